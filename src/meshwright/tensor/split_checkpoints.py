"""What checkpoints keep of their inputs: split over axes on which they are whole, and gathered for the second run.

After Megatron-LM's ``distribute_saved_activations`` (Narayanan et al., 2021).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..dispatch import SpecHandle, disabled, refresh, tensors_in, wanted
from ..dispatch.views import SavedCopies
from ..errors import LayoutError, ShardError
from ..layout import Partial, Replicate, Shard, Spec, as_placement, marked, marks_of
from ..local_tensor import bare
from ..resharding import executor, planner, record
from . import DistTensor, call_enabled, wrap

Tensor = torch.Tensor


class _InputsOption(threading.local):
    """What this thread's checkpoints are asked for: axis name to how inputs are kept; empty: as they are."""

    placements: Mapping[str, Shard] = {}


ASKED = _InputsOption()
REASON = "a checkpoint kept its input split (shard_checkpoint_inputs), and runs again for the backward"


@contextmanager
def shard_checkpoint_inputs(placements: Mapping[str, Any]) -> Iterator[None]:
    """Shard the inputs that `torch.utils.checkpoint` keeps inside; all-gather them when the block runs again.

    Under tensor parallelism the input of a block is replicated over `tp`, so each rank keeps all of it until the
    backward. Here each rank keeps its shard, for one all-gather per input before the block runs again. Gradients have
    the same bits.

    Megatron-LM: `distribute_saved_activations`.

    Kept unchanged: inputs that are sharded over the axis or lack the dim, parameters, and keyword arguments. Partial
    inputs are kept unchanged too, with a warning: end the block with `mw.constrain(x, {"tp": mw.Replicate()})`, which
    sends what the next block would have sent. A dim need not divide. In captured steps everything that the block reads
    of other activations is sharded, unless it is written to. Use it around the forward, or as a decorator.

    Args:
        placements: Axis name to `Shard(dim)`.

    Raises:
        LayoutError: If a placement is not `Shard`.
        ShardError: If a checkpoint inside has `use_reentrant=True`, in eager code.

    Examples:
        ```python
        from torch.utils.checkpoint import checkpoint

        mesh = mw.Mesh({"tp": 2})


        def train():
            block = mw.shard_module(nn.Linear(4, 4), mesh, {"weight": {"tp": mw.Shard(0)}, "bias": {"tp": mw.Shard(0)}})
            x = mw.shard_tensor(torch.ones(2, 4), mesh, {}).requires_grad_()
            with mw.shard_checkpoint_inputs({"tp": mw.Shard(0)}):
                y = checkpoint(block, x, use_reentrant=False)
            y.sum().backward()
            return block.weight.grad.placements


        assert mw.simulate(train, mesh)[0] == (mw.Shard(0),)
        ```
    """
    if not isinstance(placements, Mapping):
        raise LayoutError(
            f"shard_checkpoint_inputs({placements!r}): axis names with placements were expected: {{'tp': mw.Shard(1)}}"
        )
    asked = {axis: as_placement(p) for axis, p in placements.items()}
    for axis, p in asked.items():
        if not isinstance(p, Shard):
            raise LayoutError(f"shard_checkpoint_inputs: {axis}={p!r} does not split what is kept: say Shard(dim)")
    before, ASKED.placements = ASKED.placements, asked  # type: ignore[assignment]
    try:
        yield
    finally:
        ASKED.placements = before


class _Types:
    """The types that a tensor gets, also after the last name of it is gone.

    Without them each use of an input in the second run would find types of its own.
    """

    def __init__(self, t: DistTensor) -> None:
        self.spec, self.standin = t._spec, SpecHandle(t)

    def told(self) -> Spec:
        """The spec of the tensor with the types that are known by now."""
        own = self.standin.spec
        told = self.spec.with_(
            grad_partial_mask=own.grad_partial_mask,
            undecided_mask=own.undecided_mask,
            accumulate_dtype=own.accumulate_dtype,
        )
        return marked(told, marks_of(self.spec).after_write())


@dataclass(frozen=True)
class _Split:
    """How an input lay that is kept in part.

    Attributes:
        leaf: whether it was one: autocast keeps the casts of leaves alone, and so chooses what the second run saves.
        strides: in this rank's memory, by which ops choose what they save.
    """

    types: _Types
    part: Spec
    requires_grad: bool
    leaf: bool
    strides: tuple[int, ...]

    def joined(self, part: Tensor) -> Tensor:
        """The input again, with its values, and without its past."""
        plan = planner.plan(self.part, plain(self.types.spec))
        with torch.no_grad(), disabled(), record.asked("shard_checkpoint_inputs", plan, REASON):
            made = _with_strides(executor.apply(plan.steps, bare(part)), self.strides)
        if self.requires_grad and not self.leaf:
            with torch.enable_grad():
                made = _Computed.apply(made.data, torch.empty(0, requires_grad=True))  # data: no view of another
        return wrap(made, self.types.told()).requires_grad_(self.requires_grad)


