"""Files of text, texts and their tokens: how they begin, what a token adds, and where they end."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapmixed.limits import check_type

_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class Document:
    """One text and its name.

    Attributes:
        identifier: the name, which assigns the document to a shard. It should depend neither on the
            text nor on other documents; then no edit moves another document.
        text: the content.
    """

    identifier: str
    text: str


KINDS = {
    ".txt": "text", ".tokens": "text", ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json",
    ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip
# As plain text, all rows of a table would be one document, although they belong to many people.
_REFUSED = set(
    ".tsv .tab .xls .xlsx .xlsm .xlsb .ods .arrow .feather .json .gz .bz2 .xz .zst .lz4 .lzma .zip "
    ".7z .rar .tar .tgz .tbz2 .txz".split()
)

# The words by which names of files and folders tell the split, as in the library `datasets`.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}


def kind_of(file: Path) -> str | None:
    """Return the file's kind, a value of `KINDS`, or None for any other suffix."""
    return KINDS.get(file.suffix.lower())


def check_kind(name: str, file: Path, *, rows: bool = True) -> None:
    """Raise ValueError for a file of a kind that is known not to be read.

    Args:
        name: the argument's name, for the message.
        file: the file; an unknown suffix passes as text.
        rows: whether files of rows are read, too.
    """
    if file.suffix.lower() in _REFUSED or (not rows and kind_of(file) not in (None, "text")):
        tables = " or rows of CSV, JSON lines (*.jsonl) or Parquet" if rows else ""
        raise ValueError(f"{name} must hold unpacked text{tables}, got {file}")


def files_below(name: str, folder: Path, split: str | None) -> dict[str, list[Path]]:
    """Return the files below a folder by kind, sorted, without files of other suffixes.

    Args:
        name: the argument's name, for the message.
        folder: the folder.
        split: the only split whose files are returned, or "all"; None if there must be one at most.

    Raises:
        ValueError: if there are tables or archives, which must not be left out silently, or a file
            has two names there: its text would be two documents, which may be in two shards.
        ValueError: if there are several splits, and `split` names none of them.
    """
    files: dict[str, list[Path]] = {}
    names: dict[tuple[int, int], Path] = {}
    splits: set[str] = set()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kind, parts = kind_of(file), _splits_of(file.relative_to(folder))
        if kind not in (None, "text"):
            parts = parts or {"unnamed"}  # rows next to test.jsonl are hardly meant to join it
        if kind is not None:
            splits |= parts
        if split not in (None, "all", *parts):
            continue
        if kind is not None:
            status = file.stat()
            other = names.setdefault((status.st_dev, status.st_ino), file)
            if other is not file:
                raise ValueError(f"{name} must hold each file once, but {other} and {file} are one")
            files.setdefault(kind, []).append(file)
        elif file.suffix.lower() != ".json":  # data sets describe themselves in such files
            check_kind(name, file)
    listed = ", ".join(sorted(splits))
    if split is None and len(splits) > 1:
        raise ValueError(
            f"{name} must hold one split, but {folder} holds {listed}: name a file or folder in "
            "it, or for a corpus the split (--split), which may be all"
        )
    if split not in (None, "all", *splits):
        raise ValueError(f"split must be all or one of {listed or 'none'} in {folder}, got {split}")
    return files


def _splits_of(path: Path) -> set[str]:
    """Return the splits that a file's folders name; else those that its own name does."""
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", part).lower() for part in path.parts]
    *folders, name = [set(re.split(r"[\W\d_]+", part)) for part in parts]
    for words in (set().union(*folders), name):
        if splits := {split for split, spellings in _SPLITS.items() if spellings & words}:
            return splits
    return set()


