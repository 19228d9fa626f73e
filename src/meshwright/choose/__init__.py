"""Choosing a strategy: one search and one price, for eager ops and for completion."""

from .choice import Choice, Wanted, carries_grad
from .search import Search, choose, choose_for

__all__ = ["Choice", "Search", "Wanted", "carries_grad", "choose", "choose_for"]
