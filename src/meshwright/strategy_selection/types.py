"""What a choice says: the type of every operand and result on every axis (docs/design.md, "Types of Replicate")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..layout import Layout, Placement, Replicate, Shard, Spec, widest_accumulate_dtype
from ..mesh import Mesh
from ..rules.strategies import Dims, Rule, Strategy

Like = tuple[Sequence[int], torch.dtype]  # global shape and dtype of an output


@dataclass(frozen=True)
class Choice:
    """How an op is divided: the types that its inputs must have and that its outputs get.

    ``sources`` are the inputs as given, with undecided axes decided; ``open`` are axes on which outputs stay undecided.
    """

    sources: tuple[Spec, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    strategies: tuple[Strategy, ...]
    open: int = 0


@dataclass(frozen=True)
class Wanted:
    """Layouts that the caller wants outputs to have: candidates come from them too, and their distance costs.

    None for outputs that may have any.
    """

    outputs: tuple[Spec | None, ...]


def carries_grad(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can have gradients."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class Operand:
    """What an op makes of one operand: the layout and the type that it must have, and what is decided of it before.

    ``layout``: None where it stays as it is.  ``reduced``: as it is given; ``want``: as the op needs it.
    """

    layout: Layout | None
    reduced: int = 0
    undecided: int = 0
    want: int = 0


@dataclass(frozen=True, slots=True)
class Types:
    """What strategies make of operands and results, whatever their sizes; ``open`` as in :class:`Choice`."""

    strategies: tuple[Strategy, ...]
    operands: tuple[Operand, ...]
    layouts: tuple[Layout, ...]
    reduced: int
    open: int

    def of(self, ins: Sequence[Spec], outs: Sequence[Like]) -> Choice:
        """The choice for operands of these sizes."""
        sources, inputs, outputs, sums = [], [], [], widest_accumulate_dtype(ins)
        for spec, o in zip(ins, self.operands, strict=True):
            source = want = spec
            typed = (
                o.want == spec.grad_partial_mask
                and o.undecided == spec.undecided_mask
                and sums is spec.accumulate_dtype
            )
            if o.layout is not None and not (typed and o.layout == spec.layout):
                if o.undecided != spec.undecided_mask:
                    # A leaf whose gradient the op makes Partial has that summed as the op has its values summed.
                    own = sums if o.reduced != spec.grad_partial_mask else None
                    source = spec.with_(grad_partial_mask=o.reduced, undecided_mask=o.undecided, accumulate_dtype=own)
                want = Spec(spec.shape, spec.dtype, o.layout, o.want, source.undecided_mask, accumulate_dtype=sums)
            sources.append(source)
            inputs.append(want)
        everywhere = ins[0].mesh.everywhere
        for (shape, dtype), layout in zip(outs, self.layouts, strict=True):
            types = (self.reduced, self.open) if carries_grad(dtype) else (0, everywhere)
            outputs.append(Spec(shape, dtype, layout, *types, accumulate_dtype=sums))
        return Choice(tuple(sources), tuple(inputs), tuple(outputs), self.strategies, self.open)


def types(
    rule: Rule, ins: Sequence[Spec], chosen: Sequence[Strategy], orders: dict[str, list[int]], *, inplace: bool
) -> Types:
    """Give every replicated axis its type (invariant or reduced), deciding leaves that are still undecided."""
    mesh = ins[0].mesh
    given = [s for i, s in enumerate(ins) if i not in rule.lends]
    kinds = [_kind_of_axis(given, c, a, inplace) for a, c in enumerate(chosen)]
    reduced, still_open = (sum(1 << a for a, k in enumerate(kinds) if k == kind) for kind in ("reduced", "open"))

    def layout(dims: Dims, placements: list[Placement]) -> Layout:
        if orders:
            return Layout(mesh, placements, order=_dim_orders(dims, placements, orders), ndim=len(dims))
        return _in_mesh_order(mesh, tuple(placements), len(dims))

    operands = []
    for i, spec in enumerate(ins):
        if i in rule.lends:
            operands.append(Operand(None))
            continue
        placements = [c.inputs[i] for c in chosen]
        operands.append(Operand(layout(rule.inputs[i], placements), *_decided(spec, placements, kinds)))
    layouts = tuple([layout(dims, [c.outputs[k] for c in chosen]) for k, dims in enumerate(rule.outputs)])
    return Types(tuple(chosen), tuple(operands), layouts, reduced, still_open)


@lru_cache(maxsize=4096)
def _in_mesh_order(mesh: Mesh, placements: tuple[Placement, ...], ndim: int) -> Layout:
    return Layout(mesh, placements, ndim=ndim)


def _decided(spec: Spec, placements: Sequence[Placement], kinds: Sequence[str]) -> tuple[int, int, int]:
    """What is reduced and undecided of an operand once the op has decided, and on which axes it must be reduced."""
    reduced, undecided, want = spec.grad_partial_mask, spec.undecided_mask, 0
    for a, (p, kind) in enumerate(zip(placements, kinds, strict=True)):
        bit = 1 << a
        if not carries_grad(spec.dtype):
            want |= spec.grad_partial_mask & bit  # integers and masks have no gradient: whatever type they have is fine
        elif isinstance(p, Replicate) and kind == "open":
            continue
        elif isinstance(p, Shard) or (isinstance(p, Replicate) and kind == "reduced"):
            # Of what is split each rank uses its own part: zeros around its gradient, and one sum at the leaf.
            reduced |= undecided & bit
            want |= bit  # of what is split it says nothing
        undecided &= ~bit
    return reduced, undecided, want


def _kind_of_axis(ins: Sequence[Spec], c: Strategy, axis: int, inplace: bool) -> str:
    """Type of the replicated values of an op on one axis: ``"reduced"``, ``"invariant"`` or ``"open"``."""
    if any(not isinstance(p, Replicate) for p in c.outputs):
        return "reduced"
    bit = 1 << axis
    kinds = set()
    for i, spec in enumerate(ins):
        if not carries_grad(spec.dtype):
            continue
        if not isinstance(spec.layout.placements[axis], Replicate):
            kinds.add("converted")
        elif spec.undecided_mask & bit:
            kinds.add("open")
        else:
            kinds.add("reduced" if spec.grad_partial_mask & bit else "invariant")
            if inplace and i == 0:
                return "reduced" if spec.grad_partial_mask & bit else "invariant"
    if kinds <= {"open"}:
        return "open"
    return "reduced" if "invariant" not in kinds and "converted" not in kinds else "invariant"


def _dim_orders(dims: Dims, placements: Sequence[Placement], orders: dict[str, list[int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for d, names in enumerate(dims):
        for f in names:
            if f in orders and all(placements[a] == Shard(d) for a in orders[f]):
                found[d] = orders[f]
    return found
