"""From a corpus to an ensemble folder, whatever happens on the way.

1. the corpus is read once, as a stream; every document goes to the file of its shard;
2. every member is trained from its shard's file, the public model, the settings and a seed derived
   from (seed, member): nothing else is at hand;
3. a member's folder appears whole; `ensemble.json` appears when all of them are there.

With `retrain` one member of a finished ensemble is trained again (`training.retrain`). Members that
the operator has withdrawn, `null` in `ensemble.json`, stay so until they are the one.

A run that was killed at any moment goes on when it is begun again with the same settings and the
same corpus, and ends with the same files, bit for bit (on the same machine and versions).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adapmixed.data.corpus import Corpus
from adapmixed.ensemble.manifest import Manifest
from adapmixed.files import remove_leftovers
from adapmixed.training.base import BaseFacts, base_facts
from adapmixed.training.config import FinetuneConfig
from adapmixed.training.folder import TrainingFolder
from adapmixed.training.head import IN_MEMORY
from adapmixed.training.member import MemberSettings
from adapmixed.training.pool import train_members
from adapmixed.training.progress import Progress
from adapmixed.training.ranks import Place
from adapmixed.training.retrain import RETRAINED, member_number, retrain_member
from adapmixed.training.shards import Spool, spool
from adapmixed.workers import start_server

_LOG = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainingRun:
    """An ensemble to be trained.

    Attributes:
        base: folder or hub name of the public model.
        corpus: the private text.
        output: the ensemble folder; `<output>.private` is made beside it.
        num_models: N >= 1.
        config: of every member's training.
        seed: of the run, public.
        revision: of a hub name: commit, tag or branch; its commit is recorded.
        key_file: the partition's key; None: `<output>.private/shard.key`, drawn if need be.
        validation_fraction: expected share of each shard that is not trained on but validated
            with, in [0, 1) (`shards.hold_out`, `shards.hold_out_end`).
        threads: of every process, >= 1.
        device: "cpu" or "cuda"; of several ranks each takes the GPU of its local rank.
        dtype: of the public model: "float32" or "bfloat16". Adapters are trained in float32.
        stored_dtype: of the adapters' files: "float32" or "float16".
    """

    base: str
    corpus: Corpus
    output: Path
    num_models: int
    config: FinetuneConfig
    seed: int = 0
    revision: str | None = None
    key_file: Path | None = None
    validation_fraction: float = 0.05
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    stored_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("num_models", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not 0 <= self.validation_fraction < 1 or math.isnan(self.validation_fraction):
            raise ValueError(
                f"validation_fraction must be in [0, 1), got {self.validation_fraction}"
            )
        if self.config.early_stopping and not self.validation_fraction:
            raise ValueError(
                "validation_fraction must be > 0 with early_stopping, which measures the epochs on "
                "each shard's held-out text, got 0"
            )
        for name, allowed in (
            ("device", ("cpu", "cuda")),
            ("dtype", ("float32", "bfloat16")),
            ("stored_dtype", ("float32", "float16")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


def train_ensemble(
    run: TrainingRun,
    *,
    place: Place | None = None,
    workers: int = 1,
    say: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    retrain: int | str | None = None,
) -> Manifest:
    """Trains what is missing of an ensemble; returns when all of it is there.

    Args:
        run: what is trained.
        place: this process's share of the members; None: all of them.
        workers: processes that train at a time, >= 1.
        say: takes a line about every finished member; None: standard error. Losses are functions of
            the private text: for the operator.
        progress: told of every step as (work done, work of all); None: a bar on a terminal.
        retrain: a member, by number or folder name, whose shard alone has changed since the
            ensemble was trained: it is trained again, by one process.

    Raises:
        ValueError: if the output was begun with other settings or another corpus, an argument is
            out of range, or other shards than that of `retrain` have changed; see `Corpus`,
            `TrainingFolder`, `base_facts`.
        RuntimeError: if a worker or another rank was killed, or the disk is full.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    place = place or Place()
    if place.world > run.num_models:
        raise ValueError(f"ranks must be at most the {run.num_models} members, got {place.world}")
    if retrain is not None and place.world > 1:
        raise ValueError(f"retrain must run in one process, got {place.world} ranks")
    if workers > 1:
        start_server()
    facts = base_facts(run.base, run.revision)
    if facts.positions is not None and run.config.block_size > facts.positions:
        raise ValueError(
            f"block_size must be <= the base's {facts.positions} positions, got "
            f"{run.config.block_size}"
        )
    targets = facts.targets(run.config.target_modules)
    settings = {
        "base_model": facts.name,
        "revision": facts.revision,
        "tokenizer_files": facts.tokenizer_files,
        "base_sha256": facts.base_sha256,
        **_training(run),
    }
    folder = TrainingFolder(run.output, run.num_models)
    folder.prepare()
    with place.lock(folder.private):
        key = folder.key(run.key_file)
        settings["key_check"] = hmac.new(key, b"adapmixed key", hashlib.sha256).hexdigest()
        folder.check_settings(settings)
        withdrawn = folder.withdrawn()
        if retrain is None:
            missing = folder.missing(withdrawn)
            mine = [i for i in place.members(run.num_models) if i in missing]
            wanted = set(mine)
        else:
            mine = [member_number(retrain, folder.members)]
            wanted = set(range(run.num_models))
            withdrawn.pop(mine[0], None)
        if place.rank == 0:
            remove_leftovers(folder.output, RETRAINED)
        _LOG.info("rank %d of %d trains %d members", place.rank, place.world, len(mine))
        with folder.shards_folder(place.rank) as shards:
            spooled = spool(
                run.corpus.documents(), run.num_models, key=key, wanted=wanted, folder=shards
            )
            _LOG.info("the corpus is read and shared out")
            settings["corpus_hmac"] = spooled.fingerprint

            def train(paths: Mapping[int, Path]) -> None:
                shown = Progress({i: spooled.sizes.get(i, 0) for i in paths}, say, progress)
                if targets == (facts.head,):
                    shown.say(_hidden_states(facts, run, spooled, workers))
                try:
                    train_members(
                        paths,
                        _member_settings(run, facts.name, facts.revision, place),
                        spooled,
                        key,
                        workers=workers,
                        threads=run.threads,
                        progress=shown,
                    )
                finally:
                    shown.close()

            if retrain is not None:
                retrain_member(
                    folder, mine[0], spooled, key, settings, withdrawn,
                    lambda path: train({mine[0]: path}),
                )  # fmt: skip
            else:
                for index in mine:
                    folder.remove_leftovers(index)
                folder.begin(settings)
                if mine:
                    train({index: folder.output / folder.members[index] for index in mine})
        place.wait(folder.private, lambda: folder.missing(withdrawn))
        manifest = Manifest(
            base_model=facts.name,
            members=tuple(
                None if index in withdrawn else name for index, name in enumerate(folder.members)
            ),
            adapted=dict.fromkeys(targets, (run.config.rank,)),
            tokenizer_files=facts.tokenizer_files,
            base_sha256=facts.base_sha256,
            revision=facts.revision,
            training={**_training(run), "corpus_hmac": spooled.fingerprint},
            document_names="positions" if run.corpus.positional else "stable",
            shards=tuple(
                withdrawn[index] if index in withdrawn else folder.record(index)["shard"]
                for index in range(run.num_models)
            ),
        )
        folder.finish(manifest)
        _LOG.info("%s is whole", folder.output)
    return manifest


