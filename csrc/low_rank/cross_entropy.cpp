// Softmax regression on low-rank logits z(y) = start(y) + sum_k c_k u_k(y): the losses
// log sum_y e^{z(y)} - z(target), and the derivatives of their sum.
//
// Four rows are taken at a time, and of these a stretch of tokens, so that the exponentials and the
// factors stay in a core's first cache. Everything is in single precision. The sums of the
// stretches are added in double and in order, so no bit depends on the number of threads.
#include <algorithm>
#include <cmath>
#include <memory>

#include "common/float_rows.h"
#include "common/operators.h"
#include "common/parallel.h"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr int kRows = 4, kPair = 2;
constexpr std::int64_t kStretch = 8 * kFactorPack;
constexpr std::int64_t kStep = kPair * Flt::kLanes;
static_assert(kFactorPack % kStep == 0 && kFactorPack % Quad::kLanes == 0);

// At the end of the input the last row comes again, with coefficients 0.
struct FourRows {
  const float* start[kRows];
  std::int64_t targets[kRows];
  const float* coefficients;  // (rank, kRows)
};

// A stretch of tokens, and what it contributes to four rows.
struct Stretch {
  std::int64_t first, size;  // size: a multiple of kFactorPack; logits beyond the vocabulary: -inf
  float* exponentials;       // (kRows, kStretch), e^{z - m}
  double* most;              // (kRows), m
  double* sums;              // (kRows), of the exponentials
  double* products;          // (rank, kRows), sum of e^{z - m} u_k
};

// The factors, or their derivatives, of the tokens from v on; those of the next k are kFactorPack
// further.
template <class T>
T* at_token(T* factors, std::int64_t v, std::int64_t rank) {
  return factors + v / kFactorPack * kFactorPack * rank + v % kFactorPack;
}

// Writes the logits and returns about the largest of each row.
void logits(const CrossEntropyInputs& in, const FourRows& rows, const Stretch& part,
            float (&largest)[kRows]) {
  Flt most[kRows];
  ADAPMIXED_UNROLL
  for (int row = 0; row < kRows; ++row) most[row] = Flt(-1e4f);
  for (std::int64_t v = 0; v < part.size; v += kStep) {
    Flt z[kRows][kPair];
    ADAPMIXED_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const char* start = reinterpret_cast<const char*>(rows.start[row]);
      ADAPMIXED_UNROLL
      for (int j = 0; j < kPair; ++j) {
        z[row][j] = load_floats<Dtype::f32>(start, part.first + v + j * Flt::kLanes, in.vocab);
      }
    }
    const float* u = at_token(in.factors, part.first + v, in.rank);
    for (std::int64_t k = 0; k < in.rank; ++k, u += kFactorPack) {
      const Flt low = Flt::load(u), high = Flt::load(u + Flt::kLanes);
      ADAPMIXED_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const Flt c(rows.coefficients[k * kRows + row]);
        z[row][0] = vfma(c, low, z[row][0]);
        z[row][1] = vfma(c, high, z[row][1]);
      }
    }
    ADAPMIXED_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float* line = part.exponentials + row * kStretch + v;
      z[row][0].store(line);
      z[row][1].store(line + Flt::kLanes);
      most[row] = vmax(most[row], vmax(z[row][0], z[row][1]));
    }
  }
  ADAPMIXED_UNROLL
  for (int row = 0; row < kRows; ++row) largest[row] = maximum(most[row]);
}

void exponentials(const Stretch& part, const float (&largest)[kRows]) {
  for (int row = 0; row < kRows; ++row) {
    const FloatExpFrom from(static_cast<double>(largest[row]));
    float* line = part.exponentials + row * kStretch;
    Quad total(0.0);
    for (std::int64_t v = 0; v < part.size; v += Quad::kLanes) {
      const Quad e = from.exp(Quad::load(line + v));
      ADAPMIXED_UNROLL
      for (int j = 0; j < Quad::kSize; ++j) e.v[j].store(line + v + j * Flt::kLanes);
      total = total + e;
    }
    part.most[row] = from.origin();
    part.sums[row] = sum((total.v[0] + total.v[1]) + (total.v[2] + total.v[3]));
  }
}

