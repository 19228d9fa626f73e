"""What explain says of a step is what running the step does: collectives, bytes, groups and memory."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import meshwright as mw
from meshwright import collective
from meshwright.explanation import Explanation, explain_program
from meshwright.program import Built, Plan, build
from meshwright.train.config import TrainConfig
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from tests.support.processes import run_processes

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dp=4": {"mesh": {"dp": 4}},
    "tp=4": {"mesh": {"tp": 4}},
    "dp=2,tp=2": {"mesh": {"dp": 2, "tp": 2}},
    "sequence-parallel": {"mesh": {"dp": 2, "tp": 2}, "sequence_parallel": True},
    "zero-3": {"mesh": {"dp": 2, "tp": 2}, "fsdp": "dp"},
    "zero-3, clipped, sequence-parallel": {
        "mesh": {"dp": 2, "tp": 2}, "fsdp": "dp", "clip": 0.5, "sequence_parallel": True,
    },
    "tied": {"mesh": {"dp": 2, "tp": 2}, "tie": True},
    "clipped": {"mesh": {"dp": 2, "tp": 2}, "clip": 0.5},
    "uneven tp=3": {"mesh": {"tp": 3}, "heads": 4},
    "dropout": {"mesh": {"dp": 2, "tp": 2}, "dropout": 0.1},
}  # fmt: skip


def parts(
    mesh: dict[str, int],
    *,
    layers: int = 2,
    hidden: int = 48,
    heads: int = 6,
    batch: int = 6,
    seq: int = 18,
    dropout: float = 0.0,
    tie: bool = False,
    sequence_parallel: bool = False,
    fsdp: str | None = None,
    clip: float | None = None,
    device: str = "meta",
) -> tuple[GPT, torch.optim.Optimizer, Any, mw.Mesh, Plan]:
    config = TrainConfig(
        mesh=tuple(mesh.items()), layers=layers, hidden=hidden, heads=heads, seq=seq, batch=batch, tie=tie,
        dropout=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(config, device)
    described = config.make_mesh()
    plan = plan_for(described, sequence_parallel=sequence_parallel, tie=tie)
    ids = torch.zeros(batch, seq, dtype=torch.long, device=device)
    made = Plan(
        layouts=plan.layouts, batch=plan.batch, inputs=plan.inputs, outputs=plan.outputs, fsdp=fsdp,
        clip_grad_norm=clip,
    )  # fmt: skip
    return model, torch.optim.AdamW(model.parameters()), (ids, ids), described, made


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, *batch)


def built(rank: int = 0, **options: Any) -> Built:
    model, optimizer, batch, mesh, plan = parts(**options)
    return build(model, loss, optimizer, batch, mesh, plan, rank=rank)


def compiled(*, passes: Any = (), **options: Any) -> tuple[Any, Any]:
    model, optimizer, batch, mesh, plan = parts(device="cpu", **options)
    step = mw.compile_step(
        model, loss, optimizer, batch, mesh=mesh, layouts=plan.layouts, batch=plan.batch, inputs=plan.inputs,
        outputs=plan.outputs, fsdp=plan.fsdp, clip_grad_norm=plan.clip_grad_norm,
        passes=passes,
    )  # fmt: skip
    return step, batch


# ------------------------------------------------------------------------------------------ collectives and bytes


@pytest.mark.thin(11)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_predicted_is_what_runs(name: str) -> None:
    options = CONFIGURATIONS[name]

    def run() -> tuple[Any, Any, Explanation]:
        step, batch = compiled(**options)
        with collective.counting() as counts:
            step(batch)
        return counts.table, explain_program(step.program).counts.table, explain_program(step.program)

    for rank, (measured, predicted, why) in enumerate(mw.simulate(run, mw.Mesh(options["mesh"]), timeout=300)):
        assert measured
        assert predicted == measured
        assert explain_program(built(rank, **options).program).counts.table == measured  # with no ranks at all
        assert sum(t.bytes for t in why.totals) == sum(nbytes for _, nbytes in measured.values())
        assert sum(t.count for t in why.totals) == len(why.collectives)
        for c in why.collectives:
            assert c.reason, c
            assert c.tensor, c
            assert rank in c.ranks
            assert len(c.ranks) == torch.tensor([options["mesh"][a] for a in c.axes]).prod()


def test_what_is_said_of_each() -> None:
    why = explain_program(built(rank=3, mesh={"dp": 2, "tp": 2}, layers=1).program)
    found = {c.tensor: c for c in why.collectives}
    assert [c.number for c in why.collectives] == list(range(len(why.collectives)))

    made = found["layer_norm argument 0"]
    assert (made.role, made.kind, made.axes, made.ranks) == ("forward", "all_reduce", ("tp",), (2, 3))
    assert (made.shape, made.local, made.dtype) == ((6, 18, 48), (3, 18, 48), "float32")
    assert made.bytes == 3 * 18 * 48 * 4
    assert (repr(made.src), repr(made.dst)) == ("<dp: Shard(0), tp: Partial()>", "<dp: Shard(0), tp: Replicate()>")
    assert made.line.startswith("model.py:")
    assert "a Partial value is reduced before layer_norm" in made.reason
    assert "; it is Partial since embedding at model.py:" in made.reason
    assert "linear at model.py:" in made.reason
    assert made.reason.endswith(", where k of ... k, n k, n -> ... n is split")

    back = found["gradient of linear argument 0"]
    assert (back.role, back.axes) == ("backward", ("tp",))
    assert back.reason.startswith("its gradient: each rank uses the value for its own part of linear")

    weight = found["gradient of blocks.0.attention.qkv.weight"]
    assert (weight.parameter, weight.role) == ("blocks.0.attention.qkv.weight", "backward")
    assert (weight.axes, weight.ranks, weight.shape, weight.local) == (("dp",), (1, 3), (144, 48), (72, 48))
    assert "used blocks.0.attention.qkv.weight for its own part: their gradients are summed" in weight.reason
    assert "; it is Partial since linear at model.py:" in weight.reason
    assert weight.reason.endswith(", where ...[0] of ... k, n k, n -> ... n is split")


TP = mw.Mesh({"tp": 2})


def test_a_gradient_says_what_made_it_partial() -> None:
    """Of a value that was Partial itself, the gradient's sum is for another reason: what uses it afterwards."""

    def run() -> Any:
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        step = mw.compile_step(
            model, lambda m, x: m[1](m[0](x) * 2).square().mean(), None, torch.zeros(4, 3, dtype=torch.long),
            mesh=TP, layouts={"*.weight": {"tp": mw.Shard(0)}},
        )  # fmt: skip
        return step.explain()

    forward, back = mw.simulate(run, TP)[0].collectives[:2]
    assert (forward.role, back.role) == ("forward", "backward")
    assert "it is Partial since embedding at " in forward.reason
    assert "embedding" not in back.reason
    assert back.reason == "its gradient: each rank uses the value for its own part of linear (... k, n k -> ... n)"


