"""The operators on another device, for callers whose tensors are on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adapmixed_ext


def moved(value: Any, device: torch.device | str) -> Any:
    """Return a value whose tensors, also those in tuples and results, are on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return type(value)(**{name: moved(part, device) for name, part in fields.items()})
    return value


class OnDevice:
    """The operators, each of which moves its arguments to the device and its result back."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = getattr(adapmixed_ext, name)(
                *(moved(a, self.device) for a in arguments),
                **{key: moved(a, self.device) for key, a in named.items()},
            )
            return moved(result, "cpu")

        return call
