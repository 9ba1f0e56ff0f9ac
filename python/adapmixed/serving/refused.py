"""The fields of a request that are not served: their neutral values, and why others get 400."""

from __future__ import annotations

import json
from collections.abc import Mapping

from adapmixed.generation.refused import NO_DRAW, REASONS

NOT_OFFERED = "this server does not offer it"
UNKNOWN = "this server does not know it, and a field that it ignored could void the guarantee"
GREEDY = NO_DRAW
_SEVERAL = (
    "every answer is a query of its own: repeat the prompt in a list, or send the request again"
)
_ECHO = "the prompt's tokens are no private answers, so this server does not return them"
_SEED = "whoever knows a seed can undo the randomness that protects the private data"
_FORCED = REASONS["prefix_allowed_tokens_fn"]
_NEVER: tuple[object, ...] = ()

# Field -> (values without effect, the reason why others get 400). null passes for every field.
_BOTH: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), _SEVERAL),
    "seed": (_NEVER, _SEED),
    "top_p": ((1,), REASONS["top_p"]),
    "min_p": ((0,), REASONS["min_p"]),
    "typical_p": ((1,), REASONS["typical_p"]),
    "presence_penalty": ((0,), REASONS["presence_penalty"]),
    "frequency_penalty": ((0,), REASONS["frequency_penalty"]),
    "repetition_penalty": ((1,), REASONS["repetition_penalty"]),
    "length_penalty": ((1,), REASONS["length_penalty"]),
    "logit_bias": (({},), REASONS["logit_bias"]),
    "min_tokens": ((0,), REASONS["min_new_tokens"]),
    "ignore_eos": ((False,), REASONS["forced_eos_token_id"]),
    "bad_words": (([],), REASONS["bad_words_ids"]),
    "allowed_token_ids": (_NEVER, _FORCED),
    "logits_processors": (([],), REASONS["logits_processor"]),
    "response_format": (({"type": "text"},), _FORCED),
    "structured_outputs": (_NEVER, _FORCED),
    "guided_json": (_NEVER, _FORCED),
    "guided_regex": (_NEVER, _FORCED),
    "guided_choice": (_NEVER, _FORCED),
    "guided_grammar": (_NEVER, _FORCED),
    "use_beam_search": ((False,), REASONS["beam_search"]),
    "num_beams": ((1,), REASONS["num_beams"]),
    "best_of": ((1,), REASONS["best_of"]),
    "prompt_logprobs": (_NEVER, REASONS["prompt_logprobs"]),
    "echo": ((False,), _ECHO),
    "store": ((False,), NOT_OFFERED),
    "service_tier": (("auto", "default"), NOT_OFFERED),
}
_COMPLETIONS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "logprobs": (_NEVER, REASONS["logprobs"]),
    "suffix": (("",), NOT_OFFERED),
}
_CHAT: Mapping[str, tuple[tuple[object, ...], str]] = {
    "logprobs": ((False,), REASONS["logprobs"]),
    "top_logprobs": (_NEVER, REASONS["top_logprobs"]),
    "tools": (([],), NOT_OFFERED),
    "tool_choice": (("none",), NOT_OFFERED),
    "parallel_tool_calls": (_NEVER, NOT_OFFERED),
    "functions": (([],), NOT_OFFERED),
    "function_call": (("none",), NOT_OFFERED),
    "modalities": ((["text"],), NOT_OFFERED),
    "audio": (_NEVER, NOT_OFFERED),
    "prediction": (_NEVER, REASONS["assistant_model"]),
    "reasoning_effort": (_NEVER, NOT_OFFERED),
    "verbosity": (_NEVER, NOT_OFFERED),
    "web_search_options": (_NEVER, NOT_OFFERED),
}
REFUSED = {False: {**_BOTH, **_COMPLETIONS}, True: {**_BOTH, **_CHAT}}
"""The refused fields of completions (False) and chat completions (True)."""

IGNORED = frozenset({"user", "safety_identifier", "metadata"})
"""Fields that change nothing. They are neither read nor logged."""


def why_not(name: str, value: object, *, chat: bool) -> str | None:
    """Return why a field that is not served gets 400; None if its value has no effect.

    Args:
        name: name of the field.
        value: its value, from JSON.
        chat: whether the request is a chat completion.
    """
    if value is None or name in IGNORED:
        return None
    neutral, reason = REFUSED[chat].get(name, (_NEVER, UNKNOWN))
    return None if any(_same(value, one) for one in neutral) else reason


def allowed(name: str, *, chat: bool) -> str:
    """Return the values of a field that is not served, for a message."""
    neutral, _ = REFUSED[chat].get(name, (_NEVER, ""))
    return " or ".join(["null", *map(json.dumps, neutral)])


def _same(value: object, neutral: object) -> bool:
    """Return whether two values are equal, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
