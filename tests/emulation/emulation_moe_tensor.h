// What the kernels' moe_tensor_cores.cuh offers on a GPU, on a CPU. As strict as emulation_tensor.h.
#pragma once

#include "emulation_tensor.h"

namespace emulation {

// Whether there is an instruction of so many columns among those for at most MOST.
template <int MOST>
bool has_columns(unsigned columns) {
  static_assert(MOST == 8 || MOST == 16 || MOST == 32 || MOST == 64 || MOST == 128 || MOST == 192, "no such tile");
  if (columns == 0 || columns > MOST) return false;
  if (MOST == 192) return columns == 32 || columns == 64 || (columns >= 96 && columns % 16 == 0 && columns != 176);
  return MOST == 128 ? columns % 16 == 0 : columns % 8 == 0 && !(MOST == 64 && columns == 56);
}

}  // namespace emulation

template <class T, int MOST>
inline void multiply_columns(float (&d)[MOST / 2], const unsigned (&a)[4][4], Matrix tile, unsigned columns) {
  if (!emulation::has_columns<MOST>(columns)) emulation::fail("multiply_columns: of at most %d there are no %u", MOST, columns);
  begin_matrices();
  for (int step = 0; step < 4; step++) emulation::multiply_group(IS_BF16<T>, columns, d, a[step], tile + 2 * step);
  end_matrices();
}

template <class T, int TOKENS>
inline void multiply_tokens(float (&d)[TOKENS / 2], const unsigned (&a)[4], Matrix b) {
  multiply_group<T, TOKENS>(d, a, b);
}
