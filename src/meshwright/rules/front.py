"""Python functions of torch.nn.functional that only pass their arguments on to one op.

Dispatched as ops themselves they cost one interception instead of two.  Where anything but the plain native op is
needed (a split whole factor, a split vocabulary) they answer None and their body is run, which meets the op's own rule.
"""

from __future__ import annotations

import torch

from .core import Arg, Local, LocalFn, Rule, notation, rule
from .nn import log_softmax, no_rows, softmax
from .norm import layer_norm, rms_norm

rule("F.layer_norm")(layer_norm)
rule("F.rms_norm")(rms_norm)


@rule("F.softmax")
def front_softmax(
    x: Arg, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Rule | None:
    """``softmax`` along a given dim."""
    return None if dim is None else softmax(x, dim, dtype)


@rule("F.log_softmax")
def front_log_softmax(
    x: Arg, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Rule | None:
    """``log_softmax`` along a given dim."""
    return None if dim is None else log_softmax(x, dim, dtype)


@rule("F.embedding")
def front_embedding(
    indices: Arg,
    weight: Arg,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule | None:
    """Whole tables only: rows that are split need a masked lookup."""
    split = weight.spec is not None and 0 in weight.spec.layout.dim_axes()
    if split or padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return None

    def local(ctx: Local) -> LocalFn | None:
        return (lambda indices, weight, *args, **named: no_rows(weight, indices)) if 0 in ctx.in_shape(0) else None

    return notation("..., v d -> ... d", indices, weight, whole="v", linear=[[weight]], heavy=True, local=local)
