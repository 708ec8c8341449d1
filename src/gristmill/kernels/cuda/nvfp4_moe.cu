// The products of a mixture's experts over NVFP4 weights in fragments, on Hopper: one kernel for both, and for tiles of any
// size at once. As in nvfp4_wgmma.cu the weight is the left operand of the warpgroup's matrix instruction, decoded into
// registers, and tokens are its columns; one warp is the producer of a ring of STAGES slots, and ROW_GROUPS * K_GROUPS
// warpgroups take them out: group r + ROW_GROUPS * k does slab r of the unit and every K_GROUPS-th chunk.
//
// UP takes the rows of gate and up in pairs: a thread that has the sum of a gate's row has that of up beside it, and h is made
// in registers. DOWN writes what each slot's expert gives; another kernel weighs and adds that. SPLIT blocks of a cluster share
// the columns of a unit. ADD, for few tokens, does it all: a cluster has some rows of y, its SPLIT blocks take turns at the
// tiles, weigh and add them up in shared memory, and at the end add up what each of them has.
//
// Tiles are of up to MOST tokens, each of a size that fits it: experts with few tokens cost what few cost. Slots of the ring are
// bytes: DEPTH chunks of the largest tile, or more of a smaller one, so that as much of the weight is under way. Where tiles
// come from is the Routing.
//
// All sums are fp32, in the order of chunks but for those that warpgroups and blocks take in turn: which tokens share a tile,
// and how large it is, changes nothing in a token's result. (Of ADD in which order its experts are added; that is the same on
// every run, too.)
#include "nvfp4_moe.cuh"

template <int VALUE>
struct Size {
    static constexpr int value = VALUE;
};

// Threads of the producer: one warp, or a warpgroup that gives its registers to the others where their sums need them.
DEVICE constexpr bool raised(int groups, int most, bool known) {
    return most > 128 || (groups > 2 && most > (known ? 48 : 64)) || (groups > 3 && most > (known ? 8 : 32));
}
DEVICE constexpr int threads(int groups, int most, bool known) { return 128 * groups + (raised(groups, most, known) ? 128 : 32); }

template <class X, class Out, int STEP, int ROUTING, int ROW_GROUPS, int K_GROUPS, int DEPTH, int STAGES, int SPLIT, int BLOCKS, int MOST,
          int... SIZES>
