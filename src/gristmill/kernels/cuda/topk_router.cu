// The experts of each token: topk_router() from routing scores to ids and weights, topk_router_backward() to the gradient of
// the logits.
//
// A warp has one token. Each lane holds ITEMS vectors of VEC experts: vector i of lane l begins at expert (i * 32 + l) * VEC,
// whatever the dtype, the strides and the alignment, so that a token's sums do not depend on where it lies. The experts are
// chosen one after another: the largest key of all lanes, of equal ones that of the lowest expert. That takes two reductions
// of the warp for each, and no memory.
//
// A key is a number as an unsigned integer of the same order: NaN above all, -0 as 0, and 0 for who takes no part.
#include "reductions.cuh"
#include "vectors.cuh"

constexpr int VEC = 4;
constexpr int GROUP_SHIFT = 22;         // expert * group_factor >> GROUP_SHIFT is its group
constexpr float SMALLEST_TOTAL = 1e-20f;   // added to the sum of sigmoids that weights are divided by

struct RouterParams {
    const void* logits;
    const void* bias;
    void* weights;                      // float [rows][topk]
    void* ids;                          // [rows][topk]
    long long row_stride, column_stride, bias_stride;   // in elements
    unsigned rows, experts, topk;
    unsigned groups, topk_groups;
    unsigned group_size, group_factor;
    unsigned group_span;                // the power of two from `groups` on
    float scale;
};

struct RouterBackwardParams {
    const void* logits;
    const void* ids;                    // any strides
    const void* dweights;               // any strides
    void* dlogits;                      // [rows][experts]
    long long row_stride, column_stride, ids_row, ids_column, dweights_row, dweights_column;   // in elements
    unsigned rows, experts, topk;
    float scale;
};

// ---- the warp ----

#ifdef GRISTMILL_EMULATION
template <class Choice>
DEVICE unsigned over_warp(unsigned value, const Choice& choice) {
    for (int distance = 16; distance > 0; distance /= 2) value = choice(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}
DEVICE unsigned warp_max(unsigned value) {
    return over_warp(value, [](unsigned a, unsigned b) { return max(a, b); });
}
DEVICE unsigned warp_min(unsigned value) {
    return over_warp(value, [](unsigned a, unsigned b) { return min(a, b); });
}
DEVICE unsigned warp_or(unsigned value) {
    return over_warp(value, [](unsigned a, unsigned b) { return a | b; });
}
#else
DEVICE unsigned warp_max(unsigned value) { return __reduce_max_sync(0xffffffffu, value); }
DEVICE unsigned warp_min(unsigned value) { return __reduce_min_sync(0xffffffffu, value); }
DEVICE unsigned warp_or(unsigned value) { return __reduce_or_sync(0xffffffffu, value); }
#endif

// ---- keys ----

DEVICE unsigned key_of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);   // -0 becomes 0
    const unsigned key = bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
    return value != value ? 0xffffffffu : key;
}

DEVICE float value_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// ---- scores ----

// e^value of a value that is not positive. The product with log2(e) is taken with what its rounding loses: of an exponent of
// 100 that would be a hundred times what a result may lose.
DEVICE float power(float value) {
    const float near = max_nan(value, -200.0f);   // far below what is left of it; an infinity has no rest
    const float exponent = near * 1.44269504f;
    const float rest = fmaf(near, 1.44269504f, -exponent) + near * 1.92596303e-8f;
    return fmaf(exp2_fast(exponent), rest * 0.693147181f, exp2_fast(exponent));
}

DEVICE float sigmoid(float value) {
    const float small = power(-fabsf(value));
    return (value < 0.0f ? small : 1.0f) / (1.0f + small);
}

// What a softmax over a token's logits is made of: e^(logit - base) / total.
struct Softmax {
    float base, share;   // 1 / total; 0 of a token with no logit above -infinity

    DEVICE Softmax(float largest) : base(MaxAndSum::base(largest)), share(0.0f) {}
    DEVICE float term(float logit) const { return power(logit - base); }
    DEVICE void divide_by(float total) { share = total == 0.0f ? 0.0f : 1.0f / total; }
    DEVICE float operator()(float logit) const { return term(logit) * share; }
};

// A lane's share of the scores of all lanes. Where a softmax has nothing, neither has anybody.
template <bool SIGMOID>
DEVICE float share_of(float score) {
    const float total = lane_sum<32>(score);
    if constexpr (SIGMOID) return score / (total + SMALLEST_TOTAL);
    else return total == 0.0f ? 0.0f : score / total;
}

// ---- a token's logits, and the bias ----

// Where the first expert of the lane's vector `item` is.
DEVICE unsigned vector_at(int item) { return (item * 32u + threadIdx.x % 32) * VEC; }

// One number for each expert.
template <class X, bool STRIDED>
struct Experts {
    using T = typename X::type;
    const T* row;
    long long stride;
    unsigned experts;

    DEVICE Experts(const void* data, long long offset, long long column_stride, unsigned count)
        : row(static_cast<const T*>(data) + offset), stride(STRIDED ? column_stride : 1), experts(count) {}

