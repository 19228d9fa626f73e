"""``check_rule``: an op with every layout of its inputs, and with every strategy of its rule, against one device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import collective, compat
from ..dispatch import (
    disabled,
    execute,
    function_named,
    global_outputs,
    make_rule,
    map_tensors,
    plan_call,
    resolve,
    tensors_in,
)
from ..errors import MeshwrightError, RuleError
from ..layout import REDUCE_OPS, REPLICATE, Layout, Partial, Placement, Shard, Spec, commute, crowded, unreducible
from ..mesh import Mesh
from ..ranks.simulation import simulate
from ..rules import Rule, Strategy
from ..strategy_selection import carries_grad
from ..tensor import DistTensor, whole, wrap
from .values import difference_of, local_part, tolerance_of

Tensor = torch.Tensor
MESHES = (Mesh({"x": 4}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3}))


@dataclass
class Report:
    """What was checked.

    Attributes:
        op: name of the op.
        cases: number of runs that agreed with the single device.
        strategies: what the rule allows on one axis, a line each; empty without a rule.
        gathered: runs for which there was no rule.
        random: the op draws random numbers: only shapes, and that the ranks agree, were checked.
    """

    op: str
    cases: int = 0
    strategies: list[str] = field(default_factory=list)
    gathered: int = 0
    random: bool = False

    def __str__(self) -> str:
        text = f"{self.op}: {self.cases} runs agree with the single device"
        if self.random:
            text = f"{self.op}: random; in {self.cases} runs shapes are right and the ranks agree"
        text += f", {self.gathered} gathered (no rule)" if self.gathered else ""
        return "\n".join([text, *(f"  {s}" for s in self.strategies)])


@dataclass(frozen=True)
class _Case:
    """One run: a layout for each tensor argument, and the strategies to force, if any."""

    layouts: tuple[Layout, ...]
    strategies: tuple[Strategy, ...] = ()

    def __str__(self) -> str:
        given = ", ".join(f"argument {i} {layout!r}" for i, layout in enumerate(self.layouts))
        mesh = self.layouts[0].mesh
        named = [s.factor or _partial_name(s) for s in self.strategies]
        return f"{given} on {mesh!r}" + (f" (strategy: {', '.join(named)})" if named else "")


def _partial_name(s: Strategy) -> str:
    return "partial" if any(isinstance(p, Partial) for p in s.inputs) else "replicate"


@dataclass
class _Expected:
    """What one device answers."""

    outputs: list[Any]
    cotangents: list[Tensor | None]
    grads: list[Tensor | None]
    random: bool


@dataclass
class _OpUnderTest:
    """The op with its global arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return tensors_in((self.args, self.kwargs))

    def run(self, tensors: Sequence[Tensor], forced: tuple[Strategy, ...] = ()) -> Any:
        """Call with these tensors in place of the given ones (copies of them, where the op writes)."""
        given = iter(tensors)
        inplace = resolve(self.fn).inplace
        args, kwargs = map_tensors((self.args, self.kwargs), lambda _: next(given).clone() if inplace else next(given))
        if not forced:
            return self.fn(*args, **kwargs)
        plan = plan_call(self.fn, args, kwargs, forced)
        with disabled():
            return execute(plan, self.fn, args, kwargs, wrap)


