"""Stages of a pipeline, uncut: parameters and states at their stage, seen by all; equal to one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import CaptureError, LayoutError, MeshwrightError
from meshwright.program.ir.edges import edges
from meshwright.program.ir.nodes import info_of
from meshwright.ranks import runtime
from tests.support.processes import run_processes
from tests.support.stages import DP, STAGES, TP, Net, captured, data, loss_of, net, one_device, whole

Tensor = torch.Tensor


def batches(n: int) -> list[Any]:
    return [data(i) for i in range(n)]


CASES = [
    ({"pp": 2}, {}),
    ({"pp": 3}, {"clip": None}),
    ({"dp": 2, "pp": 3}, {"batch": DP, "fsdp": "dp"}),
    ({"pp": 2, "dp": 2, "tp": 2}, {"batch": DP, "layouts": TP, "shard_states": "dp"}),
    ({"pp": 3, "dp": 2}, {"batch": DP, "tie": True, "passes": ["data-parallel-optimization"]}),
    ({"pp": 2, "dp": 2}, {"batch": DP, "loss_scale": 64.0, "fsdp": {"layers.*": "dp"}}),
    ({"pp": 2}, {"stages": {"pp": {"tokens": 0, "layers.[01]": 0, "layers.2": 1, "norm": 1}}}),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("axes", "options"), CASES, ids=str)
def test_equals_one_device(axes: dict[str, int], options: Any) -> None:
    def run() -> Any:
        step, model, _ = captured(mw.Mesh(axes), **options)
        return [step(data(i)).item() for i in range(2)], whole(model)

    losses, wanted = one_device(batches(2), options.get("clip", 0.3), options.get("tie", False))
    for found, params in mw.simulate(run, mw.Mesh(axes)):
        assert found == pytest.approx(losses, abs=1e-14)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def real(axes: dict[str, int]) -> Any:
    step, model, _ = captured(mw.init_mesh(axes), batch=DP)
    return [step(data(i)).item() for i in range(2)], whole(model)


@pytest.mark.processes
def test_real_processes() -> None:
    losses, wanted = one_device(batches(2))
    for found, params in run_processes(real, 4, {"pp": 2, "dp": 2}, timeout=120):
        assert found == pytest.approx(losses, abs=1e-14)
        assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_each_stage_holds_its_own() -> None:
    """Parameters, states and gradients; what is a number is everywhere; nothing is sent for gradients over pp."""

    def run() -> Any:
        step, model, optimizer = captured(mw.Mesh({"pp": 2}), gradients=True)
        step(data(0))
        names = {"tokens.weight": 0, "layers.0.up.weight": 0, "layers.1.down.bias": 0, "layers.2.up.bias": 1}
        for name, stage in {**names, "norm.weight": 1, "head.weight": 1}.items():
            p = model.get_parameter(name)
            here = runtime.RT.rank == stage
            assert p.placements == (mw.At(stage),), name
            for t in (p, p.grad, optimizer.state[p]["exp_avg"]):
                assert t.to_local().numel() == here * p.numel(), name
        assert model.get_parameter("layers.2.gain").placements == (mw.Replicate(),)
        return step.program.kinds, [tuple(c.kinds) for c in step.program.causes if c.op.startswith("gradient of")]

    for kinds, gradients in mw.simulate(run, mw.Mesh({"pp": 2})):
        assert set(kinds) == {"all_gather", "all_reduce"}
        assert kinds["all_reduce"] == 1  # of the norm
        assert not any(gradients)


def _crossing(tie: bool = False, **options: Any) -> list[tuple[int, int, int, str]]:
    step, _, _ = captured(options.pop("mesh"), tie=tie, **options)
    said = [n for n in step.explain().notes if n.startswith("from stage")]
    found = list(edges(step.program))
    assert len(said) == len({(e.src, e.dst) for e in found})
    return [(e.src, e.dst, e.nbytes, info_of(e.node).role) for e in found]


def test_one_value_crosses_each_border_each_way() -> None:
    """Activations and their gradients, b·t·h of a rank's rows; with sequence parallelism, ÷ tp.  Tied weights cross."""
    n = 8 * 5 * 6 * 8 // 2  # rows, positions, width, bytes: a rank's half of the rows, or of the width
    ways = [(0, 1, "forward"), (1, 2, "forward"), (2, 1, "backward"), (1, 0, "backward")]
    narrow: Any = {"layouts": TP, "outputs": {"layers.*": {"tp": mw.Shard(2)}}}
    for axis, options in (("dp", {"batch": DP}), ("tp", narrow)):
        mesh = mw.Mesh({"pp": 3, axis: 2})
        for found in mw.simulate(lambda m=mesh, o=options: _crossing(mesh=m, **o), mesh):
            assert found == [(a, b, n, role) for a, b, role in ways]
    tied = mw.simulate(lambda: _crossing(tie=True, mesh=mw.Mesh({"pp": 2})), mw.Mesh({"pp": 2}))[0]
    assert (0, 1, 11 * 6 * 8, "forward") in tied
    assert (1, 0, 11 * 6 * 8, "backward") in tied


