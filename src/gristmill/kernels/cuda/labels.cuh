// The classes that rows of logits are to be: targets, class weights, and what a row's loss and gradient are made of.
#pragma once
#include "reductions.cuh"
#include "vectors.cuh"

// 1 / ln 2 and ln 2: exponents are taken to base 2, which is what the machine has an instruction for.
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.693147180559945309417f;

// From a largest logit (or exponent) of this size on, and of rows that have none, a row is `far`: it is done once more, in a
// short loop that subtracts logits from each other before it scales them. Of all others an exponent is one fmaf,
// v * LOG2E - zero with zero = round(largest * LOG2E): exactly (v - largest) * LOG2E + d, with a d that a row's terms have
// in common, at most 1/16. Threads take nothing below FLOOR as their largest: beside a row that is not far it is 0.
constexpr float FAR = 1048576.0f, FLOOR = -4194304.0f;

DEVICE bool is_far(float largest) { return !(fabsf(largest) < FAR); }

// Rounded before anything is subtracted from it.
DEVICE float exponent_of(float logit) { return __fmul_rn(logit, LOG2E); }

struct Labels {
    const void* target;         // [rows], 64 or 32 bits each
    const float* weight;        // [classes], or null: all are 1
    long long ignore_index;
    long long first, classes;   // the logits are those of classes first, first + 1, ... of `classes`
    unsigned wide, debug;       // wide: targets have 64 bits; debug: a target that is no class stops the grid
};

struct Label {
    long long column;   // of the target among these logits; outside of them where another shard has it
    float weight;       // NaN if the target is no class
    bool ignored;

    // Whether the target is one of this row's columns.
    DEVICE bool within(unsigned columns) const { return !ignored && column >= 0 && column < columns && weight == weight; }
};

DEVICE long long target_of(const Labels& labels, long long row) {
    unsigned words[2];
    if (labels.wide) {
        load_global<8>(words, static_cast<const long long*>(labels.target) + row);
        return static_cast<long long>(static_cast<unsigned long long>(words[1]) << 32 | words[0]);
    }
    load_global<4>(words, static_cast<const int*>(labels.target) + row);
    return static_cast<int>(words[0]);
}

DEVICE float float_at(const float* pointer) {
    unsigned bits;
    load_global<4>(&bits, pointer);
    return __uint_as_float(bits);
}

DEVICE void put_float(float* pointer, float value) {
    const unsigned bits = __float_as_uint(value);
    store_global<4>(pointer, &bits);
}

// A weight that is NaN is no wild guess: it makes loss and gradient of this row NaN.
DEVICE Label label_from(const Labels& labels, long long target) {
    Label label{target - labels.first, 1.0f, target == labels.ignore_index};
    if (label.ignored) return label;
    if (target < 0 || target >= labels.classes) {
        if (labels.debug) stop_grid();
        label.weight = __uint_as_float(0x7fffffffu);
    } else if (labels.weight) {
        label.weight = float_at(labels.weight + target);
    }
    return label;
}

DEVICE Label label_of(const Labels& labels, long long row) { return label_from(labels, target_of(labels, row)); }

template <class T, int COUNT>
DEVICE void fill(Packed<T, COUNT>& vector, float value) {
    float values[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) values[k] = value;
    vector.set(values);
}

// A row as whole vectors, of which the first starts at column -shift: vectors first to last, and what is left of a RAGGED
// row at its ends, the columns before `front` and from `back` on.
template <bool RAGGED, int VEC>
struct Span {
    unsigned shift = 0, first = 0, last, front = 0, back;

    template <class T>
    DEVICE Span(const T* row, unsigned columns) {
        if constexpr (RAGGED) shift = shift_of(row), first = shift ? 1 : 0;
        last = (columns + shift) / VEC, back = columns;
        if constexpr (RAGGED) {
            front = min(first * (VEC - shift), columns);
            back = last > first ? last * VEC - shift : front;
        }
    }

    DEVICE unsigned column(unsigned vector) const { return vector * VEC - shift; }

    // The single elements of a thread, at most one at each end: there are fewer than VEC, and no fewer threads.
    DEVICE unsigned edge(int side, unsigned thread) const { return side == 0 ? thread : back + thread; }
    DEVICE bool has_edge(int side, unsigned thread, unsigned columns) const { return edge(side, thread) < (side == 0 ? front : columns); }
};

// A logit as the loss takes it: softcap * tanh(x / softcap), or x itself.
template <bool CAPPED>
struct Cap {
    float softcap, inverse;

    DEVICE float ratio(float x) const { return tanhf(x * inverse); }

    DEVICE float operator()(float x) const {
        if constexpr (CAPPED) return softcap * ratio(x);
        else return x;
    }
};

// The options of a loss.
struct Options {
    float smoothing, z_loss;
    float softcap, inverse_softcap;   // 1 and 1 without
    const float* weight_sum;          // of all classes' weights; null: there are none, and the sum is `classes`
};

// A row's largest logit and the sum of exp(v - largest) over its logits v, as loss and logsumexp. Of large logits their
// sum would keep the largest alone, so the two stay apart: in what follows, and in what the backward pass gets (`stats`).
struct RowLoss {
    float largest, log_sum;

    DEVICE RowLoss(float largest, float sum) : largest(MaxAndSum::base(largest)), log_sum(logf(sum)) {}

    DEVICE float lse() const { return largest + log_sum; }

    // lse - v with nothing that cancels: neither part is negative.
    DEVICE float below(float v) const { return (largest - v) + log_sum; }
};

// The same of a row that is not far from what a softmax of exponents has found: their largest, `zero`, and the sum of
// 2^(v * LOG2E - zero).
struct ExponentLoss {
    float zero, sum;

