"""Train an ensemble folder from a corpus, in one process or several, and go on after a kill.

1. The corpus is read as a stream, and every document is written to the file of its shard. With a
   column of names, each name has a shard of its own: its place in the table of enrolment, which a
   reading beforehand makes.
2. Every member is trained from its shard's file, the public model, the settings and a seed derived
   from (seed, member), and from nothing else.
3. A member's folder appears complete, in `.next`. When all members are finished, they are put in
   place, and `ensemble.json` appears.

With `update`, the members whose text has changed are trained again. Members that the operator has
withdrawn (`null` in `ensemble.json`) stay withdrawn until then.

A run that was killed at any moment continues if it is begun again with the same settings and the
same corpus. On the same machine and versions it ends with the same files in every bit.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from adapmixed.data.corpus import Corpus
from adapmixed.ensemble.ensemble import try_members
from adapmixed.ensemble.members import (
    MEMBER_FILE,
    MEMBER_VERSION,
    Manifest,
    read_manifest,
    read_member_record,
)
from adapmixed.ensemble.public_model import FILE_NAME, load_base
from adapmixed.files import publish_folder, temporary_folder, write_file
from adapmixed.limits import check_count, check_models, check_option
from adapmixed.ranks import SINGLE, Rank, Ranks
from adapmixed.text import token_stream
from adapmixed.training.blocks import adapts_head_alone
from adapmixed.training.finetune import AdapterTrainer, save_adapter, shorten
from adapmixed.training.settings import BaseFacts, FinetuneConfig, base_facts, documents_of
from adapmixed.training.shards import (
    KEY_BYTES,
    Spool,
    TrainingFolder,
    await_path,
    by_hash,
    by_table,
    create_key,
    enrol,
    hold_out,
    load_key,
    places_line,
    shard_record,
    sharing_line,
)
from adapmixed.workers import start_server

_LOG = logging.getLogger(__name__)
Train = Callable[[int, Path], None]
"""What trains a member, given its number and its folder."""
_worker: Train | None = None


@dataclass(frozen=True)
class TrainingRun:
    """An ensemble to be trained.

    Attributes:
        base: folder or hub name of the public model.
        corpus: the private text.
        output: the ensemble folder. `<output>.private`, in the same place, holds private files.
        num_models: N >= 1, a public constant: members, and places for the names of the corpus.
        config: the settings of every member's training.
        seed: seed of the run, which is public.
        revision: commit, tag or branch of a hub name, or None; the commit is recorded.
        threads: threads of every process, >= 1.
        device: "cpu" or "cuda". Among several processes, each takes the GPU of its local rank.
        dtype: dtype of the public model, "float32" or "bfloat16". Adapters are trained in float32.
        share_shards: whether names of the corpus' `id_column` are hashed to shards, so that several
            can share one, instead of having a place each. Other corpora are always hashed.

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
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    share_shards: bool = False

    def __post_init__(self) -> None:
        check_models(self.num_models)
        check_count("threads", self.threads)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        check_option("device", self.device, ("cpu", "cuda"))
        check_option("dtype", self.dtype, ("float32", "bfloat16"))

    @property
    def unit(self) -> str | None:
        """The column of names if every name has a place of its own, else None."""
        return None if self.share_shards else self.corpus.id_column


