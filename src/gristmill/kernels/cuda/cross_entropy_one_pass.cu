// Cross entropy, loss and gradient at once: a row of logits is read once, and its gradient for a unit gradient of the loss
// is written once, over the logits themselves if they are the same tensor.
//
// The row waits on the chip between the two (softmax_rows.cuh), or is read twice where it would not fit. Formulas: see
// cross_entropy.cu and cross_entropy_backward.cu. What a mean is divided by is counted by a kernel before this one.
#include "labels.cuh"
#include "softmax_rows.cuh"

struct OnePassParams {
    Source source;                // logits; there is no second tensor
    Rows gradient;
    Labels labels;
    Options options;
    float *loss, *lse;            // [rows]
    const float* denominators;    // the two of a mean, or null
    unsigned columns, share;      // share: columns of a row per block, a multiple of VEC
    unsigned all_rows;            // lse of ignored rows is wanted, too
};

// Logits as exponents, and, with SMOOTH, the sum of their distances on the way.
template <int VEC, bool RAGGED, bool CAPPED, bool SMOOTH, bool WEIGHTS>
struct LogitExponents {
    static constexpr float unit = 1.0f;   // largest() is an exponent already
    using Weight = Tensor<float, VEC % 4 == 0 ? 16 : VEC % 2 == 0 ? 8 : 4>;
    const Cap<CAPPED> cap;
    const float* weight;
    const unsigned columns;
    Distances& distances;

    template <class T>
    DEVICE void raw(const Packed<T, VEC>& x, unsigned column, float (&out)[VEC]) const {
#pragma unroll
        for (int k = 0; k < VEC; k++) out[k] = RAGGED && column + k >= columns ? -INFINITY : cap(x.get(k));
        if constexpr (SMOOTH) {
            Packed<float, VEC> weights;
            if constexpr (WEIGHTS) load<Weight>(weights, weight + column);
            float top = out[0];
#pragma unroll
            for (int k = 1; k < VEC; k++) top = fmaxf(top, out[k]);
            distances.raise(top);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                if (RAGGED && column + k >= columns) continue;
                if constexpr (RAGGED || WEIGHTS) distances.weigh(WEIGHTS ? weights.get(k) : 1.0f);
                distances.add(out[k], WEIGHTS ? weights.get(k) : 1.0f);
            }
            if constexpr (!RAGGED && !WEIGHTS) distances.weigh(VEC);
        }
    }

    static DEVICE float largest(float raw) { return fmaxf(exponent_of(raw), exponent_of(FLOOR)); }
    static DEVICE void above(const float (&raw)[VEC], float zero, float (&out)[VEC]) {
#pragma unroll
        for (int k = 0; k < VEC; k++) out[k] = fmaf(raw[k], LOG2E, -zero);
    }
    static DEVICE float power(float above) { return exp2_fast(above); }
};

// `own`: how far the target's logit is below lse; `distance`: the sum of w * (v - lse).
template <bool SMOOTH>
DEVICE void put_loss(const OnePassParams& p, const Label& label, long long row, float lse, float own, float distance) {
    float loss = 0.0f;
    if (!label.ignored) {
        loss = (1.0f - p.options.smoothing) * label.weight * own;
        if constexpr (SMOOTH) loss = fmaf(-p.options.smoothing / static_cast<float>(p.columns), distance, loss);
        // With a denominator of its own z-loss is added up from lse.
        if (p.options.z_loss != 0.0f && !(p.denominators && p.labels.weight)) loss = fmaf(p.options.z_loss * lse, lse, loss);
    }
    put_float(p.loss + row, loss);
    put_float(p.lse + row, label.ignored && !p.all_rows ? 0.0f : lse);
}

// The whole of a row that is `far`, from memory: nothing of it has been written yet. `first`, `step` and `end`: of the
// columns of this thread's vectors.
template <class T, int VEC, bool RAGGED, bool CAPPED, bool SMOOTH, bool WEIGHTS>
struct FarRow {
    const OnePassParams& p;
    const T* const x_row;
    const bool far;
    const unsigned first, step, end;

    template <class Body>
    DEVICE void each(const Body& body) const {
        if (!far) return;
        // A ragged row's first vector may start before it.
#pragma unroll 1
        for (unsigned column = first; starts_before<RAGGED>(column, end); column += (column + 1 - first) % VEC == 0 ? step - VEC + 1 : 1) {
            if (RAGGED && column >= p.columns) continue;
            Packed<T, 1> x;
            load<Tensor<T, sizeof(T)>>(x, x_row + column);
            body(x.get(0), column);
        }
    }

