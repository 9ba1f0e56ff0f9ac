"""Training one shard again, for instance after a user withdrew a document.

The new member is trained while the old ensemble stays as it is. The exchange is a few calls:
`ensemble.json` goes first and comes last, and `run.json` names the new corpus while neither member
is in its place. So whatever moment the process ends at, every member that is in place belongs to
the corpus that `run.json` names, and an ensemble that can be loaded is whole.
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
"""Temporary folders of this name hold a member until the exchange."""


def member_number(member: int | str, names: Collection[str]) -> int:
    """Return the number of a member that is given by number or folder name.

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
    """Train one member on its shard as it is now; leave all other members' files alone.

    A member that was trained on this very text stays as it is. The caller writes `ensemble.json`.

    Args:
        folder: of a finished run.
        member: its number.
        spool: all shards of the present corpus.
        key: of the partition.
        settings: as `TrainingFolder.begin`, of the present corpus.
        withdrawn: members whose shards may have changed, since they do not answer.
        train: trains the member into the folder it is given, which it creates.

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
            f"retrain must be given the one member whose shard has changed, "
            f"{folder.members[member]}; {', '.join(changed)} would have to be trained again too"
        )
    if _is_trained(folder, member, spool, key):
        folder.exchange(settings)
        return
    place = temporary_folder(folder.output / RETRAINED)
    train(place / folder.members[member])
    folder.exchange(settings, member, place / folder.members[member])
    place.rmdir()


def _is_trained(folder: TrainingFolder, member: int, spool: Spool, key: bytes) -> bool:
    """Whether a member is there, and was trained on its shard as it is now."""
    return folder.is_finished(member) and folder.record(member)["shard"] == shard_record(
        spool.read(member), key=key
    )
