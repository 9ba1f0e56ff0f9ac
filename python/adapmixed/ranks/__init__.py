"""Several processes that share one ensemble, and their communication."""

from adapmixed.ranks.alone import ALONE, Ranks
from adapmixed.ranks.group import Group, joined
from adapmixed.ranks.place import Place

__all__ = ["ALONE", "Group", "Place", "Ranks", "joined"]
