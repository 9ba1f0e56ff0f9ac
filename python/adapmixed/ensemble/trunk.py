"""The trunk: the layers below the first adapted one, which all members share.

Below the first adapted layer every member equals the public model. That part is computed once for b
sequences. Then the rows are repeated to (N + 1) b, with block 0 public. The end of the trunk
depends only on the adapted layers, a public constant. If it depended on weights, or on which
members are present, one member could change the last bits of another's logits. The idea is
explained in docs/concepts/shared-trunk.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.lora import block_names, head_name

_LOG = logging.getLogger(__name__)
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

    def __str__(self) -> str:
        if self.head is not None:
            return "all blocks: members adapt the output layer alone"
        shared = self.depth - len(self.blocks)
        if self.repeats_input or shared == 0:
            return "no block: every member computes all of them"
        return f"the first {shared} of {self.depth} blocks"


def find_trunk(model: Any, adapted: Collection[str]) -> Trunk:
    """Return the trunk of members that adapt these layers.

    A warning is logged if the model turns out not to allow a shared trunk.

    Args:
        model: the public model, before adapters are stacked on it; it is not changed.
        adapted: full names of the adapted layers.
    """
    head = head_name(model)
    if set(adapted) == {head}:
        return Trunk(head=head, depth=len(block_names(model)))
    blocks = block_names(model)
    own = {name: _block_of(name, blocks) for name in adapted if name != head}
    if not own or not blocks or None in own.values():
        return Trunk()
    first = min(blocks.index(block) for block in own.values() if block is not None)
    trunk = Trunk(blocks=blocks[first:], depth=len(blocks))
    reason = _fault(model, trunk)
    if reason is not None:
        _LOG.warning(
            "members share no block of %s, which costs time: %s",
            model.config.model_type,
            reason,
        )
        return Trunk()
    return trunk


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


@torch.no_grad()
def _fault(model: Any, trunk: Trunk) -> str | None:
    """Return the reason why the model does not allow this trunk, or None.

    The public model is tried alone, with padding and through a cache. Two repeated rows must be
    equal and, up to rounding, give the model's own logits.
    """
    from adapmixed.ensemble.cache import cache_argument, key_value_cache

    taken = cache_argument(model)
    training = model.training
    model.eval()
    ids = (
        torch.arange(6, device=model.device).view(2, 3) % model.config.get_text_config().vocab_size
    )
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)

    def answers() -> Tensor:
        cache, parts = key_value_cache(model.config, 3), []
        for start, stop in ((0, 2), (2, 3)):
            parts.append(
                model(
                    input_ids=ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    **{taken: cache},
                    use_cache=True,
                ).logits
            )
        return torch.cat(parts, dim=1)[..., 1:, :]

    handles = []
    try:
        expected = answers()
        handles = repeat_at(model, trunk, 2)
        found = answers()
    except Exception as error:  # a model's own code may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
    if found.shape[0] != 4 or not torch.equal(found[:2], found[2:]):
        return "repeated rows differ from each other"
    if differ(found[:2], expected):
        return "repeated rows differ from the model's own logits"
    return None


def differ(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by more than rounding, relative to their range."""
    finite = expected[expected.isfinite()].to(torch.float32)
    precision = 2.0**-10 if expected.dtype == torch.float32 else 2.0**-4
    allowed = precision * float(finite.max() - finite.min())
    return not torch.allclose(found.float(), expected.float(), rtol=0.0, atol=allowed)


def _block_of(name: str, blocks: tuple[str, ...]) -> str | None:
    return next((block for block in blocks if name.startswith(f"{block}.")), None)
