"""Meshwright: semi-automatic parallel training for PyTorch.

Write a model for one device, say how a few tensors lie on a mesh of devices, and Meshwright infers every other layout
and the communication, forward and backward.
"""

from __future__ import annotations

from . import functions as _functions  # noqa: F401 (guards torch.autograd.Function)
from . import passes
from .api import (
    constrain,
    from_dtensor,
    from_local,
    infer_backward,
    infer_forward,
    init_mesh,
    reshard,
    rule,
    shard_tensor,
    sharded,
    to_dtensor,
    unshard,
)
from .checkpoint import Checkpoints, load_weights, save_weights
from .compile import capture_local, compile_step
from .explain import Explanation, explain, explicit
from .generator import reproducible_random
from .layout import Layout, Partial, Replicate, Shard, Spec
from .mesh import Mesh
from .program import LossScale, load_program, save_program
from .shard import no_sync, shard_dataloader, shard_module, shard_optimizer
from .simulation import simulate
from .tensor import DistTensor
from .testing import check_conversion, check_program, check_rule

__all__ = [
    "Checkpoints",
    "DistTensor",
    "Explanation",
    "Layout",
    "LossScale",
    "Mesh",
    "Partial",
    "Replicate",
    "Shard",
    "Spec",
    "capture_local",
    "check_conversion",
    "check_program",
    "check_rule",
    "compile_step",
    "constrain",
    "explain",
    "explicit",
    "from_dtensor",
    "from_local",
    "infer_backward",
    "infer_forward",
    "init_mesh",
    "load_program",
    "load_weights",
    "no_sync",
    "passes",
    "reproducible_random",
    "reshard",
    "rule",
    "save_program",
    "save_weights",
    "shard_dataloader",
    "shard_module",
    "shard_optimizer",
    "shard_tensor",
    "sharded",
    "simulate",
    "to_dtensor",
    "unshard",
]
