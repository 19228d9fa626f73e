"""Trains the models of zoo.py on meshes and compares them with one device: losses, gradients, parameters after 3 steps.

Each model, plan, mesh and mode (eager, or captured by compile_step) is one row.  The ranks are simulated in this
process.  The exit code is 1 if a number is wrong or a model fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import zoo

import meshwright as mw
from meshwright.dispatch import plans  # to be told of each model's gathered ops, not of each op once

Tensor = torch.Tensor
MESHES = {"dp2tp2": {"dp": 2, "tp": 2}, "tp3": {"dp": 1, "tp": 3}, "dp3": {"dp": 3, "tp": 1}}
MODES = ("eager", "static")
STEPS = 3
LINE = "{:18} {:9} {:7} {:7} {:>8} {:>8} {:>8} {:>4}  {}"
# A gradient that is zero but for rounding would otherwise become a whole step of AdamW.
ADAMW = {"lr": 1e-2, "eps": 1e-3, "foreach": True}


@dataclass
class Numbers:
    """Three steps: losses; gradients of the first; parameters and buffers after the last."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Row:
    """What became of one model on one mesh: the largest differences, relative to the size of what is compared."""

    model: str
    plan: str
    mesh: str
    mode: str
    loss: float = 0.0
    gradient: float = 0.0
    parameters: float = 0.0
    gathered: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""

    def __str__(self) -> str:
        numbers = [f"{x:.0e}" for x in (self.loss, self.gradient, self.parameters)]
        last = f"{', '.join(self.gathered)} {self.problem}"
        return LINE.format(self.model, self.plan, self.mesh, self.mode, *numbers, f"{self.seconds:.0f}", last).rstrip()


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help=f"comma list of globs (of {', '.join(zoo.CASES)})")
    parser.add_argument("--plans", default="*", help=f"comma list of globs (of {', '.join(zoo.PLANS)})")
    parser.add_argument("--meshes", default="dp2tp2,tp3", help=f"comma list (of {', '.join(MESHES)})")
    parser.add_argument("--modes", default="*", help=f"comma list of globs (of {', '.join(MODES)})")
    parser.add_argument("--json", action="store_true", help="one JSON object per row instead of a table")
    parser.add_argument("--trace", action="store_true", help="let the first failure raise")
    return parser.parse_args(argv)


def chosen(globs: str, names: Sequence[str]) -> list[str]:
    """The names that one of the globs matches."""
    return [n for n in names if any(fnmatch.fnmatch(n, g) for g in globs.split(","))]


@functools.cache
def single(name: str) -> Numbers:
    """One device."""
    case, made = zoo.CASES[name], Numbers()
    with zoo.arithmetic(case):
        torch.manual_seed(0)
        model, batch = case.build(), case.batch(torch.Generator().manual_seed(1))
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        for step in range(STEPS):
            loss = case.loss(model, batch)
            loss.backward()
            made.losses.append(loss.detach())
            if not step:
                made.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        made.state = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
    return made


