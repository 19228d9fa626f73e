"""What an op does to layouts, in factor notation, and the strategies that follow from it.

A rule function has the signature of its op.  It gets an :class:`Arg` in place of each tensor and returns what
:func:`notation` makes of one line such as ``"... k, n k, n -> ... n"``.  A *factor* names an index of the op, as in
einops.  Per mesh axis a factor may be sharded where it leads a dim in every tensor that has it; outputs without it
are then Partial (``reduced``).  *whole* factors must not be split.  Groups of tensors in which the op is jointly
linear let Partial pass.  All strategies are derived from that; nothing is written twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..errors import RuleError
from ..layout import REPLICATE, Partial, Placement, Shard, Spec, chunk_bounds
from ..mesh import Mesh

Dim = tuple[str, ...]  # the factors that make up one dim, major first; () for a dim of size 1
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Arg:
    """Stands for a tensor argument inside a rule function: global shape and dtype, never values."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | None = field(default=None, compare=False)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self, d: int) -> int:
        """``d`` made non-negative (0 for a scalar's 0 or -1, as PyTorch has it)."""
        return d % max(self.ndim, 1)

    @property
    def letters(self) -> list[str]:
        """One fresh factor per dim, ``1`` for dims of size 1: the names that generic rules start from."""
        return ["1" if n == 1 else f"d{i}" for i, n in enumerate(self.shape)]


class Local:
    """What a rule's ``local`` may ask about the rank it runs on, when a plan is made."""

    def __init__(self, rule: Rule, inputs: Sequence[Spec], outputs: Sequence[Spec], here: tuple[int, ...]) -> None:
        self.rule, self.inputs, self.outputs, self.here = rule, tuple(inputs), tuple(outputs), here

    def out_shape(self, i: int = 0) -> tuple[int, ...]:
        """Shape of this rank's part of output ``i``."""
        return self.outputs[i].local_shape(self.here)

    def in_shape(self, i: int = 0) -> tuple[int, ...]:
        """Shape of this rank's part of input ``i``, after its conversion."""
        return self.inputs[i].local_shape(self.here)

    def axes(self, factor: str) -> tuple[int, ...]:
        """Mesh axes that split a factor, major first."""
        for dims, spec in zip(self.rule.inputs, self.inputs, strict=True):
            for d, names in enumerate(dims):
                if names and names[0] == factor:
                    return spec.layout.dim_axes().get(d, ())
        return ()

    def bounds(self, factor: str) -> tuple[int, int]:
        """This rank's (start, stop) of a factor."""
        return nested_bounds(self.rule.sizes[factor], self.inputs[0].mesh, self.axes(factor), self.here)

    def is_split(self, *factors: str) -> bool:
        """Whether any of the factors is split on this mesh."""
        return any(self.axes(f) for f in factors)


LocalFn = Callable[..., Any]


