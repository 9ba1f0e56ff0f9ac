"""An ensemble spread over processes answers and charges as one process does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ensemble import SpreadEnsemble
from rank_cases import MECHANISMS, MODELS, POSITIONS, in_ranks, logits, write_ensemble
from tiny_models import tiny_model
from torch import Tensor

from adapmixed.ensemble import Ensemble, members
from adapmixed.ensemble.members import read_adapters
from adapmixed.evaluation import evaluate
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import shaped
from adapmixed.privacy import Accountant
from adapmixed.ranks import SINGLE, Ranks
from adapmixed.rng import SeededRandom

SHAPES: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 11})


def served(ranks: Ranks, active: int | None = None) -> dict[str, Any]:
    """Return what generation and evaluation release and charge."""
    results: dict[str, Any] = {}
    ensemble: Any = SpreadEnsemble(ranks, vocab=61)
    prompt = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for name, (mechanism, epsilon) in MECHANISMS.items():
        accountant = Accountant(1e-5, epsilon=epsilon) if ranks.is_main else None
        generator = PrivateGenerator(
            ensemble, mechanism, accountant, rng=SeededRandom(1, name), active=active
        )
        tokens = [
            step
            for shape in SHAPES
            for step in generator.stream_tokens(prompt, max_new_tokens=3, **shape)
        ]
        results[name] = torch.stack(tokens).tolist()  # the same in all processes
        if accountant is not None:
            spent = [] if epsilon is None else accountant.spent.tolist()
            results[f"{name}, charged"] = [str(accountant.guarantee()), accountant.charges, spent]
    text = torch.randint(61, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    for result in evaluate(
        ensemble, text, {name: mechanism for name, (mechanism, _) in MECHANISMS.items()},
        delta=1e-5, rng=SeededRandom(3), block=16, active=active,
        epsilon={name: epsilon for name, (_, epsilon) in MECHANISMS.items() if epsilon},
    ):  # fmt: skip
        results[f"{result.name}, evaluated"] = [result.perplexity, str(result.guarantee)]
    return results


@pytest.mark.parametrize("active", [None, 40])
def test_generation_and_evaluation_charge_as_one_process(
    active: int | None, tmp_path: Path
) -> None:
    expected = served(SINGLE, active)
    main, *others = in_ranks(3, partial(served, active=active), tmp_path)
    assert main == expected
    shared = {name: expected[name] for name in MECHANISMS}
    assert all({name: other[name] for name in shared} == shared for other in others)


def test_processes_that_compare_other_facts_raise(tmp_path: Path) -> None:
    def more_facts(ranks: Ranks) -> None:
        ranks.agree({"a": "same"} if ranks.is_main else {"a": "same", "b": "more"})

    for error in in_ranks(2, more_facts, tmp_path):
        assert "ranks must agree on b, but rank 1 differs from rank 0" in str(error)


def test_what_is_sent(tmp_path: Path) -> None:
    """Each process sends its members' rows, unless all processes hold all members."""

    def work(ranks: Ranks) -> Any:
        sent: dict[str, int] = {}
        exchange, broadcast = dist.batch_isend_irecv, dist.broadcast

        def exchanged(operations: list[dist.P2POp]) -> Any:
            sent["gather"] = sum(operation.tensor.nbytes for operation in operations)
            return exchange(operations)

        def shared(tensor: Tensor, src: int) -> Any:
            sent["tell"] = tensor.nbytes
            return broadcast(tensor, src=src)

        dist.batch_isend_irecv, dist.broadcast = exchanged, shared  # in this forked process alone
        private, public = logits()
        counts = []
        for repeated in (False, True):
            spread = ranks.over(MODELS, repeated=repeated)
            share = spread.part(MODELS)
            sent.clear()
            rows = shaped(private[share], public, top_k=7)
            gathered = spread.gather(rows.private)
            whole = shaped(private, public, top_k=7).private
            assert (gathered is None) != spread.is_main
            assert gathered is None or torch.equal(gathered, whole)
            spread.tell(lambda: torch.zeros(POSITIONS), (POSITIONS,), torch.float32, public.device)
            counts.append(dict(sent))
        return counts

    for world, received, *sent in ((2, 2, 2), (3, 3, 2, 1)):
        for count, outcome in zip((received, *sent), in_ranks(world, work, tmp_path), strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            tell = {"tell": 4 * POSITIONS}
            assert outcome == [{"gather": 4 * count * POSITIONS * 7, **tell}, tell]


# Members are read by the ranks that have them.


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
    rows = [ensemble.logits(IDS)]
    smallest = 2 * ensemble.sequence_bytes(IDS.shape[1])
    chunks = [part[1:3] for part in ensemble.iter_logits(IDS, memory_bytes=smallest)]
    rows.append((torch.cat([p for p, _ in chunks], 2), torch.cat([q for _, q in chunks], 1)))
    decoder = ensemble.decoder(IDS)
    decoder.append(torch.tensor([3, 4]))
    return [*rows, decoder.logits[:2]]


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

    whole = load()
    expected = answers(whole)
    shared = {"all": "no block", "last": "the first 1 of 2", "mixed": "the first 1 of 2"}
    assert str(whole.trunk).startswith(shared.get(kind, "all blocks"))
    results = in_ranks(2, work, tmp_path)
    everyone = "head" in kind  # members of the output layer alone are computed everywhere
    for rank, share in ((0, slice(0, 2)), (1, slice(2, 4))):
        share = slice(0, 4) if everyone else share
        trunk, read, rows = results[rank]
        assert trunk == str(whole.trunk)
        present = [f"member-{i}" for i, modules in enumerate(KINDS[kind]) if modules is not None]
        assert read == [name for name in present if int(name[-1]) in range(share.start, share.stop)]
        for (private, public), (leading_private, leading), (all_private, q) in zip(
            rows, results[0][2], expected, strict=True
        ):
            assert len(private) == len(leading_private) == (4 if everyone else 2)
            torch.testing.assert_close(private, all_private[share], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(public, q, rtol=1e-5, atol=1e-6)
            assert torch.equal(public, leading)  # one public row for all, in every bit
            for i, layers in enumerate(KINDS[kind][share]):
                assert torch.equal(private[i], public) == (layers is None)
