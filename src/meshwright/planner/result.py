"""``plan``: the best way found to train a model on a machine, why, and what else there is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from ..compat import pytree
from ..errors import PassError, PlanError, takes
from ..explanation import Explanation, explain_program
from ..explanation.entries import in_bytes
from ..layout import LayoutTable
from ..machines import Hardware, bytes_from, hardware
from ..mesh import Mesh
from ..program import Plan
from ..program.capture.export import LossFn
from ..program.capture.shared_export import reusing
from ..shard.parameters.made_for import model_words
from .emit import Layouts, table_of
from .measure import Measured, TrainedStep, measure, program_of
from .repeats import Repeats
from .search import Candidate, PlanSearch, rows_of

_TRIED = 4  # candidates that are built until one fits
_SHOWN = 6
_SURELY = 0.5  # part of the memory up to which an estimate surely fits
_NOT_PROVEN = "layouts are the cheapest that were found: ops share too many values to prove that no others are cheaper"
_PIPED = 16  # blocks up to which a pipeline is built whole


@dataclass(frozen=True)
class Why:
    """What another layout of some parameters would cost, each layout besides chosen again.

    Attributes:
        pattern, placement: what was asked.
        seconds, bytes, memory: more (or less, below 0) than the plan's: of a step, that a rank sends, that it holds.
        possible: False: no plan of this mesh has it, for the reason in ``words``.
    """

    pattern: str
    placement: Mapping[str, Any]
    seconds: float
    bytes: int
    memory: float
    words: str
    possible: bool = True

    def __str__(self) -> str:
        return self.words


@dataclass
class FoundPlan:
    """A plan, what it was chosen from, and its price. `mw.plan` returns one.

    Attributes:
        mesh: The mesh, as a description.
        plan: Layouts and options, as a [LayoutTable][meshwright.LayoutTable]: for `compile_step(layouts=)`.
        candidates: Other ways that were priced, as a frontier of time against memory.
        phases: Seconds that the search took, by phase; `seconds` is their sum.
        gap: Part by which a faster plan of this space could exist, by the estimates.
    """

    mesh: Mesh
    plan: LayoutTable
    candidates: tuple[Candidate, ...]
    phases: dict[str, float]
    gap: float
    chosen: Candidate = field(repr=False)
    search: PlanSearch = field(repr=False)
    built: Measured | None = field(default=None, repr=False)

    @property
    def measured(self) -> Measured:
        """Predicted time, bytes, collectives and memory of a step, from its program: after `replan` built when read.

        Raises:
            PlanError: If the program does not fit into the memory, against the estimate.
        """
        if self.built is None:
            made = _measured(self.search, self.chosen)
            if made.memory > self.search.memory:
                raise PlanError(_too_small(self.search, made, self.chosen))
            self.built = made
        return self.built

    @property
    def seconds(self) -> float:
        """How long the search took."""
        return sum(self.phases.values())

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step."""
        return self.measured.step_seconds

    @property
    def bytes(self) -> int:
        """Bytes that the first rank sends in a step."""
        return self.measured.total_bytes

    @property
    def memory(self) -> float:
        """Bytes that the first rank holds at the peak."""
        return self.measured.memory

    def why(self, pattern: str, placement: Mapping[str, Any]) -> Why:
        """Price another layout of the parameters that a glob matches; all else is chosen again for it.

        Args:
            pattern: Glob of parameters' names.
            placement: Axis to placement; other axes are chosen again.

        Raises:
            PlanError: If the glob matches nothing, or an axis does not exist.
        """
        search, chosen = self.search, self.chosen.layouts
        if chosen.inner and chosen.axes[0] in placement:
            raise PlanError(
                f"why: axis {chosen.axes[0]!r}: {chosen.axes[0]} and {chosen.axes[1]} are one axis of the batch, of "
                f"which only {chosen.axes[1]} shards storage. Ask for {{{chosen.axes[1]!r}: ...}}, or plan with mesh=."
            )
        axes, sizes = chosen.axes[1:] if chosen.inner else chosen.axes, chosen.space.sizes
        mesh = Mesh(dict(zip(axes, sizes, strict=True)))
        pinned = search.fixing(mesh, {**search.fix, pattern: placement}, "why")
        said = ", ".join(f"{a}: {p!r}" for a, p in placement.items())
        try:
            layouts = pinned.layouts(sizes, shown=chosen.shown)
        except PlanError as error:
            return Why(pattern, placement, 0.0, 0, 0.0, f"{pattern} as {said}: no plan on this mesh: {error}", False)
        assert layouts is not None
        layouts = Layouts(layouts.space, layouts.optimum, axes, chosen.inner, chosen.shown)
        made = _measured(pinned, pinned.priced(layouts, self.chosen.storage))
        more = made.step_seconds - self.step_seconds, made.total_bytes - self.bytes, made.memory - self.memory
        words = (
            f"{pattern} as {said}: {more[0] * 1e3:+.2f} ms, {_signed_bytes(more[1])} sent, "
            f"{_signed_bytes(more[2])} held, of {self.step_seconds * 1e3:.2f} ms, {in_bytes(self.bytes)}, "
            f"{in_bytes(self.memory)}"
        )
        return Why(pattern, placement, *more, words)

    def replan(self, fix: Mapping[str, Mapping[str, Any]]) -> FoundPlan:
        """Plan again with these layouts fixed too. The step is not captured again and prices are known.

        The program is built at once where the estimate is close to the limit of memory, else when its numbers are read.

        Args:
            fix: As for `mw.plan`; a glob that was fixed before gets the new placement.

        Raises:
            PlanError: As `mw.plan`.
        """
        search = self.search.fixing(self.search.mesh, {**self.search.fix, **fix}, "replan")
        candidates = search.candidates()
        first = candidates[0]
        if first.storage.stages == 1 and first.memory <= _SURELY * search.memory:
            return _found(search, first, None, _frontier(candidates), 0.0)
        return _first_that_fits(search, candidates)

    def check(self) -> dict[str, Any]:
        """Build the program of the whole model and compare it with what was predicted. Takes as long as a capture.

        Returns:
            What differs, by name: (predicted, of the program); empty where nothing does. Memory within 1 % is equal.
        """
        found = _whole(self.search, self.mesh, self.plan)
        pairs = {
            "bytes": (dict(self.measured.bytes), dict(found.bytes)),
            "collectives": (dict(self.measured.collectives), dict(found.collectives)),
            "memory": (round(self.measured.memory), round(found.memory)),
        }
        close = abs(self.measured.memory - found.memory) <= 0.01 * found.memory
        return {k: v for k, v in pairs.items() if v[0] != v[1] and not (k == "memory" and close)}

    def explain(self) -> Explanation:
        """Explain the program of the whole model, with its predicted time. Takes as long as a capture."""
        table = self.plan
        passes = table.options.get("passes", ())
        program = program_of(
            self.search.step, self.mesh, lambda names, counts: Plan(table), Repeats((), ()), (), passes
        )
        why = explain_program(program, (), self.search.hardware)
        why.notes = (*str(self).splitlines(), *why.notes)
        return why

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        m = self.measured
        return {
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "hardware": self.search.hardware.name,
            "seconds": {"total": self.seconds, **self.phases},
            "step_seconds": m.step_seconds,
            "step": {
                "compute": m.compute, "critical": m.critical, "hidden": m.hidden, "exposed": m.exposed,
            },
            "bytes": dict(m.bytes),
            "total_bytes": m.total_bytes,
            "collectives": dict(m.collectives),
            "memory": {"peak": m.memory, **{k: float(v) for k, v in m.at_peak.items()}},
            "exact": m.exact,
            "gap": self.gap,
            "proven": self.chosen.layouts.optimum.exact,
            "storage": str(self.chosen.storage),
            "layouts": {glob: {a: repr(p) for a, p in x.placements.items()} for glob, x in self.plan.lines.items()},
            "batch": json.loads(json.dumps(self.plan.batch, default=repr)),
            "inputs": json.loads(json.dumps(self.plan.inputs, default=repr)),
            "outputs": json.loads(json.dumps(self.plan.outputs, default=repr)),
            "options": dict(self.plan.options),
            "candidates": [
                {"mesh": c.mesh, "step_seconds": c.seconds, "memory": c.memory, "storage": str(c.storage)}
                for c in self.candidates
            ],
        }  # fmt: skip

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        m = self.measured
        mesh = " × ".join(f"{a}={n}" for a, n in zip(self.mesh.axes, self.mesh.sizes, strict=True))
        sent = ", ".join(f"{in_bytes(n)} over {axes}" for axes, n in m.bytes.items()) or "nothing"
        held = ", ".join(f"{in_bytes(n)} {c}" for c, n in m.at_peak.items() if n)
        lines = [
            f"plan for {self.search.devices} × {self.search.hardware.name}: {mesh}; {self.chosen.storage}",
            f"a step takes {m.step_seconds * 1e3:.2f} ms: {m.compute * 1e3:.2f} ms of ops, {m.critical * 1e3:.2f} ms "
            f"of activations on wires, {m.hidden * 1e3:.2f} ms of parameters and gradients, of which "
            f"{m.exposed * 1e3:.2f} ms are not hidden",
            f"a rank sends {sent}" + ("" if m.exact else " (estimated)"),
            f"a rank holds {in_bytes(m.memory)} of {in_bytes(self.search.memory)}: {held}",
            f"found in {self.seconds:.2f} s: " + ", ".join(f"{k} {v:.2f}" for k, v in self.phases.items()),
            *(() if self.chosen.layouts.optimum.exact else (_NOT_PROVEN,)),
            "",
            str(self.plan),
            "",
            "other ways, by estimates:",
            *(f"  {c}" for c in self.candidates[:_SHOWN]),
        ]
        return "\n".join(lines)


