"""``DistTensor.grad``: autograd's slot, and what lies beside it.

The slot takes gradients of the tensor's local shape only.  A gradient of another one is *held* beside it: one that was
reduce-scattered while the tensor is whole, the contributions to a tensor that is stored split but used whole, one that
was assigned in another layout.  A gradient that fits the slot and has another layout than the backward's is converted
before the backward adds to it.

A gradient that was assigned is the memory of whoever gave it: a view of one flat buffer, say.  Where a backward's would
not be added to that, in its layout, it is laid *aside* for the time of a backward, which starts a new one; what that
brings is then added to it by an op in place, with the conversions that it takes, and reaches what it is a view of.

What is held may also be on its way, reduced while a backward goes on: reading waits for it, clearing or assigning drops
it.  So it needs no end of that backward, which may never come (it may raise).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Protocol

import torch

from .. import compat
from ..dispatch import NO_KWARGS, call_disabled, disabled, remember
from ..errors import LayoutError
from ..layout import Layout, Marks, Spec, marked, marks_of
from ..local_tensor import get_grad, set_grad
from ..resharding import executor, planner
from .dist_tensor import DistTensor, as_layout_of, call_enabled, is_part, raw_grad, wrap

Tensor = torch.Tensor
_ASSIGNED = itertools.count()
GRADIENT = "_gradient"  # in the dict of a tensor: its :class:`Gradient`
_engine: Any = compat.execution_engine


class PendingGradient(Protocol):
    """A gradient on its way."""

    def finalize(self, p: DistTensor) -> None:
        """Wait, and put it where it belongs: into the slot or beside it."""
        ...


class Gradient:
    """What there is of the gradient of a tensor besides autograd's slot.

    Attributes:
        held: a gradient that does not fit the slot, or one that is on its way.
        assigned: what the user assigned, as long as it is the gradient: in the slot, held or laid aside.
        number: when it was assigned, among all that were.
        aside: what was assigned, for the time of a backward that starts a new one.
    """

    held: DistTensor | PendingGradient | None = None
    assigned: DistTensor | None = None
    number: int = 0
    aside: DistTensor | None = None


NONE = Gradient()  # of a tensor that never had anything there; not to be written to


def beside_slot(p: Tensor) -> Gradient:
    """What lies beside the slot of a tensor, to be looked at."""
    found: Gradient = p.__dict__.get(GRADIENT, NONE)
    return found


def _record(p: Tensor) -> Gradient:
    """What lies beside the slot of a tensor, to be written to."""
    space = p.__dict__
    if GRADIENT not in space:
        space[GRADIENT] = Gradient()
    record: Gradient = space[GRADIENT]
    return record


def held(p: Tensor) -> DistTensor | None:
    """The gradient that is held beside the slot, if any."""
    space = p.__dict__
    kept: Any = space[GRADIENT].held if GRADIENT in space else None
    if kept is not None and not isinstance(kept, DistTensor):
        kept.finalize(p)
        return held(p)
    return kept


def hold(p: Tensor, g: DistTensor | PendingGradient | None) -> None:
    """Hold a gradient beside the slot."""
    space = p.__dict__
    if GRADIENT in space:
        space[GRADIENT].held = g
    elif g is not None:
        _record(p).held = g


def fits(p: DistTensor, g: Spec) -> bool:
    """Whether a gradient that lies so goes into the slot: on all ranks, whose decisions with it are the same then.

    A whole gradient of a single row has the shape of the part of that rank alone which has the row.
    """
    own = p._spec
    return g.layout is own.layout or g.layout == own.layout or _parts_alike(own.shape, own.layout, g.layout)


@functools.lru_cache(maxsize=1024)
def _parts_alike(shape: torch.Size, one: Layout, other: Layout) -> bool:
    """Whether the parts of two layouts have the same shape on every rank."""
    return all(one.local_shape(shape, at) == other.local_shape(shape, at) for at in one.mesh.coordinates())


def in_slot(p: DistTensor) -> DistTensor | None:
    """The gradient, which comes into the slot if it fits there.  Dispatch must be disabled, and no backward run."""
    g = p.grad
    if g is not None and beside_slot(p).held is not None and fits(p, g._spec):
        set_grad(p, g)
        hold(p, None)
    return g


class LentGradient:
    """A gradient in the slot of a parameter for a while: what lay there, and beside it, comes back.

    Dispatch must be disabled.
    """

    def __init__(self, p: DistTensor, g: Tensor) -> None:
        self.p, self.g, self.before, self.beside = p, g, get_grad(p), beside_slot(p).held
        hold(p, None)
        set_grad(p, g)

    def restore(self) -> None:
        """Unless somebody has put another one there."""
        if get_grad(self.p) is self.g:
            set_grad(self.p, self.before)
            hold(self.p, self.beside)


def in_spec(g: Tensor, source: Spec, target: Spec) -> Tensor:
    """Local part of a gradient in another layout."""
    with torch.no_grad(), disabled():
        return _converted(g, source, target)


def _converted(g: Tensor, source: Spec, target: Spec) -> Tensor:
    source, target = source.decided(), target.with_(dtype=source.dtype, undecided_mask=0)
    return executor.apply(planner.plan(source, target).steps, g)


def _merge(p: DistTensor, kept: DistTensor, slot: Tensor) -> None:
    """A reduced gradient and contributions that came after it become contributions."""
    spec: Spec = slot.__dict__.get("_spec") or p._spec.grad()
    with disabled(), torch.set_grad_enabled(kept.requires_grad or slot.requires_grad):
        if kept._spec.layout.partial:
            total = Tensor.add(kept, _converted(slot, spec, kept._spec).to(kept.device))
            hold(p, wrap(total, kept._spec))
            set_grad(p, None)
        else:
            total = Tensor.add(slot, _converted(kept, kept._spec, spec).to(slot.device))
            hold(p, None)
            set_grad(p, wrap(total, spec))


def _get(self: DistTensor) -> DistTensor | None:
    # Optimizers and clipping read it several times a step for each parameter: no more than must be here.
    space = self.__dict__
    beside = space[GRADIENT] if GRADIENT in space else NONE  # noqa: SIM401 (a call less)
    if beside.aside is not None:
        bring(self)
    found: Any = call_disabled(get_grad, (), (self,), NO_KWARGS)
    if beside.held is not None:
        kept = held(self)
        found = call_disabled(get_grad, (), (self,), NO_KWARGS)  # another one, if what was held came into the slot
        if kept is None or found is None:
            return kept if found is None else found
        _merge(self, kept, found)
        return _get(self)
    if found is not None and found.__class__ is not DistTensor and not isinstance(found, DistTensor):
        wrap(found, self._spec.grad())
    return found


def _set(self: DistTensor, value: Any) -> None:
    spec = self._spec
    if GRADIENT in self.__dict__:
        beside = _record(self)
        beside.assigned = beside.aside = None
    if value is None or (value.__class__ is DistTensor and value._spec is spec.grad() and not spec.undecided_mask):
        call_disabled(set_grad, (), (self, value), NO_KWARGS)
        hold(self, None)
        return
    given = _checked(self, value)
    with disabled():
        if given.dtype is not self.dtype and Tensor.size(given) != Tensor.size(self):  # the slot would refuse it too
            raise RuntimeError(f"assigned grad has dtype {given.dtype}, its tensor {self.dtype}: they must be equal")
        _put(self, given)
        beside = _record(self)
        beside.assigned, beside.number = given, next(_ASSIGNED)
        guard(self, given._spec)


def _put(p: DistTensor, g: DistTensor) -> None:
    """Into the slot, if it fits there, or beside it.  Dispatch must be disabled."""
    inside = fits(p, g._spec)
    set_grad(p, g if inside else None)
    hold(p, None if inside else g)


def stash_assigned_grad(p: DistTensor) -> bool:
    """Lay an assigned gradient aside, to which the backward that runs would not add as on one device; whether it was.

    Not where the backward is to be differentiated: its gradients are new tensors on one device, too.
    """
    given = beside_slot(p).assigned
    if given is None or torch.is_grad_enabled() or not accumulates(p):
        return False
    with disabled():
        if given is not get_grad(p) and given is not beside_slot(p).held:
            return False
        own = given._spec
        if given.requires_grad or (own.layout == p._spec.grad().layout and not marks_of(own).copied):
            return False
        set_grad(p, None)
        hold(p, None)
    _record(p).aside = given
    task = compat.current_graph_task_id()
    asides = _RUNNING.get(task)
    if asides is None:
        asides = _RUNNING[task] = _Asides()
        _engine.queue_callback(asides)
    asides.params.append(p)
    return True


class _Asides:
    """Tensors whose assigned gradients lie aside for one backward, which alone holds it: that may raise."""

    def __init__(self) -> None:
        self.params: list[DistTensor] = []

    def __call__(self) -> None:
        # As they were assigned: the engine's order is not the same on all ranks.
        for p in sorted(self.params, key=lambda p: beside_slot(p).number):
            bring(p)


_RUNNING: weakref.WeakValueDictionary[int, _Asides] = weakref.WeakValueDictionary()  # by graph task


def bring(p: DistTensor) -> None:
    """Add what came to the gradient that was laid aside, which is the gradient again."""
    given = beside_slot(p).aside
    if given is None:
        return
    _record(p).aside = None
    made = p.grad
    with torch.no_grad():
        if made is not None:
            call_enabled(Tensor.add_, (given, made), {})
    with disabled():
        _put(p, given)


def assigned_grad(p: Tensor, g: Tensor) -> bool:
    """Whether a gradient was assigned: somebody else may have its memory."""
    return beside_slot(p).assigned is g


def accumulates(p: Tensor) -> bool:
    """Whether the running backward will add to the gradient of a leaf (``torch.autograd.grad`` does not)."""
    node = torch.autograd.graph.get_gradient_edge(p).node
    try:
        return bool(compat.will_engine_execute_node(node))
    except RuntimeError:
        return False


def _checked(p: DistTensor, value: Any) -> DistTensor:
    """What was assigned, as a distributed tensor that can be the gradient of ``p``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    spec = p._spec
    made = value if isinstance(value, DistTensor) else _part_of(value, spec)
    given = made._spec
    if given.shape != spec.shape:
        raise RuntimeError(
            f"assigned grad has shape {tuple(given.shape)}, its tensor has {tuple(spec.shape)}: they must be equal"
        )
    if given.mesh is not spec.mesh and given.mesh != spec.mesh:
        raise LayoutError(
            f"assigned grad lies on {given.mesh!r}, its tensor on {spec.mesh!r}: a gradient lies where its tensor does"
        )
    return made


