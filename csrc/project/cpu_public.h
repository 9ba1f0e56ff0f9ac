// The public row as the loops of project read it.
#pragma once

#include "common/float_public.h"
#include "common/rows.h"
#include "project/terms.h"

ADAPMIXED_CORE_BEGIN

class PublicRow {
 public:
  static std::int64_t scratch_size(std::int64_t vocab) { return 2 * round_up(vocab, 64); }

  template <Dtype D>
  void load(const Row& row, double row_lse, std::int64_t row_vocab, const ProjectTarget& target,
            double* memory) {
    lse = row_lse, vocab = row_vocab, row_ = row;
    centre = centre_of(lse);
    const std::int64_t padded = round_up(vocab, 64);
    grid = reinterpret_cast<float*>(memory);
    rest = grid + padded;
    mass = rest + padded;
    rare_ = reinterpret_cast<std::int32_t*>(mass + padded);
    rare_count_ = 0;
    finite_rare = false;
    least_log_q = 0.0;
    const Flt offset(static_cast<float>(centre)), none(-HUGE_VALF);
    const Vec shift(lse - centre);
    const Flt least(static_cast<float>(lse - centre + kRareLogQ));
    Flt high = none, low(static_cast<float>(lse - centre));
    for (std::int64_t v = 0; v < padded; v += Flt::kLanes) {
      const Flt z = load_floats<D>(row.data, v, vocab) - offset;
      const FltMask present = z > least;
      high = vmax(high, z);
      const Flt read = vselect(present, z, Flt(static_cast<float>(lse - centre)));
      low = vmin(low, read);
      const FloatTokens a = float_tokens(low_half(read), high_half(read));
      a.grid.store(grid + v), a.rest.store(rest + v);
      const Vec log_low = low_half(read) - shift, log_high = high_half(read) - shift;
      if (target.scaled) {
        const Vec scale(target.log_target), octaves(kLog2e);
        const Flt share = narrow((log_low - scale) * octaves, (log_high - scale) * octaves);
        vselect(present, share, Flt(2.0f * kNoShare)).store(mass + v);
      } else {
        vselect(present, float_exp(log_low, log_high), Flt(0.0f)).store(mass + v);
      }
      unsigned missing = present.bits() ^ ((1u << Flt::kLanes) - 1);
      for (; missing != 0; missing &= missing - 1) {
        const std::int64_t token = v + __builtin_ctz(missing);
        if (token >= vocab) break;
        rare_[rare_count_++] = static_cast<std::int32_t>(token);
        finite_rare = finite_rare || row.at(token) - lse > kMaskedLog;
      }
    }
    least_log_q = -maximum(Flt(0.0f) - low) - (lse - centre);
    const double most = maximum(high) + centre;
    top = 0;
    while (!(row.at(top) >= most)) ++top;
  }

  // Whether the private row gives a rare token too much, be it one that the public row masks.
  bool refuses(const Row& row, double row_lse) const {
    for (std::int64_t k = 0; k < rare_count_; ++k) {
      if (refused(row.at(rare_[k]) - row_lse, row_.at(rare_[k]) - lse)) return true;
    }
    return false;
  }

  double lse, centre;
  std::int64_t vocab, top;  // top: the most likely token
  double least_log_q;       // of tokens that are not rare
  bool finite_rare;         // whether there are rare tokens that are not masked
  // a of the tokens in two parts (common/float_ratio.h); q, or log2(q / T) for scaled sums. Rare
  // tokens and those past the end have q = 0, or less than kNoShare.
  float *grid, *rest, *mass;

 private:
  Row row_;
  std::int32_t* rare_;
  std::int64_t rare_count_;
};

ADAPMIXED_CORE_END
