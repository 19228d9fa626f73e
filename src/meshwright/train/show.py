"""What the terminal shows: the mesh, the layouts, the progress, the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from .config import TrainConfig
from .log import Sink
from .verify import Verdict

LINES = 10  # lines about progress where there is no terminal to draw a bar on
MOST_RANKS = 64  # a larger mesh is not drawn
SMOOTHING = 0.8
WIDE = 100  # columns


class Show:
    """Listens to the events of a run (see ``loop.Emit``) and keeps what the plot and ``--json`` need.

    Args:
        sinks: are told the same.
    """

    def __init__(self, config: TrainConfig, console: Console, sinks: Sequence[Sink] = ()) -> None:
        self.config, self.console, self.sinks = config, console, sinks
        self.steps: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.verdict: Verdict | None = None
        self._rate = 0.0
        self._predicted = ""
        self._bar: Progress | None = None
        self._warned: set[str] = set()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """One event."""
        {"start": self._start, "step": self._step, "end": self._end, "warning": self._warning}[kind](values)
        for sink in self.sinks:
            sink(kind, values)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    # -- start ----------------------------------------------------------------------------------------

    def _start(self, values: dict[str, Any]) -> None:
        predicted = values.get("predicted_bytes")
        self._predicted = f" ({in_bytes(predicted)} predicted)" if predicted else ""
        self.console.print(self._headline(values))
        for text in values["passes"]:
            self.console.print(Text(text), soft_wrap=True)
        self.console.print(Padding(mesh_grid(self.config), (1, 0, 0, 2), expand=False))
        table = layout_table(self.config, values["parameters"])
        if Measurement.get(self.console, self.console.options, table).maximum + 2 > self.console.width:
            self.console.print(Text(f"\n{listed(table)}\n"), soft_wrap=True)
        else:
            self.console.print(Padding(table, (1, 0, 1, 2), expand=False))
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=8 if self.console.width < WIDE else 30),
                TextColumn("{task.fields[text]}"),
                console=self.console,
            )
            self._bar.add_task("", total=self.config.steps, completed=values["begin"], text="")
            self._bar.start()

    def _headline(self, values: dict[str, Any]) -> Table:
        config, rows = self.config, values["parameters"]
        count = sum(math.prod(row["shape"]) for row in rows)
        on = "nccl" if config.device == "cuda" else "gloo"
        batch = f"{config.batch} × {config.seq} {'tokens' if config.model else 'bytes'}"
        if config.accumulate > 1:
            batch += f" × {config.accumulate} micro-steps"
        options = [
            f"stored over {config.fsdp}" if config.fsdp else "",
            "stored on the host" if config.offload else "",
            f"states over {config.shard_states}" if config.shard_states else "",
            "sequence parallel" if config.sequence_parallel else "",
            f"computed in {config.precision}" if config.precision else "",
            f"dropout {config.dropout:g}" if config.dropout else "",
            f"clip {config.clip:g}" if config.clip else "",
            "captured step" if config.static else "",
            *(str(p) for p in config.pass_manager().passes),
            "verified against one device" if config.verify else "",
            f"resumed after step {values['begin']}" if values["begin"] else "",
        ]
        sizes = " × ".join(f"{axis}={n}" for axis, n in config.mesh)
        lines = {
            "model": f"{values['title']}: {count:,} parameters ({config.dtype})",
            "data": values["source"],
            "step": f"{batch}, {config.optimizer}, lr {config.learning_rate:g}, seed {config.seed}",
            "mesh": f"{sizes}: {math.prod(n for _, n in config.mesh)} processes on {config.device} ({on})",
            "with": ", ".join(filter(None, options)),
        }
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan")
        for name, text in lines.items():
            if text:
                table.add_row(name, Text(text))
        return table

    # -- steps ----------------------------------------------------------------------------------------

    def _step(self, values: dict[str, Any]) -> None:
        self.steps.append(values)
        rate = values["tokens_per_s"]
        self._rate = rate if len(self.steps) < 3 else SMOOTHING * self._rate + (1 - SMOOTHING) * rate
        n = sum(values["collectives"].values())
        text = f"loss {values['loss']:.4f}  {self._rate:,.0f} tokens/s"
        text += f"  {values['flops_share']:.0%} of peak FLOPs" if "flops_share" in values else ""
        text += f"  peak {in_bytes(values['peak_bytes'])}{self._predicted}" if "peak_bytes" in values else ""
        text += f"  {n} collectives {in_bytes(values['bytes'])}/step"
        text += f"  held-out loss {values['eval_loss']:.4f}" if "eval_loss" in values else ""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, text=text)
            return
        every = max(1, self.config.steps // LINES)
        done = values["step"] + 1
        if done == 1 or done % every == 0 or done == self.config.steps or "eval_loss" in values:
            off = f"  off by {values['rel_loss_diff']:.1e}" if "rel_loss_diff" in values else ""
            at = f"{done:>{len(str(self.config.steps))}}/{self.config.steps}"
            self.console.print(Text(f"step {at}  {text}{off}"), soft_wrap=True)

    def _warning(self, values: dict[str, Any]) -> None:
        if values["text"] not in self._warned:
            self._warned.add(values["text"])
            self.console.print(Text(f"note: {values['text']}", style="yellow"), soft_wrap=True)

    # -- end ------------------------------------------------------------------------------------------

    def _end(self, values: dict[str, Any]) -> None:
        self.close()
        self.summary, self.verdict = values["summary"], values["verdict"]
        found = self.summary
        kinds = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in found["collectives_per_step"].items())
        self.console.print()
        self.console.print(
            Text(
                f"loss {found['loss_first']:.4f} → {found['loss_last']:.4f} in {found['steps']} steps, "
                f"{found['tokens_per_s']:,.0f} tokens/s; per step and rank: {kinds or 'no collective'}, "
                f"{in_bytes(found['bytes_per_step'])}"
            ),
            soft_wrap=True,
        )
        if self.verdict is not None:
            self.console.print(Padding(verdict_table(self.verdict, self.config), (1, 0, 0, 2), expand=False))


# ---------------------------------------------------------------------------------------------- pieces


def in_bytes(n: float) -> str:
    """Bytes for people: ``1.5 MB``."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def mesh_grid(config: TrainConfig) -> Table | Text:
    """Which rank sits where: the last axis to the right, the others downwards."""
    mesh = config.make_mesh()
    if mesh.size > MOST_RANKS:
        return Text(f"{mesh.size} ranks")
    *outer, last = mesh.axes
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("", style="dim")
    for i in range(mesh.sizes[-1]):
        table.add_column(f"{last} {i}", justify="center")
    for start in range(0, mesh.size, mesh.sizes[-1]):
        row = mesh.ranks[start : start + mesh.sizes[-1]]
        at = mesh.coordinate(row[0])
        name = ", ".join(f"{axis} {i}" for axis, i in zip(outer, at, strict=False))
        table.add_row(name, *(f"rank {rank}" for rank in row))
    return table


