"""What eager code does with arguments of given specs, found without values: by doing it, on tensors that have none.

The call is made as any other, on fake local tensors, as the first rank of the mesh, whose collectives
give shapes only.  So whatever computes the call answers for itself, be it a rule, a composition or Python code of
PyTorch's, and nothing here knows an op.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch

from ..collective import as_rank
from ..compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    disable_current_modes,
    tree_leaves,
    tree_map_only,
)
from ..dispatch import (
    Args,
    Execution,
    Kwargs,
    disabled,
    function_named,
    make_rule,
    naming,
    resolve,
    spec_of,
    tensors_in,
)
from ..errors import MeshwrightError, RuleError
from ..layout import Layout, Partial, Shard, Spec, crowded
from ..ranks import runtime
from ..resharding.planner import plan as conversion
from ..resharding.record import LOCAL, Record
from ..rules import COMPOSITES, RULES, Rule
from ..rules.book import did_you_mean
from ..strategy_selection import Choice, Wanted, carries_grad, choose, choose_for
from .global_calls import GlobalCalls, tell

Tensor = torch.Tensor
Wishes = Sequence[Spec | None]


@dataclass(frozen=True)
class Inference:
    """What a call does: layouts the inputs must have, layouts the outputs get, how, and at what cost in bytes.

    ``native``: locals run through the op itself, not through a function that the rule brings.  ``kind``: ``"rule"``;
    ``"gathered"`` where there is none (the op runs on every rank, on whole inputs); ``"composite"`` where it is
    computed as other ops: then the inputs are as the first of these that takes each wants it, the bytes are those of
    all of them, and ``strategy``, which has the factor that each axis splits, is empty.  ``sent``: of the bytes those
    that a function of the rule sends by itself: halos, totals of scans, queries that are traded, rows of tokens.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategy: tuple[str, ...]
    bytes: float
    native: bool
    kind: str = "rule"
    sent: float = 0.0


def infer(name: str, args: Args, kwargs: Kwargs, outputs: Wishes | None = None) -> Inference:
    """Shared body of ``infer_forward`` and ``infer_backward``; specs stand in place of tensors.

    Forward, a spec that says no types is that of a leaf, as eager code has it: its first use decides them.
    """
    if outputs is None:
        args, kwargs = tree_map_only(Spec, _of_leaf, (args, kwargs))
    asked = _ShapeQuery.of(name, args, kwargs, outputs or ())
    with naming(resolve(asked.func), asked.specs):
        asked.run()
        found = asked.ahead()
        return _as_asked(found) if outputs is None else asked.toward(found, outputs)


def of_rule(name: str, args: Args, kwargs: Kwargs, outputs: Wishes | None = None) -> Inference:
    """What the rule of an op answers by itself, also where eager code would rather compute the op as others; what eager
    code does where there is no rule.  Forward it is asked for inputs that need no gradient."""
    asked = _ShapeQuery.of(name, args, kwargs, outputs or ())
    with naming(resolve(asked.func), asked.specs):
        asked.run(graded=False)
        found, rule = asked.ahead(), asked.rule()
        if rule is None:
            return found
        if outputs is not None:
            return asked.rule_toward(rule, found, outputs)
        made = _answer(rule, choose(rule, asked.specs, _like(found.outputs), constants=range(len(asked.specs))))
        return asked.with_sent(made)


