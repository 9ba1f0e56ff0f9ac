"""The pieces of benchmarks.headline: documents, settings, shares and the figures."""

import functools
import gzip
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapmixed.privacy.planner import SHARDS, chosen, epsilon_of, kept_share

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are not installed, and pytest may be started anywhere

from benchmarks import headline  # noqa: E402

LOG = """\
some-tool (1.2-3) unstable; urgency=medium

  [ Somebody Else ]
  * Say what is wrong
    on two lines.

  * Second.

 -- Ada Lovelace <ada@example.org>  Mon, 01 Jan 2024 00:00:00 +0000

some-tool (1.2-2) unstable; urgency=low, binary-only=yes

  * First.

 -- "Grace Hopper" <grace@example.org>  Sun, 31 Dec 2023 00:00:00 +0000

some-tool (1.2-1) unstable; urgency=low

  * Nobody has signed this.
"""
WHOLE = "[ Somebody Else ]\n* Say what is wrong\non two lines.\n* Second."


def test_documents_are_the_signed_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert headline.documents(tmp_path) == []
    for package in ("tool", "libtool"):  # built from the same source
        (tmp_path / package).mkdir()
        (tmp_path / package / "changelog.Debian.gz").write_bytes(gzip.compress(LOG.encode()))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "changelog.Debian.gz").write_bytes(b"no gzip")
    assert sorted(headline.documents(tmp_path)) == ["* First.", WHOLE]
    monkeypatch.setattr(headline, "LONGEST", 30)  # cut at a line's end
    assert sorted(headline.documents(tmp_path)) == ["* First.", "[ Somebody Else ]"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "an array of the values that are given by name and returned in their order".split()
    texts = [
        " ".join(words[(7 * number + 3 * at + at * at) % 15] for at in range(60))
        for number in range(120)
    ]
    monkeypatch.setattr(headline, "documents", lambda: texts)
    monkeypatch.setattr(headline, "QUERIES", (1_024, 2_048))
    monkeypatch.setattr(headline, "EPSILONS", (8.0,))


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_small_run_reports_every_setting_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"headline --quick --workers 1 --seeds 2 --keep {tmp_path / 'kept'}".split()
    command += ["--out", str(tmp_path / "found"), "--figure", str(tmp_path / "figure.png")]
    monkeypatch.setattr(sys, "argv", command)
    contents = []
    for _ in range(2):
        headline.main()
        contents.append(json.loads((tmp_path / "found.json").read_text())["tables"])
    first, second = contents
    assert first == second and (tmp_path / "figure.png").stat().st_size > 10_000
    rows = {(row["models"], row["name"]): row for row in first["rows"]}
    (best,) = (row for row in first["rows"] if row["best"])
    assert best["share"] == pytest.approx(1.0) and best["name"] in headline.REFERENCES
    for (models, name), row in rows.items():
        public = rows[1, "public"]["perplexity"]
        assert row["change"][0] == pytest.approx(row["perplexity"] / public - 1, abs=1e-12)
        assert row["change"][1] <= row["change"][0] <= row["change"][2], (models, name)
        if "settings" not in row or row["mechanism"] == "pmixed":
            continue
        common = (headline.DELTA, models, row["queries"], row["adjacency"])
        assert 0.99 * row["epsilon"] < epsilon_of(*common, **row["settings"]) <= row["epsilon"]
    assert {models for models, name in rows if name.startswith("pmixed")} == {4}


def test_kept_shares_are_the_measured_ones_and_interpolated() -> None:
    results = (ROOT / "benchmarks/results/headline.txt").read_text(encoding="utf-8").splitlines()
    rows = [words for line in results if (words := line.split())[1:2] and "clipped" in words[1]]
    assert len(rows) == len(SHARDS) * 24

    def share(mechanism: str, models: int, upper: float) -> float:
        choice = SimpleNamespace(mechanism=mechanism, num_models=models, settings={"upper": upper})
        return kept_share(cast(Any, choice))

    both = functools.cache(chosen)
    for words in rows:  # N, mechanism, T, neighbours, ε, perplexity, change, ..., share, settings
        (kept,) = (float(word[:-1]) / 100 for word in words[8:] if re.fullmatch(r"\d+%", word))
        found = share(words[1], int(words[0]), float(words[-1]))
        # The file has whole percents, and half of the points are between those that are kept.
        assert found == pytest.approx(kept, abs=0.015), words
        if words[3:5] == ["zero_out", "3"]:
            plans = both(3.0, headline.DELTA, int(words[0]), int(words[2]))
            (choice,) = (plan for plan in plans if plan.mechanism == words[1])
            assert kept_share(choice) == pytest.approx(found, abs=0.001)
    for name, least in (("clipped-mixing", 1.0), ("clipped-log-pool", 0.0)):
        few = [share(name, 300, least + more) for more in (0.0, 0.01, 0.02)]
        assert few[0] == 0.0 < few[1] < few[2] < share(name, 300, 1e3) == share(name, 300, 1e6)
