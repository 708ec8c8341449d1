// What stands between and behind the products of dense experts that a library makes, over rows in the order of their
// experts: the bias of the first product with the activation, and the bias of the second.
#include "vectors.cuh"

constexpr int THREADS = 128, COLUMNS = 8, ROWS = 4;   // COLUMNS of a thread, ROWS of a block
constexpr int SILU = 0, GELU = 1, SWIGLU_OAI = 2;

struct ActivateParams {
    const void* in;       // [positions][2 * width], gate before up; behind the last product [positions][width]
    void* out;            // [positions][width]
    const void* bias;     // [experts][as wide as `in`]
    const unsigned* ends; // [experts]: the position behind the last one of each expert
    float limit;          // infinite where nothing is cut
    float slope;
    unsigned experts;
    unsigned width;       // a multiple of 8
    unsigned across;      // blocks side by side
};

template <class T>
constexpr bool IS_ABSENT = false;
template <>
constexpr bool IS_ABSENT<Absent> = true;

// The first expert that ends behind a position; there is one.
DEVICE unsigned expert_at(const ActivateParams& p, unsigned position) {
    unsigned low = 0, high = p.experts - 1;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (p.ends[middle] > position) high = middle;
        else low = middle + 1;
    }
    return low;
}

// Comparisons rather than minima: a NaN stays one.
DEVICE float cut_above(float value, float limit) { return value > limit ? limit : value; }
DEVICE float cut_below(float value, float limit) { return value < limit ? limit : value; }

template <int ACTIVATION>
DEVICE float activated(const ActivateParams& p, float gate, float up) {
    gate = cut_above(gate, p.limit);
    up = cut_below(cut_above(up, p.limit), -p.limit);
    if constexpr (ACTIVATION == GELU) return gate * (0.5f + 0.5f * erff(gate * 0.70710678f)) * up;
    const float share = reciprocal_fast(1.0f + exp2_fast(gate * p.slope * -1.4426950408889634f));
    return gate * share * (ACTIVATION == SWIGLU_OAI ? up + 1.0f : up);
}

template <class Bias>
DEVICE void add_bias(float (&values)[COLUMNS], const void* bias, long long at) {
    if constexpr (!IS_ABSENT<Bias>) {
        Packed<Bias, COLUMNS> packed;
        load<Tensor<Bias, sizeof(Bias)>>(packed, static_cast<const Bias*>(bias) + at);
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) values[k] += packed.get(k);
    }
}

template <class T>
DEVICE void unpack(float (&values)[COLUMNS], const Packed<T, COLUMNS>& packed) {
#pragma unroll
    for (int k = 0; k < COLUMNS; k++) values[k] = packed.get(k);
}

// The rows of a block: [first, end), of those that belong to an expert.
struct Part {
    unsigned column, first, end;

    DEVICE explicit Part(const ActivateParams& p) {
        column = (blockIdx.x % p.across * THREADS + threadIdx.x) * COLUMNS;
        first = blockIdx.x / p.across * ROWS;
        wait_for_previous_grid();
        launch_next_grid();
        end = min(first + ROWS, p.ends[p.experts - 1]);
        if (column >= p.width) end = 0;
    }
};

template <class T, class Bias, int ACTIVATION>
__global__ void __launch_bounds__(THREADS) moe_activate(const __grid_constant__ ActivateParams p) {
    const Part part(p);
    if (part.first >= part.end) return;
    const T* in = static_cast<const T*>(p.in) + part.column;
    T* out = static_cast<T*>(p.out) + part.column;
    Packed<T, COLUMNS> gates[ROWS], ups[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        // The last row again where there are no more: it is not written.
        const long long row = min(part.first + i, part.end - 1);
        load<Tensor<T, 16>>(gates[i], in + row * 2 * p.width);
        load<Tensor<T, 16>>(ups[i], in + (row * 2 + 1) * p.width);
    }
    unsigned expert = IS_ABSENT<Bias> ? 0 : expert_at(p, part.first);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const unsigned row = part.first + i;
        if (row >= part.end) break;
        float gate[COLUMNS], up[COLUMNS];
        unpack(gate, gates[i]);
        unpack(up, ups[i]);
        if constexpr (!IS_ABSENT<Bias>) {
            while (p.ends[expert] <= row) expert++;
            const long long at = static_cast<long long>(expert) * 2 * p.width + part.column;
            add_bias<Bias>(gate, p.bias, at);
            add_bias<Bias>(up, p.bias, at + p.width);
        }
#pragma unroll
        for (int k = 0; k < COLUMNS; k++) gate[k] = activated<ACTIVATION>(p, gate[k], up[k]);
        Packed<T, COLUMNS> rounded;
        rounded.set(gate);
        store<Tensor<T, 16>>(out + static_cast<long long>(row) * p.width, rounded);
    }
}

// In fp32, unrounded: what is left to do is to add up the rows of a token.
template <class T, class Bias>
__global__ void __launch_bounds__(THREADS) moe_shift(const __grid_constant__ ActivateParams p) {
    const Part part(p);
    if (part.first >= part.end) return;
    const T* in = static_cast<const T*>(p.in) + part.column;
    float* out = static_cast<float*>(p.out) + part.column;
    unsigned expert = expert_at(p, part.first);
    for (unsigned row = part.first; row < part.end; row++) {
        Packed<T, COLUMNS> read;
        load<Tensor<T, 16>>(read, in + static_cast<long long>(row) * p.width);
        while (p.ends[expert] <= row) expert++;
        float values[COLUMNS];
        unpack(values, read);
        add_bias<Bias>(values, p.bias, static_cast<long long>(expert) * p.width + part.column);
        Packed<float, COLUMNS> sum;
        sum.set(values);
        store<Tensor<float, 16>>(out + static_cast<long long>(row) * p.width, sum);
    }
}
