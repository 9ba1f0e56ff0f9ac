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

    The work of a member is measured by its steps: an empty shard has none. Values that depend on
    the text of a shard, such as its validation loss, are only logged and never in a line.
    """

    def __init__(self, steps: Mapping[int, int], say: Callable[[str], None] | None = None) -> None:
        """Begin with no work done.

        Args:
            steps: expected steps of each member to be trained.
            say: called with each line; None for standard error.
        """
        self._steps = dict(steps)
        self._fractions = dict.fromkeys(steps, 0.0)
        self._done = 0.0  # steps
        self._say = say
        self._begun: tuple[float, float] | None = None  # time and steps at the first step
        self._bar = tqdm(
            total=sum(self._steps.values()),
            disable=None,
            leave=False,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed}, {remaining} left",
        )

    def update(self, shard: int, fraction: float) -> None:
        """Record the fraction done of a member's training."""
        self._done += self._steps[shard] * (fraction - self._fractions[shard])
        self._fractions[shard] = fraction
        if self._begun is None and self._done:
            self._begun = time.monotonic(), self._done
        self._bar.n = min(self._done, self._bar.total)
        self._bar.refresh()

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
        self.say(f"{name}: finished ({count} of {len(self._steps)}{self.time_left()})")
        self._bar.clear()
        _LOG.info("%s: %d documents, %d tokens, %s", name, documents, record["tokens"], loss)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._say is not None:
            self._say(line)
        else:
            self._bar.write(line, file=sys.stderr)

    def time_left(self) -> str:
        """Return the time left at the speed so far, as a phrase; "" before there is a speed."""
        done, total = self._done, self._bar.total
        began, before = self._begun or (0.0, done)
        if before == done < total:
            return ""
        seconds = (time.monotonic() - began) * max(total - done, 0.0) / max(done - before, 1.0)
        if seconds < 90:
            return f", {seconds:.0f} s left"
        return (
            f", {seconds / 60:.0f} min left" if seconds < 5400 else f", {seconds / 3600:.1f} h left"
        )

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
