// Matrix instructions of tensor_cores.cuh: of a warp at once, of a warpgroup when they are waited for.
#include "scheduler.h"

namespace emulation {

constexpr unsigned depth = 16, rows = 16, max_tokens = 256;  // of one instruction, for one warp
constexpr unsigned eight_rows = 1024;  // bytes from one to the next

namespace {

float widened(bool bf16, unsigned bits) { return bf16 ? bf16_to_float(bits) : f16_to_float(bits); }

// One warp's share: sums (rows x tokens) of a (rows x depth) times b (depth x tokens).
void multiply(float (&sums)[rows][max_tokens], const float (&a)[rows][depth], const float (&b)[depth][max_tokens],
              unsigned tokens) {
  for (unsigned row = 0; row < rows; ++row) {
    float* const line = sums[row];
    for (unsigned token = 0; token < tokens; ++token) line[token] = 0.0f;
    for (unsigned k = 0; k < depth; ++k) {
      const float factor = a[row][k];
      const float* const other = b[k];
      for (unsigned token = 0; token < tokens; ++token) line[token] += factor * other[token];
    }
  }
}

// What lane 4 * g + t holds of the left operand: pairs at (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8).
void spread_operand(float (&a)[rows][depth], bool bf16, unsigned lane, const unsigned* words) {
  for (unsigned index = 0; index < 4; ++index)
    for (unsigned side = 0; side < 2; ++side)
      a[lane / 4 + index % 2 * 8][lane % 4 * 2 + index / 2 * 8 + side] =
          widened(bf16, words[index] >> 16 * side & 0xffffu);
}

// And of the sums, four for every eight columns: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
void add_sums(float* mine, const float (&sums)[rows][max_tokens], unsigned lane, unsigned tokens) {
  for (unsigned index = 0; index < tokens / 2; ++index)
    mine[index] += sums[lane / 4 + index / 2 % 2 * 8][index / 4 * 8 + lane % 4 * 2 + index % 2];
}

// ---- by a warp ----

struct Rows {
  unsigned* out;
  const char* row;
};

template <unsigned COUNT>
void finish_load(void* const* lanes) {
  unsigned words[warp_lanes][COUNT];
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    for (unsigned index = 0; index < COUNT; ++index)
      std::memcpy(&words[lane][index], static_cast<Rows*>(lanes[8 * index + lane / 4])->row + 4 * (lane % 4), 4);
  for (unsigned lane = 0; lane < warp_lanes; ++lane)
    std::memcpy(static_cast<Rows*>(lanes[lane])->out, words[lane], sizeof words[lane]);
}

// Only the lanes that give a row for one of `count` matrices must give a good one.
void check_row(const char* what, const void* row, unsigned count) {
  const auto address = reinterpret_cast<unsigned long long>(row);
  if (lane() >= 8 * count) return;
  if (address % 16 != 0) fail("%s at %#llx: the address is not a multiple of 16", what, address);
  if (!in_shared(*self().home, row, 16)) fail("%s: a row is not in this block's shared memory", what);
}

template <unsigned COUNT>
void start_load(const char* what, unsigned* out, const void* row) {
  check_row(what, row, COUNT);
  Rows mine = {out, static_cast<const char*>(row)};
  meet(what, &mine, finish_load<COUNT>);
}

struct TurnedRows {
  const unsigned* in;
  char* row;
};

// Lane 4 * r + c / 2 has element (r, c) of a matrix, which goes to element r of the row that lane 8 * index + c gave.
template <unsigned COUNT>
void finish_store(void* const* lanes) {
  for (unsigned index = 0; index < COUNT; ++index)
    for (unsigned r = 0; r < 8; ++r)
      for (unsigned c = 0; c < 8; ++c) {
        const unsigned pair = static_cast<TurnedRows*>(lanes[4 * r + c / 2])->in[index];
        const auto element = static_cast<unsigned short>(pair >> c % 2 * 16);
        std::memcpy(static_cast<TurnedRows*>(lanes[8 * index + c])->row + 2 * r, &element, sizeof element);
      }
}

template <unsigned COUNT>
void start_store(const char* what, void* row, const unsigned* in) {
  check_row(what, row, COUNT);
  TurnedRows mine = {in, static_cast<char*>(row)};
  meet(what, &mine, finish_store<COUNT>);
}

struct Fragments {
  float* sums;
  const unsigned* a;
  unsigned b[2];
};

template <bool BF16>
void finish_multiply(void* const* lanes) {
  static float a[rows][depth], b[depth][max_tokens], sums[rows][max_tokens];
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    const auto& mine = *static_cast<Fragments*>(lanes[lane]);
    spread_operand(a, BF16, lane, mine.a);
    for (unsigned index = 0; index < 4; ++index)
      b[lane % 4 * 2 + index / 2 * 8 + index % 2][lane / 4] =
          widened(BF16, mine.b[index / 2] >> 16 * (index % 2) & 0xffffu);
  }
  multiply(sums, a, b, 8);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) add_sums(static_cast<Fragments*>(lanes[lane])->sums, sums, lane, 8);
}

