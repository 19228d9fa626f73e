"""Recording: what runs on fake local tensors becomes the nodes of one flat graph.

A :class:`Recorder` sits below autograd, so the forward, autograd's own backward and what is done to gradients are
recorded alike.  Views and no-ops that repeat are recorded once.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...collective import COLLECTIVES
from ...compat import TorchDispatchMode
from ...errors import CaptureError
from ...ranks import runtime
from ...resharding.record import Record
from .inplace import counterpart
from .nodes import VIEWS, NodeInfo, Value, annotate, info_of, is_mutating, value_of
from .regions import Path
from .strides import unless_row_major

Tensor = torch.Tensor
aten = torch.ops.aten

# The same memory and value: no node is needed.
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default}
_LIFTS = {aten.lift_fresh.default, aten.lift.default}
_DEVICE = torch.ops.prim.device.default


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
        merged: storages that hold the result of several collectives, which were recorded once: none may be written to.
    """

    def __init__(self, merge: bool = True) -> None:
        super().__init__()
        self.merge, self.merged = merge, set[int]()
        self.graph = fx.Graph()
        self.role, self.line, self.source = "forward", "", ""
        self._notes: dict[str, Any] = {}
        self.regions: Path = ()
        self.constants: dict[str, Tensor] = {}
        self.causes: list[Record] = []
        self._cause_ids: dict[int, int] = {}
        self._seen: dict[Any, fx.Node] = {}
        self._sent: dict[Any, fx.Node] = {}  # the same of collectives, since the last write
        self._storages: dict[int, tuple[Any, int]] = {}
        self._first: fx.Node | None = None
        self._starts: list[int] = []  # sequence numbers of autograd at which a captured node began
        self._origins: list[tuple[str, str, Path]] = []

    def __enter__(self) -> Any:
        # Recurrent layers of the CPU in single precision would be one kernel, of which fakes know too little.
        mkldnn: Any = torch.backends.mkldnn
        self._without = mkldnn.flags(enabled=False, deterministic=mkldnn.deterministic, allow_tf32=mkldnn.allow_tf32)
        self._without.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        super().__exit__(kind, error, at)
        self._without.__exit__(kind, error, at)

    # -- what is being recorded -----------------------------------------------------------------------

    def begin(self, source: str, line: str, regions: Path = ()) -> None:
        """The nodes to come serve this captured node."""
        self.source, self.line, self.regions = source, line, regions
        runtime.RT.line = line
        self._starts.append(compat.get_sequence_nr())
        self._origins.append((source, line, regions))

    @contextmanager
    def noting(self, **notes: Any) -> Iterator[None]:
        """Inside, nodes say this besides: ``sync`` or ``gather``, and of which parameter."""
        self._notes = notes
        try:
            yield
        finally:
            self._notes = {}

    def _origin(self) -> tuple[str, str, Path]:
        if self.role != "backward":
            return self.source, self.line, self.regions
        node: Any = compat.current_autograd_node()
        if node is None:
            return self.source, self.line, self.regions
        at = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._origins[at] if at >= 0 else ("", "", ())

    # -- recording ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # ``t.device``, half of all calls: nothing is recorded
        if any(hasattr(t, "__tensor_flatten__") for t in types):  # a class of tensors: what it is made of
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if torch.is_grad_enabled() and not _differentiable(func):
            self._check_cut(func, args, kwargs, out)
        if torch.Tag.inplace_view in func.tags:  # which writes nothing: squeeze_() gives another view from here on
            func = plain if (plain := counterpart(func)) in VIEWS else func
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
            if info_of(node).value is None:
                annotate(node, value=tuple(self.value(o) if isinstance(o, Tensor) else None for o in out))
            for i, o in enumerate(out):
                if isinstance(o, Tensor):
                    o.__dict__["_node"] = (node, i)
        elif func._schema.is_mutable:
            self._record(func, args, kwargs)
        return out

    def _check_cut(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Raises CaptureError where autograd knows nothing of an op, and what it is given would get no gradient: a run
        on values differentiates what its kernel calls, and a recorded one has the op as one node."""
        given = any(isinstance(t, Tensor) and t.requires_grad for t in compat.tree_leaves((args, kwargs)))
        made = [t for t in compat.tree_leaves(out) if isinstance(t, Tensor)]
        if given and (func._schema.is_mutable or any(t.is_floating_point() or t.is_complex() for t in made)):
            error = CaptureError(
                f"{self.line or runtime.user_line()}: {func} has no formula for its gradient, and in a captured step "
                "what it is given would get none through it: give it one (torch.library.register_autograd), or call it "
                "on .detach() or under torch.no_grad()"
            )
            error._located = True  # type: ignore[attr-defined]
            raise error

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None) -> fx.Node:
        made_args, made_kwargs = self._nodes(args), self._nodes(kwargs)
        key, seen = None, self._sent if func in COLLECTIVES else self._seen
        if func in VIEWS or (func in COLLECTIVES and self.merge):
            # What is brought again for the backward is not kept from the forward until then.
            phase = getattr(runtime.RT.cause, "phase", "") if func in COLLECTIVES else ""
            key = (func, _frozen(made_args), _frozen(made_kwargs), phase)
            hit = seen.get(key)
            if hit is not None:
                return hit
        node = self.emit(func, made_args, made_kwargs, self.value(out) if isinstance(out, Tensor) else None)
        info = info_of(node)
        if info.role == "forward" and info.regions:
            annotate(node, saved=tuple(r for r in info.regions if r.saves(func, args, kwargs, out)))
        if key is not None:
            seen[key] = node
        return node

    def emit(self, target: Any, args: Any, kwargs: Any = None, value: Value | None = None) -> fx.Node:
        """A node of the present role, line and cause; without ``value`` what it gives is to be said."""
        node = self.graph.create_node("call_function", target, args, kwargs or {})
        if is_mutating(node):  # a collective of what was written since is another one; views stay views
            self._sent.clear()
        source, line, regions = self._origin()
        cause = runtime.RT.cause
        node.meta["info"] = NodeInfo(
            self.role, line, source, value, cause=None if cause is None else self._cause(cause), **self._notes,
            # Whether a gathered parameter is kept is said elsewhere.
            regions=() if "gather" in self._notes else regions,
        )  # fmt: skip
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
        if info_of(node).value is None:
            annotate(node, value=self.value(t))
            return
        storage, known = t.untyped_storage(), value_of(node)
        if known is not None and storage._cdata not in self._storages:  # of a node that was recorded before
            self._storages[storage._cdata] = (storage, known.storage)
            self.merged.add(known.storage)

    def value(self, t: Tensor) -> Value:
        """Shape, dtype and storage of a fake tensor."""
        if t.layout is not torch.strided:
            raise CaptureError(
                f"{runtime.user_line()}: the step makes a sparse tensor of shape {tuple(t.shape)}, which a captured "
                "step cannot hold: make gradients of embeddings dense (sparse=False), or train eagerly"
            )
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
            info: Any = info_of(node)
            item.meta["info"] = replace(info, value=info.value[i])
            self._seen[key] = item
        t.__dict__["_node"] = item
        return item

    def _constant(self, t: Tensor) -> fx.Node:
        kind = type(t)
        if kind.__module__.partition(".")[0] != "torch":
            raise CaptureError(
                f"a {kind.__name__} of shape {tuple(t.shape)} is a tensor class of {kind.__module__}, whose ops a "
                "captured step cannot record: write what makes it with PyTorch's own ops, or train eagerly "
                "(mw.shard_module)"
            )
        if kind is not Tensor or t.is_meta:
            raise CaptureError(f"a tensor of shape {tuple(t.shape)} comes from outside the captured step")
        name = f"constant_{len(self.constants)}"
        self.constants[name] = t
        node = self.late_placeholder(name)
        self.bind(t, node)
        return node

    def placeholder(self, name: str, t: Tensor) -> fx.Node:
        """An input, and the fake that stands for it."""
        node = self.graph.placeholder(name)
        annotate(node, role="input")
        self.bind(t, node)
        return node

    def late_placeholder(self, name: str) -> fx.Node:
        """An input that came up while recording: after the others, before the first op."""
        if self._first is None:
            self._first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        where = self.graph.inserting_before(self._first) if self._first is not None else self.graph.inserting_before()
        with where:
            made = self.graph.placeholder(name)
        annotate(made, role="input")
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


_DERIVED = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")


@lru_cache(maxsize=4096)
def _differentiable(func: Any) -> bool:
    """Whether autograd knows what to do behind an op, be it to say that there is no gradient."""
    name = func.name()  # what is no op, such as prim::device, the dispatcher does not know
    if not compat.dispatch_has_kernel(name):
        return True
    return any(compat.dispatch_has_kernel_for_dispatch_key(name, k) for k in _DERIVED)


def _frozen(a: Any) -> Any:
    if isinstance(a, (tuple, list)):
        return tuple([_frozen(x) for x in a])
    if isinstance(a, dict):
        return tuple([(k, _frozen(v)) for k, v in a.items()])
    return a
