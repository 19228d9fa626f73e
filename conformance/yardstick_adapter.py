"""Meshwright behind the adapter interface of the op coverage harness (``cov.py``): PyTorch's op_db on 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import meshwright as mw

Place = str | tuple[str, int] | tuple[str, str]

# Parts of a Partial(sum) per rank, as the harness's own adapter has them: exact in floating point, sum 1.
PARTS = (0.5, 0.25, 0.125, 0.125)


def placement(place: Place) -> mw.Shard | mw.Replicate | mw.Partial:
    """``"R"``, ``("S", dim)`` or ``("P", "sum")`` as a placement."""
    if place == "R":
        return mw.Replicate()
    kind, value = place
    return mw.Shard(int(value)) if kind == "S" else mw.Partial(str(value))


class Adapter:
    """What the harness asks of a library."""

    name = "meshwright"

    def make_mesh(self, shape: Sequence[int]) -> mw.Mesh:
        """Called once per shape, after the process group was made."""
        return mw.init_mesh({f"axis{i}": n for i, n in enumerate(shape)})

    def distribute(
        self, tensor: torch.Tensor, mesh: mw.Mesh, places: Sequence[Place], requires_grad: bool
    ) -> mw.DistTensor:
        """A leaf from the full tensor, the same on all ranks."""
        placements = [placement(p) for p in places]
        full = tensor.detach()
        if any(isinstance(p, mw.Partial) for p in placements):
            part = full * PARTS[torch.distributed.get_rank()]
            made = mw.from_local(part, mesh, placements, check=False)
        else:
            made = mw.shard_tensor(full, mesh, placements, check=False)
        return made.requires_grad_(requires_grad)

    def full(self, obj: mw.DistTensor) -> torch.Tensor:
        """The global value as a plain tensor, differentiable."""
        return mw.unshard(obj)

    def is_dist(self, obj: Any) -> bool:
        """Whether ``obj`` is ours."""
        return isinstance(obj, mw.DistTensor)

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Run the op."""
        return fn(*args, **kwargs)

    def grad(self, outs: Any, leaves: Any, cots: Any) -> Any:
        """Gradients of the leaves, each in its own layout, or None."""
        return torch.autograd.grad(outs, leaves, cots, allow_unused=True)

    def classify(self, exc: BaseException) -> str:
        """``not_impl`` or ``error``."""
        return "not_impl" if isinstance(exc, NotImplementedError) else "error"
