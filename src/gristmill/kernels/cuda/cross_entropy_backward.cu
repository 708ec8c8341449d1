// Cross entropy, backward: from logits and what the forward pass knows of each row to the gradient of the logits, element
// by element.
//
//     dv_j = exp(v_j - largest) * all - w_j * each - [j is the target] * target        see Slopes
//     dx_j = dv_j * (1 - (v_j / softcap)^2)
//
// Nothing is agreed on, so a row may be shared by any number of blocks. Rows that take no part are not read.
#include "labels.cuh"

struct BackwardParams {
    Rows logits, gradient;
    long long rows, inner_rows;
    Labels labels;
    Options options;
    const float *loss_gradient, *lse_gradient;   // [rows], the first one number if `per_row` is 0; the second may be null
    const float *stats, *denominators;           // [rows][2], see RowLoss; the two denominators of a mean, or null
    unsigned columns, share, members;            // share: vectors of a row per block; members: blocks per row
    unsigned per_row;
};

// LANES: threads per row, or 0: a row has `members` blocks. UNROLL vectors of VEC elements under way at once.
template <class X, class Out, bool NESTED, int LANES, int VEC, int UNROLL, bool RAGGED, bool CAPPED, bool SMOOTH, bool WEIGHTS,
          int BOUND>
__global__ void __launch_bounds__(BOUND) cross_entropy_backward(const BackwardParams p) {
    using T = typename X::type;
    using Vector = Packed<T, VEC>;
    using Weight = Tensor<float, VEC % 4 == 0 ? 16 : VEC % 2 == 0 ? 8 : 4>;
    using One = Tensor<T, sizeof(T)>;
    static_assert(!(RAGGED && WEIGHTS), "weights are not shifted as the rows are");
    static_assert(!RAGGED || LANES == 0 || LANES >= VEC, "a thread takes one element of each end");
    launch_next_grid();
    long long row;
    unsigned thread, threads, member = 0;
    if constexpr (LANES > 0) {
        row = static_cast<long long>(blockIdx.x) * (blockDim.x / LANES) + threadIdx.x / LANES;
        thread = threadIdx.x % LANES, threads = LANES;
    } else {
        row = blockIdx.x / p.members, member = blockIdx.x % p.members;
        thread = threadIdx.x, threads = blockDim.x;
    }
    wait_for_previous_grid();
    if (row >= p.rows) return;
    const Label label = label_of(p.labels, row);
    const float lse_gradient = p.lse_gradient ? float_at(p.lse_gradient + row) : 0.0f;
    const float loss_gradient = float_at(p.loss_gradient + (p.per_row ? row : 0));
    const float weights = p.denominators ? float_at(p.denominators) : 1.0f;
    const float count = p.denominators ? float_at(p.denominators + 1) : 1.0f;
    const float largest = float_at(p.stats + 2 * row), sum = float_at(p.stats + 2 * row + 1);
    const bool nothing = label.ignored && lse_gradient == 0.0f;
    Slopes slopes;
    slopes.set<SMOOTH>(p.labels, p.options, label, sum, [&] { return RowLoss(largest, sum).lse(); }, loss_gradient, weights,
                       count, lse_gradient);
    // Huge gradients have no room for a factor.
    const bool far = is_far(largest) || !(fabsf(slopes.all) < 1e30f);
    // Exponents have their rounding of the largest one in common: it goes into a factor of the whole row.
    const float zero = exponent_of(largest);
    if (!far) {
        const float common = fmaf(largest, LOG2E, -zero);
        slopes.all *= exp2_fast(-common);
        if (sum == 1.0f) slopes.alone(exp2_fast(common));
    }
    const bool here = label.within(p.columns);
    const unsigned target = here ? static_cast<unsigned>(label.column) : ~0u;
    const Cap<CAPPED> cap{p.options.softcap, p.options.inverse_softcap};

    const Place<NESTED> place(row, p.inner_rows);
    const T* x_row = place.template in<const T>(p.logits);
    T* out_row = place.template in<T>(p.gradient);
    // Products and differences are rounded apart: of a target that is alone they are to cancel.
    const auto slope = [&](float x, float weight, bool far) {
        float ratio = 0.0f, v = x;
        if constexpr (CAPPED) ratio = cap.ratio(x), v = cap.softcap * ratio;
        // Logits that are made a second time may be rounded otherwise: none is above the largest.
        const float power = exp2_fast(far ? max_nan(largest - v, 0.0f) * -LOG2E : fmaf(v, LOG2E, -zero));
        float value = SMOOTH ? fmaf(power, slopes.all, -slopes.each * weight) : __fmul_rn(power, slopes.all);
        if constexpr (CAPPED) value = __fmul_rn(value, fmaf(-ratio, ratio, 1.0f));
        return value;
    };
    const auto slope_of_target = [&](float x) {
        if constexpr (!CAPPED) return slopes.target;
        const float ratio = cap.ratio(x);
        return __fmul_rn(slopes.target, fmaf(-ratio, ratio, 1.0f));
    };
    const auto put = [&](const Vector& x, unsigned column) {
        float value[VEC];
        Packed<float, VEC> weight;
        if constexpr (WEIGHTS) load<Weight>(weight, p.labels.weight + column);
#pragma unroll
        for (int k = 0; k < VEC; k++) value[k] = slope(x.get(k), WEIGHTS ? weight.get(k) : 1.0f, false);
        if (target - column < VEC) {
#pragma unroll
            for (int k = 0; k < VEC; k++)
                if (target - column == k) value[k] -= slope_of_target(x.get(k));
        }
        Vector out;
        out.set(value);
        store<Out>(out_row + column, out);
    };

    const Span<RAGGED, VEC> span(x_row, p.columns);
    if (far && !nothing) {
        const unsigned members = LANES > 0 ? 1 : p.members;
        each_element(x_row, member * threads + thread, p.columns, members * threads, [&](float x, unsigned column) {
            Packed<T, 1> out;
            float value = slope(x, WEIGHTS ? float_at(p.labels.weight + column) : 1.0f, true);
            if (column == target) value -= slope_of_target(x);
            out.set({value});
            store<One>(out_row + column, out);
        });
        return;
    }
    const unsigned begin = max(member * p.share, span.first) + thread, end = min(member * p.share + p.share, span.last);
    const auto edge_here = [&](int side) { return member == 0 && span.has_edge(side, thread, p.columns); };
    Packed<T, 1> edges[2];
    if constexpr (RAGGED)
#pragma unroll
        for (int side = 0; side < 2; side++)
            if (edge_here(side) && !nothing) load<One>(edges[side], x_row + span.edge(side, thread));
    if (nothing) {
        Vector zeros;
        zeros.clear();
        for (unsigned vector = begin; vector < end; vector += threads) store<Out>(out_row + span.column(vector), zeros);
    } else {
        for (unsigned vector = begin; vector < end; vector += UNROLL * threads) {
            Vector x[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const unsigned at = vector + i * threads;
                if (at < end) load<X>(x[i], x_row + span.column(at));
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const unsigned at = vector + i * threads;
                if (at < end) put(x[i], span.column(at));
            }
        }
    }
    if constexpr (RAGGED)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (!edge_here(side)) continue;
            const unsigned column = span.edge(side, thread);
            Packed<T, 1> out;
            float value = nothing ? 0.0f : slope(edges[side].get(0), 1.0f, false);
            if (column == target && !nothing) value -= slope_of_target(edges[side].get(0));
            out.set({value});
            store<One>(out_row + column, out);
        }
}

