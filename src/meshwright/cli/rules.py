"""``meshwright rules``: the book of rules."""

from __future__ import annotations

from typing import Annotated

import typer

from meshwright.errors import RuleError

from .options import BAD_INPUT, complain

app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
def rules(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="A name of an op, or a glob.")] = "*",
    partial: Annotated[
        bool, typer.Option("--partial", help="The table of which reductions pass which ops, in Markdown.")
    ] = False,
) -> None:
    """List the rules: op, kind, notation for an example, linear groups, where it is written.

    [dim]Exit codes: 0 done; 2 nothing has such a name.[/]
    """
    from meshwright.rules import partial_table
    from meshwright.rules import rules as listed

    if partial:
        typer.echo(partial_table())
        return
    try:
        for entry in listed(pattern):
            typer.echo(str(entry))
    except RuleError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
