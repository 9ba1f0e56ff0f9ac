"""``adapmixed-lab compare``: settings that keep to ε, one table, one figure."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trained_demo import DEMO_ENSEMBLE
from transformers import AutoModelForCausalLM

from adapmixed.data import demo_base
from adapmixed.data.builtin import held_out_documents
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed_lab.baselines.frontier import WORDS, methods
from adapmixed_lab.cli import main
from adapmixed_lab.dp_sgd import FORMAT_VERSION, GUARANTEE_FILE, AdapterGuarantee

pytestmark = pytest.mark.usefixtures("demo_ensemble")

MODELS, QUERIES, VOCAB, DELTA = 12, 40, 30, 1e-5
EX_POST = "data-dependent, ex-post"


def test_every_setting_keeps_to_its_epsilon() -> None:
    """Also for rows far from the public one; a fixed ε is nearly spent."""
    generator = torch.Generator().manual_seed(1)
    public = torch.randn(QUERIES, VOCAB, generator=generator)
    private = 3 * torch.randn(MODELS, QUERIES, VOCAB, generator=generator)
    found = methods([0.5, 4.0], DELTA, MODELS, QUERIES, VOCAB)
    assert list(found)[:2] == ["public", "unprotected"] and len(found) == 17
    for name, mechanism in found.items():
        accountant = Accountant(DELTA)
        accountant.charge(mechanism.propose(private, public, rng=SeededRandom(0)))
        guarantee = accountant.guarantee()
        if "≤" in name:
            target, ex_post = float(name.partition("≤")[2]), name.startswith("adapmixed")
            assert guarantee.kind == (EX_POST if ex_post else "fixed"), name
            assert guarantee.epsilon is not None and guarantee.epsilon <= target * (1 + 1e-9)
            assert ex_post or guarantee.epsilon > 0.99 * target
    assert name == "submix, claims 4" and guarantee.kind == "none"


def test_a_member_within_the_ball_keeps_its_whole_distribution() -> None:
    """So AdaPMixED is not handicapped by weights of 0 where no projection is needed."""
    public = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    private = torch.stack([public, public + 1e-3, public + 1e-3 * torch.arange(VOCAB)])
    found = methods([1.0], DELTA, 3, 5, VOCAB)
    for name in ("adapmixed, ≤ 1", "pmixed, ≤ 1"):
        ticket = found[name].propose(private, public, rng=SeededRandom(0))
        assert bool((ticket._proposed.projection.weight == 1).all())  # type: ignore[union-attr]


def dp_adapters(tmp_path: Path) -> list[str]:
    """Write two adapters with a guarantee, and return their folders; a shard's changes nothing."""
    folders = []
    for unit, changes_nothing in (("shard", True), ("user", False)):
        config = LoraConfig(r=1, target_modules=["c_attn"], init_lora_weights=changes_nothing)
        folder = tmp_path / unit
        base = AutoModelForCausalLM.from_pretrained(demo_base())
        get_peft_model(base, config).save_pretrained(folder)
        stated = AdapterGuarantee(1.75, DELTA, 1.0, 0.5, 10, 1.0, 64, unit, 8, "pld")
        content = {"format_version": FORMAT_VERSION, "training": None, **asdict(stated)}
        (folder / GUARANTEE_FILE).write_text(json.dumps(content))
        folders.append(str(folder))
    return folders


def test_the_command_prints_a_table_and_writes_a_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, figure = tmp_path / "text.txt", tmp_path / "compare.svg"
    text.write_text("\n\n".join(one.text for one in held_out_documents()[:20]), encoding="utf-8")
    command = ["compare", "--base", str(demo_base()), "--ensemble", str(DEMO_ENSEMBLE)]
    command += ["--text", str(text), "--epsilon", "2", "--seed", "1", "--out", str(figure)]
    command += ["--dp-adapter", *dp_adapters(tmp_path)]
    assert main([*command, "--queries", "24"]) == 0
    printed = capsys.readouterr().out
    table = [re.split(r"  +", line) for line in printed.split("\n\n")[0].splitlines()]
    lines = {line[0]: line for line in table[2:]}
    assert float(lines["public"][1]) > float(lines["unprotected"][1])
    assert lines["adapmixed, ≤ 2"][-1] == f"{EX_POST}, zero-out"
    for name in ("clipped-log-pool", "invisible-ink", "noisy-aggregation", "uniform-mixing"):
        *_, epsilon, covered, kind = lines[f"{name}, ≤ 2"]
        assert 1.99 < float(epsilon) <= 2.0 and covered == "24 tokens" and "fixed" in kind
    name, perplexity, *_, kept, epsilon, covered, kind = lines["dp-sgd (shard)"]
    assert (perplexity, kept, epsilon) == (lines["public"][1], "-", "1.75")
    assert covered == "any number of tokens" and kind == "fixed, add/remove"
    assert lines["dp-sgd (user)"][1] not in (perplexity, lines["unprotected"][1])
    assert all(" ".join(words.split()) in " ".join(printed.split()) for words in WORDS)
    assert figure.read_text(encoding="utf-8").startswith("<svg role=")
    assert figure.stat().st_mode & 0o077 == 0
    for bad, words in (
        (["--queries", "99999"], "--queries must be at least 1 and at most"),
        (["--epsilon", "0"], "--epsilon must be > 0"),
        (["--delta", "1e-6"], "--dp-adapter must have its ε at δ = 1e-06, got 1e-05"),
    ):
        assert main([*command, *bad]) == 2
        assert words in capsys.readouterr().err
