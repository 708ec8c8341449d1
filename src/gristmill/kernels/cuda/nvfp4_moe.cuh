// What the expert kernel is told, who is routed where, and how sums become results.
//
// The words: a slot is one entry of the ids, token * topk + j. Sorted positions are slots with an expert, in the order of
// experts, then of slots. A tile is up to `size` sorted positions of one expert; a unit is a tile by the rows of one block.
#pragma once
#include "moe_ids.cuh"
#include "moe_tensor_cores.cuh"
#include "nvfp4_results.cuh"

enum Activation { SILU = 0, GELU = 1, SWIGLU_OAI = 2 };
enum Step {
    UP = 1,     // h = act(gate, up) of w13, whose rows lie in pairs
    DOWN = 2,   // what each slot's expert makes of h, to be weighed and added afterwards
};
enum Routing {
    SCANNED = 0,   // few slots: every block finds out which experts there are, and a tile is all tokens
    OWN = 1,       // some: every block puts them in order by itself
    LISTED = 2,    // many: a kernel before has put them in order, and the rows of x as well
};

constexpr unsigned MOST_SCANNED = 64;   // slots
constexpr int MOST_SIZES = 8;

struct MoeParams {
    TensorMap small, large;        // x or h, 64 columns by 8 rows and by 32
    const void* x;                 // OWN: (tokens, columns), to be picked from
    const unsigned char* codes;
    const unsigned char* scales;
    const float* row_scale;        // (experts, rows)
    const void* bias;              // (experts, rows)
    void* out;                     // h (positions, inner), or results by slot, LISTED by position (slots, rows)
    const uint4* tiles;            // LISTED: {expert, first position, count, size}
    const unsigned* tile_count;    // LISTED
    Ids ids;
    long long x_stride;            // in elements
    int bias_kind, wide_ids, wide_map;
    int activation;
    float limit, slope;            // infinity: no limit
    unsigned tokens, slots;
    unsigned rows, inner;          // rows: of the weight, 2 * inner or hidden
    unsigned columns;
    unsigned slabs, chunks;
    unsigned share;                // chunks for each block of a SPLIT
    unsigned row_units;
    unsigned sizes[MOST_SIZES], size_count;   // of tiles, ascending
};

// ---- who is routed where ----

// The expert of a slot among those here, or NOBODY.
DEVICE unsigned expert_of(const MoeParams& p, unsigned slot) {
    const unsigned id = p.wide_ids ? id_of_slot<8, true>(p.ids, slot) : id_of_slot<4, true>(p.ids, slot);
    if (!p.ids.map) return expert_of_id<0, true>(p.ids, id);
    return p.wide_map ? expert_of_id<8, true>(p.ids, id) : expert_of_id<4, true>(p.ids, id);
}

struct Unit {
    unsigned expert, position, count, size;   // of the tile
    unsigned slab;                            // the first
    unsigned begin, end;                      // chunks
};

// SCANNED, in shared memory: the experts of all slots, and which there are, in order of appearance.
struct Scanned {
    unsigned* expert;    // (64,)
    unsigned* is_first;  // (64,)
    unsigned* chosen;    // (64,)

    DEVICE explicit Scanned(char* room) : expert(reinterpret_cast<unsigned*>(room)), is_first(expert + 64), chosen(is_first + 64) {}

    // By the first 64 threads of a block, of which all call it. Gives the number of experts.
    DEVICE unsigned make(const MoeParams& p) const {
        const unsigned slot = threadIdx.x;
        if (slot < MOST_SCANNED) expert[slot] = slot < p.slots ? expert_of(p, slot) : NOBODY;
        __syncthreads();
        if (slot < MOST_SCANNED) is_first[slot] = expert[slot] != NOBODY && !count(expert, slot, expert[slot]);
        __syncthreads();
        if (slot < MOST_SCANNED && is_first[slot]) chosen[count(is_first, slot, 1)] = expert[slot];
        __syncthreads();
        return count(is_first, MOST_SCANNED, 1);
    }

  private:
    // How many of the first `end` are `wanted`.
    DEVICE static unsigned count(const unsigned* list, unsigned end, unsigned wanted) {
        unsigned found = 0;
        for (unsigned i = 0; i < end; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(list + i);
            const unsigned values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) found += i + j < end && values[j] == wanted;
        }
        return found;
    }
};

// OWN, in shared memory: slots in the order of experts, and the list of tiles.
struct Own {
    struct Tile {
        unsigned short expert, first, count, size;
    };
    unsigned* starts;           // (experts,): positions, and tiles in the upper half
    Tile* tiles;                // (min(experts, slots) + slots / largest size,)
    unsigned short* slot_of;    // (slots,)
    unsigned short* token_of;   // (slots,), too: by position
    unsigned short* expert;     // (slots,)

