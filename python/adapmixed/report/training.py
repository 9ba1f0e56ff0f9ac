"""Losses that `adapmixed train` leaves in an ensemble's folders: the operator's."""

from pathlib import Path

from adapmixed.ensemble.manifest import FILE_NAME, read_manifest
from adapmixed.training.folder import MEMBER_FILE, read_member_record


def training_losses(folder: Path) -> list[dict[str, object]]:
    """Return the losses of every member that has any, in their order.

    Each has "member", "tokens" it was trained on and "losses", the mean of each epoch in nats per
    token; with held-out text also "loss" and "public_loss", in nats per held-out token.

    Args:
        folder: of the ensemble; one that was not made by `adapmixed train` gives nothing.

    Raises:
        ValueError: a file of the ensemble or a member is of another format.
    """
    if not (folder / FILE_NAME).is_file():
        return []
    found: list[dict[str, object]] = []
    for member in read_manifest(folder).members:
        if member is None or not (folder / member / MEMBER_FILE).is_file():
            continue
        record = read_member_record(folder / member)
        losses: dict[str, object] = {}
        if record["losses"]:  # none of an empty shard
            losses["losses"] = [float(loss) for loss in record["losses"]]
        if record["validation"] is not None:
            for name in ("loss", "public_loss"):
                losses[name] = float(record["validation"][name])
        if losses:
            found.append({"member": member, "tokens": record["tokens"], **losses})
    return found