def eager(case: zoo.Case, plan: str, mesh: mw.Mesh) -> Numbers:
    """What one rank does, with distributed tensors."""
    made = Numbers()
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(torch.Generator().manual_seed(1))
    mw.shard_module(model, mesh, zoo.plan(plan, case, model), fsdp="dp" if plan == "zero" else None)
    optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), **ADAMW))
    batch = {k: mw.shard_tensor(v, mesh, {"dp": mw.Shard(0)}) for k, v in batch.items()}
    for step in range(STEPS):
        loss = case.loss(model, batch)
        loss.backward()
        made.losses.append(mw.unshard(loss.detach()))
        if not step:
            made.gradients = {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    made.state = {n: mw.unshard(t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())}
    return made


def static(case: zoo.Case, plan: str, mesh: mw.Mesh) -> Numbers:
    """The same as a captured program."""
    made = Numbers()
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(torch.Generator().manual_seed(1))
    step = mw.compile_step(
        model, case.loss, torch.optim.AdamW(model.parameters(), **ADAMW), batch, mesh=mesh,
        layouts=zoo.plan(plan, case, model), batch={"dp": mw.Shard(0)}, fsdp="dp" if plan == "zero" else None,
        gradients=True,
    )  # fmt: skip
    for number in range(STEPS):
        loss = step(batch)
        made.losses.append(mw.unshard(loss.detach()))
        if not number:
            made.gradients = {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    made.state = {n: mw.unshard(t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())}
    return made


def furthest(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> float:
    """The largest difference of norms, relative to that of the tensor, or to a thousandth of the largest one's.

    Raises:
        AssertionError: other names, or other shapes.
    """
    missing, more = want.keys() - got.keys(), got.keys() - want.keys()
    assert not missing | more, f"{what} missing of {sorted(missing)[:3]}, more of {sorted(more)[:3]}"
    worst, scale = 0.0, max((float(t.double().norm()) for t in want.values()), default=0.0)
    for name, t in want.items():
        assert (got[name].shape, got[name].dtype) == (t.shape, t.dtype), f"{what} of {name}: another shape or dtype"
        difference = float((got[name].double() - t.double()).norm())
        if difference == difference:
            worst = max(worst, difference / max(float(t.double().norm()), 1e-3 * scale, 1e-30))
        else:
            worst = float("inf")
    return worst


def measure(name: str, plan: str, mesh_name: str, mode: str, trace: bool = False) -> Row:
    """Runs one row; what fails is its ``problem``."""
    case, mesh, row = zoo.CASES[name], mw.Mesh(MESHES[mesh_name]), Row(name, plan, mesh_name, mode)
    started = time.perf_counter()
    plans._WARNED.clear()
    try:
        want = single(name)
        with warnings.catch_warnings(record=True) as caught, zoo.arithmetic(case):
            warnings.simplefilter("always")
            found = mw.simulate(lambda: (eager if mode == "eager" else static)(case, plan, mesh), mesh, timeout=600)
        for got in found:
            losses = dict(enumerate(got.losses)), dict(enumerate(want.losses))
            row.loss = max(row.loss, furthest(*losses, "loss"))  # type: ignore[arg-type]
            row.gradient = max(row.gradient, furthest(got.gradients, want.gradients, "gradient"))
            row.parameters = max(row.parameters, furthest(got.state, want.state, "parameters"))
        row.gathered = sorted(
            {str(w.message).split(" has no rule")[0] for w in caught if "has no rule" in str(w.message)}
        )
    except Exception as error:
        if trace:
            raise
        row.problem = f"{type(error).__name__}: {error}"
    row.seconds = time.perf_counter() - started
    tolerance = 1e-10 if case.exact else 1e-4
    if not row.problem and max(row.loss, row.gradient, row.parameters) > tolerance:
        row.problem = f"WRONG by more than {tolerance:g}"
    if mode == "static" and case.uncaptured:
        row.problem = (
            "" if row.problem.startswith("CaptureError") else row.problem or "captured, which was not expected"
        )
    return row


def main() -> int:
    """The matrix."""
    given = options()
    failed, names = 0, chosen(given.models, list(zoo.CASES))
    missing = {case.needs for case in zoo.CASES.values() if not importlib.util.find_spec(case.needs)}
    if missing:
        print(f"left out, because they are not installed: models of {', '.join(sorted(missing))}", file=sys.stderr)
    if not given.json:
        print(LINE.format("model", "plan", "mesh", "mode", "loss", "gradient", "params", "s", "gathered ops"))
    for name in (n for n in names if zoo.CASES[n].needs not in missing):
        for plan in chosen(given.plans, zoo.PLANS):
            for mesh in given.meshes.split(","):
                for mode in chosen(given.modes, MODES):
                    row = measure(name, plan, mesh, mode, given.trace)
                    failed += bool(row.problem)
                    print(json.dumps(vars(row)) if given.json else str(row), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
