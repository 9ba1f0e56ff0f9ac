"""How far a run is, and how long it will take."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

_LOG = logging.getLogger(__name__)


class Progress:
    """A bar on a terminal, and a line per finished member everywhere.

    The work of a member is measured by the bytes of its shard. What depends on the text of a shard,
    its validation loss above all, is logged and in no line.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        say: Callable[[str], None] | None = None,
        told: Callable[[int, int], None] | None = None,
    ) -> None:
        """Args:
        sizes: bytes of each shard that is to be trained.
        say: takes a line; None: standard error.
        told: takes (work done, work of all) instead of the bar.
        """
        self._told = told
        self._sizes = {shard: size + 1 for shard, size in sizes.items()}
        self._fractions = dict.fromkeys(sizes, 0.0)
        self._say = say
        self._started = time.monotonic()
        self._bar = tqdm(
            total=sum(self._sizes.values()),
            disable=None if told is None else True,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left",
        )

    def update(self, shard: int, fraction: float) -> None:
        """A member's training has come so far."""
        self._fractions[shard] = fraction
        self._bar.n = min(self._done(), self._bar.total)
        self._bar.refresh()
        if self._told is not None:
            self._told(int(self._done()), sum(self._sizes.values()))

    def finished(self, shard: int, name: str, record: Mapping[str, Any]) -> None:
        """Says in a line what became of a member."""
        self.update(shard, 1.0)
        count = sum(fraction == 1.0 for fraction in self._fractions.values())
        documents = record["shard"]["documents"]
        validation = record["validation"]
        loss = "no validation text"
        if documents == 0:
            loss = "the public model"
        elif validation is not None:
            loss = (
                f"validation loss {validation['loss']:.3f}, public model "
                f"{validation['public_loss']:.3f} nats per token"
            )
        self.say(f"{name}: finished ({count} of {len(self._sizes)}, {self.time_left()} left)")
        self._bar.clear()
        _LOG.info("%s: %d documents, %d tokens, %s", name, documents, record["tokens"], loss)

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._say is not None:
            self._say(line)
        else:
            self._bar.write(line, file=sys.stderr)

    def time_left(self) -> str:
        """At the speed so far."""
        done, total = self._done(), sum(self._sizes.values())
        seconds = (time.monotonic() - self._started) * (total - done) / max(done, 1.0)
        if seconds < 90:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _done(self) -> float:
        return sum(self._sizes[shard] * part for shard, part in self._fractions.items())
