"""Plans: predicted numbers are those of the program and of a run, to the byte; what is planned is computed right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import LayoutError, MeshwrightError, PlanError, ShardError
from meshwright.layout import LayoutTable
from meshwright.planner.emit import Keeping, Layouts, table_of
from meshwright.planner.measure import TrainedStep
from meshwright.planner.repeats import Repeats
from meshwright.planner.result import FoundPlan, found_plan
from meshwright.planner.search import PlanSearch
from meshwright.planner.solve import Problem, solve
from meshwright.ranks import runtime
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of

Built = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]


def mlp() -> Built:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 12), nn.LayerNorm(12), nn.Linear(12, 6))
    x = torch.randn(8, 12)
    return net, lambda net, x: net(x).square().mean(), x


def gpt(llama: bool = False, layers: int = 4, **more: Any) -> Built:
    torch.manual_seed(0)
    config = StepConfig(layers=layers, hidden=32, heads=4, seq=16, batch=8, dtype="float64", **more)
    model = GPT(config, "cpu", Llama(vocabulary=64) if llama else None)
    ids = torch.randint(64, (2, 8, 16))
    return model, lambda m, b: loss_of(m, *b), (ids[0], ids[1])


MODELS: dict[str, Callable[[], Built]] = {"mlp": mlp, "gpt": gpt, "llama": lambda: gpt(True)}


def planned(name: str, **options: Any) -> FoundPlan:
    model, loss_fn, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mw.plan(model, loss_fn, batch, optimizer, hardware="cpu-gloo", **options)


def trained(name: str, mesh: mw.Mesh, table: Any) -> tuple[list[Any], dict[str, int], dict[str, int]]:
    """Losses and a parameter of two planned steps on simulated ranks, and what the second one sent."""

    def train() -> Any:
        model, loss_fn, batch = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mw.compile_step(model, loss_fn, optimizer, batch, mesh=mesh, layouts=table, check=False)
        first = mw.unshard(step(batch)).item()
        before, kinds = dict(runtime.RT.counts.bytes), dict(runtime.RT.counts.kinds)
        loss = step(batch)
        sent = sum(runtime.RT.counts.bytes.values()) - sum(before.values())
        ran = {k: n - kinds.get(k, 0) for k, n in runtime.RT.counts.kinds.items()}
        second = mw.unshard(loss).item()
        params = {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}
        return [first, second], params, sent, {k: n for k, n in ran.items() if n}

    losses, params, sent, ran = mw.simulate(train, mesh)[0]
    return [losses, params], sent, ran


def alone(name: str) -> list[Any]:
    model, loss_fn, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = loss_fn(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, {n: p.detach() for n, p in model.named_parameters()}]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"devices": 4}),
        ("gpt", {"mesh": mw.Mesh({"dp": 2, "tp": 2})}),
        pytest.param("llama", {"mesh": mw.Mesh({"tp": 4})}, marks=pytest.mark.long),
        ("llama", {"devices": 4}),
    ],
)
def test_predicted_is_explained_is_run(name: str, options: dict[str, Any]) -> None:
    found = planned(name, **options)
    assert found.check() == {}
    (losses, params), sent, ran = trained(name, found.mesh, found.plan)
    assert sent == found.bytes, (dict(found.measured.bytes), sent)
    assert ran == dict(found.measured.collectives)
    expected_losses, expected = alone(name)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=2e-3, atol=2e-4)
    said = json.loads(found.to_json())
    assert {"mesh", "seconds", "step_seconds", "bytes", "memory", "layouts", "candidates"} <= said.keys()
    assert "a step takes" in str(found)


def drawn(space_seed: int, layouts: Layouts) -> Layouts:
    """Another assignment of the same space: the optimum of random prices, which only possible ones have."""
    draw = random.Random(space_seed)
    problem = layouts.space.problem_of(0.0)
    made = Problem(problem.sizes, dict(problem.factors), problem.tables)
    import numpy as np

    for v, size in enumerate(problem.sizes):
        made.add((v,), np.array([draw.randrange(10**11) for _ in range(size)], dtype=np.int64))
    return Layouts(layouts.space, solve(made), layouts.axes)


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.long), 4, 5])
def test_any_plan_of_the_space_equals_one_device(seed: int) -> None:
    name, mesh = [("mlp", mw.Mesh({"a": 2, "b": 2})), ("llama", mw.Mesh({"a": 2}))][seed % 2]
    model, loss_fn, batch = MODELS[name]()
    search = PlanSearch(TrainedStep(model, loss_fn, batch, None), mw.hardware("cpu-gloo"), 1e12, mesh.size, mesh)
    layouts = search.layouts(mesh.sizes)
    assert layouts is not None
    other = drawn(seed, layouts)
    storage = random.Random(seed).choice([Keeping(), Keeping("fsdp", mesh.axes[:1]), Keeping("replicated", (), True)])
    counts = search.repeats.counts()
    if storage.kind == "fsdp":
        names = {v.label: other.placements(other.stored(v)) for v in other.space.values.values() if v.kind == "param"}
        storage = storage if not any("a" in p for p in names.values()) else Keeping()
    blocks = [f"{run.path}.*" for run in search.repeats.runs]
    table = table_of(other, storage, lambda n: search.repeats.names(n, counts), blocks=blocks, fold=False)
    (losses, params), _, _ = trained(name, mesh, table)
    expected_losses, expected = alone(name)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=2e-3, atol=2e-4)


def test_a_weight_is_split_by_inputs_where_it_has_a_bias() -> None:
    """One rank adds the bias to the sum: ``{x, bias}`` of a linear layer are Partial together."""
    fix = {"blocks.*.mlp.up.weight": {"tp": mw.Shard(0)}, "blocks.*.mlp.down.weight": {"tp": mw.Shard(1)}}
    found = planned("gpt", mesh=mw.Mesh({"tp": 2}), fix=fix)
    assert found.plan.placements_of("blocks.1.mlp.down.weight") == {"tp": mw.Shard(1)}
    (losses, params), sent, _ = trained("gpt", found.mesh, found.plan)
    assert sent == found.bytes
    expected_losses, expected = alone("gpt")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_layers_that_are_cut_out_cost_nothing_of_the_optimum(name: str) -> None:
    """All layers in one problem, each with layouts of its own, are no cheaper."""
    model, loss_fn, batch = MODELS[name]()
    mesh = mw.Mesh({"a": 2, "b": 2})
    prices = []
    for cut in (True, False):
        search = PlanSearch(TrainedStep(model, loss_fn, batch, None), mw.hardware("h100-8x400g"), 1e12, 4, mesh)
        assert search.repeats.runs
        if not cut:
            search.repeats = Repeats((), ())
        layouts = search.layouts(mesh.sizes)
        assert layouts is not None
        prices.append(layouts.optimum.price)
    assert prices[0] == pytest.approx(prices[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["states", "fsdp"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_stages_of_a_gpt_send_is_predicted(kind: str, micro_batches: int) -> None:
    model, loss_fn, batch = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    search = PlanSearch(TrainedStep(model, loss_fn, batch, optimizer), mw.hardware("cpu-gloo"), 1e12, 4)
    layouts = search.layouts((2,))
    assert layouts is not None
    found = found_plan(search, search.of_stages(layouts, Keeping(kind, ("dp",), False, 2, micro_batches), 4))
    _, sent, ran = trained("gpt", found.mesh, found.plan)
    assert sent == found.bytes == sum(n for _, n in found.explain().counts.table.values())
    assert ran == dict(found.measured.collectives)


def test_stages_of_a_plan_equal_one_device() -> None:
    model, loss_fn, batch = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    search = PlanSearch(TrainedStep(model, loss_fn, batch, optimizer), mw.hardware("cpu-gloo"), 1e12, 4)
    layouts = search.layouts((2,))
    assert layouts is not None
    chosen = search.of_stages(layouts, Keeping("replicated", (), False, 2, 4), 4)
    assert chosen.mesh == {"pp": 2, "dp": 2}
    found = found_plan(search, chosen)
    assert found.check() == {}
    (losses, params), sent, ran = trained("llama", found.mesh, found.plan)
    assert sent == found.bytes
    assert ran == dict(found.measured.collectives)
    expected_losses, expected = alone("llama")
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=2e-3, atol=2e-4)


def test_values_that_too_many_ops_share_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no exact elimination is possible the plan is valid and close to the optimum, and says so."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    exact = planned("gpt", mesh=mesh)
    assert exact.to_dict()["proven"] is True
    for module in ("solve", "narrow"):
        monkeypatch.setattr(f"meshwright.planner.{module}._MOST", 1 << 16)
    found = planned("gpt", mesh=mesh)
    assert found.to_dict()["proven"] is False
    assert "layouts are the cheapest that were found" in str(found)
    assert found.check() == {}
    least, price = (x.chosen.layouts.optimum.price for x in (exact, found))
    assert least <= price <= 1.1 * least
    (losses, _), sent, _ = trained("gpt", found.mesh, found.plan)
    assert sent == found.bytes
    torch.testing.assert_close(losses, alone("gpt")[0], rtol=1e-5, atol=1e-6)


def test_a_plan_is_a_file_that_is_edited(tmp_path: Path) -> None:
    found = planned("llama", mesh=mw.Mesh({"dp": 2}), memory="2GB")
    table = found.plan
    table.options.update(recompute=["blocks.*"], shard_states="dp", passes=["data-parallel-optimization"])
    table.inputs["blocks.0"] = {"dp": mw.Shard(0)}
    table.save(tmp_path / "plan.toml")
    read = mw.load_layouts(tmp_path / "plan.toml")
    assert (read.options, read.inputs, read.made_for) == (table.options, table.inputs, table.made_for)
    model, loss_fn, batch = MODELS["llama"]()
    mesh = mw.Mesh({"dp": 2})

    def step() -> Any:
        model, loss_fn, batch = MODELS["llama"]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        made = mw.compile_step(model, loss_fn, optimizer, batch, mesh=mesh, layouts=tmp_path / "plan.toml")
        return mw.unshard(made(batch)).item(), [p.name for p in made.program.passes if not isinstance(p, str)]

    loss, passes = mw.simulate(step, mesh)[0]
    assert loss == pytest.approx(loss_fn(model, batch).item())
    assert {"recompute", "data-parallel-optimization"} <= {*passes}
    with pytest.raises(ShardError, match="recompute"):
        mw.simulate(lambda: mw.shard_module(MODELS["llama"]()[0], mesh, read), mesh)
    del read.options["recompute"]
    mw.simulate(lambda: mw.shard_module(MODELS["llama"]()[0], mesh, read), mesh)
    with pytest.raises(PlanError, match="another model"):
        mw.simulate(lambda: mw.shard_module(MODELS["gpt"]()[0], mesh, read), mesh)
    (tmp_path / "bad.toml").write_text("[options]\nspeed = 3\n")
    with pytest.raises(LayoutError, match="options: speed = 3"):
        mw.load_layouts(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 4, "memory": "100kB"}, r"too small: the least that was found is .*fill.*would fit"),
        ({"devices": 61}, "no useful factorisation"),
        ({"devices": 4, "fix": {"head.wieght": {"tp": mw.Shard(0)}}}, "did you mean 'head.weight'"),
        ({"devices": 4, "fix": {"head.weight": {"tp": mw.Shard(5)}}}, "has no dim 5"),
        ({"devices": 4, "fix": {"head.weight": {"xp": mw.Shard(0)}}}, "there is no axis 'xp'"),
        ({"devices": 4, "fix": {"head.weight": {"tp": mw.Partial()}}}, r"Shard\(dim\) or Replicate"),
        (
            {"devices": 4, "fix": {"head.*": {"tp": mw.Shard(0)}, "*head.weight": {"tp": mw.Shard(1)}}},
            "fix contradicts itself",
        ),
        ({"devices": 4, "hardware": "b100"}, "hardware 'b100' is unknown"),
        ({"devices": 0}, "at least 1"),
        ({}, "one of them"),
        ({"devices": 4, "memory": "a lot"}, "a number of bytes"),
    ],
)
def test_bad_input_is_said(options: dict[str, Any], words: str) -> None:
    model, loss_fn, batch = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(MeshwrightError, match=words):
        mw.plan(model, loss_fn, batch, optimizer, **{"hardware": "cpu-gloo", **options})


def test_what_no_op_computes_with_is_named() -> None:
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 4))
    name = "parametrizations.weight.original0"
    with pytest.raises(PlanError, match=rf"fix= of {name}: no op of the model computes with it so"):
        mw.plan(
            model, lambda m, x: m(x).sum(), torch.ones(4, 4), None, mesh=mw.Mesh({"tp": 2}), hardware="cpu-gloo",
            fix={name: {"tp": mw.Shard(0)}},
        )  # fmt: skip


def test_what_is_fixed_stays_and_why_prices_it() -> None:
    fix = {"blocks.*.mlp.down.weight": {"tp": mw.Replicate()}}
    found = planned("llama", mesh=mw.Mesh({"tp": 2}), fix=fix)
    assert "tp" not in found.plan.get("blocks.*.mlp.down.weight", {})
    free = planned("llama", mesh=mw.Mesh({"tp": 2}))
    why = free.why("blocks.*.mlp.down.weight", {"tp": mw.Replicate()})
    assert why.possible
    assert free.bytes + why.bytes == found.bytes
    with pytest.raises(PlanError, match="no parameter"):
        free.why("nothing", {"tp": mw.Shard(0)})
    again = free.replan(fix)
    assert again.phases.keys() == {"solve"}, "neither captured nor priced again, and built when it is read"
    assert (dict(again.plan), again.measured) == (dict(found.plan), found.measured)
    assert again.phases.keys() == {"solve", "build"}
    assert again.check() == {}


def test_tables_of_layouts_stay_as_they_were(tmp_path: Path) -> None:
    table = LayoutTable({"tp": 2}, {})
    table.save(tmp_path / "a.toml")
    assert "options" not in (tmp_path / "a.toml").read_text()
