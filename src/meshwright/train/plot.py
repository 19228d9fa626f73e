"""The picture of a run: loss over steps, and under it, with verification, how far it is from one device."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.errors import extra

from .options import OptionError, writing

LOSS, REFERENCE, GRAY = "#2a6fbb", "#e08214", "#666666"


def can_draw() -> bool:
    """Whether what draws is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_path(path: Path) -> None:
    """Make the folder of the plot.  Raises OptionError if the plot cannot be written there, ExtraError if not drawn."""
    if path.suffix.lower() != ".png" or not can_draw():
        made = extra("matplotlib.backend_bases", "plot", "--plot")
        formats = sorted(made.FigureCanvasBase.get_supported_filetypes())
        if path.suffix.removeprefix(".").lower() not in formats:
            raise OptionError(f"--plot {path}: unknown kind of picture; end the name in one of .{', .'.join(formats)}")
    with writing(f"--plot {path}", "--no-plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not path.stat().st_size:
            path.unlink()


def draw(path: Path, title: str, steps: Sequence[dict[str, Any]], tolerance: float | None) -> None:
    """Write the picture.

    Args:
        path: where; its ending says which format.
        title: one line.
        steps: the values told after each step.
        tolerance: the bound on relative differences of the loss, with verification.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system is looked for
    from matplotlib.ticker import MaxNLocator

    at = [told["step"] + 1 for told in steps]
    figure = Figure(figsize=(7.0, 4.6 if tolerance is not None else 3.6), layout="constrained")
    if tolerance is None:
        loss = figure.subplots()
    else:
        loss, off = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
        # Equal losses have no place on a logarithmic axis: they are drawn at the rounding of float64.
        off.semilogy(at, [max(told["rel_loss_diff"], 1e-16) for told in steps], ".-", color=GRAY, lw=0.8, ms=3)
        off.axhline(tolerance, color=REFERENCE, ls="--", lw=1)
        off.annotate("tolerance", (1, tolerance), (0, -3), textcoords="offset points", va="top", color=REFERENCE)
        off.set_ylabel("relative\ndifference")
        loss.plot(at, [told["reference"] for told in steps], color=REFERENCE, lw=4, alpha=0.5, label="one device")
    loss.plot(at, [told["loss"] for told in steps], color=LOSS, lw=1.4, label="mesh")
    if tolerance is not None:
        loss.legend(frameon=False)
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title(title, fontsize=10)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("step")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=130)
