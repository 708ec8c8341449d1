// Fibers, the order in which they run, and the launch of a grid.
#include "scheduler.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <string>
#include <sys/mman.h>

namespace emulation {

constexpr unsigned max_threads = 1024;
constexpr unsigned max_cluster = 16;
constexpr unsigned long page = 4096;
constexpr unsigned long stack_bytes = 64 << 10;
// Not a power of two: equal offsets in all stacks would fall into the same few cache sets.
constexpr unsigned long stack_stride = stack_bytes + 9 * 64;
constexpr unsigned long long stack_mark = 0x5eed5eed5eed5eedull;
constexpr unsigned fibers_per_slab = 256;

Place* place;
Dim block_dim, grid_dim;
Traffic traffic;
unsigned long long idle_spins;
const Shape* shape;
bool waited_for_previous_grid;
unsigned ready_count;
unsigned shared_alignment;

namespace {

void (*invoke_kernel)(const void*, const void*);
const void* kernel;
const void* params;
Context launcher;
Context abandoned;  // where the state of a fiber goes that nobody returns to
std::string message;
bool failed;

std::vector<Fiber> fibers;
std::vector<Fiber*> ready;  // a ring of `ready_count` fibers from `ready_head` on; its size is a power of two
unsigned ready_head;
std::vector<Block> blocks;
std::vector<Cluster> clusters;
std::vector<char*> stacks, shared_slots;
unsigned live_fibers;
unsigned long long random_state;

unsigned random_below(unsigned limit) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned((random_state >> 33) % limit);
}

Fiber*& slot(unsigned index) { return ready[(ready_head + index) & (ready.size() - 1)]; }

[[noreturn]] void leave_launch() {
  failed = true;
  switch_context(abandoned, launcher);
  __builtin_unreachable();
}

Fiber* take_ready() {
  while (ready_count == 0)
    if (!land_copy()) fail_as_deadlock("deadlock: no thread can go on");
  if (shape->order == 1) return slot(--ready_count);
  std::swap(slot(0), slot(pick(ready_count)));
  Fiber* fiber = slot(0);
  ++ready_head;
  --ready_count;
  return fiber;
}

void run_another(Context& from) {
  Fiber* next = take_ready();
  if (next == place) return;
  ++traffic.switches;
  place = next;
  switch_context(from, next->context);
}

void run_fiber() {
  self().home->started = true;
  invoke_kernel(kernel, params);
  idle_spins = 0;
  leave(self());
  if (--live_fibers == 0) switch_context(abandoned, launcher);
  run_another(abandoned);
}

char* map_pages(unsigned long bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<char*>(pages);
}

// Stacks and shared memory are mapped once and used again by every later block.
bool reserve(unsigned fiber_count, unsigned block_count) {
  while (stacks.size() < fiber_count) {
    char* slab = map_pages(stack_stride * fibers_per_slab);
    if (slab == nullptr) return false;
    for (unsigned index = 0; index < fibers_per_slab; ++index) stacks.push_back(slab + index * stack_stride);
  }
  while (shared_slots.size() < block_count) {
    char* memory = map_pages(shared_capacity + page);
    if (memory == nullptr) return false;
    mprotect(memory + shared_capacity, page, PROT_NONE);
    shared_slots.push_back(memory);
  }
  return true;
}

void start_warps(Block& block) {
  const unsigned threads = block_dim.x;
  block.groups.assign(threads / (warp_lanes * group_warps), {});
  for (NamedBarrier& barrier : block.named) barrier = {};
  block.warps.resize((threads + warp_lanes - 1) / warp_lanes);
  for (unsigned first = 0; first < threads; first += warp_lanes) {
    Warp& warp = block.warps[first / warp_lanes];
    const unsigned lanes = min(warp_lanes, threads - first);
    warp.exited = lanes == warp_lanes ? 0u : ~0u << lanes;
    warp.pending.clear();
    for (unsigned lane = 0; lane < lanes; ++lane) warp.lanes[lane] = &block.fibers[first + lane];
  }
}

// Shared memory ends where an unreadable page begins, so that the first byte past it faults. Where it must start at a
// multiple of more than 16 bytes, what is left in between is looked at when the block ends.
void start_block(Block& block, unsigned index, unsigned group_position, Cluster& cluster) {
  const unsigned threads = block_dim.x;
  const unsigned long bytes = (shape->shared_bytes + 15) / 16 * 16;
  block.rank = index % shape->cluster;
  block.live = threads;
  block.arrived = 0;
  block.started = false;
  block.waiting.clear();
  block.window = shared_slots[group_position];
  block.shared = block.window + (shared_capacity - bytes) / shared_alignment * shared_alignment;
  std::memset(block.shared, 0xff, block.window + shared_capacity - block.shared);
  block.cluster = &cluster;
  block.fibers = &fibers[group_position * threads];
  start_warps(block);
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = block.fibers[thread];
    fiber.thread = {thread, 0, 0};
    fiber.block = {index, 0, 0};
    fiber.previous_grid_done = !shape->dependent;
    fiber.home = &block;
    fiber.waits_for = nullptr;
    fiber.spins_on = nullptr;
    fiber.cluster_phase = ClusterPhase::outside;
    fiber.in_flight = {};
    fiber.stack = stacks[group_position * threads + thread];
    prepare_context(fiber.context, fiber.stack, stack_bytes, run_fiber);
    std::memcpy(fiber.stack, &stack_mark, sizeof stack_mark);
    slot(ready_count++) = &fiber;
  }
}

