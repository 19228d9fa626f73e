"""The command line of ``meshwright check paddle``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import BAD_INPUT, complain, terminal

from .cases import CaseError, read_cases
from .report import lines_of, reasons_table, summary, table, tallies, unsupported_line
from .scoring import VERDICTS, Score, score

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

RECORDED = sorted((Path(__file__).parent / "data").glob("*.jsonl.gz"))
Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE]...", help="Cases, one JSON object a line (.gz: compressed); else the recorded ones."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]
Listed = Annotated[str | None, typer.Option("--list", metavar="VERDICT", help="Also show the cases with this verdict.")]


@app.command()
def paddle(files: Files = None, as_json: Json = False, listed: Listed = None) -> None:
    """Compare the rules with answers of PaddlePaddle's SPMD rules, in bytes moved.

    Verdicts: agree, freer, same cost, stricter, unsound (their answer is false), error, unsupported.

    [dim]Exit codes: 0 done, whatever the verdicts; 2 bad input.[/]
    """
    if listed is not None and listed not in VERDICTS:
        raise typer.BadParameter(f"{listed!r} is no verdict; these are: {', '.join(VERDICTS)}", param_hint="--list")
    try:
        scores = {str(path): [score(case) for case in read_cases(path)] for path in files or RECORDED}
    except CaseError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    if as_json:
        typer.echo(json.dumps(summary(scores, listed)))
    else:
        _show(scores, listed)


def _show(scores: dict[str, list[Score]], listed: str | None) -> None:
    console = terminal()
    for name, found in scores.items():
        by_direction = tallies(found)
        for direction, tally in by_direction.items():
            if tally.ops and direction != "both":
                console.print(table(f"{name}: {direction}", tally), "")
        console.print(unsupported_line(by_direction["both"]), "", soft_wrap=True)
    console.print(reasons_table([s for found in scores.values() for s in found]))
    for s in [s for found in scores.values() for s in found if s.verdict == listed]:
        console.print(lines_of(s), soft_wrap=True)
