"""``meshwright explain``: any model on any mesh, with no devices and no processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import meshwright as mw
from meshwright.cli import app
from meshwright.program import Plan, build
from meshwright.program.ir.nodes import info_of
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of
from meshwright.train.plan import plan_for

SMALL = ("--layers", "2", "--hidden", "32", "--heads", "4", "--seq", "8")
OWN = """
import torch
import meshwright as mw

def step(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    batch = torch.empty(32, 64)
    said = {"layouts": {"0.weight": {"tp": mw.Shard(0)}}, "batch": {"dp": mw.Shard(0)}}
    return model, lambda m, b: m(b).square().mean(), batch, said

def bare(mesh):
    model = torch.nn.Linear(4, 4)
    return model, lambda m, b: m(b).sum(), torch.empty(2, 4)

def wrong(mesh):
    return torch.nn.Linear(4, 4)

def unknown(mesh):
    return *bare(mesh), {"layout": {}}
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["explain", *args])


def data(*args: str) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# ------------------------------------------------------------------------------------------ the GPT


def test_text() -> None:
    result = run("--mesh", "dp=2,tp=2", *SMALL)
    assert result.exit_code == 0, result.output
    assert "GPT, 2 × 32" in result.stdout
    assert "step of rank 0 on dp=2 × tp=2: 4 ranks; adamw on 29 parameters" in result.stdout
    assert "forward all-reduce over tp: dp Shard 0, tp Partial → dp Shard 0" in result.stdout
    assert "memory per rank: peak" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_json_of_megatrons_layout() -> None:
    found = data("--mesh", "dp=2,tp=2", *SMALL)
    counts = {(t["role"], t["kind"], tuple(t["axes"])): t["count"] for t in found["totals"]}
    assert counts["forward", "all_reduce", ("tp",)] == 2 * 2 + 3  # two per block, the embedding, two of the loss
    assert counts["backward", "all_reduce", ("tp",)] == 2 * 2 + 1
    assert counts["backward", "all_reduce", ("dp",)] == 29
    assert found["rank"] == 0


def test_options_of_the_step() -> None:
    plain = data("--mesh", "dp=4", *SMALL)
    stored = data("--mesh", "dp=4", *SMALL, "--fsdp", "dp", "--rank", "3")
    assert "all_gather" not in plain["collectives"]
    assert stored["collectives"]["all_gather"] > 0
    assert stored["rank"] == 3
    assert stored["memory"]["at_peak"]["parameters"] < plain["memory"]["at_peak"]["parameters"] / 3
    states = data("--mesh", "dp=4", *SMALL, "--shard-states", "dp")
    assert states["memory"]["at_peak"]["states"] < plain["memory"]["at_peak"]["states"] / 3
    clipped = data("--mesh", "tp=2", *SMALL, "--clip", "1", "--optimizer", "sgd", "--tie", "--dropout", "0.1")
    assert [r["role"] for r in clipped["records"]].count("optimizer") == 1
    split = data("--mesh", "tp=2", *SMALL, "--sequence-parallel", "--dtype", "bfloat16")
    assert {"all_gather", "reduce_scatter"} <= set(split["collectives"])


def test_page(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    assert run("--mesh", "dp=2,tp=2", *SMALL, "--html", str(page)).exit_code == 0
    assert "<h1>GPT, 2 × 32</h1>" in page.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ passes


def test_passes_and_what_they_change(tmp_path: Path) -> None:
    option = ("--pass", "data-parallel-optimization:bucket_bytes=65536")
    before, after = data("--mesh", "dp=4", *SMALL), data("--mesh", "dp=4", *SMALL, *option)
    both = data("--mesh", "dp=4", *SMALL, *option, "--diff")
    assert both == {"before": before, "after": after}
    assert after["collectives"]["all_reduce"] < before["collectives"]["all_reduce"]
    # The same gradients; in a buffer each begins at a multiple of 256 bytes.
    assert 0 <= after["total_bytes"] - before["total_bytes"] <= 1.5 * 256 * 29  # sent 2 × 3 / 4 times
    assert after["notes"][0].startswith("data-parallel-optimization: ")
    page = tmp_path / "step.html"
    result = run("--mesh", "dp=4", *SMALL, *option, "--diff", "--html", str(page))
    assert "before and after the passes" in result.stdout
    assert "Before and after the passes" in page.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ the user's own model


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ownmodel.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "ownmodel", raising=False)
    return "ownmodel"