    DEVICE float weight(unsigned column) const { return WEIGHTS ? float_at(p.labels.weight + column) : 1.0f; }

    template <class Members>
    DEVICE void write(Members& team, long long row, T* out_row) const {
        const Cap<CAPPED> cap{p.options.softcap, p.options.inverse_softcap};
        Label label{0, 0.0f, true};
        if (far) label = label_of(p.labels, row);
        const bool here = label.within(p.columns);
        const unsigned hot = here ? static_cast<unsigned>(label.column) : ~0u;
        bool writer = !here && team.member == 0 && team.thread == 0;
        float v = 0.0f;
        MaxAndSum terms;
        terms.unit = LOG2E;
        each([&](float x, unsigned column) {
            add_logit(terms, cap(x));
            if (column == hot) writer = true, v = cap(x);
        });
        team.reduce(terms);
        const RowLoss sums(terms.value[0], terms.value[1]);
        Sums<1> distance;
        if constexpr (SMOOTH) {
            each([&](float x, unsigned column) { distance.value[0] = fmaf(-weight(column), sums.below(cap(x)), distance.value[0]); });
            team.reduce(distance);
        }
        if (!far) return;
        Slopes slopes;
        const float weights = p.denominators ? float_at(p.denominators) : 1.0f, count = p.denominators ? float_at(p.denominators + 1) : 1.0f;
        slopes.set<SMOOTH>(p.labels, p.options, label, terms.value[1], [&] { return sums.lse(); }, 1.0f, weights, count, 0.0f);
        each([&](float x, unsigned column) {
            float ratio = 0.0f, value = x;
            if constexpr (CAPPED) ratio = cap.ratio(x), value = cap.softcap * ratio;
            value = exp2_fast((value - sums.largest) * LOG2E);
            value = SMOOTH ? fmaf(value, slopes.all, -slopes.each * weight(column)) : __fmul_rn(value, slopes.all);
            if (column == hot) value -= slopes.target;
            if constexpr (CAPPED) value *= fmaf(-ratio, ratio, 1.0f);
            Packed<T, 1> out;
            out.set({label.ignored ? 0.0f : value});
            store<Tensor<T, sizeof(T)>>(out_row + column, out);
        });
        if (writer) put_loss<SMOOTH>(p, label, row, sums.lse(), here ? sums.below(v) : 0.0f, distance.value[0]);
    }
};

// From the sum of a row to its loss and its gradient.
template <class Out, int VEC, bool RAGGED, bool CAPPED, bool SMOOTH, bool WEIGHTS, class Members>
struct LossEpilogue {
    using T = typename Out::type;
    using Weight = Tensor<float, VEC % 4 == 0 ? 16 : VEC % 2 == 0 ? 8 : 4>;
    static constexpr bool exponents = CAPPED;   // the slope of the cap is a function of v
    static DEVICE bool takes(unsigned) { return false; }

    const OnePassParams& p;
    Members& team;
    Distances& distances;
    const Label label;
    const long long index;      // of the row
    T* const out_row;
    const float v;              // of the target, in the thread that writes the loss
    bool active;                // the row is written here
    const bool writer;
    const float weights, count; // what a mean is divided by
    const unsigned hot;         // the target's column, or one that no row has
    float zero = 0.0f;
    Slopes slopes;
    bool nothing = false, far = false;

    DEVICE void row(float largest, float sum) {
        nothing = label.ignored;
        zero = MaxAndSum::base(largest);
        Sums<1> distance;
        const ExponentLoss sums{zero, sum};
        if constexpr (SMOOTH) {
            distance.value[0] = distances.above(sums.below(distances.top));
            team.reduce(distance);
        }
        far = active && (!nothing || p.all_rows) && is_far(largest);
        if (far) active = false;
        // Of a logarithm only those who need it: the others wait for nothing.
        if (active && !nothing) {
            slopes.template set<SMOOTH>(p.labels, p.options, label, sum, [&] { return sums.lse(); }, 1.0f, weights, count, 0.0f);
            if (sum < 1.0625f) slopes.alone(sum);
        }
        if (writer && !far) put_loss<SMOOTH>(p, label, index, sums.lse(), hot != ~0u ? sums.below(v) : 0.0f, distance.value[0]);
    }

