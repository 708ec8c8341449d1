// What a kernel calls: warp collectives, barriers, clusters, atomics, bulk copies, checked memory.
//
// Whatever the programming model leaves undefined is told to the user. Threads that have returned count as arrived
// at every barrier, as they do on a GPU.
#include <algorithm>
#include <string>

#include "scheduler.h"

namespace emulation {

constexpr unsigned long long barrier_tag = 0xba221e2ull << 32;
constexpr long long max_expected_bytes = (1 << 20) - 1;  // what the hardware's transaction count holds

const Range nowhere = {1, 0, 0, 0};
const Range *last_loaded = &nowhere, *last_stored = &nowhere;
std::vector<Barrier> barriers;
std::deque<Copy> copies;
std::deque<TensorMap> maps;

namespace {

void finish_collectives(Warp& warp, const Fiber* running) {
  for (unsigned index = 0; index < warp.pending.size();) {
    const Collective collective = warp.pending[index];
    if (((collective.arrived | warp.exited) & collective.mask) != collective.mask) {
      ++index;
      continue;
    }
    warp.pending.erase(warp.pending.begin() + index);
    if (collective.finish) {
      if (collective.arrived != collective.mask) fail("%s: a lane of the warp has returned", collective.what);
      void* lanes[warp_lanes];
      std::memcpy(lanes, warp.values, sizeof lanes);
      collective.finish(lanes);
    }
    for (unsigned lane = 0; lane < warp_lanes; ++lane) {
      if (!(collective.arrived >> lane & 1u)) continue;
      const unsigned source = warp.sources[lane];
      if (!(collective.arrived >> source & 1u))
        fail("%s: lane %u reads lane %u, which does not take part", collective.what, lane, source);
      warp.results[lane] = warp.values[source];
      if (warp.lanes[lane] != running) make_ready(warp.lanes[lane]);
    }
  }
}

void finish_block_barrier(Block& block) {
  if (block.arrived == 0 || block.arrived != block.live) return;
  block.arrived = 0;
  make_ready(block.waiting);
}

void finish_cluster_barrier(Cluster& cluster) {
  if (cluster.arrived == 0 || cluster.arrived != cluster.live) return;
  cluster.arrived = 0;
  for (Block* block : cluster.blocks)
    for (unsigned thread = 0; thread < block_dim.x; ++thread) {
      ClusterPhase& phase = block->fibers[thread].cluster_phase;
      if (phase == ClusterPhase::arrived) phase = ClusterPhase::complete;
    }
  make_ready(cluster.waiting);
}

void finish_phase(Barrier& barrier) {
  if (barrier.missing != 0 || barrier.expected_bytes != 0) return;
  ++barrier.phase;
  barrier.missing = barrier.count;
  make_ready(barrier.waiting);
}

// The last lane to arrive hands out everybody's result, so a fast lane's next call cannot disturb a slow one.
unsigned long long join(const char* what, unsigned mask, unsigned long long value, unsigned source, Finish finish) {
  Fiber& fiber = self();
  Warp& warp = fiber.home->warps[fiber.thread.x / warp_lanes];
  const unsigned me = lane(), bit = 1u << me;
  if (!(mask & bit)) fail("%s: lane %u calls with mask %#x, which does not name it", what, me, mask);
  warp.values[me] = value;
  warp.sources[me] = source;
  Collective* collective = nullptr;
  for (Collective& pending : warp.pending)
    if (pending.mask == mask && pending.what == what) collective = &pending;
  if (collective == nullptr) {
    warp.pending.push_back({what, mask, 0, finish});
    collective = &warp.pending.back();
  }
  collective->arrived |= bit;
  if (((collective->arrived | warp.exited) & mask) == mask)
    finish_collectives(warp, &fiber);
  else
    wait(what);
  return warp.results[me];
}

// What can be told only when the last thread has returned.
void end(const Block& block) {
  check_groups(block);
  for (const Copy& copy : copies)
    if (in_shared(block, copy.destination, copy.bytes))
      fail("the block ends while a copy into its shared memory is in flight");
  for (const char* byte = block.shared + shape->shared_bytes; byte < block.window + shared_capacity; ++byte)
    if (*byte != char(0xff)) fail("something was written past the end of shared memory");
}

}  // namespace

Barrier& barrier_at(const char* what, const unsigned long long* address) {
  const unsigned long long index = *address ^ barrier_tag;
  if (index >= barriers.size() || barriers[index].address != address)
    fail("%s: there is no initialised barrier at this address", what);
  return barriers[index];
}

// The number of a barrier on which copies may complete.
unsigned copy_barrier(const char* what, const unsigned long long* address) {
  const Barrier& barrier = barrier_at(what, address);
  if (!barrier.fenced) fail("%s: barrier_init_fence() has not made the barrier visible to copies", what);
  return unsigned(&barrier - barriers.data());
}

bool in_shared(const Block& block, const void* pointer, unsigned long bytes) {
  const auto* address = static_cast<const char*>(pointer);
  return address >= block.shared && address + bytes <= block.shared + shape->shared_bytes;
}

void arrive_at(const char* what, Barrier& barrier, unsigned bytes) {
  if (barrier.missing == 0) fail("%s: more arrivals in one phase than the barrier's count", what);
  --barrier.missing;
  barrier.expected_bytes += bytes;
  if (barrier.expected_bytes > max_expected_bytes) fail("%s: more bytes than a barrier can count", what);
  finish_phase(barrier);
}

Block& neighbour(const char* what, unsigned rank) {
  if (rank >= shape->cluster) fail("%s rank %u of a cluster of %u blocks", what, rank, shape->cluster);
  Block& target = *self().home->cluster->blocks[rank];
  if (!target.started) fail("%s rank %u, which may not have started: synchronise the cluster", what, rank);
  if (target.live == 0) fail("%s rank %u, which has ended", what, rank);
  return target;
}

bool land_copy() {
  if (copies.empty()) return false;
  std::swap(copies.front(), copies[pick(unsigned(copies.size()))]);
  const Copy copy = copies.front();
  copies.pop_front();
  if (copy.map)
    land_box(copy);
  else
    std::memcpy(copy.destination, copy.source ? copy.source : reinterpret_cast<const char*>(&copy.value), copy.bytes);
  barriers[copy.barrier].expected_bytes -= copy.bytes;
  idle_spins = 0;
  finish_phase(barriers[copy.barrier]);
  return true;
}

void leave(Fiber& fiber) {
  Block& block = *fiber.home;
  if (!fiber.in_flight.products.empty()) fail("the thread ends while a multiply_group() of it is in flight");
  Warp& warp = block.warps[fiber.thread.x / warp_lanes];
  warp.exited |= 1u << lane();
  finish_collectives(warp, nullptr);
  --block.live;
  if (block.live == 0) end(block);
  finish_block_barrier(block);
  if (fiber.cluster_phase == ClusterPhase::arrived) --block.cluster->arrived;
  fiber.cluster_phase = ClusterPhase::outside;
  --block.cluster->live;
  finish_cluster_barrier(*block.cluster);
}

const Range* find_range(const char* what, unsigned long long address, unsigned bytes, bool writes) {
  bool read_only = false;
  for (unsigned index = 0; index < shape->range_count; ++index) {
    const Range& range = shape->ranges[index];
    if (address < range.begin || address + bytes > range.end) continue;
    if (range.writable || !writes) return &range;
    read_only = true;
  }
  if (read_only) fail("%s of %u bytes at %#llx: the buffer is read-only", what, bytes, address);
  // Name the buffer that was probably meant, and how far off the access is.
  std::string nearest = "no buffer is registered";
  unsigned long long distance = ~0ull;
  for (unsigned index = 0; index < shape->range_count; ++index) {
    const Range& range = shape->ranges[index];
    const bool before = address < range.begin;
    const unsigned long long away = before ? range.begin - address : address + bytes - range.end;
    if (away >= distance) continue;
    distance = away;
    nearest = std::to_string(away) + (before ? " bytes before the start" : " bytes past the end") + " of buffer " +
              std::to_string(index) + " (" + std::to_string(range.end - range.begin) + " bytes)";
  }
  fail("%s of %u bytes at %#llx is out of bounds: %s", what, bytes, address, nearest.c_str());
}

unsigned lane() { return place->thread.x % warp_lanes; }

unsigned long long exchange(const char* what, unsigned mask, unsigned long long value, unsigned source) {
  return join(what, mask, value, source, nullptr);
}

void meet(const char* what, void* mine, Finish finish) {
  join(what, ~0u, reinterpret_cast<unsigned long long>(mine), lane(), finish);
}

}  // namespace emulation

