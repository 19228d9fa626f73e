"""Captured steps against one device, on simulated ranks: models, batches, optimizers, layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.program import compile as steps
from meshwright.program.ir.nodes import checked_value, info_of
from tests.support.programs import DP, MESH, MLP, TP, compare, pairs, squares

# ---------------------------------------------------------------------------------------------- the GPT

GPT_RUNS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {}),
    ({"dp": 4}, {}),
    ({"tp": 4}, {"hidden": 48, "heads": 8}),
    ({"tp": 3}, {}),
    ({"tp": 4}, {"heads": 6}),  # heads that do not divide
    ({"dp": 2, "tp": 2}, {"sequence_parallel": True}),
    ({"dp": 2, "tp": 2}, {"tie": True}),
    ({"dp": 2, "tp": 2}, {"fsdp": "dp"}),
    ({"dp": 2, "tp": 2}, {"fsdp": "dp", "reshard_after_forward": False}),
    ({"dp": 2, "tp": 2}, {"shard_states": "dp", "clip": 0.5}),
    ({"dp": 2, "tp": 2}, {"dropout": 0.1}),
]


@pytest.mark.thin(6)
@pytest.mark.parametrize(("axes", "more"), GPT_RUNS, ids=str)
@pytest.mark.filterwarnings("ignore")  # of gathers, where nothing is divisible
def test_gpt(axes: dict[str, int], more: dict[str, Any]) -> None:
    from meshwright.train.config import TrainConfig
    from meshwright.train.model import GPT, loss_of
    from meshwright.train.plan import plan_for

    sizes: dict[str, Any] = {"layers": 2, "hidden": 48, "heads": 6, "seq": 18, "batch": 6, "dtype": "float64"}
    step = {k: more[k] for k in ("fsdp", "reshard_after_forward", "shard_states") if k in more}
    sizes |= {k: v for k, v in more.items() if k in ("hidden", "heads", "tie", "dropout")}
    config = TrainConfig(mesh=tuple(axes.items()), **sizes)
    mesh = mw.Mesh(axes)
    plan = plan_for(mesh, sequence_parallel=more.get("sequence_parallel", False), tie=config.tie)
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(0, 256, (6, 18), generator=g) for _ in "xy") for _ in range(4)]
    compare(
        lambda: GPT(config), lambda m, b: loss_of(m, *b), batches, mesh, layouts=plan.layouts, batch=plan.batch,
        inputs=plan.inputs, outputs=plan.outputs, clip=more.get("clip"), **step,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- optimizers


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "sgd dampening": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd maximize": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.5, maximize=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, betas=(0.8, 0.95)),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2),  # not in the program: after it
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.thin(2)
def test_optimizers_and_schedulers(name: str) -> None:
    runs = compare(MLP, squares, pairs(6), MESH, OPTIMIZERS[name], halving, layouts=TP, batch=DP)
    program = runs[0].program
    assert program is not None
    assert bool(program.update) is (name not in ("sgd dampening", "rmsprop", "adagrad"))


def test_parameter_groups() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        return torch.optim.AdamW(
            [{"params": listed[:1], "lr": 1e-3, "weight_decay": 0.0}, {"params": listed[1:], "betas": (0.5, 0.9)}],
            lr=1e-2,
        )

    runs = compare(MLP, squares, pairs(4), MESH, optimizer, halving, layouts=TP, batch=DP)
    assert [i.name for i in runs[0].program.inputs if i.kind == "hyper"] == ["lr.0", "lr.1"]  # type: ignore[union-attr]


def test_a_scheduler_does_not_recapture(monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted(monkeypatch)
    compare(MLP, squares, pairs(6), mw.Mesh({"dp": 2}), scheduler=halving, batch=DP)
    assert len(built) == 2  # once per rank


def test_a_scheduler_may_be_made_after_the_capture_and_note_what_it_likes() -> None:
    def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8, cycle_momentum=False)

    compare(MLP, squares, pairs(6), mw.Mesh({"dp": 2}), scheduler=one_cycle, batch=DP)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile_step(model, squares, optimizer, pairs(1)[0], mesh=mw.Mesh({"dp": 1}))
    one_cycle(optimizer)
    step(pairs(1)[0])


def test_clipping() -> None:
    compare(MLP, squares, pairs(4), MESH, clip=0.1, layouts=TP, batch=DP)


def test_no_optimizer_gives_gradients() -> None:
    batch = pairs(1)[0]
    torch.manual_seed(0)
    model = MLP()
    start = copy.deepcopy(model.state_dict())
    squares(model, batch).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}

    def rank() -> dict[str, Tensor]:
        own = MLP()
        own.load_state_dict(start)
        step = mw.compile_step(own, squares, None, batch, mesh=MESH, layouts=TP, batch=DP)
        step(batch)
        return {n: mw.unshard(p.grad) for n, p in own.named_parameters()}

    for got in mw.simulate(rank, MESH):
        for name, want in wanted.items():
            torch.testing.assert_close(got[name], want)


# ---------------------------------------------------------------------------------------------- models


class CNN(nn.Module):
    """Convolution, batch norm (buffers that the forward writes to), pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
        self.norm = nn.BatchNorm2d(4, dtype=torch.float64)
        self.head = nn.Linear(4, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def images(n: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(8, 3, 6, 6, generator=g, dtype=torch.float64),
            "y": torch.randint(0, 5, (8,), generator=g),
        }
        for _ in range(n)
    ]


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}], ids=str)
def test_batch_norm_and_dict_batches(axes: dict[str, int]) -> None:
    runs = compare(CNN, classes, images(4), mw.Mesh(axes), batch=DP)
    kept = {i.name for i in runs[0].program.inputs if i.kind == "buffer"}  # type: ignore[union-attr]
    assert kept == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class Tied(nn.Module):
    """One weight as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(12, 8, dtype=torch.float64)
        self.mid = MLP()
        self.head = nn.Linear(8, 12, bias=False, dtype=torch.float64)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mid(self.tokens(x)))


@pytest.mark.parametrize("placement", [0, 1, None])
def test_tied_weights(placement: int | None) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(0, 12, (4, 5), generator=g) for _ in "xy") for _ in range(3)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    layouts = {"tokens.weight": {"tp": mw.Shard(placement)}} if placement is not None else {}
    runs = compare(Tied, loss_fn, batches, MESH, layouts=layouts, batch=DP)
    grads = [n for n in runs[0].program.graph.nodes if info_of(n).grad_of]  # type: ignore[union-attr]
    assert [p for n in grads for p, _ in info_of(n).grad_of].count("tokens.weight") == 1  # summed, then reduced once


@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_dropout_masks_belong_to_elements(axes: dict[str, int]) -> None:
    layouts = TP if "tp" in axes else {}
    compare(
        lambda: MLP(dropout=0.3), squares, pairs(4), mw.Mesh(axes), layouts=layouts, batch=DP if "dp" in axes else None
    )


class Frozen(MLP):
    """A parameter that does not learn, and one that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up.bias.requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))


