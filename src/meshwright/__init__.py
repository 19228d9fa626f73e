"""Meshwright: semi-automatic parallel training for PyTorch.

Write a model for one device, say how a few tensors lie on a mesh of devices, and Meshwright infers every other layout
and the communication, forward and backward.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .ranks.launchers import interrupts_in_a_line as _interrupts_in_a_line
from .ranks.launchers import is_command as _is_command

_COMMAND = _is_command()
if _COMMAND:  # before the imports that take seconds
    _interrupts_in_a_line()

if TYPE_CHECKING or not _COMMAND:
    from .errors import RankFailedError
    from .generator import reproducible_random
    from .layout import At, Float8, Layout, LayoutTable, Partial, Replicate, Shard, Spec, load_layouts
    from .mesh import Mesh
    from .ranks.runtime import rank
    from .ranks.simulation import simulate
    from .rules.documents import attention
    from .rules.experts import expert_load, experts
    from .shard import Precision, no_sync, shard_dataloader, shard_module, shard_optimizer
    from .tensor import DistTensor
    from .tensor import autograd_functions as _functions  # noqa: F401 (guards torch.autograd.Function)
    from .tensor.api import (
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
        strategies,
        to_dtensor,
        unshard,
    )
    from .tensor.split_checkpoints import shard_checkpoint_inputs
    from .tensor.visualize import visualize

if TYPE_CHECKING:
    from . import passes
    from .checkpoint import Checkpoints, load_weights, move, save_weights
    from .documents import Packed
    from .explanation import Explanation, explain, explicit
    from .machines import hardware
    from .planner import plan
    from .planning import layouts
    from .program import LossScale, load_program, save_program
    from .program.compile import capture_local, compile_step
    from .testing import check_conversion, check_program, check_rule
    from .verification import verify

# What few scripts need, and its module: imported at its first use, as all of it costs as much as the rest together.
_LATER = {
    "Checkpoints": "checkpoint",
    "load_weights": "checkpoint",
    "move": "checkpoint",
    "save_weights": "checkpoint",
    "capture_local": "program.compile",
    "compile_step": "program.compile",
    "Explanation": "explanation",
    "explain": "explanation",
    "explicit": "explanation",
    "hardware": "machines",
    "LossScale": "program",
    "Packed": "documents",
    "load_program": "program",
    "save_program": "program",
    "check_conversion": "testing",
    "check_program": "testing",
    "check_rule": "testing",
    "layouts": "planning",
    "passes": "passes",
    "plan": "planner",
    "verify": "verification",
}


# Where the others are from.  The command line imports them when it has something to compute: not for help and errors.
_CORE = (
    "tensor.autograd_functions", "tensor.api", "errors", "generator", "tensor.split_checkpoints", "tensor.visualize",
    "layout", "mesh", "shard", "ranks.runtime", "ranks.simulation", "rules.documents", "rules.experts", "tensor",
)  # fmt: skip


def _import_core() -> None:
    """What ``import meshwright`` is in a program."""
    modules = [import_module(f".{name}", __name__) for name in _CORE]
    for name in {*__all__} - {*_LATER}:
        globals()[name] = next(getattr(m, name) for m in modules if hasattr(m, name))


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module = import_module(f".{_LATER[name]}", __name__)
        globals()[name] = module if name == "passes" else getattr(module, name)
    elif _COMMAND and name in __all__:
        _import_core()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "At",
    "Checkpoints",
    "DistTensor",
    "Explanation",
    "Float8",
    "Layout",
    "LayoutTable",
    "LossScale",
    "Mesh",
    "Packed",
    "Partial",
    "Precision",
    "RankFailedError",
    "Replicate",
    "Shard",
    "Spec",
    "attention",
    "capture_local",
    "check_conversion",
    "check_program",
    "check_rule",
    "compile_step",
    "constrain",
    "expert_load",
    "experts",
    "explain",
    "explicit",
    "from_dtensor",
    "from_local",
    "hardware",
    "infer_backward",
    "infer_forward",
    "init_mesh",
    "layouts",
    "load_layouts",
    "load_program",
    "load_weights",
    "move",
    "no_sync",
    "passes",
    "plan",
    "rank",
    "reproducible_random",
    "reshard",
    "rule",
    "save_program",
    "save_weights",
    "shard_checkpoint_inputs",
    "shard_dataloader",
    "shard_module",
    "shard_optimizer",
    "shard_tensor",
    "sharded",
    "simulate",
    "strategies",
    "to_dtensor",
    "unshard",
    "verify",
    "visualize",
]
