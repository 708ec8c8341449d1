// From sums to results: y = sum * factor + shift, the row's scale and its bias. Parameters of kernels that use this have
// row_scale, bias and bias_kind.
#pragma once
#include "nvfp4.cuh"

enum BiasKind { NO_BIAS = 0, FP32_BIAS = 1, BF16_BIAS = 2, F16_BIAS = 3 };

// With what makes decoded values whole again.
template <class X, class Params>
DEVICE float factor_at(const Params& p, unsigned row) {
    unsigned word;
    load_global<4>(&word, p.row_scale + row);
    return __uint_as_float(word) * restored<X>();
}

template <class Params>
DEVICE float bias_at(const Params& p, unsigned row) {
    unsigned word = 0;
    if (p.bias_kind == NO_BIAS) return 0.0f;
    if (p.bias_kind == FP32_BIAS) {
        load_global<4>(&word, static_cast<const float*>(p.bias) + row);
        return __uint_as_float(word);
    }
    load_global<2>(&word, static_cast<const bf16*>(p.bias) + row);
    return p.bias_kind == BF16_BIAS ? bf16_to_float(word) : f16_to_float(word);
}

DEVICE void load_four(float (&out)[4], const float* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    out[0] = __uint_as_float(words.x), out[1] = __uint_as_float(words.y);
    out[2] = __uint_as_float(words.z), out[3] = __uint_as_float(words.w);
}

// Four values side by side, or as many as are there.
template <class Out>
DEVICE void store_four(Out* to, const float (&values)[4], unsigned there, bool aligned) {
    Packed<Out, 4> packed;
    packed.set(values);
    if (aligned && there >= 4) {
        store_global<4 * sizeof(Out)>(to, packed.words);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned bits = packed.bits(i);
            if (i < there) store_global<sizeof(Out)>(to + i, &bits);
        }
    }
}
