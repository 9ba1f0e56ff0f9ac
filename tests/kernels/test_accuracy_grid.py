"""The accuracy grid: every combination of order, radius, number of models and spread.

Extended precision checks a call at every (order, radius). mpmath checks a seeded sample of the grid
and every doubtful value (see checks.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import cases
import checks
import extended
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from checks import ADJACENCIES, Report
from mpmath import mpf
from regressions import REGRESSIONS, Regression
from torch import Tensor

import adapmixed_ext

ORDERS = (1.01, 1.5, 2.0, 3.0, 8.0, 18.0, 64.0, 128.0, 256.0)
RADII = (1e-6, 1e-4, 1e-2, 0.03, 0.5, 3.6, 50.0)
MODELS = (1, 2, 3, 100, 1000)
SPREADS = (1.0, 3.0, 10.0, 30.0, 80.0)
NOISES = (0.01, 0.1, 0.5, 2.0)
KINDS = ("independent", "shared")
# One radius for each order and every radius at least once, if the product would take minutes.
DIAGONAL = tuple((order, (RADII[(2 * k + 4) % 7],)) for k, order in enumerate(ORDERS))
PRODUCT = tuple((order, RADII) for order in ORDERS)


def ensemble(
    seed: int, kind: str, models: int, positions: int, vocab: int, spread: float, noise: float
) -> tuple[Tensor, Tensor]:
    """Return models that are independent, near the public one, or all moved the same way."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    public = spread * draw(positions, vocab)
    if kind == "independent":
        return spread * draw(models, positions, vocab), public
    shift = min(spread / 2, 3.0) * draw(positions, vocab) if kind == "shared" else 0.0
    return public + shift + noise * draw(models, positions, vocab), public


