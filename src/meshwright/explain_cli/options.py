"""The options of ``meshwright explain`` as typer reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.train.config import DEVICES, DTYPES, OPTIMIZERS
from meshwright.train.options import option

MESH, MODEL, SPLITTING, PROGRAM, OUTPUT = "Mesh", "Model", "Splitting more", "Program", "Output"

Mesh = Annotated[
    str,
    option(
        MESH,
        "--mesh",
        "Named axes and their sizes; of the built-in models [bold]dp[/] splits the batch, [bold]tp[/] the model.",
        metavar="AXIS=SIZE,...",
    ),
]
Rank = Annotated[int, option(MESH, "--rank", "Whose program is shown.")]
Device = Annotated[
    str, option(MESH, "--device", f"What the program is for, one of {', '.join(DEVICES)}; none is used.")
]

Preset = Annotated[
    str | None,
    option(MODEL, "--preset", "A built-in model: [bold]gpt[/] (of meshwright train), [bold]llama-7b[/]."),
]
Model = Annotated[
    str | None,
    option(
        MODEL,
        "--model",
        "Your own: a function that takes the mesh and returns model, loss function, batch and a mapping of what "
        "compile_step is told (layouts, batch, ...).  Called with the meta device as default: nothing is allocated.",
        metavar="MODULE:FUNCTION",
    ),
]
Layers = Annotated[int | None, option(MODEL, "--layers", "Transformer blocks.")]
Hidden = Annotated[int | None, option(MODEL, "--hidden", "Width of the residual stream.")]
Heads = Annotated[int | None, option(MODEL, "--heads", "Attention heads.")]
Seq = Annotated[int | None, option(MODEL, "--seq", "Tokens per sequence.")]
Batch = Annotated[int | None, option(MODEL, "--batch", "Sequences per step, over all ranks.")]
Dtype = Annotated[str | None, option(MODEL, "--dtype", f"One of {', '.join(DTYPES)}.")]
Tie = Annotated[bool, option(MODEL, "--tie", "The head of the GPT shares the weight of the embedding.")]
Dropout = Annotated[float | None, option(MODEL, "--dropout", "Probability of dropout in the GPT.")]
Optimizer = Annotated[str, option(MODEL, "--optimizer", f"One of {', '.join(OPTIMIZERS)}.")]
Clip = Annotated[float | None, option(MODEL, "--clip", "Largest norm of all gradients together.")]

StoredOver = Annotated[
    str | None,
    option(SPLITTING, "--stored-over", "Store parameters split over this axis (ZeRO-3).", metavar="AXIS"),
]
SequenceParallel = Annotated[
    bool, option(SPLITTING, "--sequence-parallel", "Split the residual stream over tp along the sequence.")
]

Passes = Annotated[
    list[str] | None,
    option(
        PROGRAM, "--pass", "A pass over the program, and its options; may be repeated.", metavar="NAME:OPTION=VALUE,..."
    ),
]
Diff = Annotated[bool, option(PROGRAM, "--diff", "Compare the program before and after the passes.")]

Json = Annotated[bool, option(OUTPUT, "--json", "One JSON object on stdout instead of text.")]
Html = Annotated[Path | None, option(OUTPUT, "--html", "Also write one self-contained page.", metavar="FILE")]
