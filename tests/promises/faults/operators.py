"""Faults of the compiled operators and of the randomness that they draw from."""

from __future__ import annotations

from .fault import Fault

_KERNELS = "tests/kernels/"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "exact sampling",
        "a draw that equals a weight takes its token",
        "csrc/sample/formula.h",
        "if (left < weight) return left >= static_cast<uint128>(v) ? v : -1;",
        "if (left <= weight) return left >= static_cast<uint128>(v) ? v : -1;",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "draws between the integer sum and the true sum are thrown away",
        "csrc/sample/cpu.cpp",
        "if (*token < 0 && draw < total + static_cast<uint128>(vocab)) {",
        "if (*token < 0 && draw < total) {",
        (_KERNELS + "test_sample.py::test_what_integers_leave_open_is_decided_by_the_fraction",),
    ),
    Fault(
        "exact sampling",
        "all rows of a batch draw from one stream",
        "csrc/sample/cpu.cpp",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b)};",
        "const Stream stream{key, counter, static_cast<std::uint32_t>(b - b)};",
        (_KERNELS + "test_sample.py::test_sample_draws_exactly_by_the_stream",),
    ),
    Fault(
        "unpredictable randomness",
        "ChaCha with 18 rounds",
        "csrc/sample/chacha.h",
        "for (int round = 0; round < 10; ++round) {",
        "for (int round = 0; round < 9; ++round) {",
        (_KERNELS + "test_chacha.py::test_rfc_8439_blocks",),
    ),
    Fault(
        "unpredictable randomness",
        "a counter is handed out twice",
        "python/adapmixed/rng.py",
        "        self._next += 1\n",
        "        self._next |= 1\n",
        ("tests/test_rng.py::test_counters_never_repeat",),
    ),
    Fault(
        "unpredictable randomness",
        "a forked child draws what its parent draws",
        "python/adapmixed/rng.py",
        "            if os.getpid() != self._owner:\n",
        "            if self._owner is None:\n",
        ("tests/test_rng.py::test_a_forked_child_draws_another_key",),
    ),
    Fault(
        "feasible weights",
        "the projection in double precision leaves no margin for rounding",
        "csrc/project/formula.h",
        "t.excess = margin < 1.0 ? excess * (1.0 - margin) : 0.0;",
        "t.excess = excess;",
        (_KERNELS + "test_project.py::test_the_range_in_which_weights_are_near_the_optimum",),
    ),
    Fault(
        "feasible weights",
        "the excess in single precision leaves no margin for rounding",
        "csrc/project/float_search.h",
        "target.excess = excess_ * (1.0 - constant);",
        "target.excess = constant < 1.0 ? excess_ : 0.0;",
        (
            _KERNELS + "test_project.py::"
            "test_single_precision_stays_below_the_optimum_by_what_it_may_cost",
        ),
    ),
    Fault(
        "feasible weights",
        "the weight in single precision leaves no margin for rounding",
        "csrc/project/float_search.h",
        "const double weight = x.weight * (1.0 + kFloatRelative);",
        "const double weight = x.weight;",
        (
            _KERNELS + "test_project.py::"
            "test_single_precision_stays_below_the_optimum_by_what_it_may_cost",
        ),
    ),
    Fault(
        "losses in full",
        "a leave-one-out loss in single precision is that of one direction",
        "csrc/leave_one_out/bound.h",
        "std::fmax(std::fmax(forward.value, reverse.value), 0.0);",
        "std::fmax(forward.value, 0.0);",
        (_KERNELS + "test_leave_one_out.py::test_every_neighbour_on_tiny_vocabularies",),
    ),
    Fault(
        "losses in full",
        "a charge of clipped mixing is that of one direction",
        "csrc/clip/charge.h",
        "const double excess = share * std::fmax(std::fmax(forward, reverse), 0.0);",
        "const double excess = share * std::fmax(reverse, 0.0);",
        (_KERNELS + "test_clip.py::test_against_the_oracle",),
    ),
    Fault(
        "losses in full",
        "the upper bound of a pool's clip is rounded outward",
        "csrc/log_pool/formula.h",
        "most_ = kGridZero + std::floor(options.upper * scale_);",
        "most_ = kGridZero + std::ceil(options.upper * scale_);",
        (_KERNELS + "test_log_pool_privacy.py::test_bounds_that_are_no_multiples_are_kept",),
    ),
    Fault(
        "emptied is missing",
        "an exhausted member of a pool still contributes",
        "csrc/log_pool/formula.h",
        "return options.active == nullptr || options.active[at];",
        "return options.active == nullptr || at >= 0;",
        (_KERNELS + "test_log_pool.py::test_slots_that_are_inactive_or_absent_have_no_part",),
    ),
    Fault(
        "emptied is missing",
        "the screened mean leaves out absent members",
        "csrc/screen/formula.h",
        "rest_ = ((slots - on) + (1.0 - options.weight) * on) / slots;",
        "rest_ = (1.0 - options.weight) * on / slots;",
        (_KERNELS + "test_screen.py::test_inactive_slots_answer_the_public_distribution",),
    ),
    Fault(
        "budgets are not copied",
        "a source of randomness can be pickled",
        "python/adapmixed/rng.py",
        "    def __getstate__(self) -> object:\n        raise TypeError(",
        "    def __getstate__(self) -> object:\n"
        '        return {"_key": self._key, "_next": self._next}\n        raise TypeError(',
        ("tests/test_rng.py::test_sources_cannot_be_duplicated",),
    ),
    Fault(
        "vocabulary mask",
        "probability on masked tokens is drawn",
        "csrc/sample/formula.h",
        "return supported ? (p > 0.0 ? p : 0x1p-1074) : 0.0;",
        "return p > 0.0 ? p : (supported ? 0x1p-1074 : 0.0);",
        (_KERNELS + "test_sample.py::test_tokens_outside_the_public_support_are_never_drawn",),
    ),
)
