"""Parameters that a step takes whole: each at one owner, or all of them on all ranks.

Parameters and gradients are sent to where they are whole, the step of the optimizer's class runs there on plain
tensors, and each rank gets back its shards of what it updated.  States stay with the owner (``At`` on all axes).  Who
owns what follows from shapes, and what is sent from layouts, which all ranks share.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from ... import collective
from ...collective import serving, several
from ...dispatch import disabled, refresh
from ...errors import ShardError
from ...layout import At, Layout, Placement, Replicate, Spec, wire_name
from ...local_tensor import bare
from ...mesh import Mesh
from ...ranks import runtime
from ...ranks.runtime import user_line
from ...resharding import executor
from ...resharding.copies import TO_DEVICE, TO_HOST
from ...resharding.planner import plan as plan_conversion
from ...resharding.record import Record
from ...tensor import DistTensor, call_enabled, in_spec, wrap
from ..parameters.names import names_of
from ..parameters.stored import Axes
from .blocks import opaque
from .collected import mapped
from .states import Chunks, own_spec, unfit

Tensor = torch.Tensor
Box = tuple[slice, ...]
_NUMBERS = (bool, int, float)


def work(shape: Sequence[int]) -> int:
    """How long an update of a tensor takes, as Newton-Schulz and eigenvectors do: s²(2l + s) of an s × l matrix."""
    rows = shape[0] if shape else 1
    small, large = sorted((rows, math.prod(shape[1:])))
    return small * small * (2 * large + small)


class Wholes(Chunks):
    """Parameters of one optimizer whose updates are made on whole tensors.

    Args:
        by: "parameter": each at one owner; "model": all of them on all ranks.
        over, on, params: as of :class:`Chunks`; ``over`` shards the gradients alone.
    """

    def __init__(self, by: str, over: Axes, on: str | None, params: Iterable[DistTensor]) -> None:
        self.by = by
        self.homes: dict[int, tuple[int, ...]] = {}  # of a parameter: places in the mesh where it is whole
        self.loads: dict[Mesh, list[int]] = {}
        self.whole: dict[int, Tensor] = {}  # what stands in for parameters, without memory between steps
        self.active: list[DistTensor] = []  # those that the step may update
        self._here: set[int] = set()  # those of them that this rank updates
        self.told: dict[int, tuple[float, Any, int]] = {}  # of a rank: digest, structure, how many numbers
        super().__init__(over, on, params)

    def add(self, params: Iterable[DistTensor]) -> None:
        new = [p for p in params if id(p) not in self.specs]
        super().add(new)  # which has the gradients sharded
        for p in sorted(new, key=lambda p: -work(p._spec.shape)):
            mesh = p._spec.mesh
            loads = self.loads.setdefault(mesh, [0] * mesh.size)
            home = tuple(range(mesh.size))
            if self.by == "parameter" and p._spec.ndim:
                home = (loads.index(min(loads)),)
                loads[home[0]] += work(p._spec.shape)
            self.homes[id(p)] = home
            self.specs[id(p)] = Spec(p._spec.shape, p._spec.dtype, _layout_at(mesh, home))

    def prepare(self, p: DistTensor) -> Tensor:
        """What stands in for a parameter; an empty tensor where this rank does not update it."""
        if id(p) not in self.whole:
            self.whole[id(p)] = bare(p).new_empty(0)
        return self.whole[id(p)]

    def has(self, p: Tensor) -> bool:
        """Whether this rank updates a parameter."""
        return id(p) not in self.homes or id(p) in self._here

    def bring(self, params: Sequence[DistTensor], everything: bool, checked: bool) -> None:
        """Send parameters and gradients to where they are whole.  Again in a step: into the same tensors.

        Args:
            everything: those without gradients too.
            checked: refuse gradients that are Partial.
        """
        self.active, self._here = [], set()
        trades: list[Trade] = []
        come: list[tuple[DistTensor, Tensor, Tensor | None]] = []
        with torch.no_grad(), disabled():
            for p in params:
                g = p.grad
                if g is None and self.by != "model" and not (everything and p.requires_grad):
                    continue
                self.active.append(p)
                here, (home, me) = p._spec.layout.is_replicated(), self._places(p)
                local, whole, grad = bare(p), None, None
                if me in home:
                    self._here.add(id(p))
                    before = self.whole.get(id(p))
                    fits = before is not None and before.shape == p._spec.shape and not self._leaves(p)
                    whole = local if here else before if fits else _empty(local, p._spec)
                trades.append((_Route(p._spec, home, False), local, whole))
                if g is not None:
                    spec, part = _gradient(p, g, checked)
                    if me in home:
                        grad = part if spec.layout.is_replicated() else _empty(part, spec)
                    trades.append((_Route(spec, home, False), part, grad))
                if whole is not None:
                    come.append((p, whole, grad))
            self._send(trades)
            for p, whole, grad in come:
                self._place(p, whole, grad)

    def _place(self, p: DistTensor, whole: Tensor, grad: Tensor | None) -> None:
        stand_in = self.whole.get(id(p))
        if self._leaves(p):
            whole, grad = TO_HOST(whole), None if grad is None else TO_HOST(grad)
        if stand_in is None or (stand_in.dtype, stand_in.device) != (whole.dtype, whole.device):
            stand_in = self.whole[id(p)] = whole
        elif stand_in.shape != whole.shape:  # the same object in all steps: a class may keep dicts by it, or by its id
            stand_in.data = whole
        elif stand_in is not whole and stand_in.data_ptr() != whole.data_ptr():
            stand_in.copy_(whole)
        stand_in.grad = None if grad is None else grad.to(stand_in.device)

    def _places(self, p: DistTensor) -> tuple[tuple[int, ...], int]:
        return self.homes[id(p)], p._spec.mesh.ranks.index(runtime.RT.rank)

    def _mesh(self) -> Mesh:
        if len(self.loads) > 1:
            raise ShardError(
                f"shard_optimizer: by={self.by!r} with parameters on {len(self.loads)} meshes. Make an optimizer for "
                "the parameters of each mesh"
            )
        return next(iter(self.loads))

    def gather(self, params: Sequence[DistTensor]) -> None:
        """Send each rank its shards of what the step has updated."""
        trades: list[Trade] = []
        with torch.no_grad(), disabled():
            for p in self.active:
                home, me = self._places(p)
                local, whole = bare(p), self.whole[id(p)] if me in home else None
                if whole is not None and self._leaves(p):
                    whole = TO_DEVICE(whole, p._spec.mesh.device)
                trades.append((_Route(p._spec, home, True), local, whole))
            self._send(trades)
            torch.autograd.graph.increment_version([bare(p) for p in self.active])

    def _send(self, trades: Sequence[Trade]) -> None:
        if not trades:
            return
        mesh, names = self._mesh(), partial(names_of, self.active)
        with serving("", names):
            for sent in _exchange(mesh, trades):
                if sent.nbytes and runtime.RT.records is not None:
                    runtime.RT.records.append(_record(mesh, names(), self.by, trades[0][0].back, sent))

    def release(self) -> None:
        """Free the whole tensors: the step has ended."""
        self.active = []
        for stand_in in self.whole.values():
            stand_in.grad = None
            stand_in.data = stand_in.new_empty(0)

    # ------------------------------------------------------------------------------------------ states

    def hold(self, opt: Optimizer) -> None:
        """Have all states lie where their parameters are whole: new ones, those that somebody set or loaded."""
        for p, entry in opt.state.items():
            if id(p) in self.homes and isinstance(p, DistTensor):
                for k, v in entry.items():
                    entry[k] = mapped(v, partial(self._held, p))

    def _held(self, p: DistTensor, t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.ndim or opaque(t):
            return t
        whole = self.by == "model" or not p._spec.ndim
        if not isinstance(t, DistTensor) and whole and t.shape != p._spec.shape:
            return t
        with torch.no_grad(), disabled():
            if self.on is not None and t.device.type != self.on:
                t = self.placed(t)
            (home, me), mesh = self._places(p), p._spec.mesh
            want = Spec(t._spec.shape if isinstance(t, DistTensor) else t.shape, t.dtype, _layout_at(mesh, home))
            if not isinstance(t, DistTensor):
                return wrap(t.detach() if me in home else t.new_empty(0, *t.shape[1:]), want)
            if t._spec.layout == want.layout:
                return t
            return wrap(executor.apply(plan_conversion(t._spec.invariant(), want).steps, bare(t)).clone(), want)

    def tell(self, opt: Optimizer, params: Sequence[DistTensor], error: BaseException | None) -> None:
        """Bring to all ranks what the steps of owners have left behind: which states there are, and all numbers.

        A step that raised on one rank raises on all.
        """
        if self.by == "model" or not self.loads or self._mesh().size == 1:
            return
        mesh = self._mesh()
        group, me = collective.group(mesh), mesh.ranks.index(runtime.RT.rank)
        numbers: list[float] = []
        left = []
        for place, value in self._left(opt, params, me):
            before = len(numbers)
            left.append((place, _described(value, numbers), len(numbers) - before))
        digest = math.nan if error is not None else float(int(hashlib.sha256(repr(left).encode()).hexdigest()[:12], 16))
        known = [self.told.get(r, (-1.0, [], 0)) for r in range(mesh.size)]
        row = torch.zeros(1 + known[me][2], dtype=torch.float64)
        row[0] = digest
        if digest == known[me][0]:
            row[1:] = torch.tensor(numbers, dtype=torch.float64)
        sizes = [1 + n for _, _, n in known]
        rows = [r.tolist() for r in collective.all_gather(row, 0, sizes, group).split(sizes)]
        changed = any(r[0] != k[0] for r, k in zip(rows, known, strict=True))
        if changed:
            said = collective.all_gather_object((digest, left, numbers, repr(error) if error else ""), group)
            self.told = {r: (d, structure, len(n)) for r, (d, structure, n, _) in enumerate(said) if d == d}
            rows = [[d, *n] for d, _, n, _ in said]
            raised = next(((r, text) for r, (*_, text) in enumerate(said) if text and r != me), None)
            if raised is not None and error is None:
                where = f"rank {mesh.ranks[raised[0]]}, which owns some parameters"
                raise ShardError(f"{type(opt).__name__}.step raised on {where}: {raised[1]}")
        for r, (_, structure, _) in self.told.items():
            values = iter(rows[r][1:])
            if r != me:
                for (kind, i), described, count in structure:
                    if changed or count or (kind == "state" and params[i] not in opt.state):
                        self._take(opt, params, (kind, i), described, values)
        order = {id(p): i for i, p in enumerate(p for g in opt.param_groups for p in g["params"])}
        places = [order.get(id(p), len(order)) for p in opt.state]
        if places != sorted(places):  # checkpoints compare what ranks save, in order
            entries = [entry for _, entry in sorted(zip(places, opt.state.items(), strict=True), key=itemgetter(0))]
            opt.state.clear()
            opt.state.update(entries)

    def _left(self, opt: Optimizer, params: Sequence[DistTensor], me: int) -> Iterator[tuple[tuple[str, int], Any]]:
        """What this rank tells: states of its own, the numbers of groups of which it has the first parameter."""
        for i, p in enumerate(params):
            if self.homes[id(p)] == (me,) and p in opt.state:
                yield ("state", i), opt.state[p]
        active = set(map(id, self.active))
        firsts: list[int] = []
        for i, g in enumerate(opt.param_groups):
            home = next((self.homes[id(p)] for p in g["params"] if id(p) in active and p.ndim), ())
            firsts += home
            if home == (me,):
                yield ("group", i), {k: v for k, v in g.items() if type(v) in _NUMBERS}
        if firsts[:1] == [me]:
            yield ("own", 0), {k: v for k, v in opt.__dict__.items() if type(v) in _NUMBERS and k[0] != "_"}

    def _take(
        self,
        opt: Optimizer,
        params: Sequence[DistTensor],
        place: tuple[str, int],
        described: Any,
        values: Iterator[float],
    ) -> None:
        kind, i = place
        if kind != "state":
            kept = opt.param_groups[i] if kind == "group" else opt.__dict__
            kept.update(_rebuilt(described, values, {}, torch.empty))
            return
        p = params[i]
        kept = opt.state[p]
        layout, device = _layout_at(p._spec.mesh, self.homes[id(p)]), self.on or p.device

        def elsewhere(shape: tuple[int, ...], dtype: torch.dtype) -> DistTensor:
            return wrap(torch.empty(0, *shape[1:], dtype=dtype, device=device), Spec(shape, dtype, layout))

        made = _rebuilt(described, values, kept, elsewhere)
        kept.clear()
        kept.update(made)


def _gradient(p: DistTensor, g: Any, checked: bool) -> tuple[Spec, Tensor]:
    """How a gradient lies, and this rank's shard of it."""
    refresh(g, call_enabled)
    spec: Spec = g._spec
    if spec.layout.partial:
        if checked:
            raise ShardError(unfit(p, spec))
        want = own_spec(p._spec)
        return want, in_spec(g, spec, want).to(p.device, want.dtype)
    return spec.with_(dtype=p._spec.dtype), bare(g).to(p.device, p._spec.dtype)


