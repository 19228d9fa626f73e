"""Checkpointed regions of captured steps: the numbers of one device, the memory of torch's own checkpoints."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import meshwright as mw
from meshwright.errors import CaptureError
from meshwright.explanation import explain_program
from meshwright.program import Plan, Program, build
from meshwright.program.ir.nodes import info_of
from meshwright.program.run.inductor import Segment, with_inductor
from tests.support.programs import captured, on_one_device

aten = torch.ops.aten
ONE, TWO, FOUR, BOTH = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2}), mw.Mesh({"dp": 4}), mw.Mesh({"dp": 2, "tp": 2})
TP = {"*.up.weight": {"tp": mw.Shard(0)}, "*.up.bias": {"tp": mw.Shard(0)}, "*.down.weight": {"tp": mw.Shard(1)}}
DPO, MERGE = "data-parallel-optimization", "gradient-merge:k_steps=2"
GELU_ONCE = functools.partial(create_selective_checkpoint_contexts, [aten.gelu.default])
Call = Callable[..., Tensor]


def plain(fn: Call, x: Tensor) -> Tensor:
    return fn(x)


def selective(fn: Call, x: Tensor) -> Tensor:
    return checkpoint(fn, x, use_reentrant=False, context_fn=GELU_ONCE)  # type: ignore[no-any-return]


CALLS: dict[str, Call] = {
    "plain": plain,
    "new": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "selective": selective,
}


class Block(nn.Module):
    """A norm with statistics, column and row parallel linears, a write in place and dropout."""

    def __init__(self, width: int, dropout: float, norm: bool, inner: Call) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop, self.inner = nn.Dropout(dropout), inner

    def mlp(self, x: Tensor) -> Tensor:
        return self.drop(self.down(nn.functional.gelu(self.up(x)).relu_()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.mlp, self.norm(x))


class Net(nn.Module):
    def __init__(
        self, how: str = "new", width: int = 8, blocks: int = 2, dropout: float = 0.1, norm: bool = True
    ) -> None:
        super().__init__()
        inner = CALLS["new"] if how == "nested" else plain
        self.first, self.how = nn.Linear(width, width), how
        self.blocks = nn.ModuleList([Block(width, dropout, norm, inner) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)  # type: ignore[no-any-return]
        for block in self.blocks:
            x = CALLS["new" if self.how == "nested" else self.how](block, x)
        return x


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def rows(n: int, i: int, width: int = 8) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(i), dtype=torch.float64)


def made(how: str, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(how, **options).double()


def roles(program: Program) -> set[str]:
    return {info_of(n).role for n in program.graph.nodes if n.op == "call_function"}


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("how", "mesh", "n", "options"),
    [
        ("new", BOTH, 5, {"layouts": TP, "passes": [DPO]}),
        ("reentrant", FOUR, 3, {}),  # the last rank has no row
        ("nested", TWO, 3, {"fsdp": "dp", "passes": [DPO]}),
        pytest.param("nested", BOTH, 4, {"layouts": TP}, marks=pytest.mark.long),
        pytest.param("selective", BOTH, 4, {"layouts": TP}, marks=pytest.mark.long),
        pytest.param("sequential", TWO, 4, {"shard_states": "dp", "passes": [DPO]}, marks=pytest.mark.long),
        pytest.param("new", TWO, 4, {"fsdp": "dp", "reshard_after_forward": False}, marks=pytest.mark.long),
        pytest.param("new", TWO, 4, {"loss_scale": 8.0, "clip_grad_norm": 0.5}, marks=pytest.mark.long),
    ],
    ids=str,
)  # fmt: skip
def test_what_runs_again_changes_no_number(how: str, mesh: mw.Mesh, n: int, options: dict[str, Any]) -> None:
    """Statistics are updated once, dropout drops the same, whatever is run again."""

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    batches = [rows(n, i) for i in range(3)]
    clip: Any = options.get("clip_grad_norm")
    want = on_one_device(made("plain"), squares, sgd, batches, clip=clip)
    options = {"batch": {"dp": mw.Shard(0)}, **options}
    runs = mw.simulate(lambda: captured(made(how), squares, sgd, batches, mesh, **options), mesh)
    mw.check_program([r.program for r in runs])
    for run in runs:
        assert "recomputation" in roles(run.program)
        torch.testing.assert_close(run.losses, want.losses, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(run.tensors, want.tensors, rtol=1e-8, atol=1e-10)


def test_merged_micro_steps_run_regions_again() -> None:
    def run(how: str) -> Any:
        model = made(how, norm=False)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(
            model, squares, opt, rows(4, 0), mesh=TWO, batch={"dp": mw.Shard(0)}, passes=[MERGE, DPO]
        )  # fmt: skip
        torch.manual_seed(3)
        losses = [step(rows(4, i)).item() for i in range(4)]
        if how != "plain":
            assert "recomputation" in roles(step.program.parts["accumulate"])
            assert "recomputation" not in roles(step.program.parts["flush"])
        return losses, [mw.unshard(p).detach().clone() for p in model.parameters()]

    want, got = (mw.simulate(functools.partial(run, how), TWO)[0] for how in ("plain", "new"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "how", ["reentrant", "nested", *(pytest.param(h, marks=pytest.mark.long) for h in ("new", "selective"))]
)
def test_a_step_by_hand(how: str) -> None:
    """Two backwards, masks and noise that are drawn again, statistics that are not."""

    def run(how: str) -> Any:
        model = made(how, width=32, norm=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def by_hand(batch: Tensor) -> Tensor:
            for part in batch.chunk(2):
                loss = squares(model, part + 0.1 * torch.rand_like(part))
                loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        step = mw.capture_local(by_hand, ONE, model=model, optimizer=opt, batch=rows(96, 0, 32))
        mw.check_program(step.program)
        assert ("recomputation" in roles(step.program)) == (how != "plain")
        assert any("set_random_state" in str(n.target) for n in step.program.graph.nodes) == (how != "plain")
        torch.manual_seed(3)
        losses = [step(rows(96, i, 32)).item() for i in range(3)]
        return losses, {k: t.clone() for k, t in model.state_dict().items()}, torch.rand(3)

    want, got = (mw.simulate(functools.partial(run, h), ONE)[0] for h in ("plain", how))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Masked(nn.Module):
    """An outer policy saves what an inner region would have to draw a mask for."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(32, 32), nn.Linear(32, 32), nn.Dropout(0.5)
        products = functools.partial(create_selective_checkpoint_contexts, [aten.mul.Tensor])
        self.outside = functools.partial(CALLS["new"], context_fn=products) if again else plain
        self.inside = CALLS["new"] if again else plain

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.b(self.drop(self.a(x)).sin())).cos()

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(lambda y: self.inside(self.inner, y).sin(), self.a(x))


