"""Options of a command from the fields of its config (:mod:`meshwright.train.options`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from meshwright.train.options import options_in

F = TypeVar("F", bound=Callable[..., Any])
BAD_INPUT = 2


def complain(error: object) -> None:
    """One line about what is wrong."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def terminal(stderr: bool = False) -> Console:
    """Where to show things; what goes to a file or a pipe is not folded at 80 columns."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=110)


def said(context: typer.Context, name: str) -> bool:
    """Whether an option is on the command line, and not its default."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def options_of(config: type[Any]) -> Callable[[F], F]:
    """Give a command an option for each field of a config; their values are its keyword arguments."""
    kinds = get_type_hints(config)

    def parameter(name: str, default: Any) -> inspect.Parameter:
        made = options_in(config)[name]
        kind: Any = kinds[name]
        if made.read is not None:
            kind, default = str, made.shown
        elif get_origin(kind) is tuple:  # given several times
            kind, default = list[str] | None, None
        text = made.text + (f"  [dim]\\[default: {made.unset}][/]" if made.unset else "")
        option = typer.Option(made.flag, rich_help_panel=made.panel, help=text, metavar=made.metavar)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
        )

    def decorate(command: F) -> F:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        context = [p for p in own if p.kind is not p.KEYWORD_ONLY]
        made = [*context, *(parameter(f.name, f.default) for f in fields(config)), *own[len(context) :]]
        command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in made}
        return command

    return decorate


def values_of(config: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config from what the command line has of them.

    Raises:
        MeshwrightError: a text that cannot be read.
    """
    read = {f.name: f.metadata["option"].read for f in fields(config)}
    several = {name for name, kind in get_type_hints(config).items() if get_origin(kind) is tuple and not read[name]}
    return {
        name: how(given[name]) if how else tuple(given[name] or ()) if name in several else given[name]
        for name, how in read.items()
    }
