"""Documents named by position: the edits that move other documents, and the caveats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from training_cases import write_base

from adapmixed.cli import main
from adapmixed.data import Corpus
from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.rng import SecureRandom
from adapmixed.training import assign_shards
from adapmixed.training.settings import PRESETS

pytestmark = pytest.mark.usefixtures("demo_ensemble")

SHARDS, LENGTH = 16, 200
PROMPT = torch.tensor([[1, 2, 3]])
HEADING = PRESETS["wikitext-103"].new_document
POSITIONS = "Documents were named by positions in a file"
NAMES = "It was not recorded how documents were named"
ARTICLES = [f"article {k}: some text of person {k}\nsecond line of {k}" for k in range(LENGTH)]
WIKI = [f" = Person {k} = \n\n text about {k} \n more \n" for k in range(LENGTH)]
ROWS = [{"user": f"user-{k}", "text": f"text of {k}"} for k in range(LENGTH)]


def changed(folder: Path, first: str, second: str, name: str, **settings: Any) -> int:
    """Return the number of shards that one edit changes."""
    found = []
    for text in (first, second):
        (folder / name).write_text(text)
        corpus = Corpus(str(folder / name), **settings)
        assert corpus.positional is ("id_column" not in settings)
        documents = list(corpus.documents())
        homes = assign_shards([one.identifier for one in documents], SHARDS, key=b"k" * 32)
        pairs = sorted(zip(documents, homes, strict=True), key=lambda pair: pair[0].identifier)
        found.append([[one.text for one, home in pairs if home == at] for at in range(SHARDS)])
    return sum(one != other for one, other in zip(*found, strict=True))


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def blank_lines(items: list[str]) -> str:
    return "\n\n".join(items)


def wiki_rows(items: list[str]) -> str:
    return lines([{"text": line} for line in "".join(items).splitlines()])


@pytest.mark.parametrize(
    ("kind", "new", "moves"),
    [
        ("articles", ("article 7: other words\nsecond line",), False),
        ("articles", ("article 7: some text\n\nsecond line of 7",), True),
        ("articles", ("",), True),
        ("articles", (), True),
        ("headings", (" = Person 7 = \n\n other text \n\n more \n",), False),
        ("headings", (" = Person 7 = \n\n text \n = More of mine = \n more \n",), True),
        ("headings", ("",), True),
        ("rows", ({"user": "user-7", "text": "other\n\ntext"},), False),
        ("rows", ({"user": "user-7", "text": ""},), False),
        ("rows", ({"user": "user-7", "text": None},), False),
        ("rows", (), True),
        ("rows", (ROWS[7], {"user": "user-7", "text": "one more"}), True),
    ],
)
def test_an_edit_moves_others_that_positions_name(
    kind: str, new: tuple[Any, ...], moves: bool, tmp_path: Path
) -> None:
    items: Any = {"articles": ARTICLES, "headings": WIKI, "rows": ROWS}[kind]
    heading = {"new_document": HEADING}
    written: dict[str, list[tuple[str, Callable[[Any], str], dict[str, Any]]]] = {
        "articles": [("notes.txt", blank_lines, {})],
        "headings": [("wiki.txt", "".join, heading), ("wiki.jsonl", wiki_rows, heading)],
        "rows": [("rows.jsonl", lines, {})],
    }
    for name, write, settings in written[kind]:
        texts = (write(items), write([*items[:7], *new, *items[8:]]))
        count = changed(tmp_path, *texts, name, **settings)
        assert count > 10 if moves else count == 1
    if kind == "rows":  # a name is stable
        assert changed(tmp_path, *texts, name, id_column="user") == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a public model, and an ensemble of two members trained on a text file's articles."""
    folder = tmp_path_factory.mktemp("positions")
    base = write_base(folder / "base")
    (folder / "notes.txt").write_text("\n\n".join(ARTICLES[:12]))
    torch.set_num_threads(1)
    train(base, folder / "notes.txt", folder / "ensemble")
    return base, folder / "ensemble"


def train(base: Path, corpus: Path, output: Path, *options: str) -> None:
    arguments = ["--base", str(base), "--corpus", str(corpus), "--output", str(output), *options]
    small = ["--models", "2", "--epochs", "1", "--block-size", "16", "--training", "rank=2"]
    assert main(["train", *arguments, *small, "--threads", "1"]) == 0


def named(ensemble: Path, folder: Path, names: str | None, **changes: Any) -> Path:
    """Copy the members with another `document_names`; None leaves it unrecorded."""
    content = json.loads((ensemble / "ensemble.json").read_text()) | changes
    del content["document_names"]
    folder.mkdir()
    for member in ensemble.glob("member-*"):
        (folder / member.name).symlink_to(member)
    if names is not None:
        content["document_names"] = names
    (folder / "ensemble.json").write_text(json.dumps(content))
    return folder


@pytest.mark.slow
def test_training_says_and_records_positions(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, _ = trained
    for name, options, positional in (
        ("a", (), True),
        ("b", ("--id-column", "user", "--share-shards"), False),
    ):
        (tmp_path / "rows.jsonl").write_text(lines(ROWS[:12]))
        train(base, tmp_path / "rows.jsonl", tmp_path / name, *options)
        written = json.loads((tmp_path / name / "ensemble.json").read_text())
        assert written["document_names"] == ("positions" if positional else "stable")
        said = "Its documents have no names of their own" in capsys.readouterr().err
        assert said == positional
        loaded = Ensemble.from_pretrained(base, tmp_path / name)
        assert loaded.unverified == (("positions",) if positional else ())


def test_a_guarantee_says_that_positions_assigned_the_shards(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    base, ensemble = trained
    assert read_manifest(ensemble).document_names == "positions"
    for names, unverified, words in (
        ("stable", (), None),
        ("positions", ("positions",), POSITIONS),
        (None, ("names",), NAMES),
    ):
        folder = named(ensemble, tmp_path / str(names), names)
        loaded = Ensemble.from_pretrained(base, folder)
        assert loaded.unverified == unverified
        path = tmp_path / f"{names}.ledger"
        with Accountant(1e-5, path=path) as accountant:
            settings = dict(accountant=accountant, rng=SecureRandom(), max_new_tokens=2)
            answered(loaded, ClippedLogPool(-0.5, 0.5, queries=40), PROMPT, **settings)  # type: ignore[arg-type]
            said = str(accountant.guarantee())
        for sentence in (said, str(read_ledger(path).guarantee)):
            assert [one for one in (POSITIONS, NAMES) if one in sentence] == ([words] * bool(words))
    # The caveat about shards appears once; the caveat about positions appears in any case.
    unknown = named(ensemble, tmp_path / "unknown", None, shards=[])
    assert Ensemble.from_pretrained(base, unknown).unverified == ("shards",)
    known = named(ensemble, tmp_path / "known", "positions", shards=[])
    assert Ensemble.from_pretrained(base, known).unverified == ("shards", "positions")
    with pytest.raises(ValueError, match="document_names must be one of .* got 'often'"):
        read_manifest(named(ensemble, tmp_path / "wrong", "often"))
