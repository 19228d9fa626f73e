"""A plan: how one kind of call runs, decided from global metadata alone."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypedDict

import torch

from ..collective import BY_HAND, refuse_by_hand
from ..compat import disable_current_modes
from ..errors import DispatchError, MeshwrightError, RuleError
from ..layout import NO_MARKS, Layout, Spec, marked, marks_of, widest_accumulate_dtype
from ..operators import FUNCTIONS
from ..ranks import runtime
from ..resharding import planner as resharding
from ..rules import Arg, Local, Native, Rule, Strategy
from ..rules.dims import on_padded
from ..rules.factor_notation import LocalFn
from ..strategy_selection import Choice, Search, Types, carries_grad, choose, sure_types
from . import autocast, results
from .binding import Args, Kwargs
from .calls import Op, disabled, map_tensors, mesh_of, resolve, spec_of, tensors_in
from .local_comm import LocalComm
from .results import Outputs
from .written_arguments import into, written

Tensor = torch.Tensor
_DECIDED = runtime.Recent(runtime.LEAST, limit=runtime.MOST)  # the same for all ranks, as what results were told
AS_OP = 'To divide its work make it a custom op (torch.library.custom_op) with a rule: @mw.rule("lib::op")'
Conversions = tuple[tuple[int, resharding.ConversionPlan], ...]


class Route(Enum):
    """How a call runs, from the least work to the most."""

    NATIVE = auto()  # the native op on locals
    NATIVE_WITHOUT_GRAD = auto()  # NATIVE where no gradient is recorded, else EXECUTE: conversions change types alone
    RETYPE_THEN_NATIVE = auto()  # NATIVE where no gradient is recorded, else CONVERT_THEN_NATIVE
    CONVERT_THEN_NATIVE = auto()  # conversions of positional tensors, then the native op; EXECUTE to give leaves types
    EXECUTE = auto()  # all that the plan says
    FUNCTION = auto()  # a function computes it by other calls
    REDISPATCH = auto()  # PyTorch's own Python code computes it by other calls
    CAST = auto()  # the call outside of autocast, on what that casts
    STAND_IN = auto()  # looked up again where nothing stands in for the arguments


@dataclass(slots=True, eq=False)
class ShapePolymorphicPlan:
    """What was decided for calls that differ in sizes alone, and holds for all of these.

    ``shown``: on each rank the route that a first run showed of the native op, and the dtypes of what it gave.
    """

    dtypes: tuple[torch.dtype, ...]
    views: bool
    types: Types
    shown: dict[int, tuple[Route, tuple[torch.dtype, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What to do for one kind of call.

    ``candidate_route``: the route of later calls, once a first run (of all that the plan says) gave what the rule
    says; None when it did.  ``plain``: a native op on locals, right with autocast and without.  ``casts``: what
    autocast casts of its inputs, where the op does not.  ``fn`` computes the call by other calls, or takes the op's
    place on locals.
    ``conversions``: of inputs, by their order.  ``known``: of Partial inputs that were reduced before: the reduced
    value is taken in their place.  ``decide``: inputs that get these types.  ``back``: a write that cannot be made in
    the layout of its target is made in a copy of another layout, which is then brought back and copied into the target.

    ``choice``: None where there is no rule, and inputs are gathered, with a ``warning`` where that moves data.
    ``copies``: results are views that are copies on the mesh; ``pieces``: pieces of one value, parts of sums;
    ``image``: and as large as that value;
    ``watched``: arguments are such copies (see ``views``).  ``replayed``: this rank has nothing of a result (see
    ``execution``).  ``graded``: another choice is cheaper where other arguments need gradients.
    ``mixed``: plain tensors are among the arguments, which stand for what all ranks have.
    ``untyped``: leaves that need gradients are linked (1) or get their types (2) by this call.
    ``line``: what this plan shares with those of other sizes.
    """

    op: Op
    route: Route = Route.EXECUTE
    candidate_route: Route | None = None
    plain: bool = False
    casts: autocast.InputCasts | None = None
    fn: LocalFn | None = None
    outputs: tuple[Spec, ...] = ()
    conversions: Conversions = ()
    known: Conversions = ()
    decide: tuple[tuple[int, Spec], ...] = ()
    back: resharding.ConversionPlan | None = None
    choice: Choice | None = None
    why: str = ""
    warning: str = ""
    copies: bool = False
    pieces: bool = False
    image: bool = False
    watched: bool = False
    replayed: bool = False
    graded: bool = False
    mixed: bool = False
    line: ShapePolymorphicPlan | None = None
    untyped: int = field(init=False)

    def __post_init__(self) -> None:
        open_ = self.choice is not None and self.choice.open
        object.__setattr__(self, "untyped", 2 if self.decide else int(bool(open_)))


