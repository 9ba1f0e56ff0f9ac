"""Members that share the public trunk, spread over ranks, answer as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import in_ranks
from tiny_models import adapted_layers, tiny_model, write_adapter
from torch import Tensor

from adapmixed.ensemble import Ensemble, Manifest, write_manifest
from adapmixed.ranks import Ranks

HEAD, LAST = ["lm_head"], ["h.1.attn.c_attn", "h.1.mlp.c_fc"]
KINDS: dict[str, list[list[str] | None]] = {  # None: a missing member
    "head": [HEAD, HEAD, None, HEAD],
    "last": [LAST, LAST, LAST, None],
    "mixed": [HEAD, LAST, None, LAST],
    "head, none on the second rank": [HEAD, HEAD, None, None],
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [7, 7, 7, 8, 8, 8]])


def write(folder: Path, members: list[list[str] | None]) -> None:
    base = tiny_model("gpt2")
    base.save_pretrained(folder / "base")
    names = [f"member-{i}" if layers else None for i, layers in enumerate(members)]
    written = []
    for i, (name, layers) in enumerate(zip(names, members, strict=True)):
        if name is not None:
            path = write_adapter(base, folder / "ensemble" / name, seed=i, target_modules=layers)
            config = json.loads((path / "adapter_config.json").read_text())
            config["base_model_name_or_path"] = "base"
            (path / "adapter_config.json").write_text(json.dumps(config))
            written.append(path)
    write_manifest(folder / "ensemble", Manifest("base", tuple(names), adapted_layers(written)))


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
    write(tmp_path, KINDS[kind])

    def load(**ranks: Any) -> Ensemble:
        return Ensemble.from_pretrained(tmp_path / "base", tmp_path / "ensemble", **ranks)

    def work(ranks: Ranks) -> Any:
        ensemble = load(ranks=ranks)
        # Give each process its own logits, as if matrix products of other sizes rounded otherwise.
        head = ensemble.output_layer.base
        head.register_forward_hook(lambda *call: call[-1].mul_(1 + 2e-6 * ranks.rank))
        return str(ensemble.trunk), answers(ensemble)

    alone = load()
    expected = answers(alone)
    assert str(alone.trunk) == (
        "the first 1 of 2 blocks"
        if "head" not in kind
        else "all blocks: members adapt the output layer alone"
    )
    found = in_ranks(2, work, tmp_path)
    everyone = "head" in kind  # members of the output layer alone are computed everywhere
    for rank, own in ((0, slice(0, 2)), (1, slice(2, 4))):
        own = slice(0, 4) if everyone else own
        trunk, rows = found[rank]
        assert trunk == str(alone.trunk)
        for (private, public), (leading_private, leading), (all_private, q) in zip(
            rows, found[0][1], expected, strict=True
        ):
            assert len(private) == len(leading_private) == (4 if everyone else 2)
            torch.testing.assert_close(private, all_private[own], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(public, q, rtol=1e-5, atol=1e-6)
            assert torch.equal(public, leading)  # one public row for all, in every bit
            for i, layers in enumerate(KINDS[kind][own]):
                assert torch.equal(private[i], public) == (layers is None)
