"""``mw.layouts``: what it splits of a model, against one device in float64; its table and its file."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.errors import CaptureError, LayoutError, ShardError
from meshwright.explanation import explain_program
from meshwright.program import Plan, build

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]
MESHES = {"dp2tp2": mw.Mesh({"dp": 2, "tp": 2}), "tp3": mw.Mesh({"tp": 3})}
ROWS, LENGTH, WIDTH, HEADS, WORDS = 4, 5, 12, 6, 60


class Block(nn.Module):
    """A block of a GPT; with names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.e, self.f = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        q, k, v = (m(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.a, self.b, self.c))
        x = x + self.d(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.f(F.gelu(self.e(self.n2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def made() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = Model().double()
    return model, (torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH)))


def one_device() -> dict[str, Tensor]:
    model, batch = made()
    loss = loss_of(model, batch)
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def eager(mesh: mw.Mesh, table: mw.LayoutTable | Path) -> dict[str, Tensor]:
    model, batch = made()
    mw.shard_module(model, mesh, table)
    if "dp" in mesh.axes:
        batch = tuple(mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) for t in batch)
    loss = loss_of(model, batch)
    loss.backward()
    return {n: mw.unshard(t) for n, t in [("loss", loss.detach()), *((n, p.grad) for n, p in model.named_parameters())]}


def captured(mesh: mw.Mesh, table: mw.LayoutTable | Path) -> dict[str, Tensor]:
    model, batch = made()
    step = mw.compile_step(model, loss_of, None, batch, mesh=mesh, layouts=table, gradients=True)
    loss = step(batch)
    return {n: mw.unshard(t) for n, t in [("loss", loss.detach()), *((n, p.grad) for n, p in model.named_parameters())]}


@functools.cache
def found(mesh: mw.Mesh) -> mw.LayoutTable:
    model, batch = made()
    return mw.layouts(model, mesh, batch, loss_of)


@pytest.mark.parametrize("mode", [eager, captured])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_equals_one_device(mesh: mw.Mesh, mode: object) -> None:
    want, table = one_device(), found(mesh)
    for got in mw.simulate(lambda: mode(mesh, table), mesh):  # type: ignore[operator]
        for name, t in want.items():
            torch.testing.assert_close(got[name], t, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_splits_as_megatron_does(mesh: mw.Mesh) -> None:
    columns, rows = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
    split = {g: p for g, p in found(mesh).items() if p}
    firsts = [f"blocks.*.{m}.{t}" for m in "abce" for t in ("weight", "bias")]
    want = dict.fromkeys([*firsts, "words.weight", "head.weight"], columns)
    assert split == want | dict.fromkeys(["blocks.*.d.weight", "blocks.*.f.weight"], rows)


def test_sends_what_megatron_sends() -> None:
    """Over tp: two sums of a block forward and two backward, one of the embedding, one of the head's input, and of the
    rows' maxima, sums and targets of the loss."""
    model, batch = made()
    mesh = MESHES["tp3"]
    built = build(model, loss_of, None, batch, mesh, Plan(layouts=found(mesh)))
    sent = sum(explain_program(built.program).counts.bytes.values())
    stream = ROWS * LENGTH * WIDTH * 8
    sums = 2 * 2 / 3 * stream * (2 * 4 + 2)
    assert sums <= sent <= sums + 2 * 2 / 3 * 3 * ROWS * LENGTH * 8


def test_the_table_is_read_and_written(tmp_path: Path) -> None:
    mesh = MESHES["dp2tp2"]
    table = found(mesh)
    assert "blocks.*.e.weight" in str(table)
    assert "pair with blocks.*.f.weight" in str(table)
    table.save(tmp_path / "plan.toml")
    again = mw.load_layouts(tmp_path / "plan.toml")
    assert dict(again) == dict(table)
    assert again.batch == table.batch
    assert str(again) == str(table)
    again["head.weight"] = {}
    del again["blocks.*.e.bias"]
    again.save(tmp_path / "other.toml")
    edited = mw.load_layouts(tmp_path / "other.toml")
    assert edited["head.weight"] == {}
    assert "blocks.*.e.bias" not in edited
    want = one_device()
    for mode in (eager, captured):
        got = mw.simulate(lambda mode=mode: mode(mesh, str(tmp_path / "other.toml")), mesh)[3]
        torch.testing.assert_close(got["blocks.1.e.weight"], want["blocks.1.e.weight"])


def test_another_models_plan_names_all_that_it_has_not() -> None:
    mesh = MESHES["tp3"]
    with pytest.raises(ShardError, match=r"matches no parameter or buffer \(nor do .*'blocks.*head.weight'"):
        mw.simulate(lambda: mw.shard_module(nn.Sequential(nn.Linear(3, 3)), mesh, found(mesh)), mesh)


def test_an_axis_that_nothing_uses_is_said() -> None:
    model, batch = made()
    table = mw.layouts(model, mw.Mesh({"dp": 2, "tp": 2, "pp": 2}), batch, loss_of)
    assert any("'pp'" in note for note in table.notes)
    assert "'pp'" in str(table)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mesh = {", "cannot be read"),
        ('[layouts]\n"a" = { tp = "Shard(x)" }', "a: 'Shard(x)' is no placement"),
        ('mesh = { tp = 2 }\n[layouts]\n"a" = { dp = "Shard(0)" }', "a: dp: no axis"),
        ('[layouts]\n"a" = "Shard(0)"', "was expected"),
        ("rows = 3", "unknown rows"),
        ("format = 9", "format 9"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(LayoutError, match=f"plan.toml.*{words.replace('(', '.').replace(')', '.')}"):
        mw.load_layouts(tmp_path / "plan.toml")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))


class Branches(nn.Module):
    """What it does depends on values; its pairs do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Pair(), Pair()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() < 1e9 else x
        return x


def test_a_model_that_cannot_be_captured_is_taken_block_by_block() -> None:
    torch.manual_seed(0)
    mesh, model, x = MESHES["tp3"], Branches().double(), torch.randn(ROWS, WIDTH).double()
    table = mw.layouts(model, mesh, x, lambda m, b: m(b).square().mean())
    split = {"layers.*.a.weight": 0, "layers.*.a.bias": 0, "layers.*.b.weight": 1}
    assert {g: p for g, p in table.items() if p} == {g: {"tp": mw.Shard(d)} for g, d in split.items()}
    assert "block by block (layers.*)" in table.notes[0]
    assert "if x.sum() < 1e9" in table.notes[0]
    loss = model(x).square().mean()
    loss.backward()

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        mine = mw.shard_module(Branches().double(), mesh, table)
        mine(x).square().mean().backward()
        return [mw.unshard(p.grad) for p in mine.parameters()]

    for got in mw.simulate(run, mesh):
        torch.testing.assert_close(got, [p.grad for p in model.parameters()])
    with pytest.raises(CaptureError, match="branches on the value"), torch.device("meta"):
        mw.layouts(Branches(), mesh, torch.empty(ROWS, WIDTH), lambda m, b: m(b).square().mean())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, padding=1)
        self.norm = nn.GroupNorm(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(F.relu(self.n(self.a(x)))))


def test_convolutions_in_pairs_with_their_buffers() -> None:
    table = mw.layouts(Convolutions(), MESHES["tp3"], torch.randn(2, 3, 5, 5), lambda m, x: m(x).square().mean())
    first = dict.fromkeys(("a.weight", "a.bias", "n.weight", "n.bias", "n.running_mean", "n.running_var"), 0)
    assert {g: p for g, p in table.items() if p} == {
        g: {"tp": mw.Shard(d)} for g, d in (first | {"b.weight": 1}).items()
    }


class Grouped(nn.Module):
    """Attention with fewer heads of keys than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.k, self.v = (nn.Linear(WIDTH, n * WIDTH // HEADS) for n in (HEADS, 2, 2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (WIDTH,))
        parts = self.qkv(x), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
        x = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.layer_norm(x, (WIDTH,)) * x


def test_few_heads_of_keys_do_not_keep_those_of_queries_whole() -> None:
    x = torch.randn(ROWS, LENGTH, WIDTH)
    table = mw.layouts(Grouped(), MESHES["tp3"], x, lambda m, b: m(b).square().mean())
    assert table["qkv.weight"] == table["qkv.bias"] == {"tp": mw.Shard(0)}
    assert table["out.weight"] == {"tp": mw.Shard(1)}
    assert "what comes of it is gathered" in table.lines["k.weight"].reason


def test_the_models_own_plan_is_named_where_it_is_followed() -> None:
    model, batch = made()
    model.tp_plan = {"blocks.*.e": "colwise", "blocks.*.f": "rowwise", "places": "embedding_rowwise"}
    table = mw.layouts(model, MESHES["tp3"], batch, loss_of)
    assert dict(table) == dict(found(MESHES["tp3"]))  # the plan's table of places would be summed for nothing
    assert table.lines["blocks.*.e.weight"].reason.startswith("the model's own plan (colwise)")


def test_a_tied_table_is_split_with_the_head() -> None:
    model, batch = made()
    model.head.weight = model.words.weight
    table = mw.layouts(model, MESHES["tp3"], batch, loss_of)
    assert table["words.weight"] == {"tp": mw.Shard(0)}
    assert "head.weight" not in table


def test_wrong_arguments() -> None:
    model, batch = made()
    with pytest.raises(LayoutError, match="mesh cannot be a dict"):
        mw.layouts(model, {"tp": 2}, batch)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"layouts: tensor='tpp': Mesh\(tp=3\) has the axes tp"):
        mw.layouts(model, MESHES["tp3"], batch, loss_of, tensor="tpp")
    with pytest.raises(CaptureError, match=r"must return a scalar tensor.* of shape \(4, 5, 60\): return its mean"):
        mw.layouts(model, MESHES["tp3"], batch, lambda m, b: m(b[0]))
    table = found(MESHES["tp3"])
    with pytest.raises(LayoutError, match="a mapping from axes"):
        table["head.weight"] = {"dp": mw.Shard(0)}


def test_leaves_of_the_batch_that_do_not_split_are_whole() -> None:
    model, batch = made()
    more = (*batch, torch.tensor(3.0), torch.randn(LENGTH))
    table = mw.layouts(model, MESHES["dp2tp2"], more, lambda m, b: loss_of(m, b[:2]) * b[2] + b[3].sum())
    assert table.batch == {"0": {"dp": mw.Shard(0)}, "1": {"dp": mw.Shard(0)}, "2": {}, "3": {}}
    assert [n for n in table.notes if n == "3 of the batch is whole: it has not the 4 rows of others"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
import torch.nn as nn, torch

def step(mesh):
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8))
    return model, lambda m, b: m(b).square().mean(), torch.randn(16, 8)
"""
    (tmp_path / "own_layouts.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = CliRunner().invoke
    done = run(app, ["layouts", "own_layouts:step", "--mesh", "dp=2,tp=2", "--save", "plan.toml"])
    assert done.exit_code == 0, done.output
    assert "by inputs, end of a pair with 0.weight" in " ".join(done.output.split())
    assert mw.load_layouts("plan.toml")["2.weight"] == {"tp": mw.Shard(1)}
    told = run(app, ["explain", "--model", "own_layouts:step", "--mesh", "dp=2,tp=2", "--layouts", "plan.toml"])
    assert told.exit_code == 0, told.output
    assert "all-reduce over tp" in told.output
    for more, words in (
        (["layouts", "own_layouts:none", "--mesh", "tp=2"], "no attribute"),
        (["layouts", "own_layouts:step", "--mesh", "tp"], "cannot read"),
        (["explain", "--layouts", "plan.toml"], "--layouts is for your own model"),
    ):
        failed = run(app, more)
        assert failed.exit_code == 2
        assert words in failed.output
