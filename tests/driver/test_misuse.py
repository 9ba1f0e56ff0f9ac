"""Every guard of the table "Misuse" in docs/privacy.md: refused, or said by the guarantee."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import FakeEnsemble
from tiny_models import TARGETS, tiny_model, write_adapter

import adapmixed_ext as ops
from adapmixed.cli import main
from adapmixed.data import Document
from adapmixed.data.demo import demo_base, demo_ensemble_path
from adapmixed.decoding import generate, stream
from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, PMixED, PublicOnly
from adapmixed.misuse import REASONS
from adapmixed.models import Ensemble, Manifest, read_manifest, write_manifest
from adapmixed.models.provenance import base_sha256, tokenizer_files
from adapmixed.privacy import (
    Accountant,
    Caveat,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    Ledger,
    PerModelFilter,
)
from adapmixed.rng import SecureRandom, SeededRandom
from adapmixed.training import shard_record

PROMPT = torch.tensor([[1, 2, 3]])
POOL = ClippedLogPool(-0.5, 0.5, queries=40)
MODELS = ["--base", str(demo_base()), "--ensemble", str(demo_ensemble_path())]
KEY = bytes(range(32))


def answer(mechanism: Any = POOL, ensemble: Any = None, **settings: Any) -> str:
    """The guarantee of a few answers."""
    accountant = settings.setdefault("accountant", Accountant(1e-5))
    settings = dict(max_new_tokens=2, rng=SecureRandom()) | settings
    generate(ensemble or FakeEnsemble(), mechanism, PROMPT, **settings)
    return str(accountant.epsilon())


# Asking for something other than a sample


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ({"do_sample": False}, "infinite Rényi divergence"),
        ({"num_beams": 4}, "a search keeps what private probabilities rank highest"),
        ({"penalty_alpha": 0.6}, "as deterministic as greedy"),
        ({"output_scores": True}, "a probability of the mixture is itself"),
        ({"logprobs": 5}, "a probability of the mixture is itself"),
        ({"temperature": 0.7}, "another law than the one that was projected and charged"),
        ({"top_p": 0.9}, "another law than the one that was projected and charged"),
        ({"top_k": 50}, "top_k of ClippedMixing"),
        ({"logits_processor": []}, "another law"),
        ({"num_return_sequences": 3}, "a query of its own"),
        ({"seed": 1}, "randomness comes from rng"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_python_arguments(function: Any, option: dict[str, Any], why: str) -> None:
    accountant = Accountant(1e-5)
    settings: dict[str, Any] = dict(max_new_tokens=2, rng=SecureRandom(), accountant=accountant)
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"{name} must not be given, got .*{why}"):
        function(FakeEnsemble(), POOL, PROMPT, **settings, **option)
    assert accountant.queries == 0


def test_other_unknown_arguments_are_errors_as_ever() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_tokens'"):
        answer(max_tokens=3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--greedy"], "infinite Rényi divergence"),
        (["--do-sample", "False"], "infinite Rényi divergence"),
        (["--num-beams=4"], "a search keeps what private probabilities rank highest"),
        (["--logprobs", "5"], "a probability of the mixture is itself"),
        (["--min-p=0.1"], "another law than the one that was projected and charged"),
        (["--top-p", "0.9"], "another law than the one that was projected and charged"),
    ],
)
def test_options_of_the_command(
    options: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", *MODELS, "--prompt", "The", *options])
    assert stop.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"argument {options[0].partition('=')[0]}: must not be given" in error and why in error


def test_top_k_after_mixing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *MODELS, "--text", str(tmp_path), "--top-k", "50"]) == 2
    error = capsys.readouterr().err
    assert "--top-k does not apply to adapmixed, got 50" in error and REASONS["top_k"] in error


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
        assert Caveat("seeded") in proposal.events()


def test_no_ledger_is_charged_for_seeded_answers(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.db", delta=1e-5, configuration="x") as ledger:
        with pytest.raises(ValueError, match="knows a seed can undo the randomness"):
            answer(rng=SeededRandom(1), ledger=ledger)
        proposal = POOL.propose(torch.randn(3, 1, 5), torch.randn(1, 5), rng=SeededRandom(0))
        with pytest.raises(ValueError, match="knows a seed can undo the randomness"):
            ledger.charge(proposal.events())
        assert ledger.charges == 0
        ledger.charge(Caveat("shards"))


def test_a_fork_does_not_reuse_a_key() -> None:
    rng = SecureRandom()
    here = bytes(rng.reserve()[0].tolist())
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, bytes(rng.reserve()[0].tolist()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        there = pipe.read(32)
    os.waitpid(child, 0)
    assert len(there) == 32 and there != here
    assert bytes(rng.reserve()[0].tolist()) == here


# Screening


def test_noise_is_added_before_re_scaling() -> None:
    with pytest.raises(ValueError, match="noise is added before re-scaling: after it the stated"):
        AdaPMixED(18.0, 0.2, screen="rescaled")  # type: ignore[arg-type]
    # The operator itself: of three kept tokens of small mass, noise as large as that mass decides.
    q = torch.log(torch.tensor([[0.004, 0.003, 0.003, *[0.99 / 990] * 990]]))
    noise = torch.tensor([[-0.004, 0.0, 0.0]], dtype=torch.float64)
    settings: Any = dict(weight=0.0, order=3.0, threshold=10.0, top_k=3)
    divergence = float(ops.screen(q[None], q, noise, **settings).check().divergence)
    kept = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    first = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    after = (kept + noise[0]).clamp_min(0) / (kept + noise[0]).clamp_min(0).sum()

    def renyi(s: torch.Tensor) -> float:
        return float((s**3 * kept**-2).sum().log() / 2)

    assert divergence == pytest.approx(renyi(first), rel=1e-4)
    assert renyi(after) < 0.01 * renyi(first)


@pytest.mark.parametrize("screen", ["noisy", None])
def test_no_filter_runs_on_adapmixed(screen: Any) -> None:
    """Its screening's bit and its losses are no part of a model's charge."""
    budget = FilterBudget("renyi", 1.0, 1e-5, 18.0)
    accountant, model_filter = Accountant(1e-5, filter_budget=budget), PerModelFilter(3, budget)
    with pytest.raises(ValueError, match="its screening tells a bit about all of them, retired"):
        answer(AdaPMixED(18.0, 0.2, screen), accountant=accountant, model_filter=model_filter)
    assert accountant.queries == 0 and not model_filter.spent.any()
    # Nor is a screening charged beside a filter by hand, in either order.
    charge = IndividualCharge("renyi", 18.0, torch.zeros(3, 1, dtype=torch.float64).numpy())
    events = [GaussianScreening(3, 1, 1e-4, 1e-2), charge]
    for order in (events, events[::-1]):
        accountant = Accountant(1e-5, filter_budget=budget)
        accountant.attach(PerModelFilter(3, budget))
        with pytest.raises(ValueError, match="screening must be off or public under a filter"):
            accountant.add(order)


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_no_filter_runs_on_adapmixed_by_option(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = {"generate": ["--prompt", "The"], "evaluate": ["--text", str(tmp_path)]}[command]
    assert main([command, *MODELS, *what, "--filter-epsilon", "2"]) == 2
    error = capsys.readouterr().err
    assert "--filter-epsilon does not apply to adapmixed" in error
    assert "screening tells a bit about all of them" in error


# The public model


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    base, folder = tiny_model("gpt2"), tmp_path / "ensemble"
    paths = [
        write_adapter(base, folder / f"m{i}", seed=i, target_modules=TARGETS["gpt2"])
        for i in range(2)
    ]
    for path in paths:
        name_base(path, "some-org/Tiny")
    write_manifest(folder, Manifest("", ("m0", "m1")))
    return paths


def name_base(adapter: Path, name: str) -> None:
    config = adapter / "adapter_config.json"
    named = json.loads(config.read_text()) | {"base_model_name_or_path": name}
    config.write_text(json.dumps(named))


def named(name: str) -> Any:
    """A model as `from_pretrained(name)` returns it."""
    base = tiny_model("gpt2")
    base.config._name_or_path = name
    return base


def public_folder(folder: Path, **manifest: Any) -> Path:
    """The public model's folder, whose digest the ensemble then records."""
    base = folder.parent / "tiny"
    tiny_model("gpt2").save_pretrained(base)
    write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256=base_sha256(base), **manifest))
    return base


