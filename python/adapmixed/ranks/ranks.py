"""The processes of one ensemble: their ranks, and their calls as a single process answers them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


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


class Ranks:
    """The processes that share an ensemble; this class is a single process with all members.

    `Group` stands for several processes. Every process runs the same program on its own members, so
    all of them make these calls in the same order. The main process receives the rows of all
    members. It alone answers, charges, draws and writes, and it tells the others the tokens.

    Attributes:
        rank: number of this process, in [0, world).
        world: number of processes.
    """

    rank: int = 0
    world: int = 1

    @property
    def alone(self) -> bool:
        """Whether this is the only process, so that nothing is sent."""
        return self.world == 1

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which answers, charges, draws and writes."""
        return self.rank == 0

    def over(self, num_models: int, *, repeated: bool = False) -> Ranks:
        """Return these processes with an ensemble of N members.

        Args:
            num_models: N.
            repeated: whether every process has all members, because sending the rows takes longer
                than computing them. This holds for members that adapt the output layer alone.
        """
        return self

    def own(self, num_models: int) -> slice:
        """Return the contiguous slice of N members that this process holds."""
        return slice(0, num_models)

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return all members' rows, (N, ...), on the main process, and None on the others.

        Args:
            rows: (n, ...) of this process's members.
        """
        return rows

    def tell(
        self,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return the main process's tensor on every process.

        Args:
            make: makes the tensor; only the main process calls it.
            shape: shape of the tensor.
            dtype: dtype of the tensor.
            device: device of the tensor on this process.
        """
        return make()

    def same(self, value: Tensor) -> Tensor:
        """Return the main process's value in place of this process's, which should be equal."""
        return self.tell(lambda: value, tuple(value.shape), value.dtype, value.device)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all processes have the same facts, by the SHA-256 of their text.

        Raises:
            ValueError: on every process, if a fact differs; the message names the first one.
        """

    def held(self, members: int) -> tuple[int, int]:
        """Return two counts that are the same on every process.

        These are the largest number of members of one process, and the number of members whose
        rows the main process gathers, 0 if it gathers none.

        Args:
            members: number of members of this process.
        """
        return members, 0


ALONE = Ranks()
