// Rows of one or two tensors on their way into a team.
//
// A kernel calls prime() once; for every row arrive(), then get() for each of the thread's vectors; and, once a barrier
// has shown that every thread of the block is done with a row, reuse() of that row.
//
// FEED says how the rows come:
//   STRAIGHT  into registers when asked for; a team does one row
//   AHEAD     into registers, one row ahead of the one that is worked on
//   ASYNC     into shared memory, each thread its own vectors; a team does one row. No registers wait for the data, so
//             that more blocks fit and more bytes are in flight
//   2, 3, ..  into a ring of so many rows in shared memory, by bulk copies
//
// RAGGED (vectors.cuh): `begin` and `column` count from the row's first aligned vector, so they may lie before the row;
// only for feeds of one row, since every row is shifted by its own number of elements.
#pragma once
#include "vectors.cuh"

constexpr int STRAIGHT = 0, AHEAD = -1, ASYNC = -2;

DEVICE constexpr bool one_row(int feed) { return feed == STRAIGHT || feed == ASYNC; }

// body(i, column[i]) for each of a thread's vectors, which lie equally far apart. ROLLED: as a loop of AT_ONCE at a time, for
// bodies that do not index registers by i; it takes fewer of them, so that more blocks fit on an SM (H200, softmax
// 4096x131072, 512 threads of 8 vectors: 531 us with 32 registers, 591 with 54).
template <bool ROLLED, int AT_ONCE = 4, int ITEMS, class Body>
DEVICE void each_vector(const unsigned (&column)[ITEMS], const Body& body) {
    if constexpr (ROLLED) {
        const unsigned step = ITEMS > 1 ? column[ITEMS - 1] - column[ITEMS > 1 ? ITEMS - 2 : 0] : 0;
        unsigned here = column[0];
#pragma unroll AT_ONCE
        for (int i = 0; i < ITEMS; i++, here += step) body(i, here);
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) body(i, column[i]);
    }
}

struct Source {
    Rows first, second;
    long long rows, inner_rows;
};

template <class First, class Second, bool NESTED, int VEC, int ITEMS, int FEED, bool RAGGED = false>
struct Feed {
    static_assert(!RAGGED, "bulk copies fetch whole vectors");
    using A = typename First::type;
    using B = typename Second::type;
    static constexpr bool by_column = true;   // get() needs no index that is known at compile time
    static constexpr unsigned bytes_per_column = sizeof(A) + (Second::present ? sizeof(B) : 0);
    static constexpr unsigned barrier_bytes = 128;

    const Source& source;
    const long long step;
    const unsigned begin, count;      // this block's columns
    unsigned long long* barriers;
    char* ring;
    unsigned started = 0, arrived = 0;

    DEVICE Feed(const Source& source, long long step, const unsigned (&)[ITEMS], unsigned begin, unsigned end, char* shared)
        : source(source), step(step), begin(begin), count(end - begin),
          barriers(reinterpret_cast<unsigned long long*>(shared)), ring(shared + barrier_bytes) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < FEED; i++) barrier_init(barriers + i, 1);
            barrier_init_fence();
        }
        __syncthreads();
    }

    DEVICE void prime(long long row) {
#pragma unroll 1
        for (int i = 0; i < FEED; i++) start(row + i * step);
    }

    DEVICE void arrive(long long) {
        barrier_wait(barriers + arrived % FEED, arrived / FEED & 1);
        arrived++;
    }

    DEVICE void get(Packed<A, VEC>& first, Packed<B, VEC>& second, int, unsigned column) const {
        const A* slot = reinterpret_cast<const A*>(slot_of(arrived - 1));
        first = *reinterpret_cast<const Packed<A, VEC>*>(slot + (column - begin));
        if constexpr (Second::present)
            second = *reinterpret_cast<const Packed<B, VEC>*>(reinterpret_cast<const B*>(slot + count) + (column - begin));
    }

    DEVICE void reuse(long long row) { start(row + FEED * step); }

  private:
    DEVICE char* slot_of(unsigned turn) const { return ring + turn % FEED * (count * bytes_per_column); }

    DEVICE void start(long long row) {
        if (row < source.rows && threadIdx.x == 0) {
            const Place<NESTED> place(row, source.inner_rows);
            unsigned long long* barrier = barriers + started % FEED;
            char* slot = slot_of(started);
            barrier_expect(barrier, count * bytes_per_column);
            if (count) bulk_copy(slot, place.template in<const A>(source.first) + begin, count * sizeof(A), barrier);
            if constexpr (Second::present)
                if (count) bulk_copy(slot + count * sizeof(A), place.template in<const B>(source.second) + begin, count * sizeof(B), barrier);
        }
        started++;
    }
};

// Registers, with no row ahead or one.
template <class First, class Second, bool NESTED, int VEC, int ITEMS, bool NEXT, bool RAGGED>
struct RegisterFeed {
    using A = typename First::type;
    using B = typename Second::type;
    static constexpr bool by_column = false;
    const Source& source;
    const long long step;
    const unsigned (&column)[ITEMS];
    const unsigned end;
    Packed<A, VEC> first_now[ITEMS], first_next[NEXT ? ITEMS : 1];
    Packed<B, VEC> second_now[ITEMS], second_next[NEXT ? ITEMS : 1];