def test_a_public_model_of_another_name_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    for same in ("some-org/Tiny", "tiny", "/models/tiny"):
        # Equal names of a folder or an object show nothing of the weights.
        assert Ensemble.load(named(same), adapters).unverified == ("shards", "base")
    for folder in (adapters, adapters[0].parent):
        with pytest.raises(ValueError, match=r"m0 names 'some-org/Tiny', got 'some-org/Huge'"):
            Ensemble.load(named("some-org/Huge"), folder)
    tiny_model("gpt2").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"names 'some-org/Tiny', got '.*/other'"):
        Ensemble.load(tmp_path / "other", adapters)
    name_base(adapters[1], "some-org/Huge")
    with pytest.raises(ValueError, match=r"m0 names 'some-org/Tiny', .*m1 'some-org/Huge'"):
        Ensemble.load(named("some-org/Tiny"), adapters)


def test_a_public_model_of_other_weights_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    folder = adapters[0].parent
    shards = {"plain": "1GB", "in-parts": "20KB"}
    for name, size in shards.items():
        tiny_model("gpt2").save_pretrained(tmp_path / name, max_shard_size=size)
        tiny_model("gpt2", 1).save_pretrained(tmp_path / f"{name}-other", max_shard_size=size)
        digest = base_sha256(tmp_path / name)
        assert digest is not None and digest != base_sha256(tmp_path / f"{name}-other")
        write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256=digest))
        # The digest tells, whatever the folder is called; a model object by where it came from.
        assert "base" not in Ensemble.load(tmp_path / name, folder).unverified
        # An object may have been changed since it was read.
        assert "base" in Ensemble.load(named(str(tmp_path / name)), folder).unverified
        for base in (tmp_path / f"{name}-other", named(str(tmp_path / f"{name}-other"))):
            with pytest.raises(ValueError, match="has another SHA-256"):
                Ensemble.load(base, folder)
    assert (tmp_path / "in-parts" / "model.safetensors.index.json").is_file()
    assert base_sha256(folder) is None


