"""Training curves of float32 and of bfloat16 beside it: one model, one order of data, ZeRO-3 on two ranks.

``python -m bench.curves`` trains a byte-level GPT on the sources of Python's standard library twice, on simulated
ranks, and draws both losses: eight minutes of one core.  The exit code is 1 where they end more than half a percent
apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.train import TrainConfig
from meshwright.train.loop import train

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "precision.png"
CONFIG = TrainConfig(
    mesh=(("dp", 2),), stored_over="dp", static=True, passes=("data-parallel-optimization",), steps=2000, batch=8,
    lr=1e-3,
)  # fmt: skip
LAST, APART = 100, 5e-3
COLORS = {"float32": "#e08214", "bfloat16": "#2a6fbb"}


def losses(config: TrainConfig) -> list[float]:
    """Nats per byte, of each step."""
    found: list[float] = []

    def told(kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            found.append(values["loss"])

    mesh = config.make_mesh()
    mw.simulate(lambda: train(config, mesh, told), mesh)
    return found


def final(found: Sequence[float]) -> tuple[float, float]:
    """Mean of the last steps, and its standard error."""
    last = found[-LAST:]
    return statistics.fmean(last), statistics.stdev(last) / len(last) ** 0.5


def smoothed(found: Sequence[float], over: int = 25) -> list[float]:
    """Means of so many steps, up to each."""
    return [statistics.fmean(found[max(0, i + 1 - over) : i + 1]) for i in range(len(found))]


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """Both losses, and under them their relative difference, smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    loss, off = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    means = {name: smoothed(found) for name, found in curves.items()}
    for name, mean in means.items():
        wide = name == "float32"  # the other one lies on it
        loss.plot(mean, color=COLORS[name], lw=4 if wide else 1.2, alpha=0.5 if wide else 1, label=name)
    full, half = means.values()
    off.plot([100 * (h / f - 1) for f, h in zip(full, half, strict=True)], color="#666666", lw=0.8)
    off.axhspan(-100 * APART, 100 * APART, color="#666666", alpha=0.15, lw=0)
    loss.set_ylabel("loss (nats per byte)")
    off.set_ylabel("difference (%)")
    off.set_xlabel("step")
    loss.legend(frameon=False)
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draw, and say where both end."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--steps", type=int, default=CONFIG.steps)
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    given = parser.parse_args(argv)
    config = replace(CONFIG, steps=given.steps)
    curves = {"float32": losses(config), "bfloat16": losses(replace(config, precision="bf16"))}
    draw(given.out, curves)
    ends = {name: final(found) for name, found in curves.items()}
    for name, (mean, error) in ends.items():
        print(f"{name}: {mean:.4f} ± {error:.4f} nats per byte, mean of the last {LAST} of {given.steps} steps")
    apart = ends["bfloat16"][0] / ends["float32"][0] - 1
    pairs = zip(curves["float32"][-LAST:], curves["bfloat16"][-LAST:], strict=True)
    error = statistics.stdev(h / f for f, h in pairs) / LAST**0.5
    print(f"bfloat16 / float32 - 1: {apart:+.2%} ± {error:.2%}")
    return int(abs(apart) > APART)


if __name__ == "__main__":
    sys.exit(main())
