"""``mw.verify``: a training step on simulated ranks, value by value against one device."""

from .entry import verify
from .journal import Departure
from .report import Coverage, Verification

__all__ = ["Coverage", "Departure", "Verification", "verify"]
