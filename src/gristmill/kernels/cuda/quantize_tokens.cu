// Activations rounded to FP8 or to NVFP4, each token (row) with a scale of its own. A block has one row: it reads it, agrees
// on its largest value, and writes it.
//
//     FP8    scale = max(max |x| / 448, 2^-126), y = e4m3(x * (1 / scale))
//     NVFP4  scale = max |x| / (6 * 448), at least 2^-126, 1 for a row of zeros; for every 16 values
//            s = e4m3(max |x| / (6 * scale)), y = e2m1(x / (s * scale)), zeros where s is 0
//
// NaN in a row makes its scale NaN, and no other row's.
#include "team.cuh"
#include "vectors.cuh"

constexpr int THREADS = 256;
constexpr int KEPT = 4;   // vectors of 16 bytes that a thread keeps of its row; it reads the others twice
using Row = Team<BLOCK, 32, 1>;

template <class T, int COUNT>
DEVICE void values_of(float (&values)[COUNT], const Packed<T, COUNT>& packed) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) values[k] = packed.get(k);
}

template <class T, int COUNT>
DEVICE void read(float (&values)[COUNT], const T* pointer) {
    constexpr int VEC = 16 / sizeof(T);
#pragma unroll
    for (int k = 0; k < COUNT; k += VEC) {
        Packed<T, VEC> packed;
        load<Tensor<T, 16>>(packed, pointer + k);
#pragma unroll
        for (int i = 0; i < VEC; i++) values[k + i] = packed.get(i);
    }
}

struct Fp8Params {
    const void* x;        // rows at multiples of 16 bytes, of a multiple of 16 columns
    long long stride;     // in elements
    f8* out;              // [rows][columns]
    float* scale;         // [rows]
    unsigned columns;
};

template <class T>
__global__ void __launch_bounds__(THREADS) quantize_fp8(const Fp8Params params) {
    constexpr int VEC = 16 / sizeof(T);
    const long long row = blockIdx.x;
    const T* x = static_cast<const T*>(params.x) + row * params.stride;
    f8* out = params.out + row * params.columns;
    const unsigned vectors = params.columns / VEC;
    Row team{Meeting()};
    launch_next_grid();
    wait_for_previous_grid();

    Packed<T, VEC> kept[KEPT];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const unsigned at = threadIdx.x + i * THREADS;
        kept[i].clear();
        if (at < vectors) load<Tensor<T, 16>>(kept[i], x + at * VEC);
    }
    Max largest;
    float values[VEC];
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        values_of(values, kept[i]);
        largest.add(values);
    }
#pragma unroll 2
    for (unsigned at = threadIdx.x + KEPT * THREADS; at < vectors; at += THREADS) {
        read(values, x + at * VEC);
        largest.add(values);
    }
    team.reduce(largest);

    // A quotient of constants without a call for extreme numbers: the rest of the first guess, which of an infinity is a NaN.
    const float near = largest.value[0] * (1.0f / 448.0f), rest = fmaf(-448.0f, near, largest.value[0]);
    const float scale = max_nan(rest == rest ? fmaf(rest, 1.0f / 448.0f, near) : near, 0x1p-126f);
    const float inverse = 1.0f / scale;
    if (threadIdx.x == 0) {
        const unsigned bits = __float_as_uint(scale);
        store_global<4>(params.scale + row, &bits);
    }
    const auto write = [&](unsigned at) {
        Packed<f8, VEC> rounded;
#pragma unroll
        for (int k = 0; k < VEC; k++) values[k] *= inverse;
        rounded.set(values);
        store<Tensor<f8, 16>>(out + at * VEC, rounded);
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const unsigned at = threadIdx.x + i * THREADS;
        values_of(values, kept[i]);
        if (at < vectors) write(at);
    }
#pragma unroll 2
    for (unsigned at = threadIdx.x + KEPT * THREADS; at < vectors; at += THREADS) {
        read(values, x + at * VEC);
        write(at);
    }
}

struct Nvfp4Params {
    const void* x;               // rows at multiples of 16 bytes, of a multiple of 16 columns
    long long stride;            // in elements
    unsigned char* codes;        // [rows][columns / 2]
    unsigned char* scales;       // in tiles of 128 rows by 4 blocks (formats/nvfp4/tiles.py), with their padding
    float* scale;                // [rows]
    unsigned rows, columns;      // a block for each row of the tiles; those from `rows` on are zeros
};

// The number of an E4M3 byte that is not negative.
DEVICE float e4m3_to_float(unsigned byte) {
    if (byte == 0x7fu) return __uint_as_float(0x7fffffffu);
    // With the exponent of fp32 it is 2^-120 of what it should be, subnormal or not.
    return __uint_as_float(byte << 20) * 0x1p120f;
}

// The code of a value of E2M1's scale: the nearest, of two equally near ones the even one.
DEVICE unsigned e2m1(float value) {
    const float size = fabsf(value);
    const unsigned code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
    return code | (__float_as_uint(value) >> 28 & 8u);
}

template <class T>
__global__ void __launch_bounds__(THREADS) quantize_nvfp4(const Nvfp4Params params) {
    constexpr int VEC = 16 / sizeof(T);
    const unsigned row = blockIdx.x, blocks = params.columns / 16, wide = (blocks + 3) / 4 * 4;
    const bool there = row < params.rows;
    const T* x = static_cast<const T*>(params.x) + row * params.stride;
    unsigned char* codes = params.codes + static_cast<unsigned long long>(row) * (params.columns / 2);
    unsigned char* scales = params.scales + static_cast<unsigned long long>(row / 128) * wide * 128 + row % 32 * 16 + row % 128 / 32 * 4;
    Row team{Meeting()};
    launch_next_grid();
    wait_for_previous_grid();

    Max largest;
    if (there) {
        float values[VEC];
#pragma unroll 4
        for (unsigned at = threadIdx.x * VEC; at < params.columns; at += THREADS * VEC) {
            read(values, x + at);
            largest.add(values);
        }
    }
    team.reduce(largest);
    const float scale = largest.value[0] == 0.0f ? 1.0f : max_nan(largest.value[0] / 2688.0f, 0x1p-126f);
    if (there && threadIdx.x == 0) {
        const unsigned bits = __float_as_uint(scale);
        store_global<4>(params.scale + row, &bits);
    }
    // Whole warps to the end: four lanes put the scales of their blocks into one word.
    for (unsigned first = 0; first < wide; first += THREADS) {
        const unsigned block = first + threadIdx.x;
        unsigned level = 0;
        if (there && block < blocks) {
            float values[16];
            read(values, x + block * 16);
            Max top;
            top.add(values);
            level = pack_e4m3(top.value[0] / (6.0f * scale), 0.0f) & 0xffu;
            const float unit = e4m3_to_float(level) * scale;
            unsigned words[2] = {0, 0};
#pragma unroll
            for (int k = 0; k < 16; k++)
                if (level != 0) words[k / 8] |= e2m1(values[k] / unit) << k % 8 * 4;
            store_global<8>(codes + block * 8, words);
        }
        unsigned word = level << threadIdx.x % 4 * 8;
        word |= __shfl_xor_sync(0xffffffffu, word, 1);
        word |= __shfl_xor_sync(0xffffffffu, word, 2);
        if (block < wide && threadIdx.x % 4 == 0) store_global<4>(scales + block * 128, &word);
    }
}
