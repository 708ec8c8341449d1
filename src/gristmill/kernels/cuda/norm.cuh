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

    DEVICE void add(float x, float g = 0.0f) {
        Base::value[0] = fmaf(x, x, Base::value[0]);
        if constexpr (PRODUCTS) Base::value[1] = fmaf(x, g, Base::value[1]);
    }

    DEVICE void settle() {}
    DEVICE float centered(float x) const { return x; }
    DEVICE float normalised(float x, float factor) const { return x * factor; }
    DEVICE float spread() const { return Base::value[0]; }
    DEVICE float sum() const { return 0.0f; }
    DEVICE float product() const { return Base::value[Base::floats - 1]; }
};

// Where the moments of a row start (reductions.cuh): with the number of columns that the LANES lanes have, which is the
// same for every row, and with the mean of their first values.
template <bool CENTERED, int LANES>
struct Start {
    float count = 0.0f, inverse_first = 0.0f;

    // A thread has `vector` columns at each of `column` that lies before `end`; the first of them are its first values.
    template <int ITEMS>
    DEVICE Start(const unsigned (&column)[ITEMS], unsigned end, unsigned vector) {
        unsigned vectors = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) vectors += column[i] < end;
        set(vectors * vector, column[0] < end ? vector : 0);
    }

    DEVICE Start(unsigned columns, unsigned first) { set(columns, first); }

    // `sum`: of this thread's first values.
    DEVICE float center(float sum) const { return lane_sum<LANES>(sum) * inverse_first; }

  private:
    DEVICE void set(unsigned columns, unsigned first) {
        if constexpr (CENTERED) {
            count = lane_sum<LANES>(static_cast<float>(columns));
            const float firsts = lane_sum<LANES>(static_cast<float>(first));
            inverse_first = firsts > 0.0f ? 1.0f / firsts : 0.0f;
        }
    }
};
