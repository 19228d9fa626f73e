"""Nodes of a program as lines of Python: what they call, with places for the names of values."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx as fx

from ... import compat
from ...collective import COLLECTIVES, STARTS, WAIT_OP
from ...errors import ProgramError
from ...layout import Layout
from ...mesh import Mesh
from ...operators import KERNELS
from ..ir.nodes import Value, checked_value, info_of, target_name, value_of
from ..ir.program import Program
from ..ir.sizes import Size
from . import helpers
from .bundle import Bundle

Tensor = torch.Tensor
aten = torch.ops.aten

HOLE = "\x00"  # in the code of a statement, for each value that it reads
_SMALL = 64  # bytes of an all-reduce that gloo ranks gather and add in their order
_MANY = 4  # tensors of a list that is written by names
_STATES = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"}
_SUMMED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}
_METHODS = {
    *("t", "view", "expand", "permute", "unsqueeze", "squeeze", "transpose", "select", "clone", "detach", "unbind"),
}
_METHODS_OF = {  # an overload that a method of the same name calls
    ("copy_", "default"), ("as_strided", "default"), ("addcmul_", "default"), ("add_", "Tensor"), ("mul_", "Tensor"),
    ("masked_fill", "Scalar"),
}  # fmt: skip
_FUNCTIONS = {
    *(
        "tanh",
        "relu",
        "sigmoid",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
        "abs",
        "reciprocal",
        "maximum",
        "minimum",
    ),
    *("cat", "stack", "sum", "mean", "where", "addmm", "bmm", "baddbmm", "amax", "amin", "cumsum", "topk", "gather"),
}
_INFIX = {aten.add.Tensor: "+", aten.sub.Tensor: "-", aten.mul.Tensor: "*", aten.div.Tensor: "/", aten.mm.default: "@"}
_INFIX |= {aten.bitwise_and.Tensor: "&", aten.bitwise_or.Tensor: "|"}
for _name, _sign in {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}.items():
    _INFIX |= {getattr(getattr(aten, _name), _kind): _sign for _kind in ("Scalar", "Tensor")}
_PREFIX = {aten.neg.default: "-", aten.bitwise_not.default: "~"}
_DEFAULTS = {"layout": torch.strided, "pin_memory": False}
_OF_TORCH = {"aten", "prims"}  # namespaces of ops that every process has
_OPTIONS = {  # of a collective, the helper's arguments among the options
    "all_reduce": ("op",),
    "all_gather": ("dim", "sizes"),
    "reduce_scatter": ("op", "dim", "sizes"),
    "broadcast": ("src_index",),
    "all_to_all": ("split_dim", "split_sizes", "concat_dim", "concat_sizes"),
    "permute": ("targets",),
    "exchange_rows": ("dim", "table"),
    "gather_rows": ("wanted", "sizes"),
    "scatter_rows": ("wanted", "sizes"),
}
_HELPERS = {"all_to_all": "exchange", "permute": "permute_ranks"}


def sections_of(graph: fx.Graph) -> dict[str, str]:
    """Node of a captured graph to the path and class of its module, ``"layers.0.mlp (MLP)"``."""
    made = {}
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if not stack:
            continue
        path, kind = stack[-1]
        name = kind if isinstance(kind, str) else kind.__name__
        if path and path != "model":
            made[node.name] = f"{path.removeprefix('model.')} ({name.rpartition('.')[2]})"
        else:
            made[node.name] = "loss" if not path else name.rpartition(".")[2]
    return made


def gradient_in_bucket(node: fx.Node) -> fx.Node | None:
    """The gradient that a pass writes to its place in a bucket, of that place and of the copy into it."""
    if node.target is aten.copy_.default and _is_place(node.args[0]):
        return cast(fx.Node, node.args[1])
    if _is_place(node):
        return next((cast(fx.Node, u.args[1]) for u in node.users if u.target is aten.copy_.default), None)
    return None


def is_bucket(node: Any) -> bool:
    """Whether a node is memory for gradients that are reduced together."""
    made = isinstance(node, fx.Node) and node.target in (aten.empty.memory_format, aten.zeros.default)
    return made and info_of(node).role == "backward" and any(u.target is aten.as_strided.default for u in node.users)


def _is_place(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.as_strided.default and is_bucket(node.args[0])


def few_in_order(mesh: Mesh, value: Value, axes: str) -> bool:
    """Whether gloo ranks gather what a sum adds up, and add it in their order; of two ranks both orders are one."""
    ranks = math.prod(mesh.axis_size(a) for a in axes.split(","))
    return mesh.device == "cpu" and ranks > 2 and value.size <= _SMALL and value.dtype in (torch.float32, torch.float64)


@dataclass(frozen=True)
class Statement:
    """One line of a step.

    Attributes:
        node: The node that it computes.
        code: Python, with a `HOLE` for each of `reads`.
        reads: The values that it reads, in order.
        comment: Shape and layout.
        reason: Of a collective, why it runs.
        section: The module and the part of the step that it belongs to.
    """

    node: fx.Node
    code: str
    reads: tuple[fx.Node, ...]
    comment: str = ""
    reason: str = ""
    section: str = ""


@dataclass
class Writer:
    """Turns the nodes of a program into statements, and collects the functions that these call.

    Args:
        sections: Source of a node to the path and class of its module.
        odd: Of nodes whose kernels give other strides than the program has: the names.
    """

    program: Program
    sections: Mapping[str, str]
    bundle: Bundle
    odd: set[str]
    keys: Mapping[fx.Node, str]  # of inputs, in the file of tensors
    groups: dict[str, str]  # axes to the name of their group
    lists: dict[tuple[str, ...], str]  # names of tensors that the update takes together, to the name of their list
    reads: list[fx.Node] = field(default_factory=list)

    def statement(self, node: fx.Node) -> Statement:
        """Of one call."""
        self.reads = []
        code = self._call(node)
        if node.name in self.odd:
            self.bundle.add(helpers.strided)
            code = f"strided({code}, {self._text(tuple(checked_value(node).strides))})"
        gradient = gradient_in_bucket(node)
        info = info_of(node if gradient is None else gradient)
        comment, reason = self._comment(node), self._reason(node)
        return Statement(node, code, tuple(self.reads), comment, reason, self._section(info.role, info.source))

    def _section(self, role: str, source: str) -> str:
        where = self.sections.get(source, "")
        if not where:
            where = {"gradients": "gradients", "update": "optimizer"}.get(source, "")
        return ", ".join(filter(None, (where, role if role != where else "")))

    # -- calls ------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> str:
        target = node.target
        if target in COLLECTIVES:
            return self._collective(node)
        if target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        if target is WAIT_OP:
            return f"{self.bundle.add(helpers.wait)}({self._text(node.args[0])})"
        if isinstance(target, compat.OpOverload):
            if target.namespace == "meshwright":
                return self._own(node, target)
            if target.namespace not in _OF_TORCH:
                return self._custom(node, target)
            return self._aten(node, target)
        raise ProgramError(f"step.to_python: {target_name(target)} has no name in a file")

    def _aten(self, node: fx.Node, target: Any) -> str:
        name, overload = target._schema.name.partition("::")[2], target._overloadname
        plain = not any(isinstance(a, (int, float)) for a in node.args[1:2]) or len(node.args) == 2
        if target in _INFIX and len(node.args) == 2 and not node.kwargs:
            left, right = (self._text(a) for a in node.args)
            return f"{left} {_INFIX[target]} {right}"
        if target in _PREFIX:
            return f"{_PREFIX[target]}{self._text(node.args[0])}"
        args = self._arguments(node)
        if name == "_unsafe_view":
            name = "view"
        method = name in _METHODS and overload in ("default", "int") and plain | (name != "clone")
        if method or ((name, overload) in _METHODS_OF and isinstance(node.args[0], fx.Node)):
            own, *rest = args
            return f"{own}.{name}({', '.join(rest)})"
        if name in _FUNCTIONS and overload in ("default", "Tensor", "dim_IntList", "dim", "self"):
            return f"torch.{name}({', '.join(args)})"
        packet = getattr(getattr(torch.ops, target.namespace), name)
        others = [o for o in packet.overloads() if "out" not in o]
        dotted = f"{target.namespace}.{name}" if len(others) == 1 else f"{target.namespace}.{name}.{overload}"
        return f"{'' if target.namespace == 'aten' else 'torch.ops.'}{dotted}({', '.join(args)})"

    def _own(self, node: fx.Node, target: Any) -> str:
        """A kernel of this package: its source goes into the file."""
        name = target._schema.name.partition("::")[2]
        own: dict[str, Callable[..., Any]] = {
            "laid": helpers.laid, "to_device": helpers.to_device, "to_host": helpers.to_host,
            "keep_one": helpers.keep_one, "row": helpers.row, "pack": helpers.pack, "unpack": helpers.unpack,
        }  # fmt: skip
        kernel = own.get(name) or KERNELS.get(name)
        if kernel is None or not hasattr(kernel, "__name__") or kernel.__name__ == "<lambda>":
            raise ProgramError(
                f"step.to_python: {self._where(node)} uses meshwright.{name}, which has no source to copy"
            )
        try:
            return f"{self.bundle.add(kernel)}({', '.join(self._arguments(node))})"
        except ProgramError as error:
            raise ProgramError(f"{error} ({self._where(node)})") from None

    def _custom(self, node: fx.Node, target: Any) -> str:
        """A custom op of the user or of another package: the source of its function goes into the file."""
        definitions = sys.modules[compat.CustomOpDef.__module__].OPDEFS  # none of an op of C++ or of torch.library.impl
        op = definitions.get(target._schema.name)
        fn = op._init_fn if op is not None and not {*op._backend_fns} - {None} else None
        where, name = self._where(node), target._schema.name
        try:
            if fn is None:
                raise ProgramError(f"step.to_python: {name} is not a torch.library.custom_op with one Python function")
            return f"{self.bundle.add_bare(fn)}({', '.join(self._arguments(node))})"
        except ProgramError as error:
            raise ProgramError(
                f"{error} ({where}). A file that needs only torch cannot call {name}: use ops of PyTorch there, or a "
                "custom op whose function stands at the top of a module and needs only torch"
            ) from None

    def _collective(self, node: fx.Node) -> str:
        kind, started = COLLECTIVES[node.target], node.target in STARTS.values()
        if kind.name not in _OPTIONS:
            raise ProgramError(
                f"step.to_python: {self._where(node)} needs the collective {kind.name}, which has no counterpart in "
                "torch.distributed. Leave out the option that needs it (Precision(grad_comm=, gather=))"
            )
        x, *options, axes, _ = node.args
        named = kind.named(options)
        given: Any = {k: named[k] for k in _OPTIONS[kind.name]}
        value = checked_value(x)
        if "op" in given and (given["op"] not in ("sum", "avg", "max", "min") or value.dtype not in _SUMMED):
            raise ProgramError(
                f"step.to_python: {self._where(node)} reduces {value.dtype} by {given['op']}, which torch.distributed "
                "does not on every backend"
            )
        name = ("start_" if started else "") + _HELPERS.get(kind.name, kind.name)
        if (
            kind.name == "all_reduce"
            and not started
            and given["op"] == "sum"
            and few_in_order(self.program.mesh, value, str(axes))
        ):
            name = "all_reduce_in_order"
        fn: Callable[..., Any] = getattr(helpers, name)
        text = [self._text(a) for a in (x, *given.values())]
        return f"{self.bundle.add(fn)}({', '.join([*text, self.group(str(axes))])})"

    def group(self, axes: str) -> str:
        """The name of the group over these axes, ``"dp,tp"``."""
        return self.groups.setdefault(axes, re.sub(r"\W", "_", axes).upper())

    def _where(self, node: fx.Node) -> str:
        return info_of(node).line or info_of(node).source or node.name

    # -- arguments --------------------------------------------------------------------------------------

    def _arguments(self, node: fx.Node) -> list[str]:
        return [self._text(a) for a in node.args] + [
            f"{k}={self._text(v)}" for k, v in node.kwargs.items() if k not in _DEFAULTS or v != _DEFAULTS[k]
        ]

    def _text(self, a: Any) -> str:
        """An argument as source."""
        if isinstance(a, fx.Node):
            self.reads.append(a)
            return HOLE
        if isinstance(a, list) and len(a) >= _MANY and all(x in self.keys for x in a):
            return self._listed([self.keys[x] for x in a])
        if isinstance(a, (tuple, list)):
            inner = ", ".join(self._text(x) for x in a)
            return f"[{inner}]" if isinstance(a, list) else f"({inner}{',' if len(a) == 1 else ''})"
        if isinstance(a, Size):
            return repr(int(a))
        if type(a) is str and '"' not in a and a.isprintable():
            return f'"{a}"'
        if a is None or type(a) in (bool, int, str):
            return repr(a)
        if isinstance(a, float):
            return repr(a) if math.isfinite(a) else f'float("{a}")'
        if isinstance(a, torch.device):
            return f'"{a}"' if a.type == "cpu" else "DEVICE"
        if isinstance(a, (torch.dtype, torch.layout, torch.memory_format)):
            return str(a)
        raise ProgramError(f"step.to_python: {a!r} has no name in a file")

    def _listed(self, keys: list[str]) -> str:
        """Many tensors by their names, of which the file has one list for parameters, states and sums."""
        ends = {key.rpartition(".")[2] for key in keys}
        end = f".{next(iter(ends))}" if len(ends) == 1 else ""
        if end:
            bare = tuple(key.removesuffix(end) for key in keys)
            if bare in self.lists or end.removeprefix(".") in _STATES:
                name = self.lists.setdefault(bare, f"NAMES_{len(self.lists)}")
                return f'[w[f"{{name}}{end}"] for name in {name}]'
        name = self.lists.setdefault(tuple(keys), f"NAMES_{len(self.lists)}")
        return f"[w[name] for name in {name}]"

    # -- comments ---------------------------------------------------------------------------------------

    def _comment(self, node: fx.Node) -> str:
        value, info = value_of(node), info_of(node)
        words = [] if value is None else [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
        if info.spec is not None:
            words.append(repr(info.spec.layout))
        return " ".join(words)

    def _reason(self, node: fx.Node) -> str:
        cause = self.program.cause(node)
        if cause is None or node.target not in COLLECTIVES:
            return ""
        reason = re.sub(r" \([^()]*->[^()]*\)$", "", cause.reason.partition("; ")[0])  # the op's rule
        return f"{_changes(cause.src, cause.dst)}: {reason}"


def _changes(src: Any, dst: Any) -> str:
    """The axes of two layouts whose placements differ: ``tp: Partial() -> Replicate()``."""
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        return f"{src} -> {dst}"
    pairs = zip(src.mesh.axes, src.placements, dst.placements, strict=True)
    return ", ".join(f"{axis}: {a} -> {b}" for axis, a, b in pairs if a != b) or f"{src} -> {dst}"


__all__ = ["HOLE", "Statement", "Writer", "sections_of"]
