"""One-step conversions between layouts, and their transposes.

A *step* changes what one mesh axis (or several flattened ones) does to a tensor and keeps its value.  Its
backward is the step between the dual types, the other way round: with ``Spec.grad`` as the dual (``Shard`` is
its own, invariant ``Replicate`` is its own, reduced ``Replicate`` and ``Partial`` are each other's), the
transpose of ``A -> B`` is ``B.grad() -> A.grad()``.  The whole table of the design page follows from that line;
the idea is Xu et al., GSPMD, and JAX's varying/unreduced types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from . import collective, runtime
from .errors import ConversionError
from .layout import Partial, Replicate, Shard, Spec, chunk_bounds

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One conversion: ``kind`` over ``axes`` from ``src`` to ``dst``.

    Kinds: ``retype`` (no data changes), ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``,
    ``slice`` (own part of a replicated value), ``keep_one`` (value on the first rank, zero elsewhere),
    ``pad`` (own shard with zeros around it).
    """

    kind: str
    axes: tuple[int, ...]
    src: Spec
    dst: Spec

    @property
    def moves(self) -> bool:
        """Whether data crosses between ranks."""
        return self.kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")

    def transpose(self) -> Step:
        """The step that the backward of this one runs."""
        return _transpose(self)

    def __repr__(self) -> str:
        axes = ",".join(self.src.mesh.axes[a] for a in self.axes)
        return f"{self.kind}[{axes}] {self.src.layout!r} -> {self.dst.layout!r}"


@lru_cache(maxsize=4096)
def _transpose(step: Step) -> Step:
    return between(step.dst.grad(), step.src.grad(), step.axes)


def between(src: Spec, dst: Spec, axes: tuple[int, ...]) -> Step:
    """The step from ``src`` to ``dst``, which differ on ``axes`` only.  Raises ConversionError if there is none."""
    kinds = {_kind(src, dst, a) for a in axes}
    if len(kinds) > 1:
        kinds.discard("retype")
    if len(kinds) != 1:
        raise ConversionError(f"no single step leads from {src!r} to {dst!r}: it would mix {sorted(kinds)}")
    return Step(kinds.pop(), axes, src, dst)


def _kind(src: Spec, dst: Spec, axis: int) -> str:
    a, b = src.layout.placements[axis], dst.layout.placements[axis]
    if isinstance(a, Replicate):
        if isinstance(b, Replicate):
            return "retype"
        if isinstance(b, Shard):
            return "slice"
        return "keep_one" if b.op in ("sum", "avg") else "retype"
    if isinstance(a, Partial):
        if isinstance(b, Replicate):
            return "all_reduce"
        if isinstance(b, Shard):
            return "reduce_scatter"
        if {a.op, b.op} <= {"sum", "avg"}:
            return "retype"
        raise ConversionError(f"a Partial({a.op!r}) cannot become a Partial({b.op!r}) without being reduced")
    if isinstance(b, Shard):
        return "all_to_all"
    if isinstance(b, Replicate):
        return "all_gather"
    if b.op in ("sum", "avg"):
        return "pad"
    raise ConversionError(f"a shard cannot become a Partial({b.op!r}) in one step")


def run(step: Step, local: Tensor) -> Tensor:
    """Execute one step on this rank's local tensor (no autograd)."""
    ready: Runner | None = runtime.RT.memo.get(step)
    if ready is None:
        ready = runtime.RT.memo[step] = _prepare(step)
    if runtime.RT.check:
        return _checked(step, local, ready)
    return ready(local)


def _checked(step: Step, local: Tensor, ready: Runner) -> Tensor:
    """In check mode: ranks that hold the same part by the step's source layout must hold the same values."""
    layout = step.src.layout
    same = tuple(a for a, p in enumerate(layout.placements) if isinstance(p, Replicate) and step.src.mesh.sizes[a] > 1)
    if same and not collective.recording():
        collective.same_values(local, repr(layout), collective.group(step.src.mesh, same))
    if step.moves:
        runtime.RT.doing = f"{layout!r} -> {step.dst.layout!r}"
    return ready(local)


Runner = Callable[[Tensor], Tensor]


def _prepare(step: Step) -> Runner:
    """What the step does on this rank, with groups and sizes looked up once."""
    ready = _PREPARE[step.kind](step, step.src.mesh.coordinate(runtime.RT.rank))
    scale = _scale(step)
    return ready if scale == 1.0 else lambda t: ready(t) * scale


def _scale(step: Step) -> float:
    """``avg`` is ``sum`` x 1/n: what the data must be multiplied by around a plain sum."""
    scale = 1.0
    for a in step.axes:
        n = step.src.mesh.sizes[a]
        p, q = step.src.layout.placements[a], step.dst.layout.placements[a]
        if isinstance(p, Partial) and p.op == "avg":
            scale /= n
        if isinstance(q, Partial) and q.op == "avg":
            scale *= n
    return scale


