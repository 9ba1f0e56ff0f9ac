"""The table "Misuse" in docs/concepts/threat-model.md: each entry raises, or is said."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import answered
from fake_ensemble import FakeEnsemble
from tiny_models import ADAPTED, TARGETS, tiny_model, write_adapter
from trained_demo import DEMO_ENSEMBLE

from adapmixed.cli import _parser, main
from adapmixed.data import Document, demo_base
from adapmixed.ensemble import Ensemble, Manifest, read_manifest, write_manifest
from adapmixed.ensemble.public_model import base_files, load_base
from adapmixed.evaluation import evaluate
from adapmixed.generation import PrivateGenerator
from adapmixed.generation.refused import REASONS
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, PMixED, PublicOnly
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed.training import shard_record

PROMPT = torch.tensor([[1, 2, 3]])
POOL = ClippedLogPool(-0.5, 0.5, queries=40)
MODELS = ["--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]

pytestmark = pytest.mark.usefixtures("demo_ensemble")


def answer(mechanism: Any = POOL, ensemble: Any = None, **settings: Any) -> str:
    """Return the guarantee of a few answers."""
    accountant = settings.setdefault("accountant", Accountant(1e-5))
    settings = dict(max_new_tokens=2, rng=SecureRandom()) | settings
    answered(ensemble or FakeEnsemble(), mechanism, PROMPT, **settings)
    return str(accountant.guarantee())


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Return the adapters of an ensemble whose public model is called some-org/Tiny."""
    base, folder = tiny_model("gpt2"), tmp_path / "ensemble"
    paths = [
        write_adapter(base, folder / f"m{i}", seed=i, target_modules=TARGETS["gpt2"])
        for i in range(2)
    ]
    for path in paths:
        name_base(path, "some-org/Tiny")
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED))
    return paths


def name_base(adapter: Path, name: str) -> None:
    config = adapter / "adapter_config.json"
    named = json.loads(config.read_text()) | {"base_model_name_or_path": name}
    config.write_text(json.dumps(named))


def named(name: str) -> Any:
    """Return a model like the one of `from_pretrained(name)`."""
    base = tiny_model("gpt2")
    base.config._name_or_path = name
    return base


def public_folder(folder: Path, **manifest: Any) -> Path:
    """Write the public model, record its digest in the ensemble, and return its folder."""
    base = folder.parent / "tiny"
    tiny_model("gpt2").save_pretrained(base)
    write_manifest(
        folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=base_files(base), **manifest)
    )
    return base


# Asking for something other than a sample


