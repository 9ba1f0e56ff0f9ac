// p(v) ~ q(v) exp((kappa/N) sum_i clip(log p_i(v) - log q(v), a, b)). log_pool/formula.h has the
// derivation and the rounding.
//
// A position's rows are read in groups. Each row is read for its log-sum-exp and then, from the
// cache, for its clipped log-ratios, which are added to the position's sums.
#include <algorithm>

#include "common/float_rows.h"
#include "common/operators.h"
#include "common/parallel.h"
#include "common/row_sums.h"
#include "common/rows.h"
#include "log_pool/formula.h"

ADAPMIXED_CORE_BEGIN
namespace {

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
  const auto zero = bit_cast<std::uint64_t>(kGridZero) * static_cast<std::uint64_t>(1 - count);
  return Vec(bit_cast<double>(zero));
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

constexpr std::int64_t kTile = 1024;

inline void store_doubles(Vec x, double* row, std::int64_t v, std::int64_t end) {
  if (v + Vec::kLanes <= end) return x.store(row + v);
  double lanes[Vec::kLanes];
  x.store(lanes);
  for (int i = 0; v + i < end; ++i) row[v + i] = lanes[i];
}

// One position: first the public row, then the private rows in parts that threads share, then the
// sums.
template <Dtype D>
class Position {
 public:
  Position(const PoolGrid& grid, const LogPoolInputs& in, const LogPoolOptions& options,
           const LogPoolResults& out, std::int64_t position)
      : grid_(grid),
        in_(in),
        options_(options),
        out_(out),
        position_(position),
        models_(in.shape.models),
        vocab_(in.shape.vocab),
        public_(row_of(in.public_logits, 0, position)) {}

