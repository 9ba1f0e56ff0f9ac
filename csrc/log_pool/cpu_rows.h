// Adds up the clipped log-ratios of several rows on the grid of log_pool/formula.h.
#pragma once

#include "common/rows.h"
#include "log_pool/formula.h"

ADAPMIXED_CORE_BEGIN

// The number of rows that are added together, with one load and one store of a token's sum.
constexpr int kGroup = 4;
// A row of logits, and the extremes of its positions on the grid.
struct PoolMember {
  const char* data;
  double origin;
  double low = HUGE_VAL, high = -HUGE_VAL;
};

// While positions are added, a sum holds the sum of their bit patterns, and 0.0 before the first.
// Adding this offset turns the sum of `count` of them into kGridZero plus the sum of their units.
inline Vec sum_offset(std::int64_t count) {
  std::uint64_t zero;
  const double grid_zero = kGridZero;
  std::memcpy(&zero, &grid_zero, sizeof zero);
  zero *= static_cast<std::uint64_t>(1 - count);
  double bits;
  std::memcpy(&bits, &zero, sizeof bits);
  return Vec(bits);
}

// Adds the rows' clipped positions at [begin, end) to sums[begin...]. kTrack: finds the extremes
// over the tokens that the public row has.
template <Dtype D, int kRows, bool kAdd, bool kTrack>
void add_rows(const PoolGrid& grid, const char* public_row, PoolMember* members, std::int64_t begin,
              std::int64_t end, double* sums) {
  const char* data[kRows];
  Vec origin[kRows], low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) {
    data[r] = members[r].data;
    origin[r] = Vec(members[r].origin);
    if (kTrack) low[r] = Vec(members[r].low), high[r] = Vec(members[r].high);
  }
  const auto add = [&](std::int64_t v, std::int64_t stop) ADAPMIXED_INLINE {
    Vec z0 = load_logits<D>(public_row, v, stop);
    // The extremes ignore a NaN.
    if (kTrack) z0 = vselect(z0 > Vec(-HUGE_VAL), z0, Vec(NAN));
    Vec sum = kAdd ? Vec::load(sums + v) : Vec(0.0);
    ADAPMIXED_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec z = load_logits<D>(data[r], v, stop);
      const Vec x = grid.position(z - z0, origin[r]);
      if (kTrack) low[r] = vmin(x, low[r]), high[r] = vmax(x, high[r]);
      if (kAdd) sum = add_bits(sum, grid.clipped(x));
    }
    if (kAdd) sum.store(sums + v);
  };
  std::int64_t v = begin;
  for (; v + Vec::kLanes <= end; v += Vec::kLanes) add(v, v + Vec::kLanes);
  if (v < end) add(v, end);
  for (int r = 0; kTrack && r < kRows; ++r) {
    members[r].low = -maximum(Vec(0.0) - low[r]);
    members[r].high = maximum(high[r]);
  }
}

ADAPMIXED_CORE_END
