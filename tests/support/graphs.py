"""Programs written node by node, for what passes do with a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

import meshwright as mw
from meshwright.collective import OPERATORS
from meshwright.collective.graph import mesh_text
from meshwright.layout import Layout, Partial, Replicate, Shard, Spec
from meshwright.program import Program
from meshwright.program.ir.nodes import LINEAR_VIEWS, Value, annotate, is_mutating, value_of
from meshwright.program.ir.program import Input, Output
from meshwright.resharding.record import Record

aten = torch.ops.aten
F64 = torch.float64


class Written:
    """A program of the first rank of a mesh, while it is written.

    Args:
        axes: of the mesh.
        dtype: of all values.
    """

    def __init__(self, axes: dict[str, int], dtype: torch.dtype = F64) -> None:
        self.mesh, self.dtype = mw.Mesh(axes), dtype
        self.graph, self.inputs, self.causes = fx.Graph(), list[Input](), list[Record]()
        self.text, self._storages = mesh_text(self.mesh), 0

    def _new(self, shape: Sequence[int]) -> Value:
        self._storages += 1
        return Value.alone(shape, self.dtype, self._storages)

    def spec(self, shape: Sequence[int], **placements: Any) -> Spec:
        """Of a value of this global shape; axes that are not named replicate it."""
        return Spec(
            tuple(shape), self.dtype, Layout(self.mesh, [placements.get(a, Replicate()) for a in self.mesh.axes])
        )

    def given(self, name: str, *shape: int, kind: str = "param", spec: Spec | None = None) -> fx.Node:
        """An input."""
        node = self.graph.placeholder(name)
        annotate(node, role="input", value=self._new(shape))
        self.inputs.append(Input(name, kind, spec))
        return node

    def op(self, target: Any, *args: Any, shape: Any = None, role: str = "backward", **info: Any) -> fx.Node:
        """A call of an operator; what it gives lies in memory of its own unless the operator says otherwise."""
        node = self.graph.create_node("call_function", target, args, name=_named(target))
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        of = value_of(first)
        assert of is not None
        shape = of.shape if shape is None else shape
        inside = target in LINEAR_VIEWS or is_mutating(node) or target is operator.getitem
        value = Value(tuple(shape), self.dtype, of.storage, of.nbytes) if inside else self._new(shape)
        annotate(node, role=role, value=value, **info)
        return node

    def gradient(self, x: fx.Node, y: fx.Node, name: str, spec: Spec | None = None, **info: Any) -> fx.Node:
        """The product of two matrices, which is the gradient of a parameter."""
        a, b = value_of(x), value_of(y)
        assert a is not None
        assert b is not None
        shape = (a.shape[0], b.shape[1])
        of = spec if spec is not None else self.spec(shape, **{self.mesh.axes[0]: Partial()})
        return self.op(aten.mm.default, x, y, shape=shape, grad_of=((name, of),), **info)

    def sum(self, x: fx.Node, axes: str, op: str = "sum", **info: Any) -> fx.Node:
        """An all-reduce."""
        return self.op(OPERATORS["all_reduce"].default, x, op, axes, self.text, **info)

    def scatter(self, x: fx.Node, axes: str, sizes: list[int], **info: Any) -> fx.Node:
        """A reduce-scatter of the first dim, of which this rank has the first part."""
        value = value_of(x)
        assert value is not None
        shape = (sizes[0], *value.shape[1:])
        return self.op(OPERATORS["reduce_scatter"].default, x, "sum", 0, sizes, 0, axes, self.text, shape=shape, **info)

    def cause(self, *axes: str, shape: tuple[int, ...] = (4, 4)) -> int:
        """The number of a record of a conversion."""
        dst = Layout(self.mesh)
        self.causes.append(Record("op", 0, ("all_reduce",), axes, shape, dst, dst, 1.0, 0.0, "line", "why", "backward"))
        return len(self.causes) - 1

    def update(self, *pairs: tuple[fx.Node, fx.Node]) -> None:
        """An update of parameters from gradients, one after the other."""
        for p, g in pairs:
            self.op(aten.add_.Tensor, p, g, role="optimizer")

    def program(self, *results: fx.Node) -> Program:
        """The program, which gives these."""
        self.graph.output(tuple(results))
        outputs = tuple(Output(f"y{i}", "aux") for i in range(len(results)))
        return Program(self.mesh, 0, self.graph, tuple(self.inputs), outputs, tuple(self.causes))


def lines(program: Program) -> list[str]:
    """The calls of a program: ``"mul_tensor = mul(sum_1, 0.5)"``."""
    return [f"{n.name} = {_named(n.target)}({_args(n.args)})" for n in program.graph.nodes if n.op == "call_function"]


def _named(target: Any) -> str:
    return str(getattr(target, "_overloadpacket", target)).rpartition(".")[2]


def _args(args: Any) -> str:
    return ", ".join(f"[{_args(a)}]" if isinstance(a, (list, tuple)) else str(a) for a in args)


__all__ = ["Shard", "Written", "lines"]
