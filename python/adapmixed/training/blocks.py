"""Cut tokens into blocks to train on, or into stored hidden states of a shared trunk.

If members adapt the output layer alone, everything below it is public and frozen. So its hidden
states are the same in every epoch. They are computed once per token in eval mode and kept, and so
are the public logits while they fit. Training is then a softmax regression on the tokens that are
predicted. A shard with more of them than `STATES_BYTES` passes through the trunk in every epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.lora import head_name
from adapmixed.limits import check_count
from adapmixed_ext.low_rank import cross_entropy, pack_tokens, unpack_tokens

_LOG = logging.getLogger(__name__)
IGNORED = -100
"""The label that torch's cross entropy ignores."""
PASS_TOKENS = 512
"""Tokens per forward pass on a CPU, so that the logits stay in the cache; at least one block."""
STATES_BYTES = 4 << 30
"""Largest size of one shard's hidden states, in bytes, which are kept in memory."""
PUBLIC_BYTES = 1 << 30
"""Bytes of one shard's public logits that are kept; the others are computed in every epoch."""
_TOKENS = 256  # tokens per pass of the trunk, so that activations stay in a core's cache
_TRIAL = 8  # tokens of a trial


@dataclass(frozen=True)
class Blocks:
    """Blocks of tokens to train on or to score, as `token_blocks` cuts them.

    Attributes:
        inputs: (blocks, t) int64 token ids, or numbers of stored hidden states instead.
        labels: (blocks, t) int64; each block has a label that counts.
        head: the output layer, if it computes losses from stored states; each pass is then a block.
    """

    inputs: Tensor
    labels: Tensor
    head: _Head | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def passes(self, rows: Tensor, *, whole: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (inputs, targets), each (k, s) int64, for the passes of a step.

        What follows the last target is left out.

        Args:
            rows: (n,) int64, the numbers of the step's blocks.
            whole: whether one pass takes all of them, as on a GPU.
        """
        most = 1 if self.head is not None else max(1, PASS_TOKENS // self.labels.shape[1])
        for part in torch.split(rows, len(rows) if whole else most):
            targets = self.labels[part, 1:]
            last = int((targets != IGNORED).any(0).nonzero().max()) + 1
            yield self.inputs[part, :last], targets[:, :last]


def token_blocks(
    tokens: Sequence[int], block_size: int, beginning: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Cut one shard's token stream into blocks, with the last one padded.

    Args:
        tokens: the stream; fewer than two tokens give no block, since nothing can be predicted.
        block_size: t, tokens of the stream per block, >= 2.
        beginning: the k tokens that every block begins with (`text.beginning_of`).

    Returns:
        (input_ids, labels), each (blocks, k + t) int64. Labels are -100 where nothing is scored: at
        the beginning, at the first token of the stream in each block and at padding.

    Raises:
        ValueError: if `block_size` is below 2.
    """
    check_count("block_size", block_size, 2)
    starts = [i for i in range(0, len(tokens), block_size) if len(tokens) - i >= 2]
    inputs = torch.zeros((len(starts), len(beginning) + block_size), dtype=torch.int64)
    labels = torch.full(inputs.shape, IGNORED, dtype=torch.int64)
    first = len(beginning) + 1
    for row, start in enumerate(starts):
        block = torch.tensor([*beginning, *tokens[start : start + block_size]], dtype=torch.int64)
        inputs[row, : block.numel()] = block
        labels[row, first : block.numel()] = block[first:]
    return inputs, labels


class HeadTrunk:
    """The part of a model below its output layer, which alone is adapted.

    It must be a module whose output alone determines the logits. A few public tokens are tried:
    from the module's stored output the model must give the same bits. Without such a module, which
    is logged, or if other layers are adapted, nothing is stored.

    Args:
        model: a `finetune.adapted_copy` in eval mode.

    Attributes:
        found: whether there is such a module.
    """

    found: bool = False

    def __init__(self, model: Any) -> None:
        self._model = inner = model.get_base_model()
        if not adapts_head_alone(inner):
            return
        trunk, head = inner.get_decoder(), inner.get_output_embeddings()
        self._name = name = next((path for path, m in inner.named_modules() if m is trunk), "")
        numbers = torch.arange(_TRIAL, device=head.weight.device)[None]
        # No token has its own number.
        ids = (numbers + 1) % inner.config.get_text_config().vocab_size
        try:
            with torch.no_grad():
                expected = inner(input_ids=ids, use_cache=False).logits
                output = trunk(input_ids=ids, use_cache=False)
                # Whether the output layer's results are the logits, without a cap or a scale.
                self._plain = torch.equal(head(output[0]), expected)
                self._kind = type(output)
                inner.set_submodule(name, _Stored(output[0][0], type(output)))
                self.found = torch.equal(inner(input_ids=numbers, use_cache=False).logits, expected)
        except Exception as error:  # a model's own code may raise anything
            _LOG.info("%s: %s", type(error).__name__, error)
        finally:
            if name:
                inner.set_submodule(name, trunk)
        if not self.found:
            _LOG.warning(
                "the trunk of %s was not found: it runs in every epoch instead of once",
                type(inner).__name__,
            )

    @contextmanager
    def once(self, parts: Sequence[Blocks]) -> Iterator[Sequence[Blocks]]:
        """Let the model answer from stored hidden states while the context is entered.

        Args:
            parts: blocks of tokens.

        Yields:
            the blocks to use instead of `parts`.
        """
        inner = self._model
        layer = inner.get_output_embeddings()
        inputs, labels = (torch.cat([getattr(p, n) for p in parts]) for n in ("inputs", "labels"))
        scored = int((labels[:, 1:] != IGNORED).sum())
        width = layer.weight.shape[1] if self.found else 0
        if not 0 < scored * width * inner.dtype.itemsize <= STATES_BYTES:
            yield parts
            return
        module, head = inner.get_submodule(self._name), head_name(inner)
        states = _states(module, Blocks(inputs, labels))
        numbers = torch.zeros_like(inputs)
        numbers[:, :-1][labels[:, 1:] != IGNORED] = torch.arange(len(states))
        quick = self._plain and states.dtype == torch.float32 and not layer.weight.is_cuda
        new_head = _Head(layer, states) if quick else None
        sizes = list(map(len, parts))
        split = zip(torch.split(numbers, sizes), torch.split(labels, sizes), strict=True)
        try:
            inner.set_submodule(self._name, _Stored(states, self._kind))
            inner.set_submodule(head, new_head or layer)
            yield [Blocks(*part, new_head) for part in split]
        finally:
            if new_head is not None:
                new_head.finish()
            inner.set_submodule(self._name, module)
            inner.set_submodule(head, layer)


def lora_layers(model: Any) -> list[Any]:
    """Return peft's LoRA layers of a model."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def adapts_head_alone(inner: Any) -> bool:
    """Return whether the output layer is the only one of peft's LoRA layers."""
    layers = lora_layers(inner)
    return len(layers) == 1 and layers[0] is inner.get_output_embeddings()


class _Stored(nn.Module):
    """A substitute for the trunk that answers with stored hidden states, as `kind` of output."""

    def __init__(self, states: Tensor, kind: type) -> None:
        super().__init__()
        self._states, self._kind = states, kind

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        states = self._states[input_ids.to(self._states.device)]
        return self._kind(last_hidden_state=states.to(input_ids.device))


class _Head(nn.Module):
    """peft's output layer in fp32 on the CPU, with public logits, and B in packs of tokens."""

    def __init__(self, layer: Any, states: Tensor) -> None:
        super().__init__()
        self._base, self._states = layer.base_layer, states
        self._kept: dict[int, Tensor] = {}  # public logits of blocks, by their first row
        self._room = PUBLIC_BYTES // (4 * len(layer.base_layer.weight))  # rows
        (adapter,) = layer.active_adapters
        self._scale, self._a = layer.scaling[adapter], layer.lora_A[adapter].weight
        self._b = layer.lora_B[adapter].weight
        self.packs = nn.Parameter(pack_tokens(self._b.detach().T))
        self._b.requires_grad_(False)

    @torch.no_grad()
    def finish(self) -> None:
        """Give the layer its B."""
        self._b.copy_(unpack_tokens(self.packs, len(self._b)).T).requires_grad_()

    @torch.no_grad()
    def loss(self, numbers: Tensor, targets: Tensor, weight: float | None = None) -> float:
        """Return the sum of the cross entropies of a block's targets (1, s), in nats.

        With a weight, the gradient of the sum times the weight is added to the parameters'.
        """
        scored = targets != IGNORED
        targets, first = targets[scored], int(numbers[scored][0])
        states, packs = self._states[first : first + len(targets)], self.packs.detach()
        public = self._kept.get(first)
        if public is None:
            public = self._base(states)
            if len(public) <= self._room:
                self._room -= len(public)
                self._kept[first] = public
        low = nn.functional.linear(states, self._a) * self._scale  # s A h
        inputs = public, low, packs, targets
        if weight is None:
            return float(cross_entropy(*inputs).sum())
        of_low, of_packs = torch.empty_like(low), torch.zeros_like(packs)
        losses = cross_entropy(*inputs, (of_low, of_packs))
        _add_gradient(self.packs, of_packs * weight)
        _add_gradient(self._a, of_low.T @ states * (weight * self._scale))
        return float(losses.sum())


def _add_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.requires_grad:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@torch.no_grad()
def _states(trunk: Any, blocks: Blocks) -> Tensor:
    """Return the hidden states from which tokens are predicted, (tokens, d) in the model's dtype.

    A pass takes few blocks, so that little is computed for padding.
    """
    size = int((blocks.labels[:, 1:] != IGNORED).sum())
    device = next(trunk.parameters()).device
    rows = torch.arange(len(blocks))
    states, done = None, 0
    for part in torch.split(rows, max(1, _TOKENS // blocks.labels.shape[1])):
        for ids, targets in blocks.passes(part, whole=True):
            hidden = trunk(input_ids=ids.to(device), use_cache=False)[0]
            hidden = hidden[targets != IGNORED]
            if states is None:
                states = torch.empty((size, hidden.shape[-1]), dtype=hidden.dtype)
            states[done : done + len(hidden)] = hidden
            done += len(hidden)
    assert states is not None
    return states
