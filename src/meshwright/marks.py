"""Marks that a model leaves in its captured program: wishes about layouts.

Below ``api``, which writes them where a model is exported, and ``program``, which reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from .errors import LayoutError
from .layout import Layout, Partial, Placement, Replicate, Shard, as_placement
from .rules.parts import operator

Tensor = torch.Tensor


def _same(x: Tensor, wish: str) -> Tensor:
    return x.clone()


def _like(x: Tensor, wish: str) -> Tensor:
    return torch.empty_like(x)


CONSTRAIN = operator("constrain(Tensor x, str wish) -> Tensor", _same, _like)


def exporting() -> bool:
    """Whether ``torch.export`` is running the model."""
    return torch.compiler.is_exporting()


def mark(x: Tensor, placements: Any) -> Tensor:
    """Leave a wish about ``x`` in the program that is being exported."""
    made: Tensor = CONSTRAIN(x, wish_text(placements))
    return made


def wish_text(placements: Any) -> str:
    """Placements as text: ``tp=Shard(1);dp=Replicate()``; without names the axes are counted."""
    if isinstance(placements, Layout):
        placements = dict(zip(placements.mesh.axes, placements.placements, strict=True))
    if not isinstance(placements, Mapping):
        listed = placements if isinstance(placements, (list, tuple)) else [placements]
        placements = dict(enumerate(listed))
    return ";".join(f"{a}={as_placement(p)!r}" for a, p in placements.items())


_ENTRY = re.compile(r"(\w+)=(Shard|Replicate|Partial)\((.*)\)")


def read_wish(text: str) -> dict[Any, Placement]:
    """What :func:`wish_text` wrote: axis name (or index) to placement."""
    made: dict[Any, Placement] = {}
    for entry in filter(None, text.split(";")):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise LayoutError(
                f"cannot read the wish {entry!r}: write axis=Shard(dim), axis=Replicate() or axis=Partial()"
            )
        axis, kind, inner = found.groups()
        key: Any = int(axis) if axis.isdigit() else axis
        if kind == "Shard":
            made[key] = Shard(int(inner))
        else:
            made[key] = Replicate() if kind == "Replicate" else Partial(inner.strip("'\"") or "sum")
    return made
