"""Parameters that a model writes to in its forward: averaged, clamped, normalised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import CaptureError, PassError, ProgramError
from meshwright.program import Program
from meshwright.program.ir.nodes import annotate, info_of
from meshwright.program.load import load_program

Tensor = torch.Tensor
Write = Callable[[nn.Linear, nn.Linear], Any]
DP, BOTH = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 2, "tp": 2})
TP = {"*a.weight": {"tp": mw.Shard(0)}, "*k.weight": {"tp": mw.Shard(1)}}
X = torch.randn(8, 7, generator=torch.Generator().manual_seed(0))
DPO, MERGE = "data-parallel-optimization", "gradient-merge:k_steps=2"


def average(a: nn.Linear, k: nn.Linear) -> None:
    for p, q in zip(k.parameters(), a.parameters(), strict=True):
        p.mul_(0.9).add_(q, alpha=0.1)


def numbers(a: nn.Linear, k: nn.Linear) -> None:
    torch._foreach_mul_([a.weight, k.weight, a.bias], [0.9, 0.5, 1.1])


WRITES: dict[str, Write] = {
    "average": average,
    "clamp": lambda a, k: a.weight.clamp_(-0.2, 0.2),
    "scale": lambda a, k: a.weight.mul_(0.5),
    "setitem": lambda a, k: a.weight.__setitem__((slice(None), 0), 0.0),
    "view": lambda a, k: a.weight.view(-1)[:5].zero_(),
    "rows": lambda a, k: a.weight[1:3].mul_(0.5),
    "index": lambda a, k: a.weight.index_fill_(0, torch.tensor([1]), 0.0),
    "transposed": lambda a, k: a.weight.t().clamp_(-0.1, 0.1),
    "chunk": lambda a, k: a.weight.chunk(2)[0].zero_(),
    "lerp": lambda a, k: k.weight.lerp_(a.weight, 0.1),
    "copy": lambda a, k: k.weight.copy_(a.weight),
    "out": lambda a, k: torch.mul(a.weight, 0.5, out=k.weight),
    "renorm": lambda a, k: a.weight.renorm_(2, 0, 0.3),
    "relu": lambda a, k: F.relu(a.weight, inplace=True),
    "init": lambda a, k: nn.init.constant_(k.weight, 0.5),
    "detached": lambda a, k: a.weight.detach().clamp_(-0.2, 0.2),
    "list": numbers,
}


class Pair(nn.Module):
    """A layer, a frozen one beside it, and what is written to them in each forward."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(7, 5), nn.Linear(7, 5).requires_grad_(False)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.a, self.k)
        return (self.a(x) - self.k(x)).square().mean()


class Pairs(nn.Module):
    """A pair for each of these writes."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.pairs = nn.ModuleDict({n: Pair(WRITES[n]) for n in names})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([pair(x) for pair in self.pairs.values()]).mean()


class Tables(nn.Module):
    """Lookups that scale down the rows that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(8, 4, max_norm=0.5), nn.EmbeddingBag(8, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        ids = x.argsort(1)[:, :2]
        return (self.table(ids) - 1).square().mean() + (self.bag(ids) - 1).square().mean()


Made = tuple[nn.Module, torch.optim.Optimizer]
Result = list[Tensor]


def made_of(make: Callable[[], nn.Module]) -> Made:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def one_device(make: Callable[[], nn.Module], steps: int = 3, every: int = 1) -> Result:
    model, optimizer = made_of(make)
    losses = []
    for i in range(steps):
        losses.append(model(X))
        (losses[-1] / every).backward()
        if i % every == every - 1 or i == steps - 1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(every / (i % every + 1))
            optimizer.step()
            optimizer.zero_grad()
    return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters())]


def captured(make: Callable[[], nn.Module], mesh: mw.Mesh, steps: int = 3, **options: Any) -> Result:
    model, optimizer = made_of(make)
    step = mw.compile_step(model, None, optimizer, X, mesh=mesh, batch={"dp": mw.Shard(0)}, **options)
    losses = torch.stack([mw.unshard(step(X).detach()).clone() for _ in range(steps)])
    if step.program.parts:
        step.flush()
    return [losses, *(mw.unshard(p.detach()) for p in model.parameters())]


