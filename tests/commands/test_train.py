"""The command ``adapmixed train``: presets, options, and the path from a corpus to an answer."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_cases import write_base, write_corpus

from adapmixed.cli import _parser, main
from adapmixed.commands import train
from adapmixed.commands.train import training_of
from adapmixed.ensemble import read_manifest
from adapmixed.mechanisms import AdaPMixED
from adapmixed.training import FinetuneConfig
from adapmixed.training.settings import PRESETS, BaseFacts

FACTS = BaseFacts(
    name="gpt2", revision=None, files={}, beginning=(), tested=True, longest_block=1024,
    linear_layers=(
        "h.0.c_attn", "h.0.c_proj", "h.1.c_attn", "h.1.c_proj", "h.10.c_attn", "lm_head"
    ),
    default_targets=("c_attn",), head="lm_head", blocks=("h.0", "h.1", "h.10"),
)  # fmt: skip


def parsed(*options: str) -> argparse.Namespace:
    required = ["--base", "gpt2", "--corpus", "builtin", "--output", "out"]
    return _parser().parse_args(["train", *required, *options])


def config(*options: str, facts: BaseFacts = FACTS) -> FinetuneConfig:
    arguments = parsed(*options)
    return train._config(arguments, facts, training_of(arguments))


# Epochs and learning rate come from the paper's table train_params, N from priv_params.
@pytest.mark.parametrize(
    ("name", "epochs", "rate", "num_models"),
    [
        ("wikitext-103", 15, 2e-4, 100),
        ("one-billion-word", 5, 2e-4, 80),
        ("pubmed", 5, 2e-4, 100),
        ("air-dialogue", 10, 4e-4, 100),
    ],
)
def test_presets(name: str, epochs: int, rate: float, num_models: int) -> None:
    assert config("--preset", name) == FinetuneConfig(
        rank=4, alpha=32.0, learning_rate=rate, weight_decay=0.01, block_size=512,
        epochs=epochs, batch_size=8,
    )  # fmt: skip
    assert PRESETS[name].num_models == num_models
    assert isinstance(AdaPMixED.preset(name), AdaPMixED)  # the mechanism's preset has the same name


def test_options_come_before_presets() -> None:
    found = config("--preset", "pubmed", "--epochs", "2", "--adapt", "c_attn,lm_head")
    assert (found.epochs, found.rank, found.target_modules) == (2, 4, ("c_attn", "lm_head"))
    with pytest.raises(ValueError, match="all, or name .* which end in c_attn, .*, got 'wte'"):
        config("--adapt", "c_attn,wte")
    with pytest.raises(ValueError, match="adapt must be given: peft has no default layers"):
        config("--preset", "pubmed", facts=replace(FACTS, default_targets=()))


def test_adapted_layers() -> None:
    assert config().target_modules == config("--adapt", "head").target_modules == ("lm_head",)
    assert config("--adapt", "last:1").target_modules == ("h.10.c_attn",)
    assert config("--adapt", "last:2").target_modules == (
        "h.1.c_attn", "h.1.c_proj", "h.10.c_attn"
    )  # fmt: skip
    assert config("--adapt", "all").target_modules == FACTS.linear_layers[:-1]
    # The defaults of output-layer members hold for every way to request them, and for no others.
    assert (config().rank, config().epochs, config().batch_size) == (8, 2, 1)
    assert config("--adapt", "lm_head") == config()
    text = "rank=2 early_stopping=yes steps=7 shared_a=yes"
    few = replace(config(), rank=2, early_stopping=True, epochs=1, steps=7, shared_a=True)
    assert config("--training", text) == few
    with pytest.raises(ValueError, match="epochs must not be given with steps, got 3"):
        config("--training", text, "--epochs", "3")
    assert config("--epochs", "3") == replace(config(), epochs=3, steps=1)
    assert config("--adapt", "all").rank == FinetuneConfig().rank
    # A preset keeps the paper's numbers, and its layers unless others are given.
    assert config("--preset", "pubmed").target_modules == ("c_attn",)
    of_preset = config("--preset", "pubmed", "--adapt", "head")
    assert (of_preset.rank, of_preset.target_modules) == (4, ("lm_head",))
    for what in ("last:0", "last:4", "first", "last:-1"):
        with pytest.raises(ValueError, match=f"adapt must be head.*got '{what}'"):
            config("--adapt", what)
    with pytest.raises(ValueError, match="0 blocks found in gpt2, got 'all'"):
        config("--adapt", "all", facts=replace(FACTS, blocks=()))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=0", "rank must be an integer >= 1, got 0"),
        ("shared_a=1", "--training: shared_a must be yes or no, got '1'"),
        ("block_size=8", "--training does not take block_size: use --block-size"),
        ("target_modules=lm_head", "--training does not take target_modules: use --adapt"),
        ("seeds=1", "--training does not take seeds: keys are rank, alpha, .*, early_stopping, "),
    ],
)
def test_refusals_of_settings(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config("--training", text)


def test_the_page_names_all_settings() -> None:
    with pytest.raises(ValueError, match="keys are ") as error:
        training_of(parsed("--training", "x=1"))
    page = (Path(__file__).parents[2] / "docs/how-to/train.md").read_text(encoding="utf-8")
    assert all(key in page for key in str(error.value).split("keys are ")[1].split(", "))


def test_a_block_is_no_longer_than_the_window_unless_it_is_given() -> None:
    for positions in (32, 2048, None):
        facts = replace(FACTS, longest_block=positions)
        for options, size in (((), 256), (("--preset", "pubmed"), 512)):
            fits = min(size, positions or size)
            assert config(*options, facts=facts).block_size == fits
        assert config("--block-size", "64", facts=facts).block_size == 64


def test_from_a_corpus_to_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, output = write_base(tmp_path / "tiny-base"), tmp_path / "ensemble"
    write_corpus(tmp_path / "corpus.jsonl")
    arguments = ["--corpus", str(tmp_path / "corpus.jsonl"), "--id-column", "user"]
    arguments += ["--models", "40", "--epochs", "1", "--block-size", "16"]
    arguments += ["--training", "validation_fraction=0.4", "--preset", "air-dialogue", "--output"]
    models = ["--base", str(base)]
    assert main(["train", *models, *arguments, str(output)]) == 0
    printed = capsys.readouterr()
    assert printed.err.count(": finished (") == 40 and "(40 of 40, 00:00 left)" in printed.err
    assert not any(word in printed.err for word in ("loss", "documents,", "tokens"))
    assert printed.out == f"wrote {output}: 40 members\n"
    assert "What stays in one shard: all documents of one 'user'." in printed.err
    assert "Places: 12 of 40 are taken, each by one 'user'." in printed.err
    assert "do not publish" in printed.err
    assert not any(words in printed.err for words in ("warning", "no names of their own"))
    training = read_manifest(output).training
    assert training["learning_rate"] == 4e-4 and "empty" not in training
    answer = ["--ensemble", str(output), "--prompt", "user", "--max-new-tokens", "2", "--seed", "1"]
    answer += ["--mechanism", "clipped-log-pool scale=2 lower=0 upper=0.5 queries=2"]
    assert main(["generate", *models, *answer]) == 0
    said = capsys.readouterr().err
    assert "Up to 2 answered queries are" in said and "for everything of one 'user' with ε" in said
    # Losses are logged for the operator alone.
    shared = [str(tmp_path / "verbose"), "--verbose", "--share-shards", "--models", "3"]
    assert main(["train", *models, *arguments, *shared]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "public_loss" in line]
    assert lines and all("adapmixed.training.run: member-00" in line for line in lines)


def test_a_base_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    rest = ["--corpus", str(tmp_path / "corpus.jsonl"), "--output", str(tmp_path / "out")]

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    assert main(["train", "--base", "./modle", *rest]) == 2
    error = capsys.readouterr().err
    assert "--base must be an existing folder or a hub name, got './modle'" in error
    assert main(["train", "--base", "modle", *rest]) == 2
    error = capsys.readouterr().err
    assert "that can be read, got 'modle': no connection" in error
    assert not (tmp_path / "out").exists()
