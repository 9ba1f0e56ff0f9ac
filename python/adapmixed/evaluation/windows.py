"""Cut a token stream into windows, of which the models read all and score a part."""

from collections.abc import Sequence
from dataclasses import dataclass

from adapmixed.limits import check_count, check_optional_count


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the stream that the models read at once; each scored token is one query.

    Attributes:
        start: index of the first token read.
        first: index of the first token scored, > start; the tokens before it are context.
        stop: index after the last token scored; the last token is scored but not read.
    """

    start: int
    first: int
    stop: int

    @property
    def queries(self) -> int:
        """The number of scored tokens."""
        return self.stop - self.first


def plan_runs(
    tokens: Sequence[int],
    window: int | None,
    block: int | None,
    queries: int | None,
    *,
    runs: int = 1,
    stride: int | None = None,
) -> tuple[list[list[Window]], int]:
    """Return the windows of every run and the queries in each; see :func:`evaluate_runs`.

    Every one of several runs has its own whole blocks, as many as its queries need. Without a
    number of queries, the blocks are divided evenly.

    Args:
        tokens: the token stream.
        window: the longest input of the models in tokens; None for no limit.
        block: as in :func:`evaluate`.
        queries: as in :func:`evaluate_runs`.
        runs: number of runs.
        stride: as in :func:`evaluate`.

    Raises:
        ValueError: as :func:`evaluate_runs`.
    """
    check_count("runs", runs)
    block, length = _check_block(window, block, queries, stride), len(tokens)
    stretch = length if runs == 1 else _stretch(length, block, queries, runs, stride)
    available = _offered(_cut(stretch, block, stride))
    if available < 1:
        raise ValueError(f"tokens must hold at least one query (2 tokens), got {length}")
    total = available if queries is None else queries
    if runs == 1 and total > available:
        raise ValueError(
            f"queries must be in [1, {available}] (the text offers no more in "
            f"{_cuts(block, stride)}), got {queries}"
        )
    found = []
    for start in range(0, runs * stretch, stretch):
        windows = _first(_cut(min(stretch, length - start), block, stride), total)
        found.append([Window(start + w.start, start + w.first, start + w.stop) for w in windows])
    return found, total


def _stretch(length: int, block: int, queries: int | None, runs: int, stride: int | None) -> int:
    """Return the tokens of each of several runs, in whole blocks; ValueError if they do not fit."""
    if queries is None:
        most = length // block
        stretch = most // runs * block
    else:
        blocks = -(-queries // (block - 1)) if stride is None else -(-(queries + 1) // block)
        stretch = blocks * block
        most = length // stretch
        most += _offered(_cut(length - most * stretch, block, stride)) >= queries
    if runs > most:
        wanted = "at least 1 query" if queries is None else f"{queries} queries"
        if most == 0:
            raise ValueError(
                f"the text must offer {wanted} on their own {_cuts(block, stride)}, got only "
                f"{length} tokens"
            )
        raise ValueError(
            f"runs must be at most {most}, since {length} tokens offer no more runs with "
            f"{wanted} on their own {_cuts(block, stride)}, got {runs}"
        )
    return stretch


def block_of(window: int | None, block: int | None) -> int:
    """Return the tokens per block; by default 512, or the models' window if that is shorter."""
    return min(512, window or 512) if block is None else block


def _check_block(
    window: int | None, block: int | None, queries: int | None, stride: int | None
) -> int:
    block = check_count("block", block_of(window, block), 2, window)
    check_optional_count("queries", queries)
    if stride is not None:  # every scored token has at least block - stride tokens of context
        check_count("stride", stride, 1, block - 1)
    return block


def _cut(length: int, block: int, stride: int | None) -> list[Window]:
    """Return blocks whose first token is not scored, or windows that slide by `stride`."""
    if stride is None:
        # A last block of one token has nothing to score.
        return [
            Window(start, start + 1, min(start + block, length))
            for start in range(0, length - 1, block)
        ]
    found, first = [], 1
    for start in range(0, length, stride):
        if first >= length:
            break
        found.append(Window(start, first, min(start + block, length)))
        first = found[-1].stop
    return found


def _offered(windows: list[Window]) -> int:
    return sum(one.queries for one in windows)


def _first(windows: list[Window], queries: int) -> list[Window]:
    """Return the first windows that hold this number of queries; the last one is shortened."""
    found = []
    for one in windows:
        if queries < 1:
            break
        found.append(Window(one.start, one.first, min(one.stop, one.first + queries)))
        queries -= found[-1].queries
    return found


def _cuts(block: int, stride: int | None) -> str:
    return f"blocks of {block}" + ("" if stride is None else f" that slide by {stride}")
