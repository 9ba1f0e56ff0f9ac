"""`model.generate(..., custom_generate=private_generate, ensemble=..., mechanism=...)`.

transformers hands a callable the prepared settings of a generation. Those that act on rows before
they are projected, or on released tokens alone, are honoured; any other one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapmixed.decoding import generate
from adapmixed.mechanisms import Mechanism, Shaped
from adapmixed.misuse import REASONS
from adapmixed.privacy import Accountant, Ledger, PerModelFilter
from adapmixed.rng import SecureRandom
from adapmixed_ext import RandomSource

if TYPE_CHECKING:
    from adapmixed.models import Ensemble


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
    ledger: Ledger | None = None,
    model_filter: PerModelFilter | None = None,
    **inputs: Any,
) -> Tensor:
    """Continues prompts as `generate` of transformers does, every token answered privately.

    Args:
        model: whose `generate` was called, the public model of the ensemble; it is not run.
        input_ids: (b, t) prompts, padded on the left where lengths differ.
        logits_processor: temperature and top-k, which are applied before projection; no other.
        stopping_criteria: asked after every token, without scores.
        generation_config: `do_sample` must be True.
        ensemble, mechanism, accountant: needed.
        rng, ledger, model_filter: as `decoding.stream`; rng None: `SecureRandom()`.
        inputs: of these the attention_mask, (b, t), is used. (Named, it would be given twice.)

    Returns:
        (b, t + s) int64, prompts and what was released, padded with the pad token (else 0).

    Raises:
        ValueError: an argument is missing, a setting would void the guarantee, or as
            `decoding.stream`.
    """
    if ensemble is None or mechanism is None or accountant is None:
        raise ValueError(
            "ensemble, mechanism and accountant must be given to generate() beside custom_generate"
        )
    shaped = Shaped(mechanism, **_shape(logits_processor, generation_config))
    prompt = input_ids.cpu()

    def ended(released: Tensor) -> Tensor:
        tokens = torch.cat([prompt, released.clamp_min(0)], dim=1).to(input_ids.device)
        return stopping_criteria(tokens, None).cpu()

    released = generate(
        ensemble,
        shaped,
        input_ids,
        attention_mask=inputs.get("attention_mask"),
        max_new_tokens=max(generation_config.max_length - input_ids.shape[1], 1),
        rng=SecureRandom() if rng is None else rng,
        accountant=accountant,
        ledger=ledger,
        model_filter=model_filter,
        stop=ended,
    )
    pad = generation_config.pad_token_id
    fill = pad if isinstance(pad, int) else 0
    released = released.masked_fill(released < 0, fill).to(input_ids.device)
    return torch.cat([input_ids, released], dim=1)


def _shape(processors: Iterable[Any], config: Any) -> dict[str, Any]:
    """Temperature and top-k of these settings."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    if not config.do_sample:
        raise _refused("do_sample", config.do_sample)
    for name in ("num_beams", "num_return_sequences"):
        if getattr(config, name, None) not in (None, 1):
            raise _refused(name, getattr(config, name))
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise _refused(name, True)
    found: dict[str, Any] = {}
    for processor in processors:
        if isinstance(processor, TemperatureLogitsWarper):
            found["temperature"] = float(processor.temperature)
        elif isinstance(processor, TopKLogitsWarper):
            found["top_k"] = int(processor.top_k)
        else:
            raise _refused("logits_processor", type(processor).__name__)
    return found


def _refused(name: str, value: object) -> ValueError:
    return ValueError(f"{name} must not be {value!r} where tokens are private: {REASONS[name]}")
