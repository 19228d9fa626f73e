"""``meshwright explain``: what a step sends and holds on a mesh, without the mesh."""

from __future__ import annotations

from .command import explain

__all__ = ["explain"]