// The products of kCount factors from the k-th on.
template <int kCount>
void products(const CrossEntropyInputs& in, const Stretch& part, std::int64_t k) {
  Flt found[kRows][kCount];
  ADAPMIXED_UNROLL
  for (int row = 0; row < kRows; ++row) {
    ADAPMIXED_UNROLL
    for (int j = 0; j < kCount; ++j) found[row][j] = Flt(0.0f);
  }
  for (std::int64_t v = 0; v < part.size; v += Flt::kLanes) {
    const float* u = at_token(in.factors, part.first + v, in.rank) + k * kFactorPack;
    Flt factors[kCount];
    ADAPMIXED_UNROLL
    for (int j = 0; j < kCount; ++j) factors[j] = Flt::load(u + j * kFactorPack);
    ADAPMIXED_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const Flt e = Flt::load(part.exponentials + row * kStretch + v);
      ADAPMIXED_UNROLL
      for (int j = 0; j < kCount; ++j) found[row][j] = vfma(e, factors[j], found[row][j]);
    }
  }
  ADAPMIXED_UNROLL
  for (int j = 0; j < kCount; ++j) {
    ADAPMIXED_UNROLL
    for (int row = 0; row < kRows; ++row) part.products[(k + j) * kRows + row] = sum(found[row][j]);
  }
}

// Adds c_k (p - 1[target]) to the derivatives of u_k.
void add_to_factors(const CrossEntropyInputs& in, const FourRows& rows, const Stretch& part,
                    const double (&lse)[kRows], float* of_factors) {
  float weights[kRows];  // p / e^{z - m}
  for (int row = 0; row < kRows; ++row) {
    weights[row] = static_cast<float>(std::exp(part.most[row] - lse[row]));
  }
  for (std::int64_t v = 0; v < part.size; v += kStep) {
    Flt p[kRows][kPair];
    ADAPMIXED_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float* line = part.exponentials + row * kStretch + v;
      p[row][0] = Flt::load(line) * Flt(weights[row]);
      p[row][1] = Flt::load(line + Flt::kLanes) * Flt(weights[row]);
    }
    float* to = at_token(of_factors, part.first + v, in.rank);
    for (std::int64_t k = 0; k < in.rank; ++k, to += kFactorPack) {
      Flt low = Flt::load(to), high = Flt::load(to + Flt::kLanes);
      ADAPMIXED_UNROLL
      for (int row = 0; row < kRows; ++row) {
        const Flt c(rows.coefficients[k * kRows + row]);
        low = vfma(c, p[row][0], low);
        high = vfma(c, p[row][1], high);
      }
      low.store(to);
      high.store(to + Flt::kLanes);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const std::int64_t target = rows.targets[row];
    if (target < part.first || part.first + part.size <= target) continue;
    float* to = at_token(of_factors, target, in.rank);
    for (std::int64_t k = 0; k < in.rank; ++k) {
      to[k * kFactorPack] -= rows.coefficients[k * kRows + row];
    }
  }
}

// Takes four rows after another, with memory for four.
class Regression {
 public:
  Regression(const CrossEntropyInputs& in, const CrossEntropyResults& out, int threads)
      : in_(in),
        out_(out),
        threads_(threads),
        stretches_((in.vocab + kStretch - 1) / kStretch),
        numbers_(new double[stretches_ * (2 + in.rank) * kRows]),
        exponentials_(new float[stretches_ * kStretch * kRows]),
        coefficients_(new float[in.rank * kRows]) {}

