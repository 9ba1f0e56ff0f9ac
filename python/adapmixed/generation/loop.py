"""The loop over tokens: logits, ticket, charge, then release (`_steps` and `charged`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from adapmixed.errors import BudgetSpentError
from adapmixed.generation.refused import refuse
from adapmixed.limits import (
    DEFAULT_ACTIVE,
    check_active,
    check_count,
    check_rng,
    check_type,
)
from adapmixed.mechanisms import Allowance, Mechanism, Origin, Rows, shaped
from adapmixed.mechanisms.rows import check_shape, shaped_bytes
from adapmixed.privacy import Accountant
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Decoder, Ensemble
    from adapmixed.ensemble.forward import AnswerBytes

_LOG = logging.getLogger(__name__)
DEFAULT_MEMORY_BYTES = 1 << 30

StopRule = Callable[[Tensor], Tensor]
"""A function from (b, s) int64 released tokens, −1 after an end, to (b,) bool, True for sequences
that end here."""


@dataclass(frozen=True)
class Answerer:
    """The models, mechanism, accountant and randomness that answer queries.

    Attributes:
        ensemble: models that answer.
        mechanism: how a query is answered.
        accountant: charged for every answer; None on all processes but the main one.
        rng: source of all randomness.
        memory_bytes: limit for the logits, activations, keys and values that are held until the
            last token, in bytes. Weights and adapters are not included.
        active: K ≥ 2, number of the likeliest public tokens about which members speak; None, or V
            and more, for all.
    """

    ensemble: Ensemble
    mechanism: Mechanism
    accountant: Accountant | None
    rng: RandomSource
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    active: int | None = DEFAULT_ACTIVE

    def __post_init__(self) -> None:
        if not callable(getattr(self.ensemble, "decoder", None)):
            raise ValueError(
                f"ensemble must be an Ensemble (Ensemble.from_pretrained), got {self.ensemble!r}"
            )
        wanted = "a Mechanism (ClippedLogPool, AdaPMixED ...)"
        check_type("mechanism", self.mechanism, Mechanism, wanted)
        if self.ensemble.ranks.is_main:
            check_type("accountant", self.accountant, Accountant, "an Accountant")
        elif self.accountant is not None:
            raise ValueError(
                "accountant must be None on all processes but the main one, which is charged"
            )
        check_rng(self.rng)
        check_count("memory_bytes", self.memory_bytes)
        check_active(self.active)
        self.check(0)
        folder = getattr(self.ensemble, "folder", None)
        if folder is not None and self.accountant is not None:
            self.accountant.register(folder)

    @property
    def origin(self) -> Origin:
        """The origin of the rows that are answered."""
        return Origin.of(self.ensemble, self.active)

    def check(self, queries: int) -> None:
        """Bind the accountant, and check that it can be charged for so many queries.

        All processes call this together, and raise together.

        Args:
            queries: largest number of queries that will be answered.

        Raises:
            ValueError: the accountant cannot be charged for this mechanism and ensemble, or it has
                a ledger and the source is seeded.
            BudgetSpentError: fewer queries are left of the mechanism's plan.
        """
        ensemble, accountant = self.ensemble, self.accountant
        raised: list[BaseException] = []

        def checked() -> Tensor:
            assert accountant is not None  # on the main process
            try:
                accountant.check_seeded(getattr(self.rng, "seeded", True))
                origin = self.origin
                bound = ensemble.num_models, origin.ensemble, origin.active_tokens, origin.unit
                accountant.bind(self.mechanism, *bound)
                accountant.check_left(self.mechanism, queries)
            except Exception as error:
                raised.append(error)
            spent = any(isinstance(error, BudgetSpentError) for error in raised)
            return torch.tensor([bool(raised), spent])

        found = ensemble.ranks.tell(checked, (2,), torch.bool, torch.device("cpu"))
        failed, spent = found.tolist()
        if raised:
            raise raised[0]
        if failed:
            kind = BudgetSpentError if spent else ValueError
            raise kind("accountant cannot be charged: see the error of the main process")

    def answer_bytes(self, temperature: float, top_k: int | None) -> AnswerBytes:
        """Return a function for the memory of one answer beyond its logits.

        `Ensemble.decoder` calls it. Shaped rows are copied; with a temperature the copy is float32.
        """

        def of_one(rows: int, vocab_size: int, element: int, active: int | None) -> int:
            copied, width, answered = shaped_bytes(
                rows, vocab_size, element, temperature=temperature, top_k=top_k, active=active
            )
            return copied + self.mechanism.answer_bytes(rows, width, answered)

        return of_one

    def stream(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        attention_mask: Tensor | None = None,
        stop_token: int | Collection[int] | None = None,
        stop: StopRule | None = None,
        **refused: Never,
    ) -> Iterator[Tensor]:
        """Yield tokens one position at a time; each is charged before it is drawn.

        Each sequence of the batch is a separate query at every step, so a batch of b sequences
        costs b queries per step. A sequence that has ended is neither charged nor sampled again.
        Its stop token is charged. Arguments are checked, and the prompt is read, at the call.

        Args:
            input_ids: (b, t) int64 prompts, padded on the left if their lengths differ.
            max_new_tokens: largest number of tokens for each sequence, ≥ 1.
            temperature: divides all rows before they are projected, 0.01 to 100.
            top_k: number of the likeliest public tokens that all rows keep; None for all.
            attention_mask: (b, t), 0 at padding; None without padding.
            stop_token: one token or several that end a sequence once released.
            stop: function of the released tokens that ends sequences, for example at stop strings.
                The main process alone calls it.
            refused: options of other libraries, which raise because they would void the guarantee.

        Returns:
            An iterator of (b,) int64, the next token of each sequence, or −1 if it has ended.

        Raises:
            ValueError: an argument is not valid, the text exceeds the model's window or
                memory_bytes (the message names the bytes needed), or an option would void the
                guarantee.
            BudgetSpentError: b max_new_tokens queries are more than are left of the mechanism's
                plan, even if answers may end early.
            LedgerError: a charge could not be made durable, so its token is not drawn; raised while
                iterating.
        """
        refuse(refused)
        _check_query(input_ids, attention_mask, stop_token, stop)
        check_count("max_new_tokens", max_new_tokens)
        check_shape(temperature, top_k)
        check_window(self.ensemble.max_positions, input_ids.shape[-1], max_new_tokens)
        mask = None if attention_mask is None else attention_mask.tolist()
        settings = (max_new_tokens, temperature, top_k, stop_token)
        self.ensemble.ranks.agree(
            {
                "the mechanism": self.mechanism,
                "the prompt": (input_ids.tolist(), mask),
                "the settings of the answer": (settings, self.memory_bytes, self.active),
            }
        )
        self.check(len(input_ids) * max_new_tokens)
        decoder = self.ensemble.decoder(
            input_ids,
            memory_bytes=self.memory_bytes,
            attention_mask=attention_mask,
            new_tokens=max_new_tokens - 1,
            answer_bytes=self.answer_bytes(temperature, top_k),
            active=self.active,
        )
        _LOG.info(
            "read %d prompts of %d tokens; %r answers up to %d more of each",
            *input_ids.shape,
            self.mechanism,
            max_new_tokens,
        )
        shape = {"temperature": temperature, "top_k": top_k}
        stops = _stop_rules(stop_token, stop)
        return self._steps(decoder, len(input_ids), max_new_tokens, shape, stops)

    def _steps(
        self,
        decoder: Decoder,
        sequences: int,
        max_new_tokens: int,
        shape: dict[str, Any],
        stops: tuple[StopRule, ...],
    ) -> Iterator[Tensor]:
        going = torch.ones(sequences, dtype=torch.bool)
        released = torch.empty(sequences, 0, dtype=torch.int64)
        for step in range(max_new_tokens):
            tokens = torch.full((sequences,), -1, dtype=torch.int64)
            tokens[going] = self.answer(*decoder.logits, **shape)
            yield tokens.clone()
            released = torch.cat([released, tokens[:, None]], dim=1)
            before, going = going, self._still_going(going, released, stops)
            if step + 1 == max_new_tokens or not bool(going.any()):
                _LOG.info("released %d tokens", int((released >= 0).sum()))
                return
            ended = ~going[before]
            if bool(ended.any()):
                decoder.drop(ended)
            decoder.append(tokens[going])

    def _still_going(self, going: Tensor, released: Tensor, stops: tuple[StopRule, ...]) -> Tensor:
        """Return which sequences go on. The main process decides: all must drop the same ones."""

        def decided() -> Tensor:
            still = going.clone()
            for stop in stops:
                still &= ~stop(released)
            return still

        return self.ensemble.ranks.tell(decided, (len(going),), torch.bool, going.device)

    def answer(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        active_tokens: Tensor | None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Tensor:
        """Return one token for each row: proposed, charged, then released.

        The caller should hold no other reference to the logits, so that there is room for new ones.

        Args:
            private_logits: (n, b, K) of this process's members.
            public_logits: (b, V).
            active_tokens: (b, K) int64, the tokens of the private columns; None for all.
            temperature: as in :meth:`stream`.
            top_k: as in :meth:`stream`.

        Returns:
            (b,) int64 on the CPU.

        Raises:
            BudgetSpentError: fewer than b queries are left of the mechanism's plan.
            LedgerError: the charge could not be made durable, so no token is drawn.
        """
        ranks = self.ensemble.ranks
        rows = shaped(
            private_logits, public_logits,
            temperature=temperature, top_k=top_k, active=self.active, tokens=active_tokens,
            spare=True,
        )  # fmt: skip
        private = ranks.gather(rows.private)

        def drawn() -> Tensor:
            assert private is not None and self.accountant is not None  # on the main process
            gathered = replace(rows, private=private)
            return charged(gathered, self.mechanism, self.accountant, self.rng, self.origin)

        public = rows.public
        return ranks.tell(drawn, (len(public),), torch.int64, public.device).cpu()


def charged(
    rows: Rows,
    mechanism: Mechanism,
    payer: Accountant | Allowance,
    rng: RandomSource,
    origin: Origin,
) -> Tensor:
    """Return (B,) tokens of B rows: proposed, charged, then released; raises as `payer.charge`."""
    ticket = mechanism.propose_rows(rows.answerable(), rng=rng, origin=origin)
    payer.charge(ticket)
    tokens = ticket.release().tokens
    assert tokens is not None  # no targets were given
    return tokens


def check_window(limit: int | None, length: int, max_new_tokens: int) -> None:
    """Raise ValueError if answers to prompts of this length do not fit a window of so many."""
    # The last token is released but never read back.
    if limit is not None and length > limit:
        raise ValueError(
            f"prompt must have at most {limit} tokens, the model's window, got {length}"
        )
    if limit is not None and length + max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens must be <= {limit - length + 1} after a prompt of {length} tokens "
            f"(the model's window is {limit}), got {max_new_tokens}"
        )


def _check_query(
    input_ids: object, attention_mask: object, stop_token: object, stop: object
) -> None:
    """Raise ValueError for arguments of a wrong type. The ensemble checks shapes and values."""
    check_type("input_ids", input_ids, Tensor, "a tensor (b, t)")
    check_type("attention_mask", attention_mask, Tensor, "a tensor (b, t) or None", optional=True)
    tokens = stop_token if isinstance(stop_token, Collection) else (stop_token,)
    whole = all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    if stop_token is not None and (isinstance(stop_token, str | bytes) or not whole):
        raise ValueError(f"stop_token must be an integer, several or None, got {stop_token!r}")
    if stop is not None and not callable(stop):
        raise ValueError(f"stop must be a function of released tokens or None, got {stop!r}")


def _stop_rules(
    tokens: int | Collection[int] | None, stop: StopRule | None
) -> tuple[StopRule, ...]:
    rules: list[StopRule] = []
    if tokens is not None:
        ends = torch.tensor([tokens] if isinstance(tokens, int) else sorted(tokens))
        rules.append(lambda released: torch.isin(released[:, -1], ends))
    return (*rules, stop) if stop is not None else tuple(rules)