@takes(
    PlanError,
    model=(nn.Module, "give the nn.Module that is trained"),
    mesh=((Mesh, type(None)), 'give a mesh: mw.Mesh({"dp": 2, "tp": 2}), or devices='),
    optimizer=((torch.optim.Optimizer, type(None)), "give a torch.optim.Optimizer of the model's parameters, or None"),
    fix=((Mapping, type(None)), 'give a dict, glob of names to placements: {"head.weight": {"tp": mw.Shard(0)}}'),
)
def plan(
    model: nn.Module,
    loss_fn: LossFn | None,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    *,
    devices: int | None = None,
    mesh: Mesh | None = None,
    hardware: str | Hardware,
    memory: str | float | None = None,
    fix: Mapping[str, Mapping[str, Any]] | None = None,
) -> FoundPlan:
    """Find mesh, layouts and storage of a model for a machine. Nothing is changed, sent or allocated.

    It captures the step of one device. On each mesh the cheapest layouts of all ops are found exactly, by a model of
    costs. Around them it tries ZeRO, hybrid sharding and recomputation of blocks. The best plan that fits is built, so
    that its bytes, collectives and memory are those of the program.

    Args:
        model: A module for one device, or on the meta device.
        loss_fn: As for [compile_step][meshwright.compile_step].
        batch: Example with global shapes; values do not matter.
        optimizer: As for `compile_step`. Its class decides how many states a parameter has.
        devices: Number of ranks. Give it, or `mesh`.
        mesh: The mesh, if it is not to be chosen. It need not be connected.
        hardware: Preset or file, see [hardware][meshwright.hardware]. There is no default.
        memory: Bytes that a rank may hold, `"70GB"`. Default: 90 % of the hardware's.
        fix: Globs of parameters to placements that are given: `{"head.weight": {"tp": mw.Shard(0)}}`. Without `mesh`
            its axes are `dp` and `tp`.

    Returns:
        The plan. `print(found)` shows it, `found.plan.save("plan.toml")` writes it, `found.why(glob, placement)` prices
        another layout, and `found.check()` compares it with the program of the whole model.

    Raises:
        PlanError: If nothing fits into the memory (with the smallest that does, what fills it, and a change that would
            fit), `fix` contradicts itself, or the devices cannot be used.
        HardwareError: If the hardware is unknown.
        CaptureError: If the step cannot be captured. Names the line.

    Examples:
        ```python
        net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        optimizer, x = torch.optim.AdamW(net.parameters()), torch.ones(64, 256)
        found = mw.plan(net, lambda net, x: net(x).sum(), x, optimizer, devices=4, hardware="cpu-gloo")
        assert found.mesh.size == 4 and found.memory < 8e9
        assert found.check() == {}
        ```
    """
    machine = _hardware(hardware)
    if (devices is None) == (mesh is None):
        raise PlanError("plan: give devices= (how many ranks) or mesh=, one of them")
    if devices is not None and (type(devices) is not int or devices < 1):
        raise PlanError(f"plan: devices={devices!r}: a number of ranks, at least 1, was expected")
    empty = next((x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor) and not x.numel()), None)
    if empty is not None:
        raise PlanError(f"plan: batch has an empty tensor, of shape {tuple(empty.shape)}. Give an example with rows.")
    limit = 0.9 * machine.memory if memory is None else bytes_from(memory, "memory")
    count = mesh.size if mesh is not None else int(devices or 1)
    device = "cpu" if mesh is None else mesh.device
    search = PlanSearch(
        TrainedStep(model, loss_fn, batch, optimizer, device), machine, limit, count, mesh, dict(fix or {})
    )
    candidates = search.candidates()
    return _first_that_fits(search, candidates)


