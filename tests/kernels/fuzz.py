"""Random calls of every operator against the oracles.

    python tests/kernels/fuzz.py --count 2000 --seed 0

runs the cases 0 to 1999 and prints a summary; `--seed S --count 1` runs case S again alone, and
`--device cuda` all but those with bad rows on a GPU; `--isa avx512` takes that path in all of them.
The float64 reference and extended precision find what looks wrong, mpmath decides whether it is.
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
from typing import Any

import checks
import extended
import pools
import torch
from checks import Report
from fuzz_answers import check_mixture, check_renyi, check_screen, drawn
from fuzz_cases import ISAS, Call, build
from fuzz_clip import check_clip, clip
from on_device import OnDevice
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Projection

INF = math.inf


class Source:
    """A random source whose stream starts anew at every call, so that two calls can be compared."""

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


def run(call: Call, operators: Any = adapmixed_ext) -> Report:
    """Check every operator on one case."""
    report = Report()
    copies = call.private.clone(), call.public.clone()
    with setting(call.threads, call.isa):
        if call.expected is not None:
            _refused(call, operators, report)
        else:
            try:
                _answered(call, operators, report)
            except ValueError as error:
                report.failures.append(f"good rows were refused: {error}")
    for copy, rows in zip(copies, (call.private, call.public), strict=True):
        if not torch.equal(copy.nan_to_num(7.0), rows.nan_to_num(7.0)):
            report.failures.append("an argument was changed")
    report.failures = [f"{call}: {failure}" for failure in report.failures]
    return report


def _operators(
    call: Call, operators: Any, projection: Projection | Tensor
) -> dict[str, Callable[[], object]]:
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
    setting = choose.choice(pools.SETTINGS)
    on = choose.choice((None, torch.rand(private.shape[:2], generator=generator) < 0.7))
    model = choose.randrange(private.shape[0])
    orders = [1.0, *call.orders, INF]
    return {
        "leave_one_out": lambda: operators.leave_one_out(
            private, public, projection, orders=call.orders, adjacency=call.adjacency,
            num_models=call.slots,
        ),
        "mixture": lambda: operators.mixture(private, public, projection),
        "log_prob": lambda: (targets, operators.log_prob(private, public, projection, targets)),
        "log_pool": lambda: pooled(operators, private, public, targets, setting, on),
        "screen": lambda: (noise, screening, operators.screen(
            private, public, noise, **screening)),
        "renyi": lambda: (model, orders, operators.renyi_divergence(
            private[model], public, orders)),
    }  # fmt: skip


def pooled(
    operators: Any, private: Tensor, public: Tensor, targets: Tensor, setting: pools.Setting,
    active: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return one pool, and the answers computed from it."""
    options = setting.options(private.shape[0])
    pool = operators.log_pool(private, public, active=active, **options)
    mixture = operators.mixture(private, public, pool)
    log_prob = operators.log_prob(private, public, pool, targets)
    return setting, active, targets, pool, mixture, log_prob


def _check_pool(call: Call, answer: tuple[Any, ...], report: Report) -> None:
    setting, active, targets, pool, mixture, log_prob = answer
    truth = pools.Truth(call.private, call.public, setting, pool.private_lse, active)
    pools.check_answers(truth, pool, mixture, targets.unsqueeze(1), log_prob.unsqueeze(1), report)
    units = pool.span / setting.unit(call.private.shape[0])
    if not torch.equal(units, units.round()):
        report.failures.append("span: not a multiple of the grid's unit")


def _refused(call: Call, operators: Any, report: Report) -> None:
    weight = torch.full(call.private.shape[:2], 0.5)
    calls = _operators(call, operators, weight)
    calls["project"] = lambda: operators.project(
        call.private, call.public, order=call.order, radius=call.radius
    )
    calls["clip_project"] = lambda: clip(call, operators)
    private_is_bad = str(call.expected).startswith("private")
    if private_is_bad:
        del calls["renyi"]  # its arguments have other names
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
            report.failures.append(f"{name}: raised no error, expected {call.expected!r}")


def _answered(call: Call, operators: Any, report: Report) -> None:
    private, public = call.private, call.public
    choose = random.Random(call.seed + 2)
    result = operators.project(private, public, order=call.order, radius=call.radius)
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
    answers = {
        name: operator() for name, operator in _operators(call, operators, projection).items()
    }
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
    check_mixture(own, mixture, *answers["log_prob"], report)
    _check_pool(call, answers["log_pool"], report)
    check_screen(call, *answers["screen"], report)
    check_renyi(call, *answers["renyi"], report)
    if operators is adapmixed_ext:
        check_clip(call, operators, report)
    token = operators.sample(mixture, public, rng=Source(call.seed))
    report.values += token.numel()
    held = public.gather(1, token.unsqueeze(1)).squeeze(1) > -INF
    if not bool(held.all()):
        report.failures.append(f"sample: {token.tolist()} include a token with q = 0")
    if public.shape[1] <= 300 and token.tolist() != drawn(mixture, public, Source(call.seed)):
        report.failures.append(f"sample: {token.tolist()} is not what the stream draws")
    _check_threads(call, operators, projection, result, answers, token, report)


def _check_threads(
    call: Call, operators: Any, projection: Projection | Tensor, result: Projection,
    answers: dict, token: Tensor, report: Report,
) -> None:  # fmt: skip
    """Check that another number of threads gives the same bits."""
    torch.set_num_threads(3 - call.threads)
    again = operators.project(call.private, call.public, order=call.order, radius=call.radius)
    pairs = [("weight", again.weight, result.weight),
             ("complement", again.complement, result.complement)]  # fmt: skip
    calls = _operators(call, operators, projection)
    for name in ("leave_one_out", "mixture"):
        pairs.append((name, calls[name](), answers[name]))
    pairs.append(("log_prob", calls["log_prob"]()[1], answers["log_prob"][1]))
    pairs.append(("screen", calls["screen"]()[2].divergence, answers["screen"][2].divergence))
    again_pool = calls["log_pool"]()
    for k in (4, 5):
        pairs.append(("log_pool", again_pool[k], answers["log_pool"][k]))
    pairs.append(("log_pool", again_pool[3].span, answers["log_pool"][3].span))
    again_token = operators.sample(answers["mixture"], call.public, rng=Source(call.seed))
    pairs.append(("sample", again_token, token))
    for name, one, other in pairs:
        if not torch.equal(one, other):
            report.failures.append(f"{name}: depends on the number of threads")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--isa", choices=ISAS, help="use this instruction set in every case")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    operators = adapmixed_ext if on_cpu else OnDevice(options.device)
    total, kinds, started = Report(), Counter(), time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        call = build(seed)
        if call.expected is not None and not on_cpu:
            continue  # on a GPU the call itself raises nothing
        call.isa = options.isa or call.isa
        kinds[call.kind] += 1
        report = run(call, operators)
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