def by_hand(model: nn.Module, opt: Any) -> Callable[[Tensor], Tensor]:
    """A step of one backward, as users write it."""

    def step(batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step


def test_saved_products_of_masks() -> None:
    def run(again: bool) -> Any:
        torch.manual_seed(0)
        model = Masked(again).double()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.capture_local(by_hand(model, opt), ONE, model=model, optimizer=opt, batch=rows(64, 0, 32))
        torch.manual_seed(1)
        return [step(rows(64, 0, 32)).item() for _ in range(2)], [p.detach().clone() for p in model.parameters()]

    want, got = (mw.simulate(functools.partial(run, again), ONE)[0] for again in (False, True))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Written(nn.Module):
    """Values that a region reads are written to before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8).double()
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def inside(self, x: Tensor, scale: Tensor) -> Tensor:
        y = (x * (self.count * 1.0)).sin() * (scale * 2)
        self.count += 1
        return y.cos() * (self.lin(y) * (self.count * 1.0)).sin()

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full_like(x, 0.5)
        y = CALLS["new"](self.inside, self.lin(x), scale) if self.training else self.inside(self.lin(x), scale)
        scale.mul_(3)
        return y * scale


def test_what_was_written_to_is_not_read_again() -> None:
    torch.manual_seed(0)
    start = Written().state_dict()

    def run() -> Any:
        model = Written()
        model.load_state_dict(start)
        return captured(model, squares, lambda ps: torch.optim.SGD(ps, lr=0.1), [rows(4, 0)] * 3, TWO)

    def unmarked(model: Any, x: Tensor) -> Tensor:
        z = model.lin(x)
        half = torch.full_like(x, 0.5)
        return (model.inside(z, half) * 1.5).square().mean()

    model = Written()
    model.load_state_dict(start)
    want = on_one_device(model, unmarked, lambda ps: torch.optim.SGD(ps, lr=0.1), [rows(4, 0)] * 3)
    got = mw.simulate(run, TWO)[0]
    torch.testing.assert_close((got.losses, got.tensors), (want.losses, want.tensors), rtol=1e-9, atol=1e-12)


def test_a_reentrant_call_without_a_gradient_gives_none() -> None:
    """As torch's own, which warns of it."""

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.down(checkpoint(model.up, x, use_reentrant=True)).square().mean()

    block = Block(8, 0.0, False, plain)
    program = build(block, loss, torch.optim.SGD(block.parameters(), lr=0.1), torch.randn(4, 8), ONE).program
    (update,) = [n for n in program.graph.nodes if "_fused_sgd_" in str(n.target)]
    assert [n.name for n in update.args[0]] == ["p_model_down_weight", "p_model_down_bias"]


# ---------------------------------------------------------------------------------------------- memory


class Live(TorchDispatchMode):
    """Bytes of the storages that are made inside and alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.seen:
                storage = t.untyped_storage()
                self.seen[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self.seen.pop(key, 0)


def peaks(how: str, dropout: float) -> tuple[int, int, int]:
    """Most bytes alive in a step: eager, of ``compile_step``, of ``capture_local``."""

    def made_of() -> Any:
        torch.manual_seed(0)
        model = Net(how, width=32, blocks=5, dropout=dropout, norm=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(512, 32)

    def most(run: Callable[[Tensor], Any], x: Tensor) -> int:
        for mode in (contextlib.nullcontext(), live := Live()):
            with mode:
                run(x)
        return live.peak

    model, opt, x = made_of()
    eager = most(by_hand(model, opt), x)

    def compiled() -> int:
        model, opt, x = made_of()
        return most(mw.compile_step(model, squares, opt, x, mesh=ONE), x)

    def local() -> int:
        model, opt, x = made_of()
        return most(mw.capture_local(by_hand(model, opt), ONE, model=model, optimizer=opt, batch=x), x)

    return eager, *(mw.simulate(f, ONE)[0] for f in (compiled, local))


@pytest.mark.parametrize(
    ("how", "dropout"), [("new", 0.1), *(pytest.param(h, 0.0, marks=pytest.mark.long) for h in ("new", "nested"))]
)
def test_the_peak_is_that_of_torch(how: str, dropout: float) -> None:
    """Within 5 %, of compiled steps and of steps by hand; less than half of what it is without checkpoints.

    Up to torch 2.11 eager code holds more.
    """
    less = 0.05 if "op_output" in inspect.signature(SelectiveCheckpointContext).parameters else 0.1
    eager, *ours = peaks(how, dropout)
    _, *whole = peaks("plain", dropout)
    for peak, most in zip(ours, whole, strict=True):
        assert -less < peak / eager - 1 < 0.05, (eager, ours)
        assert peak < 0.5 * most


def program_of(how: str, train: bool = True, **options: Any) -> Program:
    model = Net(how, norm=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(TP, {"dp": mw.Shard(0)}, **options)
    return build(model, squares, opt, torch.randn(4, 8), BOTH, plan, train=train).program


def test_a_policy_decides_what_is_saved() -> None:
    again = {
        how: {str(n.target) for n in program_of(how).graph.nodes if info_of(n).role == "recomputation"}
        for how in ("new", "selective")
    }
    assert again["new"] - again["selective"] == {"aten.gelu.default", "aten.relu_.default"}  # which writes to it


def test_without_a_backward_nothing_runs_again() -> None:
    assert roles(program_of("new", train=False)) == {"forward"}


# ---------------------------------------------------------------------------------------------- what is seen


def test_explain_shows_both_runs() -> None:
    why = explain_program(program_of("new"))
    forward, again = ([c for c in why.collectives if c.role == role] for role in ("forward", "recomputation"))
    # The sum behind the last linear is not needed again; what it is computed from is.
    assert {c.reason.removeprefix("run again for the backward: ") for c in again} <= {c.reason for c in forward}
    assert all(c.reason.startswith("run again for the backward: ") for c in again)
    assert again
    assert "recomputation all-reduce over tp" in " ".join(why.text().split())
    assert "recomputation" in why.to_html()
    assert sum(t.count for t in why.totals if t.role == "recomputation") == len(again)


def test_a_saved_program_is_the_same(tmp_path: Path) -> None:
    program = program_of("nested", fsdp="dp")
    mw.save_program(program, tmp_path / "step")
    assert str(mw.load_program(tmp_path / "step")) == str(program)


def test_a_compiler_does_not_see_both_runs_at_once() -> None:
    model = Net("nested", norm=False)
    program = build(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8), ONE).program
    first = {n.name for n in program.graph.nodes if info_of(n).role == "forward"}
    again = {n.name for n in program.graph.nodes if info_of(n).role == "recomputation"}
    bodies = [
        {n.name for n in node.target.module.graph.nodes if n.op == "call_function"}
        for node in with_inductor(program).graph.nodes
        if isinstance(node.target, Segment)
    ]
    assert any(b & first for b in bodies)
    assert any(b & again for b in bodies)
    assert not any(b & first and b & again for b in bodies)


def test_contexts_that_a_program_cannot_enter_are_refused() -> None:
    def error(context_fn: Any) -> str:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=False, context_fn=context_fn).square().mean()  # type: ignore[no-any-return]

        model = nn.Linear(4, 4)
        with pytest.raises(CaptureError) as caught:
            build(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 4), ONE)
        return str(caught.value)

    def offload(*_: Any, **__: Any) -> CheckpointPolicy:
        return getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", "elsewhere")  # not in torch 2.10

    assert "saves or recomputes" in error(functools.partial(create_selective_checkpoint_contexts, offload))
    assert "gives no_grad, inference_mode: a captured" in error(lambda: (torch.no_grad(), torch.inference_mode()))


class TwoCalls(nn.Module):
    """Of the second one the backward needs what it reads, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = CALLS["new"](self.part, self.a(x))
        return CALLS["new"](torch.sin, x)


def test_what_is_said_of_what_runs_again() -> None:
    """Three values of 3 x 4 in float32, and two views."""
    model = TwoCalls().to("meta")
    optimizer, plan = torch.optim.SGD(model.parameters()), Plan({}, {"dp": mw.Shard(0)})
    program = build(model, squares, optimizer, torch.zeros(6, 4), TWO, plan).program
    again = [n for n in program.graph.nodes if info_of(n).role == "recomputation"]
    assert [str(n.target._overloadpacket).removeprefix("aten.") for n in again] == ["tanh", "t", "addmm", "tanh", "t"]
    (record,) = (r for r in program.passes if r.name == "recompute")
    assert record.summary == "5 nodes of 2 checkpointed calls run again for the backward"
    assert record.lines == ("they make 144 bytes again on this rank",)
    assert record.details == {"calls": 2, "nodes": 5, "bytes": 144}
    behind = again[-1].next
    assert (behind.target, info_of(behind).role) == (aten.tanh_backward.default, "backward")
