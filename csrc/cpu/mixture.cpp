// p = mean_i p_bar_i, the distribution the token is drawn from.
#include "core/leave_one_out.h"
#include "cpu/mixture_tile.h"
#include "cpu/parallel.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

void mixture(const Ensemble& in, const Weights& weights, double* probabilities, int threads) {
  const std::int64_t vocab = in.shape.vocab;
  const std::int64_t width = MixtureTile::tile_width(in.shape.models);
  const std::int64_t tiles = (vocab + width - 1) / width;
  const std::int64_t count = in.shape.positions * tiles;
  cpu::parallel_for(count, 4, threads, [&](std::int64_t first, std::int64_t last) {
    double* memory = cpu::thread_scratch(MixtureTile::scratch_size(in.shape.models));
    for (std::int64_t task = first; task < last; ++task) {
      const std::int64_t position = task / tiles, begin = task % tiles * width;
      const std::int64_t end = begin + width < vocab ? begin + width : vocab;
      MixtureTile tile(in, weights, position, memory);
      tile.load(begin, end);
      double* out = probabilities + position * vocab + begin;
      for (std::int64_t lane = 0; begin + lane < end; lane += Vec::kLanes) {
        double p[Vec::kLanes];
        (tile.q(lane) * tile.mean(lane).ratio).store(p);
        for (int l = 0; l < Vec::kLanes && begin + lane + l < end; ++l) out[lane + l] = p[l];
      }
      for (std::int64_t k = 0; k < tile.wild_count(); ++k) {
        out[tile.wild(k) - begin] = rare_mean(in, weights, position, tile.wild(k));
      }
    }
  });
}

}  // namespace

void add_mixture(cpu::Table& table) { table.mixture = mixture; }

ADAPMIXED_CORE_END
