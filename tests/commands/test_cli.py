"""The command line: every command, its output files, its errors."""

import argparse
import json
import shlex
from pathlib import Path

import pytest
from trained_demo import DEMO_ENSEMBLE, copy_trained

from adapmixed.cli import _parser, main
from adapmixed.data.demo import demo_base, held_out_text
from adapmixed.privacy import Accountant, read_ledger
from adapmixed_lab.cli import _parser as laboratory_parser
from adapmixed_lab.cli import main as laboratory

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
METHOD_FIELDS = {
    "name", "perplexity", "queries", "epsilon", "delta", "guarantee", "unit", "adjacency",
    "method", "order",
}  # fmt: skip


def test_no_command_has_more_options_than_a_screen_shows() -> None:
    for parser in (_parser(), laboratory_parser()):
        (found,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
        for name, command in found.choices.items():
            assert sum(bool(one.option_strings) for one in command._actions) <= 26, name


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:3]), encoding="utf-8")
    return path


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--base", str(demo_base())]) == 0
    output = capsys.readouterr().out
    for word in ("instruction set:", "CUDA kernels:", "GPU:", "torch:", "transformers is tested: "):
        assert word in output
    assert "1000 head members take: 0.04 GB in bfloat16 at rank 8" in output


@pytest.mark.slow
def test_demo_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_trained(tmp_path / "report")
    assert main(["demo", "--out", str(tmp_path / "report"), "--queries", "48"]) == 0
    printed = capsys.readouterr().out
    steps = [line for line in printed.splitlines() if " of 5: " in line]
    assert [step.split(" s] ")[1][0] for step in steps] == ["1", "2", "3", "4", "5"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    names = [method["name"] for method in report["methods"]]
    assert names == [
        "public", "unprotected", names[2], "one adapter, all text", "pmixed", "adapmixed",
        "clipped-log-pool, ε ≤ 1", "clipped-log-pool, ε ≤ 3",
        "clipped-mixing, ε ≤ 1", "clipped-mixing, ε ≤ 3",
    ]  # fmt: skip
    assert names[2].startswith("unprotected pool, κ = ")
    for method in report["methods"]:
        assert set(method) >= METHOD_FIELDS
        assert method["queries"] == 48
        assert isinstance(method["guarantee"], str) and method["guarantee"]
        assert method["name"] in printed
    assert all(one["epsilon"] is None for one in report["methods"][1:4])
    assert report["methods"][0]["epsilon"] == 0
    assert 0.45 < report["methods"][5]["epsilon"] < 2
    for method in report["methods"][6:]:
        budget = float(method["name"][-1])
        assert method["kind"] == "fixed" and 0.8 * budget < method["epsilon"] <= budget
    assert {"format_version", "environment", "config"} <= set(report)
    # The sample is drawn from the system's randomness, so it may end with its first token.
    assert isinstance(report["sample"]["text"], str)


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


@pytest.mark.parametrize(
    "mechanism",
    ["clipped-mixing lower=0.6 upper=2 order=6", "clipped-log-pool lower=-0.5 upper=1 scale=2"],
)
@pytest.mark.slow
def test_budgets_of_shards_go_on_from_their_ledger(
    mechanism: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ledger.db"
    arguments = ["--prompt", "The try statement", "--max-new-tokens", "4", "--epsilon", "3"]
    arguments += ["--mechanism", mechanism, "--ledger", str(path)]
    spent = []
    for _ in range(2):
        assert main(["generate", *MODELS, *arguments]) == 0
        error = capsys.readouterr().err
        assert "ε = 3" in error or "ε = 2.9" in error
        assert "a budget of every shard" in error and "may be published" in error
        assert "PRIVATE" not in error and "spent of" not in error
        with Accountant(1e-5, epsilon=3.0, path=path, create=False) as accountant:
            spent.append(accountant.spent)
            assert spent[-1].max() <= accountant.limit
    assert (spent[0] > 0).all() and (spent[1] > spent[0]).all()
    assert main(["generate", *MODELS, *arguments, "--operator"]) == 0
    error = capsys.readouterr().err
    assert "PRIVATE, for the operator: spent of a budget of" in error
    assert len([line for line in error.splitlines() if line.startswith("  ")]) == 64
    charges = read_ledger(path).charges
    for other in (["--epsilon", "4"], ["--delta", "2e-6"]):
        assert main(["generate", *MODELS, *arguments, *other]) == 2
        error = capsys.readouterr().err
        assert f"{other[0]} must be what the ledger was created with" in error
    assert read_ledger(path).charges == charges


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mechanism", "clipped-mixing"], "--mechanism clipped-mixing needs lower, upper"),
        (["--mechanism", "adapmixed scale=2"], "--mechanism adapmixed does not take scale: keys"),
        (["--mechanism", "pmixed epsilon=8 top_k=2"], "--mechanism pmixed does not take top_k"),
        (["--mechanism", "pmixed epsilon=8 delta=0.1"], "does not take delta: use --delta"),
        (["--mechanism", "adapmixed queries=2"], "--mechanism adapmixed does not take queries"),
        (["--mechanism", "public order=3"], "public does not take order: keys are none"),
        (["--mechanism", "pmixed preset=pubmed"], "--mechanism pmixed does not take preset"),
        (["--mechanism", "adapmixed preset=mine"], "preset must be one of wikitext-103"),
        (["--mechanism", "pate"], "--mechanism must be one of adapmixed, pmixed"),
        (["--mechanism", ""], "--mechanism must be "),
        (["--mechanism", "adapmixed order"], "--mechanism adapmixed must have KEY=VALUE once for"),
        (["--mechanism", "adapmixed order=2 order=3"], "got 'order=3'"),
        (["--mechanism", "adapmixed 'order=3"], "--mechanism must be 'NAME KEY=VALUE ...'"),
        (
            ["--mechanism", "clipped-log-pool lower=-1,upper=1,scale=2"],
            "--mechanism clipped-log-pool: lower must be a number, got '-1,upper=1,scale=2'",
        ),
        (["--mechanism", "adapmixed order=high"], "order must be a number, got 'high'"),
        (["--mechanism", "adapmixed loss_orders=2,x"], "must be a number, got 'x'"),
        (["--mechanism", "pmixed epsilon=8 queries=2.5"], "queries must be an integer, got '2.5'"),
        (["--mechanism", "adapmixed order=none"], "order must be a number, got 'none'"),
        (["--epsilon", "2"], "--epsilon must be None for AdaPMixED, got 2.0"),
        (["--mechanism", "adapmixed order=1"], "order must be > 1, got 1.0"),
        (["--mechanism", "adapmixed"] * 2, "must not be repeated, got 'adapmixed' twice"),
        (["--queries", "0"], "queries must be"),
        (["--block", "100000"], "block must be <="),
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


POOL = ["--mechanism", "clipped-log-pool lower=-0.25 upper=1 scale=2"]


def test_evaluate_with_a_budget_of_every_shard(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("\n\n".join(held_out_text()[:8]), encoding="utf-8")
    path = tmp_path / "out.json"
    budget = [*POOL, "--epsilon", "0.3", "--adjacency", "replace_one"]
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mechanism", "clipped-log-pool lower=1 upper=2"], "lower (a log-ratio) must be <= 0"),
        (["--epsilon", "0", *POOL], "--epsilon must be > 0"),
        (["--delta", "1", *POOL], "--delta must be <= 0.1"),
        (["--epsilon", "2", "--mechanism", "adapmixed"], "None for AdaPMixED, got 2.0: its losses"),
        (["--epsilon", "2", "--mechanism", "pmixed epsilon=8"], "the same for every member"),
        (["--epsilon", "2", "--mechanism", "unprotected"], "no bound that could be charged"),
        (["--epsilon", "2", "--mechanism", f"{POOL[1]} queries=9"], "queries must be None if ev"),
        (["--epsilon", "0.1", "--mechanism", "clipped-mixing lower=0.5 upper=2"], "at order 8.0"),
        (["--adjacency=replace_one", "--mechanism", "adapmixed"], "be 'zero_out' for AdaPMixED"),
        (["--memory", "1K", *POOL], "generate: --memory must be >= "),
        (["--max-new-tokens", "0", *POOL], "generate: --max-new-tokens must be an integer >= 1"),
        (["--max-new-tokens", "99999", *POOL], "generate: --max-new-tokens must be <= "),
        (["--temperature", "0", *POOL], "generate: --temperature must be >= 0.01"),
        (["--top-k", "0", *POOL], "generate: --top-k must be an integer >= 1"),
        (["--chat", "--prompt", "More", *POOL], "--chat takes one prompt, got 2"),
    ],
)
def test_generate_refuses(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *MODELS, "--prompt", "The", *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1
    assert error.startswith("adapmixed generate: ") and "memory_bytes" not in error


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--mechanism", "adapmixed preset=wikitext-103"], "(zero-out)"),
        (["--mechanism", "adapmixed adjacency=add_remove"], "(the paper's leave-one-out)"),
        ([*POOL, "--adjacency", "replace_one"], "(replace-one)"),
    ],
)
def test_the_neighbours_that_are_asked_for(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The paper's leave-one-out is a setting of AdaPMixED, and the guarantee states it."""
    short = ["--prompt", "The", "--max-new-tokens", "2", *given]
    assert main(["generate", *MODELS, *short, "--operator"]) == 0
    assert words in capsys.readouterr().err


def test_missing_files_are_named_before_the_work(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere, given = str(tmp_path / "missing" / "out.json"), ["--text", str(text)]
    no_base = ["--base", str(tmp_path / "no-base"), "--ensemble", str(DEMO_ENSEMBLE)]
    no_ensemble = ["--base", str(demo_base()), "--ensemble", str(tmp_path), "--prompt", "x", *POOL]
    for command, words in (
        (["evaluate", *no_base, *given, "--json", nowhere], "--json must name a file in an exist"),
        (["evaluate", *no_base, *given], "no-base"),
        (["evaluate", *MODELS, "--text", str(tmp_path / "none.txt")], "none.txt"),
        (["generate", *no_ensemble], "ensemble.json"),
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.strip().splitlines()) == 1


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


ANSWERS = "--ensemble e --mechanism 'clipped-log-pool lower=0 upper=1 queries=9'"


@pytest.mark.parametrize(
    "command",
    [
        "train --corpus builtin --output out",
        "evaluate --ensemble e --text text.txt",
        f"generate {ANSWERS} --prompt x",
        f"chat {ANSWERS}",
        f"serve {ANSWERS} --ledger ledger --port 0",
        "doctor",
        "dp-sgd --corpus builtin --output out --epsilon 1 --delta 1e-5",
        "reproduce table2 --scale full --ensemble e --text text.txt",
    ],
)
def test_a_base_below_a_folder_that_is_here_is_no_hub_name(
    command: str, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(text.parent)
    Path("models").mkdir()
    program = laboratory if command.startswith(("dp-sgd", "reproduce")) else main
    assert program([*shlex.split(command), "--base", "models/none"]) == 2
    printed = capsys.readouterr()
    words = ": --base must be an existing folder or a hub name, got "
    assert words in printed.err.splitlines()[-1]
    assert "asking the model hub" not in printed.err and printed.out == ""
