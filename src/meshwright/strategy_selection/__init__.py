"""Choosing a strategy: one search and one price, for eager ops and for completion."""

from .choice import Choice, Types, Wanted, carries_grad
from .search import Search, choose, choose_for, sure_types

__all__ = ["Choice", "Search", "Types", "Wanted", "carries_grad", "choose", "choose_for", "sure_types"]
