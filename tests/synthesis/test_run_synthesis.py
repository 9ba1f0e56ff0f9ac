"""Private texts end to end, from files, over kills, and with the ε of one text for all."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from processes import ended
from tiny_models import around, tiny_model, tokenizer

from adapmixed import cli
from adapmixed.data import Corpus, Document
from adapmixed.privacy.planner import recommended
from adapmixed.synthesis import Synthesis, run, synthesize
from adapmixed.synthesis.run import dealt

COUNT, SIZE, TOKENS = 3, 5, 6
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model with a tokenizer of single words."""
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", max_position_embeddings=64).save_pretrained(folder)
    around(tokenizer([59, *range(59), 60], eos_token="w60"), 0).save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a CSV file with 40 records."""
    rows = [f'{k},"w{k} w{k + 1}\nw{k + 2}"' for k in range(40)]
    path = tmp_path / "texts.csv"
    path.write_text("\n".join(["who,said", *rows]))
    return path


def begun(base: Path, texts: Path, **more: Any) -> Synthesis:
    settings: dict[str, Any] = {
        "epsilon": 8.0, "delta": 1e-6, "count": COUNT, "max_tokens": TOKENS, "batch": SIZE,
        "longest": 5, "plain": True, "top_k": None,
    }  # fmt: skip
    return synthesize(str(base), Corpus(str(texts), "said", "who"), "w20", **settings | more)


def journal_of(out: Path) -> list[dict[str, Any]]:
    lines = (out.with_name(f"{out.name}.private") / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_guarantee_is_that_of_one_text(base: Path, texts: Path) -> None:
    result = begun(base, texts)
    assert result.guarantee.budget == TOKENS and 7.9 < (result.guarantee.epsilon or 0) <= 8.0
    assert "one record is emptied" in str(result.guarantee)
    assert "A record is everything of one 'who'. If a record leaves, another" in result.promise
    written = dict(result)
    assert [*written] == [0, 1, 2] and all(isinstance(text, str) for text in written.values())
    assert not dict(result)  # another draw from the same records would not be paid for


def test_a_run_goes_on_from_any_line_of_its_journal(
    base: Path, texts: Path, tmp_path: Path
) -> None:
    """Nothing that was drawn is drawn again, and no batch gives more tokens than were paid for."""
    out = tmp_path / "out.csv"
    whole = begun(base, texts, out=out)
    expected = dict(whole)
    whole.close()
    path = tmp_path / "out.csv.private" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:cut]) + (lines[cut][:5] if cut < len(lines) else b""))
        kept = [json.loads(line) for line in lines[:cut]]
        again = begun(base, texts, out=out)
        written = dict(again)
        again.close()
        assert journal_of(out)[:cut] == kept
        spent = [entry["batch"] for entry in kept[1:] if len(entry) == 1]
        assert all(written[batch] == expected[batch] for batch in spent[:-1])  # each was complete
        assert cut < len(lines) or written == expected
        drawn = [entry["batch"] for entry in journal_of(out) if "token" in entry]
        assert all(1 <= drawn.count(batch) <= TOKENS for batch in range(COUNT))
        spent = [entry["batch"] for entry in journal_of(out)[1:] if len(entry) == 1]
        assert spent == [0, 1, 2]
        rows = [*csv.reader(out.read_text().splitlines())]
        assert rows[0] == ["text", "batch"] and len(rows) == 1 + COUNT


def test_a_batch_is_spent_before_its_first_token(
    base: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends the run with what was written, also for who asks again."""
    result = begun(base, texts, out=tmp_path / "out.csv")
    written = 0

    def flushed(descriptor: int) -> None:
        nonlocal written
        written += 1
        if written > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("adapmixed.synthesis.run.os.fsync", flushed)
    with pytest.raises(OSError, match="No space left.*journal.jsonl"):
        dict(result)
    assert not dict(result)
    result.close()
    entries = journal_of(tmp_path / "out.csv")[1:]
    assert entries[0] == {"batch": 0} and len(entries) == 2
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("kept", [True, False])
def test_a_forked_child_draws_nothing(base: Path, texts: Path, tmp_path: Path, kept: bool) -> None:
    """Parent and child would each draw a text from the same records."""
    out = tmp_path / "out.csv" if kept else None
    result = begun(base, texts, out=out)

    def work() -> None:
        with pytest.raises(ValueError, match="in the process that made it"):
            next(iter(result))
        result.close()  # the parent goes on, and is the only one
        if kept:
            with pytest.raises(BlockingIOError):
                begun(base, texts, out=out)

    assert ended(work) == 0
    assert len(dict(result)) == COUNT
    result.close()


def test_nothing_is_spent_by_a_text_that_does_not_fit(
    base: Path, texts: Path, tmp_path: Path
) -> None:
    result = begun(base, texts, max_tokens=90, out=tmp_path / "out.csv")
    with pytest.raises(ValueError, match="max_new_tokens must be <= "):
        dict(result)
    result.close()
    assert len(journal_of(tmp_path / "out.csv")) == 1


