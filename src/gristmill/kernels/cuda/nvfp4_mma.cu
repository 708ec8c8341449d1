// y = x W^T over an NVFP4 weight in fragments, by the matrix instructions of warps: Ampere, Ada, and few tokens on Hopper.
//
// What has to move is the weight, once. Every thread reads its own 16 bytes of codes of DEPTH chunks ahead straight into
// registers, nobody waits for anybody on the way, and the first of them are under way before the previous kernel is over.
// The weight is the left operand (16 rows), tokens are the right one (8 columns), so one token costs what eight do.
//
// A tile is 64 * SLABS rows by TOKENS tokens. Four warps, a group, do the four row tiles of its slabs; GROUPS groups take
// batches of DEPTH chunks in turn, and their sums are added through shared memory, in order. A block does every
// `workers`-th tile, its loads running ahead from one to the next. Where tiles are few, `shares` blocks share the columns of
// each: in a CLUSTER, which adds through its shared memory, or where there are none by PARTIAL sums in global memory, which
// a second kernel adds. Tokens are copied to shared memory: a block that does several tiles keeps those of its columns
// where they fit, else they come through two slots, once more for every tile.
//
// A chunk takes 76 instructions of a warp at 8 tokens, 83 at 16, 98 at 32 in tiles of two slabs (sm_90a, bf16): 2.4 to 3.1
// per weight of a lane. Memory at its full speed (H200) leaves time for 4.4.
//
// Sums are fp32 in a fixed order, given by the template, `share` and the columns alone: results are the same on every run,
// and those of a token do not depend on the others.
#include "nvfp4_results.cuh"

struct MmaParams {
    const unsigned char* codes;
    const unsigned char* scales;
    const float* row_scale;
    const void* x;
    const void* bias;
    void* y;                              // (tokens, rows), contiguous
    float* partials;                      // (shares, tokens, rows rounded up to 4)
    long long x_stride;                   // elements
    int bias_kind;
    unsigned tokens, rows, columns;
    unsigned slabs, chunks;
    unsigned tiles, workers;              // of rows; how many are done at a time
    unsigned shares, share, rounds;       // blocks for a tile; chunks, and batches of each group, for one of them
    unsigned slot_rounds, slots;          // tokens of so many of them have room in a slot; two slots, or one where they stay
};

#ifdef GRISTMILL_EMULATION
DEVICE void load_weight(uint4& out, const void* pointer) {
    emulation::find_range("load_weight", reinterpret_cast<unsigned long long>(pointer), 16, false);
    emulation::traffic.loaded += 16;
    out = *static_cast<const uint4*>(pointer);
}
DEVICE void load_weight(uint2& out, const void* pointer) {
    emulation::find_range("load_weight", reinterpret_cast<unsigned long long>(pointer), 8, false);
    emulation::traffic.loaded += 8;
    out = *static_cast<const uint2*>(pointer);
}
DEVICE void prefetch_global(const void*) {}
DEVICE unsigned this_thread() { return threadIdx.x; }
#else
DEVICE void prefetch_global(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer)); }

// Read where it is asked for: what follows from it holds no registers during the main loop.
DEVICE unsigned this_thread() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Of what nobody writes and nobody else reads: past L1. Volatile, or the compiler would move it down to its use.
DEVICE void load_weight(uint4& out, const void* pointer) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w) : "l"(pointer));
}
DEVICE void load_weight(uint2& out, const void* pointer) {
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(out.x), "=r"(out.y) : "l"(pointer));
}
#endif

// What sums of four rows are multiplied by, and what is added to them.
template <class X>
struct Ends {
    float factor[4], shift[4];
    unsigned there;   // rows of the four that exist

    // Into L2: the latency of memory is then over when they are needed.
    DEVICE void prefetch(const MmaParams& p, unsigned row) const {
        if (row >= p.rows) return;
        prefetch_global(p.row_scale + row);
        if (p.bias_kind != NO_BIAS) prefetch_global(static_cast<const char*>(p.bias) + row * (p.bias_kind == FP32_BIAS ? 4 : 2));
    }

