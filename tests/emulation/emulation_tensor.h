// What the kernels' tensor_cores.cuh offers on a GPU, on a CPU. As strict as emulation.h:
//
// A copy by a thread (copy_async...) lands when that thread waits for it. A warpgroup's multiplication is done when it is
// waited for: until then its sums are NaN, and whoever changed them, the operand in registers or the matrix in shared
// memory in between ends the launch.
#pragma once

#include "tensor_runtime.h"

// Kernels that include this find their shared memory at such an address, as they do on a GPU that has tensor maps.
#define EMULATION_SHARED_ALIGNMENT 1024

inline char* shared_memory_1024() { return shared_memory(); }

template <int PENDING>
inline void copy_async_wait_for() {
  emulation::wait_for_copies(PENDING);
}

template <class T, bool HIGH>
inline unsigned multiply_pair(unsigned a, unsigned b) {
  return emulation::multiply_pair(IS_BF16<T>, a, HIGH ? b >> 16 : b & 0xffffu);
}

template <unsigned MASK>
inline unsigned select_bits(unsigned a, unsigned b) {
  return (a & MASK) | (b & ~MASK);
}

inline unsigned rotate_right(unsigned word, int count) {
  return word >> (count & 31) | word << (-count & 31);
}

inline unsigned byte_select(unsigned word, unsigned selector) {
  unsigned result = 0;
  for (unsigned byte = 0; byte < 4; ++byte) {
    const unsigned from = selector >> 4 * byte & 0xfu;
    if (from > 7) emulation::fail("byte_select: the selector %#x has a digit above 7", selector);
    if (from < 4) result |= (word >> 8 * from & 0xffu) << 8 * byte;
  }
  return result;
}

inline unsigned uniform(unsigned value) {
  const unsigned first = unsigned(emulation::exchange(emulation::uniform_name, 0xffffffffu, value, 0));
  if (first != value) emulation::fail("uniform: %u here, %u in lane 0", value, first);
  return first;
}

template <int COUNT>
inline void lower_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "no such number of registers");
}

template <int COUNT>
inline void raise_registers() {
  lower_registers<COUNT>();
}

template <class T>
inline void multiply_warp(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulation::multiply_warp(IS_BF16<T>, d, a, b0, b1);
}

template <int PENDING>
inline void wait_for_matrices() {
  emulation::wait_for_products(PENDING);
}

template <class T, int TOKENS>
inline void multiply_group(float (&d)[TOKENS / 2], const unsigned (&a)[4], Matrix b) {
  static_assert(TOKENS % 8 == 0 && TOKENS >= 8 && TOKENS <= 256, "no such instruction");
  emulation::multiply_group(IS_BF16<T>, TOKENS, d, a, b);
}

template <int COUNT>
inline void hold(float (&)[COUNT]) {}
