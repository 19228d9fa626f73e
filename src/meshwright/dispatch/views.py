"""Views that are copies on the mesh: reading one sees what was written to its base, writing to one reaches its base.

On one device a view shares the memory of its base.  Where making it needs communication it is a copy here, and keeps a
:class:`View` of where it came from.  Version counters, those of autograd, tell that a base was written since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from .. import compat
from ..errors import DispatchError
from ..layout import MarkedSpec, marked, marks_of
from ..local_tensor import Sharing, as_plain, is_dense, same_storage, shared_memory, storage_of, version_of
from ..operators import Internal
from ..ranks import runtime
from ..resharding import executor, planner
from .binding import Args, Kwargs
from .calls import disabled, op_name, saving, tensors_in
from .leaves import propagate_type_to_base, resolve_types
from .plans import CallPlan, written_spec
from .results import on_meta

Tensor = torch.Tensor
_MOST_WRITES = 4096  # addresses to count by
Call = Callable[[Any, Args, Kwargs], Any]


@dataclass(slots=True, eq=False, weakref_slot=True)
class View:
    """How a copy was made: output ``index`` of ``func(*args, **kwargs)``, whose first tensor is ``base``.

    ``version``: of the base, when the copy last held what the base holds; None where it does not count its writes, of
    which ``counted`` is then what it does count: those that have a history.
    ``alias``: it is the memory of the base, which is a copy itself.  ``recorded``: made with gradients on.
    ``detached``: writes to it have no history.  ``writing``: what is written is on its way to the base.
    ``pieces``: all that the call made, itself included: parts of the base that do not overlap.
    ``apart``: a copy on this rank alone, maybe, as its part does not lie in memory as a view needs.  To bring writes to
    its base could take communication, which the other ranks would know nothing of: they are refused.
    ``rewritten``: it was written to with gradients on, and the base has its history from it: the next use of the copy
    makes it anew, so that its gradients flow through the base, as they do on one device.
    ``turned``: how often the base was turned in place (``t_``, ``unsqueeze_``) when the copy was made: afterwards the
    call makes another view of it.
    """

    base: Tensor
    func: Any
    args: Args
    kwargs: Kwargs
    index: int
    version: Any
    alias: bool
    recorded: bool
    counted: int = 0
    detached: bool = False
    writing: bool = False
    pieces: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    apart: bool = False
    turned: int = 0
    rewritten: bool = False


def view_of(t: Tensor) -> View | None:
    """Where a copy came from; None for a tensor that is no copy."""
    space = getattr(t, "__dict__", {})
    spec = space.get("_spec")
    return space.get("_view") if type(spec) is MarkedSpec and spec.marks.copied else None


def remember(
    func: Any, args: Args, kwargs: Kwargs, base: Tensor, made: Sequence[Tensor], *, apart: bool = False
) -> None:
    """Note of each of these copies how it was made.  Must run with dispatch disabled."""
    pieces: weakref.WeakSet[Any] = weakref.WeakSet()
    for i, t in enumerate(made):
        if t is base:
            continue
        alias = view_of(base) is not None and same_storage(t, base)
        view = View(
            base, func, args, kwargs, i, _version(base), alias, torch.is_grad_enabled(),
            counted=_counted(base),
            pieces=pieces if len(made) > 1 else weakref.WeakSet(), apart=apart, turned=base.__dict__.get("_turned", 0),
        )  # fmt: skip
        view.pieces.add(view)
        t.__dict__["_view"] = view


@dataclass(slots=True)
class PieceSource:
    """What pieces, or an image as large as it, were computed from, by ``func(*args, **kwargs)``.

    ``base``: gives it, or None where it is gone: an image alone does not keep it.  Among the arguments ``BASE`` stands
    for it.  ``whole``: them all, computed from a base that is whole on these axes.  ``mark``: tells it from others, on
    the base.
    """

    base: Callable[[], Tensor | None]
    func: Any
    args: Args
    kwargs: Kwargs
    version: Any
    several: bool
    whole: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    mark: object = field(default_factory=object)


BASE = "base"


def remember_pieces(
    func: Any, args: Args, kwargs: Kwargs, base: Tensor, made: Sequence[Tensor], *, image: bool = False
) -> None:
    """Note what these pieces, which may be needed whole, were cut from.  Must run with dispatch disabled.

    Args:
        image: what was made is as large as the base, and need not be a view of it.
    """
    version = _version(base)
    if version is not None:
        held: Callable[[], Tensor | None] = weakref.ref(base) if image else lambda: base
        source = PieceSource(held, func, *with_base(base, BASE, args, kwargs), version, len(made) > 1)
        for i, t in enumerate(made):
            if t is not base:
                t.__dict__["_piece"] = (source, i, _version(t))


def cut_from(t: Tensor) -> tuple[PieceSource, Tensor, int] | None:
    """The source of a piece that is needed whole, with its base, where it pays to make that whole: once, for all its
    pieces and images.

    It does for the pieces of one call, from the second piece or image on, and where the base is known whole.  Not for a
    parameter, of which a loop over its rows may take few (and where nothing is kept for the next one).
    """
    source, i, version = t.__dict__["_piece"]
    base = source.base()
    if base is None or source.version != _version(base) or version != _version(t):
        return None
    spec = base.__dict__["_spec"]
    if not spec.layout.partial and ((base.is_leaf and base.requires_grad) or getattr(base, "_is_param", False)):
        return None
    first = base.__dict__.setdefault("_asked", source.mark)
    pays = source.several or first is not source.mark or marks_of(spec).known is not None
    return (source, base, i) if pays else None


def remember_detached(base: Tensor, made: Tensor) -> None:
    """``made`` is the memory of ``base``, a copy, without its history."""
    if view_of(base) is not None:
        made.__dict__["_view"] = View(base, None, (), {}, 0, None, True, False, detached=True)


def _version(t: Tensor) -> Any:
    """Tells whether a tensor was written to since; None where nobody knows.  Must run with dispatch disabled."""
    if (Sharing.ever and shared_memory(t) is not None) or "_uncounted" in t.__dict__:
        return None
    if t.is_inference():
        writes = runtime.RT.writes
        return writes.get(None, 0), writes.get(storage_of(t), 0)
    return version_of(t) if Sharing.counted else t._version


def _counted(t: Tensor) -> int:
    """How many writes to a tensor autograd has counted."""
    return 0 if t.is_inference() else t._version


def count_write(t: Tensor | None) -> None:
    """Note a write under inference mode, in which tensors do not count theirs; None: to any memory."""
    writes = runtime.RT.writes
    with disabled():
        at = None if t is None else storage_of(t)
    if len(writes) > _MOST_WRITES:
        at, count = None, writes.get(None, 0)
        writes.clear()
        writes[None] = count
    writes[at] = writes.get(at, 0) + 1


def before(plan: CallPlan, tensors: Sequence[Tensor], call: Call) -> None:
    """Bring the copies among the arguments of a call up to date, and refuse writes that autograd refuses."""
    target = tensors[0] if plan.op.inplace else None
    for t in tensors:
        refresh(t, call, target)
    if plan.op.inplace:
        refuse_leaf(tensors[0])
        if plan.op.turns and (view := view_of(tensors[0])) is not None:
            _refuse_turned(view, plan.op.name.removesuffix("_"))


def _refuse_turned(view: View, name: str) -> None:
    """Raises DispatchError for an op that changes in place how a copy lies in memory, and not its values."""
    raise DispatchError(
        f"{name}_ of a view of {view.base.__dict__['_spec']!r} that is a copy here, as making it needed communication: "
        f"what is written to it afterwards would not reach its base. Say y = y.{name}(...)"
    )


def refuse_leaf(t: Tensor) -> None:
    """Raises RuntimeError, as PyTorch does, where a write would change a leaf that requires a gradient."""
    view, recorded = view_of(t), torch.is_grad_enabled()
    while view is not None:
        _refuse_unknown(view)
        _refuse_overlapping(view)
        recorded = recorded and not view.detached
        if recorded and view.base.requires_grad and view.base.is_leaf:
            raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
        view = view_of(view.base)


_PERHAPS = {"reshape", "flatten", "ravel"}  # views or copies, as the strides of the whole would have it


def _refuse_unknown(view: View) -> None:
    """Raises DispatchError where nobody can say whether a write to a copy, or to its base, is to reach the other."""
    name, spec = op_name(view.func), view.base.__dict__["_spec"]
    if view.turned != view.base.__dict__.get("_turned", 0):
        raise DispatchError(
            f"{name}: cannot write, because the base was transposed in place (t_, unsqueeze_, ...) after {name} copied "
            f"it. Use x = x.t(), or call {name} later (the base is {spec!r} now)."
        )
    if view.apart:
        raise DispatchError(
            f"{name} of {spec!r} is a copy on this rank, whose part is not contiguous in memory, and was then "
            f"written to, or its base was: say .contiguous() in front of .{name}(...) and write to that, or "
            f".{name}(...).clone()"
        )
    if name in _PERHAPS:
        raise DispatchError(
            f"{name} of {spec!r} needed communication, and was then written to, or its base was: whether {name} makes "
            f"a view is not known here. Say .view(...), which does, or .{name}(...).clone()"
        )


_REPEATING = {"unfold", "expand", "expand_as", "broadcast_to", "broadcast_tensors"}  # one element in several places


def _refuse_overlapping(view: View) -> None:
    """Raises DispatchError for a write to a copy in which an element of the base is in several places.

    The copy has them apart: those that were written would say one value of the element, the others the old one.
    """
    name = op_name(view.func)
    if not view.alias and name in _REPEATING and _overlaps(_on_meta(view)[1]):
        raise DispatchError(
            f"{name} of {view.base.__dict__['_spec']!r} needed communication and has elements of it in several places: "
            f"what is written to it cannot reach its base. Write to the base, or say .{name}(...).clone()"
        )


def _overlaps(t: Tensor) -> bool:
    """Whether an element in memory is in several places of a view that a call makes of a contiguous tensor."""
    return not is_dense([max(n, 1) for n in t.shape], t.stride(), gaps=True)


def refresh(t: Tensor, call: Call, target: Tensor | None = None) -> None:
    """Make a copy anew where its base was written since.

    ``target``: of the write that ``t`` is for, if any, from which its base gets its history anew in any case.
    """
    view = view_of(t)
    if view is None or view.writing:
        return
    refresh(view.base, call, target)
    now = _version(view.base)
    if view.alias:
        return
    if now is not None and now == view.version:
        if view.rewritten and torch.is_grad_enabled() and t is not target and view.base is not target:
            _take_history(t, view, call)
        return
    view.rewritten = False
    _refuse_unknown(view)
    with torch.set_grad_enabled(view.recorded and not (t.is_leaf and t.requires_grad)), _unseen():
        made = tensors_in(call(view.func, view.args, view.kwargs))[view.index]
        with disabled():
            # Where nobody counts writes to the base, it is made anew at each use; but what autograd has saved of it is
            # not to count as written to where it was not.
            _replace(t, made, perhaps=now is None and view.counted == _counted(view.base))
            view.counted = _counted(view.base)
    view.version = now


def _take_history(t: Tensor, view: View, call: Call) -> None:
    """Have the gradients of a copy flow through its base, which has its value from the copy."""
    view.rewritten = False
    with _unseen():
        made = tensors_in(call(view.func, view.args, view.kwargs))[view.index]
        # The values are those that autograd may have saved of the copy.
        with disabled(), compat.preserve_version_counter(t):
            _replace(t, made)
            t.__dict__.pop("_memo", None)


@contextmanager
def _unseen() -> Iterator[None]:
    """A checkpoint finds the copy up to date when it runs its block again: it sees no run bring it there."""
    if not saving():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_same, _same), compat.outside_modes():
        yield


def _same(t: Tensor) -> Tensor:
    return t


class SavedCopies:
    """Copies that are kept for a backward: on one device autograd counts writes to what they would be views of."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._views = [view for t in tensors if (view := view_of(t)) is not None]

    def check(self) -> None:
        """Raises RuntimeError, as PyTorch does, where the base of one was written since."""
        for view in self._views:
            if _stale(view):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an input of a checkpoint is {op_name(view.func)} of {view.base.__dict__['_spec']!r}, which was "
                    "written to after the checkpointed block had run"
                )


