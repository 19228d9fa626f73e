"""Autocast before the rule: a plan is made for the dtypes that autocast gives the op, as PyTorch itself tells them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import compat
from ..compat import FakeTensorMode, TorchDispatchMode
from ..layout import Spec
from .binding import Args, Kwargs
from .calls import disabled, map_tensors, tensors_in

active: Callable[[], bool] = compat.is_any_autocast_enabled


def state() -> tuple[Any, ...]:
    """What of autocast a plan depends on."""
    return tuple(torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda"))


class _Casts(TorchDispatchMode):
    """Notes the casts of the given tensors that come before anything else: those that autocast makes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[torch.Tensor] = []
        self.found: dict[int, torch.dtype] = {}
        self.watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watching:
            at = [i for i, t in enumerate(self.given) if args and args[0] is t]
            self.watching = func is torch.ops.aten._to_copy.default and bool(at)
            if self.watching:
                self.found |= dict.fromkeys(at, kwargs["dtype"])
        return func(*args, **(kwargs or {}))


Seen = tuple[dict[int, torch.dtype], list[torch.dtype]]


def casts(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs, device: str) -> dict[int, torch.dtype]:
    """Which tensors (by their order in the call) autocast casts for this op, and to what, from runs on fakes.

    Of an op made of others, some of which autocast casts, all are cast to the dtype of the result.
    """
    if not torch.is_autocast_enabled(device):
        return {}
    found, made = _seen(func, specs, args, kwargs, device)
    with torch.autocast(device, enabled=False):
        asked, plain = _seen(func, specs, args, kwargs, device)
    found = {i: d for i, d in found.items() if asked.get(i) is not d}
    if not found and plain and made != plain and len(made) == 1:
        found = {i: made[0] for i, s in enumerate(specs) if s.dtype.is_floating_point}
    return {i: d for i, d in found.items() if d is not specs[i].dtype}


def _seen(func: Any, specs: Sequence[Spec], args: Args, kwargs: Kwargs, device: str) -> Seen:
    """Casts of the tensors, and dtypes of the outputs (none where PyTorch refuses: planning finds out why)."""
    watch, shapes = _Casts(), iter(specs)

    def fake(t: torch.Tensor) -> torch.Tensor:
        s = next(shapes)
        watch.given.append(torch.empty(s.shape, dtype=s.dtype, device=device))
        return watch.given[-1]

    try:
        with disabled(), torch.no_grad(), warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
            warnings.simplefilter("ignore")
            given = map_tensors(args, fake), map_tensors(kwargs, fake)
            with watch:
                made = func(*given[0], **given[1])
    except Exception:
        return watch.found, []
    return watch.found, [t.dtype for t in tensors_in(made)]


def cast_first(func: Any, dtypes: dict[int, torch.dtype], device: str) -> Callable[..., Any]:
    """``func`` on tensors of these dtypes, outside of autocast: as autocast calls it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        at = iter(range(len(tensors_in((args, kwargs)))))

        def cast(t: torch.Tensor) -> torch.Tensor:
            dtype = dtypes.get(next(at))
            return t if dtype is None else t.to(dtype)

        args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)

    return run
