"""Read a request by an allowlist: every field is served, without effect, or gets 400."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from adapmixed.generation.generator import check_window
from adapmixed.generation.refused import NO_DRAW, REASONS
from adapmixed.limits import check_count, check_flag, check_optional_count, check_temperature
from adapmixed.serving.admission import Key
from adapmixed.serving.engine import MOST_WAITING, Prompt
from adapmixed.serving.errors import RequestError, shortened
from adapmixed.text import check_prompt, check_text, stop_tokens, templated, text_ids

ROLES = ("system", "developer", "user", "assistant")
_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
_MESSAGE = (
    f'{{"role": ..., "content": ...}} with the role {" or ".join(ROLES)}, and a string or a list '
    'of {"type": "text", "text": ...}'
)
DEFAULT_TOKENS = 256  # largest number of tokens of an answer without max_tokens
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

_UNKNOWN = "this server does not offer it, and a field that it ignored could void the guarantee"
_REASONS = {
    **REASONS,
    "n": (
        "every answer is a query of its own: repeat the prompt in a list, or send the request again"
    ),
    "seed": "whoever knows a seed can undo the randomness that protects the private data",
    "echo": "the prompt's tokens are no private answers, so this server does not return them",
}
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
REFUSED = {
    name: (_NEUTRAL.get(name, ()), _REASONS.get(name, _UNKNOWN)) for name in _REASONS | _NEUTRAL
}
"""Field that is not served -> (values without effect, the reason why others get 400)."""


def prompts_of(tokenizer: Any, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of every prompt of a completion.

    Args:
        tokenizer: the public model's tokenizer.
        value: the field `prompt`.

    Raises:
        ValueError: it has another form, or a prompt holds no token.
    """
    single = isinstance(value, str) or isinstance(value, list) and value and type(value[0]) is int
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MOST_WAITING:
        raise ValueError(f"prompt must be {_FORMS}, 1 to {MOST_WAITING} of them")
    return tuple(_tokens(tokenizer, prompt) for prompt in prompts)


