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
    ADD = 3,    // the same of few tokens, weighed and added at once: y
};
enum Routing {
    SCANNED = 0,   // few slots: every block finds out which experts there are, and a tile is all tokens
    LISTED = 1,    // more: a kernel before has put them in order, and the rows of x as well
};

constexpr unsigned MOST_SCANNED = 64;   // slots
constexpr int SCANNED_BYTES = 4 * 64 * 4;

struct MoeParams {
    TensorMap small, large;        // x or h, 64 columns by 8 rows and by 32
    const unsigned char* codes;
    const unsigned char* scales;
    const float* row_scale;        // (experts, rows)
    const void* bias;              // (experts, rows)
    void* out;                     // h (positions, inner); results by slot, LISTED by position (slots, rows); or y (tokens, rows)
    const void* weights;           // (tokens, topk): what each slot weighs; for ADD
    const int* slot_of;            // LISTED: sorted position -> slot; for ADD
    const uint4* tiles;            // LISTED: {expert, first position, count, size}
    const unsigned* tile_count;    // LISTED
    Ids ids;
    long long weights_row, weights_column;   // in elements
    int bias_kind, weights_kind, wide_ids, wide_map;
    int activation;
    float limit, slope;            // infinity: no limit
    unsigned tokens, slots;
    unsigned rows, inner;          // rows: of the weight, 2 * inner or hidden
    unsigned slabs, chunks;
    unsigned share;                // chunks for each block of a SPLIT
    unsigned row_units;
};

// ---- who is routed where ----

// The expert of a slot among those here, or NOBODY.
DEVICE unsigned expert_of(const MoeParams& p, unsigned slot) {
    const unsigned id = p.wide_ids ? id_of_slot<8, true>(p.ids, slot) : id_of_slot<4, true>(p.ids, slot);
    if (!p.ids.map) return expert_of_id<0, true>(p.ids, id);
    return p.wide_map ? expert_of_id<8, true>(p.ids, id) : expert_of_id<4, true>(p.ids, id);
}

DEVICE float weight_of(const MoeParams& p, unsigned slot) {
    const unsigned token = slot / p.ids.topk;
    const long long at = token * p.weights_row + (slot - token * p.ids.topk) * p.weights_column;
    unsigned word;
    if (p.weights_kind == FP32_BIAS) {
        load_settled<4>(&word, static_cast<const float*>(p.weights) + at);
        return __uint_as_float(word);
    }
    load_settled<2>(&word, static_cast<const bf16*>(p.weights) + at);
    return p.weights_kind == BF16_BIAS ? bf16_to_float(word) : f16_to_float(word);
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
    float* weight;       // (64,)

    DEVICE explicit Scanned(char* room) : expert(reinterpret_cast<unsigned*>(room)), is_first(expert + 64), chosen(is_first + 64),
                                          weight(reinterpret_cast<float*>(chosen + 64)) {}

    // By the first 64 threads of a block, of which all call it. Gives the number of experts.
    template <bool WEIGHTS>
    DEVICE unsigned make(const MoeParams& p) const {
        const unsigned slot = threadIdx.x;
        if (slot < MOST_SCANNED) {
            expert[slot] = slot < p.slots ? expert_of(p, slot) : NOBODY;
            if (WEIGHTS && slot < p.slots) weight[slot] = weight_of(p, slot);
        }
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

// The results of a warpgroup whose sums are whole. What is 16 bits wide goes through shared memory, a piece at a time, to be
// written in lines; no other warpgroup is waited for, so that one writes while another multiplies.
template <class X, class Out, int STEP, int MOST>
DEVICE void write_whole(const MoeParams& p, const Unit& unit, const float (&sums)[MOST / 2], const float (&factor)[2], const float (&shift)[2],
                        char* shared, unsigned row_group, unsigned warp, unsigned lane) {
    const unsigned slab = unit.slab + row_group, number = warp * 32 + lane;
    if constexpr (STEP == DOWN && sizeof(Out) == 4) {
        // Eight lanes write 32 bytes side by side, which is what memory takes at a time.
#pragma unroll
        for (int i = 0; i < MOST / 2; i++) {
            if (i % 4 == 0 && i * 2 >= unit.size) break;
            const unsigned column = i / 4 * 8 + lane % 4 * 2 + i % 2, row = slab * 64 + warp * 16 + i / 2 % 2 * 8 + lane / 4;
            if (column >= unit.count || row >= p.rows) continue;
            const unsigned word = __float_as_uint(sums[i] * factor[i / 2 % 2] + shift[i / 2 % 2]);
            store_global<4>(static_cast<float*>(p.out) + static_cast<unsigned long long>(unit.position + column) * p.rows + row, &word);
        }
        __syncwarp();
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
            __syncwarp();   // the activation may have parted them
            barrier_among(1 + row_group, 128);
            for (unsigned i = number; i < TOKENS * (ROWS / 8); i += 128) {
                const unsigned within = i / (ROWS / 8), column = piece * TOKENS + within, row = slab * ROWS + i % (ROWS / 8) * 8;
                if (column >= unit.count || row >= width) continue;
                const unsigned long long line = unit.position + column;
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
                        const Scanned& scanned, unsigned rank, unsigned row_group, unsigned k_group, unsigned warp,
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
                    store_at(unit.position + column);
                }
            }
        }
        meet();   // before anybody writes there again, or leaves while others still read
    }
}

