"""Types of replicated axes through ops that convert: undecided ones, decided before, linked, known, stored.

Meshes have axes of two, three and four, and dims are about as long as the mesh: from there on conversions split dims
that nobody else splits.  Values, gradients and second gradients, eagerly and captured, are those of one device.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import ConversionError
from meshwright.layout import Layout, Partial, Placement, Replicate, Shard, Spec
from meshwright.resharding import conversions
from meshwright.resharding.planner import plan as make_plan
from tests.support import sweep as sweeps
from tests.support.compare import check_equal, plain

Tensor = torch.Tensor
F64 = torch.float64


def _written(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    y -= x.mean(0)
    return y * w


def _linked(x: Tensor, w: Tensor) -> Tensor:
    y = x.t().clone()  # computed of a leaf, and of its type
    return (y - y.mean(1, keepdim=True)).t() * w + x


def _known(x: Tensor, w: Tensor) -> Tensor:
    m = x.sum(0)
    curved = m.tanh()  # what m was reduced to is known from here on
    return (x * m + curved) * w


def _used_twice(x: Tensor, w: Tensor) -> Tensor:
    m = x.mean(0)
    return (x - m) * w + x * m


def _decided_after(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(0)).pow(2).sum() + (x * w).sum()


def _decided_before(x: Tensor, w: Tensor) -> Tensor:
    y = x * w
    return (y - y.mean(0)) * x


def _exchanged(x: Tensor, w: Tensor) -> Tensor:
    return x.cumsum(0) * w + x.flip(1).cumsum(1)


def _pieces(x: Tensor, w: Tensor) -> Tensor:
    left, right = x.sum(0).chunk(2)
    return (x.square() * torch.cat([left.tanh(), right.sin()])) * w


def _resharded(x: Tensor, w: Tensor) -> Tensor:
    m = x.mean(0)
    if isinstance(m, mw.DistTensor):
        m = mw.reshard(m, [Replicate()] * m.mesh.ndim)
    return (x - m) * w


def _constrained(x: Tensor, w: Tensor) -> Tensor:
    return (x - mw.constrain(x.mean(0), {"a": Shard(0)})) * w if isinstance(x, mw.DistTensor) else (x - x.mean(0)) * w


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "standardise": lambda x, w: (x - x.mean(0)) * w,
    "columns": lambda x, w: (x - x.mean(1, keepdim=True)) * w,
    "variance": lambda x, w: x / (x.var(0) + 1) * w,
    "softmax": lambda x, w: F.softmax(x, 0) * w,
    "batch norm": lambda x, w: F.batch_norm(x, None, None, training=True) * w,
    "instance norm": lambda x, w: F.instance_norm(x.t()[None]) * w.t(),
    "norm": lambda x, w: F.normalize(x, dim=0) * w,
    "product": lambda x, w: (x - x.mean(0)) @ w.t(),
    "of the product": lambda x, w: (x @ w.t()).softmax(0) @ x,
    "largest": lambda x, w: (x - x.amax(0)).exp() * w,
    "written": _written,
    "linked": _linked,
    "known": _known,
    "used twice": _used_twice,
    "decided after": _decided_after,
    "decided before": _decided_before,
    "exchanged": _exchanged,
    "pieces": _pieces,
    "resharded": _resharded,
    "constrained": _constrained,
}
MESHES = {
    "2x3": {"a": 2, "b": 3},
    "3x3": {"a": 3, "b": 3},
    "2x4": {"a": 2, "b": 4},
    "4x3": {"a": 4, "b": 3},
    "2x3x2": {"a": 2, "b": 3, "c": 2},
}


def layouts_of(ndim: int) -> list[tuple[Placement, ...]]:
    return list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=ndim))


def results(program: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> dict[str, Tensor]:
    """Value, gradients and gradients of a norm of these."""
    y = program(x, w).square().sum()
    first = torch.autograd.grad(y, (x, w), create_graph=True)
    second = torch.autograd.grad(first[0].square().sum() + first[1].tanh().sum(), (x, w))
    program(x, w).square().sum().backward()
    found = {"y": y, "x'": first[0], "w'": first[1], "x''": second[0], "w''": second[1], "x.grad": x.grad}
    return plain(found)  # type: ignore[no-any-return]


def values(mesh: mw.Mesh, longer: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(longer)
    n, c = mesh.size + longer, mesh.size + 2 * longer
    return tuple(torch.randn(n, c, dtype=F64, generator=generator) for _ in range(2))  # type: ignore[return-value]


def pairs(mesh: mw.Mesh, name: str, part: int) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """Layouts of the two operands: a part of all pairs, among them always some where one axis splits each."""
    every = list(itertools.product(layouts_of(mesh.ndim), repeat=2))
    apart = [
        (x, w)
        for x, w in every
        if not any(isinstance(p, Shard) and isinstance(q, Shard) for p, q in zip(x, w, strict=True))
    ]
    rng = random.Random(f"{name} {mesh!r}")
    yield from rng.sample(apart, min(part, len(apart)))
    yield from rng.sample(every, part)


InputLayout = list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]


def on_mesh(
    program: Callable[[Tensor, Tensor], Tensor], mesh: mw.Mesh, x: Tensor, w: Tensor, laid: InputLayout
) -> list[dict[str, Tensor]]:
    made = []
    for x_at, w_at in laid:
        leaves = (mw.shard_tensor(t.clone().requires_grad_(), mesh, at) for t, at in ((x, x_at), (w, w_at)))
        made.append(results(program, *leaves))
    return made


@pytest.mark.thin(11)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_that_convert(name: str, mesh: str) -> None:
    grid = mw.Mesh(MESHES[mesh])
    for longer in (-1, 0, 1) if sweeps.WHOLE else (0, 1):
        x, w = values(grid, longer)
        want = results(PROGRAMS[name], x.clone().requires_grad_(), w.clone().requires_grad_())
        laid = list(pairs(grid, name, 2 if grid.size > 9 else 3))

        run = functools.partial(on_mesh, PROGRAMS[name], grid, x, w, laid)
        for rank, found in enumerate(mw.simulate(run, grid)):
            for at, got in zip(laid, found, strict=True):
                check_equal(got, want, f"rank {rank}, {longer=}, {at}")


class Net(nn.Module):
    def __init__(self, program: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> None:
        super().__init__()
        self.program, self.x, self.w = program, nn.Parameter(x.clone()), nn.Parameter(w.clone())

    def forward(self, scale: Tensor) -> Tensor:
        return self.program(self.x, self.w).square().sum() * scale.mean()


def trained(
    name: str, x: Tensor, w: Tensor, sharded: Callable[[Net, torch.optim.Optimizer], Callable[[Tensor], Tensor]]
) -> dict[str, Tensor]:
    model = Net(PROGRAMS[name], x, w)
    step = sharded(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    losses = [plain(step(torch.ones(4, dtype=F64))) for _ in range(2)]
    return {"losses": torch.stack(losses), "x": plain(model.x), "w": plain(model.w)}


def one_device(model: Net, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.thin(19)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in ("resharded", "constrained")])
def test_captured(name: str, mesh: str) -> None:
    grid = mw.Mesh(MESHES[mesh])
    x, w = values(grid, 0)
    x_at, w_at = next(iter(pairs(grid, name, 1)))
    layouts = {"x": dict(zip(grid.axes, x_at, strict=True)), "w": dict(zip(grid.axes, w_at, strict=True))}

    def captured(model: Net, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        batch = torch.ones(4, dtype=F64)
        return mw.compile_step(model, None, optimizer, batch, mesh=grid, layouts=layouts)

    want = trained(name, x, w, one_device)
    for got in mw.simulate(functools.partial(trained, name, x, w, captured), grid):
        check_equal(got, want, f"{layouts}")


@pytest.mark.parametrize(
    "options",
    [{"fsdp": "b"}, {"precision": mw.Precision(accumulate=F64)}, {"fsdp": "b", "precision": mw.Precision()}],
    ids=["stored", "precision", "both"],
)
@pytest.mark.parametrize("mesh", [{"a": 2, "b": 3}, {"a": 2, "b": 4}], ids=["2x3", "2x4"])
def test_stored_parameters(mesh: Mapping[str, int], options: Mapping[str, object]) -> None:
    """Parameters that are gathered, or cast, for their ops are undecided in front of the op too."""
    grid = mw.Mesh(mesh)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.first.weight
            h = F.linear(x, weight - weight.mean(0), self.first.bias)
            return self.last(torch.tanh(self.norm(h)))

    def train(shard: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, data = Model().double(), torch.randn(20, 16, dtype=F64)
        if shard:
            layouts = {"norm.*": {"a": Shard(0)}, "last.weight": {"a": Shard(1)}}
            mw.shard_module(model, grid, layouts, **options)
            data = mw.shard_tensor(data, grid, {"b": Shard(0)})
        for _ in range(2):
            model(data).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad
                    p.grad = None
        return {n: plain(p) for n, p in model.named_parameters()}

    want = train(False)
    for got in mw.simulate(functools.partial(train, True), grid):
        check_equal(got, want, str(options))


@pytest.mark.parametrize("length", [2, 3, 16])
@pytest.mark.parametrize("mesh", MESHES)
def test_checkpointed_blocks_run_again_as_they_ran(mesh: str, length: int) -> None:
    """Also where the first run decided types: choices do not hang on that."""
    grid = mw.Mesh(MESHES[mesh])

    def loss(x: Tensor, w: Tensor, again: bool) -> Tensor:
        def block(a: Tensor) -> Tensor:
            return F.layer_norm(a @ w, (length,))

        return F.mse_loss(checkpoint(block, x, use_reentrant=False) if again else block(x), torch.zeros(32, length))

    torch.manual_seed(0)
    x, w = torch.randn(32, length, dtype=F64), torch.randn(length, length, dtype=F64)
    want = torch.autograd.grad(loss(*(leaves := (x.requires_grad_(), w.requires_grad_())), False), leaves)

    def run() -> list[Tensor]:
        made = [mw.shard_tensor(t.detach().requires_grad_(), grid, at) for t, at in ((x, {}), (w, {"b": Shard(1)}))]
        loss(*made, True).backward()
        return plain([t.grad for t in made])  # type: ignore[no-any-return]

    for found in mw.simulate(run, grid):
        check_equal(found, list(want), mesh)


@pytest.mark.parametrize("mesh", [m for m in MESHES if m != "2x3x2"])
def test_no_step_touches_an_undecided_axis(mesh: str) -> None:
    """And the way back leads between the duals, step by step, with the same axes undecided."""
    grid = mw.Mesh(MESHES[mesh])
    shape = (grid.size, grid.size + 1)
    types: list[tuple[Placement, int]] = [
        (Replicate(), 0),
        (Replicate(), 1),
        (Partial(), 0),
        (Shard(0), 0),
        (Shard(1), 0),
    ]
    made = [Spec(shape, F64, Layout(grid, [Replicate(), p]), r << 1, 1) for p, r in types]
    for src, dst in itertools.product(made, repeat=2):
        steps = make_plan(src, dst).steps
        assert not any(0 in s.axes for s in steps), (src, dst, steps)
        here = dst.dual()
        for back in conversions.transpose(steps):
            assert back.src is here
            assert back.src.undecided_mask == back.dst.undecided_mask == 1
            here = back.dst
        assert not steps or here is src.dual()
    decided = make_plan(*(Spec(shape, F64, Layout(grid, [Replicate(), p]), 2) for p in (Partial(), Replicate())))
    assert any(0 in s.axes for s in decided.steps)  # which pays where the type is known


def test_types_must_be_decided_before() -> None:
    grid = mw.Mesh({"a": 2, "b": 3})
    whole = Layout(grid)
    undecided, decided = Spec((6, 6), F64, whole, undecided_mask=1), Spec((6, 6), F64, whole, grad_partial_mask=1)
    with pytest.raises(ConversionError, match="must be decided"):
        conversions.between(undecided, decided, (0,))
    (step,) = make_plan(undecided, decided).steps  # of a value: undecided counts as invariant
    assert step.src is undecided.decided()
