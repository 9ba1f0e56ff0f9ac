"""LoRA adapters of N members on one public model, computed in one forward pass.

A LoRA adapter changes a linear layer y = x W + b to

    y_i = x W + b + scale_i (x A_i) B_i,      A_i (in, r_i), B_i (r_i, out).

There are (N + 1) b rows. Block 0 belongs to the public model, block i + 1 to member i. The base
layer is computed once over all rows, and the updates are one batched product.

No operand's shape may depend on the adapters, because matrix libraries choose kernel and order of
summation by shapes, so that a rank would show in the last bits of other members' rows. Therefore
every adapter is padded with zeros to the largest rank that a member may have in this layer, which
is a public constant. Member i has place i, and no update reads another member's rows.

A and B are kept in fp32, whatever the base's dtype, and the update is added in fp32 before rounding
to it, as peft does. `scale` is folded into B.

Below the first adapted layer every member equals the public model. This trunk is computed once for
b sequences, whose rows are then repeated to (N + 1) b. Its end, too, depends on the adapted layers
alone, a public constant (docs/concepts/shared-trunk.md).

The output layer is apart: `adapmixed.ensemble.output_layer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Update = tuple[Tensor, Tensor]
"""(A, scale * B), of shapes (in, r) and (r, out), fp32."""

SHARES_NO_BLOCK = frozenset({"gpt_bigcode", "gemma3n_text", "gemma4_text"})
"""Types of tested models whose code fixes the number of rows before the blocks."""
# Arguments of decoder blocks, grouped by the meaning of their first dimension.
_SEQUENCES = frozenset({"attention_mask", "position_ids", "position_embeddings"})
_HEADS_OF_SEQUENCES = frozenset({"alibi"})  # (b heads, ...)
_NO_SEQUENCES = frozenset({"position_bias", "cache_position"})


@dataclass(frozen=True)
class Adapter:
    """The adapter of one member.

    Attributes:
        updates: maps a layer's full name to its update (A, scale * B), of shapes (in, r) and
            (r, out), fp32.
        base_name: the public model that the adapter's folder names, or None.
        digest: that of `members.member_digests`, of what was read; empty without files.
    """

    updates: Mapping[str, Update]
    base_name: str | None = None
    digest: str = ""

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The adapted layers, each with its rank."""
        return {name: (int(down.shape[-1]),) for name, (down, _) in self.updates.items()}

    @property
    def is_zero(self) -> bool:
        """Whether every update is zero, so that the adapted model equals the public one."""
        return all(not up.count_nonzero() for _, up in self.updates.values())


MISSING = Adapter({})
"""Stands for a missing member, which answers as the public model does."""


def merged_layers(
    members: Iterable[Mapping[str, Sequence[int]]],
) -> dict[str, tuple[int, ...]]:
    """Return every layer that some member adapts, with all its ranks in ascending order."""
    found: dict[str, set[int]] = {}
    for layers in members:
        for name, ranks in layers.items():
            found.setdefault(name, set()).update(ranks)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


class BatchedLoRA(nn.Module):
    """A linear layer with the updates of N members, computed as the module's docstring explains.

    Args:
        base: the adapted layer, `nn.Linear` or GPT-2's `Conv1D`.
        updates: for each member (A, scale * B), of shapes (in, r) and (r, out), or None if the
            member does not adapt this layer.
        rank: R, the largest rank that a member may have here.

    Attributes:
        down: A, (N, in, R) fp32 on the base's device, padded with zeros.
        up: scale * B, (N, R, out) fp32, padded with zeros.
    """

    down: Tensor
    up: Tensor

    def __init__(self, base: nn.Module, updates: Sequence[Update | None], rank: int) -> None:
        super().__init__()
        self.base = base
        size_in, size_out = layer_shape(base)
        device = next(base.parameters()).device
        down = torch.zeros((len(updates), size_in, rank), device=device)
        up = torch.zeros((len(updates), rank, size_out), device=device)
        for member, update in enumerate(updates):
            if update is not None:
                own = update[0].shape[1]
                down[member, :, :own], up[member, :own] = update
        self.register_buffer("down", down)
        self.register_buffer("up", up)

    def forward(self, x: Tensor) -> Tensor:
        """Map ((N + 1) b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        models = len(self.up)
        y: Tensor = self.base(x).contiguous()
        block = x.shape[0] // (models + 1)
        inputs = x[block:].reshape(models, -1, x.shape[-1]).to(torch.float32)
        outputs = y.view(models + 1, -1, y.shape[-1])[1:]
        hidden = torch.matmul(inputs, self.down)
        if outputs.dtype == torch.float32:
            outputs.baddbmm_(hidden, self.up)
        else:  # add before rounding: rounding the update first would add a second error
            outputs.copy_(outputs.float().baddbmm_(hidden, self.up))
        return y


def stack_adapters(
    model: nn.Module, adapters: Sequence[Adapter], adapted: Mapping[str, Sequence[int]]
) -> None:
    """Replace every adapted layer of `model`, in place, by one with the updates of all adapters.

    The stacked weights take 4 N R (in + out) bytes for each layer with largest rank R.

    Args:
        model: the public model, which is changed.
        adapters: one for each member, N >= 1; what they do not adapt, they leave as it is.
        adapted: the layers below the output layer that members may adapt, with their ranks, a
            public constant.

    Raises:
        ValueError: if `adapted` names a layer that the base lacks.
    """
    for name in sorted(adapted):
        try:
            base = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(
                f"adapted must name layers of the base by their full names, got {name!r}"
            ) from error
        updates = [adapter.updates.get(name) for adapter in adapters]
        model.set_submodule(name, BatchedLoRA(base, updates, max(adapted[name])))


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (in, out) of an `nn.Linear` or a `Conv1D`.

    Raises:
        ValueError: for any other layer.
    """
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    raise ValueError(f"layer must be nn.Linear or Conv1D, got {type(layer).__name__}")


