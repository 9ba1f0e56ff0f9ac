"""Checks of what answers are asked with: refusals name the argument, its value and what is allowed.

A mistake in an argument is said at the call, before anything is read, charged or released.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from adapmixed.mechanisms import Mechanism
from adapmixed.mechanisms.checks import check_count
from adapmixed.privacy import Accountant, Ledger, PerModelFilter


def check_type(name: str, value: object, kind: type, words: str, *, optional: bool = False) -> None:
    """A value of this type, or None where that is allowed."""
    if not (optional and value is None) and not isinstance(value, kind):
        raise ValueError(f"{name} must be {words}, got {value!r}")


def check_parties(
    ensemble: Any,
    mechanism: object,
    *,
    accountant: object,
    rng: Any,
    ledger: object,
    model_filter: object,
    overflow: object,
    memory_bytes: object,
) -> None:
    """Who answers, by which mechanism, from whose randomness, and who is charged.

    Raises:
        ValueError: the first that is of another kind.
    """
    if not callable(getattr(ensemble, "decoder", None)):
        raise ValueError(f"ensemble must be an Ensemble (Ensemble.load), got {ensemble!r}")
    check_type("mechanism", mechanism, Mechanism, "a Mechanism (ClippedLogPool, AdaPMixED ...)")
    check_type("accountant", accountant, Accountant, "an Accountant")
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be SecureRandom() or SeededRandom(seed), got {rng!r}")
    check_type("ledger", ledger, Ledger, "a Ledger (Ledger.open) or None", optional=True)
    check_type("model_filter", model_filter, PerModelFilter, "a PerModelFilter", optional=True)
    if not isinstance(overflow, str):  # which of them: `Ensemble.decoder`
        raise ValueError(f"overflow must be 'refuse' or 'slide', got {overflow!r}")
    check_count("memory_bytes", memory_bytes)


def check_query(
    input_ids: object, attention_mask: object, stop_token: object, stop: object
) -> None:
    """What is asked, and what ends an answer: the types; shapes and values are the ensemble's.

    Raises:
        ValueError: the first that is of another kind.
    """
    check_type("input_ids", input_ids, Tensor, "a tensor (b, t)")
    check_type("attention_mask", attention_mask, Tensor, "a tensor (b, t) or None", optional=True)
    tokens = stop_token if isinstance(stop_token, Collection) else (stop_token,)
    whole = all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    if stop_token is not None and (isinstance(stop_token, str | bytes) or not whole):
        raise ValueError(f"stop_token must be an integer, several or None, got {stop_token!r}")
    if stop is not None and not callable(stop):
        raise ValueError(f"stop must be a function of released tokens or None, got {stop!r}")


def texts_of(prompts: object) -> list[str]:
    """One or several prompts as a list.

    Raises:
        ValueError: neither a string nor a sequence of strings; naming which.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Collection) or isinstance(prompts, bytes | dict | set | frozenset):
        raise ValueError(f"prompts must be a string or a list of strings, got {prompts!r}")
    for index, prompt in enumerate(prompts):
        check_type(f"prompts[{index}]", prompt, str, "a string")
    return list(prompts)


def messages_of(messages: object) -> list[dict[str, Any]]:
    """A conversation as a list of messages.

    Raises:
        ValueError: no messages, or one that is not {"role": string, "content": ...}.
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
