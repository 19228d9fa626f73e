"""``mw.verify``: right steps are right, wrong ones are named, and what cannot be verified says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.dispatch import forget_ops
from meshwright.errors import CaptureError, LayoutError, ShardError, VerifyError
from meshwright.rules import RULES, notation
from meshwright.verification import Departure, Verification
from meshwright.verification.journal import Journal, RankJournal
from meshwright.verification.watch import Observed

MESH = mw.Mesh({"dp": 2, "tp": 2})
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {"up.*": COLUMN, "down.weight": ROW}
SPLIT = {"dp": mw.Shard(0)}
PASSES = ["data-parallel-optimization", "gradient-merge:k_steps=2,weighted=false"]  # of batch norm


class Net(nn.Module):
    """A bit of everything that a step may hold: a buffer that is written to, dropout, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids).flatten(0, 1))
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.25, self.training)
        return F.linear(x, self.table.weight)


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids), labels.flatten())


def subject() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Net(), (torch.randint(12, (4, 3)), torch.randint(12, (4, 3)))


def verified(mesh: mw.Mesh = MESH, layouts: Any = LAYOUTS, **said: Any) -> Verification:
    model, batch = subject()
    return mw.verify(model, said.pop("loss_fn", loss_fn), batch, mesh, layouts, **{"batch": SPLIT, "steps": 1, **said})


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (mw.Mesh({"tp": 2}), {"clip_grad_norm": 0.1, "batch": None}),
        (mw.Mesh({"dp": 3, "tp": 4}), {"modes": ["eager"], "shard_states": "dp"}),
        (mw.Mesh({"dp": 2, "tp": 1}), {"modes": ["captured"], "passes": PASSES}),
    ],
)
def test_right_is_right(mesh: mw.Mesh, said: dict[str, Any]) -> None:
    report = verified(mesh, **said)
    assert report.passed, str(report)
    for mode in report.covered:
        assert not mode.missed, mode.missed
        assert mode.values["forward"] > 10
        assert mode.values["backward"] > 10
        assert mode.values["loaded"] > 20


def folded(model: nn.Module, batch: Any) -> torch.Tensor:
    """Of what captured programs fold: what converts nothing, constants, and what nothing depends on."""
    h = model.up(model.table(batch[0])).chunk(2)[0]
    h.cos()
    return (h.to(h.dtype).softmax(-1) * (torch.arange(8) + 1).to(h.dtype)).square().mean()


