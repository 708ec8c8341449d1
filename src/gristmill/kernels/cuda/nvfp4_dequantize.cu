// NVFP4 weights in fragments (formats/nvfp4/fragments.py) as plain rows: values times block scales, which is exact, in
// bf16, fp16 or fp32; an eighth of that, rounded, in E4M3, whose range it would leave otherwise. FACTOR: in bf16, fp16 and
// fp32 each row times a number of its own, rounded.
//
// A range of slabs and of chunks at a time. A block has one slab of it and GROUP chunks, a warp 16 rows of those. What a
// thread decodes lies in pieces of two columns; the four lanes that share a row exchange them until each has 16 bytes side
// by side, so that a row of a chunk is written in runs of 64 bytes.
#include "nvfp4.cuh"

struct DequantizeParams {
    const char* codes;        // of the first piece of the range
    const char* scales;
    const float* factor;      // [rows]
    void* out;                // [rows][stride]
    long long stride;         // in elements
    unsigned chunks;          // of a whole slab, in the range or not
    unsigned rows, columns;   // of the range; columns are a multiple of 16
    unsigned groups;          // blocks for one slab
};

// The 16-bit type by way of which T is decoded.
template <class T>
struct Decode {
    using type = bf16;
};
template <>
struct Decode<f16> {
    using type = f16;
};

constexpr int GROUP = 4;   // chunks of a block: their loads are under way together

// Lane t of four has part t of four items; then all parts of item t.
DEVICE void exchange(unsigned (&words)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? words[i] : words[i + 1], 1);
        if (odd) words[i] = other;
        else words[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i + 2], 2);
        if (upper) words[i] = other;
        else words[i + 2] = other;
    }
}

// The two numbers of a pair in bf16.
DEVICE float low_of(unsigned pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Both as they are to be written. Without a factor that is a power of two, restored<T>(), and exact.
template <class T, bool FACTOR>
DEVICE unsigned scaled(unsigned pair, float factor) {
    if constexpr (!FACTOR) return multiply_pair<T, false>(pair, IS_BF16<T> ? 0x4400u : 0x5800u);
    else if constexpr (IS_BF16<T>) return pack_bf16(low_of(pair) * factor, high_of(pair) * factor);
    else return pack_f16(f16_to_float(static_cast<unsigned short>(pair)) * factor, f16_to_float(static_cast<unsigned short>(pair >> 16)) * factor);
}

// One row of a piece: pairs[2 * j + h] are columns 16 * j + 8 * h + 2 * t and the next. `out` is where the row begins,
// `left` how many columns it has; a row that is not there has none. All lanes call it.
template <class T, bool FACTOR>
DEVICE void write_row(T* out, unsigned left, const unsigned (&pairs)[8], float factor) {
    const unsigned t = threadIdx.x % 4;
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = scaled<T, FACTOR>(pairs[4 * half + i], factor);
            exchange(words);
            const unsigned column = 32 * half + 8 * t;
            if (column < left) store_global<16>(out + column, words);
        }
    } else if constexpr (sizeof(T) == 4) {
        // Two lanes are enough: one gets four columns of the first half of a block, the other the same of the second.
        const bool odd = t % 2;
        const unsigned first = odd ? 8 + 2 * (t - 1) : 2 * t;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? pairs[2 * j] : pairs[2 * j + 1], 1);
            const unsigned before = odd ? other : pairs[2 * j], after = odd ? pairs[2 * j + 1] : other;
            const unsigned words[4] = {__float_as_uint(low_of(before) * factor), __float_as_uint(high_of(before) * factor),
                                       __float_as_uint(low_of(after) * factor), __float_as_uint(high_of(after) * factor)};
            if (16 * j + first < left) store_global<16>(out + 16 * j + first, words);
        }
    } else {
        static_assert(!FACTOR, "rows of E4M3 are scaled by whoever multiplies them");
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const unsigned first = pairs[2 * j], second = pairs[2 * j + 1];
            words[j] = pack_e4m3(low_of(first) * factor, high_of(first) * factor) |
                       pack_e4m3(low_of(second) * factor, high_of(second) * factor) << 16;
        }
        exchange(words);
        const unsigned ordered[4] = {(words[0] & 0xffffu) | words[1] << 16, (words[2] & 0xffffu) | words[3] << 16,
                                     words[0] >> 16 | (words[1] & 0xffff0000u), words[2] >> 16 | (words[3] & 0xffff0000u)};
        if (16 * t < left) store_global<16>(out + 16 * t, ordered);
    }
}

template <class T, bool FACTOR>
__global__ void __launch_bounds__(128) nvfp4_dequantize(const DequantizeParams params) {
    using Decoded = typename Decode<T>::type;
    const unsigned slab = blockIdx.x / params.groups, group = blockIdx.x % params.groups;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned column = group * GROUP * CHUNK_COLUMNS;
    const unsigned long long piece = static_cast<unsigned long long>(slab) * params.chunks + group * GROUP;
    const char* codes = params.codes + piece * PIECE_CODES + 16 * threadIdx.x;
    const char* scales = params.scales + piece * PIECE_SCALES + 64 * warp + 8 * (lane / 4);
    launch_next_grid();
    wait_for_previous_grid();

    unsigned loaded[GROUP][4], levels[GROUP][2];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (column + i * CHUNK_COLUMNS < params.columns) {
            load_global<16>(loaded[i], codes + i * PIECE_CODES);
            load_global<8>(levels[i], scales + i * PIECE_SCALES);
        }
    }
    const unsigned row[2] = {slab * SLAB_ROWS + 16 * warp + lane / 4, slab * SLAB_ROWS + 16 * warp + lane / 4 + 8};
    float factor[2];
    T* out[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        factor[r] = sizeof(T) == 1 ? restored<Decoded>() / 8 : restored<Decoded>();
        if constexpr (FACTOR) {
            unsigned bits = 0;
            if (row[r] < params.rows) load_global<4>(&bits, params.factor + row[r]);
            factor[r] *= __uint_as_float(bits);
        }
        out[r] = static_cast<T*>(params.out) + row[r] * params.stride + column;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const unsigned start = column + i * CHUNK_COLUMNS;
        if (start >= params.columns) break;
        unsigned operands[4][4];
        decode_piece<Decoded>(operands, uint4{loaded[i][0], loaded[i][1], loaded[i][2], loaded[i][3]}, uint2{levels[i][0], levels[i][1]});
#pragma unroll
        for (int r = 0; r < 2; r++) {
            unsigned pairs[8];
#pragma unroll
            for (int p = 0; p < 8; p++) pairs[p] = operands[p / 2][p % 2 * 2 + r];
            const unsigned left = row[r] < params.rows ? params.columns - start : 0;
            write_row<T, FACTOR>(out[r] + i * CHUNK_COLUMNS, left, pairs, factor[r]);
        }
    }
}