def layout_table(config: TrainConfig, rows: list[dict[str, Any]]) -> Table:
    """Parameters and what each axis does to them; alike parameters of repeated blocks share a row."""
    merged: dict[tuple[Any, ...], int] = {}
    for row in rows:
        name = re.sub(r"\.\d+\.", ".*.", row["name"])
        key = (name, row["shape"], row["placements"], row["local"])
        merged[key] = merged.get(key, 0) + 1
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("parameter", no_wrap=True)
    table.add_column("×", justify="right", no_wrap=True)
    table.add_column("global", justify="right", no_wrap=True)
    for axis, _ in config.mesh:
        table.add_column(axis, no_wrap=True)
    table.add_column("local", justify="right", no_wrap=True)
    for (name, shape, placements, local), n in merged.items():
        cells = [Text(name), Text(str(n)), Text(by(shape))]
        for p in placements:
            quiet = p == "Replicate()"
            cells.append(Text("replicate" if quiet else p, style="dim" if quiet else "green"))
        table.add_row(*cells, Text(by(local)))
    return table


def listed(table: Table) -> str:
    """A table that is wider than the terminal: a line for each row, with nothing cut off."""
    heads = [str(c.header) for c in table.columns]
    rows = zip(*(c.cells for c in table.columns), strict=True)
    return "\n".join(", ".join(f"{h} {cell}" for h, cell in zip(heads, row, strict=True)) for row in rows)


def by(shape: tuple[int, ...]) -> str:
    """``192 × 64``."""
    return " × ".join(map(str, shape)) or "1"


def verdict_table(found: Verdict, config: TrainConfig) -> Table:
    """The comparison with one device."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("against one device", "relative difference", "in step", "tolerance", ""):
        table.add_column(name)
    rows = [
        ("loss", found.loss, found.loss_step, found.loss_tolerance),
        (f"gradients, {found.grad_name}", found.grad, found.grad_step, found.grad_tolerance),
    ]
    for name, value, step, tolerance in rows:
        good = value <= tolerance
        verdict = Text("passed" if good else "FAILED", style="bold green" if good else "bold red")
        at = f"{step + 1} of {config.steps}" if value else ""
        table.add_row(Text(name), f"{value:.2e}", at, f"{tolerance:.0e}", verdict)
    return table