    DEVICE void vector(unsigned column, const float (&value)[VEC], float factor) const {
        if (!active) return;
        if (nothing) {
            const float zeros[VEC] = {};
            put(column, zeros);
            return;
        }
        const unsigned hit = hot - column;
        Packed<float, VEC> weights;
        if constexpr (WEIGHTS) load<Weight>(weights, p.labels.weight + column);
        const float scale = CAPPED ? slopes.all : slopes.all * factor;
        float slope[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            const float power = CAPPED ? exp2_fast(value[k]) : value[k];
            slope[k] = SMOOTH ? fmaf(power, scale, -slopes.each * (WEIGHTS ? weights.get(k) : 1.0f)) : __fmul_rn(power, scale);
        }
        if (hit < VEC)
#pragma unroll
            for (int k = 0; k < VEC; k++)
                if (hit == k) slope[k] -= slopes.target;
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            if constexpr (CAPPED) {
                const float ratio = (value[k] + zero) * LN2 * p.options.inverse_softcap;
                slope[k] *= fmaf(-ratio, ratio, 1.0f);
            }
        }
        put(column, slope);
    }

    DEVICE void put(unsigned column, const float (&slope)[VEC]) const {
        Packed<T, VEC> out;
        out.set(slope);
        if constexpr (RAGGED) store_inside<Out>(out_row, column, p.columns, out);
        else store<Out>(out_row + column, out);
    }
};

// Two blocks of many threads fit on an SM if ragged rows take no more registers than aligned ones; 0 leaves it to the compiler.
template <class X, class Out, bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, bool RAGGED,
          bool CAPPED, bool SMOOTH, bool WEIGHTS, int BOUND>
