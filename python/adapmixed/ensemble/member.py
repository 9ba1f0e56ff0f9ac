"""Read one member's adapter from an ordinary peft folder and check it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapmixed.ensemble.digests import adapter_sha256

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_LAYER_PREFIX = "base_model.model."
LORA_WEIGHT = re.compile(re.escape(_LAYER_PREFIX) + r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
"""A layer's name and A or B; a state dict puts the adapter's name, often default, behind them."""

# Settings that are read here, or that do not change the trained adapter's computation.
# Any other setting must be unset.
_READ = frozenset(
    {
        "peft_type", "task_type", "r", "lora_alpha", "target_modules", "fan_in_fan_out", "bias",
        "rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform", "layers_pattern",
        "exclude_modules", "init_lora_weights", "inference_mode", "lora_dropout",
        "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "loftq_config",
        "megatron_core", "eva_config", "qalora_group_size", "runtime_config",
    }
)  # fmt: skip
_ROWS = 4096  # compared at once
_SMALLEST = 2.0**-24  # the step of the smallest numbers in fp16
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """One checked adapter.

    Attributes:
        updates: maps a layer's full name to (A, scale * B), of shapes (in, r) and (r, out), fp32.
        base_name: the public model that the adapter's folder names, or None.
        digest: `adapter_digest` of what was read; empty without files.
    """

    updates: Mapping[str, tuple[Tensor, Tensor]]
    base_name: str | None = None
    digest: str = ""

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The adapted layers, each with its rank."""
        return {name: (int(down.shape[-1]),) for name, (down, _) in self.updates.items()}

    @property
    def is_zero(self) -> bool:
        """Whether every update is zero, so that the adapted model equals the public one."""
        return all(not up.count_nonzero() for _, up in self.updates.values())


MISSING = Adapter({})
"""Stands for a missing member, which answers as the public model does."""


def read_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> Adapter:
    """Read an ordinary peft LoRA folder for `model`, which is not changed.

    Args:
        model: the public model.
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        the adapter, checked, in fp32.

    Raises:
        ValueError: if the adapter does not fit the model or is not plain LoRA, for instance
            another peft type, DoRA, biases or extra trained modules.
    """
    return read_adapters(model, [Path(folder)])[0]


def read_adapters(model: Any, folders: Sequence[Path]) -> list[Adapter]:
    """Read folders as `read_adapter` does."""
    modules = dict(model.named_modules())
    return [_read(model, modules, path) for path in folders]


def _read(model: Any, modules: Mapping[str, Any], path: Path) -> Adapter:
    from safetensors import SafetensorError
    from safetensors.torch import load

    config, file = _read_config(path), weights_file(path)
    content = file.read_bytes()
    try:
        weights: dict[str, Tensor] = load(content)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, value in weights.items():
        match = LORA_WEIGHT.fullmatch(key)
        if match is None and _is_copy_of_base(path, model, key, value):
            continue
        if match is None:
            raise ValueError(
                f"{path}: weights must be lora_A and lora_B of linear layers, got {key} with "
                f"target_modules={config.get('target_modules')!r}"
            )
        pair = pairs.setdefault(match[1], {})
        if match[2] in pair:
            raise ValueError(f"{path}: weights must be of one adapter, got {key} besides another")
        pair[match[2]] = value
    if not pairs:
        raise ValueError(f"{path}: the adapter holds no weights")
    head = model.get_output_embeddings()
    updates: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pair in sorted(pairs.items()):
        if name not in modules:
            raise ValueError(f"{path}: the adapter adapts {name}, which the base does not have")
        if modules[name] is head and "B" in pair:
            _check_rows(path, f"lora_B of {name}", pair["B"], modules[name].weight)
        updates[name] = _update(path, config, name, modules[name], pair)
    _check_targets(path, config, modules, set(updates))
    return Adapter(updates, config.get("base_model_name_or_path"), _digest(config, content))


def adapter_digest(folder: Path) -> str:
    """Return the digests of a peft folder's weights and of its settings, but for names and modes.

    Raises:
        ValueError: as `read_adapter`, for files that are missing and for the settings.
    """
    return _digest(_read_config(folder), weights_file(folder).read_bytes())


def _digest(config: Any, weights: bytes) -> str:
    of_weights = hashlib.sha256(weights).hexdigest()
    return f"{WEIGHTS_FILE} {of_weights}\n{CONFIG_FILE} {adapter_sha256(config)}"


