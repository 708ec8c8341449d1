// NVFP4 weights in fragments (formats/nvfp4/fragments.py says where every bit lies) on their way into a tensor core.
#pragma once
#include "tensor_cores.cuh"

constexpr int SLAB_ROWS = 64, CHUNK_COLUMNS = 64;   // of a piece
constexpr int PIECE_CODES = 2048, PIECE_SCALES = 256;   // bytes

// Decoded values come out smaller than they are; sums are multiplied by this.
template <class T>
DEVICE constexpr float restored() { return is_bf16(T()) ? 512.0f : 128.0f; }

// The 16 values of one row in a thread's two words, as eight pairs, times 2^-126 in bf16 and 2^-14 in fp16: the bits of
// E2M1 at the low end of the exponent. Half of that is a subnormal, which products keep.
template <class T>
DEVICE void decode_row(unsigned (&pairs)[8], unsigned first, unsigned second) {
    const unsigned rest = (first & 0x60306030u) | (rotate_right(second, 30) & ~0x60306030u);
    const unsigned raw[8] = {first, rotate_right(first, 4), first << 6, second, rotate_right(second, 4), second << 6, rotate_right(rest, 8), rest << 2};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if constexpr (is_bf16(T())) pairs[i] = raw[i] & 0x81c081c0u;
        else pairs[i] = (raw[i] & 0x80008000u) | (raw[i] << 3 & 0x0e000e00u);
    }
}

// The scale in byte `block` of a word, twice: times 2^117 in bf16, 2^7 in fp16.
template <class T>
DEVICE unsigned decode_scale(unsigned word, int block) {
    const unsigned twice = byte_select(word, 0x4040u | block << 8 | block);
    if constexpr (is_bf16(T())) return twice * 16u + 0x70007000u;
    else return twice * 128u + 0x08000800u;
}

// What a thread holds of a piece (16 bytes of codes, two words of scales) as the operands of four matrix instructions:
// operands[j][...] belong to columns 16 * j to 16 * j + 15. Exact: a value times a scale has six significant bits.
template <class T>
DEVICE void decode_piece(unsigned (&operands)[4][4], const uint4& codes, const uint2& scales) {
    unsigned upper[8], lower[8];
    decode_row<T>(upper, codes.x, codes.y);
    decode_row<T>(lower, codes.z, codes.w);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const unsigned scale = decode_scale<T>(scales.x, j), other = decode_scale<T>(scales.y, j);
        operands[j][0] = multiply_pair<T>(upper[2 * j], scale);
        operands[j][1] = multiply_pair<T>(lower[2 * j], other);
        operands[j][2] = multiply_pair<T>(upper[2 * j + 1], scale);
        operands[j][3] = multiply_pair<T>(lower[2 * j + 1], other);
    }
}
