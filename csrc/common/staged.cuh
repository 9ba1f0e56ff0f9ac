// Copies of rows from global to shared memory that are on their way while the threads do something
// else. A copy moves 16 bytes, as aligned as that. So the tokens of a row lie as far behind a
// multiple of 16 bytes in shared memory as they do in global memory.
#pragma once

#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kCopied = 16;  // bytes of a copy

// Copies 16 bytes. Both addresses are multiples of 16.
__device__ inline void copy_later(void* shared, const void* global) {
#if defined(ADAPMIXED_SIMT)
  simt::copy_later(shared, global);
#else
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global));
#endif
}

// Makes one group of the thread's copies since the last group.
__device__ inline void end_copies() {
#if defined(ADAPMIXED_SIMT)
  simt::end_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread's copies but the last kLater. A barrier must follow before
// another thread's copies are read.
template <int kLater>
__device__ void await_copies() {
#if defined(ADAPMIXED_SIMT)
  simt::await_copies(kLater);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

// How many tokens lie between the last multiple of 16 bytes and a token.
template <Dtype D>
__device__ int tokens_before(const typename Bits<D>::type* token) {
  constexpr auto kSize = sizeof(typename Bits<D>::type);
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(token) % kCopied / kSize);
}

// Bytes of shared memory for `count` tokens of a row, wherever they begin.
template <Dtype D>
constexpr int staged_bytes(int count) {
  const int size = static_cast<int>(sizeof(typename Bits<D>::type));
  return (count * size + kCopied - size + kCopied - 1) / kCopied * kCopied;
}

// A warp begins to copy kCount tokens of a row, of which there are `left`, to shared memory. The
// first comes tokens_before(row) behind `shared`. Where the row ends, each lane copies tokens by
// itself, and zeros stand for the rest: nothing is read behind a tensor. What shares 16 bytes with
// the first token is read, too.
template <Dtype D, int kCount>
__device__ void stage_tokens(typename Bits<D>::type* shared, const typename Bits<D>::type* row,
                             int left) {
  constexpr int kCopies = staged_bytes<D>(kCount) / kCopied;
  constexpr int kTokens = kCopied / static_cast<int>(sizeof *row);
  const int before = tokens_before<D>(row), end = before + left, own = lane_id() * kTokens;
  const auto* from = row - before;
  if (end >= kCopies * kTokens) {  // the same for all lanes
#pragma unroll
    for (int first = 0; first < kCopies; first += kWarp) {
      const int at = first * kTokens + own;
      if (first + kWarp <= kCopies || first + lane_id() < kCopies) {
        copy_later(shared + at, from + at);
      }
    }
    return;
  }
  // Loads together, as registers allow.
  [[maybe_unused]] constexpr int kTogether = 8 / static_cast<int>(sizeof *row);
#pragma unroll kTogether
  for (int k = lane_id(); k < kCopies * kTokens; k += kWarp) {
    shared[k] = k < end ? from[k] : 0;
  }
}

// Pieces of kTokens tokens that a warp reads one after the other, from a ring of kPlaces in shared
// memory. While it reads one, the next are on their way. A whole warp must call each member
// together. copy(to) begins to copy the next piece, or does nothing if there is none.
template <Dtype D, int kTokens, int kPlaces>
class StagedPieces {
 public:
  using Word = typename Bits<D>::type;
  static constexpr int kPiece = staged_bytes<D>(kTokens), kBytes = kPlaces * kPiece;

  // memory: kBytes of this warp's own.
  __device__ explicit StagedPieces(char* memory) : memory_(memory) {}

  // Nothing may be on its way.
  template <class Copy>
  __device__ void start(const Copy& copy) {
    read_ = 0;
#pragma unroll 1
    for (int k = 0; k < kPlaces - 1; ++k) {
      copy(place(k));
      end_copies();
    }
  }
  // Waits for the next piece and returns it. `from`: its first token in global memory.
  template <class Copy>
  __device__ const Word* await(const Word* from, const Copy& copy) {
    await_copies<kPlaces - 2>();
    __syncwarp();
    copy(place(read_ + kPlaces - 1));  // where all lanes have read the last piece
    end_copies();
    return place(read_++) + tokens_before<D>(from);
  }

 private:
  __device__ Word* place(unsigned k) const {
    return reinterpret_cast<Word*>(memory_ + k % kPlaces * kPiece);
  }

  char* memory_;
  unsigned read_ = 0;
};

ADAPMIXED_CORE_END
