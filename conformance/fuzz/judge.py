"""Running a program on one device and on simulated ranks, and comparing everything that can be seen."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn as nn

from meshwright.errors import ConversionError, DesyncError, MeshwrightError, RuleError
from meshwright.program.compile import compile_step
from meshwright.ranks.simulation import simulate
from meshwright.tensor import api

from .program import Leaf, Program, namespace, run_line, tensors, values

Tensor = torch.Tensor
Found = dict[str, Tensor | None]
VERDICTS = ("equal", "refused", "unstable", "wrong", "internal", "hang")
BAD = ("wrong", "internal", "hang")
_TOLERANCE = 1e-7
_ROUNDED = 1e-5  # of programs that go through float32: parts of a sum are rounded apart from each other
_DEFECTS = (RuleError, ConversionError, DesyncError)


@dataclass(frozen=True)
class Verdict:
    """What became of a program: one of VERDICTS, why, and the names of the values that differ."""

    kind: str
    why: str = ""
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Raised:
    """An error on one rank."""

    kind: str
    ours: bool
    desync: bool
    text: str


def whole(t: Tensor | None) -> Tensor | None:
    """The global value, cut off from what is done to it later."""
    return None if t is None else api.unshard(t).detach().clone()


def differentiate(program: Program, env: Mapping[str, Any], found: Found) -> None:
    """Gradients of the weighted sum of the outputs, and of a penalty on them; added to ``found``."""
    leaves = [leaf for leaf in program.leaves if leaf.grad]
    if not program.outputs or not leaves:
        return
    loss: Any = sum(
        (env[o] * values(tuple(env[o].shape), 50 + i, env[o].dtype)).sum() for i, o in enumerate(program.outputs)
    )
    found["loss"] = whole(loss)
    at = [env[leaf.name] for leaf in leaves]
    grads = torch.autograd.grad(loss, at, allow_unused=True, create_graph=program.second)
    found |= {f"gradient of {leaf.name}": whole(g) for leaf, g in zip(leaves, grads, strict=True)}
    if program.second:
        penalty: Any = sum((g * g).sum() for g in grads if g is not None and g.requires_grad)
        none: list[Tensor | None] = [None] * len(at)
        second = torch.autograd.grad(penalty, at, allow_unused=True) if isinstance(penalty, Tensor) else none
        # A gradient that is a constant may have no graph, where one device has one that gives zeros.
        found |= {
            f"second gradient of {leaf.name}": torch.zeros(x.shape, dtype=x.dtype) if g is None else whole(g)
            for leaf, x, g in zip(leaves, at, second, strict=True)
        }


def trace(program: Program, mesh: Any, jitter: float = 0.0) -> Found:
    """Everything that a run shows: values at the end (and on the way), gradients, which values require one."""
    env = namespace(mesh)
    for leaf in program.leaves:
        env[leaf.name] = _jittered(leaf, jitter) if jitter else leaf.make(mesh)
    found: Found = {}
    for k, line in enumerate(program.lines):
        run_line(line, env)
        if program.watch:
            found |= {f"{n} after line {k + 1}": whole(env[n]) for n in dict.fromkeys(re.findall(r"v\d+", line))}
    found |= {n: whole(t) for n, t in tensors(env).items()}
    found |= {f"requires_grad of {n}": torch.tensor(t.requires_grad) for n, t in tensors(env).items()}
    differentiate(program, env, found)
    return found


def _jittered(leaf: Leaf, jitter: float) -> Tensor:
    t = leaf.value()
    moved = torch.cos(torch.arange(t.numel(), dtype=torch.float64) * 3.1).reshape(t.shape)
    return (t * (1 + jitter * moved)).requires_grad_(leaf.grad)


def _attempt(fn: Any, *args: Any) -> Found | _Raised:
    try:
        found: Found = fn(*args)
        return found
    except Exception as error:  # whatever it is, it is a finding or a refusal
        # These say that Meshwright contradicts itself: defects, and no refusals.
        ours = isinstance(error, MeshwrightError) and not isinstance(error, _DEFECTS)
        return _Raised(type(error).__name__, ours, isinstance(error, DesyncError), str(error))


def differences(got: Found, want: Found, program: Program) -> list[str]:
    """What differs, a line each; the name comes first, up to a colon."""
    tolerance = _ROUNDED if any("float32" in line for line in program.lines) else _TOLERANCE
    out = []
    for name in want:
        if name not in got:
            out.append(f"{name}: missing")
            continue
        a, b = got[name], want[name]
        if (a is None) != (b is None):
            out.append(
                f"{name}: {'None' if a is None else 'a tensor'}, one device has {'None' if b is None else 'a tensor'}"
            )
        elif (
            a is not None and b is not None and not _equal(*(_defined(a, b) if "second" in name else (a, b)), tolerance)
        ):
            out.append(f"{name}: {_short(a)}, one device has {_short(b)}")
    return out


def _defined(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Without what has no second derivative, as a norm at zero: one device says nan, by chance of its formula."""
    none = b.isnan() if a.shape == b.shape else torch.zeros(())
    return (a.masked_fill(none, 0), b.masked_fill(none, 0)) if none.any() else (a, b)


def _short(t: Tensor) -> str:
    text = " ".join(str(t.flatten()[:6].tolist()).split())
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} {text}"


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    size = float(b.abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    tolerance = tolerance if a.dtype in (torch.float64, torch.complex128) else 1e-3
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * (1 + size), equal_nan=True)


