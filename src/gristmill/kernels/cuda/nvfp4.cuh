// NVFP4 weights in fragments (formats/nvfp4/fragments.py says where every bit lies) on their way into a tensor core.
#pragma once
#include "tensor_cores.cuh"

constexpr int SLAB_ROWS = 64, CHUNK_COLUMNS = 64;   // of a piece
constexpr int PIECE_CODES = 2048, PIECE_SCALES = 256;   // bytes

// Decoded values come out smaller than they are; sums are multiplied by this.
template <class T>
DEVICE constexpr float restored() { return IS_BF16<T> ? 512.0f : 128.0f; }

// The 16 values of one row in a thread's two words, as eight pairs, times 2^-126 in bf16 and 2^-14 in fp16: the bits of
// E2M1 at the low end of the exponent. Half of that is a subnormal, which products keep.
template <class T>
DEVICE void decode_row(unsigned (&pairs)[8], unsigned first, unsigned second) {
    const unsigned rest = select_bits<0x60306030u>(first, rotate_right(second, 30));
    const unsigned raw[8] = {first, rotate_right(first, 4), first << 6, second, rotate_right(second, 4), second << 6, rotate_right(rest, 8), rest << 2};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if constexpr (IS_BF16<T>) pairs[i] = raw[i] & 0x81c081c0u;
        else pairs[i] = (raw[i] & 0x80008000u) | (raw[i] << 3 & 0x0e000e00u);
    }
}

// Scales FIRST and FIRST + 2 of the four in a word: times 2^117 in bf16, 2^7 in fp16.
template <class T, int FIRST>
DEVICE unsigned decode_scales(unsigned word) {
    const unsigned apart = byte_select(word, FIRST ? 0x4341u : 0x4240u);
    if constexpr (IS_BF16<T>) return apart * 16u + 0x70007000u;
    else return apart * 128u + 0x08000800u;
}

// What a thread holds of a piece (16 bytes of codes, two words of scales) as the operands of four matrix instructions:
// operands[j][...] belong to columns 16 * j to 16 * j + 15. Exact: a value times a scale has six significant bits.
template <class T>
DEVICE void decode_piece(unsigned (&operands)[4][4], const uint4& codes, const uint2& scales) {
    unsigned upper[8], lower[8];
    decode_row<T>(upper, codes.x, codes.y);
    decode_row<T>(lower, codes.z, codes.w);
    const unsigned upper_scales[2] = {decode_scales<T, 0>(scales.x), decode_scales<T, 1>(scales.x)};
    const unsigned lower_scales[2] = {decode_scales<T, 0>(scales.y), decode_scales<T, 1>(scales.y)};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        operands[0][2 * half] = multiply_pair<T, false>(upper[half], upper_scales[0]);
        operands[1][2 * half] = multiply_pair<T, false>(upper[2 + half], upper_scales[1]);
        operands[2][2 * half] = multiply_pair<T, true>(upper[4 + half], upper_scales[0]);
        operands[3][2 * half] = multiply_pair<T, true>(upper[6 + half], upper_scales[1]);
        operands[0][2 * half + 1] = multiply_pair<T, false>(lower[half], lower_scales[0]);
        operands[1][2 * half + 1] = multiply_pair<T, false>(lower[2 + half], lower_scales[1]);
        operands[2][2 * half + 1] = multiply_pair<T, true>(lower[4 + half], lower_scales[0]);
        operands[3][2 * half + 1] = multiply_pair<T, true>(lower[6 + half], lower_scales[1]);
    }
}
