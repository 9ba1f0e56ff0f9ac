"""Check whether an ensemble can be built on a public model.

All members answer in one batch. So a row of the batch must not depend on another member's rows, not
even in its last bits. And the same tokens must give the same logits in one pass, through a cache
and behind padding. `check_model` raises for models that are known to break these rules. `TESTED`
lists the families whose tests check them. `check_behaviour` tries a model of any other type when it
is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adapmixed.ensemble.lora import BatchedLoRA
from adapmixed.ensemble.output_layer import HeadAdapters, Logits
from adapmixed.text import beginning_of

if TYPE_CHECKING:
    from adapmixed.ensemble.ensemble import Ensemble

# `model_type` of the families in tests/helpers/families.py.
TESTED = frozenset(
    {
        "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text",
        "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "granite", "llama", "mistral", "mpt", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3",
        "stablelm", "starcoder2",
    }
)  # fmt: skip
_TOKENS = 6
_PADDING = 2


def check_model(model: Any, tokenizer: Any = None) -> None:
    """Raise ValueError for a model that is known not to separate members or positions exactly.

    Args:
        model: the public model; without weights (on the device "meta") it is checked as well.
        tokenizer: its tokenizer, or None.

    Raises:
        ValueError: if the model has an encoder, mixture-of-experts layers, recurrent layers (state
            space, linear attention, convolution) or another memory than keys and values, attention
            to later tokens, no key/value cache, quantised weights, or an output layer whose width
            is not the configuration's vocab_size.
        ValueError: if the tokenizer begins a text with a token that the model does not have.
    """
    from adapmixed.ensemble.decoder import cache_argument, check_cache

    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"base must be a decoder-only model, got {kind}, which reads its prompt in an encoder "
            "that the ensemble does not run"
        )
    for name, module in model.named_modules():
        if re.search(r"(?i)expert|moe", type(module).__name__):
            raise ValueError(
                f"base must have no mixture-of-experts layers, got {kind} with {name or 'root'} "
                f"({type(module).__name__}): the tokens that one member sends to an expert change "
                "the shape of a product, and so the last bits of other members' logits"
            )
    cache_argument(model)
    check_cache(model.config)
    both_ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    if both_ways and both_ways != "vision":  # with "vision" only images attend to later tokens
        raise ValueError(
            f"base must be causal, got {kind} with use_bidirectional_attention = {both_ways!r}: a "
            "later token would change earlier logits"
        )
    if getattr(model, "is_quantized", False) or hasattr(model.config, "quantization_config"):
        raise ValueError(
            "base must not be quantised: some methods choose scales or outliers over all rows of a "
            "batch, so that one member would change another's logits"
        )
    head, vocab_size = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    width = None if head is None else int(head.weight.shape[0])
    if width != vocab_size:
        raise ValueError(
            f"base must have an output layer as wide as its vocab_size = {vocab_size}, got {width}"
        )
    for token in beginning_of(tokenizer):
        if token >= vocab_size:
            raise ValueError(
                f"base must have the tokens with which its tokenizer begins a text, got {token} "
                f"with vocab_size = {vocab_size}"
            )


def max_positions(config: Any) -> int | None:
    """Return the longest input in tokens, or None if the model sets no limit.

    Up to this length a model computes the same logits in one pass and in chunks. LongRoPE changes
    the frequencies of all positions that are not cached once an input exceeds the original window,
    so that window is the limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    limit = getattr(config, "max_seq_len", None) if limit is None else limit  # MPT
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *rope.values()):  # one entry for all layers, or one per kind of layer
        if isinstance(entry, dict) and entry.get("rope_type") == "longrope":
            original = entry.get("original_max_position_embeddings")
            limit = limit if original is None else min(int(original), limit or int(original))
    return None if limit is None else int(limit)


