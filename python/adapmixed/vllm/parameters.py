"""The sampling parameters that a private answer can have; all others are refused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from adapmixed.mechanisms.rows import check_shape

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "seed": (None,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "logprob_token_ids": (None,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "trace_decode_token_ids": (None,),
    "routed_experts_prompt_start": (0, None),
    "watermarking": (None, False),
    "_watermarking_skipped": (False,),
    "extra_args": (None, {}),
}
_SHAPE = {"temperature", "top_k", "max_tokens"}
_OWN = {  # these decide what is told of a token, and where an answer ends
    "stop", "stop_token_ids", "ignore_eos", "detokenize", "skip_special_tokens", "flat_logprobs",
    "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "skip_clone", "stream_interval", "output_text_buffer_length", "skip_reading_prefix_cache",
    "_eos_token_id", "_all_stop_token_ids", "_bad_words_token_ids",
}  # fmt: skip


def check_parameters(params: Any) -> None:
    """Raise ValueError unless a private answer can have these `SamplingParams`.

    A parameter that this version of vLLM does not know is refused as well.
    """
    for name in getattr(type(params), "__struct_fields__", None) or vars(params):
        value = getattr(params, name)
        if name in _SHAPE or name in _OWN:
            continue
        neutral = _NEUTRAL.get(name)
        if neutral is None:
            raise ValueError(f"{name} is not a parameter of private answers")
        if not any(value == one and (value is None) == (one is None) for one in neutral):
            raise ValueError(f"{name} must be {neutral[0]!r} for a private answer, got {value!r}")
    if params.max_tokens is None:
        raise ValueError("max_tokens must be given: it is reserved before the answer starts")
    shape_of(params)


def shape_of(params: Any) -> tuple[float, int | None]:
    """Return the temperature and the top-k that shape the rows before the mechanism.

    Raises:
        ValueError: the temperature is 0 or too small.
    """
    top_k = None if params.top_k in (0, -1) else int(params.top_k)
    return _checked_shape(float(params.temperature), top_k)


@lru_cache  # every row of every step asks
def _checked_shape(temperature: float, top_k: int | None) -> tuple[float, int | None]:
    check_shape(temperature, top_k)
    return temperature, top_k