@pytest.mark.parametrize("lies", [False, True])
def test_what_a_program_folds_is_neither_missed_nor_blamed(lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if lies:
        monkeypatch.setitem(RULES, "softmax", lambda x, *a, **k: notation("... d -> ... d", x))
    forget_ops()
    try:
        said = {"loss_fn": folded, "modes": ["captured"], "save": False}
        report = verified(mw.Mesh({"tp": 2}), {"up.*": COLUMN}, batch=None, **said)
    finally:
        monkeypatch.undo()
        forget_ops()
    assert [d.op for d in report.departures] == ["softmax"] * lies
    assert report.covered[0].missed == ()


def written_base(model: nn.Module, batch: Any) -> torch.Tensor:
    """Torch makes the ``grad_fn`` of a view of what was written to anew, and ends a process that adds a hook then."""
    h = model.up(model.table(batch[0]).flatten(0, 1))
    seen = h.t()
    h.mul_(2.0)
    return seen.to(seen.dtype).sin().mean()


@pytest.mark.parametrize("passes", [(), ["gradient-merge:k_steps=2"]])
def test_gradients_of_captured_steps_are_told_once(passes: Any) -> None:
    """Passes name what they add gradients up in, too."""
    report = verified(loss_fn=written_base, passes=passes, modes=["captured"], save=False)
    assert report.passed, report
    assert not report.notes, report


def hooked(params: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(params, lr=0.1)

    def halve(opt: Any, *args: Any) -> None:
        for p in opt.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    made.register_step_pre_hook(halve)
    return made


def some(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.ndim > 1], lr=0.1)


@pytest.mark.parametrize("optimizer", [hooked, some])
@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_gradients_that_a_hook_writes_to_or_no_optimizer_takes(optimizer: Any, mode: str) -> None:
    report = verified(optimizer=optimizer, modes=[mode], steps=2)
    assert report.passed, str(report)
    counted = report.covered[0].values
    assert counted["stepped" if optimizer is hooked else "grad"] > 10


@pytest.mark.parametrize(
    ("said", "unused"),
    [
        ({"layouts": {"up.*": [mw.Replicate(), mw.Shard(0)]}, "batch": [mw.Shard(0), mw.Replicate()]}, []),
        ({"layouts": {"up.*": mw.Layout(MESH, COLUMN)}, "batch": {"0": SPLIT, "1": SPLIT}}, []),
        ({"layouts": {"up.*": {"tp": mw.Replicate()}}, "batch": None, "shard_states": ("dp",)}, ["tp"]),
    ],
)
def test_axes_are_used_by_name_and_by_place(said: dict[str, Any], unused: list[str]) -> None:
    report = verified(modes=["eager"], save=False, **said)
    assert [n.split("'")[1] for n in report.notes] == unused


class Heavy(torch.optim.Optimizer):
    """A class of the user's own, with a tensor and a number as states; one that mixes elements, if asked to."""

    def __init__(self, params: Any, mixes: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.mixes = mixes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 / state["count"])
            p.sub_(state["mean"] / (state["mean"].norm() if self.mixes else 1), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(("said", "mixes"), [({}, False), ({"fsdp": "dp"}, False), ({}, True)])
def test_an_optimizer_of_the_users_own_is_taken_by_its_word(said: dict[str, Any], mixes: bool) -> None:
    said = {"optimizer": lambda params: Heavy(params, mixes), **said}
    if mixes:
        with pytest.raises(ShardError, match=r"by='element', but Heavy does not update shards.*Pass by='parameter'"):
            verified(by="element", **said)
    report = verified(by="parameter" if mixes else "element", **said)
    assert not report.departures


def test_the_load_brings_back_buffers_that_are_true_or_false() -> None:
    model, batch = subject()
    model.register_buffer("mask", torch.ones(3, 3).tril().bool())
    report = mw.verify(model, loss_fn, batch, MESH, LAYOUTS, batch=SPLIT, modes=["eager"], steps=1)
    assert report.passed, str(report)


def test_the_model_stays() -> None:
    model, batch = subject()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    mw.verify(model, loss_fn, batch, MESH, LAYOUTS, batch=SPLIT, modes=["eager"], steps=1)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_default_dtype() is torch.float32


def test_a_rank_of_its_own_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.ranks import runtime

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if runtime.RT.rank == 3 else 1.0)  # HERE

    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# HERE"))
    report = verified(loss_fn=lambda m, b: loss_fn(m, b) + own(m.up.weight).sum(), modes=["eager"])
    (found,) = report.departures
    assert (found.op, found.line, found.phase) == ("mul", f"test_verify.py:{line}", "forward")
    assert "hold different copies" in found.text


def compiled(make: Any = torch.optim.AdamW, loss: Any = loss_fn, rows: int = 4, **said: Any) -> Any:
    model, batch = subject()
    batch = tuple(t[:rows] for t in batch)
    said = {"mesh": MESH, "layouts": LAYOUTS, "batch": SPLIT, **said}
    return mw.compile_step(model, loss, make(model.parameters()), batch, **said)


def swapped(model: nn.Module, batch: Any) -> torch.Tensor:
    """The same ops as in ``twice``, given other values."""
    loss = loss_fn(model, batch)
    return loss.sin() - loss


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_fn(model, batch)
    return loss - loss.sin()


def test_digests_tell_steps_apart_and_ranks_alike() -> None:
    def digests(*made: Any) -> Any:
        return mw.simulate(lambda: [make().digest for make in made], MESH)

    adam = lambda params: torch.optim.AdamW(params, lr=0.5)  # noqa: E731  a rate may change
    ranks = digests(compiled, lambda: compiled(adam))
    assert {word for rank in ranks for word in rank} == {verified(modes=["captured"], steps=1, save=False).digest}
    others = [
        lambda: compiled(lambda p: torch.optim.AdamW(p, weight_decay=0.1)), lambda: compiled(layouts={}),
        lambda: compiled(batch=None), lambda: compiled(shard_states="dp"), lambda: compiled(passes=PASSES[:1]),
        lambda: compiled(loss=twice), lambda: compiled(loss=swapped),
    ]  # fmt: skip
    found = digests(*others)
    assert len({*ranks[0], *found[0]}) == 1 + len(others)
    assert all(rank == found[0] for rank in found)


def test_a_report_is_kept_and_checked(tmp_path: Path) -> None:
    report = verified(steps=1, save=False)
    report.save(tmp_path / "report.json")
    kept = Verification.load(tmp_path / "report.json")
    assert kept == report

    def cluster(layouts: Any) -> None:
        model, batch = subject()
        optimizer = torch.optim.AdamW(model.parameters())
        kept.check(mw.compile_step(model, loss_fn, optimizer, batch, mesh=MESH, layouts=layouts, batch=SPLIT))

    mw.simulate(lambda: cluster(LAYOUTS), MESH)
    with pytest.raises(VerifyError, match="has the digest"):
        mw.simulate(lambda: cluster({"up.weight": ROW}), MESH)
    wrong = replace(kept, departures=(Departure("eager", 0, "forward", "mul", "a.py:1", (), "x", "", "off", 1.0),))
    with pytest.raises(VerifyError, match="the verified step failed: eager, step 0, forward: mul"):
        mw.simulate(lambda: wrong.check(compiled()), MESH)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(VerifyError, match="is no report of"):
        Verification.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"passed": False}, "says both"), ({"digest": None}, "digest is None"), ({"seconds": "1"}, "seconds is '1'"),
        ({"departures": {}}, "departures is {}"), ({"notes": "x"}, "notes is 'x'"), ({"more": 1}, "more"),
    ],
)  # fmt: skip
def test_a_report_that_was_changed_is_none(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    report = Verification("title", (), (), (), "digest", 1.0)
    (tmp_path / "report.json").write_text(json.dumps(json.loads(report.to_json()) | changed))
    with pytest.raises(VerifyError, match=f"is no report of mw.verify.*{words}"):
        Verification.load(tmp_path / "report.json")


def test_a_difference_without_bounds_is_kept(tmp_path: Path) -> None:
    departure = Departure("eager", 0, "forward", "mul", "a.py:1", (), "x", "", "off", float("inf"))
    report = Verification("title", (departure,), (), (), "", 1.0)
    report.save(tmp_path / "report.json")
    kept = Verification.load(tmp_path / "report.json")
    assert kept == report
    assert kept.to_json() == report.to_json()


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ({"loss_fn": lambda m, b: m(b[0])}, VerifyError, "shape \\(12, 12\\): return the loss, a scalar"),
        ({"loss_fn": lambda m, b: loss_fn(m, b).detach()}, VerifyError, "does not depend on any parameter"),
        ({"batch": {"dp": mw.Shard(2)}}, LayoutError, "batch.0 of shape \\(4, 3\\) does not lie as"),
        ({"layouts": {"upp.weight": COLUMN}, "modes": ["eager"]}, ShardError, "close ones: up.weight"),
        ({"batched": SPLIT}, VerifyError, "no option 'batched'; did you mean 'batch'"),
        ({"modes": ["eagre"]}, VerifyError, "did you mean 'eager'"),
        ({"steps": 0}, VerifyError, "at least one update"),
        ({"loss_fn": lambda m, b: loss_fn(m, b) if b[0].sum() > 0 else 0}, CaptureError, "modes=\\['eager'\\]"),
    ],
)
def test_bad_input_is_named(said: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        verified(**{"modes": ["eager"], **said} if error is not CaptureError else said)


def test_an_axis_without_use_is_said() -> None:
    report = verified(mw.Mesh({"dp": 2, "pp": 2}), {}, modes=["eager"])
    assert report.passed
    assert any("no layout names the axis 'pp'" in n for n in report.notes)


def test_an_op_without_float64_is_said_with_what_to_do() -> None:
    def grouped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([2, 4], dtype=torch.int32)
        return F.grouped_mm(x, torch.stack([model.weight.t(), model.weight.t()]), offs=ends).square().mean()

    with pytest.raises(VerifyError, match=r"in float64 on one device.* raised RuntimeError: .*\n*.*experts_implement"):
        mw.verify(nn.Linear(8, 8, bias=False), grouped, torch.randn(4, 8), MESH, {}, modes=["eager"])


@pytest.mark.parametrize("ask", [lambda h: h.contiguous(), lambda h: h.to(h.dtype), lambda h: h.expand_as(h)])
def test_a_value_that_an_op_gives_back_is_one_value_with_all_its_uses(ask: Any) -> None:
    """Its gradient on one device is a sum over the uses of both; ranks may have made another value."""

    def shared(model: Any, batch: Any) -> torch.Tensor:
        h = model.down(model.up(model.table(batch[0])))  # a sum over ranks, which is known from the next line on
        return (h.cos() + ask(h).sin()).square().mean()

    report = verified(loss_fn=shared, modes=["eager"])
    assert report.passed
    assert not [n for n in report.notes if n.startswith("without consequence")], report


@pytest.mark.parametrize(("mode", "off"), [("eager", 0.0), ("captured", 0.0), ("eager", 1e-6)])
def test_what_a_model_asks_for_in_float32_is_compared_in_float64(mode: str, off: float) -> None:
    """Norms and softmax of many models do: rounding would hide what is wrong."""

    from meshwright.ranks import runtime

    def upcast(model: Any, batch: Any) -> torch.Tensor:
        h = model.up(model.table(batch[0])).to(torch.float32)
        scale = 1 + off * (runtime.RT.rank == 1)
        h = h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6) * scale
        return model.down(h.softmax(-1, dtype=torch.float32).to(model.down.weight.dtype)).square().mean()

    report = verified(loss_fn=upcast, modes=[mode], save=False)
    assert report.passed == (not off), report
    assert not off or report.departures[0].op == "mul"


def test_float32_stays_where_an_op_has_nothing_else() -> None:
    def narrow(model: Any, batch: Any) -> torch.Tensor:
        h = model.up(model.table(batch[0])).float()
        if h.dtype is torch.float64:
            raise RuntimeError("Expected mat_a to be Float32, got Double")
        return model.down(h.to(model.down.weight.dtype)).square().mean()

    report = verified(loss_fn=narrow, modes=["eager"], save=False)
    assert report.passed
    assert any("compared to 1e-4" in n for n in report.notes), report.notes


@pytest.mark.parametrize(("what", "departs"), [("param", False), ("grad", True)])
def test_what_adam_makes_of_gradients_that_are_zero_is_no_departure(what: str, departs: bool) -> None:
    """The gradient of a bias of keys is rounding, which Adam divides by no less than 1e-8: numbers of a ViT."""
    seen = [
        Observed((what, "k.bias"), "", "", torch.tensor([x], dtype=torch.float64), name="k.bias")
        for x in (1.26964968e-14, 1.14696418e-13)
    ]
    journal = Journal(1)
    journal.note(0, seen[0])
    ranks = RankJournal(journal, "eager")
    ranks.tell(0, 0, seen[1])
    assert bool(ranks.departed) == departs
