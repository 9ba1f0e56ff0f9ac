"""The option --mechanism, and ``adapmixed mechanisms``, which lists its names and keys."""

from __future__ import annotations

from typing import Any

import pytest
from mechanism_cases import MECHANISMS

from adapmixed.cli import main
from adapmixed.commands.options import kinds, mechanism_of
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    PMixED,
    PublicOnly,
)


def made(text: str, epsilon: float | None = None, queries: int = 100) -> Any:
    return mechanism_of(text, delta=1e-5, epsilon=epsilon, queries=queries, way="zero_out")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("public", PublicOnly()),
        ("adapmixed", AdaPMixED(18.0, 0.2)),
        ("adapmixed screen=none loss_orders=2,18", AdaPMixED(18.0, 0.2, None, loss_orders=(2, 18))),
        ("adapmixed threshold=inf adjacency=add_remove",
         AdaPMixED(18.0, 0.2, threshold=float("inf"), adjacency="add_remove")),
        ("adapmixed preset=pubmed", AdaPMixED.preset("pubmed")),
        ("adapmixed preset=pubmed sigma=0.5 screen_top_k=7",
         AdaPMixED(15.0, 0.3, sigma=0.5, screen_weight=1e-3, screen_top_k=7)),
        ("pmixed epsilon=8", PMixED(8.0, 1e-5, 100, 3.0)),
        ("clipped-mixing lower=0.5 upper=2", ClippedMixing(0.5, 2.0, 100)),
        ("clipped-log-pool lower=-0.5 upper=1 queries=none", ClippedLogPool(-0.5, 1.0)),
    ],
)  # fmt: skip
def test_a_text_describes_a_mechanism(text: str, expected: Any) -> None:
    assert made(text) == expected
    assert made(f"  {text.replace(' ', '   ')} ") == expected


def test_a_budget_of_every_shard_has_no_plan() -> None:
    assert made("clipped-mixing lower=0.5 upper=2", 3.0) == ClippedMixing(0.5, 2.0, order=8.0)
    assert made("clipped-mixing lower=0.5 upper=2 order=6", 3.0).order == 6.0
    assert made("clipped-log-pool lower=-0.5 upper=1", 3.0) == ClippedLogPool(-0.5, 1.0)
    with pytest.raises(ValueError, match="epsilon must be None for PMixED, got 3.0"):
        made("pmixed epsilon=8", 3.0)  # always planned


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("adapmixed order=18 target_leakage=0.2", "adapmixed"),
        ("adapmixed loss_orders=2,18", "adapmixed loss_orders=2.0,18.0"),
        ("clipped-log-pool lower=-1 upper=1", "clipped-log-pool lower=-1.0 upper=1e0 scale=1"),
    ],
)
def test_one_setting_has_one_text(one: str, other: str) -> None:
    """Equal settings have one `repr`, to which accountants and ledgers are bound."""
    assert repr(made(one)) == repr(made(other))


KEYS = "keys are epsilon, queries, order"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--mechanism must be 'NAME KEY=VALUE ...', got ''"),
        ("adapmixed 'order=3", "--mechanism must be 'NAME KEY=VALUE ...'"),
        ("pate", "--mechanism must be one of adapmixed, .*, got 'pate'"),
        ("pmixed 3", "--mechanism pmixed must have KEY=VALUE once for every key, got '3'"),
        ("pmixed epsilon=3 epsilon=4", "once for every key, got 'epsilon=4'"),
        ("pmixed --epsilon=3", f"--mechanism pmixed does not take --epsilon: {KEYS}"),
        ("pmixed epsilon=x", "--mechanism pmixed: epsilon must be a number, got 'x'"),
        ("pmixed epsilon=6 delta=1e-6", "does not take delta: use --delta"),
        ("pmixed epsilon=8 queries=2.5", "queries must be an integer, got '2.5'"),
        ("public x=1", "does not take x: keys are none"),
        ("clipped-mixing", "--mechanism clipped-mixing needs lower, upper"),
        ("adapmixed loss_orders=2,x", "must be a number, got 'x'"),
        ("adapmixed preset=bogus", "preset must be one of wikitext-103, .*, got 'bogus'"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(text)


def test_mechanisms_lists_names_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in listed] == list(kinds())
    for name in kinds():
        assert main(["mechanisms", name]) == 0
        first, *keys = capsys.readouterr().out.splitlines()
        assert first in listed
        # The listed value is the one that is used by default.
        pairs = dict(line.strip().split("=", 1) for line in keys)
        pairs.pop("queries", None)
        case = MECHANISMS.get(name)
        must = {key: f"{getattr(case, key)!r}" for key in pairs if pairs[key] == "..."}
        short = " ".join([name, *(f"{key}={value}" for key, value in must.items())])
        whole = " ".join([name, *(f"{key}={value}" for key, value in (pairs | must).items())])
        assert repr(made(whole)) == repr(made(short))
