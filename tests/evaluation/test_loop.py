"""Perplexity, guarantees and curves by direct computations; memory; the result file; errors."""

from __future__ import annotations

import base64
import gc
import itertools
import json
import math
import random
import signal
import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from processes import CHANGES, killed_before
from result_cases import BLOCK, DELTA, MECHANISMS, NOISY, QUERIES, answer, numbers, stream
from tiny_models import POSITIONS, VOCAB
from torch import Tensor

from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate
from adapmixed.evaluation.loop import FORMAT_VERSION
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.privacy import Accountant, BudgetSpentError
from adapmixed.privacy.composition import ShardBudget
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SecureRandom, SeededRandom

DETERMINISTIC: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
    "adapmixed": replace(NOISY, screen=None),
}


def run(ensemble: Any, tokens: list[int], mechanisms: Any = None, **settings: Any) -> Any:
    arguments: dict[str, Any] = dict(delta=DELTA, rng=SeededRandom(0), memory_bytes=1000)
    if mechanisms is None:
        mechanisms = {"public": PublicOnly()}
    return evaluate(ensemble, tokens, mechanisms, **(arguments | settings))


def test_default_block_is_512_or_the_window(ensemble: Ensemble) -> None:
    tokens = stream(3 * POSITIONS, vocab=VOCAB)
    (result,) = run(ensemble, tokens, memory_bytes=1 << 24)
    assert result.queries == 3 * (POSITIONS - 1)
    for window, queries in ((None, 1021), (1024, 1021), (512, 1021), (100, 1012)):
        fake = FakeEnsemble(max_positions=window)
        (result,) = run(fake, stream(1023), queries=None)
        assert result.queries == queries


def test_tokens_outside_the_vocabulary_are_refused(ensemble: Ensemble) -> None:
    with pytest.raises(ValueError, match="input_ids must lie in"):
        run(ensemble, [1, VOCAB, 2], memory_bytes=1 << 24)
    with pytest.raises(ValueError, match="targets must be tokens in"):
        run(ensemble, [1, 2, VOCAB], memory_bytes=1 << 24)


def test_guarantees_shares_and_curves() -> None:
    fake, tokens = FakeEnsemble(), stream(401)
    mechanisms: dict[str, Mechanism] = {
        "public": PublicOnly(),
        "unprotected": Unprotected(),
        "pmixed": PMixED(8.0, DELTA, 400, 6.0),
        "adapmixed": NOISY,
    }
    results = {r.name: r for r in run(fake, tokens, mechanisms, block=401)}
    kinds = {name: r.guarantee.kind for name, r in results.items()}
    assert kinds == {
        "public": "public",
        "unprotected": "none",
        "pmixed": "fixed",
        "adapmixed": "data-dependent, ex-post",
    }
    assert results["public"].guarantee.epsilon == 0.0
    assert results["unprotected"].guarantee.epsilon is None
    assert results["pmixed"].guarantee.epsilon == pytest.approx(8.0, rel=1e-9)
    assert [results[n].screened for n in ("public", "unprotected", "pmixed")] == [0.0, 0.0, 0.0]
    assert 0.05 < results["adapmixed"].screened < 0.95
    for name, result in results.items():
        counts = [queries for queries, _ in result.curve]
        assert counts == [64, 128, 192, 256, 320, 384, 400]
        assert result.curve[-1][1] == result.guarantee.epsilon
        if name not in ("public", "unprotected"):
            epsilons = [epsilon for _, epsilon in result.curve]
            # PMixED's whole budget is charged with the first query.
            assert epsilons == sorted(epsilons)
            assert (epsilons[0] < epsilons[-1]) == (name != "pmixed")
            parts = result.breakdown
            assert parts["total"] == result.guarantee.epsilon
            assert parts["conversion"] == pytest.approx(c_alpha(mechanisms[name].order, DELTA))
            assert parts["total"] == pytest.approx(
                parts["mixing"] + parts["screening"] + parts["conversion"]
            )
    # Screening is charged for all queries, even for those that the public model answers.
    screening = 400 * 3.0 * (0.5 / (3 * 0.05)) ** 2
    assert results["adapmixed"].breakdown["screening"] == pytest.approx(screening)