  void compute(std::int64_t begin) {
    read(begin);
    each_stretch([&](const Stretch& part) {
      float largest[kRows];
      logits(in_, rows_, part, largest);
      exponentials(part, largest);
      if (!out_.of_factors) return;
      std::int64_t k = 0;
      for (; k + 2 <= in_.rank; k += 2) products<2>(in_, part, k);
      if (k < in_.rank) products<1>(in_, part, k);
    });
    double lse[kRows];
    add_up(begin, lse);
    if (!out_.of_factors) return;
    each_stretch(
        [&](const Stretch& part) { add_to_factors(in_, rows_, part, lse, out_.of_factors); });
  }

 private:
  void read(std::int64_t begin) {
    float* own = coefficients_.get();
    rows_.coefficients = own;
    for (int row = 0; row < kRows; ++row) {
      const std::int64_t at = std::min(begin + row, in_.rows - 1);
      rows_.start[row] = in_.start + at * in_.stride;
      rows_.targets[row] = in_.targets[at];
      for (std::int64_t k = 0; k < in_.rank; ++k) {
        own[k * kRows + row] = begin + row < in_.rows ? in_.coefficients[at * in_.rank + k] : 0.0f;
      }
    }
  }

  Stretch stretch(std::int64_t at) {
    double* numbers = numbers_.get() + at * (2 + in_.rank) * kRows;
    return {at * kStretch,
            std::min(kStretch, round_up(in_.vocab - at * kStretch, kFactorPack)),
            exponentials_.get() + at * kRows * kStretch,
            numbers,
            numbers + kRows,
            numbers + 2 * kRows};
  }

  template <class F>
  void each_stretch(const F& body) {
    cpu::parallel_for(stretches_, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      const FlushDenormals flush;
      for (std::int64_t at = begin; at < end; ++at) body(stretch(at));
    });
  }

  // Adds what the stretches gave, and writes the losses and the derivatives of the coefficients.
  void add_up(std::int64_t begin, double (&lse)[kRows]) {
    for (int row = 0; row < kRows; ++row) {
      double most = -HUGE_VAL, total = 0.0;
      for (std::int64_t at = 0; at < stretches_; ++at) {
        most = std::fmax(most, stretch(at).most[row]);
      }
      for (std::int64_t at = 0; at < stretches_; ++at) {
        const Stretch part = stretch(at);
        total += part.sums[row] * std::exp(part.most[row] - most);
      }
      lse[row] = most + std::log(total);
      if (begin + row >= in_.rows) continue;
      const float* u = at_token(in_.factors, rows_.targets[row], in_.rank);
      float z = rows_.start[row][rows_.targets[row]];
      for (std::int64_t k = 0; k < in_.rank; ++k) {
        z = vfma(rows_.coefficients[k * kRows + row], u[k * kFactorPack], z);
      }
      out_.losses[begin + row] = lse[row] - static_cast<double>(z);
      for (std::int64_t k = 0; out_.of_factors && k < in_.rank; ++k) {
        double found = -static_cast<double>(u[k * kFactorPack]);
        for (std::int64_t at = 0; at < stretches_; ++at) {
          const Stretch part = stretch(at);
          found += part.products[k * kRows + row] * std::exp(part.most[row] - lse[row]);
        }
        out_.of_coefficients[(begin + row) * in_.rank + k] = static_cast<float>(found);
      }
    }
  }

  const CrossEntropyInputs& in_;
  const CrossEntropyResults& out_;
  int threads_;
  std::int64_t stretches_;
  std::unique_ptr<double[]> numbers_;
  std::unique_ptr<float[]> exponentials_, coefficients_;
  FourRows rows_{};
};

void cross_entropy(const CrossEntropyInputs& in, const CrossEntropyResults& out, int threads) {
  Regression regression(in, out, threads);
  for (std::int64_t begin = 0; begin < in.rows; begin += kRows) regression.compute(begin);
}

}  // namespace

void add_cross_entropy(cpu::Table& table) { table.cross_entropy = cross_entropy; }

ADAPMIXED_CORE_END
