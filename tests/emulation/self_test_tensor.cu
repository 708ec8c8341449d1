// Small kernels that use one thing of tensor_cores.cuh or moe_tensor_cores.cuh each, right or wrong on purpose, for test_emulation_copies.py and
// test_emulation_matrices.py.
#include "moe_tensor_cores.cuh"

struct Params {
    TensorMap map;
    const void* in;
    const void* other;
    void* out;
    int column, row;
    unsigned value, count;
};

DEVICE unsigned read_word(const void* from, unsigned index) {
    unsigned word;
    load_global<4>(&word, static_cast<const unsigned*>(from) + index);
    return word;
}

DEVICE void write_word(const Params& p, unsigned index, unsigned word) { store_global<4>(static_cast<unsigned*>(p.out) + index, &word); }

DEVICE void write_shared(const Params& p, const void* from, unsigned bytes) {
    for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) write_word(p, i, static_cast<const unsigned*>(from)[i]);
}

// ---- barriers ----

// The first half of the block turns around what it was given, twice; the second half does not take part.
// value 1: without the barrier, 2: one warp names another count, 3: a count that is no whole warp, 4: no such name.
__global__ void turn_half(const Params p) {
    unsigned* shared = reinterpret_cast<unsigned*>(shared_memory());
    const unsigned half = blockDim.x / 2;
    if (threadIdx.x >= half) return;
    for (unsigned round = 0; round < 2; round++) {
        shared[threadIdx.x] = read_word(p.in, round * half + threadIdx.x);
        const int count = p.value == 2 && threadIdx.x < 32 ? half + 32 : p.value == 3 ? 33 : half;
        if (p.value != 1) barrier_among(p.value == 4 ? 16 : 3, count);
        write_word(p, round * half + threadIdx.x, shared[half - 1 - threadIdx.x]);
        if (p.value != 1) barrier_among(3, half);
    }
}

// Thread 0 hands `count` words to the others, which sum them; it waits until all have taken the one before.
// value 1: one arrival too many, 2: no barrier.
__global__ void hand_around(const Params p) {
    unsigned* shared = reinterpret_cast<unsigned*>(shared_memory()) + 8;
    unsigned long long* full = reinterpret_cast<unsigned long long*>(shared_memory());
    unsigned long long* empty = full + 1;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(empty, blockDim.x - 1);
        barrier_init_fence();
    }
    __syncthreads();
    unsigned sum = 0;
    for (unsigned i = 0; i < p.count; i++) {
        if (threadIdx.x == 0) {
            if (i > 0) barrier_wait(empty, (i - 1) & 1);
            *shared = read_word(p.in, i);
            barrier_arrive(full);
            if (p.value == 1) barrier_arrive(full);
            if (p.value == 2) barrier_arrive(full + 2);
        } else {
            barrier_wait(full, i & 1);
            sum += *shared * threadIdx.x;
            barrier_arrive(empty);
        }
    }
    write_word(p, threadIdx.x, sum);
}

// ---- copies by each thread ----

// Thread t copies vector t of each of `count` rows, one group each, three of them ahead; vectors from `row` on are zeros.
// value 1: waits for one group less than it reads, 2: unaligned, 3: past the source, 4: leaves the shared memory.
__global__ void copy_rows(const Params p) {
    char* shared = shared_memory();
    const unsigned row_bytes = blockDim.x * 16;
    const auto fetch = [&](unsigned row) {
        const unsigned at = row * row_bytes + threadIdx.x * 16;
        char* const to = shared + row % 3 * row_bytes + threadIdx.x * 16 + (p.value == 2 ? 8 : p.value == 4 ? row_bytes * 3 : 0);
        if (row < p.count) copy_async_or_zero(to, static_cast<const char*>(p.in) + at + (p.value == 3 ? p.count * row_bytes : 0), threadIdx.x < p.row);
        copy_async_commit();
    };
    for (unsigned row = 0; row < 2; row++) fetch(row);
    for (unsigned row = 0; row < p.count; row++) {
        fetch(row + 2);
        if (p.value == 1) copy_async_wait_for<3>();
        else copy_async_wait_for<2>();
        for (unsigned i = 0; i < 4; i++)
            write_word(p, row * row_bytes / 4 + threadIdx.x * 4 + i, reinterpret_cast<unsigned*>(shared + row % 3 * row_bytes)[threadIdx.x * 4 + i]);
    }
}