    DEVICE void load(const MmaParams& p, unsigned row) {
        there = row < p.rows ? min(4u, p.rows - row) : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= there) continue;
            factor[i] = factor_at<X>(p, row + i);
            shift[i] = bias_at(p, row + i);
        }
    }

    template <class Out>
    DEVICE void store(const MmaParams& p, unsigned token, unsigned row, const float (&sums)[4]) const {
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = i < there ? fmaf(sums[i], factor[i], shift[i]) : 0.0f;
        Out* const to = static_cast<Out*>(p.y) + static_cast<unsigned long long>(token) * p.rows + row;
        store_four(to, values, there, p.rows % 4 == 0);
    }
};

// A batch of a group: its first piece in each slab, where codes and scales of that lie, and how many chunks of it there are.
template <int SLABS>
struct Batch {
    unsigned long long piece[SLABS];
    const unsigned char *codes, *scales;
    unsigned chunks;
};

// Blocks that an SM is to have room for: 16 warps in all, unless their sums take too many registers.
DEVICE constexpr int least_blocks(int groups, int sums) { return sums <= 16 && groups < 4 ? 4 / groups : 1; }

template <class X, class Out, int TOKENS, int SLABS, int GROUPS, int DEPTH, int CLUSTER, bool PARTIAL>
__global__ void __launch_bounds__(128 * GROUPS, least_blocks(GROUPS, TOKENS * SLABS / 2)) nvfp4_mma(const __grid_constant__ MmaParams p) {
    static_assert(GROUPS * DEPTH % 4 == 0, "tokens are copied four chunks at a time");
    static_assert(16 * SLABS % CLUSTER == 0 && !(CLUSTER > 1 && PARTIAL), "no such kernel");
    constexpr int THREADS = 128 * GROUPS, STRIPE = GROUPS * DEPTH, TILE = TOKENS * 128;   // chunks of a round; bytes of tokens beside a chunk
    constexpr int LINE = 64 * SLABS + 4, QUADS = 16 * SLABS / CLUSTER;   // floats, free of bank conflicts; rows by four that a block finishes
    // One sum has too few products under way: with one row tile and eight tokens steps take turns between two.
    constexpr int CHAINS = SLABS * TOKENS == 8 ? 2 : 1;
    constexpr bool EARLY = CLUSTER == 1 && !PARTIAL && SLABS * TOKENS == 8;   // small tiles leave registers for what is needed at their end
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, group = warp / 4;
    const unsigned shares = PARTIAL ? p.shares : CLUSTER;
    const unsigned rank = uniform(blockIdx.x % shares), worker = uniform(blockIdx.x / shares % p.workers);
    const unsigned first_token = uniform(blockIdx.x / shares / p.workers) * TOKENS, tokens = min(unsigned(TOKENS), p.tokens - first_token);
    const unsigned begin = rank * p.share, end = min(begin + p.share, p.chunks);
    const unsigned my_codes = warp % 4 * 512 + lane * 16, my_scales = warp % 4 * 64 + lane / 4 * 8;

    uint4 codes[DEPTH][SLABS];
    uint2 scales[DEPTH][SLABS];
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
#pragma unroll
        for (int s = 0; s < SLABS; s++) codes[i][s] = uint4{0, 0, 0, 0}, scales[i][s] = uint2{0, 0};

    const auto batch_at = [&](unsigned tile, unsigned round) {
        const unsigned chunk = begin + (round * GROUPS + group) * DEPTH;
        Batch<SLABS> batch;
        batch.chunks = tile < p.tiles && chunk < end ? end - chunk : 0;
#pragma unroll
        for (int s = 0; s < SLABS; s++) {
            // A tile may reach beyond the last slab: what it computes there is not stored.
            batch.piece[s] = static_cast<unsigned long long>(min(tile * SLABS + s, p.slabs - 1)) * p.chunks + chunk;
        }
        batch.codes = p.codes + batch.piece[0] * PIECE_CODES + my_codes;
        batch.scales = p.scales + batch.piece[0] * PIECE_SCALES + my_scales;
        return batch;
    };
    // A chunk that is not there keeps what it was: tokens beside it are zeros.
    const auto fetch = [&](int i, const Batch<SLABS>& batch) {
        if (i >= batch.chunks) return;
        if constexpr (SLABS == 1) {
            load_weight(codes[i][0], batch.codes + i * PIECE_CODES);
            load_weight(scales[i][0], batch.scales + i * PIECE_SCALES);
        } else {
            // The addresses of both slabs would hold registers that operands need.
#pragma unroll
            for (int s = 0; s < SLABS; s++) {
                load_weight(codes[i][s], p.codes + batch.piece[s] * PIECE_CODES + i * PIECE_CODES + my_codes);
                load_weight(scales[i][s], p.scales + batch.piece[s] * PIECE_SCALES + i * PIECE_SCALES + my_scales);
            }
        }
    };

    // Tokens lie chunk by chunk, in each 128 bytes for a token, in pieces of 16 whose order differs from token to token:
    // the eight tokens that a matrix has come from all banks.
    const unsigned slot_chunks = p.slot_rounds * STRIPE;
    char* const ring = shared_memory();
    const auto copy_tokens = [&](unsigned slot, unsigned chunk) {
        const unsigned thread = this_thread(), lane = thread % 32;
        char* const to = ring + slot * slot_chunks * TILE + lane / 8 * TILE;
        const X* const from = static_cast<const X*>(p.x) + first_token * p.x_stride + chunk * CHUNK_COLUMNS + lane * 8;
        const unsigned limit = min(p.columns, end * CHUNK_COLUMNS), first = chunk * CHUNK_COLUMNS + lane * 8;
        unsigned token = 0;
        for (unsigned part = thread / 32;; part += THREADS / 32) {
            while (part >= slot_chunks / 4) part -= slot_chunks / 4, token++;
            if (token >= tokens) break;
            const bool there = first + part * 256 < limit;
            copy_async_or_zero(to + part * 4 * TILE + token * 128 + (lane % 8 ^ token % 8) * 16,
                               there ? from + token * p.x_stride + part * 256 : static_cast<const X*>(p.x), there);
        }
        copy_async_commit();
    };

    Batch<SLABS> batch = batch_at(worker, 0);
#pragma unroll
    for (int i = 0; i < DEPTH; i++) fetch(i, batch);
    wait_for_previous_grid();
    launch_next_grid();
    copy_tokens(0, begin);

    // The first of four rows of a tile whose results a thread writes.
    const auto row_of = [&](unsigned thread) { return ((CLUSTER > 1 ? rank * QUADS : 0) + thread % QUADS) * 4; };
    float* const sums_of_all = reinterpret_cast<float*>(ring + p.slots * slot_chunks * TILE);
    const unsigned my_matrix = lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;

    // Slots are filled in turn, once for every tile unless tokens stay.
    const unsigned fills = p.slots == 1 ? 1 : ((p.tiles - 1 - worker) / p.workers + 1) * ((p.rounds + p.slot_rounds - 1) / p.slot_rounds);
    unsigned turn = 0, next_chunk = begin + (p.rounds > p.slot_rounds ? slot_chunks : 0);
    for (unsigned tile = worker; tile < p.tiles; tile += p.workers) {
        Ends<X> ends;
        if (const unsigned thread = this_thread(); thread / QUADS < tokens) {
            if constexpr (EARLY) ends.load(p, tile * (64 * SLABS) + row_of(thread));
            else if constexpr (!PARTIAL) ends.prefetch(p, tile * (64 * SLABS) + row_of(thread));
        }
        float sums[CHAINS][SLABS][TOKENS / 8][4] = {};
        for (unsigned round = 0, within = p.slot_rounds; round < p.rounds; round++, within++) {
            if (within == p.slot_rounds) {
                within = 0;
                if (turn < fills) {
                    copy_async_wait_for<0>();
                    __syncthreads();
                    if (++turn < fills) {
                        copy_tokens(turn & 1, next_chunk);
                        next_chunk += slot_chunks;
                        if (next_chunk >= begin + p.rounds * STRIPE) next_chunk = begin;
                    }
                }
            }
            const bool last = round + 1 == p.rounds;
            batch = batch_at(last ? tile + p.workers : tile, last ? 0 : round + 1);
            // The slot that was filled before the one that is being filled now.
            const char* const x = ring + ((turn - 1) & (p.slots - 1)) * slot_chunks * TILE + (within * GROUPS + group) * (DEPTH * TILE);
            const char* const half_of_x[2] = {x + my_matrix, x + (my_matrix ^ 64)};
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                unsigned matrices[TOKENS / 8][2][4];
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int half = 0; half < 2; half++) load_matrices(matrices[n][half], half_of_x[half] + i * TILE + n * 1024);
#pragma unroll
                for (int s = 0; s < SLABS; s++) {
                    unsigned operands[4][4];
                    decode_piece<X>(operands, codes[i][s], scales[i][s]);
                    if (s + 1 == SLABS) fetch(i, batch);
#pragma unroll
                    for (int step = 0; step < 4; step++)
#pragma unroll
                        for (int n = 0; n < TOKENS / 8; n++) {
                            const unsigned(&from)[4] = matrices[n][step / 2];
                            multiply_warp<X>(sums[step % CHAINS][s][n], operands[step], from[step % 2 * 2], from[step % 2 * 2 + 1]);
                        }
                }
            }
        }

        // Through shared memory, turned so that the rows of a token lie side by side as they do in y. Whoever still reads
        // the last tile's sums there is waited for.
        if (tile != worker) {
            if constexpr (CLUSTER > 1) cluster_wait();
            else __syncthreads();
        }
        const unsigned thread = this_thread(), my_row = row_of(thread), row = tile * (64 * SLABS) + my_row;
        float* const mine = sums_of_all + group * (TOKENS * LINE) + thread % 4 * 2 * LINE + warp % 4 * 16 + thread % 32 / 4;
