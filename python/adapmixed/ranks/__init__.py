"""Several processes that share one ensemble, and their communication."""

from adapmixed.ranks.alone import ALONE, Ranks
from adapmixed.ranks.group import Group, joined
from adapmixed.ranks.rank import Rank

__all__ = ["ALONE", "Group", "Rank", "Ranks", "joined"]