def test_frozen_and_unused_parameters() -> None:
    runs = compare(Frozen, squares, pairs(3), MESH, layouts=TP, batch=DP)
    torch.testing.assert_close(runs[0].tensors["spare"], torch.ones(3, dtype=torch.float64))


class Guided(MLP):
    """A part of the forward without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up(x).abs().mean()
        return super().forward(x) / (1 + scale)


def test_no_grad_blocks() -> None:
    compare(Guided, squares, pairs(3), MESH, layouts=TP, batch=DP)


class Cast(nn.Module):
    """Autocast inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.down(F.gelu(self.up(x))).float()


def test_autocast() -> None:
    batches = [tuple(t.float() for t in pair) for pair in pairs(3)]
    runs = compare(Cast, squares, batches, MESH, layouts=TP, batch=DP, tolerance=5e-2)
    dtypes = {checked_value(n).dtype for n in runs[0].program.graph.nodes if "addmm" in n.name}  # type: ignore[union-attr]
    assert dtypes == {torch.bfloat16}


class CastOnce(nn.Module):
    """The same call without autocast and with it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.up(x)  # the weight gets its type
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = first + self.up(x).float()
        return first + self.up(x)


def test_autocast_of_one_of_several_calls() -> None:
    batches = [tuple(t.float() for t in pair) for pair in pairs(3)]
    runs = compare(
        CastOnce, squares, batches, MESH, layouts={"up.weight": {"tp": mw.Shard(1)}}, batch=DP, tolerance=5e-2
    )
    graph = runs[0].program.graph  # type: ignore[union-attr]
    dtypes = [checked_value(n).dtype for n in graph.nodes if "mm" in n.name][:3]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]


# ---------------------------------------------------------------------------------------------- batches and losses


def test_batches_with_other_leaves() -> None:
    """Numbers and strings in a batch are constants of the program."""
    batches = [{"pair": pair, "scale": 3.0, "kind": "plain"} for pair in pairs(3)]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        assert batch["kind"] == "plain"
        return squares(model, batch["pair"]) * batch["scale"]

    compare(MLP, loss_fn, batches, MESH, layouts=TP, batch=DP)


def test_results_beside_the_loss() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        out = model(batch[0])
        return {"loss": ((out - batch[1]) ** 2).mean(), "out": out, "largest": out.abs().amax()}

    batches = pairs(2)
    seen: list[Any] = []

    def after(step: Any, batches: Any) -> None:
        before = step.model.down.bias.detach().clone()
        made = step(batches[0])
        assert list(made) == ["loss", "out", "largest"]
        assert made["out"].shape == (6, 8)
        torch.testing.assert_close(mw.unshard(made["out"]).abs().amax(), mw.unshard(made["largest"]))
        assert not torch.equal(mw.unshard(before), mw.unshard(step.model.down.bias.detach()))
        seen.append(True)

    torch.manual_seed(0)
    start = MLP().state_dict()

    def rank() -> None:
        from tests.support.programs import captured

        own = MLP()
        own.load_state_dict(start)
        captured(own, loss_fn, torch.optim.AdamW, batches, MESH, after=after, layouts=TP, batch=DP)

    mw.simulate(rank, MESH)
    assert len(seen) == MESH.size


def test_the_model_may_compute_its_loss() -> None:
    class Own(MLP):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return ((super().forward(x) - y) ** 2).mean()

    batches = pairs(2)

    def rank() -> list[float]:
        torch.manual_seed(0)
        own = Own()
        step = mw.compile_step(own, None, torch.optim.SGD(own.parameters(), lr=0.1), batches[0], mesh=MESH, batch=DP)
        return [step(b).item() for b in batches]

    torch.manual_seed(0)
    model = Own()
    assert mw.simulate(rank, MESH)[3][0] == pytest.approx(model(*batches[0]).item(), rel=1e-12)


def test_eval_computes_the_loss_only() -> None:
    batches = pairs(3)
    torch.manual_seed(0)
    model = MLP(dropout=0.5)
    start = copy.deepcopy(model.state_dict())
    model.eval()
    wanted = squares(model, batches[0]).item()

    def rank() -> tuple[list[float], int, str]:
        own = MLP(dropout=0.5)
        own.load_state_dict(start)
        step = mw.compile_step(
            own, squares, torch.optim.AdamW(own.parameters()), batches[0], mesh=MESH, layouts=TP, batch=DP
        )
        step.eval()
        made = [step(batches[0]).item() for _ in range(2)]
        roles = {info_of(n).role for n in step.program.graph.nodes if n.op == "call_function"}
        mw.check_program(step.program)
        step.train()
        before = mw.unshard(own.up.weight.detach()).clone()
        step(batches[0])
        assert not torch.equal(before, mw.unshard(own.up.weight.detach()))
        return made, len(step._ready), ",".join(sorted(roles))

    for made, programs, roles in mw.simulate(rank, MESH):
        assert made == pytest.approx([wanted, wanted], rel=1e-12)
        assert (programs, roles) == (2, "forward")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each build."""
    built: list[int] = []
    right = steps.build

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(1)
        return right(*args, **kwargs)

    monkeypatch.setattr(steps, "build", build)
    return built