def _stale(view: View | None) -> bool:
    """Whether a base was written since a copy, or what it was copied from, was brought up to date."""
    if view is None or view.writing:
        return False
    with disabled():
        now = _version(view.base)
    return _stale(view_of(view.base)) or not (view.alias or (now is not None and now == view.version))


def _replace(t: Tensor, made: Tensor, perhaps: bool = False) -> None:
    """Give ``t`` the value, and the history, of ``made``.

    ``perhaps``: it has that history, and maybe that value: nothing is written then on a rank whose part is the same.
    """
    if made.requires_grad:
        resolve_types(made, made.__dict__["_spec"].decided())
    source = made.__dict__["_spec"]
    old = t.__dict__["_spec"]
    spec = written_spec(old, source)
    local = executor.apply(planner.plan(source, spec.with_(dtype=source.dtype)).steps, made)
    with as_plain(t, local):
        if not (perhaps and torch.equal(t, local)):
            t.copy_(local)
    if torch.is_grad_enabled() and t.requires_grad:
        t.__dict__["_spec"] = marked(spec, marks_of(old).after_write())
        propagate_type_to_base(t, [t])


def write_through(t: Tensor, call: Call) -> None:
    """Bring what was written to a copy to its base, and from there on."""
    view = view_of(t)
    if view is None:
        return
    with torch.set_grad_enabled(torch.is_grad_enabled() and not view.detached):
        if view.alias:
            write_through(view.base, call)
            return
        _refuse_overlapping(view)
        view.writing, version = True, _version(view.base)
        try:
            index = _slices(view, t)
            if index is not None:
                call(Tensor.__setitem__, (view.base, index, t), {})
            else:
                args, kwargs = with_base(view.base, BASE, view.args, view.kwargs)
                call(_writer(op_name(view.func)), (view.base, t, view.func, args, kwargs, view.index), {})
        finally:
            view.writing = False
        view.rewritten = torch.is_grad_enabled() and t.requires_grad and not view.base.is_leaf
        # What was written to one piece left the others as they are: to make them anew would be a write to them.
        now = _version(view.base)
        for piece in [p for p in view.pieces if p is view or p.version == version]:
            piece.version = now


