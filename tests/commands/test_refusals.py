"""What commands refuse before they work: one line that names the option, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from trained_demo import MODELS

from adapmixed.cli import main
from adapmixed.data import held_out_text

pytestmark = pytest.mark.usefixtures("demo_ensemble")
CLIPPED = "clipped-log-pool lower=-0.5 upper=0.5"
POOL = ["--mechanism", CLIPPED]
ASKED = ["--epsilon=3", "--tokens=9"]
ANY = "for any number of tokens,"
HUB = "--corpus must be hub:NAME[:CONFIG][@REVISION], got "
GIVEN = {
    "generate": [*MODELS, "--prompt", "The"],
    "chat": [*MODELS, "--plain"],
    "compare": [*MODELS, "--prompt", "The"],
    "evaluate": [*MODELS, "--text", "text.txt"],
    "plan": [],
    "train": ["--base", ".", "--output", "out"],
}
"""What is given to each command before the options of a row, of which the last one counts."""

GENERATE: list[tuple[list[str], str]] = [
    (["--mechanism", "clipped-log-pool lower=1 upper=2"], "lower (a log-ratio) must be <= 0"),
    (["--epsilon", "0", *POOL], "--epsilon must be > 0"),
    (["--epsilon", "2", "--mechanism", "adapmixed"], "None for AdaPMixED, got 2.0: its losses"),
    (["--epsilon", "2", "--mechanism", "pmixed epsilon=8"], "the same for every member"),
    (["--epsilon", "2", "--mechanism", f"{CLIPPED} queries=9"], "queries must be None if ev"),
    (["--adjacency=replace_one", "--mechanism", "adapmixed"], "be 'zero_out' for AdaPMixED"),
    (["--memory", "1K", *POOL], "--memory must be >= "),
    (["--max-new-tokens", "0", *POOL], "--max-new-tokens must be an integer >= 1"),
    (["--max-new-tokens", "99999", *POOL], "--max-new-tokens must be <= "),
    (["--temperature", "0", *POOL], "--temperature must be >= 0.01"),
    (["--top-k", "0", *POOL], "--top-k must be an integer >= 1"),
    (["--batch", "0", *POOL], "--batch must be an integer >= 1, got 0"),
    (["--chat", "--prompt", "More", *POOL], "--chat takes one prompt, got 2"),
    (["--prompts", "blank.txt", *POOL], "a prompt in every line, line 2 of blank.txt is blank"),
    (["--prompts", "utf16.txt", *POOL], "must be UTF-8 text (iconv -f UTF-16"),
    (["--seed", "4", "--ledger", "x", *POOL], "--seed cannot be used with --ledger, got 4"),
    (["--ensemble", ".", *POOL], "ensemble.json"),
]
LEDGERS: list[tuple[list[str], str]] = [
    (["--epsilon", "2", *POOL, "--ledger", "x", "--no-create"],
     "--ledger must name an existing ledger with --no-create, got x"),
    (["--epsilon", "2", *POOL, "--no-create"], "--no-create needs --ledger"),
    # No mechanism is taken by default, above all not one whose ε must not be published.
    (["--ledger", "x"], "--mechanism must be given, or --plan: "),
    # A second run of the same command would be rejected.
    *((["--mechanism", text, "--ledger", "x"],
       f"--ledger needs --epsilon, {ANY} or queries= in --mechanism {text.split()[0]}")
      for text in (CLIPPED, "clipped-mixing lower=0.5 upper=2")),
    (["--mechanism", "pmixed epsilon=8", "--ledger", "x"],
     "--ledger needs queries= in --mechanism pmixed, the number of tokens of all runs"),
    (["--epsilon", "2", *POOL, "--ledger", "."], "--ledger must name a file in an existing folder"),
]  # fmt: skip
EVALUATE: list[tuple[list[str], str]] = [
    (["--result", "."], "--result must name a file in an existing folder"),
    (["--base", "./no-base", "--json", "none/out.json"], "--json must name a file in an exist"),
    (["--base", "./no-base", "--json", "/dev/null"], "--json must name a file in an exist"),
    (["--base", "./no-base"], "no-base"),
    (["--text", "none.txt"], "--text must name a text file or a directory of *.txt files, got"),
    (["--epsilon=2"], "--epsilon must be None for AdaPMixED, got 2.0: its losses depend"),
    (["--mechanism", "adapmixed"] * 2, "must not be repeated, got 'adapmixed' twice"),
    ([*POOL, f"--mechanism={CLIPPED.replace(' ', '  ')}"], f"got '{CLIPPED}' twice"),
    (["--queries", "0"], "--queries must be"),
    (["--block", "100000"], "--block must be <="),
    (["--mechanism", "pmixed epsilon=7 queries=10", "--queries", "30"],
     "up to 30 more with 10 left: ask for fewer (evaluate: --queries"),
]  # fmt: skip
PLAN: list[tuple[list[str], str]] = [
    (["--epsilon=1", "--models=2"], "--epsilon and --tokens must be given"),
    (["--epsilon=-1", "--models=3", "--tokens=9"], "epsilon must be > 0, got -1.0"),
    ([*ASKED, "--models=3", "--save=x"], "--save needs --ensemble"),
    ([*ASKED, "--ensemble=none"], "none does not"),
    ([*ASKED, "--ensemble=none", "--models=3"], "--models must not be given with --ensemble"),
    ([*ASKED, "--all"], "--all needs --ensemble or --models"),
    ([*ASKED, "--periods=2"], "--periods needs --ensemble or --models"),
    ([*ASKED, "--models=3", "--save=no/folder"], "--save must name a file in an existing fold"),
]
TRAIN: list[tuple[list[str], str]] = [
    (["--corpus", "nowhere"], "--corpus must be a file, a folder"),
    (["--corpus", "builtin", "--id-column", "user"], "--id-column applies to rows"),
    (["--corpus", "builtin"], "Unrecognized model"),
    (["--corpus", "builtin", "--training", "validation_fraction=x"],
     "--training: validation_fraction must be a number, got 'x'"),
    *((["--corpus", name], f"{HUB}'{name}'") for name in ("hub:", "hub:a:", "hub:a:b:c", "hub:a@")),
]  # fmt: skip
OTHERS = [
    ("chat", ["--mechanism", "public", "--turns", "0"], "--turns must be"),
    ("compare", [], "--mechanism must be given"),
]
TABLE = [
    *(("generate", *row) for row in [*GENERATE, *LEDGERS]),
    *(("chat", *row) for row in LEDGERS),
    *(("evaluate", *row) for row in EVALUATE),
    *(("plan", *row) for row in PLAN),
    *(("train", *row) for row in TRAIN),
    *OTHERS,
]


@pytest.mark.parametrize(("command", "options", "words"), TABLE)
def test_what_commands_refuse(
    command: str,
    options: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n\n".join(held_out_text()[:6]), encoding="utf-8")
    Path("blank.txt").write_text("The value\n \nIf the name\n", encoding="utf-8")
    Path("utf16.txt").write_text("a prompt", encoding="utf-16")
    before = sorted(tmp_path.iterdir())
    assert main([command, *GIVEN[command], *options]) == 2
    output = capsys.readouterr()
    assert output.out == "" and words in output.err
    assert output.err.startswith(f"adapmixed {command}: ") and "memory_bytes" not in output.err
    assert len(output.err.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
