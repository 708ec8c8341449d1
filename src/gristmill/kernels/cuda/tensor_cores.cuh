// Tensor cores and what feeds them: matrix instructions, tensor maps, talk between the blocks of a cluster. One small
// function per instruction, as in machine.cuh, and emulated on the CPU like those.
#pragma once
#include "vectors.cuh"

// Which of the two 16-bit types: bf16, or else f16.
template <class T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<bf16> = true;

#ifdef GRISTMILL_EMULATION
#include "emulation_tensor.h"
#else

// What the driver makes of a tensor for the copy engine: opaque.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// At a multiple of 1024 bytes, as matrices want it. A constant to the compiler, so that what is added to it stays out of the
// threads' registers.
DEVICE char* shared_memory_1024() {
    extern __shared__ __align__(1024) char dynamic_shared_memory_1024[];
    return dynamic_shared_memory_1024;
}

// ---- barriers, in addition to those of machine.cuh ----

// Waits for `threads` threads of the block that name the same barrier (1 to 15).
DEVICE void barrier_among(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

DEVICE void barrier_arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// ---- copies ----

// 16 bytes, or zeros in their place.
DEVICE void copy_async_or_zero(void* shared_destination, const void* source, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared_destination)), "l"(source), "r"(there ? 16 : 0)
                 : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last PENDING groups that this thread committed have come.
template <int PENDING>
DEVICE void copy_async_wait_for() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// As bulk_copy, of what no kernel before this one in the stream writes: it may be called before wait_for_previous_grid.
DEVICE void bulk_copy_constant(void* shared_destination, const void* source, unsigned bytes, unsigned long long* barrier) {
    bulk_copy(shared_destination, source, bytes, barrier);
}

// The box of the map at (column, row) of its tensor; what lies outside of that is zeros.
DEVICE void tensor_copy(void* shared_destination, const TensorMap* map, int column, int row, unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(shared_destination)),
                 "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Four floats that lie at the same place in the shared memory of block `rank` of the cluster.
DEVICE void load_remote(float (&out)[4], const float* address, unsigned rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote]; }"
        : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
        : "r"(shared_address(address)), "r"(rank)
        : "memory");
#endif
}

// ---- pairs of 16-bit numbers ----

// Both numbers of a times the low one of b, or the high one: the product picks it at no cost. Before sm_90 bf16 has no
// product of its own; adding -0 to one changes nothing.
template <class T, bool HIGH>
DEVICE unsigned multiply_pair(unsigned a, unsigned b) {
#define MULTIPLY(OPERATION, HALVES)                                                                                          \
    asm("{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, %2; mov.b32 both, " HALVES "; " OPERATION "; }" \
        : "=r"(result)                                                                                               \
        : "r"(a), "r"(b))
#if __CUDA_ARCH__ >= 900
#define MULTIPLY_BF16(HALVES) MULTIPLY("mul.rn.bf16x2 %0, %1, both", HALVES)
#else
#define MULTIPLY_BF16(HALVES) MULTIPLY(".reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 %0, %1, both, none", HALVES)
#endif
    unsigned result;
    if constexpr (IS_BF16<T> && HIGH) MULTIPLY_BF16("{high, high}");
    else if constexpr (IS_BF16<T>) MULTIPLY_BF16("{low, low}");
    else if constexpr (HIGH) MULTIPLY("mul.rn.f16x2 %0, %1, both", "{high, high}");
    else MULTIPLY("mul.rn.f16x2 %0, %1, both", "{low, low}");
#undef MULTIPLY_BF16
#undef MULTIPLY
    return result;
}

// Bits of a where the mask has ones, of b elsewhere.
template <unsigned MASK>
DEVICE unsigned select_bits(unsigned a, unsigned b) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "n"(MASK), "r"(a), "r"(b));
    return result;
}

DEVICE unsigned rotate_right(unsigned word, int count) { return __funnelshift_r(word, word, count); }

// Bytes of `word` and zeros (selector 4), from the lowest: byte_select(word, 0x4140) is {byte 0, 0, byte 1, 0}.
DEVICE unsigned byte_select(unsigned word, unsigned selector) { return __byte_perm(word, 0u, selector); }

// A value that all lanes of the warp agree on, as the compiler cannot know by itself.
DEVICE unsigned uniform(unsigned value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---- registers (sm_90a): a warpgroup gives some of its own away, another takes them ----

template <int COUNT>
DEVICE void lower_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

template <int COUNT>
DEVICE void raise_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// ---- matrices by a warp (sm_80 and up) ----

// Four 8x8 matrices of 16-bit numbers: lane 8 * i + r gives the address of row r of matrix i, and gets of each matrix
// the pair at row lane / 4, columns 2 * (lane % 4) and one more.
DEVICE void load_matrices(unsigned (&out)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

DEVICE void load_matrices(unsigned (&out)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(shared_address(row)) : "memory");
}

// The other way, and turned (sm_90): of each matrix a lane gives the pair at row lane / 4, and what was a column of the
// matrix becomes the row at the address of lane 8 * i + column.
DEVICE void store_matrices_turned(void* row, const unsigned (&in)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(in[0]), "r"(in[1]),
                 "r"(in[2]), "r"(in[3])
                 : "memory");
#endif
}

