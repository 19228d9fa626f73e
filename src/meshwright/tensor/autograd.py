"""``backward`` and ``torch.autograd.grad``: cotangents in, gradients out, each in its own layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from .. import compat
from ..compat import engine_run_backward
from ..dispatch import (
    NO_KWARGS,
    Args,
    Kwargs,
    disabled,
    refresh,
    resolve_types,
    root,
    unit_cotangent,
    wanting_gradients,
)
from ..errors import DispatchError
from . import modes
from .dist_tensor import DistTensor, call_enabled, local_of, plain, whole, wrap

Tensor = torch.Tensor


def _seed(y: DistTensor, gradient: Tensor | None) -> Tensor:
    """The cotangent of ``y`` in the layout of its gradient, as a local tensor."""
    with disabled():
        if y._spec.undecided_mask:
            resolve_types(y, y._spec.decided())
    spec = y._spec
    if gradient is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return unit_cotangent(spec, y.device)
    if not isinstance(gradient, DistTensor) and compat.current_graph_task_id() != -1:
        raise DispatchError(
            "a backward inside a backward was given a plain gradient for a DistTensor, which is this rank's part of it "
            "and not the global value (reentrant checkpoints do so): use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False)"
        )
    if gradient.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output has a shape of {tuple(gradient.shape)} and output has a shape of "
            f"{tuple(spec.shape)}."
        )
    return plain(local_of(gradient, spec.grad().with_(dtype=gradient.dtype)))


def grad(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad`` on distributed tensors: seeds in, gradients out, each in its own layout."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("is_grads_batched"):
        raise DispatchError(
            "autograd.grad(is_grads_batched=True) maps conversions over a batch, which they cannot do: loop over the "
            "rows of grad_outputs and pass retain_graph=True"
        )
    outputs, inputs = _listed(given["outputs"]), _listed(given["inputs"])
    create = bool(given.get("create_graph"))
    materialize = bool(given.get("materialize_grads"))
    allow = given.get("allow_unused")
    outputs, seeds = _seeds(outputs, given.get("grad_outputs"))
    made = _run_engine(
        outputs, seeds, given.get("retain_graph"), create, inputs, bool(materialize if allow is None else allow), False
    )
    with disabled():
        # Autograd may hand out one object twice, or the caller's own cotangent: wrap an alias of it.
        found = [
            wrap(g.view_as(g), x._spec.grad()) if isinstance(x, DistTensor) and g is not None else g
            for x, g in zip(inputs, made, strict=True)
        ]
    if materialize:
        found = [
            torch.zeros_like(x, requires_grad=create) if g is None else g for x, g in zip(inputs, found, strict=True)
        ]
    return tuple(found)


def backward(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.backward`` and ``DistTensor.backward``."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = _listed(given["tensors"])
    inputs = given.get("inputs")
    listed = () if inputs is None else tuple(_listed(inputs))
    if inputs is not None and not listed:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    tensors, seeds = _seeds(tensors, given.get("grad_tensors"))
    _run_engine(tensors, seeds, given.get("retain_graph"), bool(given.get("create_graph")), listed, True, True)


def _seeds(outputs: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
    """Where the backward starts, and the cotangents there."""
    listed = _listed(given) if given is not None else [None] * len(outputs)
    if len(listed) != len(outputs):
        raise RuntimeError(f"{len(outputs)} tensors to differentiate, but {len(listed)} gradients for them")
    made: list[Any] = []
    with disabled(), torch.enable_grad():
        outputs = [root(y, wrap) if isinstance(y, DistTensor) and y.requires_grad else y for y in outputs]
    for y, g in zip(outputs, listed, strict=True):
        if isinstance(y, DistTensor):
            made.append(_seed(y, g) if y.requires_grad else g)
        elif g is None and isinstance(y, Tensor):
            if y.requires_grad and y.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            made.append(torch.ones_like(y) if y.requires_grad else None)
        else:
            made.append(plain(whole(g)) if isinstance(g, DistTensor) else g)
    return outputs, made


def _run_engine(
    outputs: Sequence[Any],
    seeds: Sequence[Any],
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool,
    accumulate: bool,
) -> tuple[Any, ...]:
    """Autograd's engine itself, with dispatch on: user code may run inside a backward.

    Hooks, recomputed checkpoints and custom functions all see distributed tensors as they do in a forward;
    ``torch.autograd.backward`` would come back here.
    """
    keep = create_graph if retain_graph is None else retain_graph
    with modes.locals_only(), wanting_gradients(inputs) if inputs else nullcontext():
        made = engine_run_backward(
            tuple(outputs), tuple(seeds), keep, create_graph, tuple(inputs), allow_unused, accumulate_grad=accumulate
        )
    return cast(tuple[Any, ...], made)


def _listed(x: Any) -> list[Any]:
    """One tensor or several, those that are copies of views with the history that their base has now."""
    listed = [x] if isinstance(x, Tensor) else list(x)
    for t in listed:
        if isinstance(t, DistTensor):
            refresh(t, call_enabled)
    return listed


def _backward_of(
    self: DistTensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Gradients of the leaves, as on one device: the global value is what is differentiated."""
    backward(None, (self, gradient, retain_graph, create_graph, inputs), NO_KWARGS)


DistTensor.backward = _backward_of  # type: ignore[assignment,method-assign]
