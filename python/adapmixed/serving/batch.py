"""The engine over an `Ensemble`: one batch that sequences join and leave between tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES
from adapmixed.limits import DEFAULT_ACTIVE, check_count
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.serving.engine import Drawing, Prompt
from adapmixed.text import left_padded
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.ensemble.decoder import Decoder

# Prompts are read together if the longest has at most this many times the tokens of the shortest,
# and a few more: padding is computed, too.
_UNEVEN, _FEW = 2, 16
# A step reads so many tokens of prompts, or so many for each running sequence, so that those that
# run wait a few times as long as for a step without prompts.
_PART, _PART_EACH = 64, 4


@dataclass(eq=False)
class _Batch:
    """Sequences of one decoder; `tokens` are the last ones released, None before the first."""

    decoder: Decoder
    prompts: list[Prompt]
    tokens: Tensor | None = None


class BatchEngine:
    """Answers a batch of sequences with every kind of mechanism and member, in one process.

    New prompts are read into a batch of their own, a long one over several steps, and join the
    others after their first token.

    Args:
        ensemble: the models that answer.
        mechanism: how a query is answered.
        accountant: charged for every token before it is drawn.
        rng: source of all randomness; None for `SecureRandom()`.
        memory_bytes: limit for logits, activations, keys and values of all sequences, in bytes.
        active: as in `PrivateGenerator`.

    Attributes:
        window: positions of the models' window, or as many as the memory holds of one sequence.

    Raises:
        ValueError: an argument is not valid, several processes share the ensemble, the accountant
            cannot be charged for this mechanism and ensemble, or it has a ledger and rng is seeded.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        accountant: Accountant,
        *,
        rng: RandomSource | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        active: int | None = DEFAULT_ACTIVE,
    ) -> None:
        if not ensemble.ranks.single:
            raise ValueError("ensemble must be held by one process to be served")
        check_count("memory_bytes", memory_bytes)
        self._ensemble, self._memory, self._active = ensemble, memory_bytes, active
        self._drawing = Drawing(ensemble, mechanism, accountant, active, rng)
        self._batches: list[_Batch] = []
        positions = ensemble.max_positions or memory_bytes  # a position takes more than a byte
        self.window = bisect_right(range(1, positions + 1), memory_bytes, key=self._bytes)
        if not self.window:
            raise ValueError(
                f"memory_bytes must be >= {self._bytes(1)}, which one token takes, got "
                f"{memory_bytes}"
            )

    def room(self, waiting: Sequence[Prompt]) -> int:
        """Return how many of the waiting prompts, from the first, should join now.

        All sequences together fit the memory until they end. Prompts are read together if they are
        short and of similar lengths.
        """
        running = sum(len(batch.prompts) for batch in self._batches)
        window = max((batch.decoder.window for batch in self._batches), default=0)
        for count in range(1, len(waiting) + 1):
            joining = waiting[:count]
            lengths = [len(prompt.tokens) for prompt in joining]
            uneven = max(lengths) > _UNEVEN * min(lengths) + _FEW
            slow = running and count > 1 and count * max(lengths) > _part(running)
            longest = max(lengths) + max(prompt.max_tokens for prompt in joining) - 1
            needed = (running + count) * self._bytes(max(window, longest))
            if uneven or slow or needed > self._memory:
                return count - 1
        return len(waiting)

    def admit(self, joining: Sequence[Prompt]) -> None:
        """Add prompts as a batch of their own, which the next steps read."""
        ids, mask = left_padded([prompt.tokens for prompt in joining])
        held = sum(
            len(batch.prompts) * self._bytes(batch.decoder.window) for batch in self._batches
        )
        decoder = self._ensemble.decoder(
            ids,
            memory_bytes=self._memory - held,
            attention_mask=mask,
            new_tokens=max(prompt.max_tokens for prompt in joining) - 1,
            answer_bytes=self._drawing.answer_bytes,
            unread=True,
            active=self._active,
        )
        self._batches.append(_Batch(decoder, list(joining)))

    def step(self) -> list[tuple[Prompt, int]]:
        """Return the next token of every sequence whose prompt is read, all of them charged.

        Raises:
            BudgetSpentError: the plan is spent, although the server reserves its tokens.
            LedgerError: the charge could not be made durable. No token was released.
            RuntimeError: more was charged than released, which could pay for a later step.
        """
        answering = [batch for batch in self._batches if batch.tokens is not None]  # one at most
        reading = next((batch for batch in self._batches if batch.tokens is None), None)
        part = None  # several prompts are short, and read as a whole
        if answering and reading is not None and len(reading.prompts) == 1:
            part = _part(len(answering[0].prompts))
        if reading is not None and (part is None or reading.decoder.unread <= part):
            answering.append(reading)
        private = sum(not prompt.public for batch in answering for prompt in batch.prompts)
        with self._drawing.ahead(private):
            for batch in answering:
                if batch.tokens is not None:
                    batch.decoder.append(batch.tokens)
            if reading is not None:
                reading.decoder.read(part)
        released: list[tuple[Prompt, int]] = []
        for batch in answering:
            batch.tokens = self._drawing.draw(batch.decoder.logits, batch.prompts)
            released += zip(batch.prompts, batch.tokens.tolist(), strict=True)
        self._drawing.check_all_drawn()
        if len(answering) > 1:
            first, joining = answering
            first.decoder.join(joining.decoder)
            first.prompts += joining.prompts
            first.tokens = torch.tensor([token for _, token in released])
            self._batches.remove(joining)
        return released

    def leave(self, ended: Collection[Prompt]) -> None:
        """Remove sequences from their batches."""
        gone = set(ended)
        for batch in list(self._batches):
            ends = torch.tensor([prompt in gone for prompt in batch.prompts])
            if bool(ends.all()):
                self._batches.remove(batch)
            elif bool(ends.any()):
                batch.decoder.drop(ends)
                batch.prompts = [prompt for prompt in batch.prompts if prompt not in gone]
                batch.tokens = None if batch.tokens is None else batch.tokens[~ends]

    def _bytes(self, window: int) -> int:
        """Return the bytes that one sequence needs until it ends."""
        return self._ensemble.sequence_bytes(
            window, answer_bytes=self._drawing.answer_bytes, active=self._active
        )


def _part(running: int) -> int:
    """Return how many tokens of prompts a step reads while so many sequences run."""
    return max(_PART, _PART_EACH * running)
