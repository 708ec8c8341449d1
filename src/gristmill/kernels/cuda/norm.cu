// RMSNorm and LayerNorm, forward. With h = x, or x + residual, over N columns:
//
//     RMSNorm    z = h * rsqrt(mean(h^2) + eps) * (weight + weight_offset)
//     LayerNorm  z = (h - mean(h)) * rsqrt(mean((h - mean(h))^2) + eps) * (weight + weight_offset) + bias
//
// and y = z, or z * (1 / scale) in FP8.
//
// A team of threads (team.cuh) owns a row and keeps it on the chip between the one read and the one write (feed.cuh): the
// bytes that move are the bytes that must. A team with several rows fetches ahead and keeps its weights.
#include "norm.cuh"

// What y is scaled by, for FP8. GIVEN: one scale for the whole tensor, which is read. PER_ROW: that with which the row's
// largest |z| becomes the largest number of E4M3; it is written, one for each row.
enum Scaling { UNSCALED, GIVEN, PER_ROW };

struct ForwardParams {
    Source source;                // x and residual
    Rows y, sum;
    const void* weight;
    Meeting meeting;
    unsigned columns, share;      // share: columns of a row per block, a multiple of VEC
    float inverse_columns, eps, weight_offset;
    const void* bias;
    float* scale;                 // [1] or [rows]
    unsigned* amax;               // the largest |z| of all so far, as bits; zeroed by the host
};

// Blocks on an SM that the compiler has to leave room for; 0: as it thinks best. To have more of them it spills a few words
// of some kernels that give FP8; with 1 it does not.
constexpr DEVICE int least_blocks(Scope scope, Scaling scaling, bool amax) {
    return scaling != UNSCALED && (scope == GRID || (scope == WARP && amax)) ? 1 : 0;
}

// h * rstd as it goes on: rounded where the types ask for it (float: not rounded), times the weight, plus the bias.
template <class Weight, class Bias, class Normalised, class Product, int VEC>
DEVICE float transformed(float normalised, const Packed<typename Weight::type, VEC>& weight,
                         const Packed<typename Bias::type, VEC>& bias, int k, float weight_offset) {
    static_assert(!Bias::present || sizeof(Product) == 4, "what has a bias is rounded once, at the end");
    const float value = round_to<Normalised>(normalised);
    if constexpr (Weight::present && Bias::present) return fmaf(value, weight.get(k) + weight_offset, bias.get(k));
    else if constexpr (Weight::present) return round_to<Product>(value * (weight.get(k) + weight_offset));
    else if constexpr (Bias::present) return value + bias.get(k);
    else return value;
}

// The scale of a row: never so small that its inverse is infinite; NaN where the row has a NaN. A division would call a
// function where its operands are extreme, and what waits in registers around a call may be spilled.
DEVICE float row_scale(float largest) {
    const float near = largest * (1.0f / 448.0f), rest = fmaf(-448.0f, near, largest);
    // The rest of an infinity is a NaN.
    return max_nan(rest == rest ? fmaf(rest, 1.0f / 448.0f, near) : near, 0x1p-126f);
}

template <Scaling SCALING, int COUNT>
DEVICE void scale_by(float (&values)[COUNT], float inverse_scale) {
    if constexpr (SCALING != UNSCALED) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) values[k] *= inverse_scale;
    }
}

// 1 / value, of 0 and infinity, too, and exact for powers of two; likewise without a call.
DEVICE float inverse(float value) {
    const float near = reciprocal_fast(value), error = fmaf(-value, near, 1.0f);
    return fabsf(error) < 0.5f ? fmaf(near, error, near) : near;
}

DEVICE float load_float(const float* pointer) {
    unsigned bits;
    load_global<4>(&bits, pointer);
    return __uint_as_float(bits);
}

DEVICE void store_float(float* pointer, float value) {
    const unsigned bits = __float_as_uint(value);
    store_global<4>(pointer, &bits);
}