class Native:
    """A local function that is one native call: ``fn(first tensor, *static)`` whatever the call's other arguments.

    Dispatch may run it without entering Python; ``otherwise(x, *static)`` serves where ``fn`` refuses (a view of a
    shard whose strides do not allow it).
    """

    __slots__ = ("fn", "otherwise", "static")

    def __init__(self, fn: Callable[..., Any], *static: Any, otherwise: Callable[..., Any] | None = None) -> None:
        self.fn, self.static, self.otherwise = fn, static, otherwise

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.otherwise is None:
            return self.fn(x, *self.static)
        try:
            return self.fn(x, *self.static)
        except RuntimeError:
            return self.otherwise(x, *self.static)


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule for one call: factors of each input and output, and how each factor behaves.

    Inputs in ``lends`` only lend their shape: they hint at splits and stay as they are, whatever a strategy says.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    moves: bool = False
    heavy: bool = False
    lends: frozenset[int] = frozenset()
    local: Callable[[Local], LocalFn | None] | None = None
    decompose: Callable[..., Any] | None = None
    text: str = ""

    def out_shape(self, i: int) -> tuple[int, ...]:
        """Global shape of output ``i`` as the notation gives it."""
        return tuple(math.prod(self.sizes[f] for f in dim) for dim in self.outputs[i])

    def shardable(self, factor: str) -> bool:
        """Whether a factor may be split at all."""
        return factor not in self.whole and self.sizes[factor] != 1

    def axis_strategies(self, suggested: Sequence[Placement], outputs: Sequence[Placement] = ()) -> list[Strategy]:
        """Strategies for one axis that the inputs' (and, backward, the outputs') placements suggest.

        The first one replicates everything.
        """
        found = [self._replicated()]
        for dims, p, i in self._occurrences(suggested, outputs):
            strategy = None
            if isinstance(p, Shard) and p.dim < len(dims):
                factors = [f for f in dims[p.dim] if self.sizes[f] != 1]
                if factors and self.shardable(factors[0]):
                    strategy = self.by_factor(factors[0])
            elif isinstance(p, Partial):
                found += [s for s in self.by_partial(p, i, suggested) if s not in found]
            if strategy is not None and strategy not in found:
                found.append(strategy)
        return found

    def instead_of(self, i: int, p: Placement) -> Iterator[Strategy]:
        """Where a split of input ``i`` can go that cannot stay: the other factors of its dims, the outermost first.

        Only for what just moves elements: an op that computes along a dim wants it whole, and its layout as it was.
        """
        dims = self.inputs[i]
        if not self.moves or not isinstance(p, Shard) or p.dim >= len(dims):
            return
        here = [f for f in dims[p.dim] if self.sizes[f] != 1][:1]
        if here and self.shardable(here[0]) and self.by_factor(here[0]):
            return
        for dim in dims:
            for f in dim[:1]:
                if f not in here and self.shardable(f) and f not in self.reduced:
                    strategy = self.by_factor(f)
                    if strategy is not None:
                        yield strategy

    def _occurrences(
        self, suggested: Sequence[Placement], outputs: Sequence[Placement]
    ) -> Iterator[tuple[Dims, Placement, int | None]]:
        for i, (dims, p) in enumerate(zip(self.inputs, suggested, strict=True)):
            yield dims, p, i
        for dims, p in zip(self.outputs, outputs, strict=False):
            yield dims, p, None

    def all_strategies(self, partials: Sequence[Partial] = (Partial(),)) -> list[Strategy]:
        """Every strategy for one axis: replicate, each factor, each linear group as each of these Partials."""
        found = [self._replicated()]
        for f in self.sizes:
            s = self.by_factor(f) if self.shardable(f) else None
            if s is not None and s not in found:
                found.append(s)
        found += [s for p in partials for s in self.by_partial(p, None) if s not in found]
        return found

    def _replicated(self) -> Strategy:
        return Strategy((REPLICATE,) * len(self.inputs), (REPLICATE,) * len(self.outputs), None)

    def by_factor(self, factor: str) -> Strategy | None:
        """The strategy that splits one factor, or None where it cannot be split."""
        holders = {i for i, dims in enumerate(self.inputs) if any(factor in dim for dim in dims)}
        if self.reduced.get(factor) == "sum" and not self._terms_told(holders):
            return None
        inputs: list[Placement] = []
        for i, dims in enumerate(self.inputs):
            p = self._split(dims, factor)
            if p is None:
                return None
            if (
                p is REPLICATE
                and self.reduced.get(factor) == "sum"
                and any(i in g and g & holders for g in self.linear)
            ):
                # An input without the factor that is *added* to terms with it would be counted on every rank.
                p = Partial()
            inputs.append(p)
        outputs: list[Placement] = []
        for dims in self.outputs:
            p = self._split(dims, factor)
            if p is None:
                return None
            if p is REPLICATE:
                if factor not in self.reduced:
                    return None
                p = Partial(self.reduced[factor])
            outputs.append(p)
        return Strategy(tuple(inputs), tuple(outputs), factor)

    def _terms_told(self, holders: AbstractSet[int]) -> bool:
        """Whether it is clear which terms the ranks add up.

        In ``index_put(x, index, number, accumulate=True)`` only the index has the factor.  Nothing tells that the
        number goes with it, and that x is added once.
        """
        added = set().union(*(g for g in self.linear if g & holders))
        return all(len(g) == 1 or g & added for g in self.linear)

    def _split(self, dims: Dims, factor: str) -> Placement | None:
        """Shard where the factor leads a dim, Replicate where it is absent, None where it is inside one."""
        place: Placement = REPLICATE
        for d, names in enumerate(dims):
            if factor in names:
                leading = next(f for f in names if self.sizes[f] != 1)
                if leading != factor or place is not REPLICATE:
                    return None
                place = Shard(d)
        return place

    def by_partial(self, p: Partial, index: int | None, others: Sequence[Placement] = ()) -> Iterator[Strategy]:
        """Strategies that keep one linear group Partial (with input ``index`` in it, if given).

        An average among ``others`` of another kind becomes a sum, which for the rest is free in the backward too.
        """
        if p.op not in ("sum", "avg") and not self.moves:
            return
        for group in self.linear:
            if index is None or index in group:
                kept = Partial() if p.op == "avg" and any(others[i] != p for i in group if others) else p
                ins = tuple(kept if i in group else REPLICATE for i in range(len(self.inputs)))
                yield Strategy(ins, (kept,) * len(self.outputs), None)

    def aligned(self, factor: str, mesh: Mesh, axes: Sequence[int]) -> bool:
        """Whether splitting ``factor`` over ``axes`` cuts every dim that it leads at whole multiples of the rest."""
        for dims in (*self.inputs, *self.outputs):
            for names in dims:
                if factor in names and len(names) > 1:
                    rest = math.prod(self.sizes[f] for f in names) // max(self.sizes[factor], 1)
                    if rest != 1 and not _aligned(self.sizes[factor], rest, tuple(mesh.sizes[a] for a in axes)):
                        return False
        return True


