"""Random sources: no (key, counter) pair is ever returned twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ended

import adapmixed_ext as ops
from adapmixed.rng import SecureRandom, SeededRandom

SOURCES: list[Callable[[], Any]] = [SecureRandom, lambda: SeededRandom(7)]
both = pytest.mark.parametrize("make", SOURCES, ids=["secure", "seeded"])


def pair(rng: Any) -> tuple[bytes, int]:
    key, counter = rng.reserve()
    assert key.dtype == torch.uint8 and key.shape == (32,) and key.device.type == "cpu"
    return bytes(key.tolist()), counter


@both
def test_counters_never_repeat(make: Callable[[], Any]) -> None:
    """Neither one after another nor across threads, which wait for each other."""
    rng = make()
    pairs = [pair(rng) for _ in range(1000)]
    assert [counter for _, counter in pairs] == list(range(1000))
    assert len({key for key, _ in pairs}) == 1
    with ThreadPoolExecutor(1) as pool, rng._lock:
        with pytest.raises(TimeoutError):
            pool.submit(rng.reserve).result(0.05)


def test_seeded_is_repeatable_and_sources_differ() -> None:
    secure = {pair(SecureRandom())[0] for _ in range(50)}
    assert len(secure) == 50 and bytes(32) not in secure
    for seed in (0, 1, -1, 2**200, 12):
        assert pair(SeededRandom(seed)) == pair(SeededRandom(seed))
    keys = {pair(SeededRandom(seed))[0] for seed in [*range(-20, 20), 2**64, 2**64 + 1, 2**200]}
    assert len(keys) == 43
    draws = [ops.gaussian((100,), sigma=1.0, rng=SeededRandom(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert len(set(draws[0].tolist()) & set(draws[2].tolist())) == 0


@pytest.mark.parametrize("seed", [1.0, "1", None, True, b"1"])
def test_seeds_are_integers(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an integer, got"):
        SeededRandom(seed)


def test_a_forked_child_draws_another_key(tmp_path: Path) -> None:
    rng, path = SecureRandom(), tmp_path / "keys"
    before = pair(rng)
    assert ended(lambda: path.write_bytes(b"".join(pair(rng)[0] for _ in range(3)))) == 0
    report = path.read_bytes()
    child = {report[i : i + 32] for i in (0, 32, 64)}
    assert len(child) == 1 and before[0] not in child  # one new key, kept
    after = pair(rng)
    assert after == (before[0], 1)  # the parent goes on as before


def test_children_are_apart_and_repeatable() -> None:
    parent = SeededRandom(5)
    keys = [bytes(source.reserve()[0].tolist()) for source in (
        parent, parent.child("a"), parent.child("b"), parent.child("a").child("b")
    )]  # fmt: skip
    assert len(set(keys)) == 4
    assert bytes(SeededRandom(5).child("a").reserve()[0].tolist()) == keys[1]
    assert parent.child("a").seeded and not SecureRandom().child("a").seeded


def test_paths_of_labels_are_apart() -> None:
    """A slash in a label is not the step to a child."""
    root = SeededRandom(3)
    sources = [
        root.child("a/b"), root.child("a").child("b"), root.child("a/").child("b"),
        root.child("a").child("/b"), root.child("a\\").child("b"), root.child("a\\/b"),
    ]  # fmt: skip
    assert len({source.reserve()[0].numpy().tobytes() for source in sources}) == len(sources)


def test_a_seeded_source_goes_on_behind_an_earlier_one() -> None:
    first, second = SeededRandom(3, "a"), SeededRandom(3, "a")
    handed_out = [first.reserve()[1] for _ in range(5)]
    assert first.position == 5 and second.position == 0
    second.skip_to(first.position)
    assert second.position == 5
    key, counter = second.reserve()
    assert counter not in handed_out and counter == first.reserve()[1]
    assert key.tolist() == first.reserve()[0].tolist()
    with pytest.raises(ValueError, match="position must be an integer >= 6, got 5"):
        second.skip_to(5)
    for position in (6.0, True, None):
        with pytest.raises(ValueError, match="position must be an integer"):
            second.skip_to(position)  # type: ignore[arg-type]
