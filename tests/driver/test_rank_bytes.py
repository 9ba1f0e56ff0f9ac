"""How many bytes ranks send: docs/ranks.md, "What is sent"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Group, in_ranks, write_models
from rank_mechanisms import FILTERED, MECHANISMS, MODELS, POSITIONS, SCREEN, TARGETS, VOCAB, logits

from adapmixed.charging import Charge
from adapmixed.models import Ensemble
from adapmixed.privacy import Accountant, PerModelFilter
from adapmixed.rng import SeededRandom


def bytes_of(name: str, positions: int, world: int, sampling: bool) -> dict[str, int]:
    """docs/ranks.md, "What is sent", in bytes."""
    rows = -(-MODELS // world) * world
    token = 8 * positions if sampling else 0
    answer = {
        "sum": 8 * positions * VOCAB if sampling else 0,
        "each": 0 if sampling else 8 * positions * world,
    }
    pool = {"sum": 8 * positions * VOCAB, "each": 8 * positions * rows}
    adaptive = {"sum": 8 * positions * VOCAB, "each": 8 * positions * rows}
    sent: dict[str, dict[str, int]] = {
        "public": {"sum": 0, "each": 0},
        "unprotected": answer,
        "pmixed": answer,
        "clipped-mixing": answer | {"decide": positions},
        "clipped-log-pool": pool | {"decide": positions},
        "adapmixed, zero-out": adaptive,
        "adapmixed, public screen": adaptive | {"decide": positions},
        "adapmixed": adaptive | {
            "sum": adaptive["sum"] + 8 * positions * SCREEN["top_k"], "decide": positions,
        },
        # Three orders of the losses; seven and eleven tokens of q.
        "adapmixed, no screen": adaptive | {"each": 3 * adaptive["each"]},
        "adapmixed, fixed": answer | {
            "sum": answer["sum"] + 8 * positions * SCREEN["top_k"], "decide": positions,
        },
        "pmixed, published, sampled": answer | {"decide": positions * MODELS},
        "clipped-log-pool, public rules": pool | {
            "sum": 8 * positions * 7, "decide": positions + 8 * positions * 7,
        },
        "shaped": pool | {"decide": positions + 8 * positions * 11},
    }  # fmt: skip
    found = {"decide": 0} | sent[name]
    found["decide"] += token
    return {kind: size for kind, size in found.items() if size}


COUNTED = [
    "public", "unprotected", "pmixed", "clipped-mixing", "clipped-log-pool", "adapmixed",
    "adapmixed, zero-out", "adapmixed, public screen", "adapmixed, no screen", "adapmixed, fixed",
    "pmixed, published, sampled", "clipped-log-pool, public rules", "shaped",
]  # fmt: skip


def test_the_bytes_that_are_sent(tmp_path: Path) -> None:
    def work(ranks: Group) -> Any:
        private, public = logits()
        ranks = ranks.over(MODELS)
        found = {}
        for name in COUNTED:
            for targets in (None, TARGETS):
                ranks.traffic.clear()
                mechanism, rng = MECHANISMS[name], SeededRandom(0)
                rows = ranks.rows(private)
                mechanism.propose(rows, public, targets=targets, rng=rng, ranks=ranks).release()
                found[name, targets is None] = dict(ranks.traffic)
        return found

    for world in (2, 3):
        for found in in_ranks(world, work, tmp_path):
            for (name, sampling), traffic in found.items():
                where = (name, sampling, world)
                assert traffic == bytes_of(name, POSITIONS, world, sampling), where


@pytest.mark.parametrize("name", FILTERED)
def test_a_filter_tells_who_contributes(name: str, tmp_path: Path) -> None:
    """A byte for each model and query besides what the mechanism sends, and its charges."""
    mechanism, budget = FILTERED[name]

    def work(ranks: Group) -> Any:
        private, public = logits()
        ranks, found = ranks.over(MODELS), []
        for filtered in (False, True):
            model_filter = PerModelFilter(MODELS, budget) if filtered else None
            charge = Charge(
                Accountant(1e-5, filter_budget=budget if filtered else None), None, model_filter
            )
            proposal = mechanism.propose(
                ranks.rows(private), public, rng=SeededRandom(0), ranks=ranks
            )
            ranks.traffic.clear()
            proposal.release(charge(proposal) if filtered else None)
            found.append(dict(ranks.traffic))
        return found

    for plain, filtered in in_ranks(2, work, tmp_path):
        assert filtered.pop("decide") == plain.pop("decide") + POSITIONS * MODELS
        assert filtered == plain


def test_the_forward_pass_tells_the_public_row(tmp_path: Path) -> None:
    """In the logits' bytes, from every call of the models, and nothing of the private rows."""
    write_models(tmp_path, members=2)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 7, 7, 8, 8, 8]])

    def work(ranks: Group) -> Any:
        found = []
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            ensemble = Ensemble.load(
                tmp_path / "base", tmp_path / "ensemble", ranks=ranks, dtype=dtype
            )
            traffic = ensemble.ranks.traffic
            traffic.clear()
            ensemble.logits(ids)
            whole = dict(traffic)
            traffic.clear()
            ensemble.decoder(ids).append(torch.tensor([3, 4]))
            found.append((size * ensemble.vocab_size, whole, dict(traffic)))
        return found

    for found in in_ranks(2, work, tmp_path):
        for row, whole, decoded in found:
            assert whole == {"decide": ids.numel() * row}
            assert decoded == {"decide": 2 * len(ids) * row}  # the prompt's last position, a token