@dataclass(frozen=True, slots=True)
class Strategy:
    """What one mesh axis does to each input and output of an op."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None


@lru_cache(maxsize=4096)
def _aligned(size: int, rest: int, parts: tuple[int, ...]) -> bool:
    if size % math.prod(parts) == 0:
        return True
    spans = [(0, size, 0, size * rest)]
    for n in parts:
        finer = []
        for a, b, c, d in spans:
            for i in range(n):
                lo, hi = chunk_bounds(b - a, n, i)
                low, high = chunk_bounds(d - c, n, i)
                finer.append((a + lo, a + hi, c + low, c + high))
        spans = finer
    return all((a * rest, b * rest) == (c, d) or (a == b and c == d) for a, b, c, d in spans)


def nested_bounds(size: int, mesh: Mesh, axes: Sequence[int], here: Sequence[int]) -> tuple[int, int]:
    """(start, stop) of ``size`` things split over ``axes`` one after the other, at coordinate ``here``."""
    start, stop = 0, size
    for a in axes:
        lo, hi = chunk_bounds(stop - start, mesh.sizes[a], here[a])
        start, stop = start + lo, start + hi
    return start, stop


# ---------------------------------------------------------------------------------------------- notation


@lru_cache(maxsize=8192)
def _parse(text: str) -> tuple[tuple[tuple[Any, ...], ...], tuple[tuple[Any, ...], ...]]:
    """``"a (b c), d -> a"`` as nested tuples: tensors, dims, factors."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"notation {text!r} has no '->'")
    return _parse_side(left, text), _parse_side(right, text)


