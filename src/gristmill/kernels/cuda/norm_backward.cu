// RMSNorm and LayerNorm, backward. With c = x - mean(x) (RMSNorm: c = x), r = rsqrt(mean(c^2) + eps) and
// g = dy * (weight + weight_offset), over N columns:
//
//     dx = r * (g - mean(g) - c * r * mean(g * c * r)) [+ dsum]        (RMSNorm: without mean(g))
//     dweight = sum over rows of dy * c * r                             dbias = sum over rows of dy
//
// The row of x must be read anyway, so its statistics are recomputed in the same reduction that sums g * c: nothing is
// saved by the forward pass. Teams are persistent: each takes rows in turn, keeps its share of dweight and dbias in
// registers, and writes it once, as rows of partial sums; norm_gradient then adds those rows in their order. One team
// alone (a single row, say) writes the gradients itself.
#include "norm.cuh"

struct BackwardParams {
    Source source;                // x and dy
    Rows dsum, dx;
    const void* weight;
    void* dweight;
    float* partials;              // [teams, or blocks in scope WARP][columns]; null when one team writes the gradients itself
    Meeting meeting;
    unsigned columns, share;      // share: columns of a row per block, a multiple of VEC
    float inverse_columns, eps, weight_offset;
    void* dbias;
    float* bias_partials;
};

// Some columns of a gradient: into a row of partials, or, when there is but one, into the gradient.
template <class Element, int ACCESS, int COUNT>
DEVICE void write_gradient(void* gradient, float* partials, unsigned columns, unsigned partial, unsigned column,
                           const float (&values)[COUNT]) {
    if (partials) {
        Packed<float, COUNT> out;
        out.set(values);
        store<Tensor<float, COUNT % 4 ? 4 : 16>>(partials + static_cast<long long>(partial) * columns + column, out);
    } else {
        Packed<Element, COUNT> out;
        out.set(values);
        store<Tensor<Element, ACCESS>>(static_cast<Element*>(gradient) + column, out);
    }
}

// All of a thread's columns of dweight, or (BIAS) dbias. In scope WARP the block's teams first add up among themselves, in
// their order: one partial row per block.
template <class Gradient, bool BIAS, Scope SCOPE, int LANES, int VEC, int ITEMS>
DEVICE void write_gradients(const BackwardParams& p, unsigned team, const unsigned (&column)[ITEMS], unsigned end,
                            const float (&values)[ITEMS][VEC]) {
    using Element = typename Gradient::type;
    if constexpr (SCOPE == WARP) {
        float* sums = reinterpret_cast<float*>(shared_memory());
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column[i] < end)
#pragma unroll
                for (int k = 0; k < VEC; k++) sums[threadIdx.x / LANES * p.columns + column[i] + k] = values[i][k];
        __syncthreads();
        for (unsigned c = threadIdx.x; c < p.columns; c += blockDim.x) {
            float sum[1] = {0.0f};
            for (unsigned t = 0; t < blockDim.x / LANES; t++) sum[0] += sums[t * p.columns + c];
            write_gradient<Element, sizeof(Element), 1>(BIAS ? p.dbias : p.dweight, BIAS ? p.bias_partials : p.partials,
                                                        p.columns, blockIdx.x, c, sum);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (column[i] < end)
                write_gradient<Element, Gradient::access, VEC>(BIAS ? p.dbias : p.dweight, BIAS ? p.bias_partials : p.partials,
                                                               p.columns, team, column[i], values[i]);
    }
}

// dy * (weight + weight_offset), of a vector.
template <class Weight, int VEC>
DEVICE Values<VEC> weighted(Values<VEC> g, const Packed<typename Weight::type, VEC>& weight, float weight_offset) {
#pragma unroll
    for (int k = 0; k < VEC; k++)
        if constexpr (Weight::present) g.value[k] *= weight.get(k) + weight_offset;
    return g;
}