def read_text(path: str | os.PathLike[str], *, name: str = "path") -> list[Document]:
    """Read a UTF-8 text file as one document, or every `*.txt` file below a folder.

    Args:
        path: the file or the folder.
        name: how errors call `path`, such as the option of a command.

    Returns:
        documents sorted by identifier, without files that hold no text. The identifier is the path
        relative to `path`, or the file's own name for a single file.

    Raises:
        ValueError: if `path` does not exist, is not UTF-8, holds no text, or holds rows
            (`*.jsonl`, `*.tsv` ...), or if a folder holds several splits.
    """
    root = Path(path)
    if root.is_file():
        check_kind(name, root, rows=False)
        files = [root]
    else:
        files = files_below(name, root, None).get("text", [])
    documents = list(file_documents(root, files))
    if not documents:
        raise ValueError(f"{name} must name a file of text or a folder of *.txt files, got {root}")
    return documents


def file_documents(root: Path, files: Iterable[Path]) -> Iterator[Document]:
    """Yield each file as one document, named by its path below `root`, without blank files.

    Raises:
        ValueError: if a file is not UTF-8.
    """
    for file in files:
        text = "".join(text_lines(file))
        if text.strip():
            yield Document(relative_name(root, file), text)


def text_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file without a byte-order mark; ValueError if it is not UTF-8."""
    with open(file, encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines):
                if number < 2 and "\0" in line:  # UTF-16 without a mark
                    raise UnicodeError("bytes of 0")
                yield line
        except UnicodeError as error:
            raise ValueError(
                f"{file} must be UTF-8 text (iconv -f UTF-16 -t UTF-8 converts UTF-16), got {error}"
            ) from error


def relative_name(root: Path, file: Path) -> str:
    """Return the file's path below `root`, or its own name if it is `root`."""
    return file.name if file == root else file.relative_to(root).as_posix()


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
        stream += ids if vocab_size is None else [token for token in ids if token < vocab_size]
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
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        known = tokenizer is not None and 0 <= outside < len(tokenizer)
        name = f" ({tokenizer.convert_ids_to_tokens(outside)})" if known else ""
        raise ValueError(
            f"prompt must hold tokens in [0, {vocab_size}), the base's vocab_size, "
            f"got {outside}{name}"
        )


