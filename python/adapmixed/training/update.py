"""Train the members again whose text has changed: customers come, change and leave.

The old ensemble stays intact while new members are trained in its folder `.next`, where a killed
update goes on. The exchange takes a few file operations (`TrainingFolder.exchange`).
`ensemble.json` is removed first and written last. `run.json` changes to the new corpus while
neither the old nor the new members are in place. So if the process ends at any moment, every
member in place belongs to the corpus in `run.json`, and an ensemble that can be loaded is complete.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adapmixed.ensemble.manifest import read_member_record
from adapmixed.files import remove_leftovers
from adapmixed.training.folder import TrainingFolder
from adapmixed.training.partition import shard_record
from adapmixed.training.shards import Spool

_LEDGER = (
    "The ledgers of this ensemble end with it. What they charged stays spent, and a new period "
    "begins with a new ledger. For everybody whose text is in both, ε and δ of the periods add, or "
    "their plans compose ('adapmixed ledger show --all')."
)


def update_members(
    folder: TrainingFolder,
    spool: Spool,
    key: bytes,
    settings: Mapping[str, Any],
    train: Callable[[Mapping[int, Path]], None],
    say: Callable[[str], None],
) -> None:
    """Train the members whose shards have changed, without changing other members' files.

    The caller writes `ensemble.json`.

    Args:
        folder: the folder of a run.
        spool: all shards of the current corpus.
        key: the key of the partition.
        settings: as in `TrainingFolder.begin`, for the current corpus.
        train: trains members into the folders that it is given.
        say: called with a line about what will be trained, and about the ledger.

    Raises:
        ValueError: if there is text of a withdrawn member.
    """
    records = [shard_record(spool.read(at), key=key) for at in range(len(folder.members))]
    for at in folder.withdrawn():
        if records[at]["documents"]:
            raise ValueError(
                f"update needs a corpus without the text of {folder.members[at]}, which was "
                f"withdrawn (null in ensemble.json), got {records[at]['documents']} documents: "
                "remove them, or put its name back"
            )
    changed: dict[int, str] = {}
    for at, name in enumerate(folder.members):
        remove_leftovers(folder.output, name)
        remove_leftovers(folder.next, name)
        if not folder.is_finished(at):
            changed[at] = "missing"
        elif folder.record(at)["shard"] != records[at]:
            kind = "added" if folder.is_empty(at) else "changed"
            changed[at] = kind if records[at]["documents"] else "left"
    say(_summary(folder, changed))
    paths = {at: folder.next / folder.members[at] for at in changed}
    for at, path in list(paths.items()):
        if path.is_dir():
            if read_member_record(path)["shard"] == records[at]:  # of a killed update
                del paths[at]
            else:
                shutil.rmtree(path)
    folder.next.mkdir(mode=0o700, exist_ok=True)
    train(paths)
    folder.exchange(settings, changed)


def _summary(folder: TrainingFolder, changed: Mapping[int, str]) -> str:
    """Return what an update trains and what it means, for the operator alone."""
    if not changed:
        return "Update: no member is to be trained, and the ledger goes on."
    names = ", ".join(folder.members[at] for at in changed)
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(changed.values()).items())
    return (
        f"Update: trains {names} ({counts}), {len(changed)} of {len(folder.members)} members; the "
        f"others keep their bytes. This is private: do not publish it. {_LEDGER}"
    )