// value 0: waits, 1: does not, 2: other threads read what this one waited for without a barrier.
__global__ void copy_block(const Params p) {
    unsigned* shared = reinterpret_cast<unsigned*>(shared_memory());
    copy_async(shared + threadIdx.x * 4, static_cast<const char*>(p.in) + threadIdx.x * 16);
    if (p.value != 1) copy_async_wait();
    if (p.value != 2) __syncthreads();
    for (unsigned i = 0; i < 4; i++) write_word(p, threadIdx.x * 4 + i, shared[(blockDim.x - 1 - threadIdx.x) * 4 + i]);
}

// ---- constants ----

// value 0: right, 1: an ordinary bulk copy before the wait, 2: a box before it, 3: loads before it.
__global__ void copy_constant(const Params p) {
    unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_memory());
    char* const tile = shared_memory() + 1024;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, p.count);
        if (p.value == 1) bulk_copy(tile, p.in, p.count, barrier);
        else if (p.value == 2) tensor_copy(tile, &p.map, 0, 0, barrier);
        else if (p.value == 3) copy_async_or_zero(tile, p.in, true);
        else bulk_copy_constant(tile, p.in, p.count, barrier);
    }
    __syncthreads();
    wait_for_previous_grid();
    barrier_wait(barrier, 0);
    write_shared(p, tile, p.count);
}

// ---- boxes ----

// A box of `count` bytes; out is what came. value 1: nobody waits, 2: at an address that is no multiple of 1024.
__global__ void copy_box(const Params p) {
    unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_memory());
    char* const tile = shared_memory() + 1024 + (p.value == 2 ? 128 : 0);
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, p.count);
        tensor_copy(tile, &p.map, p.column, p.row, barrier);
    }
    __syncthreads();
    if (p.value != 1) barrier_wait(barrier, 0);
    write_shared(p, tile, p.count);
}

// Every thread's four floats from the next block. value 1: not synchronised, 2: a rank too high, 3: unaligned, 4: it left.
__global__ void read_next(const Params p) {
    float* shared = reinterpret_cast<float*>(shared_memory());
    const unsigned rank = cluster_rank(), at = rank * blockDim.x * 4 + threadIdx.x * 4;
    for (unsigned i = 0; i < 4; i++) shared[threadIdx.x * 4 + i] = __uint_as_float(read_word(p.in, at + i));
    if (p.value != 1) {
        cluster_arrive();
        cluster_wait();
    }
    if (p.value == 4 && rank == 1) return;
    if (p.value == 4) {
        cluster_arrive();
        cluster_wait();
    }
    float four[4];
    load_remote(four, shared + threadIdx.x * 4 + (p.value == 3), p.value == 2 ? cluster_size() : (rank + 1) % cluster_size());
    for (unsigned i = 0; i < 4; i++) write_word(p, at + i, __float_as_uint(four[i]));
    cluster_arrive();
    cluster_wait();
}

// value 1: writes past the end.
__global__ void fill_aligned(const Params p) {
    char* const shared = shared_memory_1024();
    if (threadIdx.x == 0) write_word(p, 0, static_cast<unsigned>(reinterpret_cast<unsigned long long>(shared) % 1024));
    shared[threadIdx.x + (p.value == 1)] = 1;
}

// ---- words ----

template <class T, bool HIGH>
__global__ void multiply_pairs(const Params p) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < p.count) write_word(p, i, multiply_pair<T, HIGH>(read_word(p.in, i), read_word(p.other, i)));
}

