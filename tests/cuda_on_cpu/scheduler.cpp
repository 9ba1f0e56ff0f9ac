// Runs the threads of one block as fibres, in a settable order.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "simt.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define SIMT_TSAN(x) x
#else
#define SIMT_TSAN(x)
#endif
// The scheduler itself is not what is looked at, and its frames do not return in order.
#define SIMT_SCHEDULER __attribute__((no_sanitize("thread"), noinline))

namespace simt {
namespace {

constexpr std::size_t kStack = 128 << 10;

enum class State { ready, at_block, at_warp, done };

struct Fibre {
  ucontext_t context;
  jmp_buf resume_point;
  bool started = false;
  State state = State::ready;
  int line = 0;
  uint3 index{};
  // The warp operation it waits at.
  unsigned mask = 0;
  int operation = 0;
  std::uint64_t value = 0, received[32] = {};
  // Two tags in turn: what one barrier releases must not be acquired at the next.
  unsigned block_barriers = 0, warp_barriers = 0;
  char tag[2] = {};
  void* sanitizer = nullptr;
};

struct Block {
  std::vector<Fibre> fibres;
  std::vector<int> order;
  const std::function<void()>* kernel = nullptr;
  Fibre* current = nullptr;
  int current_index = 0;
  jmp_buf scheduler;
  void* sanitizer = nullptr;
  int votes = 0, counted = 0;
  std::string error;
  char tag[2] = {}, begin_tag = 0, end_tag = 0;
};

thread_local Block* the_block = nullptr;
thread_local std::vector<std::uint64_t> shared_memory;

// Stacks, and the sanitizer's fibres, are used again from block to block.
struct Pool {
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<void*> sanitizers;

  void grow(std::size_t count) {
    while (stacks.size() < count) {
      stacks.emplace_back(new char[kStack]);
      SIMT_TSAN(sanitizers.push_back(__tsan_create_fiber(0)));
    }
  }
  ~Pool() { SIMT_TSAN(for (void* fibre : sanitizers) __tsan_destroy_fiber(fibre)); }
};
thread_local Pool pool;

SIMT_SCHEDULER void to_scheduler() {
  Fibre* fibre = the_block->current;
  SIMT_TSAN(__tsan_switch_to_fiber(the_block->sanitizer, 1));
  if (!_setjmp(fibre->resume_point)) _longjmp(the_block->scheduler, 1);
}

SIMT_SCHEDULER void fibre_main() {
  SIMT_TSAN(__tsan_acquire(&the_block->begin_tag));
  (*the_block->kernel)();
  SIMT_TSAN(__tsan_release(&the_block->end_tag));
  the_block->current->state = State::done;
  to_scheduler();
}

SIMT_SCHEDULER void resume(int index) {
  Block& block = *the_block;
  Fibre& fibre = block.fibres[index];
  block.current = &fibre;
  block.current_index = index;
  threadIdx = fibre.index;
  if (!_setjmp(block.scheduler)) {
    SIMT_TSAN(__tsan_switch_to_fiber(fibre.sanitizer, 1));
    if (fibre.started) _longjmp(fibre.resume_point, 1);
    fibre.started = true;
    setcontext(&fibre.context);
  }
}

SIMT_SCHEDULER void wait(State state, int line) {
  the_block->current->state = state;
  the_block->current->line = line;
  to_scheduler();
}

std::string stuck(const Block& block) {
  std::string text = "simt: threads wait for each other for ever:";
  for (std::size_t i = 0; i < block.fibres.size(); ++i) {
    const Fibre& fibre = block.fibres[i];
    text += " " + std::to_string(i);
    text += fibre.state == State::done       ? " has returned"
            : fibre.state == State::at_block ? " is at the block barrier of line "
                                             : " is at the warp operation of line ";
    if (fibre.state != State::done) text += std::to_string(fibre.line);
  }
  return text;
}

SIMT_SCHEDULER void schedule(std::mt19937& random) {
  Block& block = *the_block;
  const int count = static_cast<int>(block.fibres.size());
  for (;;) {
    bool ran = false;
    if (config.order == Order::random) {
      std::shuffle(block.order.begin(), block.order.end(), random);
    }
    for (int k = 0; k < count; ++k) {
      const int index = block.order[config.order == Order::reverse ? count - 1 - k : k];
      if (block.fibres[index].state != State::ready) continue;
      resume(index);
      ran = true;
      if (!block.error.empty()) return;
    }
    if (ran) continue;
    int waiting = 0, done = 0;
    for (const Fibre& fibre : block.fibres) {
      waiting += fibre.state == State::at_block;
      done += fibre.state == State::done;
    }
    if (done == count) return;
    // A thread that has returned is not waited for, as on the GPUs we build for; but no kernel of
    // ours leaves before a barrier.
    if (waiting != count) {
      block.error = stuck(block);
      return;
    }
    block.counted = block.votes;
    block.votes = 0;
    for (Fibre& fibre : block.fibres) fibre.state = State::ready;
  }
}

SIMT_SCHEDULER void prepare(Fibre& fibre, unsigned index) {
  fibre.index = {index % blockDim.x, index / blockDim.x % blockDim.y,
                 index / blockDim.x / blockDim.y};
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = pool.stacks[index].get();
  fibre.context.uc_stack.ss_size = kStack;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, fibre_main, 0);
  SIMT_TSAN(fibre.sanitizer = pool.sanitizers[index]);
}

SIMT_SCHEDULER void run_block(const std::function<void()>& kernel, std::mt19937& random) {
  Block block;
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block.kernel = &kernel;
  block.fibres.resize(count);
  block.order.resize(count);
  the_block = &block;
  pool.grow(count);
  SIMT_TSAN(block.sanitizer = __tsan_get_current_fiber());
  for (unsigned i = 0; i < count; ++i) {
    block.order[i] = static_cast<int>(i);
    prepare(block.fibres[i], i);
  }
  SIMT_TSAN(__tsan_release(&block.begin_tag));
  schedule(random);
  SIMT_TSAN(__tsan_acquire(&block.end_tag));
  the_block = nullptr;
  if (!block.error.empty()) throw std::runtime_error(block.error);
}

}  // namespace

