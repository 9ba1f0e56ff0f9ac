"""Batched LoRA: the public model and N adapted models in one forward pass.

A LoRA adapter changes a linear layer y = x W + b to

    y_i = x W + b + scale_i (x A_i) B_i,      A_i (in, r), B_i (r, out).

There are (N + 1) b rows. Block 0 belongs to the public model, block i + 1 to member i. The base
layer is computed once over all rows. The updates are one batched product per distinct rank. A
product is added only to the rows of members of that rank, and no update reads another member's
rows. So changing one adapter leaves every bit of all other rows, even if its rank or layers change.

This holds only if no operand's shape depends on the other adapters. Matrix libraries choose kernel
and order of summation by the shapes and alignment of their operands. So adapters must not be padded
to the largest rank, nor batched with members of their own rank only. Either would show another
adapter's rank in the last bits. Therefore every product is a batch of N at one rank. Member i has
place i, and members of other ranks have zeros there; their rows are restored afterwards. Usually
all ranks are equal and nothing is restored. Each further rank costs one more batch.

A and B are kept in fp32, whatever the base's dtype, and the update is added in fp32 before rounding
to it, as peft does. `scale` is folded into B.

The output layer is apart: `adapmixed.ensemble.output_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from adapmixed.ensemble.adapted_layers import merged_layers
from adapmixed.ensemble.member import Adapter, layer_shape

Update = tuple[Tensor, Tensor]


class RankGroup(nn.Module):
    """The updates of rank r that N members add to a layer's output.

    Attributes:
        down: A, (N, in, r) fp32; zero for members of another rank.
        up: scale * B, (N, r, out) fp32; zero for members of another rank.
        others: indices of the members of another rank, ascending, int64.
    """

    down: Tensor
    up: Tensor
    others: Tensor

    def __init__(self, updates: Sequence[Update | None], rank: int, shape: tuple[int, int]) -> None:
        super().__init__()
        down = torch.zeros((len(updates), shape[0], rank), dtype=torch.float32)
        up = torch.zeros((len(updates), rank, shape[1]), dtype=torch.float32)
        others = []
        for place, update in enumerate(updates):
            if update is not None and update[0].shape[-1] == rank:
                down[place], up[place] = update
            else:
                others.append(place)
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        self.register_buffer("others", torch.tensor(others, dtype=torch.int64))

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        """Add the updates in place; the rows of `others` keep their bits.

        Args:
            outputs: (N, m, out), the base's output for each member.
            inputs: (N, m, in), in the dtype of `down`.
        """
        # Adding zeros is not enough: 0 * inf is NaN, and -0.0 + 0.0 is 0.0.
        kept = outputs.index_select(0, self.others) if len(self.others) else None
        hidden = torch.matmul(inputs, self.down)
        if outputs.dtype == self.up.dtype:
            outputs.baddbmm_(hidden, self.up)
        else:  # add before rounding: rounding the update first would add a second error
            outputs.copy_(outputs.to(self.up.dtype).baddbmm_(hidden, self.up))
        if kept is not None:
            outputs.index_copy_(0, self.others, kept)


class BatchedLoRA(nn.Module):
    """A linear layer with the updates of N members, computed as the module's docstring explains.

    Args:
        base: the adapted layer, `nn.Linear` or GPT-2's `Conv1D`.
        updates: for each member (A, scale * B), of shapes (in, r) and (r, out), or None if the
            member does not adapt this layer. They are kept in fp32 on the base's device, which
            takes 4 N r (in + out) bytes for each rank.
        ranks: all ranks that a member may have here; None for those of `updates`.

    Attributes:
        groups: the `RankGroup`s, one per rank, ascending.

    Raises:
        ValueError: if there are no members, or an update does not fit the base or `ranks`.
    """

    def __init__(
        self,
        base: nn.Module,
        updates: Sequence[Update | None],
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.num_models = len(updates)
        shape, known = checked_updates(base, updates, ranks)
        groups = [RankGroup(updates, rank, shape) for rank in known]
        self.groups = nn.ModuleList(groups).to(next(base.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ((N + 1) b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        blocks = self.num_models + 1
        y: Tensor = self.base(x).contiguous()
        block = x.shape[0] // blocks
        inputs = x[block:].reshape(self.num_models, -1, x.shape[-1]).to(torch.float32)
        outputs = y.view(blocks, -1, y.shape[-1])[1:]
        for group in self.groups:
            group(outputs, inputs)
        return y


def stack_adapters(
    model: nn.Module,
    adapters: Sequence[Adapter],
    adapted: Mapping[str, Sequence[int]] | None = None,
    *,
    head: str | None = None,
) -> None:
    """Replace every adapted layer of `model`, in place, by one with the updates of all adapters.

    An adapter that does not adapt a layer adds no update there. The stacked weights take
    4 N r (in + out) bytes for each adapted layer and each of its ranks r.

    Args:
        model: the public model, which is changed.
        adapters: one for each member, N >= 1.
        adapted: the layers with their ranks, a public constant; None for those of `adapters`.
        head: full name of the output layer, which is left alone; or None.

    Raises:
        ValueError: if `adapted` lacks a layer of an adapter, or names one that the base lacks.
    """
    if adapted is None:
        adapted = merged_layers([adapter.layers for adapter in adapters])
    for adapter in adapters:
        for name in adapter.updates.keys() - adapted.keys():
            raise ValueError(f"adapted must name every adapted layer, but lacks {name!r}")
    for name in sorted(adapted):
        parent, _, leaf = name.rpartition(".")
        updates = [adapter.updates.get(name) for adapter in adapters]
        try:
            base = model.get_submodule(name)
        except AttributeError as error:
            full = [one for one, _ in model.named_modules() if one.endswith(f".{name}")]
            hint = f": a full name is needed, such as {full[0]!r}" if full else ""
            raise ValueError(f"adapted must name layers of the base, got {name!r}{hint}") from error
        if name != head:
            setattr(model.get_submodule(parent), leaf, BatchedLoRA(base, updates, adapted[name]))


def checked_updates(
    base: nn.Module, updates: Sequence[Update | None], ranks: Sequence[int] | None
) -> tuple[tuple[int, int], list[int]]:
    """Return the layer's (in, out) and its ascending ranks.

    Raises:
        ValueError: an update does not fit the base.
    """
    size_in, size_out = layer_shape(base)
    found = set()
    for index, update in enumerate(updates):
        if update is None:
            continue
        shapes = tuple(update[0].shape), tuple(update[1].shape)
        rank = shapes[0][-1] if shapes[0] else 0
        if rank < 1 or shapes != ((size_in, rank), (rank, size_out)):
            raise ValueError(
                f"updates[{index}] must have shapes ({size_in}, r) and (r, {size_out}) with "
                f"r >= 1, got {shapes[0]} and {shapes[1]}"
            )
        found.add(rank)
    return (size_in, size_out), sorted(found if ranks is None else ranks)
