"""How the GPT lies on a mesh: the layout of Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

On ``dp`` the batch is split, on ``cp`` its sequences, and every parameter replicated. On ``tp`` each pair of
Linears is split in the middle: the first by its outputs (columns of the mathematical matrix, dim 0 of
``weight``), the second by its inputs (dim 1), so that only the result of the second is Partial and needs a
collective. Heads lie one after the other in ``qkv``, so a part of its rows is whole heads. The vocabulary is
split over ``tp`` in the embedding and in the head; the logits are never gathered.

Sequence parallelism is a constraint of activations only: the residual stream between the pairs is split over
``tp`` along the sequence, gathered before the first Linear of a pair and reduce-scattered after the second.
"""

from __future__ import annotations

from typing import Any

import meshwright as mw
from meshwright.program import Plan

from .config import check_axes

FIRST_OF_A_PAIR = ("*.attention.[qkv]*", "*.mlp.[gu]*")  # qkv, or query, key and value; up, or gate and up
ROW_SPLIT = ("*.attention.out.weight", "*.mlp.down.weight")
VOCABULARY_SPLIT = ("tokens.weight", "head.weight")
NORMS = ("*.norm1", "*.norm2", "norm")  # split along the sequence; what they give is gathered
SCATTERED_AFTER = ("tokens", "*.attention.out", "*.mlp.down")


def plan_for(
    mesh: mw.Mesh, *, sequence_parallel: bool = False, tie: bool = False, few: bool = False, **more: Any
) -> Plan:
    """The plan of the GPT for a mesh with the axes ``dp``, ``cp`` and ``tp``, or some of them.

    Args:
        few: leave out what follows in a captured step: the first Linear of each pair.
        more: of the :class:`Plan`.

    Raises:
        MeshError: an axis that the plan knows nothing to do with.
    """
    check_axes(mesh)
    batch = {axis: mw.Shard(d) for d, axis in enumerate(("dp", "cp")) if axis in mesh.axes}
    if "tp" not in mesh.axes:
        return Plan(batch=batch, **more)
    rows, columns = {"tp": mw.Shard(1)}, {"tp": mw.Shard(0)}
    vocabulary = VOCABULARY_SPLIT[:1] if tie else VOCABULARY_SPLIT  # a tied weight has one name
    layouts = dict.fromkeys((*vocabulary, *(() if few else FIRST_OF_A_PAIR)), columns) | dict.fromkeys(ROW_SPLIT, rows)
    if not sequence_parallel:
        return Plan(layouts, batch, **more)
    split, whole = {"tp": mw.Shard(1)}, {"tp": mw.Replicate()}
    outputs = dict.fromkeys(SCATTERED_AFTER, split) | dict.fromkeys(NORMS, whole)
    return Plan(layouts, batch, dict.fromkeys(NORMS, split), outputs, **more)
