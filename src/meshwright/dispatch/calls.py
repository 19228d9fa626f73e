"""What is called and with what: names of ops, tensors among arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .. import compat
from ..errors import LayoutError, RuleError
from ..layout import Layout, Spec
from ..mesh import Mesh
from ..operators import INTERNAL
from ..rules import COMPOSITES, RULES, Rule
from ..rules.pointwise import is_pointwise, pointwise_rule
from .binding import Args, Bindings, Kwargs, bind, unread

Tensor = torch.Tensor
NO_KWARGS: Kwargs = {}


disabled = compat.DisableTorchFunctionSubclass
call_disabled = compat.disabled_torch_function_impl

# ---------------------------------------------------------------------------------------------- names of ops

_DUNDER = {
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "invert": "bitwise_not", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    "rrshift": "__rrshift__", "rlshift": "__rlshift__", "radd": "add", "rmul": "mul", "rand": "bitwise_and",
    "ror": "bitwise_or", "rxor": "bitwise_xor",
}  # fmt: skip
_INPLACE_DUNDER = {"iadd", "isub", "imul", "idiv", "itruediv", "iand", "ior", "ixor", "ilshift", "irshift", "imod",
                   "ipow", "ifloordiv"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Op:
    """A function as dispatch sees it: the name of its rule, and whether it writes to its first argument."""

    func: Any
    name: str
    inplace: bool
    python: bool
    pointwise: bool
    rule: Callable[..., Rule | None] | None
    composite: Callable[..., Any] | None
    unread: bool = False

    def binding(self, args: Args, kwargs: Kwargs) -> Bindings | None:
        """How a call with names is brought to the order of the op's schema; None where it is there.

        A call of ``unread`` defaults always is.
        """
        if not kwargs and not self.unread:
            return None
        return bind(self.func, f"{self.name}_" if self.inplace else self.name, args, kwargs)

    @property
    def custom(self) -> bool:
        """Whether its kernel and backward may be Python: these must never meet a DistTensor."""
        return "::" in self.name

    @property
    def turns(self) -> bool:
        """Whether it changes, in place, how what it is given lies in memory, and not the values."""
        return self.inplace and _turns(self.name)


@cache
def _turns(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removesuffix("_") + "_", None)
    return packet is not None and any(torch.Tag.inplace_view in getattr(packet, o).tags for o in packet.overloads())


OPS: dict[Any, Op] = {}


def resolve(func: Callable[..., Any]) -> Op:
    """The op that a function called by the user stands for."""
    found = OPS.get(func)
    if found is None:
        found = OPS[func] = _resolve(func)
    return found


# Methods of which the tensor is not the first argument of the op: rules are written for the op's order.
_SELF_SECOND: dict[Any, Callable[..., Any]] = {
    torch.Tensor.where: lambda x, condition, other: torch.where(condition, x, other),
    torch.Tensor.polygamma: lambda x, n: torch.polygamma(n, x),
}


def _resolve(func: Any) -> Op:
    name = op_name(func)
    python = isinstance(func, types.FunctionType) and func is not torch.Tensor.unflatten  # which calls itself
    inplace = False
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        if bare in _INPLACE_DUNDER:
            bare, inplace = bare[1:], True
        name = _DUNDER.get(bare, bare)
        inplace = inplace or bare == "setitem"
    elif name.endswith("_") and not name.endswith("__"):
        inplace = True
        name = name if name in RULES or name in COMPOSITES else name[:-1]
    if python:
        module = getattr(func, "__module__", "")
        if module == "torch.nn.functional":
            name = "F." + name
        elif module not in ("torch.functional", "torch._tensor", "torch"):
            name = f"{module}.{name}"  # nn.init.normal_ is not Tensor.normal_, torch.masked.sum is not torch.sum
    pointwise = not python and is_pointwise(name)
    return Op(
        func,
        name,
        inplace,
        python,
        pointwise,
        RULES.get(name) or (pointwise_rule if pointwise else None),
        _SELF_SECOND.get(func) or COMPOSITES.get(name),
        isinstance(func, types.BuiltinFunctionType) and unread(func, name),
    )


def op_name(func: Any) -> str:
    """Name of a function: ``"add"`` for ``torch.add``, ``aten.add.Tensor``; ``"lib::op"`` for custom ops."""
    if isinstance(func, compat.OpOverload):
        func = func.overloadpacket
    if isinstance(func, compat.OpOverloadPacket):
        space, _, name = func._qualified_op_name.partition("::")
        return name if space == "aten" else f"{space}::{name}"
    if isinstance(func, compat.CustomOpDef):
        return str(func._qualname)
    return str(getattr(func, "__name__", type(func).__name__))


_SPACES = ("nn.functional.", "special.", "linalg.", "fft.", "F.")


def function_named(name: str) -> Callable[..., Any]:
    """The function that a name stands for: ``"gelu"``, ``"F.cross_entropy"``, ``"linalg.inv"``, ``"ns::op"``.

    A name of ATen has the defaults of ATen: where PyTorch's binding for Python reads others, it is the op itself.

    Raises RuleError if there is none.
    """
    if "::" in name:
        space, _, rest = name.partition("::")
        found = getattr(getattr(torch.ops, space), rest.split(".")[0], None)
    elif name in ("getitem", "setitem"):
        found = getattr(Tensor, f"__{name}__")
    elif name.startswith(_SPACES):
        space, _, rest = name.rpartition(".")
        home: Any = torch.nn.functional if space in ("F", "nn.functional") else getattr(torch, space)
        found = getattr(home, rest, None)
    else:
        if name in INTERNAL:
            return INTERNAL[name]
        homes = (
            torch,
            compat.C_NN,
            Tensor,
            torch.nn.functional,
            torch.special,
            torch.linalg,
            torch.ops.aten,
        )
        there = [getattr(h, name) for h in homes if hasattr(h, name)]
        there = sorted(filter(callable, there), key=lambda f: f is _python_method(name))
        found = there[0] if there else None
        if found is None and hasattr(Tensor, name):
            return _property(name)
    if found is None:
        raise RuleError(f"no function is known by the name {name!r}")
    return getattr(torch.ops.aten, name) if resolve(found).unread else found


def _python_method(name: str) -> Any:
    """A method of Tensor that is written in Python: ``Tensor.index`` is not the op ``index``."""
    found = getattr(Tensor, name, None)
    return found if isinstance(found, types.FunctionType) else None


def _property(name: str) -> Callable[..., Any]:
    def read(x: Tensor) -> Any:
        return getattr(x, name)

    return read


# Questions about the object or its memory, and autograd's own bookkeeping: the same for local and global.
METADATA_METHODS = {
    "is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_pinned", "is_conj", "is_neg", "is_signed",
    "requires_grad_", "storage_offset", "element_size", "get_device", "is_set_to",
    "__hash__", "stride", "dim_order", "is_shared", "share_memory_",
    "has_names", "_is_view", "_backward_hooks", "is_distributed", "is_coalesced",
    "record_stream", "_has_symbolic_sizes_strides", "is_vulkan_available",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------- arguments


def saving() -> Any:
    """The hook of a region that a checkpoint may run again; None outside of one.

    Such a region must find its inputs as its first run found them. Each run has a hook of its own.
    """
    top = compat.top_saved_tensors_default_hooks(True)
    return top[0] if top is not None and not str(top[0].__module__).startswith(_OWN) else None


_OWN = __name__.partition(".")[0]


_LEAVES = {int, bool, float, type(None), str, torch.dtype}  # of arguments: neither tensors nor with any in them


def tensors_in(args: Any) -> list[Tensor]:
    """All tensors among (nested) arguments, in order."""
    found: list[Tensor] = []
    _collect((args,), found)
    return found


def _collect(several: Iterable[Any], found: list[Tensor]) -> None:
    for a in several:
        kind = a.__class__
        if kind in _LEAVES:
            continue
        if isinstance(a, Tensor):
            found.append(a)
        elif kind is tuple or isinstance(a, (tuple, list)):
            _collect(a, found)
        elif isinstance(a, dict):
            _collect(a.values(), found)


def map_tensors(a: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Nested arguments with each tensor replaced, in the order of :func:`tensors_in`."""
    kind = a.__class__
    if kind in _LEAVES:
        return a
    if isinstance(a, Tensor):
        return fn(a)
    if kind is tuple:
        return tuple([map_tensors(x, fn) for x in a])
    if isinstance(a, tuple):
        made = [map_tensors(x, fn) for x in a]
        return type(a)(*made) if hasattr(a, "_fields") else tuple(made)
    if isinstance(a, list):
        return [map_tensors(x, fn) for x in a]
    if isinstance(a, dict):
        return {k: map_tensors(v, fn) for k, v in a.items()}
    return a


def spec_of(t: Tensor, mesh: Mesh) -> Spec:
    """Spec of an argument; a plain tensor counts as replicated."""
    spec = t.__dict__.get("_spec") if hasattr(t, "__dict__") else None
    if spec is not None:
        return spec
    everywhere = mesh.everywhere
    return Spec(t.shape, t.dtype, Layout(mesh), undecided_mask=0 if t.requires_grad else everywhere)


def mesh_of(tensors: Sequence[Tensor], name: str) -> Mesh:
    """The one mesh that distributed arguments live on.  Raises LayoutError where there are two."""
    mesh: Mesh | None = None
    for t in tensors:
        spec = getattr(t, "__dict__", {}).get("_spec")
        if spec is not None:
            if mesh is not None and spec.mesh != mesh:
                raise LayoutError(
                    f"{name}: arguments lie on different meshes, {mesh!r} and {spec.mesh!r}; bring them together with "
                    "mw.shard_tensor(mw.unshard(x), mesh, placements)"
                )
            mesh = spec.mesh
    if mesh is None:
        raise LayoutError(f"{name}: no argument is a DistTensor")
    return mesh