def with_base(old: Any, new: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Arguments of a view with its base replaced."""
    return tuple(new if a is old else a for a in args), {k: new if a is old else a for k, a in kwargs.items()}


@lru_cache(maxsize=256)
def _writer(name: str) -> Internal:
    """An op in place that writes a value to a view of a whole tensor."""

    def write(base: Tensor, value: Tensor, func: Any, args: Args, kwargs: Kwargs, i: int) -> Tensor:
        args, kwargs = with_base(BASE, base, args, kwargs)
        tensors_in(func(*args, **kwargs))[i].copy_(value)
        return base

    write.__name__ = f"write_through_{name}_"
    return Internal(write)


def _on_meta(view: View) -> tuple[Tensor, Tensor]:
    """The base and the view, of global shapes and without values."""
    meta = torch.empty(view.base.__dict__["_spec"].shape, device="meta")
    device = view.base.__dict__["_spec"].mesh.device
    with disabled():
        func, args, kwargs = on_meta(view.func, *with_base(view.base, meta, view.args, view.kwargs), device)
        return meta, tensors_in(func(*args, **kwargs))[view.index]


def _slices(view: View, t: Tensor) -> tuple[Any, ...] | None:
    """The index with which ``base[index]`` is the view, read off its strides; None where no index with slices is."""
    base = view.base.__dict__["_spec"]
    meta, made = _on_meta(view)
    starts, left = [], made.storage_offset()
    for n, stride in zip(base.shape, meta.stride(), strict=True):
        starts.append(left // stride if n > 1 else 0)
        left -= starts[-1] * stride
    index: list[Any] = []
    at = 0  # the next dim of the base
    for size, stride in zip(made.shape, made.stride(), strict=True):
        if size == 1:
            index.append(None)
            continue
        d = next((d for d in range(at, base.ndim) if base.shape[d] > 1 and stride >= meta.stride(d)), None)
        if d is None or stride % meta.stride(d) or not size:
            return None
        step = stride // meta.stride(d)
        if starts[d] + (size - 1) * step >= base.shape[d]:
            return None
        index += [*starts[at:d], slice(starts[d], starts[d] + (size - 1) * step + 1, step)]
        at = d + 1
    return (*index, *starts[at:])
