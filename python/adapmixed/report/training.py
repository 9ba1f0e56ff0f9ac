"""Read the training losses in an ensemble's folders, which are for the operator."""

from pathlib import Path

from adapmixed.ensemble.manifest import (
    FILE_NAME,
    MEMBER_FILE,
    read_manifest,
    read_member_record,
)


def training_losses(folder: Path) -> list[dict[str, object]]:
    """Return the training losses of the members that have any, in their order.

    Each entry has "member", "tokens" (trained on) and "losses", the mean of each epoch in nats per
    token. With held-out text it also has "loss" and "public_loss", in nats per held-out token.

    Args:
        folder: the ensemble folder. The result is empty if `adapmixed train` did not make it.

    Raises:
        ValueError: if a file of the ensemble or of a member has another format.
    """
    if not (folder / FILE_NAME).is_file():
        return []
    found: list[dict[str, object]] = []
    for member in read_manifest(folder).members:
        if member is None or not (folder / member / MEMBER_FILE).is_file():
            continue
        record = read_member_record(folder / member)
        losses: dict[str, object] = {}
        if record["losses"]:  # an empty shard has none
            losses["losses"] = [float(loss) for loss in record["losses"]]
        if record["validation"] is not None:
            for name in ("loss", "public_loss"):
                losses[name] = float(record["validation"][name])
        if losses:
            found.append({"member": member, "tokens": record["tokens"], **losses})
    return found