def test_a_target_that_cannot_occur_has_infinite_perplexity() -> None:
    fake = FakeEnsemble()
    fake._token[:, 2] = -math.inf
    mechanisms = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert [r.perplexity for r in run(fake, [0, 1, 2, 0], mechanisms)] == [math.inf] * 2
    assert all(math.isfinite(r.perplexity) for r in run(fake, [0, 1, 3, 0], mechanisms))


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    run(FakeEnsemble(), stream(200), block=100, progress=lambda *counts: seen.append(counts))
    assert [done for done, _ in seen] == [0, 64, 99, 163, 198]
    assert {total for _, total in seen} == {198}


@pytest.mark.parametrize(
    "tokens,settings,message",
    [
        ([3], {}, r"queries must .* at most 0 .*\(1 tokens in .* got 0"),
        ([1, 2, 3], dict(block=513), "block must .* got 513"),
        ([1, 2, 3], dict(queries=0), "queries must .* got 0"),
        ([1, 2, 3], dict(block=2, queries=2), "queries must .* at most 1 .* got 2"),
        ([1, 2, 3], dict(delta=0.0), "delta must"),
        ([1, 2, 3], dict(adjacency="removed"), "adjacency must"),
        ([1, 2, 3], dict(epsilon=-1.0), "epsilon must"),
        ([1, 2, 3], dict(mechanisms={}), "mechanisms must"),
        (stream(100), dict(block=32, stride=32), "stride must .* got 32"),
        (stream(100), dict(block=32, stride=2.0), "stride must"),
        (stream(100), dict(block=32, stride=4, queries=100), "queries must .* at most 99 .* 100"),
    ],
)
def test_refusals(tokens: list[int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(FakeEnsemble(), tokens, **settings)


def test_a_mechanism_does_not_depend_on_its_neighbours() -> None:
    """Screening noise comes from the mechanism's own source."""
    noisy = AdaPMixED(order=4.0, target_leakage=0.1, sigma=0.3, threshold=0.5, screen_top_k=3)
    mechanisms = {"other": noisy, **DETERMINISTIC, "ada": noisy}
    together = run(FakeEnsemble(), stream(200), mechanisms)
    assert [result.name for result in together] == list(mechanisms)
    for result in together:
        (single,) = run(FakeEnsemble(), stream(200), {result.name: mechanisms[result.name]})
        for part in ("perplexity", "screened", "guarantee"):
            assert getattr(result, part) == getattr(single, part), (result.name, part)
    assert 0 < together[-1].screened < 1
    assert together[0].screened == together[-1].screened  # of one kind: the same noise


@pytest.mark.parametrize(
    ("mechanism", "order"),
    [(ClippedLogPool(-0.5, 0.5, 2.0), None), (ClippedMixing(0.5, 2.0, order=4.0), 4.0)],
)
def test_perplexity_under_budgets_of_shards(
    mechanism: Mechanism, order: float | None, tmp_path: Path
) -> None:
    epsilon = ShardBudget(0.5, order).epsilon(DELTA)
    (result,) = run(
        FakeEnsemble(), stream(401), {"pool": mechanism}, block=401, epsilon={"pool": epsilon},
        result=tmp_path / "result.json",
    )  # fmt: skip
    kept = json.loads((tmp_path / "result.json").read_text())["state"]["tallies"][0]
    guarantee = result.guarantee
    assert (guarantee.method, guarantee.kind) == ("per-shard budget", "fixed")
    assert {e for _, e in result.curve} == {guarantee.epsilon} and guarantee.epsilon <= epsilon
    # It charges as generation does: position after position, each shard until it cannot pay.
    private, public = FakeEnsemble().logits(torch.tensor([stream(401)[:400]]))
    accountant, log_probs, active = Accountant(DELTA, epsilon=epsilon), [], []
    for t, target in enumerate(stream(401)[1:]):
        proposal = mechanism.propose(
            private[:, 0, t : t + 1], public[0, t : t + 1], targets=torch.tensor([target]),
            rng=SeededRandom(0),
        )  # fmt: skip
        accountant.charge(proposal)
        assert proposal._active is not None
        active.append(proposal._active)
        answer = proposal.release()
        assert answer.log_prob is not None
        log_probs.append(float(answer.log_prob))
    assert bool(active[0].all()) and not bool(active[-1].any())
    assert accountant.guarantee().epsilon == guarantee.epsilon
    assert 0.0 < accountant.spent.max() <= accountant.limit
    assert Accountant.from_state(kept["accountant"]).spent.tolist() == accountant.spent.tolist()
    counts = [queries for queries, _ in result.perplexities]
    assert counts == [64, 128, 192, 256, 320, 384, 400]
    for queries, perplexity in result.perplexities:
        expected = math.exp(-math.fsum(log_probs[:queries]) / queries)
        assert perplexity == pytest.approx(expected, rel=1e-9)
    assert result.perplexities[-1][1] == result.perplexity


def test_what_an_accountant_refuses_raises_before_anything_is_read() -> None:
    plan, pool = PMixED(8.0, DELTA, 99, 6.0), ClippedLogPool(-0.5, 0.5, queries=400)
    adaptive = NOISY
    refused: list[tuple[Mechanism, dict[str, Any], str]] = [
        (plan, {}, "within the 99 that the mechanism was planned for"),
        (plan, {"epsilon": 3.0}, "epsilon must be None for PMixED, got 3.0: it"),
        (pool, {"epsilon": 3.0}, "queries must be None if every shard has a budget"),
        (adaptive, {"epsilon": {"x": 3.0}}, r"epsilon must name mechanisms .* got \['x'\]"),
        (adaptive, {"adjacency": "replace_one"}, "adjacency must be 'zero_out' for AdaPMixED, got"),
    ]
    for mechanism, settings, words in refused:
        fake = FakeEnsemble()
        with pytest.raises((ValueError, BudgetSpentError), match=words):
            run(fake, stream(401), {"m": mechanism}, block=401, **settings)
        assert not fake.budgets


def test_members_speak_about_the_active_vocabulary(demo_ensemble: Path) -> None:
    """A member has (1 − t) p_i(y) / p_i(S) at a token of S, and q(y) elsewhere."""
    demo = Ensemble.from_pretrained(demo_base(), demo_ensemble)
    tokens = stream(60, vocab=demo.vocab_size)
    (result,) = run(demo, tokens, {"mean": Unprotected()}, memory_bytes=1 << 30, active=600)
    private, public = (z[..., 0, :-1, :].double() for z in demo.logits(torch.tensor([tokens])))
    q = public.softmax(-1)
    tail = torch.ones_like(q, dtype=torch.bool).scatter(-1, q.topk(600).indices, False)
    p = private.masked_fill(tail, -math.inf).softmax(-1).mean(0)
    expected = torch.where(tail, q, p * q.masked_fill(tail, 0.0).sum(-1, keepdim=True))
    losses = -expected.gather(1, torch.tensor(tokens[1:])[:, None]).log()
    assert math.log(result.perplexity) == pytest.approx(float(losses.mean()), abs=1e-6)


# Windows.


def contexts(length: int, block: int, stride: int | None) -> dict[int, int]:
    """Return where each scored token's context begins, found independently token by token."""
    if stride is None:
        return {t: t - t % block for t in range(length) if t % block}
    starts = {}
    for t in range(1, length):
        # The earliest window that reaches the token.
        number = 0
        while number * stride + block <= t:
            number += 1
        starts[t] = number * stride
    return starts


@pytest.mark.parametrize(
    ("block", "stride"),
    [(100, None), (100, 1), (100, 40), (100, 99), (7, None), *((7, n) for n in range(1, 7))],
)
@pytest.mark.parametrize(
    ("memory_bytes", "queries"), [(1000, None), (33, None), (1000, 99), (33, 130)]
)
def test_every_token_is_scored_once_with_its_context(
    block: int, stride: int | None, memory_bytes: int, queries: int | None
) -> None:
    tokens, fake = stream(250 + (stride or 0)), FakeEnsemble()
    mechanisms: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    settings: dict[str, Any] = dict(stride=stride, memory_bytes=memory_bytes, queries=queries)
    results = run(fake, tokens, mechanisms, block=block, **settings)
    assert set(fake.budgets) == {memory_bytes}
    sums = [0.0, 0.0]
    starts = dict([*contexts(len(tokens), block, stride).items()][:queries])
    assert len(fake.budgets) == len(set(starts.values()))  # no window more than is needed
    for t, start in starts.items():
        private, public = fake.logits(torch.tensor([tokens[start:t]]))
        for number, rows in enumerate((public[0, -1:], private[:, 0, -1])):
            p = torch.softmax(rows.double(), -1).mean(0)[tokens[t]]
            sums[number] -= math.log(p)
    for result, total in zip(results, sums, strict=True):
        assert result.queries == len(starts) == result.guarantee.queries
        assert result.perplexity == pytest.approx(math.exp(total / len(starts)), rel=1e-9)


@pytest.mark.parametrize("queries", [1, 2, 7, 8, 9, 16, 17, 24, 80])
def test_a_curve_keeps_evenly_spaced_points_and_the_last(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapmixed.evaluation.loop._POSITIONS_PER_CALL", 1)
    monkeypatch.setattr("adapmixed.evaluation.loop.CURVE_POINTS", 8)
    (result,) = run(FakeEnsemble(), stream(queries + 1), block=queries + 1)
    kept = [done for done, _ in result.curve]
    assert kept == [done for done, _ in result.perplexities]
    step = kept[0]
    assert kept == [*range(step, queries + 1, step)] + ([queries] if queries % step else [])
    assert step == 1 if queries <= 8 else 4 < len(kept) <= 9


# Memory.

WIDE, LONGEST = 512, 99_840


def measured(queries: int, result: Path) -> tuple[int, list[Any]]:
    """Return (peak of Python's memory without the text, evaluations)."""
    mechanisms: dict[str, Mechanism] = {
        "adaptive": AdaPMixED(order=18.0, target_leakage=0.01, screen=None),
        "pool": ClippedLogPool(-0.05, 0.05, 1.0, queries=queries),
    }
    tokens, fake = stream(queries * WIDE // (WIDE - 1) + WIDE), FakeEnsemble()
    gc.freeze()  # so that the collections are quick
    tracemalloc.start()
    try:
        results = evaluate(
            fake, tokens, mechanisms, delta=1e-5, rng=SeededRandom(1), block=WIDE,
            queries=queries, memory_bytes=WIDE, result=result,
            progress=lambda *_: gc.collect() and None,  # Python's free lists are not counted
        )  # type: ignore[arg-type]  # fmt: skip
        return tracemalloc.get_traced_memory()[1], results
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@pytest.mark.slow
def test_memory_and_file_do_not_grow_with_the_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer and larger calls, and shorter curves, for the test's time.
    monkeypatch.setattr("adapmixed.evaluation.loop._POSITIONS_PER_CALL", WIDE)
    monkeypatch.setattr("adapmixed.evaluation.loop.SAVE_SECONDS", 0.2)
    monkeypatch.setattr("adapmixed.evaluation.loop.CURVE_POINTS", 16)
    shorter, _ = measured(LONGEST // 8, tmp_path / "short.json")
    longer, results = measured(LONGEST, tmp_path / "long.json")
    assert longer < shorter + LONGEST  # one more byte per query would fail
    sizes = [(tmp_path / name).stat().st_size for name in ("short.json", "long.json")]
    assert sizes[1] < sizes[0] + 1000 < 10_000
    for result in results:
        assert result.queries == result.guarantee.queries == LONGEST
        assert 8 <= len(result.curve) <= 17
        assert result.curve[-1] == (LONGEST, result.guarantee.epsilon)
        assert result.perplexities[-1] == (LONGEST, result.perplexity)
        counts = [queries for queries, _ in result.curve]
        assert counts == sorted(set(counts))


class Lending(FakeEnsemble):
    """An ensemble that knows which of its logits are still held, even through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[weakref.ref[Any]] = []
        self.held: list[int] = []

    def iter_logits(
        self, ids: Tensor, *, memory_bytes: int, **others: Any
    ) -> Iterator[tuple[slice, Tensor, Tensor, None]]:
        for where, *logits, _ in super().iter_logits(ids, memory_bytes=memory_bytes):
            # An array owns the memory of such a tensor and of its views.
            arrays = [tensor.numpy().copy() for tensor in logits]
            private, public = map(torch.from_numpy, arrays)
            self.lent += map(weakref.ref, arrays)
            del logits, arrays
            yield where, private, public, None
            del private, public
            self.held.append(sum(weak() is not None for weak in self.lent))


@pytest.mark.slow
def test_logits_are_not_kept() -> None:
    mechanisms: dict[str, Mechanism] = {
        "adaptive": AdaPMixED(order=18.0, target_leakage=0.01, screen=None),
        "pool": ClippedLogPool(-0.05, 0.05, 1.0),
    }
    lending: Any = Lending()
    evaluate(
        lending, stream(16 * 40), mechanisms, delta=1e-5, rng=SeededRandom(1), block=16,
        queries=500, memory_bytes=8,
    )  # fmt: skip
    # The last window may be shorter; two tensors in every chunk.
    assert len(lending.held) > 60 and len(lending.lent) == 2 * len(lending.held)
    assert max(lending.held) == 0


# The result file: an evaluation that is killed at any moment goes on as if it had not been.


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return numbers(answer())


def windows_in(path: Path) -> int:
    """Return the number of windows that are answered in a file."""
    return int(json.loads(path.read_bytes())["state"]["place"])


@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(tmp_path: Path) -> None:
    reference, windows = numbers(answer()), -(-QUERIES // (BLOCK - 1))
    for number in itertools.count(1):
        path = tmp_path / f"{number}.json"
        status = killed_before(lambda: answer(path), number, CHANGES)  # noqa: B023
        assert status in (0, -signal.SIGKILL)
        saved = max(number - 2, 0) // 6  # lock; open, fsync, replace, unlink, folder: open, fsync
        if path.exists():
            assert max(saved, 1) - 1 <= windows_in(path) <= windows
        ensemble = FakeEnsemble()
        assert numbers(answer(path, ensemble=ensemble)) == reference, number
        if status == 0:
            break
        # Saved windows are not answered again.
        assert len(ensemble.budgets) <= windows + 1 - max(saved, 1)
        left = {p.name for p in tmp_path.iterdir()} - {f"{n}.json" for n in range(number + 1)}
        assert not left
    assert number > 6 * (windows + 1)


def test_one_process_at_a_time_writes_and_a_complete_file_is_only_read(
    tmp_path: Path, reference: list[Any]
) -> None:
    path = tmp_path / "result.json"
    (tmp_path / ".result.json.lock").touch()  # what a killed process leaves does no harm

    class Disturbed(FakeEnsemble):
        def iter_logits(self, ids: Any, **settings: Any) -> Any:
            before = path.read_bytes()
            with pytest.raises(BlockingIOError, match="must not be written by another process"):
                answer(path)
            assert path.read_bytes() == before
            return super().iter_logits(ids, **settings)

    assert numbers(answer(path, ensemble=Disturbed())) == reference
    assert list(tmp_path.iterdir()) == [path] and path.stat().st_mode & 0o077 == 0
    before, ensemble = path.read_bytes(), FakeEnsemble()
    assert numbers(answer(path, ensemble=ensemble)) == reference
    assert path.read_bytes() == before and not ensemble.budgets


def interrupted(path: Path, windows: int, **changed: Any) -> None:
    """Evaluate and stop before that window, with everything saved until then."""

    class Stopped(Exception):
        pass

    class Stopping(FakeEnsemble):
        def iter_logits(self, ids: Any, *, memory_bytes: int, **others: Any) -> Any:
            if len(self.budgets) == windows - 1:
                raise Stopped
            return super().iter_logits(ids, memory_bytes=memory_bytes)

    with pytest.raises(Stopped):
        answer(path, ensemble=Stopping(), **changed)


def test_goes_on_with_new_noise(tmp_path: Path) -> None:
    """No noise is drawn twice after an interruption with seeded screening noise.

    The utility, too, is that of an uninterrupted evaluation.
    """
    path, names = tmp_path / "result.json", ("noisy", "budgeted")
    only = dict(mechanisms={name: MECHANISMS[name] for name in names}, diagnostics=True)
    interrupted(path, 2, **only)
    assert windows_in(path) == 1
    whole = answer(**only)
    for again in (answer(path, **only), answer(path, **only)):
        assert numbers(again) == numbers(whole)
        for result, other in zip(again, whole, strict=True):
            assert result.utility == other.utility


def test_secure_randomness_is_never_stored_nor_used_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sources: list[SecureRandom] = []

    class Watched(SecureRandom):
        def child(self, label: str) -> SecureRandom:
            sources.append(SecureRandom())
            return sources[-1]

    interrupted(path, 4, rng=Watched())
    text = path.read_text(encoding="ascii")
    assert json.loads(text)["configuration"]["randomness"] is None
    assert '"position":null' in text and '"position":0' not in text
    first = len(sources)
    assert any(source._next for source in sources)
    runs = answer(path, rng=Watched())
    assert [result.queries for result in runs] == [QUERIES] * len(MECHANISMS)
    keys = [bytes(source._key.tolist()) for source in sources]
    assert len(set(keys)) == len(keys) > first
    text += path.read_text(encoding="ascii")
    for key in keys:
        assert key.hex() not in text and base64.b64encode(key).decode().rstrip("=") not in text
    with pytest.raises(ValueError, match='randomness is .*"seed":3.*begun with null'):
        answer(path)


def another(**facts: Any) -> FakeEnsemble:
    fake = FakeEnsemble()
    vars(fake).update(facts)
    return fake


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": (dict(rng=SeededRandom(4)), 'randomness is {"seed":4'),
    "delta": (dict(delta=1e-6, epsilon={"budgeted": 8.0}), "delta is 1e-06"),
    "block": (dict(block=21), "block is 21"),
    "queries": (dict(queries=30), "queries is 30"),
    "text": (dict(tokens=stream(100, seed=2)), "text is"),
    "diagnostics": (dict(diagnostics=True), "diagnostics is true"),
    "mechanism": (
        dict(mechanisms=MECHANISMS | {"public": MECHANISMS["unprotected"]}),
        r"mechanisms is \[\[.public.,.Unprotected",
    ),
    "epsilon": (dict(epsilon={"budgeted": 8.0}), r"mechanisms is .*,8.0\]\], but"),
    "models": (dict(ensemble=FakeEnsemble(models=4)), "num_models is 4"),
    "files": (dict(ensemble=another(fingerprint="b" * 64)), "fingerprint is .b{64}., .* with null"),
    "beginning": (dict(ensemble=another(beginning=(0,))), r"beginning is \[0\]"),
    "caveats": (dict(ensemble=another(unverified=("names",))), "unverified is .*names"),
    "dtype": (dict(ensemble=another(dtype=torch.bfloat16)), "dtype is .*bfloat16., .*float32"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_evaluation_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 3)
    changed, words = CHANGED[name]
    before = path.read_bytes()
    if name in ("delta", "models"):
        changed = changed | {"mechanisms": {n: m for n, m in MECHANISMS.items() if n != "pmixed"}}
    with pytest.raises(ValueError, match=words):
        answer(path, **changed)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 4)
    whole = path.read_bytes()
    generator = random.Random(1)
    for length in [0, 1, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(5))]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="must be JSON|must be as evaluate wrote it"):
            answer(path)
    for _ in range(20):
        at = generator.randrange(len(whole) - 1)
        spoilt = bytearray(whole)
        spoilt[at] ^= 1 << generator.randrange(7)
        path.write_bytes(bytes(spoilt))
        with pytest.raises(ValueError):
            answer(path)
        assert path.read_bytes() == bytes(spoilt)
    at = whole.index(b'"loss":') + 7
    path.write_bytes(whole[:at] + (b"1" if whole[at : at + 1] == b"2" else b"2") + whole[at + 1 :])
    with pytest.raises(ValueError, match="must be as evaluate wrote it .*, its checksum differs"):
        answer(path)
    for version in (1, FORMAT_VERSION + 1):
        changed = json.loads(whole) | {"format_version": version}
        path.write_text(json.dumps(changed), encoding="ascii")
        with pytest.raises(ValueError, match=f"must be {FORMAT_VERSION}, got {version}"):
            answer(path)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "result.json", tmp_path):
        ensemble = FakeEnsemble()
        with pytest.raises(OSError):
            answer(path, ensemble=ensemble)
        assert not ensemble.budgets


def test_the_file_is_not_written_more_often_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 4, save_seconds=1e6)
    assert windows_in(path) == 0
    assert numbers(answer(path, save_seconds=1e6)) == numbers(answer())
    assert windows_in(path) == -(-QUERIES // (BLOCK - 1))
