"""Show the progress of a training run and the time left."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

_LOG = logging.getLogger(__name__)


class Progress:
    """A progress bar on a terminal, and a line per finished member.

    The work of a member is measured by the bytes of its shard. Values that depend on the text of a
    shard, such as its validation loss, are only logged and never in a line.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        say: Callable[[str], None] | None = None,
        told: Callable[[int, int], None] | None = None,
    ) -> None:
        """Begin with no work done.

        Args:
            sizes: bytes of each shard to be trained.
            say: called with each line; None for standard error.
            told: called with (work done, work in all) instead of the bar; or None.
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
        """Record the fraction done of a member's training."""
        self._fractions[shard] = fraction
        self._bar.n = min(self._done(), self._bar.total)
        self._bar.refresh()
        if self._told is not None:
            self._told(int(self._done()), sum(self._sizes.values()))

    def finished(self, shard: int, name: str, record: Mapping[str, Any]) -> None:
        """Print the line of a finished member, and log its losses."""
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
        """Print a line above the bar."""
        if self._say is not None:
            self._say(line)
        else:
            self._bar.write(line, file=sys.stderr)

    def time_left(self) -> str:
        """Return the time left at the speed so far, as a phrase."""
        done, total = self._done(), sum(self._sizes.values())
        seconds = (time.monotonic() - self._started) * (total - done) / max(done, 1.0)
        if seconds < 90:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def _done(self) -> float:
        return sum(self._sizes[shard] * part for shard, part in self._fractions.items())