// Nearly all have nothing to add to what others have found: those read, and leave the line to the readers.
DEVICE void raise_amax(unsigned* amax, float largest) {
    const unsigned bits = __float_as_uint(largest);
    if (bits > load_acquire(amax)) atomic_max(amax, bits);
}

// Held: the type in which h waits in registers, hence the one it is rounded to before it is normalised: x's own
// without a residual; with one, the type of `sum`, or float (then `sum` alone is rounded).
// Normalised, Product: the types that h * rstd and its product with the weight are rounded to (float: not rounded).
// SCALING, AMAX: what y is scaled by, and whether the largest |z| is wanted, too.
// ITEMS vectors of VEC elements per thread; HOLD: whether h waits in registers, or is read from the feed again;
// BOUND: the largest block.
template <class X, class Residual, class Weight, class Bias, class Y, class Sum, class Held, class Normalised, class Product,
          bool CENTERED, Scaling SCALING, bool AMAX,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND, least_blocks(SCOPE, SCALING, AMAX)) norm_forward(const ForwardParams p) {
    using WeightElement = typename Weight::type;
    using BiasElement = typename Bias::type;
    using SumElement = typename Sum::type;
    using Out = typename Y::type;
    using RowStatistics = Statistics<CENTERED, false>;
    // Stores that pass L1 by are for rows that come straight; else plain ones are faster (16384x16384 with residual: 515 us
    // against 520).
    constexpr bool in_l1 = FEED != STRAIGHT;
    Team<SCOPE, LANES, RowStatistics::floats> team(p.meeting);
    launch_next_grid();

    const unsigned begin = min(team.member * p.share, p.columns);
    const unsigned end = min(begin + p.share, p.columns);
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = begin + (i * team.threads + team.thread) * VEC;
    const Start<CENTERED, LANES> start(column, end, VEC);
    Feed<X, Residual, NESTED, VEC, ITEMS, FEED> feed(p.source, team.teams, column, begin, end,
                                                       shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    // A weight and a bias that are used once come while the team agrees, two vectors at a time: more would take the registers
    // that another block needs (H200, 16384x16384, one row at a time: 267 us, 315 with four).
    constexpr bool late = Bias::present && one_row(FEED) && ITEMS * VEC * (sizeof(WeightElement) + sizeof(BiasElement)) > 64;
    constexpr int batch = late && ITEMS > 2 ? 2 : ITEMS;
    Packed<WeightElement, VEC> weight[batch];
    Packed<BiasElement, VEC> bias[batch];
    bool weight_loaded = late || (!Weight::present && !Bias::present);
    const auto load_weights = [&](int first) {
#pragma unroll
        for (int j = 0; j < batch; j++) {
            const int i = first + j < ITEMS ? first + j : ITEMS - 1;
            if (first + j >= ITEMS || column[i] >= end) continue;
            if constexpr (Weight::present) load<Weight>(weight[j], static_cast<const WeightElement*>(p.weight) + column[i]);
            if constexpr (Bias::present) load<Bias>(bias[j], static_cast<const BiasElement*>(p.bias) + column[i]);
        }
    };
    float inverse_scale = 1.0f;
    if constexpr (SCALING == GIVEN) inverse_scale = inverse(load_float(p.scale));
    Max largest;   // |z| of this thread's rows so far
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
            load_weights(0);
            weight_loaded = true;
        }

        Packed<Held, VEC> held[HOLD ? ITEMS : 1];
        Packed<SumElement, VEC> sum;
        float center = 0.0f;
        if constexpr (CENTERED) {
            if (column[0] < end) {
                get(held[0], sum, 0);
                center = held[0].get(0);
                if constexpr (FEED == STRAIGHT && ITEMS > 1) {
                    Packed<typename X::type, VEC> last;
                    Packed<typename Residual::type, VEC> beside;
                    feed.get(last, beside, ITEMS - 1, column[ITEMS - 1]);
                    center = after(last.get(0), center);
                }
            }
            center = start.center(center);
        }
        RowStatistics statistics(start.count, center);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            Packed<Held, VEC>& h = held[HOLD ? i : 0];
            get(h, sum, i);
            if constexpr (Residual::present)
                if (active) store<Sum, in_l1>(place.template in<SumElement>(p.sum) + column[i], sum);
            statistics.add(values_of(h).value);
        }
        if constexpr (late) load_weights(0);
        team.reduce(statistics);
        statistics.settle();
        if (HOLD) feed.reuse(row);
        else if (row >= team.teams) feed.reuse(row - team.teams);
        const float rstd = inverse_root(fmaf(statistics.spread(), p.inverse_columns, p.eps));

        // Once, to write y; with a scale of its own first once for the largest |z|.
        constexpr int passes = SCALING == PER_ROW ? 2 : 1;
