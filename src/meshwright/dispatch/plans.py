"""A plan: how one kind of call runs, decided from global metadata alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import reshard, runtime
from ..choose import Choice, carries_grad, choose
from ..errors import DispatchError, MeshwrightError, RuleError
from ..layout import Layout, Spec
from ..mesh import Mesh
from ..rules import Arg, Local, Native, Rule, Strategy
from ..rules.dims import on_padded
from . import autocast
from .calls import (
    Op,
    disabled,
    map_tensors,
    mesh_of,
    resolve,
    spec_of,
    tensors_in,
)

Tensor = torch.Tensor


@dataclass(slots=True)
class CallPlan:
    """What to do for one kind of call.

    ``plain``: nothing but the native op on locals, one tensor out; ``fast``: plain, and seen to give what the rule
    says.  ``untyped``: leaves that require grad are tied together (1) or get their type (2) by this call.
    ``retypes``: plain but for conversions that only change types, which do nothing where no gradient is recorded.
    ``stored``: an argument is marked so in its spec: for each call it is asked what stands in for it.
    ``native``: run this call instead of the op.  ``swift``: conversions of plain positional arguments around one
    native op: no nested arguments to walk.  ``known``: Partial inputs and how each was reduced before: the reduced
    value is taken in its place.  ``alias``: a custom op, whose backward may look at the inputs that it saved: it gets
    plain aliases.  ``back``: a write that cannot be made in the layout of its target: it is made in a copy of another
    layout, which is then brought back and copied into the target.
    ``replayed``: this rank has nothing of a result (see ``execution``).  ``padded``: makes of a function one for parts
    without elements, which the op refuses and of which this rank has some.
    ``copies``: it makes views that are copies on the mesh; ``cuts``: pieces of one value, parts of sums (see
    ``views``); ``watched``: arguments are such copies (see ``views``).
    ``graded``: it holds for arguments of these ``requires_grad`` only: another choice is cheaper for others.
    """

    op: Op
    fast: bool = False
    plain: bool = False
    untyped: int = 0
    retypes: bool = False
    stored: bool = False
    native: Native | None = None
    swift: bool = False
    alias: bool = False
    spec: Spec | None = None
    outputs: tuple[Spec, ...] = ()
    conversions: tuple[tuple[int, reshard.ConversionPlan], ...] = ()
    known: tuple[tuple[int, reshard.ConversionPlan], ...] = ()
    decide: tuple[tuple[int, Spec], ...] = ()
    local: Callable[..., Any] | None = None
    run: Callable[..., Any] | None = None
    redispatch: bool = False
    gathered: bool = False
    copies: bool = False
    cuts: bool = False
    replayed: bool = False
    padded: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    watched: bool = False
    graded: bool = False
    back: reshard.ConversionPlan | None = None
    open: int = 0
    checked: bool = False
    mesh: Mesh | None = None
    choice: Choice | None = None
    why: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def plan_call(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategies: Sequence[Strategy] | None = None,
    *,
    known: bool = True,
) -> CallPlan:
    """Decide how to run a call.  Reads specs, shapes and dtypes only, so that all ranks decide alike.

    ``strategies``, one per mesh axis, are taken instead of the cheapest ones (for tests of a rule).  ``known``: take
    Partial values that were reduced before as what they were reduced to.
    """
    op = resolve(func)
    bound = op.binding(args, kwargs)
    if op.composite is not None:
        return CallPlan(op, run=bound.around(op.composite) if bound else op.composite)
    if op.python and op.rule is None:
        return CallPlan(op, redispatch=True)
    with disabled():
        tensors = tensors_in((args, kwargs))
        mesh = mesh_of(tensors, op.name)
        specs = [spec_of(t, mesh) for t in tensors]
        constants = {i for i, t in enumerate(tensors) if not t.requires_grad}
        free = {i for i in constants if "_spec" not in tensors[i].__dict__}  # their keys say it
    watched = any(s.copied for s in specs)
    instead, written = [], op.inplace and specs[0].known is not None
    for i, s in enumerate(specs):
        if s.known is not None and known and not (op.inplace and i == 0):  # what is written to stays what it is
            instead.append((i, reshard.plan(s.with_(undecided=0), s.known.with_(undecided=0))))
            specs[i] = s.known
    with mw_context(op, specs):
        dtypes = autocast.casts(func, specs, args, kwargs, mesh.device) if autocast.active() else {}
        if dtypes and op.python:
            return CallPlan(op, redispatch=True)
        specs = [s.with_(dtype=dtypes[i]) if i in dtypes else s for i, s in enumerate(specs)]
        plan = _plan_ruled(func, op, mesh, specs, args, kwargs, strategies, (free, constants), bool(instead))
    if dtypes and (instead or not plan.plain):  # else the native op does it, in C++ and with autocast's own memo
        return CallPlan(op, run=autocast.cast_first(func, dtypes, mesh.device))
    if bound and plan.run is not None:
        plan.run = bound.around(plan.run)
    if bound and plan.local is not None:
        plan.local = bound.around(plan.local)
    if plan.padded is not None:
        plan.local = plan.padded(plan.local or func)
    if not (args and isinstance(args[0], Tensor)) and plan.native is not None:
        plan.native, plan.plain, plan.retypes, plan.swift = None, False, False, False
    plan.known = tuple(instead)
    plan.watched = watched
    if instead or written or plan.watched or plan.copies or plan.cuts:
        plan.plain = plan.retypes = plan.swift = False
    return plan


class mw_context:
    """Adds the op and its arguments to errors of ours that pass through."""

    def __init__(self, op: Op, specs: Sequence[Spec]) -> None:
        self.op, self.specs = op, specs

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, MeshwrightError) and not getattr(error, "_placed", False):
            error._placed = True  # type: ignore[attr-defined]
            listed = "; ".join(repr(s) for s in self.specs)
            error.args = (f"{self.op.name}{'_' if self.op.inplace else ''}({listed}): {error}",)


def _plan_ruled(
    func: Any,
    op: Op,
    mesh: Mesh,
    specs: list[Spec],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    strategies: Sequence[Strategy] | None,
    constants: tuple[Collection[int], Collection[int]],
    replaced: bool,
) -> CallPlan:
    made = _run_meta(func, specs, args, kwargs, [])
    if made is _REFUSED and op.python:
        return CallPlan(op, redispatch=True)
    if made is _REFUSED:
        # Most likely a mistake of the caller: every rank runs the op on global values, and PyTorch says what is wrong.
        plan = _gather_plan(op, mesh, specs)
        plan.notes["refused"] = True
        return plan
    like = _described(made, specs)
    rule = make_rule(op, specs, args, kwargs)
    if op.python and (rule is None or like is None or (not op.inplace and _whole_is_split(rule, specs))):
        return CallPlan(op, redispatch=True)
    if rule is None or (like is None and not rule.outputs):
        return _mark_copies(_gather_plan(op, mesh, specs), func, specs, args, kwargs, replaced)
    if like is None:
        like = [(torch.Size(rule.out_shape(i)), specs[0].dtype) for i in range(len(rule.outputs))]
    else:
        _check_outputs(op, rule, like)
    if rule.decompose is not None and not op.inplace and _whole_is_split(rule, specs):
        return CallPlan(op, run=rule.decompose, mesh=mesh)
    try:
        choice, graded = _choose_graded(rule, specs, like, op.inplace, strategies, *constants)
    except DispatchError:
        choice, graded = _choose_graded(rule, specs, like, False, strategies, *constants)
    plan = _plan_from(op, mesh, rule, specs, choice)
    plan.graded = graded
    return _mark_copies(plan, func, specs, args, kwargs, replaced)


def _choose_graded(
    rule: Rule,
    specs: list[Spec],
    like: list[tuple[torch.Size, torch.dtype]],
    inplace: bool,
    strategies: Sequence[Strategy] | None,
    free: Collection[int],
    constants: Collection[int],
) -> tuple[Choice, bool]:
    """The choice, and whether it hangs on which distributed operands need a gradient.

    Beside a Partial, a replicated operand has its gradient reduced, which may cost more than to reduce the Partial
    first; one that needs none costs nothing.  ``free``: plain tensors without a gradient; ``constants``: all without.
    """

    def made(without: Collection[int]) -> Choice:
        return choose(rule, specs, like, inplace=inplace, strategies=strategies, constants=without)

    beside = [i for i, s in enumerate(specs) if i not in free and carries_grad(s.dtype) and not s.layout.partial]
    if not beside or not rule.linear or not any(s.layout.partial for s in specs):
        return made(free), False
    choice = made([*free, *(i for i in beside if i in constants)])
    others = [[], beside, *([i] for i in beside)] if len(beside) > 1 else [[], beside]
    return choice, any(made([*free, *some]) != choice for some in others)


def by_grad(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of a graded plan: which tensors need a gradient is part of it."""
    return (key, *[t.requires_grad for t in tensors_in((args, kwargs))])


