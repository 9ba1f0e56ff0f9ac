"""A rank that ends, hangs or raises ends the run; the ledger covers all that was released."""

from __future__ import annotations

import os
import signal
import socket
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ensemble import SpreadEnsemble
from rank_cases import TIMEOUT, environment, free_port, in_ranks, result, started, status_of
from torch import Tensor

from adapmixed.errors import BudgetSpentError, ProcessError
from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, Mechanism
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger import Ledger
from adapmixed.ranks import SINGLE, Rank, Ranks, joined
from adapmixed.rng import SeededRandom

STEPS, SEQUENCES = 4, 2
PROMPT = torch.tensor([[1, 2], [3, 4]])
POOL = ClippedLogPool(lower=-0.5, upper=0.5)
ADAPTIVE = AdaPMixED(3.0, 0.2, screen_weight=0.5, sigma=0.1, threshold=4.0, screen_top_k=3)


def serve(ranks: Ranks, folder: Path, mechanism: Mechanism, seen: str = "seen") -> None:
    """Generate; every rank writes down each token as soon as it is told."""
    ensemble = SpreadEnsemble(ranks)
    accountant = Accountant(1e-5, path=folder / "ledger.db") if ranks.is_main else None
    generator = PrivateGenerator(ensemble, mechanism, accountant)  # type: ignore[arg-type]
    with open(folder / f"{seen}-{ranks.rank}", "ab", buffering=0) as released:
        for tokens in generator.stream_tokens(PROMPT, max_new_tokens=STEPS):
            released.write(bytes(tokens.tolist()))
    if accountant is not None:
        accountant.close()


def charged(folder: Path) -> int:
    """Return the number of queries in the ledger of an ended run."""
    return read_ledger(folder / "ledger.db").guarantee.queries


def released(folder: Path) -> int:
    """Return the number of tokens that some rank knows."""
    return max((len(path.read_bytes()) for path in folder.glob("seen-*")), default=0)


def dies_before(number: int, victim: int, how: int) -> Any:
    """Return a hook that kills or stops a rank before its number-th collective."""

    def arm(ranks: Ranks) -> None:
        inner, count = Ranks._run, [number]

        def wrapped(self: Ranks, *arguments: Any) -> None:
            count[0] -= 1
            if count[0] == 0:
                os.kill(os.getpid(), how)
            inner(self, *arguments)

        if ranks.rank == victim:
            Ranks._run = wrapped  # type: ignore[method-assign]  # in this child alone

    return arm


# Collective 1 belongs to the construction, 2 to the agreement, 3 to the check; then three to every
# step: the rows, the tokens, and which sequences go on.
ENDS = [(number, victim, signal.SIGKILL) for number in (2, 4, 5, 6, 7) for victim in (0, 1)]


@pytest.mark.parametrize(
    ("number", "victim", "how"),
    [*ENDS, pytest.param(8, 1, signal.SIGSTOP, marks=pytest.mark.slow)],
)
def test_a_rank_that_ends_or_hangs_ends_the_run(
    number: int, victim: int, how: int, tmp_path: Path
) -> None:
    arm, killed = dies_before(number, victim, how), how == signal.SIGKILL

    def work(ranks: Ranks) -> None:
        arm(ranks)
        serve(ranks, tmp_path, POOL)

    children = started(2, work, tmp_path, timeout=TIMEOUT if killed else 4.0)
    try:
        assert status_of(children[1 - victim]) == 0
    finally:
        os.kill(children[victim], signal.SIGKILL)
        assert status_of(children[victim]) == -signal.SIGKILL
    error = result(tmp_path, 1 - victim)
    assert isinstance(error, ProcessError)
    assert f" while rank {1 - victim} of 2 waited for it" in str(error)
    answered, paid = released(tmp_path), charged(tmp_path)
    assert answered <= paid <= answered + SEQUENCES
    assert (number <= 5) == (answered == 0)  # the others are in the middle


def test_no_rank_knows_a_token_before_it_is_charged(tmp_path: Path) -> None:
    """The main process ends during a charge that never reaches the disk."""

    def work(ranks: Ranks) -> None:
        inner, count = Ledger.append, [0]

        def append(self: Ledger, *arguments: Any) -> None:
            count[0] += 1
            if count[0] == 3:  # the binding, a charge
                time.sleep(0.3)  # the other process writes down what it was told so far
                os.kill(os.getpid(), signal.SIGKILL)
            inner(self, *arguments)

        Ledger.append = append  # type: ignore[method-assign]  # in this child alone
        serve(ranks, tmp_path, POOL)

    children = started(2, work, tmp_path)
    assert [status_of(child) for child in children] == [-signal.SIGKILL, 0]
    assert isinstance(result(tmp_path, 1), ProcessError)
    assert released(tmp_path) == SEQUENCES == charged(tmp_path)


