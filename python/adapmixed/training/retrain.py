"""Train one shard again, for instance after a user withdrew a document.

The old ensemble stays intact while the new member is trained. The exchange takes a few file
operations. `ensemble.json` is removed first and written last. `run.json` changes to the new corpus
while neither the old nor the new member is in place. So if the process ends at any moment, every
member in place belongs to the corpus in `run.json`, and an ensemble that can be loaded is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from adapmixed.files import remove_leftovers, temporary_folder
from adapmixed.training.folder import TrainingFolder
from adapmixed.training.partition import shard_record
from adapmixed.training.shards import Spool

RETRAINED = "retrained"
"""Name of the temporary folders that hold a new member until the exchange."""


def member_number(member: int | str, names: Collection[str]) -> int:
    """Return the number of a member given by number or folder name.

    Raises:
        ValueError: if there is no such member.
    """
    known = {name: number for number, name in enumerate(names)}
    number = known.get(str(member), member)
    if isinstance(number, str) and number.isascii() and number.isdigit():
        number = int(number)
    if type(number) is not int or not 0 <= number < len(known):
        raise ValueError(
            f"retrain must be a member's folder name or a number below {len(known)}, got {member!r}"
        )
    return number


def retrain_member(
    folder: TrainingFolder,
    member: int,
    spool: Spool,
    key: bytes,
    settings: Mapping[str, Any],
    withdrawn: Collection[int],
    train: Callable[[Path], None],
) -> None:
    """Train one member on its current shard, without changing other members' files.

    A member that was trained on the same text stays unchanged. The caller writes `ensemble.json`.

    Args:
        folder: the folder of a finished run.
        member: the member's number.
        spool: all shards of the current corpus.
        key: the key of the partition.
        settings: as in `TrainingFolder.begin`, for the current corpus.
        withdrawn: withdrawn members, whose shards may have changed because they do not answer.
        train: trains the member into the folder that it is given, which it creates.

    Raises:
        ValueError: if other shards have changed, or other members are missing.
    """
    remove_leftovers(folder.output, folder.members[member])
    changed = [
        name
        for number, name in enumerate(folder.members)
        if number not in (member, *withdrawn) and not _is_trained(folder, number, spool, key)
    ]
    if changed:
        raise ValueError(
            "retrain must name the only member whose shard has changed, got "
            f"{folder.members[member]}, but {', '.join(changed)} would have to be trained again too"
        )
    if _is_trained(folder, member, spool, key):
        folder.exchange(settings)
        return
    place = temporary_folder(folder.output / RETRAINED)
    train(place / folder.members[member])
    folder.exchange(settings, member, place / folder.members[member])
    place.rmdir()


def _is_trained(folder: TrainingFolder, member: int, spool: Spool, key: bytes) -> bool:
    """Return whether a member is finished and was trained on its current shard."""
    return folder.is_finished(member) and folder.record(member)["shard"] == shard_record(
        spool.read(member), key=key
    )
