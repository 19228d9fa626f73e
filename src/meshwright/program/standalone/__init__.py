"""A captured step as a Python file that needs only torch."""

from .statements import sections_of
from .write import to_python

__all__ = ["sections_of", "to_python"]