def train_ensemble(
    run: TrainingRun,
    *,
    ranks: Ranks = SINGLE,
    workers: int = 1,
    say: Callable[[str], None] | None = None,
    update: bool = False,
) -> Manifest:
    """Train the missing members of an ensemble, and return when all members are finished.

    Args:
        run: the ensemble to train.
        ranks: the processes that train it (`adapmixed.ranks.joined`), which take members in turn
            and see one file system.
        workers: number of worker processes, >= 1. With more than one, a script must call this under
            `if __name__ == "__main__":`.
        say: called with a line about every finished member, and about places or shared shards; None
            for standard error.
        update: whether to train the members again whose text has changed. The old ensemble stays
            intact until all of them are finished.

    Returns:
        the content of `ensemble.json`.

    Raises:
        ValueError: if the output was begun with other settings or another corpus.
        ValueError: if an argument is out of range, or the corpus or the base cannot be used (see
            `Corpus`, `TrainingFolder` and `base_facts`).
        ValueError: if the trial of a base of an untested type fails (`try_members`).
        ValueError: if there are more names than places, or `update` is not possible.
        RuntimeError: if a worker or another rank was killed.
    """
    check_count("workers", workers)
    ranks = ranks.over(run.num_models)
    folder = TrainingFolder(run.output, run.num_models)
    begun = folder.begun()
    if update and not begun.get("places"):
        raise ValueError(
            f"update must be of an ensemble in {run.output} whose names have places of their own, "
            f"got {'names that share shards' if begun else 'none'}: train the whole corpus into a "
            "new output"
        )
    facts = base_facts(run.base, run.revision)
    documents = documents_of(run.corpus, run.base, facts.revision)
    names: set[str] = set()
    if run.corpus.id_column is not None:
        reading = documents_of(run.corpus, run.base, facts.revision)
        names = {document.identifier for document in reading}
    if facts.longest_block is not None and run.config.block_size > facts.longest_block:
        before = f" after the {len(facts.beginning)} that begin a text" if facts.beginning else ""
        raise ValueError(
            f"block_size must be <= the base's {facts.longest_block} positions{before}, got "
            f"{run.config.block_size}"
        )
    targets = facts.targets(run.config.target_modules)
    if not facts.tested:  # refuse now what could not be loaded after the training
        dtype = getattr(torch, run.dtype)
        try_members(*load_base(run.base, dtype, revision=facts.revision), targets)
    unplaced = [None] * run.num_models
    if run.unit and not begun:  # before a file is written; the key does not matter
        enrol(unplaced, names, key=bytes(KEY_BYTES))
    tell = say or partial(tqdm.write, file=sys.stderr)  # above a bar
    settings = {
        "unit": run.unit,
        "base_model": facts.name,
        "revision": facts.revision,
        "base_files": facts.files,
        "beginning": list(facts.beginning),
        **_training(run),
    }
    mine = range(ranks.rank, run.num_models, ranks.world)
    with folder.held() if ranks.is_main else nullcontext():
        if ranks.is_main:
            create_key(folder.key_file)
        ranks.wait()  # until the main process has made the folders
        await_path(folder.key_file)
        key = load_key(folder.key_file)
        settings["key_check"] = hmac.new(key, b"adapmixed key", hashlib.sha256).hexdigest()
        table = None
        column = repr(run.corpus.id_column)
        if run.unit:
            trained = map(folder.record, range(run.num_models))
            empty = [at for at, record in enumerate(trained) if record and not record["documents"]]
            table = enrol(begun.get("places") or unplaced, names, key=key, empty=empty)
            shard_of, line = by_table(table, key), places_line(table, column)
        else:
            shard_of = by_hash(run.num_models, key)
            line = sharing_line(names, run.num_models, column, key=key)
        settings["places"] = table
        folder.check_settings(settings, update=update)
        if ranks.is_main and names:
            tell(line)
        with TemporaryDirectory(prefix="shards-", dir=folder.private) as shards:
            wanted = range(run.num_models) if ranks.is_main else mine
            spooled = Spool(documents, shard_of, key=key, wanted=wanted, folder=Path(shards))
            settings["corpus_hmac"] = spooled.fingerprint
            records = {at: shard_record(spooled.read(at), key=key) for at in wanted}
            withdrawn = folder.withdrawn()
            if update:
                for at in withdrawn & records.keys():
                    if documents := records[at]["documents"]:
                        raise ValueError(
                            f"update needs a corpus without the text of {folder.members[at]}, "
                            f"which was withdrawn (null in ensemble.json), got {documents} "
                            "documents: remove them, or put its name back"
                        )
                withdrawn = withdrawn if settings == begun else set()
            changed = [
                at for at in wanted if at not in withdrawn and folder.record(at) != records[at]
            ]
            ranks.wait()
            ranks.agree(settings)
            if ranks.is_main:
                folder.next.mkdir(mode=0o700, exist_ok=True)
                if update:
                    tell(_update_line(folder, changed))
                else:
                    folder.begin(settings)
                empty = [at for at in changed if not records[at]["documents"]]
                if empty and table is None:
                    tell(
                        f"warning: {len(empty)} of the {len(changed)} shards to train on are "
                        "empty, so that their members answer as the public model does. This number "
                        "depends on the private text: do not publish it"
                    )
            ranks.wait()  # until the main process has recorded the run
            paths = {at: folder.next / folder.members[at] for at in changed if at in mine}
            for at, path in list(paths.items()):
                if path.is_dir() and read_member_record(path)["shard"] == records[at]:
                    del paths[at]  # of a killed run
                elif path.is_dir():
                    shutil.rmtree(path)
            device = run.device
            if device == "cuda" and not ranks.single:
                device = f"cuda:{Rank.from_environment().local_rank}"
            trainer = partial(member_trainer, run, facts, device, spooled, key)
            steps = {at: run.config.expected_steps(spooled.sizes[at]) for at in paths}
            _LOG.info("rank %d of %d trains %d members", ranks.rank, ranks.world, len(paths))
            finished = train_members(paths, trainer, workers=workers, threads=run.threads)
            show_progress(finished, steps, tell)
        ranks.wait()  # until all members are there
        if ranks.is_main:
            folder.exchange(settings, changed)
            members = enumerate(folder.members)
            folder.finish(
                Manifest(
                    base_model=facts.name,
                    members=tuple(None if at in withdrawn else name for at, name in members),
                    adapted=dict.fromkeys(targets, run.config.rank),
                    base_files=facts.files,
                    revision=facts.revision,
                    training={**_training(run), "corpus_hmac": spooled.fingerprint},
                    document_names="positions" if run.corpus.positional else "stable",
                    unit=run.unit,
                    beginning=facts.beginning,
                    shards=tuple(records.values()),
                )
            )
        ranks.wait()  # until the main process has written `ensemble.json`
        await_path(folder.output / FILE_NAME)
    return read_manifest(folder.output)


