"""Contender for the host cost of replaying a captured step: forward and backward, on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import meshwright as mw
from meshwright.program import build
from meshwright.program.run.runner import compile_program


class Replay:
    """The program's runner on the model's own parameters."""

    name = "meshwright"

    def make(self, model: torch.nn.Module, ids: torch.Tensor, tgt: torch.Tensor) -> Callable[[], Any]:
        program = build(model, None, None, (ids, tgt), mw.Mesh({"dp": 1})).program
        run = compile_program(program)
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        batch = iter((ids, tgt))
        inputs = [tensors[i.name].detach() if i.name in tensors else next(batch) for i in program.inputs]
        return lambda: run(inputs)


CONTENDERS = [Replay()]
