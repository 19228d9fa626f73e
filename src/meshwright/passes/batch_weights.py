"""The weight of a micro-batch in a program: what its :class:`LossWeight` says, as nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from ..errors import PassError
from ..program.ir.loss_weight import WEIGHT_OUTPUT, LossWeight, ScalarStep, applied
from ..program.ir.nodes import NodeInfo, Value, annotate, call, checked_value, info_of
from ..program.ir.program import WEIGHT, Program

aten = torch.ops.aten

UPDATE_WEIGHTS = NodeInfo("backward", source="weights of micro-batches")  # of what serves them
MakeNumber = Callable[[torch.dtype], Value]  # in memory of its own


def weight_of(program: Program) -> LossWeight | None:
    """The weight of the micro-batches of a program; None where the loss is that of one rank.

    Raises:
        PassError: nobody asked for it when the step was captured.
    """
    loss = next((o for o in program.outputs if o.kind == "loss"), None)
    if loss is None or loss.spec is None:
        return None
    if program.weight is None:
        raise PassError(
            "the program does not say what its loss is a mean over: list the pass in compile_step(passes=...), or give "
            "weighted=False for the plain mean of the micro-steps"
        )
    return program.weight


def name_of(weight: LossWeight) -> str:
    """Of its sum: programs of other shapes add to the same if what they are means over has the same ratios."""
    return " ".join([WEIGHT, *(f"{n:.6g}" for n in sorted(weight.others))])


def without_count(program: Program) -> tuple[Program, fx.Node | None]:
    """The program, which may be changed, without the output that counts a micro-batch; and what gives it."""
    pairs = list(zip(program.outputs, program.results, strict=True))
    count = next((n for o, n in pairs if o.kind == WEIGHT_OUTPUT), None)
    if count is not None:
        (output,) = program.graph.find_nodes(op="output")
        output.args = (tuple(n for o, n in pairs if o.kind != WEIGHT_OUTPUT),)
    kept = tuple(o for o, _ in pairs if o.kind != WEIGHT_OUTPUT)
    return replace(program, outputs=kept, weight=None), count


class WeightNodes:
    """Puts the weights of micro-batches into graphs.

    Args:
        number: makes what a node gives that is a number.
    """

    def __init__(self, weight: LossWeight, number: MakeNumber) -> None:
        self.weight, self.number = weight, number

    def of_micro_batch(self, graph: fx.Graph, count: fx.Node | None) -> tuple[Any, Any]:
        """How much a micro-batch counts, and by what its loss is divided: numbers, or nodes in float64."""
        number: float = round(self.weight.number, 9)
        number = int(number) if number.is_integer() else number  # programs for many sizes know how integers vary
        if count is None:
            return number, number
        info, value = info_of(count), checked_value(count)
        one = _after(graph, count, aten.view.default, (count, []), info.beside(replace(value, shape=(), given=None)))
        weight = end = self.cast(graph, one, torch.float64, info)
        if self.weight.function:
            end = self.cast(graph, self.function(graph, one, info), torch.float64, info)
        if number == 1:
            return weight, end
        # A mean, times of how many it is.
        made = [
            _after(graph, end, aten.mul.Tensor, (n, number), info.beside(self.number(torch.float64)))
            for n in dict.fromkeys((weight, end))
        ]
        return made[0], made[-1]

    def divisor(self, graph: fx.Graph, total: fx.Node) -> fx.Node:
        """What the sums of an update are divided by, of the weights of its micro-batches."""
        if self.weight.function:
            end = self.cast(graph, total, self.weight.dtype, UPDATE_WEIGHTS)
            total = self.cast(graph, self.function(graph, end, UPDATE_WEIGHTS), torch.float64, UPDATE_WEIGHTS)
        if not self.weight.counted:
            return total
        # Of which nothing counts there is no gradient, as on one device.
        info, at = UPDATE_WEIGHTS.beside(self.number(torch.bool)), UPDATE_WEIGHTS.beside(self.number(torch.float64))
        zero = _after(graph, total, aten.eq.Scalar, (total, 0), info)
        made = _after(graph, zero, aten.masked_fill.Scalar, (total, zero, 1), at)
        annotate(made, role=UPDATE_WEIGHTS.role)
        return made

    def function(self, graph: fx.Graph, count: fx.Node, info: NodeInfo) -> fx.Node:
        """What a count is made to before something is divided by it."""
        at = count

        def emit(step: ScalarStep, args: tuple[Any, ...]) -> fx.Node:
            nonlocal at
            operands = []
            for i, a in enumerate(args):
                if step.takes_tensor(i, a):
                    made = info.beside(self.number(step.dtype))
                    a = at = _after(graph, at, aten.full.default, ([], a), made, {"dtype": step.dtype})
                operands.append(a)
            at = _after(
                graph, at, step.target, tuple(operands), info.beside(self.number(step.dtype)), dict(step.kwargs)
            )
            return at

        made: fx.Node = applied(self.weight.function, count, emit)
        return made

    def cast(self, graph: fx.Graph, node: fx.Node, dtype: torch.dtype, info: NodeInfo) -> fx.Node:
        """A number in another dtype."""
        return _after(graph, node, aten._to_copy.default, (node,), info.beside(self.number(dtype)), {"dtype": dtype})


def _after(
    graph: fx.Graph, at: fx.Node, target: Any, args: tuple[Any, ...], info: NodeInfo, kwargs: Any = None
) -> fx.Node:
    with graph.inserting_after(at):
        return call(graph, target, args, info, kwargs)


__all__ = ["UPDATE_WEIGHTS", "WeightNodes", "name_of", "weight_of", "without_count"]
