"""Answers to prompts and conversations, charged as they are released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor

from adapmixed.arguments import check_parties, messages_of, texts_of
from adapmixed.charging import answered_before, check_budget, check_unseeded
from adapmixed.decoding import DEFAULT_MEMORY_BYTES, check_window, stream
from adapmixed.generation.text import Continuation, left_padded, stop_rule
from adapmixed.mechanisms import Mechanism
from adapmixed.mechanisms.checks import check_count
from adapmixed.misuse import refuse
from adapmixed.privacy import Accountant, Guarantee, Ledger, PerModelFilter
from adapmixed.rng import SecureRandom
from adapmixed_ext import RandomSource

if TYPE_CHECKING:
    from adapmixed.models import Ensemble


class PrivateGenerator:
    """Answers prompts with one mechanism; everything it releases is charged to one accountant.

    Args:
        ensemble: the models; it must have a tokenizer.
        mechanism: how a query is answered. `Shaped` gives it a temperature or a top-k.
        accountant: charged with every event.
        rng: source of all randomness; None: `SecureRandom()`.
        ledger: charged besides, durably before a token is drawn.
        model_filter: decides which slots contribute; the accountant then is one for its budget.
        overflow: "refuse" what does not fit the model's window, or "slide" (`decoding.stream`).
        memory_bytes: bound on logits, activations, keys and values (`decoding.stream`).

    Raises:
        ValueError: the ensemble has no tokenizer, an argument is of another kind, or a seeded rng
            stands beside a ledger.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        mechanism: Mechanism,
        *,
        accountant: Accountant,
        rng: RandomSource | None = None,
        ledger: Ledger | None = None,
        model_filter: PerModelFilter | None = None,
        overflow: str = "refuse",
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        **refused: Never,
    ) -> None:
        refuse(refused)
        rng = SecureRandom() if rng is None else rng
        check_parties(
            ensemble, mechanism, accountant=accountant, rng=rng, ledger=ledger,
            model_filter=model_filter, overflow=overflow, memory_bytes=memory_bytes,
        )  # fmt: skip
        if ledger is not None:
            check_unseeded(rng)
        if ensemble.tokenizer is None:
            raise ValueError("ensemble must have a tokenizer: its base has none")
        self.ensemble = ensemble
        self.mechanism = mechanism
        self.accountant = accountant
        self._tokenizer = ensemble.tokenizer
        self._options: dict[str, Any] = {
            "rng": rng,
            "accountant": accountant,
            "ledger": ledger,
            "model_filter": model_filter,
            "overflow": overflow,
            "memory_bytes": memory_bytes,
        }

    @property
    def guarantee(self) -> Guarantee:
        """What holds for all that was released so far; private where it is data-dependent."""
        return self.accountant.epsilon()

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> list[str]:
        """The continuations of one or several prompts; arguments and errors as `stream`."""
        pieces = list(
            self.stream(
                prompts, max_new_tokens=max_new_tokens, stop_strings=stop_strings, **refused
            )
        )
        return ["".join(parts) for parts in zip(*pieces, strict=True)]

    def stream(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> Iterator[list[str]]:
        """The continuations piece by piece.

        Args:
            prompts: each is a query at every step until it ends.
            max_new_tokens: ≥ 1, of each prompt.
            stop_strings: end a continuation once they are in it; they are released, and charged.
            refused: nothing: as `decoding.stream`.

        Returns:
            iterator of one piece of text per prompt and step, "" where a token does not end a
            character or the prompt has ended. Arguments are checked at the call.

        Raises:
            ValueError: no prompt, an empty one, one that is no string, or as `decoding.stream`.
            BudgetSpentError: (a ValueError) as `decoding.stream`.
            LedgerError: as `decoding.stream`.
        """
        refuse(refused)
        ids = [self._ids(text) for text in texts_of(prompts)]
        return self._stream(ids, max_new_tokens, stop_strings)

    def batches(
        self, prompts: str | Sequence[str], max_new_tokens: int, size: int | None = None
    ) -> list[list[str]]:
        """Prompts in their order, cut into batches for `generate`; all are checked at once.

        Args:
            size: of a batch, ≥ 1; None: as many as fit memory_bytes, at least one.

        Raises:
            ValueError: a prompt, max_new_tokens or size that `generate` would refuse.
            BudgetSpentError: all together are more than what is left of the budget.
        """
        check_count("max_new_tokens", max_new_tokens)
        check_count("size", size, optional=True)
        texts = texts_of(prompts)
        ids = [self._ids(text) for text in texts]
        left_padded(ids)  # refuses a prompt without tokens
        budget, options = self.mechanism.budget, self._options
        check_window(self.ensemble, max(map(len, ids)), max_new_tokens, options["overflow"])
        if budget is not None:
            spent = answered_before(self.ensemble.ranks, self.accountant, options["ledger"])
            check_budget(self.mechanism, len(texts) * max_new_tokens, spent)
        found: list[list[str]] = []
        longest = 0
        for text, tokens in zip(texts, ids, strict=True):
            longest = max(longest, len(tokens))
            if found and len(found[-1]) < self._most(longest, max_new_tokens, size):
                found[-1].append(text)
            else:
                found.append([text])
                longest = len(tokens)
        return found

    def _most(self, length: int, max_new_tokens: int, size: int | None) -> int:
        """Prompts padded to this length that one batch may hold."""
        if size is not None:
            return size
        one = self.ensemble.sequence_bytes(
            length,
            new_tokens=max_new_tokens - 1,
            overflow=self._options["overflow"],
            beside=self.mechanism.held_bytes,
        )
        return int(self._options["memory_bytes"] // one)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        max_new_tokens: int,
        stop_strings: Sequence[str] = (),
        **refused: Never,
    ) -> Iterator[str]:
        """The answer to a conversation, piece by piece, by the base's chat template.

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
        pieces = self._stream([list(tokens)], max_new_tokens, stop_strings)
        return (piece for (piece,) in pieces)

    def check_chat(self, opening: Sequence[Mapping[str, str]] = ()) -> None:
        """Refuses a base without a chat template, or whose template refuses this opening."""
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
        self, prompts: list[list[int]], max_new_tokens: int, stop_strings: Sequence[str]
    ) -> Iterator[list[str]]:
        ids, mask = left_padded(prompts)
        steps = stream(
            self.ensemble,
            self.mechanism,
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            stop_token=self.ensemble.end_tokens,
            stop=stop_rule(self._tokenizer, stop_strings),
            **self._options,
        )
        return self._pieces([Continuation(self._tokenizer, prompt) for prompt in prompts], steps)

    def _pieces(self, texts: list[Continuation], steps: Iterator[Tensor]) -> Iterator[list[str]]:
        for tokens in steps:
            yield [
                text.add(token) if token >= 0 else ""
                for text, token in zip(texts, tokens.tolist(), strict=True)
            ]
        yield [text.rest() for text in texts]