// value 1: a selector that has no such byte, 2: lanes that do not agree.
__global__ void change_words(const Params p) {
    const unsigned i = threadIdx.x, word = read_word(p.in, i);
    const unsigned results[4] = {rotate_right(word, i), byte_select(word, p.value == 1 ? 0x8000u : 0x4321u), select_bits<0x0f0f00ffu>(word, ~word * 3u),
                                 uniform(p.value == 2 ? i : i / 32 + 5)};
    for (unsigned k = 0; k < 4; k++) write_word(p, 4 * i + k, results[k]);
}

// ---- matrices by a warp ----

// Rows of 16 bytes in shared memory, given in the order of `other`. value 1: a lane has left, 2: unaligned, 3: outside.
template <int COUNT>
__global__ void load_rows(const Params p) {
    char* shared = shared_memory();
    for (unsigned i = 0; i < 4; i++) reinterpret_cast<unsigned*>(shared)[threadIdx.x * 4 + i] = read_word(p.in, threadIdx.x * 4 + i);
    __syncwarp();
    if (p.value == 1 && threadIdx.x == 31) return;
    unsigned words[COUNT];
    load_matrices(words, shared + read_word(p.other, threadIdx.x) * 16 + (p.value == 2 ? 8 : p.value == 3 ? 4096 : 0));
    for (unsigned i = 0; i < COUNT; i++) write_word(p, i * 32 + threadIdx.x, words[i]);
}

// COUNT matrices of 8 x 8 in `in`, a lane's pair of each; out is shared memory, with rows in the order of `other`.
// value as above.
template <int COUNT>
__global__ void store_turned(const Params p) {
    char* shared = shared_memory();
    if (p.value == 1 && threadIdx.x == 31) return;
    unsigned words[COUNT];
    for (unsigned i = 0; i < COUNT; i++) words[i] = read_word(p.in, i * 32 + threadIdx.x);
    store_matrices_turned(shared + read_word(p.other, threadIdx.x) * 16 + (p.value == 2 ? 8 : p.value == 3 ? 4096 : 0), words);
    write_shared(p, shared, 512);
}

