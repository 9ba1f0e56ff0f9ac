"""docs/tutorial.md: its commands are run in order, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from adapmixed.privacy import Ledger

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"^```sh\n(.*?)^```$", (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"), re.S | re.M
)


def test_the_commands_run(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail"], input="\n".join(BLOCKS), cwd=tmp_path, text=True,
        capture_output=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(BLOCKS) == 6
    for words in ("clipped-log-pool", "clipped-mixing", "perplexity", "Ledger", "member-003"):
        assert words.lower() in (done.stdout + done.stderr).lower(), words
    manifest = json.loads((tmp_path / "my-ensemble" / "ensemble.json").read_text(encoding="utf-8"))
    assert manifest["num_models"] == 4 and len(manifest["shards"]) == 4
    assert (tmp_path / "report" / "report.html").is_file()
    charges = Ledger.verify(tmp_path / "ledger.db").charges
    exported = (tmp_path / "charges.jsonl").read_text(encoding="utf-8").splitlines()
    # One record a step: at most 4 of the first answer, 3 of the two others together.
    assert 2 <= charges <= 7 and len(exported) >= charges
