"""A micro-batch is a mesh axis: what crosses it says what a loss is a mean over.

A step is captured for two micro-batches, and its forward recorded on a mesh of one axis with two coordinates, on fakes:
tensors of the batch are sharded over it by rows, all else is replicated.  Nothing but global shapes is read, so all
ranks decide alike, however many rows each of them has.

1. Losses that count what they are a mean over become sums divided by their counts, in ops.
2. The graphs for one and for two micro-batches are compared: a number that differs is a number of rows.
3. The programs of both coordinates are compared: one that differs takes rows by their places.
4. :class:`~.loss_terms.LossTerms` of the loss are the answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.fx as fx

from ... import collective, compat
from ...collective.graph import KEEP_ONE
from ...errors import CaptureError, PassError
from ...layout import Layout, Partial, Replicate, Shard, Spec
from ...mesh import Mesh
from ...ranks import runtime
from ...tensor import tell
from ..ir.loss_weight import LossWeight, Weighing, value_at
from ..ir.nodes import ancestors, draws, info_of, reduces, target_name
from ..ir.trace import Recorder
from .export import Captured
from .interpret import Interpreter, spec_at
from .loss_sums import MicroBatchWeight, as_sums
from .loss_terms import LossTerms, MicroBatch, Mixed, Term, constant, draws_numbers, is_whole_number, pairs_of
from .row_numbers import Compared, Refused, compared_sizes
from .source_lines import line_of

aten = torch.ops.aten
Tensor = torch.Tensor
Dims = Mapping[str, int | None]  # of a tensor of the batch, by its node, the dim that has its rows

AXIS = "micro"
_SEQUENCES = {
    "scaled_dot_product_attention", "attention", "conv1d", "associative_scan", "lstm", "gru", "rnn_tanh",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- the batch


def doubled(batch: Any, captured: Captured, dims: Dims) -> Any:
    """A batch of twice the rows, on the meta device."""
    leaves, tree = compat.pytree.tree_flatten(batch)
    for source in captured.sources:
        if source.kind == "batch":
            leaves[source.leaf] = _with_twice(source.fake, dims[source.node])
    return compat.pytree.tree_unflatten(leaves, tree)


def _with_twice(t: Tensor, d: int | None) -> Tensor:
    """A tensor of twice the size of ``t`` in a dim, on the meta device, with its dims in the same order in memory."""
    shape, strides = list(t.shape), list(t.stride())
    if d is not None:
        end = strides[d] * shape[d]
        strides = [2 * s if i != d and 0 < end <= s else s for i, s in enumerate(strides)]
        shape[d] *= 2
    return torch.empty_strided(shape, strides, dtype=t.dtype, device="meta")


def row_dims(captured: Captured, layouts: Mapping[str, Layout], rows_dim: int | None) -> list[Dims]:
    """Which dims of the batch's tensors may have its rows: the first one of each, or one that a mesh axis shards.

    Args:
        layouts: of each tensor of the batch, by its node.
        rows_dim: which one has.
    """
    batch = {s.node: s.fake for s in captured.sources if s.kind == "batch"}
    if rows_dim is not None or not layouts:
        return [_along(batch, rows_dim or 0)]
    sharded: list[dict[str, int]] = []
    for axis in range(next(iter(layouts.values())).mesh.ndim):
        found = {n: p.dim for n, layout in layouts.items() if isinstance(p := layout.placements[axis], Shard)}
        sharded += [found] if found and found not in sharded else []
    firsts = [found for found in sharded if 0 in found.values()]
    candidates: list[Dims] = [] if any(set(found.values()) != {0} for found in firsts) else [_along(batch, 0)]
    for found in firsts or sharded:
        if set(found.values()) != {0}:
            rows = {batch[n].shape[d] for n, d in found.items()}
            candidates.append({
                n: found.get(n, 0 if len(rows) == 1 and t.ndim and t.shape[0] in rows else None)
                for n, t in batch.items()
            })  # fmt: skip
    return candidates


def _along(batch: Mapping[str, Tensor], dim: int) -> Dims:
    """The same dim of all tensors that have as many rows there as most; the first of those that have no such dim."""
    sizes = {n: t.shape[dim] for n, t in batch.items() if t.ndim > dim}
    often = Counter(sizes.values())
    rows = next((s for s in sizes.values() if often[s] == max(often.values())), 0)
    firsts = {n: 0 for n, t in batch.items() if 0 < t.ndim <= dim and t.shape[0] == rows}
    return {n: dim if sizes.get(n) == rows else firsts.get(n) for n in batch}


# ---------------------------------------------------------------------------------------------- recording


class _Following(Interpreter):
    """Notes which recorded node is the value of which captured one, and what it was given."""

    def __init__(self, recorder: Recorder, compared: Compared, mesh: Mesh) -> None:
        super().__init__(recorder, {}, {}, lambda t: t)
        self.mesh = mesh
        self.by_row, self.repeated = compared.by_row, compared.repeated
        self.names: dict[fx.Node, str] = {}
        self.given: dict[str, tuple[tuple[fx.Node, bool], ...]] = {}
        self.differentiated: dict[tuple[str, fx.Node], bool] = {}

    def _node(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        tensors = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and "_node" in t.__dict__]
        at = [(self.recorder.node_of(t), t.requires_grad) for t in tensors]
        rows = dict(zip([n for n, _ in at], [n.name in self.by_row for n in node.all_input_nodes], strict=False))
        self.given[node.name] = tuple(rows.items())
        self.differentiated.update({(node.name, n): requires for n, requires in at})
        one = args[0] if node.name in self.repeated else None
        if isinstance(one, Tensor) and ((spec := spec_at(one)) is None or spec.layout.is_replicated()):
            made = self._repeated(node, one, list(args[1]))
        else:
            made = super()._node(node, args, kwargs)
        if isinstance(made, Tensor) and "_node" in made.__dict__:
            self.names.setdefault(self.recorder.node_of(made), node.name)
        return made

    def _repeated(self, node: fx.Node, x: Tensor, sizes: list[int]) -> Tensor:
        """One row for each of this micro-batch's: a part of what would be there for all, made at once."""
        shape, d = node.meta["val"].shape, self.repeated[node.name]
        sizes[d] = shape[d] // 2
        made: Tensor = self.calls.call(node.target, (x, sizes), {})
        layout = Layout(self.mesh, [Shard(d)], ndim=len(shape))
        return tell(made.view_as(made), Spec(shape, made.dtype, layout, undecided_mask=self.mesh.everywhere))


