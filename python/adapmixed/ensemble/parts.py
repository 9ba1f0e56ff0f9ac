"""Read all members and the public model from disk, and check that they belong together.

`member.read_adapters` reads the members' peft folders.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapmixed.ensemble.adapted_layers import checked_layers, ensemble_layers
from adapmixed.ensemble.digests import CONFIG
from adapmixed.ensemble.layers import head_name
from adapmixed.ensemble.manifest import FILE_NAME, Manifest, read_manifest
from adapmixed.ensemble.member import CONFIG_FILE, MISSING, Adapter, read_adapters
from adapmixed.ensemble.member_record import MEMBER_FILE, read_member_record
from adapmixed.ensemble.provenance import (
    check_files,
    check_names,
    check_one_base,
    fingerprint,
    found_files,
    is_hub_name,
    member_digests,
    source_of,
)
from adapmixed.ensemble.public_model import check_base, load_base
from adapmixed.ensemble.vocabulary import beginning_of, check_tokenizers
from adapmixed.ranks import Ranks

_LOG = logging.getLogger(__name__)
Folder = str | os.PathLike[str]


@dataclass(frozen=True)
class Parts:
    """The parts that an ensemble is built from.

    Attributes:
        model: the public model; the ensemble may change it.
        tokenizer: the public model's tokenizer, or None.
        paths: the folders of all members, None for a missing member.
        adapters: the adapters of this process's members.
        adapted: the layers that members may adapt, each with its ranks.
        ranks: the processes that share the members.
        unverified: what could not be verified; see `Ensemble`.
        unit: see `Ensemble`.
        fingerprint: `provenance.fingerprint` of the base and of all members as they were read.
    """

    model: Any
    tokenizer: Any
    paths: Sequence[Path | None]
    adapters: Sequence[Adapter]
    adapted: Mapping[str, Sequence[int]]
    ranks: Ranks
    unverified: tuple[str, ...]
    unit: str | None
    fingerprint: str


def read_parts(
    base: Any,
    folder: Folder | Sequence[Folder | None],
    *,
    adapted: Mapping[str, Sequence[int]] | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    ranks: Ranks,
) -> Parts:
    """Read the public model and this process's adapters; see `Ensemble.from_pretrained`."""
    check_base(base)
    manifest, root, paths, adapted = _listed(folder, adapted)
    source = source_of(base)
    revision = None if manifest is None else manifest.revision
    recorded = {} if manifest is None else manifest.base_files
    local = isinstance(base, str | os.PathLike) and Path(base).is_dir()
    found = found_files(source, revision) if recorded or local else {}  # hashing takes its time
    compared = check_files(source, found, root, recorded)
    model, tokenizer = load_base(base, dtype, revision=revision)
    _check_beginning(manifest, tokenizer)
    if recorded and not all(compared):  # loading has downloaded the files of a hub name
        found = found_files(source, revision)
        compared = check_files(source, found, root, recorded)
    same_base, same_tokenizer = compared
    if device is not None:
        model = model.to(device)
    name = source or type(base).__name__
    adapted = ensemble_layers(paths, adapted)
    ranks = ranks.over(len(paths), repeated=set(adapted) == {head_name(model)})
    mine = paths[ranks.own(len(paths))]
    present = [path for path in mine if path is not None]
    vocab_size = model.config.get_text_config().vocab_size
    _LOG.info("public model %s: %s on %s", name, model.dtype, model.device)
    read = dict(zip(present, read_adapters(model, present), strict=True))
    check_tokenizers(present, tokenizer, name, int(vocab_size))
    _check_records(manifest, paths, read)
    names = {str(path): one.base_name for path, one in read.items()}
    if same_base:
        check_one_base(names)
    else:
        check_names(source, names)
        # A full hub name with its commit identifies the tokenizer together with the weights. Names
        # in the members verify nothing, so that the guarantee does not depend on who is missing.
        same_base = same_tokenizer = (
            manifest is not None
            and manifest.revision is not None
            and is_hub_name(source)
            and manifest.base_model == source
        )
    if not ranks.alone:
        facts = {
            "the ensemble": manifest or [path and path.name for path in paths],
            "the adapted layers": adapted,
            "the base": source if manifest is None else None,
            "whether the base was verified": (same_base, same_tokenizer),
            "the dtype": model.dtype,
            "the vocabulary": vocab_size,
            "the tokenizer": tokenizer and sorted(tokenizer.get_vocab().items()),
        }
        ranks.agree(facts)
    # A model object may have changed since it was loaded from the files that it names.
    same_base = same_base and isinstance(base, str | os.PathLike)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        paths=paths,
        adapters=[MISSING if path is None else read[path] for path in mine],
        adapted=adapted,
        ranks=ranks,
        unverified=(
            *_unverified_shards(manifest, len(paths)),
            *(() if same_base else ("base",)),
            *(() if same_tokenizer or not same_base or tokenizer is None else ("tokenizer",)),
        ),
        unit=None if manifest is None else manifest.unit,
        fingerprint=fingerprint(
            base, member_digests(paths, read), found, getattr(model.config, "_commit_hash", None)
        ),
    )


