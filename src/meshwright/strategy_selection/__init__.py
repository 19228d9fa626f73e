"""Choosing a strategy: one search and one price, for eager ops and for completion."""

from .search import Search, choose, choose_for, sure_types
from .types import Choice, Types, Wanted, carries_grad

__all__ = ["Choice", "Search", "Types", "Wanted", "carries_grad", "choose", "choose_for", "sure_types"]
