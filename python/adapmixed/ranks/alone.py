"""What the ranks of one ensemble ask of each other, and the answers where there is one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Ranks:
    """The ranks that share an ensemble; this class is the one process that has all members.

    Every rank runs the same program on its own members, so that all of them come to each of these
    calls in the same order; `Group` are several. The rank that leads charges, draws and writes.

    Attributes:
        rank: number of this one.
        world: how many there are.
        summed: whether losses that need all members are taken from the sum of what each rank's
            members add, in double, as several ranks must: 2.5 to 10 times as long as single
            precision, which one process takes first, and equal on any number of ranks.
    """

    rank: int = 0
    world: int = 1
    summed: bool = False

    @property
    def alone(self) -> bool:
        """Whether all members are here: then nothing is sent, and values stay as they are."""
        return self.world == 1

    @property
    def leads(self) -> bool:
        """Whether this rank charges, draws and writes."""
        return self.rank == 0

    def over(self, num_models: int) -> Ranks:
        """These ranks with an ensemble of N members."""
        return self

    def own(self, num_models: int) -> slice:
        """Which of N members are this rank's: contiguous, in the order of the ensemble."""
        return slice(0, num_models)

    def slots(self, members: int) -> int:
        """N of the whole ensemble, of which this rank has so many members.

        Raises:
            ValueError: this rank has another number of members.
        """
        return members

    def most(self, members: int) -> int:
        """The largest number of members that one rank has."""
        return members

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's (n, ...) of (N, ...)."""
        return whole

    def gather(self, rows: Tensor) -> Tensor:
        """(N, ...), all ranks' (n, ...) in the order of the members, on every rank."""
        return rows

    def each(self, value: Tensor) -> Tensor:
        """(world, ...), the values of all ranks, of one shape, on every rank."""
        return value.unsqueeze(0)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of all ranks' values, the same bits on every rank."""
        return value

    def decide(
        self,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """What the rank that leads makes, on every rank; the others do not call `make`."""
        return make()

    def same(self, value: Tensor) -> Tensor:
        """The leading rank's value, where every rank has one that should be equal."""
        return self.decide(lambda: value, tuple(value.shape), value.dtype, value.device)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Refuses to go on where ranks differ in a fact, compared by the SHA-256 of its text.

        Raises:
            ValueError: names the first fact that differs, on every rank.
        """


class OneRank(Ranks):
    """The only rank that `torchrun` started: computes as each of several does."""

    summed = True


ALONE = Ranks()
