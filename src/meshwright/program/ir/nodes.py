"""What the nodes of a program say: of which kind they are, what they give, and what they are there for."""

from __future__ import annotations

import contextlib
import gc
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...collective import COLLECTIVES
from ...errors import ProgramError
from ...layout import Spec
from .regions import Path
from .strides import Strides, dense, row_major

aten = torch.ops.aten

# What may be a node and looks at the memory of its first input: all of ATen's views of dense tensors, and _unsafe_view.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.as_strided.default, aten._reshape_alias.default, aten.view_as_real.default, aten.view_as_complex.default,
    aten.diagonal.default, aten.unfold.default, aten.slice_inverse.default, aten._conj.default, aten._neg_view.default,
    aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.view.dtype,
}  # fmt: skip
LINEAR_VIEWS = VIEWS - {aten.view.dtype}  # numbers of another dtype in the same bits


@dataclass(frozen=True, slots=True)
class Value:
    """What a node gives: a local tensor of this shape and dtype in some storage.

    ``storage`` numbers the storages of a program; views share one.  ``nbytes`` is the size of the whole storage.
    ``given`` are its strides where it is not row-major.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    nbytes: int
    given: Strides | None = None

    @property
    def strides(self) -> Strides:
        """How it lies in its storage."""
        return row_major(self.shape) if self.given is None else self.given

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def fresh(self, storage: int, dtype: torch.dtype | None = None) -> Value:
        """What an elementwise op makes of it: as it, in memory of its own and without gaps."""
        return Value.alone(self.shape, dtype or self.dtype, storage, self.given and dense(self.shape, self.given))

    @staticmethod
    def alone(shape: Sequence[int], dtype: torch.dtype, storage: int, given: Strides | None = None) -> Value:
        """Of a tensor that has a storage for itself, without gaps."""
        return Value(tuple(shape), dtype, storage, math.prod(shape) * dtype.itemsize, given)


Values = Value | tuple[Value | None, ...] | None  # of one tensor, of several, of none


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What is known of a node of a program.

    Attributes:
        role: ``"input"``, ``"forward"``, ``"recomputation"``, ``"backward"`` or ``"optimizer"``.
        line: the user's; ``source``: the captured node that it serves.
        value: what it gives.
        cause: the number of the record of the conversion that it belongs to.
        spec: where a value of the user's program ends, how it lies on the mesh.
        grad_of: of a gradient as autograd gave it: names of parameters and the spec of the gradient, Partial on the
            axes over which it is still to be summed.
        gradient_at: of a gradient inside of the user's program: names of the captured nodes whose gradient it is, and
            its spec.
        sync: the parameter whose gradient it synchronises; ``gather``: the parameter that it gathers; ``unit``: those
            that are gathered with it.
        writes: whether it is a write of the user's forward to an input.
        seed: whether it is what a backward starts from; ``transposed``: made by autograd of a linear op.
        regions: while recording, the checkpointed calls that it is part of, from the outside; ``saved``: those whose
            policy keeps what it gives.
        stage: of a step with stages, the one that has it; None for what every stage has, and for the update.
    """

    role: str = ""
    line: str = ""
    source: str = ""
    value: Values = None
    cause: int | None = None
    spec: Spec | None = None
    grad_of: tuple[tuple[str, Spec], ...] = ()
    gradient_at: tuple[tuple[str, Spec], ...] = ()
    sync: str = ""
    gather: str = ""
    unit: str = ""
    writes: bool = False
    seed: bool = False
    transposed: bool = False
    regions: Path = ()
    saved: Path = ()
    stage: int | None = None

    @property
    def values(self) -> Iterator[Value]:
        """The tensors that it gives, one or several."""
        return (v for v in (self.value if isinstance(self.value, tuple) else (self.value,)) if v is not None)

    def beside(self, value: Values = None, sync: str = "") -> NodeInfo:
        """Of a node that is put beside this one, for the same end."""
        return NodeInfo(self.role, self.line, self.source, value, sync=sync)


UPDATE = NodeInfo("optimizer", source="update")  # of what a pass adds to an update
_NOTHING = NodeInfo()
_FIELDS = tuple(f.name for f in fields(NodeInfo))
_fields_of = operator.attrgetter(*_FIELDS)


def info_of(node: fx.Node) -> NodeInfo:
    """What is known of a node."""
    found: NodeInfo = node.meta.get("info", _NOTHING)
    return found


def annotate(node: fx.Node, **changes: Any) -> None:
    """Say this of a node besides, fields of :class:`NodeInfo`."""
    known = dict(zip(_FIELDS, _fields_of(info_of(node)), strict=True))  # a quarter of the time of replace()
    known.update(changes)
    node.meta["info"] = NodeInfo(**known)


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], info: NodeInfo, kwargs: Any = None) -> fx.Node:
    """A call of an operator at the place where the graph inserts."""
    node = graph.call_function(target, args, kwargs)
    node.meta["info"] = info
    return node


def value_of(node: fx.Node) -> Value | None:
    """Shape, dtype and storage of what a node gives; None for several tensors or none."""
    found = info_of(node).value
    return found if isinstance(found, Value) else None


def checked_value(node: Any) -> Value:
    """What a node gives.  Raises ProgramError where it is not one tensor."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if value is None:
        raise ProgramError(f"{getattr(node, 'name', node)} is not one tensor")
    return value


def move_to_storage(node: fx.Node, storage: int) -> None:
    """Note that a node and the views of it have this storage."""
    value = info_of(node).value
    if isinstance(value, Value):
        annotate(node, value=replace(value, storage=storage))
    elif value is not None:
        annotate(node, value=tuple(v and replace(v, storage=storage) for v in value))
    for user in node.users:
        if user.target in VIEWS or user.target is operator.getitem:
            move_to_storage(user, storage)


def target_name(target: Any) -> str:
    """``aten.mm.default``, ``meshwright.all_reduce.default``, ``operator.getitem``."""
    if isinstance(target, compat.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '').removeprefix('_')}.{getattr(target, '__name__', target)}"


# ---------------------------------------------------------------------------------------------- kinds of nodes


def is_mutating(node: fx.Node) -> bool:
    """Whether a node writes to one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def reduces(node: fx.Node) -> bool:
    """Whether a node reduces over ranks, by a sum or otherwise."""
    kind = COLLECTIVES.get(node.target)
    return kind is not None and kind.reduces


def is_sum(node: fx.Node) -> bool:
    """Whether a node sums, or averages, over ranks."""
    return reduces(node) and node.args[1] in ("sum", "avg")


def draws(node: fx.Node) -> bool:
    """Whether a node advances a random generator: the others' numbers depend on it.

    Kernels of attention draw where they drop something only: ``dropout_p`` says so.
    """
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    schema = getattr(target, "_schema", None)
    for i, a in enumerate(() if schema is None else schema.arguments):
        if a.name == "dropout_p":
            return bool((node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)) != 0)
    return True


# ---------------------------------------------------------------------------------------------- graphs


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, no garbage is looked for: all the many nodes that are being made stay, and going through them again and
    again takes a sixth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def remove_dead(graph: fx.Graph) -> None:
    """Remove nodes that nobody uses, that write nothing, draw no random numbers and send nothing.

    A collective stays though this rank does nothing with what it gives: where a shard is empty a rank computes less
    than the others, which wait for it all the same.
    """
    for node in reversed(list(graph.nodes)):
        kept = node.users or is_mutating(node) or draws(node) or node.target in COLLECTIVES
        if node.op == "call_function" and not kept:
            graph.erase_node(node)


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that values are computed from, themselves included."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
