// Cross entropy, forward: of each row of logits v its loss and lse = log(sum(exp(v))).
//
//     loss = (1 - e) * w_t * (lse - v_t) + e / V * sum_j w_j * (lse - v_j) + z * lse^2        e: label smoothing
//
// A row is read once and nothing of it is kept: each thread carries the largest logit so far and the sum of the terms
// relative to it (LogitTerms), and a team of threads (team.cuh) joins those. So rows may be of any length; what counts is
// how many loads are under way. A second, small kernel adds up the rows in a fixed order.
//
// Large logits are subtracted from each other before they are scaled, in a second run over such a row (see FAR): exact for
// any offset, and no overflow.
#include "labels.cuh"
#include "team.cuh"

struct ForwardParams {
    Rows logits;
    long long rows, inner_rows;
    Labels labels;
    Options options;
    float *loss, *lse;            // [rows]
    float* stats;                 // [rows][2]: the largest logit, 0 if all are -infinity, and the sum of exp(v - largest)
    float* shard;                 // [rows][3 or 4], in the place of all three
    unsigned columns, share;      // share: vectors of a row per block
    unsigned all_rows;            // lse of ignored rows is wanted, too
};

DEVICE void put_stats(float* stats, long long row, float largest, float sum) {
    const unsigned bits[2] = {__float_as_uint(largest), __float_as_uint(sum)};
    store_global<8>(stats + 2 * row, bits);
}

// What a thread knows of its part of the row.
template <bool CAPPED, bool SMOOTH>
struct Share {
    const Cap<CAPPED> cap;
    LogitTerms terms;
    Distances distances;

    template <class T, int VEC, int COUNT>
    DEVICE void add(const Packed<T, VEC> (&x)[COUNT]) {
        float largest = x[0].get(0);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++) largest = fmaxf(largest, x[i].get(k));
        largest = cap(largest);
        const float before = terms.value[0];
        terms.raise(largest);
        const float zero = terms.zero();
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int k = 0; k < VEC; k++) terms.value[1] += exp2_fast(fmaf(cap(x[i].get(k)), LOG2E, -zero));
        if constexpr (SMOOTH) distances.raise(before, terms.value[0]);
    }

    template <class Vector>
    DEVICE void add_one(const Vector& x) {
        const Vector one[1] = {x};
        add(one);
    }
};

// UNROLL vectors of VEC elements under way at once, twice as many with AHEAD: the next ones are on their way while these
// are added. SHARD: the logits are some of all classes, and the sums are what is wanted, that of v - largest too if SMOOTH.
template <class X, bool NESTED, Scope SCOPE, int LANES, int VEC, int UNROLL, bool AHEAD, bool RAGGED, bool CAPPED,
          bool SMOOTH, bool WEIGHTS, bool SHARD, int BOUND>
