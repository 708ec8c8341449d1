// What the kernels' moe_machine.cuh offers on a GPU, on a CPU (votes.cpp). As strict as emulation.h.
#pragma once

#include "emulation.h"

namespace emulation {

// Alignment and bounds, and that it may be read even before the previous grid is done.
void check_settled(const char* what, const void* pointer, unsigned bytes);

inline constexpr char shuffle_from_name[] = "shuffle_from", shuffle_up_name[] = "shuffle_up";

}  // namespace emulation

template <int BYTES>
inline void load_settled(unsigned* out, const void* pointer) {
  static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "no such access width");
  emulation::check_settled("load_settled", pointer, BYTES);
  emulation::traffic.loaded += BYTES;
  if (BYTES < 4) out[0] = 0;
  std::memcpy(out, pointer, BYTES);
}

unsigned match_lanes(unsigned value);
unsigned vote(bool so);

inline unsigned shuffle_from(unsigned value, unsigned lane) {
  if (lane > 31) emulation::fail("shuffle_from: there is no lane %u", lane);
  return unsigned(emulation::exchange(emulation::shuffle_from_name, 0xffffffffu, value, lane));
}

inline unsigned shuffle_up(unsigned value, unsigned distance) {
  const unsigned lane = emulation::lane(), source = lane < distance ? lane : lane - distance;
  return unsigned(emulation::exchange(emulation::shuffle_up_name, 0xffffffffu, value, source));
}

inline unsigned count_bits(unsigned word) { return unsigned(__builtin_popcount(word)); }

unsigned atomic_add_shared(unsigned* pointer, unsigned value);
