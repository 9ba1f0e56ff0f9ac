// A stretch of one position's vocabulary with the projected distributions of all models, relative
// to q: the excess p_bar_i / q - 1 = lambda d and the ratio p_bar_i / q = 1 - lambda + lambda r.
// Both are kept because each is accurate where the other cancels.
#pragma once

#include "clip/formula.h"
#include "common/rows.h"

ADAPMIXED_CORE_BEGIN

class MixtureTile {
 public:
  static std::int64_t tile_width(std::int64_t models) {
    const std::int64_t fit = 16384 / (models < 1 ? 1 : models) / 8 * 8;
    return fit < 8 ? 8 : fit > 512 ? 512 : fit;
  }
  static std::int64_t scratch_size(std::int64_t models) {
    return (2 * models + 4) * tile_width(models);
  }

  MixtureTile(const Ensemble& in, const Weights& weights, std::int64_t position, double* memory)
      : in_(in), weights_(weights), position_(position), width_(tile_width(in.shape.models)) {
    excess_ = memory;
    ratio_ = excess_ + in.shape.models * width_;
    q_ = ratio_ + in.shape.models * width_;
    ratio_spread_ = q_ + width_;
    excess_spread_ = ratio_spread_ + width_;
    wild_ = reinterpret_cast<std::int64_t*>(excess_spread_ + width_);
  }

  std::int64_t width() const { return width_; }
  Vec q(std::int64_t lane) const { return Vec::load(q_ + lane); }
  // The means over the models that are present.
  Projected<Vec> mean(std::int64_t lane) const {
    return {mean_from(excess(0, lane), Vec::load(excess_spread_ + lane), in_.shape.models),
            mean_from(ratio(0, lane), Vec::load(ratio_spread_ + lane), in_.shape.models)};
  }
  Vec excess(std::int64_t model, std::int64_t lane) const {
    return Vec::load(excess_ + model * width_ + lane);
  }
  Vec ratio(std::int64_t model, std::int64_t lane) const {
    return Vec::load(ratio_ + model * width_ + lane);
  }
  // Tokens that the public row masks, or that are too rare in it. The lanes hold q = 0 for them.
  std::int64_t wild_count() const { return wild_count_; }
  std::int64_t wild(std::int64_t k) const { return wild_[k]; }

  void add_wild(std::int64_t v) { wild_[wild_count_++] = v; }

  void load(std::int64_t begin, std::int64_t end) {
    load_public(begin, end);
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      const Row row = row_of(in_.private_logits, i, position_);
      with_dtype(row.dtype,
                 [&](auto tag) { load_model<decltype(tag)::value>(row, i, begin, end); });
    }
  }

 private:
  void load_public(std::int64_t begin, std::int64_t end) {
    const Row row = row_of(in_.public_logits, 0, position_);
    const Vec lse(in_.public_lse[position_]);
    wild_count_ = 0;
    with_dtype(row.dtype, [&](auto tag) {
      for (std::int64_t v = begin; v < end; v += Vec::kLanes) {
        const Vec lq = load_logits<decltype(tag)::value>(row.data, v, end) - lse;
        // A NaN is kept (as inf), so that a row which is not a distribution is noticed.
        const auto present = (lq >= Vec(kWildLogQ)) | lq.is_nan();
        vselect(present, exp_(lq), Vec(0.0)).store(q_ + v - begin);
        Vec(0.0).store(ratio_spread_ + v - begin);
        Vec(0.0).store(excess_spread_ + v - begin);
        const unsigned rare = (lq < Vec(kWildLogQ)).bits();
        for (int lane = 0; lane < Vec::kLanes; ++lane) {
          if ((rare >> lane & 1u) && v + lane < end) wild_[wild_count_++] = v + lane;
        }
      }
    });
  }

  template <Dtype D>
  void load_model(const Row& row, std::int64_t model, std::int64_t begin, std::int64_t end) {
    const std::int64_t at = model * in_.shape.positions + position_;
    const Vec shift(in_.private_lse[at] - in_.public_lse[position_]);
    const Member<Vec> member(weights_, at);
    const Row public_row = row_of(in_.public_logits, 0, position_);
    double* excess = excess_ + model * width_ - begin;
    double* ratio_out = ratio_ + model * width_ - begin;
    for (std::int64_t v = begin; v < end; v += Vec::kLanes) {
      const Vec t =
          load_logits<D>(row.data, v, end) - load_logits<D>(public_row.data, v, end) - shift;
      const auto present = Vec::load(q_ + v - begin) > Vec(0.0);
      const Projected<Vec> own = member(vselect(present, t, Vec(0.0)));
      own.excess.store(excess + v);
      own.ratio.store(ratio_out + v);
      accumulate(excess_spread_ + v - begin, own.excess - Vec::load(excess_ + v - begin));
      accumulate(ratio_spread_ + v - begin, own.ratio - Vec::load(ratio_ + v - begin));
    }
  }

  static void accumulate(double* at, Vec difference) { (Vec::load(at) + difference).store(at); }

  const Ensemble& in_;
  const Weights& weights_;
  std::int64_t position_, width_;
  double *excess_, *ratio_, *q_, *ratio_spread_, *excess_spread_;
  std::int64_t* wild_;
  std::int64_t wild_count_ = 0;
};

ADAPMIXED_CORE_END
