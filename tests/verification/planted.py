"""Errors that are planted, and the op that each of them spoils: a rule that lies, a conversion, a pass, a user's own.

``python -m tests.verification.planted`` plants them all and says which were found, and named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch import forget_ops
from meshwright.generator import counter
from meshwright.passes import PassRecord, copied
from meshwright.program.check import verify as wellformed
from meshwright.ranks import runtime
from meshwright.resharding import executor
from meshwright.rules import RULES, notation
from meshwright.verification import Verification

Tensor = torch.Tensor
MESH = mw.Mesh({"tp": 3})
WEIGHTS = torch.arange(1.0, 7.0, dtype=torch.float64)
DATA = mw.Mesh({"dp": 2})
Body = Callable[["Net", Tensor, Tensor], Any]
Plant = Callable[[pytest.MonkeyPatch], None]


class Net(nn.Module):
    """Over tp its hidden values are split on their last dim, and what it adds up of them is Partial."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Embedding(7, 6)
        self.register_buffer("seen", torch.ones(6), persistent=False)
        self.register_buffer("kept", torch.ones(6))
        self.count = 1.0

    def forward(self, x: Tensor, body: Body) -> Any:
        hidden = self.up(x)
        return body(self, hidden, self.down(hidden))


@dataclass(frozen=True)
class Planted:
    """One error.

    Attributes:
        name: of the error.
        plant: what spoils Meshwright; None where the body is wrong.
        body: of the model, given it, what is split and what is Partial.
        ops: what the first departure is to name.
        said: what ``verify`` is told besides.
    """

    name: str
    ops: tuple[str, ...]
    body: Body
    plant: Plant | None = None
    mesh: mw.Mesh = MESH
    said: Any = None


LAYOUTS = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}


def found(one: Planted) -> Verification:
    """What ``verify`` says of a planted error."""
    with pytest.MonkeyPatch.context() as patch:
        if one.plant is not None:
            one.plant(patch)
        forget_ops()
        try:
            torch.manual_seed(0)
            loss = lambda m, x: m(x, one.body).square().mean()  # noqa: E731
            on_tp = "tp" in one.mesh.axes
            said = {"modes": ["eager"], "steps": 1, "save": False, **(one.said or {})}
            said.setdefault("batch", None if on_tp else {"dp": mw.Shard(0)})
            return mw.verify(Net(), loss, torch.randn(4, 6), one.mesh, LAYOUTS if on_tp else {}, **said)
        finally:
            patch.undo()
            forget_ops()


# ---------------------------------------------------------------------------------------------- rules that lie


