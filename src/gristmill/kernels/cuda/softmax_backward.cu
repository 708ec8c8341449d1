// The gradients of softmax and log-softmax, from their results alone:
//
//     dx = scale * y * (dy - sum(dy * y))                            softmax
//     dx = scale * (dy - exp(y) * sum(dy)) where y > -infinity       log-softmax; elsewhere 0, and not in the sum
//
// Rows are kept between one read and one write (feed.cuh). What lies beyond the causal limit is not read; its zeros are
// written.
#include "softmax_limits.cuh"
#include "team.cuh"

struct SoftmaxBackwardParams {
    Source source;            // y and dy
    Rows dx;
    Meeting meeting;
    Causal causal;
    unsigned columns, share;  // share: columns of a row per block, a multiple of VEC
    float scale;
};

// What an element adds to the row's sum, and its gradient once that is known.
template <bool LOG>
struct Slope {
    static DEVICE float term(float y, float dy) {
        if constexpr (LOG) return y == -INFINITY ? 0.0f : dy;
        else return dy * y;
    }

    static DEVICE float gradient(float y, float dy, float sum, float scale) {
        if constexpr (LOG) return y == -INFINITY ? 0.0f : scale * fmaf(-exp2_fast(y * 1.44269504f), sum, dy);
        else return scale * y * (dy - sum);
    }
};

template <class Y, class DY, class DX, bool LOG, bool CAUSAL, bool RAGGED, int VEC>
struct SoftmaxBackwardRow {
    using Element = typename DX::type;
    unsigned limit, end;
    float scale;
    Element* dx;

    DEVICE bool takes_part(unsigned column) const { return !(CAUSAL || RAGGED) || column < limit; }

    DEVICE void add(Sums<1>& sum, const Packed<typename Y::type, VEC>& y, const Packed<typename DY::type, VEC>& dy, unsigned column) const {
        float term[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) term[k] = takes_part(column + k) ? Slope<LOG>::term(y.get(k), dy.get(k)) : 0.0f;
        sum.value[0] += sum_of<VEC>(term);
    }

    template <bool IN_L1>
    DEVICE void write(float sum, const Packed<typename Y::type, VEC>& y, const Packed<typename DY::type, VEC>& dy, unsigned column) const {
        float value[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++)
            value[k] = takes_part(column + k) ? Slope<LOG>::gradient(y.get(k), dy.get(k), sum, scale) : 0.0f;
        Packed<Element, VEC> out;
        out.set(value);
        store_vector<IN_L1>(column, out);
    }

    template <bool IN_L1>
    DEVICE void write_zeros(unsigned column) const {
        Packed<Element, VEC> out;
        out.clear();
        store_vector<IN_L1>(column, out);
    }

  private:
    template <bool IN_L1>
    DEVICE void store_vector(unsigned column, const Packed<Element, VEC>& out) const {
        if constexpr (RAGGED) store_inside<DX, IN_L1>(dx, column, end, out);
        else store<DX, IN_L1>(dx + column, out);
    }
};