def _hardware(given: Any) -> Hardware:
    return hardware(given)


def _first_that_fits(search: PlanSearch, candidates: Sequence[Candidate]) -> FoundPlan:
    """Build candidates until one fits.

    Raises:
        PlanError: If none does.
        PassError: If none can be built.
    """
    tried: list[tuple[Measured, Candidate]] = []
    left, failed = list(candidates), list[PassError]()
    while left and len(tried) <= _TRIED:
        likely = [c for c in left if c.memory <= 1.2 * search.memory]
        last = not likely or len(tried) == _TRIED
        c = min(left, key=lambda c: c.memory) if last else likely[0]
        try:
            made = _measured(search, c)
        except PassError as error:  # a loss that is not the mean of those of micro-batches
            failed.append(error)
            left = [x for x in left if x.storage.stages == 1 and x is not c]
            continue
        if made.memory <= search.memory:
            return _found(search, c, made, _frontier(left), max(0.0, c.seconds / min(x.seconds for x in left) - 1.0))
        tried.append((made, c))
        left = [] if last else [x for x in left if x is not c]
    if not tried:
        raise failed[0]
    made, c = min(tried, key=lambda t: t[0].memory)
    raise PlanError(_too_small(search, made, c))


def _measured(search: PlanSearch, c: Candidate) -> Measured:
    """A candidate in numbers."""
    if c.storage.stages == 1:
        mesh = _mesh(search, c)
        captured_with = search.captured_with if mesh.device == search.step.device else None
        before = search.phases.get("capture", 0.0)
        with search.timed("build"), reusing(search.exports):
            made = measure(
                search.step, mesh, _plan_of(search, c), search.hardware, search.repeats, captured_with=captured_with
            )
        search.phases["build"] -= search.phases.get("capture", 0.0) - before
        return _with_experts(made, c)
    if sum(run.count for run in search.repeats.runs) > _PIPED:
        return _estimated(c)
    counts = search.repeats.counts()
    table = table_of(
        c.layouts, c.storage, lambda name: search.repeats.names(name, counts), fold=False,
        blocks=search.repeats.blocks(counts) if c.storage.recompute else (),
    )  # fmt: skip
    with search.timed("build"):
        return _whole(search, _mesh(search, c), table)