def lie(*names: str, rule: Callable[..., Any]) -> Plant:
    """Another rule for ops."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for name in names:
            patch.setitem(RULES, name, rule)

    return plant


def passes_partial(name: str, fn: Callable[[Tensor], Tensor]) -> Planted:
    """An op that is not linear and says that it is."""
    rule = lambda x, *a, **k: notation("... -> ...", x, linear=[x])  # noqa: E731
    return Planted(f"{name} says that it is linear", (name,), lambda m, h, p: fn(p), lie(name, rule=rule))


def elementwise(name: str, fn: Callable[[Tensor], Tensor], *others: str) -> Planted:
    """An op over the last dim that says that each element is for itself."""
    rule = lambda x, *a, **k: notation("... d -> ... d", x)  # noqa: E731
    return Planted(f"{name} may be split over its dim", (name, *others), lambda m, h, p: fn(h), lie(name, rule=rule))


def reduced(name: str, op: str, fn: Callable[[Tensor], Tensor]) -> Planted:
    """A reduction that says to be another one."""
    rule = lambda x, *a, **k: notation("... d -> ...", x, reduced="d", op=op)  # noqa: E731
    return Planted(f"{name} is reduced by {op}", (name,), lambda m, h, p: fn(h), lie(name, rule=rule))


def _linear(**how: Any) -> Callable[..., Any]:
    return lambda x, w, b=None: notation("... k, n k, n -> ... n", x, w, b, reduced="k", heavy=True, **how)


RULED: list[Planted] = [
    passes_partial("relu", F.relu), passes_partial("gelu", F.gelu), passes_partial("tanh", torch.tanh),
    passes_partial("exp", torch.exp), passes_partial("square", torch.square), passes_partial("sigmoid", torch.sigmoid),
    passes_partial("abs", torch.abs), passes_partial("silu", F.silu),
    elementwise("softmax", lambda h: F.softmax(h, -1)), elementwise("log_softmax", lambda h: F.log_softmax(h, -1)),
    elementwise("cumsum", lambda h: h.cumsum(-1)), elementwise("flip", lambda h: h.flip(-1) * WEIGHTS),
    elementwise("roll", lambda h: h.roll(1, -1) * WEIGHTS),
    reduced("mean", "sum", lambda h: h.mean(-1)), reduced("sum", "avg", lambda h: h.sum(-1)),
    reduced("amax", "sum", lambda h: h.amax(-1)), reduced("amin", "max", lambda h: h.amin(-1)),
    reduced("logsumexp", "sum", lambda h: h.logsumexp(-1)), reduced("prod", "sum", lambda h: h.prod(-1)),
    Planted("layer_norm may be split over what it normalises", ("layer_norm",), lambda m, h, p: F.layer_norm(h, (6,)),
            lie("layer_norm", rule=lambda x, *a, **k: notation("... d -> ... d", x))),
    Planted("batch_norm takes the mean of its own rows", ("batch_norm",),
            lambda m, h, p: F.batch_norm(h.sin(), None, None, training=True).sin(),
            lie("batch_norm", rule=lambda x, *a, **k: notation("b c -> b c", x)), DATA),
    Planted("cross_entropy is a mean of means", ("cross_entropy",),
            lambda m, h, p: F.cross_entropy(p, torch.tensor([0, 1, 2, 3])) * torch.ones(2),
            lie("cross_entropy_loss", rule=lambda x, y, *a, **k: notation("b d, b -> ", x, y, reduced="b", whole="d")),
            DATA),
    Planted("var is the mean of variances", ("var",), lambda m, h, p: h.var(-1, unbiased=False),
            lie("var", rule=lambda x, *a, **k: notation("... d -> ...", x, reduced="d", op="avg"))),
    Planted("a bias is counted on every rank", ("linear",), lambda m, h, p: m.down(h) * 1.0,
            lie("linear", rule=_linear(linear=[]))),
    Planted("linear is linear in its weight alone", ("linear",), lambda m, h, p: m.last(p),
            lie("linear", rule=lambda x, w, b=None: notation("... k, n k, n -> ... n", x, w, b, reduced="k", linear=[x],
                                                             heavy=True))),
    Planted("mul is linear in both together", ("mul",), lambda m, h, p: p * p,
            lie("mul", rule=lambda x, y: notation("..., ... -> ...", x, y, linear=[[x, y]]))),
    Planted("add is linear in each alone", ("add",), lambda m, h, p: p + m.kept,
            lie("add", rule=lambda x, y, **k: notation("... d, d -> ... d", x, y, linear=[x, y]))),
    Planted("matmul is reduced by max", ("matmul",), lambda m, h, p: torch.matmul(h, m.last.weight),
            lie("matmul", rule=lambda x, y, **k: notation("m k, k n -> m n", x, y, reduced="k", op="max", heavy=True))),
    Planted("embedding finds its rows anywhere", ("embedding",),
            lambda m, h, p: F.embedding(torch.tensor([0, 2, 1, 1]), h.t()),
            lie("embedding", rule=lambda w, i, *a: notation("v d, n -> n d", w, i, reduced="v"))),
    Planted("mse_loss is a mean of means", ("mse_loss",),
            lambda m, h, p: F.mse_loss(h, torch.zeros(4, 6)) * torch.ones(2),
            lie("mse_loss", rule=lambda x, y, *a: notation("b d, b d -> ", x, y, reduced="b d"))),
    Planted("attention adds up over keys", ("scaled_dot_product_attention",),
            lambda m, h, p: F.scaled_dot_product_attention(m.last.weight[None, None, :, :4], h.t()[None, None],
                                                           h.t()[None, None]),
            lie("scaled_dot_product_attention", rule=lambda q, k, v, *a, **o: notation(
                "b h t d, b h s d, b h s e -> b h t e", q, k, v, reduced="s", whole="d"))),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- conversions


def converts(kind: str, change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> Plant:
    """A conversion that does something else."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        made = executor._PREPARE[kind]

        def prepare(step: Any, here: tuple[int, ...]) -> Any:
            inner = made(step, here)
            return lambda t: change(t, inner)

        patch.setitem(executor._PREPARE, kind, prepare)

    return plant


