"""Train one member on its shard's file, validate it, and write its folder atomically."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.data.builtin import Document
from adapmixed.ensemble.manifest import MEMBER_FILE, MEMBER_VERSION
from adapmixed.ensemble.public_model import load_base
from adapmixed.files import publish_folder, temporary_folder, write_file
from adapmixed.training.adapter import save_adapter, shorten
from adapmixed.training.blocks import token_stream
from adapmixed.training.finetune import AdapterTrainer, Trained
from adapmixed.training.head import adapts_head_alone
from adapmixed.training.partition import shard_record
from adapmixed.training.shards import Spool, hold_out, hold_out_end

if TYPE_CHECKING:
    from adapmixed.training.base import BaseFacts
    from adapmixed.training.run import TrainingRun


class MemberTrainer:
    """A trainer of members, one after the other, on one public model that is never changed."""

    def __init__(
        self, run: TrainingRun, facts: BaseFacts, device: str, spool: Spool, key: bytes
    ) -> None:
        """Load the public model.

        Args:
            run: the settings of all members.
            facts: facts about the public model.
            device: the device, for instance "cpu" or "cuda:0".
            spool: the shards.
            key: the key of the partition.
        """
        model, tokenizer = load_base(run.base, getattr(torch, run.dtype), revision=facts.revision)
        self._run, self._facts, self._spool, self._key = run, facts, spool, key
        base = model.to(device).eval()
        self._vocab_size = base.config.get_text_config().vocab_size
        self._trainer = AdapterTrainer(base, run.config)
        self._tokenizer = tokenizer

    def train(self, shard: int, folder: Path, progress: Callable[[float], None]) -> None:
        """Train one member and move it to its folder.

        B of an output layer is rounded to bfloat16: an ensemble then keeps it in half the memory.

        Args:
            shard: the member's number.
            folder: the member's folder, which must not exist.
            progress: called with the fraction done.

        Raises:
            ValueError: if training diverged.
            RuntimeError: if the disk is full.
        """
        run = self._run
        documents = self._spool.read(shard)
        training, validation = hold_out(documents, run.validation_fraction, key=self._key)
        tokens, held = self._tokens(training), self._tokens(validation)
        if not validation:
            tokens, held = hold_out_end(tokens, run.validation_fraction)
        trained = self._trainer.train(
            tokens,
            seed=run.seed,
            shard=shard,
            beginning=self._facts.beginning,
            held_out=held,
            scratch=self._spool.folder,
            progress=lambda done, steps: progress(done / steps),
        )
        if not _is_finite(trained):
            raise ValueError(f"{folder.name}: training diverged, use a lower learning_rate")
        if adapts_head_alone(trained.model.get_base_model()):
            shorten(trained.model)
        record = {
            "format_version": MEMBER_VERSION,
            "shard": shard_record(documents, key=self._key),
            "tokens": len(tokens),
            "losses": trained.losses,
            "epoch": trained.epoch,
            "validation": _validation(trained, len(validation), len(held)),
        }
        temporary = temporary_folder(folder)
        save_adapter(trained.model, temporary, run.config, base_name=self._facts.name)
        text = json.dumps(record, indent=1) + "\n"
        write_file(temporary / MEMBER_FILE, text.encode())
        for file in temporary.iterdir():  # the weights, too, depend on private text
            file.chmod(0o600)
        publish_folder(temporary, folder)

    def _tokens(self, documents: Sequence[Document]) -> list[int]:
        texts = [document.text for document in documents]
        return token_stream(self._tokenizer, texts, self._vocab_size)


def _is_finite(trained: Trained) -> bool:
    weights = (p for p in trained.model.parameters() if p.requires_grad)
    return all(bool(p.isfinite().all()) for p in weights) and all(
        map(math.isfinite, (*trained.losses, *trained.held_out_losses))
    )


def _validation(trained: Trained, documents: int, tokens: int) -> dict[str, Any] | None:
    """Return losses on the held-out tokens, in nats per token, or None if there are none."""
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
