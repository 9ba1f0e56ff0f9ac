"""An ensemble's folder: `ensemble.json`, the members' peft folders, and their checks.

    {"format_version": 5, "base_model": "...",
     "members": ["member-000", null, ...], "adapted": {"lm_head": 8, ...},
     "base_files": {"config.json": "...", "model.safetensors": "...", ...}, "training": {...},
     "document_names": "stable", "beginning": [2], "unit": "user",
     "shards": [{"documents": n, "sha256": "...", "identifiers": [...], "identifier_key": "..."}]}

The members are ordinary peft folders in the same folder. `null` stands for a missing member, which
answers as the public model does. Their number N and `adapted` are public constants. They determine
the layers that members share and all shapes of the computation, so these do not depend on which
members are present.

A guarantee covers one shard. It does not cover a person with records in two shards, so shards that
overlap raise. Overlaps are found through keyed hashes of the identifiers (users, documents), which
`training.shard_record` writes. The operator keeps the key, without which nobody can tell
whether a name is among the identifiers. The digests must not be published: whoever holds a shard's
data can tell from them that a member was trained on it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from adapmixed.ensemble.lora import MISSING, Adapter, Update, find_trunk, head_name
from adapmixed.ensemble.public_model import (
    ADAPTER_CONFIG,
    FILE_NAME,
    check_base,
    check_names,
    compare_files,
    content_digest,
    is_hub_name,
    last_part,
    load_base,
    read_json,
    source_of,
)
from adapmixed.files import write_file
from adapmixed.limits import check_option, check_type
from adapmixed.ranks import Ranks
from adapmixed.text import beginning_of

FORMAT_VERSION = 5
MEMBER_FILE = "shard.json"
MEMBER_VERSION = 2
DOCUMENT_NAMES = ("stable", "positions")
"""How documents are named for their shards: by names that no other document can change ("stable"),
or by positions in a file."""
_DIGEST = re.compile("[0-9a-f]{32,128}")
Folder = str | os.PathLike[str]
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LORA_WEIGHT = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
"""A layer's name and A or B; a state dict puts the adapter's name, often default, behind them."""
_COMPUTE = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "use_rslora",
)  # fmt: skip
"""Settings of peft that decide what a plain LoRA adapter computes."""
_NAMES = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")
_ASIDE = (
    *_NAMES, "peft_type", "task_type", "lora_dropout", "loftq_config",
    "megatron_core", "eva_config", "qalora_group_size", "runtime_config", "fan_in_fan_out",
)  # fmt: skip
"""Settings that leave a trained adapter's computation alone. Any other must have its default."""
_USUAL = {"init_lora_weights": (True, "gaussian", "eva", "orthogonal")}  # the base stays as it is
Layer = tuple[dict[str, tuple[int, ...]], float]
"""The shapes of A and B of an adapted layer, and the scale of their product."""
_ROWS = 4096  # compared at once
_SMALLEST = 2.0**-24  # the step of the smallest numbers in fp16
_RESIZED = "resized embeddings cannot be shared: train without resize_token_embeddings"