DEVICE void store_matrices_turned(void* row, const unsigned (&in)[2]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(in[0]), "r"(in[1]) : "memory");
#endif
}

// d (16 x 8) += a (16 x 16) times b (16 x 8). With g = lane / 4, t = lane % 4: a holds (g, 2t), (g + 8, 2t), (g, 2t + 8),
// (g + 8, 2t + 8) with their neighbours to the right; b (2t, g), (2t + 8, g) with those below; d (g, 2t), (g, 2t + 1),
// (g + 8, 2t), (g + 8, 2t + 1).
template <class T>
DEVICE void multiply_warp(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA(TYPE)                                                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_BF16<T>) MMA("bf16");
    else MMA("f16");
#undef MMA
}

// ---- matrices by a warpgroup (sm_90a) ----
//
// d (64 x TOKENS) += a (64 x 16) times b (16 x TOKENS). Warp w of the group has rows 16 * w on of a and d, laid out over its
// lanes as above: a in four registers, d in four for every eight columns. b lies in shared memory, a row of 64 numbers
// (128 bytes, in the order that tensor maps call 128-byte swizzle) for each of the TOKENS columns.
//
// Asynchronous: between issue and wait_for_matrices nobody may touch d and a.

DEVICE void begin_matrices() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

DEVICE void end_matrices() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int PENDING>
DEVICE void wait_for_matrices() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}

// Columns 16 * step to 16 * step + 15 of the rows at `tile`, which is a multiple of 1024 bytes: the lower half of what the
// instruction takes. The upper half, eight rows of 128 bytes and their swizzle, is always the same.
using Matrix = unsigned;
DEVICE Matrix matrix_of(const void* tile, int step) { return (shared_address(tile) >> 4 | 1u << 16) + 2 * step; }

#define PLACES_4 "%0, %1, %2, %3"
#define PLACES_8 \
    PLACES_4 \
    ", %4, %5, %6, %7"
#define PLACES_16 \
    PLACES_8 \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PLACES_32 \
    PLACES_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_48 \
    PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PLACES_64 \
    PLACES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PLACES_96 \
    PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81" \
    ", %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PLACES_128 \
    PLACES_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126" \
    ", %127"

#define SLOTS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SLOTS_8(i) SLOTS_4(i), SLOTS_4((i) + 4)
#define SLOTS_16(i) SLOTS_8(i), SLOTS_8((i) + 8)
#define SLOTS_32(i) SLOTS_16(i), SLOTS_16((i) + 16)
#define SLOTS_48(i) SLOTS_32(i), SLOTS_16((i) + 32)
#define SLOTS_64(i) SLOTS_32(i), SLOTS_32((i) + 32)
#define SLOTS_96(i) SLOTS_64(i), SLOTS_32((i) + 64)
#define SLOTS_128(i) SLOTS_64(i), SLOTS_64((i) + 64)

#define WGMMA(TYPE, TOKENS, COUNT, A, B)                                                                              \
    asm volatile("{ .reg .b64 matrix; mov.b64 matrix, {" B ", 0x40000040}; wgmma.mma_async.sync.aligned.m64n" #TOKENS "k16.f32." TYPE "." TYPE \
                 " {" PLACES_##COUNT "}, {" A "}, matrix, 1, 1, 1, 0; }"                                               \
                 : SLOTS_##COUNT(0)                                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define WGMMA_OF(TOKENS_, COUNT, A, B)                                          \
    if constexpr (TOKENS == TOKENS_) {                                          \
        if constexpr (IS_BF16<T>) WGMMA("bf16", TOKENS_, COUNT, A, B);        \
        else WGMMA("f16", TOKENS_, COUNT, A, B);                                \
    }

template <class T, int TOKENS>
DEVICE void multiply_group(float (&d)[TOKENS / 2], const unsigned (&a)[4], Matrix b) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_OF(8, 4, "%4, %5, %6, %7", "%8")
    WGMMA_OF(16, 8, "%8, %9, %10, %11", "%12")
    WGMMA_OF(32, 16, "%16, %17, %18, %19", "%20")
    WGMMA_OF(64, 32, "%32, %33, %34, %35", "%36")
    WGMMA_OF(96, 48, "%48, %49, %50, %51", "%52")
    WGMMA_OF(128, 64, "%64, %65, %66, %67", "%68")
    WGMMA_OF(192, 96, "%96, %97, %98, %99", "%100")
    WGMMA_OF(256, 128, "%128, %129, %130, %131", "%132")
#endif
}

// Keeps the compiler from moving d about between a wait and what follows it.
template <int COUNT>
DEVICE void hold(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#undef WGMMA_OF
#undef WGMMA

#endif