def test_a_rank_that_raises_ends_the_run(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        if ranks.is_main:
            inner, step = SpreadEnsemble.logits, [0]

            def broken(self: SpreadEnsemble, ids: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
                private, public = inner(self, ids, **named)
                step[0] += 1
                return private, public * (float("nan") if step[0] == 2 else 1.0)

            SpreadEnsemble.logits = broken  # type: ignore[method-assign]
        serve(ranks, tmp_path, ADAPTIVE)

    children = started(2, work, tmp_path)
    assert [status_of(child) for child in children] == [0, 0]
    first, second = result(tmp_path, 0), result(tmp_path, 1)
    assert isinstance(first, ValueError) and "contains NaN" in str(first)
    assert isinstance(second, ProcessError) and "another rank has ended" in str(second)
    assert released(tmp_path) == SEQUENCES == charged(tmp_path)


def test_the_main_process_that_raised_answers_nothing_more(tmp_path: Path) -> None:
    """The others wait for its answer; they must not take another one for it."""

    def work(ranks: Ranks) -> object:
        if ranks.rank:
            return ranks.same(torch.zeros(1))

        def fails() -> Tensor:
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            ranks.tell(fails, (1,), torch.float32, torch.device("cpu"))
        return ranks.same(torch.ones(1))

    main, other = in_ranks(2, work, tmp_path)
    assert isinstance(main, ProcessError)
    assert "rank 0 raised OSError while the others waited" in str(main)
    assert isinstance(other, ProcessError) and "another rank has ended" in str(other)


def test_the_main_process_says_which_sequences_end(tmp_path: Path) -> None:
    """Otherwise ranks with other stop rules would go on with rows of other texts."""

    def tokens(ranks: Any, ends: int) -> list[list[int]]:
        accountant, calls = Accountant(1e-5) if ranks.is_main else None, count(1)
        generator = PrivateGenerator(
            SpreadEnsemble(ranks),  # type: ignore[arg-type]
            POOL, accountant, rng=SeededRandom(1),
        )  # fmt: skip
        steps = generator.stream_tokens(
            PROMPT,
            max_new_tokens=STEPS,
            stop=lambda: torch.arange(2) == (ends if next(calls) == 2 else -1),
        )
        return [step.tolist() for step in steps]

    expected = tokens(SINGLE, 0)
    assert [step[0] for step in expected[2:]] == [-1, -1]
    assert in_ranks(2, lambda ranks: tokens(ranks, ranks.rank), tmp_path) == [expected] * 2


def test_a_spent_plan_raises_the_same_everywhere(tmp_path: Path) -> None:
    spent = ClippedLogPool(lower=-0.5, upper=0.5, queries=SEQUENCES * STEPS - 1)
    for error in in_ranks(2, lambda ranks: serve(ranks, tmp_path, spent), tmp_path):
        assert isinstance(error, BudgetSpentError)


def test_ranks_that_run_something_else(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        serve(ranks, tmp_path, POOL if ranks.is_main else ADAPTIVE)

    for error in in_ranks(2, work, tmp_path):
        assert isinstance(error, ValueError)
        assert "ranks must agree on the mechanism, but rank 1 differs from rank 0" in str(error)
        assert "AdaPMixED" in str(error) or "ClippedLogPool" in str(error)
    assert charged(tmp_path) == 0 == released(tmp_path)


def test_an_accountant_of_another_process_raises(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        accountant = None if ranks.is_main else Accountant(1e-5)
        PrivateGenerator(SpreadEnsemble(ranks), POOL, accountant)  # type: ignore[arg-type]

    main, other = in_ranks(2, work, tmp_path)
    assert "accountant must be an Accountant" in str(main)
    assert "accountant must be None on all processes but the main one" in str(other)


def joins() -> None:
    with joined() as ranks:
        assert ranks is SINGLE


def test_ranks_that_cannot_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joins()
    for error in in_ranks(2, lambda ranks: joins(), tmp_path):
        assert "processes must join once" in str(error)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in environment(0, 2, taken.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ProcessError, match="did not come together within 300 s: .*address"):
            joins()
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr("adapmixed.ranks.TIMEOUT_SECONDS", 1.0)
    with pytest.raises(ProcessError, match="^the 2 ranks did not come together within 1 s: "):
        joins()  # nobody else comes


def test_ranks_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {(): Rank(0, 1), ("5", "8", "1"): Rank(5, 8, 1), ("0", "2"): Rank(0, 2)}
    for values in (*expected, ("0",), ("2", "2"), ("-1", "2"), ("0", "2", "x")):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        monkeypatch.setattr(os, "environ", dict(zip(names, values, strict=False)))
        if values in expected:
            assert Rank.from_environment() == expected[values]
            continue
        with pytest.raises(ValueError, match="RANK and WORLD_SIZE must be integers"):
            Rank.from_environment()