def test_stored_parameters_are_named() -> None:
    why = explain_program(built(mesh={"dp": 2}, fsdp="dp", layers=1).program)
    gathered = [c for c in why.collectives if c.parameter == "blocks.0.mlp.up.weight"]
    assert [(c.role, c.kind, c.tensor) for c in gathered] == [
        ("forward", "all_gather", "blocks.0.mlp.up.weight"),
        ("backward", "all_gather", "blocks.0.mlp.up.weight"),
        ("backward", "reduce_scatter", "gradient of blocks.0.mlp.up.weight"),
    ]
    assert all("the parameter is stored split" in c.reason for c in gathered)


def test_a_step_explains_itself() -> None:
    def run() -> tuple[str, str]:
        step, _ = compiled(mesh={"dp": 2})
        return str(step.explain()), str(explain_program(step.program))

    for own, same in mw.simulate(run, mw.Mesh({"dp": 2})):
        assert own == same


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", ["dp=4", "dp=2,tp=2", "zero-3", "clipped"])
def test_predicted_is_what_runs_after_passes(name: str) -> None:
    options = CONFIGURATIONS[name]

    def run() -> tuple[Any, Explanation]:
        step, batch = compiled(passes=["data-parallel-optimization:bucket_bytes=16384"], **options)
        with collective.counting() as counts:
            step(batch)
        return counts.table, step.explain()

    for measured, why in mw.simulate(run, mw.Mesh(options["mesh"]), timeout=300):
        assert why.counts.table == measured
        assert all(c.reason and c.tensor for c in why.collectives)
        if name != "zero-3":
            fused = [c for c in why.collectives if "gradients: " in c.tensor]
            assert fused
            assert all(f"{len(c.parameter.split(', '))} gradients" in c.tensor for c in fused)


