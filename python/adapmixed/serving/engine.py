"""What an engine is asked, its interface, and how all engines draw: charged, then released.

An engine holds a batch of sequences. `step` makes one token for each of them whose prompt has been
read, and charges all of these tokens before it returns any. Another engine needs a window and these
four methods alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.lora import Logits
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import Allowance, Mechanism, PublicOnly
from adapmixed.privacy import Accountant
from adapmixed_ext.types import RandomSource

MOST_WAITING = 64
"""Largest number of sequences that wait for an engine, of prompts of a request, and of requests
that wait to be read."""


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


class Drawing:
    """Draws what an engine releases. Nothing is drawn that the accountant was not charged for.

    If the mechanism's cost is fixed, all tokens of a step are one charge, which is written while
    the models compute. Otherwise rows with the same temperature and top-k are one charge.

    Args:
        ensemble: whose rows are answered.
        mechanism: how a query is answered.
        accountant: charged for every token before it is drawn.
        active: as in `PrivateGenerator`.
        rng: source of all randomness; None for `SecureRandom()`.

    Raises:
        ValueError: the accountant cannot be charged for this mechanism and ensemble, or it has
            a ledger and rng is seeded.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        accountant: Accountant,
        active: int | None,
        rng: RandomSource | None = None,
    ) -> None:
        self._private = PrivateGenerator(ensemble, mechanism, accountant, rng=rng, active=active)
        rng, free = self._private.rng, Accountant(accountant.delta)
        self._public = PrivateGenerator(ensemble, PublicOnly(), free, rng=rng, active=active)
        self._accountant = accountant
        self._allowance: Allowance | None = None  # None if charges depend on the rows
        if accountant.epsilon is None:
            models, seeded = ensemble.num_models, getattr(rng, "seeded", True)
            with suppress(ValueError):
                self._allowance = Allowance(mechanism, models, self._private.origin, seeded=seeded)
        self._writer = ThreadPoolExecutor(1, "adapmixed-ledger")  # its thread starts when needed

    @contextmanager
    def ahead(self, tokens: int) -> Iterator[None]:
        """Charge so many private tokens while the block computes their rows, if cost is fixed.

        Raises:
            BudgetSpentError: the plan is spent, although the server reserves its tokens.
            LedgerError: the charge could not be made durable. No token of the step may be drawn.
        """
        if self._allowance is None or not tokens:
            yield
            return
        writing = self._writer.submit(self._accountant.charge_ahead, self._allowance, tokens)
        try:
            yield
        finally:
            writing.result()

    def draw(self, logits: Logits, prompts: Sequence[Prompt]) -> Tensor:
        """Return a token for every row, (B,) int64 on the CPU.

        Args:
            logits: of B rows.
            prompts: what each of them continues.
        """
        shapes = [(prompt.temperature, prompt.top_k, prompt.public) for prompt in prompts]
        drawn = torch.empty(len(shapes), dtype=torch.int64)
        for shape in dict.fromkeys(shapes):
            rows = torch.tensor([index for index, other in enumerate(shapes) if other == shape])
            private, public, tokens = logits
            if len(rows) < len(shapes):
                here = rows.to(public.device)
                private, public = private[:, here], public[here]
                tokens = None if tokens is None else tokens[here]
            temperature, top_k, free = shape
            generator, payer = (self._public, None) if free else (self._private, self._allowance)
            drawn[rows] = generator.answer(
                private, public, tokens, payer, temperature=temperature, top_k=top_k
            )
        return drawn

    def check_all_drawn(self) -> None:
        """Raise RuntimeError if a step drew less than it charged: that could pay for others."""
        if self._allowance is not None and self._allowance.left:
            raise RuntimeError("all queries that were charged must be released in the same step")

    def answer_bytes(self, rows: int, vocab_size: int, element: int, active: int | None) -> int:
        """Return the bytes of one answer in addition to its logits, for any temperature and top-k.

        Sequences of one shape are copied out of the batch before they are divided.
        """
        estimate = self._private.answer_bytes(temperature=2.0, top_k=None)
        held = estimate(rows, vocab_size, element, active)
        return held + rows * min(vocab_size, active or vocab_size) * element