// ITEMS vectors of VEC elements per thread; HOLD: whether y and dy wait in registers, or are read from the feed again; BOUND:
// the largest block.
template <class Y, class DY, class DX, bool LOG, bool CAUSAL, bool RAGGED,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND) softmax_backward(const SoftmaxBackwardParams p) {
    constexpr bool in_l1 = FEED != STRAIGHT;
    using Supply = Feed<Y, DY, NESTED, VEC, ITEMS, FEED, RAGGED>;
    constexpr bool rolled = !HOLD && Supply::by_column;
    Team<SCOPE, LANES, 1> team(p.meeting);
    launch_next_grid();
    const Share<RAGGED, VEC> share(team.member, p.share, p.columns, first_shift<Y, NESTED, RAGGED>(p.source, team.index));
    unsigned reach = share.end;
    if constexpr (CAUSAL && one_row(FEED)) reach = share.read(p.causal.limit(team.index, p.columns));
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = share.begin + (i * team.threads + team.thread) * VEC;
    Supply feed(p.source, team.teams, column, share.begin, reach, shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    for (long long row = team.index; team.more(row, p.source.rows); row += team.teams) {
        const bool active = row < p.source.rows;   // else a team of a warp that waits for the others
        const unsigned read = active ? reach : 0, end = active ? share.end : 0;
        const Place<NESTED> place(row, p.source.inner_rows);
        const SoftmaxBackwardRow<Y, DY, DX, LOG, CAUSAL, RAGGED, VEC> here{
            CAUSAL ? p.causal.limit(row, p.columns) : p.columns, share.end, p.scale, place.template in<typename DX::type>(p.dx)};
        if constexpr (FEED == STRAIGHT) feed.arrive(row);
        // While the row comes.
        if constexpr (CAUSAL)
            each_vector<true>(column, [&](int, unsigned at) {
                if (starts_before<RAGGED>(at, end) && !starts_before<RAGGED>(at, read)) here.template write_zeros<in_l1>(at);
            });
        if constexpr (FEED != STRAIGHT) feed.arrive(row);
        Packed<typename Y::type, VEC> held_y[HOLD ? ITEMS : 1];
        Packed<typename DY::type, VEC> held_dy[HOLD ? ITEMS : 1];
        Sums<1> sum;
        each_vector<rolled, 1>(column, [&](int i, unsigned at) {
            if (!starts_before<RAGGED>(at, read)) return;
            auto& y = held_y[HOLD ? i : 0];
            auto& dy = held_dy[HOLD ? i : 0];
            feed.get(y, dy, i, at);
            here.add(sum, y, dy, at);
        });
        team.reduce(sum);
        // Without HOLD rows are read from the feed twice: whoever is here is done with the row before, not with this one.
        if (HOLD) feed.reuse(row);
        else if (row >= team.teams) feed.reuse(row - team.teams);
        each_vector<rolled, 1>(column, [&](int i, unsigned at) {
            if (!starts_before<RAGGED>(at, read)) return;
            auto& y = held_y[HOLD ? i : 0];
            auto& dy = held_dy[HOLD ? i : 0];
            if constexpr (!HOLD) feed.get(y, dy, i, at);
            here.template write<in_l1>(sum.value[0], y, dy, at);
        });
        if constexpr (one_row(FEED)) break;
    }
    team.finish();
}

// The same for rows of any length, which are read twice, the second time from the cache; one row per team.
template <class Y, class DY, class DX, bool LOG, bool CAUSAL, bool RAGGED,
          bool NESTED, Scope SCOPE, int VEC, int UNROLL, int BOUND>
__global__ void __launch_bounds__(BOUND) softmax_backward_twice(const SoftmaxBackwardParams p) {
    Team<SCOPE, 32, 1> team(p.meeting);
    launch_next_grid();
    const Place<NESTED> place(team.index, p.source.inner_rows);
    const auto* y_row = place.template in<const typename Y::type>(p.source.first);
    const auto* dy_row = place.template in<const typename DY::type>(p.source.second);
    const Share<RAGGED, VEC> share(team.member, p.share, p.columns, RAGGED ? shift_of(y_row) : 0);
    const unsigned limit = CAUSAL ? p.causal.limit(team.index, p.columns) : p.columns;
    const unsigned read = CAUSAL ? share.read(limit) : share.end, step = team.threads * VEC;
    const SoftmaxBackwardRow<Y, DY, DX, LOG, CAUSAL, RAGGED, VEC> here{limit, share.end, p.scale,
                                                                        place.template in<typename DX::type>(p.dx)};
    wait_for_previous_grid();
    Packed<typename Y::type, VEC> y[UNROLL];
    Packed<typename DY::type, VEC> dy[UNROLL];
    const auto load_all = [&](unsigned column) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const unsigned at = column + i * step;
            if (!starts_before<RAGGED>(at, read)) continue;
            if constexpr (RAGGED) {
                load_inside<Y>(y[i], y_row, at, read);
                load_inside<DY>(dy[i], dy_row, at, read);
            } else {
                load<Y>(y[i], y_row + at);
                load<DY>(dy[i], dy_row + at);
            }
        }
    };
    const unsigned first = share.begin + team.thread * VEC;
    Sums<1> sum;
    for (unsigned column = first; starts_before<RAGGED>(column, read); column += UNROLL * step) {
        load_all(column);
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (starts_before<RAGGED>(column + i * step, read)) here.add(sum, y[i], dy[i], column + i * step);
    }
    team.reduce(sum);
    team.finish();
    for (unsigned column = first; starts_before<RAGGED>(column, share.end); column += UNROLL * step) {
        load_all(column);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const unsigned at = column + i * step;
            if (!starts_before<RAGGED>(at, share.end)) continue;
            if (starts_before<RAGGED>(at, read)) here.template write<true>(sum.value[0], y[i], dy[i], at);
            else here.template write_zeros<true>(at);
        }
    }
}
