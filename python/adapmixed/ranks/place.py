"""Which of how many ranks this process is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Place:
    """Rank `rank` of `world`; `local_rank` is its number among those of one machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """From RANK, WORLD_SIZE and LOCAL_RANK, as `torchrun` sets them; alone without them.

        Raises:
            ValueError: if only one is set, or rank is not in [0, world size).
        """
        names = ("RANK", "WORLD_SIZE")
        given = [environment.get(name) for name in names]
        if given == [None, None]:
            return cls()
        if not all(value is not None and value.isdecimal() for value in given):
            raise ValueError(f"RANK and WORLD_SIZE must both be integers >= 0, got {given}")
        rank, world = (int(value or 0) for value in given)
        if rank >= world:
            raise ValueError(f"RANK must be below WORLD_SIZE {world}, got {rank}")
        return cls(rank, world, int(environment.get("LOCAL_RANK", "0")))
