"""Completion: few words, all layouts; forward and backward; what the user said stays."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import LayoutError, MeshError, ShardError
from meshwright.program import Built, Plan, build
from meshwright.program.ir.nodes import info_of
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for

S, R = mw.Shard, mw.Replicate()
MESH = mw.Mesh({"dp": 2, "tp": 2})
CONFIG = TrainConfig(mesh={"dp": 2, "tp": 2}, layers=2, hidden=64, heads=4, seq=16, batch=4)
BATCH = (torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long))
DP = {"dp": S(0)}
MEGATRON = {n: p for n, p in plan_for(MESH).layouts.items() if n.startswith("*")}  # of the blocks alone


def gpt(layouts: Any = (), model: nn.Module | None = None, batch: Any = None, **plan: Any) -> Built:
    model = model or GPT(CONFIG, "meta")
    optimizer = torch.optim.AdamW(model.parameters())
    return build(model, lambda m, b: loss_of(m, *b), optimizer, BATCH, MESH, Plan(dict(layouts), batch, **plan))


def of_blocks(built: Built) -> dict[str, mw.Layout]:
    return {n: s.layout for n, s in built.stored.items() if n.startswith("blocks")}


def on_tp(built: Built) -> Counter[tuple[str, str]]:
    """(role, kind) of the collectives over tp."""
    return Counter((info_of(n).role, n.target._opname) for n in built.program.collectives() if n.args[-2] == "tp")


@pytest.mark.parametrize(
    "named",
    [
        {"*.qkv.weight": S(0), "*.up.weight": S(0)},
        {"*.out.weight": S(1), "*.down.weight": S(1)},
        {"*.qkv.weight": S(0), "*.down.weight": S(1)},
        {"*.out.weight": S(1), "*.up.weight": S(0)},
    ],
    ids=lambda named: " ".join(named),
)
def test_two_weights_of_each_block_give_megatron(named: dict[str, Any]) -> None:
    built = gpt({n: {"tp": p} for n, p in named.items()}, batch=DP)
    whole = gpt(MEGATRON, batch=DP)
    assert of_blocks(built) == of_blocks(whole)
    assert of_blocks(built)["blocks.1.attention.out.weight"] == mw.Layout(MESH, {"tp": S(1)})
    # Per block two sums forward (attention, MLP) and two backward; there are two blocks, and nothing else on tp.
    assert on_tp(built) == {("forward", "all_reduce"): 4, ("backward", "all_reduce"): 4}
    assert built.program.kinds == whole.program.kinds


def test_only_the_outputs_named() -> None:
    built = gpt(outputs={"head": {"dp": S(0), "tp": S(2)}})
    assert built.stored["head.weight"].layout == mw.Layout(MESH, {"tp": S(0)})
    batch = {s.name: built.completed.layouts[s.node] for s in built.captured.sources if s.kind == "batch"}
    assert batch["batch.0"] == mw.Layout(MESH, {"dp": S(0)})  # through all blocks, backward


def test_only_one_activation_named() -> None:
    built = gpt(outputs={"blocks.0.mlp.up": {"dp": S(0), "tp": S(2)}})
    layouts = of_blocks(built)
    assert layouts["blocks.0.mlp.up.weight"] == layouts["blocks.0.mlp.up.bias"] == mw.Layout(MESH, {"tp": S(0)})
    assert layouts["blocks.0.mlp.down.weight"] == mw.Layout(MESH, {"tp": S(1)})
    assert layouts["blocks.1.mlp.up.weight"].is_replicated()
    batch = {s.name: built.completed.layouts[s.node] for s in built.captured.sources if s.kind == "batch"}
    assert batch["batch.0"] == mw.Layout(MESH, {"dp": S(0)})


def test_a_value_named_by_its_node() -> None:
    nodes = [n.name for n in gpt().captured.graph.nodes if n.name.startswith("gelu")]
    built = gpt({nodes[0]: {"tp": S(2)}}, batch=DP)
    assert of_blocks(built)["blocks.0.mlp.up.weight"] == mw.Layout(MESH, {"tp": S(0)})


def test_constrain_inside_the_model() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(mw.constrain(self.a(x), {"tp": S(1)}).relu()).sum()

    built = build(Marked(), None, None, torch.ones(4, 8), MESH, Plan(batch=DP))
    assert built.stored["a.weight"].layout == mw.Layout(MESH, {"tp": S(0)})
    assert built.stored["b.weight"].layout == mw.Layout(MESH, {"tp": S(1)})


def test_nothing_said_is_replicated_and_sends_nothing() -> None:
    built = gpt()
    assert all(s.layout.is_replicated() for s in built.stored.values())
    assert not built.program.kinds
    assert {o.source for o in built.completed.origins} == {"default"}


def test_words_of_the_user_stay() -> None:
    said = {"*.up.weight": {"tp": S(0)}, "*.down.weight": {"tp": R}}  # alone, down would be split by its inputs
    built = gpt(said, batch=DP)
    assert of_blocks(built)["blocks.0.mlp.down.weight"].is_replicated()
    assert of_blocks(built)["blocks.0.mlp.up.bias"] == mw.Layout(MESH, {"tp": S(0)})
    built = gpt(outputs={"blocks.0.mlp.up": {"tp": S(2)}}, batch=DP)
    gelu = next(n for n in built.captured.graph.nodes if n.name.startswith("gelu"))
    (origin,) = (o for o in built.completed.origins if o.value == str(gelu.args[0]))
    assert origin.layout == mw.Layout(MESH, {"dp": S(0), "tp": S(2)}, ndim=3), "of other axes nothing was said"


def test_words_that_contradict_each_other() -> None:
    class Halves(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = super().forward(x).chunk(2, 1)
            return (a * b).sum()

    def said(**layouts: Any) -> Built:
        return build(Halves(8, 16), None, None, torch.ones(4, 8), MESH, Plan(layouts, batch=DP))

    half = next(n for n in said().captured.graph.nodes if n.target is operator.getitem)
    pieces = str(half.args[0])  # of which the half is the first
    for p in (S(0), R):
        with pytest.raises(LayoutError, match=rf"contradiction: {half} .* on 'tp', but {pieces} .*: name one of them"):
            said(**{pieces: {"tp": S(1)}, half.name: {"tp": p}})


def test_origins_say_who_and_what_lost() -> None:
    built = gpt({"*.up.weight": {"tp": S(0)}}, batch=DP)
    origins = {o.value: o for o in built.completed.origins}
    assert origins["blocks.0.mlp.up.weight"].source == "user"
    reached = origins["blocks.0.mlp.down.weight"]
    assert (reached.source, repr(reached.layout)) == ("propagated", "<dp: Replicate(), tp: Shard(1)>")
    assert "by k" in reached.reason
    assert "model.py:" in reached.reason
    assert not reached.lost
    back = {o.value: o for o in gpt({"*.down.weight": {"tp": S(1)}}, batch=DP).completed.origins}
    before = back["blocks.0.mlp.up.weight"]  # against the order of the ops
    assert (before.source, repr(before.layout)) == ("propagated", "<dp: Replicate(), tp: Shard(0)>")
    plan = Plan({"weight": {"tp": S(0)}}, batch={"tp": S(1)})
    built = build(nn.Linear(32, 8), lambda m, b: m(b).sum(), None, torch.ones(4, 32), MESH, plan)
    (bias,) = (o for o in built.completed.origins if o.value == "bias")
    assert [text.partition(":")[0] for text in bias.lost] == ["by k"]


def test_where_operands_disagree_bytes_decide_and_the_loser_is_told() -> None:
    def bias(rows: int) -> Any:
        # The weight is split by n, the input by k: what moves less is taken, with the sum of the output that k leaves.
        plan = Plan({"weight": {"tp": S(0)}}, batch={"tp": S(1)})
        built = build(nn.Linear(32, 8), lambda m, b: m(b).sum(), None, torch.ones(rows, 32), MESH, plan)
        return next(o for o in built.completed.origins if o.value == "bias")

    wide = bias(4)
    assert "Shard(0)" in repr(wide.layout)
    assert [text.partition(":")[0] for text in wide.lost] == ["by k"]
    tall = bias(64)  # by k the bias is not split: it would be counted on each rank
    assert "Shard" not in repr(tall.layout)


def test_deterministic() -> None:
    first, again = (gpt({"*.up.weight": {"tp": S(0)}}, batch=DP) for _ in range(2))
    assert first.completed.origins == again.completed.origins
    assert str(first.program) == str(again.program)


def test_repeated_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.program.capture import complete

    solved: list[Any] = []
    original = complete.Completion._solve
    monkeypatch.setattr(complete.Completion, "_solve", lambda *a: (solved.append(a), original(*a))[1])

    def count(layers: int) -> int:
        solved.clear()
        config = TrainConfig(mesh={"dp": 2, "tp": 2}, layers=layers, hidden=64, heads=4, seq=16, batch=4)
        gpt({"*.up.weight": {"tp": S(0)}}, model=GPT(config, "meta"), batch=DP)
        return len(solved)

    assert count(2) == count(6)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            {"layouts": {"*.upp.weight": {"tp": S(0)}}},
            ShardError,
            r"'\*.upp.weight' matches no .*close ones: .*up.weight",
        ),
        ({"layouts": {"*.up.weight": {"tq": S(0)}}}, MeshError, r"up.weight, of shape .*: unknown axis 'tq'"),
        (
            {"layouts": {"*.up.weight": {"tp": S(2)}}},
            LayoutError,
            r"up.weight, of shape \(256, 64\): Shard\(2\).*2 dims",
        ),
        (
            {"outputs": {"blocks.0.mlp.up": {"tp": S(2)}, "blocks.0.mlp.u*": {"tp": S(1)}}},
            None,
            "",
        ),
    ],
    ids=["unknown name", "unknown axis", "no such dim", "the last constraint of a module counts"],
)
def test_bad_words(options: dict[str, Any], kind: Any, message: str) -> None:
    if kind is None:
        gpt(**options)
        return
    with pytest.raises(kind, match=message):
        gpt(**options)


@pytest.mark.parametrize("globs", [("*.up.weight", "blocks.0.mlp.*.weight"), ("blocks.0.mlp.*.weight", "*.up.weight")])
def test_the_last_glob_that_matches_counts(globs: tuple[str, str]) -> None:
    """Whichever is the narrower one, as in shard_module."""
    config = TrainConfig(mesh={"dp": 2, "tp": 2}, layers=1, hidden=32, heads=4, seq=16, batch=4)
    table = dict(zip(globs, ({"tp": S(0)}, {"tp": S(1)}), strict=True))
    found = gpt(table, model=GPT(config, "meta")).stored["blocks.0.mlp.up.weight"].layout

    def shard() -> mw.Layout:
        return mw.shard_module(GPT(config, "cpu"), MESH, table).get_parameter("blocks.0.mlp.up.weight").spec.layout

    assert found == mw.simulate(shard, MESH)[0] == mw.Layout(MESH, {"tp": S(1)})


def test_a_glob_contradicts_a_distributed_parameter() -> None:
    def step() -> None:
        model = mw.shard_module(torch.nn.Linear(4, 4), MESH, {"weight": {"tp": S(0)}}, sync=False)
        with pytest.raises(LayoutError, match=r"contradicts weight, which is a DistTensor with .* Reshard"):
            mw.compile_step(
                model, lambda m, x: m(x).sum(), None, torch.ones(4, 4), mesh=MESH, layouts={"weight": {"tp": S(1)}}
            )

    mw.simulate(step, MESH)


def test_the_last_glob_counts_for_a_distributed_parameter() -> None:
    """A batch of another size is captured where the parameters are on the mesh."""

    def step() -> tuple[Any, ...]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        layouts = {"*.weight": {"tp": S(0)}, "1.weight": {}}
        step = mw.compile_step(model, lambda m, x: m(x).sum(), None, torch.ones(4, 4), mesh=MESH, layouts=layouts)
        step(torch.ones(4, 4))
        step(torch.ones(6, 4))
        return model[0].weight.placements, model[1].weight.placements

    assert mw.simulate(step, MESH)[0] == ((mw.Replicate(), S(0)), (mw.Replicate(), mw.Replicate()))


def test_tied_weights_have_one_layout() -> None:
    config = TrainConfig(mesh={"dp": 2, "tp": 2}, layers=1, hidden=32, heads=4, seq=16, batch=4, tie=True)
    built = gpt({"tokens.weight": {"tp": S(1)}, "head.weight": {"tp": S(0)}}, model=GPT(config, "meta"))
    assert built.stored["tokens.weight"].layout == mw.Layout(MESH, {"tp": S(0)})  # one parameter: the last glob counts
    built = gpt({"head.weight": {"tp": S(0)}}, model=GPT(config, "meta"))
    assert built.stored["tokens.weight"].layout == mw.Layout(MESH, {"tp": S(0)})
    assert "head.weight" not in built.stored


def test_a_pattern_for_weights_leaves_counters_alone() -> None:
    """As in ``shard_module``: of a tensor without dims there is nothing to split, unless it is named in full."""
    mesh, x = mw.Mesh({"tp": 2}), torch.randn(6, 4, dtype=torch.float64)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6, dtype=torch.float64), nn.BatchNorm1d(6, dtype=torch.float64))

    def squares(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(m(x).pow(4).mean())

    want = squares(net(), x).item()

    def run() -> tuple[float, int, Any]:
        model = net()
        step = mw.compile_step(model, squares, None, x, mesh=mesh, layouts=globs)
        losses = [float(step(x)) for _ in range(2)]
        return losses[0], int(model[1].num_batches_tracked), model[1].running_mean

    globs = {"0.*": {"tp": S(0)}, "1.*": {"tp": S(0)}}
    for loss, count, mean in mw.simulate(run, mesh):
        assert abs(loss - want) < 1e-12
        assert count == 2
        assert mean.placements == (S(0),)
    named = {"1.num_batches_tracked": {"tp": S(0)}}
    with pytest.raises(LayoutError, match="nothing to split"):
        build(net(), squares, None, x, mesh, Plan(named))


def test_a_glob_of_all_names_meets_no_checks_under_autocast() -> None:
    """Casts check dtypes: calls without a value."""
    mesh = mw.Mesh({"dp": 2})

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean()

    def run() -> float:
        torch.manual_seed(0)
        model, x = nn.Linear(6, 4), torch.ones(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, loss, optimizer, x, mesh=mesh, layouts={"*": {}}, batch={"dp": mw.Shard(0)})
        return float(step(x))

    torch.manual_seed(0)
    alone = float(loss(nn.Linear(6, 4), torch.ones(4, 6)))
    assert mw.simulate(run, mesh) == pytest.approx([alone] * 2, rel=1e-3)