int lane() { return the_block->current_index & 31; }

SIMT_SCHEDULER void fail(const std::string& what, int line) {
  the_block->error = "simt: " + what + ", line " + std::to_string(line);
  for (;;) to_scheduler();  // never resumed
}

void* dynamic_shared() { return shared_memory.data(); }

SIMT_SCHEDULER void sync_block(int line) {
  [[maybe_unused]] char* tag = &the_block->tag[the_block->current->block_barriers++ & 1];
  SIMT_TSAN(__tsan_release(tag));
  wait(State::at_block, line);
  SIMT_TSAN(__tsan_acquire(tag));
}

SIMT_SCHEDULER bool vote_block(bool vote, int line, int* count) {
  the_block->votes += vote;
  sync_block(line);
  *count = the_block->counted;
  return *count != 0;
}

SIMT_SCHEDULER const std::uint64_t* exchange(unsigned mask, int operation, std::uint64_t value,
                                             int line) {
  Block& block = *the_block;
  Fibre& self = *block.current;
  const int lane = block.current_index & 31, first = block.current_index & ~31;
  const int count = static_cast<int>(block.fibres.size());
  if (!(mask >> lane & 1u)) fail("a warp operation's mask lacks the lane itself", line);
  self.mask = mask;
  self.operation = operation;
  self.value = value;
  self.line = line;
  self.state = State::at_warp;
  bool complete = true;
  for (int k = 0; k < 32; ++k) {
    if (!(mask >> k & 1u)) continue;
    if (first + k >= count) fail("a warp operation names a lane that does not exist", line);
    const Fibre& other = block.fibres[first + k];
    if (other.state == State::done) fail("a warp operation waits for a lane that returned", line);
    if (other.state != State::at_warp) {
      complete = false;
    } else if (other.mask != mask || other.operation != operation) {
      fail("lanes meet at different warp operations, the other at line " +
               std::to_string(other.line),
           line);
    }
  }
  if (!complete) {
    to_scheduler();
    return self.received;
  }
  for (int k = 0; k < 32; ++k) {
    if (!(mask >> k & 1u)) continue;
    Fibre& other = block.fibres[first + k];
    other.state = State::ready;
    for (int j = 0; j < 32; ++j) {
      other.received[j] = mask >> j & 1u ? block.fibres[first + j].value : 0;
    }
  }
  return self.received;
}

SIMT_SCHEDULER void sync_warp(unsigned mask, int line) {
  char* tag = &the_block->current->tag[the_block->current->warp_barriers++ & 1];
  SIMT_TSAN(__tsan_release(tag));
  [[maybe_unused]] const std::uint64_t* tags =
      exchange(mask, 3, reinterpret_cast<std::uint64_t>(tag), line);
  SIMT_TSAN(for (int k = 0; k < 32; ++k) {
    if (tags[k] != 0) __tsan_acquire(reinterpret_cast<void*>(tags[k]));
  });
}

void run(const std::function<void()>& kernel, dim3 grid, dim3 block, std::size_t shared) {
  if (block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535 ||
      shared > (227u << 10)) {
    throw std::runtime_error("simt: no GPU could run a grid of this shape");
  }
  std::mt19937 random(config.seed);
  gridDim = grid;
  blockDim = block;
  std::vector<unsigned> order(std::size_t{grid.x} * grid.y * grid.z);
  for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<unsigned>(k);
  if (config.order == Order::reverse) std::reverse(order.begin(), order.end());
  if (config.order == Order::random) std::shuffle(order.begin(), order.end(), random);
  for (const unsigned k : order) {
    blockIdx = {k % grid.x, k / grid.x % grid.y, k / grid.x / grid.y};
    // Not a number, where nothing has been written.
    shared_memory.assign((shared + 7) / 8, ~std::uint64_t{0});
    run_block(kernel, random);
  }
}

}  // namespace simt
