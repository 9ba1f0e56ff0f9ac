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
from itertools import accumulate

import checks
import extended
import mpmath as mp
import numpy as np
import oracle
import torch
from checks import Report
from fuzz_cases import Call, build
from mpmath import mpf
from test_random import uniform_below
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Projection, reference

INF = math.inf
PROBABILITY_ERROR = 1e-6


class Source:
    """A stream that starts anew at every call: two calls can be compared."""

    seeded = True

    def __init__(self, seed: int) -> None:
        self.key = torch.tensor(list(random.Random(seed).randbytes(32)), dtype=torch.uint8)

    def reserve(self) -> tuple[Tensor, int]:
        return self.key, 3


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
    if public.shape[1] <= 300 and token.tolist() != _drawn(mixture, public, Source(call.seed)):
        report.failures.append(f"sample: {token.tolist()} is not what the stream draws")
    _check_threads(call, projection, result, answers, token, report)


def _drawn(mixture: Tensor, public: Tensor, source: Source) -> list[int]:
    """The tokens of the integer law, by the stream itself."""
    key, counter = source.reserve()
    tokens = []
    for b, weights in enumerate(reference.sampling_weights(mixture, public)):
        draw = uniform_below(bytes(key.tolist()), counter, b, sum(weights))
        tokens.append(next(v for v, end in enumerate(accumulate(weights)) if draw < end))
    return tokens


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
