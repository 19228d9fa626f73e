"""What a plan sends, computes and holds, from the program that it gives: the same that ``explain`` shows.

The program is built for the model with few of its blocks, once with the fewest and once with one block more of each
run.  All numbers grow by the same for each block, so those of the whole model follow, bytes and counts exactly.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..collective import COLLECTIVES
from ..compat import pytree
from ..explanation import explain_program, memory_of
from ..explanation.timeline import collectives_of, idle_of, network_of
from ..machines import Hardware
from ..mesh import Mesh
from ..passes import PassManager
from ..passes.buckets import seconds_of
from ..program import Plan, Program
from ..program.capture.build import build
from ..program.capture.export import Captured, LossFn
from ..program.capture.module_results import with_constrained_outputs
from ..program.ir.nodes import info_of
from ..program.ir.purposes import Purpose
from ..program.run.pipeline import cut_batch
from .repeats import Repeats, cut_to

CapturedWith = Callable[[tuple[int, ...]], Captured]
Key = tuple[str, ...]
Numbers = dict[Key, float]
_HIDES = 0.9  # of the time that ops compute, the part beside which gradients and parameters travel


@dataclass(frozen=True)
class TrainedStep:
    """A model and what it is trained on: the arguments of ``compile_step`` that a plan does not change."""

    model: nn.Module
    loss_fn: LossFn | None
    batch: Any
    optimizer: torch.optim.Optimizer | None
    device: str = "cpu"


@dataclass(frozen=True)
class Measured:
    """A plan in numbers, on the first rank.

    Attributes:
        step_seconds: predicted time of a step.
        compute, critical, hidden, exposed: seconds of ops; of collectives on activations, and of what the optimizer
            updated; of gradients and parameters, and what of these nothing hides.
        bytes: axes (``"dp"``, ``"dp,tp"``) to bytes that a rank sends in a step; ``collectives``: kind to number.
        memory: bytes at the peak; ``at_peak``: by category.
        exact: bytes and collectives are those of the program, to the byte; else estimated.
    """

    step_seconds: float
    compute: float
    critical: float
    hidden: float
    exposed: float
    bytes: Mapping[str, int]
    collectives: Mapping[str, int]
    memory: float
    at_peak: Mapping[str, float]
    exact: bool = True

    @property
    def total_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return sum(self.bytes.values())


def measure(
    step: TrainedStep,
    mesh: Mesh,
    plan_of: Callable[[Callable[[str], Sequence[str]], Sequence[int]], Plan],
    hardware: Hardware,
    repeats: Repeats,
    passes: Sequence[str] = (),
    captured_with: CapturedWith | None = None,
) -> Measured:
    """A plan in numbers.

    Args:
        plan_of: the plan for a model with so many blocks of each run, given what a name of the cut model stands for.
        repeats: which blocks are alike, of which two or three are kept.
        passes: over the captured step; with a pipeline ``repeats`` has no blocks.
        captured_with: the step with so many blocks of each run, captured before; None: capture it.

    Raises:
        PlanError: If blocks that seem alike send different things.
    """
    counts = tuple(min(run.count, 2) for run in repeats.runs)
    base = _numbers(step, mesh, plan_of, hardware, repeats, counts, passes, captured_with)
    total = dict(base)
    for i, run in enumerate(repeats.runs):
        if run.count <= counts[i]:
            continue
        one_more = tuple(n + (i == k) for k, n in enumerate(counts))
        more = _numbers(step, mesh, plan_of, hardware, repeats, one_more, passes, captured_with)
        for key in {*base, *more}:
            total[key] = total.get(key, 0.0) + (run.count - counts[i]) * (more.get(key, 0.0) - base.get(key, 0.0))
    return summary(total)


def _numbers(
    step: TrainedStep, mesh: Mesh, plan_of: Any, hardware: Hardware, repeats: Repeats, counts: Sequence[int],
    passes: Sequence[str], captured_with: CapturedWith | None,
) -> Numbers:  # fmt: skip
    program = program_of(step, mesh, plan_of, repeats, counts, passes, captured_with)
    return numbers_of(program, hardware) if program.pipeline is None else _of_pipeline(program, hardware)


def program_of(
    step: TrainedStep, mesh: Mesh, plan_of: Any, repeats: Repeats, counts: Sequence[int], passes: Sequence[str],
    captured_with: CapturedWith | None = None,
) -> Program:  # fmt: skip
    """The program of a plan, for a model with so many blocks of each run."""
    manager, batch = PassManager(list(passes)), step.batch
    if manager.splits > 1:  # a program is that of a micro-batch
        leaves, tree = pytree.tree_flatten(batch)
        batch = pytree.tree_unflatten(cut_batch(leaves, manager.splits)[0], tree)
    with cut_to(step.model, repeats, counts):
        plan, captured = plan_of(lambda name: repeats.names(name, counts), counts), None
        if captured_with is not None and not (plan.recompute or plan.inputs or manager.splits > 1):
            captured = with_constrained_outputs(captured_with(tuple(counts)), plan.outputs)
        optimizer = _of(step.optimizer, step.model)
        program = build(
            step.model,
            step.loss_fn,
            optimizer,
            batch,
            mesh,
            plan,
            homes=manager.homes,
            weighing=manager.weighing,
            captured=captured,
        ).program
    return manager(program)


def _of_pipeline(program: Program, hardware: Hardware) -> Numbers:
    """Of the first rank of a pipeline: its parts, as often as they run, and what it waits for others."""
    how = program.pipeline
    assert how is not None
    here, found = program.mesh.coordinate(program.rank)[how.axis], defaultdict[Key, float](float)
    explained = explain_program(program)
    for name, part in program.parts.items():
        times = how.times(name, here)
        for key, value in numbers_of(part, hardware).items() if times else ():
            if key[0] not in ("memory", "bytes", "count"):
                found[key] += times * value
    found["compute", "bubble"] = idle_of(how, here) * sum(v for k, v in found.items() if k[0] == "compute")
    for (kind, axes), (count, nbytes) in explained.counts.table.items():
        found["count", kind] += count
        found["bytes", ",".join(axes)] += nbytes
    if explained.memory is not None:
        found["memory",] = explained.memory.peak
        found.update({("memory", k): float(v) for k, v in explained.memory.at_peak.items()})
    return dict(found)


def _of(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of the parameters that are left."""
    if optimizer is None:
        return None
    left = {id(p) for p in model.parameters()}
    made = copy.copy(optimizer)
    groups = [{**g, "params": [p for p in g["params"] if id(p) in left]} for g in optimizer.param_groups]
    made.param_groups = [g for g in groups if g["params"]]
    return made


