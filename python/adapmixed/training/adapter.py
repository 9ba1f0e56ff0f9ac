"""Put a peft adapter on a copy of the public model, and save it in a folder."""

from __future__ import annotations

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from adapmixed.training.settings import FinetuneConfig


def adapted_copy(base: Any, config: FinetuneConfig) -> Any:
    """Return a copy of `base` with a new LoRA adapter.

    A is drawn from torch's global random state, and B is 0. Modules are copied. Weights are shared
    with `base` and frozen in the copy.

    Args:
        base: a transformers causal language model.
        config: the settings; rank, alpha and target_modules are used.
    """
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(**_settings(base, config))
    shared = {id(p): torch.nn.Parameter(p.detach(), requires_grad=False) for p in base.parameters()}
    with warnings.catch_warnings():
        # peft uses an old name of transformers, and warns about merging adapters of a tied head.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=r"Model has `tie_word_embeddings=True`")
        return get_peft_model(copy.deepcopy(base, shared), settings)


def lora_layers(model: Any) -> list[Any]:
    """Return peft's LoRA layers of a model."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def begin_adapter(model: Any, *, train_a: bool) -> None:
    """Draw A of every adapted layer from torch's global random state, and set B to 0.

    Args:
        model: the result of `adapted_copy`.
        train_a: whether A is trained, and not B alone.
    """
    for layer in lora_layers(model):
        (name,) = layer.active_adapters
        layer.reset_lora_parameters(name, init_lora_weights=True)
        layer.lora_A[name].weight.requires_grad_(train_a)


@torch.no_grad()
def shorten(model: Any) -> None:
    """Round every B to bfloat16."""
    for layer in lora_layers(model):
        (name,) = layer.active_adapters
        weight = layer.lora_B[name].weight
        weight.copy_(weight.bfloat16())


def save_adapter(
    model: Any, folder: str | os.PathLike[str], config: FinetuneConfig, *, base_name: str
) -> None:
    """Write an ordinary peft folder that contains no path of this machine.

    Weights are in bfloat16 where it holds them exactly, else in float32.

    Args:
        model: the result of `adapted_copy`.
        folder: the folder, created if it is missing; its adapter files are replaced.
        config: the settings that the adapter was trained with.
        base_name: the value of `base_model_name_or_path`, a hub name or a neutral word.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = _settings(model, config) | {"base_model_name_or_path": base_name, "peft_type": "LORA"}
    written |= {"inference_mode": True, "lora_dropout": 0.0}
    text = json.dumps(written, indent=2, sort_keys=True) + "\n"
    (target / "adapter_config.json").write_text(text, encoding="utf-8")
    # By default peft also stores the whole output layer if that is adapted.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {
        name: _short(value.detach().to("cpu", torch.float32)) for name, value in state.items()
    }
    save_file(weights, str(target / "adapter_model.safetensors"), metadata={"format": "pt"})


def _short(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in bfloat16 if that is exact."""
    short = value.contiguous().bfloat16()
    return short if torch.equal(short.float(), value) else value.contiguous()


def _settings(model: Any, config: FinetuneConfig) -> dict[str, Any]:
    """Return peft's settings of an adapter on this model."""
    from transformers.pytorch_utils import Conv1D

    suffixes = tuple(f".{target}" for target in config.target_modules)
    # GPT-2's Conv1D stores weights as (in, out).
    conv1d = any(
        isinstance(getattr(module, "base_layer", module), Conv1D)
        for name, module in model.named_modules()
        if f".{name}".endswith(suffixes)
    )
    return {
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "target_modules": list(config.target_modules),
        "fan_in_fan_out": conv1d,
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