using namespace emulation;

void __syncthreads() {
  Block& block = *self().home;
  if (++block.arrived == block.live) {
    finish_block_barrier(block);
  } else {
    block.waiting.push_back(&self());
    wait("__syncthreads");
  }
}

char* shared_memory() { return self().home->shared; }

unsigned cluster_rank() { return self().home->rank; }

unsigned cluster_size() { return shape->cluster; }

void cluster_arrive() {
  Fiber& fiber = self();
  if (fiber.cluster_phase != ClusterPhase::outside) fail("cluster_arrive() twice without cluster_wait()");
  fiber.cluster_phase = ClusterPhase::arrived;
  ++fiber.home->cluster->arrived;
  finish_cluster_barrier(*fiber.home->cluster);
}

void cluster_wait() {
  Fiber& fiber = self();
  if (fiber.cluster_phase == ClusterPhase::outside) fail("cluster_wait() without cluster_arrive()");
  if (fiber.cluster_phase == ClusterPhase::arrived) {
    fiber.home->cluster->waiting.push_back(&fiber);
    wait("cluster_wait");
  }
  fiber.cluster_phase = ClusterPhase::outside;
}

void wait_for_previous_grid() {
  waited_for_previous_grid = true;
  if (self().previous_grid_done) return;
  Block& block = *self().home;
  for (unsigned thread = 0; thread < block_dim.x; ++thread) block.fibers[thread].previous_grid_done = true;
}

