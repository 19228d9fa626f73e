"""Training curves of float32 and of less beside it: one model, one order of data, two ranks.

``python -m bench.curves precision`` trains a byte-level GPT on the sources of Python's standard library, on simulated
ranks, in float32 and in bfloat16; ``wires`` in float32 and with gradients that travel in bfloat16 and in float8;
``gathers`` with parameters that travel in float8.  Each draws its losses: eight minutes, twelve and eight of one core.
The exit code is 1 where one ends further apart from float32
than its bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.train import TrainConfig
from meshwright.train.loop import train

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
CONFIG = TrainConfig(
    mesh=(("dp", 2),), fsdp="dp", static=True, passes=("data-parallel-optimization",), steps=2000, batch=8,
    lr=1e-3,
)  # fmt: skip
LAST = 100


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        color: of its line.
        apart: how far from float32 it may end, relatively.
        options: of its configuration.
    """

    color: str
    apart: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


CURVES = {
    "float32": Curve("#e08214"),
    "bfloat16": Curve("#2a6fbb", 5e-3, {"precision": "bf16"}),
    # Of plain data parallelism: there sums are encoded too.
    "float32, sent as float8": Curve("#1b7837", 1e-2, {"grad_comm": "float8", "fsdp": None}),
    "float32, gathered as float8": Curve("#b2182b", 1e-2, {"gather": "float8"}),
    "float32, sent as bfloat16": Curve("#762a83", 1e-2, {"grad_comm": "bf16", "fsdp": None}),
}
DRAWN = {
    "precision": ["float32", "bfloat16"],
    "gathers": ["float32", "float32, gathered as float8"],
    "wires": ["float32", "float32, sent as float8", "float32, sent as bfloat16"],
}


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


def apart(full: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """How much higher the other one ends, relatively, and the error of the paired differences."""
    pairs = [o / f for f, o in zip(full[-LAST:], other[-LAST:], strict=True)]
    return final(other)[0] / final(full)[0] - 1, statistics.stdev(pairs) / len(pairs) ** 0.5


def smoothed(found: Sequence[float], over: int = 25) -> list[float]:
    """Means of so many steps, up to each."""
    return [statistics.fmean(found[max(0, i + 1 - over) : i + 1]) for i in range(len(found))]


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """The losses, and under them their relative differences from float32, smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    loss, off = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    full = smoothed(curves["float32"])
    for name, found in curves.items():
        mean, color, wide = smoothed(found), CURVES[name].color, name == "float32"  # the others lie on it
        loss.plot(mean, color=color, lw=4 if wide else 1.2, alpha=0.5 if wide else 1, label=name)
        if not wide:
            off.plot([100 * (h / f - 1) for f, h in zip(full, mean, strict=True)], color=color, lw=0.8)
    most = 100 * max(CURVES[name].apart for name in curves)
    off.axhspan(-most, most, color="#666666", alpha=0.15, lw=0)
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
    """Train, draw, and say where all end."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("which", choices=DRAWN, help="what beside float32")
    parser.add_argument("--steps", type=int, default=CONFIG.steps)
    parser.add_argument("--out", type=Path, help="the picture; else one of docs/images")
    given = parser.parse_args(argv)
    config, curves, far = replace(CONFIG, steps=given.steps), dict[str, list[float]](), False
    for name in DRAWN[given.which]:
        found = curves[name] = losses(replace(config, **CURVES[name].options))
        mean, error = final(found)
        print(f"{name}: {mean:.4f} ± {error:.4f} nats per byte, mean of the last {LAST} of {given.steps} steps")
        if name != "float32":
            draw(given.out or PICTURES / f"{given.which}.png", curves)
            off, error = apart(curves["float32"], found)
            print(f"{name} / float32 - 1: {off:+.2%} ± {error:.2%}", flush=True)
            far |= abs(off) > CURVES[name].apart
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
