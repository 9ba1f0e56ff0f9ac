"""Read a request by an allowlist: every field is served, without effect, or gets 400."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from adapmixed.ensemble.vocabulary import text_ids
from adapmixed.generation.refused import NO_DRAW, REASONS
from adapmixed.generation.text import stop_tokens, templated
from adapmixed.limits import LEAST_TEMPERATURE, MOST_TEMPERATURE, check_temperature
from adapmixed.serving.engine import Prompt, Query
from adapmixed.serving.errors import RequestError, bad_request, no_model, shortened
from adapmixed.serving.keys import Key

ROLES = ("system", "developer", "user", "assistant")
MOST = 1024
"""Largest number of prompts of a request, checked before any is read."""

_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
_MESSAGE = (
    f'{{"role": ..., "content": ...}} with the role {" or ".join(ROLES)}, and a string or a list '
    'of {"type": "text", "text": ...}'
)
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
_SERVED = {
    "model", "max_tokens", "temperature", "top_k", "stop", "stop_token_ids", "stream",
    "stream_options",
}  # fmt: skip
SERVED = {False: _SERVED | {"prompt"}, True: _SERVED | {"messages", "max_completion_tokens"}}
"""The fields of completions (False) and chat completions (True) that have an effect."""

IGNORED = frozenset({"user", "safety_identifier", "metadata"})
"""Fields that change nothing. They are neither read nor logged."""

_UNKNOWN = "this server does not know it, and a field that it ignored could void the guarantee"
_REASONS = {
    **REASONS,
    "n": (
        "every answer is a query of its own: repeat the prompt in a list, or send the request again"
    ),
    "seed": "whoever knows a seed can undo the randomness that protects the private data",
    "echo": "the prompt's tokens are no private answers, so this server does not return them",
    **dict.fromkeys(
        (
            "store", "service_tier", "suffix", "tools", "tool_choice", "parallel_tool_calls",
            "functions", "function_call", "modalities", "audio", "reasoning_effort", "verbosity",
            "web_search_options",
        ),
        "this server does not offer it",
    ),
}  # fmt: skip
_NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (0,)),
    **dict.fromkeys(("n", "top_p", "typical_p", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("num_beams", "best_of"), (1,)),
    **dict.fromkeys(("ignore_eos", "use_beam_search", "echo", "store", "logprobs"), (False,)),
    **dict.fromkeys(("bad_words", "logits_processors", "tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "modalities": (["text"],),
}
REFUSED = {name: (_NEUTRAL.get(name, ()), reason) for name, reason in _REASONS.items()}
"""Field that is not served -> (values without effect, the reason why others get 400)."""


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds.

    Raises:
        RequestError: 400: it is not an object in UTF-8, a key occurs twice, it is nested too
            deeply, or it holds NaN or an infinity.
    """
    try:
        found = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except RequestError:
        raise
    except RecursionError:
        raise bad_request(None, "the body must not be nested so deeply") from None
    except ValueError:  # also of UTF-8, and of integers with thousands of digits
        raise bad_request(None, "the body must be one JSON object in UTF-8") from None
    if not isinstance(found, dict):
        raise bad_request(None, "the body must be one JSON object in UTF-8")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise bad_request(name[:60], f"the field {shortened(name)} must be given once")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise bad_request(None, f"the body must be JSON, which has no {text}")


def text_of(param: str, value: Any) -> str:
    """Return a value as a string of Unicode characters.

    Raises:
        RequestError: 400: it is no string, or it holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise bad_request(param, f"{param} must be a string, got {shortened(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(param, f"{param} must not hold half of a surrogate pair") from None
    return value


def whole_of(param: str, value: Any) -> int:
    """Return a value as an integer ≥ 1. true is no integer.

    Raises:
        RequestError: 400: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_request(param, f"{param} must be an integer >= 1, got {shortened(value)}")
    return value


def flag_of(param: str, value: Any) -> bool:
    """Return a value as a bool; null is false.

    Raises:
        RequestError: 400: it is neither true, false nor null.
    """
    if value is not None and not isinstance(value, bool):
        raise bad_request(param, f"{param} must be true or false, got {shortened(value)}")
    return bool(value)


