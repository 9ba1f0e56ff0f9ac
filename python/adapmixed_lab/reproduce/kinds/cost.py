"""The cost of a private token: multiply-adds of the linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adapmixed.ensemble.layers import head_name, linear_names

if TYPE_CHECKING:
    from adapmixed.ensemble.trunk import Trunk


def token_cost(
    base: Any, trunk: Trunk, adapted: Mapping[str, Sequence[int]], num_models: int
) -> float:
    """Return the multiply-adds of one private token, divided by those of the public model.

    Only products with weights count. Attention's products with its keys grow with the context, but
    for the same layers, so the ratio hardly changes with them.

    Args:
        base: the public model, on any device ("meta" will do).
        trunk: the part that members share with it.
        adapted: layer -> ranks, as in `ensemble.json`. Every member has one of each layer's ranks,
            and the largest is counted.
        num_models: N.
    """
    head = head_name(base)
    weights = {name: base.get_submodule(name).weight for name in linear_names(base)}
    own = {
        name
        for name in weights
        if trunk.repeats_input
        or (trunk.head is None and name == head)
        or name.startswith(tuple(f"{block}." for block in trunk.blocks))
    }
    rows = {name: num_models + 1 if name in own else 1 for name in weights}
    public = sum(weight.numel() for weight in weights.values())
    shared = sum(rows[name] * weight.numel() for name, weight in weights.items())
    updates = sum(max(ranks) * sum(weights[name].shape) for name, ranks in adapted.items())
    return float((shared + num_models * updates) / public)
