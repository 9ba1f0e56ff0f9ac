"""The study of what members adapt: costs, rows, and going on after an interruption."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny

from adapmixed.data import demo_base, held_out_documents, private_documents
from adapmixed.ensemble.layers import linear_names
from adapmixed.ensemble.trunk import find_trunk
from adapmixed_lab.cli import main
from adapmixed_lab.reproduce import kinds as study
from adapmixed_lab.reproduce.drawing import draw
from adapmixed_lab.reproduce.kinds import corpora, kinds
from adapmixed_lab.reproduce.kinds.cost import token_cost
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.outputs import write_outputs
from adapmixed_lab.reproduce.result import read_experiment
from adapmixed_lab.reproduce.tables import text
from adapmixed_lab.reproduce.trained import write_corpus

N, RANK = 5, 2
RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "reproduce-kinds.json"


def test_cost_of_a_token() -> None:
    """The rows of every layer and the members' updates are counted by hand."""
    base: Any = tiny("gpt2")
    names = linear_names(base)
    size = {name: base.get_submodule(name).weight.numel() for name in names}
    update = {name: RANK * sum(base.get_submodule(name).weight.shape) for name in names}
    last = max(name.split(".h.")[1].split(".")[0] for name in names if ".h." in name)
    of_last = [name for name in names if f".h.{last}." in name]
    expected = {
        ("lm_head",): sum(size.values()) + N * update["lm_head"],
        tuple(of_last): sum(size.values())
        + N * sum(size[name] + update[name] for name in of_last)
        + N * size["lm_head"],
        tuple(names): (N + 1) * sum(size.values()) + N * sum(update.values()),
    }
    for adapted, count in expected.items():
        layers = dict.fromkeys(adapted, (RANK,))
        found = token_cost(base, find_trunk(base, adapted), layers, N)
        assert found == pytest.approx(count / sum(size.values()), rel=1e-12)


@pytest.fixture
def one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(folder: Path, base: str, progress: object = None) -> list[corpora.Domain]:
        path = folder / "few.jsonl"
        write_corpus(path, private_documents()[:6])
        held_out = tuple(one.text for one in held_out_documents()[:40])
        return [corpora.Domain("few", "few", base, path, held_out, 1)]

    monkeypatch.setattr(study, "domains", few)


@pytest.mark.usefixtures("one_domain")
@pytest.mark.slow
def test_rows_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, settings = Run(), {"queries": 6, "settings": ((2, 3), (1, 2)), "workers": 1}
    result = kinds(tmp_path, run, **settings)
    rows = result["rows"]
    labels = {row["label"] for row in rows}
    assert labels == {
        f"{kind}, r = {rank}, N = {n}" for kind in study.RATES for rank, n in ((2, 3), (1, 2))
    }
    public = {tuple(row["ours"]["perplexities"]) for row in rows if row["method"] == "public model"}
    assert len(public) == 1  # the same queries, whatever the ensemble
    costs = {row["label"]: row["ours"]["cost"] for row in rows}
    assert 1 < costs["head, r = 2, N = 3"] < costs["last:1, r = 2, N = 3"]
    assert costs["last:1, r = 2, N = 3"] < costs["last:2, r = 2, N = 3"]
    assert costs["last:2, r = 2, N = 3"] < costs["all, r = 2, N = 3"]
    for row in rows:
        ours = row["ours"]
        assert len(ours["perplexities"]) == study.SEEDS
        assert ours["perplexity"] == pytest.approx(sum(ours["perplexities"]) / study.SEEDS)
        if row["method"].endswith("ε ≤ 1"):
            assert ours["kind"] == "fixed" and 0.97 < ours["epsilon"] <= 1
    monkeypatch.setattr(study, "trained", lambda output, **_: output)  # nothing is trained again
    again = kinds(tmp_path, run, **settings)["rows"]
    assert [(r["method"], r["label"], r["ours"]["perplexities"]) for r in again] == [
        (r["method"], r["label"], r["ours"]["perplexities"]) for r in rows
    ]
    words = text(result)
    assert "What members adapt: few" in words and corpora.NO_CHANGELOGS[:30] in words
    (written,) = (p for p in write_outputs(result, tmp_path) if p.suffix == ".json")
    (figure,) = draw(read_experiment(written))
    assert figure.svg.startswith("<svg") and "ranks 1, 2" in figure.caption


@pytest.mark.usefixtures("one_domain")
@pytest.mark.slow
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = partial(kinds, seeds=1, settings=((1, 2),), workers=1)
    monkeypatch.setattr(study, "kinds", small)
    assert main(["reproduce", "kinds", "--queries", "5", "--out", str(tmp_path)]) == 0
    assert "head, r = 1, N = 2" in capsys.readouterr().out
    names = {path.name for path in tmp_path.iterdir()}
    files = {f"kinds-builtin{end}" for end in (".json", ".csv", "-1.svg", "-1.pdf")}
    assert names == {"kinds", *files}


def test_corpora_of_authors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No author is on two sides, and the tuned public model is kept."""
    documents = [
        corpora.Document(f"author {number}", f"* Fix number {number} of many.")
        for number in range(300)
    ]
    monkeypatch.setattr(corpora, "changelog_documents", lambda: documents)
    tuned: list[set[str]] = []

    def tune(base: str, texts: list[str], folder: Path, progress: object) -> None:
        tuned.append(set(texts))
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(corpora, "_tune", tune)
    for _ in range(2):
        _, logs, near = corpora.domains(tmp_path, str(demo_base()))
    (public,) = tuned
    private = logs.text.read_text()
    assert logs.text == near.text and near.base == str(tmp_path / "public-model")
    sides = [
        {one.text for one in documents if one.text in private},
        public,
        set(logs.held_out),
    ]
    assert sum(len(side) for side in sides) == len(set.union(*sides)) == 300
    assert all(len(side) > 20 for side in sides)
    monkeypatch.setattr(corpora, "changelog_documents", list)
    assert [one.slug for one in corpora.domains(tmp_path, str(demo_base()))] == ["reference"]


def test_the_tuned_public_model_is_better_on_such_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = ["* New upstream release.\n* Bump Standards-Version."] * 40
    corpora._tune(str(demo_base()), texts, tmp_path / "tuned", None)
    ids = AutoTokenizer.from_pretrained(tmp_path / "tuned")(texts[0], return_tensors="pt").input_ids
    losses = []
    for folder in (demo_base(), tmp_path / "tuned"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    assert losses[1] < losses[0] - 0.5 and math.isfinite(losses[1])
