"""``meshwright doctor``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from .options import terminal

if TYPE_CHECKING:
    from .findings import Finding

PROBLEM = 1


def _verdict(made: Sequence[Finding]) -> Text:
    """The last line: whether Meshwright works here."""
    if broken := [f.what for f in made if f.broken]:
        return Text(f"failed: fix {', '.join(broken)}", style="bold red")
    advice = sum(bool(f.fix) for f in made)
    return Text(f"passed: Meshwright works here{f' ({advice} hints above)' if advice else ''}", style="bold green")


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    names: Annotated[
        bool,
        typer.Option("--names", help="List the undocumented names of torch, and what differs between its versions."),
    ] = False,
    torch_changes: Annotated[
        bool,
        typer.Option("--torch-changes", help="List each change that Meshwright applies to torch, with its reason."),
    ] = False,
) -> None:
    """Check this machine and this installation, and end with a verdict.

    [dim]Exit codes: 0 Meshwright works here; 1 something that it needs is missing.[/]
    """
    from meshwright import compat

    from .findings import findings

    made = list(findings(torch_changes or as_json))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(f) for f in made], indent=1))
    else:
        console = terminal()
        for f in made:
            console.print(Text(f"{f.what}: {f.found}"), soft_wrap=True)
            if f.fix:
                console.print(Text(f"  -> {f.fix}", style="red" if f.broken else "yellow"), soft_wrap=True)
        for name, (path, needed) in compat.PRIVATE.items() if names else ():
            console.print(Text(f"{path}  {needed}  (compat.{name})"), soft_wrap=True)
        for name, (since, what) in compat.DIFFERENT.items() if names else ():
            console.print(Text(f"from torch {since} on: {what}  (compat.{name})"), soft_wrap=True)
        console.print(_verdict(made), soft_wrap=True)
    if any(f.broken for f in made):
        raise typer.Exit(PROBLEM)
