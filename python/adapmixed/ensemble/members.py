"""Read the members' peft folders and the public model, and check that they belong together."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.lora import MISSING, Adapter, Update, find_trunk, head_name, layer_shape
from adapmixed.ensemble.manifest import (
    FILE_NAME,
    MEMBER_FILE,
    Manifest,
    check_distinct,
    checked_layers,
    read_json,
    read_manifest,
    read_member_record,
)
from adapmixed.ensemble.public_model import (
    ADAPTER_CONFIG,
    ADDED_TOKENS,
    TOKENIZER_FILES,
    check_base,
    check_names,
    compare_files,
    content_digest,
    is_hub_name,
    last_part,
    load_base,
    load_tokenizer,
    source_of,
)
from adapmixed.ranks import Ranks
from adapmixed.text import beginning_of

_LOG = logging.getLogger(__name__)
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
_ROWS = 4096  # compared at once
_SMALLEST = 2.0**-24  # the step of the smallest numbers in fp16
_RESIZED = "resized embeddings cannot be shared: train without resize_token_embeddings"


def read_members(
    base: Any,
    folder: Folder | Sequence[Folder | None],
    *,
    adapted: Mapping[str, Sequence[int]] | None,
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
    found, verified = ({}, False) if on_hub else compare()
    model, tokenizer = load_base(base, dtype, revision=manifest.revision)
    commit = getattr(model.config, "_commit_hash", None)
    if on_hub:  # loading has downloaded the files, perhaps of a newer commit than was here
        found, verified = compare(commit or manifest.revision)
    here, trained = beginning_of(tokenizer), manifest.beginning
    if tokenizer is not None and trained is not None and trained != here:
        raise ValueError(
            f"beginning in {FILE_NAME} must be {list(here)}, the tokens with which the base's "
            f"tokenizer begins a text, got {list(trained)}: train the ensemble again"
        )
    if device is not None:
        model = model.to(device)
    ranks = ranks.over(len(paths), repeated=set(manifest.adapted) == {head_name(model)})
    mine = paths[ranks.own(len(paths))]
    present = [path for path in mine if path is not None]
    vocab_size = int(model.config.get_text_config().vocab_size)
    name = source or type(base).__name__
    _LOG.info("public model %s: %s on %s", name, model.dtype, model.device)
    read = dict(zip(present, read_adapters(model, present), strict=True))
    exact = root is None and adapted is None
    for path, adapter in read.items():
        _check_layers(path, adapter.layers, manifest.adapted, exact=exact)
    check_tokenizers(present, tokenizer, name, vocab_size)
    _check_records(manifest, paths, read)
    check_names(None if verified else source, {str(p): one.base_name for p, one in read.items()})
    if manifest.revision is not None and on_hub and manifest.base_model == source:
        # A full hub name with its commit identifies the files. Names in the members verify nothing,
        # so that the guarantee does not depend on who is missing.
        verified = True
    digest = fingerprint(base, member_digests(paths, read), found, commit)
    if not ranks.alone:
        facts = {
            "the ensemble": manifest,
            "what members share": find_trunk(model, manifest.adapted),
            "all files": digest,
            "the base": source if root is None else None,
            "whether the base was verified": verified,
            "the dtype": model.dtype,
            "the vocabulary": vocab_size,
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
        "num_models": len(paths),
        "adapters": [MISSING if path is None else read[path] for path in mine],
        "adapted": manifest.adapted,
        "ranks": ranks,
        "unverified": tuple(caveat for caveat, applies in unverified.items() if applies),
        "unit": manifest.unit,
        "fingerprint": digest,
        "folder": None if root is None else os.fspath(root),
    }


def _listed(
    folder: Folder | Sequence[Folder | None], adapted: Mapping[str, Sequence[int]] | None
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
        manifest = Manifest("", names, checked_layers(adapted))
    check_distinct([path.resolve() for path in paths if path is not None])
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
            own = read_member_record(path)["shard"]
        except (OSError, ValueError):  # a service need not have it, or cannot read it
            own = record
        if own != record:
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
    modules, found = dict(model.named_modules()), []
    tensors = dict(model.named_parameters(remove_duplicate=False))
    targeted: dict[str, set[str]] = {}  # by the settings, which members mostly share
    for path in folders:
        raw, config = _read_config(path)
        content = _weights_file(path).read_bytes()
        try:
            updates = _updates(modules, tensors, config, content)
            _check_targets(config, modules, set(updates), targeted)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        found.append(Adapter(updates, config.base_model_name_or_path, _digest(raw, content)))
    return found


def _updates(
    modules: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Any, content: bytes
) -> dict[str, Update]:
    """Return the update of every layer in the content of a weights file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        weights: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise ValueError(f"weights must be a readable safetensors file: {error}") from error
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
            raise ValueError(
                f"weights must be lora_A and lora_B of linear layers, got {key} with "
                f"target_modules={config.target_modules!r}"
            )
    updates: dict[str, Update] = {}
    for name, pair in sorted(pairs.items()):
        if name not in modules:
            raise ValueError(f"the adapter adapts {name}, which the base does not have")
        try:
            updates[name] = _update(config, name, modules[name], pair)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return updates