def test_weights_of_the_older_form_are_compared(adapters: list[Path], tmp_path: Path) -> None:
    """`pytorch_model.bin`, in one file or several."""
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
        digest = base_sha256(tmp_path / f"bin-{parts}-0")
        write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256=digest))
        assert Ensemble.load(tmp_path / f"bin-{parts}-0", folder).unverified == ("shards",)
        with pytest.raises(ValueError, match="has another SHA-256"):
            Ensemble.load(tmp_path / f"bin-{parts}-1", folder)


def test_another_tokenizer_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    """By what determines it, in whatever files; a copy that is written otherwise is the same."""
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
    recorded = tokenizer_files(base)
    assert recorded.keys() == forms.keys()
    digest = base_sha256(base)
    plain = Manifest("", ("m0", "m1"), base_sha256=digest, tokenizer_files=recorded)
    write_manifest(folder, plain)
    assert Ensemble.load(base, folder).unverified == ("shards",)
    config = {"model_max_length": 7, "tokenizer_class": "GPT2Tokenizer", "chat_template": "x"}
    for name, same in (
        ("vocab.json", json.dumps(dict(reversed((vocabulary | {"ab": 9}).items())), indent=3)),
        ("tokenizer_config.json", json.dumps(config)),
    ):
        (base / name).write_text(same)
        assert Ensemble.load(base, folder).unverified == ("shards",)
    for name, other in (
        ("vocab.json", json.dumps(vocabulary | {"bc": 9})),
        ("merges.txt", "#version: 0.2\nb c\n"),
        ("tokenizer_config.json", json.dumps(config | {"add_prefix_space": True})),
    ):
        kept = (base / name).read_text()
        (base / name).write_text(other)
        with pytest.raises(ValueError, match=f"{name} has another SHA-256"):
            Ensemble.load(base, folder)
        (base / name).write_text(kept)
    # A file that the training had not, one of it that is gone, or others: nothing to compare with.
    (base / "added_tokens.json").write_text("{}")
    with pytest.raises(ValueError, match="in the same files: .* has added_tokens.json, merges"):
        Ensemble.load(base, folder)
    words = "tokenizer was not compared"
    for manifest in (replace(plain, tokenizer_files={}), Manifest("", ("m0", "m1"))):
        write_manifest(folder, manifest)
        ensemble = Ensemble.load(base, folder)
        missing = "tokenizer" if manifest.base_sha256 else "base"
        assert ensemble.unverified == ("shards", missing)
        assert (words in answer(ensemble=ensemble)) == (missing == "tokenizer")


