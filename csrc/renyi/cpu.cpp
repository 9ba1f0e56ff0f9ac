// D_alpha(P || Q) and D_alpha(Q || P) of pairs of rows (renyi/formula.h).
#include "common/operators.h"
#include "common/parallel.h"
#include "common/rows.h"
#include "renyi/formula.h"

ADAPMIXED_CORE_BEGIN
namespace {

template <Dtype D, int kOrders>
void add_rows(const Row& p, const Row& q, std::int64_t vocab, PairSums<Flt, kOrders>& sums) {
  constexpr std::int64_t kBlock = kTermsInFloats * Flt::kLanes;
  for (std::int64_t begin = 0; begin < vocab; begin += kBlock) {
    const std::int64_t end = begin + kBlock < vocab ? begin + kBlock : vocab;
    for (std::int64_t v = begin; v < end; v += Flt::kLanes) {
      const Flt z = load_floats<D>(p.data, v, vocab), z0 = load_floats<D>(q.data, v, vocab);
      if (sums.add(z, z0)) continue;
      sums.add_exactly(low_half(z), low_half(z0));
      sums.add_exactly(high_half(z), high_half(z0));
    }
    sums.widen();
  }
}

template <Dtype D, int kOrders>
void one_pair(const Row& p, const Row& q, std::int64_t vocab, const PairShift& x,
              const double* orders, int count, double* forward, double* backward) {
  for (int first = 0; first < count; first += kOrders) {
    PairSums<Flt, kOrders> of(x, orders, first, count);
    add_rows<D>(p, q, vocab, of);
    double sums[PairSums<Flt, kOrders>::kSize];
    of.get(sums);
    for (int k = 0; k < kOrders && first + k < count; ++k) {
      const int j = first + k;
      forward[j] = divergence_above(sums[1], sums[3 + 2 * k], sums[0], orders[j], x);
      backward[j] = divergence_above(sums[2], sums[4 + 2 * k], sums[0], orders[j], x);
    }
  }
}

void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                      double* forward, double* backward, int threads) {
  const std::int64_t vocab = in.shape.vocab;
  const int count = static_cast<int>(num_orders);
  cpu::parallel_for(in.shape.positions, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      const Row p = row_of(in.private_logits, 0, k), q = row_of(in.public_logits, 0, k);
      const PairShift x(in.private_lse[k], in.public_lse[k]);
      double *to = forward + k * count, *back = backward + k * count;
      with_dtype(p.dtype, [&](auto tag) {
        constexpr Dtype kDtype = decltype(tag)::value;
        if (count == 1) {
          one_pair<kDtype, 1>(p, q, vocab, x, orders, count, to, back);
        } else {
          one_pair<kDtype, 4>(p, q, vocab, x, orders, count, to, back);
        }
      });
    }
  });
}

}  // namespace

void add_renyi_divergence(cpu::Table& table) { table.renyi_divergence = renyi_divergence; }

ADAPMIXED_CORE_END
