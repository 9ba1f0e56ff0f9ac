// Chooses the best instruction set of this machine once; tests can force another.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "common/dispatch.h"
#include "common/operators.h"

#define ADAPMIXED_DECLARE(isa)                  \
  namespace adapmixed::isa {                    \
  void add_log_sum_exp(cpu::Table& table);      \
  void add_project(cpu::Table& table);          \
  void add_clip_project(cpu::Table& table);     \
  void add_leave_one_out(cpu::Table& table);    \
  void add_mixture(cpu::Table& table);          \
  void add_log_pool(cpu::Table& table);         \
  void add_add_low_rank(cpu::Table& table);     \
  void add_cross_entropy(cpu::Table& table);    \
  void add_renyi_divergence(cpu::Table& table); \
  void add_screen(cpu::Table& table);           \
  void add_sample(cpu::Table& table);           \
  namespace {                                   \
  cpu::Table make_table(const char* name) {     \
    cpu::Table table{};                         \
    table.name = name;                          \
    add_log_sum_exp(table);                     \
    add_project(table);                         \
    add_clip_project(table);                    \
    add_leave_one_out(table);                   \
    add_mixture(table);                         \
    add_log_pool(table);                        \
    add_add_low_rank(table);                    \
    add_cross_entropy(table);                   \
    add_renyi_divergence(table);                \
    add_screen(table);                          \
    add_sample(table);                          \
    return table;                               \
  }                                             \
  }                                             \
  }

ADAPMIXED_DECLARE(scalar)
#if defined(ADAPMIXED_X86)
ADAPMIXED_DECLARE(avx2)
ADAPMIXED_DECLARE(avx512)
#endif

namespace adapmixed::cpu {
namespace {

#if defined(ADAPMIXED_X86)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("fma");
}
#endif

const Table* find(const char* name) {
  static const Table scalar_table = adapmixed::scalar::make_table("scalar");
  if (std::strcmp(name, "scalar") == 0) return &scalar_table;
#if defined(ADAPMIXED_X86)
  static const Table avx2_table = adapmixed::avx2::make_table("avx2");
  static const Table avx512_table = adapmixed::avx512::make_table("avx512");
  __builtin_cpu_init();
  if (std::strcmp(name, "avx2") == 0 && has_avx2()) return &avx2_table;
  if (std::strcmp(name, "avx512") == 0 && has_avx512()) return &avx512_table;
#endif
  return nullptr;
}

const Table* best() {
  for (const char* name : {"avx512", "avx2", "scalar"}) {
    if (const Table* table = find(name)) return table;
  }
  return nullptr;
}

std::atomic<const Table*>& current() {
  static std::atomic<const Table*> table{best()};
  return table;
}

const Table& table() { return *current().load(); }

}  // namespace

const char* instruction_set() { return table().name; }

bool use_instruction_set(const char* name) {
  const Table* chosen = find(name);
  if (chosen != nullptr) current().store(chosen);
  return chosen != nullptr;
}

void log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                 std::int64_t vocab, double* lse, std::int32_t* status, int threads) {
  table().log_sum_exp(logits, models, positions, vocab, lse, status, threads);
}
void near_log_sum_exp(const Logits& logits, std::int64_t models, std::int64_t positions,
                      std::int64_t vocab, const std::int64_t* near, double* lse, int threads) {
  table().near_log_sum_exp(logits, models, positions, vocab, near, lse, threads);
}
void project(const ProjectInputs& in, double order, double radius, const ProjectResults& out,
             int threads) {
  table().project(in, order, radius, out, threads);
}
void clip_project(const ClipInputs& in, const ClipOptions& options, const ClipResults& out,
                  int threads) {
  table().clip_project(in, options, out, threads);
}
void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, int threads) {
  table().leave_one_out(in, weights, options, loss, balance, threads);
}
void mixture(const Ensemble& in, const Weights& weights, double* probabilities, int threads) {
  table().mixture(in, weights, probabilities, threads);
}
void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, int threads) {
  table().log_prob(in, weights, targets, result, threads);
}
void log_pool(const LogPoolInputs& in, const LogPoolOptions& options, const LogPoolResults& out,
              int threads) {
  table().log_pool(in, options, out, threads);
}
void pool_mixture(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                  double* probabilities, int threads) {
  table().pool_mixture(in, options, log_normaliser, probabilities, threads);
}

void pool_probabilities(const double* log_weights, const double* log_normaliser,
                        std::int64_t positions, std::int64_t vocab, double* probabilities,
                        int threads) {
  table().pool_probabilities(log_weights, log_normaliser, positions, vocab, probabilities, threads);
}
void pool_log_prob(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                   const std::int64_t* targets, double* result, int threads) {
  table().pool_log_prob(in, options, log_normaliser, targets, result, threads);
}
void add_low_rank(const LowRankInputs& in, const LowRankResults& out, int threads) {
  table().add_low_rank(in, out, threads);
}
void cross_entropy(const CrossEntropyInputs& in, const CrossEntropyResults& out, int threads) {
  table().cross_entropy(in, out, threads);
}
void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                      double* forward, double* backward, int threads) {
  table().renyi_divergence(in, orders, num_orders, forward, backward, threads);
}
void screen(const Ensemble& in, const ScreenOptions& options, double* divergence, bool* passed,
            int threads) {
  table().screen(in, options, divergence, passed, threads);
}
void keystream(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
               std::int64_t count, std::uint8_t* result) {
  table().keystream(key, counter, first, count, result);
}
void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, int threads) {
  table().gaussian(key, counter, sigma, count, result, threads);
}
void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
            std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
            std::int64_t* tokens, std::int32_t* status, int threads) {
  table().sample(probabilities, public_logits, positions, vocab, key, counter, tokens, status,
                 threads);
}

}  // namespace adapmixed::cpu
