"""``adapmixed evaluate``: the methods of the command line, its files, its errors."""

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
from adapmixed.commands.plan import take_plan
from adapmixed.data import demo_base, held_out_text
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


def test_both_references_come_first_and_adapmixed_is_the_default() -> None:
    references = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert asked() == references | {"adapmixed": AdaPMixED(18.0, 0.2)}
    assert list(asked("public")) == list(references)
    assert list(asked("unprotected", "public")) == list(references)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume"], "--result must be given with resume"),
        (["--result", "."], "--result must name a file in an existing folder"),
        (["--result", "none/result.json"], "--result must name a file in an existing folder"),
        (["--epsilon=2"], "--epsilon must be None for AdaPMixED, got 2.0: its losses depend"),
        (["--adjacency=replace_one"], "--adjacency must be 'zero_out' for AdaPMixED"),
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mechanism", "adapmixed order"], "--mechanism adapmixed must have KEY=VALUE once for"),
        (["--mechanism", "adapmixed"] * 2, "must not be repeated, got 'adapmixed' twice"),
        ([f"--mechanism={POOL}", f"--mechanism={POOL.replace(' ', '  ')}"], f"got '{POOL}' twice"),
        (["--queries", "0"], "--queries must be"),
        (["--block", "100000"], "--block must be <="),
        (["--text", "nowhere"], "--text must name a text file or a directory of *.txt files, got"),
    ],
)
def test_evaluate_refuses(
    text: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *MODELS, "--text", str(text), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


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


@pytest.mark.slow
def test_evaluate_is_repeatable_with_a_seed(text: Path, tmp_path: Path) -> None:
    outputs = []
    for name, memory in (("a.json", "1G"), ("b.json", "1G"), ("c.json", "120M")):
        path = tmp_path / name
        arguments = ["--text", str(text), "--queries", "60", "--seed", "7", "--json", str(path)]
        assert main(["evaluate", *MODELS, *arguments, "--memory", memory]) == 0
        outputs.append(path.read_bytes())
    assert outputs[0] == outputs[1]
    first, chunked = (json.loads(output) for output in (outputs[0], outputs[2]))
    assert first["config"]["randomness"] == "seeded (7)"
    # Chunks round the logits differently, but the same random numbers are drawn.
    for one, other in zip(first["methods"], chunked["methods"], strict=True):
        assert one["screened"] == other["screened"]
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=1e-4)


def test_pmixed_is_budgeted_for_its_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    pmixed = ["--mechanism", "pmixed epsilon=7"]
    arguments = ["--text", str(text), "--queries", "30", "--json", str(path)]
    assert main(["evaluate", *MODELS, *arguments, *pmixed]) == 0
    method = json.loads(path.read_text(encoding="utf-8"))["methods"][-1]
    assert 6.999 < method["epsilon"] <= 7
    assert "Up to 30 answered queries" in method["guarantee"]
    few = ["--mechanism", "pmixed epsilon=7 queries=10"]
    assert main(["evaluate", *MODELS, *arguments, *few]) == 2
    refused = capsys.readouterr().err
    assert "queries must stay within the 10 that" in refused and "early" not in refused
    assert "up to 30 more with 10 left: ask for fewer (evaluate: --queries" in refused
    prompt = ["--prompt", "The", "--max-new-tokens", "5"]
    assert main(["generate", *MODELS, *prompt, *pmixed]) == 0
    assert "Up to 5 answered queries" in capsys.readouterr().err


def test_evaluate_with_a_budget_of_every_shard(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("\n\n".join(held_out_text()[:8]), encoding="utf-8")
    path = tmp_path / "out.json"
    budget = ["--mechanism", POOL, "--epsilon", "0.3", "--adjacency", "replace_one"]
    arguments = ["--text", str(text), "--queries", "70", "--json", str(path), *budget]
    assert main(["evaluate", *MODELS, *arguments]) == 0
    output = capsys.readouterr()
    report = json.loads(path.read_text(encoding="utf-8"))
    public, _, pool = report["methods"]
    assert "a budget of every shard" in pool["guarantee"] and pool["adjacency"] == "replace_one"
    assert 0.29 < pool["epsilon"] <= 0.3
    # With so small a budget the members contribute hardly anything.
    assert pool["perplexity"] == pytest.approx(public["perplexity"], rel=0.05)
    assert [queries for queries, _ in pool["perplexities"]] == [64, 70]
    assert "perplexity of queries" in output.out and "65 to 70" in output.out
    assert output.out.endswith("\nNo share of the gain is stated: that takes 512 scored tokens.\n")
    assert output.out.count("may be published") == 1  # the guarantee
    assert "PRIVATE" not in output.out and output.err.strip() == ""
