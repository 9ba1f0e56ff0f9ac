"""Faults that break a promise, by the part of the sources that they change."""

from __future__ import annotations

from . import (
    accountant,
    ensemble,
    generation,
    mechanisms,
    operators,
    privacy,
    serving,
    training,
)
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *operators.FAULTS,
    *mechanisms.FAULTS,
    *privacy.FAULTS,
    *accountant.FAULTS,
    *ensemble.FAULTS,
    *generation.FAULTS,
    *serving.FAULTS,
    *training.FAULTS,
)
