// D<->_alpha(p || p') of every model and order, where p' is the mixture without that model, as an
// upper bound (bound.h).
//
// The vocabulary is cut into chunks (cpu_chunk.h) whose sums are added in order: the result does
// not depend on the number of threads.
#include <vector>

#include "common/operators.h"
#include "common/parallel.h"
#include "leave_one_out/cpu_chunk.h"

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
        threads_(threads),
        chunks_((plan_.vocab + plan_.chunk() - 1) / plan_.chunk()) {}

  void run() {
    const std::int64_t positions = in_.shape.positions;
    if (positions == 0) return;
    fits_ = &fits_of(plan_.options.orders, plan_.options.num_orders);
    for (std::int64_t b = 0; b < positions; ++b) {
      choices_.push_back(plan_.moments(largest_weight(b)));
    }
    // Positions are summed in groups: the chunks' sums take at most 32 MB, or one position's worth.
    const std::int64_t most = (std::int64_t{1} << 22) / (chunks_ * chunk_size());
    const std::int64_t group = most < 1 ? 1 : most < positions ? most : positions;
    double* memory = cpu::thread_scratch(group * chunks_ * chunk_size(), 1);
    for (std::int64_t first = 0; first < positions; first += group) {
      const std::int64_t left = positions - first;
      sum_chunks(first, left < group ? left : group, memory);
    }
  }

 private:
  std::int64_t stride(int degree) const {
    return ModelSums::size(degree, plan_.options.num_orders);
  }
  // The number of doubles for one chunk of one position: the models' sums and the TokenSums.
  std::int64_t chunk_size() const {
    return in_.shape.models * stride(kMaxMoments) + sizeof(TokenSums) / sizeof(double);
  }
  TokenSums* token_sums(double* of_chunk) const {
    return reinterpret_cast<TokenSums*>(of_chunk + in_.shape.models * stride(kMaxMoments));
  }

  double largest_weight(std::int64_t position) const {
    if (weights_.upper > 0.0) return weights_.upper;
    double largest = 0.0;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      largest = std::fmax(largest, weights_.weight[i * in_.shape.positions + position]);
    }
    return largest;
  }

  // A position whose losses cannot be bounded gets an infinite growth.
  void sum_chunks(std::int64_t first, std::int64_t count, double* memory) {
    const std::int64_t models = in_.shape.models, length = plan_.chunk(), each = chunk_size();
    cpu::parallel_for(count * chunks_, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(Chunk::scratch_size(plan_));
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t position = first + task / chunks_, start = task % chunks_ * length;
        const std::int64_t stop = start + length < plan_.vocab ? start + length : plan_.vocab;
        const MomentChoice& choice = choices_[position];
        double* own = memory + task * each;
        for (std::int64_t k = 0; k < models * stride(choice.degree); ++k) own[k] = 0.0;
        Chunk chunk(in_, weights_, plan_, choice, position, scratch);
        const bool bounded = chunk.add(start, stop, own);
        *token_sums(own) = chunk.token_sums();
        if (!bounded) token_sums(own)->growth = HUGE_VAL;
      }
    });
    cpu::parallel_for(count, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        double* total = memory + b * chunks_ * each;
        for (std::int64_t c = 1; c < chunks_; ++c) {
          double* own = total + c * each;
          for (std::int64_t k = 0; k < models * stride(choices_[first + b].degree); ++k) {
            total[k] += own[k];
          }
          token_sums(total)->add(*token_sums(own));
        }
        finish(first + b, total, *token_sums(total));
      }
    });
  }

  void finish(std::int64_t position, double* sums, const TokenSums& tokens) {
    const std::int64_t models = in_.shape.models, orders = plan_.options.num_orders;
    const MomentChoice& choice = choices_[position];
    const auto model = [&](std::int64_t i) {
      return ModelSums{sums + i * stride(choice.degree), choice.degree};
    };
    double mean_norm = 0.0, ratio_error = 0.0;
    for (std::int64_t i = 0; i < models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position;
      // Against the public distribution sum p x = -(sum q delta) / slots. Otherwise it is the mean
      // of sum q delta minus this model's, divided by slots - 1.
      balance_[at] = tokens.growth == HUGE_VAL ? 0.0
                     : plan_.against_public
                         ? -plan_.slots * model(i).first()
                         : tokens.balance - (plan_.slots - 1.0) * model(i).first();
      mean_norm += std::sqrt(model(i).second(choice.reach)) / static_cast<double>(models);
      ratio_error =
          std::fmax(ratio_error, double_ratio_error(in_.private_lse[at], in_.public_lse[position]));
    }
    const LossBound bound(plan_, choice.reach, choice.degree, tokens, mean_norm,
                          largest_weight(position), ratio_error);
    bool all_public = mean_norm == 0.0;
    for (std::int64_t i = 0; all_public && i < models; ++i) {
      all_public = answers_public(i, position);
    }
    for (std::int64_t i = 0; i < models; ++i) {
      double* out = loss_ + (i * in_.shape.positions + position) * orders;
      const ModelSums own = model(i);
      const bool nothing = plan_.against_public
                               ? own.second(choice.reach) == 0.0 && answers_public(i, position)
                               : all_public;
      for (std::int64_t k = 0; k < orders; ++k) {
        const double order = plan_.options.orders[k];
        const auto excess = [&](bool reverse) {
          return bound.excess(fits_->of[k][choice.index][reverse], own.moments(),
                              own.listed(k, reverse), order);
        };
        out[k] = tokens.growth == HUGE_VAL ? HUGE_VAL
                 : nothing ? 0.0
                           : divergence_from_excess(excess(false), excess(true), order);
      }
    }
  }

  // Whether p_bar_i is q, exactly.
  bool answers_public(std::int64_t i, std::int64_t position) const {
    const std::int64_t at = i * in_.shape.positions + position;
    if (weights_.upper == 0.0 && weights_.weight[at] == 0.0) return true;
    if (weights_.active != nullptr && !weights_.active[at]) return true;
    if (in_.private_lse[at] != in_.public_lse[position]) return false;
    const Row own = row_of(in_.private_logits, i, position);
    const Row other = row_of(in_.public_logits, 0, position);
    for (std::int64_t v = 0; v < plan_.vocab; ++v) {
      if (own.at(v) != other.at(v)) return false;
    }
    return true;
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan plan_;
  const LossFits<kMaxOrders>* fits_ = nullptr;
  std::vector<MomentChoice> choices_;
  double *loss_, *balance_;
  int threads_;
  std::int64_t chunks_;
};

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, int threads) {
  Call(in, weights, options, loss, balance, threads).run();
}

}  // namespace

void add_leave_one_out(cpu::Table& table) { table.leave_one_out = leave_one_out; }

ADAPMIXED_CORE_END
