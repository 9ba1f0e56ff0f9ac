"""How a token stream is cut into what the models read and what of it is scored."""

from collections.abc import Sequence


def plan(
    tokens: Sequence[int], window: int | None, block: int | None, queries: int | None
) -> tuple[list[list[int]], int]:
    """The blocks of a token stream and the number of queries in them; see :func:`evaluate`."""
    for argument, value in (("block", block), ("queries", queries)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{argument} must be an integer, got {value!r}")
    block = min(512, window or 512) if block is None else block
    if block < 2 or (window is not None and block > window):
        raise ValueError(f"block must be in [2, {window or 'any'}], got {block}")
    # A last block of one token has nothing to score.
    blocks = [list(tokens[i : i + block]) for i in range(0, len(tokens), block)]
    available = sum(len(b) - 1 for b in blocks)
    if available < 1:
        raise ValueError(f"tokens must hold at least one query (2 tokens), got {len(tokens)}")
    total = available if queries is None else queries
    if total < 1 or total > available:
        raise ValueError(
            f"queries must be in [1, {available}] (what the text offers in blocks of {block}), "
            f"got {queries}"
        )
    return blocks, total