def some(seed: int, rows: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    return sorted(random.Random(seed).sample(list(rows), min(count, len(rows))))


def loss_orders(order: float) -> list[float]:
    """Return the order itself and two others, so that every pair occurs somewhere."""
    k = ORDERS.index(order)
    return [order, ORDERS[(k + 2) % len(ORDERS)], ORDERS[(k + 5) % len(ORDERS)]]


def check_case(
    case: Case,
    device: torch.device,
    plan: Sequence[tuple[float, Sequence[float]]] = PRODUCT,
    rows: int = 12,
    models: int = 3,
) -> Report:
    """Check project and leave_one_out at every order and radius of the plan."""
    report = Report()
    moved = case.to(device)
    count, positions = case.private.shape[:2]
    picked = some(1, case.rows, rows)
    i, b = (torch.tensor(index) for index in zip(*picked, strict=True))
    chosen = sorted({0, *random.Random(2).sample(range(count), min(models, count))})
    for order, radii in plan:
        orders = loss_orders(order)
        results = []
        losses: dict[str, list[Tensor]] = {adjacency: [] for adjacency in ADJACENCIES}
        for radius in radii:
            result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
            results.append(result)
            for adjacency in ADJACENCIES:
                losses[adjacency].append(
                    adapmixed_ext.leave_one_out(
                        moved.private, moved.public, result, orders=orders, adjacency=adjacency
                    ).cpu()
                )
        weight = torch.stack([result.weight.cpu() for result in results])
        complement = torch.stack([result.complement.cpu() for result in results])
        if weight.isnan().any() or complement.isnan().any():
            report.failures.append(f"{case.name} order {order}: NaN among the weights")
            continue
        report.add(
            checks.check_weights(
                case.private[i, b], case.public[b], weight[:, i, b], complement[:, i, b],
                order, radii, case.name,
            )
        )  # fmt: skip
        mixtures = extended.Mixtures(
            case.private, case.public, extended.array(weight), extended.array(complement)
        )
        for adjacency in ADJACENCIES:
            loss = torch.stack(losses[adjacency])
            if loss.isnan().any():
                report.failures.append(f"{case.name} order {order}: NaN among the losses")
            report.add(
                checks.check_mixtures(
                    mixtures, case.private, case.public, weight, complement, loss, orders,
                    adjacency, chosen, (case.name, order, radii),
                )
            )  # fmt: skip
    return report


def verdict(report: Report) -> None:
    assert report.values > 0
    assert not report.failures, (len(report.failures), report.failures[:5])


def tiny_cases(models: int, spread: float) -> Iterator[Case]:
    """Yield one small vocabulary of each kind for every dtype."""
    positions = {1: 4, 2: 3, 3: 2}.get(models, 1)
    for t, dtype in enumerate(cases.DTYPES):
        for k, kind in enumerate(KINDS):
            seed = 10_000 * models + 100 * int(spread) + 10 * t + k
            vocab = random.Random(seed).choice((2, 5, 9, 16, 33) if models < 1000 else (2, 7))
            noise = NOISES[seed % 4]
            private, public = ensemble(seed, kind, models, positions, vocab, spread, noise)
            name = f"{kind} N{models} V{vocab} spread{spread} noise{noise} {dtype} seed{seed}"
            yield Case(name, private.to(dtype), public.to(dtype))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("models", MODELS)
@pytest.mark.slow
def test_every_combination(models: int, spread: float, device: torch.device) -> None:
    report = Report()
    for case in tiny_cases(models, spread):
        report.add(check_case(case, device))
    verdict(report)


def wide_cases(models: int, spread: float) -> Iterator[Case]:
    """Yield vocabularies of a thousand tokens and more, for vectorised code; dtypes alternate."""
    turn = MODELS.index(models) + SPREADS.index(spread)
    for k, kind in enumerate(("near", *KINDS)):
        if models == 1000 and k != turn % 3:
            continue
        seed = 20_000 + 1000 * MODELS.index(models) + 10 * SPREADS.index(spread) + k
        noise = NOISES[(turn + k) % 4]
        vocab = 1024 + random.Random(seed).randrange(700 if models < 1000 else 16)
        dtype = torch.float32 if kind == "near" else cases.DTYPES[(turn + k) % 3]
        private, public = ensemble(seed, kind, models, 1, vocab, spread, noise)
        name = f"{kind} N{models} V{vocab} spread{spread} noise{noise} {dtype} seed{seed}"
        yield Case(name, private.to(dtype), public.to(dtype))


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("models", MODELS)
@pytest.mark.slow
def test_wide_vocabularies(models: int, spread: float, device: torch.device) -> None:
    report = Report()
    for case in wide_cases(models, spread):
        plan = PRODUCT if models <= 3 else DIAGONAL
        report.add(check_case(case, device, plan, rows=3, models=1))
    verdict(report)


@pytest.mark.parametrize("models", (1, 3, 100))
@pytest.mark.slow
def test_a_part_on_every_path(models: int, isa: str) -> None:
    """Each spread has a small and a wide case."""
    report, device = Report(), torch.device("cpu")
    for k, spread in enumerate(SPREADS if models < 100 else SPREADS[::2]):
        small, wide = list(tiny_cases(models, spread)), list(wide_cases(models, spread))
        report.add(check_case(small[k % len(small)], device, rows=2, models=1))
        report.add(check_case(wide[k % len(wide)], device, DIAGONAL, rows=1, models=1))
    verdict(report)


def special_cases() -> list[Case]:
    """Return the small corner cases, and the same inside a larger vocabulary."""
    return [
        *cases.canary(),
        *cases.masked(),
        *cases.identical(),
        *cases.corners(),
        *cases.planted(),
    ]


SPECIAL = special_cases()


@pytest.mark.parametrize("case", SPECIAL, ids=cases.ids(SPECIAL))
@pytest.mark.slow
def test_corners(case: Case, device: torch.device) -> None:
    small = case.private.shape[0] <= 3 or case.private.shape[2] < 100
    plan = PRODUCT if small else DIAGONAL
    verdict(check_case(case, device, plan, rows=6, models=3))


def test_a_sample_of_the_grid_at_70_digits(device: torch.device) -> None:
    """mpmath checks a seeded sample, and that extended precision can be trusted."""
    choose = random.Random(5)
    for _ in range(120):
        models, spread = choose.choice((1, 1, 2, 2, 3, 3, 100)), choose.choice(SPREADS)
        case = choose.choice(list(tiny_cases(models, spread)))
        if choose.random() < 0.25:
            case = choose.choice([*cases.canary(), *cases.masked()])
        order, radius = choose.choice(ORDERS), choose.choice(RADII)
        loss_order, adjacency = choose.choice(ORDERS), choose.choice(ADJACENCIES)
        i, b = choose.choice(case.rows)
        where = (case.name, order, radius, i, b)
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
        loss = adapmixed_ext.leave_one_out(
            moved.private, moved.public, result, orders=loss_order, adjacency=adjacency
        )[i, b].item()  # fmt: skip
        weight, complement = result.weight.cpu(), result.complement.cpu()
        w, c = weight[i, b].item(), complement[i, b].item()
        ball = oracle.Ball(case.private[i, b], case.public[b])
        assert not checks.weight_fault(ball, w, c, order, radius), (where, w, c)
        exact = checks.exact_loss(
            case.private[:, b], case.public[b], weight[:, b], complement[:, b], i, loss_order,
            adjacency,
        )  # fmt: skip
        assert checks.loss_holds(loss, exact), (where, loss_order, adjacency, loss, exact)
        pair = extended.array(weight), extended.array(complement)
        mixtures = extended.Mixtures(case.private, case.public, *pair)
        other = mixtures.losses([i], [loss_order], adjacency)[0, b, 0]
        assert abs(mpf(str(other)) - exact) <= 1e-12 * exact + 1e-15, (where, other, exact)
        if ball.masked:
            continue
        rows = extended.Rows(case.private[i, b : b + 1], case.public[b : b + 1])
        at = extended.exact_pair(*(value[i : i + 1, b] for value in pair))
        error = abs(
            mpf(str(rows.excess(*at, order)[0])) - ball.excess(*oracle.exact_weight(w, c), order)
        )
        assert error <= mpf(str(rows.uncertainty(order)[0])), (where, mp.nstr(error))


@pytest.mark.parametrize("found", REGRESSIONS, ids=[found.case.name for found in REGRESSIONS])
def test_what_once_failed(found: Regression, device: torch.device) -> None:
    """All bounds hold at 70 digits."""
    case = found.case.to(device)
    result = adapmixed_ext.project(
        case.private, case.public, order=found.order, radius=found.radius
    )
    weight, complement = result.weight.cpu(), result.complement.cpu()
    for i, b in case.rows:
        ball = oracle.Ball(case.private[i, b], case.public[b])
        w, c = weight[i, b].item(), complement[i, b].item()
        assert not checks.weight_fault(ball, w, c, found.order, found.radius), (w, c)
    projection: object = result
    if found.weight is not None:
        weight = torch.full_like(weight, found.weight)
        complement, projection = 1 - weight, weight.to(device)
    equal = bool((found.case.private == found.case.private[:1]).all()) and len(weight) > 1
    for adjacency in ADJACENCIES:
        loss = adapmixed_ext.leave_one_out(
            case.private, case.public, projection, orders=found.loss_orders, adjacency=adjacency
        )
        if equal and (adjacency == "add_remove" or torch.equal(case.private[0], case.public)):
            assert (loss == 0).all(), loss
        for i, b in case.rows:
            for k, order in enumerate(found.loss_orders):
                exact = checks.exact_loss(
                    found.case.private[:, b], found.case.public[b], weight[:, b],
                    complement[:, b], i, order, adjacency,
                )  # fmt: skip
                assert checks.loss_holds(loss[i, b, k].item(), exact), (adjacency, i, b, order)
