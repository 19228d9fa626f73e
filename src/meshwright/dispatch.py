"""From a call on distributed tensors to a plan, and from the plan to local work.

``plan_call`` decides, once per (function, specs, static arguments), from global metadata alone: which conversions the
inputs need, what runs on locals, which specs the outputs get.  ``execute`` converts, runs and stamps.  Eager tensors
and the static program share both; neither knows which of them is calling.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import convert, record, reshard, runtime
from .choose import Choice, Wish, choose
from .errors import ConversionError, DispatchError, LayoutError, MeshwrightError, RuleError
from .layout import Layout, Spec
from .mesh import Mesh
from .rules import COMPOSITES, RULES, Arg, Local, Native, Rule, Strategy
from .rules.pointwise import is_pointwise, pointwise_rule

Tensor = torch.Tensor
disabled = torch._C.DisableTorchFunctionSubclass
call_disabled = torch._C._disabled_torch_function_impl

# ---------------------------------------------------------------------------------------------- names of ops

_DUNDER = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "rrshift": "__rrshift__", "rlshift": "__rlshift__", "radd": "add", "rmul": "mul", "rand": "bitwise_and",
    "ror": "bitwise_or", "rxor": "bitwise_xor", "div": "div",
}  # fmt: skip
_INPLACE_DUNDER = {"iadd", "isub", "imul", "idiv", "itruediv", "iand", "ior", "ixor", "ilshift", "irshift", "imod",
                   "ipow", "ifloordiv"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Op:
    """A function as dispatch sees it: the name of its rule, and whether it writes to its first argument."""

    name: str
    inplace: bool
    python: bool
    pointwise: bool
    rule: Callable[..., Rule | None] | None
    composite: Callable[..., Any] | None


_OPS: dict[Any, Op] = {}


def resolve(func: Callable[..., Any]) -> Op:
    """The op that a function called by the user stands for."""
    found = _OPS.get(func)
    if found is None:
        found = _OPS[func] = _resolve(func)
    return found


def forget_ops() -> None:
    """Drop what was resolved (a rule was added)."""
    _OPS.clear()
    runtime.RT.plans.clear()
    runtime.RT.fast.clear()


def _resolve(func: Any) -> Op:
    name = op_name(func)
    python = isinstance(func, types.FunctionType)
    inplace = False
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in _INPLACE_DUNDER:
            bare, inplace = bare[1:], True
        name = bare if bare in ("setitem", "getitem") else _DUNDER.get(bare, bare)
        inplace = inplace or bare == "setitem"
    elif name.endswith("_") and not name.endswith("__"):
        inplace = True
        name = name if name in RULES or name in COMPOSITES else name[:-1]
    if python:
        module = getattr(func, "__module__", "")
        if module == "torch.nn.functional":
            name = "F." + name
        elif module not in ("torch.functional", "torch._tensor", "torch"):
            name = f"{module}.{name}"  # nn.init.normal_ is not Tensor.normal_, torch.masked.sum is not torch.sum
    pointwise = not python and is_pointwise(name)
    return Op(
        name,
        inplace,
        python,
        pointwise,
        RULES.get(name) or (pointwise_rule if pointwise else None),
        COMPOSITES.get(name),
    )


def op_name(func: Any) -> str:
    """Name of a function: ``"add"`` for ``torch.add``, ``Tensor.add``, ``aten.add.Tensor``; ``"lib::op"`` for custom ops."""
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        space, _, name = func._qualified_op_name.partition("::")
        return name if space == "aten" else f"{space}::{name}"
    if isinstance(func, torch._library.custom_ops.CustomOpDef):
        return str(func._qualname)
    return str(getattr(func, "__name__", type(func).__name__))


# ---------------------------------------------------------------------------------------------- keys

_T, _F = object(), object()


def _key_bool(a: bool, func: Any) -> Any:
    return _T if a else _F


def _key_int(a: int, func: Any) -> Any:
    op = _OPS.get(func)
    return int if op is not None and op.pointwise else a


def _key_type(a: Any, func: Any) -> Any:
    return type(a)


def _key_self(a: Any, func: Any) -> Any:
    return a


def _key_sequence(a: Sequence[Any], func: Any) -> Any:
    # Numbers in a list are sizes or factors of sizes, floats too (interpolate's scale_factors).
    return (type(a), *[x if x.__class__ is float else key_part(x, func) for x in a])


def _key_slice(a: slice, func: Any) -> Any:
    return (slice, key_part(a.start, func), key_part(a.stop, func), key_part(a.step, func))


def _key_plain(a: Tensor, func: Any) -> Any:
    return (Tensor, a.shape, a.dtype, a.requires_grad)


_KEYS: dict[type, Callable[[Any, Any], Any]] = {
    bool: _key_bool, int: _key_int, float: _key_type, complex: _key_type, tuple: _key_sequence, list: _key_sequence,
    torch.Size: _key_sequence, slice: _key_slice, Tensor: _key_plain, torch.nn.Parameter: _key_plain,
    torch.Generator: _key_type,
}  # fmt: skip
for _plain_type in (str, type(None), torch.dtype, torch.device, type(...), torch.memory_format, torch.layout, type):
    _KEYS[_plain_type] = _key_self


def key_part(a: Any, func: Any) -> Any:
    """What of an argument decides the plan: specs, shapes, flags; never values that cannot change a layout."""
    make = _KEYS.get(a.__class__)
    if make is not None:
        return make(a, func)
    if isinstance(a, Tensor):
        spec = a.__dict__.get("_spec")
        return spec if spec is not None else _key_plain(a, func)
    if isinstance(a, dict):
        return (dict, *[(k, key_part(v, func)) for k, v in a.items()])
    try:
        hash(a)
    except TypeError:
        return type(a)
    return a


# ---------------------------------------------------------------------------------------------- arguments


def tensors_in(args: Any) -> list[Tensor]:
    """All tensors among (nested) arguments, in order."""
    found: list[Tensor] = []
    _collect(args, found)
    return found


def _collect(a: Any, found: list[Tensor]) -> None:
    if isinstance(a, Tensor):
        found.append(a)
    elif isinstance(a, (tuple, list)):
        for x in a:
            _collect(x, found)
    elif isinstance(a, dict):
        for x in a.values():
            _collect(x, found)


def map_tensors(a: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with each tensor replaced, in the order of :func:`tensors_in`."""
    if isinstance(a, Tensor):
        return fn(a)
    if isinstance(a, tuple):
        made = [map_tensors(x, fn) for x in a]
        return type(a)(*made) if hasattr(a, "_fields") else tuple(made)
    if isinstance(a, list):
        return [map_tensors(x, fn) for x in a]
    if isinstance(a, dict):
        return {k: map_tensors(v, fn) for k, v in a.items()}
    return a