def test_own_model(own: str) -> None:
    found = data("--mesh", "dp=2,tp=4", "--model", f"{own}:step")
    laid = {x["name"]: x for x in found["layouts"]}
    assert (laid["2.weight"]["source"], laid["2.weight"]["layout"]) == ("propagated", "<dp: Replicate(), tp: Shard(1)>")
    assert any(r["line"].startswith("ownmodel.py:") for r in found["records"])
    assert data("--mesh", "dp=2", "--model", f"{own}:bare")["total_bytes"] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "ownmodel"), "module:function was expected"),
        (("--model", "ownmodel:nothing"), "has no attribute 'nothing'"),
        (("--model", "nosuchmodule:step"), "No module named 'nosuchmodule'"),
        (("--model", "ownmodel:wrong"), "Return (model, loss_fn, batch)"),
        (("--model", "ownmodel:unknown"), "a mapping with some of fsdp, offload, layouts"),
        (("--model", "ownmodel:step", "--layers", "3"), "--layers is for the built-in models"),
        (("--mesh", "dp=2,xx=2"), "does not know it"),
        (("--mesh", "dp"), "write axis=size"),
        (("--mesh", "dp=2", "--rank", "2"), "has the ranks 0 to 1"),
        (("--preset", "bert"), "one of gpt, llama-7b"),
        (("--preset", "llama-7b", "--tie"), "only the GPT has that"),
        (("--mesh", "ep=2"), "splits experts, and there are none: add --experts"),
        (("--diff",), "give some"),
        (("--pass", "no-such-pass"), "there is no pass"),
        (("--sequence-parallel", "--mesh", "dp=2"), "has no such axis"),
        (("--fsdp", "xx", "--mesh", "dp=2"), "unknown axis"),
        (("--optimizer", "adam"), "one of adamw, sgd"),
        (("--hidden", "30", "--heads", "4"), "cannot be split over --heads"),
        (("--html", "no/such/folder/x.html"), "No such file"),
        (("--device", "tpu"), "one of cpu, cuda"),
    ],
)
def test_bad_input(own: str, args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


# ------------------------------------------------------------------------------------------ Llama


def llama_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, *batch)


def small_llama() -> tuple[GPT, Any]:
    torch.manual_seed(0)
    config = StepConfig(layers=2, hidden=32, heads=4, seq=12, dtype="float64")
    model = GPT(config, llama=Llama(64))
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    return model, (ids, ids.roll(-1, 1))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.thin(2)
def test_llama_trains_as_on_one_device(sequence_parallel: bool) -> None:
    model, batch = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    want = []
    for _ in range(3):
        loss = llama_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.item())
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def steps() -> list[float]:
        model, batch = small_llama()
        plan = plan_for(mesh, sequence_parallel=sequence_parallel, few=True)
        step = mw.compile_step(
            model, llama_loss, torch.optim.AdamW(model.parameters(), lr=1e-2), batch, mesh=mesh,
            layouts=plan.layouts, batch=plan.batch, inputs=plan.inputs, outputs=plan.outputs,
        )  # fmt: skip
        return [step(batch).item() for _ in range(3)]

    for got in mw.simulate(steps, mesh, timeout=120):
        assert got == pytest.approx(want, rel=1e-9)


