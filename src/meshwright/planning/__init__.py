"""Layouts that nobody writes: found in the captured step of one device."""

from .table import layouts

__all__ = ["layouts"]
