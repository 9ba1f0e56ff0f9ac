"""Random calls of every operator against the oracles.

    python tests/kernels/fuzz.py FIRST_SEED COUNT

runs these cases and prints what failed. The float64 reference and extended precision find what
looks wrong, mpmath decides whether it is.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import checks
import extended
import mpmath as mp
import numpy as np
import oracle
import pools
import torch
from checks import Report
from draws import drawn_by_hand
from fuzz_cases import Call, build
from mpmath import mpf
from oracle_clip import check_charges, check_row
from torch import Tensor
from workload import Source

import adapmixed_ext
from adapmixed_ext import _C, Clipping, reference

INF = math.inf
PROBABILITY_ERROR = 1e-6
BOXES = (
    (math.exp(-0.5), math.exp(0.5)), (math.exp(-0.25), math.e), (0.9, 9e5), (0.0, 2.0),
    (1e-6, 1.0), (1.0 - 1e-9, 1.0 + 1e-9), (0.3, 1.0 + 1e-7), (0.97, 40.0),
)  # fmt: skip
SHORT = 60  # rows up to this length go to the oracle of boxes


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
    with setting(call.threads, call.isa):
        mixture = _check_ball(call, operators, report)
        _check_sample(call, operators, mixture, report)
        _check_pool(call, operators, report)
        _check_screen(call, operators, report)
        _check_renyi(call, operators, report)
        if operators is adapmixed_ext:
            _check_clip(call, report)
    report.failures = [f"{call}: {failure}" for failure in report.failures]
    return report


def _check_ball(call: Call, operators: Any, report: Report) -> Tensor:
    """Check project, and leave_one_out, mixture and log_prob of its weights or of any others."""
    private, public = call.private, call.public
    choose = random.Random(call.seed + 2)
    projection: Any = operators.project(private, public, order=call.order, radius=call.radius)
    weight, complement = projection.weight, projection.complement
    models, positions = weight.shape
    rows = [(i, b) for i in range(models) for b in range(positions)]
    i, b = (torch.tensor(x) for x in zip(*choose.sample(rows, min(6, len(rows))), strict=True))
    report.add(
        checks.check_weights(
            private[i, b], public[b], weight[i, b][None], complement[i, b][None], call.order,
            [call.radius], "project",
        )
    )  # fmt: skip
    if choose.random() < 0.3:
        generator = torch.Generator().manual_seed(call.seed)
        weight = torch.rand(models, positions, dtype=torch.float64, generator=generator)
        weight[choose.randrange(models)] = choose.choice((0.0, 1.0, 1e-9))
        complement, projection = 1 - weight, weight
    loss = operators.leave_one_out(
        private, public, projection, orders=call.orders, adjacency=call.adjacency,
        num_models=call.slots,
    )  # fmt: skip
    pair = extended.array(weight), extended.array(complement)
    report.add(
        checks.check_losses(
            private, public, weight, complement, loss, call.orders, call.adjacency,
            sorted(choose.sample(range(models), min(3, models))), "leave_one_out", call.slots,
        )
    )  # fmt: skip
    mixture: Tensor = operators.mixture(private, public, projection)
    truth = extended.Mixtures(private, public, *pair).mean
    report.values += mixture.numel()
    error = abs(extended.array(mixture) - truth)
    if not (error <= PROBABILITY_ERROR * truth + 1e-300).all():
        report.failures.append(f"mixture: off by {error.max()}")
    targets = torch.tensor([choose.randrange(public.shape[1]) for _ in range(positions)])
    log_prob = operators.log_prob(private, public, projection, targets)
    with np.errstate(divide="ignore"):
        exact = np.log(truth[np.arange(positions), targets.numpy()])
    for value, right in zip(log_prob.tolist(), exact, strict=True):
        if value != right and not abs(value - right) <= PROBABILITY_ERROR + 1e-12 * abs(right):
            report.failures.append(f"log_prob: {value!r}, exact {right}")
    return mixture


def _check_sample(call: Call, operators: Any, mixture: Tensor, report: Report) -> None:
    source = Source(call.seed)
    tokens = operators.sample(mixture, call.public, rng=source)
    report.values += tokens.numel()
    if bool((call.public.gather(1, tokens[:, None]) == -INF).any()):
        report.failures.append(f"sample: {tokens.tolist()} include a token with q = 0")
    if call.public.shape[1] <= 300:
        key, counter = source.reserve()
        if tokens.tolist() != drawn_by_hand(mixture, call.public, bytes(key.tolist()), counter):
            report.failures.append(f"sample: {tokens.tolist()} is not what the stream draws")


def _check_pool(call: Call, operators: Any, report: Report) -> None:
    private, public = call.private, call.public
    choose = random.Random(call.seed + 5)
    chosen = choose.choice(pools.SETTINGS)
    generator = torch.Generator().manual_seed(call.seed)
    active = choose.choice((None, torch.rand(private.shape[:2], generator=generator) < 0.7))
    targets = torch.randint(public.shape[1], public.shape[:1], generator=generator)
    options = chosen.options(private.shape[0])
    pool = operators.log_pool(private, public, active=active, **options)
    mixture = operators.mixture(private, public, pool)
    log_prob = operators.log_prob(private, public, pool, targets)
    truth = pools.Truth(private, public, chosen, pool.private_lse, active)
    pools.check_answers(truth, pool, mixture, targets[:, None], log_prob[:, None], report)


def _check_screen(call: Call, operators: Any, report: Report) -> None:
    choose = random.Random(call.seed + 1)
    private, public = call.private, call.public
    positions, vocab = public.shape
    top_k = choose.choice((1, vocab, choose.randint(1, vocab), vocab + 2))
    generator = torch.Generator().manual_seed(call.seed)
    noise = torch.randn(positions, top_k, generator=generator, dtype=torch.float64)
    noise *= choose.choice((0.0, 1e-6, 0.01, 0.3))
    active = choose.choice((None, torch.rand(private.shape[:2], generator=generator) < 0.7))
    weight, threshold = choose.choice((0.0, 1e-4, 0.3, 1.0)), 0.5
    options = {"weight": weight, "order": call.order, "threshold": threshold, "top_k": top_k}
    options |= {"num_models": call.slots, "active": active}
    got = operators.screen(private, public, noise, **options)
    truth, _ = reference.screen(private, public, noise, **options)
    for b in range(positions):
        value, other = got.divergence[b].item(), truth[b].item()
        report.values += 1
        if bool(got.passed[b]) != (value <= threshold):
            report.failures.append(f"screen: {value!r} passed {bool(got.passed[b])}")
        if value == other or abs(value - other) <= 0.5e-6 * other + 1e-13:
            continue
        exact = oracle.screening(
            private[:, b], public[b], noise[b], weight=weight, order=call.order, top_k=top_k,
            divisor=call.slots, active=None if active is None else active[:, b].tolist(),
        )  # fmt: skip
        if value < INF or (call.order - 1) * exact <= 600:
            _check_divergence(value, exact, f"screen at {b}", report)


def _check_divergence(value: float, exact: mpf, where: str, report: Report) -> None:
    report.decided += 1
    if mp.isinf(exact) or math.isinf(value):
        good = bool(mp.isinf(exact)) and value == INF
    else:
        relative, absolute = checks.DIVERGENCE_ERROR
        good = value >= 0 and abs(mpf(value) - exact) <= relative * exact + absolute
    if not good:
        report.failures.append(f"{where}: {value!r}, exact {mp.nstr(exact, 17)}")


def _check_renyi(call: Call, operators: Any, report: Report) -> None:
    private = call.private[random.Random(call.seed + 6).randrange(len(call.private))]
    found = operators.renyi_divergence(private, call.public, call.orders)
    for way in (0, 1):
        for b in range(len(private)):
            p, q = oracle.softmax(private[b]), oracle.softmax(call.public[b])
            for k, order in enumerate(call.orders):
                value = found[way][b, k].item()
                report.values += 1
                exact = oracle.renyi(p, q, order) if way == 0 else oracle.renyi(q, p, order)
                if not checks.loss_holds(value, exact, order):
                    where = f"renyi, {(way, b, order)}"
                    report.failures.append(f"{where}: {value!r}, exact {mp.nstr(exact, 17)}")


def _check_clip(call: Call, report: Report) -> None:
    private, public = call.private, call.public
    choose = random.Random(call.seed + 3)
    lower, upper = choose.choice(BOXES)
    got: Clipping = adapmixed_ext.clip_project(
        private, public, lower=lower, upper=upper, orders=call.orders, num_models=call.slots
    )
    i, b = choose.randrange(private.shape[0]), choose.randrange(private.shape[1])
    row = private[i : i + 1, b : b + 1], public[b : b + 1]
    try:
        if public.shape[1] <= SHORT:
            box = check_row(private, public, got, i, b)
            check_charges(got, box, i, b, call.orders, call.slots)
        else:
            truth = reference.clip_project(*row, lower=lower, upper=upper)
            own = adapmixed_ext.clip_project(*row, lower=lower, upper=upper)
            bar = adapmixed_ext.mixture(*row, own)
            q = row[1].double().softmax(-1)
            inner = (truth[0] > lower * q * (1 + 1e-12)) & (truth[0] < upper * q * (1 - 1e-12))
            relative = 1e-9 + 1e-14 / max(truth[0][inner].sum().item(), 1e-300)
            torch.testing.assert_close(bar, truth[0], rtol=relative, atol=1e-300)
            charge = reference.clip_charge(
                truth, row[1], lower=lower, orders=call.orders, num_models=call.slots
            )
            assert got.charge is not None
            known = torch.tensor([order - 1 for order in call.orders]) * charge[0, 0] < 600
            charge = torch.where(known | got.charge[i, b].isfinite(), charge[0, 0], math.inf)
            torch.testing.assert_close(got.charge[i, b], charge, rtol=2e-5, atol=2e-12)
            assert bool((got.charge[i, b] >= charge * (1 - 1e-9) - 1e-12).all())
    except AssertionError as error:
        report.failures.append(f"clip_project in {lower}, {upper}, row {(i, b)}: {error}")


def main(first: int, count: int) -> int:
    total = Report()
    for seed in range(first, first + count):
        report = run(build(seed))
        for failure in report.failures:
            print("FAILED", failure, flush=True)
        total.add(report)
    print(f"{count} cases: {total.values} values, {total.decided} decided by mpmath, "
          f"{len(total.failures)} failures")  # fmt: skip
    return 1 if total.failures else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
