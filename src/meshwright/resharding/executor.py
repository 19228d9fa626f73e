"""One-step conversions between layouts, run: on values, and differentiably.

A *step* changes what one mesh axis (or several flattened ones) does to a tensor and keeps its value.  Its backward is
the step between the dual types, the other way round (see ``conversions``).

A Partial that is reduced otherwise than by a sum has parts with different shares of the gradient: those shares sum
up to it, so its dual is ``Partial(sum)``.  What the share of a part is, ``_Weighted`` alone knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import collective
from ..compat import disabled_torch_function_impl as call_disabled
from ..compat import function_base, peek_interpreter_stack
from ..errors import ConversionError, DispatchError
from ..layout import At, Partial, Replicate, Shard, Spec, neutral, own_bounds, own_ranges, wire_name
from ..local_tensor import as_plain, distributed
from ..ranks import runtime
from .conversions import ConversionStep, lowered, op_of, replicated, transpose, weighted
from .copies import TO_DEVICE, TO_HOST

Tensor = torch.Tensor
_LOCAL: Any = Tensor  # properties of local tensors, to be called with dispatch disabled
_requires_grad, _data = _LOCAL.requires_grad.__get__, _LOCAL.data.__get__


Runner = Callable[[Tensor], Tensor]
Nodes = tuple[tuple[Any, tuple[ConversionStep, ...]], ...]


class RankSteps:
    """Steps in a row as this rank runs them, with groups and sizes looked up once.

    Attributes:
        runners: each step with what it does on this rank.
        still: whether that is nothing.
        views: whether they must be given the tensor itself, and not its memory: what they give may be a view of it.
    """

    __slots__ = ("_nodes", "runners", "steps", "still", "views")

    def __init__(self, steps: tuple[ConversionStep, ...]) -> None:
        self.runners = [(step, _prepare(step)) for step in lowered(steps)]
        self.still = all(runner is _same for _, runner in self.runners)
        self.views = collective.recording() or any(s.kind == "slice" or weighted(s) for s in steps)
        self.steps = steps
        self._nodes: Nodes | None = None

    def nodes(self) -> Nodes:
        """What autograd runs in their place: functions, each with its steps."""
        if self._nodes is None:
            self._nodes = _nodes(tuple([s for s in self.steps if not _nothing_here(s)]))
        return self._nodes

    def run(self, local: Tensor) -> Tensor:
        """Execute them on this rank's local tensor (no autograd)."""
        if runtime.RT.check:
            for step, runner in self.runners:
                _check(step, local)
                local = runner(local)
            return local
        for _, runner in self.runners:
            local = runner(local)
        return local


def ready(steps: tuple[ConversionStep, ...]) -> RankSteps:
    """The steps made ready on this rank."""
    memo = runtime.RT.memo
    found: RankSteps | None = memo.get(steps) or memo.find(steps)
    if found is None:
        found = RankSteps(steps)
        memo.keep(steps, found)
    return found


def _check(step: ConversionStep, local: Tensor) -> None:
    """In check mode: ranks that hold the same part by the step's source layout must hold the same values."""
    layout = step.src.layout
    same = tuple(a for a, p in enumerate(layout.placements) if isinstance(p, Replicate) and step.src.mesh.sizes[a] > 1)
    # Of the other kinds a rank may leave out what does nothing to its own part.
    if same and (step.moves or step.kind == "slice") and not collective.recording():
        collective.same_values(local, repr(layout), collective.group(step.src.mesh, same))
    if step.moves:
        runtime.RT.doing = f"{layout!r} -> {step.dst.layout!r}"


def _prepare(step: ConversionStep) -> Runner:
    """What the step does on this rank, with groups and sizes looked up once."""
    ready = _in_blocks(step, _PREPARE[step.kind](step, step.src.mesh.coordinate(runtime.RT.rank)))
    scale = _scale(step)
    return ready if scale == 1.0 else lambda t: ready(t) * scale


def _in_blocks(step: ConversionStep, runner: Runner) -> Runner:
    """A runner that gets, and gives, the blocks of a dim in their own order, where it needs each rank's together."""
    if step.kind in ("retype", "cast", "to_device", "to_host") or not step.axes:
        return runner
    axis, n = step.axes[0], step.src.mesh.sizes[step.axes[0]]
    before, after = step.dst.layout.placements[axis], step.src.layout.placements[axis]
    if n > 1 and isinstance(before, Shard) and before.blocks and before != after:
        given, apart = runner, _moved(before, n)
        runner = lambda t: given(apart(t))  # noqa: E731
    if n > 1 and isinstance(after, Shard) and after.blocks and before != after:
        made, together = runner, _moved(after, n, back=True)
        return lambda t: together(made(t))
    return runner


