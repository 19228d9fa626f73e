"""The options of ``meshwright train`` as typer reads them.  TrainConfig checks their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .config import DEVICES, DTYPES, LEARNING_RATES, OPTIMIZERS
from .verify import TOLERANCES

RATES = ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
BOUNDS = "; ".join(f"{name} {loss:.0e} and {grad:.0e}" for name, (loss, grad) in TOLERANCES.items())


def option(panel: str, name: str, text: str, **more: Any) -> Any:
    """One option, shown in a panel of ``--help``."""
    return typer.Option(name, rich_help_panel=panel, help=text, **more)


def unset(text: str) -> str:
    """How ``--help`` shows the default of an option that has no value of its own."""
    return f"  [dim]\\[default: {text}][/]"


MESH, MODEL, TRAINING, SPLITTING = "Mesh", "Model", "Training", "Splitting more"
PROGRAM, OUTPUT = "Static program", "Output"

Mesh = Annotated[
    str,
    option(
        MESH,
        "--mesh",
        "Named axes and their sizes: [bold]dp[/] splits the batch, [bold]tp[/] splits the model.",
        metavar="AXIS=SIZE,...",
    ),
]
Device = Annotated[str, option(MESH, "--device", f"One of {', '.join(DEVICES)}.")]
Threads = Annotated[int, option(MESH, "--threads", "Threads of each process inside one op.")]

Layers = Annotated[int, option(MODEL, "--layers", "Transformer blocks.")]
Hidden = Annotated[int, option(MODEL, "--hidden", "Width of the residual stream.")]
Heads = Annotated[int, option(MODEL, "--heads", "Attention heads.")]
Tie = Annotated[bool, option(MODEL, "--tie", "The head shares the weight of the embedding.")]
Dropout = Annotated[float, option(MODEL, "--dropout", "Probability of dropout; the masks are the same on every mesh.")]
Dtype = Annotated[str, option(MODEL, "--dtype", f"One of {', '.join(DTYPES)}.")]

Data = Annotated[
    list[str] | None,
    option(
        TRAINING,
        "--data",
        "Text to train on, read as bytes; several files may follow." + unset("Python's standard library"),
        metavar="FILE...",
    ),
]
Seq = Annotated[int, option(TRAINING, "--seq", "Bytes per window of text.")]
Batch = Annotated[int, option(TRAINING, "--batch", "Windows per micro-step, over all processes.")]
Steps = Annotated[int, option(TRAINING, "--steps", "Steps of the optimizer.")]
Accumulate = Annotated[
    int, option(TRAINING, "--accumulate", "Micro-steps per step; gradients are exchanged once per step.")
]
Optimizer = Annotated[str, option(TRAINING, "--optimizer", f"One of {', '.join(OPTIMIZERS)} (sgd: momentum 0.9).")]
Lr = Annotated[float | None, option(TRAINING, "--lr", "Learning rate." + unset(RATES))]
Clip = Annotated[
    float | None, option(TRAINING, "--clip", "Largest norm of all gradients together." + unset("no clipping"))
]
Seed = Annotated[int, option(TRAINING, "--seed", "The same seed gives the same run on every mesh.")]

StoredOver = Annotated[
    str | None,
    option(SPLITTING, "--stored-over", "Store parameters split over this axis (ZeRO-3).", metavar="AXIS"),
]
StatesOver = Annotated[
    str | None,
    option(SPLITTING, "--states-over", "Split optimizer states over this axis (ZeRO-1/2).", metavar="AXIS"),
]
SequenceParallel = Annotated[
    bool, option(SPLITTING, "--sequence-parallel", "Split the residual stream over tp along the sequence.")
]

Static = Annotated[bool, option(PROGRAM, "--static", "Capture the step as one program and run that.")]
Passes = Annotated[
    list[str] | None,
    option(
        PROGRAM,
        "--pass",
        "With --static: a pass over the program, and its options; may be repeated.",
        metavar="NAME:OPTION=VALUE,...",
    ),
]

Verify = Annotated[
    bool,
    option(
        OUTPUT,
        "--verify",
        "Train the same model on one device too and compare loss and gradients in every step.  Largest "
        f"relative differences: {BOUNDS}.  Exit code 1 beyond.",
    ),
]
Json = Annotated[bool, option(OUTPUT, "--json", "Print one JSON object last; everything else goes to stderr.")]
Plot = Annotated[Path, option(OUTPUT, "--plot", "Where the plot of the loss goes.")]
NoPlot = Annotated[bool, option(OUTPUT, "--no-plot", "Draw no plot.")]
