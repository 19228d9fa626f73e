"""What reads the memory of a tensor, or its values below ``__torch_function__``: the global bytes, or a refusal.

A DistTensor says its global shape and holds this rank's part.  Whoever takes an address or a storage and walks it by
that shape would read another rank's share of nothing: so an address is given only where the part is the whole.
Storages stay comparable (tied weights are found by them) and answer nothing else.
"""

from __future__ import annotations

import functools
import math
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import compat, torch_changes
from ..dispatch import Args, FunctionOverride, Kwargs, call_disabled, disabled, map_tensors, op_name, tensors_in
from ..errors import DispatchError
from .dist_tensor import BASE, DistTensor, Numbers, is_part, plain, read, seen, whole

Tensor = torch.Tensor
_enabled = compat.is_torch_function_enabled


def refuse_part(what: str, x: DistTensor, instead: str = "") -> None:
    """Raises DispatchError where ``x`` is more than this rank's memory."""
    if is_part(x._spec):
        raise DispatchError(
            f"{what} would give this rank's memory, which is not the global value of {x._spec!r}: take mw.unshard(x) "
            f"(every rank calls it), or x.to_local() for this rank's part{instead}"
        )


def global_values(a: Any) -> Any:
    """Arguments with plain global values in place of distributed tensors; every rank must call it."""
    return map_tensors(a, lambda t: whole(t) if isinstance(t, DistTensor) else t)


TRACED = (
    "torch.compile and torch.export cannot trace what is done with DistTensors: mw.compile_step(..., "
    'backend="inductor") captures a whole step and compiles what lies between collectives; a compiled function of a '
    "rank's part is given x.to_local().clone(), or is the kernel of a custom op with a rule, which gives it "
    "x.detach(); what is exported, build on one device, with values from mw.unshard"
)


def _compiling() -> bool:
    """Whether Dynamo wants a stand-in for a tensor; one that an exported program holds may be a replicated one.

    Other modules of Dynamo are on the stack of code that it leaves alone, too: of what ``torch.utils.checkpoint`` runs.
    """
    if "torch._dynamo" not in sys.modules or torch.compiler.is_exporting():
        return False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch._dynamo.convert_frame":
        frame = frame.f_back
    return frame is not None


class StorageView:
    """Stands for the storage of a rank's part: it can be told from others, but not read."""

    _SAME = frozenset({"data_ptr", "_cdata", "_weak_ref", "nbytes", "size", "device", "is_cuda", "resizable"})

    def __init__(self, of: DistTensor) -> None:
        self._of = of
        with disabled():
            self._storage = of.untyped_storage()

    def __getattr__(self, name: str) -> Any:
        if name in self._SAME:
            return getattr(self._storage, name)
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "_fix_weakref":  # whoever makes a fake tensor asks for it
            raise DispatchError(TRACED)
        raise _refusal(self._of, f"untyped_storage().{name}")

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: Any) -> Any:
        raise _refusal(self._of, "untyped_storage()[...]")

    def __eq__(self, other: object) -> bool:
        return self._storage is (other._storage if isinstance(other, StorageView) else other)

    def __hash__(self) -> int:
        return hash(self._storage)


def _refusal(x: DistTensor, what: str) -> DispatchError:
    try:
        refuse_part(what, x)
    except DispatchError as error:
        return error
    raise AssertionError(what)


# ---------------------------------------------------------------------------------------------- methods of the tensor

_SAVE = "; to save a model: {name: mw.unshard(t) for name, t in model.state_dict().items()}"


def _address(func: Any, args: Args, kwargs: Kwargs) -> Any:
    refuse_part(f"{func.__name__}()", args[0], _SAVE)
    return call_disabled(func, (), args, kwargs)


