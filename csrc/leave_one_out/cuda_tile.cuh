// The sums of one chunk: for each tile first the deviations of all models, a thread a token, then
// the models' moments, a lane a model. A lane adds its model's larger x one by one.
#pragma once

#include "leave_one_out/cuda_call.cuh"

ADAPMIXED_CORE_BEGIN

// A chunk of one position. A whole block must call the constructor and run() together.
template <Dtype D>
class ChunkSums {
 public:
  __device__ ChunkSums(const LossCall& call, std::int64_t position, double* out)
      : call_(call),
        all_(call.all),
        position_(position),
        models_(static_cast<int>(call.in.shape.models)),
        memory_(call.layout),
        facts_(call, position),
        reach_(call.reach[facts_.degree]),
        in_double_(call.weights.upper > 0.0 || few_slots(call.all)),
        out_(out) {}

  // `wide`: of the block's shared memory, a bit for each token of a tile at which some |t| may
  // exceed 1.
  __device__ void run(std::int64_t begin, std::int64_t end, std::uint32_t* wide) {
    const int group = call_.layout.models;
    ThreadSums sums;
    if (!facts_.admissible) sums.growth = HUGE_VALF;
    for (std::int64_t start = begin; start < end; start += call_.layout.tile) {
      TileToken token = load_public(start, sums);
      Deviations found;
      for (int first = 0; first < models_; first += group) {
        const Deviations here = add_group(first, token);
        found.total += here.total;
        found.largest = std::fmax(found.largest, here.largest);
      }
      const unsigned bits = __ballot_sync(kAllLanes, finish(token, found, sums));
      if (lane_id() == 0) wide[warp_id()] = bits;
      for (int first = 0; first < models_; first += group) {
        if (models_ > group) add_group(first, token);
        if (token.exact || !token.counted) write_exact(first, token);
        __syncthreads();
        add_models(first, start, wide, start == begin);
        __syncthreads();  // the tile has been read
      }
    }
    store(sums);
  }

 private:
  __device__ double public_lse() const { return call_.in.public_lse[position_]; }
  __device__ bool in_tile() const { return static_cast<int>(threadIdx.x) < call_.layout.tile; }
  __device__ int size_of(int first) const {
    return models_ - first < call_.layout.models ? models_ - first : call_.layout.models;
  }

  __device__ TileToken load_public(std::int64_t start, ThreadSums& sums) const {
    TileToken token{};
    token.v = start + threadIdx.x;
    if (!in_tile() || token.v >= call_.in.shape.vocab) return token;
    token.z0 = logit<D>(row_bits<D>(call_.in.public_logits, 0, position_), token.v);
    const double log_q = token.z0 - public_lse();
    if (log_q <= kMaskedLog) {
      // A token that the public row masks may have no part of any model's answer.
      for (int i = 0; i < models_ && !(call_.weights.upper > 0.0); ++i) {
        const ModelRow<D> row = model_row<D>(call_.in, call_.weights, i, position_);
        const double lse = call_.in.private_lse[i * call_.in.shape.positions + position_];
        const double log_p = logit<D>(row.logits, token.v) - lse;
        if (row.weight > 0.0 && !(log_p <= kMaskedLog)) sums.growth = HUGE_VALF;
      }
      return token;
    }
    token.counted = true;
    token.q = exp_(vmax(kRarest, log_q));
    token.exact = in_double_ || !(token.q >= kLeastFloatQ);
    token.a = split_token(token.z0 - static_cast<float>(centre_of(public_lse())));
    return token;
  }