def test_another_batch_shape_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = counted(monkeypatch)
    large, small = pairs(4), pairs(4, batch=3)
    batches = [large[0], small[0], large[1], small[1], large[2], small[2]]
    compare(MLP, squares, batches, MESH, layouts=TP, batch=DP)
    assert len(built) == 2 * MESH.size


def test_sharded_batches_are_taken_as_they_are() -> None:
    batches = pairs(3)

    def rank() -> tuple[list[float], list[float]]:
        made = []
        for shard in (False, True):
            torch.manual_seed(0)
            own = MLP()
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
            step = mw.compile_step(own, squares, optimizer, batches[0], mesh=MESH, layouts=TP, batch=DP)
            listed = [tuple(mw.shard_tensor(t, MESH, DP) if shard else t for t in b) for b in batches]
            made.append([step(b).item() for b in listed])
        return made[0], made[1]

    for plain, sharded in mw.simulate(rank, MESH):
        assert plain == sharded


def test_meta_models_are_made_shard_by_shard() -> None:
    batches = pairs(2)
    torch.manual_seed(5)
    wanted = squares(MLP(), batches[0]).item()

    def rank() -> float:
        torch.manual_seed(5)
        with torch.device("meta"):
            own = MLP()
        step = mw.compile_step(
            own, squares, torch.optim.AdamW(own.parameters()), batches[0], mesh=MESH, layouts=TP, batch=DP
        )
        assert isinstance(own.up.weight, mw.DistTensor)
        return float(step(batches[0]).item())

    assert mw.simulate(rank, MESH) == pytest.approx([wanted] * 4, rel=1e-12)