def test_predicted_is_what_runs_in_micro_steps() -> None:
    def run() -> tuple[Any, Any, Explanation, Explanation]:
        step, batch = compiled(passes=["gradient-merge:k_steps=2"], mesh={"dp": 2, "tp": 2})
        tables = []
        for _ in range(2):
            with collective.counting() as counts:
                step(batch)
            tables.append(counts.table)
        return *tables, explain_program(step.program.parts["accumulate"]), step.explain()

    for first, last, predicted_first, predicted_last in mw.simulate(run, mw.Mesh({"dp": 2, "tp": 2}), timeout=300):
        assert predicted_first.counts.table == first
        assert predicted_last.counts.table == last
        assert any("the last of 2 micro-steps" in note for note in predicted_last.notes)
        assert predicted_last.memory.highest["gradients"] > predicted_first.memory.highest["parameters"]


def test_clipping_is_explained() -> None:
    why = explain_program(built(mesh={"dp": 2, "tp": 2}, clip=1.0).program)
    (clipping,) = [c for c in why.collectives if c.role == "optimizer"]
    assert clipping.tensor == "norm of the gradients"
    assert clipping.reason == "gradients that are split over tp: the squares of their parts are summed"


# ------------------------------------------------------------------------------------------ layouts


def test_where_layouts_came_from() -> None:
    model, optimizer, batch, mesh, _ = parts(mesh={"dp": 2, "tp": 2}, layers=1)
    plan = Plan({"*.qkv.weight": {"tp": mw.Shard(0)}, "*.up.weight": {"tp": mw.Shard(0)}}, batch={"dp": mw.Shard(0)})
    why = explain_program(build(model, loss, optimizer, batch, mesh, plan).program)
    laid = {x.name: x for x in why.laid}
    assert laid["blocks.0.attention.qkv.weight"].source == "user"
    out = laid["blocks.0.attention.out.weight"]
    assert (out.source, repr(out.layout)) == ("propagated", "<dp: Replicate(), tp: Shard(1)>")
    assert "linear" in out.reason
    assert laid["norm.weight"].source == "default"
    assert out.local == (48, 24)
    assert (out.bytes, out.states) == (48 * 24 * 4, 2 * 48 * 24 * 4 + 4)


def test_stored_and_seen_differ() -> None:
    why = explain_program(built(mesh={"dp": 2}, fsdp="dp", layers=1).program)
    (weight,) = [x for x in why.laid if x.name == "blocks.0.mlp.up.weight"]
    assert weight.layout != weight.seen == mw.Layout(weight.seen.mesh)


