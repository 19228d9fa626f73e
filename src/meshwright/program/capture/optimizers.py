"""Several optimizers as one: each has its own parameters, options and schedule; a step asks one object for all."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ...compat import FakeTensor
from ...errors import CaptureError

Optimizer = torch.optim.Optimizer
Given = Optimizer | Sequence[Optimizer] | None


class Optimizers:
    """What steps ask an optimizer for, of several.

    Attributes:
        parts: the optimizers, as they were given.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        self.state = _States(self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, one after the other."""
        return [g for part in self.parts for g in part.param_groups]

    def step(self) -> None:
        """One step of each."""
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for part in self.parts:
            part.zero_grad()


class _States:
    """The states of all parameters, where their optimizers have them."""

    def __init__(self, of: Optimizers) -> None:
        self._of = of

    @cached_property
    def _owner(self) -> dict[int, Optimizer]:
        return {id(p): part for part in self._of.parts for g in part.param_groups for p in g["params"]}

    def __getitem__(self, p: torch.Tensor) -> Any:
        return self._owner[id(p)].state[p]

    def get(self, p: torch.Tensor) -> Any:
        """The states of a parameter, or None."""
        return self._owner[id(p)].state.get(p)


def as_one(given: Any) -> Any:
    """An optimizer or several as what a step works with; None for none.

    Raises:
        CaptureError: what is no optimizer, one that must run the model itself, a parameter that two have.
    """
    if given is None or isinstance(given, Optimizers):
        return given
    parts = list(given) if isinstance(given, (list, tuple)) else [given]
    seen: set[int] = set()
    for part in parts:
        if not isinstance(part, Optimizer):
            raise CaptureError(f"optimizer={part!r}: a torch.optim.Optimizer or a list of them was expected")
        closure = inspect.signature(type(part).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise CaptureError(
                f"{type(part).__name__} runs the model itself, as often as it likes (step(closure)): it cannot follow "
                "a captured step; train eagerly with it"
            )
        own = {id(p) for g in part.param_groups for p in g["params"]}
        if seen & own:
            raise CaptureError("a parameter belongs to two optimizers, which would both change it: give it to one")
        seen |= own
    if not parts:
        raise CaptureError("optimizer=[]: give at least one optimizer, or None")
    return parts[0] if len(parts) == 1 else Optimizers(parts)


def parts_of(optimizer: Any) -> tuple[Optimizer, ...]:
    """The optimizers that one stands for."""
    if optimizer is None:
        return ()
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)


def check_unscaled(optimizer: Any) -> None:
    """Raises CaptureError for what ``torch.amp.GradScaler`` leaves with an optimizer: a captured update ignores it."""
    for part in parts_of(optimizer):
        for name in ("grad_scale", "found_inf"):
            given = getattr(part, name, None)
            if given is None:
                continue
            if isinstance(given, FakeTensor):  # of the capture that ends here
                delattr(part, name)
            raise CaptureError(
                f"{type(part).__name__}.{name} is set, which a captured update does not read: it would neither unscale "
                "gradients nor skip what overflowed. Use compile_step(loss_scale='dynamic'), or unscale gradients in "
                f"the step and del optimizer.{name}"
            )


def numbers_of(optimizer: Any) -> list[dict[str, Any]]:
    """What of an optimizer is a constant of a program."""
    # What is no option of the optimizer's is a note of somebody else: initial_lr, max_lr, a name.
    groups = [g for one in parts_of(optimizer) for g in one.param_groups]
    params = [{"params": [id(p) for p in g["params"]]} for g in groups]
    return [a | b for a, b in zip(params, options_of(optimizer), strict=True)]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each parameter group, but the learning rate."""
    return [
        {k: v for k, v in g.items() if k != "lr" and k in one.defaults}
        for one in parts_of(optimizer)
        for g in one.param_groups
    ]


def difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """In what an optimizer's numbers differ, in words."""
    if len(old) != len(new):
        return f"{len(old)} parameter groups and has {len(new)}"
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        if a["params"] != b["params"]:
            return f"{len(a['params'])} parameters in group {i} and has {len(b['params'])}, or others"
        for k in a:
            if a[k] != b.get(k):
                return f"{k}={a[k]!r} in group {i} and has {b.get(k)!r}"
    return "other options"


__all__ = ["Given", "Optimizers", "as_one", "check_unscaled", "difference", "numbers_of", "options_of", "parts_of"]
