"""Layouts that the user fixes: checked, and as the states of parameters that they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch.nn as nn

from ..errors import LayoutError, PlanError, near
from ..layout import Placement, Replicate, Shard, as_placement
from ..mesh import Mesh
from ..program.capture.export import Captured
from .prices import State
from .repeats import Repeats

Fix = Mapping[str, Mapping[str, Any]]


def check_fix(fix: Fix, model: nn.Module, mesh: Mesh | None, caller: str) -> None:
    """Raises PlanError for globs that match nothing, axes that there are not, and placements that cannot be."""
    names = dict(model.named_parameters())
    axes = mesh.axes if mesh is not None else ("dp", "tp")
    wanted: dict[tuple[str, str], tuple[str, Placement]] = {}
    for glob, placements in fix.items():
        where = f"{caller}: fix={glob!r}" if caller != "why" else f"why: {glob!r}"
        matched = [n for n in names if isinstance(glob, str) and fnmatchcase(n, glob)]
        if not matched:
            raise PlanError(f"{where}: no parameter has such a name{near(str(glob), list(names)[:50])}")
        if not isinstance(placements, Mapping):
            raise PlanError(f'{where}: {placements!r}: give axes and placements, as {{"tp": mw.Shard(0)}}')
        for axis, p in placements.items():
            if axis not in axes:
                of_any = "" if mesh is not None else ". To fix layouts on the axes of one mesh, plan with mesh="
                raise PlanError(f"{where}: there is no axis {axis!r}{near(str(axis), axes)}{of_any}")
            placement = _parameter_placement(where, p)
            for n in matched:
                shape = tuple(names[n].shape)
                if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
                    raise PlanError(f"{where}: {n} of shape {shape} has no dim {placement.dim}")
                own = Shard(placement.dim % len(shape)) if isinstance(placement, Shard) else placement
                before = wanted.setdefault((n, axis), (glob, own))
                if before[1] != own:
                    raise PlanError(
                        f"{caller}: fix contradicts itself: {before[0]!r} puts {n} at {before[1]!r} on {axis}, "
                        f"{glob!r} at {own!r}. Leave one of them out."
                    )


def _parameter_placement(where: str, given: Any) -> Placement:
    try:
        placement = as_placement(given)
    except LayoutError as error:
        raise PlanError(f"{where}: {given!r} is not a placement. Give mw.Shard(dim) or mw.Replicate().") from error
    if not isinstance(placement, (Shard, Replicate)):
        raise PlanError(f"{where}: {placement!r}: a parameter is Shard(dim) or Replicate()")
    return placement


def states_allowed(fix: Fix, captured: Captured, axes: Sequence[str], repeats: Repeats) -> dict[str, Any]:
    """Name of a parameter of the cut model to which of its states fit."""
    made: dict[str, Any] = {}
    for s in captured.sources:
        if s.kind != "param":
            continue
        wanted: dict[int, Placement] = {}
        for name in repeats.names(s.name, repeats.counts()):
            for glob, placements in fix.items():
                if fnmatchcase(name, glob):
                    for axis, p in placements.items():
                        placement = as_placement(p)
                        if isinstance(placement, Shard) and placement.dim < 0:
                            placement = Shard(placement.dim + s.fake.ndim)
                        if axis in axes:
                            wanted[axes.index(axis)] = placement
                        elif isinstance(placement, Shard):
                            wanted[-1] = placement
        if wanted:
            made[s.name] = _fits(wanted)
    return made


def _fits(wanted: Mapping[int, Placement]) -> Any:
    def fits(state: State) -> bool:
        return all(a >= 0 and state[a][0] == p for a, p in wanted.items())

    return fits


__all__ = ["Fix", "check_fix", "states_allowed"]
