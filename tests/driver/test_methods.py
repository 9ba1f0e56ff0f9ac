"""--method "NAME key=value ...": what is built from it, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import _parser, main
from adapmixed.commands.evaluate import Asked
from adapmixed.commands.methods import choices_of
from adapmixed.data.demo import demo_base, held_out_text
from adapmixed.evaluation import read_result
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    PMixED,
    PublicOnly,
    Unprotected,
)

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]


def parsed(*options: str) -> argparse.Namespace:
    return _parser().parse_args(["evaluate", *MODELS, "--text", "none", *options])


def asked(*options: str) -> Asked:
    return Asked.of(choices_of(parsed(*options)), queries=50, num_models=4)


def test_methods_of_the_command_line() -> None:
    found = asked(
        "--method", "pmixed epsilon=6  order=4",
        "--method", "clipped-mixing lower=0.5 upper=2 adjacency=replace_one",
        "--method", "clipped-mixing lower=0.8 upper=1.5 budget-queries=100",
        "--method=clipped-log-pool lower=-0.25 upper=1 scale=2 filter-epsilon=2",
        "--method=clipped-log-pool lower=-0.25 upper=1 num-models=70",
        "--method", "adapmixed preset=pubmed rule=paper",
        "--method", "unprotected",
        "--delta", "1e-6",
    )  # fmt: skip
    expected: dict[str, Any] = {
        "public": PublicOnly(),
        "pmixed": PMixED(6.0, 1e-6, 50, 4.0),
        "clipped-mixing lower=0.5 upper=2 adjacency=replace_one": ClippedMixing(0.5, 2.0, 50),
        "clipped-mixing lower=0.8 upper=1.5 budget-queries=100": ClippedMixing(0.8, 1.5, 100),
        "clipped-log-pool lower=-0.25 upper=1 scale=2 filter-epsilon=2": ClippedLogPool(
            -0.25, 1.0, 2.0
        ),
        "clipped-log-pool lower=-0.25 upper=1 num-models=70": ClippedLogPool(
            -0.25, 1.0, 1.0, 50, num_models=70
        ),
        "adapmixed": AdaPMixED.preset("pubmed"),
        "unprotected": Unprotected(),
    }
    assert found.mechanisms == expected
    assert list(found.mechanisms) == list(expected)
    assert {name for name, rule in found.rules.items() if rule == "paper"} == {"adapmixed"}
    assert {n for n, a in found.adjacencies.items() if a} == {list(expected)[2]}
    (kept,) = found.filters.values()
    assert kept.num_models == 4 and kept.budget.delta == 1e-6
    assert 1.99 < kept.budget.epsilon() <= 2


def test_the_mechanism_options_describe_one_more() -> None:
    def names(*options: str) -> list[str]:
        return list(asked(*options).mechanisms)

    assert names() == ["public", "adapmixed"]
    assert names("--mechanism", "public") == ["public"]
    assert names("--method", "pmixed") == ["public", "pmixed"]
    assert names("--method", "public", "--method", "pmixed") == ["public", "pmixed"]
    # Not those that hold for all methods ...
    shared = ["--delta=1e-6", "--rule=paper", "--adjacency=zero_out"]
    assert names("--method", "pmixed", *shared) == ["public", "pmixed"]
    # ... but every other one.
    assert names("--method", "pmixed", "--order", "5") == ["public", "adapmixed", "pmixed"]
    assert names("--method", "pmixed", "--preset=pubmed") == ["public", "adapmixed", "pmixed"]
    both = ["--mechanism", "pmixed", "--epsilon", "6", "--method", "pmixed epsilon=7"]
    assert names(*both) == ["public", "pmixed", "pmixed epsilon=7"]
    assert asked("--method", "pmixed", *shared).adjacencies == {"pmixed": "zero_out"}
    assert asked("--method", "pmixed rule=per_model", *shared).rules == {"pmixed": "per_model"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--method", ""], "--method must be 'NAME KEY=VALUE ...', got ''"),
        (["--method", "'"], "--method must be 'NAME KEY=VALUE ...'"),
        (["--method", "mixed"], "--method 'mixed': argument --mechanism: invalid choice: 'mixed'"),
        (["--method", "pmixed 3"], "--method must be 'NAME KEY=VALUE ...', got '3'"),
        (["--method", "pmixed --epsilon=3"], "got '--epsilon=3' in"),
        (["--method", "pmixed eps=3"], "unrecognized arguments: --eps=3"),
        (["--method", "pmixed epsilon=x"], "argument --epsilon: invalid float value: 'x'"),
        (["--method", "pmixed delta=1e-6"], "must not set delta.*: delta is that of all methods"),
        (["--method", "pmixed mechanism=public"], "must not set mechanism"),
        (["--method", "pmixed release-counts=2"], "must not set release-counts"),
        (["--method", "pmixed operator=1"], "must not set operator"),
        (["--method", "pmixed greedy=1"], "unrecognized|must not be given"),
        (["--method", "pmixed lower=1"], "--lower does not apply to pmixed, got 1.0"),
        (
            ["--method", "clipped-mixing lower=0.5 upper=2 num-models=9"],
            "--num-models does not apply to clipped-mixing, got 9",
        ),
        (["--method", "clipped-mixing"], "--lower must be given for clipped-mixing"),
        (["--method", "pmixed", "--method", "pmixed"], "must not be given twice, got 'pmixed'"),
        (["--method", "adapmixed filter-epsilon=2"], "--filter-epsilon does not apply to ada"),
        (["--method", "pmixed adjacency=replace_one"], "--adjacency must be zero_out for pmixed"),
    ],
)  # fmt: skip
def test_refusals(options: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choices_of(parsed(*options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume"], "--resume needs --result"),
        (["--result", "."], "--result must name a file in an existing folder"),
        (["--result", "none/result.json"], "--result must name a file in an existing folder"),
        (["--runs=2", "--operator"], "--operator cannot be used with --runs"),
        (
            ["--mechanism=clipped-log-pool", "--lower=-1", "--upper=1", "--filter-epsilon=2",
             "--release-counts=1", "--release-sigma=60", "--runs=2"],
            "--release-counts cannot be used with --result or --runs, got 1",
        ),
    ],
)  # fmt: skip
def test_combinations(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *MODELS, "--text", "none", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:6]), encoding="utf-8")
    return path


METHODS = [
    "--method=adapmixed",
    "--method=adapmixed rule=paper",
    "--method=unprotected",
    "--method=clipped-log-pool lower=-0.25 upper=1 scale=2 filter-epsilon=2",
]


def test_methods_side_by_side_and_a_result_to_go_on_from(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "out.json", tmp_path / "result.json"
    command = ["evaluate", *MODELS, "--text", str(text), "--block=17", "--stride=5", "--seed=1"]
    command += ["--queries=18", *METHODS, "--json", str(path), "--result", str(result)]
    assert main(command) == 0
    first, report = path.read_bytes(), json.loads(path.read_text(encoding="utf-8"))
    names = [method["name"] for method in report["methods"]]
    assert names == ["public", "adapmixed", "adapmixed rule=paper", "unprotected",
                     "clipped-log-pool"]  # fmt: skip
    public, ada, paper, unprotected, pool = report["methods"]
    assert {method["queries"] for method in report["methods"]} == {18}
    assert (ada["rule"], paper["rule"]) == ("per_model", "paper")
    assert ada["epsilon"] < paper["epsilon"] and unprotected["epsilon"] is None
    assert "per-model filter" in pool["guarantee"] and public["epsilon"] == 0
    assert report["config"]["stride"] == 5
    stored = read_result(result)
    assert stored.complete
    assert [one.evaluations[0].perplexity for one in stored.runs] == [
        method["perplexity"] for method in report["methods"]
    ]
    assert main(command) == 2
    assert "--result must name a new file without --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert path.read_bytes() == first


def test_runs_of_the_command_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    command = ["evaluate", *MODELS, "--text", str(text), "--block=17", "--seed=1", "--runs=3"]
    command += ["--queries=10", "--method=adapmixed", "--method=unprotected"]
    assert main([*command, "--json", str(path), "--out", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr().out
    assert "standard deviation (n − 1) of 3 runs of 10 queries" in printed
    assert "does not cover all runs together" in printed
    report = json.loads(path.read_text(encoding="utf-8"))
    public, ada, unprotected = report["runs"]
    for one in (public, ada, unprotected):
        assert len(one["perplexity"]) == len(set(one["perplexity"])) == 3
        mean, deviation = one["perplexity_mean"], one["perplexity_deviation"]
        assert mean == pytest.approx(sum(one["perplexity"]) / 3)
        squares = sum((value - mean) ** 2 for value in one["perplexity"])
        assert deviation == pytest.approx((squares / 2) ** 0.5)
        assert f"{mean:.2f} ± {deviation:.2f}" in printed
    assert unprotected["epsilon"] == [None] * 3 and unprotected["epsilon_mean"] is None
    assert len(set(ada["epsilon"])) == 3 and ada["epsilon_deviation"] > 0
    # The report's own table and figures are those of the first run.
    assert [m["perplexity"] for m in report["methods"]] == [
        one["perplexity"][0] for one in report["runs"]
    ]
