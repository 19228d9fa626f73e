"""The report for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..mesh import Mesh
from ..program.check.verify import ROLES
from ..resharding.record import SINCE
from .account import Account
from .entries import Collective, InputLayout, folded, folded_layouts, in_bytes, in_words, placed
from .memory import CATEGORIES, Memory
from .pipeline import PipelineAccount
from .timeline import COMPUTE, Timeline

COLORS = {"forward": "cyan", "recomputation": "green", "backward": "magenta", "optimizer": "yellow"}

_MOST_RANKS = 64  # a larger mesh is not drawn
_BAR = 28


def as_text(why: Account, width: int, color: bool) -> str:
    """The report as a string."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(report(why))
    return "\n".join(line.rstrip() for line in file.getvalue().strip("\n").splitlines()) + "\n"


def report(why: Account) -> RenderableType:
    """The report as something that rich prints."""
    if not why.collectives and not why.counts.total and not why.counts.copies and why.mesh is None:
        return Text("no communication")
    return Group(*(part for section in _sections(why) for part in section))


def _sections(why: Account) -> Iterator[tuple[RenderableType, ...]]:
    if why.mesh is not None:
        sizes = " × ".join(f"{a}={n}" for a, n in zip(why.mesh.axes, why.mesh.sizes, strict=True))
        update = f"; {why.update}" if why.update else ""
        yield (Text(f"step of rank {why.rank} on {sizes}: {why.mesh.size} ranks{update}", style="bold"),)
        if why.mesh.size <= _MOST_RANKS:
            yield (_indented(_grid(why.mesh, why.rank)),)
    yield tuple(_indented(Text(note, style="dim")) for note in why.notes)
    if why.ledger:
        yield _titled("requested options", *(Text(str(e), style="" if e.applied else "bold red") for e in why.ledger))
    if why.laid:
        yield _titled("layouts", _layouts(why))
        yield _titled("how layouts were inferred", *_origins(why.laid))
    yield _titled("collectives", *_listed(why))
    yield tuple(_indented(Text(str(w), style="bold red")) for w in why.warnings)
    yield _titled("totals per rank", _totals(why))
    if why.memory is not None:
        yield _titled(f"memory per rank: peak {in_bytes(why.memory.peak)}", *_memory(why.memory))
    if why.time is not None:
        seconds = f"{why.time.seconds * 1e3:.3g} ms"
        yield _titled(f"predicted time of a step on {why.time.hardware}: {seconds}", _time(why.time))
    if why.pipeline is not None:
        yield _titled(f"memory per rank along {why.pipeline.axis} between micro-batch actions", _stages(why.pipeline))


def _titled(title: str, *parts: RenderableType) -> tuple[RenderableType, ...]:
    return (Text(f"\n{title}", style="bold"), *(_indented(p) for p in parts)) if parts else ()


def _indented(part: RenderableType, by: int = 2) -> Padding:
    return Padding(part, (0, 0, 0, by), expand=False)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _grid(mesh: Mesh, rank: int) -> Table:
    """Which rank sits where: the last axis to the right, the others downwards."""
    *outer, last = mesh.axes
    table = _table("", *(f"{last} {i}" for i in range(mesh.sizes[-1])))
    for start in range(0, mesh.size, mesh.sizes[-1]):
        row = mesh.ranks[start : start + mesh.sizes[-1]]
        at = mesh.coordinate(row[0])
        name = ", ".join(f"{axis} {i}" for axis, i in zip(outer, at, strict=False))
        table.add_row(Text(name, style="dim"), *(Text(str(r), style="bold reverse" if r == rank else "") for r in row))
    return table


def _stages(pipeline: PipelineAccount) -> Table:
    names = ("parameters", "states", "gathered", "gradients", "activations", "micro-batches", "total")
    table = _table(pipeline.axis, "stages", *names, right=names)
    for r in pipeline.ranks:
        sizes = [in_bytes(n) for n in (r.parameters, r.states, r.gathered, r.gradients, r.activations)]
        table.add_row(str(r.rank), ", ".join(map(str, r.stages)), *sizes, str(r.micro_batches), in_bytes(r.total))
    return table


def _time(time: Timeline) -> Table:
    table = _table("", "ms", "of the step", "along the step", right=("ms", "of the step"))
    waits = {"waits for collectives": time.exposed, "waits for stages": time.bubble}
    for name, seconds in {**time.lanes(), **{k: s for k, s in waits.items() if s}}.items():
        lane = Text(time.drawn(name), style="cyan")
        share = f"{seconds / time.seconds:.0%}" if time.seconds else ""
        label = name if name in waits or name == COMPUTE else f"wire of {name}"
        table.add_row(label, f"{seconds * 1e3:.3g}", share, lane)
    return table