def check_rule(
    op: str | Callable[..., Any],
    *args: Any,
    mesh: Mesh | Sequence[Mesh] | None = None,
    most: int = 200,
    **kwargs: Any,
) -> Report:
    """Check an op's rule against one device: values and gradients, on simulated ranks.

    Tries every layout of each input on one mesh axis: `Replicate`, `Shard` of each dim, by blocks of the longest dim,
    and `Partial` by each reduction. Tries every pair of the rule's strategies on two axes. Sizes that the axes do not
    divide test uneven and empty shards.

    Args:
        op: A function (`torch.nn.functional.gelu`, a custom op) or a name (`"gelu"`, `"mylib::op"`).
        *args: The op's arguments, with global plain tensors. float64 detects more than float32.
        mesh: Mesh or meshes to try. Default: 4 ranks, 3 ranks, 2 x 2 and 2 x 3.
        most: Maximum number of runs per mesh; of more, a fixed random sample.
        **kwargs: The op's keyword arguments.

    Returns:
        A report of what was checked; `.cases` is the number of runs.

    Raises:
        RuleError: If a value or gradient differs. Names op, layouts, rank and largest difference.

    Examples:
        ```python
        report = mw.check_rule("gelu", torch.randn(5, dtype=torch.float64), mesh=mw.Mesh({"dp": 2}))
        assert report.cases > 0
        ```
    """
    fn = function_named(op) if isinstance(op, str) else op
    call = _OpUnderTest(resolve(fn).name, fn, args, kwargs)
    if not call.tensors:
        raise RuleError(f"check_rule({call.name!r}): give the op's arguments, with at least one tensor")
    meshes = MESHES if mesh is None else (mesh,) if isinstance(mesh, Mesh) else tuple(mesh)
    want = _reference(call)
    report = Report(call.name, random=want.random)
    for m in meshes:
        rule = _rule_on(call, m)
        if rule is not None and m.ndim == 1 and not report.strategies:
            report.strategies = [_described(s) for s in rule.all_strategies()]
        report.gathered += rule is None
        for case in _cases(call, m, rule, most):
            _check_case(call, case, want, report)
    return report


def _described(s: Strategy) -> str:
    ins, outs = (", ".join(map(repr, p)) for p in (s.inputs, s.outputs))
    return f"{s.factor or _partial_name(s)}: {ins} -> {outs}"


# ------------------------------------------------------------------------------------------ what to compare with


def _reference(call: _OpUnderTest) -> _Expected:
    generator = torch.Generator().manual_seed(7)
    leaves = [_leaf(t) for t in call.tensors]
    torch.manual_seed(1)
    outputs = _flat(call.run(leaves))
    torch.manual_seed(2)
    again = _flat(call.run(leaves))
    is_random = any(difference_of(a, b) is not None for a, b in zip(outputs, again, strict=True))
    cotangents: list[Tensor | None] = [
        torch.rand(y.shape, generator=generator, dtype=torch.float64).add(0.5).to(y.dtype)
        if isinstance(y, Tensor) and y.requires_grad
        else None
        for y in outputs
    ]
    grads = _grads(outputs, leaves, cotangents)
    return _Expected([_detached(y) for y in outputs], cotangents, grads, is_random)


def _leaf(t: Tensor) -> Tensor:
    return t.detach().clone().requires_grad_(carries_grad(t.dtype))


def _detached(y: Any) -> Any:
    return y.detach() if isinstance(y, Tensor) else y


def _flat(result: Any) -> list[Any]:
    return list(compat.tree_leaves(result))


def _grads(
    outputs: Sequence[Any], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None and y.requires_grad]
    wanted = [i for i, t in enumerate(leaves) if t.requires_grad]
    found: list[Tensor | None] = [None] * len(leaves)
    if pairs and wanted:
        ys, cs = [y for y, _ in pairs], [c for _, c in pairs]
        made = torch.autograd.grad(ys, [leaves[i] for i in wanted], cs, allow_unused=True)
        for i, g in zip(wanted, made, strict=True):
            found[i] = g
    return found


# --------------------------------------------------------------------------------------------------- what to run


def _rule_on(call: _OpUnderTest, mesh: Mesh) -> Rule | None:
    """The rule for this call with everything replicated: its strategies do not depend on layouts."""
    op = resolve(call.fn)
    if op.composite is not None or op.rule is None:
        return None
    specs = [Spec(t.shape, t.dtype, Layout(mesh)) for t in call.tensors]
    rule = make_rule(op, specs, call.args, call.kwargs)
    like = global_outputs(call.fn, specs, call.args, call.kwargs)
    return None if rule is None or like is None or not rule.outputs else rule