def test_rows_without_names_carry_a_caveat(base: Path, texts: Path) -> None:
    corpus = Corpus(str(texts), "said")
    settings = {"epsilon": 8.0, "delta": 1e-6, "count": 1, "max_tokens": 4, "batch": 5}
    result = synthesize(str(base), corpus, "w20", plain=True, longest=5, **settings)  # type: ignore[arg-type]
    assert result.guarantee.unit == "record" and "position" in " ".join(result.guarantee.caveats)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"count": 0}, "count must be an integer >= 1"),
        ({"count": 9}, "texts must hold at least 45 names, 9 batches of 5, got 40"),
        ({"epsilon": 0.2}, r"epsilon must pay for a clip 0.3 wide, .*, got 0.2, .* batches of 5"),
        ({"epsilon": 1e-9}, "epsilon must pay for a clip"),
        ({"epsilon": 1e-9, "batch": None}, "epsilon must pay for 6 tokens"),
    ],
)
def test_bad_arguments(base: Path, texts: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dict(begun(base, texts, **change))


def test_an_empty_column(base: Path, texts: Path) -> None:
    texts.write_text("who,said\n1,\n2,  \n")
    with pytest.raises(ValueError, match="texts must hold records, got none: the column 'said'"):
        begun(base, texts)


def test_other_settings_and_a_second_process_are_refused(
    base: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.csv"
    begun(base, texts, out=out, temperature=0.5).close()  # spends nothing
    result = begun(base, texts, out=out)
    next(iter(result))
    with pytest.raises(BlockingIOError):
        begun(base, texts, out=out)
    result.close()
    for change in ({"epsilon": 7.0}, {"count": 2}, {"longest": 4}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="the same settings and texts"):
            begun(base, texts, out=out, **change)
    with monkeypatch.context() as later, pytest.raises(ValueError, match="format_version"):
        later.setattr(run, "JOURNAL_VERSION", run.JOURNAL_VERSION + 1)
        begun(base, texts, out=out)
    texts.write_text(texts.read_text().replace('"w', '"w5 w'))  # in every record
    with pytest.raises(ValueError, match="the same settings and texts"):
        begun(base, texts, out=out)
    with pytest.raises(ValueError, match="texts must hold at least 45 names"):
        begun(base, texts, count=9, out=tmp_path / "other.csv")
    (tmp_path / "out.csv.private" / "journal.jsonl").unlink()
    for known in (texts, out):
        with pytest.raises(ValueError, match="out must be a new file"):
            begun(base, texts, out=known)
    assert not (tmp_path / "other.csv.private").exists() and len(texts.read_text()) > 400


def test_a_batch_is_the_least_with_a_wide_clip() -> None:
    size = run._size(3.0, 1e-6, 100)
    for number, wide in [(size, True), (size - 1, False)]:
        plan = recommended(3.0, 1e-6, number, 100, mechanism="clipped-log-pool")
        assert (plan.settings["upper"] >= run.GOOD_WIDTH) is wide


@pytest.mark.slow
def test_the_command(
    base: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = ["--base", base, "--texts", texts, "--column", "said", "--id-column", "who",
             "--describe", "w20", "--plain", "--count", 2, "--batch", 6, "--max-tokens", 4,
             "--epsilon", 8, "--longest", 5, "--out", tmp_path / "out.csv"]  # fmt: skip
    assert cli.main(["synthesize", *map(str, given)]) == 0
    printed = capsys.readouterr()
    assert "Each of the 2 texts" in printed.out and "everything of one 'who'" in printed.out
    assert "40 names" in printed.err and len((tmp_path / "out.csv").read_text().splitlines()) == 3
    assert cli.main(["synthesize", "--texts", "a.csv"]) == 2
    assert "--base must be given, or --demo" in capsys.readouterr().err
    assert cli.main(["synthesize", "--demo", "--texts", str(texts)]) == 2
    assert "--texts must not be given with --demo" in capsys.readouterr().err


def documents(*names: str) -> list[Document]:
    return [Document(name, f"text of {name}") for name in names]


def test_each_name_has_one_slot_at_most() -> None:
    names = [f"n{k}" for k in range(200)]
    batches = dealt([*documents(*names), Document("n7", "more")], 8, 20, key=KEY)
    assert [len(slots) for slots in batches.slots] == [20] * 8
    held = [record for slots in batches.slots for record in slots if record is not None]
    assert len(set(held)) == len(held) == 160 - batches.empty == 200 - len(batches.left_out)
    assert batches.names == 200 and 0 < batches.empty
    assert "text of n7\n\nmore" in held
    first, again, other = (
        dealt(order(documents(*names)), 8, 20, key=key)
        for order, key in ((list, KEY), (reversed, KEY), (list, bytes(32)))
    )
    assert first == again != other


def test_a_change_of_one_record_stays_in_its_slot() -> None:
    names = [f"n{k}" for k in range(200)]
    before = dealt(documents(*names), 8, 20, key=KEY).slots
    changed = [
        Document(document.identifier, document.text + "!" * (document.identifier == "n3"))
        for document in documents(*names)
    ]
    after = dealt(changed, 8, 20, key=KEY).slots
    places = [(b, k) for b in range(8) for k in range(20) if before[b][k] != after[b][k]]
    assert [after[b][k] for b, k in places] == ["text of n3!"]