def relu(m: Net, h: Tensor, p: Tensor) -> Tensor:
    return F.relu(p)


def softmax(m: Net, h: Tensor, p: Tensor) -> Tensor:
    return F.softmax(mw.constrain(h, {"tp": mw.Replicate()}), -1)


def cut(m: Net, h: Tensor, p: Tensor) -> Tensor:
    return mw.constrain(F.relu(p), {"tp": mw.Shard(1)}).sin()


CONVERSIONS = [
    Planted("an all-reduce is forgotten", ("relu",), relu, converts("all_reduce", lambda t, run: t.clone())),
    Planted("an all-reduce adds twice", ("relu",), relu, converts("all_reduce", lambda t, run: run(run(t)))),
    Planted("an all-reduce on one rank is another", ("relu",), relu,
            converts("all_reduce", lambda t, run: run(t) + (runtime.RT.rank == 1))),
    Planted("a gather in the other order", ("softmax",), softmax,
            converts("all_gather", lambda t, run: run(t).roll(2, -1))),
    Planted("a slice of the wrong part", ("linear",), cut,  # a weight, which is cut as it is laid
            converts("slice", lambda t, run: run(t.roll(1, -1)))),
    Planted("the transpose of a slice forgets the others", ("relu", "sin"), cut,
            converts("all_gather", lambda t, run: run(t) * 0.5)),
    Planted("a reduce-scatter is not a sum", ("sin",),
            lambda m, h, p: mw.constrain(p, {"tp": mw.Shard(1)}).sin(),
            converts("reduce_scatter", lambda t, run: run(t) / 3)),
    Planted("an all-to-all mixes rows", ("sin",),
            lambda m, h, p: mw.constrain(h, {"tp": mw.Shard(0)}).sin(),
            converts("all_to_all", lambda t, run: run(t).flip(0))),
    Planted("the all-reduce of a gradient is forgotten", ("linear",), lambda m, h, p: m.up(p.sin()),
            converts("all_reduce", lambda t, run: run(t) if torch._C._current_graph_task_id() == -1 else t.clone())),
    Planted("a term is kept on every rank", ("linear",), lambda m, h, p: p + m.last.bias,
            converts("keep_one", lambda t, run: t.clone())),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- a user's own


class _Scaled(torch.autograd.Function):
    """A gradient that differs by rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + runtime.RT.rank)


def hooked(m: Net, h: Tensor, p: Tensor) -> Tensor:
    y = p.sin()
    y.register_hook(lambda g: g * (2.0 if isinstance(g, mw.DistTensor) else 1.0))
    return y.cos()


def seeded(m: Net, h: Tensor, p: Tensor) -> Tensor:
    torch.manual_seed(runtime.RT.rank + (runtime.RT.sim is not None))
    return F.dropout(p.sin(), 0.5)


def noise(m: Net, h: Tensor, p: Tensor) -> Tensor:
    torch.manual_seed(7 if runtime.RT.sim is None else 8)
    return p.sin() + torch.rand(6)


def counted(m: Net, h: Tensor, p: Tensor) -> Tensor:
    m.count += 1
    return p.sin() * m.count


def buffered(m: Net, h: Tensor, p: Tensor) -> Tensor:
    m.seen.mul_(2.0)
    return p.sin() * m.seen


def local_mean(m: Net, h: Tensor, p: Tensor) -> Tensor:
    local = h.to_local() if isinstance(h, mw.DistTensor) else h
    local = local - local.mean(-1, keepdim=True)
    return (mw.from_local(local, h.mesh, h.placements) if isinstance(h, mw.DistTensor) else local).sin()


def said_partial(m: Net, h: Tensor, p: Tensor) -> Tensor:
    y = F.relu(p)
    if isinstance(y, mw.DistTensor):
        y = mw.from_local(y.to_local(), y.mesh, {"tp": mw.Partial()})
    return y.sin()


def by_rank(params: Any) -> torch.optim.Optimizer:
    """An optimizer whose rate a hook sets by rank."""
    made = torch.optim.SGD(params, 0.1)
    made.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.1 + runtime.RT.rank))
    return made


def drawn_by_layout(patch: pytest.MonkeyPatch) -> None:
    made = counter.dropout
    patch.setattr(counter, "dropout", lambda x, seed, p, shape, offset: made(x, seed, p, shape, (0,) * len(offset)))


SAVED = {"save": True}
USERS = [
    Planted("a rank scales what it has", ("mul",),
            lambda m, h, p: p.sin() * (2.0 if runtime.RT.rank == 1 and runtime.RT.sim else 1.0)),
    Planted("a gradient is scaled by rank", ("clone", "sin", "cos"), lambda m, h, p: _Scaled.apply(p.sin()).cos()),
    Planted("a hook scales what is distributed", ("sin",), hooked),
    Planted("ranks have other seeds", ("dropout",), seeded),
    Planted("random numbers are drawn from another seed", ("rand",), noise),
    Planted("a count in Python is not saved", ("mul",), counted, said=SAVED),
    Planted("a buffer is not saved", ("the save and the load",), buffered, said=SAVED),
    Planted("a mean of a rank's own part", ("mean",), local_mean),
    Planted("a whole value is said to be a part", ("sin",), said_partial),
    Planted("a hook of the optimizer sets the rate by rank", ("optimizer.step",), lambda m, h, p: p.sin(),
            said={"optimizer": by_rank}),
    Planted("masks follow from the place in the part", ("dropout",), lambda m, h, p: F.dropout(h, 0.5),
            drawn_by_layout),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- passes


@dataclass(frozen=True)
class Spoils(mw.passes.Pass):
    """Takes away, or doubles, the first op of a kind that a program has."""

    name = "spoils"
    op: str = "meshwright.all_reduce"
    role: str = "backward"
    twice: bool = False

    def apply(self, program: Any) -> Any:
        made = copied(program)
        nodes = [n for n in made.graph.nodes if n.op == "call_function" and str(n.target).startswith(self.op)]
        node = next(n for n in nodes if mw.passes.info_of(n).role == self.role)
        if self.twice:
            with made.graph.inserting_after(node):
                again = made.graph.node_copy(node, lambda n: n)
            again.replace_all_uses_with(node)
            node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
            again.args = (node, *again.args[1:])
        else:
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
        return made, PassRecord("spoiled")


def unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("meshwright.passes.pass_manager.checked", lambda program, what: None)
    patch.setattr(wellformed, "check_gradients", lambda program: None)


def spoiled(what: str, op: str, role: str, ops: Sequence[str], body: Body, mesh: mw.Mesh = MESH, **how: Any) -> Planted:
    said = {"modes": ["captured"], "passes": [Spoils(op, role, **how)]}
    return Planted(f"a pass {what}", tuple(ops), body, unchecked, mesh, said)


GRADIENTS = ("the reduction of the gradient over ranks", "optimizer.step", "linear")
PASSES = [
    spoiled("loses an all-reduce of the forward", "meshwright.all_reduce", "forward", ["relu"], relu),
    spoiled("loses the reduction of a gradient", "meshwright.all_reduce", "backward", GRADIENTS,
            lambda m, h, p: p.sin(), DATA),
    spoiled("reduces a gradient twice", "meshwright.all_reduce", "backward", GRADIENTS, lambda m, h, p: p.sin(), DATA,
            twice=True),
    spoiled("loses a sine", "aten.sin", "forward", ["sin"], lambda m, h, p: p.cos().sin()),
    spoiled("takes a sine twice", "aten.sin", "forward", ["sin"], lambda m, h, p: p.cos().sin(), twice=True),
    spoiled("loses a negation of the backward", "aten.neg", "backward", ["cos"], lambda m, h, p: p.sin().cos()),
]  # fmt: skip

TABLE = [*RULED, *CONVERSIONS, *USERS, *PASSES]


def named(one: Planted, report: Verification) -> bool:
    """Whether the first departure names the op."""
    return any(d.op in one.ops for d in report.departures)


def main() -> int:
    """Plant all; how many were not found or not named."""
    missed = wrong = 0
    for one in TABLE:
        if len(sys.argv) > 1 and not any(w in one.name for w in sys.argv[1:]):
            continue
        try:
            report = found(one)
        except Exception as error:
            print(f"RAISED  {one.name}: {type(error).__name__}: {error}", flush=True)
            missed += 1
            continue
        missed += report.passed
        wrong += not report.passed and not named(one, report)
        word = "MISSED" if report.passed else "named " if named(one, report) else "OTHER "
        print(f"{word}  {one.name}: {report.departures[0] if report.departures else ''}"[:240], flush=True)
    print(f"{len(TABLE)} planted, {missed} missed, {wrong} with another op")
    return missed + wrong


if __name__ == "__main__":
    sys.exit(main())
