"""Local ops in CUDA graphs: the ops between two collectives become one graph, which the CPU starts with one call.

A graph reads and writes the memory that it was recorded with. So each segment

* runs as it is at its first call (which loads kernels), is recorded at the second, and replayed from then on;
* reads parameters, buffers, states, sums of gradients and what other graphs give where they are, and is recorded again
  if one of them has moved; everything else is copied into memory of its own before each replay;
* keeps memory of its own for all that it computes, which no other graph shares.

What a graph cannot hold stays between graphs, and `graphs_of` has the reason.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...collective import COLLECTIVES, STARTS, WAIT_OP
from ...local_tensor import span_of
from ..ir.host import host_storages
from ..ir.inplace import storages, written
from ..ir.nodes import call, draws, info_of
from ..ir.program import Program
from ..ir.strides import is_dense
from .segments import Segment, Stretch, with_segments

Tensor = torch.Tensor
aten = torch.ops.aten

COLLECTIVE, DRAWS, CPU_MEMORY = "collectives", "random numbers", "memory of the CPU (learning rate, offload)"
READ_BY_CPU, CUSTOM, ATTENTION = "values that the CPU reads", "custom ops", "attention (its random state is on the CPU)"
MOVING = "writes to memory that moves between steps"
_STAYS = (
    "param",
    "buffer",
    "state",
    "scale",
    "accumulator",
    "constant",
)  # kinds of inputs whose memory stays from step to step
_READ = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_MOST = 4  # recordings of a segment; one that needs more has memory that moves at each step


class CUDARecording:
    """A CUDA graph of one call of a function, and the tensors that it gives, which each replay fills again."""

    def __init__(self, fn: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads run other ranks
            self.results = fn(*tensors)

    def replay(self) -> None:
        """Compute again, from what is in the memory that was recorded."""
        self.graph.replay()


class GraphSegment(Segment):
    """A segment that is replayed as a CUDA graph.

    Args:
        in_place: of each tensor that it reads, whether the graph reads it where it is.
    """

    recording: Callable[..., Any] = CUDARecording  # the tests have one for tensors of the CPU

    def __init__(self, module: fx.GraphModule, name: str, in_place: Sequence[bool]) -> None:
        super().__init__(module, name)
        self.in_place = tuple(in_place)
        self.recorded = -1  # times; before the first call -1
        self._recording: Any = None
        self._inputs: list[Tensor] = []
        self._addresses: list[int] = []

    def __call__(self, *tensors: Tensor) -> Any:
        """The tensors that leave the stretch: valid until the next call."""
        addresses = [t.data_ptr() for t, stays in zip(tensors, self.in_place, strict=True) if stays]
        if self.recorded < 0:
            self.recorded = 0
            return self.module(*tensors)
        if self._recording is None or addresses != self._addresses:
            self._recording, self._inputs = None, []
            if self.recorded == _MOST:
                return self.module(*tensors)
            self.recorded, self._addresses = self.recorded + 1, addresses
            self._inputs = [t if stays else _memory_like(t) for t, stays in zip(tensors, self.in_place, strict=True)]
            self._recording = self.recording(self.module, self._inputs)
        for mine, t, stays in zip(self._inputs, tensors, self.in_place, strict=True):
            if not stays:
                _copy(mine, t)
        self._recording.replay()
        return self._recording.results


@dataclass
class CUDAGraphs:
    """Which ops of a program go into CUDA graphs.

    Attributes:
        program: the program with a call of a segment for each graph.
        ops: how many ops are in graphs; ``left``: reasons of the others, and their numbers.
    """

    program: Program
    ops: int = 0
    left: Counter[str] = field(default_factory=Counter)

    @property
    def segments(self) -> list[GraphSegment]:
        """The graphs, in order."""
        return [n.target for n in self.program.graph.nodes if isinstance(n.target, GraphSegment)]

    def __str__(self) -> str:
        left = ", ".join(f"{n} {reason}" for reason, n in sorted(self.left.items()))
        return f"{self.ops} ops in {len(self.segments)} CUDA graphs" + (f"; outside: {left}" if left else "")


class _Chooser:
    """The choice of ops, in the order of a program.

    Attributes:
        stays: storages at the same address in each step; ``rewritten``: those that some op writes to.
        created: storages of the stretch that is being put together, which nothing outside of it has yet.
    """

    def __init__(self, program: Program) -> None:
        self.left = Counter[str]()
        self.ops, self.device = 0, program.mesh.device
        inputs = list(zip(program.placeholders, program.inputs, strict=True))
        constants = {name for name, t in program.constants.items() if t.device.type != self.device}
        elsewhere = [n for n, i in inputs if i.kind == "hyper" or (i.kind == "constant" and i.name in constants)]
        self.on_cpu = host_storages(program) | {s for n in elsewhere for s in storages(n)}
        self.stays = {s for n, i in inputs if i.kind in _STAYS for s in storages(n)} - self.on_cpu
        self.rewritten = {s for n in program.graph.nodes for s in written(n)}
        self.created: set[int] = set()

    def takes(self, node: fx.Node, before: Sequence[fx.Node]) -> bool:
        """Whether a graph takes an op; counts the reason if not."""
        self.created = self.created if before else set()
        reason = self.reason(node)
        if reason:
            self.left[reason] += 1
        else:
            self.created |= set(storages(node)) - {s for n in node.all_input_nodes for s in storages(n)}
        return not reason

    def reason(self, node: fx.Node) -> str:
        """Why an op cannot be in a graph; empty if it can."""
        target = node.target
        if target in COLLECTIVES or target in STARTS.values() or target is WAIT_OP:
            return COLLECTIVE
        if not isinstance(target, compat.OpOverload):
            return CUSTOM
        if draws(node):
            return DRAWS
        near = {s for n in (node, *node.all_input_nodes) for s in storages(n)}
        device: Any = node.kwargs.get("device") or self.device
        if not near.isdisjoint(self.on_cpu) or torch.device(device).type != self.device:
            return CPU_MEMORY
        if any(tag in target.tags for tag in _READ):
            return READ_BY_CPU
        if target.namespace != "aten":
            return CUSTOM
        if "attention" in str(target):
            return ATTENTION
        return MOVING if written(node) - self.created - self.stays else ""

    def segment(self, stretch: Stretch, name: str) -> Segment | None:
        """The graph of a stretch; None where it would give a view of memory that moves and that others write to."""
        in_place = [self.stays.issuperset(storages(n)) for n in stretch.reads]
        moving = {s for n, stays in zip(stretch.reads, in_place, strict=True) if not stays for s in storages(n)}
        gives = {s for n in stretch.gives for s in storages(n)}
        if not (gives & moving).isdisjoint(self.rewritten):
            self.left[MOVING] += len(stretch.nodes)
            return None
        self.stays |= gives - moving
        self.ops += sum(n.target is not operator.getitem for n in stretch.nodes)
        return GraphSegment(stretch.module(), name, in_place)


def graphs_of(program: Program) -> CUDAGraphs:
    """A program whose local ops run in CUDA graphs, as far as they can.

    What leaves the program from the memory of a graph is copied: the next replay overwrites that memory.
    """
    choice = _Chooser(program)
    held = frozenset(choice.stays)
    changed = with_segments(program, choice.takes, choice.segment)
    (output,) = changed.graph.find_nodes(op="output")
    of_graphs = {s for n in changed.graph.nodes if isinstance(n.target, GraphSegment) for s in storages(n)} - held
    copies: dict[fx.Node, fx.Node] = {}
    with changed.graph.inserting_before(output):
        for node in dict.fromkeys(changed.results):
            if not of_graphs.isdisjoint(storages(node)):
                copies[node] = call(changed.graph, aten.clone.default, (node,), info_of(node))
    output.args = (tuple(copies.get(n, n) for n in changed.results),)
    return CUDAGraphs(changed, choice.ops, choice.left)


def with_cuda_graphs(program: Program) -> Program:
    """The program with each stretch of local ops as one CUDA graph."""
    return graphs_of(program).program


def _memory_like(t: Tensor) -> Tensor:
    """Memory for a copy, with the same strides."""
    if is_dense(t.shape, t.stride(), gaps=True):
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return t.new_empty(span_of(t)).as_strided(t.shape, t.stride())


def _copy(into: Tensor, t: Tensor) -> None:
    """Copy a tensor into memory like its own, several of whose elements may share a place."""
    if is_dense(t.shape, t.stride(), gaps=True):
        into.copy_(t)
    else:
        flat = (span_of(t),), (1,)
        into.as_strided(*flat).copy_(t.as_strided(*flat))


__all__ = ["CUDAGraphs", "CUDARecording", "GraphSegment", "graphs_of", "with_cuda_graphs"]