// ---- by a warpgroup ----

// The numbers [tokens][depth] that a descriptor stands for: rows of 128 bytes in eights, whose 16-byte units lie where
// bits 7 to 9 of the address have been xored into bits 4 to 6.
void read_matrix(std::vector<unsigned short>& out, Matrix matrix, unsigned tokens) {
  const Block& block = *self().home;
  const unsigned start = (matrix & 0x3fff) << 4;
  out.resize(tokens * depth);
  for (unsigned token = 0; token < tokens; ++token)
    for (unsigned half = 0; half < 2; ++half) {
      unsigned address = start + token / 8 * eight_rows + token % 8 * 128 + half * 16;
      address ^= (address >> 7 & 7) << 4;
      if (!in_shared(block, block.window + address, 16)) fail("multiply_group: the matrix leaves the shared memory");
      std::memcpy(&out[token * depth + half * 8], block.window + address, 16);
    }
}

// The warps of a group multiply by the same matrices in the same order.
void note_product(Fiber& fiber, Matrix matrix) {
  const unsigned warp = fiber.thread.x / warp_lanes;
  Warpgroup& group = fiber.home->groups[warp / group_warps];
  const unsigned index = group.counts[warp % group_warps]++;
  if (index == group.issued.size())
    group.issued.push_back(matrix);
  else if (group.issued[index] != matrix)
    fail("multiply_group: warps of one group multiply by different matrices");
}

Accumulator& accumulator_of(InFlight& mine, const float* sums) {
  for (Accumulator& accumulator : mine.accumulators)
    if (accumulator.sums == sums) return accumulator;
  fail("multiply_group: its sums are unknown");
}

void settle(InFlight& mine) {
  for (unsigned index = 0; index < mine.accumulators.size();) {
    Accumulator& accumulator = mine.accumulators[index];
    if (accumulator.in_flight != 0) {
      ++index;
      continue;
    }
    for (unsigned at = 0; at < accumulator.values.size(); ++at)
      if (bits_of(accumulator.sums[at]) != ~0u) fail("the sums of a multiply_group() were changed before it was waited for");
    std::memcpy(accumulator.sums, accumulator.values.data(), accumulator.values.size() * sizeof(float));
    mine.accumulators.erase(mine.accumulators.begin() + index);
  }
}

void finish_product(void* const* lanes, unsigned index) {
  static float a[rows][depth], b[depth][max_tokens], sums[rows][max_tokens];
  static std::vector<unsigned short> matrix_now;
  const auto product = [&](unsigned lane) -> Product& { return static_cast<Fiber*>(lanes[lane])->in_flight.products[index]; };
  const Product& first = product(0);
  read_matrix(matrix_now, first.matrix, first.tokens);
  if (matrix_now != first.matrix_then)
    fail("the matrix of a multiply_group() was changed in shared memory between its issue and the wait");
  for (unsigned k = 0; k < depth; ++k)
    for (unsigned token = 0; token < first.tokens; ++token) b[k][token] = widened(first.bf16, matrix_now[token * depth + k]);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    const Product& mine = product(lane);
    if (mine.matrix != first.matrix || mine.tokens != first.tokens || mine.bf16 != first.bf16 || mine.group != first.group)
      fail("multiply_group: lanes of one warp disagree");
    if (std::memcmp(mine.operand, mine.operand_then, sizeof mine.operand_then) != 0)
      fail("the operand of a multiply_group() was changed in its registers between its issue and the wait");
    spread_operand(a, first.bf16, lane, mine.operand_then);
  }
  multiply(sums, a, b, first.tokens);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    Accumulator& accumulator = accumulator_of(static_cast<Fiber*>(lanes[lane])->in_flight, product(lane).sums);
    add_sums(accumulator.values.data(), sums, lane, first.tokens);
    --accumulator.in_flight;
  }
}

unsigned waited_groups;  // those before this one are waited for

void finish_products(void* const* lanes) {
  const InFlight& first = static_cast<Fiber*>(lanes[0])->in_flight;
  for (unsigned lane = 1; lane < warp_lanes; ++lane) {
    const InFlight& other = static_cast<Fiber*>(lanes[lane])->in_flight;
    if (other.products.size() != first.products.size() || other.product_groups != first.product_groups)
      fail("multiply_group: lanes of one warp disagree");
  }
  unsigned count = 0;
  while (count < first.products.size() && first.products[count].group < waited_groups) finish_product(lanes, count++);
  for (unsigned lane = 0; lane < warp_lanes; ++lane) {
    InFlight& mine = static_cast<Fiber*>(lanes[lane])->in_flight;
    mine.products.erase(mine.products.begin(), mine.products.begin() + count);
    settle(mine);
  }
}

}  // namespace

