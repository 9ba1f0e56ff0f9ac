"""Processes that work together as ranks: which one this is, and what they tell each other."""

from adapmixed.ranks.alone import ALONE, OneRank, Ranks
from adapmixed.ranks.group import TIMEOUT_SECONDS, Group, RankError, joined
from adapmixed.ranks.place import Place

__all__ = ["ALONE", "TIMEOUT_SECONDS", "Group", "OneRank", "Place", "RankError", "Ranks", "joined"]