class OfInputs(TypedDict):
    """What a plan says of the inputs of its call."""

    conversions: Conversions
    known: Conversions
    decide: tuple[tuple[int, Spec], ...]
    back: resharding.ConversionPlan | None
    watched: bool
    mixed: bool


def plan_call(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    strategies: Sequence[Strategy] | None = None,
    *,
    known: Callable[[Tensor], bool] | None = None,
) -> CallPlan:
    """Decide how to run a call.  Reads specs, shapes and dtypes only, so that all ranks decide alike.

    ``strategies``, one per mesh axis, are taken instead of the cheapest ones (for tests of a rule).  ``known``: for
    which Partial values the value to which they were reduced before is taken; None: for all.
    """
    op = resolve(func)
    if op.custom and op.name.partition("::")[0] in BY_HAND:
        refuse_by_hand(op.name, next(t.__dict__["_spec"] for t in tensors_in((args, kwargs)) if "_spec" in t.__dict__))
    if kwargs.get("out") is not None:
        return CallPlan(op, Route.FUNCTION, fn=partial(into, getattr(func, "overloadpacket", func)))
    if op.composite is not None:
        bound = op.binding(args, kwargs)
        return CallPlan(op, Route.FUNCTION, fn=bound.around(op.composite) if bound else op.composite)
    if op.python and op.rule is None:
        return CallPlan(op, Route.REDISPATCH)
    # Modes around the call, as selective checkpoints have, are to see what runs on this rank alone.
    with disabled(), disable_current_modes():
        planner = _Planner(op, func, args, kwargs, known)
        with naming(op, planner.specs):
            return planner.plan(strategies)


def casts_of(func: Any, args: Args, kwargs: Kwargs) -> autocast.InputCasts | None:
    """What autocast casts of the arguments of a call, whatever computes it; None: nothing."""
    op = resolve(func)
    if op.python or kwargs.get("out") is not None or not autocast.active():
        return None
    tensors = tensors_in((args, kwargs))
    mesh = mesh_of(tensors, op.name)
    specs = [spec_of(t, mesh) for t in tensors]
    with disabled(), disable_current_modes():
        return autocast.casts(func, specs, args, kwargs, mesh.device)


