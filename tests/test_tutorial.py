"""docs/tutorial.md: its commands and its Python run in order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adapmixed.privacy import read_ledger

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", TEXT, re.S | re.M)


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    script = [
        block if kind == "sh" else f"python - <<'END'\n{block}END\n" for kind, block in BLOCKS
    ]
    done = subprocess.run(
        ["bash", "-euo", "pipefail"], input="\n".join(script), cwd=tmp_path, text=True,
        capture_output=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [kind for kind, _ in BLOCKS] == ["sh"] * 5 + ["python", "sh"]
    printed = (done.stdout + done.stderr).lower()
    for words in ("clipped-log-pool", "clipped-mixing", "perplexity", "Ledger", "member-003"):
        assert words.lower() in printed, words
    assert printed.count("a budget of every shard") == 4  # of each run, and the ledger's
    manifest = json.loads((tmp_path / "my-ensemble" / "ensemble.json").read_text(encoding="utf-8"))
    assert manifest["num_models"] == 4 and len(manifest["shards"]) == 4
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["methods"]
    charges = read_ledger(tmp_path / "ledger.db").charges
    exported = (tmp_path / "charges.jsonl").read_text(encoding="utf-8").splitlines()
    # The binding, then one record a step: at most 4 of the first answer, 3 of the two others
    # together, 4 of the last. The export describes the ledger first.
    assert 4 <= charges <= 12 and len(exported) == charges + 1
