// What the two halves of the emulation's runtime share: scheduler.cpp runs fibers, machine.cpp is what they call.
//
// Blocks that may talk to each other run together (a cluster; the whole grid of a cooperative launch), other blocks
// one after another. A fiber runs until it must wait, then switches straight to another that can run; when none
// can, a copy in flight lands, and when there is none either, the launch is deadlocked.
#pragma once

#include <deque>
#include <vector>

#include "emulation.h"
#include "fibers.h"

namespace emulation {

constexpr unsigned warp_lanes = 32;

struct Block;

// How far a thread is with the cluster's split barrier.
enum class ClusterPhase { outside, arrived, complete };

struct Fiber : Place {
  Context context;
  Block* home;
  const char* waits_for;        // nullptr while it can run
  const unsigned* spins_on;     // where its last load_acquire() read
  ClusterPhase cluster_phase;
  char* stack;
};

// Lanes that wait for each other at one __syncwarp or shuffle.
struct Collective {
  const char* what;
  unsigned mask, arrived;
};

struct Warp {
  unsigned exited;  // lanes that have returned, or that a short last warp does not have
  Fiber* lanes[warp_lanes];
  unsigned long long values[warp_lanes], results[warp_lanes];
  unsigned sources[warp_lanes];
  std::vector<Collective> pending;
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
  Cluster* cluster;
  Fiber* fibers;
  std::vector<Fiber*> waiting;
  std::vector<Warp> warps;
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

// Bytes on their way into shared memory: a bulk copy, or (with no source) a float stored by another block.
struct Copy {
  char* destination;
  const char* source;
  float value;
  unsigned bytes, barrier;
};

extern const Shape* shape;
extern bool waited_for_previous_grid;
extern std::vector<Barrier> barriers;
extern std::deque<Copy> copies;  // in flight
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

}  // namespace emulation
