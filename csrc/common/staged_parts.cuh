// The parts of rows that the warps of a block copy to shared memory for row_parts_kernel
// (common/row_parts.cuh).
#pragma once

#include "common/block.cuh"
#include "common/staged.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarp;

// A part of some rows, in stages of 2 KiB: every kRowWarps-th row. A whole warp must call each
// member together.
template <Dtype D>
class StagedParts {
 public:
  static constexpr int kTokens = 2048 / static_cast<int>(sizeof(typename Bits<D>::type));
  using Pieces = StagedPieces<D, kTokens, 2>;
  using Word = typename Pieces::Word;

  // memory: Pieces::kBytes of this warp's own. The part begins at token `begin` and has `size`
  // tokens in so many stages.
  __device__ StagedParts(const Logits& private_logits, const Logits& public_logits,
                         std::int64_t position, std::int64_t begin, int size, int stages,
                         char* memory)
      : pieces_(memory),
        private_rows_(row_bits<D>(private_logits, 0, position) + begin),
        public_row_(row_bits<D>(public_logits, 0, position) + begin),
        stride_(private_logits.stride_model),
        size_(size),
        stages_(stages) {}

  // Begins with the part of row `row`. The last row is before `end`.
  __device__ void start(int row, int end) {
    row_ = row, end_ = end;
    pieces_.start([this](Word* to) { copy(to); });
  }
  // The part's first token of a row; the public row is the first one.
  __device__ const Word* part(int row) const {
    return row == 0 ? public_row_ : private_rows_ + (row - 1) * stride_;
  }
  __device__ int size() const { return size_; }
  __device__ int stages() const { return stages_; }
  // The next stage of a row, of which this is the part's first token.
  __device__ const Word* await(const Word* part) {
    return pieces_.await(part, [this](Word* to) { copy(to); });
  }

 private:
  __device__ void copy(Word* to) {
    if (row_ >= end_) return;
    const int first = stage_ * kTokens;
    stage_tokens<D, kTokens>(to, part(row_) + first, size_ - first);
    if (++stage_ == stages_) stage_ = 0, row_ += kRowWarps;
  }

  Pieces pieces_;
  const Word *private_rows_, *public_row_;
  const std::int64_t& stride_;
  int size_, stages_, row_ = 0, end_ = 0, stage_ = 0;
};

ADAPMIXED_CORE_END
