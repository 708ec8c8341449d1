// What moe_machine.cuh offers: votes of a warp, counting in shared memory, loads of what has long been written.
#include "emulation_moe.h"
#include "scheduler.h"

namespace emulation {

namespace {

// What a lane brings to a vote, and what it learns from it.
struct Ballot {
  unsigned value, lanes;
};

void finish_match(void* const* lanes) {
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    auto& mine = *static_cast<Ballot*>(lanes[lane]);
    mine.lanes = 0;
    for (unsigned other = 0; other < warp_lanes; ++other)
      if (static_cast<Ballot*>(lanes[other])->value == mine.value) mine.lanes |= 1u << other;
  }
}

unsigned cast(const char* what, unsigned value) {
  Ballot mine = {value, 0};
  meet(what, &mine, finish_match);
  return mine.lanes;
}

}  // namespace

void check_settled(const char* what, const void* pointer, unsigned bytes) {
  const auto address = reinterpret_cast<unsigned long long>(pointer);
  if (address % bytes != 0)
    fail("%s of %u bytes at %#llx: the address is not a multiple of %u", what, bytes, address, bytes);
  const Range* range = find_range(what, address, bytes, false);
  if (range->fresh && !place->previous_grid_done)
    fail("%s before wait_for_previous_grid() of what the previous grid has written", what);
}

}  // namespace emulation

using namespace emulation;

unsigned match_lanes(unsigned value) {
  static constexpr char name[] = "match_lanes";
  return cast(name, value);
}

// Those who bring the same as I do are the voters for it, or else all the others.
unsigned vote(bool so) {
  static constexpr char name[] = "vote";
  const unsigned same = cast(name, so);
  return so ? same : ~same;
}

unsigned atomic_add_shared(unsigned* pointer, unsigned value) {
  if (reinterpret_cast<unsigned long long>(pointer) % sizeof(unsigned) != 0 ||
      !in_shared(*self().home, pointer, sizeof(unsigned)))
    fail("atomic_add_shared: the address is not that of a word in this block's shared memory");
  idle_spins = 0;
  const unsigned before = *pointer;
  *pointer = before + value;
  return before;
}