def _storage(func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if is_part(x._spec):
        return StorageView(x)
    if _compiling():
        raise DispatchError(TRACED)
    return call_disabled(func, (), args, kwargs)


def _dlpack(func: Any, args: Args, kwargs: Kwargs) -> Any:
    refuse_part("DLPack", args[0])
    return func(plain(args[0]), *args[1:], **kwargs)


def _is_nonzero(func: Any, args: Args, kwargs: Kwargs) -> bool:
    return bool(func(*global_values(args)))


def _is_same_size(func: Any, args: Args, kwargs: Kwargs) -> bool:
    x, y = (*args, *kwargs.values())
    return bool(x.shape == y.shape)


def _type(func: Any, args: Args, kwargs: Kwargs) -> Any:
    wanted = (*args[1:], *kwargs.values())[:1]
    if not wanted:
        return call_disabled(func, (), args, kwargs)
    (kind,) = wanted
    return args[0].to(kind if isinstance(kind, torch.dtype) else torch.empty(0).type(kind).dtype)


def into_plain(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An op that writes to a plain tensor: with global values, on every rank; the tensor stays plain.

    Raises DispatchError for one on the meta device, which has no memory: PyTorch writes nothing, and says nothing.
    """
    if args[0].is_meta and any(isinstance(t, DistTensor) and not t.is_meta for t in tensors_in((args, kwargs))):
        raise DispatchError(
            f"{op_name(func)}: the target, of shape {tuple(args[0].shape)}, is on the meta device, where nothing is "
            "written. Copy the model after mw.shard_module, which gives it memory."
        )
    return func(*global_values(args), **global_values(kwargs))


READERS: dict[str, FunctionOverride] = {
    **dict.fromkeys(("data_ptr", "const_data_ptr", "storage", "_typed_storage"), _address),
    "untyped_storage": _storage,
    "__dlpack__": _dlpack,
    "is_nonzero": _is_nonzero,
    "is_same_size": _is_same_size,
    "type": _type,
}


def _numpy(self: DistTensor, *, force: bool = False) -> Any:
    """The global values as an array, which cannot be written to where it is a copy.  Every rank must call it."""
    made = read(self.detach() if force else self).numpy(force=force)
    if is_part(self._spec):
        made.flags.writeable = False
    return made


def _cuda_array_interface(self: DistTensor) -> Any:
    if self.is_cuda:
        refuse_part("__cuda_array_interface__", self)
    return call_disabled(BASE.__cuda_array_interface__.__get__, (), (self,), {})


DistTensor.numpy = _numpy  # type: ignore[method-assign,assignment]
DistTensor.__cuda_array_interface__ = property(_cuda_array_interface)  # type: ignore[assignment]
DistTensor.itemsize = property(lambda self: self.dtype.itemsize)  # type: ignore[assignment]
DistTensor.nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)  # type: ignore[assignment]


# ------------------------------------------------------------------------------------------------ below torch functions


def _holds(a: Any) -> bool:
    if isinstance(a, DistTensor):
        return True
    if a.__class__ is list or a.__class__ is tuple:
        kinds = set(map(type, a))
        return any(issubclass(k, DistTensor) for k in kinds) or (
            (list in kinds or tuple in kinds) and any(map(_holds, a))
        )
    return False


def _reading(original: Any, name: str) -> Any:
    """A function of PyTorch that reads tensors in C, without asking whose they are, as one that reads global values."""
    first = 1 if name in _METHODS else 0

    @functools.wraps(original)
    def reading(*args: Any, **kwargs: Any) -> Any:
        own = name == "set_" and isinstance(args[0], DistTensor)
        if not _enabled() or not (own or any(map(_holds, args[first:])) or any(map(_holds, kwargs.values()))):
            return original(*args, **kwargs)
        if own:
            return DistTensor.__torch_function__(original, (DistTensor,), args, kwargs)
        if name in _CASTS and args and isinstance(args[0], DistTensor):
            dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            return args[0] if dtype is None else args[0].to(dtype)
        rest, kwargs = map_tensors((args[first:], kwargs), _detached)
        return original(*args[:first], *global_values(rest), **global_values(kwargs))

    return staticmethod(reading) if name == "__new__" else reading


def _detached(t: Tensor) -> Tensor:
    return t.detach() if isinstance(t, DistTensor) else t


_CASTS = ("as_tensor", "asarray")
_METHODS = ("new", "new_tensor", "new_full", "set_", "__new__")
torch_changes.replace(
    *(f"torch.{name}" for name in ("tensor", *_CASTS, "full", "arange", "scalar_tensor", "to_dlpack")),
    *("torch.nested.nested_tensor", "torch.nested.as_nested_tensor", "torch.utils.dlpack.to_dlpack"),
    *(f"torch.Tensor.{name}" for name in _METHODS),
    why="it reads memory in C, where a DistTensor has the part of a rank: it is given global values",
)(_reading)


def _number_of(kernel: Any, keys: Any) -> Callable[[Tensor], Any]:
    """The kernel with which PyTorch reads a tensor as a number, for global numbers.

    Its parser takes a 0-d tensor for a number (``torch.add(x, y, alpha=a)``) without asking whose tensor it is.
    """

    plain_number = kernel.call_boxed

    def read(t: Tensor) -> Any:
        if t.__class__ is not Tensor and isinstance(t, DistTensor) and _enabled() and is_part(t.__dict__["_spec"]):
            return seen(t).item()
        return plain_number(keys, t)

    return read


_READ = "aten::_local_scalar_dense"
_KERNELS: list[Any] = []  # what holds the kernel, which goes with it


@torch_changes.install_when(
    "the first Partial of no dims that has no history",
    "torch.ops.aten._local_scalar_dense",
    why="a DistTensor in the place of a number (alpha=) is read in C: a Partial gives the global number",
)
def _read_numbers() -> None:
    aten = torch.library.Library("aten", "IMPL")
    _KERNELS.append(aten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for device in ("CPU", "CUDA"):
            if compat.dispatch_has_kernel_for_dispatch_key(_READ, device):
                keys = compat.DispatchKeySet(getattr(compat.DispatchKey, device))
                reader = _number_of(torch.library.get_kernel(_READ, device), keys)
                aten.impl(_READ.removeprefix("aten::"), reader, device, allow_override=True)


# Not with the first mesh: a kernel in Python costs each read of a plain number a microsecond.  What has a history (a
# loss) the parser refuses by itself.
Numbers.to_be_read = _read_numbers


def _set_data(self: Tensor, value: Any) -> None:
    """``plain.data = x``: a plain tensor holds global values."""
    if isinstance(value, DistTensor) and _enabled():
        value = plain(whole(value.detach()))
    _data.__set__(self, value)


def _as_subclass(self: Tensor, cls: type[Any]) -> Any:
    if isinstance(self, DistTensor) and _enabled():
        refuse_part("as_subclass()", self)
        self = self.to_local()
    return _cast(self, cls)


# The getter of Tensor.data stays PyTorch's own; a DistTensor has a property of its own.
_data, _cast = BASE.data, BASE.as_subclass


@torch_changes.replace("torch.Tensor.data", why="what is set as .data of a plain tensor is a global value")
def _settable(original: Any, name: str) -> Any:
    return property(_data.__get__, _set_data, _data.__delete__)


@torch_changes.replace("torch.Tensor.as_subclass", why="a DistTensor that is more than this rank's memory is refused")
def _castable(original: Any, name: str) -> Any:
    return functools.wraps(_cast)(_as_subclass)
