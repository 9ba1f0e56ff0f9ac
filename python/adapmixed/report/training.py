"""Validation losses that `adapmixed train` leaves in an ensemble's folders: the operator's."""

from pathlib import Path

from adapmixed.models.manifest import FILE_NAME, read_manifest
from adapmixed.training.folder import MEMBER_FILE, read_member_record


def validation_losses(folder: Path) -> list[dict[str, object]]:
    """Of every member with held-out text, in their order: "member", "tokens" it was trained on,
    "loss" and "public_loss" in nats per held-out token.

    Args:
        folder: of the ensemble; one that was not made by `adapmixed train` gives nothing.

    Raises:
        ValueError: a file of the ensemble or a member is of another format.
    """
    if not (folder / FILE_NAME).is_file():
        return []
    found: list[dict[str, object]] = []
    for member in read_manifest(folder).members:
        if not (folder / member / MEMBER_FILE).is_file():
            continue
        record = read_member_record(folder / member)
        validation = record["validation"]
        if validation is not None:
            losses = {name: float(validation[name]) for name in ("loss", "public_loss")}
            found.append({"member": member, "tokens": record["tokens"], **losses})
    return found
