"""The command line: help, and bad input before any process starts."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from meshwright.cli import Commands, app
from meshwright.cli import train as command
from meshwright.cli.options import options_of, values_of
from meshwright.explanation import page
from meshwright.passes import registered
from meshwright.train import OptionError, TrainConfig, launch, plot
from meshwright.train.choices import PASSES
from meshwright.train.options import COUNT, option, options_in
from tests.support import fresh

RUNNER = CliRunner()
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def run(*words: str, **environment: str) -> Any:
    return RUNNER.invoke(app, list(words), env={**environment, "NO_COLOR": "1", "TERM": "dumb"})


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_help_and_version() -> None:
    assert "train" in run("--help").output
    assert re.search(r"meshwright 0\.\d.*torch 2\.", run("--version").output)
    assert run().exit_code == 2  # no command: the help


@pytest.mark.parametrize("name", Commands.listed)
def test_help_lists_the_first_lines_of_commands(name: str) -> None:
    assert Commands.listed[name] in " ".join(plain(run(name, "--help").output).split())


def test_help_of_train_names_every_option() -> None:
    text = plain(run("train", "--help").output)
    for made in options_in(TrainConfig).values():
        assert made.flag in text
    for more in ("--json", "--plot", "--no-plot", "Exit codes", "standard library"):
        assert more in text
    assert run("train", "-h").exit_code == 0


def test_every_option_reaches_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 99)
    (tmp_path / "b").write_bytes(b"y" * 99)
    seen: list[TrainConfig] = []
    monkeypatch.setattr(launch, "run_processes", lambda config, show: seen.append(config))
    line = (
        "train --mesh dp=2,tp=3 --threads 2 --seq 9 --batch 6 --steps 7 --accumulate 2 --optimizer sgd "
        "--lr 0.5 --clip 1.5 --seed 4 --layers 1 --hidden 12 --heads 3 --tie --dropout 0.25 --dtype float64 "
        "--shard-states dp --sequence-parallel --verify --no-plot --data a b"
    )
    result = run(*line.split())
    assert result.exit_code == 0, result.output
    (config,) = seen
    assert config == TrainConfig(
        mesh=(("dp", 2), ("tp", 3)), data=("a", "b"), shard_states="dp", sequence_parallel=True, layers=1,
        hidden=12, heads=3, seq=9, batch=6, steps=7, accumulate=2, optimizer="sgd", lr=0.5, clip=1.5,
        dropout=0.25, tie=True, seed=4, dtype="float64", verify=True, threads=2,
    )  # fmt: skip


def test_a_new_option_is_one_field() -> None:
    @dataclass(frozen=True)
    class More(TrainConfig):
        warmup: int = option(1, "--warmup", "Training", "Steps until the learning rate is reached.", COUNT)

    made, seen = typer.Typer(), []

    @made.command()
    @options_of(More)
    def more(**given: Any) -> None:
        seen.append(More(**values_of(More, given)))

    assert RUNNER.invoke(made, ["--warmup", "3", "--mesh", "dp=2", "--data", "a"]).exit_code == 0
    assert seen == [More(warmup=3, mesh=(("dp", 2),), data=("a",))]
    text = plain(RUNNER.invoke(made, ["--help"], env={"COLUMNS": "200"}).output)
    assert "Steps until the learning rate is reached." in text
    with pytest.raises(OptionError, match=r"--warmup 0: at least 1 was expected"):
        More(warmup=0)


def test_help_and_what_is_wrong_are_said_without_pytorch() -> None:
    lines = [
        ("--version", 0), *((f"{name} --help", 0) for name in ("", *Commands.listed, "checkpoint show")),
        ("nothing", 2), ("train --mesh dp=x", 2), ("train --static --pass nothing", 2), ("train --data nowhere.txt", 2),
        ("train --steps 0", 2), ("train --steps many", 2), ("train --nothing", 2), ("explain --pass nothing", 2),
        ("explain --mesh dp=0", 2), ("explain --rank 1", 2), ("train --mesh dp=2 --shard-states tp", 2),
    ]  # fmt: skip
    code = f"""
import sys
sys.orig_argv, sys.argv = ["python", "-m", "meshwright"], ["meshwright"]
from meshwright.cli import main
for words, code in {lines!r}:
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as end:
        assert end.code == code, (words, end.code)
    assert "torch" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_command_imports_what_it_computes_with_at_its_first_use() -> None:
    code = """
import sys
sys.orig_argv, sys.argv = ["python", "-m", "meshwright"], ["meshwright"]
import meshwright.resharding.executor, meshwright.rules, meshwright as mw
assert "meshwright.tensor.autograd_functions" not in sys.modules
missing = [name for name in mw.__all__ if not hasattr(mw, name)]
assert not missing, missing
assert "meshwright.tensor.autograd_functions" in sys.modules and callable(mw.reshard)
"""
    fresh.run(code, "torch")


def test_extras_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib.backend_bases", "jinja2"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(plot, "can_draw", lambda: False)
    assert "--plot needs matplotlib: pip install 'meshwright[plot]'" in run("train", "--plot", "a.png").stderr
    page.template.cache_clear()
    with pytest.raises(ImportError, match=r"^a page of HTML needs jinja2: pip install 'meshwright\[html\]'$"):
        page.template()