__global__ void __launch_bounds__(BOUND) cross_entropy_forward(const ForwardParams p) {
    using T = typename X::type;
    using Vector = Packed<T, VEC>;
    using Weight = Tensor<float, VEC % 4 == 0 ? 16 : VEC % 2 == 0 ? 8 : 4>;
    static_assert(!(RAGGED && WEIGHTS), "weights are not shifted as the rows are");
    static_assert(!RAGGED || LANES >= VEC, "a thread takes one element of each end");
    Team<SCOPE, LANES, 2> team(Meeting{});
    launch_next_grid();
    wait_for_previous_grid();
    const long long row = team.index;
    const bool active = row < p.rows;
    // The first vectors are on their way before it is known whether the row is ignored.
    const long long target = active ? target_of(p.labels, row) : 0;
    const Place<NESTED> place(active ? row : 0, p.inner_rows);
    const T* x_row = place.template in<const T>(p.logits);
    const Span<RAGGED, VEC> span(x_row, p.columns);
    const auto fetch = [&](Vector(&x)[UNROLL], unsigned at) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) load<X>(x[i], x_row + span.column(at + i * team.threads));
    };
    unsigned end = active ? min(team.member * p.share + p.share, span.last) : 0;
    unsigned vector = max(team.member * p.share, span.first) + team.thread;
    const unsigned step = UNROLL * team.threads;
    const auto whole = [&](unsigned at) { return at + (UNROLL - 1) * team.threads < end; };
    Vector x[AHEAD ? 2 : 1][UNROLL];
    if (whole(vector)) fetch(x[0], vector);

    Label label{0, 0.0f, true};
    if (active) label = label_from(p.labels, target);
    const bool wanted = active && (SHARD || p.all_rows || !label.ignored);
    const bool writer = active && team.thread == 0 && team.member == 0;
    if (SCOPE != WARP && !wanted) {
        if (writer) put_float(p.loss + row, 0.0f), put_float(p.lse + row, 0.0f), put_stats(p.stats, row, 0.0f, 0.0f);
        team.finish();
        return;
    }
    if (!wanted) end = 0;
    Share<CAPPED, SMOOTH> mine{{p.options.softcap, p.options.inverse_softcap}};
    // On its way while the row comes.
    Packed<T, 1> target_logit;
    target_logit.clear();
    const bool here = label.within(p.columns);
    if (writer && here) load<Tensor<T, sizeof(T)>>(target_logit, x_row + label.column);

    const auto edge_here = [&](int side) { return wanted && team.member == 0 && span.has_edge(side, team.thread, p.columns); };
    Packed<T, 1> edges[2];
    if constexpr (RAGGED) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            fill(edges[side], -INFINITY);
            if (edge_here(side)) load<Tensor<T, sizeof(T)>>(edges[side], x_row + span.edge(side, team.thread));
        }
    }
    const auto smooth = [&](const Vector& x, unsigned at) {
        if constexpr (SMOOTH) {
            Packed<float, VEC> weight;
            if constexpr (WEIGHTS) load<Weight>(weight, p.labels.weight + at * VEC);
            else mine.distances.weigh(VEC);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                if constexpr (WEIGHTS) mine.distances.weigh(weight.get(k));
                mine.distances.add(mine.cap(x.get(k)), WEIGHTS ? weight.get(k) : 1.0f, mine.terms.value[0]);
            }
        }
    };
    const auto add = [&](const Vector(&x)[UNROLL], unsigned at) {
        mine.add(x);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) smooth(x[i], at + i * team.threads);
    };
    if constexpr (AHEAD) {
        while (whole(vector)) {
#pragma unroll
            for (int turn = 0; turn < 2; turn++) {
                if (!whole(vector)) break;
                if (whole(vector + step)) fetch(x[1 - turn], vector + step);
                add(x[turn], vector);
                vector += step;
            }
        }
    } else {
        while (whole(vector)) {
            add(x[0], vector);
            vector += step;
            if (whole(vector)) fetch(x[0], vector);
        }
    }
    // What is left is not as many. What is missing is no logit: minus infinity, which a cap would make a number of.
    if (vector < end) {
        Vector (&last)[UNROLL] = x[0];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            fill(last[i], -INFINITY);
            const unsigned at = vector + i * team.threads;
            if (at < end) load<X>(last[i], x_row + span.column(at));
        }
        if constexpr (!CAPPED) mine.add(last);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (vector + i * team.threads >= end) continue;
            if constexpr (CAPPED) mine.add_one(last[i]);
            smooth(last[i], vector + i * team.threads);
        }
    }
    if constexpr (RAGGED) {
        if constexpr (!CAPPED) mine.add(edges);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            if (!edge_here(side)) continue;
            if constexpr (CAPPED) mine.add_one(edges[side]);
            if constexpr (SMOOTH) mine.distances.weigh(1.0f), mine.distances.add(mine.cap(edges[side].get(0)), 1.0f, mine.terms.value[0]);
        }
    }

    const float top = mine.terms.value[0];
    team.reduce(mine.terms);
    float largest = mine.terms.value[0], sum = mine.terms.sum();
    // The sum of w * (v - lse), of a shard that of w * (v - largest).
    Sums<1> distances;
    if constexpr (SMOOTH) {
        distances.value[0] = mine.distances.above(SHARD ? largest - top : RowLoss(largest, sum).below(top));
        team.reduce(distances);
    }
    const bool far = wanted && is_far(largest);
    if (team.any(far)) {
        const unsigned columns = far ? p.columns : 0, first = team.member * team.threads + team.thread, step = team.members * team.threads;
        const T* x_row = Place<NESTED>(active ? afresh(row) : 0, p.inner_rows).template in<const T>(p.logits);
        MaxAndSum terms;
        terms.unit = LOG2E;
        each_element(x_row, first, columns, step, [&](float x, unsigned) { add_logit(terms, mine.cap(x)); });
        team.reduce(terms);
        if (far) largest = terms.value[0], sum = terms.value[1];
        if constexpr (SMOOTH) {
            const RowLoss sums(largest, sum);
            Sums<1> apart;
            each_element(x_row, first, columns, step, [&](float x, unsigned column) {
                const float v = mine.cap(x), weight = WEIGHTS ? float_at(p.labels.weight + column) : 1.0f;
                apart.value[0] = fmaf(-weight, SHARD ? sums.largest - v : sums.below(v), apart.value[0]);
            });
            team.reduce(apart);
            if (far) distances = apart;
        }
    }
    const RowLoss sums(largest, sum);
    team.finish();
    if (!writer) return;
    const float v = mine.cap(target_logit.get(0));
    if constexpr (SHARD) {
        float* out = p.shard + row * (SMOOTH ? 4 : 3);
        put_float(out, largest);
        put_float(out + 1, sum);
        put_float(out + 2, label.ignored ? 0.0f : here ? v : label.weight == label.weight ? 0.0f : label.weight);
        if constexpr (SMOOTH) put_float(out + 3, distances.value[0]);
        return;
    }
    const float lse = sums.lse();
    float loss = 0.0f;
    if (!label.ignored) {
        loss = (1.0f - p.options.smoothing) * label.weight * (here ? sums.below(v) : 0.0f);
        if constexpr (SMOOTH) loss = fmaf(-p.options.smoothing / static_cast<float>(p.columns), distances.value[0], loss);
        if (p.options.z_loss != 0.0f) loss = fmaf(p.options.z_loss * lse, lse, loss);
    }
    put_float(p.loss + row, loss);
    put_float(p.lse + row, wanted ? lse : 0.0f);
    // Of a NaN or +infinity all is NaN.
    put_stats(p.stats, row, !wanted ? 0.0f : sum == sum ? sums.largest : sum, wanted ? sum : 0.0f);
}

