// What the experts made of a token, added up in the order of its slots and rounded once: the same at every run.
#include "moe_ids.cuh"
#include "vectors.cuh"

constexpr int THREADS = 128;
constexpr int WARP = 32;
constexpr int AHEAD = 8;   // rows whose loads are under way together

struct CombineParams {
    Ids ids;                // with ID == 0 `ids.ids` are positions [tokens][topk] of rows, -1 for a slot that takes no part
    const void* partial;    // [slots][hidden]; rows of slots that take no part hold anything
    void* y;                // [tokens]: rows of `hidden`, y_stride apart
    const void* weights;    // [tokens][topk]
    long long y_stride, weights_row, weights_column;   // in elements
    unsigned hidden;
    unsigned across;        // blocks side by side for a token
};

template <class T>
constexpr bool IS_ABSENT = false;
template <>
constexpr bool IS_ABSENT<Absent> = true;

template <class T>
DEVICE float load_weight(const void* weights, long long at) {
    Packed<T, 1> one;
    one.clear();
    load_settled<sizeof(T)>(one.words, static_cast<const T*>(weights) + at);
    return one.get(0);
}

// COLUMNS of a thread. ID, MAP: as in moe_ids.cuh; ID == 0: rows by position. Weight: the type of factors of rows, or Absent.
template <class Partial, class Out, int COLUMNS, int ID, int MAP, class Weight>
__global__ void __launch_bounds__(THREADS) moe_combine(const __grid_constant__ CombineParams p) {
    constexpr bool WEIGHTED = !IS_ABSENT<Weight>;
    const unsigned token = blockIdx.x / p.across, lane = threadIdx.x % WARP, topk = p.ids.topk;
    const unsigned column = (blockIdx.x % p.across * THREADS + threadIdx.x) * COLUMNS;
    const Partial* partial = static_cast<const Partial*>(p.partial) + column;
    float sums[COLUMNS] = {};
    for (unsigned base = 0; base < topk; base += WARP) {
        // Each lane looks at one slot. Who takes part was known long before the previous kernel began.
        unsigned row = NOBODY, weight = 0;
        if (base + lane < topk) {
            const unsigned j = base + lane, slot = token * topk + j;
            if constexpr (ID == 0) load_settled<4>(&row, static_cast<const int*>(p.ids.ids) + slot);
            else if (expert_of_id<MAP, true>(p.ids, id_of_slot<ID, true>(p.ids, slot)) != NOBODY) row = slot;
            if constexpr (WEIGHTED)
                weight = __float_as_uint(load_weight<Weight>(p.weights, token * p.weights_row + j * p.weights_column));
        }
        unsigned taken = vote(row != NOBODY);
        if (base == 0) {
            wait_for_previous_grid();
            launch_next_grid();
        }
        while (taken != 0) {
            const unsigned count = count_bits(taken);
            Packed<Partial, COLUMNS> values[AHEAD];
            unsigned factors[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (i >= count) break;
                const unsigned source = count_bits((taken & -taken) - 1);
                taken &= taken - 1;
                const long long at = shuffle_from(row, source);
                if constexpr (WEIGHTED) factors[i] = shuffle_from(weight, source);
                if (column < p.hidden) load<Tensor<Partial, 16>>(values[i], partial + at * p.hidden);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (i >= count || column >= p.hidden) break;
#pragma unroll
                for (int k = 0; k < COLUMNS; k++) {
                    if constexpr (WEIGHTED) sums[k] = fmaf(__uint_as_float(factors[i]), values[i].get(k), sums[k]);
                    else sums[k] += values[i].get(k);
                }
            }
        }
    }
    if (column >= p.hidden) return;
    Packed<Out, COLUMNS> rounded;
    rounded.set(sums);
    store<Tensor<Out, 16>>(static_cast<Out*>(p.y) + token * p.y_stride + column, rounded);
}
