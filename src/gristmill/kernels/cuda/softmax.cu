// Softmax and log-softmax of rows: y = exp(v - max(v)) / sum(exp(v - max(v))), or its logarithm, where
//
//     v = scale * x [+ mask]      or -infinity, where a bool mask is false and beyond the causal limit
//
// A row with nobody in it gives zeros, or -infinity; a row of which a NaN or +infinity takes part is NaN, the hidden columns
// too, as that softmax is. What lies beyond the causal limit is not read; its zeros are written.
#include "softmax_limits.cuh"
#include "softmax_rows.cuh"

constexpr int MASK_LEVELS = 6;

// A mask that is broadcast over leading dims of x: row r of x takes the row of the mask that the strides say, outermost
// level first; a level that the mask does not have has stride 0.
struct MaskRows {
    const void* data;
    long long size[MASK_LEVELS], stride[MASK_LEVELS];   // in elements
    unsigned levels;

    template <class T>
    DEVICE const T* row(long long row) const {
        long long offset = 0;
#pragma unroll 1
        for (unsigned level = levels; level-- > 0;) {
            const long long above = divide(row, size[level]);
            offset += (row - above * size[level]) * stride[level];
            row = above;
        }
        return static_cast<const T*>(data) + offset;
    }
};

template <bool MASKED>
struct SoftmaxParams {
    Source source;            // x alone
    Rows y;
    Meeting meeting;
    Causal causal;
    unsigned columns, share;  // share: columns of a row per block, a multiple of VEC
    float scale;              // of x
};

template <>
struct SoftmaxParams<true> : SoftmaxParams<false> {
    MaskRows mask;
};

constexpr float LOG2E = 1.44269504f, LARGEST = 3.40282347e38f;

// Rows without a mask and with a scale above 0: the largest x has the largest exponent, so that only distances from it are
// scaled. A logarithm is made of v itself, not of exponents of 2, which overflow before it does.
template <bool LOG, bool LIMITED>
struct PlainExponents {
    const float unit, scale;
    const unsigned limit;

    DEVICE PlainExponents(float scale, unsigned limit)
        : unit(fminf(scale * LOG2E, LARGEST)), scale(LOG ? scale : unit), limit(limit) {}

    template <class T, int VEC>
    DEVICE void raw(const Packed<T, VEC>& x, unsigned column, float (&out)[VEC]) const {
#pragma unroll
        for (int k = 0; k < VEC; k++) out[k] = !LIMITED || column + k < limit ? x.get(k) : -INFINITY;
    }
    static DEVICE float largest(float raw) { return raw; }

    template <int VEC>
    DEVICE void above(const float (&raw)[VEC], float zero, float (&out)[VEC]) const {
#pragma unroll
        for (int k = 0; k < VEC; k++) out[k] = (raw[k] - zero) * scale;
    }
    static DEVICE float power(float above) { return exp2_fast(LOG ? above * LOG2E : above); }
};

// Any row: scaled and masked first, then compared.
template <class Mask, bool LOG, bool LIMITED, bool RAGGED>
struct MaskedExponents {
    using Element = typename Mask::type;
    static constexpr float unit = LOG2E;
    const float scale;
    const unsigned limit, columns;
    const Element* const mask;

    DEVICE MaskedExponents(float scale, unsigned limit, unsigned columns, const Element* mask)
        : scale(scale), limit(limit), columns(columns), mask(mask) {}

    template <class T, int VEC>
    DEVICE void raw(const Packed<T, VEC>& x, unsigned column, float (&out)[VEC]) const {
        Packed<Element, VEC> here;
        if constexpr (Mask::present) {
            if constexpr (RAGGED) load_inside<Mask>(here, mask, column, columns);
            else load<Mask>(here, mask + column);
        }
#pragma unroll
        for (int k = 0; k < VEC; k++) {
            bool part = !LIMITED || column + k < limit;
            float added = 0.0f;
            if constexpr (Mask::present && sizeof(Element) == 1) part = part && here.get(k) != 0.0f;
            else if constexpr (Mask::present) added = here.get(k);
            out[k] = part ? fmaf(x.get(k), scale, added) : -INFINITY;
        }
    }
    static DEVICE float largest(float raw) { return raw; }

    template <int VEC>
    static DEVICE void above(const float (&raw)[VEC], float zero, float (&out)[VEC]) {
#pragma unroll
        for (int k = 0; k < VEC; k++) out[k] = LOG ? raw[k] - zero : (raw[k] - zero) * unit;
    }
    static DEVICE float power(float above) { return exp2_fast(LOG ? above * LOG2E : above); }
};

template <class Y, bool LOG, bool CAUSAL, bool HOLD, bool RAGGED, bool IN_L1>
struct WriteSoftmax {
    using Element = typename Y::type;
    static constexpr bool exponents = LOG;
    Element* row_of_y;
    unsigned end;
    float last = 0.0f;   // 1 / sum, or LOG: the logarithm of the sum; 0 in a row with nobody in it

    DEVICE WriteSoftmax(Element* row_of_y, unsigned end) : row_of_y(row_of_y), end(end) {}

    DEVICE void row(float, float sum) {
        if constexpr (LOG) last = sum == 0.0f ? 0.0f : logf(sum);
        else last = sum == 0.0f ? 0.0f : 1.0f / sum;
    }

