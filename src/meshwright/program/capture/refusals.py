"""What a step may not do while it is captured, as one table: it acts on autograd or on random generators outside of
ops, so that a program would silently go on without it.

A call is refused where code of the user's makes it; torch's own goes on.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from ...compat import FakeTensor
from ...errors import CaptureError
from ...ranks import runtime
from ...torch_changes import note
from .fakes import replaced

Tensor = torch.Tensor
When = Callable[..., bool]

_HOOK = (
    "which a captured step does not run: give the op a gradient of its own (torch.library.custom_op with "
    "register_autograd), or train eagerly"
)
_GRADIENT = (
    "but the gradients of a captured step come behind the loss function: use torch.autograd.grad for gradients that "
    "are part of the loss, and compile_step(gradients=True) to read those of parameters after a step"
)
_SAVED = (
    "but a captured step decides itself what it keeps for the backward: use torch.utils.checkpoint to save memory, "
    "or train eagerly"
)
_SEED = (
    "but a captured step draws from the generator that is there when it runs: seed it before the step, or make what "
    "is drawn a tensor of the batch"
)
GENERATOR = f"the step draws from a torch.Generator, {_SEED}"
_HOST = (
    "which a captured step would draw once and keep for all steps: draw with torch (torch.rand), or make what is "
    "drawn a tensor of the batch"
)
_FREEZE = (
    "but a captured step differentiates once, behind the loss function: compute with parameter.detach() "
    "(torch.func.functional_call), under torch.no_grad(), or change requires_grad between steps"
)
_FORWARD = (
    "but a captured step differentiates backwards only: use torch.autograd.grad, twice for a product with a tangent"
)
_VALUE = (
    "the value of a tensor from outside of the step, which may change, and a captured step does the same in every "
    "step: compute with the tensor itself"
)
_ASSERT = (
    "which depends on the value of a tensor, and a captured step would not look at it: check it behind the step, or "
    "train eagerly (distributions: validate_args=False)"
)


@dataclass(frozen=True)
class Refused:
    """A function, method or property that is refused.

    Attributes:
        owner, name: where it is found.
        why: continues "... calls ``what``".
        when: of the arguments, whether it is refused, whoever calls; None: always, where the user calls.
    """

    owner: Any
    name: str
    why: str
    when: When | None = None

    @property
    def what(self) -> str:
        """As the user calls it."""
        owner = self.owner.__name__ if isinstance(self.owner, (type, types.ModuleType)) else type(self.owner).__name__
        return f"{owner}.{self.name}".removesuffix(".__enter__")

    def refuse(self) -> None:
        """Raise the CaptureError."""
        raise CaptureError(f"{runtime.user_line()}: the step calls {self.what}, {self.why}")


def _toggles(t: Any, value: bool = True) -> bool:
    return isinstance(t, nn.Parameter) and t.requires_grad is not bool(value)


def _outside(t: Any, *_: Any) -> bool:
    return not isinstance(t, FakeTensor) and runtime.is_users(sys._getframe(2).f_code.co_filename)


def _functions_of(generator: Any, module: Any) -> Iterator[str]:
    """Names of the functions of a module that draw from its global generator."""
    for name, found in vars(module).items():
        if not name.startswith("_") and getattr(found, "__self__", None) is generator:
            yield name


def _numbers() -> Iterator[Refused]:
    yield from (Refused(random, n, _HOST) for n in _functions_of(random._inst, random))
    if "numpy" in sys.modules:
        import numpy.random as theirs

        yield from (Refused(theirs, n, _HOST) for n in _functions_of(theirs.mtrand._rand, theirs))


def generators() -> tuple[Refused, ...]:
    """What seeds, saves or draws from generators that a program does not know."""
    names = ("manual_seed", "seed", "get_rng_state", "set_rng_state")
    seeds = [Refused(module, n, _SEED) for module in (torch, torch.random) for n in names]
    devices = [
        Refused(module, n, _SEED)
        for module in (torch.cuda, torch.cuda.random)
        for n in (*names, "manual_seed_all", "seed_all", "get_rng_state_all", "set_rng_state_all")
    ]
    return (*seeds, Refused(torch.random, "fork_rng", _SEED), *devices, *_numbers())


note(
    *("torch.inference_mode.__enter__", "torch.inference_mode.__exit__", "torch.set_anomaly_enabled"),
    *("torch.distributions.Distribution._validate_args", "torch.nn.modules.transformer._detect_is_causal_mask"),
    why="modes and checks that look at values, of which a capture has none",
)
_MODULE_HOOKS = ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook")
_DERIVED = (
    Refused(Tensor, "register_hook", _HOOK),
    Refused(Tensor, "register_post_accumulate_grad_hook", _HOOK),
    Refused(Tensor, "grad_fn", "whose hooks a captured step does not run: " + _HOOK.partition(": ")[2]),
    Refused(torch.autograd.graph, "get_gradient_edge", _HOOK),
    Refused(torch.autograd.graph, "register_multi_grad_hook", _HOOK),
    *(Refused(nn.Module, name, _HOOK) for name in _MODULE_HOOKS),
    Refused(torch.autograd.graph.saved_tensors_hooks, "__enter__", _SAVED),
    Refused(Tensor, "retain_grad", _GRADIENT),
    Refused(Tensor, "grad", _GRADIENT),
    Refused(Tensor, "backward", _GRADIENT),
    Refused(torch.autograd, "backward", _GRADIENT),
    Refused(torch.autograd.forward_ad, "make_dual", _FORWARD, lambda *_, **__: True),  # torch.func.jvp, jacfwd
    Refused(Tensor, "requires_grad_", _FREEZE, _toggles),
    Refused(Tensor, "requires_grad", _FREEZE, _toggles),
    *(Refused(torch, n, _ASSERT, lambda *_, **__: True) for n in ("_assert_async", "_functional_assert_async")),
    *(Refused(Tensor, n, _VALUE, _outside) for n in ("item", "tolist", "numpy", "__float__", "__int__", "__bool__")),
)

note(
    *(f"{r.owner.__module__ + '.' if isinstance(r.owner, type) else ''}{r.owner.__name__}.{r.name}" for r in _DERIVED),
    *(f"{r.owner.__name__}.{r.name}" for r in generators()),
    why="what a captured step cannot hold is refused, with the user's line",
)


def derived() -> tuple[Refused, ...]:
    """What acts on the autograd of a step, of which only the ops of the forward are captured."""
    return _DERIVED


@contextlib.contextmanager
def refused(*entries: Refused) -> Iterator[None]:
    """Inside, these raise CaptureError, with the user's line."""
    with contextlib.ExitStack() as stack:
        for entry in entries:
            if hasattr(entry.owner, entry.name):
                stack.enter_context(replaced(entry.owner, **{entry.name: _guarded(entry)}))
        yield


