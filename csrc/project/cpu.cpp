// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} of every private row,
// and the log-sum-exps of all rows.
//
// project/search.h is the search, project/terms.h the sums that it takes.
#include "common/float_rows.h"
#include "common/operators.h"
#include "common/parallel.h"
#include "common/row_sums.h"
#include "common/rows.h"
#include "project/terms.h"

ADAPMIXED_CORE_BEGIN
namespace {

// The public row as the loops read it.
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

// A private row: d of its tokens, kept, and q or log2(q / T).
template <Dtype D>
class PrivateRow {
 public:
  using Float = Quad;

  // scratch: as many doubles as tokens, rounded up to 64.
  PrivateRow(const PublicRow& q, const Row& row, double lse, const ProjectTarget& target,
             double* scratch)
      : q_(q),
        target_(target),
        row_(row),
        d_(reinterpret_cast<float*>(scratch)),
        kept_mass_(d_ + round_up(q.vocab, 64)),
        mass_(q.mass) {
    const double centre = centre_of(lse);
    const FloatShift shift = make_shift(lse - centre, q.lse - q.centre);
    scale_ = 1.0 + shift.residual, offset_ = shift.residual;
    c_ = Flt(shift.c), centre_ = Flt(static_cast<float>(centre));
  }

  double scale() const { return scale_; }
  double offset() const { return offset_; }
  RowRange range() const {
    return {scale_ * -maximum(Flt(0.0f) - low_) + offset_, scale_ * maximum(high_) + offset_,
            target_.log_target - q_.least_log_q};
  }

  template <class Visit>
  ADAPMIXED_INLINE void for_each(const Visit& visit) const {
    for (std::int64_t v = 0; v < count_; v += Quad::kLanes) {
      visit(Quad::load(mass_ + v), Quad::load(d_ + v));
    }
  }
  void add_up(double (&)[6]) const {}

  Moments load() {
    BlockSum<Quad> second, third, fourth;
    for (; count_ < q_.vocab; count_ += Quad::kLanes) {
      const Quad q = Quad::load(q_.mass + count_);
      const Quad z = load_quad<D>(row_.data, count_, q_.vocab);
      const Quad d = vselect(q > Quad(0.0), ratio(count_, z), Quad(0.0));
      ADAPMIXED_UNROLL
      for (int k = 0; k < Quad::kSize; ++k) keep(count_ + k * Flt::kLanes, d.v[k]);
      const Quad first = q * d, square = first * d;
      second.add(first, d), third.add(square, d), fourth.add(square * d, d);
      if (count_ % (kTermsInFloats * Flt::kLanes) == 0) {
        second.widen(), third.widen(), fourth.widen();
      }
    }
    second.widen(), third.widen(), fourth.widen();
    return {sum(second.total), sum(third.total), sum(fourth.total)};
  }

  // Keeps tokens that can matter: for s = alpha, X^s <= max(1, r^s); for s = 1 - alpha, X >= r if
  // r <= 1, and X >= 1 - most. Smaller terms than kLeftOut / V are left out.
  void select(double s, double most) {
    const double per_nat = kOctavesPerNat;
    // Half a nat is left for the rounding of the scores.
    const double least = target_.log_target + std::log(kLeftOut / q_.vocab) - 0.5;
    const Flt threshold(static_cast<float>((least + q_.lse - q_.centre) * per_nat));
    const double floor = s < 0.0 && most < 1.0 ? std::log1p(-most) * per_nat : -1e30;
    const Flt power(static_cast<float>(s)), lowest(static_cast<float>(floor)), c = c_;
    mass_ = kept_mass_, count_ = 0;
    low_ = high_ = Flt(0.0f);
    const auto matters = [&](std::int64_t v, Flt z) ADAPMIXED_INLINE {
      const Flt a = Flt::load(q_.grid + v);
      const Flt t = vmax(vfms(z - centre_, Flt(kOctavesPerNat), a + c), lowest);
      return vfma(t, power, a) > threshold;
    };
    for (std::int64_t v = 0; v < q_.vocab; v += Quad::kLanes) {
      const Quad z = load_quad<D>(row_.data, v, q_.vocab);
      FltMask hit[Quad::kSize];
      ADAPMIXED_UNROLL
      for (int k = 0; k < Quad::kSize; ++k) hit[k] = matters(v + k * Flt::kLanes, z.v[k]);
      if (((hit[0] | hit[1]) | (hit[2] | hit[3])).bits() == 0) continue;
      for (int k = 0; k < Quad::kSize; ++k) {
        if (hit[k].bits() == 0) continue;
        const Flt share = Flt::load(q_.mass + v + k * Flt::kLanes);
        const Flt d = ratio(v + k * Flt::kLanes, z.v[k]);
        compress(hit[k], share).store(kept_mass_ + count_);
        keep(count_, compress(hit[k], vselect(share > Flt(kNoShare), d, Flt(0.0f))));
        count_ += __builtin_popcount(hit[k].bits());
      }
    }
    for (; count_ % Quad::kLanes != 0; ++count_) {
      kept_mass_[count_] = 2.0f * kNoShare, d_[count_] = 0.0f;
    }
  }