void check_groups(const Block& block) {
  for (const Warpgroup& group : block.groups)
    for (unsigned count : group.counts)
      if (count != group.issued.size()) fail("multiply_group: some warps of a group did not take part");
}

unsigned multiply_pair(bool bf16, unsigned pair, unsigned factor) {
  unsigned result = 0;
  for (unsigned side = 0; side < 2; ++side) {
    const double product = double(widened(bf16, pair >> 16 * side & 0xffffu)) * widened(bf16, factor);
    unsigned bits;
    if (bf16 && std::fabs(product) < 0x1p-126)  // a float would round once more: multiples of 2^-133
      bits = unsigned(std::nearbyint(std::fabs(product) * 0x1p133)) | (std::signbit(product) ? 0x8000u : 0u);
    else
      bits = bf16 ? bf16_of(float(product)) : f16_of(float(product));
    result |= bits << 16 * side;
  }
  return result;
}

void multiply_warp(bool bf16, float* sums, const unsigned* a, unsigned b0, unsigned b1) {
  static constexpr char name_bf16[] = "multiply_warp<bf16>", name_f16[] = "multiply_warp<f16>";
  Fragments mine = {sums, a, {b0, b1}};
  meet(bf16 ? name_bf16 : name_f16, &mine, bf16 ? finish_multiply<true> : finish_multiply<false>);
}

void multiply_group(bool bf16, unsigned tokens, float* sums, const unsigned* a, Matrix matrix) {
  Fiber& fiber = self();
  InFlight& mine = fiber.in_flight;
  if (!mine.begun) fail("multiply_group() without begin_matrices() since the last end_matrices()");
  if (fiber.thread.x / (warp_lanes * group_warps) >= fiber.home->groups.size())
    fail("multiply_group: the four warps of this group are not all there");
  if (matrix >> 14 != 1u << 2) fail("multiply_group: %#x is not what matrix_of() gives", matrix);
  if ((matrix << 4 & 0x380) != 0) fail("multiply_group: the tile does not lie at a multiple of 1024 bytes");
  Product product = {bf16, tokens, mine.product_groups, sums, a, {a[0], a[1], a[2], a[3]}, matrix, {}};
  if (lane() == 0) {
    note_product(fiber, matrix);
    read_matrix(product.matrix_then, matrix, tokens);
  }
  mine.products.push_back(std::move(product));

  const unsigned count = tokens / 2;
  for (Accumulator& accumulator : mine.accumulators) {
    const bool same = accumulator.sums == sums && accumulator.values.size() == count;
    if (same) {
      ++accumulator.in_flight;
      return;
    }
    if (sums < accumulator.sums + accumulator.values.size() && accumulator.sums < sums + count)
      fail("multiply_group: its sums overlap those of another one in flight");
  }
  mine.accumulators.push_back({sums, 1, {sums, sums + count}});
  std::memset(sums, 0xff, count * sizeof(float));
}

void wait_for_products(unsigned pending) {
  Fiber& fiber = self();
  static constexpr char name[] = "wait_for_matrices";
  const unsigned groups = fiber.in_flight.product_groups;
  waited_groups = groups > pending ? groups - pending : 0;
  meet(name, &fiber, finish_products);
}

}  // namespace emulation

using namespace emulation;

void load_matrices(unsigned (&out)[4], const void* row) {
  static constexpr char name[] = "load_matrices of four";
  start_load<4>(name, out, row);
}

void load_matrices(unsigned (&out)[2], const void* row) {
  static constexpr char name[] = "load_matrices of two";
  start_load<2>(name, out, row);
}

void store_matrices_turned(void* row, const unsigned (&in)[4]) {
  static constexpr char name[] = "store_matrices_turned of four";
  start_store<4>(name, row, in);
}

void store_matrices_turned(void* row, const unsigned (&in)[2]) {
  static constexpr char name[] = "store_matrices_turned of two";
  start_store<2>(name, row, in);
}

void begin_matrices() { self().in_flight.begun = true; }

void end_matrices() {
  ++self().in_flight.product_groups;
  self().in_flight.begun = false;
}

Matrix matrix_of(const void* tile, int step) {
  const Block& block = *self().home;
  if (reinterpret_cast<unsigned long long>(tile) % 1024 != 0)
    fail("matrix_of: the tile does not lie at a multiple of 1024 bytes");
  if (!in_shared(block, tile, 1024)) fail("matrix_of: the tile is not in this block's shared memory");
  if (step < 0 || step > 3) fail("matrix_of: rows of 64 numbers have steps 0 to 3, not %d", step);
  const unsigned address = unsigned(static_cast<const char*>(tile) - block.window) + 32 * step;
  return address >> 4 | 1u << 16;
}
