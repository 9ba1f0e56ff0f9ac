"""A mechanism over the first members of an ensemble: many sizes from one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from adapmixed.mechanisms import Mechanism, Proposal
from adapmixed.mechanisms.checks import check_count
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource


@dataclass(frozen=True)
class FirstMembers(Mechanism):
    """`mechanism` over the first `count` models, the others not being there.

    Shards keep their size, so a smaller ensemble has seen less text. (The paper distributes all
    text over fewer and larger shards.)

    Attributes:
        mechanism: what answers.
        count: how many models it has, >= 1 and at most the ensemble's.
    """

    name: ClassVar[str] = "first-members"

    mechanism: Mechanism
    count: int

    def __post_init__(self) -> None:
        check_count("count", self.count)

    @property
    def budget(self) -> int | None:
        """That of the mechanism."""
        return self.mechanism.budget

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; one process has all models.

        Raises:
            ValueError: besides, an ensemble that is spread over ranks.
        """
        if not ranks.alone:
            raise ValueError(f"ranks must be one process, got {ranks.world} ranks")
        if len(private_logits) < self.count:
            raise ValueError(
                f"count must be at most the ensemble's {len(private_logits)} models, got "
                f"{self.count}"
            )
        private = private_logits[: self.count]
        return self.mechanism.propose(private, public_logits, targets=targets, rng=rng)


def sizes(
    num_models: int, wanted: tuple[int, ...] = (8, 16, 32, 64, 80, 100, 128)
) -> tuple[int, ...]:
    """The sizes that are wanted and there, and the whole ensemble."""
    return (*(count for count in wanted if count < num_models), num_models)
