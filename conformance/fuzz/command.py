"""The command line of ``meshwright check fuzz``."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from . import Tally, campaign

FOUND = 1

app = typer.Typer(rich_markup_mode="rich", add_completion=False)

Count = Annotated[int, typer.Option("--count", min=1, help="How many programs.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the first one; each program has its own.")]
Static = Annotated[bool, typer.Option("--static", help="As captured steps with two updates, instead of eagerly.")]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Worker processes.")]
Whole = Annotated[bool, typer.Option("--whole", help="Show programs as they were drawn, without making them smaller.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def fuzz(
    count: Count = 200,
    seed: Seed = 0,
    static: Static = False,
    jobs: Jobs = 1,
    whole: Whole = False,
    as_json: Json = False,
) -> None:
    """Run random programs on simulated meshes and compare everything with one device.

    Programs of 3 to 12 lines over all families of ops, in place and through views, with inputs in every layout. Values,
    gradients and second gradients must be equal; a refusal must be the same on every rank.

    [dim]Exit codes: 0 nothing found, 1 findings, 2 bad input.[/]
    """
    start = time.monotonic()
    console = Console(stderr=True)
    with console.status("") as status:

        def tell(tally: Tally) -> None:
            status.update(f"{sum(tally.counts.values())} of {count} programs, {len(tally.findings)} findings")

        tally = campaign(count, seed, static=static, small=not whole, jobs=jobs, tell=tell)
    if as_json:
        typer.echo(json.dumps(tally.as_dict() | {"seed": seed, "static": static, "seconds": time.monotonic() - start}))
    else:
        _show(tally, time.monotonic() - start)
    raise typer.Exit(FOUND if tally.findings else 0)


def _show(tally: Tally, seconds: float) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for f in sorted(tally.findings, key=lambda f: f.seed):
        console.print(f"[bold red]{f.kind}[/] (--seed {f.seed} --count 1): {escape(f.why)}\n{escape(f.program)}\n")
    if tally.refused:
        console.print("[bold]refused, on every rank with the same error[/]")
        for reason, n in tally.refused.most_common():
            console.print(f"{n:6}  {escape(reason)}")
    listed = ", ".join(f"{n} {kind}" for kind, n in tally.counts.most_common())
    console.print(f"{sum(tally.counts.values())} programs in {seconds:.0f} s: {listed}")
