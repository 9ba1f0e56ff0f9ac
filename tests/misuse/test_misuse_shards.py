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
    alice, bob, unknown = shard("alice"), shard("bob"), {"documents": 3, "sha256": "9" * 64}
    for members in (("m0", "m1"), ("m0", None), (None, None)):
        assert Manifest("", members, ADAPTED, shards=(alice, bob)).disjoint
        assert not Manifest("", members, ADAPTED, shards=(alice, unknown)).disjoint
        with pytest.raises(ValueError, match="shards must be disjoint, .* share the identifier"):
            Manifest("", members, ADAPTED, shards=(alice, shard("alice", "bob")))
    with pytest.raises(ValueError, match="share the identifier"):  # whatever folders are called
        Manifest("", ("missing member 1", None), ADAPTED, shards=(alice, shard("alice", "bob")))


def test_overlapping_shards_are_refused(tmp_path: Path) -> None:
    members = ("m0", "m1", "m2")
    alice, bob, empty = shard("alice", "carol"), shard("bob"), shard()
    good = Manifest("", members, ADAPTED, shards=(alice, empty, bob))
    write_manifest(tmp_path, good)
    assert good.disjoint and read_manifest(tmp_path) == good
    text = (tmp_path / "ensemble.json").read_text()
    assert "alice" not in text and "bob" not in text
    for shards, why in [
        ((alice, empty, shard("dora", "carol")), "m0 and m2 share the identifier"),
        ((bob, empty, bob), "m0 and m2 hold the same"),
        ((alice, {"sha256": bob["sha256"]}, bob), "m1 and m2 hold the same"),
        ((alice, shard("bob", key=KEY[::-1]), empty), "m0 and m1 must be hashed under one key"),
        ((alice, bob), "each of the 3 members"),
        (
            (alice, bob, alice | {"identifiers": ["carol"]}),
            "m2 must be hexadecimal digests, got 'carol'",
        ),
        ((alice, bob, empty | {"documents": 4}), "identifiers of m2 must be those of its 4"),
        ((alice, bob, empty | {"documents": -1}), "documents of m2 must be an integer >= 0"),
        ((alice, bob, {"identifiers": []}), "identifier_key of m2 must be given .* got none"),
    ]:
        with pytest.raises(ValueError, match=why):
            Manifest("", members, ADAPTED, shards=shards)
    with pytest.raises(ValueError, match="key must have 16 to 64 bytes"):
        shard("alice", key=b"short")


@pytest.mark.parametrize("named", [False, True])
def test_records_that_show_nothing_prove_nothing(named: bool) -> None:
    """An empty list of identifiers is that of an empty shard only if its record says so."""
    alice, bob = shard("alice"), shard("bob")
    record = {"identifiers": [], "identifier_key": alice["identifier_key"]} if named else {}
    for others in ((alice, bob), (record, record)):
        assert not Manifest("", ("m0", "m1", "m2"), ADAPTED, shards=(*others, record)).disjoint
    empty = record | {"documents": 0}
    assert Manifest("", ("m0", "m1", "m2"), ADAPTED, shards=(alice, bob, empty)).disjoint


def test_a_guarantee_says_that_shards_were_not_verified(adapters: list[Path]) -> None:
    folder, words = adapters[0].parent, "Disjointness of the shards was not verified"
    digests = ({"documents": 3, "sha256": "1" * 64}, {"documents": 2, "sha256": "2" * 64})
    for shards, verified in [
        ((), False),
        (digests, False),
        ((shard("alice"), digests[1]), False),
        ((shard("alice"), shard("bob")), True),
    ]:
        base = public_folder(folder, shards=shards, document_names="stable")
        ensemble = Ensemble.from_pretrained(base, folder)
        assert ensemble.unverified == (() if verified else ("shards",))
        assert (words not in answer(ensemble=ensemble)) == verified
    base = public_folder(folder, shards=(shard("alice"), {"documents": 0}))
    with pytest.raises(ValueError, match="m1 has 0 documents, but its adapter is not zero"):
        Ensemble.from_pretrained(base, folder)
    path = folder / "ensemble.json"
    overlapping = json.loads(path.read_text()) | {"shards": [shard("a"), shard("b", "a")]}
    path.write_text(json.dumps(overlapping))
    with pytest.raises(ValueError, match="shards must be disjoint, m0 and m1 share the identifier"):
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
