// The interface of every back end: plain pointers, strides in elements, no framework.
//
// Shapes: N models, B positions, V tokens, K orders. Logits are (N, B, V) or (B, V) in fp32, bf16
// or fp16. Their last stride is 1; the others are arbitrary, 0 included. All results are
// contiguous. Results that enter a privacy guarantee are double.
#pragma once

#include <cstdint>

namespace adapmixed {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

// The status of one row of logits. A row whose status is not kRowOk has no defined result.
enum RowStatus : std::int32_t {
  kRowOk = 0,
  kRowNan = 1,
  kRowPlusInf = 2,
  kRowEmpty = 3,     // every logit is -inf
  kRowTooLarge = 4,  // |largest logit| > kMaxLogit
  kRowPublic = 5,    // the public row has one of these (CUDA: the call before raised nothing)
};

// Beyond this a float64 log-sum-exp does not resolve probabilities well enough for a privacy bound.
constexpr double kMaxLogit = 1e6;

struct Logits {
  const void* data;
  std::int64_t stride_model;  // 0 for the public row
  std::int64_t stride_position;
  Dtype dtype;
};

struct Shape {
  std::int64_t models;     // N, the rows that are present
  std::int64_t positions;  // B
  std::int64_t vocab;      // V
};

// The inputs of an ensemble with their log-sum-exps, which every operation after the first needs.
struct Ensemble {
  Shape shape;
  Logits private_logits;
  Logits public_logits;
  const double* private_lse;  // (N, B)
  const double* public_lse;   // (B)
};

// The inputs of a projection. It reads the rows first, so it computes their log-sum-exps.
struct ProjectInputs {
  Shape shape;
  Logits private_logits;
  Logits public_logits;
};
struct ProjectResults {
  double* weight;               // (N, B)
  double* private_lse;          // (N, B)
  std::int32_t* status;         // (N, B)
  double* public_lse;           // (B)
  std::int32_t* public_status;  // (B)
};

// How the projected distribution follows from p and q. Renyi ball: p_bar = weight p + rest q. Box
// (upper > 0): p_bar = clip(e^weight p, lower q, upper q), and rest q if p = 0.
struct Weights {
  const double* weight;    // (N, B): lambda, or log s
  const double* residual;  // (N, B), box only
  double lower = 0.0, upper = 0.0;
  const bool* active = nullptr;  // (N, B) or null; box only: inactive slots answer q
};

constexpr std::int64_t kMaxOrders = 8;

struct ClipInputs {
  Shape shape;
  Logits private_logits;
  Logits public_logits;
  const double* public_lse;  // (B)
};
// The bounds of the box of ratios to q, and the orders of the charges, if charges are wanted.
struct ClipOptions {
  double lower, upper;      // 0 <= lower <= 1 <= upper
  const double* orders;     // (K), each > 1, K <= kMaxOrders
  std::int64_t num_orders;  // may be 0
  std::int64_t num_models;  // >= N
};
struct ClipResults {
  double* log_scale;     // (N, B), log s; +inf if p_bar = upper q at every p > 0
  double* residual;      // (N, B), p_bar / q at tokens with p = 0
  double* charge;        // (N, B, K)
  double* private_lse;   // (N, B)
  std::int32_t* status;  // (N, B)
};

struct LeaveOneOutOptions {
  const double* orders;  // (K), each > 1, K <= kMaxOrders
  std::int64_t num_orders;
  bool zero_out;            // else add/remove
  std::int64_t num_models;  // >= N; absent slots answer q
};

struct ScreenOptions {
  double weight;
  double order;
  double threshold;
  std::int64_t top_k;
  std::int64_t num_models;
  const bool* active;          // (N, B) or null
  const double* noise;         // (B, top_k), already scaled by sigma
  const std::int64_t* tokens;  // (B, top_k), the likeliest of the public row, masked ones last
  double* log_ratios;          // (B, top_k), written over
};

struct LogPoolInputs {
  Shape shape;
  Logits private_logits;
  Logits public_logits;
  // (N, B), log-sum-exps of the private rows minus the public ones; null to compute them. CPU only.
  const double* differences;
};
struct LogPoolOptions {
  double lower, upper;      // a <= 0 <= b
  double scale;             // kappa
  std::int64_t num_models;  // >= N; absent slots have u_i = 0
  const bool* active;       // (N, B) or null; inactive slots have u_i = 0
};
struct LogPoolResults {
  double* log_normaliser;       // (B) log sum_v q exp((kappa/N) sum_i u_i)
  double* span;                 // (N, B) max_v u_i - min_v u_i over q > 0
  double* private_lse;          // (N, B)
  std::int32_t* status;         // (N, B)
  double* public_lse;           // (B)
  std::int32_t* public_status;  // (B)
  double* log_weights;          // (B, V) log q + (kappa/N) sum_i u_i
};

// Members lie side by side in blocks of this many.
constexpr std::int64_t kLowRankBlock = 16;

// Logits z of the public model on `shape.vocab` = K columns, or each member's own, and what its
// adapter adds to them. Members are padded to whole blocks.
struct LowRankInputs {
  Shape shape;
  const float* start;  // z; the stride of the models is 0 for the public model's
  std::int64_t start_model, start_position;
  const float* coefficients;   // c: (B, blocks, rank, kLowRankBlock)
  const void* factors;         // u: (V, blocks, rank, kLowRankBlock)
  Dtype dtype;                 // of u: f32 or bf16
  const std::int64_t* tokens;  // (B, K), the tokens of the columns; null if they are the V tokens
  std::int64_t rank, vocab;    // vocab: V
};

struct LowRankResults {
  float* data;  // (N, B, K)
  std::int64_t stride_model, stride_position;
};

// One member's factors for training: tokens lie in packs of this many, the last one padded.
constexpr std::int64_t kFactorPack = 64;

struct CrossEntropyInputs {
  std::int64_t rows, vocab, rank;
  const float* start;  // (n, V)
  std::int64_t stride;
  const float* coefficients;    // (n, rank)
  const float* factors;         // (packs, rank, kFactorPack)
  const std::int64_t* targets;  // (n) in [0, V)
};
struct CrossEntropyResults {
  double* losses;          // (n)
  float* of_coefficients;  // (n, rank); null, as of_factors, if they are not wanted
  float* of_factors;       // as the factors; added to
};

// Where a GPU works: device pointers everywhere, except orders and keys. Calls queue kernels; they
// neither allocate nor wait. Bad rows raise no error. They get a status and weight 0, and their
// results are +inf (divergences, losses), NaN (probabilities) or -1 (tokens). A call throws
// std::runtime_error if a kernel cannot be queued.
namespace cuda {
struct Queue {
  int device;
  void* stream;     // cudaStream_t
  void* workspace;  // 16-byte aligned, as large as the operator's _workspace function returns
};
}  // namespace cuda

// The operators of one back end. Place: the number of threads on a CPU, const cuda::Queue& on a
// GPU. Both have the same results up to rounding.
template <class Place>
struct Operators {
  void (*log_sum_exp)(const Logits& logits, std::int64_t models, std::int64_t positions,
                      std::int64_t vocab, double* lse, std::int32_t* status, Place place);
  void (*project)(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
                  Place place);
  void (*clip_project)(const ClipInputs& in, const ClipOptions& options, const ClipResults& out,
                       Place place);
  // loss: (N, B, K). balance: (N, B), sum_v (p_bar_i - q), which is 0 up to rounding if the rows
  // belong to the log-sum-exps.
  void (*leave_one_out)(const Ensemble& in, const Weights& weights,
                        const LeaveOneOutOptions& options, double* loss, double* balance,
                        Place place);
  void (*mixture)(const Ensemble& in, const Weights& weights, double* probabilities, Place place);
  // On a GPU NaN for a target outside [0, V).
  void (*log_prob)(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
                   double* result, Place place);
  void (*log_pool)(const LogPoolInputs& in, const LogPoolOptions& options,
                   const LogPoolResults& out, Place place);
  // start + sum_k coefficients[k] factors[k] on the chosen tokens.
  void (*add_low_rank)(const LowRankInputs& in, const LowRankResults& out, Place place);
  // One pair of rows per position: in.shape.models == 1, private = P, public = Q.
  void (*renyi_divergence)(const Ensemble& in, const double* orders, std::int64_t num_orders,
                           double* forward, double* backward, Place place);
  void (*screen)(const Ensemble& in, const ScreenOptions& options, double* divergence, bool* passed,
                 Place place);
  // Samples of N(0, sigma^2): eight from each block of the stream, in order from its first block.
  void (*gaussian)(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
                   double* result, Place place);
  void (*sample)(const double* probabilities, const Logits& public_logits, std::int64_t positions,
                 std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
                 std::int64_t* tokens, std::int32_t* status, Place place);

