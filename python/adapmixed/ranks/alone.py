"""What the processes of one ensemble ask of each other, and the answers if there is one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Ranks:
    """The processes that share an ensemble; this class is the one process that has all members.

    Every process runs the same program on its own members, so that all come to each of these calls
    in the same order; `Group` is several. The main process gets the rows of all members. It alone
    answers, charges, draws and writes, and tells the others the tokens.

    Attributes:
        rank: number of this process.
        world: how many there are.
    """

    rank: int = 0
    world: int = 1

    @property
    def alone(self) -> bool:
        """Whether this is the only process: then nothing is sent."""
        return self.world == 1

    @property
    def is_main(self) -> bool:
        """Whether this process answers, charges, draws and writes."""
        return self.rank == 0

    def over(self, num_models: int, *, repeated: bool = False) -> Ranks:
        """Return these processes with an ensemble of N members.

        Args:
            repeated: every process has all members. Those of the output layer alone take longer to
                send than to compute.
        """
        return self

    def own(self, num_models: int) -> slice:
        """Return which of N members are this process's: contiguous, in their order."""
        return slice(0, num_models)

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return (N, ...), all processes' (n, ...) in the order of the members; None elsewhere
        than on the main process."""
        return rows

    def tell(
        self,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return what the main process makes, everywhere; the others do not call `make`."""
        return make()

    def same(self, value: Tensor) -> Tensor:
        """Return the main process's value; every process has one that should be equal."""
        return self.tell(lambda: value, tuple(value.shape), value.dtype, value.device)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Compare facts among processes, by the SHA-256 of their text.

        Raises:
            ValueError: on every process, naming the first fact that differs.
        """

    def held(self, members: int) -> tuple[int, int]:
        """Return the largest number of members that one process has, and how many members' rows
        the main process gathers, 0 if it need not: the same everywhere."""
        return members, 0


ALONE = Ranks()
