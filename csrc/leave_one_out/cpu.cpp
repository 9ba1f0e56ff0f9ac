// D<->_alpha(p || p') of every model and order, where p' is the mixture without that model.
//
// A position is first summed in single precision (cpu_float_chunk.h), with a bound on the error
// (bound.h). Its deviations are in single or double precision, as a sample suggests. If the bound
// fails, deviations are computed in double; if it still fails, everything is (cpu_exact.h).
// Ensembles of few models, and clipped ones, are computed in double at once. The vocabulary is cut
// into chunks whose sums are added in order: the result does not depend on the number of threads.
#include <atomic>
#include <memory>
#include <vector>

#include "common/dispatch.h"
#include "common/row_sums.h"
#include "leave_one_out/cpu_exact.h"
#include "leave_one_out/cpu_float_chunk.h"
#include "leave_one_out/cpu_sample.h"

ADAPMIXED_CORE_BEGIN
namespace {

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
    const std::int64_t positions = in_.shape.positions;
    std::vector<std::int64_t> left;
    for (std::int64_t b = 0; b < positions; ++b) left.push_back(b);
    const bool floats_serve = plan_.slots >= kFewSlots && weights_.upper == 0.0;
    if (floats_serve && positions > 0) {
      choose_fits();
      choose_arithmetic();
      left = sum_all(left);
      std::vector<std::int64_t> again, last;
      for (const std::int64_t b : left) {
        (arithmetic_[b].in_double ? last : again).push_back(b);
        arithmetic_[b].in_double = true;
      }
      left = sum_all(again);
      left.insert(left.end(), last.begin(), last.end());
    }
    for (const std::int64_t b : left) exact(b);
  }

 private:
  std::int64_t stride(int degree) const {
    return ModelSums::size(degree, plan_.options.num_orders);
  }

  void choose_arithmetic() {
    const std::int64_t models = in_.shape.models;
    arithmetic_.resize(in_.shape.positions);
    cpu::parallel_for(in_.shape.positions, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(sample_scratch_size(models));
      for (std::int64_t b = begin; b < end; ++b) {
        with_dtype(in_.private_logits.dtype, [&](auto tag) {
          arithmetic_[b] =
              sample_arithmetic<decltype(tag)::value>(in_, weights_, plan_, b, scratch);
        });
      }
    });
  }

  // Sums these positions. Returns those for which single precision was not accurate enough.
  std::vector<std::int64_t> sum_all(const std::vector<std::int64_t>& positions) {
    const std::int64_t count = static_cast<std::int64_t>(positions.size());
    std::vector<std::int64_t> left;
    if (count == 0) return left;
    const std::int64_t chunks = (plan_.vocab + plan_.chunk() - 1) / plan_.chunk();
    // Positions are summed in groups: the chunks' sums take at most 32 MB, or one position's worth.
    const std::int64_t each = chunks * chunk_size();
    const std::int64_t fit = (std::int64_t{1} << 22) / each;
    const std::int64_t group = fit < 1 ? 1 : fit < count ? fit : count;
    double* memory = cpu::thread_scratch(group * each, 1);
    std::unique_ptr<std::atomic<bool>[]> failed(new std::atomic<bool>[group]);
    for (std::int64_t first = 0; first < count; first += group) {
      const std::int64_t here = count - first < group ? count - first : group;
      for (std::int64_t b = 0; b < here; ++b) failed[b].store(false);
      sum_chunks(positions.data() + first, here, chunks, memory, failed.get());
      for (std::int64_t b = 0; b < here; ++b) {
        if (failed[b].load()) left.push_back(positions[first + b]);
      }
    }
    return left;
  }

  // Chooses the degree of each position from its largest weight, and computes the fits that are
  // needed.
  void choose_fits() {
    const std::int64_t positions = in_.shape.positions;
    fits_.reset(new const LossFit*[positions]);
    // Kept between calls, because consecutive calls mostly have the same orders.
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
      const int degree = degree_at(loss_degree(plan_, largest));
      auto& fit = known[degree];
      if (!fit) {
        fit.reset(new LossFit);
        plan_.fit_all(degree, *fit);
      }
      fits_[b] = fit.get();
    }
  }

  // The number of doubles for one chunk of one position: the models' sums and the TokenSums.
  std::int64_t chunk_size() const {
    return in_.shape.models * stride(kMaxMoments) + sizeof(TokenSums) / sizeof(double);
  }

  void sum_chunks(const std::int64_t* positions, std::int64_t count, std::int64_t chunks,
                  double* memory, std::atomic<bool>* failed) {
    const std::int64_t models = in_.shape.models, length = plan_.chunk(), each = chunk_size();
    const auto token_sums = [&](std::int64_t task) {
      return reinterpret_cast<TokenSums*>(memory + task * each + models * stride(kMaxMoments));
    };
    cpu::parallel_for(count * chunks, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(FloatChunk::scratch_size(plan_, kMaxMoments));
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t b = task / chunks, position = positions[b],
                           start = task % chunks * length;
        if (failed[b].load(std::memory_order_relaxed)) continue;
        const std::int64_t stop = start + length < plan_.vocab ? start + length : plan_.vocab;
        const LossFit& fit = *fits_[position];
        double* own = memory + task * each;
        for (std::int64_t k = 0; k < models * stride(fit.degree); ++k) own[k] = 0.0;
        FloatChunk chunk(in_, weights_, plan_, fit, position, arithmetic_[position], scratch);
        if (!chunk.add(start, stop, own)) failed[b].store(true, std::memory_order_relaxed);
        *token_sums(task) = chunk.token_sums();
      }
    });
    cpu::parallel_for(count, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        if (failed[b].load()) continue;
        const LossFit& fit = *fits_[positions[b]];
        double* total = memory + b * chunks * each;
        TokenSums tokens = *token_sums(b * chunks);
        for (std::int64_t c = 1; c < chunks; ++c) {
          for (std::int64_t k = 0; k < models * stride(fit.degree); ++k) {
            total[k] += total[c * each + k];
          }
          tokens.add(*token_sums(b * chunks + c));
        }
        if (!finish(positions[b], total, tokens)) failed[b].store(true);
      }
    });
  }

  // Computes the losses of one position. Returns false if floats were not accurate enough for one
  // of them.
  bool finish(std::int64_t position, double* sums, const TokenSums& tokens) {
    const std::int64_t models = in_.shape.models, orders = plan_.options.num_orders;
    const LossFit& fit = *fits_[position];
    const auto model = [&](std::int64_t i) {
      return ModelSums{sums + i * stride(fit.degree), fit.degree};
    };
    LossPrecision precision{0.0, 0.0};
    double mean_norm = 0.0;
    for (std::int64_t i = 0; i < models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position;
      // Against the public distribution sum p x = -(sum q delta) / slots. Otherwise it is the mean
      // of sum q delta minus this model's, divided by slots - 1.
      balance_[at] = plan_.against_public ? -plan_.slots * model(i).first()
                                          : tokens.balance - (plan_.slots - 1.0) * model(i).first();
      if (!(std::fabs(balance_[at]) < kMostBalance)) return false;  // the exact sums decide
      mean_norm += std::sqrt(model(i).second(fit.reach)) / static_cast<double>(models);
      precision.largest_weight = std::fmax(precision.largest_weight, weights_.weight[at]);
      precision.ratio_error = std::fmax(
          precision.ratio_error, double_ratio_error(in_.private_lse[at], in_.public_lse[position]));
    }
    if (!(std::fabs(tokens.balance) < kMostBalance)) return false;
    const LossBound bound(plan_, fit.reach, fit.degree, tokens, precision, mean_norm);
    for (std::int64_t i = 0; i < models; ++i) {
      double* out = loss_ + (i * in_.shape.positions + position) * orders;
      const ModelSums own = model(i);
      const double size = std::sqrt(own.second(fit.reach));
      for (std::int64_t k = 0; k < orders; ++k) {
        const ListedSums& listed = own.listed(k);
        const auto forward =
            bound.direction(fit.forward[k].view(), own, size, listed.forward, listed);
        const auto reverse =
            bound.direction(fit.reverse[k].view(), own, size, listed.reverse, listed);
        if (!bound.loss(forward, reverse, size, plan_.options.orders[k], out[k])) return false;
      }
    }
    return true;
  }

  // Computes the position in double, with log-sum-exps to match.
  void exact(std::int64_t position) {
    const std::int64_t models = in_.shape.models, positions = in_.shape.positions;
    const std::int64_t orders = plan_.options.num_orders, vocab = plan_.vocab;
    cpu::Buffer memory(models * (5 + orders));
    double *lse = memory.data(), *weight = lse + models, *complement = weight + models;
    double *balance = complement + models, *loss = balance + models;
    bool* active =
        weights_.active == nullptr ? nullptr : reinterpret_cast<bool*>(loss + models * orders);
    Logits rows = in_.private_logits, public_row = in_.public_logits;
    rows.data = row_of(rows, 0, position).data;
    public_row.data = row_of(public_row, 0, position).data;
    cpu::parallel_for(models, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t at = i * positions + position;
        weight[i] = weights_.weight[at];
        complement[i] = weights_.complement[at];
        lse[i] = in_.private_lse[at];
        if (active != nullptr) active[i] = weights_.active[at];
      }
    });
    const Ensemble one{{models, 1, vocab}, rows, public_row, lse, in_.public_lse + position};
    const Weights own{weight, complement, weights_.lower, weights_.upper, active};
    exact_leave_one_out(one, own, plan_.options, loss, balance, threads_);
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
  std::vector<Arithmetic> arithmetic_;
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