  // Writes the deviations of a group of models at this thread's token, if it is not exact. A whole
  // block must call this together.
  __device__ Deviations add_group(int first, const TileToken& token) {
    const int count = size_of(first);
    __syncthreads();  // the last group's constants have been read
    for (int j = static_cast<int>(threadIdx.x); j < count; j += kLossThreads) {
      const std::int64_t at = (first + j) * call_.in.shape.positions + position_;
      const double lse = call_.in.private_lse[at], weight = call_.weights.weight[at];
      const FloatShift shift =
          make_shift(lse - centre_of(lse), public_lse() - centre_of(public_lse()));
      memory_.models[j] = {shift.c, static_cast<float>(centre_of(lse)),
                           static_cast<float>(weight * (1.0 + shift.residual)),
                           static_cast<float>(weight * shift.residual)};
    }
    __syncthreads();
    Deviations found;
    if (!token.counted || token.exact) return found;
    float* column = memory_.deviations + threadIdx.x;
    const int pitch = call_.layout.pitch();
    const auto* at = row_bits<D>(call_.in.private_logits, first, position_) + token.v;
    const std::int64_t stride = call_.in.private_logits.stride_model;
    typename Bits<D>::type next[kModelsAtOnce] = {};
    const auto load = [&](int left) {
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) {
        if (g < left) next[g] = at[g * stride];
      }
      at += kModelsAtOnce * stride;
    };
    load(count);
#pragma unroll 1
    for (int j = 0; j < count; j += kModelsAtOnce) {
      float e[kModelsAtOnce];
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) e[g] = float_of<D>(next[g]);
      load(count - j - kModelsAtOnce);  // on their way while these are computed
#pragma unroll
      for (int g = 0; g < kModelsAtOnce; ++g) {
        e[g] = j + g < count ? deviation(memory_.models[j + g], e[g], token.a) : 0.0f;
        if (j + g < count) column[(j + g) * pitch] = e[g];
        found.largest = std::fmax(found.largest, std::fabs(e[g]));
      }
      found.total +=
          static_cast<double>(((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7])));
    }
    return found;
  }
  // With p/q kept above e^-25.
  __device__ static float deviation(const FloatModel& model, float z, const FloatToken& token) {
    const float a = token.grid + model.c;
    const float lowest = vfma(a, 1.0f / kOctavesPerNat, -25.0f);
    return vfma(ratio_excess(at_least(lowest, z - model.centre), a, token.rest), model.slope,
                model.offset);
  }

  // Computes what all models share at this thread's token. Returns whether some |t| may exceed 1.
  __device__ bool finish(TileToken& token, const Deviations& found, ThreadSums& sums) {
    if (!in_tile()) return false;
    if (!token.counted) {
      set(0.0, 0.0, 0.0);
      return false;
    }
    if (!token.exact) {
      const double mean = found.total / all_.slots, ratio = 1.0 + mean;
      const double inverse = 1.0 / ratio, relative = inverse / call_.divisor();
      const double middle = all_.against_public ? 0.0 : mean;
      token.exact = ratio < kLeastRatio || (middle - found.largest) * relative < -0.45;
      if (!token.exact) {
        const double p = token.q * ratio, shared = std::fabs(middle) * relative;
        const double factor = relative / reach_;
        sums.mass += p;
        sums.balance += token.q * mean;
        sums.common += p * shared * shared;
        sums.most_common = std::fmax(sums.most_common, rounded_up(shared));
        sums.growth =
            std::fmax(sums.growth, rounded_up((mean + 2.0 * facts_.mean_weight) * inverse));
        set(middle * factor, factor, p);
        return !(found.largest * factor + std::fabs(middle * factor) <= 1.0);
      }
    }
    const ExactToken exact = exact_token<D>(call_, position_, token.v, token.z0, token.q);
    token.mean = exact.mean;
    if (!exact.bounded) sums.growth = HUGE_VALF;
    sums.mass += exact.p;
    sums.balance += token.q * token.mean.excess;
    set(0.0, -1.0, exact.p);
    return true;
  }

  __device__ void set(double middle, double factor, double p) const {
    const int thread = static_cast<int>(threadIdx.x);
    TileTokens& four = memory_.tokens[thread / 4];
    four.middle.v[thread % 4] = static_cast<float>(middle);
    four.factor.v[thread % 4] = static_cast<float>(factor);
    four.p.v[thread % 4] = static_cast<float>(p);
    memory_.mixture[thread] = p;
  }

  // Writes what `kept` returns, divided by the reach, for a group of models.
  __device__ void write_exact(int first, const TileToken& token) const {
    if (!in_tile()) return;
    const int count = size_of(first);
    float* column = memory_.deviations + threadIdx.x;
    bool lost = false;
    const MixtureToken<double> mixture = mixture_token(all_, token.q, token.mean, lost);
#pragma unroll 1
    for (int j = 0; j < count; ++j, column += call_.layout.pitch()) {
      const double kept = token.counted ? exact_neighbour<D>(call_, position_, token.v, token.z0,
                                                             first + j, mixture)
                                        : 0.0;
      *column = static_cast<float>(kept / reach_);
    }
  }

  // Adds the tile's sums of a group of models. `fresh`: nothing has been stored yet. A whole block
  // must call this together.
  __device__ void add_models(int first, std::int64_t start, const std::uint32_t* wide, bool fresh) {
    const int count = size_of(first);
    for (int at = warp_id() * kModelLanes; at < count; at += kLossThreads / kWarp * kModelLanes) {
      with_degree(degree_at(facts_.degree), [&](auto degree) {
        add_moments<decltype(degree)::value>(first, at, start, wide, fresh);
      });
    }
  }

  template <int kDegree>
  __device__ void add_moments(int first, int at, std::int64_t start, const std::uint32_t* wide,
                              bool fresh) {
    const int count = size_of(first), index = at + lane_id() % kModelLanes;
    const int part = lane_id() / kModelLanes, length = call_.layout.tile / kTileParts;
    const bool present = index < count;
    const int i = first + (present ? index : count - 1);  // a lane without a model reads the last
    const float* deviations =
        memory_.deviations + (i - first) * call_.layout.pitch() + part * length;
    float total[kDegree + 1] = {};
    std::uint64_t large = 0;
#pragma unroll 1
    for (int k = 0; k < length; k += kBurst) {
      float s[kDegree + 1] = {};
      const int own = part * length + k, other = (1 - part) * length + k;
      const std::uint32_t bits = wide[own / 32] >> own % 32 | wide[other / 32] >> other % 32;
      const TileTokens* tokens = memory_.tokens + own / 4;
      unsigned found = 0;
      if ((bits & 0xffffu) == 0) {  // the same for all lanes
        add_burst<false>(tokens, deviations + k, s, found);
      } else {
        add_burst<true>(tokens, deviations + k, s, found);
      }
      large |= std::uint64_t{found} << k;
#pragma unroll
      for (int m = 0; m <= kDegree; ++m) total[m] = total[m] + s[m];
    }
#pragma unroll
    for (int m = 0; m <= kDegree; ++m) {
      total[m] = total[m] + __shfl_xor_sync(kAllLanes, total[m], kModelLanes);
    }
    const auto put = [&](std::int64_t column, double value) {
      if (!present || column % kTileParts != part) return;
      double& to = out_[LossLayout::kHeader + column * models_ + i];
      to = fresh ? value : to + value;
    };
    const std::int64_t moments = LossLayout::columns(0, call_.orders.count);
    int hidden = total[1] == 0.0f && differs<D>(call_, position_, i, start + part * length, length);
    hidden |= __shfl_xor_sync(kAllLanes, hidden, kModelLanes);
#pragma unroll
    for (int m = 0; m < kDegree; ++m) {
      put(moments + m, m == 0 && hidden != 0 ? kHidden : static_cast<double>(total[1 + m]));
    }
    add_listed(large, part * length, deviations, reach_ * static_cast<double>(total[0]), fresh,
               put);
  }

  // What stands for sum p t^2 of a row that floats do not tell from the public one.
  static constexpr double kHidden = 1e-300;

  // Adds the tokens of this lane's part of the tile whose bits are set. A whole warp must call this
  // together.
  template <class Put>
  __device__ void add_listed(std::uint64_t large, int begin, const float* deviations, double first,
                             bool fresh, const Put& put) const {
    const bool any = __ballot_sync(kAllLanes, large != 0) != 0;
    const auto for_each = [&](const auto& visit) {
      for (std::uint64_t bits = large; bits != 0; bits &= bits - 1) {
        const int k = __ffsll(static_cast<long long>(bits)) - 1, at = begin + k;
        const TileTokens& four = memory_.tokens[at / 4];
        const float factor = four.factor.v[at % 4];
        const float t = vfma(-deviations[k], factor, four.middle.v[at % 4]);
        const double p = memory_.mixture[at];
        if (p != 0.0) visit(neighbour_of(t * reach_), p, factor > 0.0f);
      }
    };
    double both[2] = {0.0, 0.0};
    for_each([&](const Neighbour& other, double p, bool) {
      both[0] += p * other.x;
      both[1] += p * other.x * other.x;
    });
    shared_sum(both);
    put(0, first + both[0]);
    if (!any && !fresh) return;
    put(1, both[1]);
    const float most_log = static_cast<float>(80.0 / all_.largest_order);
#pragma unroll 1
    for (int k = 0; k < 2 * call_.orders.count; ++k) {
      const double order = call_.orders.value[k / 2], s = k % 2 == 0 ? order : 1.0 - order;
      ListedSums found;
      for_each([&](const Neighbour& other, double p, bool rough) {
        const auto x = static_cast<float>(other.x);
        const FloatLog<float> log = float_log(x, static_cast<float>(other.X));
        const bool in_floats = order > kLeastFloatOrder && std::fabs(log.log) < most_log;
        double term, size = std::fabs(static_cast<double>(log.log));
        if (in_floats) {
          term = p * power_excess(x, log, static_cast<float>(s));
        } else {
          const LogParts<double> exact = log_parts(other.x, other.X);
          term = p * power(other.x, exact, s).excess, size = std::fabs(exact.log);
        }
        const double share = reach_ / std::fmax(std::fabs(other.x), reach_);
        found.add({term, term * size, term * share, term * size * share}, s, in_floats, rough);
      });
      double sums[4] = {found.value, found.weight, found.rough, found.near};
      shared_sum(sums);
#pragma unroll
      for (int m = 0; m < 4; ++m) put(2 + 4 * k + m, sums[m]);
    }
  }

  // The sums over the lanes that share a model.
  template <int kCount>
  __device__ static void shared_sum(double (&values)[kCount]) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
      values[m] += __shfl_xor_sync(kAllLanes, values[m], kModelLanes);
    }
  }

  __device__ void store(const ThreadSums& sums) const {
    double totals[3] = {sums.mass, sums.balance, sums.common};
    double most[2] = {sums.most_common, sums.growth};
    block_reduce(totals, Add{});
    block_reduce(most, Max{});
    if (threadIdx.x != 0) return;
    const double header[LossLayout::kHeader] = {
        totals[0], totals[1], totals[2], most[0], most[1], static_cast<double>(facts_.degree)};
    for (int k = 0; k < LossLayout::kHeader; ++k) out_[k] = header[k];
  }

  const LossCall& call_;
  const Neighbours& all_;
  std::int64_t position_;
  int models_;
  TileMemory memory_;
  LossFacts facts_;
  double reach_;
  bool in_double_;
  double* out_;
};

ADAPMIXED_CORE_END
