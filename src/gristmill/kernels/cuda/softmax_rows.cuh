// The softmax of a row, whatever it is of and whatever is made of it.
//
// Two ways over a row: softmax_row() keeps it on the chip between one read and one write (feed.cuh), softmax_row_twice()
// reads it twice, the second time from the cache. Both are templates over two objects of the kernel's:
//
// Exponents, what the softmax is of. A term of the sum is 2^e; an exponent e is given in two steps, so that a kernel may
// find the largest one before it scales:
//   raw(x, column, out)   from a vector of the row to VEC raw numbers, larger ones for larger exponents; -INFINITY for what
//                         does not take part
//   largest(raw)          what stands for the largest raw number; -INFINITY of -INFINITY
//   unit                  exponents are so many times what largest() counts. With the raw number itself as the largest,
//                         numbers are subtracted before they are scaled: exact for any offset, and no overflow
//   above(raw, zero, out) how far VEC raw numbers lie above `zero`, which is such a largest one, or 0
//   power(above)          the term of such a distance
//
// Epilogue, what is made of it:
//   row(largest, sum)              once: the largest exponent of the row, as largest() counts, and the sum of
//                                  2^(e - largest); -INFINITY and 0 of a row with nobody in it
//   vector(column, value, factor)  for each vector: 2^(e - largest) is value[k] * factor, or, if `exponents` is true,
//                                  e - largest is value[k], as above() counts; what does not take part has 0, or -INFINITY
//   takes(column)                  whether it wants the vector there, too, of which nothing takes part
//
// Terms are taken relative to the largest of each thread's own values and corrected by one factor at the end, so that an
// element costs one power of two. Nothing is subtracted from -INFINITY but numbers: no NaN that was not in the row.
#pragma once
#include "feed.cuh"
#include "team.cuh"

// ---- what both ways share ----

// The terms of a vector of raw numbers join those of the thread.
template <int VEC, class Exponents>
DEVICE void add_terms(MaxAndSum& state, const Exponents& exponents, const float (&raw)[VEC]) {
    float term[VEC];
    float top = raw[0];
#pragma unroll
    for (int k = 1; k < VEC; k++) top = fmaxf(top, raw[k]);
    state.raise(exponents.largest(top));
    exponents.above(raw, MaxAndSum::base(state.value[0]), term);
#pragma unroll
    for (int k = 0; k < VEC; k++) term[k] = exponents.power(term[k]);
    state.value[1] += sum_of<VEC>(term);
}

// From raw numbers to what an epilogue takes.
template <bool EXPONENTS, int VEC, class Exponents>
DEVICE void to_values(const Exponents& exponents, float zero, float (&raw)[VEC]) {
    exponents.above(raw, zero, raw);
    if constexpr (!EXPONENTS) {
#pragma unroll
        for (int k = 0; k < VEC; k++) raw[k] = exponents.power(raw[k]);
    }
}

template <bool EXPONENTS, int VEC>
DEVICE void leave_out(float (&value)[VEC]) {
#pragma unroll
    for (int k = 0; k < VEC; k++) value[k] = EXPONENTS ? -INFINITY : 0.0f;
}

// ---- the two ways ----

// `column`: of the thread's vectors, of which those that start before `read` take part. HOLD: terms
// (or raw numbers) wait in registers as floats; else the row is taken from the feed again, AT_ONCE vectors at a time, and
// nothing waits. The edges of ragged rows make for long code.
template <bool HOLD, bool RAGGED, int VEC, int AT_ONCE = RAGGED ? 1 : 4, int ITEMS, class Members, class Supply, class Exponents, class Epilogue>
DEVICE void softmax_row(Members& team, Supply& feed, long long row, const unsigned (&column)[ITEMS], unsigned read,
                        const Exponents& exponents, Epilogue& epilogue) {
    constexpr bool rolled = !HOLD && Supply::by_column;
    Packed<typename Supply::A, VEC> x;
    Packed<typename Supply::B, VEC> other;
    float kept[HOLD ? ITEMS : 1][VEC];
    MaxAndSum state;
    state.unit = exponents.unit;
    if constexpr (HOLD) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (!starts_before<RAGGED>(column[i], read)) continue;
            feed.get(x, other, i, column[i]);
            exponents.raw(x, column[i], kept[i]);
#pragma unroll
            for (int k = 0; k < VEC; k++) top = fmaxf(top, kept[i][k]);
        }
        state.value[0] = exponents.largest(top);
        const float zero = MaxAndSum::base(state.value[0]);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (!starts_before<RAGGED>(column[i], read)) {
                leave_out<Epilogue::exponents>(kept[i]);
                continue;
            }
            float term[VEC];
            exponents.above(kept[i], zero, term);