def test_uneven_parts_are_padded_on_a_gpu() -> None:
    """192 columns over 5 ranks are 39, 39, 39, 39 and 36; of what is gathered or scattered four fifths pass a rank."""
    program = built(4, mesh={"dp": 5}, fsdp="dp", layers=1, batch=10).program
    for device in ("cpu", "cuda"):
        why = explain_program(dataclasses.replace(program, mesh=mw.Mesh({"dp": 5}, device=device)))
        sent = {(c.kind, c.parameter): c for c in why.collectives if c.role in ("forward", "backward")}
        weight = sent["all_gather", "blocks.0.mlp.down.weight"], sent["reduce_scatter", "blocks.0.mlp.down.weight"]
        even, padded = (48 * columns * 4 * 4 // 5 for columns in (192, 195))
        assert [c.bytes for c in weight] == [even] * 2
        assert [c.padding for c in weight] == [(padded - even) * (device == "cuda")] * 2
        assert ("of padding" in why.text(120)) is (device == "cuda")


# ------------------------------------------------------------------------------------------ memory


class _Alive(TorchDispatchMode):
    """Bytes of the storages that are alive, looked at after each op that runs: knows nothing of programs."""

    def __init__(self, held: list[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.add(held)

    def add(self, tensors: Any) -> None:
        for t in pytree.tree_leaves(tensors):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {k: (ref, n) for k, (ref, n) in self.storages.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self.storages.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(out)
        return out


def _peak_on_processes(options: dict[str, Any]) -> tuple[int, int, dict[str, int]]:
    """(predicted, measured, what is predicted to be there) of one rank."""
    mw.init_mesh(options["mesh"])
    step, batch = compiled(**options)
    for _ in range(2):
        step(batch)
    states = [t for s in step.optimizer.state.values() for t in s.values()]
    held = [*step.model.parameters(), *step.model.buffers(), *states, *batch]
    with _Alive([t.to_local() if isinstance(t, mw.DistTensor) else t for t in held]) as alive:
        step(batch)
    memory = explain_program(step.program).memory
    assert memory is not None
    return memory.peak, alive.most, memory.at_peak


@pytest.mark.thin(7)
@pytest.mark.processes
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2, "tp": 2}, "hidden": 96, "seq": 64, "batch": 8, "layers": 3},
        {"mesh": {"dp": 2}, "fsdp": "dp", "hidden": 192, "seq": 16, "batch": 4, "layers": 3},
        {"mesh": {"tp": 2}, "hidden": 96, "seq": 128, "batch": 4, "layers": 3, "sequence_parallel": True},
        {"mesh": {"dp": 2}, "hidden": 96, "seq": 32, "batch": 4, "passes": ["data-parallel-optimization"]},
        {"mesh": {"dp": 2}, "hidden": 96, "seq": 32, "batch": 4, "passes": ["gradient-merge:k_steps=3"]},
    ],
    ids=["dp=2,tp=2", "zero-3", "sequence-parallel", "passes", "micro-steps"],
)
def test_peak_memory_is_what_is_alive_in_a_run(options: dict[str, Any]) -> None:
    world = torch.tensor(list(options["mesh"].values())).prod().item()
    for predicted, measured, at_peak in run_processes(_peak_on_processes, int(world), options, timeout=120):
        assert sum(at_peak.values()) == predicted
        assert predicted == pytest.approx(measured, rel=0.1), (predicted, measured, at_peak)


def test_memory_by_hand() -> None:
    """x @ w, relu, sum, over dp=2: small enough to count."""
    model = torch.nn.Linear(8, 16, bias=False, device="meta")
    batch = torch.empty(4, 8, device="meta")
    made = build(
        model, lambda m, b: m(b).sin().sum(), torch.optim.SGD(model.parameters(), lr=0.1), batch, mw.Mesh({"dp": 2}),
        Plan(batch={"dp": mw.Shard(0)}),
    )  # fmt: skip
    memory = explain_program(made.program).memory
    assert memory is not None
    assert memory.highest["parameters"] == 8 * 16 * 4
    assert memory.highest["states"] == 0
    assert memory.highest["gradients"] == 2 * 8 * 16 * 4  # as autograd gave it, and summed
    assert memory.highest["inputs"] == 2 * 8 * 4 + 4  # the batch and the learning rate
    assert memory.peak == sum(memory.at_peak.values()) <= sum(memory.highest.values())


# ------------------------------------------------------------------------------------------ views


def test_json_holds_all_of_it() -> None:
    program = built(mesh={"dp": 2, "tp": 2}).program
    why = explain_program(program)
    data = json.loads(why.to_json())
    assert data["mesh"] == {"dp": 2, "tp": 2}
    assert data["collectives"] == why.counts.kinds
    assert data["total_bytes"] == why.counts.total_bytes == sum(r["bytes"] for r in data["records"])
    assert [r["tensor"] for r in data["records"]] == [c.tensor for c in why.collectives]
    parameters = [i.name for i in program.inputs if i.kind == "param"]
    assert [x["name"] for x in data["layouts"] if x["kind"] == "param"] == parameters
    assert data["memory"]["peak"] == sum(data["memory"]["at_peak"].values())


def test_text_is_narrow_and_folds_repeated_layers() -> None:
    few, many = (explain_program(built(mesh={"dp": 2, "tp": 2}, layers=n).program) for n in (3, 9))
    for why in (few, many):
        lines = why.text(72).splitlines()
        assert max(map(len, lines)) <= 72
        assert "dp=2 × tp=2" in lines[0]
    assert len(few.text().splitlines()) == len(many.text().splitlines())
    assert "9 × gradient of blocks.*.mlp.up.weight float32[192×48] 18.4 kB each" in many.text()
    assert f"{many.counts.total} collectives; in all" in str(many)


