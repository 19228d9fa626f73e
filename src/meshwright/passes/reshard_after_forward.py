"""Gather stored parameters again for the backward, instead of keeping them whole in between (ZeRO-3).

A view of a gathered parameter that the backward reads is made again from a second gather, right before its first use.
What the forward wrote to it is part of that: it was brought to the stored parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from ..program.ir.inplace import returned
from ..program.ir.nodes import VIEWS, checked_value, info_of, is_mutating, remove_dead
from ..program.ir.program import Program
from ..program.ir.subgraphs import Rewrite, copied, read_instead
from .pass_manager import Pass, PassRecord, register

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class ReshardAfterForward(Pass):
    """Gather stored parameters a second time, for the backward.

    A captured step has it unless it was given ``reshard_after_forward=False``.
    """

    name = "reshard-after-forward"
    before = ("gradient-merge", "data-parallel-optimization")

    def applies(self, program: Program) -> bool:
        """Whether a forward gathers parameters, and a backward may read them."""
        return any(map(_ends, program.graph.nodes)) and any(info_of(n).role == "backward" for n in program.graph.nodes)

    def apply(self, program: Program) -> tuple[Program, PassRecord]:
        """The program whose backward has gathers of its own."""
        made = Rewrite(copied(program))
        constants = _constants(made.graph)
        again = [n for n in made.order if _ends(n) and _repeat(made, n, constants)]
        remove_dead(made.graph)
        nbytes = sum(checked_value(n).nbytes for n in again)
        summary = f"{len(again)} parameters are gathered again for the backward"
        line = f"{nbytes} bytes on this rank are not kept from the forward to the backward"
        return made.done(), PassRecord(summary, (line,), {"gathers": len(again), "bytes": nbytes})


def _ends(node: fx.Node) -> bool:
    """Whether a node is the last one of the steps that gather a parameter for the forward."""
    info = info_of(node)
    return (
        bool(info.gather) and info.role == "forward" and not any(info_of(u).gather == info.gather for u in node.users)
    )


def _views(node: fx.Node, constants: Collection[fx.Node]) -> Iterator[fx.Node]:
    """A node and the views of it that the forward made, what its writes give included.

    Of a parameter without elements on this rank, what is padded for kernels that refuse empty tensors counts as well:
    other ranks read the parameter in the backward where this one reads that.
    """
    yield node
    is_empty = 0 in checked_value(node).shape
    for user in node.users:
        looks = (
            user.target in VIEWS or user.target is operator.getitem or (is_mutating(user) and returned(user) is node)
        )
        pads = is_empty and user.target is aten.constant_pad_nd.default
        if (looks or pads) and info_of(user).role == "forward":
            yield from _views(user, constants)
            if pads:
                yield from (u for u in user.users if u.target is aten.add.Tensor and _adds(u, user, constants))


def _adds(node: fx.Node, padded: fx.Node, constants: Collection[fx.Node]) -> bool:
    """Whether a node adds a constant to what was padded."""
    return info_of(node).role == "forward" and all(n is padded or n in constants for n in node.all_input_nodes)


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on no input of the program."""
    found = set[fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and not is_mutating(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _repeat(made: Rewrite, gathered: fx.Node, constants: Collection[fx.Node]) -> bool:
    """Whether the backward needed a gather of its own, and got one."""
    whole = set(_views(gathered, constants))
    readers = made.readers(whole)
    stack = [n for r in readers for n in r.all_input_nodes if n in whole]
    again = set[fx.Node]()
    while stack:
        node = stack.pop()
        if node not in again and (node in whole or info_of(node).gather == info_of(gathered).gather):
            again.add(node)
            stack += [returned(node)] if is_mutating(node) else node.all_input_nodes
    if readers:
        ordered = sorted(again, key=made.order.__getitem__)
        why = "gathered again for the backward: "
        read_instead(readers, made.again(ordered, readers[0], "backward", why, writes=False))
    return bool(readers)


__all__ = ["ReshardAfterForward"]