def recorded(captured: Captured, compared: Compared, dims: Dims, numbers_add: bool, place: int) -> MicroBatch:
    """The forward of one of two micro-batches.

    Args:
        dims: of the tensors of the batch that have rows, which.
        numbers_add: a number of the batch is the sum of those of micro-batches; else it is the same for all.
        place: which one of the two.
    """
    mesh = Mesh({AXIS: 2})
    recorder, held, made = Recorder(merge=False), dict[int, Tensor](), dict[str, Tensor]()
    batch, constants = set[fx.Node](), dict[fx.Node, Tensor]()
    with runtime.preferring({}, 0), collective.as_rank(mesh, place), captured.mode, recorder, torch.enable_grad():
        following = _Following(recorder, compared, mesh)
        for source in captured.sources:
            fake, d = source.fake, dims.get(source.node)
            placement: Any = Replicate() if d is None else Shard(d)
            if source.kind == "batch" and d is None and fake.numel() == 1 and numbers_add:
                placement = Partial()
            spec = Spec(
                fake.shape, fake.dtype, Layout(mesh, [placement], ndim=fake.ndim), undecided_mask=mesh.everywhere
            )
            if id(fake) not in held:
                local = torch.empty(spec.local_shape((place,)), dtype=fake.dtype, device=fake.device)
                local.requires_grad_(fake.requires_grad)
                node = recorder.placeholder(source.node, local)
                tell(local, spec)
                held[id(fake)] = local
                batch |= {node} if source.kind == "batch" and placement != Replicate() else set()
                constants.update({} if source.value is None else {node: source.value})
                following.names[node] = source.node
            made[source.node] = held[id(fake)]
        loss, *_ = following.run(captured.module, lambda node: made[node.name])
        node = recorder.node_of(loss)
    constants.update({n: recorder.constants[str(n.target)] for n in recorder.graph.nodes
                      if n.op == "placeholder" and str(n.target) in recorder.constants})  # fmt: skip
    random = {n.name for n in captured.graph.nodes if draws(n)}
    ops = {n.name: target_name(n.target) for n in captured.graph.nodes if n.op == "call_function"}
    return MicroBatch(
        recorder.graph, node, frozenset(batch), constants, following.names, following.given, compared.by_row,
        following.differentiated, compared.degrees, compared.row_counts, frozenset(random), ops,
    )  # fmt: skip