__global__ void __launch_bounds__(threads(ROW_GROUPS * K_GROUPS, MOST, sizeof...(SIZES) > 0), BLOCKS) nvfp4_moe(const __grid_constant__ MoeParams p) {
    static_assert(DEPTH % (2 * K_GROUPS) == 0, "a warpgroup has an even number of chunks of a slot, as operands take turns");
    constexpr int GROUPS = ROW_GROUPS * K_GROUPS, CONSUMERS = 128 * GROUPS;
    // Tiles are of SIZES, each of which has a loop of its own without conditions: what is missing of a unit's last slot is zeros.
    constexpr bool KNOWN = sizeof...(SIZES) > 0;
    constexpr bool RAISED = raised(GROUPS, MOST, KNOWN);
    constexpr int ROWS = SLAB_ROWS * ROW_GROUPS, WEIGHT = ROW_GROUPS * (PIECE_CODES + PIECE_SCALES);
    constexpr int SLOT = (DEPTH * (MOST * 128 + WEIGHT) + 1023) / 1024 * 1024;   // bytes
    // A thread writes, or adds, its own sums.
    constexpr bool WHOLE = STEP == ADD || (K_GROUPS == 1 && SPLIT == 1 && (STEP == UP || ROUTING == LISTED));
    static_assert(STEP != ADD || (K_GROUPS == 1 && MOST <= 64), "a row is one warp's, and two columns at most one lane's");
    constexpr int RESULTS = STEP == ADD ? 0 : WHOLE ? ROW_GROUPS * most_of_piece(MOST) * turned_line(STEP) : K_GROUPS * most_of_piece(MOST) * add_line(ROWS) * 4;

    char* const ring = shared_memory_1024();
    char* const results = ring + STAGES * SLOT;
    float* const factors = reinterpret_cast<float*>(results + RESULTS);
    unsigned long long* const full = reinterpret_cast<unsigned long long*>(factors + 2 * ROWS);
    unsigned long long* const empty = full + STAGES;
    char* const scanned_room = reinterpret_cast<char*>(empty + STAGES);
    const Scanned scanned(scanned_room);
    float* const totals = reinterpret_cast<float*>(scanned_room + SCANNED_BYTES);   // ADD: of all tokens

    const unsigned rank = SPLIT > 1 ? cluster_rank() : 0, warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i, 1);
            barrier_init(empty + i, CONSUMERS / 32);
        }
        barrier_init_fence();
    }
    // Who is routed where was settled before the previous kernel, save for the first of the two.
    if constexpr (STEP == UP) wait_for_previous_grid();
    unsigned tile_count;
    if constexpr (ROUTING == SCANNED) {
        tile_count = scanned.make<STEP == ADD>(p);
    } else {
        load_settled<4>(&tile_count, p.tile_count);
        __syncthreads();
    }
    // Units are dealt to all blocks, or of ADD tiles to those of a cluster.
    const unsigned units = STEP == ADD ? uniform(tile_count) : uniform(tile_count) * p.row_units;
    const unsigned start = STEP == ADD ? rank : blockIdx.x / SPLIT, step = STEP == ADD ? SPLIT : gridDim.x / SPLIT;
    // What is listed of a tile: its expert, first position, count and size.
    const auto tile_at = [&](unsigned number) {
        const unsigned tile = STEP == ADD ? number : number / p.row_units;
        if constexpr (ROUTING == SCANNED) {
            return uint4{scanned.chosen[tile], tile * MOST, p.tokens, MOST};
        } else {
            unsigned words[4];
            load_settled<16>(words, p.tiles + tile);
            return uint4{words[0], words[1], words[2], words[3]};
        }
    };
    const auto unit_of = [&](unsigned number, const uint4& tile) {
        Unit unit = {tile.x, tile.y, tile.z, tile.w};
        unit.slab = (STEP == ADD ? blockIdx.x / SPLIT : number % p.row_units) * ROW_GROUPS;
        unit.begin = SPLIT > 1 && STEP != ADD ? rank * p.share : 0;
        unit.end = min(unit.begin + p.share, p.chunks);
        return unit;
    };
    // Chunks of a slot.
    const auto depth_of = [](unsigned size) { return SLOT / (size * 128 + WEIGHT) / (2 * K_GROUPS) * (2 * K_GROUPS); };

    if (warp >= CONSUMERS / 32) {   // a condition on threadIdx would keep the compiler from using uniform registers beyond it
        if constexpr (RAISED) lower_registers<24>();
        if (threadIdx.x > CONSUMERS) return;
        // A slot holds the tokens of its chunks, then for each slab codes, then for each slab scales.
        const auto fetch_weight = [&](unsigned slot, const Unit& unit, unsigned chunk, unsigned depth) {
            const unsigned count = min(depth, unit.end - chunk), tokens = unit.size * 128;
            if constexpr (KNOWN) barrier_expect(full + slot, depth * (tokens + ROW_GROUPS * PIECE_SCALES) + count * (ROW_GROUPS * PIECE_CODES));
            else barrier_expect(full + slot, count * (tokens + WEIGHT));
            char* const codes = ring + slot * SLOT + depth * tokens;
            char* const scales = codes + ROW_GROUPS * depth * PIECE_CODES;
#pragma unroll
            for (int r = 0; r < ROW_GROUPS; r++) {
                // A unit may reach beyond the last slab: what it computes there is not stored.
                const unsigned slab = min(unit.slab + r, p.slabs - 1);
                const unsigned long long at = (static_cast<unsigned long long>(unit.expert) * p.slabs + slab) * p.chunks + chunk;
                bulk_copy_constant(codes + r * depth * PIECE_CODES, p.codes + at * PIECE_CODES, count * PIECE_CODES, full + slot);
                bulk_copy_constant(scales + r * depth * PIECE_SCALES, p.scales + at * PIECE_SCALES, count * PIECE_SCALES, full + slot);
                // Beside zeros of tokens the weight may be anything but infinity and NaN: any codes, real scales.
                for (unsigned i = count; KNOWN && i < depth; i++)
                    bulk_copy_constant(scales + (r * depth + i) * PIECE_SCALES, p.scales + at * PIECE_SCALES, PIECE_SCALES, full + slot);
            }
        };
        const auto fetch_tokens = [&](unsigned slot, const Unit& unit, unsigned chunk, unsigned depth) {
            const unsigned count = KNOWN ? depth : min(depth, unit.end - chunk), first = ROUTING == SCANNED && STEP == UP ? 0 : unit.position;
            char* tile = ring + slot * SLOT;
            for (unsigned i = 0; i < count; i++, tile += unit.size * 128) {
                const int column = (chunk + i < unit.end ? chunk + i : p.chunks) * CHUNK_COLUMNS;   // beyond the end of x there are zeros
                unsigned row = 0;
                for (; row + 32 <= unit.size; row += 32) tensor_copy(tile + row * 128, &p.large, column, first + row, full + slot);
                for (; row < unit.size; row += 8) tensor_copy(tile + row * 128, &p.small, column, first + row, full + slot);
            }
        };

        // The weight is nobody's result: as much of it as the ring holds comes while the previous kernel still runs.
        unsigned ahead = 0;
        if (start < units) {
            const Unit first = unit_of(start, tile_at(start));
            const unsigned depth = depth_of(first.size);
            for (unsigned chunk = first.begin; ahead < STAGES && chunk < first.end; chunk += depth) fetch_weight(ahead++, first, chunk, depth);
        }
        wait_for_previous_grid();
        launch_next_grid();
        unsigned turn = 0, slot = 0, phase = 1;
        for (unsigned number = start; number < units; number += step) {
            const Unit unit = unit_of(number, tile_at(number));
            const unsigned depth = depth_of(unit.size);
            for (unsigned chunk = unit.begin; chunk < unit.end; chunk += depth) {
                if (turn >= ahead) {
                    if (turn >= STAGES) barrier_wait(empty + slot, phase);
                    fetch_weight(slot, unit, chunk, depth);
                }
                fetch_tokens(slot, unit, chunk, depth);
                turn++;
                if (++slot == STAGES) slot = 0, phase ^= 1;
            }
        }
        return;
    }

    if constexpr (RAISED) raise_registers<GROUPS <= 2 ? 240 : GROUPS == 3 ? 160 : 112>();
    wait_for_previous_grid();
    const unsigned row_group = ROW_GROUPS > 1 ? warp / 4 % ROW_GROUPS : 0, k_group = K_GROUPS > 1 ? warp / 4 / ROW_GROUPS : 0;
    const unsigned my_codes = threadIdx.x % 128 * 16, my_scales = warp % 4 * 64 + lane / 4 * 8;
    unsigned slot = 0, phase = 0;
    Held held = {};
    // SIZE: that of the tile, or 0 where the compiler does not know it.
    const auto compute = [&](const Unit& unit, auto of) {
        constexpr int SIZE = decltype(of)::value, TOKENS = SIZE ? SIZE : MOST;
        const unsigned size = SIZE ? SIZE : unit.size;
        float sums[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;

        // Read now, needed at the end.
        float factor[2], shift[2];
        const unsigned first_row = unit.slab * SLAB_ROWS;
        if constexpr (WHOLE) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                bool there;
                const unsigned row = unit.expert * p.rows + source_row<STEP>(p, first_row + row_group * 64 + warp % 4 * 16 + half * 8 + lane / 4, there);
                factor[half] = there ? factor_at<X>(p, row) : 0.0f;
                shift[half] = there ? bias_at(p, row) : 0.0f;
            }
        } else if (threadIdx.x < ROWS) {
            bool there;
            const unsigned row = unit.expert * p.rows + source_row<STEP>(p, first_row + threadIdx.x, there);
            factors[threadIdx.x] = there ? factor_at<X>(p, row) : 0.0f;
            factors[ROWS + threadIdx.x] = there ? bias_at(p, row) : 0.0f;
        }

        // A piece is decoded while the one before it is multiplied, so a slot is free when the first piece of the next one has
        // been handed over. Two sets of operands take turns.
        unsigned last = STAGES;   // the slot to be given back
        const auto give_back = [&]() {
            if (lane == 0) barrier_arrive(empty + last);
        };
        unsigned operands[2][4][4];
        const unsigned depth = depth_of(size), tile_bytes = size * 128;
        constexpr int EACH = SLOT / (TOKENS * 128 + WEIGHT) / (2 * K_GROUPS) * 2;   // chunks of a full slot for a warpgroup
        for (unsigned chunk = unit.begin; chunk < unit.end; chunk += depth) {
            barrier_wait(full + slot, phase);
            const unsigned count = (min(depth, unit.end - chunk) + K_GROUPS - 1 - k_group) / K_GROUPS;   // for this warpgroup
            const char* const tokens = ring + slot * SLOT;
            Matrix tile = matrix_of(tokens, 0) + k_group * (tile_bytes / 16);
            const char* codes = tokens + depth * tile_bytes + (row_group * depth + k_group) * PIECE_CODES + my_codes;
            const char* scales = tokens + depth * (tile_bytes + ROW_GROUPS * PIECE_CODES) + (row_group * depth + k_group) * PIECE_SCALES + my_scales;
            const auto work = [&](unsigned (&mine)[4][4]) {
                decode_piece<X>(mine, *reinterpret_cast<const uint4*>(codes), *reinterpret_cast<const uint2*>(scales));
                codes += K_GROUPS * PIECE_CODES, scales += K_GROUPS * PIECE_SCALES;
                if constexpr (SIZE) {
                    begin_matrices();
#pragma unroll
                    for (int j = 0; j < 4; j++) multiply_tokens<X, TOKENS>(sums, mine[j], tile + 2 * j);
                    end_matrices();
                } else {
                    multiply_columns<X, MOST>(sums, mine, tile, size);
                }
                tile += K_GROUPS * (tile_bytes / 16);
                wait_for_matrices<1>();
            };
            if constexpr (SIZE) {
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    work(operands[i % 2]);
                    if (i == 0 && last < STAGES) give_back();
                }
            } else {
                // At the end of a unit there may be an odd one, or none at all for this warpgroup.
                if (!count) wait_for_matrices<0>();
                for (unsigned i = 0; i < count; i += 2) {
                    work(operands[0]);
                    if (i == 0 && last < STAGES) give_back();
                    if (i + 1 == count) {
                        wait_for_matrices<0>();
                        break;
                    }
                    work(operands[1]);
                }
                if (!count && last < STAGES) give_back();
            }
            last = slot;
            if (++slot == STAGES) slot = 0, phase ^= 1;
        }
        wait_for_matrices<0>();
        hold(sums);
        give_back();

        float* const all = reinterpret_cast<float*>(results);
        if constexpr (STEP == ADD) {
            if constexpr (ROUTING == LISTED) held.merge(lane);
            add_to_totals<TOKENS, ROW_GROUPS>(sums, factor, shift, held, totals, row_group, warp % 4, lane);
        } else if constexpr (WHOLE) {
            char* const mine = results + row_group * (most_of_piece(MOST) * turned_line(STEP));
            write_whole<X, Out, STEP, TOKENS>(p, unit, sums, factor, shift, mine, row_group, warp % 4, lane);
        } else {
            write_added<X, Out, STEP, ROUTING == SCANNED, TOKENS, ROW_GROUPS, K_GROUPS, SPLIT>(p, unit, sums, all, factors, scanned, rank, row_group,
                                                                                                 k_group, warp % 4, lane);
        }
    };

    if constexpr (STEP == ADD) {
        for (unsigned i = threadIdx.x; i < p.tokens * add_line(ROWS); i += CONSUMERS) totals[i] = 0.0f;
        __syncwarp();
        barrier_among(1, CONSUMERS);
    }
    // What is read of the next tile is on its way long before it is needed: the tile while this one is computed, the slots of its
    // columns while this one is added, their weights while the next one is computed.
    uint4 next = {};
    if (start < units) next = tile_at(start);
    if constexpr (STEP == ADD && ROUTING == LISTED) held.read_slots(p, next, lane);
    for (unsigned number = start; number < units; number += step) {
        Unit unit = unit_of(number, next);
        unit.size = uniform(unit.size);
        if constexpr (STEP == ADD && ROUTING == LISTED) held.weigh(p, unit.count, lane);
        if constexpr (STEP == ADD && ROUTING == SCANNED) held.find(p, scanned, unit.expert, lane);
        next = {};
        if (number + step < units) next = tile_at(number + step);
        const auto done = [&](auto of) {
            if (sizeof...(SIZES) > 1 && unit.size != decltype(of)::value) return false;
            compute(unit, of);
            return true;
        };
        if constexpr (KNOWN) (void)(done(Size<SIZES>()) || ...);
        else compute(unit, Size<0>());
        if constexpr (STEP == ADD && ROUTING == LISTED) held.read_slots(p, next, lane);
    }
    if constexpr (STEP == ADD) write_totals<X, ROW_GROUPS, SPLIT>(p, blockIdx.x / SPLIT * ROW_GROUPS, totals, rank);
}
