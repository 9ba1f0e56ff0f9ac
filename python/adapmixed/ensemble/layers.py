"""Find the decoder blocks, the output layer and the linear layers of a causal language model."""

from __future__ import annotations

from typing import Any

from torch import nn


def head_name(model: Any) -> str:
    """Return the full name of the output layer, for instance "lm_head".

    Raises:
        ValueError: if the model has no output layer.
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            return str(name)
    raise ValueError(f"model must have an output layer, {type(model).__name__} has none")


def block_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the decoder blocks from the first to the last.

    The blocks are the only list with as many modules as the configuration has hidden layers. The
    result is empty if there is no such list or more than one.
    """
    depth = model.config.get_text_config().num_hidden_layers
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return tuple(f"{outer[0]}.{i}" for i in range(depth)) if len(outer) == 1 else ()


def linear_names(model: Any) -> tuple[str, ...]:
    """Return the full names of the layers that a LoRA can adapt, in the model's order."""
    from transformers.pytorch_utils import Conv1D

    kinds = nn.Linear | Conv1D
    return tuple(name for name, module in model.named_modules() if isinstance(module, kinds))
