"""The command line: ``meshwright COMMAND``.  Commands find in ``context.obj`` what a launcher said."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, ClassVar

import typer

from meshwright.errors import MeshError
from meshwright.ranks.launchers import launched

from .lazy import LazyGroup


class Commands(LazyGroup):
    """Each is a file of this package with its ``app``."""

    listed: ClassVar = {
        "train": "Train a byte-level GPT on real text, across a mesh of processes.",
        "explain": "Show what a training step sends and holds on a mesh, and why, with no devices and no processes.",
        "layouts": "Find layouts for your own model: what each axis splits, and why, with no devices and no processes.",
        "plan": "Find mesh, layouts and storage of a model for a machine, with no devices and no processes.",
        "calibrate": "Measure this machine's links and kernels, for --hardware of plan.",
        "verify": "Train your own step on simulated ranks and compare everything with one device.",
        "checkpoint": "Show what is in checkpoints, verify their checksums, export their weights.",
        "doctor": "Check this machine and this installation, and end with a verdict.",
        "rules": "List the rules: op, kind, notation for an example, linear groups, where it is written.",
        "check": "Check the rules against yardsticks, and random programs against one device.",
    }

    def load(self, name: str) -> typer.Typer:
        """The command."""
        app: typer.Typer = import_module(f"{__name__}.{name}").app
        return app


app = typer.Typer(
    name="meshwright",
    cls=Commands,
    help="Semi-automatic parallel training for PyTorch.",
    epilog="meshwright COMMAND --help explains a command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"meshwright {version('meshwright')} (torch {version('torch')})")
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
    try:
        context.obj = launched()
    except MeshError as error:
        raise typer.BadParameter(str(error)) from None


_SPELLED = {"×": "x", "→": "->", "…": "...", "≤": "<=", "≥": ">=", "–": "-", "±": "+-", "·": "."}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def _spell_out(error: UnicodeError) -> tuple[str, int]:
    """For streams that cannot say it (LANG=C, latin-1): signs as ASCII has them."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_SPELLED.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _without(stream: int) -> None:
    """Drop what could not be written, or Python tries again at its exit and ends with 120."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _open_streams() -> None:
    """Have closed streams lead nowhere: files that are opened later would get their numbers, and what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):  # another file has the number already
                os.fstat(number)
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
                continue
            _without(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _missing(error: BaseException) -> str:
    """What the system has no more of, and the limit to be raised; empty for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return "open files (ulimit -n)"
    text = str(error).lower()
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "cannot allocate memory" in text:
        return "memory (ulimit -v)"
    if isinstance(error, ImportError) and "failed to map segment" in text:
        return "memory (ulimit -v)"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in text):
        return "threads, or memory for them (ulimit -u, ulimit -v)"
    return ""


def main() -> None:
    """Entry point of the ``meshwright`` script."""
    _open_streams()
    codecs.register_error("meshwright", _spell_out)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="meshwright")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (OSError, MemoryError, ImportError, RuntimeError) as error:
        if missing := _missing(error):
            sys.stderr.write(f"error: this process can have no more {missing}: raise the limit ({error})\n")
            sys.exit(1)
        if not isinstance(error, OSError) or error.errno not in _FULL:
            raise
        _without(1)
        try:
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
            sys.stderr.flush()
        except OSError:
            _without(2)
        sys.exit(1)


if __name__ == "__main__":
    main()
