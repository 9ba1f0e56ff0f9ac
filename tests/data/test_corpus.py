"""Corpora: their documents, the names of documents, and their errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from training_cases import write_base

from adapmixed.cli import main
from adapmixed.data import Corpus, Document
from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.mechanisms import ClippedLogPool
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.rng import SecureRandom
from adapmixed.text import read_text
from adapmixed.training import assign_shards
from adapmixed.training.settings import PRESETS

ROWS = [
    {"user": "ann", "text": "one"},
    {"user": 7, "text": "two"},
    {"user": "ann", "text": ["three", "four"]},
    {"user": "bob", "text": " "},
    {"user": "bob", "text": None},
]
WIKI = " = Title = \n\n text \n = = Section = = \n more \n = Other = \n end \n"


def pairs(corpus: Corpus) -> list[tuple[str, str]]:
    return [(document.identifier, document.text) for document in corpus.documents()]


def write_rows(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    return path


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (the train extra)")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


HEADING = PRESETS["wikitext-103"].new_document
LINES = "\n\n".join(map(json.dumps, ROWS))
FILE, ROW = (f"document ({kind}, by its position)" for kind in ("article", "row"))
NAMED = "all documents of one 'user'"
# The files, the settings, the documents, and what one is; of a folder unless there is one file.
SOURCES: dict[str, tuple[dict[str, str], dict[str, Any], list[tuple[str, str]], str]] = {
    "files of a folder": (
        {"b.txt": "two\n\nstill two", "sub/a.TXT": "one", "README.md": "", "state.json": ""},
        {}, [("b.txt", "two\n\nstill two"), ("sub/a.TXT", "one")], "document (file)",
    ),
    "articles": ({"wiki.train.tokens": "a\nb\n\n \nc\n"}, {},
                 [("wiki.train.tokens#0", "a\nb"), ("wiki.train.tokens#1", "c")], FILE),
    "text by any name": ({"README.md": "one"}, {}, [("README.md#0", "one")], FILE),
    "headings": (
        {"wiki.txt": WIKI}, {"new_document": HEADING},
        [("wiki.txt#0", WIKI.split("\n = O")[0]), ("wiki.txt#1", " = Other = \n end ")], FILE,
    ),
    "headings in rows": (
        {"w.jsonl": "\n".join(json.dumps({"text": line}) for line in WIKI.splitlines())},
        {"new_document": HEADING},
        [("w.jsonl#0", WIKI[: WIKI.index(" = Other")]), ("w.jsonl#1", " = Other = \n end \n")], ROW,
    ),
    "rows by a column": (
        {"rows.jsonl": LINES}, {"id_column": "user"},
        [("ann", "one"), ("7", "two"), ("ann", "three\nfour")], NAMED,
    ),
    "rows": ({"rows.jsonl": LINES}, {}, [
        ("rows.jsonl#0", "one"), ("rows.jsonl#1", "two"), ("rows.jsonl#2", "three\nfour"),
    ], ROW),
    "another column": ({"r.jsonl": '{"said": "five"}'}, {"text_column": "said"},
                       [("r.jsonl#0", "five")], ROW),
    "CSV": ({"b.CSV": 'user,text\nann,"one,\n""two"""\nbob,\n7,three\n'}, {"id_column": "user"},
            [("ann", 'one,\n"two"'), ("7", "three")], NAMED),
    "a byte order mark": ({"a.txt": "\ufeffone"}, {}, [("a.txt#0", "one")], FILE),
    "one in rows": ({"a.jsonl": '\ufeff{"text": "one"}'}, {}, [("a.jsonl#0", "one")], ROW),
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_what_documents_are(source: str, tmp_path: Path) -> None:
    files, settings, documents, unit = SOURCES[source]
    for name, content in files.items():
        write_named(tmp_path, [name], content or " ")
    corpus = Corpus(str(tmp_path / name if len(files) == 1 else tmp_path), **settings)
    assert pairs(corpus) == documents
    assert corpus.unit == unit and corpus.positional == ("its position" in unit)
    assert str(tmp_path) not in json.dumps(corpus.description())
    column = settings.get("text_column", "text") if unit in (ROW, NAMED) else None
    assert corpus.description()["text_column"] == column
    # If documents have names, a preset's expression is not used.
    asked = None if "id_column" in settings or len(files) > 1 else HEADING
    assert corpus.with_new_document(HEADING).new_document == asked


