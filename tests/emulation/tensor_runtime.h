// What emulation_tensor.h asks of the runtime (tensor_copies.cpp, matrices.cpp).
#pragma once

#include "emulation.h"

// On a GPU the driver makes 128 opaque bytes of a tensor; here the host packs these (harness.py, tensor_map).
struct alignas(64) TensorMap {
  unsigned long long tag, address, columns, rows, row_stride;  // the stride in bytes
  unsigned box_columns, box_rows, element_bytes, swizzle;      // swizzle: 128, or 0 for none
  unsigned char unused[72];
};
static_assert(sizeof(TensorMap) == 128, "as long as the driver's");

void barrier_among(int name, int threads);
void barrier_arrive(unsigned long long* barrier);

void copy_async_or_zero(void* shared_destination, const void* source, bool there);
void copy_async_commit();
void bulk_copy_constant(void* shared_destination, const void* source, unsigned bytes, unsigned long long* barrier);
void tensor_copy(void* shared_destination, const TensorMap* map, int column, int row, unsigned long long* barrier);
void load_remote(float (&out)[4], const float* address, unsigned rank);

void load_matrices(unsigned (&out)[4], const void* row);
void load_matrices(unsigned (&out)[2], const void* row);
void store_matrices_turned(void* row, const unsigned (&in)[4]);
void store_matrices_turned(void* row, const unsigned (&in)[2]);

void begin_matrices();
void end_matrices();
// The lower half of a descriptor, as the GPU has it.
using Matrix = unsigned;
Matrix matrix_of(const void* tile, int step);

namespace emulation {

void wait_for_copies(unsigned pending);
void multiply_warp(bool bf16, float* sums, const unsigned* a, unsigned b0, unsigned b1);
void multiply_group(bool bf16, unsigned tokens, float* sums, const unsigned* a, Matrix b);
void wait_for_products(unsigned pending);
unsigned multiply_pair(bool bf16, unsigned pair, unsigned factor);
inline constexpr char uniform_name[] = "uniform";

}  // namespace emulation