def test_a_checkpoint_of_it_loads_on_another_mesh(tmp_path: Path) -> None:
    """And the other way round; states too: what follows has the numbers of one device."""
    losses, wanted = one_device(batches(4))

    def run(axes: dict[str, int], options: Any, first: int) -> Callable[[], Any]:
        def ranks() -> Any:
            step, model, optimizer = captured(mw.Mesh(axes), **options)
            store = mw.Checkpoints(tmp_path)
            if first:
                assert store.load(model=model, optimizer=optimizer, program=step) == first
            found = [step(data(i)).item() for i in (first, first + 1)]
            if not first:
                store.save(2, model=model, optimizer=optimizer, program=step).wait()
            return found, whole(model)

        return ranks

    plain: Any = {"stages": None, "batch": DP, "fsdp": "dp"}
    ways = [({"pp": 3}, {}), ({"dp": 2}, plain), ({"dp": 2, "pp": 2}, {"batch": DP, "fsdp": "dp"})]
    for saved, loaded in ((0, 1), (1, 2)):
        for folder in tmp_path.iterdir():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        for found, _ in mw.simulate(run(*ways[saved], 0), mw.Mesh(ways[saved][0])):
            assert found == pytest.approx(losses[:2], abs=1e-14)
        for found, params in mw.simulate(run(*ways[loaded], 2), mw.Mesh(ways[loaded][0])):
            assert found == pytest.approx(losses[2:], abs=1e-14)
            assert max((params[n] - wanted[n]).abs().max().item() for n in wanted) < 1e-14


def test_what_users_do_to_it(tmp_path: Path) -> None:
    """Other sizes, micro-steps, the model by itself, other weights, the program as a file, another step of it."""
    mesh = mw.Mesh({"pp": 2})
    passes = ["gradient-merge:k_steps=2"]

    def run() -> None:
        model = net()
        step, mine, _ = captured(mesh, clip=None, passes=passes)
        assert step.eval(data(5, 3)).item() == pytest.approx(loss_of(model, data(5, 3)).item(), abs=1e-14)
        step(data(0))
        assert step.flush()
        with torch.no_grad():
            logits = mw.unshard(mine(data(1)[0]))
        assert logits.shape == (8, 5, 11)
        mine.load_state_dict({n: t.clone() for n, t in model.state_dict().items()})
        assert mine.get_parameter("layers.2.up.weight").placements == (mw.At(1),)
        assert step.eval(data(5)).item() == pytest.approx(loss_of(model, data(5)).item(), abs=1e-14)
        path = tmp_path / str(runtime.RT.rank)
        mw.save_program(step.program, path)
        assert str(mw.load_program(path)) == str(step.program)
        again = mw.compile_step(mine, loss_of, None, data(0), mesh=mesh, stages=STAGES)
        again(data(2))
        loss_of(model, data(2)).backward()
        for name, p in model.named_parameters():
            grad = mine.get_parameter(name).grad
            assert grad is not None
            assert (mw.unshard(grad) - p.grad).abs().max() < 1e-14
        with pytest.raises(CaptureError, match=r"stored at a stage .* give this one the same stages="):
            mw.compile_step(mine, loss_of, None, data(0), mesh=mesh)

    mw.simulate(run, mesh)
    mw.simulate(run, mesh, check=True)


