"""Read the prompts of a request into tokens."""

from __future__ import annotations

from typing import Any

from adapmixed.ensemble.vocabulary import text_ids
from adapmixed.generation.text import templated
from adapmixed.serving.bodies import text_of
from adapmixed.serving.errors import RequestError, bad_request, shortened

ROLES = ("system", "developer", "user", "assistant")
MOST = 1024
"""Largest number of prompts of a request, checked before any is read."""

_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
_PARTS = 'a string, or a list of {"type": "text", "text": ...}'


def prompts_of(tokenizer: Any, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of every prompt of a completion.

    Args:
        tokenizer: the public model's tokenizer.
        value: the field `prompt`.

    Raises:
        RequestError: 400: it has another form, or a prompt holds no token.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise bad_request("prompt", f"prompt must be {_FORMS}, got {shortened(value)}")
    if not value:
        raise bad_request("prompt", "prompt must hold at least one prompt, got none")
    if isinstance(value[0], int):
        value = [value]
    if len(value) > MOST:
        raise bad_request("prompt", f"prompt must be at most {MOST} prompts, got {len(value)}")
    prompts = tuple(_tokens(tokenizer, one) for one in value)
    if not all(prompts):
        raise bad_request("prompt", "prompt must hold at least one token, got none")
    return prompts


def _tokens(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(text_ids(tokenizer, text_of("prompt", prompt)))
    if isinstance(prompt, list):
        if all(isinstance(one, int) and not isinstance(one, bool) for one in prompt):
            return tuple(prompt)
    raise bad_request("prompt", f"prompt must be {_FORMS}")


def conversation_of(tokenizer: Any, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of one conversation, with the public model's chat template.

    Args:
        tokenizer: the public model's tokenizer.
        value: the field `messages`.

    Raises:
        RequestError: 400: it has another form, there is no chat template, or it rejects these
            messages.
    """
    messages = messages_of(value)
    if not getattr(tokenizer, "chat_template", None):
        message = "the model has no chat template: use /v1/completions"
        raise bad_request("messages", message, "no_chat_template")
    try:
        text = templated(tokenizer, messages)
    except ValueError as error:
        raise bad_request("messages", str(error)) from None
    tokens = tuple(text_ids(tokenizer, text))
    if not tokens:
        raise bad_request("messages", "messages must hold at least one token, got none")
    return (tokens,)


def messages_of(value: Any) -> list[dict[str, str]]:
    """Return a conversation as roles and texts alone.

    Args:
        value: the field `messages`.

    Raises:
        RequestError: 400: it has another form.
    """
    if not isinstance(value, list) or not value:
        message = f"messages must be a list of at least one message, got {shortened(value)}"
        raise bad_request("messages", message)
    return [_message(f"messages[{index}]", one) for index, one in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad_request(name, f"{name} must be an object, got {shortened(value)}")
    for key, one in value.items():
        if key not in ("role", "content") and one is not None:
            message = f"{name} must have role and content alone, got {shortened(key)}"
            raise bad_request(name, message)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        message = f"{name}.role must be one of {', '.join(ROLES)}, got {shortened(role)}"
        raise bad_request(f"{name}.role", message)
    return {"role": role, "content": _content(f"{name}.content", value.get("content"))}


def _content(name: str, value: Any) -> str:
    if not isinstance(value, list):
        return text_of(name, value)
    return "".join(_part(name, one) for one in value)


def _part(name: str, value: Any) -> str:
    fine = isinstance(value, dict) and value.keys() == {"type", "text"} and value["type"] == "text"
    if not fine:
        raise bad_request(name, f"{name} must be {_PARTS}, got {shortened(value)}")
    return text_of(name, value["text"])


def window_error(error: ValueError, *, chat: bool) -> RequestError:
    """Return the error for a query that an engine could not answer, even alone."""
    text, param = str(error), "messages" if chat else "prompt"
    if text.startswith("prompts "):
        return bad_request("prompt", text)
    if text.startswith("prompt must hold "):
        return bad_request(param, text)
    if text.startswith("max_new_tokens "):
        return bad_request("max_tokens", f"max_tokens {text.partition(' ')[2]}", _TOO_LONG)
    return bad_request(param, text, _TOO_LONG)


_TOO_LONG = "context_length_exceeded"
