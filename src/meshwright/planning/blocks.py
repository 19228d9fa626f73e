"""Blocks of a model that cannot be captured whole: each by itself, on what it is called with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import CaptureError
from ..program.capture.export import Captured, LossFn
from ..program.capture.source_lines import check_returned, own_loss

Tensor = torch.Tensor
Call = tuple[tuple[Any, ...], dict[str, Any]]


def captured_blocks(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, capture: Callable[[nn.Module, LossFn, Any], Captured]
) -> Iterator[tuple[str, Captured]]:
    """The outermost modules that can be captured, by name, as steps of their own: what they return is their loss.

    Runs the step once, on a copy, to see what modules are called with; nothing where that fails too (on the meta
    device).

    Raises:
        CaptureError: what the step returns is no loss.
    """
    calls: dict[str, Call] = {}
    loss = loss_fn or own_loss
    tried = copy.deepcopy(model)

    def note(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.setdefault(name, (args, kwargs)) and None

    for name, module in tried.named_modules():
        if name:
            module.register_forward_pre_hook(note(name), with_kwargs=True)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            made = loss(tried, batch)
    except Exception:
        return
    check_returned(loss, model, made)
    done: list[str] = []
    for name, (args, kwargs) in sorted(calls.items()):
        module = model.get_submodule(name)
        inside = any(name.startswith(f"{d}.") for d in done)
        if inside or sum(1 for p in module.parameters() if p.ndim > 1) < 2:
            continue
        try:
            captured = capture(module, _returned, (args, kwargs))
        except (CaptureError, RuntimeError, TypeError):
            continue
        done.append(name)
        yield name, captured


def _returned(module: nn.Module, call: Call) -> tuple[Tensor, ...]:
    """A number for a loss, and all that a module returns."""
    args, kwargs = call
    made = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]
    floats = [t.sum() for t in made if t.dtype.is_floating_point]
    if not floats:
        raise CaptureError("it returns nothing that has a gradient")
    return (torch.stack(floats).sum(), *made)


__all__ = ["captured_blocks"]
