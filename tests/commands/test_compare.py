"""``adapmixed compare``: continuations of the same random numbers, marked as uncharged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from trained_demo import MODELS

from adapmixed.cli import main

pytestmark = pytest.mark.usefixtures("demo_ensemble")


def columns(capsys: pytest.CaptureFixture[str], mechanism: str, *prompts: str) -> list[list[str]]:
    """Return each prompt's columns, without the lines' spaces."""
    short = ["--max-new-tokens", "12", "--seed", "3"]
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    assert main(["compare", *MODELS, *short, "--mechanism", mechanism, *given]) == 0
    output = capsys.readouterr().out
    marked, *parts = re.split(r"^'(.*)'\n\n", output, flags=re.MULTILINE)
    assert "no guarantee covers them. Do not publish them" in " ".join(marked.split())
    found = []
    for prompt, table in zip(parts[::2], parts[1::2], strict=True):
        assert prompt in prompts
        titles, rule, *lines = table.rstrip("\n").split("\n")
        ends = [match.span() for match in re.finditer("─+", rule)]
        assert titles.split() == ["public", mechanism.split()[0], "unprotected"]
        found.append([" ".join(line[a:b].strip() for line in lines).strip() for a, b in ends])
    return found


def test_continuations_share_their_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prompts = ("The try statement", "A class")
    near = columns(capsys, "clipped-mixing lower=0.9999 upper=1.0001", *prompts)
    assert len(near) == 2 and all(len(texts) == 3 for texts in near)
    for public, private, unprotected in near:
        assert public == private != unprotected
    far = columns(capsys, "clipped-log-pool lower=-8 upper=8 scale=4", *prompts)
    assert [texts[::2] for texts in far] == [texts[::2] for texts in near]
    assert [texts[1] for texts in far] != [texts[1] for texts in near]
    # A prompt's numbers do not depend on the others.
    assert columns(capsys, "clipped-mixing lower=0.9999 upper=1.0001", prompts[1]) == near[1:]
    with pytest.raises(SystemExit):
        main(["compare", *MODELS, "--mechanism", "public", "--prompt", "A class", "--ledger", "x"])
    assert list(tmp_path.iterdir()) == []  # nothing is charged or written
