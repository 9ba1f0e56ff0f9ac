"""Check that the public model is the one that the adapters were trained on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from adapmixed.ensemble.digests import CONFIG, base_files, of_tokenizer
from adapmixed.ensemble.manifest import read_manifest
from adapmixed.ensemble.member import Adapter, adapter_digest


class Compared(NamedTuple):
    """The checks of the base against the ensemble's record that were made and passed."""

    model: bool
    tokenizer: bool


def source_of(base: Any) -> str | None:
    """Return the folder or hub name of a base, or the one a model object was loaded from."""
    if not isinstance(base, str | os.PathLike):
        base = getattr(getattr(base, "config", None), "_name_or_path", None)
    return os.fspath(base) if base else None


def found_files(source: str | None, revision: str | None) -> dict[str, str]:
    """Return the digests of a base's files (:func:`base_files`).

    The hub's cache holds only the files that were requested so far.

    Args:
        source: the result of :func:`source_of`.
        revision: the hub's commit, or None.
    """
    local = _local_folder(source, revision)
    return {} if local is None else base_files(local)


def check_files(
    source: str | None, found: Mapping[str, str], folder: Path, recorded: Mapping[str, str]
) -> Compared:
    """Compare the base's files with the ensemble's record.

    Files with other names than the recorded ones raise, because the base is loaded from them. This
    does not apply to the hub's cache, which may lack files. A base without a tokenizer passes.

    Args:
        source: the result of :func:`source_of`.
        found: the result of :func:`found_files`.
        folder: the ensemble folder, for messages.
        recorded: `Manifest.base_files`.

    Raises:
        ValueError: if the model or its tokenizer differs from the record.
    """
    for name in sorted(found.keys() & recorded.keys()):
        if found[name] != recorded[name]:
            raise ValueError(
                f"base must be the one that {folder} was trained with: {source}/{name} has another "
                f"SHA-256 ({found[name][:12]}...) than ensemble.json records "
                f"({recorded[name][:12]}...)"
            )
    whole = source is not None and Path(source).is_dir()
    here, expected = set(of_tokenizer(found)), set(of_tokenizer(recorded))
    model_here, model_expected = found.keys() - here, recorded.keys() - expected
    for what, names, record in (
        ("weights", model_here, model_expected),
        ("tokenizer", here, expected),
    ):
        if whole and names and record and names != record:
            raise ValueError(
                f"base must have the {what} that {folder} was trained with, in the same files: "
                f"ensemble.json records {', '.join(sorted(record))}, but {source} has "
                f"{', '.join(sorted(names))}"
            )
    return Compared(bool(model_here) and model_here == model_expected, here == expected)


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
                f"{name!r}, got {source!r} (if only the names differ, record base_files in "
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
        found = try_to_load_from_cache(source, CONFIG, revision=revision)
    except HFValidationError:  # a path that no longer exists
        return None
    return Path(found).parent if isinstance(found, str) else None


def member_digests(
    members: Sequence[Path | None], read: Mapping[Path, Adapter] | None = None
) -> list[str]:
    """Return the digest of each member's folder (`adapter_digest`), "missing" for None.

    What was read already is not read again.

    Raises:
        ValueError: as `adapter_digest`.
    """
    known = {} if read is None else {path: one.digest for path, one in read.items()}
    return [
        "missing" if path is None else known.get(path) or adapter_digest(path) for path in members
    ]


def fingerprint(
    base: object,
    members: Sequence[str],
    files: Mapping[str, str],
    commit: str | None = None,
) -> str:
    """Return a SHA-256 of the base and of every member's files in their order.

    A base folder counts with the digests of its files, wherever it lies. A hub name counts with its
    commit, and a model object with its name alone.

    Args:
        base: the base as given to `Ensemble.from_pretrained`.
        members: `member_digests` of all members.
        files: digests of the base's files.
        commit: the hub's commit of the base, or None.

    Returns:
        64 hexadecimal digits.
    """
    if isinstance(base, str | os.PathLike) and Path(base).is_dir():
        facts = [f"{name} {found}" for name, found in sorted(files.items())]
    elif isinstance(base, str):
        facts = [f"name {base}", f"commit {commit}"]
    else:
        facts = [f"name {_last(source_of(base) or '')}"]
    return hashlib.sha256("\n".join([*facts, *members]).encode()).hexdigest()


def recorded_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Return the fingerprint of an ensemble folder, with the base that `ensemble.json` records.

    It is that of the ensemble as loaded with a base folder of the recorded files, to which ledgers
    are bound.

    Raises:
        ValueError: as `read_manifest` and `member_digests`.
    """
    manifest, root = read_manifest(folder), Path(folder)
    paths = [None if name is None else root / name for name in manifest.members]
    return fingerprint(root, member_digests(paths), manifest.base_files)