    DEVICE Own(const MoeParams& p, char* room)
        : starts(reinterpret_cast<unsigned*>(room)), tiles(reinterpret_cast<Tile*>(starts + (p.ids.experts + 1) / 2 * 2)),
          slot_of(reinterpret_cast<unsigned short*>(tiles + min(p.ids.experts, p.slots) + p.slots / p.sizes[p.size_count - 1])),
          token_of(slot_of + p.slots), expert(token_of + p.slots) {}

    // By all THREADS of a block; `warps` is room for a word of each of its warps. Gives the number of tiles.
    template <int THREADS>
    DEVICE unsigned make(const MoeParams& p, unsigned* warps) const {
        constexpr unsigned short NONE = 0xffff;
        const unsigned experts = p.ids.experts, largest = p.sizes[p.size_count - 1], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        for (unsigned i = threadIdx.x; i < experts; i += THREADS) starts[i] = 0;
        __syncthreads();
        for (unsigned slot = threadIdx.x; slot < p.slots; slot += THREADS) {
            const unsigned found = expert_of(p, slot);
            expert[slot] = found == NOBODY ? NONE : found;
            if (found != NOBODY) atomic_add_shared(starts + found, 1);
        }
        __syncthreads();
        // From counts to starts, of positions and of tiles at once; and the tiles of each expert.
        unsigned before = 0;
        for (unsigned base = 0; base < experts; base += THREADS) {
            const unsigned mine = base + threadIdx.x, count = mine < experts ? starts[mine] : 0;
            const unsigned parts = (count + largest - 1) / largest, both = count | parts << 16;
            unsigned up_to = both;
#pragma unroll
            for (unsigned distance = 1; distance < 32; distance *= 2) {
                const unsigned other = shuffle_up(up_to, distance);
                if (lane >= distance) up_to += other;
            }
            if (lane == 31) warps[warp] = up_to;
            __syncthreads();
            unsigned start = before + up_to - both;
            for (unsigned i = 0; i < THREADS / 32; i++) {
                if (i < warp) start += warps[i];
                before += warps[i];
            }
            if (mine < experts) {
                starts[mine] = start & 0xffffu;
                const unsigned each = parts ? (count + parts - 1) / parts : 0, size = size_for(p, each);
                for (unsigned i = 0; i < parts; i++)
                    tiles[(start >> 16) + i] = {static_cast<unsigned short>(mine), static_cast<unsigned short>((start & 0xffffu) + i * each),
                                               static_cast<unsigned short>(min(count - i * each, each)), static_cast<unsigned short>(size)};
            }
            __syncthreads();
        }
        // In the order of slots, so that all blocks have the same lists.
        if (warp == 0) {
            for (unsigned base = 0; base < p.slots; base += 32) {
                const unsigned slot = base + lane, found = slot < p.slots ? expert[slot] : NONE;
                const unsigned same = match_lanes(found), rank = count_bits(same & ((1u << lane) - 1));
                unsigned first = 0;
                if (found != NONE) first = starts[found];
                __syncwarp();
                if (found != NONE) {
                    if (rank == 0) starts[found] = first + count_bits(same);
                    slot_of[first + rank] = slot;
                    token_of[first + rank] = slot / p.ids.topk;
                }
                __syncwarp();
            }
        }
        __syncthreads();
        return before >> 16;
    }

    DEVICE static unsigned size_for(const MoeParams& p, unsigned count) {
        unsigned size = p.sizes[p.size_count - 1];
        for (unsigned i = p.size_count; i-- > 0;)
            if (p.sizes[i] >= count) size = p.sizes[i];
        return size;
    }
};

// ---- from sums to results ----

// The row of the weight, in the order of row scales and biases, that a packed row holds; `there`: whether it is one.
template <int STEP>
DEVICE unsigned source_row(const MoeParams& p, unsigned packed, bool& there) {
    if constexpr (STEP == UP) {
        const unsigned row = packed / 16 * 8 + packed % 8;
        there = row < p.inner;
        return packed % 16 < 8 ? row : p.inner + row;
    } else {
        there = packed < p.rows;
        return packed;
    }
}

DEVICE float sigmoid(float value) { return reciprocal_fast(1.0f + exp2_fast(value * -1.4426950408889634f)); }

DEVICE float activated(const MoeParams& p, float gate, float up) {
    // Written so that NaN stays NaN.
    gate = gate > p.limit ? p.limit : gate;
    up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    if (p.activation == GELU) return gate * (0.5f + 0.5f * erff(gate * 0.70710678f)) * up;
    return gate * sigmoid(p.slope * gate) * (p.activation == SWIGLU_OAI ? up + 1.0f : up);
}

