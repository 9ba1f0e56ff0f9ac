"""Write golden values of the public doors, or compare this version with them.

    python scripts/goldens.py --write scripts/goldens.json
    python scripts/goldens.py --compare scripts/goldens.json [--only operators/ball]

About 200 seeded cases inside the limits go through the operators and mechanisms (with every
instruction set of this machine), the accountant, the ledger, the planner, the demonstration and the
audits. The file holds the results of the scalar path. Texts, tokens, verdicts, counts and accounted
charges must be identical; other numbers must agree within `TOLERANCES`. Charges on another
instruction set count as other numbers. A case of the file may have a "reason", which maps a field
to a sentence: a difference in that field is printed and is no failure.

Recorded again with the active vocabulary: kept tokens ascend by number, so that tokens drawn under
a top-k moved, and other numbers by at most 2e-8. Recorded again with members whose first weights
are drawn otherwise, and whose gradients are summed in another order: the demonstration's answers
moved. Recorded again with boxes of shape 8 and clips from 0 at scale 2: four plans moved. Recorded
again with training by `cross_entropy` and single sums of active rows: the demonstration's numbers
moved by at most 2e-6; and with boxes of shapes up to 64 for those of 2: four plans moved. Recorded
again with `project` in single precision: weights moved by at most 3e-5, losses by 4e-5; with
`renyi_divergence`: at most 3e-5 above what stood there, +inf beyond e^709; and with `screen` in
doubles alone: a divergence whose sum is beyond e^600 is infinite. The residual of a copy of the
public row is 1. Recorded again without the claims of two audits that only their own code made; and
with fewer claims of five audits, one of which has an unprotected ensemble as a control of each;
without the ε of fewer answers than four plans are for; and with losses that serve small ratios in
single precision, and large targets that read fewer tokens: losses moved by at most 4e-5, an ε of
the demonstration by 3e-6.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adapmixed as am
import adapmixed_ext as ops
from adapmixed import AdaPMixED, ClippedLogPool, ClippedMixing, PMixED, cli, privacy
from adapmixed.data import demo_base
from adapmixed.privacy import planner
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed_ext import _C
from adapmixed_lab.audit import Effort, run
from adapmixed_lab.reproduce.published import FixedLoss

# Relative, by the name of a field; the other is that of losses, weights and perplexities. Losses
# are bounds, to which each instruction set adds what it may have lost, at most 1e-4 of them.
TOLERANCES = {"charge": 0.0, "noise": 0.0, "epsilon": 1e-9, "parts": 1e-9}
TOLERANCE = 5e-5


# Inputs.
def normal(seed: Sequence[int], *shape: int) -> Any:
    """Return float64 numbers of mean 0 and variance 1 in ±3.5.

    NumPy promises the raw bits of PCG64 for all versions, unlike the methods of default_rng, and
    torch promises no stream. Each number is a sum of four 16-bit integers, without rounding.
    """
    raw = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(math.prod(shape))
    return (raw.view(np.uint16).reshape(*shape, 4).sum(-1, dtype=np.int64) - 131070) / 37837


@lru_cache(maxsize=1)
def rows(spec: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return private (N, B, V) and public (B, V) logits for "KIND N B V DTYPE"."""
    kind, *sizes, dtype = spec.split()
    shape = tuple(int(size) for size in sizes)
    public = 2.5 * normal([seed, 0], *shape[1:])
    private = public + 0.05 * normal([seed, 1], *shape)
    if kind == "confident":
        public[:, 1] += 12.0
    if kind in ("far", "masked", "emptied", "confident"):
        private = 2.5 * normal([seed, 1], *shape)
    if kind == "shared":
        private += 2.0 * normal([seed, 2], *shape[1:])
    if kind == "rare":  # three tokens have public probabilities from e^-69.8 to e^-69.4
        sums = np.log(np.exp(public).sum(-1, keepdims=True))
        public[:, -3:] = np.ceil(4 * (sums - 69.7)) / 4
        private[..., -3:] = public[:, -3:] + [3.0, 20.0, 50.0]
    if kind == "same":
        private[:] = public
    if kind == "emptied":
        private[0] = private[-1] = public
    if kind == "masked":
        public[:, ::5], private[..., ::5], private[..., 1::7] = -math.inf, -math.inf, -math.inf
    private, public = (torch.from_numpy(logits.astype(np.float32)) for logits in (private, public))
    return private.to(getattr(torch, dtype)), public.to(getattr(torch, dtype))


