"""``meshwright check``: yardsticks that are no part of the package, but of the repository (``conformance/``)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import typer

from .lazy import LazyGroup
from .options import BAD_INPUT, complain

CHECKOUT = Path(__file__).resolve().parents[3]


class Yardsticks(LazyGroup):
    """Each is a folder of ``conformance/``, with its command in ``command.py``."""

    listed: ClassVar = {
        "paddle": "Compare the rules with answers of PaddlePaddle's SPMD rules, in bytes moved.",
        "fuzz": "Run random programs on simulated meshes and compare everything with one device.",
    }

    def load(self, name: str) -> typer.Typer:
        """The command; ends with 2 where this is not a checkout."""
        if not (CHECKOUT / "conformance" / name / "command.py").is_file():
            complain(
                f"meshwright check {name} is conformance/{name} of the repository, which is not installed: "
                "clone it, pip install -e it, and run this again"
            )
            raise typer.Exit(BAD_INPUT)
        if str(CHECKOUT) not in sys.path:
            sys.path.insert(0, str(CHECKOUT))
        app: typer.Typer = import_module(f"conformance.{name}.command").app
        return app


app = typer.Typer(cls=Yardsticks, no_args_is_help=True, rich_markup_mode="rich", add_completion=False)


@app.callback()
def check() -> None:
    """Check the rules against yardsticks, and random programs against one device."""
