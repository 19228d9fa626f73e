"""Types of leaves: undecided tensors get theirs by their first use, together with what was computed from them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..layout import Replicate, Spec, marked, marks_of, widest_accumulate_dtype

Tensor = torch.Tensor
_LOCAL: Any = Tensor  # properties of local tensors
_base_of, _is_leaf = _LOCAL._base.__get__, _LOCAL.is_leaf.__get__


class _TypeGroup:
    """Tensors whose replicated axes must become of one type: leaves and what was computed from them so far.

    Members are weak: a tensor that nobody can name any more needs no type.
    """

    def __init__(self) -> None:
        self.members: dict[int, weakref.ref[Tensor | SpecHandle]] = {}

    def add(self, t: Tensor | SpecHandle) -> None:
        key, members = id(t), self.members
        members[key] = weakref.ref(t, lambda _: members.pop(key, None))
        t.__dict__["_linked"] = self

    def alive(self) -> list[Tensor | SpecHandle]:
        return [t for t in (r() for r in list(self.members.values())) if t is not None]


def link(tensors: Sequence[Tensor | SpecHandle]) -> None:
    """Undecided tensors that one op connects get their type together."""
    linked: _TypeGroup | None = None
    for t in tensors:
        space = getattr(t, "__dict__", {})
        spec = space.get("_spec")
        if spec is None or not spec.undecided_mask or not t.requires_grad:
            continue
        own: _TypeGroup | None = space.get("_linked")
        if linked is None:
            linked = own or _TypeGroup()
        if own is None:
            linked.add(t)
        elif own is not linked:
            for m in own.alive():
                linked.add(m)


class SpecHandle:
    """The spec of a tensor with the types that it gets, also after its last name is gone: it is linked in its place.

    For what waits for a gradient or a second run, and must not keep the tensor alive.
    """

    requires_grad = True

    def __init__(self, t: Tensor) -> None:
        self.__dict__["_spec"] = t.__dict__["_spec"]
        link([t, self])

    @property
    def spec(self) -> Spec:
        """The spec, as it was, with the types that are known by now."""
        told: Spec = self.__dict__["_spec"]
        return told


def gradient_types(t: Tensor) -> Callable[[], Spec | None]:
    """What says the spec of a tensor with its types when its gradient comes; it does not hold the tensor.

    A leaf keeps its own. Of another value the last name may be gone before a use of what was computed from it decides.
    """
    space = t.__dict__
    spec: Spec | None = space.get("_spec")
    standin = (
        SpecHandle(t) if spec is not None and spec.undecided_mask and t.requires_grad and not _is_leaf(t) else None
    )

    def told() -> Spec | None:
        now: Spec | None = space.get("_spec")
        return standin.spec if standin is not None and now is not None and now.undecided_mask else now

    return told


def any_linked(args: Sequence[Any]) -> bool:
    """Whether one of the arguments gets its types together with others."""
    return True in ["_linked" in a.__dict__ for a in args if isinstance(a, Tensor)]


def should_reduce_at_use(t: Tensor, spec: Spec) -> bool:
    """Whether an undecided value should be reduced where it is used, not at the leaves that it was computed from.

    Reducing at the leaves is shared by all uses and bucketed; it is dearer where the leaves are larger than the value.
    """
    linked: _TypeGroup | None = t.__dict__.get("_linked")
    if _is_leaf(t) or linked is None or not spec.grad_partial_mask & t.__dict__["_spec"].undecided_mask:
        return False
    leaves = sum(m.__dict__["_spec"].shape.numel() for m in linked.alive() if isinstance(m, Tensor) and _is_leaf(m))
    return leaves > spec.shape.numel()


def resolve_types(t: Tensor, spec: Spec, by: str = "") -> None:
    """Give an undecided tensor its types, and the same ones to the tensors linked to it.

    ``by``: the use that makes their gradients Partial, in words.
    """
    space = getattr(t, "__dict__", {})
    old = space.get("_spec")
    if old is None or old is spec:
        return
    linked: _TypeGroup | None = space.get("_linked")
    decided = old.undecided_mask & ~spec.undecided_mask
    for m in linked.alive() if linked is not None else [t]:
        now: Spec = m.__dict__["_spec"]
        marks, mine = marks_of(now).after_write(), decided & now.undecided_mask
        now = now.with_(
            grad_partial_mask=now.grad_partial_mask | (spec.grad_partial_mask & mine),
            undecided_mask=now.undecided_mask & ~mine,
        )
        if mine and not getattr(m, "_is_param", False):  # what parameters' are summed in their precision says
            now = now.with_(accumulate_dtype=widest_accumulate_dtype((now, spec)))
        m.__dict__["_spec"] = marked(now, marks)
        if by and spec.grad_partial_mask & mine:
            m.__dict__.setdefault("_since", by)
        if not now.undecided_mask:
            m.__dict__.pop("_linked", None)


def resolve_from_base(tensors: Sequence[Tensor]) -> bool:
    """Give undecided views the types of the tensors whose memory they are; whether that told anything new.

    One memory has one history, so one type: a view made before the first write with a gradient knows nothing of it.
    """
    return True in [_follow_root(t) for t in tensors]


def _follow_root(t: Tensor) -> bool:
    spec: Spec | None = t.__dict__.get("_spec")
    if spec is None or not spec.undecided_mask or not t.requires_grad or (base := _base_of(t)) is None:
        return False
    root: Spec | None = base.__dict__.get("_spec")
    if root is None:
        return False
    link([base, t])
    told = spec.undecided_mask & ~root.undecided_mask & _replicated(root)
    if not told:
        return False
    resolve_types(
        t,
        spec.with_(
            grad_partial_mask=spec.grad_partial_mask | (root.grad_partial_mask & told),
            undecided_mask=spec.undecided_mask & ~told,
        ),
    )
    return True


def propagate_type_to_base(t: Tensor, tensors: Sequence[Tensor]) -> None:
    """After a write to ``t``: the memory that it is a view of has its types, and stays linked to what was written."""
    spec: Spec = t.__dict__["_spec"]
    base = _base_of(t)
    root: Tensor = base if base is not None and "_spec" in base.__dict__ else t
    old: Spec = root.__dict__["_spec"]
    if root is not t and old.mesh == spec.mesh:
        told = old.undecided_mask & ~spec.undecided_mask & _replicated(spec)
        now = old.with_(
            grad_partial_mask=old.grad_partial_mask | (spec.grad_partial_mask & told),
            undecided_mask=old.undecided_mask & ~told,
        )
        root.__dict__["_spec"] = marked(now, marks_of(old).after_write())
    if spec.undecided_mask:
        link([*tensors, t, root])


def _replicated(spec: Spec) -> int:
    return sum(1 << a for a, p in enumerate(spec.layout.placements) if isinstance(p, Replicate))