#pragma unroll
        for (int pass = 1; pass <= passes; pass++) {
            Max here;
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                if (late && i % batch == 0 && (i > 0 || pass > 1)) load_weights(i);
                if (column[i] >= end) continue;
                Packed<Held, VEC>& h = held[HOLD ? i : 0];
                if constexpr (!HOLD) get(h, sum, i);
                float value[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++)
                    value[k] = transformed<Weight, Bias, Normalised, Product, VEC>(
                        statistics.normalised(h.get(k), rstd), weight[i % batch], bias[i % batch], k, p.weight_offset);
                if (pass < passes) {
                    here.add(value);
                } else if (active) {
                    if constexpr (AMAX && SCALING != PER_ROW) largest.add(value);
                    scale_by<SCALING>(value, inverse_scale);
                    Packed<Out, VEC> out;
                    out.set(value);
                    store<Y, in_l1>(place.template in<Out>(p.y) + column[i], out);
                }
            }
            if (pass == passes) break;
            team.reduce(here);
            const float scale = row_scale(here.value[0]);
            inverse_scale = inverse(scale);
            if (active) {
                if (team.thread == 0 && team.member == 0) store_float(p.scale + row, scale);
                if constexpr (AMAX) largest.add(here.value);
            }
        }
        if constexpr (one_row(FEED)) break;
    }
    if constexpr (AMAX) {
        team.reduce(largest);
        if (team.thread == 0 && team.member == 0) raise_amax(p.amax, largest.value[0]);
    }
    team.finish();
}

// The same without keeping the row: it (or the sum) is read twice, from memory and then from the cache where it still
// is (PER_ROW: three times). Few registers and no shared memory, so that SMs are full of threads; rows of any length;
// one row per team.
template <class X, class Residual, class Weight, class Bias, class Y, class Sum, class Held, class Normalised, class Product,
          bool CENTERED, Scaling SCALING, bool AMAX, bool NESTED, Scope SCOPE, int VEC, int UNROLL, int BOUND>
