"""Gradients that lie otherwise than their parameter, under shard's name: see ``tensor.gradients``."""

from __future__ import annotations

from ..tensor import held, hold, in_spec

__all__ = ["held", "hold", "in_spec"]
