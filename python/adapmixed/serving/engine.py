"""The interface of an engine: admit sequences, step, let them leave.

An engine holds a batch of sequences. `step` makes one token for each of them whose prompt has been
read, and charges all of these tokens before it returns any. Another engine needs these five methods
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from adapmixed.ensemble.vocabulary import check_prompt
from adapmixed.generation.loop import check_window
from adapmixed.mechanisms.rows import check_shape

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble


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


class Engine(Protocol):
    """An engine for one thread, except for `check`, which any thread may call."""

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if this sequence could not be answered, even alone."""

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


def check_asked(prompt: Prompt, ensemble: Ensemble, window: int | None) -> None:
    """Raise ValueError unless an ensemble can continue a prompt within so many positions.

    Args:
        prompt: the prompt.
        ensemble: whose tokens it must hold.
        window: largest number of tokens that are read; None for any. The last one is not read.
    """
    if not prompt.tokens:
        raise ValueError("prompt must hold at least one token, got none")
    check_prompt(prompt.tokens, ensemble.vocab_size, ensemble.tokenizer)
    check_shape(prompt.temperature, prompt.top_k)
    check_window(window, len(prompt.tokens), prompt.max_tokens)
