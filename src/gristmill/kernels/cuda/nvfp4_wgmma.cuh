// What the warpgroup kernel of NVFP4 linear is told, how it deals out tiles, and how sums become results.
#pragma once
#include "nvfp4_results.cuh"

struct WgmmaParams {
    TensorMap x;   // (tokens, columns), boxes of TOKENS by 64
    const unsigned char* codes;
    const unsigned char* scales;
    const float* row_scale;
    const void* bias;
    void* y;       // (tokens, rows), contiguous
    int bias_kind;
    unsigned tokens, rows, slabs, chunks;
    unsigned share;   // chunks for each block of a SPLIT
    unsigned token_tiles, row_units, group;   // tiles, and how many token tiles go side by side
};

// One tile, or what a block of a SPLIT does of it.
struct Unit {
    unsigned token, row;      // the first
    unsigned slab;
    unsigned begin, end;      // chunks

    template <int TOKENS, int ROW_GROUPS, int SPLIT>
    DEVICE static Unit at(const WgmmaParams& p, unsigned number, unsigned rank) {
        const unsigned per_group = p.group * p.row_units, first = number / per_group * p.group, within = number % per_group;
        const unsigned side = min(p.group, p.token_tiles - first);
        Unit unit;
        unit.token = (first + within % side) * TOKENS;
        unit.slab = within / side * ROW_GROUPS;
        unit.row = unit.slab * SLAB_ROWS;
        unit.begin = SPLIT > 1 ? rank * p.share : 0;
        unit.end = min(unit.begin + p.share, p.chunks);
        return unit;
    }
};

// How many of a tile's tokens are written at a time.
DEVICE constexpr int piece_of(int tokens) { return tokens < 64 ? tokens : tokens % 64 ? 48 : 64; }

constexpr int TURNED = 64 * 2 + 16;   // bytes of a token's 64 results in shared memory; free of bank conflicts

DEVICE constexpr int write_bytes(int tokens) { return piece_of(tokens) * TURNED; }

// The results of a warpgroup whose sums are whole: 64 rows by TOKENS. 16-bit ones go through shared memory, a piece at a time,
// to be written in lines of 128 bytes; no other warpgroup is waited for, so that one writes while another multiplies.
template <class Out, int TOKENS>
DEVICE void write_sums(const WgmmaParams& p, const Unit& unit, const float (&sums)[TOKENS / 2], const float (&factor)[2], const float (&shift)[2],
                       char* shared, unsigned row_group, unsigned warp, unsigned lane) {
    constexpr int PIECE = piece_of(TOKENS);
    const unsigned first_row = unit.row + row_group * 64;
    Out* const y = static_cast<Out*>(p.y);
    if constexpr (sizeof(Out) == 4) {
        // Eight lanes write 32 bytes side by side, which is what memory takes at a time.
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const int half = i / 2 % 2;
            const unsigned token = unit.token + i / 4 * 8 + lane % 4 * 2 + i % 2, row = first_row + warp * 16 + half * 8 + lane / 4;
            const unsigned word = __float_as_uint(sums[i] * factor[half] + shift[half]);
            if (token < p.tokens && row < p.rows) store_global<4>(y + static_cast<unsigned long long>(token) * p.rows + row, &word);
        }
    } else {
        constexpr int BLOCKS = PIECE % 16 ? 1 : 2;   // of eight tokens, turned at a time
        const unsigned matrix = lane / 8;
        char* const mine = shared + (matrix / 2 * 8 + lane % 8) * TURNED + (warp * 16 + matrix % 2 * 8) * 2;
        const unsigned number = warp * 32 + lane;
#pragma unroll
        for (int piece = 0; piece < TOKENS / PIECE; piece++) {
#pragma unroll
            for (int block = 0; block < PIECE / 8; block += BLOCKS) {
                unsigned words[2 * BLOCKS];
#pragma unroll
                for (int i = 0; i < 2 * BLOCKS; i++) {
                    const float* const pair = sums + (piece * (PIECE / 8) + block) * 4 + i * 2;
                    Packed<Out, 2> packed;
                    packed.set_pair(0, pair[0] * factor[i % 2] + shift[i % 2], pair[1] * factor[i % 2] + shift[i % 2]);
                    words[i] = packed.words[0];
                }
                store_matrices_turned(mine + block * 8 * TURNED, words);
            }
            barrier_among(1 + row_group, 128);
            for (unsigned i = number; i < PIECE * 8; i += 128) {
                const unsigned within = i / 8, token = unit.token + piece * PIECE + within, row = first_row + i % 8 * 8;
                if (token >= p.tokens || row >= p.rows) continue;
                const Packed<Out, 8> eight = *reinterpret_cast<const Packed<Out, 8>*>(shared + within * TURNED + i % 8 * 16);
                Out* const to = y + static_cast<unsigned long long>(token) * p.rows + row;
                if (p.rows % 8 == 0) {
                    store_global<16>(to, eight.words);
                } else {
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const unsigned bits = eight.bits(j);
                        if (row + j < p.rows) store_global<2>(to + j, &bits);
                    }
                }
            }
            barrier_among(1 + row_group, 128);   // before the next piece, or tile, is written there
        }
    }
}

DEVICE constexpr int add_line(int rows) { return rows + 4; }   // floats; free of bank conflicts

DEVICE constexpr int add_bytes(int tokens, int rows) { return piece_of(tokens) * add_line(rows) * 4; }

// The results of a tile whose sums are spread over warpgroups (K_GROUPS) and blocks (SPLIT): added through shared memory, in
// their order, turned so that the rows of a token lie side by side as they do in y. `factors` are those of the tile's rows,
// and behind them the shifts.
template <class Out, int TOKENS, int ROW_GROUPS, int K_GROUPS, int SPLIT>
DEVICE void add_sums(const WgmmaParams& p, const Unit& unit, const float (&sums)[TOKENS / 2], float* all, const float* factors, unsigned rank,
                     unsigned row_group, unsigned k_group, unsigned warp, unsigned lane) {
    constexpr int ROWS = 64 * ROW_GROUPS, CONSUMERS = 128 * ROW_GROUPS * K_GROUPS, PIECE = piece_of(TOKENS), LINE = add_line(ROWS);
    const unsigned my_row = threadIdx.x % (ROWS / 4) * 4;
    const unsigned row = unit.row + my_row, rows_there = row < p.rows ? p.rows - row : 0;
#pragma unroll
    for (int piece = 0; piece < TOKENS / PIECE; piece++) {
        float* const mine = all + k_group * (PIECE * LINE) + (lane % 4 * 2) * LINE + row_group * 64 + warp * 16 + lane / 4;
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
        float factors_of[4], shifts_of[4];
        load_four(factors_of, factors + my_row);
        load_four(shifts_of, factors + ROWS + my_row);
        for (unsigned i = threadIdx.x + rank * CONSUMERS; i < PIECE * ROWS / 4; i += CONSUMERS * SPLIT) {
            const unsigned within = i / (ROWS / 4), token = unit.token + piece * PIECE + within;
            if (token >= p.tokens || !rows_there) continue;
            float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int part = 0; part < SPLIT * K_GROUPS; part++) {
                const float* const from = all + part % K_GROUPS * (PIECE * LINE) + within * LINE + my_row;
                float four[4];
                if constexpr (SPLIT > 1) load_remote(four, from, part / K_GROUPS);
                else load_four(four, from);
#pragma unroll
                for (int j = 0; j < 4; j++) total[j] += four[j];
            }
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] = total[j] * factors_of[j] + shifts_of[j];
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