# ---------------------------------------------------------------------------------------------- messages


def _empty(local: Tensor, spec: Spec) -> Tensor:
    return local.new_empty(spec.shape, dtype=spec.dtype)


@lru_cache(4096)
def _layout_at(mesh: Mesh, home: tuple[int, ...]) -> Layout:
    if len(home) > 1 or mesh.size == 1:
        return Layout(mesh)
    at: list[Placement] = [At(c) for c in mesh.coordinates()[home[0]]]
    return Layout(mesh, at)


class _Route(NamedTuple):
    """What of one tensor goes to its homes, or comes back.

    Attributes:
        spec: how it is sharded.
        homes: places in the mesh where it is whole.
        back: from there to the shards.
    """

    spec: Spec
    homes: tuple[int, ...]
    back: bool

    def moves(self) -> Iterator[tuple[int, int, int, Box, Box]]:
        """From, to, elements, where in the tensor, where in the shard; what stays on a rank too."""
        spec, homes, coordinates = self.spec, self.homes, self.spec.mesh.coordinates()
        copies = [a for a, p in enumerate(spec.layout.placements) if isinstance(p, Replicate)]
        for i, at in enumerate(coordinates):
            for box, own in spec.layout.local_boxes(spec.shape, at):
                if not (n := math.prod(s.stop - s.start for s in box)):
                    continue
                if self.back:
                    yield homes[0] if len(homes) == 1 else i, i, n, box, own
                    continue
                # Of ranks that hold the same, the one that differs from the home in no such axis sends it.
                for home in homes:
                    if all(at[a] == coordinates[home][a] for a in copies):
                        yield i, home, n, box, own