    DEVICE void vector(float (&out)[VEC], int item) const {
        const unsigned first = vector_at(item);
        if constexpr (STRIDED) {
#pragma unroll
            for (int k = 0; k < VEC; k++) out[k] = first + k < experts ? (*this)(first + k) : 0.0f;
        } else {
            Packed<T, VEC> packed;
            packed.clear();
            if (first < experts) load_inside<X>(packed, row, first, experts);
#pragma unroll
            for (int k = 0; k < VEC; k++) out[k] = packed.get(k);
        }
    }

    DEVICE float operator()(unsigned expert) const {
        Packed<T, 1> one;
        load_global<sizeof(T)>(one.words, row + expert * stride);
        return one.get(0);
    }
};

DEVICE long long token_of_warp() {
    return static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}

// The largest logit of the lane's experts, and the sum over them that belongs to it.
template <int ITEMS>
DEVICE Softmax softmax_of(const float (&logit)[ITEMS][VEC], unsigned experts) {
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++)
            if (vector_at(i) + k < experts) top = max(top, key_of(logit[i][k]));
    Softmax scores(value_of(warp_max(top)));
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        float term[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) term[k] = vector_at(i) + k < experts ? scores.term(logit[i][k]) : 0.0f;
        total += sum_of<VEC>(term);
    }
    scores.divide_by(lane_sum<32>(total));
    return scores;
}

// ---- groups ----

// Puts those out of `key` whose group is not among the best. BY_TWO: a group counts as the sum of its two largest, else as its
// largest. Lane g keeps the account of group g.
template <bool BY_TWO, int ITEMS>
DEVICE void keep_groups(unsigned (&key)[ITEMS][VEC], const RouterParams& p) {
    const unsigned lane = threadIdx.x % 32;
    unsigned own = 0;
#pragma unroll 2
    for (unsigned group = 0; group < p.groups; group++) {
        const unsigned begin = group * p.group_size;
        unsigned best = 0, second = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const unsigned here = vector_at(i) + k - begin < p.group_size ? key[i][k] : 0;
                if constexpr (BY_TWO) second = max(second, min(best, here));
                best = max(best, here);
            }
        const unsigned top = warp_max(best);
        unsigned score = top;
        if constexpr (BY_TWO) {
            const unsigned holder = warp_min(best == top ? lane : 32u);
            const unsigned next = warp_max(lane == holder ? second : best);
            if (p.group_size > 1) score = key_of(value_of(top) + value_of(next));
        }
        if (lane == group) own = score;
    }
    unsigned ahead = 0;   // groups that come before this lane's
    for (unsigned distance = 1; distance < p.group_span; distance++) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, own, distance);
        ahead += other > own || (other == own && (lane ^ distance) < lane);
    }
    const unsigned kept = warp_or(lane < p.groups && ahead < p.topk_groups ? 1u << lane : 0u);
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const unsigned group = (vector_at(i) + k) * p.group_factor >> GROUP_SHIFT;
            if (!(kept >> group % 32 & 1u)) key[i][k] = 0;
        }
}

// ---- the kernels ----

// X, BIAS: Tensors, or Absent for no bias. STRIDED: the logits of a token, or the bias, do not lie side by side. OF_CHOSEN: the
// weights of a softmax that are made to add up to one are a softmax over the chosen logits, for what the other experts have
// cancels. Scores of all experts are needed only for a bias, which may choose some that are too small for a float.
template <class X, class BIAS, class ID, int ITEMS, bool SIGMOID, bool RENORMALIZE, bool GROUPED, bool STRIDED>
__global__ void __launch_bounds__(256) topk_router(const __grid_constant__ RouterParams p) {
    constexpr bool OF_CHOSEN = !SIGMOID && RENORMALIZE;
    const unsigned lane = threadIdx.x % 32;
    const long long token = token_of_warp();
    wait_for_previous_grid();
    launch_next_grid();
    if (token >= p.rows) return;

    const Experts<X, STRIDED> logits(p.logits, token * p.row_stride, p.column_stride, p.experts);
    const Experts<BIAS, STRIDED> biases(p.bias, 0, p.bias_stride, p.experts);
    float logit[ITEMS][VEC], bias[ITEMS][VEC];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        logits.vector(logit[i], i);
        if constexpr (BIAS::present) biases.vector(bias[i], i);
    }
    Softmax softmax(0.0f);
    if constexpr (!SIGMOID && (BIAS::present || !OF_CHOSEN)) softmax = softmax_of(logit, p.experts);
    const auto score = [&](float value) { return SIGMOID ? sigmoid(value) : softmax(value); };

    // Without a bias logits are in the order of their scores, and have no more ties than they came with.
    unsigned key[ITEMS][VEC];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            float value = logit[i][k];
            if constexpr (BIAS::present) value = score(value) + bias[i][k];
            key[i][k] = vector_at(i) + k < p.experts ? key_of(value) : 0;
        }
    if constexpr (GROUPED) keep_groups<BIAS::present>(key, p);

    // Slot j is lane j's.
    unsigned own_key = 0, own_id = 0, first_key = 0;
    for (unsigned slot = 0; slot < p.topk; slot++) {
        unsigned best = 0, expert = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++)
                if (key[i][k] > best) best = key[i][k], expert = vector_at(i) + k;
        const unsigned top = warp_max(best), id = warp_min(best == top ? expert : 0xffffffffu);
        if (slot == 0) first_key = top;
        if (lane == slot) own_key = top, own_id = id;
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++)
                if (vector_at(i) + k == id) key[i][k] = 0;
    }

    const bool used = lane < p.topk;
    float own_logit = 0.0f, weight = 0.0f;
    if (used) own_logit = BIAS::present ? logits(own_id) : value_of(own_key);
    if constexpr (OF_CHOSEN) {
        // Without a bias the largest of all is the first, in groups too: they go by their largest.
        if constexpr (BIAS::present) first_key = warp_max(used ? key_of(own_logit) : 0);
        if (used) weight = Softmax(value_of(first_key)).term(own_logit);
        // One logit that is no number, or infinite, makes NaN of all scores, also where others are chosen.
        if (used && softmax.share != softmax.share) weight = softmax.share;
    } else if (used) {
        weight = score(own_logit);
    }
    if constexpr (RENORMALIZE) weight = share_of<SIGMOID>(weight);
    if (!used) return;
    const long long place = token * p.topk + lane;
    const unsigned bits = __float_as_uint(weight * p.scale), id[2] = {own_id, 0};
    store_global<4>(static_cast<float*>(p.weights) + place, &bits);
    store_global<sizeof(ID)>(static_cast<ID*>(p.ids) + place, id);
}