def weights_file(folder: Path) -> Path:
    """Return the file of a peft folder's weights.

    Raises:
        ValueError: if there is none. For pickled weights the message has the lines to convert them.
        OSError: if it may not be read.
    """
    file, pickled = folder / WEIGHTS_FILE, folder / _PICKLED
    if pickled.is_file() and not file.is_file():
        raise ValueError(
            f"{folder} must be a peft folder with {WEIGHTS_FILE}, got {_PICKLED}, which two lines "
            "of Python convert:\nimport torch, safetensors.torch as st\n"
            "st.save_file({k: v.contiguous().clone() for k, v in torch.load("
            f"{str(pickled)!r}, 'cpu', weights_only=True).items()}}, {str(file)!r})"
        )
    try:
        file.open("rb").close()  # safetensors calls a file missing that it may not read
    except FileNotFoundError as error:
        missing = file.name if folder.is_dir() else "folder there"
        raise ValueError(f"{folder} must be a peft folder, but there is no {missing}") from error
    return file


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """Return (in, out) of an `nn.Linear` or a `Conv1D`.

    Raises:
        ValueError: for any other layer.
    """
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, Conv1D):
        return int(layer.nx), int(layer.nf)
    raise ValueError(f"layer must be nn.Linear or Conv1D, got {type(layer).__name__}")


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} must be a peft folder, but has no {CONFIG_FILE}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} must be JSON: {error}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else config
    if not isinstance(config, dict) or kind != "LORA":
        raise ValueError(f"{path}: peft_type must be LORA, got {kind!r}")
    if config.get("use_dora"):
        raise ValueError(
            f"{path}: use_dora must be false, because DoRA rescales the base's weights, got "
            f"{config['use_dora']!r}"
        )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise ValueError(
            f"{path}: bias must be none and lora_bias false, got bias={config.get('bias')!r}, "
            f"lora_bias={config.get('lora_bias')!r}"
        )
    if config.get("modules_to_save"):
        raise ValueError(
            f"{path}: modules_to_save must be empty (fully trained modules cannot be stacked), "
            f"got {config['modules_to_save']}"
        )
    if config.get("init_lora_weights", True) not in _INITIALISATIONS:
        raise ValueError(
            f"{path}: init_lora_weights={config['init_lora_weights']!r} may have changed the "
            "base's weights; convert the adapter to a plain LoRA adapter first"
        )
    for name, value in config.items():
        if name not in _READ and value:
            raise ValueError(f"{path}: {name} must be unset for plain LoRA, got {value!r}")
    base_name = config.get("base_model_name_or_path")
    if base_name is not None and not isinstance(base_name, str):
        raise ValueError(f"{path}: base_model_name_or_path must be a name, got {base_name!r}")
    if type(config.get("r")) is not int or config["r"] < 1:
        raise ValueError(f"{path}: r must be an integer >= 1, got {config.get('r')!r}")
    if not _is_number(config.get("lora_alpha")):
        raise ValueError(f"{path}: lora_alpha must be finite, got {config.get('lora_alpha')!r}")
    _check_patterns(path, config)
    return config