@lru_cache(8192)
def _own_moves(route: _Route, me: int) -> list[tuple[int, int, int, Box, Box]]:
    return [m for m in route.moves() if me in m[:2]]


@lru_cache(64)
def _table(routes: tuple[_Route, ...], n: int) -> tuple[int, ...]:
    """How many elements each rank sends to each other."""
    made = [0] * (n * n)
    for route in routes:
        for source, target, count, *_ in route.moves():
            if source != target:
                made[source * n + target] += count
    return tuple(made)


Trade = tuple[_Route, Tensor, Tensor | None]  # a route, this rank's shard, the whole tensor where it is


def _record(mesh: Mesh, names: Sequence[str], by: str, back: bool, sent: Tensor) -> Record:
    """What ``explain`` says of a message."""
    home = "its owner" if by == "parameter" else "all ranks"
    reason = f"parameters and gradients go to where the update takes them whole: each to {home}"
    src, dst = "shards", "whole"
    if back:
        reason, src, dst = "each rank gets its shards of updated parameters from their owners", dst, src
    return Record(
        "optimizer.step", 0, ("exchange_rows",), mesh.axes, tuple(sent.shape), src, dst, sent.nbytes, 0.0, user_line(),
        reason, asked=True, dtypes=(wire_name(sent.dtype),), sums=(0,), part=several("", names),
    )  # fmt: skip


