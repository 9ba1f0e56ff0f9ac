"""The table "Misuse" in docs/concepts/threat-model.md: another public model or tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from misuse_cases import answer, name_base, named, public_folder, two_adapters
from tiny_models import ADAPTED, tiny_model
from trained_demo import DEMO_ENSEMBLE
from transformers import AutoTokenizer

from adapmixed.data import demo_base
from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ensemble.public_model import base_files

DIFFERS = "which differs from base_files of ensemble.json in"
pytestmark = pytest.mark.usefixtures("demo_ensemble")


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    return two_adapters(tmp_path / "ensemble")


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


def test_a_public_model_of_other_weights_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    folder = adapters[0].parent
    shards = {"plain": "1GB", "in-parts": "20KB"}
    for name, size in shards.items():
        tiny_model("gpt2").save_pretrained(tmp_path / name, max_shard_size=size)
        tiny_model("gpt2", 1).save_pretrained(tmp_path / f"{name}-other", max_shard_size=size)
        files = base_files(tmp_path / name)
        assert files.keys() == base_files(tmp_path / f"{name}-other").keys()
        write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=files))
        # The digest decides, whatever the folder is called. A model object has that of its source.
        assert "base" not in Ensemble.from_pretrained(tmp_path / name, folder).unverified
        # An object may have been changed since it was read.
        assert "base" in Ensemble.from_pretrained(named(str(tmp_path / name)), folder).unverified
        for base in (tmp_path / f"{name}-other", named(str(tmp_path / f"{name}-other"))):
            with pytest.raises(ValueError, match=DIFFERS):
                Ensemble.from_pretrained(base, folder)
    assert (tmp_path / "in-parts" / "model.safetensors.index.json").is_file()
    assert base_files(folder) == {}
    parts = sorted((tmp_path / "in-parts").glob("model-*.safetensors"))
    assert len(parts) > 1
    for part in parts:
        kept = part.read_bytes()
        part.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ValueError, match=DIFFERS):
            Ensemble.from_pretrained(tmp_path / "in-parts", folder)
        part.write_bytes(kept)


def test_weights_of_the_older_form_are_compared(adapters: list[Path], tmp_path: Path) -> None:
    """`pytorch_model.bin` is compared too, in one file or several."""
    folder = adapters[0].parent
    for parts in (1, 2):
        for seed in range(2):
            base = tmp_path / f"bin-{parts}-{seed}"
            model = tiny_model("gpt2", seed)
            model.config.save_pretrained(base)
            state = list(model.state_dict().items())
            names = [f"pytorch_model-{part}.bin" for part in range(parts)]
            names = names if parts > 1 else ["pytorch_model.bin"]
            for part, name in enumerate(names):
                torch.save(dict(state[part::parts]), base / name)
            if parts > 1:
                where = {key: names[i % parts] for i, (key, _) in enumerate(state)}
                index = {"metadata": {}, "weight_map": where}
                (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        files = base_files(tmp_path / f"bin-{parts}-0")
        assert files.keys() == {"config.json", *names}
        write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED, base_files=files))
        assert Ensemble.from_pretrained(tmp_path / f"bin-{parts}-0", folder).unverified == (
            "shards",
        )
        with pytest.raises(ValueError, match=DIFFERS):
            Ensemble.from_pretrained(tmp_path / f"bin-{parts}-1", folder)


def test_another_tokenizer_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    """The files that determine a tokenizer are compared; a copy in another layout is the same."""
    folder, base = adapters[0].parent, tmp_path / "Tiny"
    tiny_model("gpt2").save_pretrained(base)
    vocabulary = {"<|endoftext|>": 0, **{letter: i for i, letter in enumerate("abcdefgh", 1)}}
    forms = {
        "vocab.json": json.dumps(vocabulary | {"ab": 9}),
        "merges.txt": "#version: 0.2\na b\n",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "GPT2Tokenizer"}),
    }
    for name, text in forms.items():
        (base / name).write_text(text)
    recorded = base_files(base)
    assert recorded.keys() == forms.keys() | {"config.json", "model.safetensors"}
    plain = Manifest("", ("m0", "m1"), ADAPTED, base_files=recorded)
    write_manifest(folder, plain)
    assert Ensemble.from_pretrained(base, folder).unverified == ("shards",)
    config = {"model_max_length": 7, "tokenizer_class": "GPT2Tokenizer", "chat_template": "x"}
    for name, same in (
        ("vocab.json", json.dumps(dict(reversed((vocabulary | {"ab": 9}).items())), indent=3)),
        ("tokenizer_config.json", json.dumps(config)),
    ):
        (base / name).write_text(same)
        assert Ensemble.from_pretrained(base, folder).unverified == ("shards",)
    for name, other in (
        ("vocab.json", json.dumps(vocabulary | {"bc": 9})),
        ("merges.txt", "#version: 0.2\nb c\n"),
        ("tokenizer_config.json", json.dumps(config | {"add_prefix_space": True})),
    ):
        kept = (base / name).read_text()
        (base / name).write_text(other)
        with pytest.raises(ValueError, match=f"{DIFFERS} {name}$"):
            Ensemble.from_pretrained(base, folder)
        (base / name).write_text(kept)
    # A file that the training lacked raises, and so does one that is lacking now.
    (base / "added_tokens.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{DIFFERS} added_tokens.json$"):
        Ensemble.from_pretrained(base, folder)
    (base / "added_tokens.json").unlink()
    for name in forms:
        (base / name).unlink()
    with pytest.raises(ValueError, match=f"{DIFFERS} merges.txt, tokenizer_config.json, vocab"):
        Ensemble.from_pretrained(base, folder)


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


def test_a_tokenizer_under_other_file_names_is_refused(tmp_path: Path) -> None:
    """The demonstration's vocabulary has permuted ids, in vocab.json and merges.txt."""
    base = tmp_path / "base"
    shutil.copytree(demo_base(), base)
    model = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (base / "tokenizer.json").unlink()
    names = [name for name, number in model["vocab"].items() if number >= 300]
    numbers = [model["vocab"][name] for name in names]
    permuted = model["vocab"] | dict(zip(names, numbers[1:] + numbers[:1], strict=True))
    (base / "vocab.json").write_text(json.dumps(permuted), encoding="utf-8")
    pairs = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    (base / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{DIFFERS} merges.txt, tokenizer.json.*, vocab.json"):
        Ensemble.from_pretrained(base, DEMO_ENSEMBLE)


def test_another_configuration_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    """A setting of the model, or the name of another file of weights, is another base."""
    folder = adapters[0].parent
    base = public_folder(folder)
    path = base / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({"dtype": "bfloat16"} | config, indent=7))
    ensemble = Ensemble.from_pretrained(base, folder)
    assert ensemble.unverified == ("shards",)
    path.write_text(json.dumps(config | {"activation_function": "relu"}))
    with pytest.raises(ValueError, match=f"{DIFFERS} config.json"):
        Ensemble.from_pretrained(base, folder)
    write_manifest(folder, Manifest("", ("m0", "m1"), ADAPTED))
    other = Ensemble.from_pretrained(base, folder)
    assert other.unverified == ("shards", "base")
    assert other.fingerprint != ensemble.fingerprint
    shutil.copy(base / "model.safetensors", base / "other.safetensors")
    path.write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    files = base_files(base)
    assert files.keys() == {"config.json", "other.safetensors"}