def _listed(
    folder: Folder | Sequence[Folder | None], adapted: Mapping[str, Sequence[int]] | None
) -> tuple[Manifest | None, Path, list[Path | None], Mapping[str, Sequence[int]] | None]:
    """Return `ensemble.json` or None, its folder, the members' folders, the layers they adapt."""
    manifest, root = None, Path()
    if isinstance(folder, str | os.PathLike):
        root = Path(folder)
        _check_folder(root, FILE_NAME, "an ensemble folder")
        manifest = read_manifest(root)
        if adapted is not None:
            raise ValueError(f"adapted must be None for {root}: its ensemble.json names layers")
        adapted = manifest.adapted
        paths = [None if name is None else root / name for name in manifest.members]
    else:
        adapted = None if adapted is None else checked_layers(adapted)
        paths = [None if path is None else Path(path) for path in folder]
        for path in paths:
            if path is not None:
                _check_folder(path, CONFIG_FILE, "the folders of adapters")
    if not paths:
        raise ValueError("an ensemble must have at least one private model, got 0")
    resolved = [path.resolve() for path in paths if path is not None]
    if len(set(resolved)) != len(resolved):
        twice = next(path for path in resolved if resolved.count(path) > 1)
        raise ValueError(f"members must be distinct, got {str(twice)!r} more than once")
    return manifest, root, paths, adapted


def _check_beginning(manifest: Manifest | None, tokenizer: Any) -> None:
    """Raise ValueError if members were trained on texts that begin otherwise than prompts do."""
    trained = None if manifest is None else manifest.beginning
    if trained is None or tokenizer is None or trained == (here := beginning_of(tokenizer)):
        return
    raise ValueError(
        f"beginning in {FILE_NAME} must be {list(here)}, the tokens with which the base's "
        f"tokenizer begins a text, got {list(trained)}: train the ensemble again"
    )


def _check_folder(path: Path, file: str, wanted: str) -> None:
    """Raise ValueError for a folder that does not exist, or that is a public model.

    Args:
        path: the folder.
        file: the file that it must have.
        wanted: what it must be, for the message.
    """
    if not path.is_dir():
        raise ValueError(f"folder must be {wanted}, got {path}, which is no existing folder")
    if (path / CONFIG).is_file() and not (path / file).is_file():
        raise ValueError(
            f"folder must be {wanted}, got {path} with {CONFIG} but no {file}, which is a "
            "public model: base and folder may be swapped"
        )


def _check_records(
    manifest: Manifest | None, paths: Sequence[Path | None], read: Mapping[Path, Adapter]
) -> None:
    """Raise ValueError for an adapter that is not what its shard's record says.

    A member's own record that says otherwise shows an older or a swapped member.
    """
    for path, record in zip(paths, manifest.shards if manifest else (), strict=False):
        if path is None or path not in read:
            continue
        own = _own_record(path)
        if any(own[name] != record[name] for name in _comparable(own, record)):
            raise ValueError(
                f"shards must describe what each member was trained on, but {path / MEMBER_FILE} "
                f"differs from {FILE_NAME}: the member may be of another training"
            )
        if record.get("documents") == 0 and not read[path].is_zero:
            raise ValueError(
                f"shards must describe what each member was trained on: the record of {path} "
                "has 0 documents, but its adapter is not zero"
            )


def _own_record(path: Path) -> Mapping[str, Any]:
    """Return the record that training left in a member's folder, {} if there is none to read."""
    try:
        record = read_member_record(path)["shard"]
    except (OSError, ValueError):  # a service need not have the file, nor be able to read it
        return {}
    return record if isinstance(record, Mapping) else {}


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the entries that two records have and that mean the same."""
    names = one.keys() & other.keys()
    if one.get("identifier_key") == other.get("identifier_key"):
        return names
    return names - {"identifier_key", "identifiers", "sha256"}


def _unverified_shards(manifest: Manifest | None, num_models: int) -> tuple[str, ...]:
    """Return the caveats about how documents were assigned to shards."""
    disjoint = num_models == 1 if manifest is None else manifest.disjoint
    assigned_by = None if manifest is None else manifest.document_names
    checked = {
        "shards": disjoint,
        "positions": num_models == 1 or assigned_by != "positions",
        "names": num_models == 1 or assigned_by is not None or not disjoint,
    }
    return tuple(name for name, done in checked.items() if not done)
