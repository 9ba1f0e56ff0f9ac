// D<->_alpha(p || p') of every model and order, p' the mixture without that model.
//
// Each position is summed in single precision with a bound on what that may have cost
// (float_chunk.h). Where the bound does not hold, and where few models or sums from other ranks ask
// for it, the position is summed in double (exact_leave_one_out.h). The vocabulary is cut into
// chunks whose sums are added in order: the result does not depend on the number of threads.
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/exact_leave_one_out.h"
#include "cpu/float_chunk.h"
#include "cpu/row_sums.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Relative error of a loss that the float sums may have; python adds loss_error, which is larger.
constexpr double kLossError = 9.8e-6;
// Below this many slots most x are large.
constexpr std::int64_t kFewSlots = 4;

// The float sums of one position.
struct PositionSums {
  const LossFit& fit;
  double* data;
  std::int64_t stride;
  double mean_balance, common;

  ModelSums model(std::int64_t i) const { return {data + i * stride, fit.degree}; }
};

// What single precision cost model i, by the sums themselves.
class ErrorBound {
 public:
  // shift: the largest |lse - public lse| of a model, and of its product with the weight.
  ErrorBound(const LossPlan& plan, const PositionSums& sums, double shift, double weighted_shift)
      : plan_(plan), sums_(sums), shift_(shift), weighted_shift_(weighted_shift) {
    for (std::int64_t i = 0; i < plan.models; ++i) mean_ += second(i);
    mean_ = std::sqrt(mean_ / static_cast<double>(plan.models));
    first_ = std::sqrt(second(0));
    common_ = plan.against_public ? 0.0 : std::sqrt(sums.common);
    others_ = 1.0 / std::fmax(plan.slots - 1.0, 1.0);
  }

  // sum p x^2.
  double second(std::int64_t i) const {
    const ModelSums m = sums_.model(i);
    return sums_.fit.reach * sums_.fit.reach * m.moments()[0] + m.listed_second();
  }

  // Whether loss k of model i is within kLossError (or 1e-12 nats) of the truth; sets it.
  bool loss(std::int64_t i, std::int64_t k, double& result) const {
    const ModelSums m = sums_.model(i);
    const LossFit& fit = sums_.fit;
    const double order = plan_.options.orders[k];
    double forward_slope, reverse_slope;
    const double forward_bulk = fit.forward[k].sum(m.moments(), fit.degree, forward_slope);
    const double reverse_bulk = fit.reverse[k].sum(m.moments(), fit.degree, reverse_slope);
    const ListedSums& large = m.listed(k);
    const double forward = forward_bulk + large.forward, reverse = reverse_bulk + large.reverse;
    const double excess = std::fmax(std::fmax(forward, reverse), 0.0);
    result = std::log1p(excess) / (order - 1.0);
    if (!std::isfinite(forward) || !std::isfinite(reverse)) return false;

    // The error of x: in proportion to x itself, and, as a norm under p like `size`, what it shares
    // with the other models: their deltas' rounding, that of sums over models, of z - z_0. The last
    // costs delta = w (r - 1) shift times w r <= |delta| + w.
    const double u = kFloatUnit, size = std::sqrt(second(i));
    const double own = 14.0 * u + 2.0 * u * shift_;
    const double shared =
        u * (20.0 * common_ + (plan_.against_public ? 0.0 : 10.0 * mean_) + 7.0 * first_ +
             5.0 * mean_ + shift_ * (2.0 * common_ + mean_) + 2.0 * weighted_shift_ * others_) +
        1e-11 * others_;
    // sum p x c'(x), and an upper bound on sum p |c'(x)| y for any y of norm `shared`.
    const double slope = std::fmax(std::fabs(forward_slope), std::fabs(reverse_slope));
    const double curvature = order * (order - 1.0) * (second(i) - m.listed_second());
    const double moved =
        own * slope + (size > 0.0 ? shared / size : 0.0) * std::fmax(slope, curvature);
    const double bulk = std::fabs(forward_bulk) + std::fabs(reverse_bulk);
    const double interpolation =
        std::fmax(fit.forward[k].error, fit.reverse[k].error) * m.moments()[0];
    // In a listed x only the mean delta is rounded, by 15 units and the shift of the models' mean
    // |delta|; x is at least the reach, and mean - delta at least reach / others_ times the
    // mixture.
    const double spread = std::fmax((common_ + mean_) / others_, 1.0);
    const double listed =
        large.rough_slope * u *
            ((15.0 + shift_) * spread * (1.0 + others_ / fit.reach) + 2.0 + 2.0 * shift_) +
        1e-12 * large.slope +
        20.0 * u * std::fmax(std::fabs(large.forward), std::fabs(large.reverse));
    const double total = moved + 12.0 * u * bulk + interpolation + listed;
    const double allowed = kLossError * (1.0 + excess) * std::log1p(excess);
    return total <= allowed || total <= 1e-12 * (order - 1.0);
  }

