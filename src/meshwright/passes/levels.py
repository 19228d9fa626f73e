"""Sums over one axis after another (of a node, then between nodes) as one sum over all of them."""

from __future__ import annotations

from dataclasses import replace

import torch.fx as fx

from ..collective import COLLECTIVES, bytes_of
from ..program.ir.inplace import follow
from ..program.ir.linear import is_linear
from ..program.ir.nodes import annotate, info_of, is_sum, value_of
from ..program.ir.program import Program
from .gradients import is_reduction


def flattened(program: Program) -> tuple[Program, int]:
    """The program, whose graph is changed, with one all-reduce where several in a row sum a gradient; how many went."""
    causes, count = list(program.causes), 0
    for node in list(program.graph.nodes):
        while is_reduction(node) and not COLLECTIVES[node.target].scatters:
            inner = _inner(node)
            if inner is None:
                break
            inner.replace_all_uses_with(inner.all_input_nodes[0])
            *given, axes, mesh = node.args
            names = set(f"{axes},{inner.args[-2]}".split(","))
            together = ",".join(a for a in program.mesh.axes if a in names)
            node.args = (*given, together, mesh)
            value, cause = value_of(node), program.cause(node)
            if cause is not None and value is not None:
                moved = bytes_of(node.target, value.shape, value.dtype, node.args[1:])
                causes.append(replace(cause, axes=tuple(together.split(",")), bytes=moved))
                annotate(node, cause=len(causes) - 1)
            program.graph.erase_node(inner)
            count += 1
    if count:
        follow(program.graph)
    return replace(program, causes=tuple(causes)), count


def _inner(node: fx.Node) -> fx.Node | None:
    """The sum over other axes of which a sum is the only reader, through ops that may change places with it."""
    at = node.args[0]
    while isinstance(at, fx.Node) and len(at.users) == 1:
        if at.target is node.target and at.args[1:-2] == node.args[1:-2] and is_sum(at):
            own, other = (set(str(n.args[-2]).split(",")) for n in (node, at))
            return at if own.isdisjoint(other) and not info_of(at).grad_of else None
        if not is_linear(at) or _picks(at):
            return None
        at = at.args[0]
    return None


_PLACES = {"start", "end", "index", "indices", "length", "pad", "shifts", "split_size", "split_sizes", "storage_offset"}


def _picks(node: fx.Node) -> bool:
    """Whether a node takes elements by their place, which may be this rank's own: other ranks take other ones."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(a.name in _PLACES for a in schema.arguments)


__all__ = ["flattened"]