def _update_line(folder: TrainingFolder, changed: Collection[int]) -> str:
    """Return what an update will train, and what it means for the ledger."""
    if not changed:
        return "Update: no member is to be trained, and the ledger goes on."
    return (
        f"Update: trains {', '.join(folder.members[at] for at in changed)}, {len(changed)} of "
        f"{len(folder.members)} members; the others keep their bytes. This is private: do not "
        "publish it. The ledgers of this ensemble end with it. What they charged stays spent, and "
        "a new period begins with a new ledger. For everybody whose text is in both, ε and δ of "
        "the periods add, or their plans compose ('adapmixed ledger show --all')."
    )


def _training(run: TrainingRun) -> dict[str, Any]:
    """Return the settings that members depend on, without paths of this machine."""
    return {
        **asdict(run.config),
        "target_modules": list(run.config.target_modules),
        "num_models": run.num_models,
        "seed": run.seed,
        "threads": run.threads,
        "device": run.device,
        "dtype": run.dtype,
        "corpus": run.corpus.description(),
    }


# Members, one after the other


def member_trainer(
    run: TrainingRun, facts: BaseFacts, device: str, spool: Spool, key: bytes
) -> Train:
    """Load the public model, and return the function that trains a member into a new folder.

    B of an output layer is rounded to bfloat16: an ensemble then keeps it in half the memory. The
    function raises ValueError if training diverges.

    Args:
        run: the settings of all members.
        facts: facts about the public model.
        device: the device, for instance "cpu" or "cuda:0".
        spool: the shards.
        key: the key of the partition.
    """
    model, tokenizer = load_base(run.base, getattr(torch, run.dtype), revision=facts.revision)
    vocab_size = model.config.get_text_config().vocab_size
    trainer = AdapterTrainer(model.to(device), run.config)

    def train(shard: int, folder: Path) -> None:
        documents = spool.read(shard)
        stream = token_stream(tokenizer, [document.text for document in documents], vocab_size)
        tokens, held = hold_out(stream, run.config.validation_fraction)
        trained = trainer.train(
            tokens, seed=run.seed, shard=shard, beginning=facts.beginning, held_out=held
        )
        weights = (p for p in trained.model.parameters() if p.requires_grad)
        losses = (*trained.losses, *trained.held_out_losses)
        finite = all(map(math.isfinite, losses)) and all(bool(p.isfinite().all()) for p in weights)
        if not finite:
            raise ValueError(f"{folder.name}: training diverged, use a lower learning_rate")
        if adapts_head_alone(trained.model.get_base_model()):
            shorten(trained.model)
        record: dict[str, Any] = {
            "format_version": MEMBER_VERSION,
            "shard": shard_record(documents, key=key),
            "tokens": len(tokens),
            "losses": trained.losses,
            "epoch": trained.epoch,
            "validation": None,
        }
        if trained.held_out_losses:  # nats per token
            public, *after = trained.held_out_losses
            record["validation"] = {
                "tokens": len(held),
                "loss": trained.held_out_losses[trained.epoch],
                "public_loss": public,
                "losses": after,
            }
        temporary = temporary_folder(folder)
        save_adapter(trained.model, temporary, run.config, base_name=facts.name)
        text = json.dumps(record, indent=1) + "\n"
        write_file(temporary / MEMBER_FILE, text.encode())
        for file in temporary.iterdir():  # the weights, too, depend on private text
            file.chmod(0o600)
        publish_folder(temporary, folder)

    return train


