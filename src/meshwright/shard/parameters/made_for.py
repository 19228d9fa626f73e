"""What a plan was made for: a model, by the names and shapes of its tensors, and a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from xxhash import xxh64

from ...errors import PlanError
from ...layout import LayoutTable
from ...mesh import Mesh
from .names import Names


def model_words(model: nn.Module) -> str:
    """Which parameters and buffers a model has: how many, and a digest of names, shapes and dtypes."""
    tensors = Names(model).tensors
    lines = sorted(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items())
    count = sum(t.numel() for t in tensors.values())
    return f"{len(lines)} tensors of {count} elements, {xxh64(chr(10).join(lines).encode()).hexdigest()}"


def mesh_words(mesh: Mapping[str, int]) -> str:
    """A mesh in words: ``dp=2,tp=4``."""
    return ",".join(f"{axis}={n}" for axis, n in mesh.items())


def check_plan_matches(model: nn.Module, mesh: Mesh, made_for: Mapping[str, str]) -> None:
    """Whether a plan was made for a model and a mesh.

    Raises:
        PlanError: If not.
    """
    here: dict[str, Any] = {"model": model_words(model)} if "model" in made_for else {}
    if "mesh" in made_for:
        here["mesh"] = mesh_words(dict(zip(mesh.axes, mesh.sizes, strict=True)))
    for what, found in here.items():
        if made_for[what] != found:
            raise PlanError(
                f"the plan was made for another {what} ({made_for[what]}; here: {found}). Plan again with mw.plan, or "
                "remove its made_for (table.made_for.clear(), or [made_for] in the file) to use its layouts."
            )


def planned_for(table: LayoutTable) -> dict[str, str]:
    """What the plan of a table was made for; nothing for tables that no planner made."""
    made = dict(table.made_for)
    return made | {"mesh": mesh_words(table.mesh)} if made else {}


__all__ = ["check_plan_matches", "mesh_words", "model_words", "planned_for"]
