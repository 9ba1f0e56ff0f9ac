"""Say how a text begins, which ids stand for tokens, and check the tokenizers of adapters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.ensemble.digests import ADDED_TOKENS, TOKENIZER_FILES, has_tokenizer


def beginning_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens with which a tokenizer begins every text, mostly BOS or none.

    A model that was trained so answers badly without them. So training blocks, scored windows and
    prompts begin with them.

    Args:
        tokenizer: a tokenizer, or None.
    """
    if tokenizer is None:
        return ()
    plain = _plain(tokenizer, "a")
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
    ids = begun(beginning_of(tokenizer), _plain(tokenizer, text))
    for token in () if ids else (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    return ids


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


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


def check_tokenizers(folders: Sequence[Path], tokenizer: Any, base: str, vocab_size: int) -> None:
    """Check that adapter folders hold no tokenizer other than the public model's.

    Trainers often save a copy of the tokenizer with the adapter. If they added tokens to it, the
    adapter was trained on ids with another meaning. Copies pass that cut text into the same ids. So
    they may have other tokens without an embedding in the base, and a pad token of their own.

    Args:
        folders: peft folders.
        tokenizer: the base's tokenizer; None to check nothing.
        base: the base's name in messages.
        vocab_size: V of the base.

    Raises:
        ValueError: if a tokenizer differs; the message names the folder, the base and the
            difference.
    """
    seen: set[str] = set()
    for folder in folders if tokenizer is not None else ():
        found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        digest = hashlib.sha256()
        for file in found:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        if not found or digest.hexdigest() in seen:
            continue
        seen.add(digest.hexdigest())
        difference = _difference(folder, tokenizer, vocab_size)
        if difference is not None:
            raise ValueError(
                f"adapters must use the public model's tokenizer: the one in {folder} differs from "
                f"that of {base}, {difference}"
            )


def _difference(folder: Path, tokenizer: Any, vocab_size: int) -> str | None:
    loaded = _load(folder) if has_tokenizer(folder) else None
    own = _added_tokens(folder / ADDED_TOKENS) if loaded is None else loaded.get_vocab()
    vocabulary = tokenizer.get_vocab().items()
    expected = {token: index for token, index in vocabulary if index < vocab_size}
    aside = {None if loaded is None else loaded.pad_token} - expected.keys()  # it cuts no text
    own = {
        token: index for token, index in own.items() if index < vocab_size and token not in aside
    }
    for token, index in sorted(own.items(), key=lambda item: item[1]):
        if expected.get(token) != index:
            return f"token {token!r} has id {index} there and {expected.get(token)} in the base"
    if loaded is not None and len(own) < len(expected):
        return f"it has {len(own)} tokens, the base {len(expected)}"
    if loaded is not None and _rules(loaded, expected) != _rules(tokenizer, expected):
        return "the tokens are the same but other rules cut text into them"
    return None


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # damaged files raise many types of exception
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error


def _added_tokens(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(tokens, dict) or not all(type(index) is int for index in tokens.values()):
        raise ValueError(f"{path} must map tokens to ids")
    return tokens


def _rules(tokenizer: Any, known: Mapping[str, int]) -> Any:
    """Return the rules that cut text into `known` tokens, without padding and truncation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__
    content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] in known]
    return content
