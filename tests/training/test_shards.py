"""Shards and places of names, and updates: what they change, their errors, and their kills."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import killed_before
from training_cases import CONFIG, KEY, USERS, a_run, contents, refuses, rows, write_corpus

from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.text import Document
from adapmixed.training import TrainingRun, assign_shards, train_ensemble
from adapmixed.training.run import show_progress
from adapmixed.training.shards import Spool, by_table, enrol

HEAD = replace(CONFIG, target_modules=("lm_head",), epochs=1)
CHANGED, LEFT, NEW = (USERS[3], USERS[8]), USERS[5], "newcomer"
NEXT = [
    row | ({"text": "the rest"} if row["user"] in CHANGED else {})
    for row in [*rows(), {"user": NEW, "text": "some text of mine"}]
    if row["user"] != LEFT
]
SECRET = bytes.fromhex(KEY)
PLACES = 16


@pytest.fixture(scope="module")
def folders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the old ensemble, and a new one with the places that an update of it gives."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ensembles")
    train(own(folder, tiny, "old"))
    shutil.copytree(folder / "old", folder / "updated")
    shutil.copytree(folder / "old.private", folder / "updated.private")
    train(own(folder, tiny, "updated", NEXT), update=True)
    (folder / "new.private").mkdir(mode=0o700)
    shutil.copy(folder / "updated.private" / "run.json", folder / "new.private")
    train(own(folder, tiny, "new", NEXT))
    return folder


def own(
    folder: Path, tiny: Path, name: str, text: list[dict[str, str]] | None = None, **changes: Any
) -> TrainingRun:
    """Return a run in which every user has a place of its own."""
    run = a_run(folder, tiny, name, config=HEAD, num_models=PLACES, share_shards=False)
    return replace(run, corpus=write_corpus(folder / "corpus.jsonl", text), **changes)


def train(run: TrainingRun, **settings: Any) -> list[str]:
    """Train, and return the members that were finished."""
    lines: list[str] = []
    train_ensemble(run, say=lines.append, **settings)
    return [line.split(":")[0] for line in lines if ": finished" in line]


def old_copy(folders: Path, folder: Path, tiny: Path, name: str) -> TrainingRun:
    """Copy the old ensemble to `folder / name`; return a run over the next corpus."""
    shutil.copytree(folders / "old", folder / name)
    shutil.copytree(folders / "old.private", folder / f"{name}.private")
    return own(folder, tiny, name, NEXT)


def run_file(folder: Path) -> bytes:
    return (folder.with_name(folder.name + ".private") / "run.json").read_bytes()


def member_of(folder: Path, user: str) -> str:
    table = json.loads(run_file(folder))["settings"]["places"]
    return f"member-{by_table(table, SECRET)(user):03d}"


def test_a_shard_depends_on_the_identifier_and_the_key_alone() -> None:
    key, names = bytes(range(16)), [f"user-{i}" for i in range(4000)]
    shards = assign_shards(names, 8, key=key)
    assert assign_shards(names[::-1], 8, key=key) == shards[::-1]
    assert assign_shards(names[17:18] * 2, 8, key=key) == shards[17:18] * 2
    # Stored ensembles need an edited corpus to fall into the same shards for all time.
    assert assign_shards(["", "user-1", "ünïcode"], 1000, key=key) == [577, 321, 316]
    counts = torch.bincount(torch.tensor(shards), minlength=8)
    assert len(counts) == 8  # and chi2 with 7 degrees of freedom, p = 0.001
    assert float(((counts - 500).double() ** 2 / 500).sum()) < 24.3
    other = assign_shards(names, 8, key=key[::-1])
    assert 350 < sum(a == b for a, b in zip(shards, other, strict=True)) < 650
    for number, bad, reason in (
        (0, key, "num_shards must be an integer >= 1, got 0"),
        (3, key[:15], "16 to 64 bytes, got 15"),
        (3, key * 5, "16 to 64 bytes, got 80"),
    ):
        with pytest.raises(ValueError, match=reason):
            assign_shards(["a"], number, key=bad)


def test_a_shard_whose_file_is_gone_is_not_read_as_empty(tmp_path: Path) -> None:
    """Another run may have removed the file; the member would be trained on nothing."""
    texts, places = [Document(name, "text") for name in "ab"], {"a": 0, "b": 1}
    shards = Spool(texts, places.__getitem__, key=SECRET, wanted={0}, folder=tmp_path)
    assert shards.read(0) == texts[:1] and shards.read(1) == []
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError):
        shards.read(0)


def test_nobody_moves_and_a_place_is_free_one_period_later() -> None:
    first = enrol([None] * PLACES, USERS, key=SECRET)
    assert first == enrol([None] * PLACES, USERS[::-1], key=SECRET)
    assert first != enrol([None] * PLACES, USERS, key=SECRET[::-1]) and None in first[:10]
    places = {user: by_table(first, SECRET)(user) for user in USERS}
    assert len(set(places.values())) == len(USERS)
    left = places[LEFT]
    staying = [user for user in USERS if user != LEFT]
    newer = [f"new-{number}" for number in range(PLACES - len(staying))]
    with pytest.raises(ValueError, match="for each of 5 new names, got 4 free of 16"):
        enrol(first, [*staying, *newer], key=SECRET)  # its member still holds its text
    second = enrol(first, staying, key=SECRET, empty=[left])
    assert second == first  # and nobody else has come
    third = enrol(first, [*staying, *newer], key=SECRET, empty=[left])
    assert None not in third and third[left] != first[left]
    assert all(by_table(third, SECRET)(user) == places[user] for user in staying)
    with pytest.raises(ValueError, match="corpus must not change while it is read"):
        by_table(third, SECRET)(LEFT)


def test_every_name_has_a_member_and_n_has_room(tiny: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    run = own(tmp_path, tiny, "ensemble", num_models=20)
    manifest = train_ensemble(run, say=lines.append)
    assert (manifest.unit, len(manifest.members)) == ("user", 20)
    assert read_manifest(run.output) == manifest
    assert lines[0].startswith("Places: 12 of 20 are taken, each by one 'user'.")
    documents = sorted(shard["documents"] for shard in manifest.shards)
    assert documents == [0] * 8 + [5] * 12
    ensemble = Ensemble.from_pretrained(tiny, run.output)
    assert ensemble.unit == "user" and ensemble.unverified == ()
    private, public = ensemble.logits(torch.arange(6)[None])
    same = [bool(torch.equal(row, public)) for row in private]
    assert same == [shard["documents"] == 0 for shard in manifest.shards]
    own(tmp_path, tiny, "ensemble", [row for row in rows() if row["user"] == LEFT])
    lines.clear()
    assert len(train_ensemble(run, say=lines.append, update=True).members) == 20
    assert "11 of 20 members" in lines[1] and "12 of 20 are taken" in lines[0]
    with pytest.raises(ValueError, match="unit must be null unless shards give every name"):
        replace(manifest, shards=())
    two = [dict(shard) for shard in manifest.shards]
    full = next(shard for shard in two if shard["documents"])
    full["identifiers"] = [*full["identifiers"], "0" * 32]
    with pytest.raises(ValueError, match="unit must be null .* got 'user'"):
        replace(manifest, shards=tuple(two))


def test_changed_members_alone_are_trained_again(tiny: Path, tmp_path: Path, folders: Path) -> None:
    """The result equals a whole training with the same places in every bit."""
    old, new = contents(folders / "old"), contents(folders / "new")
    run = old_copy(folders, tmp_path, tiny, "ensemble")
    before = {path: path.stat().st_mtime_ns for path in run.output.glob("member-*/*")}
    left = member_of(run.output, LEFT)  # as an update to another text, which was killed, left it
    shutil.copytree(folders / "old" / left, run.output / ".next" / left)
    shutil.copytree(folders / "old" / left, run.output / ".next" / "member-000")
    lines: list[str] = []
    train_ensemble(run, say=lines.append, update=True)
    names = sorted(member_of(run.output, user) for user in (*CHANGED, LEFT, NEW))
    assert [line.split(":")[0] for line in lines[2:]] == names
    assert lines[1].startswith(f"Update: trains {', '.join(names)}, 4 of 16 members; the others ")
    assert "ε and δ of the periods add" in lines[1]
    assert contents(run.output) == new and not (run.output / ".next").exists()
    assert {path.split("/")[0] for path in old if old[path] != new[path]} == {
        *names, "ensemble.json"
    }  # fmt: skip
    after = {path: path.stat().st_mtime_ns for path in run.output.glob("member-*/*")}
    assert {path.parent.name for path in after if after[path] != before[path]} == set(names)
    for user in USERS:  # the one who left included
        assert member_of(run.output, user) == member_of(folders / "old", user)
    # Repeated, or as the ordinary command, nothing is left to do.
    assert train(run, update=True) == train(run) == []
    assert contents(run.output) == new and run_file(run.output) == run_file(folders / "new")
    # The order of names changes no member, but the record of the corpus.
    run = own(tmp_path, tiny, "ensemble", sorted(NEXT, key=lambda row: row["user"]))
    assert train(run, update=True) == []
    # One period later the place of who left is free, also for a corpus of another name.
    more = [*NEXT, *({"user": f"new-{number}", "text": "more"} for number in range(4))]
    run = replace(run, corpus=write_corpus(tmp_path / "december.jsonl", more))
    assert len(train(run, update=True)) == 4
    assert all(shard["documents"] for shard in read_manifest(run.output).shards)


def test_a_withdrawn_member_stays_so(tiny: Path, tmp_path: Path, folders: Path) -> None:
    run = old_copy(folders, tmp_path, tiny, "ensemble")
    name = member_of(run.output, LEFT)
    path, whole = run.output / "ensemble.json", read_manifest(run.output)

    def written(member: str | None) -> None:
        data = json.loads(path.read_text())
        data["members"][int(name[-3:])] = member
        path.write_text(json.dumps(data))

    written(None)
    shutil.rmtree(run.output / name)
    before = own(tmp_path, tiny, "ensemble")
    assert train(before) == []
    refuses(f"update needs a corpus without the text of {name}, ", before, update=True)
    assert read_manifest(run.output).members[int(name[-3:])] is None
    written(name)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("adapmixed.training.run.TrainingFolder.finish", killed)
        train(before)
    assert read_manifest(run.output) == whole  # a null of another member would be there, too
    assert train(before) == []
    for trained in (4, 0):  # without a change of the corpus, the empty member stays withdrawn
        written(None)
        assert len(train(own(tmp_path, tiny, "ensemble", NEXT), update=True)) == trained
        assert (contents(run.output) == contents(folders / "new")) == bool(trained)


def test_a_member_of_an_older_training_does_not_load(
    tiny: Path, tmp_path: Path, folders: Path
) -> None:
    """For instance one that a backup brings back after a user has withdrawn a document."""
    folder = Path(shutil.copytree(folders / "new", tmp_path / "ensemble"))
    place = folder / member_of(folders / "old", CHANGED[0])
    shutil.rmtree(place)
    shutil.copytree(folders / "old" / place.name, place)
    with pytest.raises(ValueError, match="shard.json differs from ensemble.json"):
        Ensemble.from_pretrained(tiny, folder)
    (place / "shard.json").write_text("{}")  # as those of another version
    with pytest.raises(ValueError, match="shard.json: format_version must be 2, got None"):
        Ensemble.from_pretrained(tiny, folder)
    (place / "shard.json").unlink()  # a service need not have it
    assert Ensemble.from_pretrained(tiny, folder).num_models == PLACES


def test_refusals(tiny: Path, tmp_path: Path, folders: Path) -> None:
    run = old_copy(folders, tmp_path, tiny, "ensemble")
    refuses("was begun with another corpus, .* or update .--update.", run)
    edited = own(tmp_path, tiny, "ensemble", rows()[1:])
    refuses("was begun with another corpus, .* or update .--update.", edited)
    refuses("num_models = 16, got 30", replace(run, num_models=30), update=True)
    refuses("was begun with seed = 0, got 1", replace(run, seed=1), update=True)
    refuses("was begun with unit = 'user', got None", replace(run, share_shards=True))
    unnamed = replace(run, num_models=16, corpus=replace(run.corpus, id_column=None))
    refuses("was begun with unit = 'user', got None", unnamed)
    shared = replace(run, share_shards=True, num_models=4, output=tmp_path / "shared")
    teams = write_corpus(tmp_path / "teams.jsonl", [row | {"team": "red"} for row in NEXT])
    teams = replace(teams, id_column="team")
    refuses("was begun with unit = 'user', got 'team'", replace(run, corpus=teams), update=True)
    for name in ("ensemble", "ensemble.private"):
        assert contents(tmp_path / name) == contents(folders / name.replace("ensemble", "old"))
    refuses("names have places of their own, got none", shared, update=True)
    refuses(
        "each of 12 new names, got 11 free of 11",
        replace(shared, share_shards=False, num_models=11),
    )
    assert not list(tmp_path.glob("shared*"))
    lines: list[str] = []
    train_ensemble(shared, say=lines.append)
    assert read_manifest(shared.output).unit is None
    assert lines[0].startswith("Shared shards: ") and "6 at 0.00022 instead of 3 at" in lines[0]
    refuses("got names that share shards: train the whole corpus", shared, update=True)
    named = replace(shared, share_shards=False, num_models=12)
    refuses("was begun with unit = None, got 'user'", named)


def test_time_left_counts_steps_and_not_members(
    monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines: list[str] = []
    steps = {number: HEAD.expected_steps(size) for number, size in enumerate((0, 128 * 9, 128))}
    assert steps == {0: 0, 1: 9, 2: 1}

    def finished() -> Iterator[tuple[int, Path]]:
        nonlocal now
        for shard in range(3):
            yield shard, folders / "old" / f"member-{shard:03d}"
            now += 90 * 60

    show_progress(finished(), steps, lines.append)
    assert lines == [
        "member-000: finished (1 of 3)",
        "member-001: finished (2 of 3, 10:00 left)",
        "member-002: finished (3 of 3, 00:00 left)",
    ]


@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(tiny: Path, tmp_path: Path, folders: Path) -> None:
    """A member in place is complete, old or new, and an ensemble that loads is consistent."""
    old, new = contents(folders / "old"), contents(folders / "new")
    corpora = {run_file(folders / name): files for name, files in (("old", old), ("new", new))}
    some = member_of(folders / "old", LEFT)
    seen = set()
    for number in itertools.count(1):
        run = old_copy(folders, tmp_path, tiny, str(number))
        status = killed_before(lambda: train(run, update=True), number)  # noqa: B023
        left = {p: c for p, c in contents(run.output).items() if p[0] != "."}
        known = corpora[run_file(run.output)]
        assert all(content == known[path] for path, content in left.items()), number
        if "ensemble.json" in left:
            assert left == known
        whole = {path.split("/")[0] for path in left}
        assert all(path in left for path in known if path.split("/")[0] in whole), number
        seen.add((known is new, some in whole, "ensemble.json" in left))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        # Either command continues, the ordinary one with the recorded corpus.
        train(run, update=not (known is new and number % 2 and "ensemble.json" not in left))
        assert contents(run.output) == new, number
        shutil.rmtree(run.output)
    assert left == new
    whole, bare, neither = (False, True, True), (False, True, False), (True, False, False)
    assert {whole, bare, neither, (True, True, False), (True, True, True)} <= seen
