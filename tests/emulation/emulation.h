// What the kernels' machine.cuh offers on a GPU, on a CPU: with -DGRISTMILL_EMULATION the same kernel text compiles
// with g++ and every CUDA thread runs as a fiber (scheduler.cpp, machine.cpp).
//
// The emulation is stricter than a GPU where that finds bugs: shared memory starts as NaN, a copy lands as late as
// possible and its destination is NaN until then, every global access is checked against the buffers
// that the launch declared, and whatever the programming model leaves undefined ends the launch with a message.
#pragma once

#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulation {

struct Dim {
  unsigned x, y, z;
};

// Where the running fiber is in the grid, and whether it may touch global memory yet: in a dependent launch not
// before its block has called wait_for_previous_grid().
struct Place {
  Dim thread, block;
  bool previous_grid_done;
};

// Bytes [begin, end) that a launch may read, and write if `writable`. `fresh`: the previous grid may have written them.
struct Range {
  unsigned long long begin, end, writable, fresh;
};

// Bytes that a launch moved, and fiber switches it took.
struct Traffic {
  unsigned long long loaded, stored, bulk, switches;
};

struct Shape {
  unsigned grid, block, cluster;
  unsigned cooperative, dependent;
  unsigned order;  // 0: first come first served, 1: last come first served, else the seed of a random order
  unsigned long long shared_bytes;
  const Range* ranges;
  unsigned long long range_count;
  Traffic* traffic;
};

extern Place* place;
extern Dim block_dim, grid_dim;
extern Traffic traffic;
extern unsigned long long idle_spins;  // turns of spinning fibers since anything else happened

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
const Range* find_range(const char* what, unsigned long long address, unsigned bytes, bool writes);
// `what` names the call in messages, and tells calls apart by its address.
unsigned long long exchange(const char* what, unsigned mask, unsigned long long value, unsigned source);
inline constexpr char sync_name[] = "__syncwarp", shuffle_name[] = "__shfl_xor_sync", any_name[] = "any_lane";
unsigned lane();
const char* launch(void (*invoke)(const void*, const void*), const void* kernel, const Shape& shape,
                   const void* params, unsigned shared_alignment);

// Alignment, bounds, permission. `last` remembers where the previous access of this kind fell, which is nearly
// always where this one falls too.
inline void check(const char* what, const Range*& last, const void* pointer, unsigned bytes, bool writes) {
  const auto address = reinterpret_cast<unsigned long long>(pointer);
  if (address % bytes != 0)
    fail("%s of %u bytes at %#llx: the address is not a multiple of %u", what, bytes, address, bytes);
  if (!place->previous_grid_done)
    fail("%s before wait_for_previous_grid() in a launch that may overlap the previous grid", what);
  if (!(address >= last->begin && address + bytes <= last->end && (last->writable || !writes)))
    last = find_range(what, address, bytes, writes);
}

extern const Range nowhere;
extern const Range *last_loaded, *last_stored;

template <class Params>
void invoke(const void* kernel, const void* params) {
  reinterpret_cast<void (*)(Params)>(const_cast<void*>(kernel))(*static_cast<const Params*>(params));
}

// Entry point of the drivers that harness.py writes: a kernel takes one struct by value, and the bytes that the
// host packed must be that struct, but for padding at its end.
template <class Params>
const char* launch(void (*kernel)(Params), const Shape* shape, const void* packed, unsigned long long bytes,
                   unsigned shared_alignment) {
  const unsigned long long rounded = (bytes + alignof(Params) - 1) / alignof(Params) * alignof(Params);
  if (rounded != sizeof(Params)) return "the packed parameters are not as long as the kernel's parameter struct";
  alignas(Params) alignas(16) unsigned char params[sizeof(Params)] = {};
  std::memcpy(params, packed, bytes);
  return launch(invoke<Params>, reinterpret_cast<const void*>(kernel), *shape, params, shared_alignment);
}

