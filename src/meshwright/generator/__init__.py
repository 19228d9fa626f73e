"""Random numbers that do not depend on the layout: what the rules draw with, usable without them."""

from .dropout import reproducible_random
from .stream import fill, materialize

__all__ = ["fill", "materialize", "reproducible_random"]