void run_group(unsigned first_block, unsigned block_count) {
  barriers.clear();
  copies.clear();
  maps.clear();
  ready_head = ready_count = 0;
  live_fibers = block_count * block_dim.x;
  for (unsigned position = 0; position < block_count; ++position) {
    Cluster& cluster = clusters[position / shape->cluster];
    if (position % shape->cluster == 0) {
      cluster.live = shape->cluster * block_dim.x;
      cluster.arrived = 0;
      cluster.waiting.clear();
      cluster.blocks.clear();
    }
    cluster.blocks.push_back(&blocks[position]);
    start_block(blocks[position], first_block + position, position, cluster);
  }
  place = nullptr;
  run_another(launcher);
  place = nullptr;
  if (failed) return;
  for (const Fiber& fiber : fibers)
    if (std::memcmp(fiber.stack, &stack_mark, sizeof stack_mark) != 0) {
      message = "a thread needs more stack than the emulation gives it";
      failed = true;
    }
}

// A fault in a kernel (past shared memory, a wild pointer) is one more message, not the end of the process. The
// handler leaves by switching to the launcher: it runs unmasked and on a stack of its own, so nothing is left held.
void on_fault(int signal, siginfo_t* info, void*) {
  if (place == nullptr) {  // not a kernel's doing: the second fault takes the process down, as it should
    std::signal(signal, SIG_DFL);
    return;
  }
  const auto* address = static_cast<const char*>(info->si_addr);
  const char* what = signal == SIGFPE ? "arithmetic fault" : "access to memory that is not mapped";
  for (const char* memory : shared_slots)
    if (address >= memory + shared_capacity && address < memory + shared_capacity + page)
      what = "access past the end of shared memory";
  fail("%s, at %p", what, static_cast<const void*>(address));
}

class FaultHandler {
 public:
  FaultHandler() {
    static char stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (int index = 0; index < 3; ++index) sigaction(signals[index], &action, &old_actions[index]);
  }
  ~FaultHandler() {
    for (int index = 0; index < 3; ++index) sigaction(signals[index], &old_actions[index], nullptr);
    sigaltstack(&old_stack, nullptr);
  }

 private:
  static constexpr int signals[3] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_actions[3];
  stack_t old_stack;
};

