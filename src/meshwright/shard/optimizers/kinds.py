"""What is known of optimizers: which classes treat elements one by one, and what a step does besides its class's."""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from ...errors import ShardError
from ...tensor import DistTensor
from ..parameters.names import name_of

Tensor = torch.Tensor

ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
MIXING = {
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "averages over whole rows and columns",
    "SparseAdam": "expects sparse gradients",
}


def mixes(opt: Optimizer) -> bool:
    """Whether its step takes together what several ranks may hold."""
    return type(opt).__name__ in MIXING


def builtin(opt: Optimizer) -> bool:
    """Whether it is one of PyTorch's."""
    kind: Any = type(opt)
    return _builtin(kind)


@cache
def _builtin(kind: Any) -> bool:
    return str(kind.__module__).startswith("torch.optim")


def reads_no_shapes(opt: Optimizer) -> bool:
    """Whether the Python code of its step hands tensors on to kernels, and does not ask how large they are."""
    return builtin(opt) and type(opt).__name__ in ELEMENTWISE


def counts_writes(opt: Optimizer) -> bool:
    """Whether the versions of what its step writes to tell of that: fused kernels do not count, nor do others' maybe.

    By its version a tensor is known to be what it was: what it was converted to is then taken again.
    """
    if not builtin(opt) or torch.is_inference_mode_enabled():
        return False
    return not any(g.get("fused") for g in opt.param_groups)


def check_class(opt: Optimizer, params: list[DistTensor], elementwise: bool, splits: bool = False) -> None:
    """Refuse optimizers that mix elements, unless every rank holds all of them (and no states are split).

    Raises:
        ShardError: with the reason.
    """
    kind, known = type(opt), builtin(opt)
    if elementwise or reads_no_shapes(opt):
        return
    split = next((p for p in params if not p._spec.layout.is_replicated()), None)
    if kind.__name__ == "SparseAdam" and known:
        raise ShardError("SparseAdam expects sparse gradients, which distributed parameters do not have: use Adam")
    if split is None and not splits:
        return
    where = (
        f"{name_of(split)} lies as {split._spec.layout!r}" if split is not None else "shard_states splits its states"
    )
    if known and kind.__name__ in MIXING:
        raise ShardError(
            f"{kind.__name__} {MIXING[kind.__name__]}, which a rank cannot do with its part alone "
            f"({where}): replicate "
            "these parameters, or use an elementwise optimizer such as AdamW"
        )
    raise ShardError(
        f"{kind.__name__} is not known to treat elements one by one, and {where}: if it does, say so with "
        "elementwise=True, to mw.shard_optimizer(optimizer, ...) in eager steps, to mw.compile_step or to mw.verify"
    )


@cache
def fused_sgd_works(dtype: torch.dtype) -> bool:
    """Whether torch's fused SGD updates all elements of this dtype on the CPU.

    Before torch 2.15 it takes halves sixteen at a time, and forgets to write those that it took.
    """
    param, grad = (torch.ones(64, dtype=dtype, device="cpu") for _ in range(2))
    torch.ops.aten._fused_sgd_.default(
        [param], [grad], [], lr=0.5, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False,
        is_first_step=True,
    )  # fmt: skip
    return bool((param == 0.5).all())


def forgets(opt: Optimizer, fused: bool | None = None) -> Tensor | None:
    """A parameter that torch's fused SGD would not update, or not all of it; None: there is none.

    Args:
        fused: as if the optimizer said this; None: as it says.
    """
    if not isinstance(opt, torch.optim.SGD):
        return None
    return next(
        (
            p
            for g in opt.param_groups
            if (g.get("fused") if fused is None else fused)
            for p in g["params"]
            if p.dtype in HALVES and p.device.type in ("cpu", "meta") and not fused_sgd_works(p.dtype)
        ),
        None,
    )


def check_fused(opt: Optimizer) -> None:
    """Raises ShardError for a fused SGD that would leave parameters as they are."""
    p = forgets(opt)
    if p is not None:
        raise ShardError(
            f"SGD(fused=True) of torch {torch.__version__} does not update {p.dtype} on the CPU, of which "
            f"{name_of(p)} is: say fused=False"
        )


def hooks_of(opt: Optimizer) -> list[Any]:
    """The step hooks of users: of one optimizer and of all."""
    listed = (
        torch_optimizer._global_optimizer_pre_hooks, opt._optimizer_step_pre_hooks,
        opt._optimizer_step_post_hooks, torch_optimizer._global_optimizer_post_hooks,
    )  # fmt: skip
    return [h for h in chain(*(hooks.values() for hooks in listed)) if not _torchs(h)]


def own_work(opt: Optimizer) -> str:
    """What ``opt.step()`` does besides the step of its class, in words; empty for nothing."""
    hooks = hooks_of(opt)
    if hooks:
        return f"the step hook {getattr(hooks[0], '__name__', repr(hooks[0]))}"
    step: Any = opt.step
    while step is not None:
        if not _torchs(step):
            return f"a step() of its own ({getattr(step, '__qualname__', repr(step))})"
        step = getattr(step, "__wrapped__", None)
    return ""


def _torchs(f: Any) -> bool:
    """Whether a function is one of PyTorch's or of this package: a profiler's hook, a scheduler's count of steps."""
    where = getattr(getattr(f, "__func__", f), "__globals__", {}).get("__name__", "")
    return where.partition(".")[0] in ("torch", __name__.partition(".")[0])


__all__ = [
    "ELEMENTWISE",
    "builtin",
    "check_class",
    "check_fused",
    "counts_writes",
    "forgets",
    "hooks_of",
    "mixes",
    "own_work",
]
