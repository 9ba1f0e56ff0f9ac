"""Shards come from a keyed hash of identifiers alone, and are read whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapmixed.text import Document
from adapmixed.training import assign_shards
from adapmixed.training.shards import spool

KEY = bytes(range(16))
NAMES = [f"user-{i}" for i in range(4000)]


def test_assignment_depends_on_the_identifier_alone() -> None:
    shards = assign_shards(NAMES, 64, key=KEY)
    assert all(0 <= shard < 64 for shard in shards)
    assert assign_shards(NAMES[::-1], 64, key=KEY) == shards[::-1]
    assert assign_shards(NAMES[17:18], 64, key=KEY) == shards[17:18]
    assert assign_shards(NAMES[:1] * 2, 64, key=KEY) == shards[:1] * 2
    # Stored ensembles need an edited corpus to fall into the same shards for all time.
    assert assign_shards(["", "user-1", "ünïcode"], 1000, key=KEY) == [577, 321, 316]


def test_assignment_is_balanced_and_keyed() -> None:
    counts = torch.bincount(torch.tensor(assign_shards(NAMES, 8, key=KEY)), minlength=8)
    assert float(((counts - 500).double() ** 2 / 500).sum()) < 24.3  # chi2, 7 degrees, p = 0.001
    other = assign_shards(NAMES, 8, key=KEY[::-1])
    same = sum(a == b for a, b in zip(assign_shards(NAMES, 8, key=KEY), other, strict=True))
    assert 350 < same < 650


def test_assignment_refusals() -> None:
    for number, key, reason in (
        (0, KEY, "num_shards must be >= 1, got 0"),
        (3, KEY[:15], "16 to 64 bytes, got 15"),
        (3, KEY * 5, "16 to 64 bytes, got 80"),
    ):
        with pytest.raises(ValueError, match=reason):
            assign_shards(["a"], number, key=key)


def test_a_shard_whose_file_is_gone_is_not_read_as_empty(tmp_path: Path) -> None:
    """Another run may have removed the file; the member would be trained on nothing."""
    documents = [Document(name, "text") for name in "ab"]
    shards = spool(documents, {"a": 0, "b": 1}.__getitem__, key=KEY, wanted={0}, folder=tmp_path)
    assert shards.read(0) == documents[:1] and shards.read(1) == []
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError):
        shards.read(0)