def numbers_of(program: Program, hardware: Hardware) -> Numbers:
    """All numbers of a program that add up over blocks."""
    found: defaultdict[Key, float] = defaultdict(float)
    network = network_of(program, hardware)
    names = {n.name: i.name for n, i in zip(program.placeholders, program.inputs, strict=True)}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target not in COLLECTIVES:
            found["compute", info_of(node).role] += seconds_of(node, network)
    for node, axes, nbytes, seconds in collectives_of(program, hardware):
        found["bytes", axes] += nbytes
        found["count", COLLECTIVES[node.target].name] += 1
        found["parameters" if Purpose.of(program, node, names).parameter else "activations",] += seconds
    memory = memory_of(program)
    found["memory",] = memory.peak
    for category, nbytes in memory.at_peak.items():
        found["memory", category] = nbytes
    return dict(found)


def summary(numbers: Numbers, *, exact: bool = True) -> Measured:
    """The numbers of a whole model."""
    compute = sum(v for k, v in numbers.items() if k[0] == "compute")
    critical, hidden = numbers.get(("activations",), 0.0), numbers.get(("parameters",), 0.0)
    exposed = max(0.0, hidden - _HIDES * compute)
    return Measured(
        compute + critical + exposed, compute, critical, hidden, exposed,
        {k[1]: round(v) for k, v in sorted(numbers.items()) if k[0] == "bytes"},
        {k[1]: round(v) for k, v in sorted(numbers.items()) if k[0] == "count"},
        numbers.get(("memory",), 0.0), {k[1]: v for k, v in numbers.items() if k[0] == "memory" and len(k) > 1}, exact,
    )  # fmt: skip


__all__ = ["Measured", "TrainedStep", "measure", "numbers_of", "summary"]