def _moved(p: Shard, n: int, back: bool = False) -> Runner:
    """From the order of the blocks to that of the ranks, or back."""
    size = sum(p.blocks)
    ranges = [r for i in range(n) for r in own_ranges(p, size, n, i)]
    if back:
        starts, at = [], 0
        for a, b in ranges:
            starts.append((a, at, b - a))
            at += b - a
        cuts = [(at, length) for _, at, length in sorted(starts) if length]
    else:
        cuts = [(a, b - a) for a, b in ranges if b > a]

    def moved(t: Tensor) -> Tensor:
        if not t.shape[p.dim]:  # of another stage
            return t
        return torch.cat([t.narrow(p.dim, at, length) for at, length in cuts], p.dim)

    return moved


def _scale(step: ConversionStep) -> float:
    """``avg`` is ``sum`` x 1/n: what the data must be multiplied by around a plain sum."""
    scale = 1.0
    if step.kind == "retype":
        return scale
    for a in step.axes:
        n = step.src.mesh.sizes[a]
        p, q = step.src.layout.placements[a], step.dst.layout.placements[a]
        if isinstance(p, Partial) and p.op == "avg":
            scale /= n
        if isinstance(q, Partial) and q.op == "avg":
            scale *= n
    return scale


def _reduce_op(step: ConversionStep) -> str:
    op = op_of(step.src, step)
    assert op is not None
    return "sum" if op == "avg" else op


def _dim(spec: Spec, axis: int) -> int:
    """The dim along which ranks of an axis hold different parts."""
    p = spec.layout.placements[axis]
    assert isinstance(p, (Shard, At))
    return p.dim if isinstance(p, Shard) else 0


def _lengths(spec: Spec, axes: tuple[int, ...], here: tuple[int, ...]) -> list[int]:
    """Length on that dim, for each rank of the group over ``axes``."""
    d, mesh = _dim(spec, axes[0]), spec.mesh
    return [spec.local_shape(mesh.coordinate(r))[d] for r in mesh.group_ranks(mesh.rank_at(here), axes)]