// The gradient of the logits, from that of the weights. With scores s of the chosen experts, d = scale * dweights and, where
// weights were made to add up to one, p = s / (sum of s):
//
//     sigmoid   dlogits = g s (1 - s), g = (d - sum of d p) / (sum of s); or g = d
//     softmax   dlogits = p (d - sum of d p); or s (d - sum of d s)
//
// and zeros for the other experts, but for the last one: there d is 0. So it alone has to look at all logits (ALL).
template <class X, class DX, class D, class ID, int ITEMS, bool SIGMOID, bool RENORMALIZE, bool STRIDED>
__global__ void __launch_bounds__(256) topk_router_backward(const __grid_constant__ RouterBackwardParams p) {
    constexpr bool ALL = !SIGMOID && !RENORMALIZE;
    using T = typename DX::type;
    const unsigned lane = threadIdx.x % 32;
    const long long token = token_of_warp();
    wait_for_previous_grid();
    launch_next_grid();
    if (token >= p.rows) return;

    const Experts<X, STRIDED> logits(p.logits, token * p.row_stride, p.column_stride, p.experts);
    const bool used = lane < p.topk;
    unsigned expert = 0;
    float gradient = 0.0f, own_logit = 0.0f;
    if (used) {
        // Ids are not negative and small: of eight bytes the lower four are enough.
        load_global<4>(&expert, static_cast<const ID*>(p.ids) + token * p.ids_row + lane * p.ids_column);
        Packed<D, 1> d;
        load_global<sizeof(D)>(d.words, static_cast<const D*>(p.dweights) + token * p.dweights_row + lane * p.dweights_column);
        gradient = d.get(0) * p.scale;
        expert = min(expert, p.experts - 1);   // whatever ids are given, nothing else is touched
        own_logit = logits(expert);
    }
    float logit[ALL ? ITEMS : 1][VEC];
    Softmax softmax(0.0f);
    float score;
    if constexpr (ALL) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) logits.vector(logit[i], i);
        softmax = softmax_of(logit, p.experts);
        score = softmax(own_logit);
    } else if constexpr (SIGMOID) {
        score = sigmoid(own_logit);
    } else {
        score = Softmax(value_of(warp_max(used ? key_of(own_logit) : 0))).term(own_logit);
    }
    if (!used) score = 0.0f;

    float own = gradient, mean = 0.0f;
    if constexpr (RENORMALIZE) {
        const float share = share_of<SIGMOID>(score);
        own -= lane_sum<32>(gradient * share);
        if constexpr (SIGMOID) own /= lane_sum<32>(score) + SMALLEST_TOTAL;
        else own *= share;
    } else if constexpr (ALL) {
        mean = lane_sum<32>(gradient * score);
        own = score * (gradient - mean);
    }
    // 1 - s as a sigmoid of its own: near 1 nothing would be left of a difference.
    if constexpr (SIGMOID) own *= score * sigmoid(-own_logit);

    T* row = static_cast<T*>(p.dlogits) + token * p.experts;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        float value[VEC] = {};
        if constexpr (ALL) {
#pragma unroll
            for (int k = 0; k < VEC; k++) value[k] = -mean * softmax(logit[i][k]);
        }
        Packed<T, VEC> packed;
        packed.set(value);
        if (vector_at(i) < p.experts) store_inside<DX, true>(row, vector_at(i), p.experts, packed);
    }
    __syncwarp();   // the chosen ones are written over
    if (!used) return;
    Packed<T, 1> one;
    one.set_pair(0, own, 0.0f);
    store_global<sizeof(T), true>(row + expert, one.words);
}
