"""``mw.verify``: a training step on simulated ranks, value by value against one device."""

from .entry import verify
from .journal import Departure
from .report import Coverage, Verification, digest_of

__all__ = ["Coverage", "Departure", "Verification", "digest_of", "verify"]