class Continuation:
    """A continuation that is decoded token by token.

    Text is held back while it ends in "\ufffd": a character may be spelled in bytes, a token each.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._shown = len(prompt)  # tokens that are shown; those behind end inside a character
        while self._shown > max(len(prompt) - 4, 0) and self._ends_inside(self._shown):
            self._shown -= 1
        self._inside = self._shown < len(prompt)  # signs of lost bytes are the prompt's, not shown

    def add(self, token: int) -> str:
        """Return the text that this token adds; what ends inside a character is held back."""
        self._ids.append(token)
        return "" if self._ends_inside() else self.rest()

    def rest(self) -> str:
        """Return the text that was held back for an incomplete character."""
        shown, text = self._decoded(self._shown), self._decoded()
        same = len(commonprefix([shown, text]))
        piece = text[same:].lstrip(_UNKNOWN if self._inside else "")
        if same < len(shown) and piece.startswith(_UNKNOWN):  # bytes that were shown, too
            piece = _UNKNOWN + piece.lstrip(_UNKNOWN)
        if piece:
            # So that a token's cost does not grow with the text. The last piece stays, because some
            # tokenizers drop the space of the first token.
            self._ids, self._inside = self._ids[self._shown :], False
        self._shown = len(self._ids)
        return piece

    def _ends_inside(self, end: int | None = None) -> bool:
        return self._decoded(end).endswith(_UNKNOWN)

    def _decoded(self, end: int | None = None) -> str:
        return str(
            self._tokenizer.decode(
                self._ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class AnswerText:
    """Decodes an answer token by token to its end, without text that may begin a stop string.

    Args:
        tokenizer: the public model's tokenizer.
        prompt: token ids of the prompt.
        stop: strings that end the answer. The text ends before the first of them.
        ends: tokens that end the answer, and add no text.
        max_tokens: number of tokens that end it in any case.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str],
        ends: Collection[int],
        max_tokens: int,
    ) -> None:
        self._decoded = Continuation(tokenizer, prompt)
        self._stop, self._ends, self._left = stop, ends, max_tokens
        self._held = ""

    def add(self, token: int) -> tuple[str, str | None]:
        """Return the text that is certain now, and "stop" or "length" if the answer has ended."""
        self._left -= 1
        finish = "stop" if token in self._ends else None if self._left else "length"
        self._held += "" if finish == "stop" else self._decoded.add(token)
        self._held += self._decoded.rest() if finish else ""
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            return self._held[: min(places)], "stop"
        cut = len(self._held) - (0 if finish else self._begun())
        text, self._held = self._held[:cut], self._held[cut:]
        return text, finish

    def _begun(self) -> int:
        """Return the length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Return prompts as one batch, padded on the left.

    Returns:
        (b, t) int64 tokens, and the (b, t) mask, or None if no row is padded.

    Raises:
        ValueError: there is no prompt, or a prompt has no tokens.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts[{index}] must hold at least one token, got none")
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return ids, None if bool(mask.all()) else mask


def stop_tokens(tokenizer: Any, strings: Sequence[str], vocab_size: int) -> frozenset[int]:
    """Return the stop strings that are special tokens, such as "<|im_end|>", as tokens.

    Decoding hides these tokens, so no text contains their names.

    Raises:
        ValueError: the strings are not a list of strings, one is empty, or one holds the name of a
            special token and more.
    """
    several = isinstance(strings, Sequence) and not isinstance(strings, str | bytes)
    if not several or not all(isinstance(s, str) and s for s in strings):
        raise ValueError(
            f"stop_strings must be a list of strings that are not empty, got {strings!r}"
        )
    tokens = set()
    for string in strings:
        for token in tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]:
            name = tokenizer.decode([token], skip_special_tokens=False)
            hidden = name in string and not tokenizer.decode([token], skip_special_tokens=True)
            if not name or not hidden or token >= vocab_size:
                continue
            if name != string:
                raise ValueError(
                    f"stop_strings must have the special token {name!r} as a string of its own, "
                    f"because it is hidden in the text, got {string!r}"
                )
            tokens.add(token)
    return frozenset(tokens)


def texts_of(prompts: object) -> list[str]:
    """Return one or several prompts as a list.

    Raises:
        ValueError: the prompts are neither a string nor a list of strings, or one is not Unicode.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Collection) or isinstance(prompts, bytes | dict | set | frozenset):
        raise ValueError(f"prompts must be a string or a list of strings, got {prompts!r}")
    for index, prompt in enumerate(prompts):
        check_text(f"prompts[{index}]", prompt)
    return list(prompts)


def messages_of(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation as a list of messages.

    Raises:
        ValueError: there is no message, or one is not {"role": string, "content": string}.
    """
    several = isinstance(messages, Collection) and not isinstance(messages, str | bytes | dict)
    if not several or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"messages must be a list of {{'role', 'content'}}, got {messages!r}")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            check_text(f"messages[{index}][{key!r}]", message.get(key))
    return [dict(message) for message in messages]


def check_text(name: str, text: object) -> str:
    """Return a string that UTF-8 can express; raise ValueError for anything else."""
    check_type(name, text, str, "a string")
    assert isinstance(text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # from bytes that are no UTF-8, for instance
        raise ValueError(
            f"{name} must hold Unicode characters, got half of a surrogate pair at {error.start}"
        ) from None
    return text


def templated(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Return the prompt that a tokenizer's chat template makes of a conversation.

    Args:
        tokenizer: has a chat template.
        messages: list of {"role": ..., "content": ...}, of which the last is answered.

    Raises:
        ValueError: the template rejects these messages.
    """
    from jinja2 import TemplateError

    try:
        return str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )
    # The template's `raise_exception`, or a fault in it: it may not expect these messages.
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"messages must fit the base's chat template, which rejects them: {error}"
        ) from error