#pragma unroll
            for (int k = 0; k < VEC; k++) {
                term[k] = exponents.power(term[k]);
                if constexpr (!Epilogue::exponents) kept[i][k] = term[k];
            }
            state.value[1] += sum_of<VEC>(term);
        }
    } else {
        each_vector<rolled, AT_ONCE>(column, [&](int i, unsigned here) {
            if (!starts_before<RAGGED>(here, read)) return;
            feed.get(x, other, i, here);
            exponents.raw(x, here, kept[0]);
            add_terms(state, exponents, kept[0]);
        });
    }
    const float own = state.value[0];
    team.reduce(state);
    // Without HOLD rows are taken from the feed twice: whoever is here is done with the row before, not with this one.
    if (HOLD) feed.reuse(row);
    else if (row >= team.teams) feed.reuse(row - team.teams);
    const float zero = MaxAndSum::base(state.value[0]);
    const float factor = HOLD && !Epilogue::exponents ? exp2_fast((own - zero) * state.unit) : 1.0f;
    epilogue.row(state.value[0], state.value[1]);
    each_vector<rolled, AT_ONCE>(column, [&](int i, unsigned here) {
        auto& value = kept[HOLD ? i : 0];
        if (!starts_before<RAGGED>(here, read)) {
            if (!epilogue.takes(here)) return;
            if constexpr (!HOLD) leave_out<Epilogue::exponents>(value);
        } else if constexpr (HOLD) {
            if constexpr (Epilogue::exponents) to_values<true>(exponents, zero, value);
        } else {
            feed.get(x, other, i, here);
            exponents.raw(x, here, value);
            to_values<Epilogue::exponents>(exponents, zero, value);
        }
        epilogue.vector(here, value, factor);
    });
}

// What does not take part, in the vectors that start from `read` on: written while the row comes.
template <bool RAGGED, int VEC, int ITEMS, class Epilogue>
DEVICE void write_rest(const unsigned (&column)[ITEMS], unsigned read, unsigned end, const Epilogue& epilogue) {
    each_vector<true>(column, [&](int, unsigned here) {
        if (starts_before<RAGGED>(here, read) || !starts_before<RAGGED>(here, end)) return;
        float value[VEC];
        leave_out<Epilogue::exponents>(value);
        epilogue.vector(here, value, 0.0f);
    });
}

// `first`: the column of the thread's first vector; the others are `step` columns apart. UNROLL vectors are under way at
// once, all loads first: the compiler moves no load across a store.
template <class X, bool RAGGED, int VEC, int UNROLL, class Members, class Exponents, class Epilogue>
DEVICE void softmax_row_twice(Members& team, const typename X::type* row, unsigned first, unsigned step, unsigned read, unsigned end,
                              const Exponents& exponents, Epilogue& epilogue) {
    const auto load_all = [&](Packed<typename X::type, VEC>(&x)[UNROLL], unsigned column) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const unsigned here = column + i * step;
            if (!starts_before<RAGGED>(here, read)) continue;
            if constexpr (RAGGED) load_inside<X>(x[i], row, here, read);
            else load<X>(x[i], row + here);
        }
    };
    MaxAndSum state;
    state.unit = exponents.unit;
    for (unsigned column = first; starts_before<RAGGED>(column, read); column += UNROLL * step) {
        Packed<typename X::type, VEC> x[UNROLL];
        load_all(x, column);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (!starts_before<RAGGED>(column + i * step, read)) continue;
            float raw[VEC];
            exponents.raw(x[i], column + i * step, raw);
            add_terms(state, exponents, raw);
        }
    }
    team.reduce(state);
    const float zero = MaxAndSum::base(state.value[0]);
    epilogue.row(state.value[0], state.value[1]);
    for (unsigned column = first; starts_before<RAGGED>(column, end); column += UNROLL * step) {
        Packed<typename X::type, VEC> x[UNROLL];
        load_all(x, column);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const unsigned here = column + i * step;
            if (!starts_before<RAGGED>(here, end)) continue;
            float value[VEC];
            if (starts_before<RAGGED>(here, read)) {
                exponents.raw(x[i], here, value);
                to_values<Epilogue::exponents>(exponents, zero, value);
            } else {
                leave_out<Epilogue::exponents>(value);
            }
            epilogue.vector(here, value, 1.0f);
        }
    }
}
