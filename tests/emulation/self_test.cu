// Small kernels that use one thing each, right or wrong on purpose, for test_emulation.py.
#include "emulation.h"

struct Params {
    const float* in;
    float* out;
    unsigned* counter;
    long long count;
    unsigned value;
    float scale;
};

__device__ __forceinline__ float read_float(const float* pointer) {
    unsigned bits;
    load_global<4>(&bits, pointer);
    return __uint_as_float(bits);
}

__device__ __forceinline__ void write_float(float* pointer, float value) {
    const unsigned bits = __float_as_uint(value);
    store_global<4>(pointer, &bits);
}

__device__ __forceinline__ long long position() { return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; }

// ---- indices, parameters, vector access ----

template <int BYTES>
__global__ void __launch_bounds__(1024) copy(const Params p) {
    const long long i = position() * BYTES;
    if (i >= p.count) return;
    unsigned words[4];
    load_global<BYTES>(words, reinterpret_cast<const char*>(p.in) + i);
    store_global<BYTES>(reinterpret_cast<char*>(p.out) + i, words);
}

// ---- warps ----

template <int LANES>
__global__ void sum_segments(const Params p) {
    float value = read_float(p.in + position());
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance, LANES);
    write_float(p.out + position(), value);
}

// Both halves shuffle at their own pace with their own mask, then the whole warp.
__global__ void sum_halves(const Params p) {
    float value = read_float(p.in + position());
    const bool upper = threadIdx.x % 32 >= 16;
    const unsigned mask = upper ? 0xffff0000u : 0x0000ffffu;
    for (int repeat = 0; repeat < (upper ? 3 : 1); repeat++)
        for (int distance = 8; distance > 0; distance /= 2) value += __shfl_xor_sync(mask, value, distance);
    write_float(p.out + position(), __shfl_xor_sync(0xffffffffu, value, 16));
}

__global__ void shuffle_from_exited_lane(const Params p) {
    if (threadIdx.x % 2) return;
    write_float(p.out + position(), __shfl_xor_sync(0xffffffffu, 1.0f, 1));
}

__global__ void shuffle_outside_mask(const Params p) { write_float(p.out, __shfl_xor_sync(0x0000ffffu, 1.0f, 1)); }

// Lane 0 hands a value to the others through shared memory.
__global__ void pass_through_warp(const Params p) {
    float* shared = reinterpret_cast<float*>(shared_memory());
    const unsigned warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 31) shared[warp] = read_float(p.in + warp);
    if (p.value) __syncwarp();
    write_float(p.out + threadIdx.x, shared[warp]);
}

// ---- blocks ----

