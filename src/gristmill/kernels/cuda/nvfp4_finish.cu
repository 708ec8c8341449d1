// From sums to results: out = total * token * scale + shift, rounded once, where `scale` and `shift` have a number for each
// column and `token` one for each row. What a product by a library leaves to be done, in one pass.
#include "vectors.cuh"

struct FinishParams {
    const float* total;       // [rows][columns]
    void* out;                // rows `stride` elements apart, at multiples of 16 bytes
    long long stride;
    const float* token;       // [rows]
    const float* scale;       // [columns]
    const float* shift;       // [columns]
    unsigned rows, columns;   // columns: a multiple of 8
    unsigned across;          // blocks side by side
};

constexpr int THREADS = 128, COLUMNS = 8, ROWS = 16;   // COLUMNS of a thread, ROWS of a block
constexpr int AHEAD = 4;                               // rows whose loads are under way together

template <int ACCESS>
DEVICE void read(float (&values)[COLUMNS], const float* pointer) {
    Packed<float, COLUMNS> packed;
    load<Tensor<float, ACCESS>>(packed, pointer);
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) values[k] = packed.get(k);
}

template <class T, bool TOKEN, bool SHIFT>
__global__ void __launch_bounds__(THREADS) nvfp4_finish(const FinishParams params) {
    const unsigned column = (blockIdx.x % params.across * THREADS + threadIdx.x) * COLUMNS;
    const unsigned first = blockIdx.x / params.across * ROWS, end = min(first + ROWS, params.rows);
    launch_next_grid();
    wait_for_previous_grid();
    if (column >= params.columns) return;
    float scale[COLUMNS], shift[COLUMNS];
    // By fours: they may be parts of larger tensors, and lie anywhere.
    read<4>(scale, params.scale + column);
    if constexpr (SHIFT) read<4>(shift, params.shift + column);
    const float* total = params.total + column;
    T* out = static_cast<T*>(params.out) + column;
    for (unsigned start = first; start < end; start += AHEAD) {
        float sums[AHEAD][COLUMNS], token[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            // The last row again where there are no more: it is not written.
            const unsigned row = min(start + i, end - 1);
            read<16>(sums[i], total + static_cast<long long>(row) * params.columns);
            if constexpr (TOKEN) {
                unsigned bits;
                load_global<4>(&bits, params.token + row);
                token[i] = __uint_as_float(bits);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (start + i >= end) break;
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) {
                if constexpr (TOKEN) sums[i][k] *= token[i];
                if constexpr (SHIFT) sums[i][k] = fmaf(sums[i][k], scale[k], shift[k]);
                else sums[i][k] *= scale[k];
            }
            Packed<T, COLUMNS> rounded;
            rounded.set(sums[i]);
            store<Tensor<T, 16>>(out + (start + i) * params.stride, rounded);
        }
    }
}
