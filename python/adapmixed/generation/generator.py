"""Answers to prompts and conversations: each token is proposed, charged, then released."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Never, Required, TypedDict, Unpack

import torch
from torch import Tensor

from adapmixed.ensemble import Ensemble
from adapmixed.ensemble.ensemble import DEFAULT_MEMORY_BYTES, AnswerBytes
from adapmixed.errors import BudgetSpentError
from adapmixed.generation.refused import REASONS
from adapmixed.limits import (
    DEFAULT_ACTIVE,
    check_active,
    check_count,
    check_optional_count,
    check_rng,
    check_type,
)
from adapmixed.mechanisms import Allowance, Mechanism, Origin, ShapedLogits, shaped
from adapmixed.mechanisms.rows import answer_bytes, check_shape
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.rng import SecureRandom
from adapmixed.text import (
    Continuation,
    check_prompt,
    left_padded,
    messages_of,
    stop_tokens,
    templated,
    text_ids,
    texts_of,
)
from adapmixed_ext.types import RandomSource

_LOG = logging.getLogger(__name__)


class AnswerSettings(TypedDict, total=False):
    """The arguments of `PrivateGenerator.stream` that shape answers and end them."""

    max_new_tokens: Required[int]
    temperature: float
    top_k: int | None
    stop_strings: Sequence[str]


class PrivateGenerator:
    """Private answers to prompts, with one mechanism and one accountant that is charged for all.

    The constructor binds the accountant to the mechanism and the ensemble. Several generators may
    share one accountant. All arguments are attributes, too.

    Args:
        ensemble: models that answer. They must have a tokenizer.
        mechanism: how a query is answered, with its settings.
        accountant: charged for every answer before it is drawn. If several processes run, the main
            process has the accountant, and the others are given None.
        rng: source of all randomness; None for `SecureRandom()`.
        memory_bytes: limit for the logits, activations, keys and values that are held until the
            last token, in bytes. Weights and adapters are not included.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak. The
            others keep their public probability in every row. None, or V and more, for all tokens.

    Raises:
        ValueError: the ensemble has no tokenizer, an argument is not valid, the accountant cannot
            be charged for this mechanism and ensemble, or it has a ledger and the rng is seeded.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        accountant: Accountant | None,
        *,
        rng: RandomSource | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        active: int | None = DEFAULT_ACTIVE,
    ) -> None:
        if not callable(getattr(ensemble, "decoder", None)):
            raise ValueError(
                f"ensemble must be an Ensemble (Ensemble.from_pretrained), got {ensemble!r}"
            )
        self._tokenizer = getattr(ensemble, "tokenizer", "")
        if self._tokenizer is None:
            raise ValueError("ensemble must have a tokenizer, but its base has none")
        check_type("mechanism", mechanism, Mechanism, "a Mechanism (ClippedLogPool, AdaPMixED ...)")
        if ensemble.ranks.is_main:
            check_type("accountant", accountant, Accountant, "an Accountant")
        elif accountant is not None:
            raise ValueError(
                "accountant must be None on all processes but the main one, which is charged"
            )
        self.ensemble, self.mechanism, self.accountant = ensemble, mechanism, accountant
        self.rng = SecureRandom() if rng is None else rng
        check_rng(self.rng)
        self.memory_bytes, self.active = check_count("memory_bytes", memory_bytes), active
        check_active(active)
        self.check(0)
        folder = getattr(ensemble, "folder", None)
        if folder is not None and accountant is not None:
            accountant.register(folder)

    @property
    def origin(self) -> Origin:
        """The origin of the rows that are answered."""
        return Origin.of(self.ensemble, self.active)

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything the accountant was charged for; private if data-dependent.

        Raises:
            ValueError: this is not the main process.
        """
        if self.accountant is None:
            raise ValueError("guarantee must be asked of the main process, which is charged")
        return self.accountant.guarantee()

    def generate(
        self, prompts: str | Sequence[str], **settings: Unpack[AnswerSettings]
    ) -> list[str]:
        """Return the continuations of one or several prompts.

        Arguments and errors are those of :meth:`stream`.

        Returns:
            One continuation per prompt, without the prompt.
        """
        return ["".join(parts) for parts in zip(*self.stream(prompts, **settings), strict=True)]

    def stream(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> Iterator[list[str]]:
        """Yield the continuations of one or several prompts piece by piece.

        Every prompt is one query at every step until it ends. Arguments are checked at the call,
        before the iteration starts.

        Args:
            prompts: one text or several.
            max_new_tokens: largest number of tokens for each prompt, ≥ 1.
            temperature: divides all rows before they are projected, 0.01 to 100.
            top_k: number of the likeliest public tokens that all rows keep before they are
                projected; None for all.
            stop_strings: strings that end a continuation once it contains one. They are released
                and charged. A string may be the name of a special token, which is not shown.
            refused: options of other libraries, which raise because they would void the guarantee.

        Returns:
            An iterator over steps. Each step is a list with one piece of text per prompt. The piece
            is "" if a token does not complete a character, or if the prompt has ended.

        Raises:
            ValueError: there is no prompt, a prompt is empty or not a string, a number is out of
                range, the text does not fit the window or memory, or an option would void the
                guarantee.
            BudgetSpentError: fewer queries are left of the mechanism's plan.
            LedgerError: a charge could not be made durable; raised while iterating.
        """
        for name in refused:
            if name in REASONS:
                problem = f"must not be given, got {refused[name]!r}"
                raise ValueError(f"{name} {problem}: {REASONS[name]}")
            raise TypeError(f"unexpected keyword argument {name!r}")
        encoded = [self._ids(text) for text in texts_of(prompts)]
        ids, mask = left_padded(encoded)
        stops = stop_tokens(self._tokenizer, stop_strings, self.ensemble.vocab_size)
        texts = [""] * len(encoded)

        def ended() -> Tensor:
            return torch.tensor([any(stop in text for stop in stop_strings) for text in texts])

        steps = self.stream_tokens(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            attention_mask=mask,
            ends=self.ensemble.end_tokens | stops,
            stop=ended,
        )

        def pieces() -> Iterator[list[str]]:
            decoded = [Continuation(self._tokenizer, prompt) for prompt in encoded]
            for tokens in steps:
                new = [
                    text.add(token) if token >= 0 else ""
                    for text, token in zip(decoded, tokens.tolist(), strict=True)
                ]
                texts[:] = map(str.__add__, texts, new)
                yield new
            yield [text.rest() for text in decoded]

        return pieces()

    def batches(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int,
        size: int | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> list[list[str]]:
        """Divide prompts in their order into batches for `generate`, and check all of them.

        Args:
            prompts: one text or several.
            max_new_tokens: largest number of tokens for each prompt, ≥ 1.
            size: largest number of prompts in a batch, ≥ 1. None for as many as fit memory_bytes,
                at least one.
            temperature: as `generate` will be given it. The copies that it needs are counted.
            top_k: as `generate` will be given it.

        Returns:
            Batches of prompts.

        Raises:
            ValueError: a prompt, max_new_tokens or size is not valid for `generate`.
            BudgetSpentError: all prompts together need more queries than are left of the plan.
        """
        check_count("max_new_tokens", max_new_tokens)
        check_optional_count("size", size)
        check_shape(temperature, top_k)
        answer_bytes = self.answer_bytes(temperature, top_k)
        texts = texts_of(prompts)
        ids = [self._ids(text) for text in texts]
        left_padded(ids)  # raises for a prompt without tokens
        check_window(self.ensemble.max_positions, max(map(len, ids)), max_new_tokens)
        self.check(len(texts) * max_new_tokens)
        batches: list[list[str]] = []
        longest = 0
        for text, tokens in zip(texts, ids, strict=True):
            longest = max(longest, len(tokens))  # all of a batch are padded to it
            bytes_of_one = self.ensemble.sequence_bytes(
                longest,
                new_tokens=max_new_tokens - 1,
                answer_bytes=answer_bytes,
                active=self.active,
            )
            if batches and len(batches[-1]) < (size or self.memory_bytes // bytes_of_one):
                batches[-1].append(text)
            else:
                batches.append([text])
                longest = len(tokens)
        return batches

    def chat(
        self, messages: Sequence[Mapping[str, str]], **settings: Unpack[AnswerSettings]
    ) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece, with the base's chat template.

        Args:
            messages: conversation as a list of {"role": ..., "content": ...}. The last message is
                answered.
            settings: the other arguments of :meth:`stream`.

        Returns:
            An iterator over pieces of text.

        Raises:
            ValueError: the base has no chat template, the template rejects these messages, they
                have another form, or for the reasons of :meth:`stream`.
            BudgetSpentError, LedgerError: as in :meth:`stream`.
        """
        self.check_chat()
        prompt = templated(self._tokenizer, messages_of(messages))
        return (piece for (piece,) in self.stream(prompt, **settings))

    def check_chat(self) -> None:
        """Raise ValueError if the base has no chat template."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "the base's tokenizer must have a chat template, but has none: use "
                "adapmixed chat --plain, or generate with a prompt of your own"
            )

    def _ids(self, text: str) -> list[int]:
        ids = text_ids(self._tokenizer, text)
        check_prompt(ids, self.ensemble.vocab_size, self._tokenizer)
        return ids

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
        raised: Exception | None = None

        def checked() -> Tensor:
            nonlocal raised
            assert accountant is not None  # on the main process
            try:
                accountant.check_seeded(getattr(self.rng, "seeded", True))
                accountant.bind(self.mechanism, ensemble.num_models, self.origin)
                accountant.check_left(self.mechanism, queries)
            except Exception as error:
                raised = error
            return torch.tensor([raised is not None, isinstance(raised, BudgetSpentError)])

        flags = ensemble.ranks.tell(checked, (2,), torch.bool, torch.device("cpu"))
        failed, spent = flags.tolist()
        if raised is not None:
            raise raised
        if failed:
            kind = BudgetSpentError if spent else ValueError
            raise kind("accountant cannot be charged: see the error of the main process")

    def answer_bytes(self, temperature: float, top_k: int | None) -> AnswerBytes:
        """Return a function for the memory of one answer beyond its logits.

        `Ensemble.decoder` calls it. Shaped rows are copied; with a temperature the copy is float32.
        """
        return partial(answer_bytes, temperature=temperature, top_k=top_k)

    def stream_tokens(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        attention_mask: Tensor | None = None,
        ends: Collection[int] = (),
        stop: Callable[[], Tensor] | None = None,
    ) -> Iterator[Tensor]:
        """Yield tokens one position at a time; each is charged before it is drawn.

        Each sequence of the batch is a separate query at every step, so a batch of b sequences
        costs b queries per step. A sequence that has ended is neither charged nor sampled again.
        Its last token is charged. Arguments are checked, and the prompt is read, at the call.

        Args:
            input_ids: (b, t) int64 prompts, padded on the left if their lengths differ.
            max_new_tokens: largest number of tokens for each sequence, ≥ 1.
            temperature: divides all rows before they are projected, 0.01 to 100.
            top_k: number of the likeliest public tokens that all rows keep; None for all.
            attention_mask: (b, t), 0 at padding; None without padding.
            ends: tokens that end a sequence once released.
            stop: function that returns (b,) bool, True for sequences that end with the tokens that
                were yielded last. The main process alone calls it, after each step.

        Returns:
            An iterator of (b,) int64, the next token of each sequence, or −1 if it has ended.

        Raises:
            ValueError: an argument is not valid, or the text exceeds the model's window or
                memory_bytes (the message names the bytes needed).
            BudgetSpentError: b max_new_tokens queries are more than are left of the mechanism's
                plan, even if answers may end early.
            LedgerError: a charge could not be made durable, so its token is not drawn; raised while
                iterating.
        """
        check_type("input_ids", input_ids, Tensor, "a tensor (b, t)")
        check_type("attention_mask", attention_mask, Tensor, "a tensor (b, t)", optional=True)
        if not isinstance(ends, Collection) or not all(type(token) is int for token in ends):
            raise ValueError(f"ends must be a collection of integers, got {ends!r}")
        if stop is not None and not callable(stop):
            raise ValueError(f"stop must be a function or None, got {stop!r}")
        check_count("max_new_tokens", max_new_tokens)
        check_shape(temperature, top_k)
        check_window(self.ensemble.max_positions, input_ids.shape[-1], max_new_tokens)
        mask = None if attention_mask is None else attention_mask.tolist()
        settings = (max_new_tokens, temperature, top_k, ends)
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
        last, tell = torch.tensor(sorted(ends), dtype=torch.int64), self.ensemble.ranks.tell

        def steps() -> Iterator[Tensor]:
            going = torch.ones(len(input_ids), dtype=torch.bool)
            tokens = torch.full((len(going),), -1, dtype=torch.int64)

            def decided() -> Tensor:
                still = going & ~torch.isin(tokens, last)
                return still if stop is None else still & ~stop()

            for step in range(max_new_tokens):
                tokens.fill_(-1)
                tokens[going] = self.answer(*decoder.logits, temperature=temperature, top_k=top_k)
                yield tokens.clone()
                # The main process decides which go on: all must drop the same ones.
                still = tell(decided, (len(going),), torch.bool, going.device)
                ended, going = ~still[going], still
                if step + 1 == max_new_tokens or not bool(going.any()):
                    return
                if bool(ended.any()):
                    decoder.drop(ended)
                decoder.append(tokens[going])

        return steps()

    def answer(
        self,
        private: Tensor,
        public: Tensor,
        active: Tensor | None,
        payer: Allowance | None = None,
        **shape: Any,
    ) -> Tensor:
        """Return one token for each row, (b,) int64 on the CPU: charged, then released.

        The caller should hold no other reference to the logits, so that there is room for new ones.

        Args:
            private: (n, b, K) logits of this process's members.
            public: (b, V) logits.
            active: (b, K) int64, the tokens of the private columns; None for all.
            payer: has been charged for them ahead; None to charge the accountant.
            shape: temperature and top_k, as in :meth:`stream`.

        Raises:
            BudgetSpentError, LedgerError: as :meth:`stream_tokens`.
        """
        ranks = self.ensemble.ranks
        rows = shaped(private, public, active=self.active, tokens=active, **shape)
        whole = ranks.gather(rows.private)

        def drawn() -> Tensor:
            assert whole is not None and self.accountant is not None  # on the main process
            every, pays = rows.of_all(whole), payer or self.accountant
            return charged(every, self.mechanism, pays, self.rng, self.origin)

        return ranks.tell(drawn, (len(rows.public),), torch.int64, rows.public.device).cpu()


def charged(
    rows: ShapedLogits,
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
        raise ValueError(f"prompt must have at most {limit} tokens, the window, got {length}")
    if limit is not None and length + max_new_tokens - 1 > limit:
        raise ValueError(
            f"max_new_tokens must be <= {limit - length + 1} after a prompt of {length} tokens "
            f"(the window is {limit}), got {max_new_tokens}"
        )
