"""A mechanism at work: who answers, who is charged, with which randomness."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from adapmixed.charging import Charge
from adapmixed.evaluation.diagnostics import Diagnostics
from adapmixed.evaluation.result import Evaluation
from adapmixed.evaluation.tally import Tally
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant, PerModelFilter
from adapmixed.ranks import ALONE, Ranks
from adapmixed.rng import SecureRandom, SeededRandom


@dataclass(frozen=True)
class Settings:
    """How every mechanism of an evaluation is charged; arguments of :func:`evaluate`."""

    mechanisms: Mapping[str, Mechanism]
    delta: float
    rules: Mapping[str, str]
    adjacencies: Mapping[str, str | None]
    unverified: tuple[str, ...]
    diagnostics: bool
    ranks: Ranks = ALONE

    def accountant(self, name: str, model_filter: PerModelFilter | None) -> Accountant:
        """A new accountant for a mechanism, and its filter if it has one."""
        return Accountant(
            self.delta,
            rule=self.rules.get(name, "per_model"),
            adjacency=self.adjacencies.get(name),
            filter_budget=None if model_filter is None else model_filter.budget,
        )


class Method:
    """One mechanism in one run."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        model_filter: PerModelFilter | None,
        rng: SecureRandom | SeededRandom,
    ) -> None:
        self.mechanism = settings.mechanisms[name]
        self.model_filter = model_filter
        self.rng = rng
        self.unverified, self.ranks = settings.unverified, settings.ranks
        self.tally = Tally(name, settings.accountant(name, model_filter))
        self.diagnostics = Diagnostics() if settings.diagnostics else None
        self.charge = self._charge()

    def _charge(self) -> Charge:
        return Charge(self.tally.accountant, None, self.model_filter, self.unverified)

    def answer(self, private: torch.Tensor, public: torch.Tensor, targets: torch.Tensor) -> None:
        """Answers B queries; logits (N, B, V) and (B, V), targets (B,). One rank counts."""
        start = time.perf_counter()
        proposal = self.mechanism.propose(
            private, public, targets=targets, rng=self.rng, ranks=self.ranks
        )
        active = self.charge(proposal)
        answer = proposal.release(active)
        if not self.ranks.leads:
            return
        assert answer.log_prob is not None  # targets were given
        self.tally.add(answer.log_prob.tolist(), int(answer.public.sum()))
        self.tally.seconds += time.perf_counter() - start
        self.tally.mark()
        if self.diagnostics is not None:
            self.diagnostics.add(proposal, answer, active, targets)

    def result(self, forward_seconds: float) -> Evaluation:
        """What is known so far, at least one query being answered."""
        kept = self.diagnostics
        return self.tally.result(forward_seconds, None if kept is None else kept.diagnosis())

    def state(self) -> dict[str, Any]:
        """Everything that is needed to go on, as strict JSON values; private."""
        rng, kept, diagnostics = self.rng, self.model_filter, self.diagnostics
        return {
            "tally": self.tally.state(),
            "filter": None if kept is None else kept.state(),
            "counter": rng.position if isinstance(rng, SeededRandom) else None,
            **({} if diagnostics is None else {"diagnostics": diagnostics.state()}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state()` of a method of the same configuration."""
        tally = Tally.from_state(state["tally"])
        kept, counter = state["filter"], state["counter"]
        mine, found = self.tally, tally
        seeded = isinstance(self.rng, SeededRandom)
        if (
            mine.name != found.name
            or any(
                getattr(mine.accountant, setting) != getattr(found.accountant, setting)
                for setting in ("delta", "rule", "order_weights", "adjacency", "filter_budget")
            )
            or (kept is None) != (self.model_filter is None)
            or ("diagnostics" in state) != (self.diagnostics is not None)
            or (counter is None) == seeded
        ):
            raise ValueError(f"the state of {found.name!r} must be that of {mine.name!r} as set up")
        if self.model_filter is not None:
            self.model_filter.restore(kept)
        if isinstance(self.rng, SeededRandom):
            self.rng.skip_to(counter)
        if self.diagnostics is not None:
            self.diagnostics = Diagnostics.from_state(state["diagnostics"])
        self.tally = tally
        self.charge = self._charge()