def linear_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the layers that a LoRA can adapt, in the model's order."""
    from transformers.pytorch_utils import Conv1D

    kinds = nn.Linear | Conv1D
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))


def head_name(model: Any) -> str:
    """Return the full name of the output layer, for instance "lm_head".

    Raises:
        ValueError: if the model has no output layer.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            return str(name)
    raise ValueError(f"model must have an output layer, {type(model).__name__} has none")


def block_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the decoder blocks from the first to the last.

    The blocks are the only list with as many modules as the configuration has hidden layers. The
    result is empty if there is no such list or more than one.
    """
    depth = model.config.get_text_config().num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{outer[0]}.{i}" for i in range(depth)) if len(outer) == 1 else ()


@dataclass(frozen=True)
class Trunk:
    """The end of the layers that members share with the public model.

    Attributes:
        head: the output layer's name if it alone is adapted, else None.
        blocks: names of the decoder blocks that are computed for every member. Empty if `head` is
            set, or if nothing can be shared and the input itself is repeated.
        depth: number of all decoder blocks; 0 if unknown.
    """

    head: str | None = None
    blocks: tuple[str, ...] = ()
    depth: int = 0

    @property
    def repeats_input(self) -> bool:
        """Whether members share nothing, so that every row starts from the token ids."""
        return self.head is None and not self.blocks

    def shares(self, block: int) -> bool:
        """Return whether this block, counted from 0, is computed once for all members."""
        return self.head is not None or block < self.depth - len(self.blocks)

    def __str__(self) -> str:
        if self.head is not None:
            return "all blocks: members adapt the output layer alone"
        shared = self.depth - len(self.blocks)
        if self.repeats_input or shared == 0:
            return "no block: every member computes all of them"
        return f"the first {shared} of {self.depth} blocks"


def find_trunk(model: Any, adapted: Collection[str]) -> Trunk:
    """Return the trunk of members that adapt these layers.

    Args:
        model: the public model, before adapters are stacked on it; it is not changed.
        adapted: full names of the adapted layers.
    """
    head = head_name(model)
    if set(adapted) == {head}:
        return Trunk(head=head, depth=len(block_names(model)))
    blocks = block_names(model)
    own = {name: _block_of(name, blocks) for name in adapted if name != head}
    apart = model.config.model_type in SHARES_NO_BLOCK
    if apart or not own or not blocks or None in own.values():
        return Trunk()
    first = min(blocks.index(block) for block in own.values() if block is not None)
    return Trunk(blocks=blocks[first:], depth=len(blocks))


def repeat_at(model: Any, trunk: Trunk, rows: int) -> list[Any]:
    """Make the model repeat its b sequences to rows * b at the end of the trunk.

    Args:
        model: the model, which gets hooks.
        trunk: of the model.
        rows: how often sequences are repeated, N + 1.

    Returns:
        hook handles, whose `remove` undoes the change.
    """
    repeat = _Repeat(rows)
    handles = []
    for index, name in enumerate(trunk.blocks):
        block = model.get_submodule(name)
        hook = partial(repeat, index == 0)
        handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
    if trunk.blocks:
        handles.append(block.register_forward_hook(repeat.forget))
    return handles


class _Repeat:
    """Forward hooks that repeat the arguments of blocks, chosen by name."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._sequences = 0
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # masks are the same for all blocks

    def forget(self, block: nn.Module, args: Any, output: Any) -> None:
        self._known.clear()

    def __call__(
        self, first: bool, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        signature = inspect.signature(block.forward)
        bound = signature.bind(*args, **kwargs)
        hidden = bound.arguments["hidden_states"]
        if first:
            self._sequences = len(hidden)
            bound.arguments["hidden_states"] = hidden.repeat(self._rows, 1, 1)
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                for key, one in value.items():
                    value[key] = self._value(key, one)
            elif name != "hidden_states":
                bound.arguments[name] = self._value(name, value)
        return bound.args, bound.kwargs

    def _value(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._value(name, one) for one in value)
        if not isinstance(value, Tensor) or name in _NO_SEQUENCES:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, self._repeated(name, value)
        return self._known[id(value)][1]

    def _repeated(self, name: str, value: Tensor) -> Tensor:
        length = len(value)
        if name in _SEQUENCES and length in (1, self._sequences):
            if length < self._sequences:
                return value  # it is broadcast over all rows
        elif name not in _HEADS_OF_SEQUENCES or length % self._sequences:
            raise ValueError(
                f"decoder blocks must take known tensors, got {name} of shape {tuple(value.shape)}"
            )
        return value.expand(self._rows, *value.shape).flatten(0, 1)


def _block_of(name: str, blocks: tuple[str, ...]) -> str | None:
    return next((block for block in blocks if name.startswith(f"{block}.")), None)