def test_a_fingerprint_is_of_the_base_and_its_tokenizer(
    adapters: list[Path], tmp_path: Path
) -> None:
    """Also where the ensemble recorded neither: a ledger then opens with the same files alone."""
    folder, base = adapters[0].parent, tmp_path / "Tiny"
    tiny_model("gpt2").save_pretrained(base)
    first = Ensemble.load(base, folder).fingerprint
    shutil.copytree(base, tmp_path / "copy" / "Tiny")
    assert Ensemble.load(tmp_path / "copy" / "Tiny", folder).fingerprint == first
    write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256=base_sha256(base)))
    assert Ensemble.load(base, folder).fingerprint == first  # recorded, then compared
    write_manifest(folder, Manifest("", ("m0", "m1")))
    (base / "special_tokens_map.json").write_text('{"eos_token": "a"}')
    second = Ensemble.load(base, folder).fingerprint
    tiny_model("gpt2", 1).save_pretrained(base)
    third = Ensemble.load(base, folder).fingerprint
    assert len({first, second, third}) == 3


def test_a_tokenizer_under_other_file_names_is_refused(tmp_path: Path) -> None:
    """The demo's vocabulary with permuted ids, as vocab.json and merges.txt."""
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
    with pytest.raises(ValueError, match="records tokenizer.json.* has merges.txt.*vocab.json"):
        Ensemble.load(base, demo_ensemble_path())
    early = tmp_path / "early"  # the bytes of tokenizer.json alone
    shutil.copytree(demo_ensemble_path(), early)
    recorded = replace(read_manifest(early), tokenizer_files={}, tokenizer_sha256="0" * 64)
    write_manifest(early, recorded)
    with pytest.raises(ValueError, match="records tokenizer.json, .* has merges.txt.*vocab.json"):
        Ensemble.load(base, early)
    for name in tokenizer_files(base):
        (base / name).unlink()
    assert Ensemble.load(base, demo_ensemble_path()).tokenizer is None


def test_what_determines_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "README.md").write_text("a")
    assert tokenizer_files(tmp_path).keys() == {"tokenizer.model"}
    first = tokenizer_files(tmp_path)["tokenizer.model"]
    (tmp_path / "tokenizer.model").write_bytes(b"other")
    assert tokenizer_files(tmp_path)["tokenizer.model"] != first
    (tmp_path / "tokenizer.json").write_text('{"padding": null, "model": {}}')
    found = tokenizer_files(tmp_path)
    assert found.keys() == {"tokenizer.json"}  # the other vocabulary is not read beside it
    (tmp_path / "tokenizer.json").write_text('{"model": {}, "padding": {"length": 3}}')
    assert tokenizer_files(tmp_path) == found
    (tmp_path / "tokenizer.json").write_text('{"model": {"padding": 3}}')
    assert tokenizer_files(tmp_path) != found
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json must be JSON"):
        tokenizer_files(tmp_path)