def _mark_copies(
    plan: CallPlan, func: Any, specs: list[Spec], args: tuple[Any, ...], kwargs: dict[str, Any], replaced: bool
) -> CallPlan:
    """Views of converted or replaced inputs, or of copies, do not alias what the caller holds: their specs say so."""
    own = plan.local is not None and not isinstance(plan.local, Native)
    moved = own or replaced or any(s.kind != "retype" for _, c in plan.conversions for s in c.steps)
    if not plan.op.inplace and (moved or any(s.copied for s in specs)) and _is_view(func, specs, args, kwargs):
        plan.outputs = tuple(s.with_(copied=True) for s in plan.outputs)
        plan.spec = plan.outputs[0] if plan.outputs else None
        plan.copies = True
    if len(specs) == 1 and not plan.op.inplace and plan.choice is not None and _in_parts(plan.choice):
        smaller = len(plan.outputs) > 1 or plan.outputs[0].shape.numel() < specs[0].shape.numel()
        plan.cuts = smaller and _is_view(func, specs, args, kwargs)
    if _nothing_here(plan):
        plan.replayed, plan.plain, plan.retypes, plan.swift = True, False, False, False
    return plan


def _nothing_here(plan: CallPlan) -> bool:
    """Whether a result that has elements has none on this rank."""
    if plan.op.inplace or plan.mesh is None:
        return False
    here = plan.mesh.coordinate(runtime.RT.rank)
    return any(s.shape.numel() and not math.prod(s.local_shape(here)) for s in plan.outputs)