@dataclass
class _ShapeQuery:
    """One question, and the calls that answer it: ``told`` has those that were planned, in order."""

    name: str
    func: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    specs: list[Spec]
    given: list[Tensor] = field(default_factory=list)
    told: list[Execution] = field(default_factory=list)
    made: list[Spec] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    graded: bool = True

    @classmethod
    def of(cls, name: str, args: Args, kwargs: Kwargs, outputs: Wishes) -> _ShapeQuery:
        func = _function(name)
        specs = [s for s in tree_leaves((args, kwargs)) if isinstance(s, Spec)]
        if not specs:
            raise RuleError(f"{name!r}: give mw.Spec(shape, dtype, layout) in place of each tensor")
        if any(s.mesh != specs[0].mesh for s in (*specs, *(o for o in outputs if o is not None))):
            raise RuleError(f"{name!r}: the specs lie on different meshes")
        return cls(name, func, args, kwargs, specs)

    def run(self, graded: bool = True, rank: int | None = None) -> None:
        """Make the call.  ``graded``: inputs need gradients, whose bytes count too; ``rank``: default the first."""
        mesh = self.specs[0].mesh
        rank = mesh.ranks[0] if rank is None else rank
        here = mesh.coordinate(rank)
        written = resolve(self.func).inplace or self.name.endswith("_")

        def stand_in(spec: Spec) -> Tensor:
            local = torch.empty(spec.local_shape(here), dtype=spec.dtype, device=mesh.device)
            local.requires_grad_(graded and carries_grad(spec.dtype))
            self.given.append(tell(local.clone() if written else local, spec))  # a leaf cannot be written to
            return self.given[-1]

        self.given, self.told, self.records = [], [], []
        self.graded = graded
        with as_rank(mesh, rank), _undisturbed():
            args, kwargs = tree_map_only(Spec, stand_in, (self.args, self.kwargs))
            runtime.RT.told, runtime.RT.records = self.told.append, self.records
            try:
                made = tensors_in(GlobalCalls().enabled(self.func, args, kwargs))
            except MeshwrightError:
                raise
            except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException) as error:
                raise RuleError(f"what it gives hangs on values, which specs do not have ({_first(error)})") from error
            except (TypeError, ValueError, IndexError, RuntimeError) as error:
                if graded:  # some arguments have no gradient
                    return self.run(graded=False, rank=rank)
                raise RuleError(f"PyTorch refuses these arguments: {_first(error)}") from error
            self.made = [spec_of(t, mesh) for t in made or self.given[:written]]
        return None

    def ahead(self) -> Inference:
        """What the call did."""
        inputs, moved = self.specs.copy(), 0.0
        place = {id(t): i for i, t in enumerate(self.given)}
        paid = set[tuple[int, Spec]]()
        for run in self.told:
            steps = dict((*run.plan.known, *run.plan.conversions))
            for i, t in enumerate(run.tensors):
                k = place.pop(id(t), None)
                if k is not None:
                    choice = run.plan.choice
                    inputs[k] = choice.inputs[i] if choice else steps[i].dst if i in steps else inputs[k]
                if i in steps and (id(t), steps[i].dst) not in paid:  # a value is brought to one layout once
                    paid.add((id(t), steps[i].dst))
                    moved += steps[i].bytes
        moved += sum(map(_reduced_at_leaf, self.specs, self.given)) if self.graded else 0.0
        only = self.told[0].plan if len(self.told) == 1 else None
        composed, sent = only is None or resolve(self.func).composite is not None, self.sent()
        if only is None or only.choice is None:
            kind = "composite" if composed else "gathered"
            strategy = () if composed else ("replicate",) * self.specs[0].mesh.ndim
            return Inference(tuple(inputs), tuple(self.made), strategy, moved + sent, not composed, kind, sent)
        found = Inference(
            tuple(inputs), tuple(self.made), _named(only.choice), moved + sent, only.fn is None, sent=sent
        )
        return replace(found, kind="composite") if composed else found

    def sent(self) -> float:
        """Bytes that functions of rules sent by themselves: the first rank, or one in the middle if that sends more.

        The totals of a scan go from the first rank to all, halos from those in the middle both ways.
        """
        mesh = self.specs[0].mesh
        mine = _sent(self.records)
        middle = mesh.rank_at([n // 2 for n in mesh.sizes])
        if any(r.src == LOCAL for r in self.records) and middle != mesh.ranks[0]:
            other = _ShapeQuery(self.name, self.func, self.args, self.kwargs, self.specs)
            other.run(graded=self.graded, rank=middle)
            mine = max(mine, _sent(other.records))
        return mine

    def with_sent(self, found: Inference) -> Inference:
        """An answer of the rule with what its function sends, once the inputs are as it asks for."""
        again = None if found.native else self._ran(found.inputs)
        if again is None or len(again.told) != 1 or again.told[0].plan.choice is None:
            return found
        if again.told[0].plan.choice.inputs != found.inputs:
            return found
        sent = again.sent()
        return replace(found, bytes=found.bytes + sent, sent=sent)

    def rule(self) -> Rule | None:
        """The rule of the op itself, which may be the one that a function of Python calls with the same tensors."""
        op, given = resolve(self.func), self.given
        run = self.told[0] if len(self.told) == 1 and op.rule is None else None
        if run is not None and len(run.tensors) == len(given) and all(map(is_, run.tensors, given)):
            return make_rule(run.plan.op, self.specs, run.args, run.kwargs)
        args, kwargs = self._filled()
        return make_rule(op, self.specs, args, kwargs)

    def _filled(self) -> tuple[Args, Kwargs]:
        left = iter(self.given)
        return tree_map_only(Spec, lambda _: next(left), (self.args, self.kwargs))

    def toward(self, found: Inference, wishes: Wishes) -> Inference:
        """The answer for outputs that should have certain layouts, from what the call does to inputs as given."""
        _check(wishes, found.outputs)
        if found.kind == "gathered":
            return found
        rule = self.rule()
        best = None if rule is None else self.rule_toward(rule, found, wishes)
        return best if best is not None and found.kind == "rule" else self._by_trial(wishes, best)

    def rule_toward(self, rule: Rule, found: Inference, wishes: Wishes) -> Inference:
        """What the rule answers for outputs that should have certain layouts."""
        return self.with_sent(_answer(rule, choose_for(rule, self.free(), _like(found.outputs), Wanted(tuple(wishes)))))

    def free(self) -> list[Spec]:
        """The inputs, of which what is replicated may be asked for sliced: that sends nothing either way, since a value
        of which each rank uses its own part has its gradient reduced where it comes from."""
        return [s.with_(grad_partial_mask=s.mesh.everywhere, undecided_mask=0) for s in self.specs]

    def _by_trial(self, wishes: Wishes, best: Inference | None) -> Inference:
        """Of a composition only a run tells what it makes of its inputs: they are tried as given, and from there with
        one placement after the other changed, for as long as that gets cheaper; ``best`` is what is to be beaten."""
        price = (float("inf"), 0) if best is None else _price(best, wishes)
        free = self.free()
        trials: list[Sequence[Spec]] = [free]
        while trials:
            cheaper: Sequence[Spec] = ()
            for specs in trials:
                found = self._tried(specs)
                if found is None:
                    continue
                brought = sum(_bytes(s, t) for s, t in zip(free, specs, strict=True))
                found = replace(found, bytes=brought + found.bytes)
                if (cost := _price(found, wishes)) < price:
                    best, price, cheaper = found, cost, specs
            trials = list(_neighbours(cheaper, wishes)) if cheaper else []
        assert best is not None
        return best

    def _tried(self, specs: Sequence[Spec]) -> Inference | None:
        one = self._ran(specs)
        return None if one is None else one.ahead()

    def _ran(self, specs: Sequence[Spec]) -> _ShapeQuery | None:
        left = iter(specs)
        args, kwargs = tree_map_only(Spec, lambda _: next(left), (self.args, self.kwargs))
        one = _ShapeQuery(self.name, self.func, args, kwargs, list(specs))
        try:
            one.run(self.graded)
        except MeshwrightError:
            return None  # such as a write that this layout does not allow
        return one


# ---------------------------------------------------------------------------------------------- names, modes, messages


def _function(name: str) -> Callable[..., Any]:
    """The function of a name."""
    try:
        return function_named(name)
    except (RuleError, AttributeError):
        near = did_you_mean(name, {*RULES, *COMPOSITES})
        raise RuleError(f"{name!r} has no rule, and PyTorch no function of that name{near}") from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, the modes of the caller do not matter, and tensors are fakes: nothing is computed, or drawn."""
    with (
        torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(),
        disable_current_modes(), disabled(), FakeTensorMode(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


def _of_leaf(spec: Spec) -> Spec:
    return spec if spec.grad_partial_mask or spec.undecided_mask else spec.untyped()


def _as_asked(found: Inference) -> Inference:
    """An answer in which what is not decided yet says no types, as the specs of a question do."""
    inputs, outputs = (tuple([s.decided() for s in specs]) for specs in (found.inputs, found.outputs))
    return replace(found, inputs=inputs, outputs=outputs)


def _reduced_at_leaf(spec: Spec, given: Tensor) -> float:
    """Bytes that the gradient of a leaf costs which is Partial since the call: it is reduced there."""
    reduced = spec.undecided_mask & given.__dict__["_spec"].grad_partial_mask
    decided = spec.decided()
    return (
        conversion(decided, decided.with_(grad_partial_mask=decided.grad_partial_mask | reduced)).bytes
        if reduced
        else 0.0
    )


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _check(wishes: Wishes, outputs: Sequence[Spec]) -> None:
    """Raises RuleError where what is wished is not what the op gives."""
    given = [(tuple(s.shape), s.dtype) for s in outputs]
    asked = [g if w is None else (tuple(w.shape), w.dtype) for w, g in zip(wishes, given, strict=False)]
    if len(wishes) != len(given):
        raise RuleError(
            f"outputs= has {len(wishes)} entries, the op gives {len(given)} tensors: give one for each, None for those "
            "that may have any layout"
        )
    for what, i in (("shapes", 0), ("dtypes", 1)):
        if [a[i] for a in asked] != [g[i] for g in given]:
            raise RuleError(f"outputs= has {what} {[a[i] for a in asked]}, the op gives {[g[i] for g in given]}")


# ---------------------------------------------------------------------------------------------- answers and prices


def _answer(rule: Rule, choice: Choice) -> Inference:
    """What a choice of strategies says."""
    pairs = zip(choice.sources, choice.inputs, strict=True)
    moved = sum(_bytes(s, t) for s, t in pairs)
    return Inference(choice.inputs, choice.outputs, _named(choice), moved, native=rule.local is None)


def _sent(records: Sequence[Record]) -> float:
    return sum((r.bytes + r.backward_bytes for r in records if r.src == LOCAL and r.phase == "forward"), 0.0)


def _named(choice: Choice) -> tuple[str, ...]:
    def name(inputs: Sequence[Any]) -> str:
        return "partial" if any(isinstance(p, Partial) for p in inputs) else "replicate"

    return tuple(c.factor or name(c.inputs) for c in choice.strategies)


def _like(outputs: Sequence[Spec]) -> list[tuple[Any, torch.dtype]]:
    return [(s.shape, s.dtype) for s in outputs]


def _bytes(src: Spec, dst: Spec) -> float:
    return conversion(src, dst.decided()).bytes


def _price(found: Inference, wishes: Wishes) -> tuple[float, int]:
    """Bytes until the outputs are as wished, and how many of the wished shards are cut from something larger."""
    cost, cut = found.bytes, 0
    for made, wish in zip(found.outputs, wishes, strict=True):
        if wish is not None:
            cost += _bytes(made.decided(), made.with_(layout=wish.layout, grad_partial_mask=wish.grad_partial_mask))
            pairs = zip(made.layout.placements, wish.layout.placements, strict=True)
            cut += sum(isinstance(w, Shard) and p != w for p, w in pairs)
    return round(cost, 3), cut


def _neighbours(specs: Sequence[Spec], wishes: Wishes) -> Iterator[list[Spec]]:
    """The inputs with another placement on an axis on which some output is to be split: one of them, or all."""
    mesh = specs[0].mesh
    for axis in range(mesh.ndim):
        if not any(w is not None and isinstance(w.layout.placements[axis], Shard) for w in wishes):
            continue
        for d in range(max(s.ndim for s in specs)):
            changed = [_split(s, axis, d) for s in specs]
            yield changed
            if len(specs) > 1:
                yield from ([*specs[:i], c, *specs[i + 1 :]] for i, c in enumerate(changed) if c is not specs[i])


def _split(spec: Spec, axis: int, d: int) -> Spec:
    """``spec`` with dim ``d`` split over an axis, where it has one that can be divided."""
    if d >= spec.ndim or spec.shape[d] == 1:
        return spec
    placements = list(spec.layout.placements)
    placements[axis] = Shard(d)
    if crowded(placements):
        return spec
    return spec.with_(layout=Layout(spec.mesh, placements))


__all__ = ["Inference", "infer", "of_rule"]
