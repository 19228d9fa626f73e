"""The command line of ``meshwright check paddle``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from .cases import CaseError, read_cases
from .report import lines_of, reasons_table, summary, table, tallies, unsupported_line
from .scoring import VERDICTS, Score, score

BAD_INPUT = 2

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Cases, one JSON object a line.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]
Listed = Annotated[str | None, typer.Option("--list", metavar="VERDICT", help="Also show the cases with this verdict.")]


@app.command()
def paddle(files: Files, as_json: Json = False, listed: Listed = None) -> None:
    """Compare the rules with answers of PaddlePaddle's SPMD rules, in bytes moved.

    Verdicts: agree, freer, same cost, stricter, unsound (their answer is false), error, unsupported.

    [dim]Exit codes: 0 done, whatever the verdicts; 2 bad input.[/]
    """
    if listed is not None and listed not in VERDICTS:
        raise typer.BadParameter(f"{listed!r} is no verdict; these are: {', '.join(VERDICTS)}", param_hint="--list")
    try:
        scores = {str(path): [score(case) for case in read_cases(path)] for path in files}
    except CaseError as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(json.dumps(summary(scores, listed)))
    else:
        _show(scores, listed)


def _show(scores: dict[str, list[Score]], listed: str | None) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=110)  # a file or a pipe is not folded at 80 columns
    for name, found in scores.items():
        by_direction = tallies(found)
        for direction, tally in by_direction.items():
            if tally.ops and direction != "both":
                console.print(table(f"{name}: {direction}", tally), "")
        console.print(unsupported_line(by_direction["both"]), "", soft_wrap=True)
    console.print(reasons_table([s for found in scores.values() for s in found]))
    for s in [s for found in scores.values() for s in found if s.verdict == listed]:
        console.print(lines_of(s), soft_wrap=True)
