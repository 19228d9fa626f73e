"""Autocast before the rule: a plan is made for the dtypes that autocast gives the op, as PyTorch itself tells them.

Weights are cast by PyTorch's own cache, also where the op is not simply run on locals: once in a region of autocast.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import compat
from ..compat import FakeTensorMode, TorchDispatchMode, disable_current_modes
from ..layout import Spec
from .binding import Args, Kwargs
from .calls import disabled, map_tensors, tensors_in
from .leaves import link

Tensor = torch.Tensor
_LOG = logging.getLogger("torch._subclasses.fake_tensor")
ONCE = "_once"  # in the dict of what ops see of a weight, where that is no leaf: its cast
_LOCAL: Any = Tensor  # properties of local tensors
_is_leaf = _LOCAL.is_leaf.__get__

Wrap = Callable[[Tensor, Spec], Any]
active: Callable[[], bool] = compat.is_any_autocast_enabled


def state() -> tuple[Any, ...]:
    """What of autocast a plan depends on."""
    return tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda"))


class _Casts(TorchDispatchMode):
    """Notes the casts of the given tensors to one dtype that come before anything else: those that autocast makes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.found: dict[int, torch.dtype] = {}
        self.watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watching and func is not torch.ops.prim.device.default:  # which autocast asks for
            casts = func is torch.ops.aten._to_copy.default
            at = [i for i, t in enumerate(self.given) if casts and args[0] is t]
            self.watching = bool(at) and set(self.found.values()) <= {kwargs["dtype"]}
            if self.watching:
                self.found |= dict.fromkeys(at, kwargs["dtype"])
        return func(*args, **(kwargs or {}))


Seen = tuple[dict[int, torch.dtype], list[torch.dtype]]


@dataclass(frozen=True, slots=True)
class InputCasts:
    """What autocast on a device casts for an op.

    ``dtypes``: of tensors, by their order in the call.  ``itself``: they are what it casts, and not values that the op
    makes of them (views, say), of which autocast keeps no cast.
    """

    device: str
    dtypes: dict[int, torch.dtype]
    itself: bool = True

    def first(self, func: Any, wrap: Wrap, args: Args, kwargs: Kwargs) -> Any:
        """``func`` on tensors of these dtypes, outside of autocast: as autocast calls it."""
        at = itertools.count()

        def cast(t: Tensor) -> Tensor:
            dtype = self.dtypes.get(next(at))
            if dtype is None:
                return t
            leaf = t.requires_grad and _is_leaf(t)
            return _weight(t, wrap) if leaf and self._is_cached(t, dtype) else t.to(dtype)

        args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)

    def once(self, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
        """The arguments with the casts of weights that are no leaves."""
        at = itertools.count()

        def cast(t: Tensor) -> Tensor:
            dtype, once = self.dtypes.get(next(at)), t.__dict__.get(ONCE)
            return t if dtype is None or once is None or not self._is_cached(t, dtype) else once(t, dtype)

        return map_tensors(args, cast), map_tensors(kwargs, cast)

    def _is_cached(self, t: Tensor, dtype: torch.dtype) -> bool:
        """Whether autocast keeps the cast of such a tensor, if it is a leaf."""
        return self.itself and dtype is torch.get_autocast_dtype(self.device) and t.dtype is torch.float32


class _Passed(TorchDispatchMode):
    """Takes a product's first operand, as autocast passes it on, and multiplies nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.given: Tensor = args[0]
            return torch.empty(())
        return func(*args, **(kwargs or {}))


def _cached(t: Tensor) -> Tensor:
    """The cast of a local tensor to autocast's lower dtype, by PyTorch's own cache: for each op the same object, until
    that is cleared.  No function gives it; so an op is asked for that begins with it, which no kernel sees."""
    with compat.DisableTorchFunction(), _Passed() as passed:
        torch.mm(t, t)
    return passed.given


def _weight(t: Tensor, wrap: Wrap) -> Tensor:
    """The cast of a leaf.

    An alias for each use: conversions are kept on a value, and threads may clear the cache of a process at any time,
    so that a rank would send what others have.
    """
    with compat.DisableTorchFunction():
        made = _cached(t)
        spec: Spec | None = t.__dict__.get("_spec")
        if spec is None:
            return made
        made, spec = made.view_as(made), spec.with_(dtype=made.dtype)
        if not made.requires_grad:
            return wrap(made, spec.untyped())
        made = wrap(made, spec)
        link([t, made])
        return made


class CachedCast:
    """The cast of a weight that is no leaf, since it was gathered: made anew when autocast would cast a leaf anew.

    Args:
        noted: is told of each cast.
    """

    def __init__(self, device: str, noted: Callable[[Tensor], None] | None = None) -> None:
        with compat.DisableTorchFunction(), disable_current_modes():
            self.leaf = torch.empty(0, device=device, requires_grad=True)
        self.noted = noted
        self.of: Any = None
        self.made: Tensor | None = None

    def __call__(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """``t`` in autocast's lower dtype."""
        with disable_current_modes():
            of = _cached(self.leaf).__dict__.setdefault(ONCE, object())
        if self.made is None or of is not self.of:
            if not t.requires_grad:
                return t.to(dtype)
            self.of, self.made = of, t.to(dtype)
            if self.noted is not None:
                self.noted(self.made)
        if self.made.dtype is not dtype:  # as of a leaf, whose kept cast PyTorch multiplies with what is in the other
            raise RuntimeError(f"a weight of dtype {self.made.dtype} is kept where autocast now asks for {dtype}")
        return self.made.view_as(self.made)

    def forget(self) -> None:
        """Hold no cast any more."""
        self.of = self.made = None


def casts(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs, device: str) -> InputCasts | None:
    """Which tensors autocast casts for this op, and to what, from runs on fakes; None: none.

    Of an op made of others, some of which autocast casts, all are cast to the dtype of the result.
    """
    if not torch.is_autocast_enabled(device):
        return None
    found, made = _seen(func, specs, args, kwargs, device)
    with torch.autocast(device, enabled=False):
        asked, plain = _seen(func, specs, args, kwargs, device)
        found = {i: d for i, d in found.items() if asked.get(i) is not d}
        cast = [s.with_(dtype=found.get(i, s.dtype)) for i, s in enumerate(specs)]
        itself = bool(found) and _seen(func, cast, args, kwargs, device)[1] == made
    if not itself and made != plain and len(made) == 1:  # without it PyTorch may refuse operands of several dtypes
        found = {i: made[0] for i, s in enumerate(specs) if s.dtype.is_floating_point}
    found = {i: d for i, d in found.items() if d is not specs[i].dtype}
    return InputCasts(device, found, itself) if found else None


@contextmanager
def _silent() -> Iterator[None]:
    """Inside, nothing is shown of what fakes warn of, and of ops that they refuse."""
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _LOG.disabled = before


def _seen(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs, device: str) -> Seen:
    """Casts of the tensors, and dtypes of the outputs (none where PyTorch refuses: planning finds out why)."""
    watch, shapes = _Casts(), iter(specs)

    def fake(t: torch.Tensor) -> torch.Tensor:
        s = next(shapes)
        watch.given.append(torch.empty(s.shape, dtype=s.dtype, device=device))
        return watch.given[-1]

    try:
        with disabled(), torch.no_grad(), _silent(), FakeTensorMode(allow_non_fake_inputs=True):
            given = map_tensors(args, fake), map_tensors(kwargs, fake)
            with watch:
                made = func(*given[0], **given[1])
    except Exception:
        return watch.found, []
    return watch.found, [t.dtype for t in tensors_in(made)]
