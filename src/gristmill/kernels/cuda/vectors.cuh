// Element types, and short vectors of them that travel through registers as packed words.
#pragma once
#include "machine.cuh"

struct bf16 {
    unsigned short bits;
};
struct f16 {
    unsigned short bits;
};
struct f8 {
    unsigned char bits;   // E4M3; written, never read
};
struct u8 {
    unsigned char bits;   // a bool of torch's; read, never written
};

// A tensor as a kernel sees it at compile time: its element type and the widest access, in bytes, that its
// address and strides allow. Every tensor has its own: an fp32 weight does not narrow the accesses to a bf16 row.
template <class T, int ACCESS>
struct Tensor {
    using type = T;
    static constexpr int access = ACCESS;
    static constexpr bool present = true;
};

struct Absent {
    using type = float;
    static constexpr int access = 4;
    static constexpr bool present = false;
};

// A tensor at run time: contiguous rows, the strides between them in elements.
struct Rows {
    void* data;
    long long outer, inner;
};

// Where a row lies. Leading dims nearly always collapse into one; where they do not (a transpose, the heads of a fused
// qkv) the kernel is NESTED: `inner_rows` rows with stride `inner` for every step of stride `outer`.
template <bool NESTED>
struct Place {
    long long outer, inner;

    DEVICE Place(long long row, long long inner_rows) : outer(row), inner(0) {
        if constexpr (NESTED) {
            outer = (row | inner_rows) >> 32 ? row / inner_rows
                                             : static_cast<unsigned>(row) / static_cast<unsigned>(inner_rows);
            inner = row - outer * inner_rows;
        }
    }

    template <class T>
    DEVICE T* in(const Rows& tensor) const {
        return static_cast<T*>(tensor.data) + (NESTED ? outer * tensor.outer + inner * tensor.inner : outer * tensor.outer);
    }
};

template <class T, int COUNT>
struct alignas(COUNT * sizeof(T) >= 16 ? 16 : COUNT * sizeof(T) >= 8 ? 8 : 4) Packed {
    static constexpr int words_per_vector = (COUNT * sizeof(T) + 3) / 4;
    unsigned words[words_per_vector];

    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < words_per_vector; i++) words[i] = 0;
    }

    DEVICE float get(int i) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[i]);
        } else if constexpr (sizeof(T) == 1) {
            return words[i / 4] >> i % 4 * 8 & 0xffu ? 1.0f : 0.0f;
        } else {
            const unsigned word = words[i / 2];
            if constexpr (is_bf16(T())) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
            else return f16_to_float(static_cast<unsigned short>(i % 2 ? word >> 16 : word));
        }
    }

    // Element i as bits, into a vector whose element i is still zero.
    DEVICE void put(int i, unsigned bits) {
        if constexpr (sizeof(T) == 4) words[i] = bits;
        else if constexpr (sizeof(T) == 2) words[i / 2] |= bits << i % 2 * 16;
        else words[i / 4] |= bits << i % 4 * 8;
    }

    DEVICE unsigned bits(int i) const {
        if constexpr (sizeof(T) == 4) return words[i];
        else if constexpr (sizeof(T) == 2) return words[i / 2] >> i % 2 * 16 & 0xffffu;
        else return words[i / 4] >> i % 4 * 8 & 0xffu;
    }

    // Values 2*i and 2*i + 1 at once: the packing instructions take two.
    DEVICE void set_pair(int i, float low, float high) {
        if constexpr (sizeof(T) == 4) {
            words[2 * i] = __float_as_uint(low);
            if (2 * i + 1 < words_per_vector) words[2 * i + 1] = __float_as_uint(high);
        } else if constexpr (sizeof(T) == 1) {
            const unsigned pair = pack_e4m3(low, high);
            words[i / 2] = i % 2 ? words[i / 2] | pair << 16 : pair;
        } else if constexpr (is_bf16(T())) {
            words[i] = pack_bf16(low, high);
        } else {
            words[i] = pack_f16(low, high);
        }
    }

    DEVICE void set(const float (&values)[COUNT]) {
#pragma unroll
        for (int i = 0; i < (COUNT + 1) / 2; i++)
            set_pair(i, values[2 * i], 2 * i + 1 < COUNT ? values[2 * i + 1] : 0.0f);
    }

  private:
    static constexpr DEVICE bool is_bf16(bf16) { return true; }
    template <class Other>
    static constexpr DEVICE bool is_bf16(Other) { return false; }
};