def _cases(call: _OpUnderTest, mesh: Mesh, rule: Rule | None, most: int) -> Iterator[_Case]:
    tensors = call.tensors
    if rule is not None:
        every = list(itertools.product(rule.all_strategies(_partials(*tensors)), repeat=mesh.ndim))
        for chosen in _sample(every, most // mesh.ndim):
            case = _by_strategies(tensors, mesh, rule, chosen)
            if case is not None:
                yield case
    per_axis = [_placements(t) for t in tensors]
    if mesh.ndim == 1:
        yield from (
            _Case(tuple(Layout(mesh, [p], ndim=t.ndim) for p, t in zip(ps, tensors, strict=True)))
            for ps in _products(per_axis, most)
        )
        return
    mixed = [[c for c in itertools.product(p, repeat=mesh.ndim) if commute(*c) and not crowded(c)] for p in per_axis]
    for ps in _products(mixed, most // 4):
        yield _Case(tuple(Layout(mesh, list(p), ndim=t.ndim) for p, t in zip(ps, tensors, strict=True)))


def _partials(*tensors: Tensor) -> list[Partial]:
    """Every Partial that some of the tensors can be."""
    return [Partial(op) for op in REDUCE_OPS if any(not unreducible(op, t.dtype) for t in tensors)]


def _placements(t: Tensor) -> list[Placement]:
    longest = max(range(t.ndim), key=lambda d: t.shape[d], default=0)
    n = t.shape[longest] if t.ndim else 0
    blocks = [Shard(longest, (n - n // 3, n // 3))] if n >= 3 else []
    return [REPLICATE, *(Shard(d) for d in range(t.ndim)), *blocks, *_partials(t)]


def _sound(layouts: Sequence[Sequence[Placement]], tensors: Sequence[Tensor]) -> bool:
    """Whether there are such layouts: reductions that commute, of dtypes that have them."""
    return all(
        commute(*ps) and all(not isinstance(p, Partial) or not unreducible(p.op, t.dtype) for p in ps)
        for ps, t in zip(layouts, tensors, strict=True)
    )


def _by_strategies(tensors: Sequence[Tensor], mesh: Mesh, rule: Rule, chosen: tuple[Strategy, ...]) -> _Case | None:
    """Inputs laid as the strategies want them; None where they cut one compound dim at odd places."""
    for factor in {s.factor for s in chosen if s.factor}:
        if not rule.aligned(factor, mesh, [a for a, s in enumerate(chosen) if s.factor == factor]):
            return None
    placed = [[s.inputs[i] for s in chosen] for i in range(len(tensors))]
    if not _sound(placed, tensors):
        return None
    return _Case(tuple(Layout(mesh, ps, ndim=t.ndim) for ps, t in zip(placed, tensors, strict=True)), chosen)


def _sample(items: list[Any], most: int) -> list[Any]:
    return items if len(items) <= most else random.Random(0).sample(items, most)


def _products(choices: Sequence[Sequence[Any]], most: int) -> list[tuple[Any, ...]]:
    """The product; of a larger one what differs from all-first in one place, and a random sample."""
    total = 1
    for c in choices:
        total *= len(c)
    if total <= most:
        return list(itertools.product(*choices))
    first = tuple(c[0] for c in choices)
    single = [(*first[:i], p, *first[i + 1 :]) for i, c in enumerate(choices) for p in c]
    draw = random.Random(0)
    mixed = [tuple(draw.choice(c) for c in choices) for _ in range(max(most - len(single), most // 2))]
    return list(dict.fromkeys([*single, *mixed]))


# ------------------------------------------------------------------------------------------------------- one run


def _distributed(value: Tensor, layout: Layout, seed: int) -> DistTensor:
    spec = Spec(value.shape, value.dtype, layout, undecided_mask=layout.mesh.everywhere)
    made = wrap(local_part(value, spec.decided(), seed), spec)
    # Factors have gradients, but a product of them that is a leaf has none: see Spec.grad.
    made.requires_grad_(carries_grad(value.dtype) and "product" not in layout.partial.values())
    return made


_Finding = tuple[str, Any]
_OF_LOCALS = {"exchange_rows", "permute"}  # what local functions send by themselves


def _check_case(call: _OpUnderTest, case: _Case, want: _Expected, report: Report) -> None:
    """Run one case on all ranks.  Raises RuleError for what the first rank with a difference found."""
    try:
        found = simulate(lambda: _run_case(call, case, want), case.layouts[0].mesh)
    except Exception as error:
        kind = "" if isinstance(error, MeshwrightError) else f"{type(error).__name__}: "
        note = " ".join(getattr(error, "__notes__", ()))
        raise RuleError(f"check_rule({call.name!r}) with {case}: {kind}{error} {note}".rstrip()) from error
    for rank, finding in zip(case.layouts[0].mesh.ranks, found, strict=True):
        if finding is not None:
            what, difference = finding
            size = difference if isinstance(difference, str) else f"largest difference {difference:.3g}"
            raise RuleError(
                f"check_rule({call.name!r}): wrong {what} on rank {rank} with {case}: {size}; correct the "
                "rule or its local function"
            )
    report.cases += 1


def _run_case(call: _OpUnderTest, case: _Case, want: _Expected) -> _Finding | None:
    leaves = [_distributed(t, layout, i) for i, (t, layout) in enumerate(zip(call.tensors, case.layouts, strict=True))]
    torch.manual_seed(1)
    with collective.counting() as counts:
        result = _flat(call.run(leaves, case.strategies))
    outputs = [whole(y) if isinstance(y, DistTensor) else y for y in result]
    if len(outputs) != len(want.outputs):
        return f"number of outputs ({len(outputs)} instead of {len(want.outputs)})", "they differ"
    if want.random:
        return _random_finding(outputs, want, case)
    if case.strategies and {kind for kind, _ in counts.table} - _OF_LOCALS:
        return "communication", f"the strategy says none, {counts} ran"
    finding, loosest = None, tolerance_of(*call.tensors)
    for k, (got, ref) in enumerate(zip(outputs, want.outputs, strict=True)):
        name = f"value of output {k}" if len(outputs) > 1 else "value"
        finding = finding or _named(name, got, ref, loosest)
    products = any(t.is_floating_point() and not t.requires_grad for t in leaves)
    missing = [
        c is not None and not y.requires_grad and not products for y, c in zip(outputs, want.cotangents, strict=True)
    ]
    if any(missing):
        return finding or (f"gradient: output {missing.index(True)} has no history", "it requires none")
    grads = _grads(outputs, leaves, want.cotangents)
    for i, (g, ref) in enumerate(zip(grads, want.grads, strict=True)):
        if not leaves[i].requires_grad:
            continue
        have = whole(g) if isinstance(g, DistTensor) else g
        if have is None and ref is None:
            continue
        zero = torch.zeros_like(call.tensors[i])
        have, ref = zero if have is None else have, zero if ref is None else ref
        finding = finding or _named(f"gradient of argument {i}", have, ref, loosest)
    return finding


def _named(what: str, got: Any, want: Any, tolerance: float) -> _Finding | None:
    difference = difference_of(_detached(got), want, tolerance)
    return None if difference is None else (what, difference)


def _random_finding(outputs: list[Any], want: _Expected, case: _Case) -> _Finding | None:
    """Random numbers: the shapes, and that every rank ends with the same values."""
    mesh = case.layouts[0].mesh
    group = collective.group(mesh)
    for got, ref in zip(outputs, want.outputs, strict=True):
        if isinstance(ref, Tensor) and (got.shape, got.dtype) != (ref.shape, ref.dtype):
            return "shape", f"{list(got.shape)} instead of {list(ref.shape)}"
        if isinstance(got, Tensor) and got.numel():
            seen = collective.all_gather_object(got.detach().clone(), group)
            if any(difference_of(s, seen[0]) is not None for s in seen):
                return "value", "the ranks disagree on random numbers"
    return None
