"""Groups of commands that are imported when they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class LazyGroup(TyperGroup):
    """Its help needs the first lines of its commands, and nothing that they import."""

    listed: ClassVar[Mapping[str, str]]  # name to the first line of its help

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {name: TyperCommand(name, help=line) for name, line in self.listed.items()}

    def load(self, name: str) -> typer.Typer:
        """The command."""
        raise NotImplementedError

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command that is run, with its own name and options."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = get_command(self.load(name))
            command.name = name
        return name, command, rest