def _reduce_op(step: Step) -> str:
    p = step.src.layout.placements[step.axes[0]]
    assert isinstance(p, Partial)
    return "sum" if p.op == "avg" else p.op


def _dim(spec: Spec, axis: int) -> int:
    p = spec.layout.placements[axis]
    assert isinstance(p, Shard)
    return p.dim


def _lengths(spec: Spec, axis: int, here: tuple[int, ...]) -> list[int]:
    """Length on the dim that ``axis`` splits, for each rank along it."""
    d = _dim(spec, axis)
    n = spec.mesh.sizes[axis]
    return [spec.local_shape((*here[:axis], i, *here[axis + 1 :]))[d] for i in range(n)]


def _all_reduce(step: Step, here: tuple[int, ...]) -> Runner:
    op, group = _reduce_op(step), collective.group(step.src.mesh, step.axes)
    return lambda t: collective.all_reduce(t, op, group)


def _reduce_scatter(step: Step, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    op, group = _reduce_op(step), collective.group(step.src.mesh, step.axes)
    d, sizes = _dim(step.dst, axis), _lengths(step.dst, axis, here)
    return lambda t: collective.reduce_scatter(t, d, sizes, op, group)


def _all_gather(step: Step, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    group = collective.group(step.src.mesh, step.axes)
    d, sizes = _dim(step.src, axis), _lengths(step.src, axis, here)
    return lambda t: collective.all_gather(t, d, sizes, group)


def _all_to_all(step: Step, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    group = collective.group(step.src.mesh, step.axes)
    split, concat = _dim(step.dst, axis), _dim(step.src, axis)
    give, take = _lengths(step.dst, axis, here), _lengths(step.src, axis, here)
    return lambda t: collective.all_to_all(t, split, give, concat, take, group)


def _slice(step: Step, here: tuple[int, ...]) -> Runner:
    def cut(t: Tensor) -> Tensor:
        for a in step.axes:
            d = _dim(step.dst, a)
            lo, hi = chunk_bounds(t.shape[d], step.src.mesh.sizes[a], here[a])
            t = t.narrow(d, lo, hi - lo)
        # Some kernels want dense inputs and gradients, and a view would keep the whole tensor alive.
        return t if d == 0 else t.contiguous()

    return cut


def _keep_one(step: Step, here: tuple[int, ...]) -> Runner:
    first = all(here[a] == 0 for a in step.axes)
    if collective.recording():
        return lambda t: collective.keep_one(t, first)
    return _same if first else torch.zeros_like


def _pad(step: Step, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    d, shape = _dim(step.src, axis), step.dst.local_shape(here)
    lo, hi = chunk_bounds(shape[d], step.src.mesh.sizes[axis], here[axis])

    # constant_pad_nd takes (before, after) of the last dim first.
    around = [0, 0] * (len(shape) - d - 1) + [lo, shape[d] - hi]

    def pad(t: Tensor) -> Tensor:
        return torch.constant_pad_nd(t, around)

    return pad


def _retype(step: Step, here: tuple[int, ...]) -> Runner:
    return _same


def _same(t: Tensor) -> Tensor:
    return t


_PREPARE: dict[str, Callable[[Step, tuple[int, ...]], Runner]] = {
    "retype": _retype,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "keep_one": _keep_one,
    "pad": _pad,
}


def selects(step: Step) -> bool:
    """Whether the step reduces by picking values (max, min): its gradient depends on the data."""
    p = step.src.layout.placements[step.axes[0]]
    return step.kind in ("all_reduce", "reduce_scatter") and isinstance(p, Partial) and p.op in ("max", "min")


def apply(steps: tuple[Step, ...], local: Tensor) -> Tensor:
    """Execute steps in order; differentiable, with the transposed steps as the backward."""
    if not steps:
        return local
    if getattr(type(local), "class_set", False):
        return _as_plain(steps, local)
    if torch.is_grad_enabled():
        if local.requires_grad:
            parts = runtime.RT.memo.get(steps)
            if parts is None:
                parts = runtime.RT.memo[steps] = _runs(tuple(s for s in steps if not _nothing_here(s)))
            for part, function in parts:
                local = function.apply(local, part)
            return local
        with torch.no_grad():
            for step in steps:
                local = run(step, local)
        return local
    for step in steps:
        local = run(step, local)
    return local


def _as_plain(steps: tuple[Step, ...], given: Tensor) -> Tensor:
    """A subclass answers with global shapes: while the steps run, it is the plain local tensor that it is."""
    kind = type(given)
    given.__class__ = Tensor
    try:
        return apply(steps, given)
    finally:
        given.__class__ = kind


def _nothing_here(step: Step) -> bool:
    """Whether the step and its transpose leave this rank's data alone: no autograd node is needed then."""
    back = step.transpose()
    if step.moves or back.moves or _scale(step) != 1.0:
        return False
    here = step.src.mesh.coordinate(runtime.RT.rank)
    return _PREPARE[step.kind](step, here) is _same and _PREPARE[back.kind](back, here) is _same


@lru_cache(maxsize=4096)
def _runs(steps: tuple[Step, ...]) -> tuple[tuple[tuple[Step, ...], Any], ...]:
    """Linear steps that follow each other share one autograd node; selecting ones have their own."""
    parts: list[tuple[Step, ...]] = []
    for step in steps:
        if parts and not selects(step) and not selects(parts[-1][0]):
            parts[-1] = (*parts[-1], step)
        else:
            parts.append((step,))
    return tuple((part, _Select if selects(part[0]) else _Convert) for part in parts)


@lru_cache(maxsize=4096)
def transpose(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps that the backward of ``steps`` runs, in its order.

    Each is the transpose of one forward step, but steps over several axes of one kind may be one.
    """
    return tuple(step.transpose() for step in reversed(steps))


@lru_cache(maxsize=4096)
def _scales(steps: tuple[Step, ...]) -> float:
    return math.prod(_scale(step) for step in steps)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: tuple[Step, ...]) -> Tensor:
        ctx.steps, ctx.cause = steps, runtime.RT.cause
        out = local
        for step in steps:
            out = run(step, out)
        # .data and not a view: a view would tie the result's version counter and base to the input.
        return local.data if out is local else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _back(ctx.steps, grad, ctx.cause), None


def _back(steps: tuple[Step, ...], grad: Tensor, cause: Any) -> Tensor:
    """The transposed steps, in the name of the record that the forward was made for."""
    scale = _scales(steps)
    back = transpose(steps)
    if cause is not None:
        runtime.RT.cause = cause.transposed(back)
    made = apply(back, grad if scale == 1.0 else grad * scale)
    if cause is not None:
        runtime.RT.cause = None
    # A slice is a view of a cotangent that others may hold: a leaf would take it for its own and add to it in place.
    return made.clone() if made is not grad and _only_slices(back) else made


@lru_cache(maxsize=4096)
def _only_slices(steps: tuple[Step, ...]) -> bool:
    return all(s.kind in ("slice", "retype") for s in steps) and any(s.kind == "slice" for s in steps)


def apply_known(steps: tuple[Step, ...], local: Tensor, value: Tensor) -> Tensor:
    """What ``apply(steps, local)`` would give, where the data (``value``) is there already; moves nothing."""
    made: Tensor = _Known.apply(local, value, steps)
    return made


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, steps: tuple[Step, ...]) -> Tensor:
        ctx.steps, ctx.cause = steps, runtime.RT.cause
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _back(ctx.steps, grad, ctx.cause), None, None


class _Select(torch.autograd.Function):
    """Reduction by max or min: the gradient goes to the ranks that hold the extremum, in equal shares."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: tuple[Step, ...]) -> Tensor:
        (step,) = steps
        whole = _reduced_everywhere(step)
        out = run(whole, local)
        held = local == out
        ties = collective.all_reduce(held.to(local.dtype), "sum", collective.group(step.src.mesh, step.axes))
        ctx.steps, ctx.cause = steps, runtime.RT.cause
        ctx.save_for_backward(held / ties.clamp(min=1))
        if step.kind == "reduce_scatter":
            out = _slice(step, step.src.mesh.coordinate(runtime.RT.rank))(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (step,) = ctx.steps
        (share,) = ctx.saved_tensors
        # The share is a constant of the forward, so the transpose is that of a sum, times the share.
        back = (_as_sum(step).transpose(),)
        if ctx.cause is not None:
            runtime.RT.cause = ctx.cause.transposed(back)
        made = apply(back, grad) * share
        runtime.RT.cause = None
        return made, None


@lru_cache(maxsize=1024)
def _reduced_everywhere(step: Step) -> Step:
    placements = list(step.src.layout.placements)
    for a in step.axes:
        placements[a] = Replicate()
    layout = type(step.src.layout)(step.src.mesh, placements, order=dict(step.src.layout.order))
    return Step("all_reduce", step.axes, step.src, step.src.with_(layout=layout))


@lru_cache(maxsize=1024)
def _as_sum(step: Step) -> Step:
    placements = [Partial() if a in step.axes else p for a, p in enumerate(step.src.layout.placements)]
    layout = type(step.src.layout)(step.src.mesh, placements, order=dict(step.src.layout.order))
    return Step(step.kind, step.axes, step.src.with_(layout=layout), step.dst)
