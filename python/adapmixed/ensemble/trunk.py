"""The trunk: the layers below the first adapted one, which all members share.

Below the first adapted layer every member equals the public model. That part is computed once for b
sequences. Then the rows are repeated to (N + 1) b, with block 0 public. The end of the trunk
depends only on the adapted layers, a public constant. If it depended on weights, or on which
members are present, one member could change the last bits of another's logits. The idea is
explained in docs/concepts/shared-trunk.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from adapmixed.ensemble.lora import block_names, head_name

SHARES_NO_BLOCK = frozenset({"gpt_bigcode", "gemma3n_text", "gemma4_text"})
"""Types of tested models whose code fixes the number of rows before the blocks."""
# Arguments of decoder blocks, grouped by the meaning of their first dimension.
_SEQUENCES = frozenset({"attention_mask", "position_ids", "position_embeddings"})
_HEADS_OF_SEQUENCES = frozenset({"alibi"})  # (b heads, ...)
_NO_SEQUENCES = frozenset({"position_bias", "cache_position"})


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