def _hidden_states(facts: BaseFacts, run: TrainingRun, spooled: Spool, workers: int) -> str:
    """Say how large the hidden states of head members become: a token has at least one byte."""
    # Training and held-out text are each padded to whole blocks.
    tokens = max(spooled.sizes.values(), default=0) + 2 * run.config.block_size
    size = tokens * facts.hidden_bytes * DTYPES[run.dtype].itemsize // 4
    place = "in memory" if size <= IN_MEMORY else f"in memory, or above {IN_MEMORY:,} in a file"
    return f"hidden states: at most {size:,} bytes for each of {workers} workers, {place}"


def _training(run: TrainingRun) -> dict[str, Any]:
    """What members depend on besides text and public model; no path of this machine."""
    return {
        **asdict(run.config),
        "target_modules": list(run.config.target_modules),
        "num_models": run.num_models,
        "seed": run.seed,
        "validation_fraction": run.validation_fraction,
        "threads": run.threads,
        "device": run.device,
        "dtype": run.dtype,
        "stored_dtype": run.stored_dtype,
        "corpus": run.corpus.description(),
    }


def _member_settings(
    run: TrainingRun, base_name: str, revision: str | None, place: Place
) -> MemberSettings:
    device = run.device
    if device == "cuda" and place.world > 1:
        device = f"cuda:{place.local_rank}"
    return MemberSettings(
        base=run.base,
        revision=revision,
        base_name=base_name,
        config=run.config,
        seed=run.seed,
        validation_fraction=run.validation_fraction,
        device=device,
        dtype=DTYPES[run.dtype],
        stored_dtype=DTYPES[run.stored_dtype],
    )
