// Small kernels that use one thing each of moe_machine.cuh, right or wrong on purpose, for test_emulation_votes.py.
#include "moe_machine.cuh"

struct Params {
    const unsigned* in;
    unsigned* out;
    unsigned value;
};

DEVICE unsigned position() { return blockIdx.x * blockDim.x + threadIdx.x; }

DEVICE unsigned read(const unsigned* pointer) {
    unsigned word;
    load_global<4>(&word, pointer);
    return word;
}

DEVICE void write(unsigned* pointer, unsigned value) { store_global<4>(pointer, &value); }

__global__ void match(const Params p) { write(p.out + position(), match_lanes(read(p.in + position()))); }

__global__ void ask(const Params p) { write(p.out + position(), vote(read(p.in + position()) < p.value)); }

__global__ void take_from(const Params p) {
    write(p.out + position(), shuffle_from(read(p.in + position()), (threadIdx.x * 3 + p.value) % (p.value == 99 ? 64 : 32)));
}

__global__ void take_up(const Params p) { write(p.out + position(), shuffle_up(read(p.in + position()), p.value)); }

__global__ void count(const Params p) { write(p.out + position(), count_bits(read(p.in + position()))); }

__global__ void vote_after_a_lane_left(const Params p) {
    if (threadIdx.x == 5) return;
    write(p.out + position(), vote(true));
}

// A histogram of the block's words.
__global__ void histogram(const Params p) {
    auto* counts = reinterpret_cast<unsigned*>(shared_memory());
    if (threadIdx.x < p.value) counts[threadIdx.x] = 0;
    __syncthreads();
    atomic_add_shared(counts + read(p.in + position()), 1);
    __syncthreads();
    if (threadIdx.x < p.value) write(p.out + threadIdx.x, counts[threadIdx.x]);
}

// Everybody's number of order: what was there before.
__global__ void draw(const Params p) {
    auto* counter = reinterpret_cast<unsigned*>(shared_memory());
    if (threadIdx.x == 0) *counter = 0;
    __syncthreads();
    write(p.out + atomic_add_shared(counter, 1), 7);
}

__global__ void add_elsewhere(const Params p) { atomic_add_shared(p.out, 1); }

__global__ void add_askew(const Params p) { atomic_add_shared(reinterpret_cast<unsigned*>(shared_memory() + 2), 1); }

// Before the wait; `value`: by a load that may not be.
template <int BYTES>
__global__ void read_early(const Params p) {
    unsigned words[4] = {};
    const char* pointer = reinterpret_cast<const char*>(p.in) + position() * BYTES;
    if (p.value == 1) load_global<BYTES>(words, pointer);
    else load_settled<BYTES>(words, pointer + (p.value == 2 ? 1 : 0));
    wait_for_previous_grid();
    store_global<BYTES>(reinterpret_cast<char*>(p.out) + position() * BYTES, words);
}