# ---------------------------------------------------------------------------------------------- layouts


def _layouts(why: Account) -> Table:
    assert why.mesh is not None
    table = _table(
        "×", "name", "global", *why.mesh.axes, "local", "bytes", "source", right=("×", "global", "local", "bytes")
    )
    for n, x in folded_layouts(why.laid):
        stored = dict(placed(x.layout))
        seen = dict(placed(x.seen))
        cells = [Text(str(n), style="dim"), Text(x.name), Text(_by(x.shape))]
        for axis in why.mesh.axes:
            at = stored[axis]
            text = Text("·" if at == "Replicate" else at, style="dim" if at == "Replicate" else "green")
            cells.append(text if seen[axis] == at else text.append(" (stored)", style="dim"))
        said = {"user": "bold", "propagated": "", "default": "dim"}[x.source]
        table.add_row(*cells, Text(_by(x.local)), Text(in_bytes(x.bytes)), Text(x.source, style=said))
    return table


def _origins(laid: tuple[InputLayout, ...]) -> Iterator[RenderableType]:
    for n, x in folded_layouts(laid):
        if x.source != "propagated":
            continue
        yield Text.assemble((f"{n} × " if n > 1 else "", "dim"), x.name, (f": {in_words(x.seen)}", "green"))
        yield _indented(Text(f"via {x.reason}", style="dim"))
        for lost in x.lost:
            yield _indented(Text(f"overruled: {lost}", style="dim italic"))


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "1"


# ---------------------------------------------------------------------------------------------- collectives


def _listed(why: Account) -> Iterator[RenderableType]:
    """By role, then by what is done and why; below that the tensors that it is done to."""
    if not why.collectives:
        yield Text("no implicit collectives", style="dim")
    groups: dict[tuple[str, ...], list[tuple[int, Collective]]] = {}
    for n, c in folded(why.collectives):
        reason = c.reason.replace(c.parameter, "it").partition(SINCE)[0] if c.parameter else c.reason
        key = (c.role, c.kind.replace("_", "-"), ", ".join(c.axes), in_words(c.src), in_words(c.dst), reason)
        groups.setdefault(key, []).append((n, c))
    for (role, kind, axes, src, dst, reason), alike in sorted(groups.items(), key=lambda g: ROLES.index(g[0][0])):
        yield Text.assemble((role, COLORS[role]), " ", (kind, "bold"), f" over {axes}: {src}", (" → ", "dim"), dst)
        yield _indented(Text(reason, style="dim"))
        for n, c in alike:
            yield _indented(_moved(n, c), 4)
    if why.unlisted > 0:
        yield Text(f"plus {why.unlisted} explicit collectives (gradient synchronization)", style="dim")


def _moved(n: int, c: Collective) -> Text:
    made = Text()
    made.append(f"{n} × " if n > 1 else "", style="bold")
    made.append(f"{c.tensor} {c.dtype}[{_by(c.shape)}] ")
    made.append(in_bytes(c.bytes) + (" each" if n > 1 else ""), style="green")
    made.append(f" + {in_bytes(c.padding)} of padding" if c.padding else "", style="dim")
    made.append(f" at {c.line}" if c.line else "", style="dim")
    since = c.reason.partition(SINCE)[2].partition(", where")[0] if c.parameter else ""
    made.append(f" since {since}" if since else "", style="dim")
    return made


def _totals(why: Account) -> Table:
    table = _table("role", "kind", "axes", "count", "bytes", right=("count", "bytes"))
    for t in why.totals:
        role = Text(t.role, style=COLORS.get(t.role, ""))
        table.add_row(role, t.kind.replace("_", "-"), ",".join(t.axes), str(t.count), in_bytes(t.bytes))
    table.add_row("all", "", "", str(why.counts.total), in_bytes(why.counts.total_bytes), style="bold")
    for way, (count, nbytes) in why.counts.copies.items():
        table.add_row("", f"copy {way.replace('_', ' ')}", "", str(count), in_bytes(nbytes))
    return table


# ---------------------------------------------------------------------------------------------- memory


def _memory(memory: Memory) -> Iterator[RenderableType]:
    table = _table("", "at the peak", "", "maximum over the step", right=("at the peak", "maximum over the step"))
    for name in CATEGORIES:
        there = memory.at_peak[name]
        bar = "█" * round(_BAR * there / memory.peak) if memory.peak else ""
        table.add_row(name, in_bytes(there), Text(bar, style="cyan"), in_bytes(memory.highest[name]))
    yield table
    if memory.host:
        yield Text(f"{in_bytes(memory.host)} of parameters and states are stored on the CPU", style="dim")
    at = f" ({memory.line})" if memory.line else ""
    yield Text(f"the peak is in the {memory.role}, at {memory.node}{at}", style="dim")
