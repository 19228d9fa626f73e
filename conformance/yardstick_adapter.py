"""Meshwright behind the adapter interface of the shared op coverage harness, ``cov.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .opdb.contenders import Meshwright, Place


def _place(said: str | tuple[str, int | str]) -> Place:
    """``"R"``, ``("S", dim)`` or ``("P", "sum")``."""
    if isinstance(said, str):
        return said
    return int(said[1]) if said[0] == "S" else "P"


class Adapter(Meshwright):
    """What the harness asks of a library."""

    def make_mesh(self, shape: Sequence[int]) -> Any:
        """Called once per shape, after the process group was made."""
        return self.mesh(shape)

    def distribute(self, tensor: torch.Tensor, mesh: Any, places: Sequence[Any], requires_grad: bool) -> Any:
        """A leaf from the full tensor, the same on all ranks."""
        return super().distribute(tensor, mesh, [_place(p) for p in places], requires_grad)

    def is_dist(self, obj: Any) -> bool:
        """Whether ``obj`` is ours."""
        return self.owns(obj)

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Run the op."""
        return fn(*args, **kwargs)

    def grad(self, outs: Any, leaves: Any, cots: Any) -> Any:
        """Gradients of the leaves, each in its own layout, or None."""
        return torch.autograd.grad(outs, leaves, cots, allow_unused=True)

    def classify(self, exc: BaseException) -> str:
        """``not_impl`` or ``error``."""
        return "not_impl" if self.missing(exc) else "error"
