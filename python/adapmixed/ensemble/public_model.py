"""Load the public model and its tokenizer from a folder, a hub name or a model object."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from adapmixed.ensemble.batched_lora import BatchedLoRA
from adapmixed.ensemble.digests import CONFIG, has_tokenizer
from adapmixed.ensemble.manifest import FILE_NAME
from adapmixed.ensemble.member import CONFIG_FILE
from adapmixed.ensemble.output_layer import OutputLayer


def load_base(
    base: Any, dtype: torch.dtype | None, *, revision: str | None = None
) -> tuple[Any, Any]:
    """Return a public model that may be changed, and its tokenizer or None.

    Args:
        base: a folder, a hub name, or a transformers model, which is copied.
        dtype: the model's dtype; None for fp32, or for a model object's own.
        revision: commit, tag or branch of a hub name; None for the newest.

    Raises:
        ValueError: if the model cannot be read or carries adapters, or as `check_base`.
        OSError: if there is no such model.
    """
    if isinstance(base, torch.nn.Module):
        adapted = any(isinstance(module, BatchedLoRA | OutputLayer) for module in base.modules())
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
    with reading_base(base):
        return _read(os.fspath(base), dtype, revision)


def check_base(base: Any) -> None:
    """Check that a base is a folder of a model, or can be a hub name, before the hub is asked.

    Args:
        base: as in `load_base`. Anything but a string or a path passes.

    Raises:
        ValueError: if it is a path without a folder, or the folder of an ensemble or an adapter.
    """
    if not isinstance(base, str | os.PathLike):
        return
    name = os.fspath(base)
    local = Path(name)
    if not name or not local.is_dir():
        if isinstance(base, os.PathLike):
            raise ValueError(f"base must be an existing folder, got {name!r}")
        # What the hub has no such name for is a path; so is a name below a folder that is here.
        try:
            cached = isinstance(try_to_load_from_cache(name, CONFIG), str)
            below = "/" in name and local.parent.is_dir() and not cached
            is_path = below or local.exists()
        except HFValidationError:
            below, is_path = False, True
        if is_path:
            why = f", which is a path since {local.parent} is a folder here" if below else ""
            raise ValueError(f"base must be an existing folder or a hub name, got {name!r}{why}")
        return
    for file, kind in ((FILE_NAME, "an ensemble"), (CONFIG_FILE, "an adapter")):
        if (local / file).is_file() and not (local / CONFIG).is_file():
            raise ValueError(
                f"base must be a public model, got {name} with {file} but no {CONFIG}, "
                f"which is {kind}: base and folder may be swapped"
            )


@contextmanager
def reading_base(base: str | os.PathLike[str]) -> Iterator[None]:
    """Check a base, and name it in every error of what reads it.

    Raises:
        ValueError: as `check_base`.
        OSError: if reading raises OSError. Errors of the hub do not name the model themselves.
    """
    check_base(base)
    name = os.fspath(base)
    try:
        yield
    except OSError as error:
        if Path(name).is_dir():
            raise
        raise OSError(
            f"base must be an existing folder or a hub name that can be read, got {name!r}: {error}"
        ) from error


def _read(name: str, dtype: torch.dtype | None, revision: str | None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder or hub name."""
    from transformers import AutoModelForCausalLM

    try:
        with _quiet_off_terminal():
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype or torch.float32, revision=revision
            )
    except (OSError, ValueError):
        raise
    except Exception as error:  # damaged weights files raise many types of exception
        raise ValueError(f"base must be a readable model, {name} is not: {error}") from error
    if hasattr(model, "peft_config"):  # transformers adds an adapter that lies beside the weights
        raise ValueError(
            f"base must be the plain public model, got {name} with adapter_config.json, which "
            "makes an adapter part of it"
        )
    return model, load_tokenizer(name, revision)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub name; None for a folder without one."""
    from transformers import AutoTokenizer

    local = Path(name)
    if local.is_dir() and not has_tokenizer(local):
        return None
    return AutoTokenizer.from_pretrained(name, revision=revision)


@contextmanager
def _quiet_off_terminal() -> Iterator[None]:
    """Hide transformers' progress bars if standard error is no terminal, then restore them."""
    from transformers.utils import logging

    silence = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if silence:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silence:
            logging.enable_progress_bar()
