"""Several --mechanism options: the methods built from them, and their errors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import _parser, main
from adapmixed.commands import options
from adapmixed.commands.evaluate import _mechanisms
from adapmixed.commands.plan_file import take_plan
from adapmixed.data.demo import demo_base, held_out_text
from adapmixed.evaluation import read_result
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2"


def parsed(*options: str) -> argparse.Namespace:
    arguments = _parser().parse_args(["evaluate", *MODELS, "--text", "none", *options])
    take_plan(arguments, several=True)
    return arguments


def asked(*texts: str, options: tuple[str, ...] = ()) -> dict[str, Mechanism]:
    given = [f"--mechanism={text}" for text in texts]
    return _mechanisms(parsed(*given, *options), queries=50)


def test_methods_of_the_command_line() -> None:
    found = asked(
        "pmixed epsilon=6  order=4",
        "clipped-mixing lower=0.5 upper=2",
        "clipped-mixing  lower=0.8 upper=1.5 queries=100",
        "clipped-log-pool lower=-0.25 upper=1 public_confidence=0.5",
        "adapmixed preset=pubmed screen=none loss_orders=3,18",
        "unprotected",
        options=("--delta", "1e-6"),
    )
    expected: dict[str, Any] = {
        "public": PublicOnly(),
        "unprotected": Unprotected(),
        "pmixed": PMixED(6.0, 1e-6, 50, 4.0),
        "clipped-mixing lower=0.5 upper=2": ClippedMixing(0.5, 2.0, 50),
        "clipped-mixing lower=0.8 upper=1.5 queries=100": ClippedMixing(0.8, 1.5, 100),
        "clipped-log-pool": ClippedLogPool(-0.25, 1.0, 1.0, 50, 0.5),
        "adapmixed": AdaPMixED(
            15.0, 0.3, screen=None, screen_weight=1e-3, sigma=1e-1, loss_orders=(3.0, 18.0)
        ),
    }
    assert found == expected and list(found) == list(expected)


def test_budgets_of_shards_need_no_plan() -> None:
    texts = (POOL, "clipped-mixing lower=0.5 upper=2", "clipped-mixing lower=0.5 upper=2 order=4")
    found = asked(*texts, options=("--epsilon=4",))
    assert list(found.values()) == [
        PublicOnly(),
        Unprotected(),
        ClippedLogPool(-0.25, 1.0, 2.0),
        ClippedMixing(0.5, 2.0, order=8.0),
        ClippedMixing(0.5, 2.0, order=4.0),
    ]


def test_both_references_come_first_and_adapmixed_is_the_default() -> None:
    references = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert asked() == references | {"adapmixed": AdaPMixED(18.0, 0.2)}
    assert list(asked("public")) == list(references)
    assert list(asked("unprotected", "public")) == list(references)


KEYS = "keys are epsilon, queries, order"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([""], "--mechanism must be 'NAME KEY=VALUE ...', got ''"),
        (["'"], "--mechanism must be 'NAME KEY=VALUE ...'"),
        (["mixed"], "--mechanism must be one of adapmixed, .*, got 'mixed'"),
        (["pmixed 3"], "--mechanism pmixed must have KEY=VALUE once for every key, got '3'"),
        (["pmixed epsilon=3 epsilon=4"], "once for every key, got 'epsilon=4'"),
        (["pmixed --epsilon=3"], f"--mechanism pmixed does not take --epsilon: {KEYS}"),
        (["pmixed eps=3"], "does not take eps"),
        (["pmixed epsilon=x"], "--mechanism pmixed: epsilon must be a number, got 'x'"),
        (["pmixed epsilon=nan"], "--mechanism pmixed: epsilon must be > 0, got nan"),
        (["pmixed epsilon=6 delta=1e-6"], "does not take delta: use --delta"),
        (["pmixed"], "--mechanism pmixed needs epsilon"),
        (["pmixed greedy=1"], "does not take greedy"),
        (["pmixed lower=1"], "does not take lower"),
        (["public x=1"], "does not take x: keys are none"),
        (["clipped-mixing"], "--mechanism clipped-mixing needs lower, upper"),
        (["adapmixed preset=bogus"], "preset must be one of wikitext-103, .*, got 'bogus'"),
        (["adapmixed preset=pubmed x=1"], "--mechanism adapmixed does not take x"),
        (["adapmixed", "adapmixed"], "--mechanism must not be repeated, got 'adapmixed' twice"),
        ([POOL, POOL.replace(" ", "  ")], f"must not be repeated, got '{POOL}' twice"),
    ],
)
def test_refusals(texts: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asked(*texts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume"], "--result must be given with resume"),
        (["--result", "."], "--result must name a file in an existing folder"),
        (["--result", "none/result.json"], "--result must name a file in an existing folder"),
        (["--epsilon=2"], "--epsilon must be None for AdaPMixED, got 2.0: its losses depend"),
        (["--mechanism=pmixed epsilon=8", "--epsilon=2"], "--epsilon must be None for PMixED"),
        ([f"--mechanism={POOL} queries=9", "--epsilon=2"], "queries must be None if every shard"),
        (["--mechanism=clipped-mixing lower=0.5 upper=2", "--epsilon=1"], "--epsilon must be > "),
        (["--adjacency=replace_one"], "--adjacency must be 'zero_out' for AdaPMixED"),
        (["--delta=0"], "--delta must be >= 1e-15, got 0.0"),
        ([f"--mechanism={POOL}", "--epsilon=-1"], "--epsilon must be > 0, got -1.0"),
    ],
)  # fmt: skip
def test_combinations(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before the models are loaded or the text is read."""
    assert main(["evaluate", *MODELS, "--text", "none", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:6]), encoding="utf-8")
    return path


