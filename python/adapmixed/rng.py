"""Random sources for the operators: keys and never-repeating counters of a ChaCha20 stream.

A released token and a screening bit are private only if nobody can predict the randomness behind
them. So queries are answered with :class:`SecureRandom`. :class:`SeededRandom` is for tests and
evaluation only.
"""

import hashlib
import os
import threading
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


class _Counter:
    """A source of (key, counter) pairs that returns every counter once."""

    seeded: ClassVar[bool]

    def __init__(self, key: bytes) -> None:
        self._lock = threading.Lock()
        self._install(key)

    def _install(self, key: bytes) -> None:
        import torch

        self._key = torch.frombuffer(bytearray(key), dtype=torch.uint8).clone()
        self._next = 0

    def reserve(self) -> "tuple[Tensor, int]":
        """Return the key, (32,) uint8, and a counter that was never returned with it before."""
        with self._lock:
            self._renew()
            counter = self._next
            self._next += 1
            return self._key, counter

    def _renew(self) -> None:
        """Replace the key before a counter is returned twice, if that could happen."""


class SecureRandom(_Counter):
    """A random source whose key comes from the operating system, for answers to queries.

    A forked child draws a new key at its first use.
    """

    seeded = False

    def __init__(self) -> None:
        super().__init__(os.urandom(32))
        self._owner = os.getpid()

    def child(self, label: str) -> "SecureRandom":
        """Return an independent source, for one of several users.

        Args:
            label: name of the user; the keys differ in any case.
        """
        return SecureRandom()

    def _renew(self) -> None:
        if os.getpid() != self._owner:
            self._install(os.urandom(32))
            self._owner = os.getpid()


class SeededRandom(_Counter):
    """A repeatable random source whose key comes from a seed, for tests and evaluation only.

    Whoever knows the seed can undo the randomness. Two sources with the same seed and label give
    the same numbers, so whoever sees answers of both needs no seed. Guarantees of the answers say
    so, and a ledger takes no charge for them.

    Args:
        seed: any integer.
        label: distinguishes several sources with one seed. The label of a child is its path, such
            as "/a", so a label with a slash may name the source of a child.

    Raises:
        ValueError: the seed is not an integer.
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
        """Number of counters that were returned so far."""
        with self._lock:
            return self._next

    def skip_to(self, position: int) -> None:
        """Skip the counters that an earlier source of this seed and label has returned.

        Args:
            position: the next counter, as :attr:`position` of the earlier source.

        Raises:
            ValueError: it is no integer, or before the next counter, which would be returned twice.
        """
        with self._lock:
            if not isinstance(position, int) or position < self._next:
                raise ValueError(f"position must be an integer >= {self._next}, got {position!r}")
            self._next = position

    def child(self, label: str) -> "SeededRandom":
        """Return a source for one of several users that does not depend on the others' draws.

        Args:
            label: name of the user. The same seed and labels give the same source.
        """
        # A slash of the label's own is escaped, so that no two paths of labels are equal.
        escaped = label.replace("\\", "\\\\").replace("/", "\\/")
        return SeededRandom(self.seed, f"{self.label}/{escaped}")
