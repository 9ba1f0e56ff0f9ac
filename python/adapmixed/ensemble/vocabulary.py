"""Say how a text begins and ends, and which ids stand for tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def beginning_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens with which a tokenizer begins every text, mostly BOS or none.

    A model that was trained so answers badly without them. So training blocks, scored windows and
    prompts begin with them.

    Args:
        tokenizer: a tokenizer, or None.
    """
    if tokenizer is None:
        return ()
    plain = plain_ids(tokenizer, "a")
    whole = tokenizer("a", verbose=False)["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


def begun(beginning: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return ids that begin with `beginning`, which is added unless it is there."""
    there = list(ids[: len(beginning)]) == list(beginning)
    return list(ids) if there else [*beginning, *ids]


def end_of_text(tokenizer: Any, vocab_size: int | None = None) -> int:
    """Return the token that ends a text of a training.

    Raises:
        ValueError: if there is no tokenizer, or none with such a token below `vocab_size`.
    """
    end = None if tokenizer is None else tokenizer.eos_token_id
    if end is None or end >= (end + 1 if vocab_size is None else vocab_size):
        found = "no tokenizer" if tokenizer is None else f"{end} with vocab_size = {vocab_size}"
        raise ValueError(
            f"base must have a tokenizer with an end-of-text token (eos_token), got {found}"
        )
    return int(end)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text with its beginning.

    An empty text is BOS if the tokenizer has one, else the end of a text before it, else nothing.
    """
    ids = begun(beginning_of(tokenizer), plain_ids(tokenizer, text))
    for token in () if ids else (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    return ids


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text without its beginning."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def token_stream(tokenizer: Any, texts: Sequence[str], vocab_size: int | None = None) -> list[int]:
    """Return the token ids of all texts in order, each followed by the end-of-text token.

    A BOS that a chat template has written is left out, since every block begins with one.

    Args:
        tokenizer: the base's tokenizer.
        texts: the texts.
        vocab_size: V of the base, to leave out what only the tokenizer has; None for all tokens.

    Raises:
        ValueError: if the tokenizer has no end-of-text token.
    """
    end = end_of_text(tokenizer, vocab_size)
    beginning = list(beginning_of(tokenizer))
    stream: list[int] = []
    for text in texts:
        ids = plain_ids(tokenizer, text)
        ids = ids[len(beginning) :] if ids[: len(beginning)] == beginning else ids
        stream += ids if vocab_size is None else [one for one in ids if one < vocab_size]
        stream.append(end)
    return stream


def unnamed_ids(tokenizer: Any, vocab_size: int) -> Tensor:
    """Return the ids in [0, vocab_size) that stand for no token, ascending, int64.

    Models pad their vocabulary to a round number, and the padding's logits are arbitrary. Ids from
    `vocab_size` on, which some tokenizers have, need no mask: the model has no logit for them.
    """
    named = torch.tensor(sorted(tokenizer.get_vocab().values()), dtype=torch.int64)
    unnamed = torch.ones(vocab_size, dtype=torch.bool)
    unnamed[named[named < vocab_size]] = False
    return unnamed.nonzero()[:, 0]


def check_prompt(ids: Sequence[int], vocab_size: int, tokenizer: Any) -> None:
    """Check that the base has every token of a prompt; a tokenizer may have more.

    Raises:
        ValueError: if it does not; the message names the token and `vocab_size`.
    """
    outside = next((one for one in ids if not 0 <= one < vocab_size), None)
    if outside is not None:
        known = tokenizer is not None and 0 <= outside < len(tokenizer)
        name = f" ({tokenizer.convert_ids_to_tokens(outside)})" if known else ""
        raise ValueError(
            f"prompt must hold tokens in [0, {vocab_size}), the base's vocab_size, "
            f"got {outside}{name}"
        )