def spec_of(t: Tensor, mesh: Mesh) -> Spec:
    """Spec of an argument; a plain tensor counts as replicated."""
    spec = t.__dict__.get("_spec") if hasattr(t, "__dict__") else None
    if spec is not None:
        return spec
    everywhere = (1 << mesh.ndim) - 1
    return Spec(t.shape, t.dtype, Layout(mesh), undecided=0 if t.requires_grad else everywhere)


def mesh_of(tensors: Sequence[Tensor], name: str) -> Mesh:
    """The one mesh that distributed arguments live on.  Raises LayoutError where there are two."""
    mesh: Mesh | None = None
    for t in tensors:
        spec = getattr(t, "__dict__", {}).get("_spec")
        if spec is not None:
            if mesh is not None and spec.mesh != mesh:
                raise LayoutError(
                    f"{name}: arguments lie on different meshes, {mesh!r} and {spec.mesh!r}; bring them together with "
                    "mw.shard_tensor(mw.unshard(x), mesh, placements)"
                )
            mesh = spec.mesh
    if mesh is None:
        raise LayoutError(f"{name}: no argument is a DistTensor")
    return mesh


# ---------------------------------------------------------------------------------------------- plans


@dataclass(slots=True)
class Plan:
    """What to do for one kind of call.

    ``plain``: nothing but the native op on locals, one tensor out; ``fast``: plain, and seen to give what the rule
    says.  ``untyped``: leaves that require grad are tied together (1) or get their type (2) by this call.
    ``retypes``: plain but for conversions that only change types, which do nothing where no gradient is recorded.
    ``native``: run this call instead of the op.  ``swift``: conversions of plain positional arguments around one
    native op: no nested arguments to walk.
    """

    op: Op
    fast: bool = False
    plain: bool = False
    untyped: int = 0
    retypes: bool = False
    native: Native | None = None
    swift: bool = False
    spec: Spec | None = None
    outputs: tuple[Spec, ...] = ()
    conversions: tuple[tuple[int, reshard.Plan], ...] = ()
    decide: tuple[tuple[int, Spec], ...] = ()
    local: Callable[..., Any] | None = None
    run: Callable[..., Any] | None = None
    redispatch: bool = False
    gathered: bool = False
    copies: bool = False
    open: int = 0
    checked: bool = False
    mesh: Mesh | None = None
    choice: Choice | None = None
    why: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def plan_call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], strategies: Sequence[Strategy] | None = None
) -> Plan:
    """Decide how to run a call.  Reads specs, shapes and dtypes only, so that all ranks decide alike.

    ``strategies``, one per mesh axis, are taken instead of the cheapest ones (for tests of a rule).
    """
    op = resolve(func)
    if op.inplace:
        for t in tensors_in(args[:1]):
            refuse_copy(f"{op.name}_: ", t)
    if op.composite is not None:
        return Plan(op, run=op.composite)
    if op.python and op.rule is None:
        return Plan(op, redispatch=True)
    with disabled():
        tensors = tensors_in((args, kwargs))
        mesh = mesh_of(tensors, op.name)
        specs = [spec_of(t, mesh) for t in tensors]
    with mw_context(op, specs):
        return _plan_ruled(func, op, mesh, specs, args, kwargs, strategies)


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
    strategies: Sequence[Strategy] | None = None,
) -> Plan:
    like = global_outputs(func, specs, args, kwargs)
    rule = make_rule(op, specs, args, kwargs)
    if op.python and (rule is None or like is None or (not op.inplace and _whole_is_split(rule, specs))):
        return Plan(op, redispatch=True)
    if rule is None or (like is None and not rule.outputs):
        return _mark_copies(_gather_plan(op, mesh, specs), func, specs, args, kwargs)
    if like is None:
        like = [(torch.Size(rule.out_shape(i)), specs[0].dtype) for i in range(len(rule.outputs))]
    else:
        _check_outputs(op, rule, like)
    if rule.decompose is not None and not op.inplace and _whole_is_split(rule, specs):
        return Plan(op, run=rule.decompose, mesh=mesh)
    choice = choose(rule, specs, like, inplace=op.inplace, strategies=strategies)
    return _mark_copies(_plan_from(op, mesh, rule, specs, choice), func, specs, args, kwargs)


