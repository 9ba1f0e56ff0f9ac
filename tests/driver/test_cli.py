"""The command line: every command, its output files, its refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import main
from adapmixed.data.demo import demo_base, held_out_text
from adapmixed.privacy import Ledger

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
METHOD_FIELDS = {
    "name", "perplexity", "queries", "epsilon", "delta", "guarantee", "unit", "adjacency", "rule",
    "order",
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:3]), encoding="utf-8")
    return path


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    for word in ("instruction set:", "CUDA kernels:", "GPU:", "randomness:", "torch:"):
        assert word in output


def test_help_costs_no_torch() -> None:
    code = (
        "import sys\nfrom adapmixed.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_demo_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path / "report"), "--queries", "48"]) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    names = [method["name"] for method in report["methods"]]
    assert names == [
        "public", "unprotected", "pmixed", "adapmixed", "adapmixed, paper's rule",
        "clipped-log-pool, ε ≤ 1", "clipped-log-pool, ε ≤ 3",
        "clipped-mixing, ε ≤ 1", "clipped-mixing, ε ≤ 3",
    ]  # fmt: skip
    for method in report["methods"]:
        assert set(method) >= METHOD_FIELDS
        assert method["queries"] == 48
        assert isinstance(method["guarantee"], str) and method["guarantee"]
        assert method["name"] in printed
    assert report["methods"][1]["epsilon"] is None
    assert report["methods"][0]["epsilon"] == 0
    assert 0.45 < report["methods"][3]["epsilon"] < 2
    # The same answers by the other rule: never less.
    assert report["methods"][4]["epsilon"] >= report["methods"][3]["epsilon"]
    for method in report["methods"][5:]:
        budget = float(method["name"][-1])
        assert method["kind"] == "fixed" and 0.8 * budget < method["epsilon"] <= budget
    assert {"format_version", "environment", "config"} <= set(report)
    # The sample is drawn from the system's randomness: it may be over with its first token.
    assert isinstance(report["sample"]["text"], str)
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page and "<script" not in page


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


CLIPPED = ["clipped-mixing", "clipped-log-pool"]


@pytest.mark.parametrize("name", ["pmixed", "public", "unprotected", *CLIPPED])
def test_evaluate_every_mechanism(text: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "out.json"
    arguments = ["--text", str(text), "--queries", "20", "--mechanism", name, "--json", str(path)]
    if name in CLIPPED:
        box = {"clipped-mixing": ("0.8", "2"), "clipped-log-pool": ("-0.25", "0.5")}[name]
        arguments += [f"--lower={box[0]}", f"--upper={box[1]}", "--top-k", "200"]
    assert main(["evaluate", *MODELS, *arguments]) == 0
    assert json.loads(path.read_text(encoding="utf-8"))["methods"][-1]["name"] == name


def test_generate_prints_text_and_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "The try statement", "--max-new-tokens", "6", "--seed", "1"]
    assert main(["generate", *MODELS, *arguments]) == 0
    first = capsys.readouterr()
    assert main(["generate", *MODELS, *arguments]) == 0
    assert capsys.readouterr().out == first.out
    assert first.out.strip()
    assert "6 answered queries" in first.err and "seeded" in first.err


@pytest.mark.parametrize(
    "options",
    [
        ["--mechanism", "clipped-mixing", "--lower=0.6", "--upper=2", "--order", "6"],
        ["--mechanism", "clipped-log-pool", "--lower=-0.5", "--upper=1", "--scale", "2"],
    ],
)
def test_a_filter_goes_on_from_its_ledger(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "The try statement", "--max-new-tokens", "4", *options]
    arguments += ["--ledger", str(tmp_path / "ledger.db"), "--filter-epsilon", "3"]
    for _ in range(2):
        assert main(["generate", *MODELS, *arguments]) == 0
        error = capsys.readouterr().err
        assert "ε = 3" in error or "ε = 2.9" in error
        assert "per-model filter" in error and "may be published" in error
        assert "PRIVATE" not in error and "noise" not in error
    with Ledger.open(
        tmp_path / "ledger.db", **_settings(tmp_path / "ledger.db"), create=False
    ) as ledger:
        spent = ledger.accountant.individual_spent
        assert spent is not None and (spent > 0).all()
        assert ledger.description.filter_budget is not None
        assert spent.max() <= ledger.description.filter_budget.amount


def _settings(path: Path) -> dict[str, Any]:
    known = Ledger.verify(path).description
    names = ("delta", "rule", "configuration", "filter_budget")
    return {name: getattr(known, name) for name in names}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mechanism", "clipped-mixing"], "--lower must be given for clipped-mixing"),
        (["--scale", "2"], "--scale does not apply to adapmixed"),
        (["--mechanism", "pmixed", "--top-k", "2"], "--top-k does not apply to pmixed"),
        (["--budget-queries", "2"], "--budget-queries does not apply to adapmixed"),
        (["--mechanism", "public", "--order", "3"], "--order does not apply to public, got 3.0"),
        (["--mechanism", "pmixed", "--preset", "pubmed"], "--preset does not apply to pmixed"),
        (["--preset", "pubmed", "--order", "2"], "--order does not apply to a preset"),
        (["--epsilon", "2"], "--epsilon does not apply to adapmixed"),
        (["--order", "1"], "order must be > 1, got 1.0"),
        (["--queries", "0"], "queries must be in"),
        (["--block", "100000"], "block must be in"),
    ],
)
def test_evaluate_refuses(
    text: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *MODELS, "--text", str(text), *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_pmixed_is_budgeted_for_its_run(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    pmixed = ["--mechanism", "pmixed", "--epsilon", "7"]
    arguments = ["--text", str(text), "--queries", "30", "--json", str(path)]
    assert main(["evaluate", *MODELS, *arguments, *pmixed]) == 0
    method = json.loads(path.read_text(encoding="utf-8"))["methods"][-1]
    assert 6.999 < method["epsilon"] <= 7
    assert "Up to 30 answered queries" in method["guarantee"]
    few = [*pmixed, "--budget-queries", "10"]
    assert main(["evaluate", *MODELS, *arguments, *few]) == 2
    assert "queries must stay within the budget of 10" in capsys.readouterr().err
    prompt = ["--prompt", "The", "--max-new-tokens", "5"]
    assert main(["generate", *MODELS, *prompt, *pmixed]) == 0
    assert "Up to 5 answered queries" in capsys.readouterr().err


POOL = ["--mechanism", "clipped-log-pool", "--lower=-0.25", "--upper=1", "--scale", "2"]


def test_evaluate_under_a_filter(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("\n\n".join(held_out_text()[:8]), encoding="utf-8")
    path = tmp_path / "out.json"
    filtered = [*POOL, "--filter-epsilon", "0.3", "--adjacency", "replace_one"]
    counts = ["--release-counts", "3", "--release-sigma", "60"]
    arguments = ["--text", str(text), "--queries", "70", "--json", str(path), *filtered]
    assert main(["evaluate", *MODELS, *arguments, *counts, "--operator"]) == 0
    output = capsys.readouterr()
    report = json.loads(path.read_text(encoding="utf-8"))
    public, pool = report["methods"]
    assert "per-model filter" in pool["guarantee"] and pool["adjacency"] == "replace_one"
    assert 0.29 < pool["epsilon"] <= 0.3
    # With so small a budget hardly anything is contributed.
    assert pool["perplexity"] == pytest.approx(public["perplexity"], rel=0.05)
    assert [queries for queries, _ in pool["perplexities"]] == [64, 70]
    assert "perplexity of queries" in output.out and "65 to 70" in output.out
    released = report["released_counts"]
    assert [one["spent_above"] for one in released] == [0.25, 0.5, 0.75]
    assert all(one["noisy_count"] == round(one["noisy_count"]) for one in released)
    assert output.out.count("may be published") == 4  # the guarantee and the counts
    assert "PRIVATE" in output.err and "PRIVATE" not in output.out
    assert len(output.err.strip().splitlines()) == 1 + 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--release-counts", "2"], "--release-counts and --release-sigma must be given together"),
        (
            ["--release-counts", "2", "--release-sigma", "9"],
            "--release-counts needs --filter-epsilon",
        ),
        (
            [*POOL, "--filter-epsilon=2", "--release-counts=2", "--release-sigma=9", "--seed=1"],
            "--seed cannot be used with --release-counts",
        ),
        (
            [*POOL, "--filter-epsilon=2", "--release-counts=2", "--release-sigma=9"]
            + ["--keep-counts"],
            "--keep-counts needs --release-counts and --ledger",
        ),
        (
            [*POOL, "--filter-epsilon=2", "--ledger=x", "--keep-counts"],
            "--keep-counts needs --release-counts and --ledger",
        ),
        (
            [*POOL, "--filter-epsilon=2", "--release-counts=900", "--release-sigma=9"],
            "releases must leave some of the budget",
        ),
        (
            ["--mechanism=pmixed", "--adjacency=replace_one"],
            "--adjacency must be zero_out for pmixed, got 'replace_one'",
        ),
        (["--adjacency=replace_one"], "--adjacency must be add_remove or zero_out for adapmixed"),
        (
            ["--mechanism=clipped-mixing", "--lower=0.5", "--upper=2", "--filter-epsilon=3"]
            + ["--adjacency=add_remove"],
            "adjacency must be 'zero_out' or 'replace_one' under a filter",
        ),
    ],
)
def test_generate_refuses(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *MODELS, "--prompt", "The", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace_one"])
def test_the_neighbours_that_are_asked_for(
    adjacency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mechanism = POOL if adjacency == "replace_one" else ["--preset", "wikitext-103"]
    short = ["--prompt", "The", "--max-new-tokens", "2", "--adjacency", adjacency]
    assert main(["generate", *MODELS, *short, *mechanism, "--operator"]) == 0
    words = {"zero_out": "zero-out", "add_remove": "add/remove", "replace_one": "replace-one"}
    assert f"({words[adjacency]})" in capsys.readouterr().err


def test_demo_for_other_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--queries", "12", "--adjacency", "replace_one"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    fixed = [m for m in report["methods"] if m["kind"] == "fixed"]
    assert len(fixed) == 4 and {m["adjacency"] for m in fixed} == {"replace_one"}
    assert len(report["methods"]) == 6 and "replace-one" in report["sample"]["guarantee"]
    for name in ("pmixed", "adapmixed"):
        assert f"{name} is left out: --adjacency must be" in printed


def test_demo_with_diagnostics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--out", str(tmp_path), "--queries", "12", "--diagnostics"]
    assert main(arguments) == 0
    assert "the utility theorem (nats a token)" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    found = {one["name"]: one["diagnostics"]["utility"] for one in report["methods"]}
    for name in ("pmixed", "adapmixed"):
        assert found[name]["gap"] <= found[name]["mean_bound"] <= found[name]["bound"]


def test_bad_outputs_are_refused_before_the_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "missing" / "out.json")
    missing_base = ["--base", str(tmp_path / "no-base"), "--ensemble", str(DEMO_ENSEMBLE)]
    assert main(["evaluate", *missing_base, "--text", str(text), "--json", nowhere]) == 2
    assert "--json must name a file in an existing folder" in capsys.readouterr().err
    assert main(["evaluate", *missing_base, "--text", str(text)]) == 2
    error = capsys.readouterr().err
    assert "no-base" in error and len(error.strip().splitlines()) == 1


def test_the_demo_checks_its_arguments_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for queries in ("0", "-5", "10000000"):
        assert main(["demo", "--out", str(tmp_path / "out"), "--queries", queries]) == 2
        printed = capsys.readouterr()
        assert "queries must be" in printed.err and "training" not in printed.out
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "--out must name a folder, got the file" in capsys.readouterr().err


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *MODELS, "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    missing = ["--base", str(demo_base()), "--ensemble", str(tmp_path)]
    assert main(["generate", *missing, "--prompt", "x"]) == 2
    assert "ensemble.json" in capsys.readouterr().err