def _parse_side(side: str, text: str) -> tuple[tuple[Any, ...], ...]:
    tensors = []
    for part in side.split(","):
        dims: list[Any] = []
        inside: list[str] | None = None
        for token in part.replace("(", " ( ").replace(")", " ) ").split():
            if token == "(" and inside is None:
                inside = []
            elif token == ")" and inside is not None:
                dims.append(tuple(f for f in inside if f != "1"))
                inside = None
            elif inside is not None:
                inside.append(token)
            elif token == "...":
                dims.append(...)
            else:
                dims.append(() if token == "1" else (token,))
        if inside is not None:
            raise RuleError(f"notation {text!r}: a bracket is not closed")
        tensors.append(tuple(dims))
    return tuple(tensors)


Tensors = Arg | Sequence[Arg] | None


def notation(
    text: str,
    *tensors: Tensors,
    sizes: Mapping[str, int] | None = None,
    whole: str = "",
    reduced: str | Mapping[str, str] = "",
    linear: Sequence[Sequence[Tensors]] = (),
    moves: bool = False,
    heavy: bool = False,
    local: Callable[[Local], LocalFn | None] | None = None,
    decompose: Callable[..., Any] | None = None,
) -> Rule:
    """A rule from one line of factor notation.

    Args:
        text: ``"inputs -> outputs"``; tensors are separated by commas, dims by spaces; ``(h d)`` is a dim made of two
            factors, ``h`` major; ``1`` is a dim of size one; ``...`` any leading dims, the same for all (inputs with
            fewer of them, or of size 1, broadcast).
        tensors: the arguments in the order of ``text``; a ``None`` drops its entry; a sequence takes as many entries.
        sizes: sizes of factors that no plain dim gives.
        whole: factors that must not be split, separated by spaces.
        reduced: factors that may be split leaving the outputs Partial(sum), or a mapping to the reductions.  A factor
            that is in no output and not listed here is whole.
        linear: groups of tensors in which the op is jointly linear.
        moves: the op only moves elements: Partial of any reduction passes.
        heavy: the op contracts: computing it whole on every rank costs more than bytes tell.
        local: called once per plan with a :class:`Local`; returns the function to run on locals instead of the op.
        decompose: called with the op's own arguments when a whole factor is split: the op as a composition.

    Raises:
        RuleError: the text does not fit the tensors.
    """
    ins_text, outs_text = _parse(text)
    if not tensors and ins_text == ((),):
        ins_text = ()
    entries = list(zip(ins_text, tensors, strict=False)) if len(ins_text) == len(tensors) else None
    if entries is None:
        raise RuleError(f"notation {text!r} names {len(ins_text)} inputs, the rule gave {len(tensors)}")
    found: dict[str, int] = dict(sizes or {})
    width = max((_ellipsis(dims, t, text) for dims, t in _each(entries)), default=0)
    lead = _lead_sizes(entries, width, text)
    inputs: dict[int, Dims] = {}
    for dims, t in _each(entries):
        inputs[t.index] = _expand(dims, t, width, lead, found, text)
    for i, n in enumerate(lead):
        found.setdefault(f"~{i}", n)
    outputs = tuple(
        tuple(
            x
            for dim in dims
            for x in ([((f"~{i}",) if lead[i] != 1 else ()) for i in range(width)] if dim is ... else [dim])
        )
        for dims in outs_text
    )
    count = max(inputs, default=-1) + 1
    if sorted(inputs) != list(range(count)):
        raise RuleError(f"notation {text!r} does not cover every tensor argument")
    named = {f for dims in (*inputs.values(), *outputs) for dim in dims for f in dim}
    missing = named - set(found)
    if missing:
        raise RuleError(f"notation {text!r}: give the size of {', '.join(sorted(missing))}")
    reductions = dict.fromkeys(reduced.split(), "sum") if isinstance(reduced, str) else dict(reduced)
    in_outputs = {f for dims in outputs for dim in dims for f in dim}
    kept_whole = set(whole.split()) | {f for f in named if f not in in_outputs and f not in reductions}
    return Rule(
        inputs=tuple(inputs[i] for i in range(count)),
        outputs=outputs,
        sizes={f: found[f] for f in sorted(named)},
        whole=frozenset(kept_whole),
        reduced={f: op for f, op in reductions.items() if f in named},
        linear=tuple(g for g in (frozenset(a.index for a in _args(group)) for group in linear) if g),
        moves=moves,
        heavy=heavy,
        local=local,
        decompose=decompose,
        text=text,
    )