// How many of a tile's tokens are written at a time, and for how many of them tiles of up to `most` need room.
DEVICE constexpr int piece_of(int tokens) { return tokens < 64 ? tokens : tokens % 64 ? 48 : 64; }
DEVICE constexpr int most_of_piece(int most) { return most < 64 ? most : 64; }

// Bytes of a token's results in shared memory: 32 of h, or 64 in 16 bits; free of bank conflicts.
DEVICE constexpr int turned_line(int step) { return step == UP ? 32 * 2 + 16 : 64 * 2 + 16; }

DEVICE constexpr int add_line(int rows) { return rows + 4; }   // floats; free of bank conflicts

template <bool FIRST, class A, class B>
struct Either {
    using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using type = B;
};

// The line of the results that a column of a tile is written to: that of its position or, where `slot_of` is not null, its slot.
DEVICE unsigned long long line_of(const Unit& unit, unsigned column, const unsigned short* slot_of) {
    return slot_of ? slot_of[unit.position + column] : unit.position + column;
}

// The results of a warpgroup whose sums are whole. What is 16 bits wide goes through shared memory, a piece at a time, to be
// written in lines; no other warpgroup is waited for, so that one writes while another multiplies.
template <class X, class Out, int STEP, int MOST>
DEVICE void write_whole(const MoeParams& p, const Unit& unit, const float (&sums)[MOST / 2], const float (&factor)[2], const float (&shift)[2],
                        char* shared, const unsigned short* slot_of, unsigned row_group, unsigned warp, unsigned lane) {
    const unsigned slab = unit.slab + row_group, number = warp * 32 + lane;
    if constexpr (STEP == DOWN && sizeof(Out) == 4) {
        // Eight lanes write 32 bytes side by side, which is what memory takes at a time.
#pragma unroll
        for (int i = 0; i < MOST / 2; i++) {
            if (i % 4 == 0 && i * 2 >= unit.size) break;
            const unsigned column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = slab * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            if (column >= unit.count || row >= p.rows) continue;
            const unsigned word = __float_as_uint(sums[i] * factor[i / 2 % 2] + shift[i / 2 % 2]);
            store_global<4>(static_cast<float*>(p.out) + line_of(unit, column, slot_of) * p.rows + row, &word);
        }
    } else {
        using Result = typename Either<STEP == UP, X, Out>::type;
        constexpr int LINE = turned_line(STEP), ROWS = STEP == UP ? 32 : 64, TOKENS = piece_of(MOST);
        static_assert(MOST % TOKENS == 0, "pieces make up the tile");
        const unsigned width = STEP == UP ? p.inner : p.rows;
        unsigned short* const mine = reinterpret_cast<unsigned short*>(shared + lane % 4 * 2 * LINE) + warp * (ROWS / 4) + lane / 4;
#pragma unroll
        for (int piece = 0; piece < MOST / TOKENS; piece++) {
            if (piece * TOKENS >= unit.size) break;
#pragma unroll
            for (int block = 0; block < TOKENS / 8; block++) {
                if (piece * TOKENS + block * 8 >= unit.size) break;
                const float* const four = sums + (piece * (TOKENS / 8) + block) * 4;
                unsigned short* const to = mine + block * 8 * (LINE / 2);
                float values[4];
#pragma unroll
                for (int i = 0; i < 4; i++) values[i] = four[i] * factor[i / 2] + shift[i / 2];
                Packed<Result, 2> pair;
                if constexpr (STEP == UP) {
                    pair.set_pair(0, activated(p, values[0], values[2]), activated(p, values[1], values[3]));
                    to[0] = pair.bits(0), to[LINE / 2] = pair.bits(1);
                } else {
                    pair.set_pair(0, values[0], values[1]);
                    to[0] = pair.bits(0), to[LINE / 2] = pair.bits(1);
                    pair.set_pair(0, values[2], values[3]);
                    to[8] = pair.bits(0), to[LINE / 2 + 8] = pair.bits(1);
                }
            }
            barrier_among(1 + row_group, 128);
            for (unsigned i = number; i < TOKENS * (ROWS / 8); i += 128) {
                const unsigned within = i / (ROWS / 8), column = piece * TOKENS + within, row = slab * ROWS + i % (ROWS / 8) * 8;
                if (column >= unit.count || row >= width) continue;
                const unsigned long long line = line_of(unit, column, slot_of);
                const Packed<Result, 8> eight = *reinterpret_cast<const Packed<Result, 8>*>(shared + within * LINE + i % (ROWS / 8) * 16);
                store_global<16>(static_cast<Result*>(p.out) + line * width + row, eight.words);
            }
            __syncwarp();
            barrier_among(1 + row_group, 128);   // before the next piece, or tile, is written there
        }
    }
}

