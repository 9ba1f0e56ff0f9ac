"""Checks of every operator against its documented bounds, on any device or simulation of one.

The float64 reference or extended precision decide most values. 70 digits decide the doubtful ones,
and all that look wrong. So every reported failure is a failure at 70 digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import cases
import mpmath as mp
import numpy as np
import oracle
import pytest
import torch
from cases import INF, Case, Plan, Source
from mpmath import mpf
from numpy.typing import NDArray
from oracle import Array, Mixtures, array
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

LOSS_ERROR, LOSS_FLOOR = 1e-4, 1e-9
LEAST = 1e-12  # below this optimum any smaller weight is allowed
LEAST_RADIUS = 1e-5  # below it, too
ENOUGH = 3  # failures, after which a report ends, because mpmath is slow
SUM_ERROR = 4e-12  # of the sum of a distribution
NORMAL = math.log(2.0**-1022)  # the bounds of a pool hold for log p above this
LSE_ERROR = 7e-7  # documented error of a private row's log-sum-exp in a pool


@dataclass
class Report:
    """The failures, and the number of checked values."""

    failures: list[str] = field(default_factory=list)
    values: int = 0

    def expect(self, good: object, *what: object) -> None:
        self.values += 1
        if not good:
            self.failures.append(" ".join(map(str, what)))

    def compare(self, name: str, got: Array, truth: Array, bound: Array | float) -> None:
        """Expect |got - truth| <= bound everywhere; infinities must agree."""
        self.values += got.size
        bound = np.broadcast_to(bound, got.shape)
        with np.errstate(invalid="ignore"):
            error = np.where(got == truth, 0, abs(got - truth))
        if not (error <= bound).all():
            at = np.unravel_index(np.argmax(np.nan_to_num(error - bound, nan=INF)), error.shape)
            self.failures.append(f"{name}: {got[at]!r} at {at}, exact {truth[at]}, off {error[at]}")


class Through:
    """The operators, called by a function of an operator and its arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Looked up now, since faults are planted there.
        return partial(self._call, getattr(adapmixed_ext, name))


