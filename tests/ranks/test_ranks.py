"""An ensemble spread over processes answers and charges as one process does, in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_ensemble import SpreadEnsemble
from rank_cases import MECHANISMS, MODELS, POSITIONS, in_ranks, logits
from torch import Tensor

from adapmixed.evaluation import evaluate
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import shaped
from adapmixed.privacy import Accountant
from adapmixed.ranks import ALONE, Ranks
from adapmixed.rng import SeededRandom

SHAPES: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.7, "top_k": 11})


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def served(ranks: Ranks) -> dict[str, Any]:
    """Return what generation and evaluation release and charge."""
    found: dict[str, Any] = {}
    ensemble: Any = SpreadEnsemble(ranks, vocab=61)
    prompt = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for name, (mechanism, epsilon) in MECHANISMS.items():
        accountant = Accountant(1e-5, epsilon=epsilon) if ranks.is_main else None
        generator = PrivateGenerator(ensemble, mechanism, accountant, rng=SeededRandom(1, name))
        tokens = [
            step
            for shape in SHAPES
            for step in generator.stream_tokens(prompt, max_new_tokens=3, **shape)
        ]
        found[name] = torch.stack(tokens)  # the same in all processes
        if accountant is not None:
            spent = [] if epsilon is None else accountant.spent.tolist()
            found[f"{name}, charged"] = [str(accountant.guarantee()), accountant.charges, spent]
    text = torch.randint(61, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    for one in evaluate(
        ensemble, text, {name: mechanism for name, (mechanism, _) in MECHANISMS.items()},
        delta=1e-5, rng=SeededRandom(3), block=16,
        epsilon={name: epsilon for name, (_, epsilon) in MECHANISMS.items() if epsilon},
    ):  # fmt: skip
        found[f"{one.name}, evaluated"] = [one.perplexity, str(one.guarantee)]
    return found


def test_generation_and_evaluation_charge_as_one_process(tmp_path: Path) -> None:
    expected = served(ALONE)
    main, *others = in_ranks(3, served, tmp_path)
    for found in (main, *others):
        if isinstance(found, Exception):
            raise found
        for name in MECHANISMS:
            assert torch.equal(found[name], expected[name]), name
    assert main.keys() == expected.keys()
    for name in expected:
        assert same(main[name], expected[name]), name


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
            sent["gather"] = sum(one.tensor.nbytes for one in operations)
            return exchange(operations)

        def told(tensor: Tensor, src: int) -> Any:
            sent["tell"] = tensor.nbytes
            return broadcast(tensor, src=src)

        dist.batch_isend_irecv, dist.broadcast = exchanged, told  # in this forked process alone
        private, public = logits()
        found = []
        for repeated in (False, True):
            spread = ranks.over(MODELS, repeated=repeated)
            own = spread.own(MODELS)
            sent.clear()
            rows = shaped(private[own], public, top_k=7)
            gathered = spread.gather(rows.private)
            whole = shaped(private, public, top_k=7).private
            assert (gathered is None) != spread.is_main
            assert gathered is None or torch.equal(gathered, whole)
            spread.tell(lambda: torch.zeros(POSITIONS), (POSITIONS,), torch.float32, public.device)
            found.append(dict(sent))
        return found

    for world, received, *sent in ((2, 2, 2), (3, 3, 2, 1)):
        for members, found in zip((received, *sent), in_ranks(world, work, tmp_path), strict=True):
            if isinstance(found, Exception):
                raise found
            told = {"tell": 4 * POSITIONS}
            assert found == [{"gather": 4 * members * POSITIONS * 7, **told}, told]
