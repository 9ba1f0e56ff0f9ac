"""Batched LoRA: the public model and N adapted models in one forward pass.

A LoRA adapter changes a linear layer y = x W + b to

    y_i = x W + b + scale_i (x A_i) B_i,      A_i (in, r), B_i (r, out).

Rows are laid out member-major: of (N + 1) b rows, block 0 is the public model's and block i + 1 is
member i's. The base is computed once over all rows; the updates are one batched product per
distinct rank, added to the rows of the members of that rank alone. No update reads another
member's rows, so changing one adapter, also to another rank or other layers, leaves the bits of all
other rows as they were.

The last holds only if no shape tells of the other adapters. Matrix libraries choose kernel and
order of summation by the shapes and the alignment of their operands, so that neither padding
adapters to the largest rank nor batching only the members of one rank will do: another adapter's
rank would show in the last bits. Every product therefore is a batch of N at the rank itself, with
member i in place i and zeros in the places of members of other ranks, whose rows are restored.
Usually all ranks are equal and nothing is restored; each further rank costs one more batch.

A and B are kept in fp32, whatever the base's dtype, and the update is added in fp32 before rounding
to it, as peft does. `scale` is folded into B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from adapmixed.models.adapters import Adapter, layer_shape


class RankGroup(nn.Module):
    """The updates of all members that have one rank r in a layer.

    Attributes:
        down: A, (N, in, r) fp32, zero for the members of other ranks.
        up: scale * B, (N, r, out) fp32, zero likewise.
        others: the members that are not of this rank, ascending, int64.
    """

    down: Tensor
    up: Tensor
    others: Tensor

    def __init__(self, updates: Mapping[int, tuple[Tensor, Tensor]], num_models: int) -> None:
        super().__init__()
        first_down, first_up = next(iter(updates.values()))
        down = torch.zeros((num_models, *first_down.shape), dtype=torch.float32)
        up = torch.zeros((num_models, *first_up.shape), dtype=torch.float32)
        for index, (own_down, own_up) in updates.items():
            down[index] = own_down
            up[index] = own_up
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        others = [index for index in range(num_models) if index not in updates]
        self.register_buffer("others", torch.tensor(others, dtype=torch.int64))

    def forward(self, y: Tensor, inputs: Tensor) -> None:
        """Adds the updates in place; the rows of `others` and the public ones keep their bits.

        Args:
            y: (N + 1, m, out), contiguous, the base's output, block 0 public.
            inputs: (N, m, in) in the dtype of `down`.
        """
        outputs = y[1:]
        # Adding zeros is not enough: 0 * inf is NaN, and -0.0 + 0.0 is 0.0.
        kept = outputs.index_select(0, self.others) if len(self.others) else None
        hidden = torch.bmm(inputs, self.down)
        if outputs.dtype == self.up.dtype:
            outputs.baddbmm_(hidden, self.up)
        else:  # add before rounding: rounding the update on its own costs a second error
            outputs.copy_(outputs.to(self.up.dtype).baddbmm_(hidden, self.up))
        if kept is not None:
            outputs.index_copy_(0, self.others, kept)


class BatchedLoRA(nn.Module):
    """A linear layer with the updates of N members (see the module's text).

    Args:
        base: the adapted layer, `nn.Linear` or GPT-2's `Conv1D`.
        updates: per member (A (in, r), scale * B (r, out)), or None where it has no update here;
            r may differ. Kept as fp32 on the base's device, 4 N r (in + out) bytes for every
            distinct r.

    Attributes:
        groups: one `RankGroup` per distinct rank, ascending.

    Raises:
        ValueError: if there are no members, or an update does not fit the base.
    """

    def __init__(self, base: nn.Module, updates: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        super().__init__()
        if not updates:
            raise ValueError("updates must hold an entry for at least one member, got 0")
        size_in, size_out = layer_shape(base)
        by_rank: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
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
            by_rank.setdefault(rank, {})[index] = update
        self.base = base
        self.num_models = len(updates)
        device = next(base.parameters()).device
        self.groups = nn.ModuleList(
            RankGroup(by_rank[rank], self.num_models).to(device) for rank in sorted(by_rank)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ((N + 1) b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        blocks = self.num_models + 1
        if x.shape[0] % blocks:
            raise ValueError(
                f"rows must be a multiple of num_models + 1 = {blocks}, got {x.shape[0]}"
            )
        y: Tensor = self.base(x).contiguous()
        block = x.shape[0] // blocks
        inputs = x[block:].reshape(self.num_models, -1, x.shape[-1]).to(torch.float32)
        for group in self.groups:
            group(y.view(blocks, -1, y.shape[-1]), inputs)
        return y


def stack_adapters(model: nn.Module, adapters: Sequence[Adapter]) -> None:
    """Swaps every adapted layer of `model`, in place, for a `BatchedLoRA` of all adapters.

    A layer that some adapters leave alone gets no update for them. Memory: the sum of
    4 N r (in + out) bytes over adapted layers and the distinct ranks r in each.

    Raises:
        ValueError: if there are no adapters.
    """
    if not adapters:
        raise ValueError("adapters must hold at least one adapter, got 0")
    for name in sorted({name for adapter in adapters for name in adapter.updates}):
        base = model.get_submodule(name)
        parent, _, leaf = name.rpartition(".")
        updates = [adapter.updates.get(name) for adapter in adapters]
        setattr(model.get_submodule(parent), leaf, BatchedLoRA(base, updates))
