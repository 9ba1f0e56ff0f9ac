"""The commands and Python blocks of docs/tutorial.md run in order, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from doc_pages import DOCS, blocks, missing
from test_blocks import run_whole

from adapmixed.privacy import read_ledger

PAGE = DOCS / "tutorial.md"


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path) -> None:
    output = run_whole(PAGE, tmp_path)
    for shown in (one for one in blocks(PAGE) if one.language == "text"):
        assert not missing(shown, output), f"{shown}:\n{output}"
    printed = output.lower()
    assert {block.language for block in blocks(PAGE)} >= {"sh", "text"}
    for words in ("clipped-log-pool", "clipped-mixing", "perplexity", "Ledger"):
        assert words.lower() in printed, words
    manifest = json.loads((tmp_path / "my-ensemble" / "ensemble.json").read_text(encoding="utf-8"))
    assert len(manifest["shards"]) == manifest["num_models"]
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["methods"]
    # One record of the binding and one per step; the export adds a description of the ledger.
    charges = read_ledger(tmp_path / "ledger.db").charges
    exported = (tmp_path / "charges.jsonl").read_text(encoding="utf-8").splitlines()
    assert 4 <= charges and len(exported) == charges + 1
