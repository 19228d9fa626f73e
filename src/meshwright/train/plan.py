"""How the GPT lies on a mesh: the layout of Megatron-LM (Shoeybi et al., 2019; Korthikanti et al., 2022).

On ``dp`` the batch is split, on ``cp`` its sequences, and every parameter replicated. On ``ep`` the batch is split,
and the experts; all else is replicated, as on ``dp``. On ``tp`` each pair of
Linears is split in the middle: the first by its outputs (columns of the mathematical matrix, dim 0 of
``weight``), the second by its inputs (dim 1), so that only the result of the second is Partial and needs a
collective. Heads lie one after the other in ``qkv``, so a part of its rows is whole heads. The vocabulary is
split over ``tp`` in the embedding and in the head; the logits are never gathered. Experts are split in the middle too.

Sequence parallelism is a constraint of activations only: the residual stream between the pairs is split over
``tp`` along the sequence, gathered before the first Linear of a pair and reduce-scattered after the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import meshwright as mw
from meshwright import collective
from meshwright.errors import PlanError
from meshwright.program import Plan
from meshwright.ranks import runtime

from .choices import AUTO_PLAN, check_axes
from .config import TrainConfig

FIRST_OF_A_PAIR = ("*.attention.[qkv]*", "*.mlp.[gu]*")  # qkv, or query, key and value; up, or gate and up
ROW_SPLIT = ("*.attention.out.weight", "*.mlp.down.weight")
VOCABULARY_SPLIT = ("tokens.weight", "head.weight")
EXPERTS = ("*.mlp.experts.gate_up", "*.mlp.experts.down")
SHARED, FIRST_SHARED, SECOND_SHARED = ("*.mlp.shared",), ("*.mlp.shared.[gu]*",), ("*.mlp.shared.down.weight",)
NORMS = ("*.norm1", "*.norm2", "norm")  # split along the sequence; what they give is gathered
AXES_OF_BATCH = {"dp": 0, "ep": 0, "cp": 1}


def plan_for(
    mesh: mw.Mesh, *, sequence_parallel: bool = False, tie: bool = False, few: bool = False, experts: bool = False,
    shared: bool = False, **more: Any,
) -> Plan:  # fmt: skip
    """The plan of the GPT for a mesh with the axes ``dp``, ``cp``, ``tp`` and ``ep``, or some of them.

    Args:
        few: leave out what follows in a captured step: the first Linear of each pair.
        experts: blocks have a mixture of experts; ``shared``: and some that compute every token.
        more: of the :class:`Plan`.

    Raises:
        MeshError: an axis that the plan knows nothing to do with.
    """
    check_axes(mesh)
    batch = {axis: mw.Shard(AXES_OF_BATCH[axis]) for axis in mesh.axes if axis in AXES_OF_BATCH}
    inside = {"ep": mw.Shard(0), "tp": mw.Shard(2)}  # experts, and the width of each
    layouts: dict[str, Any] = {}
    if experts and (laid := {axis: p for axis, p in inside.items() if axis in mesh.axes}):
        layouts = dict.fromkeys(EXPERTS, laid)
    if "tp" not in mesh.axes:
        return Plan(layouts, batch, **more)
    rows, columns = {"tp": mw.Shard(1)}, {"tp": mw.Shard(0)}
    first = FIRST_OF_A_PAIR[: 1 if experts else 2] + FIRST_SHARED[:shared]
    second = ROW_SPLIT[: 1 if experts else 2] + SECOND_SHARED[:shared]
    vocabulary = VOCABULARY_SPLIT[:1] if tie else VOCABULARY_SPLIT  # a tied weight has one name
    layouts |= dict.fromkeys((*vocabulary, *(() if few else first)), columns) | dict.fromkeys(second, rows)
    if not sequence_parallel:
        return Plan(layouts, batch, **more)
    split: Any = {"tp": mw.Shard(1)}
    whole: Any = {"tp": mw.Replicate()}
    # Experts gather the rows of tokens that they compute by themselves.
    inputs = dict.fromkeys(NORMS, split) | dict.fromkeys(SHARED[:shared], whole)
    outputs = dict.fromkeys(NORMS, whole) | ({NORMS[1]: split} if experts else {})
    after = [g.removesuffix(".weight") for g in second]
    return Plan(layouts, batch, inputs, dict.fromkeys(("tokens", *after), split) | outputs, **more)


def planned(
    config: TrainConfig, mesh: mw.Mesh, model: torch.nn.Module, loss: Callable[..., torch.Tensor], batch: Any
) -> mw.LayoutTable:
    """The plan of ``--plan``: that of a file, or the one that the first rank finds and sends to all.

    Args:
        model: on the meta device; ``loss`` and ``batch``: what it is trained on.

    Raises:
        LayoutError, PlanError, HardwareError: If there is none, or it was made for something else.
    """
    if config.plan != AUTO_PLAN:
        return mw.load_layouts(str(config.plan))
    with collective.together(mesh, "planning the step", kind=PlanError) as facts:
        table: mw.LayoutTable | None = None
        if runtime.RT.rank == mesh.ranks[0]:
            optimizer = config.make_optimizer(model)
            table = mw.plan(model, loss, batch, optimizer, mesh=mesh, hardware=str(config.hardware)).plan
        found: mw.LayoutTable = facts.exchange("the plan", table)[0]
    return found