@pytest.mark.slow
def test_parquet(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rows = [{"user": f"{name}{i}", "text": f"text {i}", "other": i} for i in range(3000)]
        write_table(tmp_path / f"{name}.parquet", rows)
    corpus = Corpus(str(tmp_path), id_column="user")
    found = pairs(corpus)
    assert (len(found), found[0], found[-1]) == (6000, ("a0", "text 0"), ("b2999", "text 2999"))
    with pytest.raises(ValueError, match="column must be one of other, text, user, got 'who'"):
        pairs(Corpus(str(tmp_path), id_column="who"))
    from pyarrow import Table, parquet

    two = Table.from_arrays([["ann"], ["bob"], ["x"]], names=["user", "user", "text"])
    parquet.write_table(two, tmp_path / "two.parquet")
    with pytest.raises(ValueError, match="columns must differ, got two with the name 'user'"):
        pairs(Corpus(str(tmp_path / "two.parquet"), id_column="user"))
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="must be a Parquet file"):
        pairs(corpus)


@pytest.mark.slow
def test_hub_data_sets_are_read_through_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed (the train extra)")
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    write_rows(tmp_path / "set" / "train.jsonl", [{"user": str(i), "text": "x"} for i in range(5)])
    write_rows(tmp_path / "set" / "test.jsonl", [{"user": "t", "text": "y"}])
    source = f"hub:{tmp_path / 'set'}"
    assert [name for name, _ in pairs(Corpus(source, id_column="user"))] == list("01234")
    assert pairs(Corpus(source, split="test")) == [("test#0", "y")]
    with pytest.raises(ValueError, match="split 'none', cannot be read"):
        pairs(Corpus(source, split="none"))


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BAD_ROWS = [
    ({"text": "x"}, "line 1: column must be one of text, got 'user'"),
    ({"user": None, "text": "x"}, "user must be a name"),
    ({"user": 1.5, "text": "x"}, "user must be a name"),
    ({"user": "a", "text": 3}, "text must be text"),
    ({"user": "a", "text": "\ud800"}, "text must hold Unicode"),
]
BAD_TALKS = [
    ("hi", "message 0 is not one"),
    ([*TALK, "bye"], "message 2 is not one"),
    ([{"from": "human", "value": "hi"}], "message 0 is not one"),
    ([{"role": "user", "content": None}], "message 0 is not one"),
    ([TALK[0], TALK[0]], "must fit the base's chat template: roles must alternate"),
    ([{"role": "user", "content": "\ud800"}], "must hold Unicode"),
]


