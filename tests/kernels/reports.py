"""What the checks of operators share: reports, and operators on any device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from oracle import Array
from plans import INF
from torch import Tensor

import adapmixed_ext

LOSS_ERROR, LOSS_FLOOR = 1e-4, 1e-9
LEAST = 1e-12  # below this optimum any smaller weight is allowed
LEAST_RADIUS = 1e-5  # below it, too
ENOUGH = 3  # failures, after which a report ends, because mpmath is slow
SUM_ERROR = 4e-12  # of the sum of a distribution
NORMAL = math.log(2.0**-1022)  # the bounds of a pool hold for log p above this
LSE_ERROR = 7e-7  # documented error of a private row's log-sum-exp in a pool


@dataclass
class Report:
    """The failures, and the number of checked values."""

    failures: list[str] = field(default_factory=list)
    values: int = 0

    def expect(self, good: object, *what: object) -> None:
        self.values += 1
        if not good:
            self.failures.append(" ".join(map(str, what)))

    def compare(self, name: str, got: Array, truth: Array, bound: Array | float) -> None:
        """Expect |got - truth| <= bound everywhere; infinities must agree."""
        self.values += got.size
        bound = np.broadcast_to(bound, got.shape)
        with np.errstate(invalid="ignore"):
            error = np.where(got == truth, 0, abs(got - truth))
        if not (error <= bound).all():
            at = np.unravel_index(np.argmax(np.nan_to_num(error - bound, nan=INF)), error.shape)
            self.failures.append(f"{name}: {got[at]!r} at {at}, exact {truth[at]}, off {error[at]}")


class Through:
    """The operators, called by a function of an operator and its arguments."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Looked up now, since faults are planted there.
        return partial(self._call, getattr(adapmixed_ext, name))


def on_device(device: torch.device | str) -> Through:
    """Return the operators, each of which moves its arguments to the device and its result back."""

    def call(operator: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        keywords = {key: moved(value, device) for key, value in named.items()}
        return moved(operator(*(moved(a, device) for a in arguments), **keywords), "cpu")

    return Through(call)


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


def copied(private: Tensor, public: Tensor) -> Tensor:
    """Tell which rows of a member are the public ones, also in the sign of 0."""
    return ((private == public) & (private.signbit() == public.signbit())).all(-1)
