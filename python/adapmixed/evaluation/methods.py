"""Run one mechanism of an evaluation: answer, charge and count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.result import Evaluation
from adapmixed.evaluation.tally import Tally
from adapmixed.mechanisms import Mechanism, Origin, shaped
from adapmixed.privacy import Accountant
from adapmixed.ranks import ALONE, Ranks
from adapmixed.rng import SecureRandom, SeededRandom


@dataclass(frozen=True)
class Settings:
    """The settings of accountants and diagnostics; arguments of :func:`evaluate`."""

    mechanisms: Mapping[str, Mechanism]
    delta: float
    epsilons: Mapping[str, float | None]
    adjacencies: Mapping[str, str | None]
    origin: Origin
    num_models: int
    diagnostics: bool
    ranks: Ranks = ALONE

    def accountant(self, name: str) -> Accountant:
        """Return a new accountant that is bound to the mechanism."""
        accountant = Accountant(
            self.delta,
            epsilon=self.epsilons.get(name),
            adjacency=self.adjacencies.get(name) or "zero_out",
        )
        origin = self.origin
        bound = self.num_models, origin.ensemble, origin.active_tokens, origin.unit
        accountant.bind(self.mechanisms[name], *bound)
        return accountant


class Method:
    """One mechanism in one run."""

    def __init__(self, name: str, settings: Settings, rng: SecureRandom | SeededRandom) -> None:
        self.mechanism = settings.mechanisms[name]
        self.rng = rng
        self.origin, self.ranks = settings.origin, settings.ranks
        self.tally = Tally(name, settings.accountant(name))
        self.diagnostics = Diagnostics() if settings.diagnostics else None

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
        proposal = self.mechanism.propose_rows(
            replace(rows, private=whole), targets=targets, rng=self.rng, origin=self.origin
        )
        self.tally.accountant.charge(proposal)
        answer = proposal.release()
        assert answer.log_prob is not None  # targets were given
        self.tally.add(answer.log_prob.tolist(), int(answer.public.sum()))
        self.tally.seconds += time.perf_counter() - start
        self.tally.mark()
        if self.diagnostics is not None:
            self.diagnostics.add(proposal, answer, targets)

    def result(self, forward_seconds: float) -> Evaluation:
        """Return the results so far, after at least one query.

        Args:
            forward_seconds: time of the models' forward passes, shared by all mechanisms.
        """
        kept = self.diagnostics
        return self.tally.result(forward_seconds, None if kept is None else kept.diagnosis())

    def state(self) -> dict[str, Any]:
        """Return the private state to continue from, as strict JSON values."""
        rng, diagnostics = self.rng, self.diagnostics
        return {
            "tally": self.tally.state(),
            "counter": rng.position if isinstance(rng, SeededRandom) else None,
            **({} if diagnostics is None else {"diagnostics": diagnostics.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state()` of a method with the same configuration.

        Raises:
            ValueError: if it is no such state.
        """
        tally, counter = Tally.from_state(state["tally"]), state["counter"]
        mine, found = self.tally, tally
        seeded = isinstance(self.rng, SeededRandom)
        if (
            mine.name != found.name
            or not mine.accountant.goes_on_from(found.accountant)
            or ("diagnostics" in state) != (self.diagnostics is not None)
            or (counter is None) == seeded
        ):
            raise ValueError(f"the state of {found.name!r} must be that of {mine.name!r} as set up")
        if isinstance(self.rng, SeededRandom):
            self.rng.skip_to(counter)
        if self.diagnostics is not None:
            self.diagnostics = Diagnostics.from_state(state["diagnostics"])
        self.tally = tally
