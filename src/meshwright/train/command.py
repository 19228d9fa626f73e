"""The command line of ``meshwright train``."""

from __future__ import annotations

import contextlib
import json
import signal
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from meshwright.errors import MeshwrightError
from meshwright.launchers import Launch
from meshwright.mesh import parse_mesh

from . import options
from . import plot as picture
from .config import TrainConfig
from .data import load_corpus
from .launch import RankError, check_devices, check_joined, first_to_fail, run_joined, run_processes
from .plan import plan_for
from .show import Show

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
PLOT = Path("runs/loss.png")
DEFAULT = TrainConfig()


def train(
    context: typer.Context,
    mesh: options.Mesh = "dp=1",
    device: options.Device = DEFAULT.device,
    threads: options.Threads = DEFAULT.threads,
    data: options.Data = None,
    seq: options.Seq = DEFAULT.seq,
    batch: options.Batch = DEFAULT.batch,
    steps: options.Steps = DEFAULT.steps,
    accumulate: options.Accumulate = DEFAULT.accumulate,
    optimizer: options.Optimizer = DEFAULT.optimizer,
    lr: options.Lr = DEFAULT.lr,
    clip: options.Clip = DEFAULT.clip,
    seed: options.Seed = DEFAULT.seed,
    layers: options.Layers = DEFAULT.layers,
    hidden: options.Hidden = DEFAULT.hidden,
    heads: options.Heads = DEFAULT.heads,
    tie: options.Tie = DEFAULT.tie,
    dropout: options.Dropout = DEFAULT.dropout,
    dtype: options.Dtype = DEFAULT.dtype,
    stored_over: options.StoredOver = DEFAULT.stored_over,
    states_over: options.StatesOver = DEFAULT.states_over,
    sequence_parallel: options.SequenceParallel = DEFAULT.sequence_parallel,
    static: options.Static = DEFAULT.static,
    passes: options.Passes = None,
    verify: options.Verify = DEFAULT.verify,
    as_json: options.Json = False,
    plot: options.Plot = PLOT,
    no_plot: options.NoPlot = False,
) -> None:
    """Train a byte-level GPT on real text, across a mesh of processes.

    Starts one process per place in the mesh on this machine, or joins those that torchrun, mpirun or srun started.

    [dim]Exit codes: 0 done; 1 verification or a process failed; 2 bad input; 130 interrupted, 143 terminated.[/]
    """
    joined: Launch | None = context.obj
    first = joined is None or joined.rank == 0
    errors = Console(stderr=True)
    try:
        config = _checked(context, joined)
        if first and not no_plot:
            picture.check_path(plot)
    except MeshwrightError as error:
        if first:
            _complain(errors, error)
        raise typer.Exit(BAD_INPUT) from None

    show = Show(config, terminal(as_json))
    _run(config, joined, show, errors)
    if not first:
        return
    if not no_plot:
        _draw(config, show, plot)
    if as_json:
        typer.echo(json.dumps(show.summary))
    if show.verdict is not None and not show.verdict.passed:
        text = "verification failed: the mesh does not compute what one device computes"
        errors.print(Text(text, style="bold red"))
        raise typer.Exit(FAILED)


def terminal(stderr: bool) -> Console:
    """Where to show things; what goes to a file or a pipe is not folded at 80 columns."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=110)


def _checked(context: typer.Context, joined: Launch | None) -> TrainConfig:
    """The options as a value.

    Whatever can be seen to be wrong is seen here: before any process starts, and alike on all of a launcher's.
    """
    given: dict[str, Any] = {f.name: context.params[f.name] for f in fields(TrainConfig)}
    # `--data a b c`: the words after the first are no option's value, and come as extra arguments.
    extra = list(context.args)
    if extra and not given["data"]:
        raise typer.BadParameter(f"unexpected argument {extra[0]!r}; files are given with --data", context)
    given["data"] = (*(given["data"] or ()), *extra)
    given["passes"] = tuple(given["passes"] or ())
    described = parse_mesh(given["mesh"], device=given["device"])
    given["mesh"] = tuple(zip(described.axes, described.sizes, strict=True))
    config = TrainConfig(**given)
    plan_for(config.make_mesh(), sequence_parallel=config.sequence_parallel)
    if joined is None:
        check_devices(config, described.size)
        load_corpus(config.data, config.seq)
    else:  # its ranks read the text together: see loop.agreed_corpus
        check_joined(config, joined)
    return config


def _run(config: TrainConfig, joined: Launch | None, show: Show, errors: Console) -> None:
    """Train; shows a failure once and exits.  SIGTERM and SIGHUP end everything as Ctrl-C does."""
    # Not in a launcher's processes: it ends them itself, and is not to wait.
    handler: Any = _interrupt if joined is None else signal.SIG_DFL
    before = {n: signal.signal(n, handler) for n in ENDING}
    try:
        if joined is None:
            run_processes(config, show)
        else:
            run_joined(config, joined, show)
    except KeyboardInterrupt as end:
        show.close()
        if joined is None or joined.rank == 0:
            with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
                errors.print("interrupted: all processes are ended")
        raise typer.Exit(128 + end.args[0] if end.args else INTERRUPTED) from None
    except Exception as error:
        show.close()
        if joined is not None and not first_to_fail():
            raise typer.Exit(FAILED) from None  # another rank has shown it
        if isinstance(error, (MeshwrightError, RankError)):
            _complain(errors, error)
            raise typer.Exit(BAD_INPUT if isinstance(error, MeshwrightError) else FAILED) from None
        raise
    finally:
        show.close()
        for number, handled in before.items():
            signal.signal(number, handled)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _complain(console: Console, error: Exception) -> None:
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def _draw(config: TrainConfig, show: Show, path: Path) -> None:
    sizes = ", ".join(f"{axis}={n}" for axis, n in config.mesh)
    model = f"{config.layers} × {config.hidden}, {config.dtype}, {config.optimizer}"
    tolerance = show.verdict.loss_tolerance if show.verdict else None
    picture.draw(path, f"byte-level GPT on {sizes}  ({model})", show.steps, tolerance)
    show.console.print(Text(f"\nplot of the loss: {path}"), soft_wrap=True)