class _Computed(torch.autograd.Function):
    """The same tensor as a result of autograd, which is differentiated no further."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(t)
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


class SavedInputs:
    """The inputs of one checkpointed call: ``args`` is what is to be kept in their place."""

    def __init__(self, args: Sequence[Any]) -> None:
        for t in tensors_in(args):
            refresh(t, call_enabled)
        self._copies = SavedCopies(
            [a for a in args if isinstance(a, Tensor)]
        )  # of others autograd counts no writes either
        self._split: dict[int, _Split] = {}  # by place among all tensors
        self._count = 0
        self.args = [self._packed(a) for a in args] if ASKED.placements else list(args)
        # Of tensors among the arguments themselves: hooks around it may give back plain ones.
        self._layouts = [(weakref.ref(a), _Types(a)) if isinstance(a, DistTensor) else None for a in self.args]

    def given(self, made: Sequence[Any]) -> list[Any]:
        """The arguments of the second run, of what was kept.

        Raises RuntimeError where what they are copies of was written since.
        """
        self._copies.check()
        laid = [self._laid(a, known) for a, known in zip(made, self._layouts, strict=True)]
        if not self._split:
            return laid
        self._count = 0
        return [_through(a, self._unpack) for a in laid]

    def _packed(self, a: Any) -> Any:
        """An argument as it is kept: itself, where nothing of it is split."""
        before = len(self._split)
        made = _through(a, self._pack)
        return a if len(self._split) == before else made

    def _laid(self, a: Any, known: Any) -> Any:
        if known is None or a.__class__ is not Tensor:
            return a
        ref, types = known
        first = ref()
        if marks_of(types.spec).stored and first is not None:
            return first  # what stands in for it is found by the object that it is
        return wrap(a, types.told() if first is None else first._spec)

    def _pack(self, t: Tensor) -> Tensor:
        place, self._count = self._count, self._count + 1
        whole = t._spec if isinstance(t, DistTensor) and not isinstance(t, nn.Parameter) else None
        part = None if whole is None else part_of(whole, ASKED.placements)
        if part is None:
            return t
        plan = planner.plan(plain(t._spec), part)  # type: ignore[attr-defined]
        with torch.no_grad(), disabled():
            made = executor.apply(plan.steps, bare(t)).clone(memory_format=torch.contiguous_format)
        split = _Split(_Types(t), part, t.requires_grad, t.is_leaf, bare(t).stride())  # type: ignore[arg-type]
        self._split[place] = split
        return made  # a plain one: hooks around it, as of save_on_cpu, take it for what it is

    def _unpack(self, t: Tensor) -> Tensor:
        place, self._count = self._count, self._count + 1
        split = self._split.get(place)
        return t if split is None else split.joined(t)


def _with_strides(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """``t`` with these strides, of which 0 says that a dim is one row, expanded."""
    if t.stride() == strides or not t.numel():
        return t
    rows = t[tuple([slice(0, 1) if step == 0 else slice(None) for step in strides])]
    return torch.empty_strided(rows.shape, strides, dtype=t.dtype, device=t.device).copy_(rows).expand(t.shape)


def _through(a: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Lists, tuples and dicts with each tensor replaced; containers of other classes are what they are."""
    if isinstance(a, Tensor):
        return fn(a)
    if type(a) in (list, tuple):
        return type(a)(_through(v, fn) for v in a)
    return {k: _through(v, fn) for k, v in a.items()} if type(a) is dict else a


def part_of(spec: Spec, asked: Mapping[str, Shard]) -> Spec | None:
    """How a rank's part of an input of a checkpoint lies that is to be kept, or None where it is kept as it is.

    Args:
        spec: of the input.
        asked: axis name to how inputs are to be kept.
    """
    mesh = spec.mesh
    for axis in asked:
        if isinstance(spec.layout.placements[mesh.axis_index(axis)], Partial):
            warnings.warn(
                f"shard_checkpoint_inputs: an input of a checkpoint is Partial over {axis} ({spec!r}) and is kept as "
                f'it is: reduce it where the block before ends, with mw.constrain(x, {{"{axis}": mw.Replicate()}})',
                stacklevel=2,
            )
    chosen = {
        axis: p
        for axis, p in asked.items()
        if isinstance(spec.layout.placements[mesh.axis_index(axis)], Replicate)
        and -len(spec.shape) <= p.dim < len(spec.shape)
    }
    marks = marks_of(spec)
    return wanted(plain(spec), chosen, None) if chosen and not (marks.copied or marks.stored) else None


def plain(spec: Spec) -> Spec:
    """A spec without the types of replicas: nothing is differentiated."""
    return spec.invariant()


def asked_again(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, to be called later, with what checkpoints are asked for now: those inside of it run again, too."""
    placements = ASKED.placements

    def run(*args: Any, **kwargs: Any) -> Any:
        with shard_checkpoint_inputs(placements) if placements else nullcontext():
            return fn(*args, **kwargs)

    return run if placements else fn


def check_reentrant() -> None:
    """Raises ShardError for a reentrant checkpoint where inputs are to be kept split."""
    if ASKED.placements:
        raise ShardError(
            "mw.shard_checkpoint_inputs keeps inputs of torch.utils.checkpoint(..., use_reentrant=False): with "
            "use_reentrant=True autograd keeps them itself. Say use_reentrant=False"
        )


__all__ = [
    "ASKED",
    "REASON",
    "SavedInputs",
    "asked_again",
    "check_reentrant",
    "part_of",
    "plain",
    "shard_checkpoint_inputs",
]
