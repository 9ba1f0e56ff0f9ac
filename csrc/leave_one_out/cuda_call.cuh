// The arguments of the kernels of one leave-one-out call, and what they leave each other. Those in
// single precision are the first attempt at every position; their bound (leave_one_out/bound.h)
// tells whether the sums in double are needed.
#pragma once

#include "leave_one_out/cuda_float_memory.cuh"

ADAPMIXED_CORE_BEGIN

struct LossOrders {
  double value[kMaxOrders];
  int integer[kMaxOrders];  // 0 for an order that is not an integer
  int count;
  bool all_integer;
};

// What the weights and log-sum-exps of up to kFloatThreads models say about single precision.
struct FloatFacts {
  double mean_weight;  // their part of it
  double largest_weight, ratio_error;
  int degree;  // index for degree_at; -1: floats do not serve
};
ADAPMIXED_HD std::int64_t float_facts_of(std::int64_t models) {
  return (models + kFloatThreads - 1) / kFloatThreads;
}

// What the blocks of a call tell each other about one position. All words begin as 0.
struct LossState {
  std::int32_t failed;      // floats do not serve here
  std::int32_t refused;     // a loss exceeds its bound
  std::int32_t foreign;     // the rows are invalid or not those of the projection
  std::int32_t overflowed;  // some sum left the range of double
  unsigned left_at;         // of the k-th position left to double_loss_kernel: its index
};
struct LossProgress {
  unsigned left;         // positions left to double_loss_kernel
  unsigned taken, done;  // its pieces of work
  unsigned unused;
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossOrders orders;
  LossLayout layout;                          // of the sums in double
  FloatLayout floats;                         // of those in single precision
  double reach[kDegrees], a_reach[kDegrees];  // moment_reach, and 1 over it
  double a_slot, a_neighbour;  // 1 over the number of slots, and of those of the neighbour
  std::int64_t first;          // first position of this group
  double* sums;                // in double: (group, chunks, per_chunk)
  TokenTotals* totals;         // in single precision: (group)
  Word* model_totals;          // (group), ModelTotals::words each
  FloatModel* models;          // (group, N)
  DoubleModel* doubles;        // (group, N)
  FloatFacts* facts;           // (group, float_facts_of(N))
  LossProgress* progress;
  LossState* states;  // (group)
  double *loss, *balance;
  bool after_floats;  // only positions that these left are summed in double

  // The places of the sums of (model, order), of the balances and of the mass among the sums of one
  // chunk.
  ADAPMIXED_HD std::int64_t sums_at(std::int64_t model, std::int64_t order) const {
    return 2 * (model * orders.count + order);
  }
  ADAPMIXED_HD std::int64_t balance_at(std::int64_t model) const {
    return 2 * in.shape.models * orders.count + model;
  }
  ADAPMIXED_HD std::int64_t mass_at() const { return balance_at(in.shape.models); }
  ADAPMIXED_HD double* loss_of(std::int64_t model, std::int64_t position) const {
    return loss + (model * in.shape.positions + position) * orders.count;
  }
  // What is reported for a computed loss. A model of weight 0 loses nothing if q replaces it.
  ADAPMIXED_HD double reported(double loss, std::int64_t model, std::int64_t position) const {
    const bool nothing =
        loss == 0.0 && all.zero_out && weights.weight[model * in.shape.positions + position] == 0.0;
    return nothing && !(weights.upper > 0.0) ? 0.0 : raised(loss);
  }
};

// A chunk of the vocabulary at one position.
struct LossChunk {
  std::int64_t position, begin, end;
  double* sums;
};

__device__ inline LossChunk loss_chunk(const LossCall& call, std::int64_t member,
                                       std::int64_t chunk) {
  const std::int64_t begin = chunk * call.layout.chunk_length;
  const std::int64_t end = begin + call.layout.chunk_length;
  return {call.first + member, begin, end < call.in.shape.vocab ? end : call.in.shape.vocab,
          call.sums + (member * call.layout.chunks + chunk) * call.layout.per_chunk};
}

// The models' sums in single precision.
__device__ inline ModelTotals model_totals(const LossCall& call, std::int64_t member) {
  const std::int64_t models = call.in.shape.models, orders = call.orders.count;
  return {call.model_totals + member * ModelTotals::words(models, orders), models, orders};
}

ADAPMIXED_CORE_END
