"""``meshwright train``: equal to one device on every mesh, with the communication of hand-written code."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli import app
from meshwright.errors import DataError, DesyncError, MeshError
from meshwright.ranks import runtime
from meshwright.train import OptionError, TrainConfig, launch, loop, show, subject
from meshwright.train.choices import TOLERANCES
from meshwright.train.loop import Summary, train
from meshwright.train.model import GPT, loss_of
from meshwright.train.plan import plan_for
from meshwright.train.plot import draw
from meshwright.train.verify import Reference, Verdict, relative, worse

SMALL = TrainConfig(layers=2, hidden=16, heads=4, seq=8, batch=4, steps=3, dtype="float64", verify=True, lr=1e-2)
VOCABULARY = 256


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of {i * i}\n" for i in range(300)))
    return str(path)


def config_for(mesh: str, text: str, **more: Any) -> TrainConfig:
    axes = tuple((name, int(n)) for name, n in (part.split("=") for part in mesh.split(",")))
    return replace(SMALL, mesh=axes, data=(text,), **more)


def simulated(config: TrainConfig, emit: Any = lambda kind, values: None) -> Summary:
    mesh = config.make_mesh()
    summaries = mw.simulate(lambda: train(config, mesh, emit), mesh)
    assert len({s.loss_last for s in summaries}) == 1
    return summaries[0]


def close(found: Summary, dtype: str) -> None:
    loss, grad = TOLERANCES[dtype]
    assert found.max_rel_loss_diff is not None
    assert found.max_rel_grad_diff is not None
    assert found.max_rel_loss_diff <= loss
    assert found.max_rel_grad_diff <= grad


# ---------------------------------------------------------------------------------------------- equal to one device

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("dp=1", {}),
    ("dp=4", {}),
    ("tp=4", {}),
    ("dp=2,tp=2", {}),
    ("tp=2,dp=2", {}),
    ("dp=2,tp=2", {"sequence_parallel": True}),
    ("tp=3", {}),
    ("tp=3", {"sequence_parallel": True}),
    ("dp=3", {"accumulate": 2}),
    ("dp=6", {}),  # more ranks than windows: some have none
    ("dp=4", {"fsdp": "dp"}),
    ("dp=4", {"shard_states": "dp"}),
    ("dp=2,tp=2", {"fsdp": "dp", "clip": 0.5}),
    ("dp=2,tp=2", {"shard_states": "dp", "accumulate": 2}),
    ("dp=2,tp=2", {"fsdp": "dp", "accumulate": 2, "sequence_parallel": True}),
    ("dp=2,tp=2", {"accumulate": 4}),
    ("dp=2,tp=2", {"dropout": 0.1}),
    ("dp=2,tp=2", {"dropout": 0.1, "sequence_parallel": True, "accumulate": 2}),
    ("dp=2,tp=2", {"optimizer": "sgd"}),
    ("dp=2,tp=2", {"clip": 0.1}),
    ("dp=2,tp=2", {"tie": True}),
    ("dp=2,tp=2", {"tie": True, "fsdp": "dp"}),
    ("dp=2,tp=2", {"tie": True, "sequence_parallel": True}),
    ("cp=4", {}),
    ("cp=2,tp=2", {"sequence_parallel": True}),
    ("dp=2,cp=2", {"fsdp": "dp", "dropout": 0.1}),
    ("dp=2,ep=2", {"experts": 5, "experts_per_token": 3, "fsdp": "dp", "clip": 0.5}),
    ("ep=2,tp=2", {"experts": 4, "shared_experts": 1, "sequence_parallel": True, "expert_width": 7}),
    ("dp=2,cp=2,ep=3", {"experts": 2, "shared_experts": 2, "accumulate": 2}),  # more ranks than experts
    ("dp=2,cp=2,tp=2,ep=2", {"experts": 4, "static": True, "layers": 1}),
    ("dp=2,tp=2", {"plan": "auto", "hardware": "cpu-gloo", "layers": 4}),
]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("mesh", "more"), RUNS, ids=[" ".join([mesh, *(f"{k}={v}" for k, v in more.items())]) for mesh, more in RUNS]
)
@pytest.mark.filterwarnings("ignore")  # of gathers, where nothing is divisible
def test_every_step_equals_one_device(mesh: str, more: dict[str, Any], text: str) -> None:
    found = simulated(config_for(mesh, text, **more))
    close(found, "float64")
    assert found.loss_last < found.loss_first


@pytest.mark.parametrize("more", [{}, {"fsdp": "dp", "static": True}], ids=["eager", "captured"])
def test_a_precision_is_that_of_one_device(more: dict[str, Any], text: str) -> None:
    """Both compute in bfloat16 and keep float32: what differs is how sums are rounded."""
    found = simulated(config_for("dp=2,tp=2", text, dtype="float32", precision="bf16", **more))
    close(found, "bfloat16")
    assert found.loss_last < found.loss_first


@pytest.mark.parametrize("more", [{}, {"static": True, "tie": True, "accumulate": 2}], ids=["eager", "captured"])
@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_gathered_in_float8_are_seen_so_by_one_device(more: dict[str, Any], text: str) -> None:
    """What differs is what float64 rounds; beside weights as they are stored it would be thousandths."""
    for mesh in ("dp=2,tp=2",) if "static" in more else ("dp=3", "dp=2,tp=2"):
        found = simulated(config_for(mesh, text, dtype="float64", gather="float8", fsdp="dp", **more))
        assert found.max_rel_loss_diff is not None
        assert found.max_rel_loss_diff < 1e-9
        assert found.max_rel_grad_diff is not None
        assert found.max_rel_grad_diff < 1e-7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision(dtype: str, text: str) -> None:
    close(simulated(config_for("dp=2,tp=2", text, dtype=dtype)), dtype)


def test_the_same_seed_gives_the_same_run_on_every_mesh(text: str) -> None:
    runs = [simulated(config_for(mesh, text, dropout=0.2)) for mesh in ("dp=1", "tp=2", "dp=4")]
    for run in runs[1:]:
        assert run.loss_last == pytest.approx(runs[0].loss_last, rel=1e-12)
    other = simulated(config_for("dp=1", text, dropout=0.2, seed=1))
    assert other.loss_last != pytest.approx(runs[0].loss_last, rel=1e-3)


def test_verification_sees_a_wrong_step(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # One device takes gradients that are 1e-6 too large: every part of the comparison must notice.
    right = Reference.backward

    def wrong(self: Reference, seed: int) -> float:
        loss = right(self, seed)
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad *= 1 + 1e-6
        return loss * (1 + 1e-8)

    monkeypatch.setattr(Reference, "backward", wrong)
    found = simulated(config_for("dp=2", text))
    assert found.max_rel_grad_diff == pytest.approx(1e-6, rel=1e-2)
    assert found.max_rel_loss_diff == pytest.approx(1e-8, rel=1e-2)


# ---------------------------------------------------------------------------------------------- communication


class HandWritten:
    """Collectives and bytes of one step as Megatron-LM and DistributedDataParallel would do it by hand.

    Ring model: an all-reduce over n ranks moves 2 (n-1)/n of the tensor per rank, the others half of it.
    """

    def __init__(self, config: TrainConfig) -> None:
        sizes = {"dp": 1, "tp": 1} | dict(config.mesh)
        self.config, self.dp, self.tp = config, sizes["dp"], sizes["tp"]
        item = config.torch_dtype.itemsize
        tokens = config.batch // self.dp * config.seq
        self.activation = tokens * config.hidden * item
        # Softmax over a split vocabulary: the maximum and the sum, one number per token.  (Megatron also reduces
        # the logit of the target there; here it stays Partial until the loss is one number.)
        self.softmax = 2 * tokens * item
        self.positions = config.seq * config.hidden * item
        self.norms = (2 * config.layers + 1) * 2 * config.hidden * item
        self.parameters = item * sum(self._local(n, p) for n, p in GPT(config).named_parameters())

    def _local(self, name: str, p: torch.Tensor) -> int:
        split = ("tokens.weight", "head.weight", "qkv.weight", "qkv.bias", "up.weight", "up.bias")
        return p.numel() // (self.tp if name.endswith((*split, "out.weight", "down.weight")) else 1)

    def step(self) -> tuple[dict[str, int], int]:
        """(kind to number, bytes)."""
        config, dp, tp = self.config, self.dp, self.tp
        kinds = {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0}
        moved = 0.0
        micro = config.accumulate
        if tp > 1:
            # Forward: after the embedding and after each half of a block.  Backward: before each half of a block
            # and before the head.
            n = 2 * (2 * config.layers + 1)
            if config.sequence_parallel:  # each all-reduce becomes a reduce-scatter and an all-gather
                kinds["all_gather"] += n * micro
                kinds["reduce_scatter"] += n * micro
            else:
                kinds["all_reduce"] += n * micro
            kinds["all_reduce"] += 2 * micro
            moved += (n * self.activation + self.softmax) * micro * 2 * (tp - 1) / tp
        gradients = self.parameters
        if config.sequence_parallel:  # these saw a part of the sequence: their gradients are summed over tp too
            both = self.norms + self.positions
            kinds["all_reduce"] += 1
            moved += both * 2 * (dp * tp - 1) / (dp * tp)
            gradients -= both
        if dp > 1:
            kinds["all_reduce"] += 1
            moved += gradients * 2 * (dp - 1) / dp
        return {kind: n for kind, n in kinds.items() if n}, round(moved)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp=2", {}),
        ("dp=4", {}),
        ("tp=2", {}),
        ("tp=4", {}),
        ("dp=2,tp=2", {}),
        ("tp=2", {"sequence_parallel": True}),
        ("dp=2,tp=2", {"sequence_parallel": True}),
        ("dp=4", {"accumulate": 4}),
        ("dp=2,tp=2", {"accumulate": 4}),
        ("dp=2,tp=2", {"dropout": 0.1}),
        ("dp=2,tp=2", {"layers": 3, "hidden": 32, "dtype": "float32"}),
    ],
    ids=str,
)
def test_communication_is_that_of_hand_written_code(mesh: str, more: dict[str, Any], text: str) -> None:
    config = config_for(mesh, text, verify=False, steps=2, **more)
    found = simulated(config)
    kinds, moved = HandWritten(config).step()
    assert found.collectives_per_step == kinds
    assert found.bytes_per_step == pytest.approx(moved, abs=8)


def test_communication_is_the_same_in_every_step(text: str) -> None:
    steps: list[Any] = []

    def emit(kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            steps.append((values["collectives"], values["bytes"]))

    simulated(config_for("dp=2,tp=2", text, verify=True, steps=3), emit)
    assert steps[0] == steps[1] == steps[2]


def test_gradients_travel_once_per_step(text: str) -> None:
    once = simulated(config_for("dp=4", text, verify=False, steps=2))
    four = simulated(config_for("dp=4", text, verify=False, steps=2, accumulate=4))
    assert four.bytes_per_step == once.bytes_per_step
    assert four.collectives_per_step == once.collectives_per_step


# ---------------------------------------------------------------------------------------------- model and plan


def test_model_predicts_the_next_byte_only_from_earlier_ones() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    x = torch.randint(VOCABULARY, (2, 8))
    y = x.clone()
    y[:, 5:] = 7
    a, b = model(x), model(y)
    assert a.shape == (2, 8, VOCABULARY)
    assert torch.equal(a[:, :5], b[:, :5])
    assert loss_of(model, x, y).item() == pytest.approx(math.log(VOCABULARY), rel=0.1)


def test_qkv_rows_are_whole_heads() -> None:
    # A part of the rows is an attention of fewer heads on its own: that is what lets tp split them.
    torch.manual_seed(0)
    attention = GPT(SMALL).blocks[0].attention
    half = type(attention)(SMALL.hidden, SMALL.heads // 2, 0.0, dtype=torch.float64)
    x = torch.randn(2, 8, SMALL.hidden, dtype=torch.float64)
    partial = []
    for i in range(2):
        rows = slice(i * 24, (i + 1) * 24)
        half.qkv.weight.data, half.qkv.bias.data = attention.qkv.weight[rows], attention.qkv.bias[rows]
        half.out.weight.data = attention.out.weight[:, i * 8 : (i + 1) * 8]
        half.out.bias.data = attention.out.bias / 2
        partial.append(half(x))
    torch.testing.assert_close(partial[0] + partial[1], attention(x))


def test_tied_head() -> None:
    model = GPT(replace(SMALL, tie=True))
    assert model.head.weight is model.tokens.weight
    assert "head.weight" not in dict(model.named_parameters())
    torch.manual_seed(3)
    first = GPT(replace(SMALL, tie=True)).tokens.weight
    assert first.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"experts": 4}, {"experts": 4, "shared_experts": 1}], ids=lambda more: str(len(more))
)
def test_every_glob_of_the_plan_matches(tie: bool, sequence_parallel: bool, more: dict[str, int]) -> None:
    from fnmatch import fnmatch

    model = GPT(replace(SMALL, tie=tie, **more))
    mesh, has = mw.Mesh({"dp": 2, "tp": 2}), {"experts": "experts" in more, "shared": "shared_experts" in more}
    plan = plan_for(mesh, sequence_parallel=sequence_parallel, tie=tie, **has)
    names, modules = dict(model.named_parameters()), dict(model.named_modules())
    for globs, among in ((plan.layouts, names), (plan.inputs, modules), (plan.outputs, modules)):
        for glob in globs:
            assert any(fnmatch(name, glob) for name in among), glob
    assert bool(plan.inputs) == sequence_parallel


def test_plan_names_the_axes_that_it_knows() -> None:
    with pytest.raises(MeshError, match=r"axis 'xp' .* knows dp \(splits the batch\), cp"):
        plan_for(mw.Mesh({"dp": 2, "xp": 2}))


# ---------------------------------------------------------------------------------------------- options


def test_defaults_of_the_optimizer() -> None:
    assert TrainConfig().learning_rate == 3e-3
    assert TrainConfig(optimizer="sgd").learning_rate == 0.1
    sgd = TrainConfig(optimizer="sgd", lr=0.5).make_optimizer(torch.nn.Linear(2, 2))
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.5, 0.9)
    assert TrainConfig(batch=3, seq=5, accumulate=2).tokens_per_step == 30


PP = (("pp", 2), ("dp", 2))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": (("dp", 2),), "chunks": 2}, "--chunks 2: .* has no axis of stages: add one, e.g. --mesh pp=2,dp=2"),
        ({"mesh": PP, "schedule": "1f1b"}, "--schedule 1f1b orders micro-batches: add --micro-batches 8"),
        ({"mesh": PP, "limit": 3}, "--limit 3 bounds micro-batches: add --micro-batches 8"),
        ({"mesh": PP, "chunks": 2, "micro_batches": 4}, "--chunks 2: of --schedule 1f1b a rank has one stage"),
        (
            {"mesh": PP, "schedule": "v", "micro_batches": 4},
            "--layers 2: pp=2 with 2 on each rank makes 4 stages, and each has a block: add --layers 4",
        ),
        ({"mesh": PP, "micro_batches": 8, "batch": 8}, "--batch 8, which 2 ranks share, .* take --batch 16"),
        ({"mesh": PP, "schedule": "2f2b", "micro_batches": 4}, "--schedule 2f2b: one of 1f1b, gpipe"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_options_of_pipelines(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainConfig(**given)
    made = TrainConfig(mesh=PP, micro_batches=8, schedule="looped", chunks=2, limit=9, layers=4)
    assert (made.batch, TrainConfig(mesh=PP).batch) == (16, 8)
    assert made.pipeline == ("pipeline:micro_batches=8,schedule=looped,chunks=2,limit=9",)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(OptionError, match=r"--heads 3: take a multiple of the heads, e\.g\. --hidden 66"):
        TrainConfig(hidden=64, heads=3)
    with pytest.raises(OptionError, match="--layers 0"):
        TrainConfig(layers=0)
    with pytest.raises(OptionError, match="'ep' splits experts, and there are none: add --experts"):
        TrainConfig(mesh=(("ep", 2),))
    with pytest.raises(OptionError, match="--shared-experts 1: there are no experts"):
        TrainConfig(shared_experts=1)
    with pytest.raises(OptionError, match="--experts-per-token 5: there are --experts 4"):
        TrainConfig(experts=4, experts_per_token=5)


# ---------------------------------------------------------------------------------------------- ranks that disagree


def test_text_that_one_rank_cannot_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = subject.load_corpus

    def flaky(files: Any, seq: int) -> Any:
        if runtime.RT.rank == 1:
            raise DataError("--data text.txt: there is no such file")
        return right(files, seq)

    monkeypatch.setattr(subject, "load_corpus", flaky)
    config = config_for("dp=3", text)
    mesh, seen = config.make_mesh(), []

    def rank() -> None:
        try:
            train(config, mesh, lambda kind, values: None)
        except DataError as error:
            seen.append(str(error))

    mw.simulate(rank, mesh)
    told = "reading the text failed on rank 1: --data text.txt: there is no such file"
    assert sorted(seen) == ["--data text.txt: there is no such file", told, told]


def test_text_that_no_rank_can_read() -> None:
    config = config_for("dp=2", "/nowhere/text.txt")
    mesh = config.make_mesh()
    with pytest.raises(DataError, match=r"^--data /nowhere/text\.txt: there is no such file"):
        mw.simulate(lambda: train(config, mesh, lambda kind, values: None), mesh)


def test_ranks_with_other_options_or_texts(text: str, tmp_path: Path) -> None:
    config = config_for("dp=2", text)
    mesh = config.make_mesh()
    other = tmp_path / "other.txt"
    other.write_text("another text " * 20)
    for changed, report in (
        (
            replace(config, lr=0.5),
            r"different options: rank 0: .*lr=0\.01.*rank 1: .*lr=0\.5",
        ),
        (replace(config, data=(str(other),)), "different texts"),
    ):
        own = {0: config, 1: changed}
        with pytest.raises(DesyncError, match=report):
            mw.simulate(lambda own=own: train(own[runtime.RT.rank], mesh, lambda k, v: None), mesh)


# ---------------------------------------------------------------------------------------------- verdicts


def test_differences() -> None:
    a = torch.tensor([3.0, 4.0])
    assert relative(a, a) == 0.0
    assert relative(a * 1.5, a) == pytest.approx(0.5)
    assert relative(a, torch.zeros(2)) == math.inf
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative(None, None) == 0.0
    assert relative(None, a) == relative(a, None) == math.inf
    assert math.isnan(relative(a * math.nan, a))
    assert worse(math.nan, 1.0)
    assert not worse(1.0, math.nan)
    assert not worse(math.nan, math.nan)


def test_nan_does_not_pass() -> None:
    assert Verdict(1e-9, 1e-8, 1e-10, 1e-9).passed
    assert not Verdict(1e-9, 1e-8, math.nan, 0.0).passed
    assert not Verdict(1e-9, 1e-8, 0.0, math.nan).passed
    assert not Verdict(1e-9, 1e-8, 1e-8, 0.0).passed


# ---------------------------------------------------------------------------------------------- what is shown


def events(text: str, mesh: str = "dp=2,tp=2", **more: Any) -> tuple[TrainConfig, list[tuple[str, Any]]]:
    config = config_for(mesh, text, **more)
    told: list[tuple[str, Any]] = []
    simulated(config, lambda kind, values: told.append((kind, values)))
    return config, told


def shown(config: TrainConfig, told: list[tuple[str, Any]], terminal: bool = False) -> tuple[show.Show, str]:
    out = io.StringIO()
    listener = show.Show(config, Console(file=out, width=100, force_terminal=terminal, color_system=None))
    for kind, values in told:
        listener(kind, values)
    listener.close()
    return listener, out.getvalue()


def test_what_is_shown(text: str) -> None:
    config, told = events(text, dropout=0.1, clip=1.0, accumulate=2)
    listener, out = shown(config, told)
    for expected in (
        "byte-level GPT, 2 layers, hidden 16, 4 heads",
        "4 × 8 bytes × 2 micro-steps, adamw, lr 0.01",
        "dp=2 × tp=2: 4 processes on cpu (gloo)",
        "dropout 0.1, clip 1, verified against one device",
        "rank 3",
        "step 3/3",
        "collectives",
        "tokens/s",
        "off by",
        "all-reduce",
        "passed",
    ):
        assert expected in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if ".weight" in line}
    assert rows["blocks.*.attention.qkv.weight"] == ["2", "48", "×", "16", "replicate", "Shard(0)", "24", "×", "16"]
    assert rows["blocks.*.mlp.down.weight"] == ["2", "16", "×", "64", "replicate", "Shard(1)", "16", "×", "32"]
    assert rows["positions.weight"] == ["1", "8", "×", "16", "replicate", "replicate", "8", "×", "16"]
    assert len(listener.steps) == 3
    assert listener.verdict is not None
    assert listener.verdict.passed


def test_terminal_has_a_bar(text: str) -> None:
    config, told = events(text, "dp=1", verify=False)
    _, out = shown(config, told, terminal=True)
    assert "━" in out
    assert "step 3/3" in out


def test_few_lines_without_a_terminal(text: str) -> None:
    config, told = events(text, "dp=1", verify=False)
    (step,) = [values for kind, values in told if kind == "step"][-1:]
    many = [("step", {**step, "step": i}) for i in range(1000)]
    _, out = shown(replace(config, steps=1000), many)
    assert len(out.splitlines()) == 11


def test_warnings_are_shown_once(text: str) -> None:
    _, out = shown(SMALL, [("warning", {"text": "gathered [x]"})] * 3)
    assert out == "note: gathered [x]\n"


def test_mesh_grid() -> None:
    def grid(*axes: tuple[str, int]) -> list[list[str]]:
        out = io.StringIO()
        Console(file=out, width=100).print(show.mesh_grid(TrainConfig(mesh=axes)))
        return [line.split() for line in out.getvalue().splitlines()]

    assert grid(("dp", 3)) == [["dp", "0", "dp", "1", "dp", "2"], ["rank", "0", "rank", "1", "rank", "2"]]
    assert grid(("dp", 2), ("tp", 2))[2] == ["dp", "1", "rank", "2", "rank", "3"]
    assert grid(("dp", 65)) == [["65", "ranks"]]


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_500_000, "2.5 MB"), (7e12, "7000.0 GB")]
)
def test_bytes_for_people(n: float, text: str) -> None:
    assert show.in_bytes(n) == text


@pytest.mark.parametrize("name", ["loss.png", "loss.svg"])
@pytest.mark.parametrize("verify", [False, True])
def test_plot(name: str, verify: bool, text: str, tmp_path: Path) -> None:
    config, told = events(text, "dp=1", verify=verify)
    listener, _ = shown(config, told)
    draw(tmp_path / name, "title", listener.steps, 1e-9 if verify else None)
    assert (tmp_path / name).stat().st_size > 1000


def test_failed_verification_has_exit_code_1(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, told = events(text, "dp=1")
    told[-1][1]["verdict"].loss = 1.0

    def replay(given: TrainConfig, listener: show.Show) -> None:
        for kind, values in told:
            listener(kind, values)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_processes", replay)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["train", "--verify", "--data", text, "--seq", "8", "--json"])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.stderr
    assert "verification failed" in result.stderr
    assert result.stdout.count("\n") == 1
    assert (tmp_path / "runs" / "loss.png").exists()


def test_windows_of_the_reference_are_those_of_the_mesh(text: str) -> None:
    config = config_for("dp=2", text)
    mesh = config.make_mesh()
    trained = loop.subject_of(config)

    def rank() -> list[torch.Tensor]:
        trainer = loop.Trainer(config, mesh, trained)
        return [mw.unshard(t) for pair in itertools.islice(trainer.batches, 2) for t in pair]

    expected = [t for pair in itertools.islice(Reference(config, trained).batches, 2) for t in pair]
    for got in mw.simulate(rank, mesh):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
