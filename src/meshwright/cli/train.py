"""``meshwright train``."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from meshwright.errors import MeshError, MeshwrightError, RankFailedError
from meshwright.ranks.launchers import Launch
from meshwright.train.choices import OUTPUT
from meshwright.train.config import TrainConfig
from meshwright.train.folder import command
from meshwright.train.log import sinks_of
from meshwright.train.plot import can_draw, check_path, draw
from meshwright.train.text import load_text

from .lazy import INTERRUPTED
from .options import BAD_INPUT, complain, from_files, options_of, said, terminal, values_of

if TYPE_CHECKING:
    from meshwright.train.show import Show

FAILED = 1
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
PLOT = Path("runs/loss.png")

Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object last; everything else goes to stderr."),
]
Plot = Annotated[Path, typer.Option("--plot", rich_help_panel=OUTPUT, help="Where the plot of the loss goes.")]
NoPlot = Annotated[bool, typer.Option("--no-plot", rich_help_panel=OUTPUT, help="Draw no plot.")]

Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", rich_help_panel=OUTPUT, metavar="FILE",
        help="Options from a TOML file, by their names; may be repeated: the later file wins, the command line last.",
    ),
]  # fmt: skip

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command(context_settings={"allow_extra_args": True})  # the second and later files of --data FILE...
@options_of(TrainConfig)
def train(
    context: typer.Context, *, config_files: Configs = None, as_json: Json = False, plot: Plot = PLOT,
    no_plot: NoPlot = False, **given: Any
) -> None:  # fmt: skip
    """Train a byte-level GPT on real text, across a mesh of processes.

    With --model DIR: a causal language model of Transformers, on text, JSONL or Parquet, packed into rows.

    Starts one process per place in the mesh on this machine, or joins those that torchrun, mpirun or srun started.

    [dim]Exit codes: 0 done; 1 verification or a process failed; 2 bad input; 130 interrupted, 143 terminated.[/]
    """
    joined: Launch | None = context.obj
    first = joined is None or joined.rank == 0
    try:
        config = _checked(context, from_files(context, TrainConfig, config_files or [], given), joined)
        # A picture that nobody asked for is left out where nothing can draw it.
        no_plot = no_plot or not (can_draw() or said(context, "plot"))
        if first and not no_plot:
            check_path(plot)
        sinks = sinks_of(config) if first else []
    except MeshwrightError as error:
        if first:
            complain(error)
        raise typer.Exit(BAD_INPUT) from None

    from meshwright.train.show import Show

    show = Show(config, terminal(as_json), sinks)
    try:
        _run(config, joined, show)
    finally:
        for sink in sinks:
            sink.close()
    if not first:
        return
    if not no_plot:
        _draw(config, show, plot)
    if as_json:
        typer.echo(json.dumps(show.summary))
    if show.verdict is not None and not show.verdict.passed:
        text = "verification failed: the mesh does not compute what one device computes"
        Console(stderr=True).print(Text(text, style="bold red"))
        raise typer.Exit(FAILED)


def _checked(context: typer.Context, given: dict[str, Any], joined: Launch | None) -> TrainConfig:
    """The options as a value.

    Whatever can be seen to be wrong is seen here: before any process starts, and alike on all of a launcher's.
    """
    # `--data a b c`: the words after the first are no option's value, and come as extra arguments.
    extra = list(context.args)
    if extra and not given["data"]:
        raise typer.BadParameter(f"unexpected argument {extra[0]!r}; files are given with --data", context)
    config = TrainConfig(**values_of(TrainConfig, given | {"data": [*(given["data"] or ()), *extra]}))
    if joined is not None:  # its ranks read the text together: see loop.agreed_subject
        _check_joined(config, joined)
        return config
    if config.device == "cuda":
        from meshwright.train.launch import check_devices

        check_devices(config, config.make_mesh().size)
    if config.model is None:
        load_text(config.data, config.seq)
    else:
        from meshwright.documents.reading import check_file

        for name in config.data:
            check_file(name)
    return config


def _check_joined(config: TrainConfig, joined: Launch) -> None:
    """Raises MeshError, on every rank alike, where the mesh does not match the number of processes."""
    size = config.make_mesh().size
    if size != joined.world:
        given = ",".join(f"{axis}={n}" for axis, n in config.mesh)
        raise MeshError(
            f"--mesh {given} needs {size} processes and {joined.by} started {joined.world}: start {size}, "
            "or change the mesh"
        )


def _run(config: TrainConfig, joined: Launch | None, show: Show) -> None:
    """Train; shows a failure once and exits.  SIGTERM and SIGHUP end everything as Ctrl-C does."""
    from meshwright.train import launch

    # Not in a launcher's processes: it ends them itself, and is not to wait.
    handler: Any = _interrupt if joined is None else signal.SIG_DFL
    before = {n: signal.signal(n, handler) for n in ENDING}
    try:
        if joined is None:
            launch.run_processes(config, show)
        else:
            launch.run_joined(config, joined, show)
    except KeyboardInterrupt as end:
        show.close()
        if joined is None or joined.rank == 0:
            with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
                Console(stderr=True).print("interrupted: all processes are ended")
                _say_how_to_continue(config)
        raise typer.Exit(128 + end.args[0] if end.args else INTERRUPTED) from None
    except Exception as error:
        show.close()
        if joined is not None and not launch.first_to_fail():
            raise typer.Exit(FAILED) from None  # another rank has shown it
        if isinstance(error, (MeshwrightError, launch.RankError)):
            complain(error)
            bad = isinstance(error, MeshwrightError) and not isinstance(error, RankFailedError)
            if not bad:
                _say_how_to_continue(config)
            raise typer.Exit(BAD_INPUT if bad else FAILED) from None
        raise
    finally:
        show.close()
        for number, handled in before.items():
            signal.signal(number, handled)


def _say_how_to_continue(config: TrainConfig) -> None:
    """The command that starts a run again that did not come to its end."""
    from meshwright import Checkpoints

    if config.save and (steps := Checkpoints(config.save).steps):
        text = f"step {max(steps)} is saved. Continue, on any mesh: {command(config)} --mesh dp=1"
        Console(stderr=True).print(Text(text), soft_wrap=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _draw(config: TrainConfig, show: Show, path: Path) -> None:
    sizes = ", ".join(f"{axis}={n}" for axis, n in config.mesh)
    model = f"{config.model or f'{config.layers} × {config.hidden}'}, {config.dtype}, {config.optimizer}"
    tolerance = show.verdict.loss_tolerance if show.verdict else None
    draw(path, f"{'training' if config.model else 'byte-level GPT'} on {sizes}  ({model})", show.steps, tolerance)
    show.console.print(Text(f"\nplot of the loss: {path}"), soft_wrap=True)
