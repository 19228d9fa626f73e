"""Errors of other classes than those of ``planted``; the op by which each was to be named was written down before the
first run, and not corrected since.

``python -m tests.verification.blind`` plants them all and says which were found, and named.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.generator import counter
from meshwright.ranks import runtime
from meshwright.rules import notation

from .planted import DATA, Net, Planted, Tensor, converts, found, lie, named, relu

FOUR = mw.Mesh({"tp": 4})  # of which 6 values are not a multiple
BOTH = mw.Mesh({"dp": 2, "tp": 3})


def here() -> bool:
    """Whether this is a rank, and not the one device."""
    return runtime.RT.sim is not None


def one_seed(patch: pytest.MonkeyPatch) -> None:
    """The second mask of a step is of another seed on ranks."""
    made, calls = counter.dropout, [0]

    def dropout(x: Tensor, seed: Any, *more: Any) -> Tensor:
        calls[0] += 1
        return made(x, seed + 1 if here() and calls[0] > runtime.RT.world else seed, *more)

    patch.setattr(counter, "dropout", dropout)


def unsaved(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """Something that a step remembers in an attribute that no checkpoint has."""
    m.count = m.count * 2.0
    return (p.sin() + m.count).cos()


def unsynchronised(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """A running mean of a rank's own rows, written by hand to a plain buffer."""
    own = p.detach()
    own = own.to_local() if isinstance(own, mw.DistTensor) else own
    with torch.no_grad():
        buffer = m.kept.to_local() if isinstance(m.kept, mw.DistTensor) else m.kept
        buffer.mul_(0.9).add_(own.mean(0))
    return p.sin()


def biased_thrice(x: Any, w: Any, b: Any = None) -> Any:
    """The bias is no term of what is added up."""
    return notation("... k, n k, n -> ... n", x, w, b, reduced="k", linear=[[x], [w]], heavy=True)


def uneven_mean(x: Any, *a: Any, **k: Any) -> Any:
    """A mean of the means of the parts: right where they are even."""
    return notation("... d -> ...", x, reduced="d", op="avg")


def rounds(t: Tensor, run: Any) -> Tensor:
    """A wire of half precision."""
    return run(t.to(torch.float32).to(t.dtype))


def other_group(patch: pytest.MonkeyPatch) -> None:
    """Sums over tp go over dp."""
    made = collective.group

    def group(mesh: Any, axes: Any = None) -> Any:
        return made(mesh, (0,) if axes == (1,) and here() else axes)

    patch.setattr(collective, "group", group)


def stale(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """A value that is kept from the first step on, on ranks alone."""
    if here():
        if not hasattr(m, "memo"):
            m.memo = m.last.weight.detach().clone()
        return F.linear(p.sin(), m.memo)
    return F.linear(p.sin(), m.last.weight.detach())


def detached(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """On ranks the graph is cut."""
    y = p.sin()
    return (y.detach() if here() else y) * m.last.weight.sum()


def frozen(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """On ranks one parameter is frozen."""
    m.last.bias.requires_grad_(not here())
    return m.last(p.sin())


def twice(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """A module that ranks call twice."""
    y = m.last(p.sin())
    return m.last(y) if here() else y.cos()


def wider(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """A threshold in the code that depends on the size of what a rank holds."""
    local = h.to_local() if isinstance(h, mw.DistTensor) else h
    return p.sin() if local.shape[-1] > 3 else p.cos()


def shuffled(m: Net, h: Tensor, p: Tensor) -> Tensor:
    """Rows in another order on ranks: the loss is the same, gradients are not."""
    y = p.sin()
    return (y.flip(0) if here() else y * 1.0) * torch.arange(1.0, 5.0, dtype=y.dtype)[:, None]


def slow_rate(params: Any) -> torch.optim.Optimizer:
    """A schedule by the number of steps that a process has seen."""
    made = torch.optim.AdamW(params, 0.1)
    made.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(weight_decay=0.5 if here() else 0.01))
    return made


def lost_state(patch: pytest.MonkeyPatch) -> None:
    """What is saved is not loaded."""
    patch.setattr("meshwright.verification.runs.Checkpoints.load", lambda self, **k: None)


BLIND = [
    Planted("one mask of two is of another seed", ("dropout",),
            lambda m, h, p: F.dropout(F.dropout(p.sin(), 0.5), 0.5), one_seed),
    Planted("a bias is counted on every rank of three", ("linear",), lambda m, h, p: m.down(h).sin(),
            lie("linear", rule=biased_thrice)),
    Planted("a number that the model keeps is in no checkpoint", ("add",), unsaved, said={"save": True}),
    Planted("a buffer has what a rank saw of the batch", ("a write to a buffer", "add_"), unsynchronised, mesh=DATA),
    Planted("a mean is right for even parts alone", ("mean",), lambda m, h, p: h.mean(-1).sin(),
            lie("mean", rule=uneven_mean), FOUR),
    Planted("a wire rounds", ("relu",), relu, converts("all_reduce", rounds)),
    Planted("sums go over the wrong group", ("relu",), relu, other_group, BOTH),
    Planted("a memo of a weight outlives its update", ("linear",), stale, said={"steps": 2}),
    Planted("ranks cut the graph", ("sin",), detached),
    Planted("ranks freeze a parameter", ("linear",), frozen),
    Planted("ranks call a module twice", ("linear",), twice),
    Planted("a branch goes by the size of a part", ("cos",), wider),
    Planted("rows lie in another order", ("flip", "mul"), shuffled),
    Planted("weight decay by process", ("optimizer.step",), lambda m, h, p: m.last(p.sin()),
            said={"optimizer": slow_rate}),
    Planted("a load that loads nothing", ("the save and the load",), lambda m, h, p: p.sin(), lost_state,
            said={"save": True}),
]  # fmt: skip


def main() -> int:
    """Plant all; how many were not found or not named."""
    missed = wrong = 0
    for one in BLIND:
        if len(sys.argv) > 1 and not any(w in one.name for w in sys.argv[1:]):
            continue
        try:
            report = found(one)
        except Exception as error:
            print(f"RAISED  {one.name}: {type(error).__name__}: {error}"[:300], flush=True)
            missed += 1
            continue
        missed += report.passed
        wrong += not report.passed and not named(one, report)
        word = "MISSED" if report.passed else "named " if named(one, report) else "OTHER "
        print(f"{word}  {one.name}: {report.departures[0] if report.departures else ''}"[:300], flush=True)
    print(f"{len(BLIND)} planted, {missed} missed, {wrong} with another op")
    return missed + wrong


if __name__ == "__main__":
    sys.exit(main())
