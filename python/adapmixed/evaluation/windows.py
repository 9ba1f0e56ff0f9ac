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
    """Return the windows of every run and the queries in each; see :func:`evaluate`.

    Every one of several runs has its own whole blocks, as many as its queries need. Without a
    number of queries, the blocks are divided evenly.

    Args:
        tokens: the token stream.
        window: the longest input of the models in tokens; None for no limit.
        block: as in :func:`evaluate`.
        queries: as in :func:`evaluate`.
        runs: number of runs.
        stride: as in :func:`evaluate`.

    Raises:
        ValueError: as :func:`evaluate`.
    """
    check_count("runs", runs)
    block = check_count("block", block_of(window, block), 2, window)
    check_optional_count("queries", queries)
    cuts = f"blocks of {block}"
    if stride is not None:  # every scored token has at least block - stride tokens of context
        check_count("stride", stride, 1, block - 1)
        cuts += f" that slide by {stride}"
    length = stretch = len(tokens)
    if runs > 1:  # each has whole blocks
        most, wanted = length // block, "at least 1 query"
        stretch = most // runs * block
        if queries is not None:
            wanted = f"{queries} queries"
            blocks = -(-queries // (block - 1)) if stride is None else -(-(queries + 1) // block)
            stretch = blocks * block
            most = length // stretch
            most += _offered(_cut(0, length % stretch, block, stride)) >= queries
        if runs > most:
            raise ValueError(
                f"runs must be at most {max(most, 1)}, since {length} tokens offer no more runs "
                f"with {wanted} on their own {cuts}, got {runs}"
            )
    available = _offered(_cut(0, stretch, block, stride))
    if available < 1:
        raise ValueError(f"tokens must hold at least one query (2 tokens), got {length}")
    total = available if queries is None else queries
    if runs == 1 and total > available:
        raise ValueError(
            f"queries must be in [1, {available}] (the text offers no more in {cuts}), got "
            f"{queries}"
        )
    starts = range(0, runs * stretch, stretch)
    whole = [_cut(start, min(start + stretch, length), block, stride) for start in starts]
    return [_first(windows, total) for windows in whole], total


def block_of(window: int | None, block: int | None) -> int:
    """Return the tokens per block; by default 512, or the models' window if that is shorter."""
    return min(512, window or 512) if block is None else block


def _cut(start: int, stop: int, block: int, stride: int | None) -> list[Window]:
    """Return blocks whose first token is not scored, or windows that slide by `stride`."""
    found, first = list[Window](), start + 1
    for at in range(start, stop, stride or block):
        first = first if stride else at + 1
        if first >= stop:  # a last block of one token has nothing to score
            break
        found.append(Window(at, first, min(at + block, stop)))
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
