#include "unwritten.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <string>
#include <vector>

#include "simt.h"

namespace simt {
namespace {

struct Region {
  const char* begin = nullptr;
  std::size_t bytes = 0;
  // A byte is written if its mark is that of now: a new mark makes all unwritten at once.
  std::vector<unsigned char> marks;
  unsigned char now = 0;

  void declare_unwritten(const char* at, std::size_t length) {
    if (length != bytes || ++now == 0) {
      marks.assign(length, 0);
      now = 1;
    }
    begin = at;
    bytes = length;
  }
  // Whether a load of these bytes reads what nothing wrote, and which byte.
  bool unwritten(std::size_t first, std::size_t count, std::size_t& byte) const {
    for (byte = first; byte < first + count; ++byte) {
      if (marks[byte] == now) continue;
      // The padding of a struct is shorter than a word of it, and beside something written.
      if (count <= 16) return true;
      const std::size_t word = byte - (reinterpret_cast<std::uintptr_t>(begin) + byte) % 8;
      bool whole = word >= first && word + 8 <= first + count;
      for (std::size_t k = word; whole && k < word + 8; ++k) whole = marks[k] != now;
      if (whole) return true;
    }
    return false;
  }
  void mark(std::size_t first, std::size_t count) {
    std::fill_n(marks.begin() + static_cast<std::ptrdiff_t>(first), count, now);
  }

  // Returns the part of [at, at + length) that lies here: its first byte's index and its length.
  bool clip(const char* at, std::size_t length, std::size_t& first, std::size_t& count) const {
    const auto distance = static_cast<std::size_t>(at - begin);
    if (distance >= bytes) return false;
    first = distance;
    count = std::min(length, bytes - distance);
    return true;
  }
};

constexpr const char* kNames[] = {"the workspace", "dynamic shared memory", "static shared memory"};

struct Watch {
  bool active = false;
  Region regions[3];
};
thread_local Watch watch;

// Where the compiled kernels keep __shared__ variables: this thread's copy of the thread-local
// memory of this program or library.
struct ThreadLocal {
  const char* begin = nullptr;
  std::size_t bytes = 0;
};
int find_thread_local(dl_phdr_info* info, std::size_t, void* result) {
  const auto here = reinterpret_cast<ElfW(Addr)>(&find_thread_local);
  bool ours = false;
  std::size_t bytes = 0;
  for (int k = 0; k < info->dlpi_phnum; ++k) {
    const auto& header = info->dlpi_phdr[k];
    const ElfW(Addr) begin = info->dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_LOAD && here >= begin && here - begin < header.p_memsz) ours = true;
    if (header.p_type == PT_TLS) bytes = header.p_memsz;
  }
  if (!ours) return 0;
  *static_cast<ThreadLocal*>(result) = {static_cast<const char*>(info->dlpi_tls_data), bytes};
  return 1;
}

template <class T>
void given(const T& variable) {
  std::size_t first = 0, count = 0;
  Region& region = watch.regions[static_cast<int>(Memory::static_shared)];
  if (region.clip(reinterpret_cast<const char*>(&variable), sizeof variable, first, count)) {
    region.mark(first, count);
  }
}

// The function, file and line of an instruction, innermost first, as addr2line tells them.
std::string place_of(const void* code) {
  Dl_info info{};
  if (dladdr(code, &info) == 0 || info.dli_fname == nullptr) return "";
  char command[4200];
  std::snprintf(command, sizeof command, "addr2line -Cfipse '%s' 0x%" PRIxPTR " 2>/dev/null",
                info.dli_fname,
                reinterpret_cast<std::uintptr_t>(code) - 1 -
                    reinterpret_cast<std::uintptr_t>(info.dli_fbase));
  std::string said;
  if (FILE* pipe = popen(command, "r")) {
    char part[512];
    while (std::fgets(part, sizeof part, pipe) != nullptr) said += part;
    pclose(pipe);
  }
  std::replace(said.begin(), said.end(), '\n', ' ');
  while (!said.empty() && said.back() == ' ') said.pop_back();
  return said.empty() ? "" : ", at " + said;
}

inline void load(const void* address, std::size_t length, const void* code) {
  if (!watch.active) return;
  const char* at = static_cast<const char*>(address);
  for (int k = 0; k < 3; ++k) {
    Region& region = watch.regions[k];
    std::size_t first = 0, count = 0;
    if (!region.clip(at, length, first, count)) continue;
    std::size_t byte = 0;
    if (!region.unwritten(first, count, byte)) return;
    watch.active = false;
    fail("a kernel reads " + std::to_string(length) + " bytes, and nothing wrote byte " +
             std::to_string(byte) + " of " + kNames[k] + place_of(code),
         0);
  }
}

void mark_written(const void* address, std::size_t length) {
  const char* at = static_cast<const char*>(address);
  for (Region& region : watch.regions) {
    std::size_t first = 0, count = 0;
    if (!region.clip(at, length, first, count)) continue;
    region.mark(first, count);
    return;
  }
}
inline void store(const void* address, std::size_t length) {
  if (watch.active) mark_written(address, length);
}

}  // namespace

