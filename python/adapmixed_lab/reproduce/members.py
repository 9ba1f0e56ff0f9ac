"""A mechanism over the first members of an ensemble: many sizes from one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from adapmixed.limits import check_count
from adapmixed.mechanisms import Mechanism, NextToken, Rows
from adapmixed_ext.types import RandomSource
from adapmixed_lab.reproduce.published import PaperRule


@dataclass(frozen=True)
class FirstMembers(Mechanism):
    """AdaPMixED over the first `count` models; `count` is then the N of its costs.

    Shards keep their size, so a smaller ensemble has seen less text. The paper distributes all text
    over fewer and larger shards instead.

    Attributes:
        mechanism: answers the queries, whose number no plan fixes.
        count: number of its models, >= 1 and at most the ensemble's.
    """

    name: ClassVar[str] = "first-members"
    no_budget: ClassVar[str] = "it is for comparisons of realised losses"

    mechanism: PaperRule
    count: int

    def __post_init__(self) -> None:
        check_count("count", self.count)

    @property
    def no_replacement(self) -> str:
        """The reason of the inner mechanism."""
        return self.mechanism.no_replacement

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """Return the bytes that the inner mechanism holds over its own models."""
        return self.mechanism.held_bytes(self.count + 1, vocab_size, element)

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        if len(rows.private) < self.count:
            raise ValueError(
                f"count must be at most the ensemble's {len(rows.private)} models, got {self.count}"
            )
        return self.mechanism._prepare(replace(rows, private=rows.private[: self.count]), rng)


def sizes(num_models: int) -> tuple[int, ...]:
    """Return the sizes to compare: those of the list below `num_models`, then `num_models`."""
    return (*(n for n in (8, 16, 32, 64, 80, 100, 128) if n < num_models), num_models)