__global__ void __launch_bounds__(BOUND) norm_forward_twice(const ForwardParams p) {
    using WeightElement = typename Weight::type;
    using BiasElement = typename Bias::type;
    using Out = typename Y::type;
    using RowStatistics = Statistics<CENTERED, false>;
    Team<SCOPE, 32, RowStatistics::floats> team(p.meeting);
    launch_next_grid();
    const unsigned begin = min(team.member * p.share, p.columns) + team.thread * VEC;
    const unsigned end = min(team.member * p.share + p.share, p.columns);
    const unsigned step = team.threads * VEC;
    // Where lanes have to find a center together they all go on until the block's last column.
    const unsigned lag = CENTERED ? team.thread * VEC : 0;
    const unsigned vectors = begin < end ? (end - begin + step - 1) / step : 0;
    const Start<CENTERED, 32> start(vectors * VEC);
    wait_for_previous_grid();
    const Place<NESTED> place(team.index, p.source.inner_rows);
    const auto* x_row = place.template in<const typename X::type>(p.source.first);
    const auto* residual_row = place.template in<const typename Residual::type>(p.source.second);
    Held* sum_row = place.template in<Held>(p.sum);

    // UNROLL vectors at a time, all loads first: the compiler moves no load across a store.
    RowStatistics statistics(start.count, 0.0f);
    for (unsigned column = begin; column - lag < end; column += UNROLL * step) {
        Packed<typename X::type, VEC> x[UNROLL];
        Packed<typename Residual::type, VEC> residual[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            x[i].clear(), residual[i].clear();
            if (column + i * step >= end) continue;
            load<X>(x[i], x_row + column + i * step);
            if constexpr (Residual::present) load<Residual>(residual[i], residual_row + column + i * step);
        }
        const auto get = [&](Packed<Held, VEC>& held, int i) {
            if constexpr (Residual::present) {
                float h[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) h[k] = x[i].get(k) + residual[i].get(k);
                held.set(h);
            } else {
                held = x[i];
            }
        };
        if constexpr (CENTERED) {
            if (column == begin) {
                Packed<Held, VEC> held;
                get(held, 0);   // what is not there is 0
                statistics = RowStatistics(start.count, start.center(after(x[UNROLL - 1].get(0), held.get(0))));
            }
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            Packed<Held, VEC> held;
            get(held, i);
            const bool here = column + i * step < end;
            if constexpr (Residual::present)
                if (here) store<Sum, true>(sum_row + column + i * step, held);
            if (CENTERED && !here) continue;
            statistics.add(values_of(held).value);
        }
    }
    team.reduce(statistics);
    statistics.settle();
    const float rstd = inverse_root(fmaf(statistics.spread(), p.inverse_columns, p.eps));

    float inverse_scale = 1.0f;
    Max largest;
    if constexpr (SCALING == GIVEN) inverse_scale = inverse(load_float(p.scale));
    Out* y_row = place.template in<Out>(p.y);
    constexpr int passes = SCALING == PER_ROW ? 2 : 1;
    constexpr int AGAIN = Bias::present && UNROLL > 1 ? UNROLL / 2 : UNROLL;   // weight and bias take registers, too
#pragma unroll
    for (int pass = 1; pass <= passes; pass++) {
        for (unsigned column = begin; column < end; column += AGAIN * step) {
            Packed<Held, VEC> h[AGAIN];
            Packed<WeightElement, VEC> weight[AGAIN];
            Packed<BiasElement, VEC> bias[AGAIN];
#pragma unroll
            for (int i = 0; i < AGAIN; i++) {
                const unsigned here = column + i * step;
                if (here >= end) continue;
                if constexpr (Residual::present) load<Sum>(h[i], static_cast<const Held*>(sum_row) + here);
                else load<X>(h[i], x_row + here);
                if constexpr (Weight::present) load<Weight>(weight[i], static_cast<const WeightElement*>(p.weight) + here);
                if constexpr (Bias::present) load<Bias>(bias[i], static_cast<const BiasElement*>(p.bias) + here);
            }
#pragma unroll
            for (int i = 0; i < AGAIN; i++) {
                if (column + i * step >= end) continue;
                float value[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++)
                    value[k] = transformed<Weight, Bias, Normalised, Product, VEC>(statistics.normalised(h[i].get(k), rstd), weight[i],
                                                                                   bias[i], k, p.weight_offset);
                if (pass < passes) {
                    largest.add(value);
                } else {
                    if constexpr (AMAX && SCALING != PER_ROW) largest.add(value);
                    scale_by<SCALING>(value, inverse_scale);
                    Packed<Out, VEC> out;
                    out.set(value);
                    store<Y, true>(y_row + column + i * step, out);
                }
            }
        }
        if (pass == passes) break;
        team.reduce(largest);
        const float scale = row_scale(largest.value[0]);
        inverse_scale = inverse(scale);
        if (team.thread == 0 && team.member == 0) store_float(p.scale + team.index, scale);
    }
    if constexpr (AMAX) {
        if constexpr (SCALING != PER_ROW) team.reduce(largest);
        if (team.thread == 0 && team.member == 0) raise_amax(p.amax, largest.value[0]);
    }
    team.finish();
}