const char* wrong_shape() {
  if (shape->grid == 0) return "a grid needs at least one block";
  if (shape->block == 0 || shape->block > max_threads) return "a block has 1 to 1024 threads";
  if (shape->cluster == 0 || shape->cluster > max_cluster) return "a cluster has 1 to 16 blocks";
  if (shape->grid % shape->cluster != 0) return "the grid is not a whole number of clusters";
  if (shape->shared_bytes > shared_capacity) return "more shared memory than any GPU has";
  return nullptr;
}

// Blocks that do not run together may run in any order, and `order` decides theirs too.
std::vector<unsigned> group_order(unsigned count) {
  std::vector<unsigned> groups(count);
  for (unsigned index = 0; index < count; ++index) groups[index] = shape->order == 1 ? count - 1 - index : index;
  for (unsigned left = count; left > 1 && shape->order > 1; --left)
    std::swap(groups[left - 1], groups[random_below(left)]);
  return groups;
}

}  // namespace

unsigned pick(unsigned count) {
  return shape->order == 0 ? 0 : shape->order == 1 ? count - 1 : random_below(count);
}

void make_ready(Fiber* fiber) {
  fiber->waits_for = nullptr;
  idle_spins = 0;
  slot(ready_count++) = fiber;
}

void make_ready(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) make_ready(fiber);
  waiting.clear();
}

void wait(const char* what) {
  Fiber& fiber = self();
  fiber.waits_for = what;
  run_another(fiber.context);
}

void step_aside() {
  Fiber& fiber = self();
  if (shape->order == 1) --ready_head;
  slot(shape->order == 1 ? 0 : ready_count) = &fiber;
  ++ready_count;
  run_another(fiber.context);
}

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  message = "block " + std::to_string(place->block.x) + " thread " + std::to_string(place->thread.x) + ": " + text;
  leave_launch();
}

void fail_as_deadlock(const char* headline) {
  message = headline;
  const Fiber* before = nullptr;
  unsigned shown = 0;
  for (const Fiber& fiber : fibers) {
    // Neighbours that wait for the same thing are told once.
    const bool repeats = before && before->waits_for == fiber.waits_for && before->home == fiber.home;
    before = &fiber;
    if (fiber.waits_for == nullptr || repeats || ++shown > 6) continue;
    message += "\n  block " + std::to_string(fiber.block.x) + ", from thread " + std::to_string(fiber.thread.x) +
               " on: " + fiber.waits_for;
  }
  leave_launch();
}

const char* launch(void (*invoke)(const void*, const void*), const void* function, const Shape& launch_shape,
                   const void* launch_params, unsigned alignment) {
  shape = &launch_shape;
  if (const char* wrong = wrong_shape()) return wrong;
  invoke_kernel = invoke;
  kernel = function;
  params = launch_params;
  shared_alignment = alignment;
  block_dim = {shape->block, 1, 1};
  grid_dim = {shape->grid, 1, 1};
  traffic = {};
  idle_spins = 0;
  failed = false;
  waited_for_previous_grid = false;
  random_state = shape->order;
  last_loaded = last_stored = &nowhere;

  const unsigned group = shape->cooperative ? shape->grid : shape->cluster;
  if (!reserve(group * shape->block, group)) return "not enough memory for the fibers' stacks";
  fibers.resize(group * shape->block);
  blocks.resize(group);
  clusters.resize(group / shape->cluster);
  unsigned capacity = 1;
  while (capacity < fibers.size()) capacity *= 2;
  ready.resize(capacity);

  {
    FaultHandler handler;
    for (unsigned index : group_order(shape->grid / group)) {
      run_group(index * group, group);
      if (failed) break;
    }
  }
  *shape->traffic = traffic;
  if (!failed && shape->dependent && !waited_for_previous_grid) {
    message = "a dependent launch must call wait_for_previous_grid(), or the grids after it may start too early";
    failed = true;
  }
  return failed ? message.c_str() : nullptr;
}

}  // namespace emulation