@pytest.mark.parametrize("function", ["generate", "stream", "chat"])
def test_python_arguments(demo: Ensemble, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function that could take an option raises with the reason, and nothing is charged."""
    monkeypatch.setattr(demo.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    accountant = Accountant(1e-5)
    here = PrivateGenerator(demo, POOL, accountant)
    asked: dict[str, Callable[..., object]] = {
        "generate": partial(here.generate, "The", max_new_tokens=2),
        "stream": partial(here.stream, "The", max_new_tokens=2),
        "chat": partial(here.chat, [{"role": "user", "content": "The"}], max_new_tokens=2),
    }
    for name, why in REASONS.items():
        with pytest.raises(ValueError, match=rf"{name} must not be given, .*{re.escape(why)}"):
            asked[function](**{name: None})
    assert accountant.queries == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):  # as ever
        asked[function](max_tokens=3)


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate"])
def test_options_of_the_command(command: str) -> None:
    """No option of the command takes such a name for its own, not even as an abbreviation."""
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", "x"], "chat": []}
    parser = _parser()
    for name in REASONS:
        option = f"--{name.replace('_', '-')}"
        if option == "--seed":  # allowed in tests and evaluation, never with a ledger
            continue
        for words in ([f"{option}=1"], [option, "1"], [f"--{name}"]):
            _, unknown = parser.parse_known_args([command, *MODELS, *what[command], *words])
            assert unknown == words
    with pytest.raises(SystemExit):
        main([command, *MODELS, *what[command], "--do-sample", "1"])


# Randomness


def test_a_guarantee_of_seeded_answers_says_so() -> None:
    words = "The randomness was seeded"
    assert words in answer(rng=SeededRandom(1))
    assert words not in answer()
    tokens, names = [1, 2, 3, 0, 2, 1] * 4, {"pool": POOL, "public": PublicOnly()}
    pool, public = evaluate(FakeEnsemble(), tokens, names, delta=1e-5, rng=SeededRandom(1))
    assert words in str(pool.guarantee) and pool.guarantee.caveats == ("seeded",)
    assert words not in str(public.guarantee)  # nothing private was read
    for mechanism in (POOL, ClippedMixing(0.5, 2.0, 9), PMixED(8.0, 1e-5, 9, 6.0)):
        proposal = mechanism.propose(torch.randn(3, 1, 5), torch.randn(1, 5), rng=SeededRandom(0))
        accountant = Accountant(1e-5)
        accountant.charge(proposal)
        assert "seeded" in accountant.guarantee().caveats


# Screening


def test_noise_is_added_before_re_scaling() -> None:
    with pytest.raises(ValueError, match="noise is added before re-scaling: after it the stated"):
        AdaPMixED(18.0, 0.2, screen="rescaled")  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["generate", "chat", "evaluate"])
def test_no_filter_runs_on_adapmixed_by_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", str(tmp_path)], "chat": []}
    adaptive = ["--mechanism", "adapmixed", "--epsilon", "2"]
    assert main([command, *MODELS, *what[command], *adaptive]) == 2
    error = capsys.readouterr().err
    assert "--epsilon must be None for AdaPMixED" in error
    assert "screening tells a bit about all of them" in error


# Another public model or tokenizer


DIFFERS = "which differs from base_files of ensemble.json in"


def test_a_public_model_of_another_name_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    for same in ("some-org/Tiny", "tiny", "/models/tiny"):
        # An equal name proves nothing about the weights of a folder or an object.
        assert Ensemble.from_pretrained(named(same), adapters).unverified == ("shards", "base")
    for folder in (adapters, adapters[0].parent):
        with pytest.raises(
            ValueError, match=r"'some-org/Huge' \(base\) and 'some-org/Tiny' \(.*m0\)"
        ):
            Ensemble.from_pretrained(named("some-org/Huge"), folder)
    tiny_model("gpt2").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"got '.*/other' \(base\) and 'some-org/Tiny'"):
        Ensemble.from_pretrained(tmp_path / "other", adapters)
    name_base(adapters[1], "some-org/Huge")
    with pytest.raises(ValueError, match=r"'some-org/Tiny' \(base\) and 'some-org/Huge' \(.*m1\)"):
        Ensemble.from_pretrained(named("some-org/Tiny"), adapters)


def test_a_public_model_of_other_files_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    """Weights in one file or several, and files that only one of folder and record has."""
    folder = adapters[0].parent
    for size, several in (("1GB", False), ("20KB", True)):
        base = tmp_path / size
        tiny_model("gpt2").save_pretrained(base, max_shard_size=size)
        manifest = Manifest("", ("m0", "m1"), ADAPTED, base_files=base_files(base))
        write_manifest(folder, manifest)
        # The digest decides, whatever the folder is called. A model object has that of its source,
        # but may have been changed since it was read.
        assert Ensemble.from_pretrained(base, folder).unverified == ("shards",)
        object_of = named(str(base))
        assert Ensemble.from_pretrained(object_of, folder).unverified == ("shards", "base")
        parts = sorted(base.glob("*.safetensors"))
        assert (len(parts) > 1) == several
        for part in parts:
            kept = part.read_bytes()
            part.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
            for public in (base, object_of):
                with pytest.raises(ValueError, match=f"{DIFFERS} {part.name}$"):
                    Ensemble.from_pretrained(public, folder)
            part.write_bytes(kept)
    (base / "merges.txt").write_text("#version: 0.2")
    with pytest.raises(ValueError, match=f"{DIFFERS} merges.txt$"):
        Ensemble.from_pretrained(base, folder)
    (base / "merges.txt").unlink()
    lacking = {**manifest.base_files, "tokenizer.json": "0" * 64}
    write_manifest(folder, replace(manifest, base_files=lacking))
    with pytest.raises(ValueError, match=f"{DIFFERS} tokenizer.json$"):
        Ensemble.from_pretrained(base, folder)


Files = dict[str, Any]
WHOLE: Files = {
    "config.json": {"activation": "gelu", "dtype": "float32"},
    "model.safetensors": "weights",
    "tokenizer.json": {"model": {}, "padding": None},
    "tokenizer_config.json": {"model_max_length": 8, "tokenizer_class": "A"},
    "added_tokens.json": {"padding": 7},
}


def write(folder: Path, files: Files) -> dict[str, str]:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=len(name))
        (folder / name).write_text(text, encoding="utf-8")
    return base_files(folder)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"config.json": {"dtype": "bfloat16", "activation": "gelu", "_name_or_path": "a"}}, True),
        ({"config.json": {"activation": "relu", "dtype": "float32"}}, False),
        ({"tokenizer.json": {"padding": {"length": 3}, "model": {}}}, True),
        ({"tokenizer.json": {"model": {"padding": 3}}}, False),
        ({"tokenizer.json": {"model": {}, "normalizer": {"type": "Lowercase"}}}, False),
        # transformers makes it a special token
        ({"tokenizer.json": {"model": {}, "padding": {"pad_token": "a"}}}, False),
        ({"tokenizer_config.json": {"tokenizer_class": "A", "chat_template": "x"}}, True),
        ({"tokenizer_config.json": {"tokenizer_class": "A", "add_prefix_space": True}}, False),
        ({"special_tokens_map.json": {"eos_token": "a"}}, False),
        ({"added_tokens.json": {"padding": 8}}, False),  # a token, not a setting
        ({"model.safetensors": "other"}, False),
        ({"pytorch_model.bin": "other", "merges.txt": "a b", "README.md": "a"}, True),  # not read
    ],
)
def test_settings_that_change_an_answer_change_a_digest(
    change: Files, same: bool, tmp_path: Path
) -> None:
    before = write(tmp_path, WHOLE)
    assert before.keys() == WHOLE.keys()
    assert (write(tmp_path, change) == before) == same


@pytest.mark.parametrize(
    ("files", "others"),
    [
        ({"pytorch_model.bin": "a", "tokenizer.model": "b"}, {}),
        (
            {"1.bin": "a", "2.bin": "b"},
            {"pytorch_model.bin.index.json": {"weight_map": {"x": "1.bin", "y": "2.bin"}}},
        ),
        (
            {"config.json": {"transformers_weights": "other.safetensors"}, "other.safetensors": ""},
            {"model.safetensors": "a"},
        ),
        ({"vocab.json": {"a": 1}, "merges.txt": "a", "tekken.json": {}}, {"README.md": "a"}),
        (
            {
                "tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.5.0.0.json"]},
                "tokenizer.json": {},
                "tokenizer.5.0.0.json": {},  # which some versions of transformers load
            },
            {"vocab.json": {}},
        ),
    ],
)
def test_files_that_are_loaded_have_a_digest(files: Files, others: Files, tmp_path: Path) -> None:
    assert write(tmp_path, others | files).keys() == files.keys()
    for name, content in files.items():
        before = base_files(tmp_path)
        other = f"{content}x" if isinstance(content, str) else content | {"x": 1}
        assert write(tmp_path, {name: other}) != before
        write(tmp_path, {name: content})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json must be JSON"):
        base_files(tmp_path)


def test_a_fingerprint_is_of_the_base_and_its_tokenizer(
    adapters: list[Path], tmp_path: Path
) -> None:
    """A ledger opens only with the same files, even if the ensemble recorded neither."""
    folder, base = adapters[0].parent, tmp_path / "Tiny"
    tiny_model("gpt2").save_pretrained(base)
    first = Ensemble.from_pretrained(base, folder).fingerprint
    shutil.copytree(base, tmp_path / "copy" / "Tiny")
    assert Ensemble.from_pretrained(tmp_path / "copy" / "Tiny", folder).fingerprint == first
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=base_files(base)))
    assert Ensemble.from_pretrained(base, folder).fingerprint == first  # recorded, then compared
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED))
    (base / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    second = Ensemble.from_pretrained(base, folder).fingerprint
    tiny_model("gpt2", 1).save_pretrained(base)
    third = Ensemble.from_pretrained(base, folder).fingerprint
    assert len({first, second, third}) == 3


def test_a_public_model_from_the_hub_is_compared(
    adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cached = tmp_path / "hub" / "models--some-org--Tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    tiny_model("gpt2").save_pretrained(cached / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("adapmixed.ensemble.members.load_base", lambda *_, **__: (named("x"), None))
    folder = adapters[0].parent
    files = base_files(cached / "snapshots" / "abc")
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=files))
    assert Ensemble.from_pretrained("some-org/Tiny", folder).unverified == ("shards",)
    changed = files | {"model.safetensors": "0" * 64}
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=changed))
    with pytest.raises(ValueError, match=DIFFERS):
        Ensemble.from_pretrained("some-org/Tiny", folder)
    # Without a digest, the full hub name with its commit decides.
    for members in (("m0", "m1"), ("m0", None), (None, None)):
        write_manifest(folder, Manifest("some-org/Tiny", members, ADAPTED, revision="abc"))
        assert Ensemble.from_pretrained("some-org/Tiny", folder).unverified == ("shards",)
        write_manifest(folder, Manifest("some-org/Tiny", members, ADAPTED))  # it may move
        moving = Ensemble.from_pretrained("some-org/Tiny", folder)
        assert moving.unverified == ("shards", "base")
        write_manifest(folder, Manifest("", members, ADAPTED))
        unnamed = Ensemble.from_pretrained("some-org/Tiny", folder)
        assert unnamed.unverified == ("shards", "base")
    write_manifest(folder, Manifest("some-org/Tiny", ("m0", "m1"), ADAPTED, revision="abc"))
    assert Ensemble.from_pretrained("some-org/Tiny", folder).unverified == ("shards",)
    assert Ensemble.from_pretrained("Tiny", folder).unverified == ("shards", "base")
    # A folder may change, whatever it is called.
    local = str(shutil.copytree(cached / "snapshots" / "abc", tmp_path / "Tiny"))
    write_manifest(folder, Manifest(local, ("m0", "m1"), ADAPTED, revision="abc"))
    assert Ensemble.from_pretrained(local, folder).unverified == ("shards", "base")
    # What is compared is what was loaded, of which main may be a newer commit.
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=files))
    shutil.copytree(cached / "snapshots" / "abc", cached / "snapshots" / "def")
    (cached / "snapshots" / "def" / "model.safetensors").write_bytes(b"newer")
    newer = named("x")
    newer.config._commit_hash = "def"
    monkeypatch.setattr("adapmixed.ensemble.members.load_base", lambda *_, **__: (newer, None))
    with pytest.raises(ValueError, match=f"{DIFFERS} model.safetensors$"):
        Ensemble.from_pretrained("some-org/Tiny", folder)
    monkeypatch.setattr("adapmixed.ensemble.members.load_base", lambda *_, **__: (named("x"), None))
    # The hub's cache may lack files: that is no other base, and was not compared.
    lacking = files | {"tokenizer.json": "0" * 64}
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=lacking))
    assert Ensemble.from_pretrained("some-org/Tiny", folder).unverified == ("shards", "base")


def test_a_guarantee_says_that_the_public_model_was_not_compared(adapters: list[Path]) -> None:
    words = "The public model was not compared"
    unnamed = Ensemble.from_pretrained(named(""), adapters)
    assert unnamed.unverified == ("shards", "base")
    assert words in answer(ensemble=unnamed)
    folder = adapters[0].parent
    compared = Ensemble.from_pretrained(public_folder(folder), folder)
    assert words not in answer(ensemble=compared)


def test_refused_bases(adapters: list[Path], tmp_path: Path) -> None:
    from peft import PeftModel

    base, folders = named(""), adapters[:1]
    head = [write_adapter(base, tmp_path / "head", seed=0, target_modules=["lm_head"])]
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), folders[0])
    for bad, reason in [
        (adapted, "carries adapters"),
        (Ensemble.from_pretrained(base, folders).model, "carries adapters"),
        (Ensemble.from_pretrained(base, head).model, "carries adapters"),
        (torch.nn.Linear(2, 2), "transformers model"),
        (3, "transformers model"),
        (tmp_path / "nowhere", "existing folder"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Ensemble.from_pretrained(bad, folders)


def test_a_base_folder_with_an_adapter_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    """transformers would add it to the weights, and private text would become public."""
    member = adapters[0]
    tiny_model("gpt2").save_pretrained(tmp_path / "base")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(member / file, tmp_path / "base" / file)
    with pytest.raises(ValueError, match="carries adapters: .* adapter_config.json"):
        Ensemble.from_pretrained(tmp_path / "base", [member])


@pytest.mark.parametrize("name", ["./modle", "/modle", "a/b/c", "", "models/modle"])
def test_a_path_is_not_asked_of_the_hub(
    name: str, adapters: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()

    def asked(*_: Any, **__: Any) -> None:
        raise OSError("the hub is asked")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", asked)
    words = f"base must be an existing folder or a hub name, got {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        load_base(name, None)
    with pytest.raises(ValueError, match=re.escape(words)):
        Ensemble.from_pretrained(name, adapters)
    with pytest.raises(OSError, match="the hub is asked"):
        load_base("some-org/modle", None)
    # A model that was downloaded before keeps its name, whatever folders are here.
    cached = "adapmixed.ensemble.public_model.try_to_load_from_cache"
    monkeypatch.setattr(cached, lambda name, file: f"{name}/{file}")
    with pytest.raises(OSError, match="the hub is asked"):
        load_base("models/modle", None)


# Shards that share identifiers, or might


KEY = bytes(range(32))


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
    other = shard("bob", key=KEY[::-1])
    assert [name for name in bob if bob[name] == other[name]] == ["documents"]
    good = Manifest("", members, ADAPTED, shards=(alice, empty, bob))
    write_manifest(tmp_path, good)
    assert read_manifest(tmp_path) == good
    text = (tmp_path / "ensemble.json").read_text()
    assert "alice" not in text and "bob" not in text
    for shards, why in [
        ((alice, empty, shard("dora", "carol")), "m0 and m2 share an identifier"),
        ((alice, bob, shard("dora") | {"sha256": bob["sha256"]}), "m1 and m2 share .* content"),
        ((alice, other, empty), "m0 and m1 must be hashed under one key"),
        ((alice, bob), "each of the 3 members"),
        # A record that is not whole proves nothing.
        *(
            ((alice, bob, record), "shards must be records .* another one for m2")
            for record in (
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