def _read_config(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the content of `adapter_config.json`, and peft's `LoraConfig` of what computes."""
    from peft import LoraConfig

    file = path / ADAPTER_CONFIG
    try:
        raw = read_json(file)
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
    known = {name: raw[name] for name in (*_COMPUTE, "base_model_name_or_path") if name in raw}
    try:
        config = LoraConfig(**known | {name: raw[name] for name in ("r", "lora_alpha")})
        os.fspath(config.base_model_name_or_path or "")
        patterns = dict(config.rank_pattern or {}) | dict(config.alpha_pattern or {})
        for pattern in [*patterns, config.target_modules, config.exclude_modules]:
            re.compile(pattern if isinstance(pattern, str) else "")
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"{file} must hold settings of LoRA: {error}") from error
    return raw, config


def _update(config: Any, name: str, layer: nn.Module, pair: Mapping[str, Tensor]) -> Update:
    """Return (A, scale * B) of one layer, of shapes (in, r) and (r, out), fp32."""
    from peft.utils.other import get_pattern_key

    size_in, size_out = layer_shape(layer)
    rank, alpha = (
        special.get(get_pattern_key(special, name), usual)
        for special, usual in (
            (config.rank_pattern or {}, config.r),
            (config.alpha_pattern or {}, config.lora_alpha),
        )
    )
    expected = {"lora_A": (rank, size_in), "lora_B": (size_out, rank)}
    found = {f"lora_{which}": tuple(value.shape) for which, value in pair.items()}
    if found != expected or rank < 1 or type(alpha) not in (int, float):
        raise ValueError(
            f"weights must have shapes {expected} by r or rank_pattern, and alpha must be a "
            f"number, got {found} and {alpha!r} ({_RESIZED})"
        )
    a, b = pair["A"].to(torch.float32), pair["B"].to(torch.float32)
    up = b * (alpha / (math.sqrt(rank) if config.use_rslora else rank))
    if not all(map(torch.isfinite, (*a.aminmax(), *up.aminmax()))):
        raise ValueError("the adapter's weights must be finite")
    return a.T.contiguous(), up.T


