// Barriers and copies of tensor_cores.cuh: by name, by each thread, through tensor maps, from other blocks.
#include <algorithm>

#include "scheduler.h"

namespace emulation {

constexpr unsigned long long map_tag = 0x7e4502a9ull;
constexpr unsigned max_box = 256, unit = 16, swizzled_row = 128, swizzle_period = 1024;

namespace {

// What one thread copies on its own.
void start_thread_copy(const char* what, void* destination, const char* source) {
  const auto to = reinterpret_cast<unsigned long long>(destination);
  if (to % unit != 0) fail("%s to %#llx: the address is not a multiple of 16", what, to);
  if (!in_shared(*self().home, destination, unit)) fail("%s leaves the shared memory", what);
  if (source != nullptr) {
    check(what, last_loaded, source, unit, false);
    traffic.loaded += unit;
  }
  std::memset(destination, 0xff, unit);
  InFlight& mine = self().in_flight;
  mine.copies.push_back({static_cast<char*>(destination), source, mine.copy_groups});
}

const char* wrong_map(const TensorMap& map) {
  if (map.tag != map_tag) return "the map was not made by tensor_map()";
  if (map.element_bytes != 1 && map.element_bytes != 2 && map.element_bytes != 4) return "no such element size";
  if (map.address % 16 != 0 || map.row_stride % 16 != 0) return "address and row stride must be multiples of 16";
  if (map.columns == 0 || map.rows == 0) return "a tensor has at least one element";
  if (map.box_columns == 0 || map.box_rows == 0 || map.box_columns > max_box || map.box_rows > max_box)
    return "a box has 1 to 256 columns and rows";
  const unsigned bytes = map.box_columns * map.element_bytes;
  if (bytes % unit != 0) return "a row of the box must be a multiple of 16 bytes";
  if (map.swizzle != 0 && map.swizzle != swizzled_row) return "swizzles are 0 and 128";
  if (map.swizzle && bytes != swizzled_row) return "a row of a swizzled box is 128 bytes";
  return nullptr;
}

// [begin, end) of a box that starts at `start` within a tensor of `size`.
struct Span {
  long long begin, end;
  Span(int start, unsigned count, unsigned long long size)
      : begin(std::max(start, 0)), end(std::min<long long>(static_cast<long long>(start) + count, size)) {}
  bool empty() const { return begin >= end; }
};

const char* source_of(const TensorMap& map, long long column, long long row) {
  return reinterpret_cast<const char*>(map.address) + row * map.row_stride + column * map.element_bytes;
}

void check_box(const void* destination, const TensorMap* map, int column, int row) {
  const auto to = reinterpret_cast<unsigned long long>(destination);
  if (reinterpret_cast<unsigned long long>(map) % alignof(TensorMap) != 0)
    fail("tensor_copy: the map does not lie at a multiple of 64");
  if (const char* wrong = wrong_map(*map)) fail("tensor_copy: %s", wrong);
  const unsigned alignment = map->swizzle ? swizzle_period : swizzled_row;
  if (to % alignment != 0) fail("tensor_copy to %#llx: the address is not a multiple of %u", to, alignment);
  const unsigned bytes = map->box_rows * map->box_columns * map->element_bytes;
  if (!in_shared(*self().home, destination, bytes)) fail("tensor_copy of %u bytes leaves the shared memory", bytes);
  if (!self().previous_grid_done) fail("tensor_copy before wait_for_previous_grid()");
  const Span columns(column, map->box_columns, map->columns), rows(row, map->box_rows, map->rows);
  if (columns.empty() || rows.empty()) return;
  const char* const begin = source_of(*map, columns.begin, rows.begin);
  const char* const end = source_of(*map, columns.end, rows.end - 1);
  find_range("tensor_copy", reinterpret_cast<unsigned long long>(begin), unsigned(end - begin), false);
}

// A copy of a kernel's map that outlives the thread.
const TensorMap* kept(const TensorMap* map) {
  for (const TensorMap& known : maps)
    if (std::memcmp(&known, map, sizeof known) == 0) return &known;
  maps.push_back(*map);
  return &maps.back();
}

}  // namespace

// Rows of the box one below the other; swizzled: in each 1024 bytes the units of 16 of row r change places by xor r.
void land_box(const Copy& copy) {
  const TensorMap& map = *copy.map;
  const unsigned row_bytes = map.box_columns * map.element_bytes;
  const Span columns(copy.column, map.box_columns, map.columns);
  for (unsigned index = 0; index < map.box_rows; ++index) {
    char line[max_box * 4] = {};
    const long long row = static_cast<long long>(copy.row) + index;
    if (row >= 0 && row < static_cast<long long>(map.rows) && !columns.empty())
      std::memcpy(line + (columns.begin - copy.column) * map.element_bytes, source_of(map, columns.begin, row),
                  (columns.end - columns.begin) * map.element_bytes);
    for (unsigned at = 0; at < row_bytes; at += unit) {
      auto to = reinterpret_cast<unsigned long long>(copy.destination) + index * row_bytes + at;
      if (map.swizzle) to ^= (to >> 7 & 7) << 4;
      std::memcpy(reinterpret_cast<char*>(to), line + at, unit);
    }
  }
}

void land_thread_copies(Fiber& fiber, unsigned groups) {
  std::vector<ThreadCopy>& mine = fiber.in_flight.copies;
  unsigned landed = 0;
  for (; landed < mine.size() && mine[landed].group < groups; ++landed) {
    const ThreadCopy& copy = mine[landed];
    if (copy.source != nullptr)
      std::memcpy(copy.destination, copy.source, unit);
    else
      std::memset(copy.destination, 0, unit);
  }
  mine.erase(mine.begin(), mine.begin() + landed);
}

void wait_for_copies(unsigned pending) {
  const unsigned groups = self().in_flight.copy_groups;
  if (groups > pending) land_thread_copies(self(), groups - pending);
}

}  // namespace emulation

