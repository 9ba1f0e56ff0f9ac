"""The page of synthetic texts: likeness, and what texts tell of records that were planted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from report_cases import HOSTILE, Page

from adapmixed.cli import main
from adapmixed.data import Corpus, demo_base
from adapmixed.synthesis import Synthesis, synthesize
from adapmixed_lab.figures import synthesis as page_of
from adapmixed_lab.figures.synthesis import Canaries, write_page

SIZE = 8


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Synthesis, Canaries]:
    """Return a synthesis in which each batch has one of the planted records."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [f'{{"text": "The name {k} of a module is {HOSTILE[:8]}."}}' for k in range(18)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    (folder / "codes.json").write_text('["65412307", "15987201"]')
    corpus = Canaries.among(Corpus(str(folder / "texts.jsonl")), "Python", 2, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adapmixed.synthesis.run.os.urandom", lambda size: bytes([1]) * size)
        run = synthesize(
            str(demo_base()), corpus, "Python", epsilon=8.0, delta=1e-6, count=2, max_tokens=12,
            batch=SIZE, longest=40, plain=True,
        )  # fmt: skip
    pairs = zip(corpus.records, run.batches.slots, strict=True)
    assert all(planted in slots for planted, slots in pairs)
    return run, corpus


def test_a_text_from_a_records_own_prompt_exposes_it(begun: tuple[Synthesis, Canaries]) -> None:
    """Each token is the one that the true code makes likeliest beside the others."""
    run, corpus = begun
    others = [page_of._other("Python", corpus.codes[0], at) for at in range(1, SIZE)]
    ids, tokens = torch.tensor([list(run.ensemble.opening)]), []
    decoder = run.ensemble.filled([corpus.records[0], *others]).decoder(ids, new_tokens=20)
    for _ in range(20):
        rows = decoder.logits.private[:, 0].log_softmax(-1)
        tokens.append(int((rows[0] - rows[1:].amax(0)).argmax()))
        decoder.append(torch.tensor(tokens[-1:]))
    run.journal.tokens.update({0: tokens, 1: tokens})
    measured = page_of.exposures(run, corpus, dict.fromkeys(range(2), corpus.records[0]))
    assert [seen for seen, _ in measured] == [True, False]
    assert measured[0][1] == 3.0 and page_of.chance(SIZE) < 1.1


def test_codes_are_kept(tmp_path: Path) -> None:
    first, again = (Canaries.among(Corpus("builtin"), "x", 3, tmp_path) for _ in range(2))
    assert first == again and len(set(first.codes)) == 3 and all(len(c) == 8 for c in first.codes)
    assert [document.text for document in first.documents()][-3:] == list(first.records)
    assert (tmp_path / "codes.json").stat().st_mode & 0o777 == 0o600


def test_the_public_model_alone_is_the_row_without_a_record(
    begun: tuple[Synthesis, Canaries],
) -> None:
    """Transformers writes what the public row says, up to its first end."""
    run, _ = begun
    reader = page_of.Reader(str(demo_base()), torch.float32)
    ends = sorted(run.ensemble.end_tokens)
    written = reader.write(
        run.ensemble.public_prompt, 2, max_tokens=12, temperature=1.0, top_k=1, ends=ends
    )
    decoder = run.ensemble.decoder(torch.tensor([list(run.ensemble.opening)]), new_tokens=12)
    tokens: list[int] = []
    for _ in range(12):
        tokens.append(int(decoder.logits.public[0].argmax()))
        decoder.append(torch.tensor(tokens[-1:]))
    assert written == [page_of.until(tokens, ends)] * 2 and len(written[0]) > 1


def test_mauve_tells_distributions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_of, "RESAMPLES", 10)
    rng = np.random.default_rng(0)
    sample, same, other = (
        (rng.standard_normal((150, 6)) + shift).astype(np.float32) for shift in (0, 0, 2)
    )
    alike, apart = page_of.mauve_interval(sample, same), page_of.mauve_interval(sample, other)
    assert alike is not None and apart is not None
    assert alike[1] > apart[2] and apart[0] < 0.5 < alike[0]
    assert alike[1] < alike[2] and apart[1] < apart[2]
    assert page_of.centred(0.5, [0.3, 0.4]) == pytest.approx((0.4525, 0.5475))
    assert page_of.mauve_interval(sample[: page_of.LEAST - 1], other) is None


def test_the_page_escapes_texts_and_says_what_it_is(
    begun: tuple[Synthesis, Canaries], tmp_path: Path
) -> None:
    made, corpus = begun
    made.journal.tokens.clear()
    path = write_page(made, corpus, dict(made), str(demo_base()), tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert "script" not in {tag for tag, _ in page.elements}
    said = made.promise, "for the operator alone", "20, with 2 that were planted", HOSTILE[:8]
    assert all(words in page.text for words in (*said, "records that were cut"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    command = ["synthesize", "--demo", "--epsilon", "10", "--max-tokens", "4", "--count", "1"]
    command += ["--out", str(tmp_path / "texts.csv"), "--report", str(tmp_path / "page")]
    assert main(command) == 0
    page = Page((tmp_path / "page" / "synthesis.html").read_text(encoding="utf-8"))
    assert "with 1 that were planted" in page.text