def _check_places(a: MicroBatch, b: MicroBatch, refused: Refused) -> None:
    """Raises PassError where two micro-batches, of the same shapes, are computed with otherwise."""
    mine, theirs = list(a.graph.nodes), list(b.graph.nodes)
    place = {n: i for i, n in enumerate(mine)} | {n: i for i, n in enumerate(theirs)}
    needed = ancestors([a.loss])
    for x, y in zip(mine, theirs, strict=False):
        if x.target is not y.target and x.op == "call_function" and x in needed:
            raise refused(x, f"{target_name(x.target)} takes some rows of the batch, or their places")
        if x not in needed or x.op != "call_function" or x.target is KEEP_ONE.default:
            continue
        same = all(
            place[p] == place[q] if isinstance(p, fx.Node) and isinstance(q, fx.Node) else type(p) is type(q) and p == q
            for p, q in pairs_of((x.args, x.kwargs), (y.args, y.kwargs))
        )
        if not same and not draws_numbers(x, a.random) and not _is_repeated(x, y, a.constants):
            if info_of(x).cause is None:
                raise refused(x, f"{target_name(x.target)} takes some rows of the batch, or their places")
            raise _Ordered(str(refused(x, f"{a.op(info_of(x).source)} uses the places of rows in the batch")))


def _is_repeated(x: fx.Node, y: fx.Node, constants: Mapping[fx.Node, Tensor]) -> bool:
    """Whether two parts of one constant have the same values."""
    a, b = constant(x, constants), None
    if a is not None:
        b = constant(y, {n: v for n in ancestors([y]) for m, v in constants.items() if m.name == n.name})
    return a is not None and b is not None and torch.equal(a, b)


# ---------------------------------------------------------------------------------------------- the answer