def on_device(device: torch.device | str) -> Through:
    """Return the operators, each of which moves its arguments to the device and its result back."""

    def call(operator: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        given = {key: moved(value, device) for key, value in named.items()}
        return moved(operator(*(moved(a, device) for a in arguments), **given), "cpu")

    return Through(call)


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a value whose tensors, also those in tuples and results, are on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return type(value)(**{name: moved(part, device) for name, part in fields.items()})
    return value


def copied(private: Tensor, public: Tensor) -> Tensor:
    """Tell which rows of a member are the public ones, also in the sign of 0."""
    return ((private == public) & (private.signbit() == public.signbit())).all(-1)


def run(operators: Sequence[str], case: Case, plan: Plan, ops: Any) -> Report:
    """Check these operators on one case."""
    report = Report()
    for name in operators:
        CHECKS[name](case, plan, ops, report)
    report.failures = [f"{case.name}: {failure}" for failure in report.failures]
    return report


# The ball: project, and leave_one_out, mixture and log_prob of its weights or of others.


def weight_tolerance(order: float) -> float:
    """Return the relative error that `project` states for a weight."""
    return min(2e-4 + 1e-5 / (order - 1), 0.999)


def check_project(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    rows = case.distinct_rows()
    i, b = (torch.tensor(index) for index in zip(*rows, strict=True))
    lse = [oracle.log_sum_exp(array(logits)) for logits in (private, public)]
    balls = case.balls or plan.balls
    for order in dict.fromkeys(order for order, _ in balls):
        radii = [radius for a, radius in balls if a == order]
        found = [ops.project(private, public, order=order, radius=radius) for radius in radii]
        for one, radius in zip(found, radii, strict=True):
            one.check()
            report.expect(one.weight.dtype == torch.float64, "project: dtype")
            report.expect(one.weight.shape == private.shape[:2], "project: shape")
            full = copied(private, public) & (radius > 0)
            report.expect((one.weight[full] == 1).all(), "project: a member like the public model")
            for got, exact in zip((one.private_lse, one.public_lse), lse, strict=True):
                bound = 3e-14 + 5e-16 * abs(exact)
                report.compare("project: log-sum-exp", array(got), exact, bound)
        weights = torch.stack([one.weight[i, b] for one in found])
        close = case.close and order >= 1.01
        check_weights(private[i, b], public[b], weights, order, radii, report, close=close)


def check_weights(
    private: Tensor,
    public: Tensor,
    weight: Tensor,
    order: float,
    radii: Sequence[float],
    report: Report,
    *,
    close: bool = True,
) -> None:
    """Check that weights are feasible and near the optimum at one order and every radius.

    Args:
        private, public: M pairs of rows, each (M, V).
        weight: (R, M), one row for each radius.
        close: whether weights must be near the optimum.
    """
    report.values += weight.numel()
    given = array(weight)
    sound = (given >= 0) & (given <= 1)
    radius = np.array(radii)[:, None]
    judged = weights_hold(oracle.Rows(private, public), given, order, radius, close)
    for k, row in zip(*np.nonzero(~(sound & judged[0] & judged[1])), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        rows = oracle.Rows(private[row : row + 1], public[row : row + 1], exact=True)
        own = array(weight[k, row : row + 1], exact=True)
        held = sound[k, row], *weights_hold(rows, own, order, radii[k], close)
        at = f"row {row} order {order} radius {radii[k]}: {given[k, row]!r}"
        for good, fault in zip(held, ("no weight", "infeasible", "too small"), strict=True):
            report.expect(good, f"project: {fault}:", at)


def weights_hold(
    rows: oracle.Rows, weight: Array, order: float, radius: Any, close: bool
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which weights are feasible, and which are near the optimum, both beyond doubt."""
    inside, _ = rows.sides(weight, order, radius)
    more = np.maximum(weight, LEAST) / (1 - oracle.alike(weight, weight_tolerance(order)))
    free = (weight == 1) | rows.masked | (not close) | (radius < LEAST_RADIUS) | (more >= 1)
    _, beyond = rows.sides(np.minimum(more, 1), order, radius)
    return inside, free | beyond


def weighings(case: Case, plan: Plan, ops: Any) -> list[tuple[Any, Tensor]]:
    """Return projections, and weights that are none, each with its weights (N, B)."""
    found = [
        ops.project(case.private, case.public, order=order, radius=radius)
        for order, radius in plan.weighings
    ]
    weights = [weight.expand(case.private.shape[:2]).contiguous() for weight in case.weights]
    if plan.random_weights:
        generator = torch.Generator().manual_seed(6)
        shape = case.private.shape[:2]
        weights.append(torch.rand(shape, dtype=torch.float64, generator=generator))
        weights[-1][0] = 0.0
        weights.append(torch.ones(shape, dtype=torch.float64))
    return [(one, one.weight) for one in found] + [(w, w) for w in weights]


def check_leave_one_out(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    orders, models = case.orders or plan.orders, plan.chosen_of(case)
    for k, (projection, weight) in enumerate(weighings(case, plan, ops)):
        slots = plan.slots(case, k)
        given = case.private, case.public, weight, slots
        mixtures = Mixtures.of_weights(*given)
        for adjacency in plan.adjacencies:
            unbounded = may_be_unbounded(case.private, case.public, mixtures, adjacency)
            unbounded = unbounded | (not case.close)
            loss = ops.leave_one_out(
                *given[:2], projection, orders=orders, adjacency=adjacency, num_models=slots
            )
            report.expect(loss.dtype == torch.float64, "leave_one_out: dtype")
            if adjacency == "zero_out":
                idle = (weight == 0) & ~torch.from_numpy(unbounded)
                report.expect((loss[idle] == 0).all(), "leave_one_out: a weight of 0 loses")
            truth = mixtures.losses(models, orders, adjacency)
            exact = partial(exact_loss, given, adjacency, models, orders)
            compare_losses(
                f"leave_one_out, {adjacency}", array(loss)[models], truth, exact, orders, report,
                unbounded[models, :, None], case.close,
            )  # fmt: skip


def exact_loss(
    given: Any, adjacency: str, models: list[int], orders: Sequence[float], m: int, b: int, k: int
) -> Array:
    """Return a loss with 70 digits; given are private and public rows, weights and slots."""
    one = slice(b, b + 1)
    rows = given[0][:, one], given[1][one], given[2][:, one], given[3]
    return Mixtures.of_weights(*rows, exact=True).losses([models[m]], [orders[k]], adjacency)


def compare_losses(
    name: str,
    got: Array,
    truth: Array,
    exact: Callable[..., Array],
    orders: Sequence[float],
    report: Report,
    unbounded: NDArray[np.bool_] | bool = False,
    close: bool = True,
) -> None:
    """Compare losses (..., K) with the truth; ``exact`` of their indices decides about failures."""
    report.values += got.size
    unbounded = np.broadcast_to(unbounded, got.shape)
    good = losses_hold(got, truth, orders, unbounded, close)
    for at in zip(*np.nonzero(~good), strict=True):
        if len(report.failures) >= ENOUGH:
            break
        value, true = mpf(float(got[at])), exact(*at).reshape(1)
        low = np.maximum(true - mpf("1e-60"), 0)  # of 70 digits
        good = losses_hold(np.array([value]), low, [orders[at[-1]]], unbounded[at], close)
        report.expect(good.all(), f"{name} at {at}: {float(value)!r}, exact {mp.nstr(true[0], 17)}")


def losses_hold(
    got: Array,
    truth: Array,
    orders: Sequence[float],
    unbounded: NDArray[np.bool_] | bool = False,
    close: bool = True,
) -> NDArray[np.bool_]:
    """Tell which losses (..., K) are upper bounds that are as close as stated."""
    with np.errstate(invalid="ignore"):
        good = (got >= truth) & ((got <= truth * (1 + LOSS_ERROR) + LOSS_FLOOR) | (not close))
        infinite = unbounded | ((np.array(orders) - 1) * truth >= 600)
    return good | (got == INF) & infinite


def may_be_unbounded(
    private: Tensor, public: Tensor, mixtures: Mixtures, adjacency: str
) -> NDArray[np.bool_]:
    """Tell which rows have a token at which `leave_one_out` states +inf, (N, B).

    That is one with q < e^-70 about which a member speaks, or to which none gives e^-80 q: none of
    all members or, if one is removed, of the others.
    """
    rare = torch.log_softmax(public.double(), -1) < -70
    spoken = (rare & ~torch.isneginf(private).all(0)).any(-1).cpu().numpy()
    likely = mixtures.bars >= np.exp(np.longdouble(-80)) * mixtures.q
    others = likely.sum(-3) + mixtures.models - len(private)
    if adjacency == "add_remove" and mixtures.models > 1:
        others = others - likely
    silent = ((others == 0) & (mixtures.q > 0)).any(-1)
    return np.broadcast_to(spoken | silent, private.shape[:2])


def check_mixture(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    for projection, weight in weighings(case, plan, ops):
        truth = Mixtures.of_weights(private, public, weight).mean
        mixture = ops.mixture(private, public, projection)
        report.expect(mixture.dtype == torch.float64, "mixture: dtype")
        report.compare("mixture", array(mixture), truth, 1e-6 * truth + 1e-300)
        sizes = [float(rows.double().logsumexp(-1).abs().max()) for rows in (private, public)]
        error = SUM_ERROR + 2.0**-52 * sum(sizes)
        report.compare("sum of mixture", array(mixture).sum(-1), truth.sum(-1), error)
        check_log_prob(case, ops, projection, truth, report)


def check_log_prob(
    case: Case, ops: Any, projection: Any, truth: Array, report: Report, error: float = 1e-6
) -> None:
    for targets in case.targets():
        got = array(ops.log_prob(case.private, case.public, projection, targets))
        with np.errstate(divide="ignore"):
            exact = np.log(truth[np.arange(len(targets)), targets.numpy()])
        report.compare("log_prob", got, exact, error + 1e-12 * abs(np.nan_to_num(exact)))


# The pool, the box, the screening, divergences and draws.


def check_log_pool(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check log_pool, and mixture and log_prob of its result."""
    private, public = case.private, case.public
    for setting in plan.pools:
        for active in plan.actives(case):
            options = setting.options(private.shape[0])
            pool = ops.log_pool(private, public, active=active, **options)
            report.expect(pool.log_normaliser.dtype == pool.span.dtype == torch.float64, "dtype")
            truth = oracle.Pool(private, public, setting, pool.private_lse, active)
            report.compare("pool: lse", array(pool.private_lse), truth.lse, LSE_ERROR)
            report.compare("pool: span", array(pool.span), truth.span, 2 * truth.ratio_error)
            width = Fraction(setting.upper) - Fraction(setting.lower)
            most = Fraction(float(pool.span.max()))
            report.expect(most <= width, "pool: a span above the box", setting)
            units = pool.span / setting.unit(private.shape[0])
            report.expect(torch.equal(units, units.round()), "pool: a span between two units")
            equal = copied(private, public)
            lse = pool.public_lse.expand_as(pool.private_lse)[equal]
            report.expect(torch.equal(pool.private_lse[equal], lse), "pool: lse of a public row")
            report.expect((pool.span[equal] == 0).all(), "pool: span of a public row")
            bound = truth.log_error.max(-1)
            report.compare(
                "pool: normaliser", array(pool.log_normaliser), truth.log_normaliser, bound
            )
            for targets in case.targets():
                got = array(ops.log_prob(private, public, pool, targets))
                at = np.arange(len(targets)), targets.numpy()
                report.compare("pool: log_prob", got, truth.log_p[at], truth.log_error[at])
            p = array(ops.mixture(private, public, pool))
            held = truth.log_p > NORMAL  # p below the range of a double is 0 or denormal
            report.compare(
                "pool: mixture", np.log(p[held]), truth.log_p[held], truth.log_error[held]
            )
            report.expect((p[~held] <= 2.0**-1021).all(), "pool: p is too large")
            report.expect((p[np.isneginf(truth.log_p)] == 0).all(), "pool: p without q")
            report.expect((abs(p.sum(-1) - 1) <= SUM_ERROR).all(), "pool: sums", p.sum(-1))


def row_of(clipping: Clipping, i: int, b: int | None = None) -> Clipping:
    """Return the clipping of one model, at one position or at all."""
    at = slice(None) if b is None else slice(b, b + 1)
    model = slice(i, i + 1)
    return dataclasses.replace(
        clipping, charge=None, active=None, public_status=clipping.public_status[at],
        log_scale=clipping.log_scale[model, at], residual=clipping.residual[model, at],
        private_lse=clipping.private_lse[model, at], public_lse=clipping.public_lse[at],
        status=clipping.status[model, at],
    )  # fmt: skip


def check_clip_project(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check clip_project, and mixture, log_prob and leave_one_out of its result."""
    private, public = case.private, case.public
    orders, chosen = plan.clip_orders, plan.chosen_of(case)
    log_p, q = oracle.log_softmax(private), oracle.softmax(public)
    p = np.where(log_p < -600, 0, np.exp(log_p))
    for k, (lower, upper) in enumerate(plan.boxes):
        slots = plan.slots(case, k)
        got = ops.clip_project(
            private, public, lower=lower, upper=upper, orders=orders, num_models=slots
        )
        report.expect(not got.status.any(), "clip_project: status")
        equal = copied(private, public)
        report.expect((got.charge[equal] == 0).all(), "clip_project: a public row is charged")
        bars = np.stack(
            [array(ops.mixture(private[i : i + 1], public, row_of(got, i))) for i in chosen]
        )
        truth = np.stack(
            [[oracle.boxed(p[i, b], q[b], lower, upper) for b in range(len(q))] for i in chosen]
        )
        check_boxes(got, bars, truth, q, chosen, report)
        # The charges are those of the distributions that are returned.
        stand_for = oracle.clipped(private, public, got)
        exact = oracle.charges(stand_for, q, got.lower, orders, slots)
        charge = array(got.charge)
        sound = (charge >= exact) | (charge == 0) & (exact <= 1e-16)  # charged 0: it answers q
        close = (charge <= exact * (1 + 2e-5) + 2e-12) | ((np.array(orders) - 1) * exact >= 600)
        report.expect(
            (sound & close).all(), "clip_project: charge in", (lower, upper), charge, exact
        )
        actives = plan.actives(case)
        given = dataclasses.replace(got, active=actives[k % len(actives)])
        adjacency = plan.adjacencies[k // 2 % len(plan.adjacencies)]
        check_clipped(case, given, adjacency, slots, plan, ops, report)


def check_boxes(
    got: Clipping, bars: Array, truth: Array, q: Array, chosen: list[int], report: Report
) -> None:
    """Check the distributions (M, B, V) of some models, their sums and that they lie in the box."""
    sums = np.array([[math.fsum(row) for row in bar] for bar in bars])
    # If the sums agree, a rescaled mean of rows is a mean of distributions in the box.
    report.expect((sums.max(0) - sums.min(0) <= 1e-12).all(), "clip_project: sums", sums)
    log_scale = array(got.log_scale)[chosen]
    log_scale = np.where(np.isinf(log_scale), 0, log_scale)
    rounding = 1e-12 + 2.0**-52 * (abs(array(got.public_lse)) + abs(log_scale))
    report.expect((abs(sums - 1) <= rounding).all(), "clip_project: sums", sums)
    least, most, rounding = got.lower * q, got.upper * q, rounding[..., None]
    # Tokens inside the box inherit the error of s; clipped tokens inherit the error of q.
    inside = (truth > least) & (truth < most)
    moving = 1e-9 + 1e-14 / np.maximum((truth * inside).sum(-1, keepdims=True), 1e-300)
    error = np.where(inside, moving, rounding) * truth + 1e-300
    report.compare("clip_project", bars, truth, error)
    within = (bars >= least * (1 - rounding) - 1e-300) & (bars <= most * (1 + rounding) + 1e-300)
    report.expect(within.all(), "clip_project: outside the box", got.lower, got.upper)


def check_clipped(
    case: Case, given: Clipping, adjacency: str, slots: int, plan: Plan, ops: Any, report: Report
) -> None:
    """Check what is answered and lost if some members of a clipping take part."""
    private, public, orders = case.private, case.public, plan.clip_orders
    bars = oracle.clipped(private, public, given)
    bars = bars / bars.sum(-1, keepdims=True)  # their sums are checked elsewhere
    mixtures = Mixtures(bars, oracle.softmax(public), slots)
    mean = bars.mean(0)
    mixture = array(ops.mixture(private, public, given))
    report.compare("mixture of boxes", mixture, mean, 1e-9 * mean + 1e-300)
    sizes = abs(array(given.public_lse)).max() + abs(array(given.private_lse)).max()
    check_log_prob(case, ops, given, mean, report, 1e-9 + 1e-15 * sizes)
    loss = ops.leave_one_out(
        private, public, given, orders=orders, adjacency=adjacency, num_models=slots
    )
    exact = mixtures.losses(range(len(private)), orders, adjacency)
    unbounded = may_be_unbounded(private, public, mixtures, adjacency)[..., None]
    unbounded = unbounded | (not case.close)
    lower = exact * (1 - 1e-12) - 2e-15  # the oracle's rows carry double rounding
    good = losses_hold(array(loss), lower, orders, unbounded)
    good |= (not case.close) & (array(loss) >= lower)
    report.expect(good.all(), "loss of boxes", adjacency, loss, exact)
    if adjacency == "zero_out":
        most = array(given.charge) * (1 + LOSS_ERROR) + LOSS_FLOOR
        within = (array(loss) <= most) | unbounded
        report.expect(within.all(), "loss of boxes above the charge", loss, given.charge)


def check_screen(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    private, public = case.private, case.public
    if plan.seed:
        far, noise, options = cases.far_from_public(plan.seed)
        got = ops.screen(far.private, far.public, noise, **options)
        check_screening(far, noise, options, got, report)
    for k, (top_k, sigma, order, weight) in enumerate(plan.screens):
        generator = torch.Generator().manual_seed(11)
        noise = torch.randn(len(public), top_k, generator=generator, dtype=torch.float64) * sigma
        for active in plan.actives(case):
            options = {"weight": weight, "order": order, "threshold": 0.5, "top_k": top_k}
            options |= {"num_models": plan.slots(case, k), "active": active}
            got = ops.screen(private, public, noise, **options)
            report.expect(got.divergence.dtype == torch.float64, "screen: dtype")
            report.expect(got.passed.dtype == torch.bool, "screen: dtype of passed")
            check_screening(case, noise, options, got, report)


def check_screening(
    case: Case, noise: Tensor, options: dict[str, Any], got: Any, report: Report
) -> None:
    """Check a screening with a threshold of 0.5 at every position."""
    private, public, order = case.private, case.public, options["order"]
    active = options["active"]
    equal = copied(private, public).all(0)
    truth, _ = reference.screen(private, public, noise, **options)
    for b, (value, other) in enumerate(zip(got.divergence.tolist(), truth.tolist(), strict=True)):
        report.expect(got.passed[b].item() == (value <= 0.5), "screen: passed", value)
        if not noise[b].any() and (options["weight"] == 0 or equal[b]):
            report.expect(value == 0, "screen: what does not move", value)
        if value == other or abs(value - other) <= 0.5e-6 * other + 1e-13:
            continue
        exact = oracle.screening(
            private[:, b], public[b], noise[b], weight=options["weight"], order=order,
            top_k=options["top_k"], divisor=options["num_models"],
            active=None if active is None else active[:, b].tolist(),
        )  # fmt: skip
        if mp.isinf(exact) or math.isinf(value):
            good = value == INF and (order - 1) * exact > 600
        else:
            good = value >= 0 and abs(mpf(value) - exact) <= 1e-5 * exact + 1e-12
        report.expect(good, f"screen at {b}: {value!r}, exact {mp.nstr(exact, 17)}", options)


def check_renyi_divergence(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    orders, public = case.orders or plan.renyi_orders, case.public
    for i in plan.chosen_of(case):
        sides = case.private[i], public
        equal = copied(*sides)
        for found, pair in zip(
            ops.renyi_divergence(*sides, orders), (sides, sides[::-1]), strict=True
        ):
            report.expect((found[equal] == 0).all(), "renyi: equal rows")
            check_divergence(f"renyi of {i}", found, pair, orders, report)


def check_divergence(
    name: str, found: Tensor, sides: Sequence[Tensor], orders: Sequence[float], report: Report
) -> None:
    """Check D_a of rows (B, V), one way, (B, K)."""

    def exact(b: int, k: int) -> Array:
        p, q = (oracle.softmax(rows[b], exact=True) for rows in sides)
        return oracle.one_way(p, q, [orders[k]])

    truth = oracle.one_way(*map(oracle.softmax, sides), orders)
    compare_losses(name, array(found), truth, exact, orders, report)


def check_sample(case: Case, plan: Plan, ops: Any, report: Report) -> None:
    """Check draws of the case's rows, and of rows that integers hardly ever decide."""
    mixture = reference.mixture(case.private, case.public, torch.tensor(0.5).double())
    source = Source(plan.seed)
    generator = torch.Generator().manual_seed(plan.seed)
    for p, public in (
        (mixture, case.public), cases.open_rows(*case.public.shape, generator),
    ):  # fmt: skip
        tokens = ops.sample(p, public, rng=source)
        drawn = public.gather(1, tokens[:, None])
        report.expect(not torch.isneginf(drawn).any(), "sample: a token with q = 0", tokens)
        expected = oracle.drawn_by_hand(p, public, bytes(source.key), source.counter)
        report.expect(tokens.tolist() == expected, "sample: not what the stream draws", tokens)


def raised(private: Tensor, public: Tensor) -> str:
    """Return the error of a call on the CPU."""
    with pytest.raises(ValueError) as caught:
        adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    return str(caught.value)


def check_bad_rows(private: Tensor, public: Tensor, error: str) -> None:
    """Check that bad rows are reported by ``check()``, have no weight and let nothing be drawn."""
    projection = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    floats = adapmixed_ext.project(private, public, order=3.0, radius=0.03)
    clipping = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0, orders=2.0)
    pool = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    noise = torch.zeros(len(public), 3, dtype=torch.float64, device=public.device)
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.3, order=2.0, threshold=1e9, top_k=3
    )
    bad = projection.status != 0
    worst = bad.any(0)
    assert worst.any() and not worst.all()
    for found in (projection, floats, clipping, pool, screening):
        assert torch.equal(found.status != 0, bad)
        with pytest.raises(ValueError) as caught:
            found.check()
        assert str(caught.value) == error
    for found in (projection, floats):
        assert (found.weight[bad] == 0).all()
    assert clipping.charge is not None and (clipping.charge[bad] == INF).all()
    assert torch.equal(pool.span.isnan(), bad) and pool.log_normaliser[worst].isnan().all()
    assert (screening.divergence[worst] == INF).all() and not screening.passed[worst].any()
    for way in adapmixed_ext.renyi_divergence(private, public, [1.5, 2.0]):
        assert torch.equal((way == INF).all(-1), bad) and not way.isnan().any()
    for weights in (projection, clipping, torch.full_like(projection.weight, 0.5)):
        loss = adapmixed_ext.leave_one_out(private, public, weights, orders=[2.0, 18.0])
        assert (loss[:, worst] == INF).all() and loss[:, ~worst].isfinite().all()
    targets = torch.zeros(len(public), dtype=torch.int64, device=public.device)
    for weights in (clipping, pool, projection):
        mixture = adapmixed_ext.mixture(private, public, weights)
        assert mixture[worst].isnan().all() and not mixture[~worst].isnan().any()
        log_prob = adapmixed_ext.log_prob(private, public, weights, targets)
        assert torch.equal(log_prob.isnan(), worst) or weights is clipping
    tokens = adapmixed_ext.sample(mixture, public, rng=Source(1))
    assert torch.equal(tokens == -1, worst)


def check_what_no_status_reports(device: torch.device) -> None:
    """Check targets, weights, noise and probabilities that the CPU refuses.

    A call that is only queued cannot raise: it answers NaN, +inf or token -1.
    """
    private, public = (rows.to(device) for rows in cases.logits(0, 5, 2, 70, 1.0, 0.3))
    weight = torch.full((5, 2), 0.25, dtype=torch.float64, device=device)
    for target in (-1, 70):
        targets = torch.tensor([3, target], device=device)
        found = adapmixed_ext.log_prob(private, public, weight, targets)
        assert found.isnan().tolist() == [False, True]
    weight[1, 1] = 1.5
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=2.0)
    assert (loss[:, 1] == INF).all() and loss[:, 0].isfinite().all()
    assert adapmixed_ext.mixture(private, public, weight)[1].isnan().all()
    noise = torch.zeros(2, 6, dtype=torch.float64, device=device)
    noise[1, 2] = math.nan
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.1, order=2.0, threshold=5.0, top_k=6
    )
    assert screening.passed.tolist() == [True, False] and screening.divergence[1] == INF
    p, q = public.double().softmax(-1).repeat(3, 1), public.repeat(3, 1)
    p[0] *= 1.1
    p[1, 3], p[1, 4] = -p[1, 3], p[1, 4] + 2 * p[1, 3]  # the sum stays
    p[2, 3] = math.nan
    p[3], q[3, 0] = 0.0, -INF
    p[3, 0] = 1.0
    tokens = adapmixed_ext.sample(p, q, rng=Source(1))
    assert (tokens[:4] == -1).all() and (tokens[4:] >= 0).all()


def run_on_changed_rows(private: Tensor, public: Tensor) -> None:
    """Run operators on rows that are bad, or changed since their log-sum-exps were taken.

    Whatever they answer, `make sanitize` sees whether they stay within their memory.
    """
    ops, shape = torch.ops.adapmixed, private.shape[:2]
    half = private.new_full(shape, 0.5, dtype=torch.float64)
    targets = torch.zeros(len(public), dtype=torch.int64, device=public.device)
    own = [torch.logsumexp(rows.double(), -1) for rows in (private, public)]
    for sums in (own, [torch.zeros_like(one) for one in own]):
        given = (private, public, *sums, half, half, 0.0, 0.0, None)
        calls: list[Callable[[], Any]] = [
            *(partial(ops.leave_one_out, *given, [1.5, 18.0], zero_out, shape[0])
              for zero_out in (False, True)),
            *(partial(ops.clip_project, private, public, sums[1], lower, 2.0, [1.5, 18.0], shape[0])
              for lower in (0.5, 0.0)),
            partial(ops.mixture, *given), partial(ops.log_prob, *given, targets),
        ]  # fmt: skip
        for call in calls:
            with suppress(ValueError):  # on the CPU
                call()


CHECKS: dict[str, Callable[[Case, Plan, Any, Report], None]] = {
    "project": check_project,
    "leave_one_out": check_leave_one_out,
    "mixture": check_mixture,
    "log_pool": check_log_pool,
    "clip_project": check_clip_project,
    "screen": check_screen,
    "renyi_divergence": check_renyi_divergence,
    "sample": check_sample,
}
