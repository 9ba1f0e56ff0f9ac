"""The rank of this process among all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Rank:
    """The rank of a process.

    Attributes:
        rank: number of the process, in [0, world).
        world: number of processes.
        local_rank: number of the process among those on its machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Self:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, as `torchrun` sets them.

        Without them the process is the only one.

        Raises:
            ValueError: if only one of RANK and WORLD_SIZE is set, one of the three is no integer,
                or RANK is not below WORLD_SIZE.
        """
        names = ("RANK", "WORLD_SIZE")
        given = [os.environ.get(name) for name in names]
        if given == [None, None]:
            return cls()
        if not all(value is not None and value.isdecimal() for value in given):
            raise ValueError(f"RANK and WORLD_SIZE must both be integers >= 0, got {given}")
        rank, world = (int(value or 0) for value in given)
        if rank >= world:
            raise ValueError(f"RANK must be below WORLD_SIZE {world}, got {rank}")
        local = os.environ.get("LOCAL_RANK", "0")
        if not local.isdecimal():
            raise ValueError(f"LOCAL_RANK must be an integer >= 0, got {local!r}")
        return cls(rank, world, int(local))