@dataclass(frozen=True)
class Manifest:
    """The content of `ensemble.json`.

    Attributes:
        base_model: name of the public model, for people; callers pass the base itself to loading.
        members: folder names, N = len(members) >= 1; None for a missing member.
        adapted: names of the layers that members may adapt, each with its largest rank.
        base_files: digest of each file that the base is loaded from, as
            `adapmixed.ensemble.base_files` returns them; {} if not recorded.
        revision: the hub commit of the base, used when it is loaded by its hub name; or None.
        training: the settings that the members were trained with.
        shards: one `training.shard_record` per member; empty if not recorded.
        document_names: one of `DOCUMENT_NAMES`, or None if not recorded. With "positions", one edit
            can move all later documents of a file to other shards.
        beginning: the tokens with which every training block began
            (`text.beginning_of`), or None if not recorded.
        unit: the column of names if every name has a member of its own, which `shards` show; or
            None.

    Raises:
        ValueError: if an entry has another form, if two shards overlap or are hashed under
            different keys, or if `shards` do not show `unit`.
    """

    base_model: str
    members: tuple[str | None, ...]
    adapted: Mapping[str, int]
    base_files: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[Mapping[str, Any], ...] = ()
    document_names: str | None = None
    beginning: tuple[int, ...] | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        if not self.members:
            raise ValueError("members must name at least one private model, got none")
        for name in self.members:
            plain = isinstance(name, str) and re.fullmatch(r"(?!\.\.?$)[^/\\]+", name)
            if name is not None and not plain:
                raise ValueError(f"members must be plain folder names or null, got {name!r}")
        for name in ("base_model", "revision", "unit"):
            check_type(name, getattr(self, name), str, "a string or null", optional=True)
        for name in ("training", "base_files"):
            check_type(name, getattr(self, name), Mapping, "an object")
        check_option("document_names", self.document_names, (None, *DOCUMENT_NAMES))
        ranks = self.adapted.values() if isinstance(self.adapted, Mapping) else ()
        if not ranks or not all(type(rank) is int and rank >= 1 for rank in ranks):
            raise ValueError(f"adapted must map layer names to integers >= 1, got {self.adapted!r}")
        object.__setattr__(self, "adapted", dict(sorted(self.adapted.items())))
        check_shards(self.members, self.shards)
        each = bool(self.shards) and all(len(shard["identifiers"]) <= 1 for shard in self.shards)
        if self.unit is not None and not (self.unit and each):
            raise ValueError(
                f"unit must be null unless shards give every name a member, got {self.unit!r}"
            )

    def paths(self, folder: str | os.PathLike[str]) -> list[Path | None]:
        """Return the members' folders below `folder`, None for a missing member."""
        return [None if name is None else Path(folder, name) for name in self.members]


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read `folder/ensemble.json`.

    Raises:
        ValueError: if the file is missing, not JSON, of another format, or inconsistent.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists():
        single = (Path(folder) / ADAPTER_CONFIG).is_file()
        why = ", it is a single adapter: give a list of such folders in Python, or write that file"
        raise ValueError(f"folder must hold {FILE_NAME}, {folder} does not{why * single}")
    data = read_versioned(path, FORMAT_VERSION, "members", "adapted")
    names = [entry.name for entry in fields(Manifest)]
    entries = {name: data[name] for name in names if data.get(name) is not None}
    try:
        for name in entries.keys() & {"members", "shards", "beginning"}:
            if not isinstance(entries[name], list):
                raise ValueError(f"{name} must be a list, got {entries[name]!r}")
            entries[name] = tuple(entries[name])
        return Manifest(**{"base_model": ""} | entries)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write `folder/ensemble.json` in the current format, atomically."""
    entries = {entry.name: getattr(manifest, entry.name) for entry in fields(Manifest)}
    data = {"format_version": FORMAT_VERSION, **entries}
    write_file(Path(folder) / FILE_NAME, (json.dumps(data, indent=1) + "\n").encode())


def read_member_record(folder: Path) -> dict[str, Any]:
    """Return the content of `shard.json` in a member's folder.

    Returns:
        "shard" (its `training.shard_record`), "tokens" (their number), "losses" of the epochs in
        nats per token, and "validation".

    Raises:
        ValueError: if the file is not JSON of this format.
        OSError: if it cannot be read.
    """
    path = folder / MEMBER_FILE
    return read_versioned(path, MEMBER_VERSION, "shard", "tokens", "losses", "validation")


def read_versioned(path: Path, version: int, *entries: str) -> dict[str, Any]:
    """Return the content of a JSON file of this format version with these entries.

    Raises:
        ValueError: if it is another file.
        OSError: if it cannot be read.
    """
    data: dict[str, Any] = read_json(path)
    stored = data.get("format_version") if isinstance(data, dict) else None
    if stored != version:
        raise ValueError(
            f"{path}: format_version must be {version}, got {stored!r}: another adapmixed wrote "
            "it, make it again with this one"
        )
    if missing := sorted(set(entries) - data.keys()):
        raise ValueError(f"{path} must hold {', '.join(entries)}, got no {missing[0]}")
    return data


def check_shards(members: Sequence[str | None], shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that the shards of N members are disjoint.

    Args:
        members: N folder names, None for missing members. Their records count like any other, so
            that the result does not depend on who is missing.
        shards: N records, or none. A record is {"documents": count, "sha256": digest of the
            content, "identifiers": [keyed hash, ...], "identifier_key": digest of the key}.

    Raises:
        ValueError: if a record has another form.
        ValueError: if two shards share an identifier or their content, or if their identifiers
            were hashed under different keys. The message names the two members.
    """
    if shards and len(shards) != len(members):
        raise ValueError(
            f"shards must describe each of the {len(members)} members, got {len(shards)}"
        )
    owner: dict[str, int] = {}  # what a shard has alone -> its member
    names = [name or f"missing member {index}" for index, name in enumerate(members)]
    for index, shard in enumerate(shards):
        if not _is_record(shard):
            raise ValueError(
                "shards must be records as training.shard_record makes them, got another one for "
                f"{names[index]}"
            )
        if shard["identifier_key"] != shards[0]["identifier_key"]:
            raise ValueError(
                f"identifiers of {names[0]} and {names[index]} must be hashed under one key, "
                "otherwise an overlap of their shards could not be found"
            )
        for what in (*shard["identifiers"], shard["sha256"]) if shard["documents"] else ():
            if (other := owner.setdefault(what, index)) != index:
                raise ValueError(
                    f"shards must be disjoint, {names[other]} and {names[index]} share an "
                    f"identifier or all content ({what[:12]}...), whose person or document no "
                    "guarantee covers"
                )