using namespace emulation;

// ---- barriers ----

void barrier_among(int name, int threads) {
  if (name < 1 || name >= int(named_barriers)) fail("barrier_among: %d names none of the barriers 1 to 15", name);
  if (threads <= 0 || threads % int(warp_lanes) != 0 || threads > int(block_dim.x))
    fail("barrier_among: %d threads are not whole warps of the block", threads);
  NamedBarrier& barrier = self().home->named[name];
  if (barrier.arrived != 0 && barrier.threads != unsigned(threads))
    fail("barrier_among: %d threads, where others wait for %u at barrier %d", threads, barrier.threads, name);
  barrier.threads = unsigned(threads);
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    make_ready(barrier.waiting);
  } else {
    barrier.waiting.push_back(&self());
    wait("barrier_among");
  }
}

void barrier_arrive(unsigned long long* address) {
  if (!in_shared(*self().home, address, sizeof *address))
    fail("barrier_arrive: the barrier is not in this block's shared memory");
  arrive_at("barrier_arrive", barrier_at("barrier_arrive", address), 0);
}

// ---- copies by each thread ----

void copy_async(void* destination, const void* source) {
  start_thread_copy("copy_async", destination, static_cast<const char*>(source));
}

void copy_async_or_zero(void* destination, const void* source, bool there) {
  start_thread_copy("copy_async_or_zero", destination, there ? static_cast<const char*>(source) : nullptr);
}

void copy_async_commit() { ++self().in_flight.copy_groups; }

void copy_async_wait() {
  copy_async_commit();
  wait_for_copies(0);
}

// ---- boxes of tensors, and other blocks ----

void tensor_copy(void* destination, const TensorMap* map, int column, int row, unsigned long long* barrier) {
  check_box(destination, map, column, row);
  const unsigned number = copy_barrier("tensor_copy", barrier);
  const unsigned bytes = map->box_rows * map->box_columns * map->element_bytes;
  traffic.bulk += bytes;
  std::memset(destination, 0xff, bytes);
  copies.push_back({static_cast<char*>(destination), nullptr, 0.0f, bytes, number, kept(map), column, row});
}

void load_remote(float (&out)[4], const float* address, unsigned rank) {
  if (reinterpret_cast<unsigned long long>(address) % sizeof out != 0 || !in_shared(*self().home, address, sizeof out))
    fail("load_remote: the address is not that of four aligned floats in this block's shared memory");
  std::memcpy(out, place_in(neighbour("load_remote from", rank), address), sizeof out);
}
