// RMSNorm, forward: y = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset), where h is x, or x + residual.
//
// A team of threads (team.cuh) owns a row and keeps it on the chip between the one read and the one write (feed.cuh): the
// bytes that move are the bytes that must. A team with several rows fetches ahead and keeps its weights.
#include "feed.cuh"
#include "team.cuh"
#include "vectors.cuh"

struct ForwardParams {
    Source source;                // x and residual
    Rows y, sum;
    const void* weight;
    Meeting meeting;
    unsigned columns, share;      // share: columns of a row per block, a multiple of VEC
    float inverse_columns, eps, weight_offset;
};

// Held: the type in which h waits in registers, hence the one it is rounded to before it is normalised: x's own
// without a residual; with one, the type of `sum`, or float (then `sum` alone is rounded).
// Normalised, Product: the types that h * rstd and its product with the weight are rounded to (float: not rounded).
// ITEMS vectors of VEC elements per thread; HOLD: whether h waits in registers, or is read from the feed again;
// BOUND: the largest block.
template <class X, class Residual, class Weight, class Y, class Sum, class Held, class Normalised, class Product,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND) rms_norm_forward(const ForwardParams p) {
    using WeightElement = typename Weight::type;
    using SumElement = typename Sum::type;
    using Out = typename Y::type;
    // Stores that pass L1 by are for rows that come straight; else plain ones are faster (16384x16384 with residual: 515 us
    // against 520).
    constexpr bool in_l1 = FEED != STRAIGHT;
    Team<SCOPE, LANES, 1> team(p.meeting);
    launch_next_grid();

    const unsigned begin = min(team.member * p.share, p.columns);
    const unsigned end = min(begin + p.share, p.columns);
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = begin + (i * team.threads + team.thread) * VEC;
    Feed<X, Residual, NESTED, VEC, ITEMS, FEED> feed(p.source, team.teams, column, begin, end,
                                                       shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    Packed<WeightElement, VEC> weight[ITEMS];
    bool weight_loaded = !Weight::present;
    const auto get = [&](Packed<Held, VEC>& held, Packed<SumElement, VEC>& sum, int i) {
        Packed<typename X::type, VEC> x;
        Packed<typename Residual::type, VEC> residual;
        feed.get(x, residual, i, column[i]);
        if constexpr (Residual::present) {
            float h[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) h[k] = x.get(k) + residual.get(k);
            held.set(h);
            if constexpr (sizeof(SumElement) == sizeof(Held)) sum = held;
            else sum.set(h);
        } else {
            held = x;
        }
    };

    for (long long row = team.index; team.more(row, p.source.rows); row += team.teams) {
        const bool active = row < p.source.rows;
        const Place<NESTED> place(row, p.source.inner_rows);
        feed.arrive(row);
        if (!weight_loaded) {
            // After the first row's loads are on their way, not before.
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (column[i] < end) load<Weight>(weight[i], static_cast<const WeightElement*>(p.weight) + column[i]);
            weight_loaded = true;
        }

        Packed<Held, VEC> held[HOLD ? ITEMS : 1];
        Packed<SumElement, VEC> sum;
        Sums<1> squares;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            Packed<Held, VEC>& h = held[HOLD ? i : 0];
            get(h, sum, i);
            if constexpr (Residual::present)
                if (active) store<Sum, in_l1>(place.template in<SumElement>(p.sum) + column[i], sum);
#pragma unroll
            for (int k = 0; k < VEC; k++) squares.value[0] = fmaf(h.get(k), h.get(k), squares.value[0]);
        }
        team.reduce(squares);
        if (HOLD) feed.reuse(row);
        else if (row >= team.teams) feed.reuse(row - team.teams);
        const float rstd = rsqrtf(fmaf(squares.value[0], p.inverse_columns, p.eps));

#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            Packed<Held, VEC>& h = held[HOLD ? i : 0];
            if constexpr (!HOLD) get(h, sum, i);
            float value[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                value[k] = round_to<Normalised>(h.get(k) * rstd);
                if constexpr (Weight::present) value[k] = round_to<Product>(value[k] * (weight[i].get(k) + p.weight_offset));
            }
            if (active) {
                Packed<Out, VEC> out;
                out.set(value);
                store<Y, in_l1>(place.template in<Out>(p.y) + column[i], out);
            }
        }
        if constexpr (one_row(FEED)) break;
    }
    team.finish();
}

// The same without keeping the row: it (or the sum) is read twice, from memory and then from the cache where it still
// is. Few registers and no shared memory, so that SMs are full of threads; rows of any length; one row per team.
template <class X, class Residual, class Weight, class Y, class Sum, class Held, class Normalised, class Product,
          bool NESTED, Scope SCOPE, int VEC, int UNROLL, int BOUND>
__global__ void __launch_bounds__(BOUND) rms_norm_forward_twice(const ForwardParams p) {
    using WeightElement = typename Weight::type;
    using Out = typename Y::type;
    Team<SCOPE, 32, 1> team(p.meeting);
    launch_next_grid();
    const unsigned begin = min(team.member * p.share, p.columns) + team.thread * VEC;
    const unsigned end = min(team.member * p.share + p.share, p.columns);
    const unsigned step = team.threads * VEC;
    wait_for_previous_grid();
    const Place<NESTED> place(team.index, p.source.inner_rows);
    const auto* x_row = place.template in<const typename X::type>(p.source.first);
    const auto* residual_row = place.template in<const typename Residual::type>(p.source.second);
    Held* sum_row = place.template in<Held>(p.sum);

    // UNROLL vectors at a time, all loads first: the compiler moves no load across a store.
    Sums<1> squares;
    for (unsigned column = begin; column < end; column += UNROLL * step) {
        Packed<typename X::type, VEC> x[UNROLL];
        Packed<typename Residual::type, VEC> residual[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            x[i].clear(), residual[i].clear();
            if (column + i * step >= end) continue;
            load<X>(x[i], x_row + column + i * step);
            if constexpr (Residual::present) load<Residual>(residual[i], residual_row + column + i * step);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            Packed<Held, VEC> held;
            if constexpr (Residual::present) {
                float h[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) h[k] = x[i].get(k) + residual[i].get(k);
                held.set(h);
                if (column + i * step < end) store<Sum, true>(sum_row + column + i * step, held);
            } else {
                held = x[i];
            }
#pragma unroll
            for (int k = 0; k < VEC; k++) squares.value[0] = fmaf(held.get(k), held.get(k), squares.value[0]);
        }
    }
    team.reduce(squares);
    team.finish();
    const float rstd = rsqrtf(fmaf(squares.value[0], p.inverse_columns, p.eps));

    Out* y_row = place.template in<Out>(p.y);
    for (unsigned column = begin; column < end; column += UNROLL * step) {
        Packed<Held, VEC> h[UNROLL];
        Packed<WeightElement, VEC> weight[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const unsigned here = column + i * step;
            if (here >= end) continue;
            if constexpr (Residual::present) load<Sum>(h[i], static_cast<const Held*>(sum_row) + here);
            else load<X>(h[i], x_row + here);
            if constexpr (Weight::present) load<Weight>(weight[i], static_cast<const WeightElement*>(p.weight) + here);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (column + i * step >= end) continue;
            float value[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                value[k] = round_to<Normalised>(h[i].get(k) * rstd);
                if constexpr (Weight::present) value[k] = round_to<Product>(value[k] * (weight[i].get(k) + p.weight_offset));
            }
            Packed<Out, VEC> out;
            out.set(value);
            store<Y, true>(y_row + column + i * step, out);
        }
    }
}