def test_a_tokenizer_for_a_version_of_transformers_is_compared(tmp_path: Path) -> None:
    """`fast_tokenizer_files` names files that transformers loads in place of tokenizer.json."""
    base = tmp_path / "base"
    shutil.copytree(demo_base(), base)
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    names = ["tokenizer.json", "tokenizer.5.0.0.json"]
    path.write_text(json.dumps(config | {"fast_tokenizer_files": names}))
    content = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    (base / names[1]).write_text(json.dumps(content))
    files = base_files(base)
    assert names[1] in files
    lowered = content | {"normalizer": {"type": "Lowercase"}}
    (base / names[1]).write_text(json.dumps(lowered))
    assert AutoTokenizer.from_pretrained(base).tokenize("THE") == ["the"]  # it is the one loaded
    assert base_files(base) != files


def test_what_determines_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "README.md").write_text("a")
    assert base_files(tmp_path).keys() == {"tokenizer.model"}
    first = base_files(tmp_path)["tokenizer.model"]
    (tmp_path / "tokenizer.model").write_bytes(b"other")
    assert base_files(tmp_path)["tokenizer.model"] != first
    (tmp_path / "tokenizer.json").write_text('{"padding": null, "model": {}}')
    found = base_files(tmp_path)
    assert found.keys() == {"tokenizer.json"}  # the other vocabulary is not read
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "padding": {"length": 3}}')
    assert base_files(tmp_path) == found
    (tmp_path / "tokenizer.json").write_text('{"model": {"padding": 3}}')
    assert base_files(tmp_path) != found
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "normalizer": {"type": "Lowercase"}}')
    assert base_files(tmp_path) != found
    found = base_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "padding": {"pad_token": "a"}}')
    assert base_files(tmp_path) != found  # transformers makes it a special token
    (tmp_path / "added_tokens.json").write_text('{"padding": 7}')  # a token, not a setting
    found = base_files(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"padding": 8}')
    assert base_files(tmp_path) != found
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tekken.json").write_text('{"vocab": []}')
    assert "tekken.json" in base_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json must be JSON"):
        base_files(tmp_path)


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