def _with_experts(made: Measured, c: Candidate) -> Measured:
    """Kernels of experts count rows that only values tell: their time is that of an even choice, from the tables."""
    more = c.parts[0] - made.compute
    if more <= 0 or not any(op.name.startswith("experts") for op in c.layouts.space.ops):
        return made
    exposed = max(0.0, made.exposed - more)
    seconds = made.step_seconds + more + exposed - made.exposed
    return replace(made, step_seconds=seconds, compute=c.parts[0], exposed=exposed)


def _mesh(search: PlanSearch, c: Candidate) -> Mesh:
    """That of a candidate: the given one where there is one."""
    given = search.mesh
    return given if given is not None and dict(zip(given.axes, given.sizes, strict=True)) == c.mesh else Mesh(c.mesh)


def _whole(search: PlanSearch, mesh: Mesh, table: LayoutTable) -> Measured:
    """The program of the whole model."""
    passes = table.options.get("passes", ())
    return measure(search.step, mesh, lambda names, counts: Plan(table), search.hardware, Repeats((), ()), passes)


def _estimated(c: Candidate) -> Measured:
    """A pipeline of many blocks: building it takes as long as capturing all of them, which `check` does."""
    compute, critical, hidden, renew = c.parts
    return Measured(c.seconds, compute + renew, critical, hidden, hidden, {}, {}, c.memory, {}, exact=False)


