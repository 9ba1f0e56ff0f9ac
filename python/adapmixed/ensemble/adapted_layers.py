"""The layers that members adapt and their ranks, a public constant of an ensemble."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapmixed.ensemble.member import LORA_WEIGHT, weights_file


def adapter_layers(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Return the layers that a peft folder adapts, each with its rank.

    Only the header of the weights file is read.

    Raises:
        ValueError: if the folder holds no weights, or damaged ones.
        OSError: if the weights may not be read.
    """
    from safetensors import SafetensorError, safe_open

    file = weights_file(Path(folder))
    found: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(str(file), framework="pt") as weights:
            for key in weights.keys():
                match = LORA_WEIGHT.fullmatch(key)
                if match is not None and match[2] == "A":
                    found[match[1]] = (int(weights.get_slice(key).get_shape()[0]),)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    return found


def merged_layers(
    members: Iterable[Mapping[str, Sequence[int]]],
) -> dict[str, tuple[int, ...]]:
    """Return every layer that some member adapts, with all its ranks in ascending order."""
    found: dict[str, set[int]] = {}
    for layers in members:
        for name, ranks in layers.items():
            found.setdefault(name, set()).update(ranks)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def checked_layers(adapted: Any) -> dict[str, tuple[int, ...]]:
    """Return the adapted layers in alphabetical order, each with its ascending ranks.

    Raises:
        ValueError: if `adapted` does not map at least one name to distinct integers >= 1.
    """
    if not isinstance(adapted, Mapping) or not adapted:
        raise ValueError(f"adapted must map layers to their ranks, got {adapted!r}")
    for name, ranks in adapted.items():
        valid = isinstance(ranks, list | tuple) and ranks and all(map(_is_rank, ranks))
        if not isinstance(name, str) or not valid or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"adapted must map layer names to distinct integers >= 1, got {name!r}: {ranks!r}"
            )
    return {name: tuple(sorted(adapted[name])) for name in sorted(adapted)}


def ensemble_layers(
    paths: Sequence[Path | None], adapted: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    """Return the layers that members may adapt, with their ranks.

    The answer must not depend on which members are present.

    Args:
        paths: one peft folder per member, None for a missing member.
        adapted: the layers and ranks that the caller declares, or None.

    Raises:
        ValueError: if `adapted` is needed and missing, or does not cover every member.
    """
    found = {path: adapter_layers(path) for path in paths if path is not None}
    if adapted is None:
        if not found:
            raise ValueError("adapted must be given if all members are missing")
        first = next(iter(found))
        other = next((path for path in found if found[path] != found[first]), None)
        if other is not None:  # else the layers would depend on which members are present
            raise ValueError(
                f"adapted must be given if members differ: {first} and {other} adapt different "
                "layers or ranks"
            )
        return merged_layers(found.values())
    for path, layers in found.items():
        for name, (rank,) in layers.items():
            short = [key for key in adapted if name.endswith(f".{key}")]
            if name not in adapted and short:
                raise ValueError(
                    f"adapted must have the full names of layers, got {short[0]!r} instead of "
                    f"{name!r}, which {path} adapts"
                )
            if rank not in adapted.get(name, ()):
                raise ValueError(
                    f"adapted must hold the layers and ranks of every member: {path} adapts {name} "
                    f"with rank {rank}, got {adapted.get(name)}"
                )
    return {name: tuple(ranks) for name, ranks in adapted.items()}


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1
