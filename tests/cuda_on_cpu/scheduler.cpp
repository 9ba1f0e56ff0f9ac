// Runs the threads of one block as fibres, in an order that can be set.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>

#include "fibres.h"

namespace simt {
namespace {

// A guard page lies below the stack, so that a kernel which needs more faults instead of writing to
// other memory.
char* make_stack() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStack + page, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    throw std::runtime_error("simt: no memory for the threads' stacks");
  }
  return static_cast<char*>(memory) + page;
}

struct Pool {  // reused from block to block
  std::vector<Fibre> fibres;
  std::vector<char*> stacks;  // never freed
  std::vector<void*> sanitizers;

  void grow(std::size_t count) {
    while (stacks.size() < count) {
      stacks.push_back(make_stack());
      SIMT_TSAN(sanitizers.push_back(__tsan_create_fiber(0)));
    }
  }
  ~Pool() { SIMT_TSAN(for (void* fibre : sanitizers) __tsan_destroy_fiber(fibre)); }
};

thread_local Block* the_block = nullptr;
thread_local std::vector<std::uint64_t> shared_memory;
thread_local Pool pool;

// The dynamic shared memory that each kernel has asked for.
std::mutex allowed_mutex;
std::map<const void*, std::size_t> allowed;

std::size_t allowed_shared(const void* kernel) {
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  const auto found = allowed.find(kernel);
  return found == allowed.end() ? kUnaskedShared - kStaticShared : found->second;
}

// A word that a block of this grid has exchanged. Blocks run one after the other here, but together
// on a GPU. A later block therefore first finds the old value; it finds the new one once half of
// its threads have run up to their first barrier.
struct Late {
  std::int32_t *address, before, after;
};
thread_local std::vector<Late> late;

void hide_late() {
  for (const Late& word : late) {
    if (*word.address == word.after) *word.address = word.before;
  }
}
void show_late() {
  for (const Late& word : late) *word.address = word.after;
}

__attribute__((noinline)) void to_scheduler() {
  Fibre* fibre = the_block->current;
  SIMT_TSAN(__tsan_switch_to_fiber(the_block->sanitizer, 1));
  // Nothing is kept of a thread that has returned.
  SIMT_ASAN(
      __sanitizer_start_switch_fiber(fibre->state == State::done ? nullptr : &fibre->fake_stack,
                                     the_block->stack, the_block->stack_size));
  if (!SIMT_SETJMP(fibre->resume_point)) SIMT_LONGJMP(the_block->scheduler, 1);
  SIMT_ASAN(__sanitizer_finish_switch_fiber(fibre->fake_stack, nullptr, nullptr));
}

void fibre_main() {
  SIMT_ASAN(__sanitizer_finish_switch_fiber(nullptr, &the_block->stack, &the_block->stack_size));
  SIMT_TSAN(__tsan_acquire(&the_block->begin_tag));
  (*the_block->kernel)();
  SIMT_TSAN(__tsan_release(&the_block->end_tag));
  the_block->current->state = State::done;
  to_scheduler();
}

__attribute__((noinline)) void resume(int index) {
  Block& block = *the_block;
  Fibre& fibre = block.fibres[index];
  block.current = &fibre;
  block.current_index = index;
  threadIdx = fibre.index;
  if (!SIMT_SETJMP(block.scheduler)) {
    SIMT_TSAN(__tsan_switch_to_fiber(fibre.sanitizer, 1));
    SIMT_ASAN(__sanitizer_start_switch_fiber(&block.fake_stack, pool.stacks[index], kStack));
    if (fibre.started) SIMT_LONGJMP(fibre.resume_point, 1);
    fibre.started = true;
    setcontext(&fibre.context);
  }
  SIMT_ASAN(__sanitizer_finish_switch_fiber(block.fake_stack, nullptr, nullptr));
}