void host_wrote(const void* address, std::size_t bytes) { mark_written(address, bytes); }

void declare_unwritten(Memory kind, const void* begin, std::size_t bytes) {
  watch.regions[static_cast<int>(kind)].declare_unwritten(static_cast<const char*>(begin), bytes);
}

void watch_block(const void* dynamic, std::size_t bytes) {
  declare_unwritten(Memory::dynamic_shared, dynamic, bytes);
  ThreadLocal found;
  dl_iterate_phdr(find_thread_local, &found);
  declare_unwritten(Memory::static_shared, found.begin, found.bytes);
  given(threadIdx), given(blockIdx), given(blockDim), given(gridDim);
  watch.active = true;
}
void watch_nothing() { watch.active = false; }

}  // namespace simt

// What g++ calls. The names are those of ThreadSanitizer, which is not linked.
extern "C" {
void __tsan_init() {}
#define ADAPMIXED_ACCESS(size)                                                 \
  void __tsan_read##size(const void* address) {                                \
    simt::load(address, size, __builtin_return_address(0));                    \
  }                                                                            \
  void __tsan_write##size(const void* address) { simt::store(address, size); } \
  void __tsan_unaligned_read##size(const void* address) {                      \
    simt::load(address, size, __builtin_return_address(0));                    \
  }                                                                            \
  void __tsan_unaligned_write##size(const void* address) { simt::store(address, size); }
ADAPMIXED_ACCESS(1)
ADAPMIXED_ACCESS(2)
ADAPMIXED_ACCESS(4)
ADAPMIXED_ACCESS(8)
ADAPMIXED_ACCESS(16)
#undef ADAPMIXED_ACCESS
void __tsan_read_range(const void* address, std::size_t bytes) {
  simt::load(address, bytes, __builtin_return_address(0));
}
void __tsan_write_range(const void* address, std::size_t bytes) { simt::store(address, bytes); }
void __tsan_vptr_update(const void* address, const void*) { simt::store(address, sizeof(void*)); }
void __tsan_vptr_read(const void*) {}

#define ADAPMIXED_ATOMIC(bits, T)                                                            \
  T __tsan_atomic##bits##_load(const T* address, int) {                                      \
    simt::load(address, sizeof(T), __builtin_return_address(0));                             \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                       \
  }                                                                                          \
  void __tsan_atomic##bits##_store(T* address, T value, int) {                               \
    simt::store(address, sizeof(T));                                                         \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                      \
  }                                                                                          \
  T __tsan_atomic##bits##_fetch_add(T* address, T value, int) {                              \
    simt::load(address, sizeof(T), __builtin_return_address(0));                             \
    return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);                             \
  }                                                                                          \
  T __tsan_atomic##bits##_fetch_or(T* address, T value, int) {                               \
    simt::load(address, sizeof(T), __builtin_return_address(0));                             \
    return __atomic_fetch_or(address, value, __ATOMIC_SEQ_CST);                              \
  }                                                                                          \
  T __tsan_atomic##bits##_exchange(T* address, T value, int) {                               \
    simt::load(address, sizeof(T), __builtin_return_address(0));                             \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                            \
  }                                                                                          \
  int __tsan_atomic##bits##_compare_exchange_strong(T* address, T* old, T value, int, int) { \
    simt::load(address, sizeof(T), __builtin_return_address(0));                             \
    return __atomic_compare_exchange_n(address, old, value, false, __ATOMIC_SEQ_CST,         \
                                       __ATOMIC_SEQ_CST);                                    \
  }
ADAPMIXED_ATOMIC(8, std::uint8_t)
ADAPMIXED_ATOMIC(32, std::uint32_t)
ADAPMIXED_ATOMIC(64, std::uint64_t)
#undef ADAPMIXED_ATOMIC
}