    DEVICE float lse() const {
        const float near = zero * LN2;
        return near + (logf(sum) - fmaf(near, LOG2E, -zero) * LN2);
    }

    // lse - v: never negative, and 0 of a logit that is alone.
    DEVICE float below(float v) const {
        const float above = fmaf(v, LOG2E, -zero);
        const bool largest = above > -0.125f;
        const float relative = fmaf(sum - exp2_fast(above), exp2_fast(-above), 1.0f);
        return max_nan((log2f(largest ? relative : sum) - (largest ? 0.0f : above)) * LN2, 0.0f);
    }
};

// MaxAndSum of logits v: the largest and the sum of 2^(v * LOG2E - exponent_of(largest)).
struct LogitTerms {
    static constexpr int floats = 2;
    float value[2] = {FLOOR, 0.0f};

    DEVICE float zero() const { return exponent_of(value[0]); }

    DEVICE void raise(float largest) {
        const float before = zero();
        value[0] = fmaxf(value[0], largest);
        value[1] *= exp2_fast(before - zero());
    }

    // The sum of exp(v - largest): 1 of a logit that is alone.
    DEVICE float sum() const {
        const float common = fmaf(value[0], LOG2E, -zero());
        return fmaf(value[1] - exp2_fast(common), exp2_fast(-common), 1.0f);
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
        value[0] = FLOOR, value[1] = 0.0f;
        each_slot(slots, [&](unsigned i) { value[0] = fmaxf(value[0], slots(i, 0)); });
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) value[0] = fmaxf(value[0], __shfl_xor_sync(0xffffffffu, value[0], distance));
        const float all = zero();
        each_slot(slots, [&](unsigned i) { value[1] = fmaf(slots(i, 1), exp2_fast(exponent_of(slots(i, 0)) - all), value[1]); });
        value[1] = lane_sum<32>(value[1]);
    }
};

// One more logit, far or not, with a `unit` of LOG2E.
DEVICE void add_logit(MaxAndSum& terms, float v) {
    terms.raise(v);
    terms.value[1] += exp2_fast((v - MaxAndSum::base(terms.value[0])) * LOG2E);
}

// The same number, of which the compiler does not know that: what is made of it waits in no register.
template <class Number>
DEVICE Number afresh(Number number) {
    unsigned zero = 0;
    asm volatile("" : "+r"(zero));
    return number + zero;
}

// body(x, column) for single elements of a row.
template <class T, class Body>
DEVICE void each_element(const T* row, unsigned first, unsigned columns, unsigned step, const Body& body) {
#pragma unroll 1
    for (unsigned column = first; column < columns; column += step) {
        Packed<T, 1> x;
        load<Tensor<T, sizeof(T)>>(x, row + column);
        body(x.get(0), column);
    }
}

// The sum of w * (v - zero) over a thread's logits, where `zero` is known only later. Each v is taken relative to the
// largest so far: what logits have in common is gone before anything is rounded, and terms of one sign cannot cancel.
struct Distances {
    float top = FLOOR, weights = 0.0f, sum = 0.0f;

    DEVICE void raise(float before, float next) { sum = above(next - before); }

    // Logits up to `largest` are to be added, with so much weight in all.
    DEVICE void raise(float largest) {
        raise(top, fmaxf(top, largest));
        top = fmaxf(top, largest);
    }

    DEVICE void weigh(float weight) { weights += weight; }
    DEVICE void add(float v, float weight) { add(v, weight, top); }
    DEVICE void add(float v, float weight, float top) { sum = fmaf(weight, v - top, sum); }

    // The sum relative to `zero`, of which zero - top is given.
    DEVICE float above(float distance) const { return fmaf(-weights, distance, sum); }
};

// What a row's gradient is made of: dv_j = power_j * all - w_j * each - [j is the target] * target, where power_j is
// exp(v_j - largest). The gradient of the loss may be as large as floats get: it is multiplied last, by what is no larger
// than its share in a result.
struct Slopes {
    float all = 0.0f, target = 0.0f, each = 0.0f;
    bool alike = false;   // a target that is alone has no gradient: power * all is `target`

    // `sum` and `lse()`: of the row. `gradient`: of the loss; `weights` and `count`: what a mean divides that of a row and
    // that of its z-loss by.
    template <bool SMOOTH, class Lse>
    DEVICE void set(const Labels& labels, const Options& options, const Label& label, float sum, const Lse& lse, float gradient,
                    float weights, float count, float lse_gradient) {
        const float inverse = reciprocal_fast(sum);
        all = lse_gradient * inverse;
        if (label.ignored) return;
        float own = label.weight, at_target = label.weight;
        // One class has all of it, to the bit.
        if (SMOOTH && labels.classes > 1) {
            const float share = options.smoothing / static_cast<float>(labels.classes);
            at_target = (1.0f - options.smoothing) * label.weight;
            own = fmaf(share, options.weight_sum ? float_at(options.weight_sum) : static_cast<float>(labels.classes), at_target);
            each = gradient * (share / weights);
        }
        at_target /= weights;
        own = SMOOTH ? own / weights : at_target;
        target = gradient * at_target;
        alike = (!SMOOTH || labels.classes == 1) && lse_gradient == 0.0f && options.z_loss == 0.0f;
        // A z-loss of 0 has no part in it, whatever lse is.
        if (options.z_loss != 0.0f) own += 2.0f * options.z_loss * lse() / count;
        all = fmaf(gradient, own * inverse, all);
    }

    // With the power of a row's largest, if it is alone, rounded as those of its elements are.
    DEVICE void alone(float power) {
        if (alike) target = __fmul_rn(power, all);
    }
};
