"""Whether the public model is the one that the adapters were trained on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from adapmixed.models.adapters import CONFIG_FILE, WEIGHTS_FILE
from adapmixed.models.manifest import Manifest, file_sha256

WEIGHTS = "model.safetensors"


def base_sha256(folder: str | os.PathLike[str]) -> str | None:
    """What `ensemble.json` records of a base folder's weights; None where it has no safetensors.

    The SHA-256 of `model.safetensors`; of weights in several files that of the lines "<name>
    <SHA-256>" of all files that their index names, by name.
    """
    path = Path(folder)
    if (path / WEIGHTS).is_file():
        return file_sha256(path / WEIGHTS)
    index = path / f"{WEIGHTS}.index.json"
    if not index.is_file():
        return None
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    lines = "".join(f"{name} {file_sha256(path / name)}\n" for name in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def source_of(base: Any) -> str | None:
    """Folder or hub name that a base is, or that a model object says it was loaded from."""
    if not isinstance(base, str | os.PathLike):
        base = getattr(getattr(base, "config", None), "_name_or_path", None)
    return os.fspath(base) if base else None


def check_files(source: str | None, folder: Path, manifest: Manifest | None) -> bool:
    """Whether the base's weights were compared with what the ensemble recorded, and agree.

    Args:
        source: of :func:`source_of`.
        folder: of the ensemble, for the message.
        manifest: None where nothing was recorded.

    Raises:
        ValueError: its tokenizer or its weights are others.
    """
    local = None if manifest is None else _local_folder(source, manifest.revision)
    if manifest is None or local is None:
        return False
    tokenizer = local / "tokenizer.json"
    if manifest.tokenizer_sha256 is not None and tokenizer.is_file():
        _compare(tokenizer, file_sha256(tokenizer), folder, manifest.tokenizer_sha256)
    if manifest.base_sha256 is None:
        return False
    found = base_sha256(local)
    if found is not None:
        _compare(local / WEIGHTS, found, folder, manifest.base_sha256)
    return found is not None


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


def fingerprint(source: str | None, members: Sequence[Path]) -> str:
    """SHA-256 of the base's name and of every member's files, in their order: which slot is whose.

    Args:
        source: of :func:`source_of`; its last part counts.
        members: peft folders.
    """
    digest = hashlib.sha256(_last(source or "").encode())
    for path in members:
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            digest.update(f"\n{file} {file_sha256(path / file)}".encode())
    return digest.hexdigest()