def test_a_picture_that_nobody_asked_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_processes", lambda config, show: None)
    monkeypatch.setattr(command, "can_draw", lambda: False)
    done = run("train")
    assert done.exit_code == 0, done.stderr
    assert not list(Path().iterdir())


def test_passes_that_come_with_the_package_are_known_without_it() -> None:
    assert list(PASSES) == [name for name, made in registered().items() if made.__module__.startswith("meshwright.")]


@pytest.mark.parametrize(
    ("words", "report"),
    [
        ("--mesh dp", r"cannot read 'dp' in mesh 'dp': write axis=size"),
        ("--mesh dp=2,dp=2", r"axis 'dp' appears twice"),
        ("--mesh dp=0", r"axis 'dp' has size 0"),
        ("--mesh dp=2,xp=2", r"axis 'xp' of Mesh.*knows dp \(splits the batch\), cp"),
        ("--mesh dp=2 --fsdp sp", r"--fsdp sp: unknown axis; Mesh\(dp=2\) has the axes dp"),
        ("--mesh dp=2 --shard-states sp", r"--shard-states sp: unknown axis"),
        (
            "--mesh dp=2,tp=2 --fsdp tp",
            r"splits the parameters over tp already; take --fsdp dp",
        ),
        ("--mesh dp=2 --gather float8", "only parameters that are stored split are gathered: add --fsdp dp"),
        ("--mesh dp=2 --fsdp dp --shard-states dp", r"leave --shard-states out"),
        ("--mesh dp=2 --sequence-parallel", r"no such axis: add one, e\.g\. --mesh dp=2,tp=2"),
        ("--hidden 10 --heads 4", r"--hidden 10 cannot be split over --heads 4.*--hidden 12"),
        ("--optimizer lion", r"--optimizer lion: one of adamw, sgd"),
        ("--dtype float8", r"--dtype float8: one of float64, float32, bfloat16"),
        ("--device tpu", r"--device tpu: one of cpu, cuda"),
        ("--steps 0", r"--steps 0: at least 1"),
        ("--batch -1", r"--batch -1: at least 1"),
        ("--dropout 1.0", r"--dropout 1\.0: a probability"),
        ("--lr 0", r"--lr 0\.0: a positive number"),
        ("--clip -1", r"--clip -1\.0: a positive number"),
        ("--data nowhere.txt", r"--data nowhere\.txt: there is no such file; give files"),
        ("--data empty.txt", r"--data empty\.txt is empty"),
        ("--data short.txt", r"short\.txt, 5 bytes: too few for windows of --seq 64"),
        ("--data short.txt nowhere.txt", r"nowhere\.txt: there is no such file"),
        ("--plot loss.xyz", r"--plot loss\.xyz: unknown kind of picture.*\.png"),
        ("--log .", r"--log \. cannot be written \(Is a directory\): give another path"),
        ("--log empty.txt/run.jsonl", r"--log empty\.txt/run\.jsonl cannot be written \("),
        ("--plot empty.txt/loss.png", r"--plot .* cannot be written \(.*--no-plot"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    words: str, report: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(launch, "run_processes", never)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    result = run("train", *words.split())
    assert result.exit_code == command.BAD_INPUT, result.output
    text = plain(result.stderr)
    assert re.search(report, text), text
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert not result.stdout


@pytest.mark.parametrize(
    ("words", "report"),
    [("--layers two", "--layers"), ("--wrong 1", "--wrong"), ("stray", "unexpected argument 'stray'")],
)
def test_unreadable_command_lines(words: str, report: str) -> None:
    result = run("train", *words.split())
    assert result.exit_code == 2
    assert report in plain(result.output)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no usable GPU" in run("train", "--device", "cuda").stderr
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    text = run("train", "--device", "cuda", "--mesh", "dp=2").stderr
    assert "2 processes need a GPU each, this machine has 1" in text


def test_torchrun_with_another_number_of_processes() -> None:
    joined = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = run("train", "--mesh", "dp=2,tp=2", RANK="0", **joined)
    assert result.exit_code == 2
    assert re.search(r"--mesh dp=2,tp=2 needs 4 processes and torchrun started 3: start 4", result.stderr)


def test_torchrun_shows_what_is_wrong_on_all_ranks_once() -> None:
    joined = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    words = ("train", "--mesh", "dp=2,tp=2", "--steps", "0")
    assert "--steps 0" in run(*words, RANK="0", **joined).stderr
    other = run(*words, RANK="1", **joined)
    assert other.exit_code == 2
    assert not other.output


def test_half_of_torchruns_environment() -> None:
    result = run("train", RANK="0", WORLD_SIZE="2")
    assert result.exit_code == 2
    assert "MASTER_ADDR is not" in plain(result.output)


def test_failures_have_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> Any:
        def raising(config: TrainConfig, show: Any) -> None:
            raise error

        return raising

    for error, code, text in (
        (KeyboardInterrupt(), 130, "interrupted"),
        (launch.RankError("rank 1 of 2 failed:\nboom [x]"), 1, "error: rank 1 of 2 failed:\nboom [x]"),
        (command.MeshwrightError("bad"), 2, "error: bad"),
    ):
        monkeypatch.setattr(launch, "run_processes", fail(error))
        result = run("train", "--no-plot")
        assert result.exit_code == code
        assert text in result.stderr