def _in_parts(choice: Choice) -> bool:
    """Whether outputs are Partial of an input that stays as it lies."""
    return any(s.layout.partial for s in choice.outputs) and choice.inputs[0].layout == choice.sources[0].layout


def _is_view(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether on one device an output would share memory with an input."""
    given: list[Tensor] = []
    made = _run_meta(func, specs, args, kwargs, given)
    memory = {t.untyped_storage()._cdata for t in given}
    return any(t.untyped_storage()._cdata in memory for t in tensors_in(made))


def _plan_from(op: Op, mesh: Mesh, rule: Rule, specs: list[Spec], choice: Choice) -> CallPlan:
    conversions = []
    for i, (src, dst) in enumerate(zip(choice.sources, choice.inputs, strict=True)):
        if src.undecided:
            dst = dst.with_(undecided=0)
            src = src.with_(undecided=0)
        steps = reshard.plan(src, dst)
        if steps.steps:
            conversions.append((i, steps))
    back = _way_back(conversions, specs, choice.outputs) if op.inplace else None
    decide = tuple(
        (i, src) for i, (given, src) in enumerate(zip(specs, choice.sources, strict=True)) if given is not src
    )
    ctx = Local(rule, choice.inputs, choice.outputs, mesh.coordinate(runtime.RT.rank))
    local = None if rule.local is None else rule.local(ctx)
    padded = partial(on_padded, ctx) if rule.padded and ctx.is_empty() else None
    alias = "::" in op.name
    direct = (local is None or isinstance(local, Native)) and choice.outputs != () and not alias and padded is None
    if op.inplace:  # what says anew what the target is cannot be left to the native op
        direct = direct and not (back or decide or choice.open or choice.outputs[0].shape != specs[0].shape)
    return CallPlan(
        op,
        plain=not conversions and direct,
        retypes=bool(conversions) and direct and all(s.kind == "retype" for _, c in conversions for s in c.steps),
        untyped=2 if decide else int(bool(choice.open)),
        native=local if isinstance(local, Native) else None,
        alias=alias,
        swift=bool(conversions) and direct and not decide and not choice.open and not op.inplace,
        spec=choice.outputs[0] if choice.outputs else None,
        outputs=choice.outputs,
        conversions=tuple(conversions),
        decide=decide,
        local=local,
        padded=padded,
        back=back,
        open=choice.open,
        mesh=mesh,
        choice=choice,
        why=rule.text,
    )


def _way_back(
    conversions: Sequence[tuple[int, reshard.ConversionPlan]], specs: Sequence[Spec], outputs: Sequence[Spec]
) -> reshard.ConversionPlan | None:
    """From where a write is made to where its target lies; None where that is the target itself."""
    made, target = outputs[0], specs[0]
    if made.shape != target.shape:  # unsqueeze_, t_: the layout changes with the shape
        if any(i == 0 for i, _ in conversions):
            raise DispatchError(
                f"the target, of {target!r}, would have to move and change its shape: do it out of place"
            )
        return None
    if made.layout == target.layout and not any(i == 0 for i, _ in conversions):
        return None
    return reshard.plan(made.with_(undecided=0), written_spec(target, made).with_(dtype=made.dtype, undecided=0))


def written_spec(target: Spec, made: Spec) -> Spec:
    """Spec of a tensor after a write that makes ``made``: types that it had are kept, for its views have them too."""
    open_ = target.undecided
    return target.with_(reduced=target.reduced | (made.reduced & open_), undecided=made.undecided & open_)


def make_rule(op: Op, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
    """Call the rule function with an Arg in place of each tensor.

    Raises RuleError (with the cause) where the rule function itself fails.
    """
    if op.rule is None:
        return None
    count = iter(range(len(specs)))

    def arg(t: Tensor) -> Arg:
        i = next(count)
        return Arg(i, tuple(specs[i].shape), specs[i].dtype, specs[i])

    try:
        bound = op.binding(args, kwargs)
        args, kwargs = map_tensors(args, arg), map_tensors(kwargs, arg)
        args, kwargs = bound(args, kwargs) if bound else (args, kwargs)
        made = op.rule(*args, **kwargs)
    except MeshwrightError:
        raise
    except (IndexError, ValueError, TypeError, KeyError) as error:
        raise RuleError(f"the rule of {op.name!r} failed: {type(error).__name__}: {error}") from error
    if made is not None and len(made.inputs) != len(specs):
        raise RuleError(f"the rule of {op.name!r} covers {len(made.inputs)} of {len(specs)} tensor arguments")
    return made


def global_outputs(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[torch.Size, torch.dtype]] | None:
    """Global shape and dtype of each output, from a run on meta tensors; None where PyTorch cannot tell."""
    return _described(_run_meta(func, specs, args, kwargs, []), specs)


def _described(made: Any, specs: Sequence[Spec]) -> list[tuple[torch.Size, torch.dtype]] | None:
    if made is NotImplemented or made is _REFUSED:
        return None
    if isinstance(made, Tensor):
        return [(made.shape, made.dtype)]
    if isinstance(made, (tuple, list)):
        return [(t.shape, t.dtype) for t in tensors_in(made)]
    return None if made is not None else [(specs[0].shape, specs[0].dtype)]


_REFUSED = object()


def _run_meta(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
) -> Any:
    """The op on meta tensors (which ``given`` collects).

    NotImplemented where PyTorch cannot tell without values, ``_REFUSED`` where it refuses the arguments.
    """
    count = iter(range(len(specs)))

    def meta(t: Tensor) -> Tensor:
        s = specs[next(count)]
        given.append(torch.empty(s.shape, dtype=s.dtype, device="meta"))
        return given[-1]

    try:
        # Modes around the call, as selective checkpoints have, are to see what runs on this rank alone.
        with disabled(), torch.no_grad(), warnings.catch_warnings(), _disable_current_modes():
            warnings.simplefilter("ignore")
            kwargs = {k: "meta" if k == "device" or isinstance(v, torch.device) else v for k, v in kwargs.items()}
            args = tuple("meta" if isinstance(a, torch.device) else a for a in args)
            return func(*map_tensors(args, meta), **map_tensors(kwargs, meta))
    except NotImplementedError:
        return NotImplemented
    except Exception:
        return _REFUSED


def _check_outputs(op: Op, rule: Rule, like: list[tuple[torch.Size, torch.dtype]]) -> None:
    said = [rule.out_shape(i) for i in range(len(rule.outputs))]
    real = [tuple(shape) for shape, _ in like]
    if said != real:
        raise RuleError(
            f"the rule of {op.name!r} ({rule.text}) says its outputs have shapes {said}, the op gives {real}: "
            "correct the rule"
        )


def _whole_is_split(rule: Rule, specs: Sequence[Spec]) -> bool:
    for dims, spec in zip(rule.inputs, specs, strict=True):
        for d in spec.layout.dim_axes():
            names = [f for f in dims[d] if rule.sizes[f] != 1]
            if names and names[0] in rule.whole:
                return True
    return False


def _gather_plan(op: Op, mesh: Mesh, specs: list[Spec]) -> CallPlan:
    """Without a rule: every input whole on every rank, the op run everywhere."""
    conversions, decide, lost = [], [], 0.0
    for i, spec in enumerate(specs):
        source = spec.with_(undecided=0)
        if source is not spec:
            decide.append((i, source))
        steps = reshard.plan(source, Spec(spec.shape, spec.dtype, Layout(mesh)))
        if steps.steps:
            conversions.append((i, steps))
            lost += steps.forward_bytes
    plan = CallPlan(op, conversions=tuple(conversions), decide=tuple(decide), mesh=mesh, gathered=True)
    if op.inplace:
        plan.outputs = (Spec(specs[0].shape, specs[0].dtype, Layout(mesh)),)
        plan.back = _way_back(conversions, specs, plan.outputs)
    plan.notes["bytes"] = lost
    return plan


_WARNED: set[str] = set()


def warn_gathered(plan: CallPlan) -> None:
    """One warning per op that runs without a rule and moves data for it."""
    if plan.notes.get("bytes") and "refused" not in plan.notes and plan.op.name not in _WARNED:
        _WARNED.add(plan.op.name)
        warnings.warn(
            f"{plan.op.name} has no rule for these arguments: its inputs are gathered on every rank "
            f"({plan.notes['bytes']:.0f} bytes sent per rank here). Give it one: @mw.rule({plan.op.name!r})",
            stacklevel=6,
        )