def _check_targets(
    config: Any, modules: Mapping[str, nn.Module], found: set[str], targeted: dict[str, set[str]]
) -> None:
    """Check that the weights are those of the targeted layers."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if config.target_modules in (None, "all-linear"):
        return
    named = config.target_modules, config.exclude_modules, config.layers_to_transform
    key = f"{named} {config.layers_pattern}"
    if key not in targeted:
        targeted[key] = set(filter(partial(check_target_module_exists, config), modules))
    if difference := sorted(found ^ targeted[key]):
        raise ValueError(
            f"target_modules {config.target_modules!r} and the weights must agree, got a "
            f"difference at {difference[0]}"
        )


def _check_copy(key: str, copy: Tensor, own: Tensor) -> None:
    """Raise ValueError unless a tensor holds the base's numbers, each rounded to its own dtype.

    peft stores some of them with adapted heads. The base's file may hold the numbers in a third
    dtype, so neither need be the other's rounding. A copy that was rounded, and stored in float32
    again, counts as rounded.
    """
    if copy.dtype == torch.float32 and not torch.equal(own, copy):
        for short in (torch.bfloat16, torch.float16):
            if torch.equal(copy.to(short).float(), copy):
                copy = copy.to(short)
    if own.dtype == copy.dtype or own.shape != copy.shape or not copy.is_floating_point():
        same = torch.equal(own, copy)
    else:
        step = max(torch.finfo(one.dtype).eps for one in (own, copy))
        same = all(
            torch.allclose(one.float(), other.float(), rtol=step, atol=_SMALLEST)
            for one, other in zip(*(torch.split(t, _ROWS) for t in (own, copy)), strict=True)
        )
    if not same:
        raise ValueError(
            f"{key} must equal the base's weights of shape {tuple(own.shape)}, which all members "
            f"share, got other ones of shape {tuple(copy.shape)} ({_RESIZED})"
        )


def _weights_file(folder: Path) -> Path:
    """Return the file of a peft folder's weights.

    Raises:
        ValueError: if there is none.
    """
    if (file := folder / WEIGHTS_FILE).is_file():
        return file
    missing = file.name if folder.is_dir() else "folder there"
    raise ValueError(f"{folder} must be a peft folder, but there is no {missing}")


def adapter_layers(folder: Folder) -> dict[str, tuple[int, ...]]:
    """Return the layers that a peft folder adapts, each with its rank.

    Only the header of the weights file is read.

    Raises:
        ValueError: if the folder holds no weights of linear layers, or damaged ones.
        OSError: if the weights may not be read.
    """
    from safetensors import SafetensorError, safe_open

    file = _weights_file(Path(folder))
    found: dict[str, tuple[int, ...]] = {}
    try:
        file.open("rb").close()  # safetensors calls a file missing that it may not read
        with safe_open(str(file), framework="pt") as weights:
            for key in weights.keys():
                match = _LORA_WEIGHT.fullmatch(key)
                if match is not None and match[2] == "A":
                    found[match[1]] = (int(weights.get_slice(key).get_shape()[0]),)
    except SafetensorError as error:
        raise ValueError(f"{file} must be a readable safetensors file: {error}") from error
    if not found:
        raise ValueError(f"{file} must hold lora_A and lora_B of linear layers, but has none")
    return dict(sorted(found.items()))


def _check_layers(
    path: Path,
    layers: Mapping[str, tuple[int, ...]],
    declared: Mapping[str, tuple[int, ...]],
    *,
    exact: bool,
) -> None:
    """Raise ValueError unless a member's layers and ranks are declared, all of them if `exact`.

    What is computed must not depend on which members are present.
    """
    if exact and layers != declared:
        raise ValueError(
            f"adapted must be given if members differ: {path} adapts other layers or ranks than "
            "the first one"
        )
    for name, (rank,) in layers.items():
        if rank not in declared.get(name, ()):
            raise ValueError(
                "adapted must hold the full names and ranks of every member's layers: "
                f"{path} adapts {name} with rank {rank}, got {declared.get(name)}"
            )


# Tokenizers of adapters


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
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for folder in folders if tokenizer is not None else ():
        files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        content = tuple((file.name, file.read_bytes()) for file in files)
        if not content or content in seen:
            continue
        seen.add(content)
        difference = _difference(folder, tokenizer, vocab_size)
        if difference is not None:
            raise ValueError(
                f"adapters must use the public model's tokenizer: the one in {folder} differs from "
                f"that of {base}, {difference}"
            )


def _difference(folder: Path, tokenizer: Any, vocab_size: int) -> str | None:
    try:
        loaded, file = load_tokenizer(folder), folder / ADDED_TOKENS
        added = read_json(file) if loaded is None and file.is_file() else {}
        expected = _tokens(tokenizer.get_vocab(), vocab_size)
        own = _tokens(expected | added if loaded is None else loaded.get_vocab(), vocab_size)
    except Exception as error:  # damaged files raise many types of exception
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from error
    if loaded is not None and loaded.pad_token not in expected:  # it cuts no text
        own.pop(loaded.pad_token, None)
    if differing := {token for token, _ in own.items() ^ expected.items()}:
        token = min(differing)
        there, here = own.get(token), expected.get(token)
        return f"token {token!r} has id {there} there and {here} in the base"
    if loaded is not None and _rules(loaded, expected) != _rules(tokenizer, expected):
        return "the tokens are the same but other rules cut text into them"
    return None


def _tokens(vocabulary: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    return {token: index for token, index in vocabulary.items() if index < vocab_size}


def _rules(tokenizer: Any, known: Mapping[str, int]) -> Any:
    """Return the rules that cut text into `known` tokens, without padding and truncation."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return type(tokenizer).__name__
    content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    content["added_tokens"] = [one for one in content["added_tokens"] if one["content"] in known]
    return content


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
    known = {path: one.digest for path, one in (read or {}).items()}
    return [
        "missing"
        if path is None
        else known.get(path) or _digest(_read_config(path)[0], _weights_file(path).read_bytes())
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
        facts = [f"{name} {found}" for name, found in sorted(files.items())]
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
