// One public row in double: q, log q, and the wild tokens, which are too rare for both.
#pragma once

#include "common/rows.h"
#include "project/row_terms.h"

ADAPMIXED_CORE_BEGIN

struct PublicRow {
  double lse;
  std::int64_t vocab, padded;
  double* logits;         // all lanes, -inf past the end
  double* q;              // 0 if masked or wild
  double* log_q;          // -inf if masked or wild
  double* inverse_reach;  // row_terms.h
  std::int64_t* wild;
  std::int64_t wild_count;

  static std::int64_t scratch_size(std::int64_t padded, std::int64_t vocab) {
    return 4 * padded + vocab;
  }

  void load(const Row& row, double row_lse, std::int64_t row_vocab, std::int64_t row_padded,
            double* memory) {
    lse = row_lse;
    vocab = row_vocab;
    padded = row_padded;
    logits = memory;
    q = logits + padded;
    log_q = q + padded;
    inverse_reach = log_q + padded;
    wild = reinterpret_cast<std::int64_t*>(inverse_reach + padded);
    wild_count = 0;
    with_dtype(row.dtype, [&](auto tag) {
      for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
        load_logits<decltype(tag)::value>(row.data, v, vocab).store(logits + v);
      }
    });
    for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
      const Vec lq = Vec::load(logits + v) - Vec(lse);
      const auto present = lq >= Vec(kWildLogQ);
      vselect(present, exp_(lq), Vec(0.0)).store(q + v);
      vselect(present, lq, Vec(-HUGE_VAL)).store(log_q + v);
      const unsigned wild_lanes = ((lq < Vec(kWildLogQ)) & (lq > Vec(-HUGE_VAL))).bits();
      for (int lane = 0; lane < Vec::kLanes; ++lane) {
        if (wild_lanes >> lane & 1u) wild[wild_count++] = v + lane;
      }
    }
  }

  void set_reach(double order, double log_target) {
    for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
      adapmixed::ADAPMIXED_ISA::inverse_reach(Vec::load(log_q + v), order, log_target)
          .store(inverse_reach + v);
    }
  }
};

ADAPMIXED_CORE_END
