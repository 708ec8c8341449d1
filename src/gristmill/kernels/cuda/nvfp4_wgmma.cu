// y = x W^T over an NVFP4 weight in fragments, on Hopper: the weight is the left operand of the warpgroup's matrix
// instruction, decoded into registers; the tokens are its columns, so a tile may have as few as eight of them.
//
// A tile is 64 * ROW_GROUPS rows of the weight by TOKENS tokens. One warp is the producer: it copies codes and scales of
// DEPTH chunks (64 columns each) and the activations beside them into a ring of STAGES slots, by bulk copies and a tensor
// map. ROW_GROUPS * K_GROUPS warpgroups take them out: group r + ROW_GROUPS * k does slab r of the tile and every
// K_GROUPS-th chunk. While one warpgroup decodes, the matrix instructions of the others run.
//
// A cluster is there for one of two reasons. SPLIT blocks share the columns of one tile and add their sums through each
// other's shared memory, in order. SHARED_BY blocks do tiles below each other and fetch the activations once for all.
//
// What has to be added (K_GROUPS, SPLIT) is added in fp32 in a fixed order, so results are the same on every run, and those
// of a token do not depend on the others: which tokens share a tile changes nothing in the order of a token's sum.
#include "nvfp4.cuh"

enum BiasKind { NO_BIAS = 0, FP32_BIAS = 1, BF16_BIAS = 2, F16_BIAS = 3 };

struct WgmmaParams {
    TensorMap x;   // (tokens, columns), boxes of TOKENS / SHARED_BY by 64
    const unsigned char* codes;
    const unsigned char* scales;
    const float* row_scale;
    const void* bias;
    void* y;       // (tokens, rows), contiguous
    int bias_kind;
    unsigned tokens, rows, slabs, chunks;
    unsigned share;        // chunks for each block of a SPLIT
    unsigned prefetched;   // chunks that are fetched into L2, beyond those in the ring, while the previous kernel still runs
    unsigned token_tiles, row_units, group;   // tiles, and how many token tiles go side by side
};

// One tile for a cluster, or a block of it.
struct Unit {
    unsigned token, row;      // the first
    unsigned slab;
    unsigned begin, end;      // chunks

    template <int TOKENS, int ROW_GROUPS, int SPLIT, int SHARED_BY>
    DEVICE static Unit at(const WgmmaParams& p, unsigned number, unsigned rank) {
        const unsigned per_group = p.group * p.row_units, first = number / per_group * p.group, within = number % per_group;
        const unsigned side = min(p.group, p.token_tiles - first);
        Unit unit;
        unit.token = (first + within % side) * TOKENS;
        unit.slab = (within / side * SHARED_BY + (SHARED_BY > 1 ? rank : 0)) * ROW_GROUPS;
        unit.row = unit.slab * SLAB_ROWS;
        unit.begin = SPLIT > 1 ? rank * p.share : 0;
        unit.end = min(unit.begin + p.share, p.chunks);
        return unit;
    }
};

DEVICE float bias_at(const WgmmaParams& p, unsigned row) {
    unsigned word = 0;
    if (p.bias_kind == NO_BIAS) return 0.0f;
    if (p.bias_kind == FP32_BIAS) {
        load_global<4>(&word, static_cast<const float*>(p.bias) + row);
        return __uint_as_float(word);
    }
    load_global<2>(&word, static_cast<const bf16*>(p.bias) + row);
    return p.bias_kind == BF16_BIAS ? bf16_to_float(word) : f16_to_float(word);
}

DEVICE void load_four(float (&out)[4], const float* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    out[0] = __uint_as_float(words.x), out[1] = __uint_as_float(words.y);
    out[2] = __uint_as_float(words.z), out[3] = __uint_as_float(words.w);
}

// Four values side by side, or as many as are there.
template <class Out>
DEVICE void store_four(Out* to, const float (&values)[4], unsigned there, bool aligned) {
    Packed<Out, 4> packed;
    packed.set(values);
    if (aligned && there >= 4) {
        store_global<4 * sizeof(Out)>(to, packed.words);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned bits = packed.bits(i);
            if (i < there) store_global<sizeof(Out)>(to + i, &bits);
        }
    }
}

