"""What of a program lies in the memory of the host: what is copied from there, and what kernels take beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from ...resharding.copies import TO_DEVICE, TO_HOST
from .inplace import storages
from .program import Program


def host_storages(program: Program) -> set[int]:
    """Numbers of the storages on the host.

    A kernel works in one memory, so all that it takes and gives lies where one of them does; the rates of an optimizer
    alone go with kernels of any.
    """
    anywhere = {
        s for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "hyper" for s in storages(n)
    }
    found: set[int] = set()
    for node in program.graph.nodes:
        if node.target is TO_DEVICE:
            found.update(*map(storages, node.all_input_nodes))
        elif node.target is TO_HOST:
            found.update(storages(node))
    before = -1
    while found and len(found) != before:
        before = len(found)
        for node in _kernels(program.graph):
            together = {s for n in (node, *node.all_input_nodes) for s in storages(n)} - anywhere
            if not together.isdisjoint(found):
                found |= together
    return found


def _kernels(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in graph.nodes if n.op == "call_function" and n.target not in (TO_DEVICE, TO_HOST))


__all__ = ["host_storages"]
