"""What the ops of a captured step compute and move, counted once for calls that are alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch.utils.flop_counter import FlopCounterMode

from ... import compat
from ...local_tensor import storage_of

Tensor = torch.Tensor
_FLOPS_PER_BYTE = 100  # that a device computes while it reads or writes one byte: accelerators do 100 to 300


class Counted(NamedTuple):
    """One call, forward.

    Attributes:
        flops: of its products.
        moved: bytes that it reads and writes; 0 of a view.
        saved: which of its tensor arguments its backward reads, by position; ``made``: which of its results.
        views: result to the argument whose memory it is.
    """

    flops: float
    moved: float
    saved: frozenset[int] = frozenset()
    made: frozenset[int] = frozenset()
    views: tuple[tuple[int, int], ...] = ()

    @property
    def in_bytes(self) -> float:
        """Both, in bytes that could be moved meanwhile."""
        return self.flops / _FLOPS_PER_BYTE + self.moved


@dataclass
class OpWork:
    """Counts calls of a captured graph.

    Args:
        saving: look too at what the backward keeps, which runs the op under autograd.
    """

    saving: bool = False

    def __post_init__(self) -> None:
        self._known: dict[Any, Counted] = {}

    def of(self, node: fx.Node) -> Counted:
        """What a node of the graph does."""
        if not isinstance(node.target, compat.OpOverload):
            return Counted(0.0, 0.0)
        args, kwargs = fx.map_arg((node.args, node.kwargs), _meta)
        key = node.target, str([(a.shape, a.dtype) if isinstance(a, Tensor) else a for a in _flat((args, kwargs))])
        if key not in self._known:
            self._known[key] = self._counted(node, args, kwargs)
        return self._known[key]

    def _counted(self, node: fx.Node, args: Any, kwargs: Any) -> Counted:
        target: Any = node.target
        # A parameter that is not multiplied with is small, or read in part as a table is.
        read = [n.meta.get("val") for n in node.all_input_nodes if n.op != "placeholder"]
        moved = sum(map(bytes_in, [*read, node.meta.get("val")]))
        given = [a for a in _flat((args, kwargs)) if isinstance(a, Tensor)]
        if str(target).startswith("meshwright.experts"):
            pairs = args[1].numel()  # of tokens and experts
            flops = 2.0 * pairs * sum(math.prod(w.shape[1:]) for w in args[3:5])
            return Counted(flops, float(moved), frozenset(range(len(given))))
        try:
            with FlopCounterMode(display=False) as flops_of:
                made = target(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # an op that needs values
            return Counted(0.0, float(moved))
        places = {storage_of(t): i for i, t in reversed(list(enumerate(given)))}
        results = [t for t in _flat(made) if isinstance(t, Tensor)]
        views = tuple((k, places[c]) for k, t in enumerate(results) if (c := storage_of(t)) in places)
        fresh = len(views) < len(results)
        saved, own = _saved(target, args, kwargs, given) if self.saving else (frozenset[int](), frozenset[int]())
        return Counted(float(flops_of.get_total_flops()), float(moved) if fresh else 0.0, saved, own, views)


def _saved(target: Any, args: Any, kwargs: Any, given: list[Tensor]) -> tuple[frozenset[int], frozenset[int]]:
    """Arguments and results that autograd keeps for the backward of a call."""
    for t in given:
        if t.is_floating_point() or t.is_complex():
            t.requires_grad_()
    kept: list[Any] = []

    def note(t: Tensor) -> None:
        kept.append(storage_of(t))
        held.append(t)

    held: list[Tensor] = []
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            made = target(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return frozenset(), frozenset()
    results = [storage_of(t) for t in _flat(made) if isinstance(t, Tensor)]
    inputs = [storage_of(t) for t in given]
    return (
        frozenset(i for i, c in enumerate(inputs) if c in kept),
        frozenset(k for k, c in enumerate(results) if c in kept and c not in inputs),
    )


def _flat(given: Any) -> list[Any]:
    return compat.pytree.tree_leaves(given)


def _meta(node: fx.Node) -> Any:
    return compat.pytree.tree_map(
        lambda x: (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
        ),
        node.meta.get("val"),
    )


def bytes_in(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(t.numel() * t.dtype.itemsize for t in _flat(value) if isinstance(t, Tensor))


__all__ = ["Counted", "OpWork", "bytes_in"]
