"""How long planning takes, by ranks, layers and axes of the mesh: the picture of ``docs/planner.md``.

``python -m bench.plan_times`` plans a Llama on the meta device: on more and more ranks, with more and more layers, and
on meshes of 64 ranks with more and more axes.  It prints CPU seconds by phase and draws them.  It takes two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "plan-times.svg"
HARDWARE = "h100-8x400g"
RANKS, LAYERS = (8, 64, 512, 4096, 16384), (4, 8, 16, 32, 64, 128)
MESHES = ((64,), (8, 8), (4, 4, 4))
USUAL_RANKS, USUAL_LAYERS = 64, 32
ROUNDS = 3
COLORS = {"capture": "#9ecae9", "tables": "#f6c79b", "solve": "#e4883a", "build": "#4c78a8"}


@dataclass(frozen=True)
class PlanTime:
    """One plan that was timed.

    Attributes:
        panel, point: what was varied, and its value.
        seconds: phase to CPU seconds.
    """

    panel: str
    point: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """CPU seconds of all phases."""
        return sum(self.seconds.values())


def timed_plan(ranks: int, layers: int, mesh: mw.Mesh | None = None) -> dict[str, float]:
    """CPU seconds of a plan, by phase; phases are timed by the clock, and get their parts of the process's time."""
    config = StepConfig(layers=layers, hidden=4096, heads=32, seq=2048, batch=ranks, dtype="bfloat16")
    model = GPT(config, "meta", Llama())
    ids = torch.empty(config.batch, config.seq, dtype=torch.long, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    where: dict[str, Any] = {"devices": ranks} if mesh is None else {"mesh": mesh}
    begin, clock = time.process_time(), time.perf_counter()
    found = mw.plan(model, lambda m, b: loss_of(m, *b), (ids, ids), optimizer, hardware=HARDWARE, **where)
    cpu, wall = time.process_time() - begin, time.perf_counter() - clock
    return {phase: found.phases[phase] * cpu / wall for phase in COLORS}


def plan_times(
    ranks: Sequence[int], layers: Sequence[int], meshes: Sequence[Sequence[int]], rounds: int
) -> Iterator[PlanTime]:
    """Plans of all three panels, with the median of some rounds for each phase."""

    def median(panel: str, point: str, *how: Any) -> PlanTime:
        every = [timed_plan(*how) for _ in range(rounds)]
        return PlanTime(panel, point, {phase: statistics.median(s[phase] for s in every) for phase in COLORS})

    for n in ranks:
        yield median("ranks", f"{n:,}", n, USUAL_LAYERS)
    for n in layers:
        yield median("layers", str(n), USUAL_RANKS, n)
    for sizes in meshes:
        mesh = mw.Mesh(dict(zip("abc", sizes, strict=False)))
        yield median("axes", f"{len(sizes)}\n{' × '.join(map(str, sizes))}", mesh.size, USUAL_LAYERS, mesh)


def draw(path: Path, times: Sequence[PlanTime]) -> None:
    """Stacked bars of the phases, one panel for ranks, layers and axes each."""
    import matplotlib
    from matplotlib.figure import Figure

    titles = {
        "ranks": f"ranks ({USUAL_LAYERS} layers)", "layers": f"layers ({USUAL_RANKS} ranks)",
        "axes": f"axes of a given mesh ({USUAL_LAYERS} layers)",
    }  # fmt: skip
    panels = [p for p in titles if any(t.panel == p for t in times)]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan-times", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9.5, 3.4), layout="constrained")
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            mine = [t for t in times if t.panel == panel]
            base = [0.0] * len(mine)
            for phase, color in COLORS.items():
                heights = [t.seconds[phase] for t in mine]
                axes.bar([t.point for t in mine], heights, 0.7, base, color=color, label=phase)
                base = [b + h for b, h in zip(base, heights, strict=True)]
            for i, t in enumerate(mine):
                axes.annotate(f"{t.total:.1f}", (i, t.total), (0, 2), textcoords="offset points", ha="center", size=8)
            axes.set_xlabel(titles[panel])
            axes.spines[["top", "right"]].set_visible(False)
            axes.margins(y=0.12)
        figure.axes[0].set_ylabel("CPU seconds")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(COLORS), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan_times", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes: does it run")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture (default: that of docs/planner.md)")
    given = parser.parse_args(argv)
    few = 1 if given.quick else None
    timed_plan(2, 2)  # imports, and what the first capture of a process loads
    times = list[PlanTime]()
    for t in plan_times(RANKS[:few], LAYERS[:few], MESHES[:few], 1 if given.quick else ROUNDS):
        times.append(t)
        phases = ", ".join(f"{phase} {s:.2f}" for phase, s in t.seconds.items())
        print(f"{t.panel} {' = '.join(t.point.splitlines())}: {t.total:.2f} s ({phases})", flush=True)
    draw(given.out, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
