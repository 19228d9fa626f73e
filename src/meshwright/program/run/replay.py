"""A step that runs again op by op: each value that its program computes is shown, and nothing is updated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..ir.nodes import checked_value, info_of, target_name
from ..ir.program import Program
from ..ir.strides import Strides, with_strides
from .bind import BoundProgram, StepState
from .proof import uncounted
from .runner import Compiled
from .watched import watched, written_inputs

Tensor = torch.Tensor
Tell = Callable[[str, str, Tensor], None]  # of a value: in words, the user's line, and this rank's part
_OUTSIDE = ("param", "buffer", "constant", "batch")  # kinds of inputs that are not computed by a step
RUNNING = ("running_mean", "running_var")  # names of buffers that the step computes that runs again


def replay(
    program: Program, carrier: StepState, how: tuple[Mapping[str, int], Any], leaves: Sequence[Any], tell: Tell
) -> None:
    """Run a program on the leaves of a batch up to its update; what it writes to stays as it is.

    Args:
        how: leaves and tree, as of :class:`BoundProgram`.
        tell: is called with inputs, values and gradients, in the order in which they are computed.
    """
    plain = watched(program, lambda name, t: tell(name, "", t))
    code = Compiled(plain)
    bound = BoundProgram(plain, carrier, *how, compiled=(code, ()))
    inputs, changed = [*bound.filled(leaves, {})], {*written_inputs(plain)}
    for i, given in enumerate(plain.inputs):
        if i in changed:
            inputs[i] = inputs[i].clone(memory_format=torch.preserve_format)
        if given.kind in _OUTSIDE and not given.name.endswith(RUNNING):
            tell(given.name, "", inputs[i])

    def seen(t: Tensor, strides: Strides, words: str, line: str) -> Tensor:
        tell(words, line, t)
        return with_strides(t, strides)

    def watch(node: fx.Node) -> tuple[Any, ...]:
        return seen, checked_value(node).strides, _in_words(node), info_of(node).line

    with uncounted():
        code.once(inputs, watch)


def _in_words(node: fx.Node) -> str:
    info, name = info_of(node), target_name(node.target).removeprefix("aten.").partition(".")[0]
    of = re.sub(r"_\d+$", "", info.source) or name  # names of captured nodes are numbered
    return f"the {'backward' if info.role == 'backward' else 'result'} of {of}"


__all__ = ["RUNNING", "Tell", "replay"]
