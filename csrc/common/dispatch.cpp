// Chooses the best instruction set of this machine once; tests can force another.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "common/operators.h"

#define ADAPMIXED_BUILD(isa)         \
  namespace adapmixed::isa {         \
  using cpu::Table;                  \
  ADAPMIXED_FILES(ADAPMIXED_DECLARE) \
  ADAPMIXED_DECLARE(cross_entropy)   \
  static Table make_table() {        \
    Table table{};                   \
    table.instruction_set = #isa;    \
    ADAPMIXED_FILES(ADAPMIXED_ADD)   \
    ADAPMIXED_ADD(cross_entropy)     \
    return table;                    \
  }                                  \
  }

ADAPMIXED_BUILD(scalar)
#if defined(ADAPMIXED_X86)
ADAPMIXED_BUILD(avx2)
ADAPMIXED_BUILD(avx512)
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
  static const Table scalar_table = scalar::make_table();
  if (std::strcmp(name, "scalar") == 0) return &scalar_table;
#if defined(ADAPMIXED_X86)
  static const Table avx2_table = avx2::make_table(), avx512_table = avx512::make_table();
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

}  // namespace

const Table& table() { return *current().load(); }

bool use_instruction_set(const char* name) {
  const Table* chosen = find(name);
  if (chosen != nullptr) current().store(chosen);
  return chosen != nullptr;
}

}  // namespace adapmixed::cpu
