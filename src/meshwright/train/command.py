"""The command line of ``meshwright train``."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from meshwright.errors import MeshwrightError
from meshwright.mesh import parse_mesh

from . import plot as picture
from .config import DEVICES, DTYPES, LEARNING_RATES, OPTIMIZERS, TrainConfig
from .data import load_corpus
from .launch import Joined, RankError, check_devices, first_to_fail, run_joined, run_processes
from .plan import plan_for
from .show import Show
from .verify import TOLERANCES

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
MESH, MODEL, TRAINING, SHARDING, OUTPUT = "Mesh", "Model", "Training", "Splitting more", "Output"
DEFAULT = TrainConfig()
RATES = ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
BOUNDS = "; ".join(f"{name} {loss:.0e} and {grad:.0e}" for name, (loss, grad) in TOLERANCES.items())


def option(*names: str, panel: str, text: str, **more: Any) -> Any:
    """An option of the command line; bounds are checked by TrainConfig, once, with better words."""
    return typer.Option(*names, rich_help_panel=panel, help=text, **more)


def train(
    context: typer.Context,
    mesh: Annotated[
        str,
        option(
            "--mesh",
            panel=MESH,
            metavar="AXIS=SIZE,...",
            text="Named axes and their sizes: [bold]dp[/] splits the batch, [bold]tp[/] splits the model.",
        ),
    ] = "dp=1",
    device: Annotated[
        str, option("--device", panel=MESH, text=f"One of {', '.join(DEVICES)}.")
    ] = DEFAULT.device,
    threads: Annotated[
        int, option("--threads", panel=MESH, text="Threads of each process inside one op.")
    ] = DEFAULT.threads,
    data: Annotated[
        list[str] | None,
        option(
            "--data",
            panel=TRAINING,
            metavar="FILE...",
            text="Text to train on, read as bytes; several files may follow.  "
            "[dim]\\[default: the sources of Python's standard library][/]",
        ),
    ] = None,
    layers: Annotated[int, option("--layers", panel=MODEL, text="Transformer blocks.")] = DEFAULT.layers,
    hidden: Annotated[
        int, option("--hidden", panel=MODEL, text="Width of the residual stream.")
    ] = DEFAULT.hidden,
    heads: Annotated[int, option("--heads", panel=MODEL, text="Attention heads.")] = DEFAULT.heads,
    tie: Annotated[
        bool, option("--tie", panel=MODEL, text="The head shares the weight of the embedding.")
    ] = False,
    dropout: Annotated[
        float,
        option("--dropout", panel=MODEL, text="Probability of dropout; the masks are those of one device."),
    ] = DEFAULT.dropout,
    dtype: Annotated[
        str, option("--dtype", panel=MODEL, text=f"One of {', '.join(DTYPES)}.")
    ] = DEFAULT.dtype,
    seq: Annotated[int, option("--seq", panel=TRAINING, text="Bytes per window of text.")] = DEFAULT.seq,
    batch: Annotated[
        int, option("--batch", panel=TRAINING, text="Windows per micro-step, over all processes.")
    ] = DEFAULT.batch,
    steps: Annotated[int, option("--steps", panel=TRAINING, text="Steps of the optimizer.")] = DEFAULT.steps,
    accumulate: Annotated[
        int,
        option(
            "--accumulate",
            panel=TRAINING,
            text="Micro-steps per step; gradients are exchanged once per step.",
        ),
    ] = DEFAULT.accumulate,
    optimizer: Annotated[
        str,
        option("--optimizer", panel=TRAINING, text=f"One of {', '.join(OPTIMIZERS)} (sgd: momentum 0.9)."),
    ] = DEFAULT.optimizer,
    lr: Annotated[
        float | None, option("--lr", panel=TRAINING, text=f"Learning rate.  [dim]\\[default: {RATES}][/]")
    ] = None,
    clip: Annotated[
        float | None, option("--clip", panel=TRAINING, text="Largest norm of all gradients together.")
    ] = None,
    seed: Annotated[
        int, option("--seed", panel=TRAINING, text="The same seed gives the same run on every mesh.")
    ] = DEFAULT.seed,
    stored_over: Annotated[
        str | None,
        option(
            "--stored-over",
            panel=SHARDING,
            metavar="AXIS",
            text="Store parameters split over this axis (ZeRO-3).",
        ),
    ] = None,
    states_over: Annotated[
        str | None,
        option(
            "--states-over", panel=SHARDING, metavar="AXIS", text="Split optimizer states over it (ZeRO-1/2)."
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        option(
            "--sequence-parallel",
            panel=SHARDING,
            text="Split the residual stream over tp along the sequence.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        option(
            "--verify",
            panel=OUTPUT,
            text="Train the same model on one device too and compare loss and gradients in every step.  "
            f"Largest relative differences: {BOUNDS}.  Exit code 1 beyond.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        option("--json", panel=OUTPUT, text="Print one JSON object last; everything else goes to stderr."),
    ] = False,
    plot: Annotated[Path, option("--plot", panel=OUTPUT, text="Where the plot of the loss goes.")] = Path(
        "runs/loss.png"
    ),
    no_plot: Annotated[bool, option("--no-plot", panel=OUTPUT, text="Draw no plot.")] = False,
) -> None:
    """Train a byte-level GPT on real text, across a mesh of processes.

    Starts one process per place in the mesh on this machine, or joins those that torchrun started.

    [dim]Exit codes: 0 done; 1 verification or a process failed; 2 bad input; 130 interrupted.[/]
    """
    given = dict(
        stored_over=stored_over, states_over=states_over, sequence_parallel=sequence_parallel, layers=layers,
        hidden=hidden, heads=heads, seq=seq, batch=batch, steps=steps, accumulate=accumulate, optimizer=optimizer,
        lr=lr, clip=clip, dropout=dropout, tie=tie, seed=seed, dtype=dtype, device=device, verify=verify,
        threads=threads,
    )  # fmt: skip
    joined: Joined | None = context.obj
    errors = Console(stderr=True)
    first = joined is None or joined.rank == 0
    try:
        # Everything that can be seen to be wrong is, before any process starts (and alike on all of torchrun's).
        files = _files(context, data)
        config = TrainConfig(mesh=_axes(mesh, device), data=files, **given)  # type: ignore[arg-type]
        plan_for(config.make_mesh(), sequence_parallel=sequence_parallel)
        if joined is None:
            check_devices(config, config.make_mesh().size)
            load_corpus(config.data, config.seq)
        if first and not no_plot:
            picture.check_path(plot)
    except MeshwrightError as error:
        if first:
            _complain(errors, error)
        raise typer.Exit(BAD_INPUT) from None

    show = Show(config, Console(stderr=as_json))
    _run(config, joined, show, errors)
    if not first:
        return
    if not no_plot:
        _draw(config, show, plot)
    if as_json:
        typer.echo(json.dumps(show.summary))
    if show.verdict is not None and not show.verdict.passed:
        errors.print(
            Text("verification failed: the mesh does not compute what one device computes", style="bold red")
        )
        raise typer.Exit(FAILED)


def _files(context: typer.Context, data: list[str] | None) -> tuple[str, ...]:
    """``--data a b c``: the words after the first one are not an option's value, and come as extra arguments."""
    extra = list(context.args)
    if extra and not data:
        raise typer.BadParameter(f"unexpected argument {extra[0]!r}; files are given with --data", context)
    return (*(data or ()), *extra)


def _axes(text: str, device: str) -> tuple[tuple[str, int], ...]:
    mesh = parse_mesh(text, device=device)
    return tuple(zip(mesh.axes, mesh.sizes, strict=True))


def _run(config: TrainConfig, joined: Joined | None, show: Show, errors: Console) -> None:
    """Train; shows a failure once and exits.  SIGTERM ends everything as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if joined is None:
            run_processes(config, show)
        else:
            run_joined(config, joined, show)
    except KeyboardInterrupt:
        show.close()
        if joined is None or joined.rank == 0:
            errors.print("interrupted: all processes are ended")
        raise typer.Exit(INTERRUPTED) from None
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
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _complain(console: Console, error: Exception) -> None:
    console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def _draw(config: TrainConfig, show: Show, path: Path) -> None:
    sizes = ", ".join(f"{axis}={n}" for axis, n in config.mesh)
    title = (
        f"byte-level GPT on {sizes}  ({config.layers} × {config.hidden}, {config.dtype}, {config.optimizer})"
    )
    picture.draw(path, title, show.steps, show.verdict.loss_tolerance if show.verdict else None)
    show.console.print(Text(f"\nplot of the loss: {path}"), soft_wrap=True)