@pytest.mark.parametrize(
    ("name", "content", "settings", "reason"),
    [
        *(
            ("a.jsonl", json.dumps(row).encode(), {"id_column": "user"}, reason)
            for row, reason in BAD_ROWS
        ),
        *(
            (
                "a.jsonl",
                b"\n\n" + json.dumps({"messages": value}).encode(),
                {"chat_column": "messages"},
                f"a.jsonl, line 3: messages .*{reason}",
            )
            for value, reason in BAD_TALKS
        ),
        ("a.jsonl", b'{"text": "x"}\n{\n', {}, "line 2 must be a JSON object"),
        ("a.txt", b"ab\xff", {}, "must be UTF-8"),
        ("a.txt", "one".encode("utf-16-le"), {}, "must be UTF-8 .*converts UTF-16"),
        ("a.txt", "мир\nмир".encode("utf-16-le"), {}, "must be UTF-8 .*converts UTF-16"),
        ("a.csv", b"user,text\nann\n", {}, "line 2 must have 2 columns"),
        ("a.csv", b"user,text\nann,b,c\n", {}, "line 2 must have 2 columns"),
        ("a.csv", b'text\n"one\n', {}, "must be a CSV file"),
        ("a.csv", b"text,text\na,b\n", {}, "a.csv: columns must differ"),
        ("a.tsv", b"user\ttext\nann\tone\n", {}, "corpus must hold .* rows of CSV, JSON lines"),
        ("a.txt.gz", b"", {}, "corpus must hold unpacked text"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        list(Corpus(str(tmp_path / name), **settings).documents(render))


def test_refused_sources(tmp_path: Path) -> None:
    def refuses(reason: str, source: str, **settings: Any) -> None:
        with pytest.raises(ValueError, match=reason):
            Corpus(source, **settings)

    refuses(r"must be a file, a folder, 'builtin' or hub:NAME.*, got 'nowhere'", "nowhere")
    refuses("holds none of them", str(tmp_path))
    write_named(tmp_path, ["tables/b.TSV"])
    refuses("corpus must hold .* rows of CSV, .* got .*b.TSV", str(tmp_path / "tables"))
    shutil.rmtree(tmp_path / "tables")
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.jsonl").write_text("{}")
    refuses("holds json and text", str(tmp_path))
    refuses("split", "builtin", split="train")
    refuses("id_column", "builtin", id_column="user")
    rows = str(tmp_path / "a.jsonl")
    refuses("must be unset .* if documents have names", rows, id_column="u", new_document="x")
    refuses("regular expression", rows, new_document="(")
    refuses("id_column must not be the text_column", rows, id_column="text")
    refuses("chat_column excludes text_column", rows, text_column="x", chat_column="messages")


@pytest.mark.parametrize("revision", [None, "main", "refs/pr/1"])
@pytest.mark.parametrize("config", [None, "en"])
def test_a_hub_data_set_is_named_with_its_configuration_and_revision(
    config: str | None, revision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("adapmixed.data.corpus._hub_rows", lambda *given: asked.append(given) or ())
    text = "hub:some/name" + f":{config}" * bool(config) + f"@{revision}" * bool(revision)
    corpus = Corpus(text)
    assert corpus.positional and list(corpus.documents()) == []
    assert asked == [("some/name", config, revision, "train")]
    described = {"source": "hub:some/name", "config": config, "revision": revision}
    assert described.items() <= corpus.description().items()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_must_have_one_name(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    """Otherwise its text would be two documents, in two shards."""
    (tmp_path / "a.txt").write_text("x")
    link(tmp_path / "a.txt", tmp_path / "b.txt")
    with pytest.raises(ValueError, match="each file once, but .*a.txt and .*b.txt are one"):
        Corpus(str(tmp_path))
    with pytest.raises(ValueError, match="each file once"):
        read_text(tmp_path)


LAYOUTS = [
    {"train": ["train.jsonl"], "validation": ["validation.jsonl"], "test": ["test.jsonl"]},
    {"train": ["Train-00000-of-00002.jsonl", "Train-00001-of-00002.jsonl"], "test": ["TEST.jsonl"]},
    {"train": ["x_training.jsonl", "x_training2.jsonl"], "test": ["x_eval.jsonl"]},
    {"train": ["training/en/test.jsonl", "training/fr.jsonl"], "test": ["evaluation/en.jsonl"]},
    {"train": ["en.train.jsonl"], "validation": ["en.valid.jsonl"], "test": ["en.testing.jsonl"]},
]


def write_named(folder: Path, names: Iterable[str], content: str = "") -> None:
    """Write files, each with the content, or with one row that has its name as text."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content or json.dumps({"text": name}), encoding="utf-8")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_several_splits_is_read_by_split(
    layout: dict[str, list[str]], tmp_path: Path
) -> None:
    write_named(tmp_path, ["extra.jsonl", *(name for names in layout.values() for name in names)])
    splits = ", ".join(sorted([*layout, "unnamed"]))
    with pytest.raises(ValueError, match=rf"one split, but .* holds {splits}: .* \(--split\)"):
        Corpus(str(tmp_path))
    for split, names in [*layout.items(), ("unnamed", ["extra.jsonl"])]:
        corpus = Corpus(str(tmp_path), split=split)
        assert [text for _, text in pairs(corpus)] == sorted(names)
        assert corpus.description()["split"] == split
    assert len(pairs(Corpus(str(tmp_path), split="all"))) == 1 + sum(map(len, layout.values()))
    with pytest.raises(ValueError, match=f"split must be all or one of {splits} in .* got tran"):
        Corpus(str(tmp_path), split="tran")


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("unnamed", ["a.jsonl", "latest.jsonl", "trainer.jsonl"]),
        ("test", ["test-0.jsonl", "test-1.jsonl"]),
    ],
)
def test_a_folder_of_one_split_or_none_is_read_whole(
    split: str, names: list[str], tmp_path: Path
) -> None:
    write_named(tmp_path, names)
    corpus = Corpus(str(tmp_path))
    assert [text for _, text in pairs(corpus)] == names
    with pytest.raises(ValueError, match=f"split must be all or one of {split} in .* got train"):
        Corpus(str(tmp_path), split="train")


def test_text_files_by_split(tmp_path: Path) -> None:
    """A split in one file is read as the file: its articles are the documents."""
    articles = "one\n\ntwo\n"
    write_named(tmp_path, ["wiki.train.tokens", "wiki.valid.tokens"], articles)
    write_named(tmp_path / "test", ["ann.txt", "bob.txt"], articles)
    corpus = Corpus(str(tmp_path), split="train")
    file = Corpus(str(tmp_path / "wiki.train.tokens"))
    assert pairs(corpus) == pairs(file) and len(pairs(corpus)) == 2
    assert corpus.positional
    with pytest.raises(ValueError, match="--text must hold one split, .*: name a file"):
        read_text(tmp_path, name="--text")
    corpus = Corpus(str(tmp_path), split="test")
    assert pairs(corpus) == [("test/ann.txt", articles), ("test/bob.txt", articles)]
    assert not corpus.positional and read_text(tmp_path / "test")[0].identifier == "ann.txt"
    (tmp_path / "test/bob.txt").unlink()  # its going does not rename the other
    assert pairs(Corpus(str(tmp_path), split="test")) == [("test/ann.txt", articles)]


def render(messages: list[dict[str, Any]]) -> str:
    if len({message["role"] for message in messages}) < len(messages):
        raise TypeError("roles must alternate")
    return "".join(f"<{message['role']}>{message['content']}\n" for message in messages)


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", write_rows), ("a.parquet", write_table)])
def test_conversations_are_rendered(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    talk = [TALK[0] | {"name": "Ann"}, TALK[1]]  # in Parquet, the other message's name is null
    talks = {"ann": talk, "bob": [], "eve": None}
    path = write(tmp_path / name, [{"user": u, "messages": m} for u, m in talks.items()])
    corpus = Corpus(str(path), id_column="user", chat_column="messages")
    seen: list[Any] = []
    found = list(corpus.documents(lambda messages: seen.append(messages) or render(messages)))
    assert found == [Document("ann", "<user>hi\n<assistant>hello\n")] and seen == [talk]
    assert corpus.description()["text_column"] is None
    by_position = Corpus(str(path), chat_column="messages")
    assert by_position.positional and by_position.with_new_document("x") == by_position
    with pytest.raises(ValueError, match="render must be given for chat_column 'messages'"):
        corpus.documents()


# Documents named by position: the edits that move other documents, and the caveats.

SHARDS, LENGTH = 16, 200
PROMPT = torch.tensor([[1, 2, 3]])
POSITIONS = "Documents were named by positions in a file"
NAMES = "It was not recorded how documents were named"
ARTICLES = [f"article {k}: some text of person {k}\nsecond line of {k}" for k in range(LENGTH)]
PEOPLE = [f" = Person {k} = \n\n text about {k} \n more \n" for k in range(LENGTH)]
USERS = [{"user": f"user-{k}", "text": f"text of {k}"} for k in range(LENGTH)]


def changed(folder: Path, first: str, second: str, name: str, **settings: Any) -> int:
    """Return the number of shards that one edit changes."""
    shards = []
    for text in (first, second):
        (folder / name).write_text(text)
        corpus = Corpus(str(folder / name), **settings)
        assert corpus.positional is ("id_column" not in settings)
        documents = list(corpus.documents())
        homes = assign_shards([doc.identifier for doc in documents], SHARDS, key=b"k" * 32)
        pairs = sorted(zip(documents, homes, strict=True), key=lambda pair: pair[0].identifier)
        shards.append([[doc.text for doc, home in pairs if home == at] for at in range(SHARDS)])
    return sum(old != new for old, new in zip(*shards, strict=True))


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


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
        ("rows", (USERS[7], {"user": "user-7", "text": "one more"}), True),
    ],
)
def test_an_edit_moves_others_that_positions_name(
    kind: str, new: tuple[Any, ...], moves: bool, tmp_path: Path
) -> None:
    items: Any = {"articles": ARTICLES, "headings": PEOPLE, "rows": USERS}[kind]
    heading = {"new_document": HEADING}
    written: dict[str, list[tuple[str, Callable[[Any], str], dict[str, Any]]]] = {
        "articles": [("notes.txt", "\n\n".join, {})],
        "headings": [("wiki.txt", "".join, heading), ("wiki.jsonl", wiki_rows, heading)],
        "rows": [("rows.jsonl", lines, {})],
    }
    for name, write, settings in written[kind]:
        texts = (write(items), write([*items[:7], *new, *items[8:]]))
        count = changed(tmp_path, *texts, name, **settings)
        assert count > 10 if moves else count == 1
    if kind == "rows":  # a name is stable
        assert changed(tmp_path, *texts, name, id_column="user") == 1


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


def test_a_guarantee_says_that_positions_assigned_the_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, ensemble, corpus = (
        write_base(tmp_path / "base"),
        tmp_path / "ensemble",
        tmp_path / "a.txt",
    )
    corpus.write_text("\n\n".join(ARTICLES[:12]))
    given = ["--base", str(base), "--corpus", str(corpus), "--output", str(ensemble)]
    small = ["--models=2", "--epochs=1", "--block-size=16", "--training=rank=2", "--threads=1"]
    assert main(["train", *given, *small]) == 0
    assert "Its documents have no names of their own" in capsys.readouterr().err
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
            assert [c for c in (POSITIONS, NAMES) if c in sentence] == ([words] * bool(words))
    # The caveat about shards appears once; the caveat about positions appears in any case.
    unknown = named(ensemble, tmp_path / "unknown", None, shards=[])
    assert Ensemble.from_pretrained(base, unknown).unverified == ("shards",)
    known = named(ensemble, tmp_path / "known", "positions", shards=[])
    assert Ensemble.from_pretrained(base, known).unverified == ("shards", "positions")
    with pytest.raises(ValueError, match="document_names must be one of .* got 'often'"):
        read_manifest(named(ensemble, tmp_path / "wrong", "often"))