struct TotalParams {
    const float *loss, *lse;      // [rows], or null: there is nothing to add up yet
    Labels labels;                // target null: the denominators are known
    float* total;
    float* denominators;          // the sum of the targets' weights, and how many rows there are; null for a sum
    long long rows;
    Meeting meeting;
    float z_loss;                 // of lse^2, where it has a denominator of its own
};

// The loss of all rows, and what a mean is divided by; in a fixed order.
template <Scope SCOPE>
__global__ void __launch_bounds__(1024) cross_entropy_total(const TotalParams p) {
    Team<SCOPE, 32, 4> team(p.meeting);
    launch_next_grid();
    wait_for_previous_grid();
    const long long step = static_cast<long long>(team.members) * team.threads;
    constexpr int batch = 8;   // so many rows on their way at once
    Sums<4> sums;              // of losses, of lse^2, of weights, of rows
    for (long long start = static_cast<long long>(team.member) * team.threads + team.thread; start < p.rows; start += batch * step) {
        float loss[batch], square[batch], weight[batch], count[batch];
#pragma unroll
        for (int i = 0; i < batch; i++) {
            loss[i] = square[i] = weight[i] = count[i] = 0.0f;
            const long long row = start + i * step;
            if (row >= p.rows) continue;
            if (p.loss) loss[i] = float_at(p.loss + row);
            if (p.lse) square[i] = float_at(p.lse + row);
            if (!p.labels.target) continue;
            const Label label = label_of(p.labels, row);
            if (label.ignored) continue;
            // A target that is no class has made the loss NaN already; other rows keep their gradients.
            weight[i] = label.weight == label.weight ? label.weight : 1.0f;
            count[i] = 1.0f;
        }
#pragma unroll
        for (int i = 0; i < batch; i++) {
            sums.value[0] += loss[i];
            sums.value[1] = count[i] > 0.0f ? fmaf(square[i], square[i], sums.value[1]) : sums.value[1];
            sums.value[2] += weight[i];
            sums.value[3] += count[i];
        }
    }
    team.reduce(sums);
    team.finish();
    if (team.member != 0 || team.thread != 0) return;
    float weights = 1.0f, count = 1.0f;
    if (p.denominators && p.labels.target) {
        weights = sums.value[2], count = sums.value[3];
        put_float(p.denominators, weights);
        put_float(p.denominators + 1, count);
    } else if (p.denominators) {
        weights = float_at(p.denominators), count = float_at(p.denominators + 1);
    }
    if (!p.total) return;
    float total = sums.value[0] / weights;
    if (p.lse) total += p.z_loss * (sums.value[1] / count);
    put_float(p.total, total);
}
