// RMSNorm, backward. With r = rsqrt(mean(x^2) + eps), g = dy * (weight + weight_offset) over N columns:
//
//     dx = r * (g - x * r * mean(g * x * r)) [+ dsum]        dweight = sum over rows of dy * x * r
//
// The row of x must be read anyway, so r is recomputed in the same reduction that sums g * x: nothing is saved by the
// forward pass. Teams are persistent: each takes rows in turn, keeps its share of dweight in registers, and writes it
// once, as a row of `partials`; rms_norm_weight_gradient then adds those rows in their order. One team alone (a
// single row, say) writes dweight itself.
#include "feed.cuh"
#include "team.cuh"
#include "vectors.cuh"

struct BackwardParams {
    Source source;                // x and dy
    Rows dsum, dx;
    const void* weight;
    void* dweight;
    float* partials;              // [teams, or blocks in scope WARP][columns]; null when one team writes dweight itself
    Meeting meeting;
    unsigned columns, share;      // share: columns of a row per block, a multiple of VEC
    float inverse_columns, eps, weight_offset;
};

// A thread's columns of dweight: into its row of partials, or, when there is but one, into dweight.
template <class GradientElement, int ACCESS, int COUNT>
DEVICE void write_gradient(const BackwardParams& p, unsigned partial, unsigned column, const float (&values)[COUNT]) {
    if (p.partials) {
        Packed<float, COUNT> out;
        out.set(values);
        store<Tensor<float, COUNT % 4 ? 4 : 16>>(p.partials + static_cast<long long>(partial) * p.columns + column, out);
    } else {
        Packed<GradientElement, COUNT> out;
        out.set(values);
        store<Tensor<GradientElement, ACCESS>>(static_cast<GradientElement*>(p.dweight) + column, out);
    }
}

template <class X, class DY, class Weight, class DSum, class DX, class DWeight,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND) rms_norm_backward(const BackwardParams p) {
    using WeightElement = typename Weight::type;
    using GradientElement = typename DWeight::type;
    using Out = typename DX::type;
    Team<SCOPE, LANES, 2> team(p.meeting);
    launch_next_grid();

    const unsigned begin = min(team.member * p.share, p.columns);
    const unsigned end = min(begin + p.share, p.columns);
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = begin + (i * team.threads + team.thread) * VEC;
    Feed<X, DY, NESTED, VEC, ITEMS, FEED> feed(p.source, team.teams, column, begin, end,
                                                 shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    Packed<WeightElement, VEC> weight[ITEMS];
    bool weight_loaded = !Weight::present;
    float dweight[ITEMS][VEC];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) dweight[i][k] = 0.0f;

    for (long long row = team.index; team.more(row, p.source.rows); row += team.teams) {
        const bool active = row < p.source.rows;
        const Place<NESTED> place(row, p.source.inner_rows);
        feed.arrive(row);
        if (!weight_loaded) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (column[i] < end) load<Weight>(weight[i], static_cast<const WeightElement*>(p.weight) + column[i]);
            weight_loaded = true;
        }
        Packed<typename DSum::type, VEC> dsum[ITEMS];
        if constexpr (DSum::present) {
            const auto* dsum_row = place.template in<const typename DSum::type>(p.dsum);
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (active && column[i] < end) load<DSum>(dsum[i], dsum_row + column[i]);
        }

        Packed<typename X::type, VEC> held_x[HOLD ? ITEMS : 1];
        Packed<typename DY::type, VEC> held_dy[HOLD ? ITEMS : 1];
        Sums<2> sums;   // of x * x and of x * g
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            auto &x = held_x[HOLD ? i : 0];
            auto &dy = held_dy[HOLD ? i : 0];
            feed.get(x, dy, i, column[i]);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const float h = x.get(k);
                const float g = Weight::present ? dy.get(k) * (weight[i].get(k) + p.weight_offset) : dy.get(k);
                sums.value[0] = fmaf(h, h, sums.value[0]);
                sums.value[1] = fmaf(h, g, sums.value[1]);
            }
        }
        team.reduce(sums);
        // Without HOLD rows are read from the feed twice: whoever is here is done with the row before, not with this one.
        if (HOLD) feed.reuse(row);
        else if (row >= team.teams) feed.reuse(row - team.teams);
        // An idle team of a warp has summed nothing: no infinity may reach its weight gradient.
        const float rstd = active ? rsqrtf(fmaf(sums.value[0], p.inverse_columns, p.eps)) : 0.0f;
        const float slope = sums.value[1] * p.inverse_columns * rstd * rstd;

