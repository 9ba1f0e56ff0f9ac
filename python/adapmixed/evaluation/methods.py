"""Run one mechanism of an evaluation: answer, charge and count."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.tally import Tally
from adapmixed.evaluation.windows import Window
from adapmixed.mechanisms import Mechanism, Origin, shaped
from adapmixed.privacy import Accountant
from adapmixed.rng import SecureRandom, SeededRandom

if TYPE_CHECKING:
    from adapmixed.ensemble import Ensemble


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation; arguments of :func:`evaluate`, and the windows of each run."""

    ensemble: Ensemble
    tokens: Sequence[int]
    windows: Sequence[Sequence[Window]]
    mechanisms: Mapping[str, Mechanism]
    delta: float
    epsilons: Mapping[str, float | None]
    adjacencies: Mapping[str, str | None]
    rng: SecureRandom | SeededRandom
    memory_bytes: int
    active: int | None
    diagnostics: bool

    @cached_property
    def origin(self) -> Origin:
        """The members that answer, and about which tokens they speak."""
        return Origin.of(self.ensemble, self.active)

    def methods(self, run: int) -> list[MethodRun]:
        """Return the mechanisms of a run, before its first answer."""
        source = self.rng if run == 0 else self.rng.child(f"run {run}")
        return [MethodRun(name, self, source) for name in self.mechanisms]


class MethodRun:
    """One mechanism in one run.

    Args:
        name: the name of the mechanism.
        settings: the settings of the evaluation.
        rng: the source of the run.
    """

    def __init__(
        self, name: str, settings: EvaluationSettings, rng: SecureRandom | SeededRandom
    ) -> None:
        self.mechanism = settings.mechanisms[name]
        self.rng = rng.child(self.mechanism.name)
        self.origin, self.ranks = settings.origin, settings.ensemble.ranks
        accountant = Accountant(
            settings.delta,
            epsilon=settings.epsilons.get(name),
            adjacency=settings.adjacencies.get(name) or "zero_out",
        )
        of = self.origin.ensemble, self.origin.active_tokens, self.origin.unit
        accountant.bind(self.mechanism, settings.ensemble.num_models, *of)
        self.tally = Tally(name, accountant, Diagnostics() if settings.diagnostics else None)

    def answer(
        self,
        private: torch.Tensor,
        public: torch.Tensor,
        tokens: torch.Tensor | None,
        targets: torch.Tensor,
    ) -> None:
        """Answer B queries; the main process charges and counts them.

        Args:
            private: (n, B, K) logits of this process's members.
            public: (B, V) logits.
            tokens: (B, K) int64, the tokens of the private columns; None for all.
            targets: (B,) int64 token ids to score.
        """
        start = time.perf_counter()
        rows = shaped(private, public, active=self.origin.active_tokens, tokens=tokens, spare=True)
        whole = self.ranks.gather(rows.private)
        if whole is None:
            return
        ticket = self.mechanism.propose_rows(
            replace(rows, private=whole), targets=targets, rng=self.rng, origin=self.origin
        )
        self.tally.accountant.charge(ticket)
        answer = ticket.release()
        self.tally.seconds += time.perf_counter() - start
        self.tally.add(ticket, answer, targets)

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        counter = self.rng.position if isinstance(self.rng, SeededRandom) else None
        return {"tally": self.tally.state(), "counter": counter}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state()` of a method with the same settings."""
        self.tally = Tally.from_state(state["tally"])
        if isinstance(self.rng, SeededRandom):
            self.rng.skip_to(state["counter"])