def _args(group: Sequence[Tensors]) -> Iterator[Arg]:
    for t in group:
        if isinstance(t, Arg):
            yield t
        elif t is not None:
            yield from t


def _each(entries: Sequence[tuple[tuple[Any, ...], Tensors]]) -> Iterator[tuple[tuple[Any, ...], Arg]]:
    for dims, t in entries:
        for arg in _args([t]):
            yield dims, arg


def _ellipsis(dims: tuple[Any, ...], t: Arg, text: str) -> int:
    plain = len([d for d in dims if d is not ...])
    if ... in dims:
        if t.ndim < plain:
            raise RuleError(f"notation {text!r}: a tensor of shape {t.shape} has too few dims")
        return t.ndim - plain
    if t.ndim != plain:
        raise RuleError(f"notation {text!r}: a tensor of shape {t.shape} has {t.ndim} dims, {plain} were named")
    return 0


def _lead_sizes(entries: Sequence[tuple[tuple[Any, ...], Tensors]], width: int, text: str) -> list[int]:
    lead = [1] * width
    for dims, t in _each(entries):
        n = _ellipsis(dims, t, text)
        if ... in dims:
            at = dims.index(...)
            for i in range(n):
                size = t.shape[at + i]
                j = width - n + i
                if size != 1 and lead[j] not in (1, size):
                    raise RuleError(f"notation {text!r}: leading dims {lead[j]} and {size} do not broadcast")
                lead[j] = size if size != 1 else lead[j]
    return lead


def _expand(dims: tuple[Any, ...], t: Arg, width: int, lead: list[int], found: dict[str, int], text: str) -> Dims:
    n = _ellipsis(dims, t, text)
    made: list[Dim] = []
    at = 0
    for dim in dims:
        if dim is ...:
            for i in range(n):
                made.append(() if t.shape[at] == 1 else (f"~{width - n + i}",))
                at += 1
            continue
        size = t.shape[at]
        at += 1
        unknown = [f for f in dim if f not in found]
        known = math.prod(found[f] for f in dim if f in found)
        if len(unknown) == 1:
            if known and size % known:
                raise RuleError(f"notation {text!r}: {size} is not a multiple of {known} in {' '.join(dim)}")
            found[unknown[0]] = size // known if known else 0
        elif unknown:
            raise RuleError(f"notation {text!r}: give the size of {' or '.join(unknown)}")
        elif known != size:
            raise RuleError(f"notation {text!r}: {' '.join(dim) or '1'} is {known} in one place and {size} in another")
        made.append(dim)
    return tuple(made)


# ---------------------------------------------------------------------------------------------- registry

RuleFn = Callable[..., Rule | None]
RULES: dict[str, RuleFn] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[RuleFn], RuleFn]:
    """Register a rule function for ops, by ATen name before autograd (``"linear"``) or ``"lib::op"``.

    The function has the op's signature, with an :class:`Arg` for each tensor, and returns what
    :func:`notation` made, or None where it has no rule for these arguments (they are then gathered).

    Raises:
        RuleError: a name that has a rule already.
    """

    def register(fn: RuleFn) -> RuleFn:
        for name in names:
            if name in RULES:
                raise RuleError(f"{name!r} has a rule already; remove it first with meshwright.rules.RULES.pop(...)")
            RULES[name] = fn
        return fn

    return register


def composite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an op that is always computed as a composition of others, on distributed tensors."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            COMPOSITES[name] = fn
        return fn

    return register
