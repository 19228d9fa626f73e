"""Marks that a model leaves in its captured program: constraints of layouts, and gradients that are part of the loss.

Below ``api``, which writes constraints where a model is exported, and ``program``, which reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import compat, torch_changes
from ..dispatch import disabled, refresh, relayout, wanted
from ..errors import CaptureError
from ..layout import Layout, Placement, as_placement, placement_from
from ..operators import operator
from ..ranks.runtime import user_line

Tensor = torch.Tensor


def _same(x: Tensor, placements: str) -> Tensor:
    return x.clone()


def _like(x: Tensor, placements: str) -> Tensor:
    return torch.empty_like(x)


CONSTRAIN = operator("constrain(Tensor x, str placements) -> Tensor", _same, _like)


def exporting() -> bool:
    """Whether ``torch.export`` is running the model."""
    return torch.compiler.is_exporting()


def mark(x: Tensor, placements: Any) -> Tensor:
    """Leave a constraint of ``x`` in the program that is being exported."""
    made: Tensor = CONSTRAIN(x, placements_text(placements))
    return made


def placements_text(placements: Any) -> str:
    """Placements as text: ``tp=Shard(1);dp=Replicate()``; without names the axes are counted."""
    if isinstance(placements, Layout):
        placements = dict(zip(placements.mesh.axes, placements.placements, strict=True))
    if not isinstance(placements, Mapping):
        listed = placements if isinstance(placements, (list, tuple)) else [placements]
        placements = dict(enumerate(listed))
    return ";".join(f"{a}={as_placement(p)!r}" for a, p in placements.items())


def brought(x: Tensor, placements: str, wrap: Any, call: Any) -> Tensor:
    """A tensor with a spec as :func:`mark` says: where code of ours leaves a constraint in the middle of an op."""
    refresh(x, call)
    spec = x.__dict__["_spec"]
    target = wanted(spec, read_placements(placements))
    if target is spec:
        return x
    with disabled():
        return relayout(x, target, wrap)


def _empty(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], create: bool
) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


GRAD: Any = operator(
    "grad(Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents, bool create) -> Tensor[]",
    _empty,  # never run: a partition differentiates in its place
    _empty,
)


torch_changes.note("torch.autograd.grad", "torch.autograd.backward", why="calls in a step are marks of its program")


@contextmanager
def gradients_marked() -> Iterator[None]:
    """Inside, ``torch.autograd.grad`` leaves a mark in the program that is being exported, which cannot hold it."""
    original = torch.autograd.grad

    def grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
        **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if compat.peek_interpreter_stack() is not None:
            raise CaptureError(f"{user_line()}: the step differentiates with torch.func: say torch.autograd.grad")
        if options.get("is_grads_batched"):
            raise CaptureError("autograd.grad(is_grads_batched=True) cannot be captured: loop over the rows")
        listed = [[x] if isinstance(x, Tensor) else list(x or ()) for x in (outputs, inputs, grad_outputs)]
        if any(g is None for g in listed[2]):
            raise CaptureError("autograd.grad with None among grad_outputs cannot be captured: give ones")
        return tuple(GRAD(*listed, create_graph))

    torch.autograd.grad = grad  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.grad = original


def read_placements(text: str) -> dict[Any, Placement]:
    """What :func:`placements_text` wrote: axis name (or index) to placement."""
    made: dict[Any, Placement] = {}
    for entry in filter(None, text.split(";")):
        axis, _, placement = entry.partition("=")
        made[int(axis) if axis.isdigit() else axis] = placement_from(placement)
    return made