// Threads of the producer: one warp, or a warpgroup that gives its registers to the others where their sums need them.
DEVICE constexpr int producers(int tokens, int groups) { return tokens > 128 || (tokens == 128 && groups > 3) ? 128 : 32; }

template <class X, class Out, int TOKENS, int ROW_GROUPS, int K_GROUPS, int DEPTH, int STAGES, int SPLIT, int SHARED_BY, int BLOCKS>
__global__ void __launch_bounds__(128 * ROW_GROUPS * K_GROUPS + producers(TOKENS, ROW_GROUPS * K_GROUPS), BLOCKS) nvfp4_wgmma(const __grid_constant__ WgmmaParams p) {
    static_assert(DEPTH % K_GROUPS == 0 && (SPLIT == 1 || SHARED_BY == 1) && TOKENS % (8 * SHARED_BY) == 0, "no such kernel");
    constexpr int GROUPS = ROW_GROUPS * K_GROUPS, CONSUMERS = 128 * GROUPS, CLUSTER = SPLIT * SHARED_BY;
    constexpr int ROWS = SLAB_ROWS * ROW_GROUPS, EACH = DEPTH / K_GROUPS;
    constexpr int TILE = TOKENS * 128;   // bytes of activations for a chunk
    constexpr bool RAISED = producers(TOKENS, GROUPS) == 128;
    constexpr int PIECE = TOKENS < 64 ? TOKENS : TOKENS % 64 ? 48 : 64;   // tokens that are written at a time
    constexpr int LINE = ROWS + 4;   // floats, free of bank conflicts
    static_assert(TOKENS % PIECE == 0, "whole pieces");

    char* const x_ring = shared_memory_1024();
    char* const code_ring = x_ring + STAGES * DEPTH * TILE;
    char* const scale_ring = code_ring + STAGES * DEPTH * ROW_GROUPS * PIECE_CODES;
    float* const sums_of_all = reinterpret_cast<float*>(scale_ring + STAGES * DEPTH * ROW_GROUPS * PIECE_SCALES);
    float* const factors = sums_of_all + K_GROUPS * PIECE * LINE;
    float* const shifts = factors + ROWS;
    unsigned long long* const full = reinterpret_cast<unsigned long long*>(shifts + ROWS);
    unsigned long long* const empty = full + STAGES;

    const unsigned rank = CLUSTER > 1 ? cluster_rank() : 0, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const unsigned units = p.row_units * p.token_tiles, step = gridDim.x / CLUSTER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, CONSUMERS / 32 * SHARED_BY);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if constexpr (SHARED_BY > 1) {
        cluster_arrive();
        cluster_wait();
    }

    if (warp >= CONSUMERS / 32) {
        if constexpr (RAISED) lower_registers<24>();
        if (threadIdx.x > CONSUMERS) return;
        const auto unit_at = [&](unsigned number) { return Unit::at<TOKENS, ROW_GROUPS, SPLIT, SHARED_BY>(p, number, rank); };
        const auto fetch_weight = [&](unsigned slot, const Unit& unit, unsigned chunk) {
            const unsigned count = min(unsigned(DEPTH), unit.end - chunk);
            barrier_expect(full + slot, DEPTH * (TILE + ROW_GROUPS * PIECE_SCALES) + count * ROW_GROUPS * PIECE_CODES);
#pragma unroll
            for (int r = 0; r < ROW_GROUPS; r++) {
                // A tile may reach beyond the last slab: what it computes there is not stored.
                const unsigned long long at = static_cast<unsigned long long>(min(unit.slab + r, p.slabs - 1)) * p.chunks + chunk;
                const unsigned place = (slot * ROW_GROUPS + r) * DEPTH;
                bulk_copy_constant(code_ring + place * PIECE_CODES, p.codes + at * PIECE_CODES, count * PIECE_CODES, full + slot);
                bulk_copy_constant(scale_ring + place * PIECE_SCALES, p.scales + at * PIECE_SCALES, count * PIECE_SCALES, full + slot);
                // Beyond the end tokens are zeros, so the weight there may be anything but infinity and NaN: any codes, real scales.
                for (unsigned i = count; i < DEPTH; i++)
                    bulk_copy_constant(scale_ring + (place + i) * PIECE_SCALES, p.scales + at * PIECE_SCALES, PIECE_SCALES, full + slot);
            }
        };
        const auto fetch_tokens = [&](unsigned slot, const Unit& unit, unsigned chunk) {
#pragma unroll
            for (int i = 0; i < DEPTH; i++) {
                char* const tile = x_ring + (slot * DEPTH + i) * TILE;
                // Beyond the end zeros: from beyond the end of x.
                const int column = (chunk + i < unit.end ? chunk + i : p.chunks) * CHUNK_COLUMNS;
                if constexpr (SHARED_BY > 1) {
                    constexpr int PART = TOKENS / SHARED_BY;
                    tensor_copy_to((1 << SHARED_BY) - 1, tile + rank * PART * 128, &p.x, column, unit.token + rank * PART, full + slot);
                } else {
                    tensor_copy(tile, &p.x, column, unit.token, full + slot);
                }
            }
        };

        // The weight is nobody's result: as much of it as the ring holds, and more into L2, comes while the previous kernel
        // still runs.
        const unsigned start = blockIdx.x / CLUSTER;
        const Unit first = unit_at(start);
        unsigned ahead = 0;
        unsigned begun = first.begin;
        for (; ahead < STAGES && begun < first.end; begun += DEPTH) fetch_weight(ahead++, first, begun);
        const unsigned later = begun < first.end ? min(p.prefetched, first.end - begun) : 0;
        if (later) {
#pragma unroll
            for (int r = 0; r < ROW_GROUPS; r++) {
                const unsigned long long at = static_cast<unsigned long long>(min(first.slab + r, p.slabs - 1)) * p.chunks + begun;
                prefetch_constant(p.codes + at * PIECE_CODES, later * PIECE_CODES);
                prefetch_constant(p.scales + at * PIECE_SCALES, later * PIECE_SCALES);
            }
        }
        wait_for_previous_grid();
        launch_next_grid();
        unsigned turn = 0, slot = 0, phase = 1;
        for (unsigned number = start; number < units; number += step) {
            const Unit unit = unit_at(number);
            for (unsigned chunk = unit.begin; chunk < unit.end; chunk += DEPTH) {
                if (turn >= ahead) {
                    if (turn >= STAGES) barrier_wait(empty + slot, phase);
                    fetch_weight(slot, unit, chunk);
                }
                fetch_tokens(slot, unit, chunk);
                turn++;
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
        }
        return;
    }

    if constexpr (RAISED) raise_registers<GROUPS < 3 ? 240 : GROUPS == 3 ? 160 : 112>();
    const unsigned row_group = ROW_GROUPS > 1 ? warp / 4 % ROW_GROUPS : 0, k_group = K_GROUPS > 1 ? warp / 4 / ROW_GROUPS : 0;
    const unsigned my_codes = row_group * DEPTH * PIECE_CODES + threadIdx.x % 128 * 16;
    const unsigned my_scales = row_group * DEPTH * PIECE_SCALES + warp % 4 * 64 + lane / 4 * 8;
    const unsigned my_row = threadIdx.x % (ROWS / 4) * 4;   // of the tile, when results are written
    unsigned slot = 0, phase = 0;
    for (unsigned number = blockIdx.x / CLUSTER; number < units; number += step) {
        const Unit unit = Unit::at<TOKENS, ROW_GROUPS, SPLIT, SHARED_BY>(p, number, rank);
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;

        // Read now, needed at the end; once tokens have come the previous kernel is over.
        barrier_wait(full + slot, phase);
        if (threadIdx.x < ROWS && unit.row + threadIdx.x < p.rows) {
            unsigned word;
            load_global<4>(&word, p.row_scale + unit.row + threadIdx.x);
            factors[threadIdx.x] = __uint_as_float(word) * restored<X>();
            shifts[threadIdx.x] = bias_at(p, unit.row + threadIdx.x);
        }

        // A piece is decoded while the one before it is multiplied, so a slot is free when the first piece of the next one has
        // been handed over. Two sets of operands take turns; `set` is the turn of a slot's first piece.
        unsigned last = STAGES;   // the slot to be given back
        const auto give_back = [&]() {
            if (lane != 0) return;
            if constexpr (SHARED_BY > 1) {
#pragma unroll
                for (int other = 0; other < SHARED_BY; other++) barrier_arrive_remote(empty + last, other);
            } else {
                barrier_arrive(empty + last);
            }
        };
        unsigned operands[2][4][4];
        const auto work = [&](int set) {
            barrier_wait(full + slot, phase);
            const char* const slot_codes = code_ring + slot * (ROW_GROUPS * DEPTH * PIECE_CODES) + my_codes;
            const char* const slot_scales = scale_ring + slot * (ROW_GROUPS * DEPTH * PIECE_SCALES) + my_scales;
            const char* const slot_tokens = x_ring + slot * (DEPTH * TILE);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const unsigned at = k_group + i * K_GROUPS;
                const uint4 codes = *reinterpret_cast<const uint4*>(slot_codes + at * PIECE_CODES);
                const uint2 scales = *reinterpret_cast<const uint2*>(slot_scales + at * PIECE_SCALES);
                unsigned (&mine)[4][4] = operands[(set + i) % 2];
                decode_piece<X>(mine, codes, scales);
                begin_matrices();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_group<X, TOKENS>(sums, mine[j], matrix_of(slot_tokens + at * TILE, j));
                end_matrices();
                wait_for_matrices<1>();
                if (i == 0 && last < STAGES) give_back();
            }
            last = slot;
            if (++slot == STAGES) slot = 0, phase ^= 1;
        };
        for (unsigned chunk = unit.begin; chunk < unit.end; chunk += DEPTH) {
            work(0);
            if constexpr (EACH % 2) {
                chunk += DEPTH;
                if (chunk >= unit.end) break;
                work(1);
            }
        }
        wait_for_matrices<0>();
        hold(sums);
        give_back();

        // Through shared memory, turned so that the rows of a token lie side by side as they do in y.
        const unsigned row = unit.row + my_row, rows_there = row < p.rows ? p.rows - row : 0;
#pragma unroll
        for (int piece = 0; piece < TOKENS / PIECE; piece++) {
            float* const mine = sums_of_all + k_group * (PIECE * LINE) + (lane % 4 * 2) * LINE + row_group * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
            for (int block = 0; block < PIECE / 8; block++) {
                const float* const four = sums + (piece * (PIECE / 8) + block) * 4;
                float* const there = mine + block * 8 * LINE;
                there[0] = four[0], there[LINE] = four[1], there[8] = four[2], there[LINE + 8] = four[3];
            }
            if constexpr (SPLIT > 1) {
                cluster_arrive();
                cluster_wait();
            } else {
                barrier_among(1, CONSUMERS);
            }
            float factor[4], shift[4];
            load_four(factor, factors + my_row);
            load_four(shift, shifts + my_row);
            for (unsigned i = threadIdx.x + rank % SPLIT * CONSUMERS; i < PIECE * ROWS / 4; i += CONSUMERS * SPLIT) {
                const unsigned within = i / (ROWS / 4), token = unit.token + piece * PIECE + within;
                if (token >= p.tokens || !rows_there) continue;
                float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int part = 0; part < SPLIT * K_GROUPS; part++) {
                    const float* const from = sums_of_all + part % K_GROUPS * (PIECE * LINE) + within * LINE + my_row;
                    float four[4];
                    if constexpr (SPLIT > 1) load_remote(four, from, part / K_GROUPS);
                    else load_four(four, from);
#pragma unroll
                    for (int j = 0; j < 4; j++) total[j] += four[j];
                }
#pragma unroll
                for (int j = 0; j < 4; j++) total[j] = total[j] * factor[j] + shift[j];
                Out* const to = static_cast<Out*>(p.y) + static_cast<unsigned long long>(token) * p.rows + row;
                store_four(to, total, rows_there, p.rows % 4 == 0);
            }
            // Before anybody writes there again, or leaves while others still read.
            if constexpr (SPLIT > 1) {
                cluster_arrive();
                cluster_wait();
            } else {
                barrier_among(1, CONSUMERS);
            }
        }
    }
    if constexpr (SHARED_BY > 1) {   // the others still arrive at barriers here
        cluster_arrive();
        cluster_wait();
    }
}
