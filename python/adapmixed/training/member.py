"""One member from its shard's file: train, validate, write the folder in one step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapmixed.data.builtin import Document
from adapmixed.ensemble.public_model import load_base
from adapmixed.files import publish_folder, temporary_folder
from adapmixed.training.adapter import save_adapter
from adapmixed.training.blocks import token_stream
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.finetune import Trained, train_adapter
from adapmixed.training.folder import FORMAT_VERSION, MEMBER_FILE
from adapmixed.training.partition import shard_record
from adapmixed.training.shards import Spool, hold_out, hold_out_end


@dataclass(frozen=True)
class MemberSettings:
    """What training a member depends on, besides its shard.

    Attributes:
        base: folder or hub name of the public model.
        revision: of a hub name.
        base_name: what the adapter's folder calls it.
        config: of the training.
        seed: of the run.
        validation_fraction: expected share of a shard that is kept for validation.
        device: e.g. "cpu", "cuda:0".
        dtype: of the public model.
        stored_dtype: of the adapter's file.
    """

    base: str
    revision: str | None
    base_name: str
    config: FinetuneConfig
    seed: int
    validation_fraction: float
    device: str
    dtype: torch.dtype
    stored_dtype: torch.dtype


class MemberTrainer:
    """Trains members one after the other; the public model is loaded once and never changed."""

    def __init__(self, settings: MemberSettings, spool: Spool, key: bytes) -> None:
        """Loads the public model.

        Raises:
            ValueError: if it has no tokenizer.
        """
        model, tokenizer = load_base(settings.base, settings.dtype, revision=settings.revision)
        if tokenizer is None:
            raise ValueError(f"base must have a tokenizer, {settings.base} has none")
        self._settings = settings
        self._spool = spool
        self._key = key
        self._base = model.to(settings.device).eval()
        self._tokenizer = tokenizer

    def train(self, shard: int, folder: Path, progress: Callable[[float], None]) -> None:
        """Trains one member and puts it in its place.

        Args:
            shard: its number.
            folder: of the member, which is not there yet.
            progress: told the fraction done.

        Raises:
            ValueError: if training diverged.
            RuntimeError: if the disk is full.
        """
        settings, config = self._settings, self._settings.config
        documents = self._spool.read(shard)
        training, validation = hold_out(documents, settings.validation_fraction, key=self._key)
        tokens, held = self._tokens(training), self._tokens(validation)
        if not validation:
            tokens, held = hold_out_end(tokens, settings.validation_fraction)
        trained = train_adapter(
            self._base,
            tokens,
            config,
            seed=settings.seed,
            shard=shard,
            held_out=held,
            scratch=self._spool.folder,
            progress=lambda done, steps: progress(done / steps),
        )
        if not _is_finite(trained):
            raise ValueError(f"{folder.name}: training diverged, a lower learning_rate is needed")
        record = {
            "format_version": FORMAT_VERSION,
            "shard": shard_record(documents, key=self._key),
            "tokens": len(tokens),
            "losses": trained.losses,
            "epoch": trained.epoch,
            "validation": _validation(trained, len(validation), len(held)),
        }
        temporary = temporary_folder(folder)
        save_adapter(
            trained.model,
            temporary,
            config,
            base_name=settings.base_name,
            dtype=settings.stored_dtype,
        )
        text = json.dumps(record, indent=1) + "\n"
        (temporary / MEMBER_FILE).write_text(text, encoding="utf-8")
        publish_folder(temporary, folder)

    def _tokens(self, documents: Sequence[Document]) -> list[int]:
        return token_stream(self._tokenizer, [document.text for document in documents])


def _is_finite(trained: Trained) -> bool:
    weights = (p for p in trained.model.parameters() if p.requires_grad)
    return all(bool(p.isfinite().all()) for p in weights) and all(
        map(math.isfinite, (*trained.losses, *trained.held_out_losses))
    )


def _validation(trained: Trained, documents: int, tokens: int) -> dict[str, Any] | None:
    """Return losses in nats per token on what was held out, or None if nothing was."""
    if not trained.held_out_losses:
        return None
    public, *losses = trained.held_out_losses
    return {
        "documents": documents,
        "tokens": tokens,
        "loss": trained.held_out_losses[trained.epoch],
        "public_loss": public,
        "losses": losses,
    }