# What is stored of a result.
def plain(value: Any) -> Any:
    """Return JSON values: numbers as they are, large arrays as a digest and sums."""
    value = value.numpy() if isinstance(value, torch.Tensor) else value
    if isinstance(value, np.ndarray):
        large = value.size > 12 and value.dtype == np.float64
        value = sketch(value) if large else value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def sketch(array: Any) -> dict[str, Any]:
    """Return a digest of the values to 20 bits, and sums that show how much they changed."""
    flat = array.ravel()
    values = np.where(np.isfinite(flat), flat, 0.0)
    bits, exponents = np.frexp(values)
    kept = np.rint(bits * 2.0**20).tobytes() + exponents.tobytes() + flat[values != flat].tobytes()
    # Weights between 1 and 2 by the place show that values have changed places.
    weighted = values * (1 + np.arange(flat.size) * 0.6180339887498949 % 1)
    size = float(np.abs(weighted).sum())
    logs = np.log2(np.abs(values), out=np.zeros_like(values), where=np.abs(values) > 1e-30)
    return {
        "shape": list(array.shape),
        "digest": hashlib.sha256(kept).hexdigest()[:16],
        "size": size,
        "largest": float(np.abs(values).max()),
        "sums": [float(weighted[at::8].sum()) / (size or 1.0) for at in range(8)],
        "logs": [float(logs[at::8].mean()) for at in range(8)],
        "infinite": int((values != flat).sum()),
        "first": plain(flat[:3].tolist()),
    }