VOID = {"meta", "input", "link", "br", "img", "hr"}


class Checked(HTMLParser):
    """Tags that close what was opened, ids that are there once, text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [v for k, v in attrs if k == "id" and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", ["dp=2,tp=2", "zero-3, clipped, sequence-parallel"])
def test_page_is_whole_and_needs_nothing_else(name: str) -> None:
    why = explain_program(built(**CONFIGURATIONS[name]).program)
    page = why.to_html("Steps <of> A & B")
    found = Checked(page)
    assert not [v for k, v in found.attributes if k in ("src", "href")]
    assert "http" not in page
    assert "url(" not in page
    assert "<h1>Steps &lt;of&gt; A &amp; B</h1>" in page
    assert {f"c{c.number}" for c in why.collectives} <= set(found.ids)
    text = " ".join(found.text)
    for c in why.collectives:
        assert c.tensor in text
        assert c.reason in text
    assert f"{why.counts.total_bytes} bytes" not in text or why.counts.total == 1
    for kind in why.memory.highest:
        assert kind in text
    assert [k for k, v in found.attributes if k == "class" and v == "cell own"] == ["class"]


@pytest.mark.parametrize(
    "mesh", [{"dp": 1}, {"dp": 2}, {"pod": 2, "dp": 2, "tp": 2}, {"dp": 64, "tp": 2}, {"dp": 8192}]
)
def test_pages_of_all_meshes(mesh: dict[str, int]) -> None:
    model = torch.nn.Linear(8, 16, device="meta")
    axes = {a: mw.Shard(0) for a in list(mesh)[:1]}
    made = build(
        model, lambda m, b: m(b).sin().sum(), torch.optim.SGD(model.parameters(), lr=0.1),
        torch.empty(8192, 8, device="meta"), mw.Mesh(mesh), Plan(batch=axes),
    )  # fmt: skip
    why = explain_program(made.program)
    Checked(why.to_html())
    assert why.text()
    assert json.loads(why.to_json())["mesh"] == mesh


def test_eager_code_has_the_same_views() -> None:
    mesh = mw.Mesh({"tp": 2})

    def run() -> Explanation:
        x = mw.shard_tensor(torch.ones(4, 6), mesh, {"tp": mw.Shard(1)})
        w = mw.shard_tensor(torch.ones(8, 6), mesh, {"tp": mw.Shard(1)}).requires_grad_()
        v = mw.shard_tensor(torch.ones(4, 8), mesh, {"tp": mw.Shard(0)}).requires_grad_()
        with mw.explain() as why:
            torch.nn.functional.linear(torch.nn.functional.linear(x, w).relu(), v).sum().backward()
        return why

    for why in mw.simulate(run, mesh):
        assert {c.role for c in why.collectives} == {"forward", "backward"}
        (back,) = [c for c in why.collectives if c.role == "backward"]
        assert back.tensor == "gradient of linear argument 0"
        assert back.reason.startswith("its gradient: ")
        text = why.text(80)
        assert "forward all-reduce over tp" in text
        assert "its gradient: " in text
        data = json.loads(why.to_json())
        assert data["mesh"] is None
        assert [r["role"] for r in data["records"]] == [c.role for c in why.collectives]
        page = why.to_html()
        assert "Eager code" in "".join(Checked(page).text)
        assert back.line in page


def test_eager_gradients_are_counted() -> None:
    mesh = mw.Mesh({"dp": 2})

    def run() -> Explanation:
        model = mw.shard_module(torch.nn.Linear(4, 4), mesh, {})
        x = mw.shard_tensor(torch.ones(4, 4), mesh, {"dp": mw.Shard(0)})
        return mw.explain(lambda: model(x).square().sum().backward())

    for why in mw.simulate(run, mesh):
        assert why.unlisted == why.counts.total - len(why.records) > 0
        assert f"plus {why.unlisted} explicit collectives" in why.text()
        assert f"Plus {why.unlisted} explicit collectives" in why.to_html()


def test_nothing_to_say() -> None:
    why = mw.explain(lambda: None)
    assert why.text() == "no communication\n"
    Checked(why.to_html())
