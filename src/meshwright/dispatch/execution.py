"""Running a plan: convert the inputs, run on locals, wrap the outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch

from .. import compat
from ..errors import RuleError
from ..layout import (
    NO_MARKS,
    REPLICATE,
    Layout,
    MarkedSpec,
    Marks,
    Partial,
    Placements,
    Spec,
    marked,
    marks_of,
    widest_accumulate_dtype,
)
from ..local_tensor import Sharing, as_plain, moved, same_storage, shared_memory, version_of
from ..ranks import runtime
from ..resharding import executor, planner, record
from ..resharding.conversions import weighted
from ..rules import Native
from .binding import Args, Kwargs
from .calls import disabled, map_tensors, mesh_of, saving, spec_of, tensors_in
from .leaves import link, propagate_type_to_base, resolve_from_base, resolve_types, should_reduce_at_use
from .plans import CallPlan, Route, plan_call, written_spec
from .views import BASE, Call, PieceSource, cut_from, remember, remember_pieces, with_base

Tensor = torch.Tensor
_LOCAL: Any = Tensor  # properties of local tensors
_is_leaf, _requires_grad, _version = _LOCAL.is_leaf.__get__, _LOCAL.requires_grad.__get__, _LOCAL._version.__get__

Wrap = Callable[[Tensor, Spec], Any]
Note = Callable[[planner.ConversionPlan, bool], None]
Converter = Callable[[Tensor, planner.ConversionPlan, "Note | None"], Tensor]

CONVERT_WITH_GRAD_DTYPE = (
    "_bring"  # in the dict of what ops see of a parameter: converts it, with a backward of its own dtype
)


def convert_tensor(t: Tensor, steps: planner.ConversionPlan, note: Note | None = None) -> Tensor:
    """``t`` brought to ``steps.dst``; made once per value and layout, so that its backward reduces once.

    ``note`` is called before anything is done, with what is converted how, and whether data moves.
    """
    grad = torch.is_grad_enabled() and _requires_grad(t)
    if steps.free and not grad:
        return t
    memo: dict[Any, Any] | None = None
    ends: Any = None
    space = t.__dict__
    alone = not Sharing.ever or shared_memory(t) is None
    if "_spec" in space and alone and (_is_cacheable(t, steps) if grad else not _inference(t)):
        version, memo = space.get("_memo", _NO_MEMO)
        now = version_of(t) if Sharing.counted else _version(t)
        if version != now:
            memo = {}
            space["_memo"] = (now, memo)
        assert memo is not None
        # Without a gradient the types of replicated axes do not matter: the layout alone is what was made.  By ends and
        # not by the plan: a rank that forgot a plan and made it anew must not send again what the others do not.
        ends = steps.ends if grad else steps.dst.layout
        hit = memo.get(ends)
        if hit is not None:
            if steps.reduces and saving():
                _learn(t, steps, hit)
            return hit
    made = None
    if grad and CONVERT_WITH_GRAD_DTYPE in space:
        value = memo.get(steps.dst.layout) if memo is not None and steps.moves else None
        if note is not None:
            note(steps, steps.moves and value is None)
        made = space[CONVERT_WITH_GRAD_DTYPE](t, steps, value)
    elif grad and (steps.moves or "_origin" in space):
        made = _already_there(t, steps, memo, note)
    if made is None and "_piece" in space:
        made = _of_whole(t, steps, note, grad)
    if made is None:
        if note is not None:
            note(steps, steps.moves)
        made = _weighed(t, steps, memo) if grad and steps.weighted else executor.apply(steps.steps, t)
    if memo is not None and (made is not t or steps.moves):  # itself (on the rank that keeps it): would hold itself
        if not grad or not _is_leaf(t):  # of a leaf the value alone: a graph would outlive its backward
            memo[ends] = made
        if steps.moves:
            if grad:
                memo.setdefault(steps.dst.layout, made.detach())
            _learn(t, steps, made)
    return made


def _is_cacheable(t: Tensor, steps: planner.ConversionPlan) -> bool:
    """Whether what a tensor that needs a gradient is converted to is kept for its next use.

    Of leaves only what a Partial was reduced to: the gathered value of a weight would stay in memory.
    """
    return not _is_leaf(t) or (steps.moves and bool(steps.src.layout.partial))


def _weighed(t: Tensor, steps: planner.ConversionPlan, memo: dict[Any, Any] | None) -> Tensor:
    """What a Partial is reduced to other than by a sum; the shares of its gradient are kept for its other consumers."""
    known = memo.get(steps.dst.layout) if memo is not None else None
    value, shares = executor.weigh(steps.steps, t, known)
    if memo is not None:
        memo[_shares_key(steps)] = shares
    return executor.apply_known(steps.steps, t, value, shares)


@lru_cache(maxsize=4096)
def _shares_key(steps: planner.ConversionPlan) -> Any:
    """What the shares of the parts hang on: the reductions, and not what type the result has."""
    return tuple([(s.kind, s.axes, s.src.layout, s.dst.layout) for s in steps.steps if weighted(s)])


def _inference(t: Tensor) -> bool:
    """Whether a tensor may change with no version counter telling."""
    return torch.is_inference_mode_enabled() or Tensor.is_inference(t)


def _of_whole(t: Tensor, steps: planner.ConversionPlan, note: Note | None, grad: bool) -> Tensor | None:
    """A piece brought to ``steps.dst`` by bringing there what it was cut from; None where that does not pay."""
    if (grad and steps.weighted) or any(s.kind not in ("all_reduce", "retype") for s in steps.steps):
        return None
    if not steps.moves or saving() or (found := cut_from(t)) is None:
        return None
    source, base, i = found
    dst = steps.dst.layout.placements
    axes = tuple(a for a, p in enumerate(steps.src.layout.placements) if p != dst[a])
    if axes not in source.whole:
        with torch.no_grad():
            source.whole[axes] = _cut_whole(source, base, axes, note)
    if note is not None:  # the backward is that of this piece
        note(steps, False)
    value = source.whole[axes][i]
    return executor.apply_known(steps.steps, t, value) if grad else value


def _cut_whole(source: PieceSource, base: Tensor, axes: Sequence[int], note: Note | None) -> list[Tensor]:
    """All pieces of a source that is whole on these axes."""
    spec: Spec = base.__dict__["_spec"].decided()
    layout = spec.layout.without_partial(axes)
    whole = convert_tensor(base, planner.plan(spec, spec.with_(layout=layout)), note)
    whole.__dict__.setdefault("_spec", spec.with_(layout=layout))
    args, kwargs = with_base(BASE, whole, source.args, source.kwargs)
    return tensors_in(execute(plan_call(source.func, args, kwargs), source.func, args, kwargs, _named))


def _named(t: Tensor, spec: Spec) -> Tensor:
    t.__dict__["_spec"] = spec
    return t


def _learn(t: Tensor, steps: planner.ConversionPlan, made: Tensor) -> None:
    """A Partial was reduced: from now on its consumers get the reduced value, which is a tensor as any other."""
    learned = _learned(t.__dict__["_spec"], steps, _requires_grad(t))
    if learned is not None:
        t.__dict__["_spec"], made.__dict__["_spec"] = learned
        hook = saving()
        if hook is not None:
            with suppress(TypeError):  # of what nobody can refer to weakly; its region then knows nothing
                t.__dict__["_learned"] = weakref.ref(hook)


def _known_here(t: Tensor) -> bool:
    """Whether the consumers of a Partial that was reduced get the reduced value: where a checkpoint may run them again,
    only if it was needed reduced in the same run of the region.  Both runs then choose alike, whatever happened to the
    value before, between or after them."""
    hook = saving()
    if hook is None:
        return True
    learned = t.__dict__.get("_learned")
    return learned is not None and learned() is hook


@lru_cache(maxsize=4096)
def _learned(spec: Spec, steps: planner.ConversionPlan, typed: bool) -> tuple[Spec, Spec] | None:
    """Specs of a tensor that was converted, and of what it was converted to; None where they stay as they are."""
    if not steps.src.layout.partial or steps.dst.layout.partial:
        return None
    known = steps.dst if typed else steps.dst.untyped()
    return marked(spec, replace(marks_of(spec), known=known)), known


def reduce_early(t: Tensor, axes: Sequence[int], reduced: int, ops: str, reason: str) -> None:
    """Reduce a Partial value before it is needed: all its consumers then get the reduced value.

    Must run with dispatch disabled.

    Args:
        axes: on which it is Partial and is reduced.
        reduced: the bits of these axes on which its gradient is then Partial.
        ops, reason: for the records, what needs it and why it is reduced here.
    """
    spec: Spec = marked(t.__dict__["_spec"], NO_MARKS)
    dst = spec.with_(layout=spec.layout.without_partial(axes), grad_partial_mask=spec.grad_partial_mask | reduced)

    def note(steps: planner.ConversionPlan, moved: bool) -> None:
        record.implicit(ops, 0, steps, reason, moved, " and ".join(t.__dict__.get("_producers", ())))

    with runtime.serving(None):
        convert_tensor(t, planner.plan(spec, dst), note)


_NO_MEMO: tuple[None, None] = (None, None)


def _versions(a: Tensor, b: Tensor) -> tuple[int, int]:
    return (version_of(a), version_of(b)) if Sharing.counted else (_version(a), _version(b))


_NO_ORIGIN: tuple[Any, Any, Any] = (None, None, None)


def ask_gradient(t: Tensor) -> None:
    """Have the gradient of a value, which has a hook or retains it, flow through it where it would go past it."""
    *_, asked = t.__dict__.get("_origin", _NO_ORIGIN)
    if asked is not None:
        asked[0] += 1


@contextmanager
def wanting_gradients(tensors: Iterable[Any]) -> Iterator[None]:
    """Inside, gradients flow through these values, also where that sends more than going past them."""
    asked = [t.__dict__["_origin"][2] for t in tensors if isinstance(t, Tensor) and "_origin" in t.__dict__]
    for count in asked:
        count[0] += 1
    try:
        yield
    finally:
        for count in asked:
            count[0] -= 1


def _already_there(
    t: Tensor, steps: planner.ConversionPlan, memo: dict[Any, Any] | None, note: Note | None
) -> Tensor | None:
    """The value as the target type without moving data that was moved before.

    A value that was converted to this layout for another consumer, with another type, keeps its data and gets its own
    backward.  A shard gathered by name (``mw.reshard``) is first taken as invariant; where it turns out to feed
    rank-dependent work, its gradient goes back in one reduce-scatter instead of an all-reduce and a slice.
    """
    if steps.moves and memo is not None:
        value, shares = memo.get(steps.dst.layout), memo.get(_shares_key(steps)) if steps.weighted else ()
        if value is None or shares is None:
            return None
        if note is not None:
            note(steps, False)
        return executor.apply_known(steps.steps, t, value, shares)
    origin, versions, asked = t.__dict__.get("_origin", _NO_ORIGIN)
    if steps.moves or origin is None or versions != _versions(origin, t):
        return None
    direct = planner.plan(origin.__dict__["_spec"].decided(), steps.dst)
    if direct.backward_bytes >= steps.backward_bytes or direct.weighted:
        return None
    if note is not None:
        note(steps, False)
    with torch.no_grad():
        value = executor.apply(steps.steps, t)  # moves nothing, but may take this rank's part
    made: Tensor = executor.Past.apply(origin, t, value, direct.steps, steps.steps, asked)
    return made


def _call_enabled(func: Any, args: Args, kwargs: Kwargs) -> Any:
    with compat.EnableTorchFunction():
        return func(*args, **kwargs)


class Execution:
    """One run of a plan: inputs converted, the op run on locals, outputs wrapped.  Must run with dispatch disabled.

    ``call`` calls a function on such tensors (``routes.Frontend``); by itself that of eager ones.

    ``plan`` is replaced by what the run shows of it: the types of its outputs, and whether later calls may take the
    route that it promises.
    """

    __slots__ = ("args", "call", "func", "kwargs", "plan", "tensors", "wrap")

    def __init__(
        self, plan: CallPlan, func: Any, args: Args, kwargs: Kwargs, wrap: Wrap, call: Call | None = None
    ) -> None:
        self.plan, self.func, self.args, self.kwargs, self.wrap = plan, func, args, kwargs, wrap
        self.call = call or _call_enabled
        self.tensors = tensors_in((args, kwargs))

    def run(self) -> Any:
        """What the call gives."""
        plan, tensors = self.plan, self.tensors
        if plan.known and not all(_known_here(tensors[i]) for i, _ in plan.known):
            return self._planned_anew()
        if (plan.untyped or plan.known) and torch.is_grad_enabled() and self._decide():
            return self._planned_anew()
        if runtime.RT.told is not None:
            runtime.RT.told(self)
        locals_ = list(tensors)
        for i, steps in (*plan.known, *plan.conversions):
            locals_[i] = _convert_recorded(plan, i, locals_[i], steps)
        if plan.back is not None:
            with as_plain(locals_[0]) as local:
                locals_[0] = local.clone()  # what was converted may be kept for its next use
        if plan.replayed:
            # Writes to what is empty here are to be differentiated as on the other ranks: PyTorch else takes a view
            # that was written to (the result of ``tensordot`` is one of its own) for an ``as_strided`` of its base,
            # whose derivative is a constant where it is empty, so that a second backward would leave out collectives.
            with compat.force_original_view_tracking(True):
                result = self._run_local(locals_)
        else:
            result = self._run_local(locals_)
        made = self._finish_write(locals_[0], result) if plan.op.inplace else self._finish_new(locals_, result)
        if runtime.RT.after_call is not None:
            runtime.RT.after_call(self, made)
        return made

    def _finish_new(self, locals_: Sequence[Tensor], result: Any) -> Any:
        """Wrap what an op made that writes to nothing, and note of views that are copies what they were made of."""
        plan, tensors = self.plan, self.tensors
        result = self.finish(self._own(result, locals_))
        if plan.copies:
            remember(self.func, self.args, self.kwargs, tensors[0], tensors_in(result))
        elif fallen_back(plan, locals_, result):
            spec = result.__dict__["_spec"]
            self.wrap(result, marked(spec, replace(marks_of(spec), copied=True)))
            remember(self.func, self.args, self.kwargs, tensors[0], [result], apart=True)
        if plan.pieces:
            remember_pieces(self.func, self.args, self.kwargs, tensors[0], tensors_in(result), image=plan.image)
        return result

    def resolve_after(self, result: Any) -> Any:
        """As :meth:`run` where the op ran already, as a native one: types for its leaves, specs for its outputs."""
        if torch.is_grad_enabled():
            if resolve_from_base(self.tensors):
                return self._planned_anew()
            for i, spec in self.plan.decide:
                if self.tensors[i].requires_grad:
                    resolve_types(self.tensors[i], spec)
        return self.finish(result)

    def _planned_anew(self) -> Any:
        plan = plan_call(self.func, self.args, self.kwargs, known=_known_here)
        if plan.route is Route.CAST and plan.casts is not None:  # it has no outputs: autocast casts first
            return self.call(plan.casts.first, (self.func, self.wrap, self.args, self.kwargs), {})
        return Execution(plan, self.func, self.args, self.kwargs, self.wrap, self.call).run()

    def _decide(self) -> bool:
        """Give leaves the types that the plan implies; whether some got others, so that another plan is needed."""
        plan, tensors = self.plan, self.tensors
        anew = resolve_from_base(tensors)
        # Where what a value was reduced to has a type, the value has it, and all that is linked to it.
        for i, steps in plan.known:
            t = tensors[i]
            if t.requires_grad and t.__dict__["_spec"].undecided_mask & ~steps.src.undecided_mask:
                resolve_types(t, t.__dict__["_spec"].with_(undecided_mask=steps.src.undecided_mask))
                anew = True
        for i, spec in () if anew else plan.decide:
            t = tensors[i]
            if _types_changed(t, spec):
                anew = True
                continue
            if t.requires_grad and "_spec" in t.__dict__:
                if should_reduce_at_use(t, spec):
                    spec, anew = t.__dict__["_spec"].decided(), True
                resolve_types(t, spec, _use(plan, spec.grad_partial_mask) if runtime.RT.records is not None else "")
        return anew

    def _run_local(self, locals_: list[Tensor]) -> Any:
        plan, fn = self.plan, self.plan.fn
        if plan.op.custom:
            # Aliases: what the backward finds saved is then a plain tensor too.
            return self._with(_aliases(locals_), fn or self.func)
        if plan.choice is not None and (fn is None or fn.__class__ is Native):
            if plan.conversions or plan.known or plan.back is not None:
                return self._with(locals_, fn or self.func)
            return (fn or self.func)(*self.args, **self.kwargs)
        if not plan.op.inplace and saving():  # what is saved must not become another kind of tensor behind its back
            locals_ = _aliases(locals_)
        # Code that looks at .shape must see local tensors as plain ones.
        with as_plain(*locals_):
            return self._with(locals_, fn or self.func)

    def _with(self, tensors: Sequence[Tensor], fn: Callable[..., Any]) -> Any:
        given = iter(tensors)
        args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(given))
        return fn(*args, **kwargs)

    def _own(self, result: Any, locals_: Sequence[Tensor]) -> Any:
        """An op may return its input: only the caller's own distributed tensor may be wrapped, of others an alias is.

        Others are plain tensors of the caller, and converted inputs, which may be kept for their next use.
        """
        others = [a for a, t in zip(locals_, self.tensors, strict=True) if a is not t or "_spec" not in t.__dict__]
        if not others or not any(r is a for r in tensors_in(result) for a in others):
            return result
        if self.plan.candidate_route is not None:
            self.plan = replace(self.plan, candidate_route=Route.EXECUTE, plain=False)
        return map_tensors(result, lambda r: r.view_as(r) if any(r is a for a in others) else r)

    def _finish_write(self, written: Tensor, result: Any) -> Tensor:
        """Bring what was written to where its target lies, and say what the target is now."""
        plan, target, made = self.plan, self.tensors[0], self.plan.outputs[0]
        moved(target)
        if plan.op.turns:  # copies of it are views of it as it was
            target.__dict__["_turned"] = target.__dict__.get("_turned", 0) + 1
        old = spec_of(target, made.mesh)
        marks = marks_of(old).after_write()
        elsewhere = plan.back is not None or plan.fn is not None  # a local function may compute the new value
        value = result if elsewhere and isinstance(result, Tensor) else written
        with as_plain(value) as new:
            if plan.choice is None and new.shape != old.shape:  # resize_: what is left of the old layout is of no use
                if value is not target:
                    with as_plain(target) as local:
                        local.set_(new)
                whole, everywhere = Layout(old.mesh), old.mesh.everywhere
                spec = old.with_(shape=new.shape, layout=whole, grad_partial_mask=0, undecided_mask=everywhere)
                return cast(Tensor, self.wrap(target, marked(spec, replace(marks, copied=False))))
        back = plan.back
        if back is not None:
            if back.steps and torch.is_grad_enabled() and (target.requires_grad or value.requires_grad):
                # Its transpose is of the type that the target's gradient has by now, which the plan did not know.
                spec = written_spec(old, made)
                back = planner.plan(made.with_(undecided_mask=spec.undecided_mask), spec.with_(dtype=made.dtype))
            value = _convert_recorded(plan, 0, value, back, _bring_back)
        if value is not target:
            with as_plain(target) as local, as_plain(value) as new:
                local.copy_(new)
        recorded = torch.is_grad_enabled() and target.requires_grad
        if made.shape != old.shape:
            spec, marks = made, replace(marks, copied=False)
        else:
            spec = (
                written_spec(old, made)
                if recorded
                else old.with_(accumulate_dtype=widest_accumulate_dtype((old, made)))
            )
        self.wrap(target, marked(spec, marks))
        if recorded:
            propagate_type_to_base(target, self.tensors)
        if plan.candidate_route is not None:
            self.plan = replace(
                plan, route=plan.candidate_route if result is target else Route.EXECUTE, candidate_route=None
            )
        return target

    def finish(self, result: Any) -> Any:
        """Wrap the outputs, and link undecided leaves to them."""
        made = tensors_in(result)
        if self.plan.candidate_route is not None:
            self._learn(result, made)
        plan, records = self.plan, runtime.RT.records
        marks = Marks(copied=True) if plan.copies else NO_MARKS
        if plan.choice is None:
            whole = Layout(mesh_of(self.tensors, plan.op.name))
            sums = widest_accumulate_dtype(spec_of(t, whole.mesh) for t in self.tensors)
            for t in made:
                undecided = 0 if t.requires_grad else whole.mesh.everywhere
                self.wrap(t, still(t, Spec(t.shape, t.dtype, whole, 0, undecided, accumulate_dtype=sums), marks))
            return result
        ties = plan.choice.open and torch.is_grad_enabled()
        for t, spec in zip(made, plan.outputs, strict=True):
            self.wrap(t, still(t, spec, marks))
            if records is not None and spec.layout.partial:
                record.produced(t, _use(plan, sum(1 << a for a in spec.layout.partial)), self.tensors)
            if ties and t.requires_grad and spec.undecided_mask:
                link([*self.tensors, t])
        return result

    def _learn(self, result: Any, made: Sequence[Tensor]) -> None:
        """Compare the outputs of a first run with what the rule says."""
        plan, outputs = self.plan, self.plan.outputs
        here = outputs[0].mesh.coordinate(runtime.RT.rank) if outputs else ()
        want, have = [s.local_shape(here) for s in outputs], [tuple(Tensor.size(t)) for t in made]
        if want != have:
            raise RuleError(
                f"the rule of {plan.op.name!r} ({plan.why}) says that this rank gets {want}, the op gave {have}: "
                "correct it"
            )
        if any(t.dtype != s.dtype for t, s in zip(made, outputs, strict=True)):
            outputs = tuple(s.with_(dtype=t.dtype) for s, t in zip(outputs, made, strict=True))
        route = plan.candidate_route or Route.EXECUTE
        if not isinstance(result, Tensor) and len(result) != len(made):  # something beside tensors
            route = Route.EXECUTE
        elif not all(t.__class__ is Tensor for t in made):
            between = route in (Route.RETYPE_THEN_NATIVE, Route.CONVERT_THEN_NATIVE)
            route = Route.CONVERT_THEN_NATIVE if between else Route.EXECUTE
        if plan.line is not None:
            plan.line.shown[runtime.RT.rank] = route, tuple([s.dtype for s in outputs])
        self.plan = replace(plan, route=route, candidate_route=None, outputs=outputs)


def fallen_back(plan: CallPlan, locals_: Sequence[Tensor], made: Any) -> bool:
    """Whether a view is a copy on this rank, whose part does not lie in memory so that it can be one."""
    if not isinstance(plan.fn, Native) or plan.fn.otherwise is None or not isinstance(made, Tensor):
        return False
    return bool(not same_storage(made, locals_[0]) and Tensor.numel(made))


def still(made: Tensor, spec: Spec, marks: Marks = NO_MARKS) -> Spec:
    """The spec of an output, which may be an operand (``p.float()``, ``p.to(device)``): what it was, it still is."""
    own: Spec | None = made.__dict__.get("_spec")
    if type(own) is MarkedSpec:
        marks = Marks(copied=own.marks.copied or marks.copied, stored=own.marks.stored)
    return spec if marks is NO_MARKS else marked(spec, marks)


def execute(plan: CallPlan, func: Any, args: Args, kwargs: Kwargs, wrap: Wrap) -> Any:
    """Convert the inputs, run the op on locals, wrap the outputs.  Must run with dispatch disabled."""
    return Execution(plan, func, args, kwargs, wrap).run()


def _aliases(locals_: list[Tensor]) -> list[Tensor]:
    """Plain tensors of the same memory in place of distributed ones."""
    return [Tensor.view_as(t, t) if "_spec" in t.__dict__ else t for t in locals_]


def _types_changed(t: Tensor, spec: Spec) -> bool:
    """Whether a tensor was just given other types than planned: it, or one linked to it, is another operand too."""
    now: Spec | None = t.__dict__.get("_spec")
    if now is None or now.layout != spec.layout:
        return False
    return bool((now.grad_partial_mask ^ spec.grad_partial_mask) & ~(now.undecided_mask | spec.undecided_mask))


def _convert_recorded(
    plan: CallPlan, i: int, t: Tensor, steps: planner.ConversionPlan, make: Converter = convert_tensor
) -> Tensor:
    rt = runtime.RT
    if rt.records is None and not (steps.moves and rt.explicit):
        return make(t, steps, None)
    producer = " and ".join(t.__dict__.get("_producers", ()))

    def note(steps: planner.ConversionPlan, moved: bool) -> None:
        record.implicit(plan.op.name, i, steps, plan.why, moved, producer)

    with runtime.serving(None):
        return make(t, steps, note)


def _bring_back(t: Tensor, steps: planner.ConversionPlan, note: Note | None) -> Tensor:
    if note is not None:
        note(steps, steps.moves)
    return executor.apply(steps.steps, t)


def _use(plan: CallPlan, axes: int) -> str:
    """Which factors of a plan are split over some axes (bits), and where, in words; empty for none."""
    chosen = plan.choice.strategies if plan.choice is not None else ()
    named = [c.factor for a, c in enumerate(chosen) if c.factor and axes >> a & 1]
    split = [f"...[{f[1:]}]" if f[0] == "~" else f for f in dict.fromkeys(named)]
    return record.since(plan.op.name, f"{', '.join(split)} of {plan.why}") if split else ""


def wanted(spec: Spec, placements: Placements, order: Any = None) -> Spec:
    """``spec`` with other placements; axes that a mapping does not name keep theirs.

    Raises LayoutError for a placement that does not fit.
    """
    if isinstance(placements, Mapping):
        names = {spec.mesh.axes[spec.mesh.axis_index(a)]: p for a, p in placements.items()}
        placements = {a: names.get(a, p) for a, p in zip(spec.mesh.axes, spec.layout.placements, strict=True)}
    layout = Layout(spec.mesh, placements, order=order, ndim=spec.ndim)
    pairs = zip(layout.placements, spec.layout.placements, strict=True)
    kept = sum(1 << a for a, (p, q) in enumerate(pairs) if p == q)
    return Spec(spec.shape, spec.dtype, layout, spec.grad_partial_mask & kept, accumulate_dtype=spec.accumulate_dtype)


def convert_layout(x: Tensor, target: Spec, wrap: Wrap) -> Tensor:
    """``x`` brought to ``target`` because somebody asked for it by name.  Must run with dispatch disabled."""
    spec: Spec = x.__dict__["_spec"]
    if x.requires_grad and spec.undecided_mask:
        resolve_types(x, spec.decided())
    source, known = x.__dict__["_spec"].decided(), marks_of(spec).known
    if known is not None and not target.layout.partial and _known_here(x):
        x = convert_tensor(x, planner.plan(source, known.decided()))
        source = known.decided()
    plan = planner.plan(source, target)
    with record.asked("reshard", plan, "asked for by name"):
        made = executor.apply(plan.steps, x)
    if not plan.moves and same_storage(made, x):
        made = made.clone()
    out: Tensor = wrap(made, target)
    if x.requires_grad and not x.is_leaf:
        out.__dict__["_origin"] = (x, _versions(x, out), [0])
    return out


def root(y: Tensor, wrap: Wrap) -> Tensor:
    """What a backward starts from: ``y``, an average as a sum and an extremum or product reduced: all gradients whole.

    Must run with dispatch disabled.
    """
    spec: Spec = y.__dict__["_spec"]
    others = {
        spec.mesh.axes[a]: Partial() if op == "avg" else REPLICATE
        for a, op in spec.layout.partial.items()
        if op != "sum"
    }
    return convert_layout(y, wanted(spec, others), wrap) if others else y


def unit_cotangent(spec: Spec, device: Any) -> Tensor:
    """The cotangent 1 of a global scalar (a ``root``), on this rank: on the first one only where parts are added up."""
    here, value = spec.mesh.coordinate(runtime.RT.rank), 1.0
    for a, place in enumerate(here):
        if place and spec.grad_partial_mask >> a & 1:
            value = 0.0
    with disabled():
        return torch.full(spec.local_shape(here), value, dtype=spec.dtype, device=device)
