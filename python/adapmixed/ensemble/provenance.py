"""Whether the public model is the one that the adapters were trained on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from adapmixed.ensemble.adapters import CONFIG_FILE, WEIGHTS_FILE
from adapmixed.ensemble.manifest import Manifest, file_sha256

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = (
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "qwen.tiktoken",
)  # fmt: skip
TOKENIZER_PARTS = (TOKENIZER, *_SETTINGS, *_VOCABULARIES)
"""Files that determine how text is cut into which ids."""
# What does not: names and versions, lengths, padding, and how a chat or released text is written.
_ASIDE = frozenset(
    {
        "padding", "truncation", "name_or_path", "transformers_version", "_commit_hash",
        "special_tokens_map_file", "tokenizer_file", "chat_template", "is_local",
        "clean_up_tokenization_spaces", "model_max_length", "max_length", "stride", "padding_side",
        "truncation_side", "truncation_strategy", "pad_to_multiple_of", "model_input_names",
    }
)  # fmt: skip


class Compared(NamedTuple):
    """What of a base was compared with what the ensemble recorded, and agrees."""

    weights: bool
    tokenizer: bool


def base_sha256(folder: str | os.PathLike[str]) -> str | None:
    """What `ensemble.json` records of a base folder's weights; None where there are none.

    The SHA-256 of `model.safetensors`; of weights in several files that of the lines "<name>
    <SHA-256>" of all files that their index names, by name. Without either, the same of
    `pytorch_model.bin`.
    """
    path = Path(folder)
    for weights in (WEIGHTS, "pytorch_model.bin"):  # in the order in which they are looked for
        if (path / weights).is_file():
            return file_sha256(path / weights)
        index = path / f"{weights}.index.json"
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            names = sorted(set(content["weight_map"].values()))
            lines = "".join(f"{name} {file_sha256(path / name)}\n" for name in names)
            return hashlib.sha256(lines.encode()).hexdigest()
    return None


def tokenizer_files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """What `ensemble.json` records of a base folder's tokenizer: the digest of each of its files.

    Beside a `tokenizer.json` the vocabularies of other forms are not read, and left out. The digest
    is the SHA-256 of the bytes; of JSON that of its content in order, without settings of padding,
    lengths and names, which leave the ids alone.

    Raises:
        ValueError: a file of JSON that is none.
    """
    return tokenizer_digests(Path(folder) / name for name in TOKENIZER_PARTS)


def tokenizer_digests(paths: Iterable[Path]) -> dict[str, str]:
    """As :func:`tokenizer_files`, of those of `TOKENIZER_PARTS` that are there."""
    found = {path.name: path for path in paths if path.is_file()}
    if TOKENIZER in found:
        found = {name: path for name, path in found.items() if name not in _VOCABULARIES}
    return {name: _canonical_sha256(path) for name, path in sorted(found.items())}


def _canonical_sha256(path: Path) -> str:
    if path.suffix != ".json":
        return file_sha256(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if path.name in (TOKENIZER, *_SETTINGS) and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _ASIDE}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_of(base: Any) -> str | None:
    """Folder or hub name that a base is, or that a model object says it was loaded from."""
    if not isinstance(base, str | os.PathLike):
        base = getattr(getattr(base, "config", None), "_name_or_path", None)
    return os.fspath(base) if base else None


def check_files(source: str | None, folder: Path, manifest: Manifest | None) -> Compared:
    """Compares the base's files with what the ensemble recorded.

    Args:
        source: of :func:`source_of`.
        folder: of the ensemble, for the message.
        manifest: None where nothing was recorded.

    Raises:
        ValueError: its tokenizer or its weights are others.
    """
    local = None if manifest is None else _local_folder(source, manifest.revision)
    if manifest is None or local is None:
        return Compared(False, False)
    # The hub's cache holds what was asked for so far.
    whole = source is not None and Path(source).is_dir()
    same_tokenizer = _compare_tokenizer(local, folder, manifest, whole=whole)
    found = None if manifest.base_sha256 is None else base_sha256(local)
    if found is not None and manifest.base_sha256 is not None:
        _compare(local / WEIGHTS, found, folder, manifest.base_sha256)
    return Compared(found is not None, same_tokenizer)


def _compare_tokenizer(local: Path, folder: Path, manifest: Manifest, *, whole: bool) -> bool:
    """Whether the tokenizer was compared: its files are those that were recorded, if any were.

    Early ensembles recorded the bytes of `tokenizer.json` alone. Files under other names may cut
    text into other ids, and there is nothing to compare them with: refused, where `whole` says that
    all files are there. A base without a tokenizer is not.
    """
    path = local / TOKENIZER
    recorded, found = set(manifest.tokenizer_files), tokenizer_files(local)
    if manifest.tokenizer_sha256 is not None:
        recorded = recorded or {TOKENIZER}
        if path.is_file():
            _compare(path, file_sha256(path), folder, manifest.tokenizer_sha256)
    for name in found.keys() & manifest.tokenizer_files.keys():
        _compare(local / name, found[name], folder, manifest.tokenizer_files[name])
    other = found.keys() != recorded if manifest.tokenizer_files else TOKENIZER not in found
    if whole and found and recorded and other:
        raise ValueError(
            f"base must have the tokenizer that {folder} was trained with, in the same files: "
            f"ensemble.json records {', '.join(sorted(recorded))}, {local} has "
            f"{', '.join(sorted(found))}"
        )
    return found.keys() == manifest.tokenizer_files.keys()


def check_names(source: str | None, names: Mapping[str, str | None]) -> bool:
    """Whether the base is the hub model that each adapter names.

    Names agree if their last parts do ("openai-community/gpt2", "/models/gpt2"); a folder's name
    says nothing of its weights, so that agreeing shows nothing.

    Args:
        source: of :func:`source_of`.
        names: `base_model_name_or_path` of each adapter; empty and None are unknown.

    Raises:
        ValueError: names that disagree, with both.
    """
    check_one_base(names)
    for adapter, name in names.items():
        if source and name and _last(name) != _last(source):
            raise ValueError(
                f"base must be the one that the adapters were trained on: {adapter} names "
                f"{name!r}, got {source!r} (base_sha256 in ensemble.json tells where only the "
                "names differ)"
            )
    hub = source is not None and not os.path.isabs(source) and not Path(source).exists()
    return hub and all(name == source for name in names.values())


def check_one_base(names: Mapping[str, str | None]) -> None:
    """Refuses adapters that name different bases; see :func:`check_names`."""
    named = [(adapter, name) for adapter, name in names.items() if name]
    for adapter, name in named[1:]:
        if _last(name) != _last(named[0][1]):
            raise ValueError(
                f"adapters must share one base: {named[0][0]} names {named[0][1]!r}, {adapter} "
                f"{name!r}"
            )


def _last(name: str) -> str:
    return PurePath(name).name.lower()


def _local_folder(source: str | None, revision: str | None) -> Path | None:
    """Where a base's files lie: the folder itself, or the hub's cache, which loading has filled."""
    if source is None:
        return None
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    except HFValidationError:  # a path that no longer exists
        return None
    return Path(found).parent if isinstance(found, str) else None


def _compare(path: Path, found: str, folder: Path, expected: str) -> None:
    if found != expected:
        raise ValueError(
            f"base must be the one that {folder} was trained with: {path} has another SHA-256, "
            f"{found[:12]}..., than ensemble.json records ({expected[:12]}...)"
        )


def fingerprint(base: object, members: Sequence[Path | None], recorded: str | None) -> str:
    """SHA-256 of the base and of every member's files, in their order: which slot is whose.

    Of a base folder the digests of its weights and of its tokenizer's files count, and its name; of
    a hub name or a model object the name alone.

    Args:
        base: as it was given to be loaded.
        members: peft folders; None for missing members.
        recorded: `base_sha256` of the manifest, with which the folder was compared; None: read.
    """
    digest = hashlib.sha256(_last(source_of(base) or "").encode())
    if isinstance(base, str | os.PathLike) and Path(base).is_dir():
        facts = [f"base {recorded or base_sha256(base)}"]
        facts += [f"{name} {found}" for name, found in sorted(tokenizer_files(base).items())]
        digest.update("".join(f"\n{fact}" for fact in facts).encode())
    for path in members:
        if path is None:
            digest.update(b"\nmissing")
            continue
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            digest.update(f"\n{file} {file_sha256(path / file)}".encode())
    return digest.hexdigest()
