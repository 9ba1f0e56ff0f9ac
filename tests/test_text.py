"""The text that tokens add and where it ends, and files of text."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from adapmixed.text import AnswerText, Continuation, read_text

WORLD = "世"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A tokenizer like those of Llama 2, Mistral and Gemma."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abok.,"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def spelled(tokenizer: Any, text: str) -> list[int]:
    return tokens_of(tokenizer, text)[1:]  # without the first space


def shown(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    continuation = Continuation(tokenizer, prompt)
    return "".join([*map(continuation.add, answer), continuation.rest()])


def test_pieces_are_the_text(tokenizer: Any) -> None:
    draw = random.Random(3)
    for _ in range(200):
        letters = draw.choice(["世界é 𝄞ab.", "世界"])
        text = "".join(draw.choices(letters, k=draw.randint(2, 70)))
        ids = tokens_of(tokenizer, text)
        whole = tokenizer.decode(ids)
        # The prompt may end inside a character, which is part of the answer then.
        cut = draw.randint(1, len(ids) - 1)
        before = tokenizer.decode(ids[:cut])
        answer = shown(tokenizer, ids[:cut], ids[cut:])
        assert whole.endswith(answer) and "\ufffd" not in answer
        if "\ufffd" not in before:
            assert before + answer == whole


def test_an_answer_may_end_inside_a_character(tokenizer: Any) -> None:
    prompt, answer = tokens_of(tokenizer, "a"), spelled(tokenizer, WORLD * 3)
    assert shown(tokenizer, prompt, answer[:7]) == WORLD * 2 + "\ufffd"
    assert shown(tokenizer, prompt, answer[:8]) == WORLD * 2 + "\ufffd"
    assert shown(tokenizer, prompt + answer[:4], answer[4:6]) == WORLD
    assert shown(tokenizer, prompt + answer[:4], []) == ""
    for prefix in (answer[:4], tokens_of(tokenizer, "\ufffd")):
        assert shown(tokenizer, prompt + prefix, tokens_of(tokenizer, "ok\ufffd.")) == " ok\ufffd."


@pytest.mark.parametrize("count", [1, 3, 100])
def test_bytes_that_are_no_character_become_a_sign(tokenizer: Any, count: int) -> None:
    """No text before or behind them is lost."""
    spelling = spelled(tokenizer, WORLD)
    wrong = spelling + spelling[:1] * count + spelled(tokenizer, " ok.") + spelling
    assert shown(tokenizer, tokens_of(tokenizer, "a"), wrong) == f"{WORLD}\ufffd ok.{WORLD}"


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], **settings: Any) -> str:
        return bytes(ids).decode(errors="replace")


def added(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the pieces of an answer, and whether a stop string ended it."""
    tokens, pieces, finish = text.encode(errors="surrogateescape"), [], None
    answer = AnswerText(Letters(), (65,), stop, {0}, len(tokens))
    for token in tokens:
        assert finish is None
        piece, finish = answer.add(token)
        pieces.append(piece)
        if finish == "stop":
            break
    assert finish
    return pieces, finish == "stop"


def test_an_answer_ends_before_a_stop_string_and_shows_nothing_of_it_early() -> None:
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choice("abß") for _ in range(draw.randint(1, 12)))
        stop = tuple("".join(draw.choice("abß") for _ in range(draw.randint(1, 4))) for _ in "12")
        pieces, stopped = added(text, stop)
        # The answer ends with the token that completes the first stop string.
        ends = [i for i in range(len(text) + 1) if any(s in text[:i] for s in stop)]
        assert stopped == bool(ends)
        seen = text[: min(ends)] if ends else text
        assert "".join(pieces) == seen[: min([seen.find(s) for s in stop if s in seen] + [99])]


def test_what_is_held_back() -> None:
    """Nothing without stop strings, or after an end token, which adds no text."""
    assert added("hello", ()) == (["h", "e", "l", "l", "o"], False)
    assert added("hel\udcc3", ()) == (["h", "e", "l", "\ufffd"], False)  # but a begun character
    assert added("hel\0lo", ("lo",)) == (["h", "e", "", "l"], True)


def test_a_long_text_is_decoded_from_its_last_tokens() -> None:
    """Also one with bytes that are no characters."""

    class Counting(Letters):
        longest = 0

        def decode(self, ids: list[int], **settings: Any) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, **settings)

    tokenizer, draw = Counting(), random.Random(5)
    text = "".join(draw.choice("aé€𝄞 ") for _ in range(900)).encode()
    for answer in (text, draw.randbytes(900)):
        continuation = Continuation(tokenizer, list("aé€𝄞 ".encode() * 200))
        pieces = [continuation.add(token) for token in answer[:10]]
        tokenizer.longest = 0
        pieces += [continuation.add(token) for token in answer[10:]] + [continuation.rest()]
        whole = answer.decode(errors="replace")
        assert answer != text or "".join(pieces) == whole
        assert "".join(pieces).replace("\ufffd", "") == whole.replace("\ufffd", "")
        assert tokenizer.longest < 20


def test_text_to_score(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("one\n\ntwo", encoding="utf-8-sig")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("öne", encoding="utf-8")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "other.md").write_text("not read")
    assert [(d.identifier, d.text) for d in read_text(tmp_path)] == [
        ("b.txt", "one\n\ntwo"),
        ("sub/a.txt", "öne"),
    ]
    assert [d.identifier for d in read_text(tmp_path / "other.md")] == ["other.md"]
    with pytest.raises(ValueError, match="path must name"):
        read_text(tmp_path / "nowhere")
    for name in ("rows.jsonl", "rows.CSV", "rows.parquet", "rows.json"):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / name).write_text("{}", encoding="utf-8")
        with pytest.raises(ValueError, match="path must hold .* got .*rows"):
            read_text(tmp_path / "rows" / name)
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(ValueError, match="must name a file of text or a folder"):
        read_text(tmp_path / "empty.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="UTF-8"):
        read_text(tmp_path)
