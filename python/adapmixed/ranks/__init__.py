"""Several processes that share one ensemble, and their communication."""

from adapmixed.ranks.group import Group, joined
from adapmixed.ranks.ranks import ALONE, Rank, Ranks

__all__ = ["ALONE", "Group", "Rank", "Ranks", "joined"]