class _Planner:
    """Makes the plan of one call.

    ``specs``: of its tensors, with what is known of their values and what autocast makes of them.  ``free``: which are
    plain and need no gradient, as their keys say.  ``constants``: which need no gradient.  ``views``: on one device an
    output would share memory with an input.  ``mixed``: whether plain ones are among them.
    """

    def __init__(self, op: Op, func: Any, args: Args, kwargs: Kwargs, known: Callable[[Tensor], bool] | None) -> None:
        self.op, self.func, self.args, self.kwargs = op, func, args, kwargs
        tensors = tensors_in((args, kwargs))
        self.mesh = mesh_of(tensors, op.name)
        carried = [spec_of(t, self.mesh) for t in tensors]
        marks = [marks_of(s) for s in carried]
        self.specs = [marked(s, NO_MARKS) for s in carried]
        self.constants = {i for i, t in enumerate(tensors) if not t.requires_grad}
        self.free = {i for i in self.constants if "_spec" not in tensors[i].__dict__}
        self.watched = any(m.copied for m in marks)
        self.mixed = any("_spec" not in t.__dict__ for t in tensors)
        self.forgets = op.inplace and marks[0].known is not None
        self.views = False
        self.known: list[tuple[int, resharding.ConversionPlan]] = []
        for i, (s, m) in enumerate(zip(self.specs, marks, strict=True)):
            if op.inplace and i == 0:  # what is written to stays what it is
                continue
            if m.known is not None and (known is None or known(tensors[i])):
                open_ = s.undecided_mask & m.known.undecided_mask
                self.known.append(
                    (i, resharding.plan(s.with_(undecided_mask=open_), m.known.with_(undecided_mask=open_)))
                )
                self.specs[i] = m.known

    def plan(self, strategies: Sequence[Strategy] | None) -> CallPlan:
        """See :func:`plan_call`."""
        casts = None
        if autocast.active():
            casts = autocast.casts(self.func, self.specs, self.args, self.kwargs, self.mesh.device)
        if casts is None:
            return self._of_any_route(strategies)
        if self.op.python:
            return CallPlan(self.op, Route.REDISPATCH)
        dtypes = casts.dtypes
        self.specs = [s.with_(dtype=dtypes[i]) if i in dtypes else s for i, s in enumerate(self.specs)]
        plan = self._of_any_route(strategies)
        return plan if plan.plain else CallPlan(self.op, Route.CAST, casts=casts)  # plain: the native op casts

    def _of_any_route(self, strategies: Sequence[Strategy] | None) -> CallPlan:
        op, specs = self.op, self.specs
        rule, wrong = None, None
        try:
            rule = make_rule(op, specs, self.args, self.kwargs)
        except Exception as error:  # of arguments that PyTorch refuses, maybe: then it is to say so
            wrong = error
        kind = None if rule is None else results.kind_of(self.func, rule, specs, self.args, self.kwargs)
        line = None
        if rule is not None and kind is not None and rule.decompose is None and not (strategies or results.VERIFY):
            # What was decided for such a line, and holds for all sizes alike.
            line = (kind, Search(rule, specs, (), op.inplace, None, self.constants).kind(), frozenset(self.free))
            decided: ShapePolymorphicPlan | None = _DECIDED.find(line)
            if decided is not None:
                self.views = decided.views
                sizes = [(torch.Size(rule.out_shape(i)), dtype) for i, dtype in enumerate(decided.dtypes)]
                return self._ruled(rule, decided.types.of(specs, sizes), False, decided)
        result = known = results.told(kind, rule)
        if result is None or results.VERIFY:
            result = results.ask(self.func, specs, self.args, self.kwargs)
            results.compare(op, known, result)
        if result.refused:
            # Most likely a mistake of the caller: ranks run the op on whole values, and PyTorch says what is wrong.
            return CallPlan(op, Route.REDISPATCH) if op.python else self._gathered()
        if wrong is not None:
            raise wrong
        like, self.views = result.outputs, result.views and not op.inplace
        if op.python and (rule is None or like is None or (not op.inplace and _whole_is_split(rule, specs))):
            return CallPlan(op, Route.REDISPATCH)
        if rule is None or (like is None and not rule.outputs):
            return self._gathered(warn=True)
        if like is None:
            like = [(torch.Size(rule.out_shape(i)), specs[0].dtype) for i in range(len(rule.outputs))]
        elif known is None:
            results.check(op, rule, like)
            results.remember(kind, result)
        if rule.decompose is not None and not op.inplace and _whole_is_split(rule, specs):
            return CallPlan(op, Route.FUNCTION, fn=self._in_order(rule.decompose))
        try:
            choice, graded = self._choose(rule, like, op.inplace, strategies)
        except DispatchError:
            choice, graded = self._choose(rule, like, False, strategies)
            line = None
        if line is not None and (types := self._types_for_all_sizes(rule, like, graded)) is not None:
            decided = ShapePolymorphicPlan(tuple([dtype for _, dtype in like]), self.views, types)
            _DECIDED.keep(line, decided)
            return self._ruled(rule, choice, graded, decided)
        return self._ruled(rule, choice, graded)

    def _types_for_all_sizes(self, rule: Rule, like: Outputs, graded: bool) -> Types | None:
        """What the choice is in all sizes; None where it hangs on these, or on what needs a gradient."""
        if graded or any(s.layout.blocks for s in self.specs):
            return None
        ways = [sure_types(rule, self.specs, like, inplace=self.op.inplace, constants=c) for c in self._without(rule)]
        return ways[0] if None not in ways else None

    def _without(self, rule: Rule) -> list[Collection[int]]:
        """Inputs that have no gradient to be reduced: as in this call first, then as in others of the same key."""
        specs, free = self.specs, self.free
        beside = [i for i, s in enumerate(specs) if i not in free and carries_grad(s.dtype) and not s.layout.partial]
        if not beside or not rule.linear or not any(s.layout.partial for s in specs):
            return [free]
        others = [[], beside, *([i] for i in beside)] if len(beside) > 1 else [[], beside]
        own = [*free, *(i for i in beside if i in self.constants)]
        return [own, *([*free, *some] for some in others)]

    def _choose(
        self, rule: Rule, like: Outputs, inplace: bool, strategies: Sequence[Strategy] | None
    ) -> tuple[Choice, bool]:
        """The choice, and whether it hangs on which distributed operands need a gradient.

        Beside a Partial, a replicated operand has its gradient reduced, which may cost more than to reduce the Partial
        first; one that needs none costs nothing.
        """

        def made(without: Collection[int]) -> Choice:
            return choose(rule, self.specs, like, inplace=inplace, strategies=strategies, constants=without)

        own, *others = self._without(rule)
        choice = made(own)
        return choice, any(made(some) != choice for some in others)

    def _ruled(self, rule: Rule, choice: Choice, graded: bool, line: ShapePolymorphicPlan | None = None) -> CallPlan:
        op, specs, outputs = self.op, self.specs, choice.outputs
        comm = None if rule.local is None else LocalComm(op.name, self.mesh)
        ctx = Local(rule, choice.inputs, outputs, self.mesh.coordinate(runtime.RT.rank), comm)
        fn = None if rule.local is None else rule.local(ctx)
        own = fn is not None and not isinstance(fn, Native)
        if fn is not None and not self._is_native(fn):
            fn = self._in_order(fn)
        if rule.padded and ctx.is_empty():
            fn = on_padded(ctx, fn or self.func)
        conversions = _conversions(choice.sources, choice.inputs)
        copies = (own or self._moves(conversions)) and self.views
        stays = choice.inputs[0].layout == choice.sources[0].layout
        smaller = len(outputs) > 1 or (bool(outputs) and outputs[0].shape.numel() < specs[0].shape.numel())
        parts = len(specs) == 1 and stays and any(s.layout.partial for s in outputs)
        image = parts and not smaller and self._is_image(fn, outputs[0])
        pieces = image or (parts and smaller and self.views)
        given = self._converted(conversions, choice.sources, outputs)
        if op.inplace and rule.crossing and own and given["back"] is None and outputs[0].shape == specs[0].shape:
            # The local function makes the new value, and may keep the old one for the backward: it gets a copy.
            given["back"] = resharding.plan(outputs[0], outputs[0])
        replayed = not op.inplace and any(s.shape.numel() and 0 in s.local_shape(ctx.here) for s in outputs)
        falls = isinstance(fn, Native) and fn.otherwise is not None and conversions  # maybe a copy: the run says
        whole = (fn is None or self._is_native(fn)) and not (copies or (pieces and not image) or replayed or falls)
        candidate_route: Route | None = (
            self._candidate_route(given, outputs, bool(choice.open)) if whole else Route.EXECUTE
        )
        plain = candidate_route is Route.NATIVE
        if not plain or fn is not None or op.inplace or self.mixed:  # what such a call gives hangs on memory, too
            line = None
        known = line.shown.get(runtime.RT.rank) if line is not None else None
        route = Route.EXECUTE
        if known is not None and all(s.layout.even(s.shape) for s in (*choice.inputs, *outputs)):
            route, dtypes = known
            candidate_route = None
            outputs = tuple([s.with_(dtype=d) for s, d in zip(outputs, dtypes, strict=True)])
        return CallPlan(
            op, route, candidate_route, plain, fn=fn, outputs=outputs, choice=choice, why=rule.text, copies=copies,
            pieces=pieces, image=image, replayed=replayed, graded=graded, line=line, **given,
        )  # fmt: skip

    def _is_image(self, fn: LocalFn | None, made: Spec) -> bool:
        """Whether the op may be computed again, of the reduced value in place of the Partial one, which is as large."""
        source = self.specs[0]
        same = source.layout.partial == made.layout.partial and source.shape.numel() == made.shape.numel()
        native = (fn is None or self._is_native(fn)) and bool(self.args) and isinstance(self.args[0], Tensor)
        # Of what draws numbers no rule keeps a Partial with the op itself.
        return same and native and not self.op.inplace and source.dtype is made.dtype

    def _candidate_route(self, given: OfInputs, outputs: tuple[Spec, ...], open_: bool) -> Route:
        """The least work that a plan allows which runs the op itself."""
        op, conversions, untyped = self.op, given["conversions"], open_ or bool(given["decide"])
        known = given["known"]
        if not outputs or op.custom or op.turns or self.forgets or self.watched:
            return Route.EXECUTE
        target, made = self.specs[0], outputs[0]
        if op.inplace and (
            given["back"]
            or untyped
            or made.shape != target.shape
            or made.accumulate_dtype is not target.accumulate_dtype
        ):
            return Route.EXECUTE  # what says anew what the target is cannot be left to the native op
        if not conversions and not known:
            return Route.NATIVE
        count = 1 + max(i for i, _ in (*conversions, *known))  # of the tensors up to the last that is converted
        first = [a for a in self.args[:count] if isinstance(a, Tensor)]  # another one is given by its position
        between = not op.inplace and len(first) == count
        if not known and all(steps.free for _, steps in conversions):
            return Route.RETYPE_THEN_NATIVE if between else Route.NATIVE_WITHOUT_GRAD
        return Route.CONVERT_THEN_NATIVE if between else Route.EXECUTE

    def _gathered(self, *, warn: bool = False) -> CallPlan:
        """Without a rule: every input whole on every rank, the op run everywhere."""
        op, whole = self.op, Layout(self.mesh)
        sources = [s.decided() for s in self.specs]
        conversions = _conversions(sources, [Spec(s.shape, s.dtype, whole) for s in sources])
        self._check_written({i for i, steps in conversions if not steps.free})
        sums = widest_accumulate_dtype(sources)
        outputs = (Spec(sources[0].shape, sources[0].dtype, whole, accumulate_dtype=sums),) if op.inplace else ()
        lost = sum(steps.forward_bytes for _, steps in conversions)
        what, instead = f"{op.name} has no rule for these arguments", f"Give it one: @mw.rule({op.name!r})"
        if op.name.startswith(FUNCTIONS):
            what, instead = f"the autograd.Function {op.name.removeprefix(FUNCTIONS)} has no rule", AS_OP
        warning = f"{what}: its inputs are gathered on every rank ({lost:.0f} bytes sent per rank here). {instead}"
        copies = warn and self._moves(conversions) and self.views
        given = self._converted(conversions, sources, outputs)
        return CallPlan(op, outputs=outputs, copies=copies, warning=warning if warn and lost else "", **given)

    def _check_written(self, moved: Collection[int]) -> None:
        """Raises DispatchError where a custom op would write to what was gathered for it, which nobody keeps."""
        tensors = tensors_in((self.args, self.kwargs))
        theirs = {id(tensors[i]) for i in moved if i or not self.op.inplace} if self.op.custom else ()
        for name, value in written(self.func, self.args, self.kwargs) if theirs else ():
            if any(id(t) in theirs for t in tensors_in((value,))):
                raise DispatchError(
                    f"{self.op.name} writes to its argument {name!r}, which is not whole on every rank, and has no "
                    f"rule: give it one (@mw.rule({self.op.name!r})), or have it return what it makes"
                )

    def _converted(self, conversions: Conversions, sources: Sequence[Spec], outputs: tuple[Spec, ...]) -> OfInputs:
        """What a plan says of inputs with these conversions, which were given their types first."""
        decided = enumerate(zip(self.specs, sources, strict=True))
        return {
            "conversions": conversions,
            "known": tuple(self.known),
            "decide": tuple([(i, new) for i, (old, new) in decided if old is not new]),
            "back": _way_back(conversions, self.specs, outputs) if self.op.inplace else None,
            "watched": self.watched,
            "mixed": self.mixed,
        }

    def _moves(self, conversions: Conversions) -> bool:
        """Whether the op does not get what the caller holds, so that a view of it does not alias that."""
        return bool(self.known) or self.watched or not all(c.free for _, c in conversions)

    def _is_native(self, fn: LocalFn) -> bool:
        return isinstance(fn, Native) and isinstance(self.args[0] if self.args else None, Tensor)

    def _in_order(self, fn: LocalFn) -> LocalFn:
        """``fn`` of arguments in the order of the schema, as a function of such calls."""
        bound = self.op.binding(self.args, self.kwargs)
        return bound.around(fn) if bound else fn


