"""Programs bound to what they work on: a model's tensors, an optimizer's states, sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from ..convert import apply
from ..dispatch import disabled
from ..errors import ProgramError
from ..layout import Layout, Spec
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor, stamp
from .core import Input, Program, value_of
from .inductor import with_inductor
from .optimizers import parts_of
from .run import Runner, compile_program
from .trace import Value

Tensor = torch.Tensor

BACKENDS: dict[str | None, Callable[[Program], Program]] = {None: lambda program: program, "inductor": with_inductor}


@dataclass
class Carrier:
    """What all programs of a step work on.

    Attributes:
        model, optimizer: whose tensors, states and numbers they read and write.
        updates: whether the optimizer's update is part of the programs; otherwise it runs after them.
        keep_gradients: leave ``parameter.grad`` after an update that ran behind a program.
        backend: what compiles local ops.
        sums: accumulators by name; shared by the programs of all batch shapes.
        scale: the loss scale and what belongs to it, by name.
        leftover: factor of the sums when they are flushed.
    """

    model: nn.Module
    optimizer: Any
    updates: bool
    keep_gradients: bool = False
    backend: str | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)
    leftover: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))


class Bound:
    """A program bound to its carrier.

    Args:
        leaves: name of a batch input to its place among the leaves of a batch.
        tree: how the loss and what came with it were returned; None for a loss alone.
    """

    def __init__(self, program: Program, carrier: Carrier, leaves: Mapping[str, int], tree: Any) -> None:
        self.program, self.carrier, self.tree = program, carrier, tree
        self.run: Runner = compile_program(BACKENDS[carrier.backend](program))
        self.batch: list[tuple[int, int, Spec | None]] = []  # place among the inputs, leaf of the batch, its spec
        self.numbers: list[tuple[int, Tensor]] = []  # group of the optimizer, its learning rate
        self.states: list[tuple[int, Input, fx.Node, Tensor]] = []  # place among the inputs, what it is, its parameter
        self.inputs: list[Any] = []
        tensors = dict((*carrier.model.named_parameters(), *carrier.model.named_buffers()))
        for i, (given, node) in enumerate(zip(program.inputs, program.placeholders, strict=True)):
            if given.kind == "batch":
                self.batch.append((i, leaves[given.name], given.spec))
                self.inputs.append(None)
            elif given.kind == "accumulator":
                self.inputs.append(self._sum(given, node))
            else:
                self.inputs.append(self._held(given, node, tensors))
        self.written = [t for t, given in zip(self.inputs, program.inputs, strict=True) if given.kind in _OWNED]
        self.grads = [(k, tensors[o.name], o.spec) for k, o in enumerate(program.outputs) if o.kind == "grad"]
        self.returned = [(k, o.spec) for k, o in enumerate(program.outputs) if o.kind in ("loss", "aux")]

    def _held(self, given: Input, node: fx.Node, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor that stays the same from step to step."""
        if given.kind in _OWNED:
            return local(tensors[given.name])
        if given.kind == "constant":
            value = self.program.constants[given.name]  # global values, as those of a plain batch
            return value if given.spec is None else part(value, given.spec).clone()
        if given.kind == "state":
            self.states.append((len(self.inputs), given, node, tensors[given.owner]))
            return self._state(given, node, tensors[given.owner])
        if given.kind == "scale":
            return self.carrier.scale[given.name]
        if given.name == "leftover":
            return self.carrier.leftover
        number = torch.tensor(0.0, dtype=torch.float64)
        self.numbers.append((int(given.name.rpartition(".")[2]), number))
        return number

    def _state(self, given: Input, node: fx.Node, p: Tensor) -> Tensor:
        """A state of the optimizer, made if it is not there; the optimizer keeps it as its own."""
        optimizer = self.carrier.optimizer
        assert optimizer is not None
        name = given.name.rpartition(".")[2]
        states = optimizer.state[p]
        if name not in states:
            value, like = checked_value(node), local(p)
            same = value.shape == tuple(like.shape)  # then also in memory: updates go through both side by side
            made = torch.zeros_like(like, dtype=value.dtype) if same else torch.zeros(value.shape, dtype=value.dtype)
            states[name] = made.to(like.device)
        found: Tensor = states[name]
        return found

    def _sum(self, given: Input, node: fx.Node) -> Tensor:
        """A sum of gradients, made if no other program of the step has it."""
        sums = self.carrier.sums
        if given.name not in sums:
            value = checked_value(node)
            sums[given.name] = torch.zeros(value.shape, dtype=value.dtype, device=self.program.mesh.device)
        return sums[given.name]

    def follow(self) -> None:
        """Look for the optimizer's states again: others were loaded."""
        for i, given, node, p in self.states:
            self.inputs[i] = self._state(given, node, p)

    def __call__(self, batch: Any) -> Any:
        """Run it; the loss and what comes with it, None for a program that returns neither."""
        inputs, optimizer = self.inputs, self.carrier.optimizer
        if self.batch:
            leaves = pytree.tree_leaves(batch)
            for i, leaf, spec in self.batch:
                inputs[i] = leaves[leaf] if spec is None else part(leaves[leaf], spec)
        for group, number in self.numbers:
            number.fill_(float(optimizer.param_groups[group]["lr"]))
        made = self.run(inputs)
        if self.numbers:
            for one in parts_of(optimizer):
                one._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        torch.autograd.graph.increment_version(self.written)
        for i, _, _ in self.batch:
            inputs[i] = None
        if self.grads:
            self._give_gradients(made)
        out = [made[k] if spec is None else stamp(made[k], spec) for k, spec in self.returned]
        if self.tree is not None:
            return pytree.tree_unflatten(out, self.tree)
        return out[0] if out else None

    def _give_gradients(self, made: list[Tensor]) -> None:
        carrier = self.carrier
        for k, p, spec in self.grads:
            p.grad = made[k] if spec is None else stamp(made[k], spec)
        if carrier.optimizer is not None and not carrier.updates:
            carrier.optimizer.step()
            if not carrier.keep_gradients:
                carrier.optimizer.zero_grad()


