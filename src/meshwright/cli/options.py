"""Options of a command from the fields of its config (:mod:`meshwright.train.options`)."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from meshwright.errors import near
from meshwright.train.options import OptionError, options_in

F = TypeVar("F", bound=Callable[..., Any])
BAD_INPUT = 2


def complain(error: object) -> None:
    """One line about what is wrong."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


@contextmanager
def writing_to(option: str, path: str) -> Iterator[None]:
    """Raises OptionError for the file of an option that cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}") from error


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


def from_files(
    context: typer.Context, config: type[Any], files: Sequence[Path], given: dict[str, Any]
) -> dict[str, Any]:
    """What the command line has of a config, and from TOML files what it has not; the later file wins.

    Raises:
        OptionError: If a file cannot be read, or names an option that there is not.
    """
    names = {made.flag.removeprefix("--"): name for name, made in options_in(config).items()}
    merged = dict(given)
    for path in files:
        for key, value in _table(path).items():
            name = names.get(key.replace("_", "-"))
            if name is None:
                raise OptionError(f"--config {path}: there is no option {key!r}{near(key, [*names])}")
            if said(context, name):
                continue
            merged[name] = _as_option_value(
                f"--config {path}: {key}", value, get_type_hints(config)[name], config, name
            )
    return merged


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"--config {path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise OptionError(f"--config {path} is no TOML ({error})") from None


def _as_option_value(where: str, value: Any, kind: Any, config: type[Any], name: str) -> Any:
    """A value of a file as the command line would give it."""
    if options_in(config)[name].read is not None:
        if isinstance(value, dict):
            value = ",".join(f"{key}={n}" for key, n in value.items())
        wanted: tuple[type, ...] = (str,)
    elif get_origin(kind) is tuple:
        value, wanted = [value] if isinstance(value, str) else value, (list,)
    else:
        wanted = tuple(k for k in (get_args(kind) or (kind,)) if k is not NoneType)
        value = float(value) if float in wanted and type(value) is int else value
    if type(value) not in wanted:
        raise OptionError(f"{where} = {value!r}: {' or '.join(k.__name__ for k in wanted)} was expected")
    return value


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