#pragma unroll
        for (int s = 0; s < SLABS; s++)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float sum = sums[0][s][n][i];
                    if constexpr (CHAINS == 2) sum += sums[1][s][n][i];
                    mine[(n * 8 + i % 2) * LINE + s * 64 + i / 2 * 8] = sum;
                }
        if constexpr (!PARTIAL && !EARLY)
            if (thread / QUADS < tokens) ends.load(p, row);
        if constexpr (CLUSTER > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            __syncthreads();
        }
#pragma unroll 1
        for (unsigned token = thread / QUADS; token < tokens; token += THREADS / QUADS) {
            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            constexpr int PARTS = CLUSTER * GROUPS, AT_ONCE = PARTS < 4 ? PARTS : 4;
#pragma unroll
            for (int first = 0; first < PARTS; first += AT_ONCE) {
                float four[AT_ONCE][4];
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++) {
                    const float* const from = sums_of_all + ((first + i) % GROUPS * TOKENS + token) * LINE + my_row;
                    if (first + i >= PARTS) continue;
                    if constexpr (CLUSTER > 1) load_remote(four[i], from, (first + i) / GROUPS);
                    else load_four(four[i], from);
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE * 4; i++)
                    if (first + i / 4 < PARTS) total[i % 4] += four[i / 4][i % 4];
            }
            if constexpr (PARTIAL) {
                const unsigned long long line = static_cast<unsigned long long>(rank) * p.tokens + first_token + token;
                const unsigned words[4] = {__float_as_uint(total[0]), __float_as_uint(total[1]), __float_as_uint(total[2]), __float_as_uint(total[3])};
                if (row < p.rows) store_global<16>(p.partials + line * ((p.rows + 3) / 4 * 4) + row, words);
            } else {
                ends.template store<Out>(p, first_token + token, row, total);
            }
        }
        if constexpr (CLUSTER > 1) {
            __syncwarp();
            cluster_arrive();
        }
    }
    // A block that has left has no shared memory that others could read.
    if constexpr (CLUSTER > 1) cluster_wait();
}

// Adds what blocks have left of each result, in order.
template <class X, class Out>
__global__ void __launch_bounds__(256) nvfp4_mma_add(const __grid_constant__ MmaParams p) {
    const unsigned quads = (p.rows + 3) / 4;
    const unsigned long long index = static_cast<unsigned long long>(blockIdx.x) * 256 + threadIdx.x, size = static_cast<unsigned long long>(p.tokens) * quads;
    wait_for_previous_grid();
    launch_next_grid();
    if (index >= size) return;
    const unsigned token = index / quads, row = index % quads * 4;
    Ends<X> ends;
    ends.load(p, row);
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (unsigned rank = 0; rank < p.shares; rank++) {
        unsigned words[4];
        load_global<16>(words, p.partials + (rank * size + index) * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += __uint_as_float(words[i]);
    }
    ends.template store<Out>(p, token, row, total);
}
