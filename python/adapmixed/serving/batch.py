"""The engine over an `Ensemble`: one batch that sequences join and leave between tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapmixed.ensemble.vocabulary import check_prompt
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES, Answerer
from adapmixed.generation.text import left_padded
from adapmixed.limits import DEFAULT_ACTIVE
from adapmixed.mechanisms import Allowance, Mechanism, PublicOnly
from adapmixed.mechanisms.rows import check_shape, shaped_bytes
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from adapmixed.serving.engine import Prompt
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Decoder, Ensemble

# Prompts are read together if the longest has at most this many times the tokens of the shortest,
# and a few more: padding is computed, too.
_UNEVEN, _FEW = 2, 16
# A step reads so many tokens of prompts, or so many for each running sequence, so that those that
# run wait a few times as long as for a step without prompts.
_PART, _PART_EACH = 64, 4


@dataclass
class _Batch:
    """Sequences of one decoder; `tokens` are the last ones released, None before the first."""

    decoder: Decoder
    prompts: list[Prompt]
    tokens: Tensor | None = None


class BatchEngine:
    """Answers a batch of sequences with every kind of mechanism and member, in one process.

    New prompts are read into a batch of their own, a long one over several steps, and join the
    others after their first token. If the mechanism's cost is fixed, all tokens of a step are one
    charge, which is written while the models compute. Otherwise sequences with the same temperature
    and top-k are one charge.

    Args:
        ensemble: the models that answer.
        mechanism: how a query is answered.
        accountant: charged for every token before it is drawn.
        rng: source of all randomness; None for `SecureRandom()`.
        memory_bytes: limit for logits, activations, keys and values of all sequences, in bytes.
        active: as in `PrivateGenerator`.

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
        if not ensemble.ranks.alone:
            raise ValueError("ensemble must be held by one process to be served")
        rng = SecureRandom() if rng is None else rng
        self._answerer = Answerer(ensemble, mechanism, accountant, rng, memory_bytes, active)
        unpaid = PublicOnly(), Accountant(accountant.delta)  # for prompts of the public model alone
        self._public = Answerer(ensemble, *unpaid, rng, memory_bytes, active)
        self._batches: list[_Batch] = []
        self._seeded = getattr(rng, "seeded", True)
        self._allowance = self._charged_ahead()
        self._writer = ThreadPoolExecutor(1, "adapmixed-ledger")  # its thread starts when needed

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError if this prompt could not be answered, even alone."""
        if not prompt.tokens:
            raise ValueError("prompt must hold at least one token, got none")
        ensemble = self._answerer.ensemble
        check_prompt(prompt.tokens, ensemble.vocab_size, ensemble.tokenizer)
        check_shape(prompt.temperature, prompt.top_k)
        most = ensemble.max_positions
        if most is not None and len(prompt.tokens) > most:
            raise ValueError(
                f"prompt must have at most {most} tokens, the model's window, got "
                f"{len(prompt.tokens)}"
            )
        self._answerer.check_window(len(prompt.tokens), prompt.max_tokens)
        needed = self._bytes(_window([prompt]))
        if needed > self._answerer.memory_bytes:
            raise ValueError(
                f"prompt and answer must fit the server's memory of {self._answerer.memory_bytes} "
                f"bytes, but {len(prompt.tokens)} + {prompt.max_tokens} tokens take {needed}"
            )

    def room(self, waiting: Sequence[Prompt]) -> int:
        """Return how many of the waiting prompts, from the first, should join now.

        All sequences together fit the memory until they end. Prompts are read together if they are
        short and of similar lengths.
        """
        running = sum(len(batch.prompts) for batch in self._batches)
        window = max((batch.decoder.window for batch in self._batches), default=0)
        found = 0
        for count in range(1, len(waiting) + 1):
            joining = waiting[:count]
            lengths = [len(prompt.tokens) for prompt in joining]
            if max(lengths) > _UNEVEN * min(lengths) + _FEW:
                break
            if running and count > 1 and count * max(lengths) > _part(running):
                break
            needed = (running + count) * self._bytes(max(window, _window(joining)))
            if needed > self._answerer.memory_bytes:
                break
            found = count
        return found

    def admit(self, joining: Sequence[Prompt]) -> None:
        """Add prompts as a batch of their own, which the next steps read."""
        ids, mask = left_padded([prompt.tokens for prompt in joining])
        held = sum(
            len(batch.prompts) * self._bytes(batch.decoder.window) for batch in self._batches
        )
        decoder = self._answerer.ensemble.decoder(
            ids,
            memory_bytes=self._answerer.memory_bytes - held,
            attention_mask=mask,
            new_tokens=max(prompt.max_tokens for prompt in joining) - 1,
            answer_bytes=self._answer_bytes,
            unread=True,
            active=self._answerer.active,
        )
        self._batches.append(_Batch(decoder, list(joining)))

    def step(self) -> list[tuple[Prompt, int]]:
        """Return the next token of every sequence whose prompt is read, all of them charged.

        Raises:
            BudgetSpentError: the plan is spent, although the server reserves its tokens.
            LedgerError: the charge could not be made durable. No token was released.
            RuntimeError: more was charged than released, which could pay for a later step.
        """
        if not self._batches:
            return []
        running = [batch for batch in self._batches if batch.tokens is not None]
        reading = next((batch for batch in self._batches if batch.tokens is None), None)
        part = None  # several prompts are short, and read as a whole
        if running and reading is not None and len(reading.prompts) == 1:
            part = _part(sum(len(batch.prompts) for batch in running))
        answering = list(running)
        if reading is not None and (part is None or reading.decoder.unread <= part):
            answering.append(reading)
        sequences = sum(not prompt.public for batch in answering for prompt in batch.prompts)
        if self._allowance is None or not sequences:
            self._compute(reading, part)
        else:
            charged = self._writer.submit(self._charge, sequences)
            try:
                self._compute(reading, part)
            finally:
                charged.result()
            self._allowance.add(sequences)
        released: list[tuple[Prompt, int]] = []
        for batch in [one for one in self._batches if not one.decoder.unread]:
            batch.tokens = self._answered(batch)
            released += zip(batch.prompts, batch.tokens.tolist(), strict=True)
        if self._allowance is not None and self._allowance.left:
            raise RuntimeError("all queries that were charged must be released in the same step")
        return released

    def _charged_ahead(self) -> Allowance | None:
        """Return the count of charged queries; None if charges depend on the rows."""
        one = self._answerer
        if one.accountant is None or one.accountant.epsilon is not None:
            return None
        models, origin = one.ensemble.num_models, one.origin
        try:
            return Allowance(one.mechanism, models, origin, seeded=self._seeded)
        except ValueError:
            return None

    def _charge(self, queries: int) -> None:
        one = self._answerer
        assert one.accountant is not None
        models, origin = one.ensemble.num_models, one.origin
        one.accountant.charge_ahead(one.mechanism, models, queries, origin, seeded=self._seeded)

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

    def _compute(self, reading: _Batch | None, part: int | None) -> None:
        """Compute the next logits of running sequences, and read a part of the next prompts."""
        self._advance()
        if reading is not None:
            reading.decoder.read(part)

    def _advance(self) -> None:
        """Join all answered batches into one, and append the tokens that were released."""
        answered = [batch for batch in self._batches if batch.tokens is not None]
        if not answered:
            return
        first, *others = answered
        for other in others:
            first.decoder.join(other.decoder)
            first.prompts += other.prompts
        tokens = torch.cat([batch.tokens for batch in answered if batch.tokens is not None])
        first.decoder.append(tokens)
        self._batches = [first, *(batch for batch in self._batches if batch.tokens is None)]

    def _answered(self, batch: _Batch) -> Tensor:
        """Return a token for every sequence of the batch, with one charge for each shape.

        Prompts of the public model alone are answered as by members that all equal it.
        """
        shapes = [(one.temperature, one.top_k, one.public) for one in batch.prompts]
        found = torch.empty(len(shapes), dtype=torch.int64)
        for shape in dict.fromkeys(shapes):
            rows = torch.tensor([index for index, one in enumerate(shapes) if one == shape])
            private, public, tokens = batch.decoder.logits
            if len(rows) < len(shapes):
                here = rows.to(public.device)
                private, public = private[:, here], public[here]
                tokens = None if tokens is None else tokens[here]
            temperature, top_k, alone = shape
            answerer, payer = (self._public, None) if alone else (self._answerer, self._allowance)
            if alone:
                said = public if tokens is None else public.gather(1, tokens)
                private = said.expand(len(private), -1, -1)
            found[rows] = answerer.answer(
                private, public, tokens, temperature=temperature, top_k=top_k, payer=payer
            )
        return found

    def _bytes(self, window: int) -> int:
        """Return the bytes that one sequence needs until it ends."""
        one = self._answerer
        return one.ensemble.sequence_bytes(
            window, answer_bytes=self._answer_bytes, active=one.active
        )

    def _answer_bytes(self, rows: int, vocab_size: int, element: int, active: int | None) -> int:
        """Return the bytes of one answer in addition to its logits, for any temperature and top-k.

        Sequences of one shape are copied out of the batch before they are divided.
        """
        copied, width, answered = shaped_bytes(
            rows, vocab_size, element, temperature=2.0, top_k=None, active=active
        )
        held = self._answerer.mechanism.answer_bytes(rows, width, answered)
        return rows * min(vocab_size, active or vocab_size) * element + copied + held


def _part(running: int) -> int:
    """Return how many tokens of prompts a step reads while so many sequences run."""
    return max(_PART, _PART_EACH * running)


def _window(joining: Sequence[Prompt]) -> int:
    """Return the positions of the longest prompt with the longest answer; its last is not read."""
    longest = max(len(prompt.tokens) for prompt in joining)
    return longest + max(prompt.max_tokens for prompt in joining) - 1