// Sums that are spread over warpgroups (K_GROUPS) and blocks (SPLIT), added in their order.
template <int K_GROUPS, int SPLIT>
DEVICE void add_parts(float (&total)[4], const float* first, unsigned part_floats) {
#pragma unroll
    for (int j = 0; j < 4; j++) total[j] = 0.0f;
#pragma unroll
    for (int part = 0; part < SPLIT * K_GROUPS; part++) {
        const float* const from = first + part % K_GROUPS * part_floats;
        float four[4];
        if constexpr (SPLIT > 1) load_remote(four, from, part / K_GROUPS);
        else load_four(four, from);
#pragma unroll
        for (int j = 0; j < 4; j++) total[j] += four[j];
    }
}

// The results of a unit whose sums have to be added, turned so that the rows of a token lie side by side as they do in memory.
// Of a SPLIT each block writes the tokens that are its own. `factors` are those of the unit's packed rows, and behind them the
// shifts. Where slots were scanned all slots of the expert are written to, of which a token may have several.
template <class X, class Out, int STEP, bool IS_SCANNED, int MOST, int ROW_GROUPS, int K_GROUPS, int SPLIT>
DEVICE void write_added(const MoeParams& p, const Unit& unit, const float (&sums)[MOST / 2], float* all, const float* factors,
                        const unsigned short* slot_of, const Scanned& scanned, unsigned rank, unsigned row_group, unsigned k_group, unsigned warp,
                        unsigned lane) {
    constexpr int ROWS = 64 * ROW_GROUPS, CONSUMERS = 128 * ROW_GROUPS * K_GROUPS, TOKENS = piece_of(MOST), LINE = add_line(ROWS);
    constexpr int QUADS = (STEP == UP ? ROWS / 2 : ROWS) / 4, OWN_TOKENS = (TOKENS + SPLIT - 1) / SPLIT;
    const unsigned width = STEP == UP ? p.inner : p.rows;
    const auto meet = [&]() {
        __syncwarp();   // after loops that lanes leave at different times
        if constexpr (SPLIT > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            barrier_among(1, CONSUMERS);
        }
    };
#pragma unroll
    for (int piece = 0; piece < MOST / TOKENS; piece++) {
        if (piece * TOKENS >= unit.size) break;
        float* const mine = all + k_group * (TOKENS * LINE) + (lane % 4 * 2) * LINE + row_group * 64 + warp * 16 + lane / 4;
#pragma unroll
        for (int block = 0; block < TOKENS / 8; block++) {
            if (piece * TOKENS + block * 8 >= unit.size) break;
            const float* const four = sums + (piece * (TOKENS / 8) + block) * 4;
            float* const there = mine + block * 8 * LINE;
            there[0] = four[0], there[LINE] = four[1], there[8] = four[2], there[LINE + 8] = four[3];
        }
        meet();
        for (unsigned i = threadIdx.x; i < OWN_TOKENS * QUADS; i += CONSUMERS) {
            const unsigned within = i / QUADS * SPLIT + rank, column = piece * TOKENS + within, quad = i % QUADS;
            const unsigned row = unit.slab * (STEP == UP ? 32 : 64) + quad * 4;
            if (within >= TOKENS || column >= unit.count || row >= width) continue;
            const unsigned packed = STEP == UP ? quad / 2 * 16 + quad % 2 * 4 : quad * 4;
            const float* const from = all + within * LINE + packed;
            float total[4], factor[4], shift[4];
            add_parts<K_GROUPS, SPLIT>(total, from, TOKENS * LINE);
            load_four(factor, factors + packed);
            load_four(shift, factors + ROWS + packed);
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] = total[j] * factor[j] + shift[j];
            if constexpr (STEP == UP) {
                float up[4];
                add_parts<K_GROUPS, SPLIT>(up, from + 8, TOKENS * LINE);
                load_four(factor, factors + packed + 8);
                load_four(shift, factors + ROWS + packed + 8);
#pragma unroll
                for (int j = 0; j < 4; j++) total[j] = activated(p, total[j], up[j] * factor[j] + shift[j]);
                store_four(static_cast<X*>(p.out) + static_cast<unsigned long long>(unit.position + column) * width + row, total, 4, true);
            } else {
                const auto store_at = [&](unsigned long long line) { store_four(static_cast<Out*>(p.out) + line * width + row, total, 4, true); };
                if constexpr (IS_SCANNED) {
                    for (unsigned slot = column * p.ids.topk; slot < (column + 1) * p.ids.topk; slot++)
                        if (scanned.expert[slot] == unit.expert) store_at(slot);
                } else {
                    store_at(line_of(unit, column, slot_of));
                }
            }
        }
        meet();   // before anybody writes there again, or leaves while others still read
    }
}