void wait(State state, int line) {
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

void schedule(std::mt19937& random) {
  Block& block = *the_block;
  const int count = static_cast<int>(block.fibres.size());
  hide_late();
  for (bool first = true;; first = false) {
    bool ran = false;
    if (config.order == Order::random) {
      std::shuffle(block.order.begin(), block.order.end(), random);
    }
    for (int k = 0; k < count; ++k) {
      if (first && k == count / 2) show_late();
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
    // Threads that have returned are not waited for on the GPUs we build for. But no kernel of ours
    // returns before a barrier, so this is an error.
    if (waiting != count) {
      block.error = stuck(block);
      return;
    }
    block.counted = block.votes;
    block.votes = 0;
    for (Fibre& fibre : block.fibres) fibre.state = State::ready;
  }
}

void prepare(Fibre& fibre, unsigned index) {
  fibre.index = {index % blockDim.x, index / blockDim.x % blockDim.y,
                 index / blockDim.x / blockDim.y};
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = pool.stacks[index];
  fibre.context.uc_stack.ss_size = kStack;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, fibre_main, 0);
  SIMT_TSAN(fibre.sanitizer = pool.sanitizers[index]);
}

void run_block(const std::function<void()>& kernel, std::mt19937& random) {
  Block block;
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  block.kernel = &kernel;
  block.fibres.swap(pool.fibres);
  block.fibres.clear();
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
  pool.fibres.swap(block.fibres);
  if (!block.error.empty()) throw std::runtime_error(block.error);
}

}  // namespace

int lane() { return the_block->current_index & 31; }

Copies& copies() { return the_block->current->copies; }

void fail(const std::string& what, int line) {
  the_block->error = "simt: " + what;
  if (line > 0) the_block->error += ", line " + std::to_string(line);
  for (;;) to_scheduler();  // never resumed
}

void exchanged(std::int32_t* address, std::int32_t before, std::int32_t after) {
  if (before != after) late.push_back({address, before, after});
}

void allow_shared(const void* kernel, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  allowed[kernel] = bytes;
}

std::vector<std::size_t> shared_limits() {
  const std::lock_guard<std::mutex> lock(allowed_mutex);
  std::vector<std::size_t> found;
  for (const auto& [kernel, bytes] : allowed) found.push_back(bytes);
  return found;
}

void* dynamic_shared() { return shared_memory.data(); }

void sync_block(int line) {
  [[maybe_unused]] char* tag = &the_block->tag[the_block->current->block_barriers++ & 1];
  SIMT_TSAN(__tsan_release(tag));
  wait(State::at_block, line);
  SIMT_TSAN(__tsan_acquire(tag));
}

bool vote_block(bool vote, int line, int* count) {
  the_block->votes += vote;
  sync_block(line);
  *count = the_block->counted;
  return *count != 0;
}

const std::uint64_t* exchange(unsigned mask, int operation, std::uint64_t value, int line) {
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

void sync_warp(unsigned mask, int line) {
  char* tag = &the_block->current->tag[the_block->current->warp_barriers++ & 1];
  SIMT_TSAN(__tsan_release(tag));
  [[maybe_unused]] const std::uint64_t* tags =
      exchange(mask, 3, reinterpret_cast<std::uint64_t>(tag), line);
  SIMT_TSAN(for (int k = 0; k < 32; ++k) {
    if (tags[k] != 0) __tsan_acquire(reinterpret_cast<void*>(tags[k]));
  });
}

namespace {
std::atomic<std::size_t> launched{0}, cleared{0};
}
std::size_t launches() { return launched; }
std::size_t memsets() { return cleared; }
void count_memset() { ++cleared; }

void run(const std::function<void()>& call, const void* kernel, dim3 grid, dim3 block,
         std::size_t shared) {
  if (block.x * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535 ||
      shared > allowed_shared(kernel)) {
    throw std::runtime_error("simt: no GPU could run a grid of this shape");
  }
  ++launched;
  std::mt19937 random(config.seed);
  late.clear();
  gridDim = grid;
  blockDim = block;
  std::vector<unsigned> order(std::size_t{grid.x} * grid.y * grid.z);
  for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<unsigned>(k);
  if (config.order == Order::reverse) std::reverse(order.begin(), order.end());
  if (config.order == Order::random) std::shuffle(order.begin(), order.end(), random);
  for (const unsigned k : order) {
    blockIdx = {k % grid.x, k / grid.x % grid.y, k / grid.x / grid.y};
    // NaN in all words that nothing has been written to.
    shared_memory.assign((shared + 7) / 8, ~std::uint64_t{0});
    run_block(call, random);
  }
}

}  // namespace simt
