// Small kernels that show whether a launch did what it was asked to do.
#include "probe.cuh"

template <int SCALE>
__global__ void fill(const Params p) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < p.count) p.out[i] = p.value * SCALE;
}

// count: floats of dynamic shared memory. Every float is written by one thread and read by another.
__global__ void reverse_through_shared(const Params p) {
    extern __shared__ float held[];
    for (long long i = threadIdx.x; i < p.count; i += blockDim.x) held[i] = p.value + i;
    __syncthreads();
    for (long long i = threadIdx.x; i < p.count; i += blockDim.x) p.out[i] = held[p.count - 1 - i];
}

__global__ void cluster_place(const Params p) {
#if __CUDA_ARCH__ >= 900
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) p.out[blockIdx.x] = 100.0f * size + rank;
#endif
}

// Hangs unless all blocks of the grid run at once.
__global__ void meet(const Params p) {
    if (threadIdx.x == 0) {
        atomicAdd(p.counter, 1u);
        while (atomicAdd(p.counter, 0u) < gridDim.x) {}
        p.out[blockIdx.x] = atomicAdd(p.counter, 0u);
    }
}

// Lets the next kernel begin, goes on for `count` nanoseconds, and only then writes out[0] and the time in out[2..3].
__global__ void early_then_slow(const Params p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    const unsigned long long begin = nanoseconds();
    while (nanoseconds() - begin < p.count) {}
    p.out[0] = p.value;
    *reinterpret_cast<unsigned long long*>(p.out + 2) = nanoseconds();
}

// Notes when it began in out[4..5], waits for the kernel before it, and copies what that wrote.
__global__ void copy_after_previous(const Params p) {
    const unsigned long long begin = nanoseconds();
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    p.out[1] = p.out[0] + p.value;
    *reinterpret_cast<unsigned long long*>(p.out + 4) = begin;
}
