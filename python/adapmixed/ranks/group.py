"""Connect several processes with torch.distributed: gloo for CPUs, NCCL for GPUs.

An error in one process ends all of them. If a process has ended or does not answer, the processes
that wait for it raise. After an error the group is not used again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from adapmixed.errors import ProcessError
from adapmixed.ranks.ranks import ALONE, Rank, Ranks

_LOG = logging.getLogger(__name__)
TIMEOUT_SECONDS = 300.0
"""Seconds that a process waits for the others before it raises."""
_LONGEST_TIMEOUT = 1e6


class Group(Ranks):
    """Several processes, each with a contiguous slice of the members; :func:`joined` makes it."""

    def __init__(
        self,
        place: Rank,
        timeout_seconds: float,
        num_models: int | None = None,
        before: Group | None = None,
        *,
        repeated: bool = False,
    ) -> None:
        self.rank, self.world = place.rank, place.world
        self._place = place
        self._timeout = timeout_seconds
        self._num_models = num_models
        self._repeated = repeated
        self._broken: list[str] = [] if before is None else before._broken

    def over(self, num_models: int, *, repeated: bool = False) -> Group:
        """Return these processes with an ensemble of N members; see `Ranks.over`.

        Raises:
            ValueError: if there are more processes than members.
        """
        if self.world > num_models:
            raise ValueError(
                f"processes must be at most as many as members, got {self.world} processes for "
                f"{num_models} members"
            )
        return Group(self._place, self._timeout, num_models, self, repeated=repeated)

    def own(self, num_models: int) -> slice:
        """Return this process's slice of the members; see `Ranks.own`.

        If N is not divisible by the number of processes, the first ones hold one more.
        """
        if self._repeated:
            return slice(0, num_models)
        return _share(num_models, self.rank, self.world)

    def held(self, members: int) -> tuple[int, int]:
        """Return the counts of `Ranks.held`."""
        models = self._members()
        if self._repeated:
            return models, 0
        return -(-models // self.world), models

    def gather(self, rows: Tensor) -> Tensor | None:
        """Return all members' rows on the main process; see `Ranks.gather`.

        The main process receives every row at its final place.
        """
        import torch.distributed as dist

        if self._repeated:
            return rows if self.is_main else None
        data = rows.contiguous()
        if not self.is_main:
            sent = dist.P2POp(dist.isend, _as_bytes(data), 0)
            self._run(lambda: _exchange([sent]))
            return None
        whole = rows.new_empty((self._members(), *rows.shape[1:]))
        whole[: len(rows)] = rows
        others = [whole[_share(len(whole), rank, self.world)] for rank in range(1, self.world)]
        received = [
            dist.P2POp(dist.irecv, _as_bytes(part), rank) for rank, part in enumerate(others, 1)
        ]
        self._run(lambda: _exchange(received))
        return whole

    def tell(
        self,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return the main process's tensor on every process; see `Ranks.tell`.

        Raises:
            ValueError: if `make` returns another shape or dtype.
        """
        import torch.distributed as dist

        found = torch.empty(shape, dtype=dtype, device=device)
        if self.is_main:
            made = self._made(make)
            if tuple(made.shape) != shape or made.dtype != dtype:
                raise ValueError(
                    f"make must give {dtype} of shape {shape}, got {made.dtype} {tuple(made.shape)}"
                )
            found.copy_(made)
        self._run(lambda: dist.broadcast(_as_bytes(found), src=0))
        return found

    def agree(self, facts: Mapping[str, object]) -> None:
        """Check that all processes have the same facts; see `Ranks.agree`.

        32 bytes are sent for each fact, and 32 for their names.
        """
        names = sorted(facts)
        # Their names first, since another number of facts has another size.
        self._agree_on(["what is compared"], [", ".join(names)])
        self._agree_on(names, [str(facts[name]) for name in names])

    def _agree_on(self, names: list[str], values: list[str]) -> None:
        digests = [hashlib.sha256(value.encode()).digest() for value in values]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        found = self._each(own.reshape(len(names), 32))
        differ = (found != found[0]).any(-1).nonzero().tolist()
        if differ:
            rank, fact = min(differ, key=lambda pair: (pair[1], pair[0]))
            raise ValueError(
                f"ranks must agree on {names[fact]}, but rank {rank} differs from rank 0 (here, "
                f"rank {self.rank} has {values[fact][:200]})"
            )

    def _made(self, make: Callable[[], Tensor]) -> Tensor:
        """Return what the main process tells. After an error the others wait in vain."""
        if self._broken:
            raise ProcessError(self._broken[0])
        try:
            return make()
        except BaseException as error:
            self._broken.append(
                f"rank 0 raised {type(error).__name__} while the others waited for its answer: the "
                "run is over and nothing more is released; what was charged stays charged"
            )
            raise

    def _each(self, value: Tensor) -> Tensor:
        """Return the values of all processes, (world, ...), on every process.

        All values must have the same shape.
        """
        import torch.distributed as dist

        data = value.contiguous()
        found = torch.empty((self.world, *data.shape), dtype=data.dtype, device=data.device)
        parts = [_as_bytes(part) for part in found]
        self._run(lambda: dist.all_gather(parts, _as_bytes(data)))
        return found

    def _members(self) -> int:
        if self._num_models is None:
            raise ValueError("ranks must know the number of members: call over(num_models) first")
        return self._num_models

    def _run(self, call: Callable[[], object]) -> None:
        if self._broken:
            raise ProcessError(self._broken[0])
        started = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            silent = time.monotonic() - started >= 0.9 * self._timeout
            what = f"has not answered for {self._timeout:g} s" if silent else "has ended"
            self._broken.append(
                f"another rank {what} while rank {self.rank} of {self.world} waited for it: the "
                "run is over and nothing more is released; what was charged stays charged"
            )
            # Log at once, because torchrun may end this process before the exception is shown.
            _LOG.error(self._broken[0])
            raise ProcessError(self._broken[0]) from error