def test_llama_from_few_words() -> None:
    """Two weights of each layer and the vocabulary are said; all others follow."""
    mesh = mw.Mesh({"dp": 2, "tp": 4})
    with torch.device("meta"):
        config = StepConfig(layers=2, hidden=64, heads=4, seq=16)
        model, ids = GPT(config, "meta", llama=Llama()), torch.empty(4, 16, dtype=torch.long)
    made = build(model, llama_loss, None, (ids, ids), mesh, plan_for(mesh, few=True))
    placed = {n: s.layout.placements[1] for n, s in made.stored.items()}
    for name in ("query", "key", "value"):
        assert placed[f"blocks.1.attention.{name}.weight"] == mw.Shard(0)
    for name in ("gate", "up"):
        assert placed[f"blocks.1.mlp.{name}.weight"] == mw.Shard(0)
    assert placed["blocks.1.norm1.weight"] == mw.Replicate()
    forward = [n for n in made.program.collectives() if info_of(n).role == "forward"]
    assert len(forward) == 2 * 2 + 3


@pytest.mark.parametrize(("preset", "size"), [("mixtral", 1.74e9), ("deepseek", 12.0e9)])
def test_experts_of_known_sizes(preset: str, size: float) -> None:
    """One layer of each; of its experts a rank of eight holds an eighth."""
    found = data("--mesh", "dp=2,ep=8", "--preset", preset, "--layers", "1")
    held = {x["name"]: x for x in found["layouts"] if x["kind"] == "param"}
    assert sum(torch.Size(x["shape"]).numel() for x in held.values()) == pytest.approx(size, rel=0.02)
    for name in ("gate_up", "down"):
        weight = held[f"blocks.0.mlp.experts.{name}"]
        assert torch.Size(weight["local"]).numel() * 8 == torch.Size(weight["shape"]).numel()


@pytest.mark.long
def test_a_model_of_7b_parameters_on_512_ranks() -> None:
    resource = pytest.importorskip("resource")
    start = time.monotonic()
    found = data("--mesh", "dp=64,tp=8", "--preset", "llama-7b", "--rank", "511")
    assert time.monotonic() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kB
    counts = {(t["role"], tuple(t["axes"])): t["count"] for t in found["totals"]}
    assert counts["forward", ("tp",)] == 2 * 32 + 3
    assert counts["backward", ("tp",)] == 2 * 32 + 1
    sizes = [torch.Size(x["shape"]).numel() for x in found["layouts"] if x["kind"] == "param"]
    assert 6.7e9 < sum(sizes) < 6.8e9
    assert found["memory"]["at_peak"]["parameters"] == pytest.approx(sum(sizes) * 2 / 8, rel=0.01)


def test_stages_of_a_large_model() -> None:
    """Over the axis of stages nothing is gathered to help ranks of another axis."""
    small = ("--layers", "4", "--hidden", "64", "--heads", "8", "--seq", "64", "--micro-batches", "8")
    found = data("--preset", "llama-405b", *small, "--mesh", "pp=4,dp=2,tp=8")
    assert {t["kind"] for t in found["totals"] if "pp" in t["axes"]} == {"all_reduce"}
    assert [r["micro_batches"] for r in found["pipeline"]["ranks"]] == [4, 3, 2, 1]
    (keys,) = (x for x in found["layouts"] if x["name"] == "blocks.0.attention.key.weight")
    assert keys["shape"] == [64, 64]  # 8 heads of keys, of as many queries here


def test_strategies_that_a_plan_says() -> None:
    """As in a step that is captured to be run."""

    def attention(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*[model(x)] * 3).sum()

    with torch.device("meta"):
        model, x = torch.nn.Linear(4, 4), torch.empty(2, 4, 8, 4)
    mesh = mw.Mesh({"cp": 2})
    for strategy, kind in (("heads", "all_to_all"), ("gather", "all_gather")):
        said = {"scaled_dot_product_attention": {"cp": strategy}}
        made = build(model, attention, None, x, mesh, Plan(batch={"cp": mw.Shard(2)}, strategies=said))
        assert {"all_to_all", "all_gather"} & {*made.program.kinds} == {kind}