def train_members(
    paths: Mapping[int, Path], trainer: Callable[[], Train], *, workers: int, threads: int
) -> Iterator[tuple[int, Path]]:
    """Train the given members in one process or several, and yield each when it is written.

    Args:
        paths: the folder of each member, by number; none of them may exist.
        trainer: makes the `member_trainer` of a process.
        workers: number of processes, >= 1; 1 trains in this process.
        threads: threads of each process. The last bits of sums depend on this number, so a member
            depends on it, too.

    Raises:
        ValueError: if training diverges.
        RuntimeError: if a worker process ended early.
    """
    if not paths:
        return
    if workers == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            train = trainer()
            for shard, path in paths.items():
                train(shard, path)
                yield shard, path
        finally:
            torch.set_num_threads(before)
        return
    executor = ProcessPoolExecutor(
        min(workers, len(paths)),
        mp_context=start_server(),
        initializer=_begin,
        initargs=(trainer, threads),
    )
    try:
        running = {executor.submit(_train, *member): member for member in paths.items()}
        for future in as_completed(running):
            future.result()
            yield running[future]
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process ended early, and finished members are kept: in a script, call this "
            'under `if __name__ == "__main__":`; if memory was short, use fewer workers'
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(trainer: Callable[[], Train], threads: int) -> None:
    """Prepare a worker process."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _worker = trainer()


def _end_with_parent() -> None:
    """End this worker if its parent is killed; otherwise it would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _train(shard: int, path: Path) -> None:
    """Train one member in a worker process."""
    assert _worker is not None
    _worker(shard, path)


def show_progress(
    finished: Iterable[tuple[int, Path]], steps: Mapping[int, int], say: Callable[[str], None]
) -> None:
    """Show a bar on a terminal, and say which members are finished, and the time left.

    The work of a member is measured by its steps: an empty shard has none. Values that depend on
    the text of a shard, such as its validation loss, are only logged and never in a line.

    Args:
        finished: yields the members as they are trained.
        steps: expected steps of each member to be trained.
        say: called with each line.
    """
    left, total, begun = dict(steps), sum(steps.values()), time.monotonic()
    with tqdm(total=total, unit="step", disable=None, leave=False) as bar:
        for shard, path in finished:
            bar.update(left.pop(shard))
            rest, words = sum(left.values()), ""  # before there is a speed
            if (done := total - rest) or not rest:
                seconds = (time.monotonic() - begun) * rest / max(done, 1)
                words = f", {tqdm.format_interval(seconds)} left"
            say(f"{path.name}: finished ({len(steps) - len(left)} of {len(steps)}{words})")
            bar.clear()
            record = read_member_record(path)
            figures = (record["shard"]["documents"], record["tokens"], record["validation"])
            _LOG.info("%s: %d documents, %d tokens, validation %s", path.name, *figures)
