"""Swap the members and force the tokens: no byte that leaves the server may differ."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_ensembles import BASE, write_ensemble
from prometheus_client import generate_latest
from serving_cases import CHAT, IN_VLLM, MODEL, Served, answering
from stub_engine import ByteTokenizer
from tiny_models import TARGETS, VOCAB, tiny_model, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble, read_manifest, write_manifest
from adapmixed.ensemble.lora import BatchedLoRA, HeadAdapters
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism, NextToken
from adapmixed.privacy import Accountant
from adapmixed.serving import answers
from adapmixed_ext.low_rank import BLOCK

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "\x01\x02\x03", "max_tokens": 6}),
    ("completions", {"prompt": ["\x04", "\x05\x06"], "max_tokens": 4, "temperature": 0.7}),
    ("completions", {"prompt": "\x07", "max_tokens": 8, "stream": True, "top_k": 5}),
    ("completions", {"prompt": "\x07", "max_tokens": 8, "stop": "\x11"}),
    ("completions", {"prompt": "\x01", "max_tokens": 900}),
    ("completions", {"prompt": "\x01", "logprobs": 1}),
    ("completions", {"prompt": "\x01" * 300, "max_tokens": 1}),
    ("completions", {"prompt": [[1, 1 << 20]], "max_tokens": 1}),
    ("chat/completions", {"messages": CHAT["messages"]}),
]
EPSILON = 4.0  # of every shard: spent by the members that differ from the public model


class Letters(ByteTokenizer):
    """A tokenizer without a chat template."""

    chat_template = None


def seen(served: Served, log: pytest.LogCaptureFixture) -> list[object]:
    """Return all that leaves the server, without times."""
    outputs: list[object] = []
    client = served.client()
    log.clear()
    for _ in range(3):
        for path, body in ASKED:
            answer = client.post(f"/v1/{path}", content=json.dumps({"model": MODEL, **body}))
            outputs.append((answer.status_code, dict(answer.headers), answer.content))
    for path in ("/v1/models", "/health", "/metrics", "/v1/ledger"):
        answer = client.get(path)
        outputs.append((answer.status_code, dict(answer.headers), answer.content))
    assert served.settled()  # or a figure may be that of a sequence that is about to leave
    outputs.append([(record.name, record.levelname, record.getMessage()) for record in log.records])
    figures = generate_latest(served.metrics.registry).decode()
    outputs.append(re.sub(r"(?m)^\S+_(created|sum|bucket)\S* .*$", "", figures))
    return outputs


def overflow(ensemble: Ensemble, value: float) -> Ensemble:
    """Make no number of what a member computes, as weights that are too large would."""
    for module in ensemble.model.modules():
        if isinstance(module, BatchedLoRA):
            module.up[0].fill_(value)
        elif isinstance(module, HeadAdapters):
            module.codes.view(-1, module.blocks, module.rank, BLOCK)[:, 0, :, 0] = value
    row = ensemble.logits(torch.tensor([[1, 2]]))[0][0]
    assert not row.isfinite().any()
    return ensemble


PLANNED = ClippedLogPool(-1.0, 1.0, queries=80)
"""It ends before the last answer that is asked for."""


def members(number: int, folder: Path) -> Ensemble:
    """Return an ensemble of three members, of which other ones equal the public model."""
    base, zero = tiny_model("llama"), ({0, 1}, {2})[number]
    write: Callable[..., Path] = write_adapter
    folders = [
        write(base, folder / f"{number}-{i}", seed=10 * number + i, zero=i in zero,
              target_modules=TARGETS["llama"])
        for i in range(3)
    ]  # fmt: skip
    found = Ensemble.from_pretrained(base, folders)
    found.tokenizer = "unused"
    return found


def heads(number: int, folder: Path) -> Ensemble:
    """Return an ensemble of output layers, for vLLM, of which other ones are missing."""
    path, missing = write_ensemble(folder / str(number), 3, seed=number), ({0, 1}, {2})[number]
    whole = read_manifest(path)
    names = tuple(None if i in missing else name for i, name in enumerate(whole.members))
    write_manifest(path, replace(whole, members=names))
    return Ensemble.from_pretrained(str(BASE), path)


@pytest.mark.parametrize(
    ("mechanism", "epsilon", "value", "in_vllm"),
    [
        (PLANNED, None, None, False),
        (PLANNED, None, math.nan, False),
        (ClippedLogPool(-1.0, 1.0), EPSILON, None, False),
        (AdaPMixED(order=3.0, target_leakage=0.05), None, None, False),
        (AdaPMixED(order=3.0, target_leakage=0.05), None, math.nan, False),
        pytest.param(PLANNED, None, math.nan, True, marks=IN_VLLM),
        pytest.param(ClippedLogPool(-1.0, 1.0), EPSILON, None, True, marks=IN_VLLM),
    ],
)
def test_members_change_nothing_but_the_tokens(
    mechanism: Mechanism,
    epsilon: float | None,
    value: float | None,
    in_vllm: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
) -> None:
    drawn = 0

    def forced(self: NextToken, rng: object) -> Tensor:
        nonlocal drawn
        rows = len(self.rows.public)
        drawn += rows
        return torch.tensor([(7 * (drawn - row)) % VOCAB for row in range(rows)])

    monkeypatch.setattr(NextToken, "sample", forced)
    monkeypatch.setattr(answers.secrets, "token_hex", lambda size: "00" * size)
    monkeypatch.setattr(answers.time, "time", lambda: 1.0)
    caplog.set_level(logging.INFO)
    results: list[list[object]] = []
    printed: list[object] = []
    spent: list[list[bool]] = []
    for number in range(2):
        ensemble = (heads if in_vllm else members)(number, tmp_path)
        if number == 1 and value is not None:
            overflow(ensemble, value)
        drawn, accountant = 0, Accountant(1e-5, epsilon=epsilon)
        given: dict[str, Any] = {"tokenizer": Letters(), "end_tokens": frozenset({3})}
        name = "vllm" if in_vllm else "adapmixed"
        with answering(
            name, BASE, ensemble, mechanism, accountant, max_tokens=1024, **given
        ) as served:
            capfd.readouterr()
            results.append(seen(served, caplog))
            printed.append(capfd.readouterr())
            if epsilon is not None:
                spent.append((accountant.spent > 0.8 * accountant.limit).tolist())
    assert results[0] == results[1]
    assert printed[0] == printed[1]
    answered = [reply for reply in results[0] if isinstance(reply, tuple)]
    ends = {429} if mechanism is PLANNED else set[int]()
    assert {reply[0] for reply in answered} == {200, 400, 404} | ends
    assert not re.search(b"(?i)epsilon|lambda|loss|shard", b"".join(reply[2] for reply in answered))
    # The test compares something: members that differ have spent their budgets.
    assert spent in ([], [[False, False, True], [True, True, False]])