def _all_reduce(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    op, group = _reduce_op(step), collective.group(step.src.mesh, step.axes)
    return lambda t: collective.all_reduce(t, op, group)


def _reduce_scatter(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    op, group = _reduce_op(step), collective.group(step.src.mesh, step.axes)
    d, sizes = _dim(step.dst, step.axes[0]), _lengths(step.dst, step.axes, here)
    return lambda t: collective.reduce_scatter(t, d, sizes, op, group)


def _wire_all_reduce(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    op, group, wire = _reduce_op(step), collective.group(step.src.mesh, step.axes), _wire(step)
    return lambda t: collective.wire_all_reduce(t, op, wire, group)


def _wire_reduce_scatter(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    op, group, wire = _reduce_op(step), collective.group(step.src.mesh, step.axes), _wire(step)
    d, sizes = _dim(step.dst, step.axes[0]), _lengths(step.dst, step.axes, here)
    return lambda t: collective.wire_reduce_scatter(t, op, d, sizes, wire, group)


def _wire(step: ConversionStep) -> str:
    assert step.src.comm_format is not None
    return wire_name(step.src.comm_format)


def _all_gather(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    group = collective.group(step.src.mesh, step.axes)
    d, sizes = _dim(step.src, step.axes[0]), _lengths(step.src, step.axes, here)
    return lambda t: collective.all_gather(t, d, sizes, group)


def _wire_all_gather(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    group, wire = collective.group(step.src.mesh, step.axes), _wire(step)
    d, sizes = _dim(step.src, step.axes[0]), _lengths(step.src, step.axes, here)
    return lambda t: collective.wire_all_gather(t, d, sizes, wire, group)


def _all_to_all(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    group = collective.group(step.src.mesh, step.axes)
    split, concat = _dim(step.dst, axis), _dim(step.src, axis)
    give, take = _lengths(step.dst, step.axes, here), _lengths(step.src, step.axes, here)
    return lambda t: collective.all_to_all(t, split, give, concat, take, group)


def _slice(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    def cut(t: Tensor) -> Tensor:
        for a in step.axes:
            d = _dim(step.dst, a)
            lo, hi = own_bounds(step.dst.layout.placements[a], t.shape[d], step.src.mesh.sizes[a], here[a])
            t = t.narrow(d, lo, hi - lo)
        # Some kernels want dense inputs and gradients, and a view would keep the whole tensor alive.  A copy on every
        # rank, also where a part of one row or none is contiguous: what autograd saves of a view of a gathered
        # parameter is gathered again, by all or by none.
        return t if d == 0 else t.clone(memory_format=torch.contiguous_format)

    return cut


def _keep_one(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    first = all(here[a] == 0 for a in step.axes)
    ones = op_of(step.dst, step) == "product"
    if collective.recording():
        if ones:
            return lambda t: collective.keep_one(t, first) + collective.keep_one(torch.ones_like(t), not first)
        return lambda t: collective.keep_one(t, first)
    return _same if first else torch.ones_like if ones else torch.zeros_like


def _pad(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    (axis,) = step.axes
    d, shape = _dim(step.src, axis), step.dst.local_shape(here)
    lo, hi = own_bounds(step.src.layout.placements[axis], shape[d], step.src.mesh.sizes[axis], here[axis])

    # constant_pad_nd takes (before, after) of the last dim first.
    around = [0, 0] * (len(shape) - d - 1) + [lo, shape[d] - hi]
    value = neutral(op_of(step.dst, step) or "sum", step.dst.dtype)

    def pad(t: Tensor) -> Tensor:
        return torch.constant_pad_nd(t, around, value)

    return pad


def _retype(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    return _same


def _cast(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    return lambda t: t.to(step.dst.dtype)


def _to_device(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    return lambda t: TO_DEVICE(t, step.src.mesh.device)


def _to_host(step: ConversionStep, here: tuple[int, ...]) -> Runner:
    return lambda t: TO_HOST(t)


def _same(t: Tensor) -> Tensor:
    return t


_PREPARE: dict[str, Callable[[ConversionStep, tuple[int, ...]], Runner]] = {
    "retype": _retype,
    "scale": _retype,
    "cast": _cast,
    "to_device": _to_device,
    "to_host": _to_host,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "wire_all_reduce": _wire_all_reduce,
    "wire_reduce_scatter": _wire_reduce_scatter,
    "all_gather": _all_gather,
    "wire_all_gather": _wire_all_gather,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "keep_one": _keep_one,
    "pad": _pad,
}


TRANSFORMS = (
    "torch.func does not support DistTensors: use torch.autograd.grad (create_graph=True to differentiate again), or "
    "apply the transform to plain tensors, from mw.unshard(x) or x.to_local()"
)
FORWARD_MODE = (
    "forward-mode differentiation does not support DistTensors: for a Jacobian-vector product differentiate "
    "torch.autograd.grad(y, x, v, create_graph=True) with respect to v"
)


def apply(steps: tuple[ConversionStep, ...], local: Tensor) -> Tensor:
    """Execute steps in order; differentiable, with the transposed steps as the backward.

    Raises DispatchError where torch.func, or forward mode, would transform what this rank does alone.
    """
    if not steps:
        return local
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise _transformed()
    here = ready(steps)
    if here.views and distributed(local):
        with as_plain(local):
            return _applied(here, local)
    made: Tensor = call_disabled(_applied, (), (here, local), {})
    return made


def _transformed() -> DispatchError:
    return DispatchError(FORWARD_MODE if peek_interpreter_stack() is None else TRANSFORMS)


def _applied(here: RankSteps, local: Tensor) -> Tensor:
    if torch.is_grad_enabled() and _requires_grad(local):
        for node, part in here.nodes():
            local = node(local, part)
        return local
    if here.still:
        return local
    if here.views:
        with torch.no_grad():
            return here.run(local)
    given = local if local.__class__ is Tensor else _data(local)
    made = here.run(given)
    return local if made is given else made


def _nothing_here(step: ConversionStep) -> bool:
    """Whether the step and its transpose leave this rank's data alone: no autograd node is needed then."""
    back = step.transpose()
    if step.moves or back.moves or weighted(step) or _scale(step) != 1.0:
        return False
    here = step.src.mesh.coordinate(runtime.RT.rank)
    return _PREPARE[step.kind](step, here) is _same and _PREPARE[back.kind](back, here) is _same


@lru_cache(maxsize=2048)
def _nodes(steps: tuple[ConversionStep, ...]) -> Nodes:
    """What autograd runs in place of each of the :func:`_parts`."""
    return tuple((_apply_in_c(_Weighted if weighted(part[0]) else _Convert), part) for part in _parts(steps))


@lru_cache(maxsize=2048)
def _parts(steps: tuple[ConversionStep, ...]) -> tuple[tuple[ConversionStep, ...], ...]:
    """Linear steps that follow each other share one autograd node; weighted ones have their own."""
    parts: list[tuple[ConversionStep, ...]] = []
    for step in steps:
        if parts and not weighted(step) and not weighted(parts[-1][0]):
            parts[-1] = (*parts[-1], step)
        else:
            parts.append((step,))
    return tuple(parts)


def _apply_in_c(function: Any) -> Any:
    """``function.apply``, without what it does for torch.func, which is refused before."""
    return inspect.getattr_static(function_base, "apply").__get__(None, function)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: tuple[ConversionStep, ...]) -> Tensor:
        ctx.steps, ctx.cause = steps, runtime.RT.cause
        ctx.set_materialize_grads(False)
        here = ready(steps)
        return _apart(here.run(local), local) if here.views else here.run(_data(local))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else back(ctx.steps, grad, ctx.cause), None  # None: all went past it


class _Bring(torch.autograd.Function):
    """Another value of a leaf; its gradient is brought to a dtype and converted in that, which it keeps."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, value: Tensor, dtype: torch.dtype, steps: tuple[ConversionStep, ...]
    ) -> Tensor:
        ctx.dtype, ctx.steps, ctx.cause = dtype, steps, runtime.RT.cause
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return back(ctx.steps, grad.to(ctx.dtype), ctx.cause), None, None, None


def bring(local: Tensor, value: Tensor, dtype: torch.dtype, steps: tuple[ConversionStep, ...]) -> Tensor:
    """``value``, which a leaf was cast and converted to; its gradient becomes ``dtype`` before anything is sent.

    Args:
        local: the leaf, which takes gradients of any dtype.
        steps: those of the conversion, of ``dtype``.
    """
    made: Tensor = _Bring.apply(local, value, dtype, steps)
    return made


def _apart(out: Tensor, local: Tensor) -> Tensor:
    """What a Function returns: by ``.data`` what is its input, or a view of memory that it made itself.

    A view of the input would tie the result's version counter and base to it; of a view made in a Function PyTorch
    lets nobody write to a part.  What shares the input's memory stays a view: writes to it are refused.
    """
    base = out._base
    return out.data if out is local or not (base is None or base is local or base is local._base) else out


def back(steps: tuple[ConversionStep, ...], grad: Tensor, cause: Any) -> Tensor:
    """The transposed steps, in the name of the record that the forward was made for."""
    backward = transpose(steps)
    if not backward:  # differentiated past a conversion, to where the data already was
        return grad
    if cause is None and runtime.RT.cause is None:
        made = apply(backward, grad)
    else:
        with runtime.serving(cause and cause.transposed(backward)):
            made = apply(backward, grad)
    # A slice is a view of a cotangent that others may hold: a leaf would take it for its own and add to it in place.
    return made.clone() if made is not grad and _only_slices(backward) else made


@lru_cache(maxsize=2048)
def _only_slices(steps: tuple[ConversionStep, ...]) -> bool:
    return all(s.kind in ("slice", "retype") for s in steps) and any(s.kind == "slice" for s in steps)


def weigh(
    steps: tuple[ConversionStep, ...], local: Tensor, value: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What ``apply(steps, local)`` gives, and the shares that parts have of its gradient, for :func:`apply_known`.

    ``value``: the result, where the data is there already; then only what the shares need is sent.
    """
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise _transformed()
    shares = []
    with torch.no_grad(), as_plain(local):
        parts, here = _parts(steps), local
        for part in parts:
            if weighted(part[0]):
                here, share = _weighed(part[0], here, value if len(parts) == 1 else None)
                shares.append(share)
            else:
                here = apply(part, here)
    return here if value is None else value, tuple(shares)


def apply_known(
    steps: tuple[ConversionStep, ...], local: Tensor, value: Tensor, shares: tuple[Tensor, ...] = ()
) -> Tensor:
    """What ``apply(steps, local)`` would give, where the data (``value``) is there already; moves nothing.

    ``shares``: of the gradient, of steps that are weighted (:func:`weigh`).
    """
    made: Tensor = _Known.apply(local, value, steps, shares)
    return made


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, value: Tensor, steps: tuple[ConversionStep, ...], shares: tuple[Tensor, ...]
    ) -> Tensor:
        # Shares are not saved: a value may have consumers of several backwards, and each run of a checkpoint must save
        # as often as the other, whether it finds the data there or not.
        ctx.steps, ctx.shares, ctx.cause = steps, shares, runtime.RT.cause
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if not ctx.shares:
            return back(ctx.steps, grad, ctx.cause), None, None, None
        left = list(ctx.shares)
        for part in reversed(_parts(ctx.steps)):
            grad = (
                _back_weighted(part, grad, left.pop(), ctx.cause) if weighted(part[0]) else back(part, grad, ctx.cause)
            )
        return grad, None, None, None


class Past(torch.autograd.Function):
    """A value that a conversion gives, whose gradient goes to what it was converted of, by a transpose that sends less.

    Where ``asked`` counts somebody who wants the gradient of the value itself, it goes through the value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        origin: Tensor,
        t: Tensor,
        value: Tensor,
        direct: tuple[ConversionStep, ...],
        steps: tuple[ConversionStep, ...],
        asked: list[int],
    ) -> Tensor:
        ctx.direct, ctx.steps, ctx.asked, ctx.cause = direct, steps, asked, runtime.RT.cause
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.asked[0]:
            return None, back(ctx.steps, grad, ctx.cause), None, None, None, None
        return back(ctx.direct, grad, ctx.cause), None, None, None, None, None


class _Weighted(torch.autograd.Function):
    """Reduction by other than a sum, where each part has its share of the gradient: 1/n of an average, equal shares for
    all that hold a maximum, the product of the others for a product.  And what is made a product: ones have no share.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, steps: tuple[ConversionStep, ...]) -> Tensor:
        (step,) = steps
        ctx.steps, ctx.cause = steps, runtime.RT.cause
        made, share = _weighed(step, local)
        ctx.save_for_backward(share)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        return _back_weighted(ctx.steps, grad, share, ctx.cause), None


def _weighed(step: ConversionStep, local: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What a weighted step gives, and the share of this rank's part; ``out``: what it gives, where that is known."""
    op, group = op_of(step.src, step), collective.group(step.src.mesh, step.axes)
    if op == "avg":
        share = local.new_tensor(1 / group.size)
        return _apart(ready((step,)).run(local), local) if out is None else out, share
    if op is None:  # made a product
        share = 1 - ready((step,)).run(torch.zeros_like(local))
        return _apart(ready((step,)).run(local), local) if out is None else out, share
    everywhere = _reduced_everywhere(step)
    sliced = step.kind == "reduce_scatter"
    whole = ready((everywhere,)).run(local) if out is None or sliced else out
    share = _share_of_product(local, group) if op == "product" else _share_of_holders(local, whole, group)
    if not sliced:
        return whole, share
    return ready((ConversionStep("slice", step.axes, everywhere.dst, step.dst),)).run(whole), share


def _back_weighted(steps: tuple[ConversionStep, ...], grad: Tensor, share: Tensor, cause: Any) -> Tensor:
    """The gradient of this rank's part, from that of what a weighted step gave."""
    (step,) = steps
    if torch.is_grad_enabled() and op_of(step.src, step) == "product":
        raise ConversionError("a reduction by product has no second derivative here: gather the factors first")
    backward = transpose(steps)
    with runtime.serving(cause and cause.transposed(backward)):
        return apply(backward, grad * share) if op_of(step.src, step) is None else apply(backward, grad) * share


def _share_of_holders(local: Tensor, out: Tensor, group: Any) -> Tensor:
    held = local == out
    ties = collective.all_reduce(held.to(local.dtype), "sum", group)
    return held / ties.clamp(min=1)


def _share_of_product(local: Tensor, group: Any) -> Tensor:
    """The product of the other parts; those that are zero are counted, to divide by none."""
    zero = local == 0
    zeros = collective.all_reduce(zero.to(local.dtype), "sum", group)
    rest = collective.all_reduce(local.masked_fill(zero, 1), "product", group)
    return torch.where(zero, rest.where(zeros == 1, 0), (rest / local).where(zeros == 0, 0))


@lru_cache(maxsize=1024)
def _reduced_everywhere(step: ConversionStep) -> ConversionStep:
    return ConversionStep("all_reduce", step.axes, step.src, replicated(step.src, step.axes))
