"""What is known of optimizers: which classes treat elements one by one, and what a step does besides its class's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from ...errors import ShardError
from ...local_tensor import bare
from ...ranks import runtime
from ...tensor import DistTensor
from ..parameters.names import name_of
from .probe import refuted

Tensor = torch.Tensor

ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
WORDS = ("element", "parameter", "model")  # what an update takes together, the smallest first
KNOWN = {
    **dict.fromkeys(ELEMENTWISE, "element"),
    **dict.fromkeys(("Muon", "Adafactor"), "parameter"),
    "LBFGS": "model",
}  # PyTorch's
USUAL = {
    **dict.fromkeys(("Muon", "Adafactor", "Shampoo", "SOAP", "Lamb", "LAMB"), "parameter"),
    "Prodigy": "model",
}  # of others, by their usual names: the probe checks them


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


def word_of(opt: Optimizer, params: Sequence[DistTensor], by: str | None) -> str:
    """What an update takes together: "element", "parameter" or "model".

    Args:
        by: what the user says of a class that is not known.

    Raises:
        ShardError: If the class is known, or seen, to take more together.
    """
    kind, name = type(opt), type(opt).__name__
    if name == "SparseAdam" and builtin(opt):
        raise ShardError("SparseAdam expects sparse gradients, which distributed parameters do not have: use Adam")
    known = KNOWN.get(name) if builtin(opt) else None
    if known is None and by is None and name in USUAL and not refuted(opt, USUAL[name]):
        known = USUAL[name]
    if known is not None:
        if by is not None and WORDS.index(by) < WORDS.index(known):
            raise ShardError(f"shard_optimizer: by={by!r}, but {name} updates by {known!r}. Leave by= out")
        return by or known
    if by is None:
        _warn_unknown(kind, params)
    elif why := refuted(opt, by):
        raise ShardError(f"shard_optimizer: by={by!r}, but {name} {why}. Pass by={WORDS[WORDS.index(by) + 1]!r}")
    return by or "model"


def _warn_unknown(kind: Any, params: Sequence[DistTensor]) -> None:
    """Warn of what a class costs whose updates are made on whole parameters on each rank."""
    split = [p for p in params if not p._spec.layout.is_replicated()]
    if not split or kind in _WARNED:
        return
    _WARNED.add(kind)
    lack = sum(p._spec.nbytes - bare(p).nbytes for p in split)
    warnings.warn(
        f"{kind.__name__} is an unknown optimizer class: each rank updates all parameters whole. Each step receives "
        f"{2 * lack} bytes (parameters, gradients), holds as many more, and states are not sharded. Pass by='element' "
        "or by='parameter' to mw.shard_optimizer, mw.compile_step or mw.verify if its update takes no more together",
        stacklevel=runtime.users_level(),
    )


_WARNED: set[Any] = set()


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


def fill_meta_states(opt: Optimizer) -> None:
    """States that a constructor gave to parameters on the meta device, as Adagrad's does, are created anew.

    Raises:
        ShardError: of a class whose constructor may need more than its defaults.
    """
    empty = [p for p, entry in opt.state.items() if isinstance(entry, dict) and any(map(_is_meta, entry.values()))]
    empty = [p for p in empty if not p.is_meta]
    if not empty:
        return
    if not builtin(opt):
        raise ShardError(
            f"{type(opt).__name__} gave states to parameters that were on the meta device, which have no values: "
            "create it after mw.shard_module"
        )
    groups = [{**group, "params": list(group["params"])} for group in opt.param_groups]
    anew = type(opt)(groups, **opt.defaults)
    for p in empty:
        opt.state[p] = anew.state[p]


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


__all__ = [
    "ELEMENTWISE",
    "WORDS",
    "builtin",
    "check_fused",
    "counts_writes",
    "fill_meta_states",
    "forgets",
    "hooks_of",
    "own_work",
    "word_of",
]