def _part_of(value: Tensor, spec: Spec) -> DistTensor:
    """A plain tensor, which has the global values, as the gradient of a tensor: of a split one a copy of its part."""
    made = as_layout_of(value, spec)
    if is_part(made._spec):
        with disabled():
            made = wrap(Tensor.clone(made).detach(), marked(made._spec, Marks(copied=True)))
            base = wrap(value.detach(), Spec(spec.shape, value.dtype, Layout(spec.mesh)))
            base.__dict__["_uncounted"] = True  # its memory is others' too, who may have it by ``.data`` or from NumPy
            remember(Tensor.view, (base, spec.shape), {}, base, [made])
    return made


def guard(p: DistTensor, given: Spec) -> None:
    """See to it that a backward adds to a gradient in the slot as it lies, or converts it before.

    Such as one that was assigned, or was reduced while later backwards bring contributions.

    Dispatch must be disabled.  An undecided leaf may yet turn out to want another layout than it would now.  Parameters
    of sharded modules have theirs laid beside the slot instead (``shard.gradients``).
    """
    if p.__dict__.keys() & {"_guarded", "_sync"} or (
        given.layout == p._spec.grad().layout and not p._spec.undecided_mask and not marks_of(given).copied
    ):
        return
    if not (p.is_floating_point() or p.is_complex()):
        return
    ref = weakref.ref(p)

    def before(grad: Tensor | None) -> None:
        own = ref()
        if own is not None and grad is not None and "_sync" not in own.__dict__ and not stash_assigned_grad(own):
            _convert_slot(own)

    thawed = p.requires_grad
    p.requires_grad_(True)  # a frozen tensor may be thawed before the next backward
    Tensor.register_hook(p, before)
    p.requires_grad_(thawed)
    p.__dict__["_guarded"] = True


def _convert_slot(p: DistTensor) -> None:
    """Give the gradient in the slot the layout of the backward's."""
    found, target = raw_grad(p), p._spec.grad()
    source: Spec | None = found.__dict__.get("_spec") if found is not None else None
    if found is None or source is None or source.layout == target.layout:
        return
    with disabled():  # with history, where this backward is to be differentiated
        local = _converted(found, source, target)
        set_grad(p, wrap(local.clone() if local is found else local, target))


def _delete(self: DistTensor) -> None:
    _set(self, None)


_DOC = "The gradient so far, in the layout that the backward gave it (Partial before it is synchronised)."
DistTensor.grad = property(_get, _set, _delete, _DOC)  # type: ignore[assignment]

__all__ = [
    "GRADIENT",
    "LentGradient",
    "PendingGradient",
    "accumulates",
    "assigned_grad",
    "beside_slot",
    "bring",
    "guard",
    "held",
    "hold",
    "in_slot",
    "in_spec",
    "stash_assigned_grad",
]
