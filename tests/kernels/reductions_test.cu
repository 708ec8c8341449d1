// One team reduces a row, every thread writes what it got: for test_emulated_reductions.py.
#include "team.cuh"

struct Params {
    const float* in;    // [2][columns]
    float* out;         // [threads of all blocks][6]
    Meeting meeting;
    unsigned columns, share;   // share: columns per block
};

DEVICE float read(const float* pointer) {
    unsigned bits;
    load_global<4>(&bits, pointer);
    return __uint_as_float(bits);
}

template <class Team, class State>
DEVICE void write(const Params& p, const Team& team, const State& state) {
#pragma unroll
    for (int k = 0; k < State::floats; k++) {
        const unsigned bits = __float_as_uint(state.value[k]);
        store_global<4>(p.out + (blockIdx.x * blockDim.x + threadIdx.x) * 6 + k, &bits);
    }
}

// A thread's columns: every `threads`-th of its block's share.
#define FOR_EACH_COLUMN(team, p, column)                                                        \
    for (unsigned column = team.member * p.share + team.thread, end = min((team.member + 1) * p.share, p.columns); \
         column < end; column += team.threads)

template <bool PRODUCTS, Scope SCOPE, int LANES>
__global__ void __launch_bounds__(1024) moments(const Params p) {
    Team<SCOPE, LANES, 6> team(p.meeting);
    wait_for_previous_grid();
    float count = 0.0f, firsts = 0.0f, sum = 0.0f;
    FOR_EACH_COLUMN(team, p, c) {
        if (count == 0.0f) sum = read(p.in + c), firsts = 1.0f;
        count += 1.0f;
    }
    count = lane_sum<LANES>(count), firsts = lane_sum<LANES>(firsts), sum = lane_sum<LANES>(sum);
    MomentsOf<PRODUCTS> state(count, firsts > 0.0f ? sum / firsts : 0.0f);
    FOR_EACH_COLUMN(team, p, c) {
        const float x[1] = {read(p.in + c)}, g[1] = {PRODUCTS ? read(p.in + p.columns + c) : 0.0f};
        if constexpr (PRODUCTS) state.add(x, g);
        else state.add(x);
    }
    team.reduce(state);
    team.finish();
    write(p, team, state);
}

template <Scope SCOPE, int LANES>
__global__ void __launch_bounds__(1024) softmax_sum(const Params p) {
    Team<SCOPE, LANES, 6> team(p.meeting);
    wait_for_previous_grid();
    float largest = -INFINITY;
    FOR_EACH_COLUMN(team, p, c) largest = fmaxf(largest, read(p.in + c));
    MaxAndSum state;
    state.raise(largest);
    FOR_EACH_COLUMN(team, p, c) state.value[1] += exp2_fast(read(p.in + c) - MaxAndSum::base(state.value[0]));
    team.reduce(state);
    team.finish();
    write(p, team, state);
}

template <Scope SCOPE, int LANES>
__global__ void __launch_bounds__(1024) largest(const Params p) {
    Team<SCOPE, LANES, 6> team(p.meeting);
    wait_for_previous_grid();
    Max state;
    FOR_EACH_COLUMN(team, p, c) {
        const float value[1] = {read(p.in + c)};
        state.add(value);
    }
    team.reduce(state);
    team.finish();
    write(p, team, state);
}
