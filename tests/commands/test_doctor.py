"""``adapmixed doctor``."""

from __future__ import annotations

import json

import pytest

from adapmixed.cli import main
from adapmixed.data import demo_base


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--base", str(demo_base())]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"instruction_set", "cuda", "compiler"} <= facts["build"].keys()
    assert isinstance(facts["gpus"], list) and isinstance(facts["transformers_is_tested"], bool)
    assert facts["torch"]
    assert facts["1000_head_members_take"] == "0.04 GB in bfloat16 at rank 8"