def tried(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the type of its error."""
    try:
        return call()
    except Exception as error:
        return {"error": type(error).__name__}


def numbers(guarantee: Any) -> dict[str, Any]:
    """Return a guarantee without its sentence."""
    names = "epsilon delta kind adjacency method order orders queries public_queries budget caveats"
    return {name: getattr(guarantee, name) for name in names.split()}


def printed(main: Callable[[Sequence[str]], int], *arguments: object) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main([str(argument) for argument in arguments])
    return status, output.getvalue()


def commanded(
    main: Callable[[Sequence[str]], int], *arguments: object, file: Path
) -> dict[str, Any]:
    """Run a command; return the JSON that it wrote to a file, and its exit status."""
    status, _ = printed(main, *arguments)
    return {**json.loads(file.read_text(encoding="utf-8")), "status": status}


# Operators.
ROWS = (
    "near 1 1 2 float32", "far 1 3 111 float32", "same 3 2 111 bfloat16", "far 2 2 2 float16",
    "shared 7 2 1000 float32", "masked 3 3 111 float32", "masked 5 1 32000 bfloat16",
    "rare 3 2 111 float32", "rare 2 1 50257 float32", "emptied 5 2 111 float16",
    "confident 16 2 257 float32", "near 100 1 50257 float32", "far 4 2 50257 bfloat16",
    "near 1000 1 111 float32", "far 65536 1 2 float32", "shared 12 4 128 float16",
    "emptied 3 1 999 float32", "near 33 3 65 bfloat16", "rare 9 2 500 float32",
)  # fmt: skip
BALLS = ((1.001, 0.5), (1.5, 0.03), (2.0, 1.0), (18.0, 3.6), (18.0, 0.0), (64.0, 0.1),
         (1024.0, 0.5), (3.0, 10.0), (7.25, 1e-5), (128.0, 4.0), (2.5, 0.3))  # fmt: skip
ORDERS = ((18.0,), (2.0, 8.0, 32.0), (1.5,), (1024.0,), (3.0, 64.0))
BOXES = ((0.5, 2.0), (0.0, 50.0), (0.78, 2.7), (0.001, 1000.0), (0.9, 1.05), (1.0, 1.0), (0.0, 1e6))
POOLS = ((-0.25, 1.0, 2.0), (0.0, 2.0, 4.0), (-32.0, 32.0, 5.0), (-1.0, 0.0, 1.0),
         (-5.0, 5.0, 33.0), (-0.25, 0.5, 0.0))  # fmt: skip
SCREENS = ((1e-4, 1e-2, 4.5, 60), (0.5, 0.05, 0.3, 4), (1.0, 1e-6, math.inf, 1), (0.0, 0.1, 2.0, 9))


def answered(private: Any, public: Any, projection: Any) -> dict[str, Any]:
    """Return the distribution that a projection gives, and eight draws from it."""
    mixture, rng = ops.mixture(private, public, projection), SeededRandom(len(private))
    drawn = [ops.sample(mixture, public, rng=rng) for _ in range(8)]
    at_top = ops.log_prob(private, public, projection, public.argmax(-1))
    return {"p": mixture, "log_prob": at_top, "tokens": drawn}


def operator(name: str, at: int) -> dict[str, Any]:
    """Return the results of one operator, and of those that take its result."""
    private, public = query = rows(ROWS[at], at)
    orders, slots = ORDERS[at % len(ORDERS)], min(len(private) + at, 65_536)
    active = torch.from_numpy(normal([at, 5], *private.shape[:2]) > -0.5) if at % 3 == 1 else None
    some: Any = {"active": active, "num_models": slots}
    if name == "ball":
        order, radius = BALLS[at % len(BALLS)]
        ball = ops.project(private, public, order=order, radius=radius)
        removed: Any = {"adjacency": ("zero_out", "add_remove")[at % 2], "num_models": slots}
        loss = ops.leave_one_out(private, public, ball, orders=orders, **removed)
        half = ops.leave_one_out(private, public, torch.full_like(ball.weight, 0.5), orders=2.0)
        return {"weight": ball.weight, "loss": loss, "half": half, **answered(*query, ball)}
    if name == "box":
        lower, upper = BOXES[at % len(BOXES)]
        box = ops.clip_project(private, public, lower=lower, upper=upper, orders=orders, **some)
        loss = ops.leave_one_out(private, public, box, orders=4.0, adjacency="zero_out")
        result = {"scale": box.log_scale.exp(), "residual": box.residual, "cost": box.charge}
        return {**result, "loss": loss, **answered(*query, box)}
    if name == "pool":
        some |= dict(zip(("lower", "upper", "scale"), POOLS[at % len(POOLS)], strict=True))
        pool = ops.log_pool(private, public, **some)
        result = {"normaliser": pool.log_normaliser.exp(), "span": pool.span}
        return {**result, **answered(*query, pool)}
    if name == "divergence":
        return {"both": ops.renyi_divergence(private, public, (1.001, 2.0, 18.0, 1024.0))}
    weight, sigma, threshold, top_k = SCREENS[at % len(SCREENS)]
    noise = ops.gaussian((len(public), top_k), sigma=sigma, rng=SeededRandom(at))
    some |= {"weight": weight, "threshold": threshold, "top_k": top_k, "order": orders[0]}
    screening = ops.screen(private, public, noise, **some)
    return {"noise": noise, "divergence": screening.divergence, "passed": screening.passed}


# Mechanisms, each with the arguments of its accountant, and ledgers.
MECHANISMS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (AdaPMixED(18.0, 0.2), {}),
    (AdaPMixED(3.0, 0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, screen_top_k=4), {}),
    (AdaPMixED(2.0, 0.5, screen="public", threshold=1.0, sigma=1e-6, adjacency="add_remove"), {}),
    (AdaPMixED(1024.0, 5e-4, screen=None, loss_orders=(2.0, 8.0, 32.0, 256.0)), {}),
    (FixedLoss(15.0, 0.01, screen_weight=1e-3), {"adjacency": "replace_one"}),
    (PMixED(8.0, 1e-5, 64, 3.0), {}),
    (PMixED(8.0, 1e-5, 64, 10.0, adjacency="replace_one"), {"adjacency": "replace_one"}),
    (PMixED(0.5, 1e-15, 2**40, 1024.0), {"delta": 1e-15}),
    (PMixED(3.0, 0.1, 40, 1.5), {"delta": 0.1}),
    (ClippedMixing(0.5, 2.0, 100), {}),
    (ClippedMixing(0.0, 6.0, 40, public_confidence=0.5), {"adjacency": "replace_one"}),
    (ClippedMixing(0.5, 4.0, order=8.0), {"epsilon": 1.6}),
    (ClippedMixing(0.5, 4.0, order=8.0, public_confidence=0.3),
     {"epsilon": 8.0, "adjacency": "replace_one"}),
    (ClippedLogPool(-0.25, 1.0, 2.0, 12), {}),
    (ClippedLogPool(-0.25, 1.0, 2.0), {"epsilon": 1.0}),
    (ClippedLogPool(0.0, 2.0, public_confidence=0.4),
     {"epsilon": 4.0, "adjacency": "replace_one"}),
    (ClippedLogPool(-5.0, 5.0, 33.0), {"delta": 1e-15}),
    (am.PublicOnly(), {}), (am.Unprotected(), {}), (am.UnprotectedPool(2.0), {}),
)  # fmt: skip
ANSWERED = (
    "far 5 3 111 float32", "rare 2 2 257 bfloat16", "emptied 24 3 1000 float32",
    "same 3 2 111 float16", "masked 5 2 111 float32", "shared 64 2 500 float32",
)  # fmt: skip


def ask(mechanism: Any, accountant: Any, query: Any, rng: Any, **shape: Any) -> Any:
    """Propose, charge and release the answers to one call."""
    proposal = mechanism.propose(*query, rng=rng, **shape)
    accountant.charge(proposal)
    answer = proposal.release()
    drawn = answer.tokens if isinstance(rng, SeededRandom) else None
    return {"tokens": drawn, "log_prob": answer.log_prob, "public": answer.public}


def answers(at: int, spec: str, ledger: Path | None = None) -> dict[str, Any]:
    """Answer ten calls, the last one for targets. A ledger is closed and continued once."""
    (mechanism, options), tries, spent = MECHANISMS[at], [], []
    rng = SecureRandom() if ledger else SeededRandom(at)
    accountant = am.Accountant(**{"delta": 1e-5, **options}, path=ledger)
    for step in range(10):
        call = rows(spec, 100 * at + step)
        shape: dict[str, Any] = {"temperature": 1.5, "top_k": 40} if step % 3 == 2 else {}
        shape |= {"targets": call[1].argmin(-1)} if step == 9 else {}
        tries.append(tried(partial(ask, mechanism, accountant, call, rng, **shape)))
        spent += [accountant.limit, accountant.spent] if "epsilon" in options else []
        if ledger and step == 5:
            tries.append(tried(partial(ask, mechanism, accountant, call, SeededRandom(0))))
            accountant.close()
            accountant = am.Accountant(**{"delta": 1e-5, **options}, path=ledger)
    accountant.close()
    counts = [accountant.queries, accountant.planned]
    result = {"answers": tries, "charge": spent, "counts": counts, "parts": accountant.breakdown()}
    if ledger:
        lines = printed(cli.main, "ledger", "show", ledger)[1].splitlines()
        fields = dict(line.split(": ", 1) for line in lines if ": " in line)
        shown = {"queries": int(fields["queries"]), "kind": fields["kind"]}
        result |= {"shown": shown | {"epsilon": float(fields["epsilon"])}}
        result |= {"verified": printed(cli.main, "ledger", "verify", ledger)[0]}
        result |= {"read": numbers(am.read_ledger(ledger).guarantee)}
    return result | numbers(accountant.guarantee())


# The accountant without mechanisms, and the planner.
LOSSES = [1e-3 * np.abs(normal([orders], 10, 40, orders)) for orders in (1, 3)]
EVENTS: dict[str, list[Any]] = {
    "Rényi bounds": [privacy.RenyiBound(3.0, 1e-2, 10, 64), privacy.Caveat("positions")],
    "planned Rényi bounds": [privacy.RenyiBound(64.0, 1e-4, 10, 5, budget=1000)],
    "a fixed loss, screened": [privacy.RenyiBound(18.0, 1e-3, 50, 300),
                               privacy.GaussianScreening(50, 300, 1e-3, 1e-2)],
    "log pools": [privacy.BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 500)],
    "two log pools": [privacy.BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 50),
                      privacy.BoundedRangeAnswer(4.0, 0.0, 0.5, 64, 9)],
    "planned log pools": [privacy.BoundedRangeAnswer(4.0, -0.25, 0.5, 100, 3, 2**40)],
    "planned boxes": [privacy.ClippedAnswer(0.78, 2.7, 100, 10, 1024), privacy.PublicAnswer(7)],
    "boxes from 0": [privacy.ClippedAnswer(0.0, 4.0, 2, 1, 10)],
    "losses": [privacy.LeaveOneOutLoss((18.0,), LOSSES[0], "zero_out"),
               privacy.GaussianScreening(10, 40, 1e-4, 1e-2)],
    "losses of three orders": [
        privacy.LeaveOneOutLoss((2.0, 8.0, 32.0), LOSSES[1], "add_remove")],
    "an unprotected answer": [privacy.PublicAnswer(7), privacy.UnprotectedAnswer(1)],
}  # fmt: skip
BOX, POOL = {"lower": 0.78, "upper": 2.7}, {"lower": -0.25, "upper": 1.0, "scale": 2.0}
PLANS: dict[str, Callable[[], Any]] = {
    "ε = 1, N = 100, T = 1024": partial(planner.plan, 1.0, 1e-5, 100, 1_024),
    "ε = 3, N = T = 64, replace-one": partial(planner.plan, 3.0, 1e-5, 64, 64, "replace_one"),
    "ε = 8, δ = 1e-15": partial(planner.plan, 8.0, 1e-15, 1_000, 99_840),
    "ε = 0.3, δ = 0.1": partial(planner.plan, 0.3, 0.1, 65_536, 1_000_000),
    "ε of a box": partial(planner.epsilon_of, 1e-5, 100, 1_024, "zero_out", **BOX),
    "ε of a pool, δ = 0.1": partial(planner.epsilon_of, 0.1, 64, 2**40, "zero_out", **POOL),
    "T of a box": partial(planner.queries_for, 1.0, 1e-5, 100, "replace_one", **BOX),
    "T of a pool": partial(planner.queries_for, 1.0, 1e-5, 100, "zero_out", **POOL),
    "N of a box": partial(planner.models_for, 1.0, 1e-5, 1_024, "zero_out", **BOX),
    "N of a pool": partial(planner.models_for, 1.0, 1e-15, 1_024, "zero_out", **POOL),
}


def found(call: Callable[[], Any]) -> Any:
    """Return the numbers of plans, or the one that the settings allow."""
    result = call()
    return [vars(plan) for plan in result] if isinstance(result, list) else result


def stated(events: list[Any], delta: float) -> dict[str, Any]:
    accountant = am.Accountant(delta).add(events)
    ways = ("zero_out", "replace_one")
    facts = {way: tried(lambda: numbers(accountant.guarantee(way))) for way in ways}  # noqa: B023
    epsilons = [tried(partial(accountant.get_epsilon, d)) for d in (1e-15, 1e-5, 0.1)]
    counts = [accountant.queries, accountant.planned]
    return {**facts, "epsilon": epsilons, "parts": accountant.breakdown(), "counts": counts}


# The demonstration and the audits.
METHOD = ("perplexity", "queries", "epsilon", "delta", "kind", "adjacency", "screened")
SECONDS = {"tokens": 1.0, "bounds": 0.1, "screening": 0.1, "sampler": 1.0, "budgets": 0.1,
           "adversary": 0.1, "odometer": 0.1, "canaries": 0.1}  # fmt: skip


@lru_cache(maxsize=1)
def trained(folder: Path) -> dict[str, Any]:
    """Train the demonstration's ensemble; return perplexities and guarantees of its methods."""
    options = ("--out", folder, "--queries", 128)
    report = commanded(cli.main, "demo", *options, file=folder / "report.json")
    return {method["name"]: {name: method[name] for name in METHOD} for method in report["methods"]}


def continued(folder: Path, at: int) -> dict[str, Any]:
    """Return texts of the trained ensemble, half of the mechanisms with another temperature."""
    trained(folder)
    mechanism, options = MECHANISMS[at]
    accountant = am.Accountant(**{"delta": 1e-5, **options})
    ensemble = am.Ensemble.from_pretrained(demo_base(), folder / "ensemble")
    generator = am.PrivateGenerator(ensemble, mechanism, accountant, rng=SeededRandom(at))
    shape: dict[str, Any] = {"temperature": 0.7, "top_k": 40} if at % 2 else {}
    prompts = ["The try statement", "A class definition"]
    texts = generator.generate(prompts, max_new_tokens=20, **shape)
    spent = accountant.spent if "epsilon" in options else None
    return {"texts": texts, "charge": spent, **numbers(accountant.guarantee())}


def audited(name: str) -> dict[str, Any]:
    findings = [*run([name], Effort(SECONDS[name], 0))]
    verdicts = {f"{f.name}: {f.claim}": f.verdict for f in findings}
    return {"status": int(not all(f.ok for f in findings)), "seed": 0, "verdicts": verdicts}


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name of each case and a function that computes its result."""
    for at, spec in enumerate(ROWS):
        for name in ("ball", "box", "pool", "divergence", "screen"):
            yield f"operators/{name}/{at} {spec}", partial(operator, name, at)
    names = [f"{at} {mechanism.name}" for at, (mechanism, _) in enumerate(MECHANISMS)]
    for at, label in enumerate(names):
        for spec in (ANSWERED[at % 6], ANSWERED[(at + 3) % 6]):
            yield f"mechanisms/{label}/{spec}", partial(answers, at, spec)
    for at in (5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16):
        ledger = folder / f"ledger-{at}"
        yield f"ledger/{names[at]}", partial(answers, at, ANSWERED[at % 6], ledger)
    for name, events in EVENTS.items():
        for delta in (1e-15, 0.1):
            yield f"accountant/{name}, δ={delta}", partial(stated, events, delta)
    for name, call in PLANS.items():
        yield f"plan/{name}", partial(found, call)
    yield "demo/report", partial(trained, folder / "demo")
    for at in (0, 1, 2, 4, 5, 9, 11, 12, 14, 15, 17, 18, 19):
        yield f"demo/text/{names[at]}", partial(continued, folder / "demo", at)
    for name in SECONDS:
        yield f"audit/{name}", partial(audited, name)


# Comparison.
def computed(only: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the instruction set and the result of each case."""
    every = [name for name in ("scalar", "avx2", "avx512") if _C.use_instruction_set(name)]
    with tempfile.TemporaryDirectory() as folder:
        for name, call in cases(Path(folder)):
            sets = every if name.startswith(("operators", "mechanisms")) else every[:1]
            for instruction_set in sets if name.startswith(only) else ():
                _C.use_instruction_set(instruction_set)
                yield name, instruction_set, plain(tried(call))


def differences(
    old: Any, new: Any, exact: bool, tolerance: float = TOLERANCE, at: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield each field that differs, and its old and new value in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        if "digest" in old and old["digest"] == new.get("digest"):
            return
        for name in sorted((old.keys() | new.keys()) - {"digest"}):
            within = TOLERANCES.get(name, tolerance) if exact else tolerance
            yield from differences(old.get(name), new.get(name), exact, within, f"{at}/{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, exact, tolerance, f"{at}/{index}")
    elif isinstance(old, float) and isinstance(new, float):
        least = 1.0 if "/sums/" in at or "/logs/" in at else 1e-6  # below it, absolute differences
        relative = abs(old - new) / max(abs(old), abs(new), least)
        if not relative <= tolerance:
            yield at, f"{old!r} -> {new!r} (relative {relative:.2g})"
    elif old != new:
        yield at, f"{str(old)[:90]} -> {str(new)[:90]}"


def main() -> int:
    """Write or compare. The exit status is 1 if a case differs without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", metavar="PREFIX", help="cases to write or compare")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__.split("+")[0]}
    file: Any = {"versions": versions, "cases": {}}
    if arguments.compare:
        file = json.loads(arguments.compare.read_text(encoding="utf-8"))
    if file["versions"] != versions:
        print(f"written with {file['versions']}, now {versions}: demo/ may differ")
    kept, seen, bad = file["cases"], set[str](), set[str]()
    for name, instruction_set, result in computed(arguments.only):
        first = name not in seen
        seen.add(name)
        if arguments.write and first:
            kept[name] = {"result": result}
        case = kept.get(name, {"result": "not in the file"})
        for field, words in differences(case["result"], result, first):
            reasons = case.get("reason", {}).items()
            reason = next((sentence for start, sentence in reasons if field.startswith(start)), "")
            print(f"{name} [{instruction_set}] {field}: {words}", reason)
            bad |= set() if reason else {name}
    for name in [name for name in kept if name.startswith(arguments.only) and name not in seen]:
        print(f"{name} is gone")
        bad.add(name)
    if arguments.write:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in kept.items())
        text = f'{{"versions": {json.dumps(versions)}, "cases": {{\n{lines}\n}}}}\n'
        arguments.write.write_text(text, encoding="utf-8")
    print(f"{len(seen)} cases, {len(bad)} differ")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
