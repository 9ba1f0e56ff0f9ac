"""Several processes that share one ensemble, and their communication."""

from adapmixed.ranks.alone import ALONE, Ranks
from adapmixed.ranks.group import TIMEOUT_SECONDS, Group, joined
from adapmixed.ranks.place import Place

__all__ = ["ALONE", "TIMEOUT_SECONDS", "Group", "Place", "Ranks", "joined"]