struct ScaleParams {
    Rows gradient;
    long long rows, inner_rows;
    const float* factor;          // [rows], or one number if `per_row` is 0
    unsigned columns, per_row;
};

// Rows times a factor, in place; those whose factor is 1 are left alone, read and all.
template <class X, bool NESTED, int VEC, int UNROLL, bool RAGGED, int BOUND>
__global__ void __launch_bounds__(BOUND) scale_gradient(const ScaleParams p) {
    using T = typename X::type;
    using Vector = Packed<T, VEC>;
    using One = Tensor<T, sizeof(T)>;
    launch_next_grid();
    wait_for_previous_grid();
    for (long long row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const float factor = float_at(p.factor + (p.per_row ? row : 0));
        if (factor == 1.0f) {
            if (!p.per_row) return;
            continue;
        }
        const Place<NESTED> place(row, p.inner_rows);
        T* x_row = place.template in<T>(p.gradient);
        const Span<RAGGED, VEC> span(x_row, p.columns);
        if constexpr (RAGGED)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                if (!span.has_edge(side, threadIdx.x, p.columns)) continue;
                T* place_of_edge = x_row + span.edge(side, threadIdx.x);
                Packed<T, 1> x;
                load<One>(x, static_cast<const T*>(place_of_edge));
                x.set({x.get(0) * factor});
                store<One>(place_of_edge, x);
            }
        for (unsigned vector = span.first + threadIdx.x; vector < span.last; vector += UNROLL * blockDim.x) {
            Vector x[UNROLL];
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const unsigned at = vector + i * blockDim.x;
                if (at < span.last) load<X>(x[i], static_cast<const T*>(x_row) + span.column(at));
            }
#pragma unroll
            for (int i = 0; i < UNROLL; i++) {
                const unsigned at = vector + i * blockDim.x;
                if (at >= span.last) continue;
                float value[VEC];
#pragma unroll
                for (int k = 0; k < VEC; k++) value[k] = x[i].get(k) * factor;
                Vector out;
                out.set(value);
                store<X>(x_row + span.column(at), out);
            }
        }
    }
}
