"""What stands in for a user's tensors and functions while a step of theirs is recorded."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ... import compat
from ...compat import FakeTensorMode, pytree
from ...errors import CaptureError
from ...tensor import DistTensor
from ...torch_changes import NEVER, note
from ..ir.strides import dense
from .fake_answers import answered

Tensor = torch.Tensor
Born = Callable[[str, Tensor], None]


_DEVICE = torch.ops.prim.device.default
_recording = threading.local()
note(
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch",
    why="fakes of a capture leave the memory of real tensors alone; elsewhere the call passes",
    until=NEVER,
)


@contextlib.contextmanager
def writing_nothing() -> Iterator[None]:
    """Inside, this thread's fakes leave the memory of real tensors alone.

    By itself PyTorch runs an op of known values for real, in place too: ``count.add_(1)``, where no fake takes part.
    """
    original = FakeTensorMode.dispatch
    if not hasattr(original, "__wrapped__"):

        @functools.wraps(original)
        def guarded(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not getattr(_recording, "depth", 0):
                return original(self, func, types, args, kwargs or {})
            if func is _DEVICE:
                return args[0].fake_device
            if func._schema.is_mutable:
                args, kwargs = pytree.tree_map_only(Tensor, partial(_unknown, self), (args, kwargs or {}))
            return answered(original, self, func, types, args, kwargs or {})

        FakeTensorMode.dispatch = guarded  # type: ignore[method-assign]
    _recording.depth = getattr(_recording, "depth", 0) + 1
    try:
        yield
    finally:
        _recording.depth -= 1


def _unknown(mode: Any, t: Tensor) -> Tensor:
    """A fake of which no value is known."""
    if not mode.is_our_fake(t):
        return mode.fake_tensor_converter.from_real_tensor(mode, t)
    if t.constant is not None:  # type: ignore[attr-defined]
        mode.fake_tensor_converter.invalidate_constant_aliases(t.constant)  # type: ignore[attr-defined]
    return t


@contextlib.contextmanager
def stand_ins(tensors: Mapping[str, Tensor], mode: FakeTensorMode, born: Born) -> Iterator[None]:
    """Inside, every one of these tensors is fake, wherever it is referred to; its values wait outside.

    Args:
        born: told each gradient that autograd gave.
    """
    swapped: list[tuple[Tensor, Tensor]] = []
    try:
        for name, t in tensors.items():
            fake = _fake(name, t, mode, born)
            _swap(t, fake)
            swapped.append((t, fake))
        yield
    finally:
        for t, fake in swapped:
            _swap(t, fake)


def _swap(a: Tensor, b: Tensor) -> None:
    """Exchange what two tensors are; references to either stay.

    As ``torch.utils.swap_tensors``, but also where a graph holds on to one: the fakes' graphs are never run again.
    """
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    compat.swap_tensor_impl(a, b)


def like(x: Tensor) -> Tensor:
    """A batch tensor's stand-in: as it lies in memory, or will when it comes in."""
    return torch.empty_strided(x.shape, dense(x.shape, tuple(x.stride())), dtype=x.dtype, device=x.device)


def _fake(name: str, t: Tensor, mode: FakeTensorMode, born: Born) -> Tensor:
    if isinstance(t, DistTensor):
        raise CaptureError("capture_local is for plain tensors of one rank; for DistTensors there is compile_step")
    with mode:
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        fake.requires_grad_(t.requires_grad)
    fake.__dict__["_is_param"] = isinstance(t, nn.Parameter)
    if t.requires_grad:
        fake.register_post_accumulate_grad_hook(partial(born, name))
        for hook in (t._post_accumulate_grad_hooks or {}).values():
            fake.register_post_accumulate_grad_hook(hook)
        for hook in (t._backward_hooks or {}).values():
            fake.register_hook(hook)
    return fake


def named_in(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The parameters of a model by name; all that the optimizer has must be among them."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    if any(id(p) not in known for g in optimizer.param_groups for p in g["params"]):
        raise CaptureError("the optimizer has parameters that the model has not: give model= all modules of the step")
    return named


@contextlib.contextmanager
def replaced(target: Any, **given: Any) -> Iterator[None]:
    """Inside, attributes of a module, class or object are these."""
    own = {name: vars(target)[name] for name in given if name in vars(target)}
    try:
        for name, value in given.items():
            setattr(target, name, value)
        yield
    finally:
        for name in given:
            if name in own:
                setattr(target, name, own[name])
            elif name in vars(target):
                delattr(target, name)


note(
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode.__torch_dispatch__",
    why="function modes see the user's calls, not what tracing asks of tensors",
)


@contextlib.contextmanager
def modes_for_users_calls() -> Iterator[None]:
    """Inside, function modes are not asked about each shape and dtype that tracing looks at."""
    dispatch = ProxyTorchDispatchMode.__torch_dispatch__

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        with compat.DisableTorchFunction():
            return dispatch(self, *args, **kwargs)

    with replaced(ProxyTorchDispatchMode, __torch_dispatch__=traced):
        yield


__all__ = ["like", "modes_for_users_calls", "named_in", "replaced", "stand_ins"]