  void run(int threads) {
    // At the logit of the most likely token the log-sum-exps start.
    const double most_likely = largest_logit<D>(public_.data, vocab_);
    for (top_ = 0; public_.at(top_) < most_likely;) ++top_;
    out_.public_status[position_] = sum_row(public_, out_.public_lse + position_);
    if (out_.public_status[position_] != kRowOk) return give_up();
    public_float_sum_ = float_sum(public_);
    const std::int64_t padded = round_up(vocab_, 8), groups = (models_ + kGroup - 1) / kGroup;
    const std::int64_t parts = threads < 1 ? 1 : threads < groups ? threads : groups;
    const std::int64_t each = (groups + parts - 1) / parts * kGroup;
    const std::int64_t tiles = (vocab_ + kLastTile - 1) / kLastTile;
    double* sums = cpu::thread_scratch(parts * padded + 2 * tiles);
    double *largest = sums + parts * padded, *total = largest + tiles;
    cpu::parallel_for(parts, 1, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t part = begin; part < end; ++part) {
        const std::int64_t first = part * each, last = first + each;
        add_part(first, last < models_ ? last : models_, sums + part * padded);
      }
    });
    cpu::parallel_for(tiles, 2, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = begin; k < end; ++k) {
        finish_tile(k * kLastTile, sums, parts, padded, largest + k, total + k);
      }
    });
    double most = -HUGE_VAL, weight = 0.0;
    for (std::int64_t k = 0; k < tiles; ++k) most = vmax(largest[k], most);
    for (std::int64_t k = 0; k < tiles; ++k) {
      if (largest[k] > -HUGE_VAL) weight += total[k] * std::exp(largest[k] - most);
    }
    out_.log_normaliser[position_] = most + std::log(weight);
  }

 private:
  static constexpr std::int64_t kLastTile = 4096;

  // Without a public row no result is defined.
  void give_up() const {
    for (std::int64_t i = 0; i < models_; ++i) {
      const std::int64_t at = i * in_.shape.positions + position_;
      out_.private_lse[at] = NAN;
      out_.status[at] = kRowPublic;
      out_.span[at] = NAN;
    }
    out_.log_normaliser[position_] = NAN;
  }

  std::int32_t sum_row(const Row& row, double* lse) const {
    std::int32_t status = kRowOk;
    *lse = log_sum_exp_near<D>(row.data, vocab_, row.at(top_));
    if (std::isnan(*lse)) log_sum_exp_row<D>(row.data, vocab_, lse, &status);
    return status;
  }

  double float_sum(const Row& row) const {
    return float_log_sum_exp<D>(row.data, vocab_, row.at(top_));
  }

  // From the difference, so that a copy of the public row has its log-sum-exp.
  std::int32_t sum_private(const Row& row, std::int64_t at, double* lse) const {
    const double difference =
        in_.differences != nullptr ? in_.differences[at] : float_sum(row) - public_float_sum_;
    *lse = out_.public_lse[position_] + difference;
    return std::isnan(*lse) ? sum_row(row, lse) : kRowOk;
  }

  // Reads the rows [first, last): computes their log-sum-exps and spans, and adds the positions of
  // active rows to `sums`.
  void add_part(std::int64_t first, std::int64_t last, double* sums) const {
    std::int64_t held = 0, count = 0, at[kGroup];
    PoolMember members[kGroup];
    for (std::int64_t v = 0; v < vocab_; v += Vec::kLanes) Vec(0.0).store(sums + v);
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t here = i * in_.shape.positions + position_;
      const Row row = row_of(in_.private_logits, i, position_);
      out_.status[here] = sum_private(row, here, out_.private_lse + here);
      out_.span[here] = NAN;
      if (out_.status[here] != kRowOk) continue;
      const PoolMember member{row.data,
                              grid_.origin(out_.private_lse[here], out_.public_lse[position_])};
      if (!takes_part(options_, here)) {
        PoolMember apart = member;
        add_all<1, false>(&apart, &here, nullptr);
        continue;
      }
      ++count;
      members[held] = member, at[held] = here;
      if (++held < kGroup) continue;
      add_all<kGroup, true>(members, at, sums);
      held = 0;
    }
    for (std::int64_t r = 0; r < held; ++r) add_all<1, true>(members + r, at + r, sums);
    const Vec offset = sum_offset(count);
    for (std::int64_t v = 0; v < vocab_; v += Vec::kLanes) {
      add_bits(Vec::load(sums + v), offset).store(sums + v);
    }
  }

  // Goes over whole rows, tile by tile. It tracks the extremes only until they reach the clip
  // bounds.
  template <int kRows, bool kAdd>
  void add_all(PoolMember* members, const std::int64_t* at, double* sums) const {
    bool tracking = true;
    for (std::int64_t begin = 0; begin < vocab_ && (kAdd || tracking); begin += kTile) {
      const std::int64_t end = begin + kTile < vocab_ ? begin + kTile : vocab_;
      if (!tracking) {
        add_rows<D, kRows, kAdd, false>(grid_, public_.data, members, begin, end, sums);
        continue;
      }
      add_rows<D, kRows, kAdd, true>(grid_, public_.data, members, begin, end, sums);
      tracking = false;
      for (int r = 0; r < kRows; ++r) {
        tracking = tracking || !grid_.clips_both(members[r].low, members[r].high);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      out_.span[at[r]] = grid_.span(members[r].low, members[r].high);
    }
  }

  // Adds the parts' sums of one tile. Computes the log-weights, their largest, and the sum of the
  // weights relative to it.
  void finish_tile(std::int64_t begin, double* sums, std::int64_t parts, std::int64_t padded,
                   double* largest, double* total) const {
    const std::int64_t end = begin + kLastTile < vocab_ ? begin + kLastTile : vocab_;
    const Vec lse(out_.public_lse[position_]);
    Vec most(-HUGE_VAL), weight(0.0);
    for (std::int64_t v = begin; v < end; v += Vec::kLanes) {
      const Vec log_q = load_logits<D>(public_.data, v, vocab_) - lse;
      Vec sum(0.0);
      for (std::int64_t part = 0; part < parts; ++part) {
        sum = sum + grid_.nats(Vec::load(sums + part * padded + v));
      }
      sum = vselect(log_q > Vec(-HUGE_VAL), sum, Vec(0.0));
      const Vec e = grid_.log_weight(sum, log_q);
      e.store(sums + v);
      store_doubles(e, out_.log_weights + position_ * vocab_, v, vocab_);
      most = vmax(e, most);
    }
    *largest = maximum(most);
    for (std::int64_t v = begin; v < end; v += Vec::kLanes) {
      weight = weight + exp_(Vec::load(sums + v) - Vec(*largest));
    }
    *total = sum(weight);
  }

  const PoolGrid& grid_;
  const LogPoolInputs& in_;
  const LogPoolOptions& options_;
  const LogPoolResults& out_;
  std::int64_t position_, models_, vocab_;
  Row public_;
  std::int64_t top_ = 0;
  double public_float_sum_ = 0.0;  // NaN if floats cannot serve the row
};

void log_pool(const LogPoolInputs& in, const LogPoolOptions& options, const LogPoolResults& out,
              int threads) {
  const PoolGrid grid(options);
  const auto run = [&](std::int64_t position, int shared_by) {
    with_dtype(in.public_logits.dtype, [&](auto tag) {
      Position<decltype(tag)::value>(grid, in, options, out, position).run(shared_by);
    });
  };
  // Each thread takes whole positions as long as there is one for every thread. The threads share
  // each of the remaining positions.
  const std::int64_t whole =
      threads < 1 ? in.shape.positions : in.shape.positions / threads * threads;
  cpu::parallel_for(whole, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) run(b, 1);
  });
  for (std::int64_t b = whole; b < in.shape.positions; ++b) run(b, threads);
}

}  // namespace

void add_log_pool(cpu::Table& table) { table.log_pool = log_pool; }

ADAPMIXED_CORE_END