def prompts_of(tokenizer: Any, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of every prompt of a completion.

    Args:
        tokenizer: the public model's tokenizer.
        value: the field `prompt`.

    Raises:
        RequestError: 400: it has another form, or a prompt holds no token.
    """
    ids = isinstance(value, list) and value and isinstance(value[0], int)
    value = [value] if ids or isinstance(value, str) else value
    if not isinstance(value, list) or not 1 <= len(value) <= MOST:
        message = f"prompt must be {_FORMS}, 1 to {MOST} of them, got {shortened(value)}"
        raise bad_request("prompt", message)
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
    if not isinstance(value, list) or not value:
        message = f"messages must be a list of at least one message, got {shortened(value)}"
        raise bad_request("messages", message)
    messages = [_message(f"messages[{index}]", one) for index, one in enumerate(value)]
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


def _message(name: str, value: Any) -> dict[str, str]:
    """Return the role and the text of a message. It must hold nothing else."""
    given = value if isinstance(value, dict) else {}
    role, content = given.get("role"), given.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    plain = all(
        isinstance(one, dict) and one == {"type": "text", "text": one.get("text")} for one in parts
    )
    more = any(one is not None for key, one in given.items() if key not in ("role", "content"))
    if role not in ROLES or not plain or more:
        raise bad_request(name, f"{name} must be {_MESSAGE} alone, got {shortened(value)}")
    text = "".join(text_of(f"{name}.content", one["text"]) for one in parts)
    return {"role": role, "content": text}


def window_error(error: ValueError, *, chat: bool) -> RequestError:
    """Return the error for a query that an engine could not answer, even alone."""
    text = str(error).replace("max_new_tokens ", "max_tokens ", 1)
    param = "messages" if chat else "prompt"
    if text.startswith("max_tokens "):
        param = "max_tokens"
    fits = text.startswith(("prompts ", "prompt must hold "))
    return bad_request(param, text, None if fits else "context_length_exceeded")


@dataclass(frozen=True)
class Defaults:
    """The served model, the values of fields that a request leaves out, and the largest max_tokens.

    Attributes:
        model: name of the served model.
        tokens: largest number of tokens of an answer without max_tokens.
        max_tokens: largest max_tokens of a request.
        window: positions of the model's window; None for any number. Without max_tokens an answer
            ends where the window does.
        vocab: number of tokens that the models have logits of.
    """

    model: str
    tokens: int = 256
    max_tokens: int = 1024
    window: int | None = None
    vocab: int = 1 << 20


def query_of(
    fields: dict[str, Any], defaults: Defaults, tokenizer: Any, key: Key, *, chat: bool
) -> Query:
    """Return what a request asks for. No field is ignored unless it has no effect.

    Args:
        fields: the JSON object of the body.
        defaults: the server's values.
        tokenizer: the public model's tokenizer.
        key: the client's key.
        chat: whether the request is a chat completion.

    Raises:
        RequestError: 404 for another model, 400 for any other fault.
    """
    if text_of("model", fields.get("model")) != defaults.model:
        raise no_model(fields["model"])
    for name, value in fields.items():
        if value is None or name in IGNORED or name in SERVED[chat]:
            continue
        neutral, why = REFUSED.get(name, ((), _UNKNOWN))
        flag = isinstance(value, bool)  # true is not 1
        if not any(flag == isinstance(one, bool) and value == one for one in neutral):
            shown = name if name in REFUSED else shortened(name)
            allows = " or ".join(["null", *map(json.dumps, neutral)])
            message = f"{shown} must be {allows}, got {shortened(value)}: {why}"
            raise bad_request(name[:60], message, "unsupported_parameter")
    stream = flag_of("stream", fields.get("stream"))
    include_usage = _include_usage(fields.get("stream_options"), stream)
    cap = min(defaults.max_tokens, key.max_tokens or defaults.max_tokens)
    given = _max_tokens(fields, cap)
    shape = _temperature(fields.get("temperature")), _top_k(fields.get("top_k"))
    stops = _stops(fields, tokenizer, defaults.vocab)
    if chat:
        prompts = conversation_of(tokenizer, fields.get("messages"))
    else:
        prompts = prompts_of(tokenizer, fields.get("prompt"))
    most = given or min(defaults.tokens, cap)
    if given is None and defaults.window is not None:
        most = max(1, min(most, defaults.window - max(map(len, prompts)) + 1))
    asked = tuple(Prompt(tokens, most, *shape, client=key.name) for tokens in prompts)
    return Query(asked, *stops, chat, stream, include_usage)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        message = "stream_options must be an object, and given with stream alone"
        raise bad_request("stream_options", message)
    for name, value in options.items():
        if name == "include_obfuscation" and value is False:  # there is none
            continue
        if name != "include_usage" and value is not None:
            message = f"stream_options must hold include_usage alone, got {shortened(name)}"
            raise bad_request("stream_options", message)
    return flag_of("stream_options.include_usage", options.get("include_usage"))


def _max_tokens(fields: dict[str, Any], cap: int) -> int | None:
    names = ("max_completion_tokens", "max_tokens")
    given = {name: whole_of(name, fields[name]) for name in names if fields.get(name) is not None}
    if len(set(given.values())) > 1:
        message = "max_tokens and max_completion_tokens must be equal if both are given"
        raise bad_request("max_tokens", message)
    for name, count in given.items():
        if count > cap:
            raise bad_request(name, f"{name} must be <= {cap}, got {shortened(count)}")
        return count
    return None


def _temperature(value: Any) -> float:
    if value is None:
        return 1.0
    if value == 0 and not isinstance(value, bool):
        raise bad_request("temperature", f"temperature must be > 0, got {value}: {NO_DRAW}")
    try:
        return check_temperature(value)
    except ValueError:
        span = f"{LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}"
        message = f"temperature must be {span}, got {shortened(value)}"
        raise bad_request("temperature", message) from None


def _top_k(value: Any) -> int | None:
    if value is None or (type(value) is int and value in (0, -1)):  # vLLM's values for all tokens
        return None
    return whole_of("top_k", value)


def _stops(
    fields: dict[str, Any], tokenizer: Any, vocab: int
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the strings and the tokens that end an answer."""
    value = fields.get("stop")
    texts = value if isinstance(value, list) else [] if value is None else [value]
    if len(texts) > MAX_STOPS:
        raise bad_request("stop", f"stop must be at most {MAX_STOPS} strings, got {len(texts)}")
    stops = tuple(text_of("stop", text) for text in texts)
    if not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
        message = f"stop must be strings of 1 to {MAX_STOP_CHARACTERS} characters"
        raise bad_request("stop", message)
    try:
        special = stop_tokens(tokenizer, stops, vocab)
    except ValueError as error:
        raise bad_request("stop", str(error).replace("stop_strings", "stop", 1)) from None
    ids = [] if fields.get("stop_token_ids") is None else fields["stop_token_ids"]
    fits = isinstance(ids, list) and len(ids) <= MAX_STOP_TOKENS
    if not fits or not all(type(one) is int and 0 <= one < vocab for one in ids):
        allows = f"a list of at most {MAX_STOP_TOKENS} tokens in [0, {vocab})"
        message = f"stop_token_ids must be {allows}, got {shortened(ids)}"
        raise bad_request("stop_token_ids", message)
    return stops, special | frozenset(ids)
