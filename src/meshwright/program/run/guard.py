"""What a captured step depends on besides its inputs: a change means another program, or an error that names it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

from ...dispatch import autocast, disabled
from ...errors import CaptureError, ProgramError
from ...tensor import DistTensor

Tensor = torch.Tensor

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def modes() -> tuple[Any, ...]:
    """What of the process is part of a program: default dtype, deterministic algorithms, autocast."""
    casts = autocast.state() if autocast.active() else ()
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), casts


@contextlib.contextmanager
def switched_back(model: nn.Module, step: Any) -> Iterator[None]:
    """Inside, modules and the step may be switched to evaluation; behind, each is what it was."""
    was = [(part, part.training) for part in (step, *model.modules())]
    try:
        yield
    finally:
        for part, training in was:
            part.training = training


class Guard:
    """The modes, hooks and parameters of a model, looked at before each step.

    Every rank has the same model, so every rank sees the same changes.

    Args:
        model: whose parameters stay the same objects; whether they require gradients may change.
        hooks: whether hooks of parameters, and of modules in the backward, are captured.
    """

    def __init__(self, model: nn.Module, hooks: bool) -> None:
        self.model, self.hooks = model, hooks
        self.modules = list(model.modules())
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.kept: list[Any] = [self.modules]  # ids below are theirs
        self.last = self._look()
        self.numbers: dict[tuple[Any, ...], int] = {tuple(self.last): 0}
        self.number = 0

    def check(self) -> int:
        """A number for the present state: programs are captured for one state.

        Raises:
            ProgramError: parameters came, went or were replaced, or have hooks that a program cannot hold.
        """
        now = self._look()
        if now != self.last:
            self._changed()
            self.last = self._look()
            self.number = self.numbers.setdefault(tuple(self.last), len(self.numbers))
        return self.number

    def _look(self) -> list[Any]:
        found: list[Any] = []
        with disabled():
            for m in self.modules:
                held = m.__dict__
                found.append(m.training)
                if held["_modules"]:
                    found += map(id, held["_modules"].values())
                for p in held["_parameters"].values():
                    if p is not None:
                        found += (id(p), p.requires_grad)
                        if p._backward_hooks or p._post_accumulate_grad_hooks:
                            theirs = (_theirs(p._backward_hooks), _theirs(p._post_accumulate_grad_hooks))
                            if any(theirs):
                                found.append(theirs)
                for name in _HOOKS:
                    if held[name]:
                        found.append((name, *held[name]))
        return found

    def _changed(self) -> None:
        self.modules = list(self.model.modules())
        self.kept.append(self.modules)
        now = dict(self.model.named_parameters(remove_duplicate=False))
        for name in (*self.params, *now):
            if now.get(name) is not self.params.get(name):
                what = "was replaced" if name in now and name in self.params else "is new" if name in now else "is gone"
                raise ProgramError(
                    f"the parameter {name} {what} since the step was captured (by load_state_dict(assign=True), or "
                    "with its module); the program and the optimizer have what was there before. Copy values into "
                    "the parameters that are there (load_state_dict without assign), or make the optimizer anew and "
                    "capture the step again"
                )
        if not self.hooks:
            for text in foreign_hooks(self.model):
                raise ProgramError(text)


def foreign_hooks(model: nn.Module) -> Iterator[str]:
    """What is wrong with hooks that only autograd would run: a program of global tensors does not know them."""
    fix = "remove it (handle.remove()), say clip_grad_norm= or write a pass instead, or train eagerly"
    with disabled():
        for name, p in model.named_parameters():
            for hook in (*(p._backward_hooks or {}).values(), *(p._post_accumulate_grad_hooks or {}).values()):
                if not _ours(hook):
                    yield f"the parameter {name} has a hook, which a captured step does not run: {fix}"
        for name, m in model.named_modules():
            if m._backward_hooks or m._backward_pre_hooks:
                what = name or type(m).__name__
                yield f"the module {what} has a backward hook, which a captured step does not run: {fix}"


def _theirs(hooks: dict[int, Any] | None) -> tuple[int, ...]:
    return tuple(key for key, hook in (hooks or {}).items() if not _ours(hook))


def _ours(hook: Any) -> bool:
    """Whether a hook is one that synchronises gradients, which programs do themselves."""
    module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    # A user's hook on a DistTensor is one of its class's, around it.
    return module.startswith(__name__.partition(".")[0] + ".") and module != DistTensor.__module__


def check_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that a program of global tensors does not run."""
    for text in foreign_hooks(model):
        raise CaptureError(text)


__all__ = ["Guard", "check_hooks", "foreign_hooks", "modes"]
