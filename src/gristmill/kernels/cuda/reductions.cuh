// What a team can agree on: sums, maxima, the sum of a softmax, mean and variance.
//
// A reduction is a few floats, `value`, and two steps:
//   over_lanes<LANES>()  from each thread's share to that of its LANES lanes; every lane gets the same bits
//   over_slots(slots)    from `slots.count` such results to that of all; slots(i, k) is float k of the i-th. Called by
//                        whole warps, which all get the same bits
// Both add in a fixed order, so that a result does not depend on who came first.
#pragma once
#include "vectors.cuh"

template <int LANES>
DEVICE float lane_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// Several at once: shuffles are not reordered, and of one sum each waits for the one before.
template <int LANES, int COUNT>
DEVICE void lane_sums(float (&values)[COUNT]) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int k = 0; k < COUNT; k++) values[k] += __shfl_xor_sync(0xffffffffu, values[k], distance);
}

template <int LANES>
DEVICE float lane_max(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        value = max_nan(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// Results that wait in shared memory, side by side. SINGLE: no more than one for each lane of a warp.
template <int FLOATS, bool SINGLE>
struct SharedSlots {
    const float* data;
    unsigned count;
    DEVICE float operator()(unsigned i, int k) const { return data[i * FLOATS + k]; }
};

// Results of other blocks, in global memory.
template <int FLOATS>
struct GlobalSlots {
    const unsigned* data;
    unsigned count;
    DEVICE float operator()(unsigned i, int k) const { return __uint_as_float(load_acquire(data + i * FLOATS + k)); }
};

template <int FLOATS, class Body>
DEVICE void each_slot(const SharedSlots<FLOATS, true>& slots, const Body& body) {
    if (threadIdx.x % 32 < slots.count) body(threadIdx.x % 32);
}

template <class Slots, class Body>
DEVICE void each_slot(const Slots& slots, const Body& body) {
#pragma unroll 1
    for (unsigned i = threadIdx.x % 32; i < slots.count; i += 32) body(i);
}

template <int COUNT>
struct Sums {
    static constexpr int floats = COUNT;
    float value[COUNT];

    DEVICE Sums() { clear(); }

    template <int LANES>
    DEVICE void over_lanes() {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int k = 0; k < COUNT; k++) value[k] += __shfl_xor_sync(0xffffffffu, value[k], distance);
    }

    template <class Slots>
    DEVICE void over_slots(const Slots& slots) {
        clear();
        each_slot(slots, [&](unsigned i) {
#pragma unroll
            for (int k = 0; k < COUNT; k++) value[k] += slots(i, k);
        });
        over_lanes<32>();
    }

  private:
    DEVICE void clear() {
#pragma unroll
        for (int k = 0; k < COUNT; k++) value[k] = 0.0f;
    }
};

// The largest of values that are not negative; a NaN among them is the result.
struct Max {
    static constexpr int floats = 1;
    float value[1] = {0.0f};

    // The sizes of some numbers.
    template <int COUNT>
    DEVICE void add(const float (&values)[COUNT]) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) value[0] = max_nan(value[0], fabsf(values[k]));
    }

    template <int LANES>
    DEVICE void over_lanes() { value[0] = lane_max<LANES>(value[0]); }

    template <class Slots>
    DEVICE void over_slots(const Slots& slots) {
        value[0] = 0.0f;
        each_slot(slots, [&](unsigned i) { value[0] = max_nan(value[0], slots(i, 0)); });
        over_lanes<32>();
    }
};

// A softmax on the way: the largest exponent to base 2, and the sum of 2^(exponent - largest). Of exponents that are
// all -infinity, or of none, the sum is 0; a NaN among them is in the sum.
struct MaxAndSum {
    static constexpr int floats = 2;
    float value[2] = {-INFINITY, 0.0f};
    float unit = 1.0f;   // exponents are so many times what value[0] counts: differences are scaled, not large numbers

    // What exponents are taken relative to: never -infinity, which would leave NaN behind.
    static DEVICE float base(float largest) { return largest == -INFINITY ? 0.0f : largest; }

    // 2^(exponent - largest) of some more exponents is to be added: `largest` is that of those.
    DEVICE void raise(float largest) {
        const float next = fmaxf(value[0], largest);
        value[1] *= exp2_fast((value[0] - base(next)) * unit);
        value[0] = next;
    }

    template <int LANES>
    DEVICE void over_lanes() {
        float largest = value[0];
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        raise(largest);
        value[1] = lane_sum<LANES>(value[1]);
    }

    template <class Slots>
    DEVICE void over_slots(const Slots& slots) {
        value[0] = -INFINITY, value[1] = 0.0f;
        each_slot(slots, [&](unsigned i) { value[0] = fmaxf(value[0], slots(i, 0)); });
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) value[0] = fmaxf(value[0], __shfl_xor_sync(0xffffffffu, value[0], distance));
        const float zero = base(value[0]);
        each_slot(slots, [&](unsigned i) { value[1] = fmaf(slots(i, 1), exp2_fast((slots(i, 0) - zero) * unit), value[1]); });
        value[1] = lane_sum<32>(value[1]);
    }
};

