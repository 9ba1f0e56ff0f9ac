"""Several ranks over torch.distributed: gloo between CPUs, NCCL between GPUs.

Whatever goes wrong on one rank ends all: a rank that has ended or is silent is an error on those
that wait for it, and after an error nothing more is asked of the group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from adapmixed.ranks.alone import ALONE, OneRank, Ranks
from adapmixed.ranks.place import Place

_LOG = logging.getLogger(__name__)
TIMEOUT_SECONDS = 300.0
"""How long a rank waits for the others before the run is over."""


class RankError(RuntimeError):
    """Another rank has ended or does not answer: the run is over."""


class Group(Ranks):
    """Several ranks, each with a contiguous slice of the members; made by :func:`joined`.

    Attributes:
        traffic: bytes of all collectives so far, by kind: "sum", the tensor; "each", all ranks'
            tensors; "decide", the tensor.
        calls: how many of each kind there were.
    """

    summed = True

    def __init__(
        self,
        place: Place,
        timeout_seconds: float,
        num_models: int | None = None,
        before: Group | None = None,
    ) -> None:
        self.rank, self.world = place.rank, place.world
        self._place = place
        self._timeout = timeout_seconds
        self._num_models = num_models
        self.traffic: Counter[str] = Counter() if before is None else before.traffic
        self.calls: Counter[str] = Counter() if before is None else before.calls
        self._broken: list[str] = [] if before is None else before._broken

    def over(self, num_models: int) -> Group:
        """See `Ranks.over`.

        Raises:
            ValueError: more ranks than members.
        """
        if self.world > num_models:
            raise ValueError(
                f"ranks must be at most as many as members, got {self.world} ranks for "
                f"{num_models} members: a rank without a member has nothing to do"
            )
        return Group(self._place, self._timeout, num_models, self)

    def own(self, num_models: int) -> slice:
        """See `Ranks.own`; the first ranks have one more where N is not divisible."""
        share, more = divmod(num_models, self.world)
        first = self.rank * share + min(self.rank, more)
        return slice(first, first + share + (self.rank < more))

    def slots(self, members: int) -> int:
        """See `Ranks.slots`."""
        here = self.own(self._members())
        if members != here.stop - here.start:
            raise ValueError(
                f"private_logits must be those of the {here.stop - here.start} members of rank "
                f"{self.rank}, got {members}"
            )
        return self._members()

    def most(self, members: int) -> int:
        """See `Ranks.most`."""
        return -(-self.slots(members) // self.world)

    def rows(self, whole: Tensor) -> Tensor:
        """See `Ranks.rows`."""
        return whole[self.own(self._members())]

    def gather(self, rows: Tensor) -> Tensor:
        """See `Ranks.gather`; what is sent is padded to the largest number of members."""
        padded = rows.new_zeros((self.most(len(rows)), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts, members = self.each(padded), self._members()
        counts = [members // self.world + (r < members % self.world) for r in range(self.world)]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def each(self, value: Tensor) -> Tensor:
        """See `Ranks.each`."""
        import torch.distributed as dist

        data = value.contiguous()
        found = torch.empty((self.world, *data.shape), dtype=data.dtype, device=data.device)
        parts = [_as_bytes(part) for part in found]
        self._run("each", _as_bytes(found), lambda: dist.all_gather(parts, _as_bytes(data)))
        return found

    def sum(self, value: Tensor) -> Tensor:
        """See `Ranks.sum`."""
        import torch.distributed as dist

        total = value.contiguous().clone()
        self._run("sum", _as_bytes(total), lambda: dist.all_reduce(total))
        return total

    def decide(
        self,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """See `Ranks.decide`."""
        import torch.distributed as dist

        found = torch.empty(shape, dtype=dtype, device=device)
        if self.leads:
            made = make()
            if tuple(made.shape) != shape or made.dtype != dtype:
                raise ValueError(
                    f"make must give {dtype} of shape {shape}, got {made.dtype} {tuple(made.shape)}"
                )
            found.copy_(made)
        data = _as_bytes(found)
        self._run("decide", data, lambda: dist.broadcast(data, src=0))
        return found

    def agree(self, facts: Mapping[str, object]) -> None:
        """See `Ranks.agree`: 32 bytes of each fact are sent."""
        names = sorted(facts)
        digests = [hashlib.sha256(str(facts[name]).encode()).digest() for name in names]
        own = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        found = self.each(own.reshape(len(names), 32))
        differ = (found != found[0]).any(-1).nonzero().tolist()
        if differ:
            rank, fact = min(differ, key=lambda pair: (pair[1], pair[0]))
            raise ValueError(
                f"ranks must agree on {names[fact]}: rank {rank} has another than rank 0 (here, on "
                f"rank {self.rank}: {str(facts[names[fact]])[:200]})"
            )

    def _members(self) -> int:
        if self._num_models is None:
            raise ValueError("ranks must know how many members there are: over(num_models)")
        return self._num_models

    def _run(self, kind: str, data: Tensor, call: Callable[[], Any]) -> None:
        if self._broken:
            raise RankError(self._broken[0])
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
            # At once: torchrun ends this process, too, before all that unwinds can be said.
            _LOG.error(self._broken[0])
            raise RankError(self._broken[0]) from error
        self.calls[kind] += 1
        self.traffic[kind] += data.numel()


def _as_bytes(value: Tensor) -> Tensor:
    """The same memory as (bytes,) uint8, which every back end carries."""
    return value.reshape(-1).view(torch.uint8)


@contextmanager
def joined(
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    place: Place | None = None,
    cuda: bool = False,
) -> Iterator[Ranks]:
    """The ranks that `torchrun` started, `OneRank` where that is one, or `ALONE` without it.

    Args:
        timeout_seconds: > 0, how long a rank waits for the others, at the start and in every step.
        place: of this process; None: what the environment says.
        cuda: whether tensors are on GPUs, which then talk through NCCL.

    Raises:
        ValueError: timeout_seconds, or ranks of other versions of adapmixed or torch, or other
            instruction sets, whose roundings differ.
        RankError: the others did not come, or a rank has ended.
    """
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be > 0, got {timeout_seconds!r}")
    place = Place.from_environment() if place is None else place
    if place.world == 1:
        yield OneRank() if place.launched else ALONE
        return
    import torch.distributed as dist

    # Its functions keep the group of their import as a default, whose threads then outlive
    # `destroy_process_group` and abort the process where they meet Python's end.
    import torch.distributed.nn.functional

    from adapmixed import __version__
    from adapmixed_ext import build_info

    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise RankError(
            f"the {place.world} ranks did not come together within {timeout_seconds:g} s"
        ) from error
    group = Group(place, timeout_seconds)
    group.agree(
        {
            "the version of adapmixed": __version__,
            "the version of torch": torch.__version__,
            "the instruction set": build_info()["instruction_set"],
        }
    )
    yield group
    # Not after an error: then the others may be gone, and the process is about to end.
    dist.destroy_process_group()