def _as_bytes(value: Tensor) -> Tensor:
    """Return the same memory as (bytes,) uint8, which every back end can send."""
    return value.reshape(-1).view(torch.uint8)


def _share(num_models: int, rank: int, world: int) -> slice:
    """Return the slice of the members that one process holds."""
    share, more = divmod(num_models, world)
    first = rank * share + min(rank, more)
    return slice(first, first + share + (rank < more))


def _exchange(operations: list[Any]) -> None:
    """Run these sends and receives."""
    import torch.distributed as dist

    for request in dist.batch_isend_irecv(operations):
        request.wait()


@contextmanager
def joined(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    place: Rank | None = None,
    cuda: bool = False,
) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started; use it in a `with` statement.

    Args:
        timeout_seconds: how long a process waits for the others, at the start and in every step;
            > 0 and at most a million.
        place: this process's rank; None to read it from the environment.
        cuda: whether tensors are on GPUs, which communicate through NCCL.

    Yields:
        the processes, or `ALONE` if there is only one.

    Raises:
        ValueError: if `timeout_seconds` is out of range, if this process has joined before and
            not left without an error, or if the processes have other versions of adapmixed or
            torch or another instruction set, since these may round differently.
        ProcessError: if the other processes do not appear, or if one has ended.
    """
    if not 0 < timeout_seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout_seconds must be > 0 and <= {_LONGEST_TIMEOUT:g}, got {timeout_seconds!r}"
        )
    place = Rank.from_environment() if place is None else place
    if place.world == 1:
        yield ALONE
        return
    import torch.distributed as dist

    # Its functions keep the group of their import as a default. That group's threads would outlive
    # `destroy_process_group` and abort the process at Python's end.
    import torch.distributed.nn.functional

    from adapmixed import __version__
    from adapmixed_ext import build_info

    if dist.is_initialized():
        raise ValueError("processes must join once: this one is still joined to others")
    started = time.monotonic()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        late = time.monotonic() - started >= 0.9 * timeout_seconds
        why = f"within {timeout_seconds:g} s" if late else f"({str(error)[:200]})"
        raise ProcessError(f"the {place.world} ranks did not come together {why}") from error
    group = Group(place, timeout_seconds)
    group.agree(
        {
            "the version of adapmixed": __version__,
            "the version of torch": torch.__version__,
            "the instruction set": build_info()["instruction_set"],
        }
    )
    yield group
    # Not after an error, when the others may be gone and this process is about to end.
    dist.destroy_process_group()
