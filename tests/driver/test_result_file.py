"""An evaluation that is killed at any moment goes on as if it had not been; what is refused."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_ensemble import FakeEnsemble
from result_cases import BLOCK, MECHANISMS, QUERIES, RUNS, answer, numbers, stream
from training_cases import forked, status_of

from adapmixed.evaluation import read_result
from adapmixed.privacy import FilterBudget, PerModelFilter
from adapmixed.rng import SecureRandom, SeededRandom

FORMATS = Path(__file__).parents[1] / "formats"
# Every call by which a result file changes what is on the disk.
CALLS = ("open", "fsync", "replace", "unlink")


@pytest.fixture(scope="module")
def reference() -> list[Any]:
    return numbers(answer())


def killed_before(number: int, path: Path, **changed: Any) -> int:
    """Evaluates in a child that is killed before its number-th call: how it ended."""

    def work() -> None:
        countdown = itertools.count(number, -1)

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                if next(countdown) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **named)

            return wrapped

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        answer(path, resume=True, **changed)

    return status_of(forked(work))


def test_killed_before_every_change_of_the_disk(tmp_path: Path) -> None:
    reference, saves = numbers(answer(runs=1)), 1 + -(-QUERIES // (BLOCK - 1))
    for number in itertools.count(1):
        path = tmp_path / f"{number}.json"
        status = killed_before(number, path, runs=1)
        assert status in (0, -signal.SIGKILL)
        saved = max(number - 2, 0) // 5  # the lock's open; open, fsync, replace, open and fsync of
        # the folder
        if path.exists() and status:
            stored = read_result(path)
            done = stored.runs[0].queries if stored.runs else 0
            assert done < QUERIES or stored.complete
        ensemble = FakeEnsemble()
        again = answer(path, resume=True, ensemble=ensemble, runs=1)
        assert numbers(again) == reference, number
        if status == 0:
            break
        # What was saved is not answered again; the first read is the probe.
        assert len(ensemble.budgets) - 1 <= saves - max(saved, 1)
        left = {p.name for p in tmp_path.iterdir()} - {f"{n}.json" for n in range(number + 1)}
        assert not left
    assert number > 5 * saves


def test_killed_at_random_moments_again_and_again(tmp_path: Path, reference: list[Any]) -> None:
    generator, kills, going_on, start = random.Random(7), 0, 0, time.monotonic()
    assert status_of(forked(lambda: answer(tmp_path / "first.json"))) == 0
    seconds = time.monotonic() - start
    for number in itertools.count():
        path = tmp_path / f"{number}.json"
        status = -signal.SIGKILL
        while status:
            going_on += path.exists() and 0 < len(read_result(path).runs)
            child = forked(lambda path=path: answer(path, resume=True))  # type: ignore[misc]
            time.sleep(generator.uniform(0.2, 1.0) * seconds)
            os.kill(child, signal.SIGKILL)
            status = status_of(child)
            assert status in (0, -signal.SIGKILL)
            kills += status != 0
        assert read_result(path).complete
        assert numbers(answer(path, resume=True)) == reference
        if kills >= 24 and going_on >= 6:
            break


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    begun, end = os.pipe(), os.pipe()

    class Waiting(FakeEnsemble):
        def iter_logits(self, ids: Any, *, memory_bytes: int, room: Any = None) -> Any:
            if len(self.budgets) == 2:  # the probe and a window are read
                os.write(begun[1], b"x")
                os.read(end[0], 1)
            return super().iter_logits(ids, memory_bytes=memory_bytes)

    child = forked(lambda: answer(path, ensemble=Waiting()))
    os.read(begun[0], 1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="result must name a file that no other process writes"):
        answer(path, resume=True)
    assert path.read_bytes() == before
    os.write(end[1], b"x")
    assert status_of(child) == 0 and read_result(path).complete
    assert list(tmp_path.iterdir()) == [path]
    # What a process that was killed has left is in nobody's way.
    other = tmp_path / "other.json"
    (tmp_path / ".other.json.lock").touch()
    assert numbers(answer(other)) == numbers(read_result(path).runs)
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_a_result_is_read_back_without_the_models(tmp_path: Path, reference: list[Any]) -> None:
    path = tmp_path / "result.json"
    assert numbers(answer(path)) == reference
    stored = read_result(path)
    assert stored.complete and numbers(stored.runs) == reference
    assert stored.configuration["runs"] == RUNS
    assert stored.configuration["methods"]["noisy, the paper's rule"]["rule"] == "paper"
    assert path.stat().st_mode & 0o077 == 0
    assert stored.about == {}
    content = json.loads(path.read_text(encoding="ascii"))
    assert content["format_version"] == 1 and "PRIVATE, for the operator" in content["notice"]
    # What it is given to keep is no part of what has to be the same to go on: the last one's stays.
    other = tmp_path / "other.json"
    interrupted(other, 2, about={"config": {"out": "first"}})
    assert numbers(answer(other, resume=True, about={"config": {"out": "second"}})) == reference
    assert read_result(other).about == {"config": {"out": "second"}}
    # Complete: nothing is answered again, and nothing is written.
    before, ensemble = path.read_bytes(), FakeEnsemble()
    assert numbers(answer(path, resume=True, ensemble=ensemble)) == reference
    assert path.read_bytes() == before and len(ensemble.budgets) == 1


def interrupted(path: Path, windows: int, **changed: Any) -> None:
    """Evaluates and stops before that window, with what was saved until then."""

    class Stopped(Exception):
        pass

    class Stopping(FakeEnsemble):
        def iter_logits(self, ids: Any, *, memory_bytes: int, room: Any = None) -> Any:
            if len(self.budgets) == windows:
                raise Stopped
            return super().iter_logits(ids, memory_bytes=memory_bytes)

    with pytest.raises(Stopped):
        answer(path, ensemble=Stopping(), **changed)


def test_secure_randomness_is_never_stored_nor_used_again(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    made: list[SecureRandom] = []

    class Watched(SecureRandom):
        def child(self, label: str) -> SecureRandom:
            made.append(SecureRandom())
            return made[-1] if not label.startswith("run ") else self

    interrupted(path, 4, rng=Watched())
    text = path.read_text(encoding="ascii")
    assert json.loads(text)["configuration"]["randomness"] == "system"
    assert '"counter":null' in text and '"counter":0' not in text
    first = len(made)
    assert any(source._next for source in made)
    runs = answer(path, rng=Watched(), resume=True)
    assert [one.queries for one in runs] == [QUERIES] * len(MECHANISMS)
    keys = [bytes(source._key.tolist()) for source in made]
    assert len(set(keys)) == len(keys) > first
    text += path.read_text(encoding="ascii")
    for key in keys:
        assert key.hex() not in text and base64.b64encode(key).decode().rstrip("=") not in text
    with pytest.raises(ValueError, match='randomness is .*"seed":3.*begun with "system"'):
        answer(path, resume=True)


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "seed": (dict(rng=SeededRandom(4)), "randomness.seed is 4, it was begun with 3"),
    "system": (dict(rng=SecureRandom()), "randomness is"),
    "delta": (dict(delta=1e-6, model_filters={}), "delta is 1e-06, it was begun with 1e-05"),
    "block": (dict(block=21), "block is 21, it was begun with 20"),
    "stride": (dict(stride=19), "stride is 19, it was begun with null"),
    "runs": (dict(runs=1), "runs is 1, it was begun with 2"),
    "queries": (dict(queries=30), "queries is 30, it was begun with 38"),
    "text": (dict(tokens=stream(100, seed=2)), "text.sha256 is"),
    "more text": (dict(length=110), "text.tokens is 110"),
    "rule": (
        dict(rule="paper"),
        r"methods\.public\.rule is .paper., .* with .per_model.",
    ),
    "adjacency": (dict(adjacency={"pool": "replace_one"}), "methods.pool.adjacency is"),
    "mechanism": (
        dict(mechanisms=MECHANISMS | {"public": MECHANISMS["unprotected"]}),
        r"methods\.public\.mechanism is .Unprotected",
    ),
    "fewer": (dict(mechanisms=dict(list(MECHANISMS.items())[::-1])), "order is"),
    "filter": (
        dict(model_filters={"filtered": PerModelFilter(3, FilterBudget("renyi", 0.3, 1e-5, 4.0))}),
        r"methods\.filtered\.filter\.budget is",
    ),
    "models": (dict(ensemble=FakeEnsemble(models=4), model_filters={}), "ensemble.num_models is 4"),
    "ensemble": (dict(ensemble=FakeEnsemble(seed=1)), "ensemble is another by its logits"),
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
        answer(path, resume=True, **changed)
    assert path.read_bytes() == before


def test_other_files_of_the_same_answers_are_refused(tmp_path: Path, reference: list[Any]) -> None:
    """By the fingerprint, which sees what eight tokens do not show; None is not known."""
    path, ensemble = tmp_path / "result.json", FakeEnsemble()
    ensemble.fingerprint = "a" * 64
    assert numbers(answer(path, ensemble=ensemble)) == reference
    assert read_result(path).configuration["ensemble"]["fingerprint"] == "a" * 64
    other = FakeEnsemble()
    other.fingerprint = "b" * 64
    with pytest.raises(ValueError, match=r"ensemble\.fingerprint is .b{64}., .* with .a{64}."):
        answer(path, resume=True, ensemble=other)
    for same in (ensemble, FakeEnsemble()):
        assert numbers(answer(path, resume=True, ensemble=same)) == reference


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 4)
    whole = path.read_bytes()
    generator = random.Random(1)
    for length in [0, 1, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(20))]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="it is truncated or corrupted"):
            answer(path, resume=True)
    for _ in range(60):
        at = generator.randrange(len(whole) - 1)
        spoilt = bytearray(whole)
        spoilt[at] ^= 1 << generator.randrange(7)
        path.write_bytes(bytes(spoilt))
        with pytest.raises(ValueError):
            read_result(path)
        with pytest.raises(ValueError):
            answer(path, resume=True)
        assert path.read_bytes() == bytes(spoilt)
    at = whole.index(b'"loss":') + 7
    path.write_bytes(whole[:at] + (b"1" if whole[at : at + 1] == b"2" else b"2") + whole[at + 1 :])
    with pytest.raises(ValueError, match="truncated or corrupted: its checksum differs"):
        answer(path, resume=True)
    path.write_text(json.dumps(json.loads(whole) | {"format_version": 2}), encoding="ascii")
    with pytest.raises(ValueError, match="format_version must be 1, got 2"):
        answer(path, resume=True)


FOREIGN = [path for path in sorted(FORMATS.glob("*.json")) if path.name != "evaluation-1.json"]


@pytest.mark.parametrize("other", FOREIGN, ids=lambda path: path.name)
def test_another_kind_of_file_is_called_that(tmp_path: Path, other: Path) -> None:
    """Not damaged: whoever names a report.json is to hear that it is the wrong file."""
    path, before = tmp_path / "result.json", other.read_bytes()
    path.write_bytes(before)
    with pytest.raises(ValueError) as refused:
        answer(path, resume=True)
    words = f"{path} must be a result file of evaluate (--result), it is another kind of file: "
    assert str(refused.value).startswith(f"{words}it has no ")
    assert path.read_bytes() == before
    for content, reason in (
        (b"\x89PNG\xff", "it is no text"),
        (b"[1]\n", "it holds no JSON object"),
        (b"# Notes\n", "it holds no JSON object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError) as refused:
            answer(path, resume=True)
        assert str(refused.value).startswith(f"{words[:-2]} or corrupted: {reason}")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 2)
    with pytest.raises(ValueError, match="must name a new file unless it is resumed"):
        answer(path)
    with pytest.raises(ValueError, match="must name a file in an existing folder"):
        answer(tmp_path / "none" / "result.json")
    with pytest.raises(ValueError, match="must name a file in an existing folder"):
        answer(tmp_path)
    with pytest.raises(ValueError, match="resume needs the result file"):
        answer(resume=True)
    with pytest.raises(ValueError, match="save_seconds must be >= 0, got -1"):
        answer(save_seconds=-1)


def test_a_filter_that_goes_on_says_what_was_spent(tmp_path: Path) -> None:
    """One evaluation changes the filter that it was given, after a break as without one."""
    from adapmixed.evaluation import evaluate

    def spent(result: Path | None, stop: int | None, resume: bool) -> Any:
        kept = PerModelFilter(3, FilterBudget("renyi", 0.2, 1e-5, 4.0))
        named = {"filtered": MECHANISMS["filtered"]}
        settings: dict[str, Any] = dict(
            delta=1e-5, rng=SeededRandom(1), block=BLOCK, memory_bytes=8, save_seconds=0.0
        )

        def progress(done: int, total: int) -> None:
            if done == stop:
                raise KeyboardInterrupt

        try:
            evaluate(
                FakeEnsemble(), stream(100), named, model_filters={"filtered": kept},
                result=result, resume=resume, progress=progress, **settings,
            )  # type: ignore[arg-type]  # fmt: skip
        except KeyboardInterrupt:
            return None
        return kept.spent.tobytes()

    path = tmp_path / "result.json"
    assert spent(path, 19 * 2 + 8, False) is None
    assert 0 < read_result(path).runs[0].queries < 95
    assert spent(path, None, True) == spent(None, None, False)


def test_the_file_is_not_written_more_often_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    interrupted(path, 4, save_seconds=1e6)
    assert read_result(path).runs == ()
    assert numbers(answer(path, resume=True, save_seconds=1e6)) == numbers(answer())
    assert read_result(path).complete
