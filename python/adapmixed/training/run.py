"""Train an ensemble folder from a corpus, with continuation after interruptions.

1. The corpus is read once, as a stream. Every document is written to the file of its shard.
2. Every member is trained from its shard's file, the public model, the settings and a seed derived
   from (seed, member), and from nothing else.
3. A member's folder appears complete. `ensemble.json` appears when all members are finished.

With `retrain`, one member of a finished ensemble is trained again (`training.retrain`). Members
that the operator has withdrawn (`null` in `ensemble.json`) stay withdrawn until they are retrained.

A run that was killed at any moment continues if it is begun again with the same settings and the
same corpus. On the same machine and versions it ends with the same files in every bit.
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
from adapmixed.ensemble.ensemble import try_members
from adapmixed.ensemble.manifest import Manifest
from adapmixed.ensemble.public_model import load_base, reading_base
from adapmixed.files import check_locks, remove_leftovers
from adapmixed.limits import check_count, check_models
from adapmixed.training.base import BaseFacts, base_facts, documents_of
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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainingRun:
    """An ensemble to be trained.

    Attributes:
        base: folder or hub name of the public model.
        corpus: the private text.
        output: the ensemble folder. `<output>.private`, in the same place, holds private files.
        num_models: N >= 1.
        config: the settings of every member's training.
        seed: seed of the run, which is public.
        revision: commit, tag or branch of a hub name, or None; the commit is recorded.
        key_file: file with the partition's key; None for `<output>.private/shard.key`, which is
            created if it is missing.
        validation_fraction: expected share of each shard that is held out for validation, in [0, 1)
            (`shards.hold_out`, `shards.hold_out_end`).
        threads: threads of every process, >= 1.
        device: "cpu" or "cuda". Among several processes, each takes the GPU of its local rank.
        dtype: dtype of the public model, "float32" or "bfloat16". Adapters are trained in float32.

    Raises:
        ValueError: if a value is out of range.
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

    def __post_init__(self) -> None:
        check_models(self.num_models)
        check_count("threads", self.threads)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        if not 0 <= self.validation_fraction < 1 or math.isnan(self.validation_fraction):
            raise ValueError(
                f"validation_fraction must be in [0, 1), got {self.validation_fraction}"
            )
        if self.config.early_stopping and not self.validation_fraction:
            raise ValueError(
                "validation_fraction must be > 0 with early_stopping, which needs held-out text of "
                "each shard, got 0"
            )
        for name, allowed in (("device", ("cpu", "cuda")), ("dtype", tuple(DTYPES))):
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
    """Train the missing members of an ensemble, and return when all members are finished.

    Args:
        run: the ensemble to train.
        place: the rank of this process, which decides its members; None to train all members.
        workers: number of worker processes, >= 1. With more than one, a script must call this under
            `if __name__ == "__main__":`.
        say: called with a line about every finished member; None for standard error.
        progress: called with (work done, work in all) as it goes on; None for a bar on a terminal.
        retrain: the number or folder name of a member to train again in one process, because its
            shard alone has changed since the ensemble was trained; or None.

    Returns:
        the content of `ensemble.json`.

    Raises:
        ValueError: if the output was begun with other settings or another corpus.
        ValueError: if an argument is out of range, or the corpus or the base cannot be used (see
            `Corpus`, `TrainingFolder` and `base_facts`).
        ValueError: if the trial of a base of an untested type fails (`try_members`).
        ValueError: if other shards than that of `retrain` have changed.
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
    with reading_base(run.base):
        facts = base_facts(run.base, run.revision)
        documents = documents_of(run.corpus, run.base, facts.revision)
    if facts.longest_block is not None and run.config.block_size > facts.longest_block:
        before = f" after the {len(facts.beginning)} that begin a text" if facts.beginning else ""
        raise ValueError(
            f"block_size must be <= the base's {facts.longest_block} positions{before}, got "
            f"{run.config.block_size}"
        )
    targets = facts.targets(run.config.target_modules)
    if not facts.tested:  # refuse now what could not be loaded after the training
        try_members(*load_base(run.base, DTYPES[run.dtype], revision=facts.revision), targets)
    settings = {
        "base_model": facts.name,
        "revision": facts.revision,
        "base_files": facts.files,
        "beginning": list(facts.beginning),
        **_training(run),
    }
    folder = TrainingFolder(run.output, run.num_models)
    check_locks(folder.private)
    folder.prepare()
    with place.lock(folder.private):
        key = folder.key(run.key_file)
        settings["key_check"] = hmac.new(key, b"adapmixed key", hashlib.sha256).hexdigest()
        folder.check_settings(settings)
        if retrain is None:
            withdrawn = folder.withdrawn()
            missing = folder.missing(withdrawn)
            mine = [i for i in place.members(run.num_models) if i in missing]
            wanted = set(mine)
        else:
            mine = [member_number(retrain, folder.members)]
            wanted = set(range(run.num_models))
            withdrawn = folder.withdrawn(mine[0])
            withdrawn.pop(mine[0], None)
        if place.rank == 0:
            remove_leftovers(folder.output, RETRAINED)
            folder.remove_shards(place.world)  # no rank of this run begins with these
        _LOG.info("rank %d of %d trains %d members", place.rank, place.world, len(mine))
        with folder.shards_folder(place.rank) as shards:
            spooled = spool(documents, run.num_models, key=key, wanted=wanted, folder=shards)
            _LOG.info("the corpus is divided into shards")
            settings["corpus_hmac"] = spooled.fingerprint
            settings["corpus_files"] = run.corpus.files()  # for the private folder alone

            def train(paths: Mapping[int, Path]) -> None:
                shown = Progress({i: spooled.sizes.get(i, 0) for i in paths}, say, progress)
                empty = sum(i not in spooled.sizes for i in paths)
                if empty:
                    shown.say(_empty_shards(empty, len(paths)))
                if targets == (facts.head,):
                    _LOG.info("%s", _hidden_states(facts, run, spooled, workers))
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
            base_files=facts.files,
            revision=facts.revision,
            training={**_training(run), "corpus_hmac": spooled.fingerprint},
            document_names="positions" if run.corpus.positional else "stable",
            beginning=facts.beginning,
            shards=tuple(
                withdrawn[index] if index in withdrawn else folder.record(index)["shard"]
                for index in range(run.num_models)
            ),
        )
        if retrain is not None:
            folder.keep_withdrawn(withdrawn)
        folder.finish(manifest)
        folder.remove_shards(0)  # of ranks that did not begin again
        _LOG.info("%s is complete", folder.output)
    return manifest


def _empty_shards(empty: int, trained: int) -> str:
    """Return the warning about shards without a document, which is for the operator alone."""
    return (
        f"warning: {empty} of the {trained} shards to train on are empty, so that their members "
        "answer as the public model does. This number depends on the private text: do not publish "
        "it"
    )


def _hidden_states(facts: BaseFacts, run: TrainingRun, spooled: Spool, workers: int) -> str:
    """Return the largest size of hidden states; a token has at least one byte.

    It depends on the largest shard's text.
    """
    # Training and held-out text are each padded to whole blocks.
    tokens = max(spooled.sizes.values(), default=0) + 2 * run.config.block_size
    size = tokens * facts.hidden_bytes * DTYPES[run.dtype].itemsize // 4
    place = "in memory" if size <= IN_MEMORY else f"in memory, or above {IN_MEMORY:,} in a file"
    return f"hidden states: at most {size:,} bytes for each of {workers} workers, {place}"


def _training(run: TrainingRun) -> dict[str, Any]:
    """Return the settings that members depend on, without paths of this machine."""
    return {
        **asdict(run.config),
        "target_modules": list(run.config.target_modules),
        "num_models": run.num_models,
        "seed": run.seed,
        "validation_fraction": run.validation_fraction,
        "threads": run.threads,
        "device": run.device,
        "dtype": run.dtype,
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
    )
