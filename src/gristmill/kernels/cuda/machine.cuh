// What the kernels need of the machine: one small function per instruction, and nothing else.
//
// No CUDA header is included: a kernel then compiles in about 0.1 s, on a machine with no toolkit. The tests
// define GRISTMILL_EMULATION and supply the same functions on the CPU, so every kernel above this file also
// runs there.
#pragma once
#define DEVICE __device__ __forceinline__

#ifdef GRISTMILL_EMULATION
#include "emulation.h"
#else

DEVICE char* shared_memory() {
    extern __shared__ __align__(128) char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

DEVICE unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- programmatic dependent launch (sm_90 and up; elsewhere the launch attribute is never set) ----

DEVICE void wait_for_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void launch_next_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- clusters (sm_90 and up; a kernel that is not clustered never calls these) ----

DEVICE unsigned cluster_rank() {
    unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

DEVICE unsigned cluster_size() {
    unsigned size = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return size;
}

DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// ---- talk between blocks through global memory (cooperative launches) ----

DEVICE unsigned atomic_add_release(unsigned* pointer, unsigned value) {
    unsigned before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(pointer), "r"(value) : "memory");
    return before;
}

DEVICE unsigned load_acquire(const unsigned* pointer) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// ---- asynchronous copies by each thread, 16 bytes from global to shared memory ----

DEVICE void copy_async(void* shared_destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared_destination)), "l"(source) : "memory");
}

// Until all copies of this thread have come; what other threads copied is not waited for.
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- barriers in shared memory that count bytes to come (sm_90 and up) ----

DEVICE void barrier_init(unsigned long long* barrier, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEVICE void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival, and `bytes` more to come.
DEVICE void barrier_expect(unsigned long long* barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

DEVICE void barrier_wait(unsigned long long* barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
    unsigned done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
#endif
}

// Writes `value` where `address` lies in the shared memory of block `rank` of this cluster, and tells the barrier at
// `barrier` there that four bytes have come.
DEVICE void store_remote(float* address, unsigned rank, float value, unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    unsigned remote, remote_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(address)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(shared_address(barrier)), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote), "r"(__float_as_uint(value)),
                 "r"(remote_barrier)
                 : "memory");
#endif
}

// From global to shared memory: 16-byte aligned on both sides, a multiple of 16 bytes.
DEVICE void bulk_copy(void* shared_destination, const void* source, unsigned bytes, unsigned long long* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared_destination)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// ---- arithmetic that CUDA C++ has no word for, or only a slower one ----

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

// 2^value within 2 units in the last place; results below 2^-126 are 0.
DEVICE float exp2_fast(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// 1 / value within 1 unit in the last place; 0 for a value above 2^126.
DEVICE float reciprocal_fast(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// The larger one; NaN if either is.
DEVICE float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// Whether it is so in any lane of the warp.
DEVICE bool any_lane(bool so) { return __any_sync(0xffffffffu, so); }

// For floats that are not negative, as bits, too: they are ordered like integers, NaN above all.
DEVICE void atomic_max(unsigned* pointer, unsigned value) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Stops the whole grid with an error that the host sees.
DEVICE void stop_grid() { asm volatile("trap;"); }

// ---- vector access ----

// Plain loads: the compiler may order them among each other, which it cannot do with loads in volatile assembly
// (H200, rms_norm 32768x4096 bf16: 131 us against 143).
template <int BYTES>
DEVICE void load_global(unsigned* out, const void* pointer) {
    if constexpr (BYTES == 16) {
        const uint4 value = *static_cast<const uint4*>(pointer);
        out[0] = value.x, out[1] = value.y, out[2] = value.z, out[3] = value.w;
    } else if constexpr (BYTES == 8) {
        const uint2 value = *static_cast<const uint2*>(pointer);
        out[0] = value.x, out[1] = value.y;
    } else if constexpr (BYTES == 4) {
        out[0] = *static_cast<const unsigned*>(pointer);
    } else if constexpr (BYTES == 2) {
        out[0] = *static_cast<const unsigned short*>(pointer);
    } else {
        out[0] = *static_cast<const unsigned char*>(pointer);
    }
}

// Stores pass L1 by (131 us against 138 on the same problem) and stay in L2 for whoever reads the result next. IN_L1:
// plain stores, for what the same block reads again, and where they were measured to be faster.
template <int BYTES, bool IN_L1 = false>
DEVICE void store_global(void* pointer, const unsigned* in) {
    if constexpr (IN_L1 && BYTES == 16) {
        *static_cast<uint4*>(pointer) = make_uint4(in[0], in[1], in[2], in[3]);
    } else if constexpr (IN_L1 && BYTES == 8) {
        *static_cast<uint2*>(pointer) = make_uint2(in[0], in[1]);
    } else if constexpr (IN_L1 && BYTES == 4) {
        *static_cast<unsigned*>(pointer) = in[0];
    } else if constexpr (IN_L1 && BYTES == 2) {
        *static_cast<unsigned short*>(pointer) = static_cast<unsigned short>(in[0]);
    } else if constexpr (BYTES == 1) {
        *static_cast<unsigned char*>(pointer) = static_cast<unsigned char>(in[0]);
    } else if constexpr (BYTES == 16) {
        asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
                     : "memory");
    } else if constexpr (BYTES == 8) {
        asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(pointer), "r"(in[0]), "r"(in[1]) : "memory");
    } else if constexpr (BYTES == 4) {
        asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(pointer), "r"(in[0]) : "memory");
    } else {
        asm volatile("st.global.L1::no_allocate.u16 [%0], %1;" ::"l"(pointer), "h"(static_cast<unsigned short>(in[0])) : "memory");
    }
}

// ---- conversions, rounding to nearest even ----

DEVICE float bf16_to_float(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

DEVICE float f16_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

DEVICE unsigned pack_bf16(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

DEVICE unsigned pack_f16(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// FP8 E4M3: beyond 448 the largest number, for NaN a NaN. The low byte is `low`.
DEVICE unsigned pack_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    const auto code = [](float value) -> unsigned {
        const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80u, size = bits & 0x7fffffffu;
        if (size > 0x7f800000u) return 0x7fu;
        if (size >= 0x43e00000u) return sign | 0x7eu;   // 448
        // Below 2^-6 multiples of 2^-9: the unit in the last place of 16384.
        if (size < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u);
        return sign | ((size - 0x3c000000u + 0x7ffffu + (size >> 20 & 1u)) >> 20);
    };
    return code(low) | code(high) << 8;
#endif
}

#endif
