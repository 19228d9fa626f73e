"""``meshwright verify``: the user's step on simulated ranks, value by value against one device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import typer

from meshwright.errors import MeshwrightError
from meshwright.train.choices import MESH, OUTPUT, PROGRAM, TRAINING, passes_of, read_mesh
from meshwright.train.options import COUNT, POSITIVE, OptionError, check_bounds, one_of, option, writing

from .options import BAD_INPUT, complain, options_of, values_of

WRONG = 1
BOTH = "eager,captured"
SHRINK = {"auto": None, "always": True, "never": False}


@dataclass(frozen=True)
class VerifyConfig:
    """What ``meshwright verify`` was asked for."""

    mesh: tuple[tuple[str, int], ...] = option(
        (("dp", 2),), "--mesh", MESH, "Named axes and their sizes.", metavar="AXIS=SIZE,...", read=read_mesh,
        shown="dp=2",
    )  # fmt: skip
    steps: int = option(2, "--steps", TRAINING, "Updates before the save; one more follows the load.", COUNT)
    seed: int = option(0, "--seed", TRAINING, "Random seed of initial values and of dropout.")
    seconds: float = option(
        120.0, "--seconds", TRAINING,
        "Time budget in seconds; sizes of a larger step are reduced, and the report lists them.", POSITIVE,
    )  # fmt: skip
    shrink: str = option(
        "auto",
        "--shrink",
        TRAINING,
        "Reduce sizes where it takes longer (auto), always, or never.",
        one_of(tuple(SHRINK)),
    )
    modes: str = option(
        BOTH, "--modes", PROGRAM, "Which steps: eager, captured or both.", one_of((BOTH, "eager", "captured"))
    )
    passes: tuple[str, ...] = option(
        (), "--pass", PROGRAM, "A pass over the captured step, and its options; may be repeated.",
        metavar="NAME:OPTION=VALUE,...",
    )  # fmt: skip
    report: str | None = option(
        None, "--report", OUTPUT, "Write the report here, as JSON, for a later run to compare.", metavar="FILE"
    )
    as_json: bool = option(False, "--json", OUTPUT, "One JSON object on stdout instead of text.")

    def __post_init__(self) -> None:
        """Raises OptionError."""
        check_bounds(self)


app = typer.Typer(rich_markup_mode="rich", add_completion=False)


@app.command()
@options_of(VerifyConfig)
def verify(
    model: str = typer.Argument(
        metavar="MODULE:FUNCTION",
        help="Takes the mesh; returns model, loss function, batch and a dict of compile_step arguments (layouts, "
        "batch, an optimizer factory, ...), as for meshwright explain.",
    ),
    **given: Any,
) -> None:
    """Train your own step on simulated ranks and compare everything with one device.

    [dim]Exit codes: 0 passed; 1 failed; 2 bad input.[/]
    """
    try:
        config = VerifyConfig(**values_of(VerifyConfig, given))
        report = _verified(model, config)
        if config.report is not None:
            with writing(f"--report {config.report}", "leave it out"):
                report.save(config.report)
    except MeshwrightError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    typer.echo(report.to_json() if config.as_json else str(report))
    if not report.passed:
        raise typer.Exit(WRONG)


def _verified(path: str, config: VerifyConfig) -> Any:
    passes = passes_of(config.passes)

    import torch

    import meshwright as mw

    from .subject import users

    mesh = mw.Mesh(dict(config.mesh))
    torch.manual_seed(config.seed)
    made = users(path, mesh, "cpu")
    if "captured" not in config.modes and passes.passes:
        raise OptionError("--pass is for captured steps: leave it out, or --modes eager")
    plan = {f.name: getattr(made.plan, f.name) for f in fields(made.plan)}
    optimizer: dict[str, Any] = {} if made.optimizer is None else {"optimizer": made.optimizer}
    return mw.verify(
        made.model, made.loss_fn, made.batch, mesh, plan.pop("layouts"), passes=passes, steps=config.steps,
        modes=config.modes.split(","), seed=config.seed, seconds=config.seconds,
        shrink=SHRINK[config.shrink], **optimizer, **plan,
    )  # fmt: skip
