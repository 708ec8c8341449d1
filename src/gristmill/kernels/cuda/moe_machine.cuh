// What kernels over experts need of the machine beyond machine.cuh: loads of what has long been written, votes of a warp,
// counting in shared memory. One small function per instruction, and emulated on the CPU like those.
#pragma once
#include "machine.cuh"

constexpr unsigned WHOLE_WARP = 0xffffffffu;

#ifdef GRISTMILL_EMULATION
#include "emulation_moe.h"
#else

// As load_global, of what was written by a kernel BEFORE the previous one in the stream: it may be called before
// wait_for_previous_grid. That is so only behind a kernel whose blocks wait for theirs before they let the next one start:
// wait_for_previous_grid(), then launch_next_grid().
//
// Past L1, which may still have what stood there in an earlier replay of a graph.
template <int BYTES>
DEVICE void load_settled(unsigned* out, const void* pointer) {
    if constexpr (BYTES == 16) {
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "l"(pointer));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(pointer));
    } else if constexpr (BYTES == 4) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(out[0]) : "l"(pointer));
    } else {
        static_assert(BYTES == 2, "no such access");
        unsigned short half;
        asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(half) : "l"(pointer));
        out[0] = half;
    }
}

// ---- all 32 lanes of a warp ----

// The lanes that bring the same value.
DEVICE unsigned match_lanes(unsigned value) { return __match_any_sync(WHOLE_WARP, value); }

// The lanes for which it is so.
DEVICE unsigned vote(bool so) { return __ballot_sync(WHOLE_WARP, so); }

DEVICE unsigned shuffle_from(unsigned value, unsigned lane) { return __shfl_sync(WHOLE_WARP, value, static_cast<int>(lane)); }

// What the lane so many before this one brings; its own where there is none.
DEVICE unsigned shuffle_up(unsigned value, unsigned distance) { return __shfl_up_sync(WHOLE_WARP, value, distance); }

// ---- words ----

DEVICE unsigned count_bits(unsigned word) { return static_cast<unsigned>(__popc(word)); }

// In the block's shared memory; gives what was there before.
DEVICE unsigned atomic_add_shared(unsigned* pointer, unsigned value) {
    unsigned before;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(pointer)), "r"(value) : "memory");
    return before;
}

#endif