def _conversions(sources: Sequence[Spec], targets: Sequence[Spec]) -> Conversions:
    made: list[tuple[int, resharding.ConversionPlan]] = []
    for i, (s, t) in enumerate(zip(sources, targets, strict=True)):
        if s is not t and (steps := resharding.plan(s, t)).steps:
            made.append((i, steps))
    return tuple(made)


@contextlib.contextmanager
def naming(op: Op, specs: Sequence[Spec]) -> Iterator[None]:
    """Adds the op and its arguments to errors of ours that pass through."""
    try:
        yield
    except MeshwrightError as error:
        if not getattr(error, "_placed", False):
            error._placed = True  # type: ignore[attr-defined]
            listed = "; ".join(repr(s) for s in specs)
            error.args = (f"{op.name}{'_' if op.inplace else ''}({listed}): {error}",)
        raise


def _way_back(
    conversions: Sequence[tuple[int, resharding.ConversionPlan]], specs: Sequence[Spec], outputs: Sequence[Spec]
) -> resharding.ConversionPlan | None:
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
    written = written_spec(target, made)
    return resharding.plan(made.with_(undecided_mask=written.undecided_mask), written.with_(dtype=made.dtype))


def written_spec(target: Spec, made: Spec) -> Spec:
    """Spec of a tensor after a write that makes ``made``: types that it had are kept, for its views have them too."""
    open_ = target.undecided_mask
    reduced = target.grad_partial_mask | (made.grad_partial_mask & open_)
    return target.with_(
        grad_partial_mask=reduced,
        undecided_mask=made.undecided_mask & open_,
        accumulate_dtype=widest_accumulate_dtype((target, made)),
    )


def make_rule(op: Op, specs: Sequence[Spec], args: Args, kwargs: Kwargs) -> Rule | None:
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
    if made is not None and not isinstance(made, Rule):
        raise RuleError(
            f"the rule of {op.name!r} returned {made!r}. Return notation('a b -> a b', x) of meshwright.rules, with "
            "the tensors as arguments; or None to gather them."
        )
    if made is not None and len(made.inputs) != len(specs):
        raise RuleError(f"the rule of {op.name!r} covers {len(made.inputs)} of {len(specs)} tensor arguments")
    return made


def _whole_is_split(rule: Rule, specs: Sequence[Spec]) -> bool:
    for dims, spec in zip(rule.inputs, specs, strict=True):
        for d in spec.layout.dim_axes():
            names = [f for f in dims[d] if rule.sizes[f] != 1]
            if names and names[0] in rule.whole:
                return True
    return False


_WARNED: set[str] = set()


def warn_gathered(plan: CallPlan) -> None:
    """One warning per op that runs without a rule and moves data for it, at the user's line."""
    if not plan.warning or plan.op.name in _WARNED or runtime.RT.told is not None:
        return
    _WARNED.add(plan.op.name)
    warnings.warn(plan.warning, stacklevel=runtime.users_level())
