"""Answers to prompts and conversations, each charged before its release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Never

from torch import Tensor

from adapmixed.ensemble.vocabulary import check_prompt, text_ids
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES, Answerer, check_window
from adapmixed.generation.refused import refuse
from adapmixed.generation.text import (
    Continuation,
    left_padded,
    messages_of,
    stop_rule,
    stop_tokens,
    templated,
    texts_of,
)
from adapmixed.limits import DEFAULT_ACTIVE, check_count, check_optional_count
from adapmixed.mechanisms import Mechanism
from adapmixed.mechanisms.rows import check_shape
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.rng import SecureRandom
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.ensemble.forward import AnswerBytes


class PrivateGenerator:
    """Private answers to prompts, with one mechanism and one accountant that is charged for all.

    The constructor binds the accountant to the mechanism and the ensemble. Several generators may
    share one accountant.

    Args:
        ensemble: models that answer. They must have a tokenizer.
        mechanism: how a query is answered, with its settings.
        accountant: charged for every answer before it is drawn. If several processes run, the main
            process has the accountant, and the others are given None.
        rng: source of all randomness; None for `SecureRandom()`.
        memory_bytes: limit for logits, activations, keys and values, in bytes.
        active: K ≥ 2, number of the public model's likeliest tokens about which members speak. The
            others keep their public probability in every row. None, or V and more, for all tokens.
        refused: options of other libraries, which raise because they would void the guarantee.

    Raises:
        ValueError: the ensemble has no tokenizer, an argument is not valid, the accountant cannot
            be charged for this mechanism and ensemble, or it has a ledger and the rng is seeded.
        TypeError: an option is unknown.
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
        **refused: Never,
    ) -> None:
        refuse(refused)
        if getattr(ensemble, "tokenizer", "") is None:
            raise ValueError("ensemble must have a tokenizer, but its base has none")
        rng = SecureRandom() if rng is None else rng
        self._answerer = Answerer(ensemble, mechanism, accountant, rng, memory_bytes, active)
        self._tokenizer = ensemble.tokenizer

    @property
    def ensemble(self) -> Ensemble:
        """The models that answer."""
        return self._answerer.ensemble

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that answers every query."""
        return self._answerer.mechanism

    @property
    def accountant(self) -> Accountant | None:
        """The accountant that is charged; None on all processes but the main one."""
        return self._answerer.accountant

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
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> list[str]:
        """Return the continuations of one or several prompts.

        Arguments and errors are those of :meth:`stream`.

        Returns:
            One continuation per prompt, without the prompt.
        """
        refuse(refused)
        pieces = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            stop_strings=stop_strings,
        )
        return ["".join(parts) for parts in zip(*pieces, strict=True)]

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
        refuse(refused)
        ids = [self._ids(text) for text in texts_of(prompts)]
        return self._stream(ids, max_new_tokens, temperature, top_k, stop_strings)

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
        answer_bytes = self._answerer.answer_bytes(temperature, top_k)
        texts = texts_of(prompts)
        ids = [self._ids(text) for text in texts]
        left_padded(ids)  # raises for a prompt without tokens
        check_window(self._answerer.ensemble.max_positions, max(map(len, ids)), max_new_tokens)
        self._answerer.check(len(texts) * max_new_tokens)
        found: list[list[str]] = []
        longest = 0
        for text, tokens in zip(texts, ids, strict=True):
            longest = max(longest, len(tokens))
            if found and len(found[-1]) < self._most(longest, max_new_tokens, size, answer_bytes):
                found[-1].append(text)
            else:
                found.append([text])
                longest = len(tokens)
        return found

    def _most(
        self, length: int, max_new_tokens: int, size: int | None, answer_bytes: AnswerBytes
    ) -> int:
        """Return how many prompts, padded to this length, one batch may hold."""
        if size is not None:
            return size
        one = self.ensemble.sequence_bytes(
            length,
            new_tokens=max_new_tokens - 1,
            answer_bytes=answer_bytes,
            active=self._answerer.active,
        )
        return int(self._answerer.memory_bytes // one)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> Iterator[str]:
        """Yield the answer to a conversation piece by piece, with the base's chat template.

        Args:
            messages: conversation as a list of {"role": ..., "content": ...}. The last message is
                answered.
            max_new_tokens: as in :meth:`stream`.
            temperature: as in :meth:`stream`.
            top_k: as in :meth:`stream`.
            stop_strings: as in :meth:`stream`.
            refused: as in :meth:`stream`.

        Returns:
            An iterator over pieces of text.

        Raises:
            ValueError: the base has no chat template, the template rejects these messages, they
                have another form, or for the reasons of :meth:`stream`.
            BudgetSpentError: as in :meth:`stream`.
            LedgerError: as in :meth:`stream`.
        """
        refuse(refused)
        self.check_chat()
        text = templated(self._tokenizer, messages_of(messages))
        pieces = self._stream([self._ids(text)], max_new_tokens, temperature, top_k, stop_strings)
        return (piece for (piece,) in pieces)

    def check_chat(self, opening: Sequence[Mapping[str, str]] = ()) -> None:
        """Check that the base has a chat template that accepts this opening.

        Args:
            opening: messages before the first one of the user.

        Raises:
            ValueError: there is no chat template, or it rejects the opening.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "the base's tokenizer must have a chat template, but has none: use "
                "adapmixed chat --plain, or generate with a prompt of your own"
            )
        if opening:
            templated(self._tokenizer, messages_of([*opening, {"role": "user", "content": "?"}]))

    def _ids(self, text: str) -> list[int]:
        ids = text_ids(self._tokenizer, text)
        check_prompt(ids, self.ensemble.vocab_size, self._tokenizer)
        return ids

    def _stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        stop_strings: Sequence[str],
    ) -> Iterator[list[str]]:
        ids, mask = left_padded(prompts)
        stops = stop_tokens(self._tokenizer, stop_strings, self.ensemble.vocab_size)
        steps = self._answerer.stream(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            attention_mask=mask,
            stop_token=self.ensemble.end_tokens | stops,
            stop=stop_rule(self._tokenizer, prompts, stop_strings),
        )
        return self._pieces([Continuation(self._tokenizer, prompt) for prompt in prompts], steps)

    def _pieces(self, texts: list[Continuation], steps: Iterator[Tensor]) -> Iterator[list[str]]:
        for tokens in steps:
            yield [
                text.add(token) if token >= 0 else ""
                for text, token in zip(texts, tokens.tolist(), strict=True)
            ]
        yield [text.rest() for text in texts]