def judge(program: Program, static: bool = False) -> Verdict:
    """Run a program on one device and on the mesh."""
    run = trace_static if static else trace
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = _attempt(run, program, None)
        if isinstance(want, _Raised):
            return Verdict("unstable", f"one device raises {want.kind}: {want.text[:200]}")
        try:
            got = simulate(lambda: _attempt(run, program, program.mesh), program.mesh)
        except Exception as error:
            return Verdict("internal", f"the simulation ended with {type(error).__name__}: {error}")
        verdict = _compared(program, got, want)
        if verdict.kind == "wrong" and not static and _unstable(program, want, verdict.names):
            return Verdict("unstable", verdict.why)
        return verdict


def _compared(program: Program, got: list[Found | _Raised], want: Found) -> Verdict:
    raised = [(r, g) for r, g in enumerate(got) if isinstance(g, _Raised)]
    if raised:
        rank, first = next(((r, g) for r, g in raised if not g.desync), raised[0])
        left = {g.desync for _, g in raised} == {True, False} or any("deadlock" in g.text for _, g in raised)
        if len(raised) < len(got) or left:
            return Verdict("hang", f"rank {rank} raised {first.kind}, others waited or went on: {first.text}")
        if all(g.ours for _, g in raised):
            return Verdict("refused", f"{first.kind}: {first.text}")
        return Verdict("internal", f"{first.kind} on rank {rank}: {first.text}")
    found = [(rank, line) for rank, mine in enumerate(got) for line in differences(cast(Found, mine), want, program)]
    if not found:
        return Verdict("equal")
    names = frozenset(line.partition(":")[0] for _, line in found)
    rank, line = found[0]
    return Verdict("wrong", f"rank {rank}: {line}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else ""), names)


def _unstable(program: Program, want: Found, names: frozenset[str]) -> bool:
    """Whether everything that differs also moves, on one device, when the inputs move by a rounding error."""
    moved = _attempt(trace, program, None, 1e-13)
    return isinstance(moved, _Raised) or names <= {line.partition(":")[0] for line in differences(moved, want, program)}


# ---------------------------------------------------------------------------------------------- captured


class _Model(nn.Module):
    """The leaves that require a gradient, as parameters."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        for leaf in program.leaves:
            if leaf.grad:
                self.register_parameter(leaf.name, nn.Parameter(leaf.value()))


def _loss_of(program: Program) -> Any:
    def loss_fn(model: _Model, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        env = namespace(None) | dict(batch) | dict(model.named_parameters())
        env["reshard"] = lambda x, placements, order=None: api.constrain(x, placements)
        for line in program.lines:
            run_line(line, env)
        loss: Any = sum(
            ((env[o] * values(tuple(env[o].shape), 50 + i, env[o].dtype)).sum() for i, o in enumerate(program.outputs)),
            start=torch.zeros((), dtype=torch.float64),
        )
        made = [t for n, t in tensors(env).items() if n not in batch and n not in dict(model.named_parameters())]
        return (loss, *[t * 1 for t in made])

    return loss_fn


def trace_static(program: Program, mesh: Any) -> Found:
    """A captured step and two updates of SGD with momentum; on one device the same, eagerly."""
    model = _Model(program)
    batch = {leaf.name: leaf.value() for leaf in program.leaves if not leaf.grad}
    batch["unused"] = torch.zeros(2, dtype=torch.float64)
    loss_fn = _loss_of(program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    found: Found = {}
    if mesh is None:
        for i in range(2):
            optimizer.zero_grad()
            made = loss_fn(model, batch)
            made[0].backward()
            optimizer.step()
            found |= {f"step {i}, value {k}": whole(t) for k, t in enumerate(made)}
            found |= {f"step {i}, {n}": whole(p) for n, p in model.named_parameters()}
        return found
    layouts = {leaf.name if leaf.grad else f"batch.{leaf.name}": leaf.layout for leaf in program.leaves}
    step = compile_step(model, loss_fn, optimizer, batch, mesh=mesh, layouts=_placements(layouts))
    for i in range(2):
        made = step(batch)
        found |= {f"step {i}, value {k}": whole(t) for k, t in enumerate(made)}
        found |= {f"step {i}, {n}": whole(p) for n, p in model.named_parameters()}
    return found


def _placements(layouts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: dict(zip(lay.mesh.axes, lay.placements, strict=True)) for name, lay in layouts.items() if lay is not None
    }


# ---------------------------------------------------------------------------------------------- shrinking


def shrink(program: Program, verdict: Verdict, static: bool = False, tries: int = 150) -> Program:
    """A smaller program with the same kind of verdict."""
    left = tries
    changed = True
    while changed and left > 0:
        changed = False
        for smaller in _smaller(program):
            left -= 1
            if left < 0:
                break
            if judge(smaller, static).kind == verdict.kind:
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Any:
    for k in reversed(range(len(program.lines))):
        yield program.without(k)
    if program.second:
        yield replace(program, second=False)
    if program.watch:
        yield replace(program, watch=False)
    for o in program.outputs:
        yield replace(program, outputs=tuple(p for p in program.outputs if p != o))
    for leaf in program.leaves:
        yield replace(program, leaves=tuple(x for x in program.leaves if x is not leaf))
        if leaf.layout is not None:
            for a in range(leaf.layout.mesh.ndim):
                simpler = leaf.layout.replace(a, api.Replicate())
                if simpler != leaf.layout:
                    yield replace(
                        program, leaves=tuple(replace(x, layout=simpler) if x is leaf else x for x in program.leaves)
                    )
    for k, line in enumerate(program.lines):
        for found in re.finditer(r", \(\{[^{}]*\}, (None|\{[^{}]*\})\)", line):
            lines = (*program.lines[:k], line[: found.start()] + line[found.end() :], *program.lines[k + 1 :])
            yield replace(program, lines=lines)
