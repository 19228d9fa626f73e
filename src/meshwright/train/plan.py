"""How the GPT lies on a mesh: the layout of Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

On ``dp`` the batch is split and every parameter replicated. On ``tp`` each pair of Linears is split in the
middle: the first by its outputs (columns of the mathematical matrix, dim 0 of ``weight``), the second by
its inputs (dim 1), so that only the result of the second is Partial and needs a collective. Heads lie one
after the other in ``qkv``, so a part of its rows is whole heads. The vocabulary is split over ``tp`` in the
embedding and in the head; the logits are never gathered.

Sequence parallelism is a wish about activations only: the residual stream between the pairs is split over
``tp`` along the sequence, gathered before the first Linear of a pair and reduce-scattered after the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import meshwright as mw
from meshwright.errors import MeshError

AXES = {"dp": "splits the batch", "tp": "splits heads, MLP and vocabulary"}

Globs = dict[str, dict[str, Any]]

COLUMN_SPLIT = ("*.attention.qkv.weight", "*.attention.qkv.bias", "*.mlp.up.weight", "*.mlp.up.bias")
ROW_SPLIT = ("*.attention.out.weight", "*.mlp.down.weight")
VOCABULARY_SPLIT = ("tokens.weight", "head.weight")

GATHERED_BEFORE = ("*.attention.qkv", "*.mlp.up", "head")
SCATTERED_AFTER = ("tokens", "*.attention.out", "*.mlp.down")


@dataclass(frozen=True)
class ModelPlan:
    """Arguments for ``mw.shard_module`` and the layout of a batch."""

    parameters: Globs = field(default_factory=dict)
    inputs: Globs = field(default_factory=dict)
    outputs: Globs = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)


def plan_for(mesh: mw.Mesh, *, sequence_parallel: bool = False, tie: bool = False) -> ModelPlan:
    """The plan of the GPT for a mesh with the axes ``dp``, ``tp`` or both.

    Raises:
        MeshError: an axis that the plan knows nothing to do with.
    """
    unknown = [a for a in mesh.axes if a not in AXES]
    if unknown:
        known = ", ".join(f"{axis} ({what})" for axis, what in AXES.items())
        raise MeshError(
            f"axis {unknown[0]!r} of {mesh!r}: the plan of this model does not know it. It knows {known}; "
            "e.g. --mesh dp=2,tp=2"
        )
    batch = {"dp": mw.Shard(0)} if "dp" in mesh.axes else {}
    if "tp" not in mesh.axes:
        return ModelPlan(batch=batch)
    rows, columns = {"tp": mw.Shard(1)}, {"tp": mw.Shard(0)}
    vocabulary = VOCABULARY_SPLIT[:1] if tie else VOCABULARY_SPLIT  # a tied weight has one name
    parameters: Globs = {
        **dict.fromkeys((*vocabulary, *COLUMN_SPLIT), columns),
        **dict.fromkeys(ROW_SPLIT, rows),
    }
    if not sequence_parallel:
        return ModelPlan(parameters, batch=batch)
    split, whole = {"tp": mw.Shard(1)}, {"tp": mw.Replicate()}
    return ModelPlan(parameters, dict.fromkeys(GATHERED_BEFORE, whole), dict.fromkeys(SCATTERED_AFTER, split), batch)