_OWNED = ("param", "buffer")


def checked_value(node: fx.Node) -> Value:
    """Shape and dtype of what a node gives.  Raises ProgramError where it is not one tensor."""
    value = value_of(node)
    if value is None:
        raise ProgramError(f"{node.name} is not one tensor")
    return value


class Ready:
    """The programs of a step for one shape of batches, in the order in which calls run them.

    Attributes:
        program: the program that updates.
        cycle: what the calls between two updates run; the last one updates.
        flush: the update alone; None where each call updates.
    """

    def __init__(self, program: Program, carrier: Carrier, leaves: Mapping[str, int], tree: Any = None) -> None:
        self.program = program
        self.cycle: list[Bound] = []
        self.flush: Bound | None = None
        merged = program.merged
        if merged is not None:
            self.cycle = [Bound(merged.accumulate, carrier, leaves, tree)] * (merged.k_steps - 1)
            self.flush = Bound(merged.flush, carrier, {}, None)
        self.cycle.append(Bound(program, carrier, leaves, tree))


def local(t: Tensor) -> Tensor:
    """The local tensor as a plain alias that shares memory and version."""
    with torch.no_grad(), disabled():
        return t.detach().as_subclass(Tensor) if not isinstance(t, DistTensor) else _bare(t)


def _bare(t: DistTensor) -> Tensor:
    made = Tensor.detach(t)
    made.__class__ = Tensor
    return made


def part(t: Any, spec: Spec) -> Tensor:
    """This rank's part of a batch tensor."""
    if isinstance(t, DistTensor):
        if t._spec.layout != spec.layout:
            raise ProgramError(
                f"a batch tensor of shape {tuple(t.shape)} lies as {t.layout!r}, the program expects {spec.layout!r}: "
                "give it so (shard_dataloader), or give plain tensors with the global values"
            )
        return _bare(t)
    whole = Spec(spec.shape, spec.dtype, Layout(spec.mesh))
    with torch.no_grad():
        made = apply(plan_conversion(whole, spec.with_(undecided=0, reduced=0)).steps, t)
    return made if made.device.type == spec.mesh.device else made.to(spec.mesh.device)


__all__ = ["BACKENDS", "Bound", "Carrier", "Ready", "local", "part"]
