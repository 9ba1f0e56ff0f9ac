"""A query to the server, and the pieces of text that answer it."""

from __future__ import annotations

from dataclasses import dataclass


class QueueFullError(RuntimeError):
    """Too many sequences wait for the engine. Nothing was reserved or charged."""


class ReservedError(RuntimeError):
    """Running answers have reserved the tokens that are left. Some of them may become free."""


class StoppedError(RuntimeError):
    """The engine has stopped, so this answer has no more tokens. All released ones were charged."""


@dataclass(frozen=True)
class Query:
    """The question of a client, checked by `serving.fields` and read by a tokenizer.

    Attributes:
        prompts: token ids of every prompt. Each one becomes a sequence of its own.
        max_tokens: largest number of tokens that answer one prompt, ≥ 1.
        temperature: divides all rows before the mechanism, 0.01 to 100.
        top_k: number of the likeliest public tokens that all rows keep; None for all.
        stop: strings that end an answer. They are charged, but not part of its text.
        stop_tokens: tokens that end an answer, as such strings do.
        public: whether the public model answers alone, which costs nothing.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    public: bool = False


@dataclass(frozen=True)
class Piece:
    """Text that one released token adds to an answer.

    Attributes:
        index: number of the prompt that is answered.
        text: the text; "" if the token ends inside a character, or may begin a stop string.
        finish: "stop" or "length" with the last piece of this prompt, else None.
    """

    index: int
    text: str
    finish: str | None = None