BUDGETED = ["--epsilon=2", f"--mechanism={POOL}", "--mechanism=clipped-mixing lower=0.5 upper=2"]
FIXED = ["--mechanism=adapmixed", "--mechanism=adapmixed screen=public", f"--mechanism={POOL}"]


@pytest.mark.parametrize("budgeted", [True, False])
def test_methods_side_by_side_and_a_result_to_go_on_from(
    budgeted: bool, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "out.json", tmp_path / "result.json"
    command = ["evaluate", *MODELS, "--text", str(text), "--block=17", "--stride=5", "--seed=1"]
    command += ["--queries=18", "--mechanism=unprotected", *(BUDGETED if budgeted else FIXED)]
    command += ["--json", str(path), "--result", str(result)]
    assert main(command) == 0
    first, report = path.read_bytes(), json.loads(path.read_text(encoding="utf-8"))
    methods = {method["name"]: method for method in report["methods"]}
    private = ["clipped-log-pool", "clipped-mixing"]
    if not budgeted:
        private = ["adapmixed", "adapmixed screen=public", "clipped-log-pool"]
    assert list(methods) == ["public", "unprotected", *private]
    assert {method["queries"] for method in report["methods"]} == {18}
    assert methods["unprotected"]["epsilon"] is None and methods["public"]["epsilon"] == 0
    for name in private:
        fixed = "fixed in advance that may be published" in methods[name]["guarantee"]
        assert fixed == (name in ("clipped-log-pool", "clipped-mixing"))
        assert (methods[name]["method"] == "per-shard budget") == budgeted
        assert not budgeted or 1.9 < methods[name]["epsilon"] <= 2
    assert report["config"]["stride"] == 5
    stored = read_result(result)
    assert stored.complete
    assert [one.perplexity for one in stored.evaluations] == [
        method["perplexity"] for method in report["methods"]
    ]
    assert main(command) == 2
    assert "--result must name a new file unless it is resumed" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert path.read_bytes() == first


def test_runs_of_the_command_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "LINE_SECONDS", 0.0)
    path = tmp_path / "out.json"
    command = ["evaluate", *MODELS, "--text", str(text), "--block=17", "--seed=1", "--runs=3"]
    command += ["--queries=10", "--mechanism=adapmixed", "--mechanism=unprotected"]
    assert main([*command, "--json", str(path)]) == 0
    printed, progress = capsys.readouterr()
    assert progress.endswith("\n30 of 30 tokens, 00:00 left\n")
    assert "Means of 3 runs of 10 queries" in printed
    assert "does not cover all runs together" in printed
    report = json.loads(path.read_text(encoding="utf-8"))
    public, unprotected, ada = report["runs"]
    for one in report["runs"]:
        assert len(one["perplexity"]) == len(set(one["perplexity"])) == 3
        mean, deviation = one["perplexity_mean"], one["perplexity_deviation"]
        assert mean == pytest.approx(sum(one["perplexity"]) / 3)
        squares = sum((value - mean) ** 2 for value in one["perplexity"])
        assert deviation == pytest.approx((squares / 2) ** 0.5)
        assert f"{mean:.2f} " in printed
    assert unprotected["epsilon"] == [None] * 3 and unprotected["epsilon_mean"] is None
    assert len(set(ada["epsilon"])) == 3 and ada["epsilon_deviation"] > 0
    # The report's own table and figures show the first run.
    assert [m["perplexity"] for m in report["methods"]] == [
        one["perplexity"][0] for one in report["runs"]
    ]


def test_the_time_left_is_that_of_the_work_since_a_resumption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 100.0, 140.0])
    monkeypatch.setattr(options.time, "monotonic", lambda: next(clock))
    update, close = options.progress_bar(1000, "token")
    update(900, 1000)  # read from a file
    update(920, 1000)
    close()
    assert capsys.readouterr().err == "920 of 1,000 tokens, 02:40 left\n"
