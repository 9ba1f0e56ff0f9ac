"""Text and tokens: prompts as a batch, the text that a token adds, and strings that end a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adapmixed.checks import check_type
from adapmixed.generation.loop import StopRule

# Prompt tokens that are decoded along, because some tokenizers drop the space of the first token.
_CONTEXT = 8
_LONGEST = 64


class Continuation:
    """A continuation that is decoded token by token."""

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._begin(prompt)

    def add(self, token: int) -> str:
        """Return the text that this token adds; "" if it ends inside a character."""
        self._ids.append(token)
        text = self._decoded()
        if text.endswith("\ufffd"):
            return ""
        piece = self._new(text)
        if len(self._ids) > _LONGEST:  # so that a token's cost does not grow with the text
            self._begin(self._ids)
        return piece

    def rest(self) -> str:
        """Return the text that was held back for an incomplete character."""
        return self._new(self._decoded())

    def _begin(self, ids: list[int]) -> None:
        self._ids = ids[-_CONTEXT:]
        self._shown = len(self._decoded())

    def _new(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece

    def _decoded(self) -> str:
        return str(
            self._tokenizer.decode(
                self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return prompts as one batch, padded on the left.

    Returns:
        (b, t) int64 tokens, and the (b, t) mask, or None if no row is padded.

    Raises:
        ValueError: there is no prompt, or a prompt has no tokens.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{index}] must hold at least one token, got none")
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return ids, None if bool(mask.all()) else mask


def stop_rule(tokenizer: Any, strings: Sequence[str]) -> StopRule | None:
    """Return the rule that ends a sequence once its released text contains one of the strings.

    Returns:
        The rule; None without strings.

    Raises:
        ValueError: the strings are not a list of strings, or one is empty.
    """
    several = isinstance(strings, Sequence) and not isinstance(strings, str | bytes)
    if not several or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(
            f"stop_strings must be a list of strings that are not empty, got {strings!r}"
        )
    if not strings:
        return None
    from transformers.generation.stopping_criteria import StopStringCriteria

    criteria = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))

    def ended(released: Tensor) -> Tensor:
        result: Tensor = criteria(released.clamp_min(0), None)
        return result

    return ended


def texts_of(prompts: object) -> list[str]:
    """Return one or several prompts as a list.

    Raises:
        ValueError: the prompts are neither a string nor a list of strings.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Collection) or isinstance(prompts, bytes | dict | set | frozenset):
        raise ValueError(f"prompts must be a string or a list of strings, got {prompts!r}")
    for index, prompt in enumerate(prompts):
        check_type(f"prompts[{index}]", prompt, str, "a string")
    return list(prompts)


def messages_of(messages: object) -> list[dict[str, Any]]:
    """Return a conversation as a list of messages.

    Raises:
        ValueError: there is no message, or one is not {"role": string, "content": string}.
    """
    if not isinstance(messages, Collection) or isinstance(messages, str | bytes | dict):
        raise ValueError(f"messages must be a list of {{'role', 'content'}}, got {messages!r}")
    found = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{name} must be {{'role': ..., 'content': ...}}, got {message!r}")
        for key in ("role", "content"):
            check_type(f"{name}[{key!r}]", message[key], str, "a string")
        found.append(dict(message))
    if not found:
        raise ValueError("messages must hold at least one message, got none")
    return found


def templated(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the prompt that a tokenizer's chat template makes of a conversation.

    Args:
        tokenizer: has a chat template.
        messages: list of {"role": ..., "content": ...}, of which the last is answered.

    Raises:
        ValueError: the template rejects these messages.
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    except TemplateError as error:  # the template's `raise_exception`, or a fault in it
        raise ValueError(
            f"messages must fit the base's chat template, which rejects them: {error}"
        ) from error