template <class X, class DY, class Weight, class DSum, class DX, class DWeight, class DBias, bool CENTERED,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND) norm_backward(const BackwardParams p) {
    using WeightElement = typename Weight::type;
    using Out = typename DX::type;
    using RowStatistics = Statistics<CENTERED, true>;
    Team<SCOPE, LANES, RowStatistics::floats> team(p.meeting);
    launch_next_grid();

    const unsigned begin = min(team.member * p.share, p.columns);
    const unsigned end = min(begin + p.share, p.columns);
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = begin + (i * team.threads + team.thread) * VEC;
    const Start<CENTERED, LANES> start(column, end, VEC);
    Feed<X, DY, NESTED, VEC, ITEMS, FEED> feed(p.source, team.teams, column, begin, end,
                                                 shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    Packed<WeightElement, VEC> weight[ITEMS];
    bool weight_loaded = !Weight::present;
    float dweight[ITEMS][VEC], dbias[ITEMS][VEC];
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
#pragma unroll
        for (int k = 0; k < VEC; k++) dweight[i][k] = dbias[i][k] = 0.0f;

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
        // Early, but where two gradients and a long row leave no registers for it to wait in.
        constexpr bool late = CENTERED && SCOPE == CLUSTER && !HOLD;
        const auto* dsum_row = place.template in<const typename DSum::type>(p.dsum);
        Packed<typename DSum::type, VEC> dsum[late ? 1 : ITEMS];
        if constexpr (DSum::present && !late) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++)
                if (active && column[i] < end) load<DSum>(dsum[i], dsum_row + column[i]);
        }

        Packed<typename X::type, VEC> held_x[HOLD ? ITEMS : 1];
        Packed<typename DY::type, VEC> held_dy[HOLD ? ITEMS : 1];
        float center = 0.0f;
        if constexpr (CENTERED) {
            if (column[0] < end) {
                feed.get(held_x[0], held_dy[0], 0, column[0]);
                center = held_x[0].get(0);
                if constexpr (FEED == STRAIGHT && ITEMS > 1) {
                    Packed<typename X::type, VEC> last;
                    Packed<typename DY::type, VEC> beside;
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
            auto &x = held_x[HOLD ? i : 0];
            auto &dy = held_dy[HOLD ? i : 0];
            feed.get(x, dy, i, column[i]);
            statistics.add(values_of(x).value, weighted<Weight>(values_of(dy), weight[i], p.weight_offset).value);
        }
        team.reduce(statistics);
        statistics.settle();
        // Without HOLD rows are read from the feed twice: whoever is here is done with the row before, not with this one.
        if (HOLD) feed.reuse(row);
        else if (row >= team.teams) feed.reuse(row - team.teams);
        float rstd = inverse_root(fmaf(statistics.spread(), p.inverse_columns, p.eps));
        const float slope = statistics.product() * p.inverse_columns * rstd, mean = statistics.sum() * p.inverse_columns;
        // An idle team of a warp has summed nothing: no infinity may reach its weight gradient. A row of one column has no
        // gradient: what its product has lost by rounding would be left over.
        if (!active || (CENTERED && p.columns == 1)) rstd = 0.0f;

#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (column[i] >= end) continue;
            auto &x = held_x[HOLD ? i : 0];
            auto &dy = held_dy[HOLD ? i : 0];
            if constexpr (!HOLD) feed.get(x, dy, i, column[i]);
            if constexpr (DSum::present && late)
                if (active) load<DSum>(dsum[0], dsum_row + column[i]);
            float value[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                const float d = dy.get(k), h = statistics.normalised(x.get(k), rstd);
                const float g = Weight::present ? d * (weight[i].get(k) + p.weight_offset) : d;
                value[k] = rstd * fmaf(-h, slope, CENTERED ? g - mean : g);
                if constexpr (DSum::present) value[k] += dsum[late ? 0 : i].get(k);
                if constexpr (DWeight::present) dweight[i][k] = fmaf(d, h, dweight[i][k]);
                if constexpr (DBias::present) dbias[i][k] += d;
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

    if constexpr (DWeight::present) write_gradients<DWeight, false, SCOPE, LANES>(p, team.index, column, end, dweight);
    if constexpr (DWeight::present && DBias::present && SCOPE == WARP) __syncthreads();
    if constexpr (DBias::present) write_gradients<DBias, true, SCOPE, LANES>(p, team.index, column, end, dbias);
}

struct GradientParams {
    const float* partials;   // [count][columns]
    void* gradient;
    unsigned count, columns, width;   // width: columns per block, a power of two up to 32
    unsigned blocks;                  // blocks of the first gradient, after which those of the second come
    const float* second_partials;
    void* second;
};

// A gradient is the sum of its partial rows, in their order within each of the block's lines, then over the lines in
// theirs. Two of them, dweight and dbias, in one launch: `Second` is Absent for one alone.
template <class First, class Second>
__global__ void __launch_bounds__(1024) norm_gradient(const GradientParams p) {
    launch_next_grid();
    const bool second = Second::present && blockIdx.x >= p.blocks;
    const unsigned block = second ? blockIdx.x - p.blocks : blockIdx.x;
    const unsigned lines = blockDim.x / p.width, line = threadIdx.x / p.width, offset = threadIdx.x % p.width;
    const unsigned column = block * p.width + offset;
    float* sums = reinterpret_cast<float*>(shared_memory());
    wait_for_previous_grid();
    float sum = 0.0f;
    if (column < p.columns) {
        const float* cell = (second ? p.second_partials : p.partials) + column;
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
        float total[1] = {0.0f};
        for (unsigned i = 0; i < lines; i++) total[0] += sums[i * p.width + offset];
        if (second) write_gradient<typename Second::type, sizeof(typename Second::type), 1>(p.second, nullptr, 0, 0, column, total);
        else write_gradient<typename First::type, sizeof(typename First::type), 1>(p.gradient, nullptr, 0, 0, column, total);
    }
}