def test_a_public_model_from_the_hub_is_compared(
    adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cached = tmp_path / "hub" / "models--some-org--Tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    tiny_model("gpt2").save_pretrained(cached / "snapshots" / "abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("adapmixed.models.ensemble.load_base", lambda *_, **__: (named("x"), None))
    folder = adapters[0].parent
    digest = base_sha256(cached / "snapshots" / "abc")
    write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256=digest))
    assert Ensemble.load("some-org/Tiny", folder).unverified == ("shards",)
    write_manifest(folder, Manifest("", ("m0", "m1"), base_sha256="0" * 64))
    with pytest.raises(ValueError, match="has another SHA-256"):
        Ensemble.load("some-org/Tiny", folder)
    write_manifest(folder, Manifest("", ("m0", "m1")))  # no digest: the hub's full name
    assert Ensemble.load("some-org/Tiny", folder).unverified == ("shards",)
    assert Ensemble.load("Tiny", folder).unverified == ("shards", "base")


def test_a_guarantee_says_that_the_public_model_was_not_compared(adapters: list[Path]) -> None:
    words = "The public model was not compared"
    unnamed = Ensemble.load(named(""), adapters)
    assert unnamed.unverified == ("shards", "base")
    assert words in answer(ensemble=unnamed)
    folder = adapters[0].parent
    compared = Ensemble.load(public_folder(folder), folder)
    assert words not in answer(ensemble=compared)


# Shards


def shard(*names: str, key: bytes = KEY) -> dict[str, Any]:
    return shard_record([Document(name, f"text of {name}") for name in names], key=key)


def test_overlapping_shards_are_refused(tmp_path: Path) -> None:
    members = ("m0", "m1", "m2")
    alice, bob, empty = shard("alice", "carol"), shard("bob"), shard()
    good = Manifest("", members, shards=(alice, empty, bob))
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
        ((alice, bob, alice | {"identifiers": ["carol"]}), "m2 must be a list of hexadecimal"),
        ((alice, bob, empty | {"documents": 4}), "identifiers of m2 must be those of its 4"),
        ((alice, bob, empty | {"documents": -1}), "documents of m2 must be an integer >= 0"),
        ((alice, bob, {"identifiers": []}), "identifier_key of m2 must be given"),
    ]:
        with pytest.raises(ValueError, match=why):
            Manifest("", members, shards=shards)
    with pytest.raises(ValueError, match="key must have 16 to 64 bytes"):
        shard("alice", key=b"short")


def test_a_guarantee_says_that_shards_were_not_verified(adapters: list[Path]) -> None:
    folder, words = adapters[0].parent, "Disjointness of the shards was not verified"
    digests = ({"documents": 3, "sha256": "1" * 64}, {"documents": 2, "sha256": "2" * 64})
    for shards, verified in [
        ((), False),
        (digests, False),
        ((shard("alice"), digests[1]), False),
        ((shard("alice"), shard("bob")), True),
        ((shard("alice"), {"documents": 0}), True),
    ]:
        base = public_folder(folder, shards=shards)
        ensemble = Ensemble.load(base, folder)
        assert ensemble.unverified == (() if verified else ("shards",))
        assert (words not in answer(ensemble=ensemble)) == verified
    path = folder / "ensemble.json"
    overlapping = json.loads(path.read_text()) | {"shards": [shard("a"), shard("b", "a")]}
    path.write_text(json.dumps(overlapping))
    with pytest.raises(ValueError, match="shards must be disjoint, m0 and m1 share the identifier"):
        Ensemble.load(named("tiny"), folder)
    assert Ensemble.load(demo_base(), demo_ensemble_path()).unverified == ()


def test_a_ledger_remembers_what_was_not_verified(tmp_path: Path) -> None:
    ensemble, path = FakeEnsemble(), tmp_path / "ledger.db"
    ensemble.unverified = ("shards",)
    with Ledger.open(path, delta=1e-5, configuration="x") as ledger:
        answer(ensemble=ensemble, ledger=ledger)
    assert Ledger.verify(path).totals.caveats == ("shards",)
    assert "not verified" in str(Ledger.verify(path).totals)


def test_the_table_in_the_documentation_names_these_tests() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
    section = page.read_text(encoding="utf-8").split("## Misuse", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    listed = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row[-2])}
    ours = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert ours - listed == {
        "a_fingerprint_is_of_the_base_and_its_tokenizer",
        "other_unknown_arguments_are_errors_as_ever",
        "the_table_in_the_documentation_names_these_tests",
    }
    assert listed <= ours
