"""Recording: what runs on fake local tensors becomes the nodes of one flat graph.

A :class:`Recorder` sits below autograd, so the forward, autograd's own backward and what is done to gradients are
recorded alike.  Views and no-ops that repeat are recorded once.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.utils._python_dispatch import TorchDispatchMode

from ... import runtime
from ...collective import COLLECTIVES
from ...errors import CaptureError, ProgramError
from ...record import Record
from ..capture.regions import Path
from .memory import Strides, dense, row_major, unless_row_major

Tensor = torch.Tensor
aten = torch.ops.aten

# The same memory and value: no node is needed.
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default}
_LIFTS = {aten.lift_fresh.default, aten.lift.default}
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    aten.as_strided.default, aten._reshape_alias.default, aten.view_as_real.default,
}  # fmt: skip


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

    def fresh(self, storage: int, dtype: torch.dtype | None = None) -> Value:
        """What an elementwise op makes of it: as it, in memory of its own and without gaps."""
        dtype, given = dtype or self.dtype, self.given and dense(self.shape, self.given)
        return Value(self.shape, dtype, storage, math.prod(self.shape) * dtype.itemsize, given)


class Recorder(TorchDispatchMode):
    """Records every op on fake tensors as a node.

    Args:
        merge: record collectives that repeat once.

    Attributes:
        graph: the graph so far.
        role: of the nodes to come: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        line, source: the user's line and the captured node that the nodes to come serve (in the backward they follow
            from autograd).
        regions: the checkpointed calls that the nodes to come are part of, or are the backward of.
        sync, gather: the parameter whose gradient the nodes to come synchronise, or that they gather, if they do.
        merged: storages that hold the result of several collectives, which were recorded once: none may be written to.
    """

    def __init__(self, merge: bool = True) -> None:
        super().__init__()
        self.merge, self.merged = merge, set[int]()
        self.graph = fx.Graph()
        self.role, self.line, self.source = "forward", "", ""
        self.sync = self.gather = ""
        self.regions: Path = ()
        self.constants: dict[str, Tensor] = {}
        self.causes: list[Record] = []
        self._cause_ids: dict[int, int] = {}
        self._seen: dict[Any, fx.Node] = {}
        self._storages: dict[int, tuple[Any, int]] = {}
        self._first: fx.Node | None = None
        self._starts: list[int] = []  # sequence numbers of autograd at which a captured node began
        self._origins: list[tuple[str, str, Path]] = []

    # -- what is being recorded -----------------------------------------------------------------------

    def begin(self, source: str, line: str, regions: Path = ()) -> None:
        """The nodes to come serve this captured node."""
        self.source, self.line, self.regions = source, line, regions
        runtime.RT.line = line
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._origins.append((source, line, regions))

    def _origin(self) -> tuple[str, str, Path]:
        if self.role != "backward":
            return self.source, self.line, self.regions
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self.source, self.line, self.regions
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._origins[at] if at >= 0 else ("", "", ())

    # -- recording ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _ALIASES:
            known = args[0].__dict__.get("_node")
            if known is not None:
                out.__dict__["_node"] = known
                return out
            if func in _LIFTS:  # a constant of the code (torch.tensor(2.0)) is new in every step
                func = aten.clone.default
        if isinstance(out, Tensor):
            node = self._record(func, args, kwargs, out)
            self.bind(out, node)
        elif isinstance(out, (tuple, list)) and any(isinstance(o, Tensor) for o in out):
            node = self._record(func, args, kwargs, out)
            node.meta.setdefault("value", tuple(self.value(o) if isinstance(o, Tensor) else None for o in out))
            for i, o in enumerate(out):
                if isinstance(o, Tensor):
                    o.__dict__["_node"] = (node, i)
        elif func._schema.is_mutable:
            self._record(func, args, kwargs).meta["value"] = None
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None) -> fx.Node:
        made_args, made_kwargs = self._nodes(args), self._nodes(kwargs)
        key = None
        if func in VIEWS or (func in COLLECTIVES and self.merge):
            key = (func, _frozen(made_args), _frozen(made_kwargs))
            hit = self._seen.get(key)
            if hit is not None:
                return hit
        node = self.emit(func, made_args, made_kwargs)
        if node.meta["role"] == "forward":
            saved = tuple(r for r in node.meta.get("regions", ()) if r.saves(func, args, kwargs, out))
            if saved:
                node.meta["saved"] = saved
        if key is not None:
            self._seen[key] = node
        return node

    def emit(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """A node of the present role, line and cause; its value is to be set."""
        node = self.graph.create_node("call_function", target, args, kwargs or {})
        if is_mutating(node):  # a collective of what was written since is another one; views stay views
            self._seen = {k: n for k, n in self._seen.items() if k[0] not in COLLECTIVES}
        source, line, regions = self._origin()
        cause = runtime.RT.cause
        node.meta.update(role=self.role, line=line, source=source)
        if self.sync:
            node.meta["sync"] = self.sync
        if self.gather:
            node.meta["gather"] = self.gather
        elif regions:  # whether a gathered parameter is kept is said elsewhere
            node.meta["regions"] = regions
        if cause is not None:
            node.meta["cause"] = self._cause(cause)
        return node

    def _cause(self, record: Record) -> int:
        """Number of a record among those of the program."""
        found = self._cause_ids.get(id(record))
        if found is None:
            found = self._cause_ids[id(record)] = len(self.causes)
            self.causes.append(record)
        return found

    def bind(self, t: Tensor, node: fx.Node) -> None:
        """``t`` is what ``node`` gives."""
        t.__dict__["_node"] = node
        if "value" not in node.meta:
            node.meta["value"] = self.value(t)
            return
        storage, known = t.untyped_storage(), value_of(node)
        if known is not None and storage._cdata not in self._storages:  # of a node that was recorded before
            self._storages[storage._cdata] = (storage, known.storage)
            self.merged.add(known.storage)

    def value(self, t: Tensor) -> Value:
        """Shape, dtype and storage of a fake tensor."""
        storage = t.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None:
            known = self._storages[storage._cdata] = (storage, len(self._storages))
        shape = tuple(t.shape)
        return Value(shape, t.dtype, known[1], storage.nbytes(), unless_row_major(shape, tuple(t.stride())))

    def node_of(self, t: Tensor) -> fx.Node:
        """The node that gives ``t``."""
        found = t.__dict__.get("_node")
        if isinstance(found, fx.Node):
            return found
        if found is None:
            return self._constant(t)
        node, i = found
        key = (operator.getitem, node, i)
        item = self._seen.get(key)
        if item is None:
            with self.graph.inserting_after(node):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta.update({k: v for k, v in node.meta.items() if k != "value"})
            item.meta["value"] = node.meta["value"][i]
            self._seen[key] = item
        t.__dict__["_node"] = item
        return item

    def _constant(self, t: Tensor) -> fx.Node:
        if type(t) is not Tensor or t.is_meta:
            raise CaptureError(f"a tensor of shape {tuple(t.shape)} comes from outside the captured step")
        name = f"constant_{len(self.constants)}"
        self.constants[name] = t
        node = self.late_placeholder(name)
        self.bind(t, node)
        return node

    def late_placeholder(self, name: str) -> fx.Node:
        """An input that came up while recording: after the others, before the first op."""
        if self._first is None:
            self._first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        where = self.graph.inserting_before(self._first) if self._first is not None else self.graph.inserting_before()
        with where:
            made = self.graph.placeholder(name)
        made.meta["role"] = "input"
        return made

    def _nodes(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.node_of(a)
        if isinstance(a, tuple):
            return tuple([self._nodes(x) for x in a])
        if isinstance(a, list):
            return [self._nodes(x) for x in a]
        if isinstance(a, dict):
            return {k: self._nodes(v) for k, v in a.items()}
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError("a size that depends on values: a captured program has fixed shapes")
        return a


def _frozen(a: Any) -> Any:
    if isinstance(a, (tuple, list)):
        return tuple([_frozen(x) for x in a])
    if isinstance(a, dict):
        return tuple([(k, _frozen(v)) for k, v in a.items()])
    return a


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


def draws(node: fx.Node) -> bool:
    """Whether a node advances a random generator: the others' numbers depend on it."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def value_of(node: fx.Node) -> Value | None:
    """Shape, dtype and storage of what a node gives; None for several tensors or none."""
    found = node.meta.get("value")
    return found if isinstance(found, Value) else None


def checked_value(node: fx.Node) -> Value:
    """What a node gives.  Raises ProgramError where it is not one tensor."""
    value = value_of(node)
    if value is None:
        raise ProgramError(f"{node.name} is not one tensor")
    return value


def target_name(target: Any) -> str:
    """``aten.mm.default``, ``meshwright.all_reduce.default``, ``operator.getitem``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '').removeprefix('_')}.{getattr(target, '__name__', target)}"