def _exchange(mesh: Mesh, trades: Sequence[Trade]) -> Iterator[Tensor]:
    """Send shards to where tensors are whole, or back: one message of each dtype from rank to rank.

    Returns:
        What this rank sends, of each dtype.
    """
    n, me = mesh.size, mesh.ranks.index(runtime.RT.rank)
    for dtype in dict.fromkeys(route.spec.dtype for route, *_ in trades):
        out: dict[int, list[Tensor]] = defaultdict(list)
        into: dict[int, list[Tensor]] = defaultdict(list)
        routes = [(route, local, whole) for route, local, whole in trades if route.spec.dtype is dtype]
        for route, local, whole in routes:
            for source, target, _, box, own in _own_moves(route, me):
                given, taken = (whole, local) if route.back else (local, whole)
                from_, to_ = (box, own) if route.back else (own, box)
                if source == me and target == me:
                    assert whole is not None
                    if whole.data_ptr() != local.data_ptr():
                        taken[to_].copy_(given[from_])  # type: ignore[index]
                elif source == me:
                    out[target].append(given[from_].reshape(-1))  # type: ignore[index]
                else:
                    into[source].append(taken[to_])  # type: ignore[index]
        sent = [t for target in range(n) for t in out[target]]
        flat = torch.cat(sent) if sent else torch.empty(0, dtype=dtype, device=routes[0][1].device)
        table = _table(tuple(route for route, *_ in routes), n)
        got = collective.exchange_rows(flat, 0, table, collective.group(mesh))
        places = [t for source in range(n) for t in into[source]]
        for place, part in zip(places, got.split([t.numel() for t in places]) if places else (), strict=True):
            place.copy_(part.view(place.shape))
        yield flat