    DEVICE RegisterFeed(const Source& source, long long step, const unsigned (&column)[ITEMS], unsigned, unsigned end, char*)
        : source(source), step(step), column(column), end(end) {}

    DEVICE void prime(long long row) {
        if constexpr (NEXT) fetch(first_next, second_next, row);
    }

    DEVICE void arrive(long long row) {
        if constexpr (NEXT) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) first_now[i] = first_next[i], second_now[i] = second_next[i];
            fetch(first_next, second_next, row + step);
        } else {
            fetch(first_now, second_now, row);
        }
    }

    DEVICE void get(Packed<A, VEC>& first, Packed<B, VEC>& second, int i, unsigned) const {
        first = first_now[i], second = second_now[i];
    }

    DEVICE void reuse(long long) {}

  private:
    DEVICE void fetch(Packed<A, VEC>* first, Packed<B, VEC>* second, long long row) {
        const Place<NESTED> place(row, source.inner_rows);
        const A* first_row = place.template in<const A>(source.first);
        const B* second_row = place.template in<const B>(source.second);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const bool here = row < source.rows && starts_before<RAGGED>(column[i], end);
            if (here) fetch<First>(first[i], first_row, column[i]);
            else first[i].clear();
            if constexpr (Second::present) {
                if (here) fetch<Second>(second[i], second_row, column[i]);
                else second[i].clear();
            }
        }
    }

    template <class Operand, class T>
    DEVICE void fetch(Packed<T, VEC>& out, const T* row, unsigned column) {
        if constexpr (RAGGED) load_inside<Operand>(out, row, column, end);
        else load<Operand>(out, row + column);
    }
};

template <class First, class Second, bool NESTED, int VEC, int ITEMS, bool RAGGED>
struct Feed<First, Second, NESTED, VEC, ITEMS, STRAIGHT, RAGGED>
    : RegisterFeed<First, Second, NESTED, VEC, ITEMS, false, RAGGED> {
    using RegisterFeed<First, Second, NESTED, VEC, ITEMS, false, RAGGED>::RegisterFeed;
};

template <class First, class Second, bool NESTED, int VEC, int ITEMS, bool RAGGED>
struct Feed<First, Second, NESTED, VEC, ITEMS, AHEAD, RAGGED>
    : RegisterFeed<First, Second, NESTED, VEC, ITEMS, true, RAGGED> {
    static_assert(!RAGGED, "the next row may be shifted otherwise");
    using RegisterFeed<First, Second, NESTED, VEC, ITEMS, true, RAGGED>::RegisterFeed;
};

template <class First, class Second, bool NESTED, int VEC, int ITEMS, bool RAGGED>
struct Feed<First, Second, NESTED, VEC, ITEMS, ASYNC, RAGGED> {
    using A = typename First::type;
    using B = typename Second::type;
    static constexpr bool by_column = true;
    const Source& source;
    const unsigned (&column)[ITEMS];
    const unsigned begin, end;
    A* first_slot;
    B* second_slot;

    DEVICE Feed(const Source& source, long long, const unsigned (&column)[ITEMS], unsigned begin, unsigned end, char* shared)
        : source(source), column(column), begin(begin), end(end), first_slot(reinterpret_cast<A*>(shared)),
          second_slot(reinterpret_cast<B*>(first_slot + (RAGGED ? (end - begin + VEC - 1) / VEC * VEC : end - begin))) {}

    DEVICE void prime(long long row) {
        const Place<NESTED> place(row, source.inner_rows);
        const A* first = place.template in<const A>(source.first);
        const B* second = place.template in<const B>(source.second);
        each_vector<true, 1>(column, [&](int, unsigned here) {
            if (RAGGED ? !is_inside<VEC>(here, end) : here >= end) return;
#pragma unroll
            for (int k = 0; k < VEC; k += 16 / sizeof(A)) copy_async(first_slot + (here - begin) + k, first + here + k);
            if constexpr (Second::present)
#pragma unroll
                for (int k = 0; k < VEC; k += 16 / sizeof(B)) copy_async(second_slot + (here - begin) + k, second + here + k);
        });
        if constexpr (RAGGED) {
            // The edges last: they are waited for.
            each_vector<true, 1>(column, [&](int, unsigned here) {
                if (is_inside<VEC>(here, end) || !starts_before<RAGGED>(here, end)) return;
                edge<First>(first_slot, first, here);
                if constexpr (Second::present) edge<Second>(second_slot, second, here);
            });
        }
    }

    DEVICE void arrive(long long) { copy_async_wait(); }

    DEVICE void get(Packed<A, VEC>& first, Packed<B, VEC>& second, int, unsigned column) const {
        first = *reinterpret_cast<const Packed<A, VEC>*>(first_slot + (column - begin));
        if constexpr (Second::present) second = *reinterpret_cast<const Packed<B, VEC>*>(second_slot + (column - begin));
    }

    DEVICE void reuse(long long) {}

  private:
    template <class Operand, class T>
    DEVICE void edge(T* slot, const T* row, unsigned column) {
        Packed<T, VEC> vector;
        load_inside<Operand>(vector, row, column, end);
        *reinterpret_cast<Packed<T, VEC>*>(slot + (column - begin)) = vector;
    }
};