def refuse_copy(what: str, t: Tensor) -> None:
    """Raises DispatchError where a write to ``t`` would be lost: a view that needed communication is a copy."""
    spec = getattr(t, "__dict__", {}).get("_spec")
    if spec is not None and spec.copied:
        raise DispatchError(
            f"{what}in place on a view that is a copy here ({spec!r}): making it needed communication, so the write would "
            "not reach the tensor that it was taken from. Write to that tensor itself, x[...] = x[...] + y; or mw.reshard "
            "it first so that the view is local; or .clone() the view if it is to be a copy"
        )


def _mark_copies(plan: Plan, func: Any, specs: list[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Views of converted inputs, or of copies, do not alias what the caller holds: their specs say so."""
    moved = any(s.kind != "retype" for _, c in plan.conversions for s in c.steps)
    if not plan.op.inplace and (moved or any(s.copied for s in specs)) and _is_view(func, specs, args, kwargs):
        plan.outputs = tuple(s.with_(copied=True) for s in plan.outputs)
        plan.spec = plan.outputs[0] if plan.outputs else None
        plan.copies = True
    return plan


def _is_view(func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether on one device an output would share memory with an input."""
    given: list[Tensor] = []
    made = _run_meta(func, specs, args, kwargs, given)
    memory = {t.untyped_storage()._cdata for t in given}
    return any(t.untyped_storage()._cdata in memory for t in tensors_in(made))


def _plan_from(op: Op, mesh: Mesh, rule: Rule, specs: list[Spec], choice: Choice) -> Plan:
    conversions = []
    for i, (src, dst) in enumerate(zip(choice.sources, choice.inputs, strict=True)):
        if src.undecided:
            dst = dst.with_(undecided=0)
            src = src.with_(undecided=0)
        steps = reshard.plan(src, dst)
        if steps.steps:
            conversions.append((i, steps))
    if op.inplace and any(i == 0 for i, _ in conversions):
        raise DispatchError(
            f"in place, the first tensor must keep its layout {specs[0].layout!r}; use the out-of-place op, or "
            "mw.reshard it first"
        )
    decide = tuple(
        (i, src) for i, (given, src) in enumerate(zip(specs, choice.sources, strict=True)) if given is not src
    )
    local = None
    if rule.local is not None:
        here = mesh.coordinate(runtime.RT.rank)
        local = rule.local(Local(rule, choice.inputs, choice.outputs, here))
    direct = (
        (local is None or isinstance(local, Native))
        and choice.outputs != ()
        and not (op.inplace and (decide or choice.open))
    )
    return Plan(
        op,
        plain=not conversions and direct,
        retypes=bool(conversions) and direct and all(s.kind == "retype" for _, c in conversions for s in c.steps),
        untyped=2 if decide else int(bool(choice.open)),
        native=local if isinstance(local, Native) else None,
        swift=bool(conversions) and direct and not decide and not choice.open and not op.inplace,
        spec=choice.outputs[0] if choice.outputs else None,
        outputs=choice.outputs,
        conversions=tuple(conversions),
        decide=decide,
        local=local,
        open=choice.open,
        mesh=mesh,
        choice=choice,
        why=rule.text,
    )


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
        made = op.rule(*map_tensors(args, arg), **map_tensors(kwargs, arg))
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
    """Global shape and dtype of each output, from a run on meta tensors; None where PyTorch cannot tell.

    Mistakes of the caller (shapes that do not fit) surface later, when every rank runs the gathered op.
    """
    made = _run_meta(func, specs, args, kwargs, [])
    if made is NotImplemented:
        return None
    if isinstance(made, Tensor):
        return [(made.shape, made.dtype)]
    if isinstance(made, (tuple, list)):
        return [(t.shape, t.dtype) for t in tensors_in(made)]
    return None if made is not None else [(specs[0].shape, specs[0].dtype)]


def _run_meta(
    func: Any, specs: Sequence[Spec], args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
) -> Any:
    """The op on meta tensors (which ``given`` collects); NotImplemented where PyTorch cannot run it."""
    count = iter(range(len(specs)))

    def meta(t: Tensor) -> Tensor:
        s = specs[next(count)]
        given.append(torch.empty(s.shape, dtype=s.dtype, device="meta"))
        return given[-1]

    try:
        with disabled(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kwargs = {k: "meta" if k == "device" or isinstance(v, torch.device) else v for k, v in kwargs.items()}
            args = tuple("meta" if isinstance(a, torch.device) else a for a in args)
            return func(*map_tensors(args, meta), **map_tensors(kwargs, meta))
    except Exception:
        return NotImplemented


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


def _gather_plan(op: Op, mesh: Mesh, specs: list[Spec]) -> Plan:
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
    plan = Plan(op, conversions=tuple(conversions), decide=tuple(decide), mesh=mesh, gathered=True)
    plan.notes["bytes"] = lost
    return plan


_WARNED: set[str] = set()


def warn_gathered(plan: Plan) -> None:
    """One warning per op that runs without a rule and moves data for it."""
    if plan.notes.get("bytes") and plan.op.name not in _WARNED:
        _WARNED.add(plan.op.name)
        warnings.warn(
            f"{plan.op.name} has no rule for these arguments: its inputs are gathered on every rank "
            f"({plan.notes['bytes']:.0f} bytes sent per rank here). Give it one: @mw.rule({plan.op.name!r})",
            stacklevel=6,
        )


# ---------------------------------------------------------------------------------------------- execution

Stamp = Callable[[Tensor, Spec], Any]


def convert_tensor(t: Tensor, steps: reshard.Plan, note: Callable[[], None] | None = None) -> Tensor:
    """``t`` brought to ``steps.dst``; made once per value and layout, so that its backward reduces once.

    ``note`` is called before data moves.
    """
    grad = torch.is_grad_enabled() and t.requires_grad
    if steps.free and not grad:
        return t
    memo: dict[Any, Tensor] | None = None
    space = t.__dict__
    if "_spec" in space and not (grad and t.is_leaf) and not _unseen(t, space):
        version, memo = space.get("_memo", _NO_MEMO)
        if version != t._version:
            memo = {}
            space["_memo"] = (t._version, memo)
        assert memo is not None
        # Without a gradient the types of replicated axes do not matter: the layout alone is what was made.
        hit = memo.get(steps if grad else steps.dst.layout)
        if hit is not None:
            return hit
    made = _already_there(t, steps, memo) if grad else None
    if made is None:
        if note is not None:
            note()
        made = convert.apply(steps.steps, t)
    if memo is not None:
        memo[steps if grad else steps.dst.layout] = made
        if grad:
            memo.setdefault(steps.dst.layout, made.detach())
    return made


def _unseen(t: Tensor, space: dict[str, Any]) -> bool:
    """Whether a tensor may change with no version counter telling, or what is made of it is of another kind later."""
    return "_shared" in space or torch.is_inference_mode_enabled() or t.is_inference()


_NO_MEMO: tuple[None, None] = (None, None)


def execute_swift(plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert positional tensors and run the native op; must run with dispatch disabled.  Outputs are not stamped."""
    changed = list(args)
    for i, steps in plan.conversions:
        t = changed[i]
        changed[i] = _convert_recorded(plan, i, t, steps) if steps.moves else convert_tensor(t, steps)
    if plan.native is not None:
        return plan.native(changed[0])
    return func(*changed, **kwargs)


def _already_there(t: Tensor, steps: reshard.Plan, memo: dict[Any, Tensor] | None) -> Tensor | None:
    """The value as the target type without moving data that was moved before.

    A value that was converted to this layout for another consumer, with another type, keeps its data and gets its own
    backward.  A shard gathered by name (``mw.reshard``) is first taken as invariant; where it turns out to feed
    rank-dependent work, its gradient goes back in one reduce-scatter instead of an all-reduce and a slice.
    """
    if steps.moves and memo is not None and not any(convert.selects(s) for s in steps.steps):
        value = memo.get(steps.dst.layout)
        return convert.apply_known(steps.steps, t, value) if value is not None else None
    origin, versions = t.__dict__.get("_origin", (None, None))
    if steps.moves or origin is None or versions != (origin._version, t._version):
        return None
    direct = reshard.plan(origin.__dict__["_spec"].with_(undecided=0), steps.dst)
    if direct.backward_bytes >= steps.backward_bytes or any(convert.selects(s) for s in direct.steps):
        return None
    return convert.apply_known(direct.steps, origin, t)


def execute(plan: Plan, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stamp: Stamp) -> Any:
    """Convert the inputs, run the op on locals, stamp the outputs.  Must run with dispatch disabled."""
    tensors = tensors_in((args, kwargs))
    grad_on = torch.is_grad_enabled()
    if grad_on:
        replan = False
        for i, spec in plan.decide:
            t = tensors[i]
            if t.requires_grad and "_spec" in t.__dict__:
                if _leans_invariant(t, spec):
                    spec, replan = t.__dict__["_spec"].with_(undecided=0), True
                settle(t, spec)
        if replan:
            return execute(plan_call(func, args, kwargs), func, args, kwargs, stamp)
    locals_ = list(tensors)
    for i, steps in plan.conversions:
        locals_[i] = _convert_recorded(plan, i, tensors[i], steps)
    result = _run_local(plan, func, args, kwargs, tensors, locals_)
    if not plan.op.inplace:
        result = _own(plan, result, tensors, locals_)
    if plan.gathered:
        return _finish_gathered(plan, tensors, result, stamp)
    if plan.op.inplace:
        if plan.local is not None and isinstance(result, Tensor) and result is not tensors[0]:
            tensors[0].copy_(result)  # the local function computed the new value instead of writing it
        stamp(tensors[0], plan.outputs[0])
        plan.fast = (plan.plain or plan.retypes) and result is tensors[0]
        return tensors[0]
    return _finish(plan, tensors, result, stamp, grad_on)


def _convert_recorded(plan: Plan, i: int, t: Tensor, steps: reshard.Plan) -> Tensor:
    if steps.moves and (runtime.RT.explicit or runtime.RT.records is not None):
        return convert_tensor(t, steps, lambda: record.implicit(plan.op.name, i, steps, plan.why))
    return convert_tensor(t, steps)


def _run_local(
    plan: Plan,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    locals_: list[Tensor],
) -> Any:
    if (plan.local is None or plan.native is not None) and not plan.gathered:
        if plan.conversions:
            given = iter(locals_)
            args, kwargs = map_tensors((args, kwargs), lambda _: next(given))
        return func(*args, **kwargs) if plan.native is None else plan.native(args[0])
    # Code that looks at .shape must see local tensors as plain ones.
    swapped = [t for t in locals_ if type(t) is not Tensor and "_spec" in t.__dict__]
    kind = type(swapped[0]) if swapped else Tensor
    for t in swapped:
        t.__class__ = Tensor
    try:
        given = iter(locals_)
        args, kwargs = map_tensors((args, kwargs), lambda _: next(given))
        return (plan.local or func)(*args, **kwargs)
    finally:
        for t in swapped:
            t.__class__ = kind


def _own(plan: Plan, result: Any, tensors: Sequence[Tensor], locals_: Sequence[Tensor]) -> Any:
    """An op may return its input: only the caller's own distributed tensor may be stamped, of others an alias is.

    Others are plain tensors of the caller, and converted inputs, which may be kept for their next use.
    """
    others = [a for a, t in zip(locals_, tensors, strict=True) if a is not t or "_spec" not in t.__dict__]
    if not others or not any(r is a for r in tensors_in(result) for a in others):
        return result
    plan.plain = plan.retypes = plan.swift = False
    return map_tensors(result, lambda r: r.view_as(r) if any(r is a for a in others) else r)


def _finish(plan: Plan, tensors: Sequence[Tensor], result: Any, stamp: Stamp, grad_on: bool) -> Any:
    made = tensors_in(result)
    if not plan.checked:
        _check_locals(plan, made)
        flat = isinstance(result, Tensor) or len(result) == len(made)
        plan.swift = plan.swift and flat
        plan.fast = flat and (plan.plain or plan.retypes) and all(t.__class__ is Tensor for t in made)
    for t, spec in zip(made, plan.outputs, strict=True):
        stamp(t, spec)
        if plan.open and grad_on and t.requires_grad and spec.undecided:
            tie([*tensors, t])
    return result


def settle_after(plan: Plan, args: Any, kwargs: Any, result: Any, stamp: Stamp) -> Any:
    """Stamp outputs of a call that ran already, and give its leaves the types that it implies."""
    tensors = tensors_in((args, kwargs))
    with disabled():
        if torch.is_grad_enabled():
            for i, spec in plan.decide:
                if tensors[i].requires_grad:
                    settle(tensors[i], spec)
        return _finish(plan, tensors, result, stamp, torch.is_grad_enabled())


def _check_locals(plan: Plan, made: Sequence[Tensor]) -> None:
    assert plan.mesh is not None
    here = plan.mesh.coordinate(runtime.RT.rank)
    want = [spec.local_shape(here) for spec in plan.outputs]
    with disabled():
        have = [tuple(Tensor.size(t)) for t in made]
    if want != have:
        raise RuleError(
            f"the rule of {plan.op.name!r} ({plan.why}) says that this rank gets {want}, the op gave {have}: correct it"
        )
    for t, spec in zip(made, plan.outputs, strict=True):
        if t.dtype != spec.dtype:
            plan.outputs = tuple(s.with_(dtype=m.dtype) for s, m in zip(plan.outputs, made, strict=True))
            plan.spec = plan.outputs[0]
            break
    plan.checked = True


def _finish_gathered(plan: Plan, tensors: Sequence[Tensor], result: Any, stamp: Stamp) -> Any:
    assert plan.mesh is not None
    whole = Layout(plan.mesh)
    everywhere = (1 << plan.mesh.ndim) - 1

    def spec(t: Tensor) -> Spec:
        return Spec(t.shape, t.dtype, whole, 0, 0 if t.requires_grad else everywhere, plan.copies)

    if plan.op.inplace:
        target: Spec = tensors[0].__dict__.get("_spec") or spec(tensors[0])
        moved = {i for i, _ in plan.conversions}
        with disabled():
            resized = isinstance(result, Tensor) and Tensor.size(result) != target.shape
        if resized:  # resize_: what is left of the old layout is of no use
            if 0 in moved:
                with _as_plain(tensors[0]) as local:
                    local.set_(result)
            stamp(tensors[0], Spec(Tensor.size(result), target.dtype, whole, 0, everywhere))
        elif 0 in moved and isinstance(result, Tensor):
            back = reshard.plan(Spec(target.shape, target.dtype, whole), target.with_(undecided=0))
            with _as_plain(tensors[0]) as local:
                local.copy_(convert.apply(back.steps, result))
        return tensors[0]
    for t in tensors_in(result):
        with disabled():
            stamp(t, spec(t))
    return result


class _as_plain:
    """A distributed tensor seen as its plain local tensor for a while."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.kind = t, type(t)

    def __enter__(self) -> Tensor:
        self.t.__class__ = Tensor
        return self.t

    def __exit__(self, *_: object) -> None:
        self.t.__class__ = self.kind


# ---------------------------------------------------------------------------------------------- types of leaves


class _Tied:
    """Tensors whose replicated axes must become of one type: leaves and what was computed from them so far.

    Members are weak: a tensor that nobody can name any more needs no type.
    """

    def __init__(self) -> None:
        self.members: dict[int, weakref.ref[Tensor]] = {}

    def add(self, t: Tensor) -> None:
        key, members = id(t), self.members
        members[key] = weakref.ref(t, lambda _: members.pop(key, None))
        t.__dict__["_tied"] = self

    def alive(self) -> list[Tensor]:
        return [t for t in (r() for r in list(self.members.values())) if t is not None]


def tie(tensors: Sequence[Tensor]) -> None:
    """Undecided tensors that one op connects get their type together."""
    tied: _Tied | None = None
    for t in tensors:
        space = getattr(t, "__dict__", {})
        spec = space.get("_spec")
        if spec is None or not spec.undecided or not t.requires_grad:
            continue
        own: _Tied | None = space.get("_tied")
        if tied is None:
            tied = own or _Tied()
        if own is None:
            tied.add(t)
        elif own is not tied:
            for m in own.alive():
                tied.add(m)


def _leans_invariant(t: Tensor, spec: Spec) -> bool:
    """Whether an undecided value should be reduced where it is used, not at the leaves that it was computed from.

    Reducing at the leaves is shared by all uses and bucketed; it is dearer where the leaves are larger than the value.
    """
    tied: _Tied | None = t.__dict__.get("_tied")
    if t.is_leaf or tied is None or not spec.reduced & t.__dict__["_spec"].undecided:
        return False
    leaves = sum(m.__dict__["_spec"].shape.numel() for m in tied.alive() if m.is_leaf)
    return leaves > spec.shape.numel()


def settle(t: Tensor, spec: Spec) -> None:
    """Give an undecided tensor its types, and the same ones to the tensors tied to it."""
    space = getattr(t, "__dict__", {})
    old = space.get("_spec")
    if old is None or old is spec:
        return
    tied: _Tied | None = space.get("_tied")
    decided = old.undecided & ~spec.undecided
    for m in tied.alive() if tied is not None else [t]:
        now: Spec = m.__dict__["_spec"]
        mine = decided & now.undecided
        now = now.with_(reduced=now.reduced | (spec.reduced & mine), undecided=now.undecided & ~mine)
        m.__dict__["_spec"] = now
        if not now.undecided:
            m.__dict__.pop("_tied", None)


# ---------------------------------------------------------------------------------------------- inference


@dataclass(frozen=True)
class Inference:
    """What a rule answers: layouts the inputs must have, layouts the outputs get, how, and at what cost in bytes."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategy: tuple[str, ...]
    bytes: float


def infer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Spec] | None) -> Inference:
    """Shared body of ``infer_forward`` and ``infer_backward``; specs stand in place of tensors."""
    rule_fn = RULES.get(name) or (pointwise_rule if is_pointwise(name) else None)
    if rule_fn is None:
        raise RuleError(f"{name!r} has no rule; the ops that have one: meshwright.rules.RULES")
    specs: list[Spec] = []
    _collect_specs((args, kwargs), specs)
    if not specs:
        raise RuleError(f"{name!r}: give mw.Spec(shape, dtype, layout) in place of each tensor")
    op = Op(name, False, False, False, rule_fn, None)
    with mw_context(op, specs):
        stand_in = iter(specs)
        made_args, made_kwargs = _map_specs((args, kwargs), lambda s: _StandIn(next(stand_in)))
        rule = make_rule(op, specs, made_args, made_kwargs)
        if rule is None:
            raise RuleError("the rule has nothing to say for these arguments: the inputs would be gathered")
        dtype = outputs[0].dtype if outputs else specs[0].dtype
        like = [(rule.out_shape(i), dtype) for i in range(len(rule.outputs))]
        choice = choose(rule, specs, like, wish=Wish(tuple(outputs)) if outputs else None)
    moved = sum(reshard.plan(s, t.with_(undecided=0)).bytes for s, t in zip(choice.sources, choice.inputs, strict=True))
    names = tuple(
        c.factor or ("replicate" if not any("Partial" in repr(p) for p in c.inputs) else "partial")
        for c in choice.strategies
    )
    return Inference(choice.inputs, choice.outputs, names, moved)


class _StandIn(torch.Tensor):
    """A tensor without data that carries a spec through :func:`map_tensors`."""

    @staticmethod
    def __new__(cls, spec: Spec) -> _StandIn:
        return torch.Tensor._make_subclass(cls, torch.empty(0, device="meta"))


def _collect_specs(a: Any, found: list[Spec]) -> None:
    if isinstance(a, Spec):
        found.append(a)
    elif isinstance(a, (tuple, list)):
        for x in a:
            _collect_specs(x, found)
    elif isinstance(a, dict):
        for x in a.values():
            _collect_specs(x, found)


def _map_specs(a: Any, fn: Callable[[Spec], Any]) -> Any:
    if isinstance(a, Spec):
        return fn(a)
    if isinstance(a, (tuple, list)):
        return type(a)(_map_specs(x, fn) for x in a)
    if isinstance(a, dict):
        return {k: _map_specs(v, fn) for k, v in a.items()}
    return a


__all__ = ["ConversionError", "Inference", "Op", "Plan", "execute", "infer", "plan_call", "resolve"]
