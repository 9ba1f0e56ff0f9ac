"""Which public models can carry an ensemble: what is refused, and what is tried on loading.

Members answer side by side in one batch, so a row of the batch must not depend on another member's
rows, not even in its last bits; and the same tokens must give the same logits in one pass, through
a cache, and behind padding. `TESTED` lists the families whose tests hold them to this. A model of
another type is tried on loading (`check_behaviour`); what is known not to hold is refused before
(`check_model`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.batched_lora import RankGroup
from adapmixed.ensemble.forward import BatchedForward

# `model_type` of the families of tests/helpers/families.py.
TESTED = frozenset(
    {
        "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "llama", "mistral", "mpt", "olmo2",
        "opt", "phi", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2",
    }
)  # fmt: skip
_TOKENS = 6
_PADDING = 2


def check_model(model: Any) -> None:
    """Refuses models that are known not to keep members apart or positions exact.

    Raises:
        ValueError: an encoder beside the decoder; mixture-of-experts layers; recurrent (state
            space, linear attention, convolution) layers; no key/value cache; quantised weights;
            or an output layer whose width is not the configuration's vocab_size.
    """
    from adapmixed.ensemble.cache import key_value_cache

    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"base must be a decoder-only model, got {kind}: an encoder-decoder reads its prompt "
            "in an encoder, which the ensemble does not run"
        )
    for name, module in model.named_modules():
        if re.search(r"(?i)expert|moe", type(module).__name__):
            raise ValueError(
                f"base must have no mixture-of-experts layers, got {kind} with {name or 'root'} "
                f"({type(module).__name__}): the tokens that one member sends to an expert set the "
                "shape of its product, so that members would show in the last bits of each other's "
                "and the public model's logits"
            )
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"base must read a key/value cache (past_key_values), {type(model).__name__} does not"
        )
    if any(getattr(key_value_cache(model.config, 0), "is_linear", ())):
        raise ValueError(
            f"base must have attention layers only, got {kind} with recurrent ones: their state "
            "takes in padding and chunk boundaries, so that batches and chunks would answer "
            "otherwise than single prompts in one pass"
        )
    if getattr(model, "is_quantized", False) or hasattr(model.config, "quantization_config"):
        raise ValueError(
            "base must not be quantised: some methods choose scales or outliers over all rows of a "
            "batch, so that members would show in each other's logits"
        )
    head, vocab_size = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    width = None if head is None else int(head.weight.shape[0])
    if width != vocab_size:
        raise ValueError(
            f"base must have an output layer as wide as its vocab_size = {vocab_size}, got {width}"
        )


def max_positions(config: Any) -> int | None:
    """Longest input, in tokens, that the model computes alike however it is cut; None: no limit.

    LongRoPE changes the frequencies of all positions once an input exceeds its original window,
    those in a cache excepted: that window is the limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    limit = getattr(config, "max_seq_len", None) if limit is None else limit  # MPT
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # one for all layers, or one per kind of layer
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            original = entry.get("original_max_position_embeddings")
            limit = limit if original is None else min(int(original), limit or int(original))
    return None if limit is None else int(limit)


@torch.no_grad()
def check_behaviour(forward: BatchedForward) -> None:
    """Tries a model of a type that has no tests of its own, on a few tokens.

    Rows of one member must keep every bit when all others' updates are taken away. Up to rounding,
    a later token must leave earlier logits alone, a cache must give what one pass gives, and so
    must left padding. This shows gross faults; windows longer than the few tokens are not tried.

    Raises:
        ValueError: naming the model type and what does not hold.
    """
    kind = forward.model.config.model_type
    failed = f"base must answer as an ensemble needs it, {kind} does not"
    try:
        fault = _fault(forward)
    except Exception as error:  # whatever a model's own code may raise
        raise ValueError(f"{failed}: {type(error).__name__}: {error}") from error
    if fault is not None:
        raise ValueError(f"{failed}: {fault}")


def _fault(forward: BatchedForward) -> str | None:
    device = forward.model.device
    tokens = (torch.arange(_TOKENS + _PADDING, device=device) * 7 + 3) % forward.vocab_size
    padded = tokens[None]
    ids = padded[:, _PADDING:]
    whole = forward(ids, None, None)
    for kept in range(min(2, forward.num_models + 1)):  # the public model, the first member
        with _only(forward.model, kept):
            alone = forward(ids, None, None)
        if not torch.equal(alone[kept], whole[kept]):
            return "one member's adapter changes another row of the batch"
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % forward.vocab_size
    if _differ(forward(other, None, None)[:, :, :-1], whole[:, :, :-1]):
        return "a later token changes earlier logits"
    cache, parts = forward.new_cache(_TOKENS + 1), []  # room to the end, as in decoding
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        parts.append(forward(part, None, cache))
    if _differ(torch.cat(parts, dim=2), whole):
        return "a key/value cache changes its logits"
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    if _differ(forward(padded, mask, None)[:, :, _PADDING:], whole):
        return "left padding changes its logits"
    return None


def _differ(found: Tensor, expected: Tensor) -> bool:
    """Whether logits differ by more than rounding, measured by their own range."""
    finite = expected[expected.isfinite()].to(torch.float32)
    precision = 2.0**-10 if expected.dtype == torch.float32 else 2.0**-4
    allowed = precision * float(finite.max() - finite.min())
    return not torch.allclose(found.float(), expected.float(), rtol=0.0, atol=allowed)


@contextmanager
def _only(model: Any, kept: int) -> Iterator[None]:
    """Takes away every member's update but that of block `kept`, for as long as it is entered."""
    groups = [module for module in model.modules() if isinstance(module, RankGroup)]
    ups = [group.up.clone() for group in groups]
    try:
        for group in groups:
            for member in range(len(group.up)):
                if group.first + member + 1 != kept:
                    group.up[member].zero_()
        yield
    finally:
        for group, up in zip(groups, ups, strict=True):
            group.up.copy_(up)
