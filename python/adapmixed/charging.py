"""Who is charged for an answer before it is released, and what is left to be charged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapmixed.mechanisms import Mechanism, Proposal
from adapmixed.privacy import Accountant, Caveat, Ledger, PerModelFilter
from adapmixed.ranks import Ranks
from adapmixed_ext import RandomSource

if TYPE_CHECKING:
    from adapmixed.models import Ensemble


@dataclass(frozen=True)
class Charge:
    """Who is charged for a proposal before it is released, and which slots may contribute.

    Where an ensemble is spread over ranks, the rank that leads is charged and decides for all.
    `unverified` is that of the ensemble; every guarantee from these charges says it.
    """

    accountant: Accountant
    ledger: Ledger | None = None
    model_filter: PerModelFilter | None = None
    unverified: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.model_filter is not None:
            if self.ledger is not None:
                self.ledger.attach(self.model_filter)
            self.accountant.attach(self.model_filter)

    def __call__(self, proposal: Proposal) -> Tensor | None:
        """Charges; the slots to release, (N, B) bool, or None without a filter.

        Raises:
            ValueError: a filter, and a mechanism whose charges are not those of single models.
            LedgerError: the charge could not be made durable; nothing may be released.
        """
        active = None
        if self.model_filter is not None:
            charges = proposal.individual_charges
            if charges is None:
                raise ValueError(
                    "model_filter needs one charge of each model, bounded by its own shard, the "
                    "history and public values alone: ClippedMixing with charge_order, or "
                    "ClippedLogPool. PMixED's charge is that of the whole ensemble; AdaPMixED's "
                    "losses depend on the other models, and its screening tells a bit about all of "
                    "them, retired ones included"
                )
            admit, amounts = self.model_filter.admit, charges.cpu().numpy()
            active = proposal.ranks.decide(
                lambda: torch.from_numpy(admit(amounts)),
                amounts.shape,
                torch.bool,
                proposal.public.device,
            ).to(proposal.public.device)
        events = [*proposal.events(active), *map(Caveat, self.unverified)]
        if not proposal.ranks.leads:
            self.accountant.follow()
            return active  # one rank keeps the accounts, and draws only after it has charged
        self.accountant.add(events)
        if self.ledger is not None:
            self.ledger.charge(events)
        return active


def ledger_configuration(ensemble: Ensemble, mechanism: Mechanism) -> str:
    """What a ledger of these answers is opened with: another mechanism, other members or members in
    another order are then refused, since what slot i has spent is that of shard i.

    Raises:
        ValueError: the ensemble was not loaded from files, which would tell its members.
    """
    if ensemble.fingerprint is None:
        raise ValueError(
            "ensemble must be loaded from files (Ensemble.load): without a fingerprint a ledger "
            "cannot tell its members"
        )
    return f"{mechanism!r} of {ensemble.num_models} models, {ensemble.fingerprint}"


def check_unseeded(rng: RandomSource) -> None:
    """Refuses a source that is seeded, or does not say: a ledger states what can be relied on."""
    if getattr(rng, "seeded", True):
        raise ValueError(
            "rng must be SecureRandom() where a ledger is charged, got "
            f"{type(rng).__name__}: whoever knows a seed can undo the randomness"
        )


class BudgetSpentError(ValueError):
    """What is left of a budget is less than the queries that are asked for; nothing was charged."""


def check_budget(mechanism: Mechanism, queries: int, answered: int = 0) -> None:
    """Refuses more queries than the mechanism is planned for, before any is answered.

    Args:
        queries: the most that may be answered: an answer that ends early takes fewer.
        answered: what was answered of the plan before (`answered_before`).

    Raises:
        BudgetSpentError: with what was spent, the budget and what is asked.
    """
    if mechanism.budget is not None and answered + queries > mechanism.budget:
        raise BudgetSpentError(
            f"queries must stay within the budget of {mechanism.budget} that {mechanism.name} was "
            f"planned for, {answered} of which are spent, got up to {queries} more (an answer that "
            "ends early takes fewer, but that is not known beforehand)"
        )


def answered_before(ranks: Ranks, accountant: Accountant, ledger: Ledger | None) -> int:
    """How many queries of a plan were charged: what the rank that leads has, on every rank."""

    def most() -> Tensor:
        totals = [accountant] if ledger is None else [accountant, ledger.accountant]
        return torch.tensor([max(total.planned_queries for total in totals)])

    return int(ranks.decide(most, (1,), torch.int64, torch.device("cpu")))
