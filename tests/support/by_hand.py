"""Steps by hand on simulated ranks: run as they are written, and captured once for many lists of passes."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright as mw
from meshwright import collective
from meshwright.passes import PassManager, PassRecord
from meshwright.program import Plan, Program
from meshwright.program.capture.distributed_calls import DistCalls
from meshwright.program.capture.local import HandWritten, record_step
from meshwright.program.capture.update import update_of
from meshwright.program.check.verify import verify_together
from meshwright.program.step import CaptureSource, CompiledStep, Recorded
from meshwright.ranks import runtime

Tensor = torch.Tensor
# Of a step: the model, the optimizer and this rank's batch.
Step = Callable[[nn.Module, torch.optim.Optimizer, Tensor], Any]

STEPS = 2
_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
_HERE = threading.local()


@contextlib.contextmanager
def without_processes(mesh: mw.Mesh) -> Iterator[None]:
    """A process group that sends nothing: enough for capturing; groups are those that :func:`all_reduce` says."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh.size)
    original = DistCalls.ranks
    DistCalls.ranks = lambda calls, boxed: calls.mesh.group_ranks(calls.rank, _HERE.axes)  # type: ignore[method-assign]
    runtime.reset()
    try:
        yield
    finally:
        DistCalls.ranks = original  # type: ignore[method-assign]
        dist.destroy_process_group()
        runtime.reset()


class Done:
    """Work that is done."""

    def wait(self) -> None:
        """There is nothing to wait for."""


def all_reduce(t: Tensor, axes: Sequence[int] = (0,), op: str = "sum", wait: bool = True) -> Any:
    """``dist.all_reduce`` over axes of the mesh, as a step by hand calls it."""
    t = t.detach()
    if _HERE.eager is not None:
        collective.all_reduce(t, op, collective.group(_HERE.eager, tuple(axes)), out_of_place=False)
        return Done()
    _HERE.axes = tuple(axes)
    return dist.all_reduce(t, op=_OPS[op], async_op=not wait)


@dataclass(frozen=True)
class Case:
    """A step by hand.

    Attributes:
        step: the step; ``model``: what makes the model, on each rank the same; ``axes``: of the mesh.
        setup: what registers hooks on it; ``dtype``: of the model and of batches.
    """

    step: Step
    model: Callable[[], nn.Module]
    axes: dict[str, int]
    setup: Callable[[nn.Module], Any] | None = None
    dtype: torch.dtype = torch.float64

    @property
    def mesh(self) -> mw.Mesh:
        """Of these axes."""
        return mw.Mesh(self.axes)

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and optimizer, anew."""
        torch.manual_seed(0)
        model = self.model().to(self.dtype)
        if self.setup is not None:
            self.setup(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def data(self, i: int, rank: int) -> Tensor:
        """The i-th batch of a rank."""
        g = torch.Generator().manual_seed(100 * i + rank)
        return torch.randn(4, 6, dtype=torch.float64, generator=g).to(self.dtype)


Found = list[tuple[Tensor, ...]]  # of each rank: losses and parameters


def _trained(case: Case, step: Callable[[Tensor], Any], model: nn.Module) -> tuple[Tensor, ...]:
    losses = []
    for i in range(STEPS):
        out = step(case.data(i, runtime.RT.rank))
        if isinstance(out, Tensor):
            losses.append(out.detach().clone())
    return (*losses, *(p.detach().clone() for p in model.parameters()))


def as_written(case: Case) -> Found:
    """What the step does without being captured."""

    def rank() -> tuple[Tensor, ...]:
        _HERE.eager = case.mesh
        try:
            model, optimizer = case.made()
            return _trained(case, lambda x: case.step(model, optimizer, x), model)
        finally:
            _HERE.eager = None

    return mw.simulate(rank, case.mesh)


@dataclass(frozen=True)
class _Kept(CaptureSource):
    name, by_hand = "kept", True
    recorded: Recorded

    def record(self, batch: Any, train: bool, again: bool, *more: Any) -> Recorded:
        return self.recorded


class Captured:
    """A step that was captured for every rank of its mesh."""

    def __init__(self, case: Case) -> None:
        self.case, self.recorded = case, []
        _HERE.eager = None
        with without_processes(case.mesh):
            for rank in case.mesh.ranks:
                model, optimizer = case.made()
                names = {id(p): n for n, p in model.named_parameters()}
                step = lambda x, m=model, o=optimizer: case.step(m, o, x)  # noqa: E731
                update = update_of(optimizer, names)
                local = HandWritten(step, case.mesh, rank, model, optimizer, case.data(0, rank), update)
                program, tree = record_step(local)
                self.recorded.append(Recorded(program, {"batch.0": 0}, tree))

    @property
    def programs(self) -> list[Program]:
        """Of each rank, before any pass."""
        return [r.program for r in self.recorded]

    def run(self, passes: Sequence[Any]) -> tuple[Found, list[Program], list[PassRecord]]:
        """What the step does with passes; its programs, and the records of the first rank."""
        case = self.case

        def rank() -> Any:
            model, optimizer = case.made()
            recorded = self.recorded[runtime.RT.rank]
            source = _Kept(model, optimizer, case.mesh, Plan(), recorded)
            step = CompiledStep(source, case.data(0, runtime.RT.rank), transform=PassManager(passes))
            return _trained(case, step, model), step.program

        made = mw.simulate(rank, case.mesh)
        programs = [p for _, p in made]
        verify_together(programs)
        return [f for f, _ in made], programs, list(programs[0].passes)


def apart(a: Found, b: Found) -> float:
    """The largest difference of two runs, beside the size of what differs."""
    worst = 0.0
    for x, y in itertools.chain(*(zip(*pair, strict=True) for pair in zip(a, b, strict=True))):
        size = y.abs().max().clamp_min(1e-3) if y.numel() else 1.0
        worst = max(worst, float(((x - y).abs().max() if x.numel() else torch.zeros(())) / size))
        if x.isnan().any():
            return float("inf")
    return worst
