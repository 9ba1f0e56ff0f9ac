"""The processes that share an ensemble, connected by torch.distributed.

gloo connects CPUs, NCCL connects GPUs. An error in one process ends all of them: if a process has
ended or does not answer, those that wait for it raise, and their `Ranks` are not used again.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from adapmixed.errors import ProcessError

_LOG = logging.getLogger(__name__)
TIMEOUT_SECONDS = 300.0
"""Seconds that a process waits for the others, at the start and in every step."""


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
        defaults = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0"}
        rank, world, local = values = [os.environ.get(*item) for item in defaults.items()]
        if rank == world == "":
            return cls()
        if not all(value.isdecimal() for value in values) or int(rank) >= int(world):
            raise ValueError(
                "RANK and WORLD_SIZE must be integers, RANK the smaller one, and LOCAL_RANK an "
                f"integer >= 0, got {values}"
            )
        return cls(int(rank), int(world), int(local))


class Ranks:
    """The processes that share an ensemble, each with a contiguous slice of its members.

    Every process runs the same program on its own members, so all of them make these calls in the
    same order. The main process receives the rows of all members. It alone answers, charges, draws
    and writes, and it tells the others the tokens. :func:`joined` makes it for several processes;
    `SINGLE` is a single one, which has all members and sends nothing.

    Attributes:
        rank: number of this process, in [0, world).
        world: number of processes.
    """

    _num_models: int  # after `over`

    def __init__(self, place: Rank) -> None:
        self.rank, self.world = place.rank, place.world
        self._repeated = self.single  # whether every process has all members
        self._broken: list[str] = []  # shared by what `over` returns, as the next one
        self._patient: list[Any] = []  # the group of `wait`, until the processes leave

    @property
    def single(self) -> bool:
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

        Raises:
            ValueError: if there are more processes than members.
        """
        if self.world > num_models:
            raise ValueError(
                f"processes must be at most as many as members, got {self.world} processes for "
                f"{num_models} members"
            )
        ranks = copy.copy(self)
        ranks._num_models, ranks._repeated = num_models, repeated or self.single
        return ranks

    def part(self, num_models: int) -> slice:
        """Return the contiguous slice of N members that this process holds.

        If N is not divisible by the number of processes, the first ones hold one more.
        """
        return slice(0, num_models) if self._repeated else self._share(num_models, self.rank)

    def held(self, members: int) -> tuple[int, int]:
        """Return two counts that are the same on every process.

        These are the largest number of members of one process, and the number of members whose
        rows the main process gathers, 0 if it gathers none.

        Args:
            members: number of members of this process.
        """
        if self._repeated:
            return members, 0
        return -(-self._num_models // self.world), self._num_models

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return all members' rows, (N, ...), on the main process, and None on the others.

        The main process receives every row at its final place.

        Args:
            rows: (n, ...) of this process's members.
        """
        if self._repeated:
            return rows if self.is_main else None
        data = rows.contiguous()
        if not self.is_main:
            self._exchange([dist.P2POp(dist.isend, _as_bytes(data), 0)])
            return None
        whole = rows.new_empty((self._num_models, *rows.shape[1:]))
        whole[: len(rows)] = rows
        others = [(rank, whole[self._share(len(whole), rank)]) for rank in range(1, self.world)]
        self._exchange([dist.P2POp(dist.irecv, _as_bytes(part), rank) for rank, part in others])
        return whole

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
        if self.single:
            return make()
        received = torch.empty(shape, dtype=dtype, device=device)
        if self.is_main:
            self._check_unbroken()
            try:
                sent = make()
                assert sent.shape == received.shape and sent.dtype == dtype
                received.copy_(sent)
            except BaseException as error:  # after which the others wait in vain
                self._broken.append(
                    f"rank 0 raised {type(error).__name__} while the others waited for its answer: "
                    "the run is over and nothing more is released; what was charged stays charged"
                )
                raise
        self._run(lambda: dist.broadcast(_as_bytes(received), src=0))
        return received

    def same(self, value: Tensor) -> Tensor:
        """Return the main process's value in place of this process's, which should be equal."""
        return self.tell(lambda: value, tuple(value.shape), value.dtype, value.device)

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all processes have the same facts, by their text.

        Raises:
            ValueError: on every process, if a fact differs; the message names the first one.
        """
        if self.single:
            return
        texts = {name: str(value) for name, value in facts.items()}
        gathered: list[Any] = [None] * self.world
        self._run(lambda: dist.all_gather_object(gathered, texts))
        for name in sorted({name for each in gathered for name in each}):
            for rank, other in enumerate(gathered):
                if other.get(name) != gathered[0].get(name):
                    raise ValueError(
                        f"ranks must agree on {name}, but rank {rank} differs from rank 0 (here, "
                        f"rank {self.rank} has {texts.get(name, 'nothing')[:200]})"
                    )

    def wait(self) -> None:
        """Return when every process has made this call, however long that takes."""
        if not self.single:
            self._run(lambda: dist.barrier(self._patient[0]))

    def _share(self, num_models: int, rank: int) -> slice:
        """Return the slice of the members that one process holds."""
        share, more = divmod(num_models, self.world)
        first = rank * share + min(rank, more)
        return slice(first, first + share + (rank < more))

    def _check_unbroken(self) -> None:
        if self._broken:
            raise ProcessError(self._broken[0])

    def _exchange(self, operations: list[Any]) -> None:
        """Run these sends and receives."""
        self._run(lambda: [request.wait() for request in dist.batch_isend_irecv(operations)])

    def _run(self, call: Callable[[], object]) -> None:
        self._check_unbroken()
        try:
            call()
        except RuntimeError as error:
            self._broken.append(
                f"another rank has ended, or not answered for {TIMEOUT_SECONDS:g} s, while rank "
                f"{self.rank} of {self.world} waited for it: the run is over and nothing more is "
                "released; what was charged stays charged"
            )
            # Log at once, because torchrun may end this process before the exception is shown.
            _LOG.error(self._broken[0])
            raise ProcessError(self._broken[0]) from error


SINGLE = Ranks(Rank())


def _as_bytes(value: Tensor) -> Tensor:
    """Return the same memory as (bytes,) uint8, which every back end can send."""
    return value.reshape(-1).view(torch.uint8)


@contextmanager
def joined(*, cuda: bool = False) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started; use it in a `with` statement.

    Args:
        cuda: whether tensors are on GPUs, which communicate through NCCL.

    Yields:
        the processes, or `SINGLE` if there is only one.

    Raises:
        ValueError: if this process has joined before and not left without an error, or if the
            processes have other versions of adapmixed or torch or another instruction set, since
            these may round differently.
        ProcessError: if the other processes do not appear, or if one has ended.
    """
    place = Rank.from_environment()
    if place.world == 1:
        yield SINGLE
        return
    # Its functions keep the group of their import as a default. That group's threads would outlive
    # `destroy_process_group` and abort the process at Python's end.
    import torch.distributed.nn.functional

    from adapmixed import __version__
    from adapmixed_ext import build_info

    if dist.is_initialized():
        raise ValueError("processes must join once: this one is still joined to others")
    ranks = Ranks(place)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        # The timeout of a call does not replace that of its group, so `wait` has one of its own.
        ranks._patient.append(dist.new_group(timeout=timedelta(days=10), backend="gloo"))
    except RuntimeError as error:
        raise ProcessError(
            f"the {place.world} ranks did not come together within {TIMEOUT_SECONDS:g} s: "
            f"{str(error)[:200]}"
        ) from error
    ranks.agree(
        {
            "the version of adapmixed": __version__,
            "the version of torch": torch.__version__,
            "the instruction set": build_info()["instruction_set"],
        }
    )
    yield ranks
    ranks._patient.clear()  # its threads, too, must end here
    # Not after an error, when the others may be gone and this process is about to end.
    dist.destroy_process_group()