def _is_record(shard: Any) -> bool:
    """Return whether this is a whole record: a shard with documents has identifiers, too."""
    entries: Mapping[str, Any] = shard if isinstance(shard, Mapping) else {}
    documents, identifiers = entries.get("documents"), entries.get("identifiers")
    if type(documents) is not int or not isinstance(identifiers, list):
        return False
    digests = (*identifiers, entries.get("sha256"), entries.get("identifier_key"))
    return min(documents, 1) <= len(identifiers) <= documents and all(
        isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests
    )


# Loading


def read_members(
    base: Any,
    folder: Folder | Sequence[Folder | None],
    *,
    adapted: Mapping[str, int] | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the arguments of `Ensemble` for a public model and this process's adapters.

    See `Ensemble.from_pretrained`. N is the number of members over all processes, and `adapted` has
    the layers of all of them.
    """
    check_base(base)
    manifest, paths = _listed(folder, adapted)
    source = source_of(base)
    root = Path(folder) if isinstance(folder, str | os.PathLike) else None
    compare, on_hub = partial(compare_files, base, root, manifest.base_files), is_hub_name(source)
    files, verified = ({}, False) if on_hub else compare()
    model, tokenizer = load_base(base, dtype, revision=manifest.revision)
    commit = getattr(model.config, "_commit_hash", None)
    if on_hub:  # loading has downloaded the files, perhaps of a newer commit than was here
        files, verified = compare(commit or manifest.revision)
    here, trained = beginning_of(tokenizer), manifest.beginning
    if tokenizer is not None and trained is not None and trained != here:
        raise ValueError(
            f"beginning in {FILE_NAME} must be {list(here)}, the tokens with which the base's "
            f"tokenizer begins a text, got {list(trained)}: train the ensemble again"
        )
    if device is not None:
        model = model.to(device)
    ranks = ranks.over(len(paths), repeated=set(manifest.adapted) == {head_name(model)})
    mine = paths[ranks.part(len(paths))]
    present = [path for path in mine if path is not None]
    read = dict(zip(present, read_adapters(model, present), strict=True))
    exact = root is None and adapted is None
    for path, adapter in read.items():
        _check_layers(path, adapter.layers, manifest.adapted, exact=exact)
    _check_records(manifest, paths, read)
    names = {str(path): adapter.base_name for path, adapter in read.items()}
    check_names(None if verified else source, names)
    if manifest.revision is not None and on_hub and manifest.base_model == source:
        # A full hub name with its commit identifies the files. Names in the members verify nothing,
        # so that the guarantee does not depend on who is missing.
        verified = True
    digest = fingerprint(base, member_digests(paths, read), files, commit)
    if not ranks.single:
        facts = {
            "the ensemble": manifest,
            "what members share": find_trunk(model, manifest.adapted),
            "all files": digest,
            "the base": source if root is None else None,
            "whether the base was verified": verified,
            "the dtype": model.dtype,
            "the vocabulary": model.config.get_text_config().vocab_size,
            "the tokenizer": tokenizer and sorted(tokenizer.get_vocab().items()),
        }
        ranks.agree(facts)
    several = len(paths) > 1  # otherwise there is nobody else's shard
    unverified = {
        "shards": several and not manifest.shards,
        "positions": several and manifest.document_names == "positions",
        "names": several and bool(manifest.shards) and manifest.document_names is None,
        # A model object may have changed since it was loaded from the files that it names.
        "base": not (verified and isinstance(base, str | os.PathLike)),
    }
    return {
        "model": model,
        "tokenizer": tokenizer,
        "adapters": [MISSING if path is None else read[path] for path in mine],
        "adapted": manifest.adapted,
        "ranks": ranks,
        "unverified": tuple(caveat for caveat, applies in unverified.items() if applies),
        "unit": manifest.unit,
        "fingerprint": digest,
        "folder": None if root is None else os.fspath(root),
    }


def _listed(
    folder: Folder | Sequence[Folder | None], adapted: Mapping[str, int] | None
) -> tuple[Manifest, list[Path | None]]:
    """Return `ensemble.json`, or what it would be for a list of folders, and the folders."""
    if isinstance(folder, str | os.PathLike):
        manifest = read_manifest(folder)
        paths = manifest.paths(folder)
        if adapted is not None:
            raise ValueError(f"adapted must be None for {folder}: its ensemble.json names layers")
    else:
        paths = [None if path is None else Path(path) for path in folder]
        if not paths:
            raise ValueError("an ensemble must have at least one private model, got 0")
        if adapted is None:
            first = next((path for path in paths if path is not None), None)
            if first is None:
                raise ValueError("adapted must be given if all members are missing")
            adapted = adapter_layers(first)
        names = tuple(None if path is None else str(i) for i, path in enumerate(paths))
        manifest = Manifest("", names, adapted)
    resolved = Counter(path.resolve() for path in paths if path is not None)
    if twice := [str(path) for path, count in resolved.items() if count > 1]:
        raise ValueError(f"members must be distinct, got {twice[0]} more than once")
    return manifest, paths


def _check_records(
    manifest: Manifest, paths: Sequence[Path | None], read: Mapping[Path, Adapter]
) -> None:
    """Raise ValueError for an adapter that is not what its shard's record says.

    A member's own record that says otherwise shows an older or a swapped member.
    """
    for path, record in zip(paths, manifest.shards, strict=False):
        if path is None or path not in read:
            continue
        try:
            shard = read_member_record(path)["shard"]
        except OSError:  # a service need not have it, or may not read it
            shard = record
        if shard != record:
            raise ValueError(
                f"shards must describe what each member was trained on, but {path / MEMBER_FILE} "
                f"differs from {FILE_NAME}: the member may be of another training"
            )
        if record["documents"] == 0 and not read[path].is_zero:
            raise ValueError(
                f"shards must describe what each member was trained on: the record of {path} "
                "has 0 documents, but its adapter is not zero"
            )


# Adapters


def read_adapters(model: Any, folders: Sequence[Path]) -> list[Adapter]:
    """Read ordinary peft LoRA folders for `model`, which is not changed.

    Args:
        model: the public model.
        folders: each holds `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        the adapters, checked, in fp32.

    Raises:
        ValueError: if an adapter does not fit the model or is not plain LoRA, for instance another
            peft type, DoRA, biases or extra trained modules.
    """
    adapters, tensors = [], dict(model.named_parameters(remove_duplicate=False))
    planned: dict[str, dict[str, Layer]] = {}  # by the settings; peft writes its sets in any order
    for path in folders:
        raw = _read_config(path)
        content, weights = _read_weights(path)
        settings = {name: raw[name] for name in _COMPUTE if name in raw}
        key = str([sorted(v, key=str) if type(v) is list else v for v in map(raw.get, _COMPUTE)])
        try:
            if key not in planned:
                planned[key] = _planned(model, settings)
            updates = _updates(planned[key], tensors, weights)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        name = raw.get("base_model_name_or_path")
        adapters.append(Adapter(updates, name, _digest(raw, content)))
    return adapters


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of `adapter_config.json`, if it is of plain LoRA."""
    from peft import LoraConfig

    try:
        raw: dict[str, Any] = read_json(path / ADAPTER_CONFIG)
    except FileNotFoundError as error:
        raise ValueError(f"{path} must be a peft folder, but has no {ADAPTER_CONFIG}") from error
    kind = raw.get("peft_type") if isinstance(raw, dict) else None
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type must be LORA, got {kind!r}")
    plain = LoraConfig()
    for name, value in raw.items():
        usual = _USUAL.get(name, (getattr(plain, name, None),))
        if name not in _COMPUTE + _ASIDE and value and value not in usual:
            raise ValueError(f"{path}: {name} must be unset for plain LoRA, got {value!r}")
    named = raw.get("base_model_name_or_path")
    check_type(f"{path}: base_model_name_or_path", named, str, "a string or null", optional=True)
    return raw


def _planned(model: Any, settings: dict[str, Any]) -> dict[str, Layer]:
    """Return the layers that peft would adapt with these settings, from a model without weights."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    try:
        config = LoraConfig(**settings | {name: settings[name] for name in ("r", "lora_alpha")})
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tied layers, and settings of GPT-2's layers
            empty = type(model)(model.config)
            inject_adapter_in_model(config, empty, low_cpu_mem_usage=True)
    except Exception as error:  # wrong settings raise many types of exception
        raise ValueError(f"{ADAPTER_CONFIG} must hold settings of LoRA: {error}") from error
    layers = {}
    for name, layer in empty.named_modules():
        if isinstance(layer, LoraLayer) and "default" in layer.lora_A:
            parts = {"A": layer.lora_A["default"], "B": layer.lora_B["default"]}
            shapes = {which: tuple(part.weight.shape) for which, part in parts.items()}
            layers[name] = shapes, float(layer.scaling["default"])
    return layers


def _updates(
    planned: Mapping[str, Layer], tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, Update]:
    """Return (A, scale * B), of shapes (in, r) and (r, out), of every layer in a weights file."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if (match := _LORA_WEIGHT.fullmatch(key)) is not None:
            pair = pairs.setdefault(match[1], {})
            if match[2] in pair:
                raise ValueError(f"weights must be of one adapter, got {key} besides another")
            pair[match[2]] = value
        elif name in tensors:
            _check_copy(key, value, tensors[name].detach().cpu())
        else:
            raise ValueError(f"weights must be lora_A and lora_B of linear layers, got {key}")
    if difference := sorted(pairs.keys() ^ planned.keys()):
        raise ValueError(
            f"target_modules and the weights must agree, got a difference at {difference[0]}"
        )
    updates: dict[str, Update] = {}
    for name, pair in sorted(pairs.items()):
        expected, scale = planned[name]
        shapes = {which: tuple(value.shape) for which, value in sorted(pair.items())}
        if shapes != expected:
            raise ValueError(
                f"{name}: weights must have shapes {expected} by r or rank_pattern, got {shapes} "
                f"({_RESIZED})"
            )
        a, b = pair["A"].to(torch.float32), pair["B"].to(torch.float32)
        up = b * scale
        if not all(map(torch.isfinite, (*a.aminmax(), *up.aminmax()))):
            raise ValueError(f"{name}: the adapter's weights must be finite")
        updates[name] = a.T.contiguous(), up.T
    return updates


def _check_copy(key: str, copy: Tensor, base: Tensor) -> None:
    """Raise ValueError unless a tensor holds the base's numbers, each rounded to its own dtype.

    peft stores some of them with adapted heads. The base's file may hold the numbers in a third
    dtype, so neither need be the other's rounding.
    """
    if base.dtype == copy.dtype or base.shape != copy.shape or not copy.is_floating_point():
        same = torch.equal(base, copy)
    else:
        step = max(torch.finfo(tensor.dtype).eps for tensor in (base, copy))
        same = all(
            torch.allclose(rows.float(), other.float(), rtol=step, atol=_SMALLEST)
            for rows, other in zip(*(torch.split(t, _ROWS) for t in (base, copy)), strict=True)
        )
    if not same:
        raise ValueError(
            f"{key} must equal the base's weights of shape {tuple(base.shape)}, which all members "
            f"share, got other ones of shape {tuple(copy.shape)} ({_RESIZED})"
        )


def _read_weights(folder: Path) -> tuple[bytes, dict[str, Tensor]]:
    """Return the weights file of a peft folder, and the tensors in it.

    Raises:
        ValueError: if there is none, or it is damaged.
    """
    if not (file := folder / WEIGHTS_FILE).is_file():
        missing = file.name if folder.is_dir() else "folder there"
        raise ValueError(f"{folder} must be a peft folder, but there is no {missing}")
    content = file.read_bytes()
    try:
        return content, load(content)
    except SafetensorError as error:
        raise ValueError(f"{file} must be a readable safetensors file: {error}") from error


def adapter_layers(folder: Folder) -> dict[str, int]:
    """Return the layers that a peft folder adapts, each with its rank.

    Raises:
        ValueError: if the folder holds no weights of linear layers, or damaged ones.
        OSError: if the weights may not be read.
    """
    weights = _read_weights(Path(folder))[1]
    matches = {key: _LORA_WEIGHT.fullmatch(key) for key in sorted(weights)}
    layers = {
        match[1]: len(weights[key]) for key, match in matches.items() if match and match[2] == "A"
    }
    if not layers:
        raise ValueError(f"{folder} must hold lora_A and lora_B of linear layers, but has none")
    return layers


def _check_layers(
    path: Path, layers: Mapping[str, int], declared: Mapping[str, int], *, exact: bool
) -> None:
    """Raise ValueError unless a member's layers and ranks are declared, all of them if `exact`.

    What is computed must not depend on which members are present.
    """
    if exact and layers != declared:
        raise ValueError(
            f"adapted must be given if members differ: {path} adapts other layers or ranks than "
            "the first one"
        )
    for name, rank in layers.items():
        if rank > declared.get(name, 0):
            raise ValueError(
                "adapted must hold the full names and largest ranks of all members' layers: "
                f"{path} adapts {name} with rank {rank}, got {declared.get(name)}"
            )


# Digests


def _digest(settings: Mapping[str, Any], weights: bytes) -> str:
    of_weights, of_settings = hashlib.sha256(weights).hexdigest(), content_digest(settings, _NAMES)
    return f"{WEIGHTS_FILE} {of_weights}\n{ADAPTER_CONFIG} {of_settings}"


def member_digests(
    members: Sequence[Path | None], read: Mapping[Path, Adapter] | None = None
) -> list[str]:
    """Return digests of each member's weights and settings, but for names and modes.

    That of None is "missing". What was read already is not read again.

    Raises:
        ValueError: as `read_adapters`, for files that are missing and for the settings.
    """
    digests = {path: adapter.digest for path, adapter in (read or {}).items()}
    return [
        "missing"
        if path is None
        else digests.get(path) or _digest(_read_config(path), _read_weights(path)[0])
        for path in members
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
        facts = [f"{name} {digest}" for name, digest in sorted(files.items())]
    elif isinstance(base, str):
        facts = [f"name {base}", f"commit {commit}"]
    else:
        facts = [f"name {last_part(source_of(base) or '')}"]
    return hashlib.sha256("\n".join([*facts, *members]).encode()).hexdigest()


def recorded_fingerprint(folder: Folder) -> str:
    """Return the fingerprint of an ensemble folder, with the base that `ensemble.json` records.

    It is that of the ensemble as loaded with a base folder of the recorded files, to which ledgers
    are bound.

    Raises:
        ValueError: as `read_manifest` and `member_digests`.
    """
    manifest = read_manifest(folder)
    return fingerprint(folder, member_digests(manifest.paths(folder)), manifest.base_files)