def _tokens(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        prompt = text_ids(tokenizer, prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise ValueError(f"prompt must be {_FORMS}")
    if not prompt:
        raise ValueError("prompt must hold at least one token, got none")
    return tuple(prompt)


def conversation_of(tokenizer: Any, value: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of one conversation, with the public model's chat template.

    Args:
        tokenizer: the public model's tokenizer.
        value: the field `messages`.

    Raises:
        ValueError: it has another form, or the chat template rejects these messages.
        RequestError: 400: there is no chat template.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a list of at least one message")
    messages = [_message(f"messages[{index}]", entry) for index, entry in enumerate(value)]
    if not getattr(tokenizer, "chat_template", None):
        message = "the model has no chat template: use /v1/completions"
        raise RequestError(400, message, "no_chat_template", param="messages")
    return (_tokens(tokenizer, templated(tokenizer, messages)),)


def _message(name: str, value: Any) -> dict[str, str]:
    """Return the role and the text of a message. It must hold nothing else."""
    message = value if isinstance(value, dict) else {}
    role, content = message.get("role"), message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    plain = all(
        isinstance(part, dict) and part == {"type": "text", "text": part.get("text")}
        for part in parts
    )
    more = any(item is not None for key, item in message.items() if key not in ("role", "content"))
    if role not in ROLES or not plain or more:
        raise ValueError(f"{name} must be {_MESSAGE} alone")
    text = "".join(check_text(f"{name}.content", part["text"]) for part in parts)
    return {"role": role, "content": text}


@dataclass(frozen=True)
class ServedModel:
    """The served model, as requests and their answers see it.

    Attributes:
        name: what requests call it.
        tokenizer: the public model's tokenizer.
        end_tokens: tokens that end an answer; they add no text.
        vocab: number of tokens that the models have logits of.
        window: the engine's. Without max_tokens an answer ends where the window does.
        max_tokens: largest max_tokens of a request.
    """

    name: str
    tokenizer: Any
    end_tokens: frozenset[int]
    vocab: int
    window: int
    max_tokens: int


@dataclass(frozen=True)
class Query:
    """The question of a client, checked, and read by a tokenizer.

    Attributes:
        prompts: every prompt becomes a sequence of its own. All have the same settings.
        stop: strings that end an answer. They are charged, but not part of its text.
        stop_tokens: tokens that end an answer, as such strings do.
        chat: whether it is a chat completion.
        stream: whether every piece of text is sent at once.
        include_usage: whether a stream ends with the number of tokens.
    """

    prompts: tuple[Prompt, ...]
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    chat: bool = False
    stream: bool = False
    include_usage: bool = False

    @property
    def tokens(self) -> int:
        """The largest number of private tokens of all answers together."""
        return sum(prompt.max_tokens for prompt in self.prompts if not prompt.public)

    @property
    def public(self) -> bool:
        """Whether the public model answers alone, which costs nothing."""
        return all(prompt.public for prompt in self.prompts)

    def of_public(self) -> Query:
        """Return this question to the public model alone."""
        return replace(self, prompts=tuple(replace(prompt, public=True) for prompt in self.prompts))


def query_of(body: bytes, model: ServedModel, key: Key, *, chat: bool) -> Query:
    """Return what a request asks for. No field is ignored unless it has no effect.

    Args:
        body: a JSON object in UTF-8. A null is as if its field was not given.
        model: the served model.
        key: the client's key.
        chat: whether the request is a chat completion.

    Raises:
        RequestError: 404 for another model, 400 for any other fault.
    """
    try:
        data = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):  # also of integers with thousands of digits
        data = None
    if not isinstance(data, dict):
        raise RequestError(400, "the body must be one JSON object in UTF-8, not nested deeply")
    fields = {name: value for name, value in data.items() if value is not None}
    try:
        check_text("model", fields.get("model"))
        if fields["model"] != model.name:
            text = f"the model {shortened(fields['model'])} is not served; GET /v1/models names one"
            raise RequestError(404, text, "model_not_found", param="model")
        _check_allowed(fields, chat)
        stream = check_flag("stream", fields.get("stream", False))
        usage = "stream_options" in fields and _include_usage(fields["stream_options"], stream)
        cap = min(model.max_tokens, key.max_tokens or model.max_tokens)
        limit = _max_tokens(fields, cap)
        temperature, top_k = fields.get("temperature", 1.0), fields.get("top_k")
        if temperature == 0 and not isinstance(temperature, bool):
            raise ValueError(f"temperature must be > 0, got {temperature}: {NO_DRAW}")
        if type(top_k) is int and top_k in (0, -1):  # vLLM's values for all tokens
            top_k = None
        shape = check_temperature(temperature), check_optional_count("top_k", top_k)
        stops = _stops(fields, model.tokenizer, model.vocab)
        if chat:
            prompts = conversation_of(model.tokenizer, fields.get("messages"))
        else:
            prompts = prompts_of(model.tokenizer, fields.get("prompt"))
        for tokens in prompts:
            check_prompt(tokens, model.vocab, model.tokenizer)
    except ValueError as error:
        raise _refused(error, chat) from None
    most, longest = limit or min(DEFAULT_TOKENS, cap), max(map(len, prompts))
    if limit is None:
        most = max(1, min(most, model.window - longest + 1))
    try:
        check_window(model.window, longest, most)
    except ValueError as error:
        raise _refused(error, chat, "context_length_exceeded") from None
    sequences = tuple(Prompt(tokens, most, *shape, client=key.name) for tokens in prompts)
    return Query(sequences, *stops, chat, stream, usage)


def _refused(error: ValueError, chat: bool, code: str | None = None) -> RequestError:
    """Return the error for a field, whose name the message begins with, or our own name for it."""
    name, _, words = str(error).partition(" ")
    ours = {"stop_strings": "stop", "max_new_tokens": "max_tokens"}
    name = "messages" if chat and name == "prompt" else ours.get(name, name)
    return RequestError(400, f"{name} {words}"[:500], code, param=name)


def _check_allowed(fields: dict[str, Any], chat: bool) -> None:
    """Raise RequestError, 400, unless all fields are served or have no effect."""
    for name, value in fields.items():
        if name in IGNORED or name in SERVED[chat]:
            continue
        neutral, why = REFUSED.get(name, ((), _UNKNOWN))
        flag = isinstance(value, bool)  # true is not 1
        if not any(flag == isinstance(other, bool) and value == other for other in neutral):
            shown = name if name in REFUSED else shortened(name)
            allows = " or ".join(["null", *map(json.dumps, neutral)])
            message = f"{shown} must be {allows}, got {shortened(value)}: {why}"
            raise RequestError(400, message, "unsupported_parameter", param=name[:60])


def _include_usage(options: Any, stream: bool) -> bool:
    if not stream or not isinstance(options, dict):
        raise ValueError("stream_options must be an object, and given with stream alone")
    for name, value in options.items():
        if name != "include_usage" and value is not None:
            raise ValueError(f"stream_options must hold include_usage alone, got {name!r}")
    value = options.get("include_usage")
    return value is not None and check_flag("stream_options.include_usage", value)


def _max_tokens(fields: dict[str, Any], cap: int) -> int | None:
    names = ("max_completion_tokens", "max_tokens")
    counts = [check_count(name, fields[name], most=cap) for name in names if name in fields]
    if len(set(counts)) > 1:
        raise ValueError("max_tokens must be equal to max_completion_tokens if both are given")
    return counts[0] if counts else None


def _stops(
    fields: dict[str, Any], tokenizer: Any, vocab: int
) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the strings and the tokens that end an answer."""
    stop = fields.get("stop", [])
    stops = tuple(check_text("stop", text) for text in (stop if isinstance(stop, list) else [stop]))
    if len(stops) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise ValueError(
            f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
        )
    special = stop_tokens(tokenizer, stops, vocab)
    ids = fields.get("stop_token_ids", [])
    fits = isinstance(ids, list) and len(ids) <= MAX_STOP_TOKENS
    if not fits or not all(type(token) is int and 0 <= token < vocab for token in ids):
        allows = f"a list of at most {MAX_STOP_TOKENS} tokens in [0, {vocab})"
        raise ValueError(f"stop_token_ids must be {allows}, got {shortened(ids)}")
    return stops, special | frozenset(ids)