class Backwards(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for i in (0, 2, 1):
            h = self.layers[i](h)
        return self.head(h)


BAD: list[tuple[Any, type[MeshwrightError], str]] = [
    ({"stages": {"pp": "layer"}}, LayoutError, "the model has no module 'layer'; did you mean 'layers'"),
    ({"stages": {"pp": "layers.0"}}, LayoutError, "layers.0 has 2 modules for 3 stages"),
    ({"stages": {"pipe": "layers"}}, MeshwrightError, "pipe"),
    ({"stages": {"pp": {"layer.*": 0}}}, LayoutError, r"'layer\.\*' matches no module"),
    ({"stages": {"pp": {"layers.*": 0, "layers.2": 1}}}, LayoutError, "puts layers.2 at stage 0, 'layers.2' at 1"),
    ({"stages": {"pp": {"layers": 0, "layers.2": 1}}}, LayoutError, "layers.2 is at stage 1, and layers, which has it"),
    ({"stages": {"pp": {"tokens": 0, "layers.*": 1}}}, LayoutError, "no module is at stage 2 of 3"),
    ({"stages": {"pp": {"layers.*": 3}}}, LayoutError, "a stage from 0 to 2 was expected"),
    ({"stages": {"pp": 3}}, LayoutError, 'the name of a list of modules, globs to stages, or "auto"'),
    ({"stages": {"pp": "layers", "dp": "layers"}}, LayoutError, "one mesh axis was expected"),
    ({"batch": {"pp": mw.Shard(0)}}, LayoutError, "batch.0 lies as .* 'pp' is the axis of the stages"),
    ({"fsdp": "pp"}, LayoutError, "is stored over 'pp', the axis of the stages"),
    ({"model": Backwards}, CaptureError, r"layers.1.up is at stage 1 .* a value of layers.2, which is at stage 2"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda x: str(x)[:40])
def test_bad_input(options: Any, error: type[MeshwrightError], message: str) -> None:
    mesh, kind = mw.Mesh({"pp": 3, "dp": 1}), options.get("model", Net)
    given = {"stages": STAGES, **{k: v for k, v in options.items() if k != "model"}}

    def run() -> None:
        with pytest.raises(error, match=message):
            mw.compile_step(kind(), loss_of, None, data(0), mesh=mesh, **given)

    mw.simulate(run, mesh)


def test_a_stage_without_work_is_told() -> None:
    def run() -> None:
        model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mw.compile_step(
            model, lambda m, x: m(x).square().sum(), optimizer, torch.ones(2, 4), mesh=mw.Mesh({"pp": 2}),
            stages={"pp": {"0": 0, "1": 1}},
        )  # fmt: skip

    with pytest.warns(UserWarning, match=r"stage 0 of 'pp' has 0.0% of the work .*, or say stages=\{'pp': \"auto\"\}"):
        mw.simulate(run, mw.Mesh({"pp": 2}))


class Places(torch.nn.Module):
    """Positions are made of a parameter alone, and enter at the first stage; their weight is read at the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layers = torch.nn.Embedding(3, 4), torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.places(torch.arange(3))
        for layer in self.layers:
            h = layer(h).tanh()
        return torch.nn.functional.linear(h, self.places.weight)


def test_a_parameter_is_where_it_is_first_used() -> None:
    def run() -> Any:
        torch.manual_seed(0)
        model, mesh = Places().double(), mw.Mesh({"pp": 2})
        step = mw.compile_step(
            model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.5), x, mesh=mesh,
            stages={"pp": "layers"},
        )  # fmt: skip
        return step(x).item(), model.places.weight.placements, mw.unshard(model.places.weight).detach()

    x = torch.rand(2, 3, 4, dtype=torch.float64)
    torch.manual_seed(0)
    model = Places().double()
    loss = model(x).square().mean()
    loss.backward()
    for got, placements, weight in mw.simulate(run, mw.Mesh({"pp": 2})):
        assert got == pytest.approx(loss.item())
        assert placements == (mw.At(0),)
        torch.testing.assert_close(weight, (model.places.weight - 0.5 * model.places.weight.grad).detach())
