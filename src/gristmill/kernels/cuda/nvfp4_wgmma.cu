// y = x W^T over an NVFP4 weight in fragments, on Hopper: the weight is the left operand of the warpgroup's matrix
// instruction, decoded into registers; the tokens are its columns, so a tile may have as few as eight of them.
//
// A tile is 64 * ROW_GROUPS rows of the weight by TOKENS tokens. One warp is the producer: it copies codes and scales of
// DEPTH chunks (64 columns each) and the activations beside them into a ring of STAGES slots, by bulk copies and a tensor
// map. ROW_GROUPS * K_GROUPS warpgroups take them out: group r + ROW_GROUPS * k does slab r of the tile and every
// K_GROUPS-th chunk. While one warpgroup decodes, the matrix instructions of the others run.
//
// SPLIT blocks of a cluster share the columns of a tile, and add their sums through each other's shared memory.
//
// What has to be added (K_GROUPS, SPLIT) is added in fp32 in a fixed order, so results are the same on every run, and those
// of a token do not depend on the others: which tokens share a tile changes nothing in the order of a token's sum.
#include "nvfp4_wgmma.cuh"

// Threads of the producer: one warp, or a warpgroup that gives its registers to the others where their sums need them.
DEVICE constexpr int producers(int tokens) { return tokens > 128 ? 128 : 32; }

template <class X, class Out, int TOKENS, int ROW_GROUPS, int K_GROUPS, int DEPTH, int STAGES, int SPLIT, int BLOCKS>
__global__ void __launch_bounds__(128 * ROW_GROUPS * K_GROUPS + producers(TOKENS), BLOCKS) nvfp4_wgmma(const __grid_constant__ WgmmaParams p) {
    static_assert(DEPTH % K_GROUPS == 0, "every warpgroup has as many chunks of a slot");
    constexpr int GROUPS = ROW_GROUPS * K_GROUPS, CONSUMERS = 128 * GROUPS;
    constexpr int ROWS = SLAB_ROWS * ROW_GROUPS, EACH = DEPTH / K_GROUPS;
    constexpr int TILE = TOKENS * 128;   // bytes of activations for a chunk
    constexpr bool RAISED = producers(TOKENS) == 128;
    constexpr bool WHOLE = K_GROUPS == 1 && SPLIT == 1;   // a thread's sums are whole

    char* const x_ring = shared_memory_1024();
    char* const code_ring = x_ring + STAGES * DEPTH * TILE;
    char* const scale_ring = code_ring + STAGES * DEPTH * ROW_GROUPS * PIECE_CODES;
    char* const results = scale_ring + STAGES * DEPTH * ROW_GROUPS * PIECE_SCALES;
    float* const factors = reinterpret_cast<float*>(results + (WHOLE ? ROW_GROUPS * write_bytes(TOKENS) : K_GROUPS * add_bytes(TOKENS, ROWS)));
    unsigned long long* const full = reinterpret_cast<unsigned long long*>(factors + 2 * ROWS);
    unsigned long long* const empty = full + STAGES;

    const unsigned rank = SPLIT > 1 ? cluster_rank() : 0, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const unsigned units = p.row_units * p.token_tiles, step = gridDim.x / SPLIT;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp >= CONSUMERS / 32) {   // a condition on threadIdx would keep the compiler from using uniform registers beyond it
        if constexpr (RAISED) lower_registers<24>();
        if (threadIdx.x > CONSUMERS) return;
        const auto unit_at = [&](unsigned number) { return Unit::at<TOKENS, ROW_GROUPS, SPLIT>(p, number, rank); };
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
                tensor_copy(tile, &p.x, column, unit.token, full + slot);
            }
        };

        // The weight is nobody's result: as much of it as the ring holds comes while the previous kernel still runs. (To have
        // more of it fetched into L2 made launches for 8192x8192 5 to 10% slower, and some for 4096x4096 up to 5% faster.)
        const unsigned start = blockIdx.x / SPLIT;
        const Unit first = unit_at(start);
        unsigned ahead = 0;
        for (unsigned chunk = first.begin; ahead < STAGES && chunk < first.end; chunk += DEPTH) fetch_weight(ahead++, first, chunk);
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

    if constexpr (RAISED) raise_registers<GROUPS < 3 ? 240 : 160>();
    const unsigned row_group = ROW_GROUPS > 1 ? warp / 4 % ROW_GROUPS : 0, k_group = K_GROUPS > 1 ? warp / 4 / ROW_GROUPS : 0;
    const unsigned my_codes = row_group * DEPTH * PIECE_CODES + threadIdx.x % 128 * 16;
    const unsigned my_scales = row_group * DEPTH * PIECE_SCALES + warp % 4 * 64 + lane / 4 * 8;
    unsigned slot = 0, phase = 0;
    for (unsigned number = blockIdx.x / SPLIT; number < units; number += step) {
        const Unit unit = Unit::at<TOKENS, ROW_GROUPS, SPLIT>(p, number, rank);
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;

        // Read now, needed at the end; once tokens have come the previous kernel is over.
        barrier_wait(full + slot, phase);
        float factor[2], shift[2];
        if constexpr (WHOLE) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned row = unit.row + row_group * 64 + warp % 4 * 16 + half * 8 + lane / 4;
                factor[half] = row < p.rows ? factor_at<X>(p, row) : 0.0f;
                shift[half] = row < p.rows ? bias_at(p, row) : 0.0f;
            }
        } else if (threadIdx.x < ROWS && unit.row + threadIdx.x < p.rows) {
            factors[threadIdx.x] = factor_at<X>(p, unit.row + threadIdx.x);
            factors[ROWS + threadIdx.x] = bias_at(p, unit.row + threadIdx.x);
        }

        // A piece is decoded while the one before it is multiplied, so a slot is free when the first piece of the next one has
        // been handed over. Two sets of operands take turns; `set` is the turn of a slot's first piece.
        unsigned last = STAGES;   // the slot to be given back
        const auto give_back = [&]() {
            if (lane == 0) barrier_arrive(empty + last);
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

        if constexpr (WHOLE) {
            char* const mine = results + row_group * write_bytes(TOKENS);
            write_sums<Out, TOKENS>(p, unit, sums, factor, shift, mine, row_group, warp % 4, lane);
        } else {
            float* const all = reinterpret_cast<float*>(results);
            add_sums<Out, TOKENS, ROW_GROUPS, K_GROUPS, SPLIT>(p, unit, sums, all, factors, rank, row_group, k_group, warp % 4, lane);
        }
    }
}