 private:
  const LossPlan& plan_;
  const PositionSums& sums_;
  double shift_, weighted_shift_;
  double mean_ = 0.0, first_ = 0.0, common_ = 0.0, others_ = 0.0;
};

class Call {
 public:
  Call(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options, double* loss,
       double* balance, int threads)
      : in_(in),
        weights_(weights),
        plan_(in.shape, options),
        loss_(loss),
        balance_(balance),
        threads_(threads) {}

  void run() {
    const std::int64_t positions = in_.shape.positions, models = in_.shape.models;
    if (positions == 0) return;
    std::unique_ptr<std::atomic<bool>[]> failed(new std::atomic<bool>[positions]);
    const bool floats = plan_.slots >= kFewSlots && plan_.options.mean_excess == nullptr;
    for (std::int64_t b = 0; b < positions; ++b) failed[b].store(!floats);
    if (floats) {
      choose_fits();
      const std::int64_t chunks = (plan_.vocab + plan_.chunk() - 1) / plan_.chunk();
      // Positions in groups: the chunks' sums take at most 32 MB or one position's worth.
      const std::int64_t each = chunks * (models * stride(kMaxMoments) + 2);
      const std::int64_t fit = (std::int64_t{1} << 22) / each;
      const std::int64_t group = fit < 1 ? 1 : fit < positions ? fit : positions;
      double* memory = cpu::thread_scratch(group * each, 1);
      for (std::int64_t first = 0; first < positions; first += group) {
        const std::int64_t here = positions - first < group ? positions - first : group;
        sum_chunks(first, here, chunks, memory, failed.get());
      }
    }
    for (std::int64_t b = 0; b < positions; ++b) {
      if (failed[b].load()) exact(b);
    }
  }

 private:
  std::int64_t stride(int degree) const {
    return ModelSums::size(degree, plan_.options.num_orders);
  }

  // The degree for each position, from its largest weight, and the fits that are needed.
  void choose_fits() {
    const std::int64_t positions = in_.shape.positions;
    fits_.reset(new const LossFit*[positions]);
    // Calls with the same orders follow one another.
    thread_local std::vector<double> orders;
    thread_local std::unique_ptr<LossFit> known[kMaxMoments + 1];
    const std::vector<double> now(plan_.options.orders,
                                  plan_.options.orders + plan_.options.num_orders);
    if (orders != now) {
      for (auto& fit : known) fit.reset();
      orders = now;
    }
    for (std::int64_t b = 0; b < positions; ++b) {
      double largest = 0.0;
      for (std::int64_t i = 0; i < in_.shape.models; ++i) {
        largest = std::fmax(largest, weights_.weight[i * positions + b]);
      }
      auto& fit = known[plan_.degree(largest)];
      if (!fit) {
        fit.reset(new LossFit);
        plan_.fit(plan_.degree(largest), *fit);
      }
      fits_[b] = fit.get();
    }
  }

