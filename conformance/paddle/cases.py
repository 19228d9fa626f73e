"""Files of what PaddlePaddle's SPMD rules answer, one case a line, read into layouts.

A tensor is ``{shape, dims_mapping, partial}``: ``dims_mapping[i]`` is the mesh axis that splits dim i, or -1; where
several axes split a dim, ``multi`` has a list of axes per dim and wins.  ``partial`` is a list of axes with their
reductions in ``reduce_type`` (sum where it says nothing), or a mapping of axes to reductions.  A nested list is a
variadic slot; ``{"const": ...}`` is a number or a list that the op takes as a tensor; ``null`` is absent.
"""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import LayoutError, MeshwrightError
from meshwright.layout import REPLICATE, Layout, Partial, Placement, Shard
from meshwright.mesh import Mesh

DIRECTIONS = ("forward", "backward")


class CaseError(MeshwrightError, ValueError):
    """A file of cases that cannot be read: says which file and line."""


@dataclass(frozen=True)
class Given:
    """A tensor of a case: its layout, and its global shape where the case says it."""

    layout: Layout
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Const:
    """An argument that is known: a number or a list."""

    value: Any


Entry = Given | Const | None
Slots = list[Entry | list[Entry]]


@dataclass(frozen=True)
class Case:
    """One answer of a rule; ``where`` is the file and line it was read from, ``text`` the line."""

    op: str
    direction: str
    mesh: Mesh
    inputs: Slots
    outputs: Slots
    attrs: Mapping[str, Any]
    result_inputs: list[Entry]
    result_outputs: list[Entry]
    where: str
    text: str


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a file, in order; of a compressed one where its name ends in ``.gz``.

    Raises:
        CaseError: no such file, or a line that is no case.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _case(line.strip(), f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise CaseError(f"{path}: {error}") from error


def _case(line: str, where: str) -> Case:
    try:
        raw = json.loads(line)
        if not isinstance(raw, dict):
            raise TypeError("a case is a JSON object")
        if raw["direction"] not in DIRECTIONS:
            raise ValueError(f"direction is {raw['direction']!r}, not one of {', '.join(DIRECTIONS)}")
        sizes = raw["mesh"]
        mesh = Mesh({f"axis{i}": n for i, n in enumerate(sizes)})
        inputs, outputs = _slots(raw["inputs"], mesh, True), _slots(raw.get("outputs") or [], mesh, True)
        return Case(
            op=str(raw["op"]).removeprefix("pd_op."),
            direction=raw["direction"],
            mesh=mesh,
            inputs=inputs,
            outputs=outputs,
            attrs={str(k): literal(v) for k, v in raw["attrs"].items()},
            result_inputs=flat(_slots(raw["result_inputs"], mesh, False)),
            result_outputs=flat(_slots(raw["result_outputs"], mesh, False)),
            where=where,
            text=line,
        )
    except KeyError as error:
        raise CaseError(f"{where}: the case has no {error}") from error
    except (TypeError, ValueError, AttributeError, LayoutError) as error:
        raise CaseError(f"{where}: not a case: {error}") from error


def literal(value: Any) -> Any:
    """What a string spells (``"[1, 2]"``, ``"False"``), or the value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def flat(slots: Slots) -> list[Entry]:
    """Variadic slots spread out."""
    return [e for slot in slots for e in (slot if isinstance(slot, list) else [slot])]


def _slots(raw: Any, mesh: Mesh, shaped: bool) -> Slots:
    if not isinstance(raw, list):
        raise TypeError(f"expected a list of tensors, not {raw!r}")
    return [
        [_entry(t, mesh, shaped) for t in slot] if isinstance(slot, list) else _entry(slot, mesh, shaped)
        for slot in raw
    ]


def _entry(raw: Any, mesh: Mesh, shaped: bool) -> Entry:
    if raw is None:
        return None
    if "const" in raw:
        return Const(literal(raw["const"]))
    shape = tuple(raw["shape"]) if shaped else None
    if shape is not None and len(shape) != len(raw["dims_mapping"]):
        raise ValueError(f"shape {list(shape)} and dims_mapping {raw['dims_mapping']} differ in length")
    return Given(_layout(raw, mesh), shape)


def _layout(raw: Mapping[str, Any], mesh: Mesh) -> Layout:
    partial = raw["partial"]
    types = partial if isinstance(partial, dict) else {str(a): "SUM" for a in partial} | (raw.get("reduce_type") or {})
    return from_dims_mapping(mesh, raw.get("multi") or raw["dims_mapping"], {int(a): str(w) for a, w in types.items()})


def from_dims_mapping(
    mesh: Mesh, dims_mapping: Sequence[int | Sequence[int]], partial: Mapping[int, str] | None = None
) -> Layout:
    """The layout that Paddle writes as ``dims_mapping`` and ``partial``.

    Args:
        dims_mapping: per dim the index of the axis that splits it, -1 for none, or a list of axes.
        partial: index of an axis to its reduction.

    Raises:
        LayoutError: an axis that the mesh lacks, or one that splits two dims, or that splits one and is Partial.
    """
    by_dim = [([] if a == -1 else [a]) if isinstance(a, int) else list(a) for a in dims_mapping]
    placements: list[Placement] = [REPLICATE] * mesh.ndim
    given: list[tuple[int, Placement]] = [(a, Shard(d)) for d, axes in enumerate(by_dim) for a in axes]
    given += [(a, Partial(word.lower())) for a, word in (partial or {}).items()]
    for a, p in given:
        if not 0 <= a < mesh.ndim:
            raise LayoutError(f"dims_mapping names axis {a}: {mesh!r} has axes 0 to {mesh.ndim - 1}, -1 is none")
        if placements[a] != REPLICATE:
            raise LayoutError(f"dims_mapping {list(dims_mapping)}: axis {a} is both {placements[a]!r} and {p!r}")
        placements[a] = p
    return Layout(mesh, placements, order={d: axes for d, axes in enumerate(by_dim) if len(axes) > 1}, ndim=len(by_dim))