def _check_patterns(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ValueError unless what names layers by regular expressions has such ones."""
    targets = config.get("target_modules")
    patterns = [targets] if isinstance(targets, str) else []
    for setting in ("rank_pattern", "alpha_pattern"):
        found = config.get(setting) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {setting} must map layers to numbers, got {found!r}")
        patterns += found
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{path}: layers must be named by regular expressions, got {pattern!r}: {error}"
            ) from error


def _is_copy_of_base(path: Path, model: nn.Module, key: str, value: Tensor) -> bool:
    """Return whether a tensor is the base's own; peft stores some of them with adapted heads.

    Raises:
        ValueError: if the tensor differs from the base's, which all members share.
    """
    name = key.removeprefix(_LAYER_PREFIX).replace(".base_layer.", ".")
    own = dict(model.named_parameters(remove_duplicate=False)).get(name)
    if own is None:
        return False
    if own.ndim == 2 and own.shape[1:] == value.shape[1:]:
        _check_rows(path, key, value, own)
    if own.shape != value.shape or not _are_roundings(own.detach().cpu(), value):
        raise ValueError(f"{path}: {key} must equal the base's weights, which all members share")
    return True


def _are_roundings(own: Tensor, copy: Tensor) -> bool:
    """Return whether two tensors may be the same numbers, each rounded to its own dtype.

    The base's file may hold the numbers in a third dtype, so neither need be the other's rounding.
    A copy that was rounded, and stored in float32 again, counts as rounded.
    """
    if copy.dtype == torch.float32 and not torch.equal(own, copy):
        for short in (torch.bfloat16, torch.float16):
            if torch.equal(copy.to(short).float(), copy):
                copy = copy.to(short)
    if own.dtype == copy.dtype or not copy.is_floating_point():
        return torch.equal(own, copy)
    step = max(torch.finfo(one.dtype).eps for one in (own, copy))
    parts = zip(torch.split(own, _ROWS), torch.split(copy, _ROWS), strict=True)
    return all(
        torch.allclose(one.float(), other.float(), rtol=step, atol=_SMALLEST)
        for one, other in parts
    )


def _check_rows(path: Path, key: str, found: Tensor, own: Tensor) -> None:
    """Raise ValueError if a tensor with a row for each token has other rows than the base."""
    if len(found) != len(own):
        raise ValueError(
            f"{path}: {key} must have the {len(own)} rows of the base, got {len(found)}: the "
            "adapter was trained with resized embeddings, which members cannot share; train it "
            "without resize_token_embeddings"
        )


def _update(
    path: Path, config: Mapping[str, Any], name: str, layer: nn.Module, pair: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (A, scale * B) of one layer, of shapes (in, r) and (r, out), fp32."""
    try:
        size_in, size_out = layer_shape(layer)
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from error
    if set(pair) != {"A", "B"}:
        raise ValueError(f"{path}: {name} must have lora_A and lora_B, got only lora_{min(pair)}")
    rank = _pattern(config, "rank_pattern", name, config["r"])
    alpha = _pattern(config, "alpha_pattern", name, config["lora_alpha"])
    if type(rank) is not int or rank < 1 or not _is_number(alpha):
        raise ValueError(f"{path}: {name}: rank and alpha must be numbers, got {rank!r}, {alpha!r}")
    a, b = pair["A"].to(torch.float32), pair["B"].to(torch.float32)
    if tuple(a.shape) != (rank, size_in) or tuple(b.shape) != (size_out, rank):
        raise ValueError(
            f"{path}: {name}: lora_A and lora_B must have shapes {(rank, size_in)} and "
            f"{(size_out, rank)} with {rank} of r or rank_pattern, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    up = b * scale
    if not all(map(torch.isfinite, (*a.aminmax(), *up.aminmax()))):
        raise ValueError(f"{path}: {name}: the adapter's weights must be finite")
    return a.T.contiguous(), up.T


def _pattern(config: Mapping[str, Any], setting: str, name: str, default: Any) -> Any:
    """Return peft's override for a layer: the first key that matches the end of its name."""
    for key, value in (config.get(setting) or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _check_targets(
    path: Path, config: Mapping[str, Any], modules: Mapping[str, nn.Module], found: set[str]
) -> None:
    """Check that the weights cover the targeted layers and that `fan_in_fan_out` fits them."""
    targets = config.get("target_modules")
    plain = not config.get("layers_to_transform") and not config.get("exclude_modules")
    expected: set[str] | None = None
    if isinstance(targets, list):
        suffixes = tuple(f".{target}" for target in targets)
        expected = {name for name in modules if f".{name}".endswith(suffixes)}
    elif isinstance(targets, str) and targets != "all-linear":
        expected = {name for name in modules if re.fullmatch(targets, name)}
    if expected is not None and (found - expected or (plain and expected - found)):
        difference = sorted(found - expected or expected - found)
        raise ValueError(
            f"{path}: target_modules {targets!r} and the weights must agree, got a difference at "
            f"{difference[0]}"
        )
    linear = {isinstance(modules[name], nn.Linear) for name in found}
    flag = config.get("fan_in_fan_out")
    if len(linear) == 1 and flag is not None and bool(flag) == linear.pop():
        raise ValueError(
            f"{path}: fan_in_fan_out must be true for Conv1D layers and false for nn.Linear, "
            f"got {flag!r} for {type(modules[min(found)]).__name__}"
        )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
