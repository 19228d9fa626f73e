"""`backend="cudagraphs"`: which ops go into graphs, and steps whose graphs are replayed in memory of the CPU.

No GPU takes part. A recording for the CPU follows the rules of a CUDA graph: nothing is computed while recording, a
replay reads and writes the recorded memory only, and what it wrote before is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright.errors import ProgramError
from meshwright.program.ir.nodes import NodeInfo, Value, checked_value
from meshwright.program.run import cuda_graphs
from meshwright.program.run.bind import BACKENDS
from meshwright.program.run.cuda_graphs import GraphSegment, graphs_of
from tests.support.programs import DP, MESH, MLP, TP, compare, pairs, squares

TWO = mw.Mesh({"dp": 2})


class CPURecording:
    """A recording of tensors of the CPU."""

    made: ClassVar[list[CPURecording]] = []

    def __init__(self, fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
        self.fn, self.tensors, self.replays = fn, list(tensors), 0
        before = [t.clone() for t in tensors]
        self.results = fn(*tensors)
        for t, value in zip(tensors, before, strict=True):
            if not bool(((t == value) | (t != t)).all()):  # memory that nobody has written yet may hold NaN
                t.copy_(value)
        own = {t.untyped_storage().data_ptr() for t in tensors}
        self.alone = [t for t in self.results if t.untyped_storage().data_ptr() not in own]
        self._spoil()
        self.made.append(self)

    def _spoil(self) -> None:
        for t in self.alone:
            t.fill_(float("nan") if t.is_floating_point() else 1)

    def replay(self) -> None:
        self.replays += 1
        self._spoil()
        for mine, t in zip(self.results, self.fn(*self.tensors), strict=True):
            if mine.data_ptr() != t.data_ptr():
                mine.copy_(t)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GraphSegment, "recording", CPURecording)
    monkeypatch.setitem(BACKENDS, "inductor", cuda_graphs.with_cuda_graphs)  # the name that a mesh of the CPU takes
    yield
    CPURecording.made.clear()


class Odd(nn.Module):
    """A batch norm, a write in place, views of the batch, a region that runs again, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.up = nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(x).t().reshape(8, -1).t()
        x = checkpoint(lambda t: torch.tanh(self.up(t)), x, use_reentrant=False)
        return self.up(x) + x.expand(2, *x.shape)[0] * self.calls