def _plan_of(search: PlanSearch, c: Candidate) -> Any:
    def made(names: Any, counts: Sequence[int]) -> Plan:
        globs = search.repeats.blocks(counts) if c.storage.recompute else ()
        return Plan(table_of(c.layouts, c.storage, names, blocks=globs, fold=False))

    return made


def _found(
    search: PlanSearch, c: Candidate, made: Measured | None, frontier: tuple[Candidate, ...], gap: float
) -> FoundPlan:
    model = search.step.model
    counts = search.repeats.counts()
    every = [*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())]
    every += [n for n, _ in model.named_modules()]
    blocks = search.repeats.blocks(counts) if c.storage.recompute else []
    table = table_of(
        c.layouts, c.storage, lambda name: search.repeats.names(name, counts), every, blocks=blocks,
        made_for={"model": model_words(model), "hardware": search.hardware.name},
    )  # fmt: skip
    return FoundPlan(_mesh(search, c), table, frontier, search.phases, gap, c, search, made)


def found_plan(search: PlanSearch, c: Candidate) -> FoundPlan:
    """The plan of one candidate, whatever others there are."""
    return _found(search, c, _measured(search, c), (c,), 0.0)


def _frontier(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other one beats in time and memory, the fastest first."""
    made: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.seconds, c.memory)):
        if not made or c.memory < made[-1].memory:
            made.append(c)
    return tuple(made)


def _too_small(search: PlanSearch, made: Measured, c: Candidate) -> str:
    held = ", ".join(f"{in_bytes(n)} {k}" for k, n in sorted(made.at_peak.items(), key=lambda e: -e[1]) if n)
    fixed = sum(n for k, n in made.at_peak.items() if k in ("parameters", "states", "gradients"))
    rest = made.memory - fixed
    rows = rows_of(search.step.batch)
    if fixed < search.memory and rest > 0:
        fits = int(rows * (search.memory - fixed) / rest)
        change = f"a batch of {fits} rows would fit" if fits else "a shorter sequence would fit"
    else:
        share = search.memory - rest if rest < search.memory else search.memory / 2  # of what more devices divide
        devices = search.devices
        while fixed * search.devices > share * devices:
            devices *= 2
        change = f"{devices} devices would fit"
        if rest >= search.memory:
            change = f"{devices} devices with a batch of {max(1, int(rows * share / rest))} rows would fit"
    return (
        f"plan: memory={in_bytes(search.memory)} is too small: the least that was found is {in_bytes(made.memory)} "
        f"({c.storage}, mesh {', '.join(f'{a}={n}' for a, n in c.mesh.items())}), which {held} fill. By these "
        f"numbers {change}."
    )


def _signed_bytes(n: float) -> str:
    return ("-" if n < 0 else "+") + in_bytes(abs(n))


__all__ = ["FoundPlan", "Why", "found_plan", "plan"]
