"""``adapmixed-lab reproduce``: samples of the built-in scale, the full scale with stand-ins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trained_demo import copy_trained
from training_cases import rows, write_base, write_corpus

from adapmixed.cli import main as library
from adapmixed.data import Corpus, demo_base, private_documents
from adapmixed.ensemble import read_manifest
from adapmixed.training import demo
from adapmixed.training.demo import train_whole
from adapmixed.training.settings import FinetuneConfig
from adapmixed.training.shards import create_key
from adapmixed_lab.cli import main
from adapmixed_lab.commands.reproduce import Sources
from adapmixed_lab.reproduce.measure import (
    BUILTIN_CONFIG,
    POOL,
    WHOLE,
    WHOLE_NAME,
    builtin_dp_adapter,
    dp_line,
)


def result_of(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        ("table1", ["--runs", "2", "--queries", "12", "--long-queries", "24", "--references"]),
        ("figure2", ["--queries", "8", "--seeds", "2", "--references"]),
    ],
)
@pytest.mark.slow
def test_builtin_sample(
    experiment: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_trained(tmp_path)
    if experiment == "table1":
        options = [*options, str(train_whole(tmp_path, str(demo_base())))]
    assert main(["reproduce", experiment, "--out", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    result = result_of(tmp_path, f"{experiment}-wikitext-103.json")
    assert result["inputs"]["num_models"] == 64 and result["inputs"]["scale"] == "builtin"
    assert "stands in for GPT-2 small over wikitext-103" in " ".join(printed.split())
    methods = {row["method"] for row in result["rows"]}
    assert (WHOLE in methods) == (experiment == "table1") and POOL in methods
    if experiment == "figure2":
        assert result["settings"]["trainings"] == 2 and (tmp_path / "ensemble-1").is_dir()
        ours = result["rows"][1]["ours"]
        assert len(set(ours["perplexities"])) == ours["difference"]["trainings"] == 2
    for suffix in (".json", ".svg")[: 1 + (experiment == "figure2")]:
        (path,) = sorted(tmp_path.glob(f"{experiment}*{suffix}"))[:1]
        assert f"wrote {path}" in printed and path.stat().st_size > 0


@pytest.mark.slow
def test_full_scale_with_stand_ins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders stand in for hub names: base, ensemble, DP-SGD adapter, data set."""
    pytest.importorskip("opacus", reason="opacus is not installed (the lab extra)")
    pytest.importorskip("datasets", reason="datasets is not installed (the train extra)")
    folder, out = tmp_path / "stand-ins", tmp_path / "out"
    folder.mkdir()
    base = write_base(folder / "gpt2")
    write_corpus(folder / "corpus.jsonl")
    common = ["--base", str(base), "--corpus", str(folder / "corpus.jsonl")]
    common += ["--id-column", "user", "--preset", "wikitext-103"]
    small = ["--epochs", "1", "--block-size", "16", "--training", "batch_size=4"]
    ensemble, dp = folder / "ensemble", folder / "dp"
    places = ["--models", "10", "--share-shards"]
    assert library(["train", *common, *small, "--output", str(ensemble), *places]) == 0
    private = ["--epsilon", "8", "--delta", "1e-5"]
    assert main(["dp-sgd", *common, *small, "--output", str(dp), *private]) == 0
    data = folder / "wikitext"
    data.mkdir()
    lines = [
        json.dumps({"text": f" = Title {i} = \n" if i % 4 == 0 else row["text"]})
        for i, row in enumerate(rows() * 4)
    ]
    (data / "test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["reproduce", "table1", "--scale", "full", "--out", str(out), "--base", str(base)]
    options += ["--ensemble", str(ensemble), "--text", f"hub:{data}", "--references", str(dp)]
    options += ["--paper", "--runs", "2", "--queries", "20", "--long-queries", "64"]
    capsys.readouterr()
    assert main(options) == 0
    printed = capsys.readouterr().out
    result = result_of(out, "table1-wikitext-103.json")
    assert result["inputs"]["base"] == "gpt2" and result["inputs"]["num_models"] == 10
    (short, long) = (row for row in result["rows"] if row["method"] == "DP-SGD")
    assert short["ours"]["kind"] == "fixed" and short["ours"]["unit"] == "block of 16 tokens"
    assert 7.5 < long["ours"]["epsilon"] <= 8 and long["paper"]["perplexity"] == 32.53
    assert "block of 16 tokens" in printed and "paper: ε" in printed
    # The same command again reads what is kept: nothing is answered anew.
    kept = {path.name: path.read_bytes() for path in (out / "training-0").glob("*.state.json")}
    assert set(kept) == {
        f"table1-{part}.state.json"
        for part in ("1", "1-run-1", "1-alone-0", "1-alone-0-run-1", "2", "2-alone-0")
    }
    assert main(options) == 0
    assert result_of(out, "table1-wikitext-103.json")["rows"] == result["rows"]
    # The default numbers of queries are the paper's, for which this text is too short.
    assert main([*options[:-6], "--out", str(tmp_path / "paper")]) == 2
    assert "got 1024" in capsys.readouterr().err


@pytest.mark.slow
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_trained(tmp_path)

    def refuses(words: str, *options: str) -> None:
        assert main(["reproduce", *options, "--out", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err

    refuses("ensemble", "table2", "--scale", "full")
    refuses("base", "table2", "--base", "gpt2")
    refuses("of one member", "table2", "--references", str(tmp_path / "ensemble"))
    refuses("queries", "table2", "--queries", "1000000000")


@pytest.mark.slow
def test_one_adapter_is_trained_once_on_all_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = FinetuneConfig(rank=2, learning_rate=3e-3, epochs=1, batch_size=64, block_size=256)
    base, documents = str(demo_base()), private_documents()[:40]

    def trained(**changes: Any) -> dict[Path, int]:
        monkeypatch.setattr(demo, "private_documents", lambda: changes.get("documents", documents))
        monkeypatch.setattr(demo, "CONFIG", changes.get("config", few))
        folder = train_whole(tmp_path, base, seed=changes.get("seed", 0))
        assert len(read_manifest(folder).members) == 1
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    made = trained()
    assert trained() == made
    for other in ({"config": replace(few, rank=3)}, {"documents": documents[::-1]}):
        with pytest.raises(ValueError):
            trained(**other)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert not trained(seed=1).keys() & made.keys()


@pytest.mark.slow
def test_a_dp_adapter_of_the_builtin_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It protects single blocks or whole shards, and is trained once; here on part of the text."""
    monkeypatch.setattr(Corpus, "documents", lambda _: private_documents()[::15])
    pytest.importorskip("opacus", reason="opacus is not installed (the lab extra)")
    few = replace(BUILTIN_CONFIG, epochs=1, batch_size=64)
    folder, base = tmp_path / "dp", str(demo_base())
    said = builtin_dp_adapter(folder, base, config=few)
    assert 7.6 <= said.epsilon <= 8.0 and said.delta == 1e-5
    assert said.protected == "block of 64 tokens"
    weights = (folder / "adapter_model.safetensors").read_bytes()
    assert builtin_dp_adapter(folder, base, config=few) == said
    assert (folder / "adapter_model.safetensors").read_bytes() == weights
    assert Sources().load([folder]).num_models == 1
    create_key(tmp_path / "key", "words")
    said = builtin_dp_adapter(tmp_path / "whole", base, key=tmp_path / "key", config=few)
    assert said.epsilon <= 8.0 and said.protected == "shard"
    assert [dp_line(path)[0] for path in (folder, tmp_path / "whole")] == ["DP-SGD", WHOLE_NAME]
    with pytest.raises(ValueError, match="other settings"):
        builtin_dp_adapter(folder, base, key=tmp_path / "key", config=few)
    content = result_of(folder, "guarantee.json")
    training = content["training"] | {"rank": 3}
    for other in ({"epsilon": 1.0}, {"blocks_per_identifier": 1}, {"training": training}):
        (folder / "guarantee.json").write_text(json.dumps(content | other))
        with pytest.raises(ValueError, match="other settings"):
            builtin_dp_adapter(folder, base, config=few)
    (folder / "guarantee.json").write_text(json.dumps(content | {"delta": 1e-6}))
    with pytest.raises(ValueError, match="must have its ε at δ = 1e-05, got one at 1e-06"):
        dp_line(folder)
    (folder / "guarantee.json").write_text(json.dumps(content | {"epsilon": "nan"}))
    with pytest.raises(ValueError, match="epsilon must be"):
        builtin_dp_adapter(folder, base, config=few)


def test_what_is_no_result_is_not_drawn_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "result.json", tmp_path / "out"
    assert main(["reproduce", str(path), "--out", str(out)]) == 2
    assert f"one of table1, table2, figure2 or a result file, got {path}" in capsys.readouterr().err
    whole = json.loads((Path(__file__).parents[2] / "formats/reproduction-3.json").read_text())
    for change in ({"format_version": 4}, {"rows": [{}]}, {"inputs": {"dataset": "../x"}}):
        path.write_text(json.dumps(whole | change))
        assert main(["reproduce", str(path), "--out", str(out)]) == 2
        output = capsys.readouterr()
        assert str(path) in output.err and not output.out and not list(out.glob("*"))
