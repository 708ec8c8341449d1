// What the kernels of RMSNorm and LayerNorm share, forward and backward: the statistics of a row.
//
// CENTERED: LayerNorm, which takes the mean away; else RMSNorm, which does not. One face for both: add() what is in the
// row, agree on it as a team, then spread() is N times the mean square of centered(x).
#pragma once
#include "feed.cuh"
#include "team.cuh"

// PRODUCTS: for the backward pass; sum() is that of g, product() that of g * centered(x).
template <bool CENTERED, bool PRODUCTS>
struct Statistics : MomentsOf<PRODUCTS> {
    using MomentsOf<PRODUCTS>::MomentsOf;
    // Roundings may leave less than nothing where all values are the same; NaN stays NaN.
    DEVICE float spread() const { return max_nan(MomentsOf<PRODUCTS>::spread(), 0.0f); }

    // The mean, as what fp32 can hold of it and a rest: from the center on values near the mean would be rounded more
    // coarsely than they are wherever an outlier has drawn the center away from them.
    DEVICE void settle() {
        float &center = this->value[1], &offset = this->value[2];
        const float mean = center + offset, part = mean - center;
        offset = (center - (mean - part)) + (offset - part);
        center = mean;
    }
};

template <bool PRODUCTS>
struct Statistics<false, PRODUCTS> : Sums<PRODUCTS ? 2 : 1> {
    using Base = Sums<PRODUCTS ? 2 : 1>;

    DEVICE Statistics(float, float) {}

    template <int COUNT>
    DEVICE void add(const float (&x)[COUNT]) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) Base::value[0] = fmaf(x[k], x[k], Base::value[0]);
    }

    template <int COUNT>
    DEVICE void add(const float (&x)[COUNT], const float (&g)[COUNT]) {
        add(x);
#pragma unroll
        for (int k = 0; k < COUNT; k++) Base::value[1] = fmaf(x[k], g[k], Base::value[1]);
    }

    DEVICE void settle() {}
    DEVICE float centered(float x) const { return x; }
    DEVICE float normalised(float x, float factor) const { return x * factor; }
    DEVICE float spread() const { return Base::value[0]; }
    DEVICE float sum() const { return 0.0f; }
    DEVICE float product() const { return Base::value[Base::floats - 1]; }
};

// Where the moments of a row start (reductions.cuh): with the number of columns that the LANES lanes have, which is the
// same for every row, and near what most of their first values are, whatever a few of them are: each fourth of the lanes
// has a mean of its own, and the smallest and the largest of the four are left out.
template <bool CENTERED, int LANES>
struct Start {
    float count = 0.0f, inverse_first = 0.0f;

    // A thread has `vector` columns at each of `column` that lies before `end`.
    template <int ITEMS>
    DEVICE Start(const unsigned (&column)[ITEMS], unsigned end, unsigned vector) {
        unsigned vectors = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) vectors += column[i] < end;
        set(vectors * vector);
    }

    DEVICE explicit Start(unsigned columns) { set(columns); }

    // `first`: this thread's first value, 0 where it has none. Of eight lanes an eighth each: large numbers have a mean, too.
    DEVICE float center(float first) const {
        const float mean = fourth(first * 0.125f) * inverse_first;
        if constexpr (LANES < 4) return mean;
        const float other = __shfl_xor_sync(0xffffffffu, mean, 1), low = fminf(mean, other), high = fmaxf(mean, other);
        const float next = __shfl_xor_sync(0xffffffffu, low, 2), last = __shfl_xor_sync(0xffffffffu, high, 2);
        return 0.5f * fmaxf(low, next) + 0.5f * fminf(high, last);
    }

  private:
    // Over the lanes whose last two bits are this one's; over all if they are less than four.
    static DEVICE float fourth(float value) {
        if constexpr (LANES < 4) return lane_sum<LANES>(value);
#pragma unroll
        for (int distance = LANES / 2; distance > 2; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
        return value;
    }

    DEVICE void set(unsigned columns) {
        if constexpr (CENTERED) {
            count = lane_sum<LANES>(static_cast<float>(columns));
            const float firsts = fourth(columns > 0 ? 0.125f : 0.0f);
            // What has no values has a NaN for a mean, which no minimum or maximum takes.
            inverse_first = firsts > 0.0f ? 1.0f / firsts : count > 0.0f ? __uint_as_float(0x7fffffffu) : 0.0f;
        }
    }
};

// `first`, but not before `last` is there: the center needs a thread's first value alone, and all loads shall be under way
// before a warp waits for it. (An infinity makes NaN of the row, as it does anyway.)
DEVICE float after(float last, float first) { return fmaf(0.0f, last, first); }

template <int COUNT>
struct Values {
    float value[COUNT];
};

template <class T, int COUNT>
DEVICE Values<COUNT> values_of(const Packed<T, COUNT>& vector) {
    Values<COUNT> out;
#pragma unroll
    for (int k = 0; k < COUNT; k++) out.value[k] = vector.get(k);
    return out;
}

// 1 / sqrt(value), within a rounding: the instruction alone is off by two. Of 0 and infinity as it is.
DEVICE float inverse_root(float value) {
    const float near = rsqrtf(value), error = fmaf(-value * near, near, 1.0f);
    return fabsf(error) < 0.5f ? fmaf(0.5f * near, error, near) : near;
}
