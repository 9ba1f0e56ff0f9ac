"""The public model and its tokenizer, from a folder, a hub name or a model object."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adapmixed.ensemble.batched_lora import BatchedLoRA, HeadLoRA
from adapmixed.ensemble.vocabulary import TOKENIZER_FILES


def load_base(
    base: Any, dtype: torch.dtype | None, *, revision: str | None = None
) -> tuple[Any, Any]:
    """(model of our own, tokenizer or None).

    Args:
        base: a transformers model, which is copied, a folder or a hub name.
        dtype: of the model; None means fp32, or a model object's own.
        revision: of a hub name: commit, tag or branch; None: the newest.

    Raises:
        ValueError, OSError: if it cannot be read or carries adapters.
    """
    if isinstance(base, torch.nn.Module):
        adapted = any(isinstance(module, BatchedLoRA | HeadLoRA) for module in base.modules())
        if adapted or hasattr(base, "peft_config"):
            raise ValueError("base must be the plain public model, got one that carries adapters")
        if not hasattr(base, "config"):
            raise ValueError(
                f"base must be a transformers model, a folder or a hub name, "
                f"got {type(base).__name__}"
            )
        model = copy.deepcopy(base)
        return (model if dtype is None else model.to(dtype)), None
    if not isinstance(base, str | os.PathLike):
        raise ValueError(
            f"base must be a transformers model, a folder or a hub name, got {type(base).__name__}"
        )
    if isinstance(base, os.PathLike) and not Path(base).is_dir():
        raise ValueError(f"base must be an existing folder, got {os.fspath(base)}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = os.fspath(base)
    try:
        with _quiet_off_terminal():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype or torch.float32, revision=revision
            )
    except (OSError, ValueError):
        raise
    except Exception as error:  # a damaged weights file has an exception type of its own
        raise ValueError(f"base must be a readable model, {name} is not: {error}") from error
    local = Path(name)
    if local.is_dir() and not any((local / file).is_file() for file in TOKENIZER_FILES):
        return model, None
    return model, AutoTokenizer.from_pretrained(name, revision=revision)


@contextmanager
def _quiet_off_terminal() -> Iterator[None]:
    """Keeps transformers' progress bars out of logs; its setting is global, so it is restored."""
    from transformers.utils import logging

    silence = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()
