// Which columns of a row a block has, and which of them take part under a causal limit.
#pragma once
#include "feed.cuh"

DEVICE long long divide(long long value, long long by) {
    return (value | by) >> 32 ? value / by : static_cast<unsigned>(value) / static_cast<unsigned>(by);
}

// Row i of every `queries` rows sees columns up to i + offset.
struct Causal {
    unsigned queries;
    int offset;

    // So many columns of a row take part.
    DEVICE unsigned limit(long long row, unsigned columns) const {
        const long long seen = row - divide(row, queries) * queries + offset + 1;
        return static_cast<unsigned>(min(max(seen, 0ll), static_cast<long long>(columns)));
    }
};

// A block's columns of a row. Those of a RAGGED row begin with its first aligned vector, `shift` columns before it.
template <bool RAGGED, int VEC>
struct Share {
    unsigned begin, end;

    DEVICE Share(unsigned member, unsigned share, unsigned columns, unsigned shift)
        : begin(RAGGED ? member * share - shift : min(member * share, columns)),
          end(min(member * share + share - shift, columns)) {}

    // What has to be read if columns from `limit` on do not take part: whole vectors, or, of a RAGGED row, elements.
    DEVICE unsigned read(unsigned limit) const {
        return min(end, RAGGED ? limit : max(begin, (limit + VEC - 1) / VEC * VEC));
    }
};

// The shift of the first tensor's row; 0 for a row that is not there, of which nothing may be touched.
template <class First, bool NESTED, bool RAGGED>
DEVICE unsigned first_shift(const Source& source, long long row) {
    if (!RAGGED || row >= source.rows) return 0;
    return shift_of(Place<NESTED>(row, source.inner_rows).template in<const typename First::type>(source.first));
}
