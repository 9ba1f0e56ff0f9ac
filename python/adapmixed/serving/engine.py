"""The interface of an engine: admit sequences, step, let them leave.

An engine holds a batch of sequences. `step` makes one token for each of them whose prompt has been
read, and charges all of these tokens before it returns any. Another engine needs these five methods
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt that an engine continues. Two objects are never equal.

    Attributes:
        tokens: token ids, at least one.
        max_tokens: largest number of tokens to come, ≥ 1.
        temperature: divides all rows before the mechanism, 0.01 to 100.
        top_k: number of the likeliest public tokens that all rows keep; None for all.
        public: whether the public model answers alone, which costs nothing.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    public: bool = False


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
