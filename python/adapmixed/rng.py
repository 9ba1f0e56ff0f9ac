"""Random sources for the operators: keys and never-repeating counters of a ChaCha20 stream.

A released token and a screening bit are private only if nobody can predict the randomness behind
them, so :class:`SecureRandom` is what serves queries; :class:`SeededRandom` is for tests and
evaluation and says so.
"""

import hashlib
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class _Counter:
    """(key, counter) pairs: the key as a tensor, each counter handed out once."""

    seeded: ClassVar[bool]

    def __init__(self, key: bytes) -> None:
        self._lock = threading.Lock()
        self._install(key)

    def _install(self, key: bytes) -> None:
        import torch

        self._key = torch.frombuffer(bytearray(key), dtype=torch.uint8).clone()
        self._next = 0

    def reserve(self) -> "tuple[Tensor, int]":
        """The key, (32,) uint8, and a counter that was never returned with it before."""
        with self._lock:
            return self._take()

    def bits(self, count: int) -> int:
        """A number in [0, 2^count), from a counter of its own."""
        key, counter = self.reserve()
        seed = b"adapmixed bits\0" + bytes(key.tolist()) + counter.to_bytes(16, "little")
        size = -(-count // 8)
        return int.from_bytes(hashlib.shake_256(seed).digest(size), "little") >> (8 * size - count)

    def _take(self) -> "tuple[Tensor, int]":
        counter = self._next
        self._next += 1
        return self._key, counter

    def __getstate__(self) -> object:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: two holders of one key would draw "
            "the same randomness"
        )


class SecureRandom(_Counter):
    """Key from the operating system. A forked child draws a new key at its first use."""

    seeded = False

    def __init__(self) -> None:
        super().__init__(os.urandom(32))
        self._owner = os.getpid()
        _secure.add(self)

    def child(self, label: str) -> "SecureRandom":
        """A source for one of several users: an independent one."""
        return SecureRandom()

    def bits(self, count: int) -> int:
        """A number in [0, 2^count), from the operating system."""
        return secrets.randbits(count)

    def reserve(self) -> "tuple[Tensor, int]":
        """The key, (32,) uint8, and a counter that was never returned with it before."""
        with self._lock:
            if os.getpid() != self._owner:
                self._install(os.urandom(32))
                self._owner = os.getpid()
            return self._take()


_secure: "weakref.WeakSet[SecureRandom]" = weakref.WeakSet()


def _renew_in_child() -> None:
    # Another thread of the parent may have held a lock at the fork; it does not exist here. The
    # owner is forgotten because a child in a new namespace can have its parent's process id.
    for source in _secure:
        source._lock = threading.Lock()
        source._owner = 0


os.register_at_fork(after_in_child=_renew_in_child)


class SeededRandom(_Counter):
    """Key derived from a seed: repeatable, for tests and evaluation only.

    Args:
        seed: any integer.
        label: tells apart several sources of one seed.

    Raises:
        ValueError: seed is no integer.
    """

    seeded = True

    def __init__(self, seed: int, label: str = "") -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, got {seed!r}")
        text = b"adapmixed seeded random\0%d\0%s" % (seed, label.encode())
        super().__init__(hashlib.sha256(text).digest())
        self.seed = seed
        self.label = label

    @property
    def position(self) -> int:
        """How many counters have been handed out."""
        with self._lock:
            return self._next

    def skip_to(self, position: int) -> None:
        """Goes on behind the counters of an earlier holder of this seed and label.

        Raises:
            ValueError: position is no integer, or lies before the next counter: one would be handed
                out twice.
        """
        if isinstance(position, bool) or not isinstance(position, int):
            raise ValueError(f"position must be an integer, got {position!r}")
        with self._lock:
            if position < self._next:
                raise ValueError(f"position must be >= {self._next}, got {position}")
            self._next = position

    def child(self, label: str) -> "SeededRandom":
        """A source for one of several users, which does not depend on what the others draw."""
        return SeededRandom(self.seed, f"{self.label}/{label}")