    // The hidden columns: of a row that is held all, else those whose zeros, written while it came, have to be NaN.
    DEVICE bool takes(unsigned column) const { return CAUSAL && (HOLD || last != last) && starts_before<RAGGED>(column, end); }

    template <int VEC>
    DEVICE void vector(unsigned column, const float (&value)[VEC], float factor) const {
        float result[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k++) result[k] = LOG ? value[k] - last : value[k] * (factor * last);
        Packed<Element, VEC> out;
        out.set(result);
        if constexpr (RAGGED) store_inside<Y, IN_L1>(row_of_y, column, end, out);
        else store<Y, IN_L1>(row_of_y + column, out);
    }
};

template <class Mask, bool LOG, bool PLAIN, bool CAUSAL, bool RAGGED>
DEVICE auto exponents_of(const SoftmaxParams<Mask::present>& p, long long row) {
    const unsigned limit = CAUSAL ? p.causal.limit(row, p.columns) : p.columns;
    if constexpr (PLAIN) {
        return PlainExponents<LOG, CAUSAL || RAGGED>(p.scale, limit);
    } else {
        const typename Mask::type* mask = nullptr;
        if constexpr (Mask::present) mask = p.mask.template row<typename Mask::type>(row);
        return MaskedExponents<Mask, LOG, CAUSAL || RAGGED, RAGGED>(p.scale, limit, p.columns, mask);
    }
}

// PLAIN: no mask, and a scale above 0. ITEMS vectors of VEC elements per thread; HOLD: whether the row waits in registers, or
// is read from the feed again; BOUND: the largest block.
template <class X, class Mask, class Y, bool LOG, bool PLAIN, bool CAUSAL, bool RAGGED,
          bool NESTED, Scope SCOPE, int LANES, int VEC, int ITEMS, int FEED, bool HOLD, int BOUND>
__global__ void __launch_bounds__(BOUND) softmax_forward(const SoftmaxParams<Mask::present> p) {
    Team<SCOPE, LANES, 2> team(p.meeting);
    launch_next_grid();
    const Share<RAGGED, VEC> share(team.member, p.share, p.columns, first_shift<X, NESTED, RAGGED>(p.source, team.index));
    unsigned read = share.end;
    if constexpr (CAUSAL && one_row(FEED)) read = share.read(p.causal.limit(team.index, p.columns));
    unsigned column[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) column[i] = share.begin + (i * team.threads + team.thread) * VEC;
    Feed<X, Absent, NESTED, VEC, ITEMS, FEED, RAGGED> feed(p.source, team.teams, column, share.begin, read,
                                                            shared_memory() + team.shared_bytes);
    wait_for_previous_grid();
    feed.prime(team.index);
    for (long long row = team.index; team.more(row, p.source.rows); row += team.teams) {
        const bool active = row < p.source.rows;   // else a team of a warp that waits for the others
        const Place<NESTED> place(row, p.source.inner_rows);
        // As for RMSNorm: stores that pass L1 by are for rows that come straight.
        WriteSoftmax<Y, LOG, CAUSAL && one_row(FEED), HOLD, RAGGED, FEED != STRAIGHT> write(
            place.template in<typename Y::type>(p.y), CAUSAL && !active ? 0 : share.end);
        if constexpr (FEED == STRAIGHT) feed.arrive(row);
        if constexpr (CAUSAL && one_row(FEED) && !HOLD)
            write_rest<RAGGED, VEC>(column, active ? read : 0, active ? share.end : 0, write);
        if constexpr (FEED != STRAIGHT) feed.arrive(row);
        const auto exponents = exponents_of<Mask, LOG, PLAIN, CAUSAL, RAGGED>(p, row);
        softmax_row<HOLD, RAGGED, VEC, RAGGED ? 1 : Mask::present ? 2 : 4>(
            team, feed, row, column, active ? read : 0, exponents, write);
        if constexpr (one_row(FEED)) break;
    }
    team.finish();
}

// The same for rows of any length, which are read twice; one row per team.
template <class X, class Mask, class Y, bool LOG, bool PLAIN, bool CAUSAL, bool RAGGED,
          bool NESTED, Scope SCOPE, int VEC, int UNROLL, int BOUND>
__global__ void __launch_bounds__(BOUND) softmax_forward_twice(const SoftmaxParams<Mask::present> p) {
    Team<SCOPE, 32, 2> team(p.meeting);
    launch_next_grid();
    const Place<NESTED> place(team.index, p.source.inner_rows);
    const auto* row = place.template in<const typename X::type>(p.source.first);
    const Share<RAGGED, VEC> share(team.member, p.share, p.columns, RAGGED ? shift_of(row) : 0);
    const unsigned read = CAUSAL ? share.read(p.causal.limit(team.index, p.columns)) : share.end;
    wait_for_previous_grid();
    const auto exponents = exponents_of<Mask, LOG, PLAIN, CAUSAL, RAGGED>(p, team.index);
    WriteSoftmax<Y, LOG, false, false, RAGGED, true> write(place.template in<typename Y::type>(p.y), share.end);
    softmax_row_twice<X, RAGGED, VEC, UNROLL>(team, row, share.begin + team.thread * VEC, team.threads * VEC, read, share.end,
                                              exponents, write);
    team.finish();
}
