// z_i(y) = z(y) + sum_k c_ik u_ik(y) on the chosen tokens y: the logits of members that adapt the
// output layer.
//
// Every element is a chain of fused multiply-adds in single precision, which starts with z and
// takes k in order. So its bits depend on neither N, B nor the number of threads, and are the same
// for every instruction set.
#include "common/operators.h"
#include "common/parallel.h"
#include "common/simd_float.h"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr int kLanes = Flt::kLanes;
constexpr int kTile = 64;  // tokens that are read together; their results fill lines of a row

#if defined(__AVX512F__)
inline Flt interleave_low(Flt a, Flt b) {
  return __builtin_shufflevector(a.v, b.v, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Flt interleave_high(Flt a, Flt b) {
  return __builtin_shufflevector(a.v, b.v, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
#elif defined(__AVX2__)
inline Flt interleave_low(Flt a, Flt b) {
  return __builtin_shufflevector(a.v, b.v, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline Flt interleave_high(Flt a, Flt b) {
  return __builtin_shufflevector(a.v, b.v, 4, 12, 5, 13, 6, 14, 7, 15);
}
#else
inline Flt interleave_low(Flt a, Flt b) { return {a.a, b.a}; }
inline Flt interleave_high(Flt a, Flt b) { return {a.b, b.b}; }
#endif

// Each round turns the bits of an element's index by one; after all of them row and lane have
// changed places.
inline void transpose(Flt (&rows)[kLanes]) {
  ADAPMIXED_UNROLL
  for (int stride = 1; stride < kLanes; stride *= 2) {
    Flt turned[kLanes];
    ADAPMIXED_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      turned[2 * i] = interleave_low(rows[i], rows[i + kLanes / 2]);
      turned[2 * i + 1] = interleave_high(rows[i], rows[i + kLanes / 2]);
    }
    ADAPMIXED_UNROLL
    for (int i = 0; i < kLanes; ++i) rows[i] = turned[i];
  }
}

inline Flt factor(const float* p) { return load_float_f32(p); }
inline Flt factor(const std::uint16_t* p) { return load_float_bf16(p); }

// The factors of the tokens [first, first + kTile) of one position; at its end some come twice. T:
// float, or the bits of a bfloat16.
template <class T>
struct Tile {
  const T* rows[kTile];

  Tile(const LowRankInputs& in, std::int64_t position, std::int64_t first, std::int64_t size) {
    const std::int64_t columns = in.shape.vocab;
    for (int t = 0; t < kTile; ++t) {
      const std::int64_t column = first + t < columns ? first + t : first;
      const std::int64_t token = in.tokens ? in.tokens[position * columns + column] : column;
      rows[t] = static_cast<const T*>(in.factors) + token * size;
    }
  }
  // Prefetches one block of members, for all tokens of the tile.
  void ask(std::int64_t block, std::int64_t part) const {
    for (const T* row : rows) {
      const char* bytes = reinterpret_cast<const char*>(row + block * part);
      const std::int64_t size = part * static_cast<std::int64_t>(sizeof(T));
      for (std::int64_t at = 0; at < size; at += 64) __builtin_prefetch(bytes + at);
    }
  }
};

template <class T>
void add_tile(const LowRankInputs& in, std::int64_t position, std::int64_t first,
              const LowRankResults& out) {
  const std::int64_t models = in.shape.models, columns = in.shape.vocab;
  const int count = static_cast<int>(columns - first < kTile ? columns - first : kTile);
  const std::int64_t blocks = (models + kLowRankBlock - 1) / kLowRankBlock;
  const std::int64_t part = in.rank * kLowRankBlock;
  const Tile<T> here(in, position, first, blocks * part);
  const float* start = in.start + position * in.start_position + first;
  float* result = out.data + position * out.stride_position + first;
  for (std::int64_t block = 0; block < blocks; ++block) {
    const float* coefficients = in.coefficients + (position * blocks + block) * part;
    here.ask(block, part);
    for (std::int64_t lane = 0; lane < kLowRankBlock; lane += kLanes) {
      const std::int64_t model = block * kLowRankBlock + lane;
      if (model >= models) break;
      for (int tile = 0; tile < kTile && tile < count; tile += kLanes) {
        Flt sums[kLanes];
        if (in.start_model == 0) {
          for (int t = 0; t < kLanes; ++t) sums[t] = Flt(start[tile + t < count ? tile + t : 0]);
        } else {
          alignas(64) float own[kLanes * kLanes] = {};
          for (int m = 0; m < kLanes && model + m < models; ++m) {
            for (int t = 0; t < kLanes && tile + t < count; ++t) {
              own[t * kLanes + m] = start[(model + m) * in.start_model + tile + t];
            }
          }
          for (int t = 0; t < kLanes; ++t) sums[t] = Flt::load(own + t * kLanes);
        }
        for (std::int64_t k = 0; k < in.rank; ++k) {
          const std::int64_t at = k * kLowRankBlock + lane;
          const Flt c = Flt::load(coefficients + at);
          ADAPMIXED_UNROLL
          for (int t = 0; t < kLanes; ++t) {
            sums[t] = vfma(c, factor(here.rows[tile + t] + block * part + at), sums[t]);
          }
        }
        transpose(sums);
        float* to = result + model * out.stride_model + tile;
        for (int m = 0; m < kLanes && model + m < models; ++m, to += out.stride_model) {
          if (tile + kLanes <= count) {
            sums[m].store(to);
          } else {
            alignas(64) float rest[kLanes];
            sums[m].store(rest);
            for (int t = 0; tile + t < count; ++t) to[t] = rest[t];
          }
        }
      }
    }
  }
}

template <class T>
void add_tiles(const LowRankInputs& in, std::int64_t begin, std::int64_t end,
               const LowRankResults& out) {
  for (std::int64_t tile = begin; tile < end; ++tile) {
    for (std::int64_t position = 0; position < in.shape.positions; ++position) {
      add_tile<T>(in, position, tile * kTile, out);
    }
  }
}

// All positions take the same tile one after the other, since they have most tokens in common.
void add_low_rank(const LowRankInputs& in, const LowRankResults& out, int threads) {
  const std::int64_t tiles = (in.shape.vocab + kTile - 1) / kTile;
  cpu::parallel_for(tiles, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    if (in.dtype == Dtype::f32) {
      add_tiles<float>(in, begin, end, out);
    } else {
      add_tiles<std::uint16_t>(in, begin, end, out);
    }
  });
}

}  // namespace

void add_add_low_rank(cpu::Table& table) { table.add_low_rank = add_low_rank; }

ADAPMIXED_CORE_END
