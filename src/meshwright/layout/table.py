"""Layouts of a model's parameters as a table: which, why, as text and as a file; read wherever globs are taken."""

from __future__ import annotations

import io
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .. import drawing
from ..errors import LayoutError
from ..untrusted_files import read_regular
from .layout import Placements
from .placement import Placement, Replicate, as_placement, placement_from

_FORMAT = 1
_KEYS = {"format", "mesh", "batch", "layouts", "notes", "inputs", "outputs", "options", "made_for"}
# What a table may say beside layouts, by the names that compile_step has for it, and of which types.
OPTIONS: dict[str, tuple[type, ...]] = {
    "fsdp": (str, list, dict), "shard_states": (str, list), "reshard_after_forward": (bool,), "stages": (dict,),
    "recompute": (list,), "passes": (list,),
}  # fmt: skip


@dataclass(frozen=True)
class LayoutLine:
    """One line: what is split how, and why.

    Attributes:
        placements: axis to placement; of axes that are not named: replicated.
        reason: in words.
    """

    placements: Mapping[str, Placement]
    reason: str = ""


class LayoutTable(MutableMapping[str, Mapping[str, Placement]]):
    """The layouts of a model's parameters, buffers and batch. `mw.layouts` returns one.

    It is a mapping from globs of names to placements. `shard_module` and `compile_step` take it. Edit it as a dict:
    `table["head.weight"] = {"tp": mw.Replicate()}`, `del table["head.weight"]`.

    Attributes:
        mesh: Axis name to size, of the mesh it was made for.
        lines: Glob to line, with the reason.
        batch: Placements of all batch tensors, or of each by name.
        notes: Remarks, such as an axis that shards nothing.
        inputs: Glob of module names to placements, as `inputs=` of `compile_step`; `outputs` likewise.
        options: Further options of `compile_step`: `fsdp`, `shard_states`, `reshard_after_forward`, `stages`,
            `recompute`, `passes`.
        made_for: Model and hardware of a plan of `mw.plan`. Without it the table fits any model with such names.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        table = mw.layouts(net, mesh, torch.ones(4, 8), lambda model, x: model(x).sum())
        table["2.bias"] = {"tp": mw.Replicate()}
        table.save("plan.toml")
        assert mw.load_layouts("plan.toml")["0.weight"] == table["0.weight"]
        ```
    """

    def __init__(
        self,
        mesh: Mapping[str, int],
        lines: Mapping[str, LayoutLine],
        batch: Mapping[str, Any] | None = None,
        notes: tuple[str, ...] = (),
        *,
        inputs: Mapping[str, Mapping[str, Placement]] | None = None,
        outputs: Mapping[str, Mapping[str, Placement]] | None = None,
        options: Mapping[str, Any] | None = None,
        made_for: Mapping[str, str] | None = None,
    ) -> None:
        self.mesh, self.lines, self.batch, self.notes = dict(mesh), dict(lines), dict(batch or {}), tuple(notes)
        self.inputs, self.outputs = dict(inputs or {}), dict(outputs or {})
        self.options, self.made_for = dict(options or {}), dict(made_for or {})

    def __getitem__(self, glob: str) -> Mapping[str, Placement]:
        return dict(self.lines[glob].placements)

    def __setitem__(self, glob: str, placements: Mapping[str, Any]) -> None:
        if not isinstance(placements, Mapping) or not placements.keys() <= self.mesh.keys():
            raise LayoutError(
                f"{glob}: {placements!r}: a mapping from axes ({', '.join(self.mesh)}) to placements was expected"
            )
        self.lines[glob] = LayoutLine({a: as_placement(p) for a, p in placements.items()}, "edited")

    def __delitem__(self, glob: str) -> None:
        del self.lines[glob]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def placements_of(self, name: str) -> dict[str, Placement]:
        """What shards a parameter: that of the last glob which matches its name."""
        found = [line.placements for glob, line in self.lines.items() if fnmatchcase(name, glob)]
        return {a: p for a, p in (found[-1] if found else {}).items() if not isinstance(p, Replicate)}

    def __repr__(self) -> str:
        return f"<layouts of {len(self)} lines for {_axes(self.mesh)}>"

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        Console(file=file, width=160, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        rows = []
        for glob, line in self.lines.items():
            split = {a: p for a, p in line.placements.items() if not isinstance(p, Replicate)}
            rows.append((glob, _words(split) or "replicated", line.reason))
        rows += [(name, _words(of) or "replicated", "the batch") for name, of in _by_leaf(self.batch).items()]
        head = drawing.heading(f"layouts on {_axes(self.mesh)}")
        return (
            head + drawing.table(("parameter", "placements", "why"), rows) + "".join(map(drawing.heading, self.notes))
        )

    def __rich__(self) -> Any:
        """The table; what is whole on all ranks, and for the same reason, in one line."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, title_justify="left", title=f"layouts on {_axes(self.mesh)}")
        for name in ("parameter", "placements", "why"):
            table.add_column(name, overflow="fold")
        whole: dict[str, list[str]] = {}
        for glob, line in self.lines.items():
            split = {a: p for a, p in line.placements.items() if not isinstance(p, Replicate)}
            if split or line.reason == "edited":
                table.add_row(Text(glob), Text(_words(split) or "whole"), Text(line.reason))
            else:
                whole.setdefault(line.reason, []).append(glob)
        for reason, globs in whole.items():
            table.add_row(Text(", ".join(globs)), Text("whole"), Text(reason))
        for name, said in _by_leaf(self.batch).items():
            table.add_row(Text(name), Text(_words(said) or "whole"), Text("the batch"))
        for what, wishes in (("inputs of a module", self.inputs), ("outputs of a module", self.outputs)):
            for glob, placements in wishes.items():
                table.add_row(Text(glob), Text(_words(placements)), Text(what))
        for name, value in self.options.items():
            table.add_row(Text(name), Text(json.dumps(value)), Text("option of compile_step"))
        return Group(table, *(Text(f"note: {note}") for note in self.notes))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as TOML, a line for each glob, to be edited and read by :func:`meshwright.load_layouts`.

        Raises:
            OSError: it cannot be written.
        """
        sizes = ", ".join(f"{_quoted(a)} = {n}" for a, n in self.mesh.items())
        text = [
            f"format = {_FORMAT}",
            f"mesh = {{ {sizes} }}",
            f"notes = {json.dumps(list(self.notes))}",
            "",
            "[batch]",
        ]
        text += [f"{_quoted(name)} = {_inline(said)}" for name, said in _by_leaf(self.batch).items()]
        for title, globs in (("inputs", self.inputs), ("outputs", self.outputs)):
            if globs:
                text += ["", f"[{title}]", *(f"{_quoted(glob)} = {_inline(said)}" for glob, said in globs.items())]
        for title, values in (("options", self.options), ("made_for", self.made_for)):
            if values:
                text += ["", f"[{title}]", *(f"{_quoted(k)} = {_value(v)}" for k, v in values.items())]
        text += ["", "[layouts]"]
        text += [f"{_quoted(glob)} = {_inline(line.placements, line.reason)}" for glob, line in self.lines.items()]
        Path(path).write_text("\n".join(text) + "\n", encoding="utf-8")


def load_layouts(path: str | os.PathLike[str]) -> LayoutTable:
    """Read a table of layouts that `LayoutTable.save` wrote, or that you wrote by hand.

    `shard_module`, `compile_step` and the command line also take the path itself.

    Args:
        path: A TOML file.

    Raises:
        LayoutError: If the file cannot be read, is no TOML, or holds no valid layout. Names the file and the key.

    Examples:
        ```python
        from pathlib import Path

        Path("plan.toml").write_text('''
        mesh = { dp = 2, tp = 2 }
        [batch]
        "*" = { dp = "Shard(0)" }
        [layouts]
        "layers.*.up.weight" = { tp = "Shard(0)" }
        "layers.*.down.weight" = { tp = "Shard(1)" }
        ''')
        assert mw.load_layouts("plan.toml")["layers.*.up.weight"] == {"tp": mw.Shard(0)}
        ```
    """
    try:
        found = tomllib.loads(read_regular(Path(path)).decode())
    except FileNotFoundError as error:
        raise LayoutError(
            f"{str(path)!r} is no file of layouts. Pass a dict, glob of names to placements: "
            '{"*.weight": {"tp": mw.Shard(0)}}. For data parallelism pass no layouts, and shard the batch.'
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LayoutError(f"{path}: cannot be read as layouts: {error}") from error
    if unknown := found.keys() - _KEYS:
        raise LayoutError(f"{path}: unknown {', '.join(sorted(unknown))}: {', '.join(sorted(_KEYS))} are known")
    if found.get("format", _FORMAT) != _FORMAT:
        raise LayoutError(f"{path}: format {found['format']!r} is of another version: {_FORMAT} is read")
    mesh, said, batch, inputs, outputs, options, made_for = (
        found.get(key, {}) for key in ("mesh", "layouts", "batch", "inputs", "outputs", "options", "made_for")
    )
    tables = (mesh, said, batch, inputs, outputs, options, made_for)
    if not all(isinstance(t, dict) for t in tables) or not all(type(n) is int for n in mesh.values()):
        raise LayoutError(f"{path}: tables were expected: mesh = {{ tp = 2 }}, [batch], [layouts]")
    notes = found.get("notes", [])
    lines = {glob: _line(path, glob, entry, mesh) for glob, entry in said.items()}
    leaves = {name: _line(path, f"batch: {name}", entry, mesh).placements for name, entry in batch.items()}
    whole = leaves["*"] if leaves.keys() == {"*"} else leaves
    for name, value in options.items():
        if name not in OPTIONS or not isinstance(value, OPTIONS[name]):
            raise LayoutError(f"{path}: options: {name} = {value!r}: of {', '.join(OPTIONS)} a value was expected")
    by_module = [
        {glob: _line(path, f"{title}: {glob}", entry, mesh).placements for glob, entry in globs.items()}
        for title, globs in (("inputs", inputs), ("outputs", outputs))
    ]
    return LayoutTable(
        mesh, lines, whole, tuple(map(str, notes)) if isinstance(notes, list) else (),
        inputs=by_module[0], outputs=by_module[1], options=options,
        made_for={str(k): str(v) for k, v in made_for.items()},
    )  # fmt: skip


def read_layouts(given: Any) -> Any:
    """What was given for globs to placements; of the path of a file, the table in it."""
    return load_layouts(given) if isinstance(given, (str, os.PathLike)) else given


def _line(path: Any, glob: str, entry: Any, mesh: Mapping[str, int]) -> LayoutLine:
    try:
        if not isinstance(entry, dict):
            raise LayoutError(f'{entry!r}: {{ tp = "Shard(0)" }} was expected')
        reason = entry.pop("reason", "")
        if unknown := [a for a in entry if mesh and a not in mesh]:
            raise LayoutError(f"{', '.join(unknown)}: no axis of the file's mesh ({', '.join(mesh)})")
        return LayoutLine({a: placement_from(str(text)) for a, text in entry.items()}, str(reason))
    except LayoutError as error:
        raise LayoutError(f"{path}: {glob}: {error}") from error


def _by_leaf(batch: Mapping[str, Any]) -> Mapping[str, Mapping[str, Placement]]:
    return {"*": batch} if batch and not any(isinstance(v, Mapping) for v in batch.values()) else batch


def _axes(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{a}={n}" for a, n in mesh.items())


def _words(placements: Mapping[str, Placements]) -> str:
    return ", ".join(f"{a}: {p!r}" for a, p in placements.items())


def _inline(placements: Mapping[str, Placements], reason: str = "") -> str:
    said = [f'{_quoted(a)} = "{p!r}"' for a, p in placements.items()]
    said += [f"reason = {json.dumps(reason, ensure_ascii=False)}"] if reason else []
    return "{ " + ", ".join(said) + " }" if said else "{}"


def _value(value: Any) -> str:
    """An option as TOML has it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_quoted(str(k))} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _quoted(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key, ensure_ascii=False)


__all__ = ["LayoutLine", "LayoutTable", "load_layouts", "read_layouts"]
