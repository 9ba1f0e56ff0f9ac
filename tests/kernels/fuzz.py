"""Random calls of every operator against the oracles.

    python tests/kernels/fuzz.py --count 2000 --seed 0

runs the cases 0 to 1999 and prints a summary; `--seed S --count 1` runs case S again alone. The
float64 reference and extended precision find what looks wrong, mpmath decides whether it is.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import checks
import extended
import mpmath as mp
import numpy as np
import oracle
import torch
from cases import DTYPES
from checks import ADJACENCIES, Report
from mpmath import mpf
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Projection, reference

INF = math.inf
ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 8.0, 18.0, 32.0, 64.0, 128.0, 256.0)
RADII = (0.0, 1e-6, 1e-4, 1e-2, 0.03, 0.5, 3.6, 50.0, 1000.0)
KINDS = (
    "ordinary", "near", "shared", "repeated", "masks", "offsets", "ties", "denormals",
    "canary", "mixed", "large", "very-negative", "bad",
)  # fmt: skip
SMALL_KINDS = ("large", "very-negative")  # most of their values need 70 digits
ISAS = ("scalar", "avx2", "avx512")
PROBABILITY_ERROR = 1e-6


class Source:
    """A stream that starts anew at every call: two calls can be compared."""

    seeded = True

    def __init__(self, seed: int) -> None:
        self.key = torch.tensor(list(random.Random(seed).randbytes(32)), dtype=torch.uint8)

    def reserve(self) -> tuple[Tensor, int]:
        return self.key, 3


@dataclass
class Call:
    """One fuzzed call of every operator."""

    seed: int
    kind: str
    private: Tensor
    public: Tensor
    order: float
    radius: float
    orders: list[float]
    adjacency: str
    slots: int
    threads: int
    isa: str
    expected: str | None  # what the error says, where a row is bad

    def __str__(self) -> str:
        shape, strides = tuple(self.private.shape), self.private.stride()
        return (
            f"seed {self.seed} ({self.kind}, {shape} strides {strides} {self.private.dtype}, "
            f"order {self.order}, radius {self.radius}, {self.isa}, {self.threads} threads)"
        )


def build(seed: int) -> Call:
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kind = choose.choice(KINDS)
    models, positions, vocab = _shape(choose, kind)
    dtype = choose.choice((torch.float32, *DTYPES))
    public = _randn(generator, positions, vocab) * choose.choice((0.1, 1.0, 3.0, 10.0, 30.0, 80.0))
    noise = choose.choice((1e-6, 0.01, 0.1, 0.5, 2.0, 10.0))
    if kind == "ordinary":
        private = _randn(generator, models, positions, vocab) * choose.choice((1.0, 5.0, 30.0))
    else:
        private = public + noise * _randn(generator, models, positions, vocab)
    if kind == "repeated":
        private = private[:1].expand_as(private).clone()
        if choose.random() < 0.5:
            private, public = (
                private[:, :1].expand_as(private).clone(),
                public[:1].expand_as(public),
            )
            public = public.clone()
    if kind in ("shared", "mixed"):
        private = private + choose.choice((0.5, 3.0)) * _randn(generator, positions, vocab)
    for name in ("masks", "offsets", "ties", "denormals", "canary", "large", "very-negative"):
        if kind == name or (kind == "mixed" and choose.random() < 0.4 and name not in SMALL_KINDS):
            private, public = _SPECIALS[name](choose, private, public)
    if dtype == torch.float16:  # 1e5 is +inf there, and that is another test's
        private = torch.where(private > 6e4, 6e4, private)
        public = torch.where(public > 6e4, 6e4, public)
    private, public = private.to(dtype), public.to(dtype)
    private, public = _revive(private), _revive(public)
    expected = _spoil(choose, private, public) if kind == "bad" else None
    private, public = _restride(choose, private), _restride(choose, public)
    return Call(
        seed, kind, private, public, _order(choose), choose.choice(RADII),
        [_order(choose) for _ in range(choose.choice((1, 1, 3)))], choose.choice(ADJACENCIES),
        models + choose.choice((0, 0, 0, 1, 7)), choose.choice((1, 2)),
        choose.choice([isa for isa in ISAS if _supported(isa)]), expected,
    )  # fmt: skip


def _supported(isa: str) -> bool:
    before = _C.instruction_set()
    known = _C.use_instruction_set(isa)
    _C.use_instruction_set(before)
    return known


def _shape(choose: random.Random, kind: str) -> tuple[int, int, int]:
    if kind in SMALL_KINDS:
        return choose.randint(1, 4), choose.randint(1, 2), choose.randint(1, 24)
    vocab = choose.choice(
        (1, 2, choose.randint(3, 40), choose.randint(41, 999), choose.randint(1000, 5000))
    )
    models = choose.choice((1, 2, 3, choose.randint(4, 40)))
    positions = choose.randint(1, 4)
    while models * positions * vocab > 40_000:  # the oracle takes 0.1 us a token and evaluation
        models, positions = max(1, models // 2), max(1, positions // 2)
        if models == positions == 1:
            break
    return models, positions, vocab


def _order(choose: random.Random) -> float:
    if choose.random() < 0.25:
        return 1.0 + math.exp(choose.uniform(math.log(0.01), math.log(300.0)))
    return choose.choice(ORDERS)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _some_tokens(choose: random.Random, vocab: int) -> list[int]:
    return choose.sample(range(vocab), choose.randint(1, max(1, min(vocab // 2, 20))))


def _masks(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    side = choose.choice(("both", "private", "public", "one model", "one model and public"))
    tokens = _some_tokens(choose, public.shape[1])
    if side in ("both", "public", "one model and public"):
        public[:, tokens] = -INF
    if side in ("both", "private"):
        private[..., tokens] = -INF
    if side.startswith("one model"):
        private[choose.randrange(private.shape[0])][:, tokens] = -INF
    return private, public


def _offsets(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    size = choose.choice((10.0, 1e3, 1e5, 9e5))
    return private + choose.choice((-1, 0, 1)) * size, public + choose.choice((-1, 1)) * size


def _ties(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    step = choose.choice((0.5, 4.0))
    private, public = (private / step).round() * step, (public / step).round() * step
    if choose.random() < 0.5:
        private[choose.randrange(private.shape[0])] = public
    return private, public


def _denormals(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        rows[..., _some_tokens(choose, public.shape[1])] = choose.choice((1e-40, -1e-45, 1e-38))
    return private, public


def _canary(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    token, rare = choose.randrange(public.shape[1]), choose.choice((1e-12, 1e-6, 1e-30, 1e-44))
    public[:, token] = torch.logsumexp(public, -1) + math.log(rare)
    model = choose.randrange(private.shape[0])
    private[model, :, token] = torch.logsumexp(private[model], -1) - math.log(1e-12)
    return private, public


def _large(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        for token in _some_tokens(choose, public.shape[1]):
            rows[..., token] = choose.choice((-1e6, -1e5, -1e4, 1e4, 1e5, 9e5))
    return private, public


def _very_negative(choose: random.Random, private: Tensor, public: Tensor) -> tuple[Tensor, Tensor]:
    for rows in (private, public):
        tokens = _some_tokens(choose, public.shape[1])[: public.shape[1] - 1]
        rows[..., tokens] = choose.choice((-1e30, -3e38, -2000.0, -760.0, -720.0, -690.0))
    return private, public


_SPECIALS: dict[str, Callable[[random.Random, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "masks": _masks, "offsets": _offsets, "ties": _ties, "denormals": _denormals,
    "canary": _canary, "large": _large, "very-negative": _very_negative,
}  # fmt: skip


def _revive(rows: Tensor) -> Tensor:
    """Gives rows that a mask or a narrow dtype left without a value, or beyond 1e6, another one."""
    top = rows.float().amax(-1, keepdim=True)
    rows = torch.where((top < -9.9e5) | (top > 9.9e5), torch.zeros_like(rows), rows)
    return rows


def _spoil(choose: random.Random, private: Tensor, public: Tensor) -> str:
    """Makes one row bad; returns the pattern of the error."""
    value, words = choose.choice(
        ((math.nan, "contains NaN"), (INF, r"contains \+inf"), (-INF, "has no finite value"),
         (1.01e6, "largest logit beyond"), (-1.01e6, "largest logit beyond"))
    )  # fmt: skip
    name, rows = choose.choice((("private_logits", private), ("public_logits", public)))
    if rows.dtype == torch.float16 and abs(value) > 6e4 and not math.isinf(value):
        value, words = math.nan, "contains NaN"
    at = tuple(choose.randrange(size) for size in rows.shape[:-1])
    whole = value in (-INF, -1.01e6)
    rows[at if whole else (*at, choose.randrange(rows.shape[-1]))] = value
    return rf"{name}\[{', '.join(map(str, at))}\] .*{words}"


def _restride(choose: random.Random, rows: Tensor) -> Tensor:
    """The same values elsewhere: inside a larger storage, the axes in another order."""
    how = choose.choice(("as it is", "inside", "steps", "turned", "inner", "repeated"))
    shape = rows.shape
    if how == "inside":
        store = torch.full((*shape[:-1], shape[-1] + 7), math.nan, dtype=rows.dtype)
        view = store[..., 3 : 3 + shape[-1]]
        return view.copy_(rows)
    if how == "steps":
        store = torch.full((*(3 * n for n in shape[:-1]), shape[-1] + 1), INF, dtype=rows.dtype)
        view = store[tuple(slice(1, None, 3) for _ in shape[:-1])][..., 1:]
        return view.copy_(rows)
    if how == "turned" and rows.dim() == 3:
        return rows.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "inner":
        store = torch.full((*shape[:-1], 2 * shape[-1]), math.nan, dtype=rows.dtype)
        return store[..., ::2].copy_(rows)
    if how in ("repeated", "turned"):  # an axis of equal rows (no NaN) in one place
        for axis in range(rows.dim() - 1):
            first = rows.narrow(axis, 0, 1)
            if bool((rows == first).all()):
                rows = first.expand(shape)
    return rows


@contextmanager
def setting(threads: int, isa: str) -> Iterator[None]:
    before = torch.get_num_threads(), _C.instruction_set()
    torch.set_num_threads(threads)
    assert _C.use_instruction_set(isa)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        _C.use_instruction_set(before[1])


def run(call: Call) -> Report:
    """Every operator on one case."""
    report = Report()
    copies = call.private.clone(), call.public.clone()
    with setting(call.threads, call.isa):
        if call.expected is not None:
            _refused(call, report)
        else:
            try:
                _answered(call, report)
            except ValueError as error:
                report.failures.append(f"good rows were refused: {error}")
    for copy, rows in zip(copies, (call.private, call.public), strict=True):
        if not torch.equal(copy.nan_to_num(7.0), rows.nan_to_num(7.0)):
            report.failures.append("an argument was changed")
    report.failures = [f"{call}: {failure}" for failure in report.failures]
    return report


def _operators(call: Call, projection: Projection | Tensor) -> dict[str, Callable[[], object]]:
    choose = random.Random(call.seed + 1)
    private, public = call.private, call.public
    positions, vocab = public.shape
    top_k = choose.choice((1, vocab, choose.randint(1, vocab), vocab + 2))
    generator = torch.Generator().manual_seed(call.seed)
    noise = torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
    noise *= choose.choice((0.0, 1e-6, 0.01, 0.3))
    active = torch.rand(private.shape[:2], generator=generator) < 0.7
    screening = {
        "weight": choose.choice((0.0, 1e-4, 0.3, 1.0)), "order": call.order, "threshold": 0.5,
        "top_k": top_k, "num_models": call.slots, "active": choose.choice((None, active)),
    }  # fmt: skip
    targets = torch.randint(vocab, (positions,), generator=generator)
    model = choose.randrange(private.shape[0])
    orders = [1.0, *call.orders, INF]
    return {
        "leave_one_out": lambda: adapmixed_ext.leave_one_out(
            private, public, projection, orders=call.orders, adjacency=call.adjacency,
            num_models=call.slots,
        ),
        "mixture": lambda: adapmixed_ext.mixture(private, public, projection),
        "log_prob": lambda: (targets, adapmixed_ext.log_prob(private, public, projection, targets)),
        "screen": lambda: (noise, screening, adapmixed_ext.screen(
            private, public, noise, **screening)),
        "renyi": lambda: (model, orders, adapmixed_ext.renyi_divergence(
            private[model], public, orders)),
    }  # fmt: skip


def _refused(call: Call, report: Report) -> None:
    weight = torch.full(call.private.shape[:2], 0.5)
    calls = _operators(call, weight)
    calls["project"] = lambda: adapmixed_ext.project(
        call.private, call.public, order=call.order, radius=call.radius
    )
    private_is_bad = str(call.expected).startswith("private")
    if private_is_bad:
        del calls["renyi"]  # its rows have other names
    for name, operator in calls.items():
        report.values += 1
        try:
            operator()
        except ValueError as error:
            pattern = str(call.expected)
            if name == "renyi":
                pattern = pattern.replace("public_logits", "q_logits")
            if not re.search(pattern, str(error)):
                report.failures.append(f"{name}: expected {pattern!r}, got {error}")
        else:
            report.failures.append(f"{name}: no error, expected {call.expected!r}")


def _answered(call: Call, report: Report) -> None:
    private, public = call.private, call.public
    choose = random.Random(call.seed + 2)
    result = adapmixed_ext.project(private, public, order=call.order, radius=call.radius)
    models, positions = private.shape[:2]
    rows = [(i, b) for i in range(models) for b in range(positions)]
    i, b = (torch.tensor(x) for x in zip(*choose.sample(rows, min(6, len(rows))), strict=True))
    report.add(
        checks.check_weights(
            private[i, b], public[b], result.weight[i, b].unsqueeze(0),
            result.complement[i, b].unsqueeze(0), call.order, [call.radius], "project",
        )
    )  # fmt: skip
    projection: Projection | Tensor = result
    weight, complement = result.weight, result.complement
    if choose.random() < 0.3:
        projection = torch.rand(models, positions, dtype=torch.float64,
                                generator=torch.Generator().manual_seed(call.seed))  # fmt: skip
        projection[choose.randrange(models)] = choose.choice((0.0, 1.0, 1e-9, 1e-300))
        weight, complement = projection, 1 - projection
    answers = {name: operator() for name, operator in _operators(call, projection).items()}
    chosen = sorted(choose.sample(range(models), min(3, models)))
    mixtures = extended.Mixtures(
        private, public, extended.array(weight), extended.array(complement), call.slots
    )
    report.add(
        checks.check_mixtures(
            mixtures, private, public, weight, complement, answers["leave_one_out"], call.orders,
            call.adjacency, chosen, "leave_one_out",
        )
    )  # fmt: skip
    mixture = answers["mixture"]
    own = mixtures if call.slots == models else extended.Mixtures(
        private, public, extended.array(weight), extended.array(complement)
    )  # fmt: skip
    _check_mixture(own, mixture, *answers["log_prob"], report)
    _check_screen(call, *answers["screen"], report)
    _check_renyi(call, *answers["renyi"], report)
    token = adapmixed_ext.sample(mixture, public, rng=Source(call.seed))
    report.values += token.numel()
    held = public.gather(1, token.unsqueeze(1)).squeeze(1) > -INF
    if not bool(held.all()):
        report.failures.append(f"sample: {token.tolist()} among them a token with q = 0")
    _check_threads(call, projection, result, answers, token, report)


def _check_mixture(
    truth: extended.Mixtures, mixture: Tensor, targets: Tensor, log_prob: Tensor, report: Report
) -> None:
    got = extended.array(mixture)
    report.values += got.size
    error = abs(got - truth.mean)
    if not (error <= PROBABILITY_ERROR * truth.mean + 1e-300).all():
        at = np.unravel_index(np.nanargmax(error / (truth.mean + 1e-300)), got.shape)
        report.failures.append(f"mixture: {got[at]} at {at}, exact {truth.mean[at]}")
    known = truth.mean > 1e-290
    report.note("mixture", error[known] / truth.mean[known])
    positions = np.arange(len(targets))
    for b, target in zip(positions, targets.tolist(), strict=True):
        value, exact = log_prob[b].item(), truth.mean[b, target]
        report.values += 1
        if exact == 0 or np.log(exact) < -extended.DEEP:
            wrong = value > -extended.DEEP  # this precision ends there
        else:
            bound = PROBABILITY_ERROR + 1e-12 * abs(np.log(exact))
            wrong = not abs(value - np.log(exact)) <= bound
        if wrong:
            report.failures.append(f"log_prob: {value!r} at {b}, exact probability {exact}")


def _check_screen(
    call: Call, noise: Tensor, options: dict, got: adapmixed_ext.Screening, report: Report
) -> None:
    truth, _ = reference.screen(call.private, call.public, noise, **options)
    for b in range(len(truth)):
        value, other = got.divergence[b].item(), truth[b].item()
        report.values += 1
        if bool(got.passed[b]) != (value <= options["threshold"]):
            report.failures.append(f"screen: {value!r} passed {bool(got.passed[b])}")
        if value == other or abs(value - other) <= adapmixed_ext.loss_error * other + 1e-12:
            if 1e-6 < other < INF:
                report.note("screen", np.array([abs(value / other - 1)]))
            continue
        report.decided += 1
        active = options["active"]
        exact = oracle.screening(
            call.private[:, b], call.public[b], noise[b], weight=options["weight"],
            order=options["order"], top_k=options["top_k"], divisor=options["num_models"],
            active=None if active is None else active[:, b].tolist(),
        )  # fmt: skip
        if not _divergence_holds(value, exact):
            report.failures.append(f"screen: {value!r} at {b}, exact {mp.nstr(exact, 17)}")


def _divergence_holds(value: float, exact: mpf, floor: float = checks.FLOOR) -> bool:
    if mp.isinf(exact) or math.isinf(value):
        return bool(mp.isinf(exact)) and value == INF
    error = adapmixed_ext.loss_error
    return value >= 0 and abs(mpf(value) - exact) <= error * abs(exact) + floor


def _check_renyi(
    call: Call, model: int, orders: list[float], got: tuple[Tensor, Tensor], report: Report
) -> None:
    truth = reference.renyi_divergence(call.private[model], call.public, orders)
    # What the rounding of two log-sum-exps does to a log-ratio: beyond the floor from 4e3 on.
    rows = call.private[model].double(), call.public.double()
    rounding = 2.0**-52 * sum(torch.logsumexp(row, -1).abs() for row in rows)
    for way in (0, 1):
        for b in range(call.public.shape[0]):
            for k, order in enumerate(orders):
                value, other = got[way][b, k].item(), truth[way][b, k].item()
                report.values += 1
                if value == other or abs(value - other) <= 0.5e-6 * other + 1e-13:
                    if 1e-6 < other < INF:
                        report.note("renyi", np.array([abs(value / other - 1)]))
                    continue
                report.decided += 1
                p, q = oracle.softmax(call.private[model, b]), oracle.softmax(call.public[b])
                exact = oracle.renyi(p, q, order) if way == 0 else oracle.renyi(q, p, order)
                floor = checks.FLOOR + (rounding[b].item() if order == INF else 0.0)
                if not _divergence_holds(value, exact, floor):
                    report.failures.append(
                        f"renyi_divergence: {value!r} at {b}, order {order}, way {way}, exact "
                        f"{mp.nstr(exact, 17)}"
                    )


def _check_threads(
    call: Call, projection: Projection | Tensor, result: Projection, answers: dict,
    token: Tensor, report: Report,
) -> None:  # fmt: skip
    """The same bits on another number of threads."""
    torch.set_num_threads(3 - call.threads)
    again = adapmixed_ext.project(call.private, call.public, order=call.order, radius=call.radius)
    pairs = [("weight", again.weight, result.weight),
             ("complement", again.complement, result.complement)]  # fmt: skip
    operators = _operators(call, projection)
    for name in ("leave_one_out", "mixture"):
        pairs.append((name, operators[name](), answers[name]))
    pairs.append(("log_prob", operators["log_prob"]()[1], answers["log_prob"][1]))
    pairs.append(("screen", operators["screen"]()[2].divergence, answers["screen"][2].divergence))
    again_token = adapmixed_ext.sample(answers["mixture"], call.public, rng=Source(call.seed))
    pairs.append(("sample", again_token, token))
    for name, one, other in pairs:
        if not torch.equal(one, other):
            report.failures.append(f"{name}: depends on the number of threads")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total, kinds, started = Report(), Counter(), time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        call = build(seed)
        kinds[call.kind] += 1
        report = run(call)
        for failure in report.failures:
            print("FAILED", failure, flush=True)
        total.add(report)
    print(
        f"{options.count} cases from seed {options.seed} in {time.monotonic() - started:.0f} s: "
        f"{total.values} values, {total.decided} decided by mpmath, {len(total.failures)} failures"
    )
    print("cases:", ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    print("worst:", ", ".join(f"{name} {value:.1e}" for name, value in sorted(total.worst.items())))
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main())
