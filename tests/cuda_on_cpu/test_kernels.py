"""Every operator's kernels against the oracles, and the same bits in every order of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import cases
import checks
import fuzzed
import oracle
import plans
import pytest
import reports
import simulated
import torch
import workload
from plans import INF, Case, Plan
from torch import Tensor

import adapmixed_ext

MOST = 2_500  # logits; a fibre takes some 50 ns from barrier to barrier
# As the kernels take longer here, fewer numbers.
FEW = Plan(
    balls=((18.0, 3.6), (3.0, 0.03), (2.5, 0.4), (64.0, 1e-6)), weighings=((18.0, 3.6),),
    orders=(1.5, 18.0, 64.0), clip_orders=(1.5, 18.0), renyi_orders=(1.01, 18.0, 1024.0),
    boxes=plans.BOXES[:4], pools=plans.POOLS[::2],
    screens=Plan.screens[1:4], models=3,
)  # fmt: skip


def check(operators: list[str], case: Case, plan: Plan, *orders: int, **how: Any) -> None:
    """Check operators in some orders of threads, whose bits must agree; how: of the simulation."""
    first: list[Tensor] = []
    answers: list[Tensor] = []

    def recorded(operator: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = operator(*arguments, **named)
        answers.extend(workload.parts(*(result if isinstance(result, tuple) else (result,))))
        return result

    for order in orders:
        answers.clear()
        with simulated.kernels(*simulated.ORDERS[order % 3], **how):
            report = checks.run(operators, case, plan, reports.Through(recorded))
        assert report.values > 0
        assert not report.failures, "\n".join(report.failures[:5])
        first = first or answers.copy()
        for expected, other in zip(first, answers, strict=True):
            assert torch.equal(expected.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0)), order


TABLE = [
    case
    for case in (
        *cases.small()[:6], *cases.masked(), *cases.identical()[1:3], *cases.strided()[:1],
        *cases.canary(), *cases.corners(), *cases.demanding(), *cases.offsets()[::4],
        *cases.boxed()[-2:],
    )
    if case.private.numel() <= 600
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(TABLE)), ids=plans.ids(TABLE))
def test_contract(index: int) -> None:
    check([*checks.CHECKS], TABLE[index], FEW, index, errors=simulated.ERRORS[index % 3])


def ensemble(models: int, vocab: int, *, shift: float, noise: float, positions: int = 2) -> Any:
    """Return logits and their public row: a common shift, and noise for each model."""
    private, public = plans.logits(0, models, positions, vocab, 3.0, noise)
    generator = torch.Generator().manual_seed(1)
    return private + shift * torch.randn(positions, vocab, generator=generator), public


def weight_of(value: float) -> tuple[Tensor, ...]:
    return (torch.full((1, 1), value, dtype=torch.float64),)


def lost() -> list[tuple[Case, int]]:
    """Return ensembles whose losses need several tiles, doubles or lists, and absent members."""
    near, shared = (ensemble(33, 333, shift=s, noise=n) for s, n in ((0.0, 1.5), (1.5, 0.3)))
    for private, public in (near, shared):
        private[..., 5::50] = public[..., 5::50] = -INF
        private[3, 0, 7] = -INF
    double = ensemble(20, 300, shift=0.0, noise=0.5)  # a canary, a token nearly lost, a rare one
    double[0][4, :, 30] += 9.0
    double[0][:, :, 40] -= 12.0
    double[1][:, 50], double[0][:, :, 50] = -60.0, -50.0
    end = ensemble(40, 256, shift=0.0, noise=0.5)  # errors count most at the interpolants' end
    end[0][..., 200:] += 2.0
    beyond = ensemble(16, 256, shift=0.0, noise=0.1)  # an excess beyond the range of floats
    beyond[0][0, :, 3] += 4.5
    groups = ensemble(100, 150, shift=0.3, noise=1.0)  # more models than a group
    groups[0][70, :, 3] += 8.0
    listed = ensemble(70, 200, shift=0.0, noise=2.0)  # nearly all tokens, for many models
    absent = ensemble(12, 200, shift=0.5, noise=0.5)
    answered = ensemble(20, 192, shift=0.0, noise=0.5, positions=4)
    for position, token in enumerate((1, 100, 190)):  # masked, but all models answer it
        answered[1][position, token] = -INF
    bfloat16 = (rows.bfloat16() for rows in near)
    return [
        (Case("near", *near, orders=(2.0, 3.0, 7.5, 32.0)), 0),
        (Case("near-bfloat16", *bfloat16, orders=(2.0, 32.0)), 0),
        (Case("shared", *shared, orders=(2.0, 3.0, 7.5, 32.0)), 0),
        (Case("double", *double, orders=(2.0, 8.0), weights=weight_of(0.9999)), 0),
        (Case("end", *end, orders=(100.0,), weights=weight_of(0.9)), 0),
        (Case("beyond", *beyond, orders=(200.0,), weights=weight_of(1.0)), 0),
        (Case("groups", *groups, orders=(2.0, 30.0), weights=weight_of(0.8)), 0),
        (Case("listed", *listed, orders=(2.0, 60.0, 7.5), weights=weight_of(0.7)), 0),
        (Case("absent", *absent, orders=(3.0,)), 38),
        *((case, 0) for case in cases.demanding() if case.name.startswith("agreeing")),
        (Case("answered", *answered, orders=(2.0,), weights=weight_of(0.3)), 0),
    ]


LOST = lost()


@pytest.mark.parametrize("adjacency", Plan.adjacencies)
@pytest.mark.parametrize("index", range(len(LOST)), ids=[case.name for case, _ in LOST])
def test_losses_of_several_tiles(index: int, adjacency: str) -> None:
    case, absent = LOST[index]
    plan = Plan(
        weighings=() if case.weights else ((3.0, 0.03),), random_weights=False, absent=absent,
        adjacencies=(adjacency,), models=100,
    )  # fmt: skip
    check(["leave_one_out"], case, plan, 0, 1, 2)
    if case.name == "listed":
        check(["leave_one_out"], case, plan, 0, sizes_of_a_gpu=True)


def tiles() -> list[Case]:
    """Return short rows that still fill several tiles, each with rare tokens."""
    private, public = plans.logits(750, 3, 1, 520, 3.0, 0.7)
    public[:, ::9] = private[:, :, ::9] = -800.0
    public[:, 4::9] = private[:, :, 4::9] = -INF
    private[0, :, ::27] += 40.0
    private[:, :, 5::31] -= 800.0  # rare in the mixture alone
    found, found_public = plans.logits(753, 4, 1, 260, 2.0, 0.02)
    # One thread of `project` finds a fact that it must tell the others.
    found_public[:, 150] = found[1:, :, 150] = -INF  # uncovered by the first model
    found_public[:, 203] = found[:, :, 203] = -800.0
    found[1, :, 203] = -650.0  # rare, but decides the first constraint
    found[2, :, 203] = -1000.0  # decides the reverse constraint at order 256
    rows = [
        Case("rare", private, public),
        Case("apart", *plans.logits(751, 3, 1, 520, 80.0, 80.0)),  # sums that overflow
        Case("bfloat16", private.bfloat16(), public.bfloat16()),
        # Single precision serves this case, also in tiles that have no token beyond its reach.
        Case("floats", *plans.logits(752, 4, 1, 400, 3.0, 0.5)),
        Case("found-by-one", found, found_public, ((18.0, 3.6), (3.0, 0.03), (256.0, 0.3))),
    ]
    return [dataclasses.replace(case, close=False) for case in rows]


@pytest.mark.parametrize("index", range(5))
def test_tiles(index: int) -> None:
    """delete_barriers.py runs this test alone."""
    check([*checks.CHECKS], tiles()[index], FEW, index)


def weighed(vocab: int) -> tuple[Tensor, Tensor]:
    """Return rows at any alignment: a mask on one side, and log-sum-exps far apart."""
    private, public = ensemble(5, vocab, shift=0.0, noise=1.2, positions=1)
    private[1] += 300.0
    private[2, 0, vocab // 2 + 1 :] = -INF
    private[:, 0, -1:] -= 0.5
    if vocab > 3:
        public[0, 2], private[:4, 0, 2] = -INF, -INF
    return private, public


def raised_and_lowered(vocab: int) -> tuple[Tensor, Tensor]:
    """Return a row whose tokens all matter equally, half of them forward and half in reverse."""
    sign = 1.0 - 2.0 * (torch.arange(vocab) % 2)
    noise = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(0))
    return 6.0 * sign + 0.01 * noise, torch.zeros(1, vocab)


# Large targets, of which few groups of tokens matter; and small ones: chains of multiplications,
# powers, and careful terms.
LARGE, SMALL = ((18.0, 3.6), (2.5, 20.0)), ((3.0, 0.03), (64.0, 0.01), (17.5, 0.03), (2.5, 1e-4))
REVERSE, REVERSE_PUBLIC = plans.logits(2, 1, 1, 9001, 1.0, 0.0)
WEIGHED = [
    *(Case(f"ordinary-{dtype}", *(rows.to(dtype) for rows in weighed(1900)), (*LARGE, *SMALL))
      for dtype in plans.DTYPES),
    *(Case(f"V{vocab}-{dtype}", *(rows.to(dtype) for rows in weighed(vocab)),
           ((18.0, 3.6), (64.0, 0.4), (3.0, 0.03), (2.5, 0.4)))
      for vocab, dtype in ((2, torch.bfloat16), (3, torch.float32), (1023, torch.bfloat16),
                           (1025, torch.float32))),
    *(Case(f"all-matter-{vocab}-{dtype}", *(rows.to(dtype) for rows in raised_and_lowered(vocab)),
           ((18.0, 1.2), (64.5, 0.4)))
      for vocab, dtype in ((700, torch.float32), (14_000, torch.float32), (7000, torch.bfloat16))),
    # Only tokens that the model lacks decide, and they take a weight near 1.
    Case("reverse", REVERSE + torch.where(torch.arange(9001) % 4 > 0, -9.0, 0.0), REVERSE_PUBLIC,
         ((18.0, 3.6),)),
]  # fmt: skip


@pytest.mark.parametrize("errors", simulated.ERRORS)
@pytest.mark.parametrize("case", WEIGHED, ids=plans.ids(WEIGHED))
def test_weights_of_several_tiles(case: Case, errors: str) -> None:
    orders = (0, 1, 2) if case.public.shape[1] <= 2000 and errors == "random" else (2,)
    check(["project"], case, Plan(), *orders, sizes_of_a_gpu=True, errors=errors)


@pytest.mark.parametrize("dtype", plans.DTYPES)
def test_pools_of_several_parts_and_tiles(dtype: torch.dtype) -> None:
    """Tokens 1100: two parts and five tiles, the last ones short; more rows than a block takes."""
    private, public = plans.logits(5, 19, 2, 1100, 3.0, 0.8)
    private[2, :, 570], public[:, 5] = -INF, -INF
    case = Case("parts", private.to(dtype), public.to(dtype))
    check(["log_pool"], case, Plan(pools=(plans.POOLS[0], plans.POOLS[4])), 2)
    rows = case.private, case.public
    with simulated.kernels("reverse"):
        pool = adapmixed_ext.log_pool(*rows, lower=-0.25, upper=1.0, scale=2.0)
    exact = oracle.log_sum_exp(oracle.array(rows[0]))
    assert abs(exact - pool.private_lse.numpy()).max() < 5e-14  # these are in double


@pytest.mark.parametrize("models", [0, 85, pytest.param(700, marks=pytest.mark.slow)])
def test_parts_and_tiles_of_a_gpu(models: int) -> None:
    """N = 85 takes 48 800 bytes of shared memory, of which 48 KiB need no asking.

    700 take tiles of 32 tokens, and two groups.
    """
    operators = ["log_pool", "clip_project", "sample", "renyi_divergence"]
    plan = dataclasses.replace(FEW, pools=plans.POOLS[:1], boxes=plans.BOXES[:1])
    case = Case("gpu", *plans.logits(6, 2, 1, 4500, 2.0, 0.7))
    if models:
        operators, plan = ["leave_one_out"], Plan(weighings=(), random_weights=False, models=3)
        rows = ensemble(models, 150 if models == 85 else 40, shift=0.0, noise=0.5)
        case = Case("gpu", *rows, orders=(3.0,), weights=weight_of(0.25))
    check(operators, case, plan, 1, sizes_of_a_gpu=True)


def test_a_row_of_more_chunks_than_threads() -> None:
    """Each thread takes two chunks of 256 tokens; a draw may end in either."""
    case = Case("chunks", *plans.logits(6, 1, 3, 66_000, 2.0, 0.7))
    check(["sample"], case, FEW, 1)


def test_rows_that_are_alike(device_or_cpu: Any) -> None:
    """Identical models lose next to nothing; emptied ones nothing, others something.

    A row that differs by a bit that floats do not see, with the same sum, is not emptied.
    """
    private, public = ensemble(1, 129, shift=1.0, noise=0.0)
    private[..., -1] += 8.0
    same = private.expand(9, 2, 129)
    alike, q = (rows + 12 for rows in ensemble(20, 300, shift=0.0, noise=0.5))
    near = torch.linspace(5e-5, 6e-5, 100)
    above = torch.nextafter(near, torch.tensor(1.0))
    bit = (near * 2.6825111 == above * 2.6825111).nonzero()[0, 0]  # kOctavesPerNat
    q[:, 5] = near[bit]
    alike[:2], alike[1, :, 5] = q, above[bit]
    with device_or_cpu:
        projection = adapmixed_ext.project(same, public, order=3, radius=0.03)
        loss = adapmixed_ext.leave_one_out(same, public, projection, orders=[3.0, 64.0])
        assert (loss <= 1e-11).all()
        projection = adapmixed_ext.project(alike, q, order=3, radius=0.03)
        loss = adapmixed_ext.leave_one_out(alike, q, projection, orders=3.0, adjacency="zero_out")
    assert (loss[0] == 0).all() and (loss[1:] > 0).all() and (loss[1] < 1e-12).all()


@pytest.fixture(params=[False, True], ids=["cpu", "simulated"])
def device_or_cpu(request: pytest.FixtureRequest) -> Any:
    return simulated.kernels() if request.param else torch.no_grad()


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in (1, 2, 3, 4, 5, 100, 101))]
)
def test_fuzzed_calls(batch: int) -> None:
    """The last batches are in tiles of a GPU."""
    gpu = batch >= 100
    most = 1500 if gpu else MOST if batch else 400
    for seed in range(30 * batch, 30 * batch + (30 if batch else 20)):
        case, plan = fuzzed.fuzzed(seed)
        if case.private.numel() <= most:
            check([*checks.CHECKS], case, plan, seed, sizes_of_a_gpu=gpu)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", workload.NAMES)
def test_the_order_of_threads_and_the_batch_do_not_matter(name: str, dtype: torch.dtype) -> None:
    x = workload.make(3, 5, 2, 147, dtype)
    runs = []
    for order in simulated.ORDERS:
        with simulated.kernels(*order):
            runs.append(workload.run(name, x))
    assert workload.same(runs[0], runs[1]) and workload.same(runs[0], runs[2])
    if name == "draws":
        assert workload.same(runs[0], workload.run(name, x))
        return
    with simulated.kernels("random", 3):
        for b in range(2):
            for part, many in zip(workload.OPERATIONS[name](x.position(b)), runs[0], strict=True):
                assert torch.equal(part, many.narrow(part.shape.index(1), b, 1))


@pytest.mark.parametrize("vocab", [40, 1100])
def test_a_log_sum_exp_has_the_same_bits_wherever_its_row_is(vocab: int) -> None:
    """Alone, among the rows of a batch, and in each operator that takes it: one or two parts."""
    rows = 3 * torch.randn(9, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    with simulated.kernels("reverse"):
        lse, status = torch.ops.adapmixed.log_sum_exp(rows, "private_logits")
        for model, position in ((0, 0), (8, 0), (3, 1)):
            single = torch.ops.adapmixed.log_sum_exp(rows[model, position : position + 1], "rows")
            assert torch.equal(single[0], lse[model, position][None])
        projection = adapmixed_ext.project(rows[1:], rows[0], order=18.0, radius=3.6)
        clipping = adapmixed_ext.clip_project(rows[1:], rows[0], lower=0.5, upper=2.0)
    assert (status == 0).all()
    torch.testing.assert_close(lse, rows.double().logsumexp(-1), rtol=5e-16, atol=3e-14)
    for result in (projection, clipping):
        assert torch.equal(result.private_lse, lse[1:])
        assert torch.equal(result.public_lse, lse[0])