CASES: dict[str, tuple[Callable[[], nn.Module], mw.Mesh, dict[str, Any]]] = {
    "data parallel": (MLP, TWO, {}),
    "tensor parallel": (MLP, MESH, {"layouts": TP}),
    "dropout": (functools.partial(MLP, dropout=0.4), TWO, {}),
    "ZeRO-3": (MLP, TWO, {"fsdp": "dp"}),
    "offload": (MLP, TWO, {"offload": "cpu"}),
    "merged": (MLP, TWO, {"passes": ["gradient-merge:k_steps=1"]}),
    "overlapped": (MLP, TWO, {"passes": ["data-parallel-optimization:bucket_bytes=100"]}),
    "odd": (Odd, TWO, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_have_the_numbers_of_one_device(case: str) -> None:
    model, mesh, options = CASES[case]
    batch = pairs(5, batch=6)
    compare(model, squares, batch, mesh, batch=DP, backend="inductor", **options)
    assert CPURecording.made
    assert {r.replays for r in CPURecording.made} == {4}  # recorded at the second call, and never again


def test_what_is_kept_outside_has_a_reason() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        q = model.up(F.dropout(batch[0], 0.2)).view(-1, 1, 4, 8)
        return F.scaled_dot_product_attention(q, q, q).square().mean()

    found: dict[str, int] = {}

    def fn() -> str:
        model = MLP()
        step = mw.compile_step(model, loss, torch.optim.AdamW(model.parameters()), pairs(1)[0], mesh=TWO, batch=DP)
        graphs = graphs_of(step.program)
        found.update(graphs.left)
        assert graphs.ops == sum(
            n.op == "call_function" and "getitem" not in n.name
            for s in graphs.segments for n in s.module.graph.nodes
        )  # fmt: skip
        return str(graphs)

    text = mw.simulate(fn, TWO)[0]
    assert set(found) >= {cuda_graphs.COLLECTIVE, cuda_graphs.CPU_MEMORY, cuda_graphs.ATTENTION}, found
    assert "CUDA graphs; outside: " in text
    assert f"{found['collectives']} collectives" in text


def test_what_the_cpu_reads_and_what_moves_stay_outside() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    chooser = object.__new__(cuda_graphs._Chooser)
    chooser.left, chooser.device, chooser.on_cpu = cuda_graphs.Counter(), "cuda", {7}
    chooser.stays, chooser.created, chooser.rewritten = {1}, set(), set()
    aten = torch.ops.aten

    def reason(target: Any, *args: Any, storage: int = 0, **kwargs: Any) -> str:
        x.meta["info"] = NodeInfo("input", value=Value.alone((2,), torch.float32, storage))
        return chooser.reason(graph.call_function(target, (x, *args), kwargs))

    assert reason(aten.nonzero.default) == cuda_graphs.READ_BY_CPU
    assert reason(aten._local_scalar_dense.default) == cuda_graphs.READ_BY_CPU
    assert reason(aten.bernoulli.p, 0.5) == cuda_graphs.DRAWS
    assert reason(aten._to_copy.default, device=torch.device("cpu")) == cuda_graphs.CPU_MEMORY
    assert reason(aten.add.Tensor, 1, storage=7) == cuda_graphs.CPU_MEMORY
    assert reason(aten.add_.Tensor, 1) == cuda_graphs.MOVING
    assert reason(aten.add_.Tensor, 1, storage=1) == ""
    assert reason(aten._to_copy.default, device=torch.device("cuda", 0)) == ""


class OnGPU(TorchDispatchMode):
    """Counts ops, all of whose results are on the GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {k: torch.device("cuda") if k == "device" else v for k, v in (kwargs or {}).items()}
        made = func(*args, **there)  # the mesh that the step was captured for is on the CPU
        assert all(t.device.type == "cuda" for t in tree_leaves(made) if isinstance(t, Tensor)), func
        self.count += 1
        return made


def test_graphs_hold_only_ops_of_the_gpu() -> None:
    """Each graph's ops on fake CUDA tensors: nothing they give is on the CPU, no size depends on values."""
    checked = []

    def fn() -> None:
        for make in (MLP, Odd):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters())
            step = mw.compile_step(model, squares, optimizer, pairs(1)[0], mesh=TWO, batch=DP)
            for node in graphs_of(step.program).program.graph.nodes:
                if isinstance(node.target, GraphSegment):
                    values = [checked_value(n) for n in node.all_input_nodes]
                    with FakeTensorMode(), OnGPU() as seen, torch.no_grad():
                        given = [torch.empty_strided(v.shape, v.strides, dtype=v.dtype, device="cuda") for v in values]
                        node.target.module(*given)
                    checked.append(seen.count - len(given))

    mw.simulate(fn, TWO)
    assert sum(checked) > 40


def test_results_outlive_the_next_step() -> None:
    """Losses, what comes with them and gradients are copies: a replay overwrites the memory of a graph."""

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        out = model(batch[0])
        return (out - batch[1]).square().mean(), out

    def run(backend: str | None) -> list[float]:
        torch.manual_seed(0)
        model = MLP()
        step = mw.compile_step(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), pairs(1)[0], mesh=TWO, batch=DP,
            gradients=True, backend=backend, check=False,
        )  # fmt: skip
        kept = []
        for batch in pairs(4):
            result = step(batch)
            kept += [*result, *(p.grad for p in model.parameters())]
        return [float(mw.unshard(t).sum()) for t in kept]

    def both() -> None:
        assert run("inductor") == pytest.approx(run(None), rel=1e-12)

    mw.simulate(both, TWO)


def _times(w: Tensor, t: Tensor) -> tuple[Tensor]:
    return (w * t,)


def test_memory_that_moved_is_recorded_again_and_then_left_to_the_cpu() -> None:
    module: Any = _times
    weights, x = [torch.full((4,), float(max(i, 2))) for i in range(8)], torch.arange(4.0)
    segment = GraphSegment(module, "s", (True, False))
    for i, weight in enumerate(weights):
        (out,) = segment(weight, x + i)
        assert torch.equal(out, weight * (x + i))
    assert segment.recorded == len(CPURecording.made) == cuda_graphs._MOST


@pytest.mark.parametrize("way", ["expand", "gaps", "unfold", "empty"])
def test_elements_that_share_a_place_are_copied(way: str) -> None:
    module: Any = _times
    segment, one = GraphSegment(module, "s", (False, False)), torch.ones(())
    for i in range(4):
        x = torch.arange(3.0) + i
        t = {"expand": x.expand(2, 3), "gaps": x[::2], "unfold": x.unfold(0, 2, 1), "empty": x[:0]}[way]
        (out,) = segment(t, one)
        assert torch.equal(out, t)
    assert segment.recorded == 1


def test_a_mesh_of_the_cpu_has_no_graphs() -> None:
    model = MLP()
    with pytest.raises(ProgramError, match=r"backend='cudagraphs' needs a mesh of GPUs, .* device='cuda'"):
        mw.compile_step(
            model, squares, torch.optim.SGD(model.parameters()), pairs(1)[0], mesh=mw.Mesh({"dp": 1}), batch=DP,
            backend="cudagraphs",
        )  # fmt: skip
