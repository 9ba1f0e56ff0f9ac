"""Device, precision and processes of `evaluate`, `generate`, `chat` and `reproduce`."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from adapmixed.commands.options import say_hub

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble
    from adapmixed.ranks import Ranks


def joined_ranks(arguments: argparse.Namespace) -> AbstractContextManager[Ranks]:
    """Join the processes of `torchrun`; GPUs communicate through NCCL.

    Raises:
        ValueError: as `check_device`.
    """
    from adapmixed.ranks import joined

    check_device(arguments)
    return joined(timeout_seconds=arguments.rank_timeout, cuda=arguments.device == "cuda")


def load_ensemble(arguments: argparse.Namespace, ranks: Ranks) -> Ensemble:
    """Load --base and --ensemble on the requested device; raise ValueError without a tokenizer."""
    import torch

    from adapmixed.ensemble import Ensemble
    from adapmixed.ranks import Rank

    device = "cpu" if arguments.device == "vllm" else arguments.device
    if device == "cuda":
        device = f"cuda:{Rank.from_environment().local_rank}"
        torch.cuda.set_device(device)  # NCCL uses the current device
    say_hub(arguments.base)
    found = Ensemble.from_pretrained(
        arguments.base,
        arguments.ensemble,
        dtype=getattr(torch, arguments.dtype),
        device=device,
        ranks=ranks,
    )
    if found.tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    return found


def check_device(arguments: argparse.Namespace) -> None:
    """Raise ValueError if --device cuda is given without a GPU or without CUDA kernels."""
    if arguments.device != "cuda":
        return
    import torch

    from adapmixed.ranks import Rank
    from adapmixed_ext import build_info

    if not build_info()["cuda"]:
        raise ValueError(
            "--device cuda needs adapmixed_ext built with CUDA, this build has no CUDA kernels "
            '(see "CUDA" in the documentation)'
        )
    local, found = Rank.from_environment().local_rank, torch.cuda.device_count()
    if local >= found:
        raise ValueError(f"--device cuda needs GPU {local}, but torch finds {found}")
