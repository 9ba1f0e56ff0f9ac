"""Members are read by the ranks that have them, and answer as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import in_ranks, write_ensemble
from tiny_models import tiny_model
from torch import Tensor

from adapmixed.ensemble import Ensemble, members
from adapmixed.ensemble.members import read_adapters
from adapmixed.ranks import Ranks

HEAD, LAST = ["lm_head"], ["h.1.attn.c_attn", "h.1.mlp.c_fc"]
KINDS: dict[str, list[list[str] | None]] = {  # None: a missing member
    "all": [["c_attn"], None, ["c_attn"], ["c_attn"]],
    "head": [HEAD, HEAD, None, HEAD],
    "last": [LAST, LAST, LAST, None],
    "mixed": [HEAD, LAST, None, LAST],
    "head, none on the second rank": [HEAD, HEAD, None, None],
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 7, 7, 8, 8, 8]])


def answers(ensemble: Ensemble) -> list[tuple[Tensor, Tensor]]:
    """Return logits computed at once, in chunks, and from the cache."""
    found = [ensemble.logits(IDS)]
    smallest = 2 * ensemble.sequence_bytes(IDS.shape[1])
    chunks = [part[1:3] for part in ensemble.iter_logits(IDS, memory_bytes=smallest)]
    found.append((torch.cat([p for p, _ in chunks], 2), torch.cat([q for _, q in chunks], 1)))
    decoder = ensemble.decoder(IDS)
    decoder.append(torch.tensor([3, 4]))
    return [*found, decoder.logits[:2]]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_answer_as_one_process(kind: str, tmp_path: Path) -> None:
    base = tiny_model("gpt2")
    base.save_pretrained(tmp_path / "base")
    write_ensemble(tmp_path / "ensemble", base, KINDS[kind])

    def load(**ranks: Any) -> Ensemble:
        return Ensemble.from_pretrained(tmp_path / "base", tmp_path / "ensemble", **ranks)

    def work(ranks: Ranks) -> Any:
        read: list[str] = []

        def noted(model: Any, folders: list[Path]) -> Any:
            read.extend(path.name for path in folders)
            return read_adapters(model, folders)

        members.read_adapters = noted  # type: ignore[attr-defined]  # in this child
        ensemble = load(ranks=ranks)
        assert ensemble.num_models == 4
        # Give each process its own logits, as if matrix products of other sizes rounded otherwise.
        head = ensemble.output_layer.base
        head.register_forward_hook(lambda *call: call[-1].mul_(1 + 2e-6 * ranks.rank))
        return str(ensemble.trunk), read, answers(ensemble)

    alone = load()
    expected = answers(alone)
    shared = {"all": "no block", "last": "the first 1 of 2", "mixed": "the first 1 of 2"}
    assert str(alone.trunk).startswith(shared.get(kind, "all blocks"))
    found = in_ranks(2, work, tmp_path)
    everyone = "head" in kind  # members of the output layer alone are computed everywhere
    for rank, own in ((0, slice(0, 2)), (1, slice(2, 4))):
        own = slice(0, 4) if everyone else own
        trunk, read, rows = found[rank]
        assert trunk == str(alone.trunk)
        present = [f"member-{i}" for i, one in enumerate(KINDS[kind]) if one is not None]
        assert read == [name for name in present if int(name[-1]) in range(own.start, own.stop)]
        for (private, public), (leading_private, leading), (all_private, q) in zip(
            rows, found[0][2], expected, strict=True
        ):
            assert len(private) == len(leading_private) == (4 if everyone else 2)
            torch.testing.assert_close(private, all_private[own], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(public, q, rtol=1e-5, atol=1e-6)
            assert torch.equal(public, leading)  # one public row for all, in every bit
            for i, layers in enumerate(KINDS[kind][own]):
                assert torch.equal(private[i], public) == (layers is None)
