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

If members adapt the output layer alone, everything below it is the public model's and is computed
once (`HeadLoRA`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from adapmixed.ensemble.adapted_layers import merged_layers
from adapmixed.ensemble.adapters import Adapter, layer_shape
from adapmixed.ensemble.room import LogitsRoom

Update = tuple[Tensor, Tensor]
# Members and positions that one product of the output layer takes, on a CPU: of 8, 16, 24 and 48
# positions 24 were the fastest in GPT-2 small's shape.
HEAD_MEMBERS = 16
HEAD_POSITIONS = 24


class RankGroup(nn.Module):
    """The updates that n members add to a layer's output, if they have rank r.

    Attributes:
        first: the number of the first of these members.
        down: A, (n, in, r) fp32, zero for members of other ranks.
        up: scale * B, (n, r, out) fp32, zero likewise.
        others: places of the members that are not of this rank, ascending, int64.
    """

    down: Tensor
    up: Tensor
    others: Tensor

    def __init__(
        self, updates: Sequence[Update | None], rank: int, shape: tuple[int, int], first: int = 0
    ) -> None:
        super().__init__()
        self.first = first
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
            outputs: (n, m, out), the base's output for each of these members.
            inputs: (n, m, in), or (m, in) if all members have the same, in the dtype of `down`.
        """
        # Adding zeros is not enough: 0 * inf is NaN, and -0.0 + 0.0 is 0.0.
        kept = outputs.index_select(0, self.others) if len(self.others) else None
        hidden = torch.matmul(inputs, self.down)
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
        updates: per member (A (in, r), scale * B (r, out)), or None for a member without an update
            here. They are kept as fp32 on the base's device, 4 N r (in + out) bytes for each rank.
        ranks: all ranks that a member may have here; None for those of `updates`.
        at_once: members that one product takes; None for all. What a product holds besides its
            outputs, copies of them in fp32 or of those that keep their bits, is of so many.

    Attributes:
        parts: the `RankGroup`s of so many members at a time, one for each rank, ascending.

    Raises:
        ValueError: if there are no members, or an update does not fit the base or `ranks`.
    """

    def __init__(
        self,
        base: nn.Module,
        updates: Sequence[Update | None],
        ranks: Sequence[int] | None = None,
        *,
        at_once: int | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.num_models = len(updates)
        self.parts = _parts(base, updates, ranks, at_once or max(1, len(updates)))

    @property
    def groups(self) -> list[RankGroup]:
        """Those of all parts."""
        return [group for part in self.parts for group in _groups(part)[1]]

    def forward(self, x: Tensor) -> Tensor:
        """Map ((N + 1) b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        blocks = self.num_models + 1
        if x.shape[0] % blocks:
            raise ValueError(
                f"rows must be a multiple of num_models + 1 = {blocks}, got {x.shape[0]}"
            )
        y: Tensor = self.base(x).contiguous()
        block = x.shape[0] // blocks
        inputs = x[block:].reshape(self.num_models, -1, x.shape[-1]).to(torch.float32)
        outputs = y.view(blocks, -1, y.shape[-1])[1:]
        for part in self.parts:
            members, groups = _groups(part)
            for group in groups:
                group(outputs[members], inputs[members])
        return y


class HeadLoRA(nn.Module):
    """The output layer of members that share everything below it with the public model.

    It reads b rows and answers with (N + 1) b. The base is computed once, in the public model's own
    shape, so that the public rows are the public model's in every bit.

    Args:
        base, updates, ranks: as `BatchedLoRA`.

    Attributes:
        room: where the answers are written; None for new memory in every call.
        parts: the `RankGroup`s of a few members at a time, one for each rank.

    Raises:
        ValueError: as `BatchedLoRA`.
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
        self.room: LogitsRoom | None = None
        self.parts = _parts(base, updates, ranks, HEAD_MEMBERS)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, ..., in) to ((N + 1) b, ..., out) in the base's dtype."""
        z: Tensor = self.base(x)
        public = z.reshape(-1, z.shape[-1])
        inputs = x.reshape(-1, x.shape[-1]).to(torch.float32)
        shape = (self.num_models + 1, *public.shape)
        y = z.new_empty(shape) if self.room is None else self.room.take(shape, z)
        y[0] = public
        positions = len(public)
        step = HEAD_POSITIONS if y.device.type == "cpu" else positions
        for part in self.parts:
            members, groups = _groups(part)
            for start in range(0, positions, step):
                stop = min(start + step, positions)
                outputs = y[1:][members, start:stop]
                outputs.copy_(public[start:stop].expand_as(outputs))
                for group in groups:
                    group(outputs, inputs[start:stop])
        return y.view(-1, *z.shape[1:])


def stack_adapters(
    model: nn.Module,
    adapters: Sequence[Adapter],
    adapted: Mapping[str, Sequence[int]] | None = None,
    *,
    head: str | None = None,
    shared: bool = False,
) -> None:
    """Swap every adapted layer of `model`, in place, for one with the updates of all adapters.

    A layer that some adapters leave alone gets no update for them. Memory: the sum of
    4 N r (in + out) bytes over adapted layers and the ranks r in each.

    Args:
        adapted: layers and their ranks, a public constant; None for what the adapters adapt.
        head: the output layer's name; a product of it takes a few members at a time.
        shared: whether everything below the output layer is shared.

    Raises:
        ValueError: if there are no adapters, or one adapts a layer or has a rank that is not in
            `adapted`.
    """
    if not adapters:
        raise ValueError("adapters must hold at least one adapter, got 0")
    if adapted is None:
        adapted = merged_layers([adapter.layers for adapter in adapters])
    for adapter in adapters:
        for name in adapter.updates.keys() - adapted.keys():
            raise ValueError(f"adapted must name every adapted layer, {name!r} is not in it")
    for name in sorted(adapted):
        parent, _, leaf = name.rpartition(".")
        updates = [adapter.updates.get(name) for adapter in adapters]
        try:
            base = model.get_submodule(name)
        except AttributeError as error:
            raise ValueError(f"adapted must name layers of the base, got {name!r}") from error
        layer: nn.Module
        if name == head and shared:
            layer = HeadLoRA(base, updates, adapted[name])
        else:
            at_once = HEAD_MEMBERS if name == head else None
            layer = BatchedLoRA(base, updates, adapted[name], at_once=at_once)
        setattr(model.get_submodule(parent), leaf, layer)


def _parts(
    base: nn.Module, updates: Sequence[Update | None], ranks: Sequence[int] | None, at_once: int
) -> nn.ModuleList:
    """The `RankGroup`s of so many members at a time, one for each rank, on the base's device."""
    shape, ranks = _checked(base, updates, ranks)
    parts = nn.ModuleList(
        nn.ModuleList(
            RankGroup(updates[first : first + at_once], rank, shape, first) for rank in ranks
        )
        for first in range(0, len(updates), at_once)
    )
    return parts.to(next(base.parameters()).device)


def _groups(part: nn.Module) -> tuple[slice, list[RankGroup]]:
    """The members of a part, and its groups."""
    groups: list[RankGroup] = list(part.children())  # type: ignore[arg-type]
    if not groups:
        return slice(0, 0), []
    return slice(groups[0].first, groups[0].first + len(groups[0].up)), groups


def _checked(
    base: nn.Module, updates: Sequence[Update | None], ranks: Sequence[int] | None
) -> tuple[tuple[int, int], list[int]]:
    """The layer's (in, out) and its ranks, ascending."""
    if not updates:
        raise ValueError("updates must hold an entry for at least one member, got 0")
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
        if ranks is not None and rank not in ranks:
            raise ValueError(f"updates[{index}] must have one of the ranks {ranks}, got {rank}")
        found.add(rank)
    return (size_in, size_out), sorted(found if ranks is None else ranks)
