"""An evaluation that is killed at any moment continues as if it had not been; errors."""

from __future__ import annotations

import base64
import itertools
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from processes import CHANGES, killed_before
from result_cases import BLOCK, MECHANISMS, QUERIES, answer, numbers, stream

from adapmixed.evaluation.loop import FORMAT_VERSION
from adapmixed.rng import SecureRandom, SeededRandom


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