// value: how many barriers are left out.
__global__ void reverse_block(const Params p) {
    float* shared = reinterpret_cast<float*>(shared_memory());
    for (int round = 0; round < 3; round++) {
        shared[threadIdx.x] = read_float(p.in + position()) + round;
        if (p.value < 1) __syncthreads();
        write_float(p.out + (round * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x, shared[blockDim.x - 1 - threadIdx.x]);
        if (p.value < 2) __syncthreads();
    }
}

__global__ void barrier_without_leavers(const Params p) {
    if (threadIdx.x >= p.value) return;
    __syncthreads();
    write_float(p.out + threadIdx.x, 1.0f);
}

__global__ void half_waits_elsewhere(const Params p) {
    if (threadIdx.x < 32) __syncthreads();
    else while (load_acquire(p.counter) == 0) {}
}

__global__ void disagree_about_shuffle(const Params) {
    if (threadIdx.x == 0) __syncwarp();
    else __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}

__global__ void write_past_shared(const Params p) { shared_memory()[p.count] = 1; }

__global__ void read_wild_pointer(const Params p) { p.out[0] = *reinterpret_cast<const float*>(p.count); }

__global__ void read_uninitialised_shared(const Params p) {
    write_float(p.out + threadIdx.x, reinterpret_cast<float*>(shared_memory())[threadIdx.x]);
}

// ---- clusters ----

// Every block sends each of its values to every block, three times over: out = sum over the cluster. value 1: no
// barrier before the first store, 2: nobody waits for the stores, 3: a block leaves early, 4: the barrier is not there.
__global__ void sum_cluster(const Params p) {
    unsigned long long* barriers = reinterpret_cast<unsigned long long*>(shared_memory());
    const unsigned count = cluster_size() * blockDim.x;
    float total = read_float(p.in + position());
    if (threadIdx.x == 0 && p.value != 4) {
        for (int i = 0; i < 2; i++) barrier_init(&barriers[i], 1);
        barrier_init_fence();
    }
    if (p.value != 1) cluster_arrive();
    if (p.value == 3 && cluster_rank() == 0) return;
    if (p.value != 1) cluster_wait();
    for (unsigned round = 0; round < 3; round++) {
        unsigned long long* barrier = &barriers[round & 1];
        float* slots = reinterpret_cast<float*>(shared_memory() + 16) + (round & 1) * count;
        if (threadIdx.x == 0) barrier_expect(barrier, count * 4);
        for (unsigned rank = 0; rank < cluster_size(); rank++)
            store_remote(slots + cluster_rank() * blockDim.x + threadIdx.x, rank, total, barrier);
        if (p.value != 2) barrier_wait(barrier, round / 2 & 1);
        total = 0.0f;
        for (unsigned rank = 0; rank < cluster_size(); rank++) total += slots[rank * blockDim.x + threadIdx.x];
    }
    write_float(p.out + position(), total);
}

__global__ void wait_without_arriving(const Params) { cluster_wait(); }

__global__ void arrive_twice(const Params) {
    cluster_arrive();
    cluster_arrive();
}

// ---- cooperative grids ----

// Rounds of a grid barrier: each block adds its number and waits for all; out holds what it saw.
__global__ void meet_in_grid(const Params p) {
    for (unsigned round = 0; round < 3; round++) {
        if (threadIdx.x == 0) {
            write_float(p.out + round * gridDim.x + blockIdx.x, static_cast<float>(blockIdx.x + round));
            atomic_add_release(p.counter, 1);
            while (load_acquire(p.counter) < (round + 1) * gridDim.x + p.value) {}
        }
        __syncthreads();
        if (threadIdx.x == 1) {
            float total = 0.0f;
            for (unsigned block = 0; block < gridDim.x; block++) total += read_float(p.out + round * gridDim.x + block);
            write_float(p.out + (3 + round) * gridDim.x + blockIdx.x, total);
        }
    }
}

// ---- bulk copies ----

// Tiles of `count` floats through `STAGES` buffers of shared memory; every thread scales its part of each tile.
// value 1: nobody waits for a copy, 2: a buffer is filled again while it is read, 3: no fence, 4: the last tile is
// copied and never waited for.
template <int STAGES>
__global__ void scale_tiles(const Params p) {
    char* shared = shared_memory();
    unsigned long long* barriers = reinterpret_cast<unsigned long long*>(shared);
    float* tiles = reinterpret_cast<float*>(shared + 64);
    const unsigned tile_count = 7, bytes = static_cast<unsigned>(p.count) * 4;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) barrier_init(&barriers[stage], 1);
        if (p.value != 3) barrier_init_fence();
    }
    __syncthreads();
    const auto fetch = [&](unsigned tile) {
        const unsigned stage = tile % STAGES;
        barrier_expect(&barriers[stage], bytes);
        bulk_copy(tiles + stage * p.count, p.in + tile * p.count, bytes, &barriers[stage]);
    };
    if (threadIdx.x == 0)
        for (unsigned tile = 0; tile < STAGES; tile++) fetch(tile);
    for (unsigned tile = 0; tile < tile_count; tile++) {
        const unsigned stage = tile % STAGES;
        if (p.value == 4 && tile == tile_count - 1) return;
        if (p.value != 1) barrier_wait(&barriers[stage], tile / STAGES & 1);
        for (unsigned i = threadIdx.x; i < p.count; i += blockDim.x)
            write_float(p.out + tile * p.count + i, tiles[stage * p.count + i] * p.scale);
        if (p.value != 2) __syncthreads();
        if (threadIdx.x == 0 && tile + STAGES < tile_count) fetch(tile + STAGES);
    }
}

// One copy with everything that can be wrong about it: `value` is added to the source, `count` is its bytes.
__global__ void copy_in_bulk(const Params p) {
    unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_memory());
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, static_cast<unsigned>(p.count));
    bulk_copy(shared_memory() + 16, reinterpret_cast<const char*>(p.in) + p.value, static_cast<unsigned>(p.count), barrier);
    barrier_wait(barrier, 0);
}

__global__ void wait_for_no_barrier(const Params) { barrier_wait(reinterpret_cast<unsigned long long*>(shared_memory()), 0); }

// ---- dependent launches: value 0: right, 1: reads before the wait, 2: never waits ----

__global__ void copy_after_wait(const Params p) {
    float value = 0.0f;
    if (p.value == 1) value = read_float(p.in + threadIdx.x);
    if (p.value != 2) wait_for_previous_grid();
    if (p.value == 0) value = read_float(p.in + threadIdx.x);
    launch_next_grid();
    if (p.value != 2) write_float(p.out + threadIdx.x, value);
}

// ---- conversions and arithmetic ----

__global__ void widen_bf16(const Params p) { write_float(p.out + position(), bf16_to_float(static_cast<unsigned short>(position()))); }

__global__ void widen_f16(const Params p) { write_float(p.out + position(), f16_to_float(static_cast<unsigned short>(position()))); }

template <bool BF16>
__global__ void narrow(const Params p) {
    for (long long i = position() * 2; i < p.count; i += gridDim.x * blockDim.x * 2) {
        const float low = read_float(p.in + i), high = read_float(p.in + i + 1);
        const unsigned pair = BF16 ? pack_bf16(low, high) : pack_f16(low, high);
        store_global<4>(reinterpret_cast<unsigned*>(p.out) + i / 2, &pair);
    }
}

__global__ void inverse_root(const Params p) { write_float(p.out + position(), rsqrtf(read_float(p.in + position()))); }

// `value` barriers in a row: what a fiber switch costs.
__global__ void many_barriers(const Params p) {
    for (unsigned i = 0; i < p.value; i++) __syncthreads();
}