@torch.no_grad()
def check_behaviour(ensemble: Ensemble) -> None:
    """Try a model of an untested type on a few tokens.

    A member's rows must keep every bit if all other updates are removed. Up to rounding, a later
    token must not change earlier logits. Up to rounding, a cache, left padding and a decoder whose
    sequences join and leave must give the logits of a single pass. This finds gross faults only:
    longer windows are not tried.

    Raises:
        ValueError: if one of these fails; the message names the model type and what failed.
    """
    kind = ensemble.model.config.model_type
    failed = f"base must answer as an ensemble needs it, {kind} does not"
    try:
        fault = _fault(ensemble)
    except Exception as error:  # a model's own code may raise anything
        raise ValueError(f"{failed}: {type(error).__name__}: {error}") from error
    if fault is not None:
        raise ValueError(f"{failed}: {fault}")


def _fault(ensemble: Ensemble) -> str | None:
    device = ensemble.model.device
    tokens = (torch.arange(_TOKENS + _PADDING, device=device) * 7 + 3) % ensemble.vocab_size
    padded = tokens[None]
    ids = padded[:, _PADDING:]
    whole = _rows(ensemble.forward(ids, None, None))
    for kept in range(2):  # the public model, the first member
        with _only(ensemble.model, kept):
            alone = _rows(ensemble.forward(ids, None, None))
        if not torch.equal(alone[kept], whole[kept]):
            return "one member's adapter changes another row of the batch"
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % ensemble.vocab_size
    if _differ(_rows(ensemble.forward(other, None, None))[:, :, :-1], whole[:, :, :-1]):
        return "a later token changes earlier logits"
    cache, parts = ensemble.new_cache(_TOKENS + 1), []  # reserve room for all, as decoding does
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        parts.append(_rows(ensemble.forward(part, None, cache)))
    if _differ(torch.cat(parts, dim=2), whole):
        return "a key/value cache changes its logits"
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    if _differ(_rows(ensemble.forward(padded, mask, None))[:, :, _PADDING:], whole):
        return "left padding changes its logits"
    cache, parts = ensemble.new_cache(_TOKENS + _PADDING), []
    for end in range(1, padded.shape[1] + 1):
        parts.append(_rows(ensemble.forward(padded[:, end - 1 : end], mask[:, :end], cache)))
    if _differ(torch.cat(parts[_PADDING:], dim=2), whole):
        return "left padding changes its logits in chunks"
    memory = ensemble.sequence_bytes(_TOKENS + _PADDING)
    decoder, joining = (
        ensemble.decoder(row[:, :-2], memory_bytes=memory, new_tokens=2) for row in (padded, ids)
    )
    decoder.join(joining)
    decoder.append(tokens[-2:-1].repeat(2))
    decoder.drop(torch.tensor([True, False], device=device))
    decoder.append(tokens[-1:])
    if _differ(_rows(decoder.logits), whole[:, :, -1]):
        return "sequences that join and leave a batch change its logits"
    return None


def _differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by more than rounding, relative to their range."""
    finite = expected[expected.isfinite()].to(torch.float32)
    precision = 2.0**-10 if expected.dtype == torch.float32 else 2.0**-4
    allowed = precision * float(finite.max() - finite.min())
    return not torch.allclose(found.float(), expected.float(), rtol=0.0, atol=allowed)


def _rows(found: Logits) -> Tensor:
    """Return the public row and the members' on all tokens, (N + 1, ...)."""
    return torch.cat([found.public[None], found.private])


@contextmanager
def _only(model: Any, kept: int) -> Iterator[None]:
    """Remove every member's update but that of block `kept` while the context is entered."""
    weights = [one.up for one in model.modules() if isinstance(one, BatchedLoRA)]
    heads = [one.factors for one in model.modules() if isinstance(one, HeadAdapters)]
    copies = [one.clone() for one in (*weights, *heads)]
    try:
        for up in weights:
            up[torch.arange(len(up)) + 1 != kept] = 0.0
        for factors in heads:
            _, blocks, _, width = factors.shape
            others = torch.arange(blocks * width).view(blocks, 1, width) + 1 != kept
            factors.masked_fill_(others.to(factors.device), 0.0)
        yield
    finally:
        for one, copy in zip((*weights, *heads), copies, strict=True):
            one.copy_(copy)