// What the columns of a tile are, of up to 64 in two for each lane of a warp: the token, and what the expert's result for it
// weighs. A token that has the expert several times is the first of its columns; the others are NOBODY's.
struct Held {
    unsigned slot[2];
    unsigned token[2];
    float weight[2];

    // The slots of a listed tile's columns; they come when they are needed.
    DEVICE void read_slots(const MoeParams& p, const uint4& tile, unsigned lane) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (lane + 32 * i < tile.z) load_settled<4>(&slot[i], p.slot_of + tile.y + lane + 32 * i);
    }

    DEVICE void weigh(const MoeParams& p, unsigned count, unsigned lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool there = lane + 32 * i < count;
            token[i] = there ? slot[i] / p.ids.topk : NOBODY;
            weight[i] = there ? weight_of(p, slot[i]) : 0.0f;
        }
    }

    // Slots of a token lie side by side. From the last column to the first, so that a weight arrives at the first of them.
    DEVICE void merge(unsigned lane) {
#pragma unroll
        for (int i = 1; i >= 0; i--) {
            const unsigned before = shuffle_up(token[i], 1), end_before = shuffle_from(token[0], 31);
            const bool again = token[i] != NOBODY && (lane ? before == token[i] : i && end_before == token[i]);
            unsigned again_lanes = vote(again);
            for (unsigned last = 31; again_lanes; last--) {
                if (!(again_lanes >> last & 1u)) continue;
                again_lanes ^= 1u << last;
                const float more = __uint_as_float(shuffle_from(__float_as_uint(weight[i]), last));
                if (last && lane == last - 1) weight[i] += more;
                if (!last && lane == 31) weight[0] += more;
            }
            if (again) token[i] = NOBODY;
        }
    }

    // Of scanned slots: all tokens are columns.
    DEVICE void find(const MoeParams& p, const Scanned& scanned, unsigned expert, unsigned lane) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned column = lane + 32 * i;
            token[i] = NOBODY, weight[i] = 0.0f;
            if (column >= p.tokens) continue;
            for (unsigned at = column * p.ids.topk; at < (column + 1) * p.ids.topk; at++)
                if (scanned.expert[at] == expert) token[i] = column, weight[i] += scanned.weight[at];
        }
        __syncwarp();
    }
};

// Results of a tile of few tokens, weighed and added to those of the tiles before in shared memory: `totals`, a line for each
// token. A row is always the same warp's, and of a tile nobody else has the same token and row.
template <int TOKENS, int ROW_GROUPS>
DEVICE void add_to_totals(const float (&sums)[TOKENS / 2], const float (&factor)[2], const float (&shift)[2], const Held& held, float* totals,
                          unsigned row_group, unsigned warp, unsigned lane) {
    constexpr int LINE = add_line(64 * ROW_GROUPS);
    float* const mine = totals + row_group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {   // pairs of rows, of one column
        const unsigned column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        const unsigned token = shuffle_from(held.token[i / 8], column % 32);
        const float weight = __uint_as_float(shuffle_from(__float_as_uint(held.weight[i / 8]), column % 32));
        if (token == NOBODY) continue;
        const float* const two = sums + i / 2 * 4 + i % 2;
        float* const to = mine + token * LINE;
        to[0] += weight * (two[0] * factor[0] + shift[0]);
        to[8] += weight * (two[2] * factor[1] + shift[1]);
    }
    __syncwarp();
}

// The totals of a cluster's blocks, added in their order: y. Each block writes the tokens that are its own.
template <class X, int ROW_GROUPS, int SPLIT>
DEVICE void write_totals(const MoeParams& p, unsigned slab, const float* totals, unsigned rank) {
    constexpr int ROWS = 64 * ROW_GROUPS, CONSUMERS = 128 * ROW_GROUPS, LINE = add_line(ROWS), QUADS = ROWS / 4;
    const auto meet = [&]() {
        __syncwarp();
        if constexpr (SPLIT > 1) {
            cluster_arrive();
            cluster_wait();
        } else {
            barrier_among(1, CONSUMERS);
        }
    };
    meet();
    for (unsigned i = threadIdx.x; i < (p.tokens + SPLIT - 1) / SPLIT * QUADS; i += CONSUMERS) {
        const unsigned token = i / QUADS * SPLIT + rank, row = slab * 64 + i % QUADS * 4;
        if (token >= p.tokens || row >= p.rows) continue;
        float total[4];
        add_parts<1, SPLIT>(total, totals + token * LINE + i % QUADS * 4, 0);
        store_four(static_cast<X*>(p.out) + static_cast<unsigned long long>(token) * p.rows + row, total, 4, true);
    }
    meet();   // before anybody leaves while others still read
}