def eager(make: Callable[[], nn.Module], mesh: mw.Mesh, layouts: Any = None, **options: Any) -> Result:
    model, optimizer = made_of(make)
    mw.shard_module(model, mesh, layouts or {}, **options)
    mw.shard_optimizer(optimizer)
    losses = []
    for _ in range(3):
        losses.append(model(mw.shard_tensor(X, mesh, {"dp": mw.Shard(0)})))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        torch.stack([mw.unshard(x.detach()) for x in losses]),
        *(mw.unshard(p.detach()) for p in model.parameters()),
    ]


def alike(made: list[Result], want: Result) -> None:
    for result in made:
        for have, one in zip(result, want, strict=True):
            torch.testing.assert_close(have, one, atol=2e-6, rtol=1e-5)


SOME = ("average", "setitem", "view", "transposed", "out", "list")
EVERY = pytest.param(tuple(WRITES), marks=pytest.mark.long)


@pytest.mark.parametrize("names", [SOME, EVERY])
@pytest.mark.parametrize("mesh", [DP, BOTH])
def test_a_captured_step_stores_what_the_forward_wrote(mesh: mw.Mesh, names: tuple[str, ...]) -> None:
    """In the one stored part of each rank, uneven here, as on one device."""

    def make() -> nn.Module:
        return Pairs(*names)

    layouts = TP if mesh is BOTH else {}
    alike(mw.simulate(lambda: captured(make, mesh, 2, layouts=layouts, fsdp="dp"), mesh), one_device(make, 2))


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"passes": [DPO]}])
def test_a_lookup_that_scales_rows(options: dict[str, Any]) -> None:
    alike(mw.simulate(lambda: captured(Tables, DP, fsdp="dp", **options), DP), one_device(Tables))


@pytest.mark.parametrize("over", [{"fsdp": "dp"}, {"shard_states": "dp"}])
def test_passes_take_a_forward_that_writes_to_parameters(over: dict[str, str]) -> None:
    """Also merged: every micro-step writes, and a flush does not write again."""

    def make() -> nn.Module:
        return Pairs("average", "scale", "list")

    alike(mw.simulate(lambda: captured(make, DP, passes=[DPO], **over), DP), one_device(make))
    merged = mw.simulate(lambda: captured(make, DP, 3, passes=[MERGE, DPO], **over), DP)
    alike(merged, one_device(make, 3, 2))


def test_a_lookup_that_scales_rows_merged() -> None:
    with pytest.raises(PassError, match="reads rows of other micro-batches"):  # it has no rule
        mw.simulate(lambda: captured(Tables, DP, 3, passes=[MERGE]), DP)
    passes = [f"{MERGE},weighted=false"]
    alike(mw.simulate(lambda: captured(Tables, DP, 3, passes=passes), DP), one_device(Tables, 3, 2))


def test_only_what_was_recorded_may_write_to_parameters(tmp_path: Path) -> None:
    """Programs that do are saved and loaded; one in which somebody else does is not well formed."""

    def build() -> Program:
        model, optimizer = made_of(lambda: Pair(average))
        batch = {"dp": mw.Shard(0)}
        return mw.compile_step(model, None, optimizer, X, mesh=DP, batch=batch, fsdp="dp").program

    program = mw.simulate(build, DP)[0]
    mw.save_program(program, tmp_path / "step.program")
    mw.check_program(load_program(tmp_path / "step.program"))
    (write, *_) = [n for n in program.graph.nodes if info_of(n).writes]
    annotate(write, writes=False)
    with pytest.raises(ProgramError, match=r"copy_.*which is part of the forward, writes to param"):
        mw.check_program(program)