// Mean and variance with nothing that cancels: `count` values have the mean center + offset, and the squares of their
// distances from it add up to `spread`.
//
// A thread starts with the count of its warp's LANES lanes, a center that they share (any value near the mean, as most
// values are), and its sums of (x - center) and of its square. PRODUCTS: two more sums, of g and of g * (x - center);
// the second becomes that of g * (x - mean).
template <bool PRODUCTS>
struct MomentsOf {
    static constexpr int floats = PRODUCTS ? 6 : 4;
    float value[floats];   // count, center, offset, spread [, sum of g, sum of g * (x - mean)]

    DEVICE MomentsOf(float count, float center) {
#pragma unroll
        for (int k = 0; k < floats; k++) value[k] = 0.0f;
        value[0] = count, value[1] = center;
    }

    // Some values, added up among themselves first: beside an outlier every addition loses a rounding of the outlier.
    template <int COUNT>
    DEVICE void add(const float (&x)[COUNT]) {
        float distance[COUNT], squares = COUNT > 1 ? 0.0f : value[3];
#pragma unroll
        for (int k = 0; k < COUNT; k++) distance[k] = x[k] - value[1], squares = fmaf(distance[k], distance[k], squares);
        value[2] += sum_of<COUNT>(distance);
        value[3] = COUNT > 1 ? value[3] + squares : squares;
    }

    template <int COUNT>
    DEVICE void add(const float (&x)[COUNT], const float (&g)[COUNT]) {
        add(x);
        float products = COUNT > 1 ? 0.0f : value[5];
#pragma unroll
        for (int k = 0; k < COUNT; k++) products = fmaf(g[k], x[k] - value[1], products);
        value[4] += sum_of<COUNT>(g);
        value[5] = COUNT > 1 ? value[5] + products : products;
    }

    DEVICE float count() const { return value[0]; }
    DEVICE float centered(float x) const { return (x - value[1]) - value[2]; }
    DEVICE float normalised(float x, float factor) const { return fmaf(x - value[1], factor, -value[2] * factor); }
    DEVICE float spread() const { return value[3]; }
    DEVICE float sum() const { return value[floats - 2]; }
    DEVICE float product() const { return value[floats - 1]; }

    template <int LANES>
    DEVICE void over_lanes() {
#pragma unroll
        for (int distance = LANES / 2; distance > 0; distance /= 2)
#pragma unroll
            for (int k = 2; k < floats; k++) value[k] += __shfl_xor_sync(0xffffffffu, value[k], distance);
        const float sum = value[2];
        value[2] = value[0] > 0.0f ? sum / value[0] : 0.0f;
        value[3] = fmaf(-sum, value[2], value[3]);
        if constexpr (PRODUCTS) value[5] = fmaf(-value[4], value[2], value[5]);
    }

    template <class Slots>
    DEVICE void over_slots(const Slots& slots) {
        // Distances from the mean of the first slot, which has values if any has, give the mean of all to a rounding of
        // such a distance; an outlier in the first makes it large. Distances from that mean give the rest.
        const auto distance = [&](unsigned i, float from) { return (slots(i, 1) - from) + slots(i, 2); };
        const float first = slots(0, 1) + slots(0, 2);
        float sums[2] = {0.0f, 0.0f};   // the count, and the distances from `first`
        each_slot(slots, [&](unsigned i) {
            sums[0] += slots(i, 0);
            sums[1] = slots(i, 0) > 0.0f ? fmaf(slots(i, 0), distance(i, first), sums[1]) : sums[1];
        });
        lane_sums<32>(sums);
        const float inverse_count = 1.0f / sums[0], center = fmaf(sums[1], inverse_count, first);
        float rest[floats - 2];   // offset, spread [, sum of g, sum of g * (x - center)]
#pragma unroll
        for (int k = 0; k < floats - 2; k++) rest[k] = 0.0f;
        each_slot(slots, [&](unsigned i) {
            if (slots(i, 0) == 0.0f) return;
            const float shift = distance(i, center);
            rest[0] = fmaf(slots(i, 0), shift, rest[0]);
            rest[1] += fmaf(slots(i, 0) * shift, shift, slots(i, 3));
            if constexpr (PRODUCTS) {
                rest[2] += slots(i, 4);
                rest[3] += fmaf(slots(i, 4), shift, slots(i, 5));
            }
        });
        lane_sums<32>(rest);
        value[0] = sums[0], value[1] = center, value[2] = rest[0] * inverse_count;
        value[3] = fmaf(-rest[0], value[2], rest[1]);
        if constexpr (PRODUCTS) {
            value[4] = rest[2];
            value[5] = fmaf(-rest[2], value[2], rest[3]);
        }
    }
};

using Moments = MomentsOf<false>;
using MomentsAndProducts = MomentsOf<true>;