  // Bytes of the workspaces. Null on a CPU, whose threads have their own.
  std::int64_t (*log_sum_exp_workspace)(const Shape& shape);
  std::int64_t (*project_workspace)(const Shape& shape);
  std::int64_t (*clip_project_workspace)(const Shape& shape);
  std::int64_t (*leave_one_out_workspace)(const Shape& shape, std::int64_t num_orders);
  std::int64_t (*mixture_workspace)(const Shape& shape);
  std::int64_t (*log_pool_workspace)(const Shape& shape);
  std::int64_t (*sample_workspace)(std::int64_t positions, std::int64_t vocab);
};

// The files that implement them: each defines add_NAME(Table&), which enters its functions into the
// table of its build.
#define ADAPMIXED_FILES(each)                                                          \
  each(log_sum_exp) each(project) each(clip_project) each(leave_one_out) each(mixture) \
      each(log_pool) each(add_low_rank) each(renyi_divergence) each(screen) each(sample)
#define ADAPMIXED_DECLARE(name) void add_##name(Table& table);
#define ADAPMIXED_ADD(name) add_##name(table);

namespace cuda {
using Table = Operators<const Queue&>;
const Table& table();
}  // namespace cuda

namespace cpu {

struct Table : Operators<int> {
  const char* instruction_set;  // "avx512", "avx2" or "scalar"
  // Within 3.2e-7, given a likely column of every position, near: (B). NaN if that is not known, of
  // rows with a status among others.
  void (*near_log_sum_exp)(const Logits& logits, std::int64_t models, std::int64_t positions,
                           std::int64_t vocab, const std::int64_t* near, double* lse, int threads);
  void (*cross_entropy)(const CrossEntropyInputs& in, const CrossEntropyResults& out, int threads);
  // Writes `count` ChaCha20 blocks of 64 bytes. Block `first` is block (first mod 2^32) of lane
  // (first / 2^32).
  void (*keystream)(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
                    std::int64_t count, std::uint8_t* result);
};

// The table of the instruction set in use.
const Table& table();
// Forces an instruction set, for tests. Returns false if this machine or build does not have it.
bool use_instruction_set(const char* name);

}  // namespace cpu
}  // namespace adapmixed
