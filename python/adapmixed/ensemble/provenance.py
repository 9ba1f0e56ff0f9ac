"""Check that the public model is the one that the adapters were trained on."""

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
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_ADDED_TOKENS = "added_tokens.json"
_VOCABULARIES = (
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "qwen.tiktoken", "tekken.json",
)  # fmt: skip
TOKENIZER_PARTS = (TOKENIZER, *_SETTINGS, _ADDED_TOKENS, *_VOCABULARIES)
"""Files that determine which token ids a text becomes."""
# Settings that leave the ids alone: names, versions, lengths, padding, chat and output formats.
_ASIDE = frozenset(
    {
        "padding", "truncation", "name_or_path", "transformers_version", "_commit_hash",
        "special_tokens_map_file", "tokenizer_file", "chat_template", "is_local",
        "local_files_only",
        "clean_up_tokenization_spaces", "model_max_length", "max_length", "stride", "padding_side",
        "truncation_side", "truncation_strategy", "pad_to_multiple_of", "model_input_names",
    }
)  # fmt: skip


class Compared(NamedTuple):
    """The checks of the base against the ensemble's record that were made and passed."""

    weights: bool
    tokenizer: bool


def base_sha256(folder: str | os.PathLike[str]) -> str | None:
    """Return the digest of a base folder's weights, as `ensemble.json` records it, or None.

    It is the SHA-256 of `model.safetensors`. If the weights lie in several files, it is the
    SHA-256 of the lines "<name> <SHA-256>" of all files that their index names, sorted by name.
    Without safetensors files the same rule applies to `pytorch_model.bin`.
    """
    path = Path(folder)
    for weights in (WEIGHTS, "pytorch_model.bin"):  # transformers' order
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
    """Return the digest of each tokenizer file of a base folder, as `ensemble.json` records it.

    If there is a `tokenizer.json`, vocabularies in other formats are left out, because they are not
    read. A digest is the SHA-256 of the file's bytes. For JSON it is the SHA-256 of the sorted
    content without settings that leave the ids alone, such as padding, lengths and names.

    Raises:
        ValueError: if a JSON file cannot be parsed.
    """
    return tokenizer_digests(Path(folder) / name for name in TOKENIZER_PARTS)


def tokenizer_digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return the digests that :func:`tokenizer_files` returns, for the tokenizer files given."""
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
    # The keys of the other files are tokens.
    if path.name in (TOKENIZER, *_SETTINGS) and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _ASIDE}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_of(base: Any) -> str | None:
    """Return the folder or hub name of a base, or the one a model object was loaded from."""
    if not isinstance(base, str | os.PathLike):
        base = getattr(getattr(base, "config", None), "_name_or_path", None)
    return os.fspath(base) if base else None


def check_files(source: str | None, folder: Path, manifest: Manifest | None) -> Compared:
    """Compare the base's files with the ensemble's record.

    Args:
        source: the result of :func:`source_of`.
        folder: the ensemble folder, for messages.
        manifest: the record, or None if there is none.

    Raises:
        ValueError: if the base's tokenizer or weights differ from the record.
    """
    local = None if manifest is None else _local_folder(source, manifest.revision)
    if manifest is None or local is None:
        return Compared(False, False)
    # The hub's cache holds only the files that were requested so far.
    whole = source is not None and Path(source).is_dir()
    found = None if manifest.base_sha256 is None else base_sha256(local)
    if found is not None and manifest.base_sha256 is not None:
        _compare(local / WEIGHTS, found, folder, manifest.base_sha256)
    same_tokenizer = _compare_tokenizer(local, folder, manifest, whole=whole)
    return Compared(found is not None, same_tokenizer)


def _compare_tokenizer(local: Path, folder: Path, manifest: Manifest, *, whole: bool) -> bool:
    """Return whether the tokenizer was compared with the record and agrees.

    A base without a tokenizer passes.

    Args:
        local: the base's folder.
        folder: the ensemble folder, for messages.
        manifest: the record.
        whole: whether `local` holds all files of the base. Then files with other names than the
            recorded ones raise, because they may cut text into other ids.

    Raises:
        ValueError: if the tokenizer differs from the record.
    """
    recorded, found = manifest.tokenizer_files, tokenizer_files(local)
    for name in found.keys() & recorded.keys():
        _compare(local / name, found[name], folder, recorded[name])
    same = found.keys() == recorded.keys()
    if whole and found and recorded and not same:
        raise ValueError(
            f"base must have the tokenizer that {folder} was trained with, in the same files: "
            f"ensemble.json records {', '.join(sorted(recorded))}, but {local} has "
            f"{', '.join(sorted(found))}"
        )
    return same


def is_hub_name(source: str | None) -> bool:
    """Return whether a source names a model of the hub, not a local path."""
    return source is not None and not os.path.isabs(source) and not Path(source).exists()


def check_names(source: str | None, names: Mapping[str, str | None]) -> None:
    """Raise if an adapter names another base.

    Names agree if their last parts do, for instance "openai-community/gpt2" and "/models/gpt2".
    Names that agree show nothing of the weights.

    Args:
        source: the result of :func:`source_of`.
        names: `base_model_name_or_path` of each adapter; empty or None if unknown.

    Raises:
        ValueError: if an adapter names another base.
    """
    check_one_base(names)
    for adapter, name in names.items():
        if source and name and _last(name) != _last(source):
            raise ValueError(
                f"base must be the one that the adapters were trained on: {adapter} names "
                f"{name!r}, got {source!r} (if only the names differ, record base_sha256 in "
                "ensemble.json)"
            )


def check_one_base(names: Mapping[str, str | None]) -> None:
    """Raise ValueError if adapters name different bases; see :func:`check_names`."""
    named = [(adapter, name) for adapter, name in names.items() if name]
    for adapter, name in named[1:]:
        if _last(name) != _last(named[0][1]):
            raise ValueError(
                f"adapters must share one base: {named[0][0]} names {named[0][1]!r}, but {adapter} "
                f"{name!r}"
            )


def _last(name: str) -> str:
    return PurePath(name).name.lower()


def _local_folder(source: str | None, revision: str | None) -> Path | None:
    """Return the folder with a base's files, possibly in the hub's cache, or None."""
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
            f"base must be the one that {folder} was trained with: {path} has another SHA-256 "
            f"({found[:12]}...) than ensemble.json records ({expected[:12]}...)"
        )


def fingerprint(base: object, members: Sequence[Path | None], recorded: str | None) -> str:
    """Return a SHA-256 of the base and of every member's files in their order.

    A base folder counts with the digests of its weights and tokenizer files, wherever it lies. A
    hub name or a model object counts with its name alone.

    Args:
        base: the base as given to `Ensemble.from_pretrained`.
        members: peft folders, None for missing members.
        recorded: `base_sha256` of the manifest, already compared with the folder; None to compute
            it.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(base, str | os.PathLike) and Path(base).is_dir():
        facts = [f"base {recorded or base_sha256(base)}"]
        facts += [f"{name} {found}" for name, found in sorted(tokenizer_files(base).items())]
    else:
        facts = [f"name {_last(source_of(base) or '')}"]
    digest = hashlib.sha256("\n".join(facts).encode())
    for path in members:
        if path is None:
            digest.update(b"\nmissing")
            continue
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            digest.update(f"\n{file} {file_sha256(path / file)}".encode())
    return digest.hexdigest()