class Norms(nn.Module):
    """Lists of tensors in the forward: norms, sums, and writes to values of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.k = nn.Linear(7, 5), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        total = nn.utils.get_total_norm([self.a.weight, self.a.bias])
        most = torch._foreach_norm([self.k.weight, self.a.weight], float("inf"))[1]
        sums = torch._foreach_add([self.a.weight, self.a.bias], [self.k.weight, self.k.bias], alpha=2)
        y = self.a(x)
        torch._foreach_mul_([z := y * 1, y], [0.9, 0.5])
        return (z + y).square().mean() + total + most + (sums[0].sum() + sums[1].sum()).sin()  # type: ignore[no-any-return]


def test_lists_of_tensors_in_a_captured_forward() -> None:
    alike(mw.simulate(lambda: captured(Norms, BOTH, layouts=TP, fsdp="dp"), BOTH), one_device(Norms))


# ---------------------------------------------------------------------------------------------- eager, inside a unit


class Own(nn.Linear):
    """A layer that does something with its own parameters before it uses them."""

    def __init__(self, change: Callable[[nn.Linear], Any], trained: bool = True) -> None:
        super().__init__(7, 5)
        self.change = change
        self.weight.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        found = self.change(self)
        y = F.linear(x, self.weight, self.bias)
        return y * found if isinstance(found, Tensor) else y


def unit(change: Callable[[nn.Linear], Any], trained: bool = True) -> nn.Module:
    layers = nn.ModuleList([Own(change, trained), nn.Linear(5, 3)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)).square().mean()  # type: ignore[no-any-return]

    return Net()


def several(own: nn.Linear) -> Tensor:
    """Writes by all ways, one after the other, and reads in between."""
    w = own.weight
    with torch.no_grad():
        first = w.view(-1)
        first[:5].mul_(0.5)
        assert w.add_(0.1) is w
        w.view(-1)[3:9].mul_(0.5)
        w.detach().mul_(0.9)
        w.t().mul_(1.1)
        torch._foreach_mul_([w, own.bias], 0.9)
        torch.mul(w, 0.9, out=w)
        return first.sum() + w.data.sum() + float(w.detach().max())  # type: ignore[no-any-return]


def quietly(write: Write) -> Callable[[nn.Linear], None]:
    def change(own: nn.Linear) -> None:
        with torch.no_grad():
            write(own, own)

    return change


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_what_a_unit_writes_to_its_own_parameters(reshard_after_forward: bool) -> None:
    """Through views, by name of the argument, by functions that change their argument: as on one device."""
    layouts = {"layers.0.weight": {"tp": mw.Shard(0)}}
    changes = [several, *(quietly(WRITES[n]) for n in ("setitem", "rows", "chunk", "relu", "init", "detached"))]
    changes.append(lambda own: quietly(lambda a, k: nn.init.constant_(tensor=a.weight, val=0.5))(own))
    for change in changes:

        def make(change: Any = change) -> nn.Module:
            return unit(change)

        def both(make: Any = make) -> Result:
            return eager(make, BOTH, layouts, fsdp="dp", reshard_after_forward=reshard_after_forward)

        alike(mw.simulate(both, BOTH), one_device(make))


def test_lookups_that_scale_rows_eagerly() -> None:
    alike(mw.simulate(lambda: eager(Tables, DP, fsdp="dp"), DP), one_device(Tables))

    def looked(mesh: mw.Mesh | None) -> Result:
        model, _ = made_of(Tables)
        if mesh is not None:
            mw.shard_module(model, mesh, fsdp="dp")
        with torch.inference_mode():
            model(X if mesh is None else mw.shard_tensor(X, mesh, {"dp": mw.Shard(0)}))
        return [mw.unshard(p.detach()) for p in model.parameters()]

    alike(mw.simulate(lambda: looked(DP), DP), looked(None))


@pytest.mark.parametrize(
    ("change", "trained", "words"),
    [
        (lambda own: own.weight.view(-1)[:5].zero_(), True, "leaf Variable that requires grad is being"),
        (lambda own: F.relu(own.weight, inplace=True), True, "leaf Variable that requires grad is being"),
        (lambda own: own.weight.mul_(2), True, "leaf Variable that requires grad is being"),
        (lambda own: own.weight.view(-1)[:5].zero_(), False, ""),
    ],
)
def test_writes_that_gradients_are_recorded_of(change: Any, trained: bool, words: str) -> None:
    """Refused as on one device, on every rank; those to frozen parameters are not."""

    def make() -> nn.Module:
        return unit(change, trained)

    if words:
        for run in (lambda: one_device(make), lambda: mw.simulate(lambda: eager(make, DP, fsdp="dp"), DP)):
            with pytest.raises(RuntimeError, match=words):
                run()
    else:
        alike(mw.simulate(lambda: eager(make, DP, fsdp="dp"), DP), one_device(make))


@pytest.mark.parametrize("recorded", [True, False])
def test_data_in_a_captured_forward_is_named(recorded: bool) -> None:
    def scale(own: nn.Linear) -> None:
        with torch.set_grad_enabled(recorded):
            own.weight.data.clamp_(-0.2, 0.2)  # the line

    line = scale.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError, match=rf"test_forward_writes.py:{line}: the model uses .data.*say .detach"):
        mw.simulate(lambda: captured(lambda: unit(scale), DP), DP)
