"""The table "Misuse" in docs/concepts/threat-model.md: shards that share identifiers, or might."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_ensemble import FakeEnsemble
from misuse_cases import answer, named, public_folder, two_adapters
from tiny_models import ADAPTED
from trained_demo import DEMO_ENSEMBLE

from adapmixed.data import Document, demo_base
from adapmixed.ensemble import Ensemble, Manifest, read_manifest, write_manifest
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.training import shard_record

pytestmark = pytest.mark.usefixtures("demo_ensemble")

KEY = bytes(range(32))


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    return two_adapters(tmp_path / "ensemble")


def shard(*names: str, key: bytes = KEY) -> dict[str, Any]:
    return shard_record([Document(name, f"text of {name}") for name in names], key=key)


def test_records_of_missing_members_count() -> None:
    """Neither a guarantee nor an error may tell which member is missing."""
    alice, bob = shard("alice"), shard("bob")
    for members in (("m0", "m1"), ("m0", None), (None, None), ("missing member 1", None)):
        Manifest("", members, ADAPTED, shards=(alice, bob))
        with pytest.raises(ValueError, match="shards must be disjoint, .* share an identifier"):
            Manifest("", members, ADAPTED, shards=(alice, shard("alice", "bob")))


def test_overlapping_shards_are_refused(tmp_path: Path) -> None:
    members = ("m0", "m1", "m2")
    alice, bob, empty = shard("alice", "carol"), shard("bob"), shard()
    good = Manifest("", members, ADAPTED, shards=(alice, empty, bob))
    write_manifest(tmp_path, good)
    assert read_manifest(tmp_path) == good
    text = (tmp_path / "ensemble.json").read_text()
    assert "alice" not in text and "bob" not in text
    for shards, why in [
        ((alice, empty, shard("dora", "carol")), "m0 and m2 share an identifier"),
        ((alice, bob, shard("dora") | {"sha256": bob["sha256"]}), "m1 and m2 share .* content"),
        ((alice, shard("bob", key=KEY[::-1]), empty), "m0 and m1 must be hashed under one key"),
        ((alice, bob), "each of the 3 members"),
        # A record that is not whole proves nothing.
        *(
            ((alice, bob, other), "shards must be records .* another one for m2")
            for other in (
                {},
                [],
                {name: alice[name] for name in alice if name != "documents"},
                alice | {"identifiers": ["carol"]},
                alice | {"identifiers": []},
                alice | {"identifiers": None},
                alice | {"identifier_key": None},
                alice | {"documents": 1},
                alice | {"documents": 2.0},
                empty | {"documents": -1},
                empty | {"sha256": ""},
            )
        ),
    ]:
        with pytest.raises(ValueError, match=why):
            Manifest("", members, ADAPTED, shards=shards)
    with pytest.raises(ValueError, match="key must have 16 to 64 bytes"):
        shard("alice", key=b"short")


def test_a_guarantee_says_that_shards_were_not_verified(adapters: list[Path]) -> None:
    folder, words = adapters[0].parent, "Disjointness of the shards was not verified"
    for shards, verified in [((), False), ((shard("alice"), shard("bob")), True)]:
        base = public_folder(folder, shards=shards, document_names="stable")
        ensemble = Ensemble.from_pretrained(base, folder)
        assert ensemble.unverified == (() if verified else ("shards",))
        assert (words not in answer(ensemble=ensemble)) == verified
    base = public_folder(folder, shards=(shard("alice"), shard()))
    with pytest.raises(ValueError, match="m1 has 0 documents, but its adapter is not zero"):
        Ensemble.from_pretrained(base, folder)
    path = folder / "ensemble.json"
    overlapping = json.loads(path.read_text()) | {"shards": [shard("a"), shard("b", "a")]}
    path.write_text(json.dumps(overlapping))
    with pytest.raises(ValueError, match="shards must be disjoint, m0 and m1 share an identifier"):
        Ensemble.from_pretrained(named("tiny"), folder)
    assert Ensemble.from_pretrained(demo_base(), DEMO_ENSEMBLE).unverified == ()


def test_a_ledger_remembers_what_was_not_verified(tmp_path: Path) -> None:
    ensemble, path = FakeEnsemble(), tmp_path / "ledger.db"
    ensemble.unverified = ("shards",)
    with Accountant(1e-5, path=path) as accountant:
        answer(ensemble=ensemble, accountant=accountant)
    assert read_ledger(path).guarantee.caveats == ("shards",)
    assert "not verified" in str(read_ledger(path).guarantee)
    ensemble.unverified = ()  # earlier answers keep the caveat
    with Accountant(1e-5, path=path) as accountant:
        assert "not verified" in answer(ensemble=ensemble, accountant=accountant)
