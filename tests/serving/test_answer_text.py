"""The text of an answer: pieces join to the whole, and it ends before the first stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest

from adapmixed.generation.text import AnswerText, Continuation


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], **settings: Any) -> str:
        return bytes(ids).decode(errors="replace")


def added(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the pieces of an answer, and whether a stop string ended it."""
    answer = AnswerText(Letters(), (65,), stop)
    pieces, stopped = [], False
    for token in text.encode():
        piece, stopped = answer.add(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    piece, stopped = answer.rest()
    return [*pieces, piece], stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("hello", (), "hello"),
        ("hello", ("zz",), "hello"),
        ("hello", ("l",), "he"),
        ("hello", ("lo", "el"), "h"),
        ("aab", ("ab",), "a"),
        ("aaab", ("aab",), "a"),
        ("a\n\nb", ("\n\n", "\n"), "a"),
        ("häß", ("ß",), "hä"),
        ("hello", ("o!",), "hello"),
        ("stop", ("stop",), ""),
    ],
)
def test_the_text_ends_before_a_stop_string(
    text: str, stop: tuple[str, ...], expected: str
) -> None:
    pieces, stopped = added(text, stop)
    assert "".join(pieces) == expected
    assert stopped == (expected != text)


def test_nothing_of_a_stop_string_is_shown_early() -> None:
    draw = random.Random(3)
    for _ in range(300):
        text = "".join(draw.choice("ab") for _ in range(draw.randint(1, 12)))
        stop = tuple("".join(draw.choice("ab") for _ in range(draw.randint(1, 4))) for _ in "12")
        pieces, stopped = added(text, stop)
        # The answer ends with the token that completes the first stop string.
        ends = [i for i in range(len(text) + 1) if any(one in text[:i] for one in stop)]
        assert stopped == bool(ends)
        seen = text[: min(ends)] if ends else text
        assert "".join(pieces) == seen[: min([seen.find(s) for s in stop if s in seen] + [99])]


def test_text_without_stop_strings_is_not_held_back() -> None:
    assert added("hello", ()) == (["h", "e", "l", "l", "o", ""], False)


def test_a_long_text_is_decoded_from_its_last_tokens() -> None:
    class Counting(Letters):
        longest = 0

        def decode(self, ids: list[int], **settings: Any) -> str:
            self.longest = max(self.longest, len(ids))
            return super().decode(ids, **settings)

    tokenizer = Counting()
    text = "".join(random.Random(5).choice("aé€𝄞 ") for _ in range(900))
    continuation = Continuation(tokenizer, [65])
    pieces = [continuation.add(token) for token in text.encode()]
    assert "".join([*pieces, continuation.rest()]) == text
    assert tokenizer.longest < 100
