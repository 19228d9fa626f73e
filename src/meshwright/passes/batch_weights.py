"""The weight of a micro-batch in a program: what its :class:`LossWeight` says, as nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from ..errors import PassError
from ..program.ir.edit import Edit, Emit
from ..program.ir.loss_weight import WEIGHT_OUTPUT, LossWeight, ScalarStep, applied
from ..program.ir.nodes import NodeInfo, info_of
from ..program.ir.program import WEIGHT, Program

aten = torch.ops.aten

UPDATE_WEIGHTS = NodeInfo("backward", source="weights of micro-batches")  # of what serves them


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
    """Puts the weights of micro-batches into graphs."""

    def __init__(self, weight: LossWeight) -> None:
        self.weight = weight

    def of_micro_batch(self, edit: Edit, count: fx.Node | None) -> tuple[Any, Any]:
        """How much a micro-batch counts, and by what its loss is divided: numbers, or nodes in float64."""
        number: float = round(self.weight.number, 9)
        number = int(number) if number.is_integer() else number  # programs for many sizes know how integers vary
        if count is None:
            return number, number
        with edit.after(count, info_of(count).beside()) as emit:
            one = emit(aten.view.default, count, [])
            weight = end = emit(aten._to_copy.default, one, dtype=torch.float64)
            if self.weight.function:
                end = emit(aten._to_copy.default, self._function(emit, one), dtype=torch.float64)
            if number != 1:  # a mean, times of how many it is
                products = [emit(aten.mul.Tensor, n, number) for n in dict.fromkeys((weight, end))]
                weight, end = products[0], products[-1]
        return weight, end

    def divisor(self, edit: Edit, total: fx.Node) -> tuple[fx.Node, fx.Node]:
        """What a loss is a mean over, of the weights of its micro-batches; and what gradients are divided by for it."""
        with edit.after(total, UPDATE_WEIGHTS) as emit:
            if self.weight.function:
                end = emit(aten._to_copy.default, total, dtype=self.weight.dtype)
                total = emit(aten._to_copy.default, self._function(emit, end), dtype=torch.float64)
            if not self.weight.counted:
                return total, total
            # Of which nothing counts there is no gradient, as on one device.
            return total, emit(aten.masked_fill.Scalar, total, emit(aten.eq.Scalar, total, 0), 1)

    def _function(self, emit: Emit, count: fx.Node) -> fx.Node:
        """What a count is made to before something is divided by it."""

        def step_node(step: ScalarStep, args: tuple[Any, ...]) -> fx.Node:
            operands = [
                emit(aten.full.default, [], a, dtype=step.dtype) if step.takes_tensor(i, a) else a
                for i, a in enumerate(args)
            ]
            return emit(step.target, *operands, **dict(step.kwargs))

        made: fx.Node = applied(self.weight.function, count, step_node)
        return made


__all__ = ["UPDATE_WEIGHTS", "WeightNodes", "name_of", "weight_of", "without_count"]