// `count` steps of out (16 x 8) += in (16 x 16 * count) times other (8 x 16 * count) transposed.
// value 1: one lane has left, 2: lanes do not agree about the type.
template <class T>
__global__ void multiply_by_warp(const Params p) {
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4, stride = 8 * p.count;
    if (p.value == 1 && threadIdx.x == 7) return;
    float sums[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    for (unsigned step = 0; step < p.count; step++) {
        const unsigned at = step * 8 + t;
        const unsigned a[4] = {read_word(p.in, g * stride + at), read_word(p.in, (g + 8) * stride + at), read_word(p.in, g * stride + at + 4),
                               read_word(p.in, (g + 8) * stride + at + 4)};
        const unsigned b0 = read_word(p.other, g * stride + at), b1 = read_word(p.other, g * stride + at + 4);
        if (p.value == 2 && threadIdx.x == 7) multiply_warp<f16>(sums, a, b0, b1);
        else multiply_warp<T>(sums, a, b0, b1);
    }
    for (unsigned i = 0; i < 4; i++) write_word(p, (g + i / 2 * 8) * 8 + 2 * t + i % 2, __float_as_uint(sums[i]));
}

// ---- matrices by a warpgroup ----

// out (64 x TOKENS) = in (64 x 64 * count) times other (TOKENS x 64 * count) transposed, which comes as boxes of the map,
// two tiles in turn. Two groups are in flight at a time. value: what is wrong (see test_emulation_matrices.py).
template <class T, int TOKENS>
__global__ void multiply_by_group(const Params p) {
    unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_memory());
    char* const tiles = shared_memory() + 1024;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, stride = 32 * p.count;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init(barrier + 1, 1);
        barrier_init_fence();
    }
    __syncthreads();
    const auto fetch = [&](unsigned chunk) {
        barrier_expect(barrier + chunk % 2, TOKENS * 128);
        tensor_copy(tiles + chunk % 2 * (TOKENS * 128), &p.map, chunk * 64, 0, barrier + chunk % 2);
    };
    if (threadIdx.x == 0)
        for (unsigned chunk = 0; chunk < 2 && chunk < p.count; chunk++) fetch(chunk);
    float sums[TOKENS / 2];
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;
    unsigned operands[2][4][4];
    for (unsigned chunk = 0; chunk < p.count; chunk++) {
        if (p.value != 1) barrier_wait(barrier + chunk % 2, chunk / 2 & 1);
        unsigned(&now)[4][4] = operands[p.value == 2 ? 0 : chunk % 2];
        const auto read = [&] {
            for (unsigned j = 0; j < 4; j++)
                for (unsigned i = 0; i < 4; i++)
                    now[j][i] = read_word(p.in, (warp * 16 + g + i % 2 * 8) * stride + chunk * 32 + j * 8 + i / 2 * 4 + t);
        };
        read();
        if (p.value != 3) begin_matrices();
        for (unsigned j = 0; j < 4; j++) {
            if (p.value == 4 && warp == 2 && chunk == 0 && j == 3) continue;
            const char* const tile = tiles + chunk % 2 * (TOKENS * 128);
            const Matrix matrix = matrix_of(p.value == 5 ? tile + 512 : tile, p.value == 6 && warp == 1 ? j ^ 1 : p.value == 7 && lane == 1 ? j ^ 1 : j);
            multiply_group<T, TOKENS>(sums, now[j], matrix);
        }
        end_matrices();
        if (p.value == 8) sums[0] = 1.0f;
        if (p.value == 1) barrier_wait(barrier + chunk % 2, chunk / 2 & 1);
        if (p.value == 9 && threadIdx.x == 0) tiles[chunk % 2 * (TOKENS * 128)] ^= 1;
        wait_for_matrices<1>();   // the chunk before is done, and its tile free
        barrier_among(1, 128);
        if (p.value == 10 && chunk == p.count - 1) break;
        if (threadIdx.x == 0 && chunk > 0 && chunk + 1 < p.count) fetch(chunk + 1);
    }
    if (p.value == 10) return;
    if (p.value != 11) wait_for_matrices<0>();
    hold(sums);
    for (unsigned i = 0; i < TOKENS / 2; i++)
        write_word(p, (warp * 16 + g + i / 2 % 2 * 8) * TOKENS + i / 4 * 8 + 2 * t + i % 2, __float_as_uint(sums[i]));
    if (p.value == 11) wait_for_matrices<0>();
}

// out (64 x count) = in (64 x 64) times other (count x 64) transposed, which comes as a box of the map.
template <int MOST>
__global__ void multiply_by_columns(const Params p) {
    unsigned long long* barrier = reinterpret_cast<unsigned long long*>(shared_memory());
    char* const tile = shared_memory() + 1024;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (threadIdx.x == 0) {
        barrier_init(barrier, 1);
        barrier_init_fence();
        barrier_expect(barrier, p.count * 128);
        tensor_copy(tile, &p.map, 0, 0, barrier);
    }
    __syncthreads();
    barrier_wait(barrier, 0);
    unsigned operand[4][4];
    for (unsigned j = 0; j < 4; j++)
        for (unsigned i = 0; i < 4; i++) operand[j][i] = read_word(p.in, (warp * 16 + g + i % 2 * 8) * 32 + j * 8 + i / 2 * 4 + t);
    float sums[MOST / 2];
    for (int i = 0; i < MOST / 2; i++) sums[i] = 0.0f;
    multiply_columns<bf16, MOST>(sums, operand, matrix_of(tile, 0), p.count);
    wait_for_matrices<0>();
    hold(sums);
    for (unsigned i = 0; i < p.count / 2; i++)
        write_word(p, (warp * 16 + g + i / 2 % 2 * 8) * p.count + i / 4 * 8 + 2 * t + i % 2, __float_as_uint(sums[i]));
}