# ---------------------------------------------------------------------------------------------- states


def test_states_are_the_optimizers_own() -> None:
    """Parameters and states are updated in place: what was saved goes on elsewhere."""
    batches = pairs(6)

    def rank() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        own = MLP()
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        step = mw.compile_step(own, squares, optimizer, batches[0], mesh=MESH, layouts=TP, batch=DP)
        held = own.up.weight
        for b in batches[:3]:
            step(b)
        assert own.up.weight is held
        saved = copy.deepcopy((own.state_dict(), optimizer.state_dict()))
        one = [step(b).item() for b in batches[3:]]
        own.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return one, [step(b).item() for b in batches[3:]]

    for one, other in mw.simulate(rank, MESH):
        assert one == other


class Scaled(nn.Module):
    """Reads a buffer in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("factor", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        return h if self.training else h * self.factor


@pytest.mark.parametrize("change", ["eval", "freeze the norm"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_buffers_stay_as_the_first_capture_left_them(axes: dict[str, int], change: str) -> None:
    data = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mesh = mw.Mesh(axes)

    def run(captured: bool) -> list[float]:
        torch.manual_seed(0)
        model = Scaled().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = lambda m, x: m(x).square().mean()  # noqa: E731
        step: Any = None
        if captured:
            batch = {"dp": mw.Shard(0)} if "dp" in axes else {}
            layouts = {"up.weight": {"tp": mw.Shard(0)}}
            step = mw.compile_step(model, loss_fn, optimizer, data, mesh=mesh, layouts=layouts, batch=batch)
        losses = []
        for i in range(4):
            if i == 2:
                (step or model).eval() if change == "eval" else model.norm.eval()
            if step is not None:
                losses.append(step(data).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, data)
            losses.append(loss.item())
            if model.training:
                loss.backward()
                optimizer.step()
        return losses

    want = run(False)
    for got in mw.simulate(lambda: run(True), mesh):
        assert got == pytest.approx(want, rel=1e-12)


def test_autocast_of_a_convolution_behind_another_op() -> None:
    """Its input is in the low precision, its weight and bias are not yet."""
    mesh, x = mw.Mesh({"dp": 2}), torch.randn(4, 2, 6)

    def trained(captured: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Conv1d(3, 2, 3))

        def loss(m: nn.Module, b: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return m(b).float().square().mean()  # type: ignore[no-any-return]

        if not captured:
            return loss(model, x).detach()
        step = mw.compile_step(model, loss, None, x, mesh=mesh, batch={"dp": mw.Shard(0)})
        return mw.unshard(step(x).detach())

    for got in mw.simulate(lambda: trained(True), mesh):
        torch.testing.assert_close(got, trained(False), rtol=2e-2, atol=1e-3)
