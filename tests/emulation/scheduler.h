// What the parts of the emulation's runtime share: scheduler.cpp runs fibers, the others are what they call:
// machine.cpp, and for what tensor_cores.cuh offers tensor_copies.cpp and matrices.cpp.
//
// Blocks that may talk to each other run together (a cluster; the whole grid of a cooperative launch), other blocks
// one after another. A fiber runs until it must wait, then switches straight to another that can run; when none
// can, a copy in flight lands, and when there is none either, the launch is deadlocked.
#pragma once

#include <deque>
#include <vector>

#include "emulation.h"
#include "fibers.h"
#include "tensor_runtime.h"

namespace emulation {

constexpr unsigned warp_lanes = 32, group_warps = 4;
constexpr unsigned named_barriers = 16;
constexpr unsigned long shared_capacity = 256 << 10;

struct Block;

// How far a thread is with the cluster's split barrier.
enum class ClusterPhase { outside, arrived, complete };

// 16 bytes that a thread copies on its own (none: zeros), until it waits for the group that they belong to.
struct ThreadCopy {
  char* destination;
  const char* source;
  unsigned group;
};

// A warpgroup's multiplication that a thread has issued, with what it read then.
struct Product {
  bool bf16;
  unsigned tokens, group;
  float* sums;
  const unsigned* operand;
  unsigned operand_then[4];
  Matrix matrix;
  std::vector<unsigned short> matrix_then;  // for a warp's first lane
};

// Sums of a thread that products in flight belong to: NaN where the kernel has them, their values here.
struct Accumulator {
  float* sums;
  unsigned in_flight;
  std::vector<float> values;
};

// What a thread has begun and not waited for.
struct InFlight {
  std::vector<ThreadCopy> copies;
  std::vector<Product> products;
  std::vector<Accumulator> accumulators;
  unsigned copy_groups, product_groups;  // so many are complete, and this is the number of the open one
  bool begun;                            // begin_matrices() since the last group
};

struct Fiber : Place {
  Context context;
  Block* home;
  const char* waits_for;        // nullptr while it can run
  const unsigned* spins_on;     // where its last load_acquire() read
  ClusterPhase cluster_phase;
  InFlight in_flight;
  char* stack;
};

// Called by the last lane of a warp that comes to an instruction of all 32, with what each of them brought.
using Finish = void (*)(void* const* lanes);

// Lanes that wait for each other at one __syncwarp, shuffle or matrix instruction.
struct Collective {
  const char* what;
  unsigned mask, arrived;
  Finish finish;
};

struct Warp {
  unsigned exited;  // lanes that have returned, or that a short last warp does not have
  Fiber* lanes[warp_lanes];
  unsigned long long values[warp_lanes], results[warp_lanes];
  unsigned sources[warp_lanes];
  std::vector<Collective> pending;
};

// The matrices that a warpgroup has multiplied by, in order, and how far along each of its warps is.
struct Warpgroup {
  std::vector<Matrix> issued;
  unsigned counts[group_warps];
};

struct NamedBarrier {
  unsigned threads, arrived;
  std::vector<Fiber*> waiting;
};

// Blocks of one cluster share a split barrier.
struct Cluster {
  unsigned live, arrived;
  std::vector<Fiber*> waiting;
  std::vector<Block*> blocks;
};

struct Block {
  unsigned rank, live, arrived;
  bool started;
  char* shared;
  char* window;  // address 0 of the shared memory that a descriptor counts from; ends where `shared` does
  Cluster* cluster;
  Fiber* fibers;
  std::vector<Fiber*> waiting;
  std::vector<Warp> warps;
  std::vector<Warpgroup> groups;
  NamedBarrier named[named_barriers];
};

// An 8-byte barrier in shared memory. The word there holds only its number: its state is kept where a kernel
// cannot overwrite it unseen.
struct Barrier {
  unsigned long long* address;
  Fiber* maker;
  bool fenced;
  unsigned count, missing, phase;
  long long expected_bytes;
  std::vector<Fiber*> waiting;
};

// Bytes on their way into shared memory: a bulk copy, (with no source) a float stored by another block, or the box of
// a tensor map at a column and a row.
struct Copy {
  char* destination;
  const char* source;
  float value;
  unsigned bytes, barrier;
  const TensorMap* map = nullptr;  // one of `maps`
  int column = 0, row = 0;
};

extern const Shape* shape;
extern bool waited_for_previous_grid;
extern std::vector<Barrier> barriers;
extern std::deque<Copy> copies;  // in flight
extern std::deque<TensorMap> maps;  // that copies were made with: the kernel's own may be gone when one lands
extern unsigned ready_count;     // fibers that can run, but for the running one

inline Fiber& self() { return *static_cast<Fiber*>(place); }

// scheduler.cpp
void make_ready(Fiber* fiber);
void make_ready(std::vector<Fiber*>& waiting);
void wait(const char* what);  // until somebody makes this fiber ready
void step_aside();            // behind all others that can run
unsigned pick(unsigned count);  // one of so many that are equal, as the launch's order has it
[[noreturn]] void fail_as_deadlock(const char* headline);

// machine.cpp
bool land_copy();          // one copy in flight arrives; false if there is none
void leave(Fiber& fiber);  // the barriers no longer count this fiber
void meet(const char* what, void* mine, Finish finish);  // all lanes of the warp
Barrier& barrier_at(const char* what, const unsigned long long* address);
unsigned copy_barrier(const char* what, const unsigned long long* address);  // the number of one that copies may complete
void arrive_at(const char* what, Barrier& barrier, unsigned bytes);
bool in_shared(const Block& block, const void* pointer, unsigned long bytes);
// Block `rank` of the running one's cluster, if its shared memory may be touched.
Block& neighbour(const char* what, unsigned rank);
// The same place in its shared memory.
template <class T>
T* place_in(const Block& target, T* pointer) {
  return reinterpret_cast<T*>(target.shared + (reinterpret_cast<const char*>(pointer) - self().home->shared));
}

// tensor_copies.cpp
void land_box(const Copy& copy);
void land_thread_copies(Fiber& fiber, unsigned groups);

// matrices.cpp
void check_groups(const Block& block);  // when the block ends

}  // namespace emulation
