"""The command line: ``meshwright COMMAND``.

The only reader of the environment: torchrun's RANK, WORLD_SIZE and LOCAL_RANK, handed to commands as
``context.obj``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer

from meshwright.check.command import check
from meshwright.explain_cli import explain
from meshwright.train.command import train
from meshwright.train.launch import Joined

# Name to (function, settings of its context): one line per command, which lives with what it runs.
COMMANDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "train": (train, {"allow_extra_args": True}),  # the second and later files of --data FILE...
    "explain": (explain, {}),
}

app = typer.Typer(
    name="meshwright",
    help="Semi-automatic parallel training for PyTorch.",
    epilog="meshwright COMMAND --help explains a command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def joined() -> Joined | None:
    """What torchrun's environment says, or None where there is none.

    Raises:
        typer.BadParameter: half of it.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing or not (rank.isdigit() and world.isdigit()):
        what = f"{missing[0]} is not" if missing else f"they read {rank!r} and {world!r}"
        raise typer.BadParameter(
            f"RANK and WORLD_SIZE are set, as torchrun does, but {what}: start with torchrun, or unset them "
            "to have the processes started here"
        )
    return Joined(int(rank), int(world), int(os.environ.get("LOCAL_RANK", rank)))


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"meshwright {version('meshwright')} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Semi-automatic parallel training for PyTorch."""
    context.obj = joined()


for _name, (_command, _settings) in COMMANDS.items():
    app.command(_name, context_settings=_settings)(_command)
app.add_typer(check, name="check")


def main() -> None:
    """Entry point of the ``meshwright`` script."""
    app()


if __name__ == "__main__":
    main()
