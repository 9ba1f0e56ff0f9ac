"""Answers to prompts and conversations, charged before they are released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

from adapmixed.checks import check_count, check_optional_count
from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES, Answerer
from adapmixed.generation.refused import refuse
from adapmixed.generation.text import (
    Continuation,
    left_padded,
    messages_of,
    stop_rule,
    texts_of,
)
from adapmixed.mechanisms import Mechanism
from adapmixed.mechanisms.rows import check_shape
from adapmixed.privacy import Accountant, Guarantee
from adapmixed.rng import SecureRandom
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.ensemble.forward import Beside


class PrivateGenerator:
    """Answers prompts with one mechanism; everything it releases is charged to one accountant.

    The accountant is bound to the mechanism and the ensemble. Several generators may share one.

    Args:
        ensemble: the models; it must have a tokenizer.
        mechanism: how a query is answered.
        accountant: charged with every answer before it is drawn. Of several processes only the main
            one has one; the others are given None.
        rng: source of all randomness; None: `SecureRandom()`.
        overflow: "refuse" raises for what does not fit the model's window; with "slide" a sequence
            that fills it forgets its older half.
        memory_bytes: bound on logits, activations, keys and values.

    Raises:
        ValueError: the ensemble has no tokenizer, an argument is of another kind, the accountant is
            bound to something else or cannot be charged for this mechanism, or a seeded rng stands
            beside a ledger.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        accountant: Accountant | None,
        *,
        rng: RandomSource | None = None,
        overflow: str = "refuse",
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        **refused: Never,
    ) -> None:
        refuse(refused)
        if getattr(ensemble, "tokenizer", "") is None:
            raise ValueError("ensemble must have a tokenizer: its base has none")
        rng = SecureRandom() if rng is None else rng
        self._answerer = Answerer(ensemble, mechanism, accountant, rng, overflow, memory_bytes)
        self._tokenizer = ensemble.tokenizer

    @property
    def ensemble(self) -> Ensemble:
        """The models."""
        return self._answerer.ensemble

    @property
    def mechanism(self) -> Mechanism:
        """How a query is answered."""
        return self._answerer.mechanism

    @property
    def accountant(self) -> Accountant | None:
        """Who is charged; None on all processes but the main one."""
        return self._answerer.accountant

    @property
    def guarantee(self) -> Guarantee:
        """What holds for all that was released so far; private if it is data-dependent.

        Raises:
            ValueError: this is not the main process, which is charged.
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
        """Return the continuations of one or several prompts; see :meth:`stream`."""
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
        """Yield the continuations piece by piece.

        Args:
            prompts: each is a query at every step until it ends.
            max_new_tokens: ≥ 1, of each prompt.
            temperature: > 0, of all rows before they are projected.
            top_k: keeps the likeliest tokens of the public model before rows are projected.
            stop_strings: end a continuation once they are in it; they are released, and charged.
            refused: options of other libraries that would void the guarantee raise.

        Returns:
            iterator of one piece of text per prompt and step, "" if a token does not end a
            character or the prompt has ended. Arguments are checked at the call.

        Raises:
            ValueError: no prompt, an empty one, one that is no string, a number out of range, what
                does not fit the window or memory, or an option that would void the guarantee.
            BudgetSpentError: fewer queries are left of the mechanism's plan.
            LedgerError: while iterating: the charge could not be made durable.
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
        """Cut prompts in their order into batches for `generate`; all are checked at once.

        Args:
            size: of a batch, ≥ 1; None: as many as fit memory_bytes, at least one.
            temperature, top_k: those that `generate` will be given; their copies count.

        Raises:
            ValueError: a prompt, max_new_tokens or size that `generate` would not take.
            BudgetSpentError: all together are more than what is left of the plan.
        """
        check_count("max_new_tokens", max_new_tokens)
        check_optional_count("size", size)
        check_shape(temperature, top_k)
        beside = self._answerer.held_bytes(temperature, top_k)
        texts = texts_of(prompts)
        ids = [self._ids(text) for text in texts]
        left_padded(ids)  # raises for a prompt without tokens
        self._answerer.check_window(max(map(len, ids)), max_new_tokens)
        self._answerer.check(len(texts) * max_new_tokens)
        found: list[list[str]] = []
        longest = 0
        for text, tokens in zip(texts, ids, strict=True):
            longest = max(longest, len(tokens))
            if found and len(found[-1]) < self._most(longest, max_new_tokens, size, beside):
                found[-1].append(text)
            else:
                found.append([text])
                longest = len(tokens)
        return found

    def _most(self, length: int, max_new_tokens: int, size: int | None, beside: Beside) -> int:
        """Return how many prompts padded to this length one batch may hold."""
        if size is not None:
            return size
        one = self.ensemble.sequence_bytes(
            length,
            new_tokens=max_new_tokens - 1,
            overflow=self._answerer.overflow,
            beside=beside,
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
        """Yield the answer to a conversation piece by piece, by the base's chat template.

        Args:
            messages: {"role": ..., "content": ...} each, the last one to be answered.

        Raises:
            ValueError: the base has no chat template, or one that refuses these messages; messages
                are of another form, or as `stream`.
        """
        refuse(refused)
        self.check_chat()
        text = self._templated(messages_of(messages))
        tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = self._stream([list(tokens)], max_new_tokens, temperature, top_k, stop_strings)
        return (piece for (piece,) in pieces)

    def check_chat(self, opening: Sequence[Mapping[str, str]] = ()) -> None:
        """Raise if the base has no chat template, or one that refuses this opening."""
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                "the base's tokenizer must have a chat template, it has none: --plain, or a prompt "
                "of your own, continues text as it is"
            )
        if opening:
            self._templated(messages_of([*opening, {"role": "user", "content": "?"}]))

    def _templated(self, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            )
        except TemplateError as error:  # `raise_exception` of the template, or a fault of its own
            raise ValueError(
                f"messages must be those that the base's chat template takes, it refuses: {error}"
            ) from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        stop_strings: Sequence[str],
    ) -> Iterator[list[str]]:
        ids, mask = left_padded(prompts)
        steps = self._answerer.stream(
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            attention_mask=mask,
            stop_token=self.ensemble.end_tokens,
            stop=stop_rule(self._tokenizer, stop_strings),
        )
        return self._pieces([Continuation(self._tokenizer, prompt) for prompt in prompts], steps)

    def _pieces(self, texts: list[Continuation], steps: Iterator[Tensor]) -> Iterator[list[str]]:
        for tokens in steps:
            yield [
                text.add(token) if token >= 0 else ""
                for text, token in zip(texts, tokens.tolist(), strict=True)
            ]
        yield [text.rest() for text in texts]