unsigned atomic_add_release(unsigned* pointer, unsigned value) {
  check("atomic_add_release", last_stored, pointer, sizeof(unsigned), true);
  idle_spins = 0;
  const unsigned before = *pointer;
  *pointer = before + value;
  return before;
}

void atomic_max(unsigned* pointer, unsigned value) {
  check("atomic_max", last_stored, pointer, sizeof(unsigned), true);
  idle_spins = 0;
  *pointer = std::max(*pointer, value);
}

// A second load from one address is taken for spinning: the others go first, and if nothing else happens for long,
// nothing ever will. With a random order the one fiber that would end the spinning may have to wait many turns.
unsigned load_acquire(const unsigned* pointer) {
  check("load_acquire", last_loaded, pointer, sizeof(unsigned), false);
  Fiber& fiber = self();
  idle_spins = fiber.spins_on == pointer ? idle_spins + 1 : 0;
  fiber.spins_on = pointer;
  if (idle_spins > 64 + 100ull * ready_count && !land_copy()) {
    fiber.waits_for = "load_acquire";
    fail_as_deadlock("deadlock: threads spin on load_acquire() and no other can go on");
  }
  step_aside();
  return *pointer;
}

void barrier_init(unsigned long long* address, unsigned count) {
  Fiber& fiber = self();
  if (reinterpret_cast<unsigned long long>(address) % 8 != 0 || !in_shared(*fiber.home, address, 8))
    fail("barrier_init: the address is not that of 8 aligned bytes in this block's shared memory");
  if (count == 0) fail("barrier_init: a barrier needs at least one arrival");
  *address = barrier_tag ^ barriers.size();
  barriers.push_back({address, &fiber, false, count, count, 0, 0, {}});
}

void barrier_init_fence() {
  for (Barrier& barrier : barriers)
    if (barrier.maker == &self()) barrier.fenced = true;
}

void barrier_expect(unsigned long long* address, unsigned bytes) {
  arrive_at("barrier_expect", barrier_at("barrier_expect", address), bytes);
}

void barrier_wait(unsigned long long* address, unsigned parity) {
  const unsigned index = unsigned(&barrier_at("barrier_wait", address) - barriers.data());
  while ((barriers[index].phase & 1u) == parity) {
    barriers[index].waiting.push_back(&self());
    wait("barrier_wait");
  }
}

// What is copied becomes unreadable at once and arrives late: who reads before the wait, or copies over what others
// still read, gets NaN.
void store_remote(float* address, unsigned rank, float value, unsigned long long* barrier_address) {
  Block& block = *self().home;
  if (reinterpret_cast<unsigned long long>(address) % sizeof(float) != 0 || !in_shared(block, address, sizeof(float)))
    fail("store_remote: the address is not that of a float in this block's shared memory");
  if (!in_shared(block, barrier_address, sizeof(unsigned long long)))
    fail("store_remote: the barrier is not in this block's shared memory");
  Block& target = neighbour("store_remote to", rank);
  const unsigned barrier = copy_barrier("store_remote", place_in(target, barrier_address));
  std::memset(place_in(target, address), 0xff, sizeof(float));
  copies.push_back({reinterpret_cast<char*>(place_in(target, address)), nullptr, value, sizeof(float), barrier});
}

namespace {

// Global memory that may be read even before the previous grid is done.
void check_constant(const char* what, unsigned long long address, unsigned bytes) {
  const Range* range = find_range(what, address, bytes, false);
  if (!self().previous_grid_done && range->writable)
    fail("%s before wait_for_previous_grid() from a buffer that kernels write", what);
}

void start_bulk_copy(const char* what, void* destination, const void* source, unsigned bytes,
                     const unsigned long long* barrier_address) {
  const unsigned barrier = copy_barrier(what, barrier_address);
  const auto from = reinterpret_cast<unsigned long long>(source), to = reinterpret_cast<unsigned long long>(destination);
  if (from % 16 != 0 || to % 16 != 0 || bytes % 16 != 0 || bytes == 0)
    fail("%s of %u bytes from %#llx to %#llx: all three must be multiples of 16", what, bytes, from, to);
  if (!in_shared(*self().home, destination, bytes)) fail("%s of %u bytes leaves the shared memory", what, bytes);
  check_constant(what, from, bytes);
  traffic.bulk += bytes;
  std::memset(destination, 0xff, bytes);
  copies.push_back({static_cast<char*>(destination), static_cast<const char*>(source), 0.0f, bytes, barrier});
}

}  // namespace

void bulk_copy(void* destination, const void* source, unsigned bytes, unsigned long long* barrier) {
  if (!self().previous_grid_done) fail("bulk_copy before wait_for_previous_grid()");
  start_bulk_copy("bulk_copy", destination, source, bytes, barrier);
}

void bulk_copy_constant(void* destination, const void* source, unsigned bytes, unsigned long long* barrier) {
  start_bulk_copy("bulk_copy_constant", destination, source, bytes, barrier);
}
