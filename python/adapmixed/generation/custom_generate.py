"""Private answers through `generate` of transformers, with `custom_generate=private_generate`.

transformers passes the prepared settings of a generation to a callable. Settings that act on rows
before they are projected, or on released tokens alone, are honoured. Any other setting raises; see
the module `settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapmixed.generation.loop import DEFAULT_MEMORY_BYTES, Answerer
from adapmixed.generation.settings import check_settings, refused
from adapmixed.generation.text import stop_rule, stop_tokens
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom
from adapmixed_ext.types import RandomSource

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble

# Arguments of generate() that transformers does not pass on, and those that it prepares itself.
_DROPPED = ("streamer", "assistant_model", "negative_prompt_ids", "negative_prompt_attention_mask")
_PREPARED = frozenset(
    {
        "attention_mask", "position_ids", "past_key_values", "cache", "cache_position", "use_cache",
        "logits_to_keep", "output_attentions", "output_hidden_states", "synced_gpus", "tokenizer",
    }
)  # fmt: skip


def private_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Iterable[Any],
    stopping_criteria: Callable[..., Tensor],
    generation_config: Any,
    *,
    ensemble: Ensemble | None = None,
    mechanism: Mechanism | None = None,
    accountant: Accountant | None = None,
    rng: RandomSource | None = None,
    overflow: str = "refuse",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    stop_strings: str | Sequence[str] | None = None,
    **inputs: Any,
) -> Tensor:
    """Continue prompts as `generate` of transformers does, with a private answer for every token.

    transformers gives the first five arguments. The caller of `generate` gives the others.

    Args:
        model: model whose `generate` was called. It is not run; the ensemble answers.
        input_ids: (b, t) int64 prompts, padded on the left if their lengths differ.
        logits_processor: processors for temperature and top-k, which are applied before projection.
            Any other raises.
        stopping_criteria: called after every token without scores, on what has been released,
            padded as the result is. `MaxTimeCriteria` of transformers raises.
        generation_config: settings of transformers. `do_sample` must be True; see
            `settings.check_settings` for the others.
        ensemble: as in :class:`PrivateGenerator`; must be given.
        mechanism: as in :class:`PrivateGenerator`; must be given.
        accountant: as in :class:`PrivateGenerator`; must be given on the main process.
        rng: as in :class:`PrivateGenerator`.
        overflow: as in :class:`PrivateGenerator`.
        memory_bytes: as in :class:`PrivateGenerator`.
        stop_strings: strings that end a continuation, searched for in the released text with the
            ensemble's tokenizer. Give them to `generate`; transformers does not accept them in a
            `generation_config` here.
        inputs: other model inputs. attention_mask, (b, t), is used. Inputs that transformers does
            not prepare itself raise.

    Returns:
        (b, t + s) int64, prompts and released tokens, padded with the pad token, or with 0 if there
        is none.

    Raises:
        ValueError: an argument is missing, a setting would void the guarantee, or for the reasons
            of :class:`PrivateGenerator`.
        BudgetSpentError: fewer queries are left of the mechanism's plan.
        LedgerError: a charge could not be made durable.
    """
    if ensemble is None or mechanism is None or (accountant is None and ensemble.ranks.is_main):
        raise ValueError(
            "ensemble, mechanism and accountant must be given to generate() with custom_generate"
        )
    frame = inspect.currentframe()
    _check_callers(None if frame is None else frame.f_back)
    check_settings(generation_config)
    _check_inputs(inputs, input_ids)
    _check_criteria(stopping_criteria)
    shape = _shape(logits_processor)
    given = stop_strings or ()
    strings = [given] if isinstance(given, str) else given
    if strings and ensemble.tokenizer is None:
        raise ValueError(
            f"stop_strings must be None if the ensemble has no tokenizer, got {stop_strings!r}: "
            "load it from a base that has one, or use PrivateGenerator"
        )
    stops = stop_tokens(ensemble.tokenizer, strings, ensemble.vocab_size)
    prompts = input_ids.clamp(0, ensemble.vocab_size - 1).tolist()
    found = stop_rule(ensemble.tokenizer, prompts, strings)
    pad = generation_config.pad_token_id
    fill = pad if isinstance(pad, int) else 0

    def continued(released: Tensor) -> Tensor:
        tokens = released.masked_fill(released < 0, fill)
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1)

    def ended(released: Tensor) -> Tensor:
        ends = stopping_criteria(continued(released), None).cpu()
        return ends if found is None else ends | found(released)

    source = SecureRandom() if rng is None else rng
    answerer = Answerer(ensemble, mechanism, accountant, source, overflow, memory_bytes)
    steps = answerer.stream(
        input_ids,
        attention_mask=inputs.get("attention_mask"),
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        stop_token=stops,
        stop=ended,
        **shape,
    )
    return continued(torch.stack(list(steps), dim=1))


def _shape(processors: Iterable[Any]) -> dict[str, Any]:
    """Return the temperature and top-k of these processors, at most one of each.

    Raises:
        ValueError: there is any other processor.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    found: dict[str, Any] = {}
    for processor in processors:
        # A subclass may do something else.
        if type(processor) is TemperatureLogitsWarper and "temperature" not in found:
            found["temperature"] = float(processor.temperature)
        elif type(processor) is TopKLogitsWarper and "top_k" not in found:
            found["top_k"] = int(processor.top_k)
        else:
            raise refused("logits_processor", type(processor).__name__)
    return found


def _check_criteria(criteria: Any) -> None:
    from transformers import MaxTimeCriteria

    if isinstance(criteria, MaxTimeCriteria):
        raise refused("max_time", criteria.max_time)
    for one in criteria if isinstance(criteria, Iterable) else ():
        _check_criteria(one)


def _check_callers(frame: FrameType | None) -> None:
    """Raise ValueError for arguments of `generate` that transformers does not pass on.

    transformers drops them silently, so they are read from the caller's frame.
    """
    if frame is None or frame.f_code.co_name != "generate":
        return
    for name in _DROPPED:
        if frame.f_locals.get(name) is not None:
            raise refused(name, type(frame.f_locals[name]).__name__)


def _check_inputs(inputs: Mapping[str, Any], prompt: Tensor) -> None:
    """Raise ValueError for inputs other than the prompt, its mask and those of transformers."""
    for name in _DROPPED:
        if inputs.get(name) is not None:
            raise refused(name, type(inputs[name]).__name__)
    for name in ("past_key_values", "cache"):  # transformers renamed it in version 5.24
        cache = inputs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name} must be empty, got {cache.get_seq_length()} positions: the ensemble reads "
                "the whole prompt itself"
            )
    unknown = sorted(
        name for name, value in inputs.items() if value is not None and name not in _PREPARED
    )
    if unknown:
        raise ValueError(
            f"model inputs must be input_ids and attention_mask, got {', '.join(unknown)}, too: "
            "the ensemble reads no others"
        )
    places = inputs.get("position_ids")
    if places is not None:
        mask = inputs.get("attention_mask")
        mask = torch.ones_like(prompt) if mask is None else mask.to(prompt.device)
        expected = (mask.cumsum(dim=1) - 1)[mask == 1]
        if not torch.equal(places.to(prompt.device).expand_as(prompt)[mask == 1], expected):
            raise ValueError(
                "position_ids must count the tokens that attention_mask does not hide, got other "
                "positions: the ensemble computes them from the mask"
            )