#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            auto &x = held_x[HOLD ? i : 0];
            auto &dy = held_dy[HOLD ? i : 0];
            if constexpr (!HOLD) feed.get(x, dy, i, column[i]);
            float value[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const float d = dy.get(k), h = x.get(k);
                const float g = Weight::present ? d * (weight[i].get(k) + p.weight_offset) : d;
                value[k] = rstd * fmaf(-h, slope, g);
                if constexpr (DSum::present) value[k] += dsum[i].get(k);
                if constexpr (DWeight::present) dweight[i][k] = fmaf(d * rstd, h, dweight[i][k]);
            }
            if (active) {
                Packed<Out, VEC> out;
                out.set(value);
                store<DX>(place.template in<Out>(p.dx) + column[i], out);
            }
        }
        if constexpr (one_row(FEED)) break;
    }
    team.finish();

    if constexpr (DWeight::present && SCOPE == WARP) {
        // The block's teams first add up among themselves, in their order: one partial row per block.
        float* sums = reinterpret_cast<float*>(shared_memory());
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column[i] < end)
#pragma unroll
                for (int k = 0; k < VEC; k++) sums[threadIdx.x / LANES * p.columns + column[i] + k] = dweight[i][k];
        __syncthreads();
        for (unsigned c = threadIdx.x; c < p.columns; c += blockDim.x) {
            float sum[1] = {0.0f};
            for (unsigned t = 0; t < blockDim.x / LANES; t++) sum[0] += sums[t * p.columns + c];
            write_gradient<GradientElement, sizeof(GradientElement), 1>(p, blockIdx.x, c, sum);
        }
    } else if constexpr (DWeight::present) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column[i] < end) write_gradient<GradientElement, DWeight::access, VEC>(p, team.index, column[i], dweight[i]);
    }
}

struct WeightGradientParams {
    const float* partials;   // [count][columns]
    void* dweight;
    unsigned count, columns, width;   // width: columns per block, a power of two up to 32
};

// dweight = sum of the partial rows, in their order within each of the block's lines, then over the lines in theirs.
template <class WeightElement>
__global__ void __launch_bounds__(1024) rms_norm_weight_gradient(const WeightGradientParams p) {
    launch_next_grid();
    const unsigned lines = blockDim.x / p.width, line = threadIdx.x / p.width, offset = threadIdx.x % p.width;
    const unsigned column = blockIdx.x * p.width + offset;
    float* sums = reinterpret_cast<float*>(shared_memory());
    wait_for_previous_grid();
    float sum = 0.0f;
    if (column < p.columns) {
        const float* cell = p.partials + column;
        constexpr unsigned batch = 8;   // so many loads on their way at once
        unsigned row = line;
        for (; row + (batch - 1) * lines < p.count; row += batch * lines) {
            float values[batch];
#pragma unroll
            for (unsigned i = 0; i < batch; i++) values[i] = cell[static_cast<long long>(row + i * lines) * p.columns];
#pragma unroll
            for (unsigned i = 0; i < batch; i++) sum += values[i];
        }
        for (; row < p.count; row += lines) sum += cell[static_cast<long long>(row) * p.columns];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < p.width && column < p.columns) {
        float total = 0.0f;
        for (unsigned i = 0; i < lines; i++) total += sums[i * p.width + offset];
        Packed<WeightElement, 1> out;
        out.set({total});
        store<Tensor<WeightElement, sizeof(WeightElement)>>(static_cast<WeightElement*>(p.dweight) + column, out);
    }
}