def find_weight(
    captured: Captured,
    layouts: Mapping[str, Layout],
    capture_again: Callable[[Any], Captured],
    batch: Any,
    weighing: Weighing,
) -> MicroBatchWeight:
    """The weight of the micro-batches of a captured step.

    Args:
        layouts: of the tensors of the batch, by node.
        capture_again: captures the step for another batch.
        batch: that it was captured for.

    Raises:
        PassError: the loss is no weighted mean over micro-batches.
    """
    one = as_sums(captured)
    found: list[MicroBatchWeight] = []
    errors: list[PassError] = []
    candidates = row_dims(captured, layouts, weighing.rows_dim)
    for dims in candidates:
        try:
            two = as_sums(_captured_again(captured, capture_again, batch, dims, weighing))
            found.append(_of_dims(one, two, dims, weighing))
        except PassError as error:
            errors.append(error)
            if isinstance(error, _OneSize) and len(candidates) == 1 and weighing.rows_dim is None:
                batch_dims = {s.node: s.fake for s in captured.sources if s.kind == "batch"}
                if any(t.ndim > 1 for t in batch_dims.values()):
                    candidates.append(_along(batch_dims, 1))  # the first has groups, say of experts
    # A dim along which order counts has no rows.
    unclear = [e for e in errors if not (isinstance(e, _Ordered) and found)]
    if not unclear and any(f != found[0] for f in found):
        unclear = [PassError(f"the loss is a mean over two things; {weighing.hint}")]
    if unclear:
        sharded = {p.dim for layout in layouts.values() for p in layout.placements if isinstance(p, Shard)}
        more = " (no tensor of the batch is sharded on its first dim: pass rows_dim= to GradientMerge to say which dim "
        more += "has the rows of the batch)"
        if 0 in sharded:
            more = " (if the first dim of the batch does not have its rows, pass rows_dim= to GradientMerge)"
        raise PassError(f"{unclear[0]}{more if weighing.rows_dim is None and not weighing.cuts else ''}")
    return found[0]


class _Ordered(PassError):
    """Values along the dim that may have the rows have an order: it is a sequence."""


class _OneSize(_Ordered):
    """The dim that may have the rows has one size only."""


def _captured_again(
    captured: Captured, capture_again: Callable[[Any], Captured], batch: Any, dims: Dims, weighing: Weighing
) -> Captured:
    try:
        return capture_again(doubled(batch, captured, dims))
    except (CaptureError, RuntimeError, ValueError) as error:
        raise _OneSize(
            f"the step cannot be captured for twice as many rows, so nobody knows what its loss is a mean over "
            f"({error}); {weighing.hint}"
        ) from error


def _of_dims(one: Captured, two: Captured, dims: Dims, weighing: Weighing) -> MicroBatchWeight:
    def refused(node: fx.Node, why: str) -> PassError:
        line = info_of(node).line if "info" in node.meta else line_of(node)
        where = line or f"%{node.name}"
        rows = [s.fake.shape[dim] for s in one.sources if s.kind == "batch" and (dim := dims[s.node]) is not None]
        single = (
            "; a micro-batch has one row here: if your code does something else for one row, use fewer micro-batches"
        )
        return PassError(
            f"{where}: {why}: the loss is no weighted mean of those of micro-batches; {weighing.hint}"
            f"{single if 1 in rows else ''}"
        )

    numbers = [s for s in two.sources if s.kind == "batch" and dims[s.node] is None and s.fake.numel() == 1]
    adds = (True, False) if numbers and not weighing.cuts else (False,)
    compared = compared_sizes(one, two, refused)
    # Constants that are repeated are best compared as they are, what is made of parameters cannot be.
    repeats: list[Mapping[str, int]] = [{}, compared.repeated] if compared.repeated else [{}]
    first: PassError | None = None
    for repeated, numbers_add in product(repeats, adds):
        try:
            found = _read(two, replace(compared, repeated=dict(repeated)), dims, numbers_add, weighing, refused)
        except PassError as error:
            first = first or error
            continue
        if numbers_add or len(adds) == 1 or found.weight.weighs:
            return replace(found, counts=tuple(compared.counterparts.get(n, n) for n in found.counts))
    assert first is not None
    raise first


def _read(
    two: Captured, compared: Compared, dims: Dims, numbers_add: bool, weighing: Weighing, refused: Refused
) -> MicroBatchWeight:
    """The weight, by one way to understand the step."""
    a, b = (recorded(two, compared, dims, numbers_add, place) for place in (0, 1))
    terms = LossTerms(a, weighing.hint)
    if isinstance(terms.loss, Mixed):
        error = terms.refused(terms.loss.node, _mixes(terms.loss, a))
        raise _Ordered(str(error)) if _is_ordered(two, info_of(terms.loss.node).source) else error
    _check_places(a, b, refused)
    return _Answer(terms, weighing).found()


