// The classes that rows of logits are to be: targets, class weights, and what a row's loss and gradient are made of.
#pragma once
#include "vectors.cuh"

// 1 / ln 2 and ln 2: exponents are taken to base 2, which is what the machine has an instruction for.
constexpr float LOG2E = 1.44269504088896340736f, LN2 = 0.693147180559945309417f;

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

// The sum of 2^(v / ln 2 - largest) over a row's logits v, as loss and logsumexp.
struct RowLoss {
    float largest, log_sum;   // to base 2

    DEVICE RowLoss(float largest_exponent, float sum)
        : largest(largest_exponent == -INFINITY ? 0.0f : largest_exponent), log_sum(log2f(sum)) {}

    DEVICE float lse() const { return (largest + log_sum) * LN2; }

    // lse - v with nothing that cancels: both are taken relative to the largest.
    DEVICE float below(float v) const { return (log_sum - fmaf(v, LOG2E, -largest)) * LN2; }

    // The same of the target's logit, whose loss no rounding makes negative.
    DEVICE float loss(float v) const { return max_nan(below(v), 0.0f); }
};

// The sum of w * (v - zero) over a thread's logits, where `zero` is known only later. Each v is taken relative to an
// `anchor`, which is one of them: what large logits have in common is gone before anything is rounded.
struct Distances {
    float anchor = 0.0f, weights = 0.0f, sum = 0.0f;
    bool anchored = false;

    DEVICE void anchor_at(float v) {
        if (!anchored) anchor = v == -INFINITY ? 0.0f : v, anchored = true;
    }

    DEVICE void add(float v, float weight) {
        weights += weight;
        sum = fmaf(weight, v - anchor, sum);
    }

    // `above_anchor`: zero - anchor. Threads that have seen nothing add nothing, whatever it is.
    DEVICE float from(float above_anchor) const { return weights == 0.0f ? sum : fmaf(-weights, above_anchor, sum); }
};

// What a row's gradient is made of: dv_j = p_j * all - [j is the target] * target - w_j * each.
struct Slopes {
    float all, target, each;

    // `gradient`: of the row's loss; `count_gradient`: of its z-loss, which has another denominator.
    DEVICE Slopes(const Labels& labels, const Options& options, const Label& label, float lse, float gradient,
                  float count_gradient, float lse_gradient) {
        all = lse_gradient, target = each = 0.0f;
        if (label.ignored) return;
        const float share = options.smoothing / static_cast<float>(labels.classes);
        const float weights = options.weight_sum ? float_at(options.weight_sum) : static_cast<float>(labels.classes);
        target = gradient * (1.0f - options.smoothing) * label.weight;
        each = gradient * share;
        all = fmaf(each, weights, target) + fmaf(count_gradient * 2.0f * options.z_loss, lse, lse_gradient);
    }
};
