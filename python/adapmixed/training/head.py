"""Train members that adapt the output layer alone, with one pass of the trunk per token.

Everything below the output layer is public and frozen, so its hidden states are the same in every
epoch. They are computed once in eval mode and kept. Training is then a softmax regression. Hidden
states are functions of the private text. So a file of them is readable by its owner alone, and has
no name while in use: nothing is left of it, however the process ends.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.layers import head_name

_LOG = logging.getLogger(__name__)
IN_MEMORY = 256 << 20
"""Largest size of one shard's hidden states in memory, in bytes; larger ones go to a file."""
_TOKENS = 512  # tokens per pass of the trunk, so that activations stay in a core's cache
_TRIAL = 8  # tokens of a trial


@contextmanager
def trunk_once(model: Any, inputs: Tensor, scratch: Path | None = None) -> Iterator[Tensor]:
    """Let a model that adapts its output layer alone answer from stored hidden states.

    The model is changed while the context is entered, and restored afterwards. It stays unchanged
    if it adapts other layers, or if its trunk is not found.

    Args:
        model: an `adapter.adapted_copy` in eval mode.
        inputs: (blocks, t) int64 token ids.
        scratch: a private folder for hidden states larger than `IN_MEMORY`; None to keep them
            always in memory.

    Yields:
        the `input_ids` to use instead of `inputs`, one row per block: block numbers (blocks, 1), or
        `inputs` themselves if the model stays unchanged.

    Raises:
        RuntimeError: if `scratch` has no room for the states.
    """
    inner = model.get_base_model()
    found = _trial(inner) if inputs.shape[0] and adapts_head_alone(inner) else None
    if found is None:
        yield inputs
        return
    name, kind = found
    trunk = inner.get_submodule(name)
    head = head_name(inner)
    layer = inner.get_submodule(head)
    stored = _Stored(_states(trunk, inputs, scratch), kind)
    inner.set_submodule(name, stored)
    if layer.base_layer.weight.dtype == torch.float32:
        inner.set_submodule(head, _Head(layer))
    try:
        yield torch.arange(inputs.shape[0])[:, None]
    finally:
        inner.set_submodule(name, trunk)
        inner.set_submodule(head, layer)


def adapts_head_alone(inner: Any) -> bool:
    """Return whether the output layer is the only one of peft's LoRA layers."""
    layers = [module for module in inner.modules() if hasattr(module, "lora_A")]
    return len(layers) == 1 and layers[0] is inner.get_output_embeddings()


class _Stored(nn.Module):
    """A substitute for the trunk that answers with stored hidden states, as `kind` of output."""

    def __init__(self, states: Tensor, kind: type) -> None:
        super().__init__()
        self.states, self._kind = states, kind

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        states = self.states[input_ids[:, 0].to(self.states.device)]
        return self._kind(last_hidden_state=states.to(input_ids.device))


class _Head(nn.Module):
    """peft's output layer in fp32, with fewer passes over the logits.

    With a copy of Bᵀ the gradient of B is a product of short rows with the logits' gradient. This
    is much faster than the product with the transposed gradient.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight = layer.base_layer.weight
        self._layer = layer
        (self._adapter,) = layer.active_adapters

    def forward(self, states: Tensor) -> Tensor:
        layer, adapter = self._layer, self._adapter
        rows = states.flatten(0, -2)
        low = layer.lora_A[adapter](rows) * layer.scaling[adapter]
        logits: Tensor = layer.base_layer(rows)
        logits = logits.addmm_(low, layer.lora_B[adapter].weight.t().contiguous())
        return logits.view(*states.shape[:-1], -1)


def _trial(inner: Any) -> tuple[str, type] | None:
    """Return the module whose output alone determines the logits, and the output's type, or None.

    A few public tokens are tried: from the trunk's stored output the model must give the same bits.
    """
    trunk = inner.get_decoder()
    name = next((name for name, module in inner.named_modules() if module is trunk), "")
    device = inner.get_output_embeddings().weight.device
    ids = torch.arange(_TRIAL, device=device)[None] % inner.config.get_text_config().vocab_size
    try:
        with torch.no_grad():
            expected = inner(input_ids=ids, use_cache=False).logits
            output = trunk(input_ids=ids, use_cache=False)
            inner.set_submodule(name, _Stored(output[0], type(output)))
            found = inner(input_ids=torch.zeros_like(ids[:, :1]), use_cache=False).logits
        if torch.equal(found, expected):
            return name, type(output)
    except Exception as error:  # a model's own code may raise anything
        _LOG.info("%s: %s", type(error).__name__, error)
    finally:
        if name:
            inner.set_submodule(name, trunk)
    _LOG.warning(
        "the trunk of %s was not found: it runs in every epoch instead of once",
        type(inner).__name__,
    )
    return None


@torch.no_grad()
def _states(trunk: Any, inputs: Tensor, scratch: Path | None) -> Tensor:
    """Return the trunk's hidden states, (blocks, t, d) in the model's dtype."""
    device = next(trunk.parameters()).device
    states, done = None, 0
    for ids in torch.split(inputs, max(1, _TOKENS // inputs.shape[1])):
        found = trunk(input_ids=ids.to(device), use_cache=False)[0]
        if states is None:
            states = _storage((*inputs.shape, found.shape[-1]), found.dtype, scratch)
        states[done : done + len(ids)] = found
        done += len(ids)
    assert states is not None
    return states


def _storage(shape: tuple[int, ...], dtype: torch.dtype, scratch: Path | None) -> Tensor:
    """Return an uninitialised tensor in memory, or mapped from a nameless file in `scratch`.

    The file's blocks are allocated at once, so that a full disk raises here and is no crash later.

    Raises:
        RuntimeError: if `scratch` has too little room.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if scratch is None or size <= IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    _LOG.info("hidden states of the shard: %d bytes in %s", size, scratch)
    path = scratch / f"states-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        free = shutil.disk_usage(scratch).free
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise RuntimeError(
                f"{scratch} must have room for the hidden states of a shard, {size} bytes, "
                f"got {free} free"
            ) from error
        return torch.from_file(
            str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype
        ).view(shape)
    finally:
        path.unlink()
        os.close(descriptor)
