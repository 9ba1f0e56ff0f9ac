// The fibres of a block, and how the sanitizers are told of them.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <string>
#include <vector>

#include "simt.h"

// The scheduler is not under test, so it is compiled without the sanitizer of the other files
// (CMakeLists.txt). These definitions name the sanitizer instead.
#if defined(ADAPMIXED_SIMT_THREAD)
#include <sanitizer/tsan_interface.h>
#define SIMT_TSAN(x) x
#else
#define SIMT_TSAN(x)
#endif
#if defined(ADAPMIXED_SIMT_ADDRESS)
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN(x) x
#else
#define SIMT_ASAN(x)
#endif

#if defined(ADAPMIXED_SANITIZE)
// The sanitizers intercept the library's jumps and take them for frames that were left for good.
using Jump = void* [5];
#define SIMT_SETJMP __builtin_setjmp
#define SIMT_LONGJMP __builtin_longjmp
#else
using Jump = jmp_buf;
#define SIMT_SETJMP _setjmp
#define SIMT_LONGJMP _longjmp
#endif

namespace simt {

constexpr std::size_t kStack = 256 << 10;

enum class State { ready, at_block, at_warp, done };

struct Fibre {
  ucontext_t context;
  Jump resume_point;
  bool started = false;
  State state = State::ready;
  int line = 0;
  uint3 index{};
  // The warp operation at which it waits.
  unsigned mask = 0;
  int operation = 0;
  std::uint64_t value = 0, received[32] = {};
  Copies copies;
  // Two tags take turns: a release at one barrier must not be acquired at the next.
  unsigned block_barriers = 0, warp_barriers = 0;
  char tag[2] = {};
  void* sanitizer = nullptr;
  void* fake_stack = nullptr;
};

struct Block {
  std::vector<Fibre> fibres;
  std::vector<int> order;
  const std::function<void()>* kernel = nullptr;
  Fibre* current = nullptr;
  int current_index = 0;
  Jump scheduler;
  void* sanitizer = nullptr;
  // The scheduler's own stack, as reported to AddressSanitizer.
  void* fake_stack = nullptr;
  const void* stack = nullptr;
  std::size_t stack_size = 0;
  int votes = 0, counted = 0;
  std::string error;
  char tag[2] = {}, begin_tag = 0, end_tag = 0;
};

}  // namespace simt