template <class T>
DEVICE float round_to(float value) {
    if constexpr (sizeof(T) == 4) {
        return value;
    } else {
        Packed<T, 2> pair;
        pair.set_pair(0, value, 0.0f);
        return pair.get(0);
    }
}

// The sum of a vector's values, pair by pair: as many additions as one after another, of which fewer wait for others and fewer roundings add up.
template <int COUNT>
DEVICE float sum_of(const float* values) {
    if constexpr (COUNT == 1) return values[0];
    else return sum_of<COUNT / 2>(values) + sum_of<COUNT - COUNT / 2>(values + COUNT / 2);
}

template <class Operand, class T, int COUNT>
DEVICE void load(Packed<T, COUNT>& out, const T* pointer) {
    constexpr int total = COUNT * sizeof(T), step = Operand::access < total ? Operand::access : total;
    if constexpr (sizeof(T) == 1 && step < 4) {
        out.clear();
#pragma unroll
        for (int i = 0; i < total; i += step) {
            unsigned part;
            load_global<step>(&part, pointer + i);
            out.words[i / 4] |= part << i % 4 * 8;
        }
    } else if constexpr (step == 2) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            unsigned low, high = 0;
            load_global<2>(&low, pointer + i);
            if (i + 1 < COUNT) load_global<2>(&high, pointer + i + 1);
            out.words[i / 2] = low | high << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < total; i += step)
            load_global<step>(&out.words[i / 4], reinterpret_cast<const char*>(pointer) + i);
    }
}

template <class Operand, bool IN_L1 = false, class T, int COUNT>
DEVICE void store(T* pointer, const Packed<T, COUNT>& in) {
    constexpr int total = COUNT * sizeof(T), step = Operand::access < total ? Operand::access : total;
    if constexpr (sizeof(T) == 1 && step < 4) {
#pragma unroll
        for (int i = 0; i < total; i += step) {
            const unsigned part = in.words[i / 4] >> i % 4 * 8;
            store_global<step, IN_L1>(pointer + i, &part);
        }
    } else if constexpr (step == 2) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const unsigned half = i % 2 ? in.words[i / 2] >> 16 : in.words[i / 2];
            store_global<2, IN_L1>(pointer + i, &half);
        }
    } else {
#pragma unroll
        for (int i = 0; i < total; i += step)
            store_global<step, IN_L1>(reinterpret_cast<char*>(pointer) + i, &in.words[i / 4]);
    }
}

// ---- ragged rows: rows whose length or address is no multiple of 16 bytes, covered by aligned vectors ----
//
// The first vector of a RAGGED row starts at column -shift, the last one may end behind the row. Columns are unsigned, so
// those before the row are huge numbers; what is outside of the row neither is read nor written.

// Elements by which a row lies beyond a multiple of 16 bytes.
template <class T>
DEVICE unsigned shift_of(const T* row) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(T));
}

// Whether a vector at `column` has something before `end`. RAGGED: rows are shorter than 2^30.
template <bool RAGGED>
DEVICE bool starts_before(unsigned column, unsigned end) {
    return RAGGED ? static_cast<int>(column) < static_cast<int>(end) : column < end;
}

// Whether all of a vector's columns are within [0, end).
template <int COUNT>
DEVICE bool is_inside(unsigned column, unsigned end) {
    return column < end && end - column >= COUNT;
}

// The part of a vector that is within [0, end); elsewhere it is zero.
template <class Operand, class T, int COUNT>
DEVICE void load_inside(Packed<T, COUNT>& out, const T* row, unsigned column, unsigned end) {
    if (is_inside<COUNT>(column, end)) {
        load<Operand>(out, row + column);
        return;
    }
    out.clear();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const unsigned here = column + i;
        if (here >= end) continue;
        unsigned bits;
        load_global<sizeof(T)>(&bits, row + here);
        out.put(i, bits);
    }
}

template <class Operand, bool IN_L1 = false, class T, int COUNT>
DEVICE void store_inside(T* row, unsigned column, unsigned end, const Packed<T, COUNT>& in) {
    if (is_inside<COUNT>(column, end)) {
        store<Operand, IN_L1>(row + column, in);
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const unsigned here = column + i, bits = in.bits(i);
        if (here < end) store_global<sizeof(T), IN_L1>(row + here, &bits);
    }
}
