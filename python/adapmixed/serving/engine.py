"""Questions, the pieces that answer them, and the interface of an engine.

An engine holds a batch of sequences. `step` makes one token for each of them whose prompt has been
read, and charges all of these tokens before it returns any. Another engine needs a window and these
four methods alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

MOST_WAITING = 64
"""Largest number of sequences that wait for an engine, and of prompts of a request."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt that an engine continues. Two objects are never equal.

    Attributes:
        tokens: token ids, at least one.
        max_tokens: largest number of tokens to come, ≥ 1.
        temperature: divides all rows before the mechanism, 0.01 to 100.
        top_k: number of the likeliest public tokens that all rows keep; None for all.
        public: whether the public model answers alone, which costs nothing.
        client: name of the key that asks. Others cannot time what an engine keeps of its prompts.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    public: bool = False
    client: str = ""


@dataclass(frozen=True)
class Query:
    """The question of a client, checked by `serving.fields` and read by a tokenizer.

    Attributes:
        prompts: every prompt becomes a sequence of its own. All have the same settings.
        stop: strings that end an answer. They are charged, but not part of its text.
        stop_tokens: tokens that end an answer, as such strings do.
        chat: whether it is a chat completion.
        stream: whether every piece of text is sent at once.
        include_usage: whether a stream ends with the number of tokens.
    """

    prompts: tuple[Prompt, ...]
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    chat: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def tokens(self) -> int:
        """The largest number of tokens of all answers together."""
        return sum(prompt.max_tokens for prompt in self.prompts)

    @property
    def public(self) -> bool:
        """Whether the public model answers alone, which costs nothing."""
        return all(prompt.public for prompt in self.prompts)

    def of_public(self) -> Query:
        """Return this question to the public model alone."""
        return replace(self, prompts=tuple(replace(one, public=True) for one in self.prompts))


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


class Engine(Protocol):
    """An engine for one thread. What fits its window it can answer, at least alone.

    Attributes:
        window: positions for a prompt and its answer, whose last token is not read.
    """

    window: int

    def room(self, waiting: Sequence[Prompt]) -> int:
        """Return how many of the waiting sequences, from the first, should join now."""

    def admit(self, joining: Sequence[Prompt]) -> None:
        """Add sequences to the batch. This or later steps read their prompts."""

    def step(self) -> list[tuple[Prompt, int]]:
        """Return the next token of every sequence whose prompt has been read, all of them charged.

        Those of the public model alone are not: no number of a member enters them.

        Raises:
            LedgerError: the charge could not be made durable. No token was released, and the
                engine must not be used again.
        """

    def leave(self, ended: Collection[Prompt]) -> None:
        """Remove sequences from the batch."""
