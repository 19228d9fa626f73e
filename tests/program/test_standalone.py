"""Steps as Python files: run without Meshwright on real processes, they give the same bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import ProgramError
from meshwright.program.standalone.functions import wrapped
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from tests.program.test_program import CNN, classes, images
from tests.support.processes import run_processes

STEPS = 3
DRIVER = """
import importlib.util, os, sys
from pathlib import Path
import torch, torch.distributed as dist

world = int(os.environ["WORLD_SIZE"])
rank = next((r for r in range(world) if os.fork() == 0), None)  # PyTorch is imported once for all ranks
if rank is None:
    sys.exit(max(os.wait()[1] for _ in range(world)) != 0)
os.environ["RANK"] = str(rank)
dist.init_process_group("gloo")
torch.set_num_threads(1)
for path in map(Path, sys.argv[1:]):
    spec = importlib.util.spec_from_file_location(path.parent.name.replace(" ", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    w, losses = module.load(), []
    with torch.no_grad():
        for batch in torch.load(path.with_name("batches.pt"), weights_only=True):
            loss = module.step(w, batch)
            losses.append(loss.clone() if isinstance(loss, torch.Tensor) else loss)
    torch.save((losses, w), path.with_name(f"got.rank{dist.get_rank()}.pt"))
assert "meshwright" not in sys.modules
dist.destroy_process_group()
"""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def pairs(rows: int) -> list[Any]:
    return [(torch.randn(rows, 4), torch.randn(rows, 1)) for _ in range(STEPS + 1)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def gpt(layers: int = 2, **more: Any) -> nn.Module:
    return GPT(StepConfig(layers=layers, hidden=16, heads=2, seq=8, **more))


def tokens() -> list[Any]:
    return [(torch.randint(0, 256, (4, 8)), torch.randint(0, 256, (4, 8))) for _ in range(STEPS + 1)]


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, *batch)


def planned(
    axes: dict[str, int], experts: bool = False, sequence_parallel: bool = False, **more: Any
) -> dict[str, Any]:
    plan = plan_for(mw.Mesh(axes), experts=experts, sequence_parallel=sequence_parallel)
    return {"layouts": plan.layouts, "batch": plan.batch, "inputs": plan.inputs, "outputs": plan.outputs, **more}


class Sums(nn.Module):
    """Sums along a sharded dim, whose rows cross from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).cumsum(-1).roll(1, -1))


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("standalone_tests::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return scaled(x, by) + 0


@scale.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, grad: (scale(grad, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


class Scaled(nn.Module):
    """Calls a custom op of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(scale(self.up(x), 0.5))


DP = {"dp": mw.Shard(0)}
DP_TP, DP_EP, EP, PP, TWO = {"dp": 2, "tp": 2}, {"dp": 2, "ep": 2}, {"ep": 2}, {"pp": 2}, {"tp": 2}
PIPELINE = "pipeline:micro_batches=4,schedule=1f1b"
BOTH_PASSES = ["data-parallel-optimization", "gradient-merge:k_steps=2"]
TP = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
# name to (mesh, model, loss, batches, optimizer, options)
CASES: dict[str, tuple[dict[str, int], Any, Any, Any, Any, dict[str, Any]]] = {
    "dp": ({"dp": 2}, mlp, squares, lambda: pairs(6), sgd, {"batch": DP}),
    "uneven": ({"dp": 2}, mlp, squares, lambda: pairs(5), adamw, {"batch": DP}),
    "one row": ({"dp": 2}, mlp, squares, lambda: pairs(1), sgd, {"batch": DP}),
    "tp": ({"tp": 2}, mlp, squares, lambda: pairs(3), adamw, {"layouts": TP}),
    "rows that cross": ({"tp": 2}, Sums, squares, lambda: pairs(3), sgd, {"layouts": {"up.*": {"tp": mw.Shard(0)}}}),
    "zero 3": ({"dp": 2}, mlp, squares, lambda: pairs(4), adamw, {"batch": DP, "fsdp": "dp", "clip_grad_norm": 0.1}),
    "custom op": ({"dp": 2}, Scaled, squares, lambda: pairs(4), sgd, {"batch": DP}),
    "pipeline": (PP, lambda: gpt(4), next_token, tokens, adamw, {"stages": {"pp": "blocks"}, "passes": [PIPELINE]}),
    "experts": (EP, lambda: gpt(experts=4), next_token, tokens, adamw, planned(EP, experts=True)),
    "gpt": (
        DP_TP,
        lambda: gpt(1),
        next_token,
        tokens,
        adamw,
        planned(
            DP_TP, fsdp="dp", passes=BOTH_PASSES, precision=mw.Precision(compute=torch.bfloat16), clip_grad_norm=1.0
        ),
    ),
    "sequence parallel": (TWO, lambda: gpt(1), next_token, tokens, sgd, planned(TWO, sequence_parallel=True)),
    "experts of four": (DP_EP, lambda: gpt(1, experts=4), next_token, tokens, sgd, planned(DP_EP, experts=True)),
    "images": ({"dp": 2}, CNN, classes, lambda: images(STEPS + 1), adamw, {"batch": DP}),
}


def written(folder: Path, world: int) -> list[Path]:
    """The files of the cases of this many ranks, with what the captured steps give after they were written."""
    names = [n for n, (axes, *_) in CASES.items() if torch.Size(axes.values()).numel() == world]
    if world > 2:  # simulated ranks add three numbers in another order than gloo
        return run_processes(write_all, world, folder, names)[0]
    return [
        mw.simulate(lambda n=name: write(folder, n, mw.Mesh(CASES[n][0])), mw.Mesh(CASES[name][0]))[0] for name in names
    ]


def write_all(folder: Path, names: list[str]) -> list[Path]:
    return [write(folder, name, mw.init_mesh(CASES[name][0])) for name in names]


def write(folder: Path, name: str, mesh: mw.Mesh) -> Path:
    _, make, loss_fn, data, optimize, options = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer, batches = optimize(model.parameters()), data()
    step = mw.compile_step(model, loss_fn, optimizer, batches[0], mesh=mesh, **options)
    for _ in range(2 if "passes" in options else 1):  # whole updates
        step(batches[0])
    path = step.to_python(folder / name / "step.py")
    losses = [step(batch).item() for batch in batches[1:]]
    held = dict((*model.named_parameters(), *model.named_buffers()))
    with torch.no_grad():
        tensors = {n: t.to_local().clone() if isinstance(t, mw.DistTensor) else t.clone() for n, t in held.items()}
    torch.save((losses, tensors), path.with_name(f"want.rank{mw.rank()}.pt"))
    if mw.rank() == 0:
        torch.save(batches[1:], path.with_name("batches.pt"))
    return path


def run_alone(folder: Path, world: int, paths: list[Path]) -> None:
    """Run files on gloo processes that cannot import this package."""
    (folder / "meshwright").mkdir()
    (folder / "meshwright" / "__init__.py").write_text("raise ImportError('this file needs only torch')")
    (folder / "driver.py").write_text(DRIVER)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["OMP_NUM_THREADS"] = "1"
    env.pop("PYTHONPATH", None)
    command = [sys.executable, str(folder / "driver.py"), *map(str, paths)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def check(path: Path, world: int) -> None:
    for rank in range(world):
        losses, want = torch.load(path.with_name(f"want.rank{rank}.pt"))
        found, got = torch.load(path.with_name(f"got.rank{rank}.pt"))
        assert [loss.item() for loss in found] == losses, path.parent.name
        for name, t in want.items():
            assert torch.equal(got[name], t), f"{path.parent.name}: {name} on rank {rank}"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As on the ranks that run files: more threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.processes
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("world", [2, 4])
def test_written_steps_give_the_same_bits_without_meshwright(world: int, tmp_path: Path) -> None:
    paths = written(tmp_path, world)
    run_alone(tmp_path, world, paths)
    for path in paths:
        check(path, world)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "inductor"}, "its local ops are compiled"),
        ({"precision": mw.Precision(grad_comm=mw.Float8())}, "needs the collective wire_"),
    ],
)
def test_a_step_that_no_file_can_hold_is_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    def write() -> None:
        torch.manual_seed(0)
        model = mlp()
        optimizer, batch = sgd(model.parameters()), pairs(4)[0]
        step = mw.compile_step(model, squares, optimizer, batch, mesh=mw.Mesh({"dp": 2}), batch=DP, **options)
        step.to_python(tmp_path / "step.py")

    with pytest.raises(ProgramError, match=message):
        mw.simulate(write, mw.Mesh({"dp": 2}))


def test_an_op_that_torch_does_not_have_is_named(tmp_path: Path) -> None:
    @torch.library.custom_op("standalone_tests::inner", mutates_args=())
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    inner.register_fake(torch.empty_like)
    inner.register_autograd(lambda ctx, grad: grad)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(inner(model(batch[0])), batch[1])

    def write() -> None:
        model = mlp()
        options: dict[str, Any] = {"mesh": mw.Mesh({"dp": 2}), "batch": DP}
        step = mw.compile_step(model, loss, sgd(model.parameters()), pairs(4)[0], **options)
        step.to_python(tmp_path / "step.py")

    with pytest.raises(ProgramError, match=r"inner does not stand at the top of a module .*test_standalone.py:"):
        mw.simulate(write, mw.Mesh({"dp": 2}))


def test_lines_end_outside_of_strings() -> None:
    inner = ", ".join(f'w["key {i} of the step"]' for i in range(12))
    lines = list(wrapped("    y = f(", inner, ")"))
    assert len(lines) > 3
    assert all(line.count('"') % 2 == 0 for line in lines)
    assert (
        "".join(line.strip() + " " for line in lines).replace("( ", "(").replace(" )", ")").strip() == f"y = f({inner})"
    )


def test_a_program_for_many_sizes_is_named(tmp_path: Path) -> None:
    def write() -> None:
        model = mlp()
        options: dict[str, Any] = {"mesh": mw.Mesh({"dp": 2}), "batch": DP}
        step = mw.compile_step(model, squares, sgd(model.parameters()), pairs(4)[0], **options)
        step.to_python(tmp_path / "first.py")
        for rows in (6, 8, 10, 12):
            step(pairs(rows)[0])
        step.to_python(tmp_path / "step.py")

    with pytest.raises(ProgramError, match="serves batches of many sizes"):
        mw.simulate(write, mw.Mesh({"dp": 2}))


def test_parts_share_the_functions_of_equal_blocks(tmp_path: Path) -> None:
    def write() -> str:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 1))
        options: dict[str, Any] = {"mesh": mw.Mesh({"dp": 2}), "batch": DP, "passes": ["gradient-merge:k_steps=2"]}
        step = mw.compile_step(model, squares, sgd(model.parameters()), pairs(4)[0], **options)
        return step.to_python(tmp_path / "step.py").read_text()

    text = mw.simulate(write, mw.Mesh({"dp": 2}))[0]
    forward = [line for line in text.splitlines() if line.startswith("def ") and "forward" in line]
    assert len(forward) == 1
    assert text.count(forward[0].removeprefix("def ").partition("(")[0] + "(") == 1 + 2 * 4


def test_gradients_enter_their_bucket_next_to_their_module(tmp_path: Path) -> None:
    def write() -> str:
        model = mlp()
        options: dict[str, Any] = {"mesh": mw.Mesh({"dp": 2}), "batch": DP, "passes": BOTH_PASSES}
        step = mw.compile_step(model, squares, sgd(model.parameters()), pairs(4)[0], **options)
        return step.to_python(tmp_path / "step.py").read_text()

    lines = mw.simulate(write, mw.Mesh({"dp": 2}))[0].splitlines()
    copies = [i for i, line in enumerate(lines) if "place_of_" in line and ".copy_(" in line]
    assert len(copies) >= 4
    for i in copies:  # its comment is that of the module whose gradient it is
        section = next(line for line in reversed(lines[:i]) if line.startswith("    # "))
        assert section.strip("# ").startswith(("0 (Linear)", "2 (Linear)", "4 (Linear)")), section
    assert any("grad_bucket = aten.empty" in line for line in lines)


def test_repeated_blocks_are_functions(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def write() -> str:
        model, batch = Net(), pairs(4)[0]
        options: dict[str, Any] = {"mesh": mw.Mesh({"dp": 2}), "batch": DP}
        return (
            mw.compile_step(model, squares, sgd(model.parameters()), batch, **options)
            .to_python(tmp_path / "step.py")
            .read_text()
        )

    text = mw.simulate(write, mw.Mesh({"dp": 2}))[0]
    assert text.count("layers_backward(w, ") >= 3
    assert 'w[f"layers.{i}.0.weight"]' in text
    assert "test_standalone.py:" in text
    assert "<dp: Shard(0)>" in text
