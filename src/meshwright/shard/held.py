"""Gradients that lie otherwise than their parameter.

Autograd's slot takes gradients of the parameter's local shape only.  Two kinds have another one: a gradient
that was reduce-scattered while the parameter is whole (``states_over``), and the contributions to a
parameter that is stored split but used whole (``stored_over``) while they accumulate.  They are *held*
beside the slot; ``DistTensor.grad`` looks at both.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from .. import convert
from ..dispatch import call_disabled, disabled
from ..layout import Spec
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor, stamp
from .raw import get_grad, set_grad

Tensor = torch.Tensor

_NO: dict[str, Any] = {}
_base: Any = DistTensor.__dict__["grad"]


def held(p: Tensor) -> DistTensor | None:
    """The gradient that is held beside the slot, if any."""
    return cast("DistTensor | None", p.__dict__.get("_held"))


def hold(p: Tensor, g: DistTensor | None) -> None:
    """Hold a gradient beside the slot."""
    if g is None:
        p.__dict__.pop("_held", None)
    else:
        p.__dict__["_held"] = g


def in_spec(g: Tensor, source: Spec, target: Spec) -> Tensor:
    """Local part of a gradient in another layout."""
    source, target = source.with_(undecided=0), target.with_(dtype=source.dtype, undecided=0)
    with torch.no_grad(), disabled():
        return convert.apply(plan_conversion(source, target).steps, g)


def _merge(p: DistTensor, kept: DistTensor) -> None:
    """A reduced gradient and contributions that came after it become contributions."""
    with torch.no_grad(), disabled():
        slot = get_grad(p)
        assert slot is not None
        spec: Spec = slot.__dict__.get("_spec") or p._spec.grad()
        if kept._spec.layout.partial:
            total = Tensor.add(kept, in_spec(slot, spec, kept._spec))
            hold(p, stamp(total, kept._spec))
            set_grad(p, None)
        else:
            total = Tensor.add(slot, in_spec(kept, kept._spec, spec))
            hold(p, None)
            set_grad(p, stamp(total, spec))


def _get(self: DistTensor) -> DistTensor | None:
    kept = self.__dict__.get("_held")
    if kept is None:
        found = call_disabled(get_grad, (), (self,), _NO)
        # Read often, by optimizers and clipping: what has its layout written on it needs no further look.
        if found is None or isinstance(found, DistTensor):
            return found
        return cast("DistTensor | None", _base.fget(self))
    with disabled():
        both = get_grad(self) is not None
    if not both:
        return cast(DistTensor, kept)
    _merge(self, kept)
    return _get(self)


def _set(self: DistTensor, value: Tensor | None) -> None:
    self.__dict__.pop("_held", None)
    if isinstance(value, DistTensor):
        with disabled():
            fits = Tensor.size(value) == Tensor.size(self) or value.shape != self.shape  # the latter is refused below
        if not fits:
            with disabled():
                set_grad(self, None)
            hold(self, value)
            return
    _base.fset(self, value)


def _delete(self: DistTensor) -> None:
    _set(self, None)


def _install() -> None:
    DistTensor.grad = property(_get, _set, _delete, _base.__doc__)  # type: ignore[method-assign,assignment]


_install()

__all__ = ["held", "hold", "in_spec"]
