"""The search: meshes, storage and recomputation around the exact optimum of layouts on each mesh."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..errors import PlanError
from ..layout import Shard
from ..machines import Hardware
from ..mesh import Mesh
from ..program.capture.export import Captured, capture
from ..program.capture.fakes import writing_nothing
from ..program.capture.shared_export import Shelf, reusing
from ..program.capture.work import OpWork
from ..program.ir.nodes import no_collection
from .emit import PIPELINE_AXIS, Keeping, Layouts
from .fixed import Fix, check_fix, states_allowed
from .measure import TrainedStep
from .narrow import cheapest
from .pipelines import Stage, cut, piped_seconds
from .prices import Wires, split
from .repeats import cut_to, repeats_of
from .solve import TooWide
from .space import Fits, Space

_STAGES = 32  # of a pipeline at most
_NONE, _SHOWN, _ALL = 0.01, 0.25, 1.0  # parts of gradients' sums that count as not hidden
_MICRO = 4  # micro-batches for each stage at most
_REMEMBERED = 1 << 24  # bytes of eliminations of a mesh that are remembered for layouts which are fixed later
_EXPORTS = 4  # of models with fewer blocks that are kept: of two sizes, with wishes and without
_KEEP = 3  # blocks of a run that are captured: the first, one between, the last
_HIDES = 0.9
_UPDATE = 10  # how often the bytes of a parameter are moved to update it
_GATHERED = 2  # blocks whose parameters are gathered at one time
_TRANSIENT = 1.15  # by which temporaries add to activations


@dataclass(frozen=True)
class Candidate:
    """A way to run the step, with estimates.

    Attributes:
        layouts, storage: which.
        seconds, memory: of a step, and bytes on a rank.
        parts: seconds of ops, of activations' collectives, of parameters' and gradients', and of the update.
    """

    layouts: Layouts
    storage: Keeping
    seconds: float
    memory: float
    parts: tuple[float, float, float, float]

    @property
    def mesh(self) -> dict[str, int]:
        """Axis to size."""
        inner = dict(zip(self.layouts.axes, self.layouts.sizes, strict=True))
        return {PIPELINE_AXIS: self.storage.stages, **inner} if self.storage.stages > 1 else inner

    def __str__(self) -> str:
        mesh = ",".join(f"{a}={n}" for a, n in self.mesh.items())
        return f"{mesh}: {self.seconds * 1e3:.1f} ms, {self.memory / 1e9:.2f} GB ({self.storage})"


@dataclass
class PlanSearch:
    """What is searched, and for what.

    Attributes:
        step: model, loss, batch and optimizer.
        hardware, memory: the machine, and bytes that a rank may hold.
        devices: how many ranks; ``mesh``: or the axes that are given.
        fix: glob of parameters to placements.
        phases: seconds that the search itself took, by phase.
        caller: the function that ``fix`` was given to, for errors.
    """

    step: TrainedStep
    hardware: Hardware
    memory: float
    devices: int
    mesh: Mesh | None = None
    fix: Fix = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    caller: str = "plan"

    def __post_init__(self) -> None:
        self.repeats = repeats_of(self.step.model, _KEEP)
        self.work = OpWork(saving=True)
        self.states = _states(self.step.optimizer)
        self._solved: dict[Any, Layouts | None] = {}
        self._spaces: dict[tuple[tuple[int, ...], float], Space] = {}
        self.exports: Shelf = deque(maxlen=_EXPORTS)
        self.captures: dict[tuple[int, ...], Captured] = {}
        check_fix(self.fix, self.step.model, self.mesh, self.caller)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note the time of a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start

    def captured(self) -> Captured:
        """The step of the cut model."""
        return self.captured_with(self.repeats.kept)

    def captured_with(self, counts: tuple[int, ...]) -> Captured:
        """The step of the model with so many blocks of each run; captured once, whatever is planned for it."""
        if counts not in self.captures:
            step = self.step
            with (
                self.timed("capture"), no_collection(), writing_nothing(), reusing(self.exports),
                cut_to(step.model, self.repeats, counts),
            ):  # fmt: skip
                self.captures[counts] = capture(step.model, step.loss_fn, step.batch, step.device)
        return self.captures[counts]

    # -- meshes ---------------------------------------------------------------------------------------

    def meshes(self, devices: int = 0) -> list[tuple[int, ...]]:
        """Sizes of axes, outermost first: of all ranks, or of so many."""
        if self.mesh is not None:
            return [self.mesh.sizes]
        every = devices or self.devices
        node = self.hardware.node or every
        found: list[tuple[int, ...]] = [(every,)]
        for inner in _divisors(every):
            aligned = node % inner == 0 or (inner % node == 0 and inner <= 4 * node)
            if 1 < inner < every and aligned:
                found.append((every // inner, inner))
        return found

    def layouts(self, sizes: tuple[int, ...], held: float = 0.0, shown: float = _SHOWN) -> Layouts | None:
        """The optimum of layouts on a mesh; None where an axis would have nothing to do.

        Args:
            held: seconds that a byte of memory is worth.
            shown: part of the time of gradients' sums that nothing hides.
        """
        key = sizes, held, shown
        if key not in self._solved:
            axes = self.axes(sizes)
            space = self._space(sizes, held)
            fixed = states_allowed(self.fix, self.captured(), axes, self.repeats)
            named = axes if self.mesh is not None or self.fix else ()
            with self.timed("solve"):
                problem = space.problem_of(shown, fixed)
                try:
                    found = Layouts(space, cheapest(problem), named, shown=shown)
                except PlanError as error:
                    if not fixed or isinstance(error, TooWide):
                        raise
                    cheapest(space.problem_of(shown))  # raises where nothing is possible without them, either
                    raise PlanError(self._contradiction(space, shown, fixed)) from error
                if not _useful(found) and (pinned := _batch_split(space)):
                    # what is too small to be worth sending is divided by rows all the same
                    found = Layouts(space, cheapest(problem.pinned(pinned)), named, shown=shown)
            self._solved[key] = found if self.mesh is not None or _useful(found) else None
        return self._solved[key]

    def _contradiction(self, space: Space, shown: float, fixed: Fits) -> str:
        """Which of the layouts that are fixed leaves no assignment, in words."""
        sizes = " × ".join(map(str, space.sizes))
        for name, fits in fixed.items():
            try:
                cheapest(space.problem_of(shown, {name: fits}))
            except PlanError:
                return (
                    f"plan: fix= of {name}: no op of the model computes with it so on a mesh of {sizes} ranks. Fix "
                    "another dim, or leave it out"
                )
        return (
            f"plan: fix=: what is fixed ({', '.join(fixed)}) does not go together on a mesh of {sizes} ranks. Leave "
            "some of them to the planner"
        )

    def _space(self, sizes: tuple[int, ...], held: float) -> Space:
        """The tables of a mesh; made once, whatever is fixed."""
        if (sizes, held) not in self._spaces:
            captured = self.captured()
            with self.timed("tables"):
                wires = Wires(sizes, self.hardware)
                self._spaces[sizes, held] = Space(captured, wires, self.repeats, work=self.work, held=held * 1e12)
        return self._spaces[sizes, held]

    def axes(self, sizes: tuple[int, ...]) -> tuple[str, ...]:
        """Names of the axes that `fix` may use."""
        if self.mesh is not None:
            return self.mesh.axes
        return ("dp", "tp")[: len(sizes)]

    # -- candidates -----------------------------------------------------------------------------------

    def candidates(self) -> list[Candidate]:
        """All of them, the fastest of those that fit first."""
        made, impossible = list[Candidate](), list[PlanError]()
        for sizes in self.meshes():
            try:
                made += self.on(sizes)
            except PlanError as error:
                impossible.append(error)
        if impossible and not made:
            raise impossible[0]
        made += self.data_parallel()
        fits = [c.seconds for c in made if c.memory <= self.memory]
        made += self.piped(min(fits, default=math.inf))
        if not any(c.memory <= self.memory for c in made):
            made += [
                c for sizes in dict.fromkeys(c.layouts.space.sizes for c in made) for c in self.on(sizes, self._worth())
            ]
        if not made:
            rows = self._rows()
            smooth = self.devices & (self.devices - 1) == 0
            number = (
                "fewer devices" if smooth else f"a number of devices of small factors (e.g. {_rounder(self.devices)})"
            )
            raise PlanError(
                f"plan: devices={self.devices} has no useful factorisation: no axis of a mesh of {self.devices} ranks "
                f"can split the {rows} rows of the batch, heads or weights. Take {number}, "
                f"or a batch of at least {self.devices} rows."
            )
        return sorted(made, key=lambda c: (c.memory > self.memory, c.seconds, c.memory, str(c)))

    def _worth(self) -> float:
        """Seconds that a byte is worth where nothing fits: that of the link which would bring it."""
        return 1.0 / self.hardware.links[-1].bandwidth

    def _rows(self) -> int:
        return max((s.fake.shape[0] for s in self.captured().sources if s.kind == "batch" and s.fake.ndim), default=0)

    def on(self, sizes: tuple[int, ...], held: float = 0.0) -> Iterator[Candidate]:
        """The candidates of one mesh."""
        layouts = self.layouts(sizes, held)
        if layouts is None:
            return
        found = [self.estimate(layouts, storage) for storage in self.storages(layouts)]
        yield from found
        # Gradients take longer than what would hide them, or they do not.
        longer = all(c.parts[2] > _HIDES * c.parts[0] for c in found)
        other = self.layouts(sizes, held, _ALL if longer else _NONE)
        if other is not None and other.optimum.values != layouts.optimum.values:
            yield from (self.estimate(other, storage) for storage in self.storages(other))
            layouts = layouts if longer else other
        layouts.space.problem.tables.forget(_REMEMBERED)
        yield from self.hybrid(layouts)

    def data_parallel(self) -> Iterator[Candidate]:
        """Rows over all ranks and parameters replicated, which guesses of what is hidden may have left out."""
        if self.mesh is not None or self.fix:
            return
        space = self._space((self.devices,), 0.0)
        pinned = _batch_split(space) | {v.variable: [0] for v in space.values.values() if v.kind == "param"}
        with self.timed("solve"):
            found = Layouts(space, cheapest(space.problem_of(_SHOWN).pinned(pinned)), shown=_SHOWN)
        if _useful(found):
            yield from (self.estimate(found, storage) for storage in self.storages(found))
            yield from self.hybrid(found)

    def hybrid(self, layouts: Layouts) -> Iterator[Candidate]:
        """Parameters that are sharded within nodes."""
        for inner in self.hybrids(layouts):
            made = layouts.hybrid(inner)
            for recompute in (False, True) if self.repeats.runs else (False,):
                for kind in ("kept", "fsdp"):
                    yield self.estimate(made, Keeping(kind, ("dp",), recompute))

    def hybrids(self, layouts: Layouts) -> list[int]:
        """Of how many ranks of a node parameters can be sharded, where the axis of the batch leaves the node."""
        rest, node = math.prod(layouts.sizes[1:]), self.hardware.node
        if self.mesh is not None or self.fix or layouts.roles[0] != "dp" or not node or node % rest:
            return []
        inner = node // rest
        return [inner] if inner > 1 and layouts.sizes[0] > inner and layouts.sizes[0] % inner == 0 else []

    def storages(self, layouts: Layouts) -> Iterator[Keeping]:
        """Ways to keep parameters and states."""
        over = tuple(a for a, r in zip(layouts.axes, layouts.roles, strict=True) if r in ("dp", "cp", "ep"))
        again = (False, True) if self.repeats.runs else (False,)
        for recompute in again:
            yield Keeping("replicated", (), recompute)
            if over:
                for kind in ("states", "kept", "fsdp"):
                    if kind != "states" or self.states:
                        yield Keeping(kind, over, recompute)

    def estimate(self, layouts: Layouts, storage: Keeping) -> Candidate:
        """Seconds and bytes of a candidate, from the tables."""
        compute, critical = layouts.seconds(storage.micro_batches)
        held, moved = self._held(layouts, storage)
        if storage.recompute:
            inside, sent = self._again(layouts, storage.micro_batches)
            compute, critical = compute + inside, critical + sent
        hidden, late, update, gathered = moved
        critical += late
        activations, _ = layouts.activations
        if storage.recompute:
            kept, blocks = self._of_blocks(layouts)
            activations = activations - kept + blocks
        renew = update * _UPDATE / self.hardware.memory_bandwidth
        exposed = max(0.0, hidden - _HIDES * compute)
        memory = held + gathered + activations * _TRANSIENT
        return Candidate(
            layouts, storage, compute + critical + exposed + renew, memory, (compute, critical, hidden, renew)
        )

    def _held(self, layouts: Layouts, storage: Keeping) -> tuple[float, tuple[float, float, float, float]]:
        """Bytes of parameters, gradients and states; and seconds of their collectives, of those after the update, bytes
        that are updated, and the most that is gathered at one time."""
        sizes, axes = layouts.sizes, layouts.axes
        over = {axes.index(a) for a in storage.axes}
        wires, hidden, late, held, update, gathered = layouts.wires, 0.0, 0.0, 0.0, 0.0, 0.0
        for seconds, local, summed, times in layouts.summed:
            mine = [a for a in summed if a in over] if storage.kind != "replicated" else []
            n = math.prod(sizes[a] for a in mine)
            if n < 2:
                hidden += seconds
                held += local * (2 + self.states)
                update += local
                continue
            rest = [a for a in summed if a not in mine]
            once = wires.seconds(mine, (n - 1) / n * local / times) * times
            hidden += once * {"fsdp": 3, "kept": 2, "states": 1}[storage.kind]
            late += once if storage.kind == "states" else 0.0
            if rest:
                m = math.prod(sizes[a] for a in rest)
                hidden += wires.seconds(rest, 2 * (m - 1) / m * local / n / times) * times
            update += local / n
            if storage.kind == "states":
                held += local + (1 + self.states) * local / n
            else:
                held += (2 + self.states) * local / n + (local if storage.kind == "kept" else 0.0)
                gathered = max(gathered, _GATHERED * local / times)
        return held, (hidden, late, update, gathered)

    def piped(self, fastest: float) -> list[Candidate]:
        """Pipelines of stages that take equally long, on what is left of the ranks for each stage.

        Args:
            fastest: seconds of what was found without: pipelines whose ops and bubble alone take longer are left out.
        """
        blocks, made = sum(run.count for run in self.repeats.runs), list[Candidate]()
        paths = {run.path for run in self.repeats.runs}
        if self.mesh is not None or self.fix or len(paths) != 1:
            return made
        for stages in _divisors(self.devices)[1:]:
            inner = self.devices // stages
            bound = self._ideal() * (1 + (stages - 1) / (_MICRO * stages))
            if stages > min(blocks, _STAGES) or inner < 2 or bound >= fastest:
                continue
            for sizes in self.meshes(inner):
                layouts = self.layouts(sizes)
                if layouts is None:
                    continue
                layouts.space.problem.tables.forget(_REMEMBERED)
                over = [n for n, role in zip(layouts.sizes, layouts.roles, strict=True) if role in ("dp", "ep")]
                counts = [m for m in (stages, 2 * stages, _MICRO * stages) if self._rows() % (m * math.prod(over)) == 0]
                for which, storage in self.staged(layouts) if counts else ():
                    made += [
                        self.of_stages(which, replace(storage, stages=stages, micro_batches=m), blocks) for m in counts
                    ]
        return made

    def staged(self, layouts: Layouts) -> Iterator[tuple[Layouts, Keeping]]:
        """Layouts and storage inside of stages, where parameters are gathered once a step in any case."""
        yield from ((layouts, storage) for storage in self.storages(layouts) if storage.kind != "kept")
        for inner in self.hybrids(layouts):
            for recompute in (False, True):
                yield layouts.hybrid(inner), Keeping("fsdp", ("dp",), recompute)

    def priced(self, layouts: Layouts, storage: Keeping) -> Candidate:
        """A candidate, with stages or without."""
        if storage.stages == 1:
            return self.estimate(layouts, storage)
        return self.of_stages(layouts, storage, sum(run.count for run in self.repeats.runs))

    def fixing(self, mesh: Mesh | None, fix: Fix, caller: str) -> PlanSearch:
        """A search with other layouts fixed, with all that this one has captured and priced already."""
        made = PlanSearch(self.step, self.hardware, self.memory, self.devices, mesh, fix, caller=caller)
        made.captures, made.work, made._spaces, made.exports = self.captures, self.work, self._spaces, self.exports
        return made

    def _ideal(self) -> float:
        """Seconds of all ops, divided among all ranks."""
        layouts = next((x for x in self._solved.values() if x is not None), None)
        if layouts is None:
            return 0.0
        return sum(op.times * sum(op.seconds) for op in layouts.space.ops) / self.devices

    def of_stages(self, layouts: Layouts, storage: Keeping, blocks: int) -> Candidate:
        """A pipeline, from the numbers of its step without stages."""
        # A stage gathers its parameters once for all micro-batches, and holds them until the last one.
        kind = "kept" if storage.kind == "fsdp" else storage.kind
        flat = replace(storage, kind=kind, stages=1)
        whole = self.estimate(layouts, flat)
        compute, critical, hidden, renew = whole.parts
        held, (_, late, _, gathered) = self._held(layouts, flat)
        m, p, inner = storage.micro_batches, storage.stages, self.in_blocks(layouts)
        per_block = (compute * inner + critical - late) / blocks / m
        sent = layouts.crossing / blocks / m / self.hardware.links[-1].bandwidth + self.hardware.links[-1].latency
        ends = compute * (1 - inner) / m
        found = cut(blocks, p, per_block, ends)
        one = max(found, key=lambda s: s.blocks).blocks / blocks
        memory = held * one * 1.1 + gathered + (whole.memory - held - gathered) * one * min(p, m) / m
        times = [Stage(s.blocks, s.seconds + 2 * sent) for s in found]
        seconds = piped_seconds([s.seconds for s in times], m) + (hidden + late + renew) * one
        return Candidate(layouts, storage, seconds, memory, (compute / p, critical / p, hidden / p, renew / p))

    def in_blocks(self, layouts: Layouts) -> float:
        """Part of the time of ops that blocks which repeat take."""
        every = [(op, op.times * sum(op.seconds) * layouts.way(op).work) for op in layouts.space.ops]
        total = sum(t for _, t in every) or 1.0
        return sum(t for op, t in every if layouts.space.in_block(op)) / total

    def _again(self, layouts: Layouts, micro_batches: int) -> tuple[float, float]:
        """Seconds of the forward of blocks, which run again: of ops, and of what they send."""
        every = inside = 0.0
        for op in layouts.space.ops:
            least = self.hardware.launch * micro_batches if op.seconds[0] else 0.0
            seconds = op.times * max(op.seconds[0] * layouts.way(op).work, least)
            every += seconds
            inside += seconds if layouts.space.in_block(op) else 0.0
        return inside, layouts.seconds(micro_batches)[1] / 2 * inside / (every or 1.0)

    def _of_blocks(self, layouts: Layouts) -> tuple[float, float]:
        """Bytes that blocks hold for the backward; and those of their inputs, with all of one block."""
        space = layouts.space
        every, outside = layouts.activations
        inside = every - outside
        blocks = sum(run.count for run in space.repeats.runs) or 1
        return inside, layouts.crossing + inside / blocks


def _useful(layouts: Layouts) -> bool:
    """Whether each axis splits something, and no two do what one would."""
    if len(layouts.roles) > 1 and set(layouts.roles) == {"dp"}:
        return False
    for axis, role in enumerate(layouts.roles):
        if role == "tp" and not any(
            isinstance(layouts.stored(v)[axis][0], Shard) for v in layouts.space.values.values() if v.kind == "param"
        ):
            return False
    return True


def _batch_split(space: Space) -> dict[int, list[int]]:
    """The values of variables of the batch that are split by rows over the outermost axis; none where none can be."""
    made = {}
    for v in space.values.values():
        if v.kind == "batch" and v.variable >= 0:
            rows = [i for i, s in enumerate(v.states) if s[0] == split(0)]
            if rows:
                made[v.variable] = rows
    return made


def _states(optimizer: torch.optim.Optimizer | None) -> int:
    """How many tensors of a parameter's size an optimizer keeps for it."""
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(g.get("momentum") for g in optimizer.param_groups))
    return 3 if any(g.get("amsgrad") for g in optimizer.param_groups) else 2


def _divisors(n: int) -> list[int]:
    return (
        [k for k in range(1, n + 1) if n % k == 0] if n < 1 << 16 else [1 << k for k in range(17) if n % (1 << k) == 0]
    )


def _rounder(n: int) -> str:
    """Numbers near to one, of small factors."""
    lower, upper = 1 << (n.bit_length() - 1), 1 << n.bit_length()
    return f"{lower} or {upper}"


def rows_of(batch: Any) -> int:
    """Rows of a batch: of its first tensor."""
    from ..compat import pytree

    found: Iterable[Any] = (x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and x.ndim)
    return next((int(x.shape[0]) for x in found), 0)


__all__ = ["Candidate", "Fix", "PlanSearch", "rows_of"]