  // memory: for each chunk of each position the models' sums, then balance and common.
  void sum_chunks(std::int64_t first, std::int64_t count, std::int64_t chunks, double* memory,
                  std::atomic<bool>* failed) {
    const std::int64_t models = in_.shape.models, length = plan_.chunk();
    const std::int64_t each = models * stride(kMaxMoments) + 2;
    cpu::parallel_for(count * chunks, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(FloatChunk::scratch_size(plan_, kMaxMoments));
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t position = first + task / chunks, start = task % chunks * length;
        if (failed[position].load(std::memory_order_relaxed)) continue;
        const std::int64_t stop = start + length < plan_.vocab ? start + length : plan_.vocab;
        const LossFit& fit = *fits_[position];
        double* own = memory + task * each;
        const std::int64_t size = models * stride(fit.degree);
        for (std::int64_t k = 0; k < size; ++k) own[k] = 0.0;
        FloatChunk chunk(in_, weights_, plan_, fit, position, scratch);
        if (!chunk.add(start, stop, own)) failed[position].store(true, std::memory_order_relaxed);
        own[size] = chunk.mean_balance();
        own[size + 1] = chunk.common();
      }
    });
    cpu::parallel_for(count, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        if (failed[first + b].load()) continue;
        const LossFit& fit = *fits_[first + b];
        double* total = memory + b * chunks * each;
        const std::int64_t size = models * stride(fit.degree);
        for (std::int64_t c = 1; c < chunks; ++c) {
          for (std::int64_t k = 0; k < size + 2; ++k) total[k] += total[c * each + k];
        }
        const PositionSums sums{fit, total, stride(fit.degree), total[size], total[size + 1]};
        if (!finish(first + b, sums)) failed[first + b].store(true);
      }
    });
  }

  // The losses of one position; false where floats were not enough for one of them.
  bool finish(std::int64_t position, const PositionSums& sums) {
    const std::int64_t orders = plan_.options.num_orders;
    double shift = 0.0, weighted_shift = 0.0;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position;
      // sum p x is mean sum q delta less this model's, over the others; or this model's over all.
      balance_[at] = plan_.against_public
                         ? -plan_.slots * sums.model(i).first()
                         : sums.mean_balance - (plan_.slots - 1.0) * sums.model(i).first();
      if (!(std::fabs(balance_[at]) < 1e-5)) return false;  // to be named by the exact sums
      const double own = std::fabs(in_.private_lse[at] - in_.public_lse[position]);
      shift = std::fmax(shift, own);
      weighted_shift = std::fmax(weighted_shift, weights_.weight[at] * own);
    }
    if (!(std::fabs(sums.mean_balance) < 1e-5)) return false;
    const ErrorBound bound(plan_, sums, shift, weighted_shift);
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      double* out = loss_ + (i * in_.shape.positions + position) * orders;
      for (std::int64_t k = 0; k < orders; ++k) {
        if (!bound.loss(i, k, out[k])) return false;
      }
    }
    return true;
  }

  // The position in double, with log-sum-exps to match.
  void exact(std::int64_t position) {
    const std::int64_t models = in_.shape.models, positions = in_.shape.positions;
    const std::int64_t orders = plan_.options.num_orders, vocab = plan_.vocab;
    cpu::Buffer memory(models * (4 + orders));
    double *lse = memory.data(), *weight = lse + models, *complement = weight + models;
    double *balance = complement + models, *loss = balance + models;
    Logits rows = in_.private_logits, public_row = in_.public_logits;
    rows.data = row_of(rows, 0, position).data;
    public_row.data = row_of(public_row, 0, position).data;
    cpu::parallel_for(models, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t at = i * positions + position;
        weight[i] = weights_.weight[at];
        complement[i] = weights_.complement[at];
        lse[i] = in_.private_lse[at];
      }
    });
    const Ensemble one{{models, 1, vocab}, rows, public_row, lse, in_.public_lse + position};
    LeaveOneOutOptions options = plan_.options;
    if (options.mean_excess != nullptr) options.mean_excess += position * vocab;
    exact_leave_one_out(one, {weight, complement}, options, loss, balance, threads_);
    for (std::int64_t i = 0; i < models; ++i) {
      balance_[i * positions + position] = balance[i];
      for (std::int64_t k = 0; k < orders; ++k) {
        loss_[(i * positions + position) * orders + k] = loss[i * orders + k];
      }
    }
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan plan_;
  std::unique_ptr<const LossFit*[]> fits_;
  double *loss_, *balance_;
  int threads_;
};

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, int threads) {
  Call(in, weights, options, loss, balance, threads).run();
}

}  // namespace

void add_leave_one_out(cpu::Table& table) { table.leave_one_out = leave_one_out; }

ADAPMIXED_CORE_END