__global__ void __launch_bounds__(BOUND, RAGGED && !HOLD && BOUND > 768 ? 2 : 0) cross_entropy_one_pass(const OnePassParams p) {
    using T = typename X::type;
    using Members = Team<SCOPE, LANES, 2>;
    using Exponents = LogitExponents<VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS>;
    using Epilogue = LossEpilogue<Out, VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS, Members>;
    static_assert(!(RAGGED && WEIGHTS), "weights are not shifted as the rows are");
    Members team(Meeting{});
    launch_next_grid();
    // A ragged row is the only one of its team.
    const T* only_row = Place<NESTED>(team.index, p.source.inner_rows).template in<const T>(p.source.first);
    const unsigned begin = team.member * p.share - (RAGGED ? shift_of(only_row) : 0);
    const unsigned end = RAGGED ? static_cast<unsigned>(min(static_cast<int>(begin + p.share), static_cast<int>(p.columns)))
                                : max(begin, min(begin + p.share, p.columns));
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = begin + (i * team.threads + team.thread) * VEC;
    Feed<X, Absent, NESTED, VEC, ITEMS, FEED, RAGGED> feed(p.source, team.teams, column, begin, end,
                                                             shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    // The target is on its way before the row, which does not wait for it: an ignored row is read in vain.
    long long first_target = 0;
    if (team.index < p.source.rows) first_target = target_of(p.labels, team.index);
    float weights = 1.0f, count = 1.0f;
    if (p.denominators) weights = float_at(p.denominators), count = float_at(p.denominators + 1);
    feed.prime(team.index);

    for (long long row = team.index; team.more(row, p.source.rows); row += team.teams) {
        const bool active = row < p.source.rows;
        const Place<NESTED> place(row, p.source.inner_rows);
        Label label{0, 0.0f, true};
        if constexpr (FEED == STRAIGHT) feed.arrive(row);
        if (active) label = one_row(FEED) ? label_from(p.labels, first_target) : label_of(p.labels, row);
        const bool here = label.within(p.columns);
        // The thread that overwrites the target's logit reads it: nobody else could know when.
        bool writer = active && !here && team.member == 0 && team.thread == 0;
        if (here && starts_before<RAGGED>(static_cast<unsigned>(label.column), end)) {
            const unsigned offset = static_cast<unsigned>(label.column) - begin;
            writer = offset < ITEMS * team.threads * VEC && offset / VEC % team.threads == team.thread;
        }
        Packed<T, 1> logit;
        logit.clear();
        if (here && writer)
            load<Tensor<T, sizeof(T)>>(logit, place.template in<const T>(p.source.first) + label.column);
        const Cap<CAPPED> cap{p.options.softcap, p.options.inverse_softcap};
        Distances distances;
        Epilogue epilogue{p, team, distances, label, row, place.template in<T>(p.gradient), cap(logit.get(0)), active, writer, weights, count, here ? static_cast<unsigned>(label.column) : ~0u};
        if (one_row(FEED) && SCOPE != WARP && label.ignored && !p.all_rows) {
            const float zeros[VEC] = {};
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (starts_before<RAGGED>(column[i], end)) epilogue.put(column[i], zeros);
            if (writer) put_float(p.loss + row, 0.0f), put_float(p.lse + row, 0.0f);
            if constexpr (FEED == ASYNC) feed.arrive(row);   // no block may leave while copies are on their way
            break;
        }
        const Exponents exponents{cap, p.labels.weight, p.columns, distances};
        if constexpr (FEED != STRAIGHT) feed.arrive(row);
        softmax_row<HOLD, RAGGED, VEC>(team, feed, row, column, end, exponents, epilogue);
        if (team.any(epilogue.far)) {
            // Last, from memory: nothing of it waits in a register beside the row.
            const Place<NESTED> again(active ? row : 0, p.source.inner_rows);
            const FarRow<T, VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS> rest{p, again.template in<const T>(p.source.first), epilogue.far, column[0], team.threads * VEC, end};
            rest.write(team, row, again.template in<T>(p.gradient));
        }
        if constexpr (one_row(FEED)) break;
    }
    team.finish();
}

// The same without keeping the row: it is read twice. Any length.
template <class X, class Out, bool NESTED, Scope SCOPE, int VEC, int UNROLL, bool RAGGED, bool CAPPED, bool SMOOTH, bool WEIGHTS,
          int BOUND>
__global__ void __launch_bounds__(BOUND) cross_entropy_one_pass_twice(const OnePassParams p) {
    using T = typename X::type;
    using Members = Team<SCOPE, 32, 2>;
    using Exponents = LogitExponents<VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS>;
    using Epilogue = LossEpilogue<Out, VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS, Members>;
    static_assert(!(RAGGED && WEIGHTS), "weights are not shifted as the rows are");
    Members team(Meeting{});
    launch_next_grid();
    wait_for_previous_grid();
    const long long row = team.index;
    const Place<NESTED> place(row, p.source.inner_rows);
    const T* x_row = place.template in<const T>(p.source.first);
    const unsigned begin = team.member * p.share - (RAGGED ? shift_of(x_row) : 0);
    const unsigned end = RAGGED ? static_cast<unsigned>(min(static_cast<int>(begin + p.share), static_cast<int>(p.columns)))
                                : min(begin + p.share, p.columns);
    const unsigned first = begin + team.thread * VEC, step = team.threads * VEC;
    const Label label = label_of(p.labels, row);
    const bool here = label.within(p.columns);
    const unsigned offset = static_cast<unsigned>(label.column) - first;
    const bool owner = here && static_cast<int>(offset) >= 0 && starts_before<RAGGED>(static_cast<unsigned>(label.column), end) && offset % step < VEC;
    const bool writer = here ? owner : team.member == 0 && team.thread == 0;
    float weights = 1.0f, count = 1.0f;
    if (p.denominators) weights = float_at(p.denominators), count = float_at(p.denominators + 1);
    Packed<T, 1> logit;
    logit.clear();
    if (owner) load<Tensor<T, sizeof(T)>>(logit, x_row + label.column);
    const Cap<CAPPED> cap{p.options.softcap, p.options.inverse_softcap};
    Distances distances;
    Epilogue epilogue{p, team, distances, label, row, place.template in<T>(p.gradient), cap(logit.get(0)), true, writer, weights, count, here ? static_cast<unsigned>(label.column) : ~0u};
    if (label.ignored && !p.all_rows) {
        const float zeros[VEC] = {};
        for (unsigned column = first; starts_before<RAGGED>(column, end); column += step) epilogue.put(column, zeros);
        if (writer) put_float(p.loss + row, 0.0f), put_float(p.lse + row, 0.0f);
    } else {
        const Exponents exponents{cap, p.labels.weight, p.columns, distances};
        softmax_row_twice<X, RAGGED, VEC, UNROLL>(team, x_row, first, step, end, end, exponents, epilogue);
        const FarRow<T, VEC, RAGGED, CAPPED, SMOOTH, WEIGHTS> rest{p, x_row, epilogue.far, first, step, end};
        if (epilogue.far) rest.write(team, row, place.template in<T>(p.gradient));
    }
    team.finish();
}