def _is_ordered(captured: Captured, name: str) -> bool:
    """Whether an op takes values in an order, or merely views them; then it says nothing of rows."""
    node = next((n for n in captured.graph.nodes if n.name == name), None)
    schema = getattr(node and node.target, "_schema", None)
    if node is None or schema is None:
        return False
    x, made = next(iter(node.all_input_nodes), node).meta.get("val"), node.meta.get("val")
    views = bool(schema.returns) and schema.returns[0].alias_info is not None and not schema.is_mutable
    moved = isinstance(x, Tensor) and isinstance(made, Tensor) and x.numel() == made.numel()
    return (views and moved) or schema.name.partition("::")[2] in _SEQUENCES


def _mixes(mixed: Mixed, recording: MicroBatch) -> str:
    node = mixed.node.all_input_nodes[0] if reduces(mixed.node) else mixed.node
    op = recording.op(info_of(node).source)
    unknown = "" if op.startswith(("aten.", "meshwright.")) else ", as it has no rule (give it one with mw.rule)"
    return f"{op} {mixed.how}{unknown}"


class _Answer:
    """What the terms of a loss say."""

    def __init__(self, terms: LossTerms, weighing: Weighing) -> None:
        self.terms, self.weighing, self.recording = terms, weighing, terms.recording

    def found(self) -> MicroBatchWeight:
        loss, terms = self.recording.loss, self.terms.loss
        assert isinstance(terms, frozenset)
        expanded = [t for term in terms for t in self._expanded(term)]
        fixed = [t for t in expanded if not t.rows]
        rows = [t for t in expanded if t.rows]
        for t in fixed:
            if t.degree or t.factors:
                raise self._refused(loss, "what is divided by a sum over the batch is none: divide a sum by a sum")
        if not rows:
            return MicroBatchWeight(LossWeight())
        divisors = {t.factors for t in rows}
        if len(divisors) > 1:
            raise self._refused(
                loss, "two means over different numbers of things are added, of which the values of a batch say how "
                "many: no one weight of a micro-batch is that of both",
            )  # fmt: skip
        (factors,) = divisors
        return self._by_values(factors, rows, fixed) if factors else self._by_sizes(rows, fixed)

    def _refused(self, node: fx.Node, why: str) -> PassError:
        return self.terms.refused(node, why)

    def _expanded(self, term: Term) -> Iterator[Term]:
        """A term with the sums over micro-batches that are factors of it as what they are sums of."""
        positive = [(k, p) for k, p in term.factors if p > 0]
        for key, power in positive:
            if power != 1.0 or key not in self.terms.sums:
                node = self.terms.functions.get(key, self.recording.loss)
                raise self._refused(node, f"{self.recording.op(info_of(node).source)} of a sum over the batch")
        if len(positive) + term.rows > 1:
            raise self._refused(self.recording.loss, "two sums over the batch are multiplied")
        if not positive:
            yield term
            return
        ((key, _),) = positive
        rest = Term(False, term.degree, term.count, tuple(f for f in term.factors if f[0] != key))
        inner = self.terms.known[self.terms.sums[key].all_input_nodes[0]]
        assert isinstance(inner, frozenset)
        for t in inner:
            yield from self._expanded(rest.times(t) if t.rows or t.factors else replace(rest.times(t), once=True))

    def _by_sizes(self, rows: list[Term], fixed: list[Term]) -> MicroBatchWeight:
        loss, degrees = self.recording.loss, {t.degree for t in rows}
        if degrees == {0.0, -1.0}:
            raise self._refused(loss, "a sum over the batch and a mean over it are added")
        if degrees not in ({0.0}, {-1.0}):
            raise self._refused(loss, f"the loss is scaled by a power of how many rows there are ({degrees})")
        if degrees == {0.0}:
            if fixed:
                raise self._refused(
                    loss, "what is the same for all rows, a penalty say, is added to a sum over the batch, which "
                    "micro-batches would add each",
                )  # fmt: skip
            return MicroBatchWeight(LossWeight())
        counts = sorted({round(t.count, 9) for t in rows})
        others = frozenset(round(n / counts[0], 9) for n in counts[1:])
        return MicroBatchWeight(LossWeight(counts[0], mean=True, others=others))

    def _by_values(
        self, factors: tuple[tuple[Any, float], ...], rows: list[Term], fixed: list[Term]
    ) -> MicroBatchWeight:
        if len(factors) > 1 or factors[0][1] > 0:
            raise self._refused(
                self.recording.loss, "a mean over what the values of a batch say is divided by such a number again"
            )
        ((key, power),) = factors
        at = self.terms.divides.get(key, self.recording.loss)
        crossing, function = self.terms.function(key)
        x = crossing.all_input_nodes[0]
        inner = self.terms.known[x]
        assert isinstance(inner, frozenset)
        if len(inner) != 1 or not (of := next(iter(inner))).rows or of.factors:
            raise self._refused(at, "what it is divided by is no sum over the batch: divide a sum by a sum")
        if {t.degree for t in rows} != {of.degree * -power} and {t.degree + power * of.degree for t in rows} != {0.0}:
            raise self._refused(at, "what is divided by a sum over the batch is none: divide a sum by a sum")
        if of.degree and function:
            raise self._refused(at, "a mean over the batch is divided by one that is kept from zero: divide sums")
        many = math.prod(next(iter(info_of(x).values)).shape)
        if many > 1:  # a mean over each row, where what is taken for rows is a sequence
            raise _Ordered(str(self._refused(at, f"terms of the loss are divided by {many} different sums")))
        names = []
        for node in self.terms.alike[("sum over micro-batches", self.terms.key(x))]:
            x = node.all_input_nodes[0]
            if self._is_differentiated(info_of(node).source, x):
                raise self._refused(at, "the gradient goes through what a sum over the batch is divided by, too")
            if x not in self.recording.names:
                raise self._refused(at, f"{self.recording.op(info_of(x).source)} uses a sum over the rows of the batch")
            names.append(self.recording.names[x])
        return MicroBatchWeight(self._weight(x, power, function, of, fixed, at), tuple(dict.fromkeys(names)))

    def _is_differentiated(self, source: str, x: fx.Node) -> bool:
        """Whether gradients go through a value that a captured node sums over micro-batches."""
        if not any(v.dtype.is_floating_point for v in info_of(x).values):
            return False
        known = self.recording.differentiated
        return known.get((source, x), any(requires for (name, _), requires in known.items() if name == source))

    def _weight(self, x: fx.Node, power: float, function: Any, of: Term, fixed: list[Term], at: fx.Node) -> LossWeight:
        dtype = next(iter(info_of(x).values)).dtype
        if power != -1.0:
            raise self._refused(at, f"the loss is divided by a power ({-power:g}) of a sum over the batch")
        if fixed and function:
            # All terms count alike only where the divisor is the count itself, those of nothing aside.
            if not self._as_count(function, dtype, x):
                raise self._refused(
                    at,
                    "what is the same for all rows, a penalty say, is added to a mean whose divisor is kept from zero "
                    "otherwise than a whole number from less than 1",
                )
            function = ()
        return LossWeight(
            of.count if of.degree else 1.0, others=frozenset(), counted=True, dtype=dtype, function=function,
            line=info_of(at).line,
        )  # fmt: skip

    def _as_count(self, function: Any, dtype: torch.dtype, x: fx.Node) -> bool:
        """Whether a function gives counts as they are, those of nothing aside."""
        sizes = (1.0, 2.0, 1000.0) if is_whole_number(x) else (0.01, 1.0, 1000.0)
        return all(math.isclose(value_at(function, dtype, n), n, rel_tol=1e-5) for n in sizes)


__all__ = ["find_weight"]
