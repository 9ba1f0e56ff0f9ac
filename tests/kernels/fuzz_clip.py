"""Checks of a fuzzed call in a density-ratio box, against the float64 reference and mpmath."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import checks
import mpmath as mp
import torch
from checks import Report
from fuzz_cases import Call
from mpmath import mpf
from oracle_clip import Box
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

BOXES = (
    (math.exp(-0.5), math.exp(0.5)), (math.exp(-0.25), math.e), (0.9, 1e6), (0.0, 2.0),
    (0.5, 1e60), (1e-300, 3.0), (1.0 - 1e-9, 1.0 + 1e-9), (0.3, 1.0 + 1e-7), (0.97, 40.0),
)  # fmt: skip
SHORT = 60  # rows up to this length go to the oracle


def clip(call: Call, operators: Any) -> Clipping:
    lower, upper = random.Random(call.seed + 3).choice(BOXES)
    result: Clipping = operators.clip_project(
        call.private, call.public, lower=lower, upper=upper, orders=call.orders,
        num_models=call.slots,
    )  # fmt: skip
    return result


def check_clip(call: Call, operators: Any, report: Report) -> None:
    got = clip(call, operators)
    torch.set_num_threads(3 - call.threads)
    again = clip(call, operators)
    torch.set_num_threads(call.threads)
    for name in ("log_scale", "residual", "charge", "private_lse"):
        if not torch.equal(getattr(got, name), getattr(again, name)):
            report.failures.append(f"clip_project: {name} depends on the number of threads")
    models, positions, vocab = call.private.shape
    rows = [(i, b) for i in range(models) for b in range(positions)]
    for i, b in random.Random(call.seed + 4).sample(
        rows, min(2 if vocab <= SHORT else 1, len(rows))
    ):
        part = slice(i, i + 1), slice(b, b + 1)
        private, public = call.private[part], call.public[part[1]]
        own = dataclasses.replace(
            got, charge=None, public_lse=got.public_lse[part[1]],
            **{name: getattr(got, name)[part] for name in
               ("log_scale", "residual", "private_lse", "status")},
        )  # fmt: skip
        bar = operators.mixture(private, public, own)[0]
        _check_row(call, got, bar, (i, b), report)


def _check_row(call: Call, got: Clipping, bar: Tensor, at: tuple[int, int], report: Report) -> None:
    i, b = at
    error = 1e-9
    private, public = call.private[i, b], call.public[b]
    box: Box | None = None
    if len(public) <= SHORT:
        box = Box(private, public, got.lower, got.upper)
        truth = torch.tensor([float(x) for x in box.bar], dtype=torch.float64)
    else:
        truth = reference.clip_project(
            private[None, None], public[None], lower=got.lower, upper=got.upper
        )[0, 0]
    q = torch.softmax(public.double(), -1)
    inside = (truth > got.lower * q * (1 + 1e-12)) & (truth < got.upper * q * (1 - 1e-12))
    relative = error + 1e-14 / max(truth[inside].sum().item(), 1e-300)
    report.values += bar.numel()
    where = f"clip_project: box {got.lower}, {got.upper}, row {at}"
    log_scale = got.log_scale[i, b].item()
    rounded = abs(got.public_lse[b].item()) + (abs(log_scale) if log_scale < math.inf else 0.0)
    rounding = 1e-12 + 2.0**-52 * rounded
    if not abs(bar.sum().item() - 1) <= rounding:
        report.failures.append(f"{where}: sums to {bar.sum().item()!r}")
    wrong = ~((bar - truth).abs() <= relative * truth + 1e-300)
    if bool(wrong.any()):
        box = box or Box(private, public, got.lower, got.upper)
        for v in wrong.nonzero()[:, 0].tolist():
            if abs(mpf(bar[v].item()) - box.bar[v]) > relative * box.bar[v] + mpf(1e-300):
                report.failures.append(
                    f"{where}: token {v}: {bar[v].item()!r}, exact {mp.nstr(box.bar[v], 17)}"
                )
                break
    outside = (bar > got.upper * q * (1 + rounding)) | (bar < got.lower * q * (1 - rounding))
    if bool((outside & (q > 1e-290)).any()):
        report.failures.append(f"{where}: a ratio outside the box")
    _check_charges(call, got, bar, at, box, where, report)


def _check_charges(
    call: Call, got: Clipping, bar: Tensor, at: tuple[int, int], box: Box | None, where: str,
    report: Report,
) -> None:  # fmt: skip
    i, b = at
    assert got.charge is not None
    estimate = reference.clip_charge(
        bar[None, None], call.public[b : b + 1], lower=got.lower, orders=call.orders,
        num_models=call.slots,
    )[0, 0]  # fmt: skip
    for k, order in enumerate(call.orders):
        value, other = got.charge[i, b, k].item(), estimate[k].item()
        report.values += 1
        if box is None and abs(value - other) <= 0.5 * adapmixed_ext.loss_error * other + 1e-13:
            continue
        box = box or Box(call.private[i, b], call.public[b], got.lower, got.upper)
        pair = got.log_scale[i, b].item(), got.residual[i, b].item()
        exact = box.charge(box.at(*pair), order, call.slots)
        report.decided += 1
        if mp.isinf(exact) or math.isinf(value):
            good = mp.isinf(exact) and value == math.inf
        else:
            error = adapmixed_ext.loss_error * exact + checks.FLOOR
            good = abs(mpf(value) - exact) <= error
        if not good:
            report.failures.append(
                f"{where}: charge {value!r}, exact {mp.nstr(exact, 17)}, order {order}, "
                f"{call.slots} slots"
            )
