"""Checks of a fuzzed call against the float64 reference, extended precision and mpmath."""

from __future__ import annotations

import math

import checks
import extended
import mpmath as mp
import numpy as np
import oracle
import torch
from checks import Report
from draws import drawn_by_hand
from fuzz_cases import Call
from mpmath import mpf
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import reference

INF = math.inf
PROBABILITY_ERROR = 1e-6


def drawn(mixture: Tensor, public: Tensor, source: adapmixed_ext.types.RandomSource) -> list[int]:
    """Return the tokens that the sampler must draw, computed from the random stream itself."""
    key, counter = source.reserve()
    return drawn_by_hand(mixture, public, bytes(key.tolist()), counter)


def check_mixture(
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
            wrong = value > -extended.DEEP  # extended precision ends at e^-DEEP
        else:
            bound = PROBABILITY_ERROR + 1e-12 * abs(np.log(exact))
            wrong = not abs(value - np.log(exact)) <= bound
        if wrong:
            report.failures.append(f"log_prob: {value!r} at {b}, exact probability {exact}")


def check_screen(
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


def check_renyi(
    call: Call, model: int, orders: list[float], got: tuple[Tensor, Tensor], report: Report
) -> None:
    truth = reference.renyi_divergence(call.private[model], call.public, orders)
    # The rounding of two log-sum-exps moves a log-ratio by more than FLOOR if they exceed 4e3.
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