 private:
  // d' of the tokens from v on, with p/q kept above e^-25.
  template <class F>
  ADAPMIXED_INLINE F ratio(std::int64_t v, F z) const {
    const F a = F::load(q_.grid + v) + F(c_);
    z = vmax(vfma(a, F(1.0f / kOctavesPerNat), F(-25.0f)), z - F(centre_));
    return ratio_excess(z, a, F::load(q_.rest + v));
  }

  void keep(std::int64_t at, Flt d) {
    low_ = vmin(low_, d), high_ = vmax(high_, d);
    d.store(d_ + at);
  }

  const PublicRow& q_;
  const ProjectTarget& target_;
  const Row row_;
  float *d_, *kept_mass_;
  const float* mass_;
  std::int64_t count_ = 0;  // of tokens, in whole vectors
  Flt c_, centre_, low_{0.0f}, high_{0.0f};
  double scale_, offset_;
};

// Solves rows of one call, position by position, with this thread's copy of the public row.
class Rows {
 public:
  Rows(const ProjectInputs& in, const ProjectTarget& target, const ProjectResults& out)
      : in_(in), target_(target), out_(out), vocab_(in.shape.vocab) {
    const std::int64_t public_size = PublicRow::scratch_size(vocab_);
    memory_ = cpu::thread_scratch(public_size + round_up(vocab_, 64));
    rest_ = memory_ + public_size;
  }

  void solve(std::int64_t position, std::int64_t model) {
    const Row row = row_of(in_.private_logits, model, position);
    const std::int64_t at = model * in_.shape.positions + position;
    with_dtype(row.dtype, [&](auto tag) {
      out_.weight[at] = solve_row<decltype(tag)::value>(row, position, at);
    });
  }

 private:
  template <Dtype D>
  double solve_row(const Row& row, std::int64_t position, std::int64_t at) {
    double& lse = out_.private_lse[at];
    out_.status[at] = kRowOk;
    const bool answered = std::isfinite(out_.public_lse[position]);
    if (answered && position_ != position) {
      public_.load<D>(row_of(in_.public_logits, 0, position), out_.public_lse[position], vocab_,
                      target_, memory_);
      position_ = position;
    }
    lse = answered ? log_sum_exp_near<D>(row.data, vocab_, row.at(public_.top)) : NAN;
    if (std::isnan(lse)) log_sum_exp_row<D>(row.data, vocab_, &lse, out_.status + at);
    if (!answered || out_.status[at] != kRowOk || public_.refuses(row, lse)) return 0.0;
    const FlushDenormals flush;
    PrivateRow<D> one(public_, row, lse, target_, rest_);
    const double found = target_.scaled ? adapmixed::ADAPMIXED_ISA::solve_row<true>(one, target_)
                                        : adapmixed::ADAPMIXED_ISA::solve_row<false>(one, target_);
    return public_.finite_rare ? std::fmin(found, reverse_free(target_.radius)) : found;
  }

  const ProjectInputs& in_;
  const ProjectTarget& target_;
  const ProjectResults& out_;
  std::int64_t vocab_;
  double *memory_, *rest_;
  PublicRow public_{};
  std::int64_t position_ = -1;
};

void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             int threads) {
  const ProjectTarget target(order, radius);
  cpu::parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row row = row_of(in.public_logits, 0, k);
      with_dtype(row.dtype, [&](auto tag) {
        log_sum_exp_row<decltype(tag)::value>(row.data, in.shape.vocab, out.public_lse + k,
                                              out.public_status + k);
      });
    }
  });
  const std::int64_t models = in.shape.models;
  // One range of rows per thread: a range shares the public row's tables, and all rows take about
  // the same time.
  const std::int64_t parts = threads < 1 ? 1 : threads;
  const std::int64_t grain = (models + parts - 1) / parts;
  cpu::parallel_for(models * in.shape.positions, grain, threads,
                    [&](std::int64_t begin, std::int64_t end) {
                      Rows rows(in, target, out);
                      for (std::int64_t k = begin; k < end; ++k) rows.solve(k / models, k % models);
                    });
}

}  // namespace

void add_project(cpu::Table& table) { table.project = project; }

ADAPMIXED_CORE_END