def _guarded(entry: Refused) -> Any:
    original = getattr(entry.owner, entry.name)
    if isinstance(original, types.MethodType) and isinstance(entry.owner, type):
        return classmethod(_checked(entry, original.__func__))
    if callable(original):
        return _checked(entry, original)
    read = original.__get__ if entry.when is not None else _checked(entry, original.__get__)
    return property(read, _checked(entry, original.__set__))


def _checked(entry: Refused, original: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        by_user = entry.when is None and runtime.is_users(sys._getframe(1).f_code.co_filename)
        if by_user or (entry.when is not None and entry.when(*args, **kwargs)):
            entry.refuse()
        return original(*args, **kwargs)

    return call


class Shapes(TorchFunctionMode):
    """Inside, a call that gives a tensor of the batch another shape in place raises CaptureError: the caller's, which
    has it behind the step on one device, would keep its own."""

    def __init__(self, batch: Sequence[Tensor]) -> None:
        super().__init__()
        self.of = {id(t): (t, t.shape, t.stride()) for t in batch}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        t, *before = self.of.get(id(args[0]) if args else 0, (None,))
        if t is not None and before != [t.shape, t.stride()]:
            name = getattr(func, "__name__", "a call")
            raise CaptureError(
                f"{runtime.user_line()}: {name} gives a tensor of the batch another shape in place, which the tensor "
                f"that a captured step is given does not take: write {name.rstrip('_')}, which returns a view, and go "
                "on with that"
            )
        return made


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Inside, ``torch.inference_mode`` is ``torch.no_grad``, which a captured graph can hold."""

    def enter(self: Any) -> None:
        self.__dict__.setdefault("_stack", []).append(torch.set_grad_enabled(not self.mode))

    def leave(self: Any, *error: Any) -> None:
        self._stack.pop().__exit__(*error)

    with replaced(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


def without_validation() -> contextlib.AbstractContextManager[None]:
    """Inside, distributions do not look at the values of their arguments, unless told to: a capture has none."""
    return replaced(torch.distributions.Distribution, _validate_args=False)


def without_mask_hints() -> contextlib.AbstractContextManager[None]:
    """Inside, nn.Transformer and its kind do not look whether a mask is the causal one, which is only a hint to faster
    kernels: a capture has no values to look at."""
    return replaced(
        nn.modules.transformer, _detect_is_causal_mask=lambda mask, is_causal=None, size=None: bool(is_causal)
    )


@contextlib.contextmanager
def without_anomaly_mode() -> Iterator[None]:
    """Inside, anomaly mode is off, whatever the step says: it looks at values, which a capture has not."""
    with torch.autograd.set_detect_anomaly(False), replaced(torch, set_anomaly_enabled=lambda *_: None):
        yield


__all__ = [
    "GENERATOR",
    "Refused",
    "Shapes",
    "derived",
    "generators",
    "inference_without_gradients",
    "refused",
    "without_anomaly_mode",
    "without_mask_hints",
    "without_validation",
]
