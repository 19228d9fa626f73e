"""Programs bound to what they work on: a model's tensors, an optimizer's states, sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx as fx
import torch.nn as nn

from ...compat import pytree
from ...dispatch import disabled
from ...errors import ProgramError
from ...layout import Layout, Replicate, Spec
from ...local_tensor import bare, version_of
from ...resharding.copies import HOST
from ...resharding.executor import apply
from ...resharding.planner import plan as plan_conversion
from ...shard.optimizers.states import held_state
from ...tensor import DistTensor, wrap
from ..capture.free_variables import Place
from ..capture.optimizers import parts_of
from ..ir.host import host_storages
from ..ir.inplace import written
from ..ir.nodes import Value, checked_value, info_of
from ..ir.program import PASSED, PIPELINE, WHOLE, Input, Program
from ..ir.sizes import Variables, value_at
from ..ir.strides import laid, same, with_strides
from .cuda_graphs import with_cuda_graphs
from .inductor import with_inductor
from .runner import Compiled, Runner

Tensor = torch.Tensor

Code = Mapping[str, Compiled]  # by part

BACKENDS: dict[str | None, Callable[[Program], Program]] = {
    None: lambda program: program,
    "inductor": with_inductor,
    "cudagraphs": with_cuda_graphs,
}


@dataclass
class StepState:
    """What all programs of a step work on.

    Attributes:
        model, optimizer: whose tensors, states and numbers they read and write.
        updates: whether the optimizer's update is part of the programs; otherwise it runs after them.
        keep_gradients: leave ``parameter.grad`` after an update that ran behind a program.
        backend: what compiles local ops, or replays them.
        sums: accumulators by name; shared by the programs of all batch shapes.
        lie: how sums lie, by the same name.
        scale: the loss scale and what belongs to it, by name.
        flush_scale: factor of the sums when they are flushed.
    """

    model: nn.Module
    optimizer: Any
    updates: bool
    keep_gradients: bool = False
    backend: str | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    lie: dict[str, Spec | None] = field(default_factory=dict)
    scale: dict[str, Tensor] = field(default_factory=dict)
    flush_scale: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64, device="cpu"))


class BoundProgram:
    """A program bound to its carrier.

    Args:
        leaves: name of a batch input to its place among the leaves of a batch.
        tree: how the loss and what came with it were returned; None for a loss alone.
        compiled: the code of a program for many sizes, and the variables at which this one is.
        apart: whether sums that lie otherwise are others.
    """

    def __init__(
        self,
        program: Program,
        carrier: StepState,
        leaves: Mapping[str, int],
        tree: Any,
        compiled: tuple[Compiled, Variables] | None = None,
        apart: bool = False,
    ) -> None:
        self.program, self.carrier, self.apart = program, carrier, apart
        code, variables = compiled or (Compiled(BACKENDS[carrier.backend](program)), ())
        self.run: Runner = code.at(variables)
        self.batch: list[tuple[int, int, Spec | None, Value]] = []  # place among the inputs, leaf of the batch, what
        self.passed: list[tuple[int, Input, Value]] = []  # what other parts of a micro-batch give
        self.numbers: list[tuple[int, Tensor]] = []  # group of the optimizer, its learning rate
        self.owned: list[_Owned] = []
        self.copied: list[tuple[int, Tensor, Tensor]] = []  # place, tensor from outside of the model, its stand-in
        self.outside = [t for t in program.constants.values() if not isinstance(t, DistTensor)]
        self.written: list[int] = []  # places of those that the program writes to
        nodes = program.graph.nodes if program.constants else ()
        self.hosted = host_storages(program)
        self.lines = {s: info_of(n).line for n in nodes for s in written(n)}  # of storages written to
        self.states: list[_BoundState] = []
        # The optimizers' states, and of how many parameters.
        self.known: list[tuple[Any, int]] = [({}, 0) for _ in parts_of(carrier.optimizer)]
        self.inputs: list[Any] = []
        self.bound_anew = 0  # how often something took the place of what was bound
        self.seen = 0  # writes when it last ran
        tensors = dict((*carrier.model.named_parameters(), *carrier.model.named_buffers()))
        for i, (given, node) in enumerate(zip(program.inputs, program.placeholders, strict=True)):
            if given.kind == "batch":
                self.batch.append((i, leaves[given.name], given.spec, value_at(checked_value(node), variables)))
                self.inputs.append(None)
            elif given.kind in PASSED:
                self.passed.append((i, given, value_at(checked_value(node), variables)))
                self.inputs.append(None)
            elif given.kind == "accumulator":
                self.inputs.append(self._sum(given, node))
            else:
                self.inputs.append(self._held(given, node, tensors))
        self.seen = self.writes()
        self.grads = [(k, tensors[o.name], o.spec) for k, o in enumerate(program.outputs) if o.kind == "grad"]
        self.returned = [(k, o.spec) for k, o in enumerate(program.outputs) if o.kind in ("loss", "aux")]
        self.tree = tree if self.returned else None

    def _held(self, given: Input, node: fx.Node, tensors: Mapping[str, Tensor]) -> Tensor:
        """A tensor that stays the same from step to step."""
        if given.kind in _OWNED:
            return self._own(given, node)
        if given.kind == "constant":
            return self._constant(given, node)
        if given.kind == "state":
            self.states.append(_BoundState(len(self.inputs), given, node, tensors[given.owner]))
            return self._state(self.states[-1])
        if given.kind == "scale":
            return self.carrier.scale[given.name]
        if given.name == "flush_scale":
            return self.carrier.flush_scale
        number = torch.tensor(0.0, dtype=torch.float64, device="cpu")
        self.numbers.append((int(given.name.rpartition(".")[2]), number))
        return number

    def _constant(self, given: Input, node: fx.Node) -> Tensor:
        """A tensor that the step found outside of the model: its own memory where that lies as the program wants it,
        else a copy in every step."""
        held, value = self.program.constants[given.name], checked_value(node)
        found = lying(held if given.spec is None else part(held, given.spec), value)
        line = self.lines.get(value.storage)
        if line is not None:
            self.written.append(len(self.inputs))
        if found.data_ptr() != held.data_ptr():
            if line is not None:
                raise ProgramError(
                    f"{line}: the step writes to a tensor of shape {tuple(held.shape)} from outside of the model that "
                    "has gaps in memory or is on another device: make it contiguous, on the mesh's device, or a buffer"
                )
            self.copied.append((len(self.inputs), held, found))
        return found

    def _state(self, s: _BoundState) -> Tensor:
        """A state of the optimizer, made if it is not there; the optimizer keeps it as its own."""
        optimizer = self.carrier.optimizer
        assert optimizer is not None
        states = s.listed = optimizer.state[s.param]
        value, held = checked_value(s.node), states.get(s.key)
        if s.spec is not None and value.shape and isinstance(held, Tensor):
            held = held_state(held, s.spec, s.key, s.param, optimizer)
        # Loaded ones may lie otherwise in memory.
        device = HOST if value.storage in self.hosted else s.param.device
        found = zeros(value, device) if held is None else lying(local(held), value)
        found = found.to(HOST) if device == HOST else found
        if held is None or local(held).data_ptr() != found.data_ptr():
            held = found if s.spec is None or not value.shape else wrap(local(found), s.spec)
        states[s.key] = s.held = held
        return found

    def _sum(self, given: Input, node: fx.Node) -> Tensor:
        """A sum of gradients, made if no other program of the step has it."""
        sums, value, key = self.carrier.sums, checked_value(node), given.name
        if key in sums and (self.apart or tuple(sums[key].shape) != tuple(value.shape)):
            # Of micro-steps whose gradients lie otherwise.
            key = key if self.carrier.lie.get(key) == given.spec else f"{key} as {given.spec!r}"
        if key not in sums:
            self.carrier.lie[key] = given.spec
            sums[key] = zeros(value, self.program.mesh.device)
        if sums[key].shape != value.shape:
            raise ProgramError(
                f"the gradient of {given.name} has shape {list(value.shape)} in one micro-batch and "
                f"{list(sums[key].shape)} in another: give batches that are cut evenly"
            )
        return sums[key]

    def sums(self) -> dict[str, Tensor]:
        """What it adds to or reads, by name."""
        pairs = zip(self.program.inputs, self.inputs, strict=True)
        return {i.name: t for i, t in pairs if i.kind == "accumulator"}

    def _own(self, given: Input, node: fx.Node) -> Tensor:
        """The local part of a parameter or buffer."""
        prefix, _, key = given.name.rpartition(".")
        module = self.carrier.model.get_submodule(prefix)
        table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
        value, found = checked_value(node), local(table[key])
        if tuple(found.shape) != tuple(value.shape):
            raise ProgramError(
                f"{given.name} has shape {list(found.shape)} on this rank, the program wants {list(value.shape)}: "
                "it was laid out otherwise than the step was captured for"
            )
        self._check_place(given, value, found)
        if not same(value.shape, tuple(found.stride()), value.strides):
            with torch.no_grad(), disabled():  # a buffer that was laid on the mesh otherwise than it was
                table[key].data = laid(found, value.strides)
            found = local(table[key])
        with disabled():  # as follow() asks, which compares
            held, memory = isinstance(table[key], DistTensor), _memory(table[key])
        self.owned.append(_Owned(len(self.inputs), given, value, table, key, held, table[key], memory))
        return found

    def _check_place(self, given: Input, value: Value, found: Tensor) -> None:
        """Raises ProgramError for a parameter that was moved away from the host."""
        if value.storage in self.hosted and found.device.type != HOST:
            raise ProgramError(
                f"{given.name} is stored on the host (offload=) and lies on {found.device} now: move it back, or "
                "capture the step again"
            )

    def follow(self) -> bool:
        """Bind to what took the place of buffers, of the memory of parameters (``p.data = ...``) and of states.

        Returns:
            False where it lies in memory as the program cannot take it: then another one is to be captured.

        Raises:
            ProgramError: of another shape, dtype or layout; the same on all ranks.
        """
        inputs = self.inputs
        with disabled():
            for o in self.owned:
                t = o.table.get(o.key)
                if t is o.tensor and _memory(t) == o.memory:
                    continue
                found = _replaced(o, t)
                self._check_place(o.given, o.value, found)
                if not same(o.value.shape, tuple(found.stride()), o.value.strides):
                    return False
                self.bound_anew += 1 + version_of(inputs[o.place]) - version_of(found)  # counts go on from there
                inputs[o.place], o.tensor, o.memory = found, cast("Tensor", t), _memory(found)
            known = [(part.state, len(part.state)) for part in parts_of(self.carrier.optimizer)]
            anew = any(a is not b or m != n for (a, m), (b, n) in zip(known, self.known, strict=True))
            for s in self.states:
                if anew or s.listed.get(s.key) is not s.held:
                    before = inputs[s.place]
                    inputs[s.place] = self._state(s)
                    if inputs[s.place] is not before:
                        self.bound_anew += 1 + version_of(before) - version_of(inputs[s.place])
            self.known = [(s, len(s)) for s, _ in known]
        return True

    def writes(self) -> int:
        """How often what it owns, and states of the optimizers, were written to or replaced."""
        with disabled():
            places = [o.place for o in self.owned] + [s.place for s in self.states]
            return sum(version_of(self.inputs[place]) for place in places) + self.bound_anew

    def __call__(self, leaves: Sequence[Any], given: dict[str, Tensor] | None = None) -> Any:
        """Run it on the leaves of a batch; the loss and what comes with it, None for a program that returns neither.

        Args:
            given: as of :meth:`values`.
        """
        made = self.values(leaves, {} if given is None else given)
        if self.grads:
            self._give_gradients(made)
        out = [made[k] if spec is None else wrap(made[k], spec) for k, spec in self.returned]
        if self.tree is not None:
            return pytree.tree_unflatten(out, self.tree)
        return out[0] if out else None

    def values(self, leaves: Sequence[Any], given: dict[str, Tensor]) -> list[Tensor]:
        """Run it on the leaves of a batch; the values of its outputs.

        Args:
            given: what other parts made, by name: what is used is taken out.
        """
        inputs = self.filled(leaves, given)
        made = self.run(inputs)
        if self.numbers:
            for one in parts_of(self.carrier.optimizer):
                one._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        torch.autograd.graph.increment_version(
            [self.inputs[x.place] for x in self.owned] + [self.inputs[i] for i in self.written]
        )
        for i, *_ in self.batch:
            self.inputs[i] = None
        return made

    def filled(self, leaves: Sequence[Any], given: dict[str, Tensor]) -> list[Any]:
        """The inputs of a run, as of :meth:`values`."""
        inputs, optimizer = self.inputs, self.carrier.optimizer
        if self.batch:
            for i, leaf, spec, value in self.batch:
                inputs[i] = lying(leaves[leaf] if spec is None else part(leaves[leaf], spec), value)
        if self.passed:
            inputs = [*inputs]  # which the program empties
            for i, passed, value in self.passed:
                inputs[i] = lying(given.pop(passed.name), value)
        for _, held, copy in self.copied:
            copy.copy_(held.detach())
        for group, number in self.numbers:
            number.fill_(float(optimizer.param_groups[group]["lr"]))
        return inputs

    def _give_gradients(self, made: list[Tensor]) -> None:
        carrier = self.carrier
        for k, p, spec in self.grads:
            p.grad = made[k] if spec is None else wrap(made[k], spec)
        if carrier.optimizer is not None and not carrier.updates:
            carrier.optimizer.step()
            if not carrier.keep_gradients:
                carrier.optimizer.zero_grad()


_OWNED = ("param", "buffer")


@dataclass(slots=True)
class _Owned:
    """A parameter or buffer: its place among the inputs, where it is registered, and what was bound."""

    place: int
    given: Input
    value: Value
    table: dict[str, Any]
    key: str
    distributed: bool
    tensor: Tensor
    memory: tuple[Any, ...]


class _BoundState:
    """A state of the optimizer: its place among the inputs, whose and what it is, and the dict that has it."""

    def __init__(self, place: int, given: Input, node: fx.Node, param: Tensor) -> None:
        self.place, self.node, self.param, self.spec = place, node, param, given.spec
        self.key = given.name.rpartition(".")[2]
        self.listed: dict[str, Any] = {}
        self.held: Any = None


def _memory(t: Tensor) -> tuple[Any, ...]:
    """Where a tensor is, while its memory is held."""
    return Tensor.data_ptr(t), Tensor.stride(t), t.shape


def _replaced(o: _Owned, t: Any) -> Tensor:
    """The local part of what took the place of a parameter or buffer, or of its memory."""
    given, value, spec = o.given, o.value, o.given.spec if o.distributed else None
    wanted = (value.dtype, tuple(spec.shape if spec else value.shape), spec and spec.layout)
    on = t._spec if isinstance(t, DistTensor) else None
    # Never its values: they would be waited for.
    now: Any = (t.dtype, tuple(on.shape if on else t.shape), on and on.layout) if isinstance(t, Tensor) else repr(t)
    if now != wanted:
        kind = "parameter" if given.kind == "param" else given.kind
        raise ProgramError(
            f"the {kind} {given.name} is {now} now, the step was captured for {wanted}: give it back its dtype, shape "
            "and layout, or capture the step again"
        )
    return local(t)


class CompiledVariant:
    """The programs of a step for one shape of batches, and the schedules that run them.

    Args:
        how: leaves and tree, as of :class:`BoundProgram`.
        many: the code of a program for many sizes, and the variables at which this one is.

    Attributes:
        program: the program that updates, with its parts.
        schedules: name to what it runs, in order, as of :class:`~meshwright.program.Program`.
        sums: what calls that do not update leave to those that follow, and how it lies.
        many: whether :attr:`program` has the graph of another size; ``given`` are then leaves of a batch of this one.
    """

    def __init__(
        self,
        program: Program,
        carrier: StepState,
        how: tuple[Mapping[str, int], Any],
        places: Sequence[Place] = (),
        many: tuple[Code, Variables] | None = None,
    ) -> None:
        self.program, self.carrier, self.how, self.places = program, carrier, how, places
        self.many = many is not None
        self.given: list[Any] = []
        inputs = [i for p in program.parts.values() for i in p.inputs] if program.pipeline else program.inputs
        self.sums = {i.name: i.spec for i in inputs if i.kind == "accumulator"}
        whole = {} if program.pipeline else {WHOLE: program}
        self.parts = {
            name: BoundProgram(
                part, carrier, *how, None if many is None else (many[0][name], many[1]), bool(program.pipeline)
            )
            for name, part in {**program.parts, **whole}.items()
        }
        known: dict[str, Any] = {**self.parts, PIPELINE: self.parts.get("flush")}
        self.schedules: dict[str, list[BoundProgram]] = {
            name: [known[part] for part in runs] for name, runs in program.schedules.items()
        }

    def at(self, program: Program, code: Code, variables: Variables) -> CompiledVariant:
        """The same for other sizes, by a program for many."""
        return CompiledVariant(program, self.carrier, self.how, self.places, (code, variables))

    def fold(self, into: CompiledVariant, part: str) -> None:
        """Of sums that lie otherwise than those that another's part reads: add them to those, and leave none here.

        Raises:
            ProgramError: nobody knows how they lie.
        """
        if self is into or part not in into.parts:
            return
        held: dict[str, Tensor] = {}
        for bound in self.parts.values():
            held.update(bound.sums())
        theirs = into.parts[part].sums()
        for name in theirs:
            if held[name] is not theirs[name]:
                spec, other = self.sums[name], into.sums[name]
                if spec is None or other is None:
                    if not theirs[name].numel():
                        continue  # of another stage's parameter
                    why = "lie otherwise in some micro-batches: give batches that are cut evenly"
                    raise ProgramError(f"the gradients of {name} {why}")
                there, here = self.within_stage(spec), self.within_stage(other)
                with torch.no_grad():
                    theirs[name].add_(apply(plan_conversion(there, here).steps, held[name]))
                held[name].zero_()

    def within_stage(self, spec: Spec) -> Spec:
        """How a value lies for the ranks of a stage, which has it whole; ranks of others do not take part."""
        pipeline = self.program.pipeline
        if pipeline is None or "accumulate" in self.parts:  # every rank computes all stages
            return spec
        return spec.with_(layout=spec.layout.replace(pipeline.axis, Replicate()))

    def follow(self) -> bool:
        """As :meth:`Bound.follow`, for all; False, too, where the step now finds other tensors outside of its model."""
        if not all(p.same() for p in self.places):
            return False
        return False not in [b.follow() for b in self.parts.values()]


def zeros(value: Value, device: Any) -> Tensor:
    """Memory for a value, filled with zeros."""
    return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=device).zero_()


def lying(t: Tensor, value: Value) -> Tensor:
    """``t`` with the strides that a program was recorded with; ``t`` itself where it has them."""
    return t if t.stride() == value.strides else with_strides(t.detach(), value.strides)


def local(t: Tensor) -> Tensor:
    """The local tensor as a plain alias that shares memory and version."""
    with torch.no_grad(), disabled():
        return t.detach().as_subclass(Tensor) if not isinstance(t, DistTensor) else bare(t)


def part(t: Any, spec: Spec) -> Tensor:
    """This rank's part of a batch tensor."""
    if isinstance(t, DistTensor):
        have = t._spec.layout
        if have != spec.layout:
            raise ProgramError(
                f"a batch tensor of shape {tuple(t.shape)} lies as {have!r}, the program expects {spec.layout!r}: "
                "give it so (shard_dataloader), or give plain tensors with the global values"
            )
        return bare(t)
    whole = Spec(spec.shape, spec.dtype, Layout(spec.mesh))
    with torch.no_grad():
        made = apply(plan_conversion(whole, spec.invariant()).steps, t)
    return made if made.device.type == spec.mesh.device else made.to(spec.mesh.device)


__all__ = ["BACKENDS", "BoundProgram", "CompiledVariant", "StepState", "local", "part"]