# ---------------------------------------------------------------------------------------------- what is told of states


def _described(value: Any, numbers: list[float]) -> Any:
    """What a state is, in words that ranks compare; its numbers are added to the others."""
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            return ("tensor", tuple(value.shape), value.dtype) if value.ndim else ("value", value)
        numbers.append(float(value))
        return "number", value.dtype
    if type(value) in _NUMBERS:
        numbers.append(float(value))
        return "plain", type(value).__name__
    if isinstance(value, dict):
        return "dict", [(k, _described(v, numbers)) for k, v in value.items()]
    if type(value) in (list, tuple):
        return type(value).__name__, [_described(v, numbers) for v in value]
    return "value", value


def _rebuilt(described: Any, numbers: Iterator[float], old: Any, tensor: Callable[..., Any]) -> Any:
    """The state that was described.

    Args:
        old: what is there; tensors that fit stay.
        tensor: makes one of a shape and dtype, which has no elements here.
    """
    kind, what, *rest = described
    if kind == "tensor":
        fits = isinstance(old, DistTensor) and tuple(old.shape) == what and old.dtype is rest[0]
        return old if fits and not old.to_local().numel() else tensor(what, rest[0])
    if kind == "number":
        return torch.tensor(next(numbers), dtype=what)
    if kind == "plain":
        return {"bool": bool, "int": int, "float": float}[what](next(numbers))
    if kind == "dict":
        known = old if isinstance(old, dict) else {}
        return {k: _rebuilt(v, numbers, known.get(k), tensor) for k, v in what}
    if kind in ("list", "tuple"):
        before = old if isinstance(old, (list, tuple)) and len(old) == len(what) else [None] * len(what)
        made = [_rebuilt(v, numbers, o, tensor) for v, o in zip(what, before, strict=True)]
        return tuple(made) if kind == "tuple" else made
    return what


__all__ = ["Wholes", "work"]
