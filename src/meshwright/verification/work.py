"""What a verification takes, estimated before anything is computed: the step is run once on the meta device."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from ..compat import TorchDispatchMode, pytree

Tensor = torch.Tensor
_OP = 1.2e-3  # seconds that an op of the forward takes with its backward, its copies and its comparisons, per run
_ELEMENT = 4e-8  # seconds that an element takes which is kept and compared
_FLOP = 2.5e-10  # seconds that a float64 operation takes on a core


@dataclass(frozen=True)
class Work:
    """One forward of a step on one device.

    Attributes:
        params: elements of parameters and buffers.
        ops: how many ops of torch's it is.
        elements: of what they give, in floating point.
        flops: of contractions.
        guessed: why it is guessed from the parameters: the step does not run without values.
    """

    params: int
    ops: int
    elements: int
    flops: float
    guessed: str = ""


@dataclass(frozen=True)
class Need:
    """What a verification takes, about: seconds on this machine, and bytes at its peak."""

    seconds: float
    bytes: int

    @classmethod
    def of(cls, work: Work, ranks: int, modes: int, updates: int) -> Need:
        """From the work of one forward.

        Every value and gradient of one device is kept, of each mode; ranks hold copies of the model while they lay it.
        """
        kept = 2 * work.elements + 5 * work.params  # gradients, parameters and two states of each
        runs = updates * modes
        seconds = runs * (
            work.ops * (1 + ranks) * _OP / 3 + (kept + 5 * work.params * ranks) * _ELEMENT
            + 6 * work.flops * _FLOP / torch.get_num_threads()
        )  # fmt: skip
        return cls(seconds, 8 * (runs * kept + work.params * (4 + 5 * ranks)))

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s and {self.bytes / 1e9:.1f} GB"


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.ops += 1
        self.elements += sum(
            t.numel() for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.is_floating_point()
        )
        return made


def work_of(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> Work:
    """What one forward of a step is.

    Raises what the step raises for a model or a batch of sizes that do not fit.
    """
    params = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    own = on_meta(model)
    given = pytree.tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, batch)
    try:
        with FlopCounterMode(display=False) as flops, _Counted() as counted:
            loss_fn(own, given)
    except (NotImplementedError, RuntimeError) as error:
        if not (isinstance(error, NotImplementedError) or "meta" in str(error)):
            raise
        tokens = max((x.numel() for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)), default=1)
        layers = sum(1 for m in model.modules() if not list(m.children()))
        text = " ".join(str(error).split()[:12])
        return Work(params, 8 * layers, 8 * layers * tokens, 2.0 * params * tokens, f"{type(error).__name__}: {text}")
    return Work(params, counted.ops, counted.elements, float(flops.get_total_flops()))


def on_meta(given: Any, but: Sequence[Tensor] = ()) -> Any:
    """A copy of a model, or of a model and its optimizer, without the memory of its tensors but some."""
    model = given[0] if isinstance(given, tuple) else given
    kept, memo = {id(t) for t in but}, dict[int, Any]()
    for t in (*model.parameters(), *model.buffers()):
        if id(t) not in kept:
            memo[id(t)] = _bare(t)
    if isinstance(given, tuple):
        for p, state in given[1].state.items():
            memo |= {id(t): _bare(t) for t in state.values() if isinstance(t, Tensor) and id(p) not in kept}
    return copy.deepcopy(given, memo)


def _bare(t: Tensor) -> Tensor:
    made = t.detach().to("meta")
    return nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made


def memory() -> int:
    """Bytes of memory that are free, about."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES")) // 2


__all__ = ["Need", "Work", "memory", "on_meta", "work_of"]