inline float float_of(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline unsigned bits_of(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Round to nearest, ties to even; any NaN becomes 0x7fff, as the GPU's conversions have it.
inline unsigned bf16_of(float value) {
  const unsigned bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

inline unsigned f16_of(float value) {
  const unsigned bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 65536 and up, and infinity
  if (magnitude < 0x38800000u) {                        // below 2^-14: a multiple of 2^-24
    // Adding 0.5 to a magnitude below 2^-14 leaves a float whose unit in the last place is 2^-24, so that the
    // addition itself rounds to nearest even and the low bits of the sum are the subnormal's.
    return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u);
  }
  // Rounding may carry into the exponent, up to infinity: that is what the format asks for.
  return sign | ((magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13);
}

// E4M3, beyond 448 the largest number. Rounded by counting: the nearest multiple of the unit at this size.
inline unsigned e4m3_of(float value) {
  if (value != value) return 0x7fu;
  const unsigned sign = bits_of(value) >> 24 & 0x80u;
  const float size = std::fabs(value);
  if (size >= 448.0f) return sign | 0x7eu;
  int exponent = -6;
  while (exponent < 8 && size >= std::ldexp(1.0f, exponent + 1)) ++exponent;
  const unsigned units = unsigned(std::nearbyint(std::ldexp(size, 3 - exponent)));  // up to 16: ties to even
  // A subnormal has no hidden bit, which is what `units` below 8 say; 16 carries into the exponent.
  return sign | (unsigned(exponent + 6) * 8 + units);
}

}  // namespace emulation

#define threadIdx (::emulation::place->thread)
#define blockIdx (::emulation::place->block)
#define blockDim (::emulation::block_dim)
#define gridDim (::emulation::grid_dim)

void __syncthreads();

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulation::exchange(emulation::sync_name, mask, 0, emulation::lane());
}

// The lane that is read follows the PTX definition of shfl.bfly: a source beyond the end of the lane's own segment
// of `width` gives the lane its own value.
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
  const unsigned lane = emulation::lane(), segment = 32u - unsigned(width);
  const unsigned last_lane = (lane & segment) | (31u & ~segment);
  unsigned source = lane ^ unsigned(lane_mask);
  if (source > last_lane) source = lane;
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::exchange(emulation::shuffle_name, mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// A macro, because newer C libraries declare an rsqrtf of their own.
#define rsqrtf emulated_rsqrt
inline float emulated_rsqrt(float value) { return float(1.0 / std::sqrt(double(value))); }

inline float __uint_as_float(unsigned bits) { return emulation::float_of(bits); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline unsigned __float_as_uint(float value) { return emulation::bits_of(value); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

char* shared_memory();

unsigned cluster_rank();
unsigned cluster_size();
void cluster_arrive();
void cluster_wait();

void wait_for_previous_grid();
inline void launch_next_grid() {}

inline float exp2_fast(float value) {
  const float result = float(std::exp2(double(value)));
  return result < 0x1p-126f ? 0.0f : result;
}
inline float reciprocal_fast(float value) {
  const float result = float(1.0 / double(value));
  return std::fabs(result) < 0x1p-126f ? 0.0f * result : result;
}
inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : std::fmax(a, b); }
inline bool any_lane(bool so) {
  unsigned long long found = so;
  for (unsigned distance = 1; distance < 32; distance *= 2)
    found |= emulation::exchange(emulation::any_name, 0xffffffffu, found, emulation::lane() ^ distance);
  return found != 0;
}
inline void stop_grid() { emulation::fail("the kernel stopped the grid"); }

unsigned atomic_add_release(unsigned* pointer, unsigned value);
void atomic_max(unsigned* pointer, unsigned value);
unsigned load_acquire(const unsigned* pointer);

void barrier_init(unsigned long long* barrier, unsigned count);
void barrier_init_fence();
void barrier_expect(unsigned long long* barrier, unsigned bytes);
void barrier_wait(unsigned long long* barrier, unsigned parity);
void store_remote(float* address, unsigned rank, float value, unsigned long long* barrier);
void bulk_copy(void* shared_destination, const void* global_source, unsigned bytes, unsigned long long* barrier);

void copy_async(void* shared_destination, const void* source);
void copy_async_wait();

template <int BYTES>
inline void load_global(unsigned* out, const void* pointer) {
  static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "no such access width");
  emulation::check("load_global", emulation::last_loaded, pointer, BYTES, false);
  emulation::traffic.loaded += BYTES;
  if (BYTES < 4) out[0] = 0;
  std::memcpy(out, pointer, BYTES);
}

template <int BYTES, bool IN_L1 = false>
inline void store_global(void* pointer, const unsigned* in) {
  static_assert(BYTES == 1 || BYTES == 2 || BYTES == 4 || BYTES == 8 || BYTES == 16, "no such access width");
  emulation::check("store_global", emulation::last_stored, pointer, BYTES, true);
  emulation::traffic.stored += BYTES;
  emulation::idle_spins = 0;
  std::memcpy(pointer, in, BYTES);
}

inline float bf16_to_float(unsigned short code) { return emulation::float_of(unsigned(code) << 16); }

inline float f16_to_float(unsigned short code) {
  const unsigned sign = (code & 0x8000u) << 16, magnitude = code & 0x7fffu;
  if (magnitude >= 0x7c00u) return emulation::float_of(sign | 0x7f800000u | (magnitude << 13));
  if (magnitude < 0x0400u) {
    const float tiny = float(magnitude) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  return emulation::float_of(sign | ((magnitude << 13) + 0x38000000u));
}

inline unsigned pack_bf16(float low, float high) {
  return emulation::bf16_of(low) | (emulation::bf16_of(high) << 16);
}

inline unsigned pack_f16(float low, float high) { return emulation::f16_of(low) | (emulation::f16_of(high) << 16); }

inline unsigned pack_e4m3(float low, float high) { return emulation::e4m3_of(low) | emulation::e4m3_of(high) << 8; }
