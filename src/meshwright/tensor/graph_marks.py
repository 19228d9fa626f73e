"""Marks that a model leaves in its captured program: constraints of layouts, and gradients that are part of the loss.

Below ``api``, which writes constraints where a model is exported, and ``program``, which reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .. import compat, torch_changes
from ..dispatch import convert_layout, disabled, refresh, wanted
from ..errors import CaptureError
from ..layout import Layout, Placement, as_placement, dtype_from, dtype_name, placement_from
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
        return convert_layout(x, target, wrap)


def _empty(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], create: bool, dtypes: str
) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype_from(d)) for x, d in zip(inputs, dtypes.split(","), strict=True)]


GRAD: Any = operator(
    "grad(Tensor[] outputs, Tensor[] inputs, Tensor[] cotangents, bool create, str dtypes) -> Tensor[]",
    _empty,  # never run: a partition differentiates in its place
    _empty,
)


torch_changes.note("torch.autograd.grad", "torch.autograd.backward", why="calls in a step are marks of its program")


@contextmanager
def gradients_marked(dtype_of: Callable[[Tensor], torch.dtype]) -> Iterator[None]:
    """Inside, ``torch.autograd.grad`` leaves a mark in the program that is being exported, which cannot hold it.

    Args:
        dtype_of: the dtype of the gradient of a value.
    """
    original = torch.autograd.grad

    def grad(
        outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None, create_graph: bool = False,
        only_inputs: bool = True, allow_unused: bool | None = None, is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> Any:  # fmt: skip
        if compat.peek_interpreter_stack() is not None:
            raise CaptureError(f"{user_line()}: the step differentiates with torch.func: say torch.autograd.grad")
        if is_grads_batched:
            raise CaptureError("autograd.grad(is_grads_batched=True) cannot be captured: loop over the rows")
        names = list(inputs) if isinstance(inputs, dict) else None
        inputs = list(inputs.values()) if isinstance(inputs, dict) else inputs
        ys, xs, cotangents = [[x] if isinstance(x, Tensor) else list(x or ()) for x in (outputs, inputs, grad_outputs)]
        if any(g is None for g in cotangents):
            raise CaptureError("autograd.grad with None among grad_outputs cannot be captured: give ones")
        found = _marked(ys, xs, cotangents, create_graph, bool(allow_unused or materialize_grads), dtype_of)
        if materialize_grads:
            found = [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]
        return tuple(found) if names is None else dict(zip(names, found, strict=True))

    torch.autograd.grad = grad
    try:
        yield
    finally:
        torch.autograd.grad = original


def _marked(
    outputs: list[Tensor],
    inputs: list[Tensor],
    cotangents: list[Tensor],
    create: bool,
    allow_unused: bool,
    dtype_of: Callable[[Tensor], torch.dtype],
) -> list[Tensor | None]:
    """Gradients with respect to those of ``inputs`` that the outputs depend on; None for the others."""
    for x in (*outputs, *inputs):
        if not isinstance(x, Tensor) or not x.requires_grad:
            raise CaptureError(
                f"{user_line()}: autograd.grad differentiates {'' if isinstance(x, Tensor) else type(x).__name__ + ' '}"
                "what does not require a gradient: pass tensors that do"
            )
    reached = _reached(outputs)
    is_used = [_edge(x) in reached for x in inputs]
    if not all(is_used) and not allow_unused:
        i = is_used.index(False)
        raise CaptureError(
            f"{user_line()}: autograd.grad: the outputs do not depend on input {i}, of shape {tuple(inputs[i].shape)}: "
            "leave it out, or pass allow_unused=True"
        )
    used = [x for x, reaches in zip(inputs, is_used, strict=True) if reaches]
    dtypes = ",".join(dtype_name(dtype_of(x)) for x in used)
    made = iter(GRAD(outputs, used, cotangents, create, dtypes) if used else ())
    return [next(made) if reaches else None for reaches in is_used]


def _edge(t: Tensor) -> tuple[Any, int]:
    """Where autograd gives the gradient of a tensor; of a leaf PyTorch makes a view, which is not captured."""
    with compat.DisableTorchFunction(), compat.disable_current_modes():
        edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def _reached(outputs: Sequence[Tensor]) -> set[tuple[Any, int]]:
    """What autograd could give gradients for: nodes, each with the number of its output."""
    stack = [_edge(y) for y in outputs]
    reached = set(stack)
    while stack:
        node, _ = stack.pop()
        above = {edge for edge in node.next_functions if edge[0] is not None} - reached
        reached |= above
        stack.extend(above)
    return reached


def read_placements(text: str) -> dict[Any, Placement]:
    """What :func:`placements_text` wrote: axis name (or index) to placement."""
    made: dict[Any, Placement] = {}
    for entry in filter(None, text.split(";")):
        axis, _, placement = entry.partition("=")
        made[int(axis) if axis.isdigit() else axis] = placement_from(placement)
    return made
