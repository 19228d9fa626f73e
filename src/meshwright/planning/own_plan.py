"""The plan of tensor parallelism that a model brings itself, as transformers' models do."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch.nn as nn

from ..shard.parameters.names import Names

# What the words of such plans say of a weight of shape (out, in), and of its bias: the dim that is split.
_DIMS = {"colwise": (0, 0), "colwise_gather_output": (0, 0), "rowwise": (1, None), "rowwise_split_input": (1, None)}
_DIMS |= {"embedding_rowwise": (0, None), "embedding_colwise": (1, None)}


def own_plan(model: nn.Module) -> dict[str, tuple[int, str]]:
    """First name of each parameter that the model's own plan splits, to the dim and the plan's word for it."""
    said = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(said, Mapping):
        return {}
    names, found = Names(model), {}
    for name, first in names.params.items():
        module, _, key = name.rpartition(".")
        word = next((w for glob, w in said.items() if re.fullmatch(_pattern(glob), module)), None)
        dims = _DIMS.get(str(word))
        dim = dims[key == "bias"] if dims is not None else None
        if dim is not None and dim < names.tensors[first].ndim:
            found[first] = dim, str(word)
    return found


def _pattern(glob: str) -> str:
    """The plans' ``*`` stands for the number of a layer, or an expert."""
    return re.escape(glob).replace(r"\*", r"\d+")


__all__ = ["own_plan"]
