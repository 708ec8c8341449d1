// The threads that share one row, and what they agree on (reductions.cuh): lanes of a warp, a block, a cluster of
// blocks, or several blocks of a cooperative grid. A kernel is written once against Team; the scope is a template argument.
#pragma once
#include "reductions.cuh"

enum Scope { WARP, BLOCK, CLUSTER, GRID };

// Blocks of a cooperative grid meet here: one counter and two rounds of partial results per team, zeroed by the host.
struct Meeting {
    unsigned* arrivals;   // [teams]
    unsigned* partials;   // [2][teams][blocks_per_row][FLOATS], floats as bits
    unsigned blocks_per_row;
};

// LANES: lanes per row in scope WARP (a power of two up to 32), 32 elsewhere. FLOATS: those of its largest reduction.
template <Scope SCOPE, int LANES, int FLOATS>
struct Team {
    unsigned thread;        // this thread within its block's share of the row
    unsigned threads;       // threads of this block that share the row
    unsigned member;        // this block within the row
    unsigned members;       // blocks that share the row
    unsigned index;         // this team within the grid
    unsigned teams;
    unsigned round = 0;
    Meeting meeting;

    static constexpr unsigned max_warps = 32, max_members = 16;

    // Bytes of shared memory that reduce() uses, at the start of the block's shared memory: two sets of slots and, in a
    // cluster, a barrier for each.
    // In a cluster every warp tells every block what it has; where that is much, each block agrees with itself first.
    static constexpr bool in_two_steps = SCOPE == CLUSTER && FLOATS > 2;
    static constexpr unsigned results = SCOPE != CLUSTER ? max_warps : in_two_steps ? max_warps + max_members : max_warps * max_members;
    static constexpr unsigned slots = SCOPE == WARP ? 0 : FLOATS * results;
    static constexpr unsigned barrier_bytes = SCOPE == CLUSTER ? 16 : 0;
    static constexpr unsigned shared_bytes = (barrier_bytes + 2 * slots * 4 + 127) / 128 * 128;

    DEVICE explicit Team(const Meeting& m) : meeting(m) {
        if constexpr (SCOPE == WARP) {
            thread = threadIdx.x % LANES, threads = LANES, member = 0, members = 1;
            index = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
            teams = gridDim.x * (blockDim.x / LANES);
        } else {
            thread = threadIdx.x, threads = blockDim.x;
            if constexpr (SCOPE == BLOCK) member = 0, members = 1;
            if constexpr (SCOPE == CLUSTER) member = cluster_rank(), members = cluster_size();
            if constexpr (SCOPE == GRID) member = blockIdx.x % m.blocks_per_row, members = m.blocks_per_row;
            index = blockIdx.x / members, teams = gridDim.x / members;
        }
        // A block may write into its neighbour only once that runs and its barriers are there: the wait is in reduce().
        if constexpr (SCOPE == CLUSTER) {
            if (threadIdx.x == 0) {
                barrier_init(barrier(0), 1);
                barrier_init(barrier(1), 1);
                barrier_init_fence();
            }
            cluster_arrive();
        }
    }

    // Rows are dealt to teams in turn. In scope WARP all teams of a warp stay in the loop until the last of them is
    // done, because the shuffles need every lane.
    DEVICE bool more(long long row, long long rows) const {
        if constexpr (SCOPE == WARP) return row - (threadIdx.x % 32) / LANES < rows;
        else return row < rows;
    }

    // Whether it is so anywhere that must go the same way: teams that share a warp share its shuffles. Of one team all
    // threads ask the same.
    DEVICE bool any(bool so) const {
        if constexpr (SCOPE == WARP && LANES < 32) return any_lane(so);
        else return so;
    }

    DEVICE void finish() const {
        if constexpr (SCOPE == CLUSTER)
            if (round == 0) cluster_wait();   // nothing was agreed on: still pair the arrival
    }

    // From each thread's share to the result of the whole team, the same bits in every thread.
    template <class Reduction>
    DEVICE void reduce(Reduction& state) {
        constexpr int floats = Reduction::floats;
        static_assert(floats <= FLOATS, "the team has no room for this reduction");
        state.template over_lanes<LANES>();
        if constexpr (SCOPE == WARP) return;
        const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        // Two sets of slots in turn: with one barrier per reduction, a fast warp may already write the next one while a
        // slow one reads this one, but never the one after.
        float* slot = reinterpret_cast<float*>(shared_memory() + barrier_bytes) + (round & 1) * slots;
        if constexpr (SCOPE != CLUSTER || in_two_steps) {
            if (lane == 0)
#pragma unroll
                for (int i = 0; i < floats; i++) slot[warp * floats + i] = state.value[i];
            __syncthreads();
            state.over_slots(SharedSlots<floats, true>{slot, warps});
        }
        if constexpr (SCOPE == GRID) meet(state);
        if constexpr (in_two_steps) {
            if (round == 0) cluster_wait();
            slot += max_warps * FLOATS;
            if (threadIdx.x == 0) barrier_expect(barrier(round & 1), members * floats * 4);
            if (threadIdx.x < members)
#pragma unroll
                for (int i = 0; i < floats; i++) store_remote(slot + member * floats + i, lane, state.value[i], barrier(round & 1));
            barrier_wait(barrier(round & 1), round / 2 & 1);
            state.over_slots(SharedSlots<floats, true>{slot, members});
        } else if constexpr (SCOPE == CLUSTER) {
            if (round == 0) cluster_wait();
            const unsigned count = members * warps;
            if (threadIdx.x == 0) barrier_expect(barrier(round & 1), count * floats * 4);
            if (lane < members)
#pragma unroll
                for (int i = 0; i < floats; i++)
                    store_remote(slot + (member * warps + warp) * floats + i, lane, state.value[i], barrier(round & 1));
            barrier_wait(barrier(round & 1), round / 2 & 1);
            state.over_slots(SharedSlots<floats, false>{slot, count});
        }
        round++;
    }

  private:
    static DEVICE unsigned long long* barrier(unsigned i) { return reinterpret_cast<unsigned long long*>(shared_memory()) + i; }

    template <class Reduction>
    DEVICE void meet(Reduction& state) {
        constexpr int floats = Reduction::floats;
        unsigned* partials = meeting.partials + ((round & 1) * teams + index) * static_cast<unsigned long long>(members) * FLOATS;
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < floats; i++) {
                const unsigned bits = __float_as_uint(state.value[i]);
                store_global<4>(partials + member * floats + i, &bits);
            }
            atomic_add_release(meeting.arrivals + index, 1);
            while (load_acquire(meeting.arrivals + index) < (round + 1) * members) {
            }
        }
        __syncthreads();
        state.over_slots(GlobalSlots<floats>{partials, members});
    }
};
