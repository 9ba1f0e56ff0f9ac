"""Compares the rows inside vLLM with those of our own engine, once, before anything is served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from adapmixed.ensemble import Ensemble
from adapmixed.vllm.heads import Heads

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference of two logits, as a part of the row's range."""

_TOKENS = 16
_NAME = "adapmixed-self-test"


def check_same_rows(runner: Any, ensemble: Ensemble, heads: Heads) -> None:
    """Compare all rows of one public context.

    Args:
        runner: vLLM's model runner, with its cache.
        ensemble: our own engine.
        heads: its members' output layers, as the sampler uses them.

    Raises:
        RuntimeError: rows differ by more than `TOLERANCE`. By how much is private.
    """
    limit = min(_TOKENS, runner.max_model_len - 1)
    tokens = [(7 * place + 3) % ensemble.vocab_size for place in range(limit)]
    hidden, public = _last_row(runner, tokens)
    found_private, found_public, tokens_found = heads.rows(hidden, public)
    private, wanted = (one[..., -1, :] for one in ensemble.logits(torch.tensor([tokens])))
    if tokens_found is not None:
        private = private.gather(-1, tokens_found.expand(len(private), -1, -1))
    pairs = (found_public, wanted), (found_private, private)
    tolerance = TOLERANCE[public.dtype]
    if not all(_same(found, own, tolerance) for found, own in pairs):
        raise RuntimeError(
            "vLLM must compute the rows of adapmixed's own engine, but they differ: this model or "
            "this setting of vLLM cannot be served: leave out --device vllm"
        )


def _last_row(runner: Any, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Return hidden states (1, d) and public logits (1, V) after these tokens."""
    groups = len(runner.kv_cache_config.kv_cache_groups)
    new = NewRequestData(
        req_id=_NAME,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_ids=tuple(_blocks(runner, len(tokens)) for _ in range(groups)),
        num_computed_tokens=0,
        lora_request=None,
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new]
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    output.num_scheduled_tokens = {_NAME: len(tokens)}
    output.total_num_scheduled_tokens = len(tokens)
    runner.execute_model(output)
    state, runner.execute_model_state = runner.execute_model_state, None
    found = state.sample_hidden_states.clone(), state.logits.clone()
    ended = SchedulerOutput.make_empty()
    ended.finished_req_ids = {_NAME}
    runner.execute_model(ended)
    return found


def _blocks(runner: Any, tokens: int) -> list[int]:
    """Return numbers of blocks of the cache; vLLM keeps block 0 for itself."""
    size = int(runner.cache_config.block_size)
    return list(range(1, 1 + -(-tokens // size)))


def _same(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    """Return whether rows are equal; one that overflows is, whatever is in it, as in a query."""
    usable = [~(one.isnan() | one.isposinf()).any(-1) for one in (found, wanted)]
    if not torch.equal(*usable):
        return False
    found, wanted = found[usable[0]], wanted[usable[0]]
    masked = torch.isneginf(wanted)
    if not torch.equal(torch.isneginf(found), masked):
        return False
    least = wanted.masked_fill(masked, torch.inf).amin(-1, keepdim=True)
    allowed = tolerance * (wanted.amax(-1, keepdim=True) - least)
    difference = (found.double() - wanted.double()).masked_fill(masked, 0.0).abs()
    return bool((difference <= allowed).all())
