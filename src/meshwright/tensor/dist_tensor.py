"""The class ``DistTensor``: the local tensor with its class set and a spec attached.

What it *does* is put in place by the modules beside this one, one for each concern: calls of ops (``calls``,
``methods``), ``.grad`` (``gradients``) and ``backward`` (``autograd``).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch.utils.hooks import RemovableHandle

from .. import collective, compat
from ..collective import refuse_by_hand, sends_objects, silent
from ..dispatch import (
    NO_KWARGS,
    Args,
    Kwargs,
    ask_gradient,
    call_disabled,
    convert_layout,
    disabled,
    gradient_types,
    refresh,
    remember_detached,
    resolve_types,
    tensors_in,
    wanted,
)
from ..errors import LayoutError
from ..layout import (
    NO_MARKS,
    Layout,
    Marks,
    Partial,
    Placement,
    Placements,
    Replicate,
    Spec,
    marked,
    marks_of,
    spec_data,
    spec_from,
)
from ..layout.picture import as_html
from ..local_tensor import bare, data_of, get_grad, moved, same_storage, share_memory
from ..mesh import Mesh, mesh_data, mesh_from
from ..ranks import runtime
from ..resharding import executor, planner
from ..rules.strided import ROW_MAJOR
from .substitutes import itself, unsharded_for_read

Tensor = torch.Tensor

# What answers for the global tensor by its spec, or by calls of ops.
GLOBAL_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "__len__")
GLOBAL_PROPERTIES = ("shape", "ndim", "T", "mT", "H", "mH", "real", "imag")
BASE: Any = Tensor  # its properties as descriptors, to be called with dispatch disabled
_DETACH = Tensor.detach
_GET_REQUIRES = BASE.requires_grad.__get__
_GET_GRAD_FN = BASE.grad_fn.__get__
_GET_DATA = BASE.data.__get__
_SET_DATA = BASE.data.__set__


class DistTensor(torch.Tensor):
    """A tensor that is sharded over a mesh. It behaves as the global tensor and holds this rank's shard.

    Create one with `shard_tensor`, `from_local` or `sharded`. Every op on a DistTensor returns DistTensors.

    DTensor: `DTensor`.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def double():
            x = mw.shard_tensor(torch.arange(6.0).view(3, 2), mesh, {"dp": mw.Shard(0)})
            y = (x * 2).sum(1)
            return tuple(y.shape), tuple(y.to_local().shape), y.placements


        assert mw.simulate(double, mesh) == [((3,), (2,), (mw.Shard(0),)), ((3,), (1,), (mw.Shard(0),))]
        ```
    """

    # The local tensor itself with its class set: dispatch sees it as the plain one for a while (``as_plain``).
    class_set = True
    _spec: Spec
    grad: DistTensor | None  # the property is in gradients

    def __new__(cls, *args: Any, **kwargs: Any) -> DistTensor:
        raise LayoutError(
            "a DistTensor is not made by its class: take mw.shard_tensor(t, mesh, placements), mw.from_local or "
            "mw.sharded"
        )

    # -- what the tensor is -------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """Global shape, dtype and layout."""
        return marked(self._spec, NO_MARKS)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the tensor lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._spec.layout.placements

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec.shape

    def size(self, dim: int | None = None) -> Any:
        """Global size."""
        return self._spec.shape if dim is None else self._spec.shape[dim]

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return self._spec.ndim

    def dim(self) -> int:
        """Number of dims."""
        return self._spec.ndim

    ndimension = dim

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self._spec.shape.numel()

    nelement = numel

    def __len__(self) -> int:
        if not self._spec.ndim:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self._spec.ndim:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    # -- values -------------------------------------------------------------------------------------------

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor that shares memory; differentiable.

        Its gradient must have the layout of this tensor's gradient: whole on each rank where the tensor is
        replicated or Partial, the own shard where it is sharded.
        """
        self = unsharded_for_read(self)
        refresh(self, call_enabled)
        with disabled():
            if self._spec.undecided_mask and self.requires_grad:
                resolve_types(self, self._spec.decided())
            spec = self._spec
            if spec.grad_partial_mask and self.requires_grad and torch.is_grad_enabled():
                # Each rank's gradient would be a part of the sum; what users write for locals gives whole ones.
                return plain(executor.apply(planner.plan(spec, spec.with_(grad_partial_mask=0)).steps, self))
            return self.view_as(self) if self.layout is torch.strided else self.clone()

    def full_tensor(self) -> Tensor:
        """Return the global value as a plain tensor, on every rank.

        A collective: every rank must call it, on one line.  Differentiable.  The result is a copy: later writes to
        this tensor do not change it.

        DTensor: ``DTensor.full_tensor()``.

        Examples:
            ```python
            mesh = mw.Mesh({"dp": 2})
            x = torch.arange(5.0)
            y = mw.simulate(lambda: mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}).full_tensor(), mesh)
            assert torch.equal(y[0], x) and torch.equal(y[1], x)
            ```
        """
        value = read(self)
        with disabled():
            alias = same_storage(value, self)
        return value.clone() if alias else value

    def redistribute(self, placements: Placements, *, order: Any = None) -> DistTensor:
        """Return this tensor in another layout, by the cheapest sequence of collectives.

        A collective wherever data moves: every rank must call it.  Differentiable: the backward moves gradients the
        other way.

        DTensor: ``DTensor.redistribute(placements=...)``.

        Args:
            placements: axis name to placement.  Axes that are not named keep theirs.
            order: dim to the axes that shard it, major first.

        Raises:
            LayoutError: If a placement does not fit the tensor or the mesh.

        Examples:
            ```python
            mesh = mw.Mesh({"dp": 2})


            def rows_to_columns():
                x = mw.shard_tensor(torch.ones(4, 6), mesh, {"dp": mw.Shard(0)})
                return x.redistribute({"dp": mw.Shard(1)}).to_local().shape


            assert mw.simulate(rows_to_columns, mesh) == [(4, 3), (4, 3)]
            ```
        """
        target = wanted(self._spec, placements, order)
        if target is self._spec:
            return self
        refresh(self, call_enabled)
        with disabled():
            return cast(DistTensor, convert_layout(self, target, wrap))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self._spec
        if any(isinstance(p, Partial) for p in spec.layout.placements):
            local, what = seen(self), "reduced value"
        else:
            local, what = self.to_local().detach(), "value" if spec.layout.is_replicated() else "local part"
        return f"DistTensor({what}={local!r}, shape={tuple(spec.shape)}, layout={spec.layout!r})"

    def __str__(self) -> str:
        return self.__repr__()

    def _repr_html_(self) -> str:
        """Which ranks hold which block, for notebooks. Reads no value, so one rank may show it alone."""
        spec = self._spec
        return as_html(spec.layout, tuple(spec.shape), str(spec.dtype).removeprefix("torch."))

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.ndim == 0 and format_spec else str(self), format_spec)

    def item(self) -> Any:
        """The one value as a Python number.  A Partial is reduced first: every rank must call it."""
        return seen(self).item()

    def tolist(self) -> Any:
        """The global values as nested lists.  Every rank must call it."""
        return seen(self).tolist()

    def __bool__(self) -> bool:
        return bool(seen(self))

    def __float__(self) -> float:
        return float(seen(self))

    def __int__(self) -> int:
        return int(seen(self))

    def __index__(self) -> int:
        return seen(self).__index__()

    def __complex__(self) -> complex:
        return complex(seen(self))

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any())

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if id(self) in memo:
            return cast(DistTensor, memo[id(self)])
        refresh(self, call_enabled)
        with disabled():
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors can be deep-copied; use .detach().clone()")
            marks = Marks(stored=marks_of(self._spec).stored)
            made = wrap(Tensor.clone(Tensor.detach(self)), marked(self._spec, marks))
            made.requires_grad_(self.requires_grad)
            grad = None if getattr(self, "_is_param", False) else self.grad  # as torch: a copy of a parameter has none
            if grad is not None:
                made.grad = wrap(Tensor.clone(Tensor.detach(grad)), grad._spec)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_part(self._spec):
            if sends_objects():
                refuse_by_hand("an object collective", self._spec)
            warnings.warn(_PICKLED, stacklevel=2)  # a rank does not know what the others do, and the file is kept
        refresh(self, call_enabled)
        local = bare(self)
        spec = self._spec
        about = {
            "mesh": mesh_data(spec.mesh),
            "spec": spec_data(spec),
            "rank": runtime.RT.rank,
            "world": runtime.RT.world,
            "requires_grad": self.requires_grad,
            "parameter": getattr(self, "_is_param", False),
        }
        return _rebuild, (local, about)

    # -- gradients ----------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for this tensor."""
        return cast(bool, call_disabled(_GET_REQUIRES, (), (self,), NO_KWARGS))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with disabled():
            self.requires_grad_(value)

    @property
    def data(self) -> DistTensor:
        """The tensor without its history, sharing memory (autograd does not count writes to one for the other)."""
        itself(self)
        spec = self._spec
        typed = spec.with_(undecided_mask=spec.mesh.everywhere)
        with disabled():
            data = data_of(self)
        made = wrap(data, marked(typed, Marks(copied=marks_of(spec).copied)))
        remember_detached(self, made)
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        old = self._spec
        if not isinstance(value, DistTensor):
            value = as_layout_of(value, _resized(old, value.shape))
        elif _keeps_layout(self) and value._spec.layout != old.layout and value._spec.shape == old.shape:
            value = wrap(local_of(value.detach(), old.with_(grad_partial_mask=0)), old.with_(dtype=value.dtype))
        with disabled():
            _SET_DATA(self, value)
        moved(self)
        self.__dict__.pop("_memo", None)
        self.__dict__.pop(ROW_MAJOR, None)
        share_memory(self)
        typed = value._spec.with_(grad_partial_mask=old.grad_partial_mask, undecided_mask=old.undecided_mask)
        self._spec = marked(typed, Marks(stored=marks_of(old).stored))  # other memory: a view of nothing any more
        if not typed.shape:
            on_scalar_created(self)

    def detach(self) -> DistTensor:
        """The tensor without its history, sharing memory.

        It has no type yet: what is made a leaf of it starts undecided.  A method and not an op, because code that
        runs inside native ops (checkpoints) detaches what they save and compares the shapes.
        """
        made = _detached(self)
        if not made._spec.shape:
            on_scalar_created(made)
        return made

    def register_hook(self, hook: Callable[[DistTensor], DistTensor | None]) -> Any:
        """``hook(grad)`` with the gradient as a DistTensor; it may return another one of any layout."""
        self._spec.grad()  # complain now
        refresh(self, call_enabled)  # else a write to what it is a view of takes its place, and the hook with it
        ask_gradient(self)
        with disabled():
            return compat.add_hook(self, GradientHook(self, hook))

    def retain_grad(self) -> None:
        """Have ``.grad`` of a value that is no leaf after a backward."""
        ask_gradient(self)
        with disabled():
            Tensor.retain_grad(self)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DistTensor], None]) -> Any:
        """``hook(tensor)`` after the gradient was accumulated into ``tensor.grad``, and synchronised there."""
        with disabled():
            if "_after" not in self.__dict__:
                return Tensor.register_post_accumulate_grad_hook(self, hook)
            handle = RemovableHandle(self.__dict__["_after"])
            self.__dict__["_after"][handle.id] = hook
            return handle

    # -- properties of torch.Tensor that are ops ----------------------------------------------------------

    @property
    def T(self) -> Any:  # type: ignore[override]
        """All dims reversed."""
        return self.permute(*range(self.ndim - 1, -1, -1))

    @property
    def mT(self) -> Any:  # type: ignore[override]
        """The last two dims exchanged."""
        return self.transpose(-2, -1)

    @property
    def H(self) -> Any:  # type: ignore[override]
        """Conjugate transpose of a matrix."""
        return self.transpose(0, 1).conj() if self.ndim else self.conj()

    @property
    def mH(self) -> Any:  # type: ignore[override]
        """Conjugate transpose of the last two dims."""
        return self.transpose(-2, -1).conj()

    @property
    def real(self) -> Any:  # type: ignore[override]
        """Real part."""
        return torch.real(self)

    @property
    def imag(self) -> Any:  # type: ignore[override]
        """Imaginary part."""
        return torch.imag(self)


class GradientHook:
    """A user's hook on the gradient of a tensor, as autograd calls it, with a local gradient.

    It knows the types of the tensor and not the tensor, which holds it: a cycle through C++ is never collected.
    """

    def __init__(self, of: Tensor, hook: Callable[[DistTensor], DistTensor | None]) -> None:
        self.types, self.hook = gradient_types(of), hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        spec = cast(Spec, self.types()).grad().with_(dtype=grad.dtype)
        with disabled():
            given = wrap(grad.view_as(grad), spec)
        if grad.device.type == spec.mesh.device:
            return self._called(given, spec)
        with silent(_BESIDE):  # autograd calls it in another thread than what the device computes, which sends
            return self._called(given, spec)

    def _called(self, given: DistTensor, spec: Spec) -> Tensor | None:
        made = self.hook(given)
        return None if made is None else plain(local_of(made, spec.with_(dtype=made.dtype)))


_BESIDE = (
    "a hook of p.register_hook, of a parameter that is stored on the host, runs beside the backward of the device and "
    "cannot communicate: p.register_post_accumulate_grad_hook may, which is called when gradients are synchronised"
)


def call_enabled(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A call on distributed tensors, from where dispatch may be disabled."""
    with compat.EnableTorchFunction():
        return func(*args, **kwargs)


def wrap(local: Tensor, spec: Spec) -> DistTensor:
    """Make ``local`` the DistTensor of ``spec``, in place: the object stays the same."""
    if local.dtype is not spec.dtype and type(local) is Tensor:
        spec = marked(spec.with_(dtype=local.dtype), marks_of(spec))
    local.__class__ = DistTensor
    made = cast(DistTensor, local)
    made._spec = spec
    if not spec.shape:
        on_scalar_created(made)
    return made


def _detached(t: DistTensor) -> DistTensor:
    itself(t)
    marks = Marks(copied=marks_of(t._spec).copied)
    made: DistTensor = call_disabled(_DETACH, (), (t,), NO_KWARGS)
    made.__class__ = DistTensor
    made._spec = marked(t._spec.untyped(), marks)
    remember_detached(t, made)
    return made


class Numbers(threading.local):
    """What PyTorch's C code may take for a number: a tensor of no dims without history."""

    to_be_read: ClassVar[Callable[[], None] | None] = None  # told of the first part of one, before anybody has it
    unseen = False  # what this thread makes is on the way to what is given


_NUMBERS = Numbers()


def on_scalar_created(t: DistTensor) -> None:
    """A tensor of no dims was made, or has lost its history."""
    told = Numbers.to_be_read
    if (
        told is None
        or _NUMBERS.unseen
        or not is_part(t._spec)
        or call_disabled(_GET_GRAD_FN, (), (t,), NO_KWARGS) is not None
    ):
        return
    told()
    Numbers.to_be_read = None


def compute(fn: Any, args: Args, kwargs: Kwargs) -> Any:
    """:func:`call_enabled` of what computes an op by other calls."""
    if Numbers.to_be_read is None or _NUMBERS.unseen:
        return call_enabled(fn, args, kwargs)
    _NUMBERS.unseen = True
    try:
        made = call_enabled(fn, args, kwargs)
    finally:
        _NUMBERS.unseen = False
    for t in tensors_in(made):
        if isinstance(t, DistTensor) and not t._spec.shape:
            on_scalar_created(t)
    return made


def plain(t: Tensor) -> Tensor:
    """The local tensor of a distributed one as a plain alias, in the same graph."""
    if not isinstance(t, DistTensor):
        return t
    with disabled():
        return t.view_as(t)


def raw_grad(t: Tensor) -> Tensor | None:
    """What autograd's slot for the gradient holds."""
    return cast("Tensor | None", call_disabled(get_grad, (), (t,), NO_KWARGS))


_PICKLED = (
    "torch.save or pickle was given DistTensors of which each rank holds a part: the file has this rank's alone, which "
    "the same rank of the same mesh can load and no other process. To save a model use mw.save_weights(model, folder) "
    "or mw.Checkpoints, or save {name: mw.unshard(t) for name, t in model.state_dict().items()}, which every rank makes"
)


def _rebuild(local: Tensor, about: dict[str, Any]) -> DistTensor:
    """The tensor that a rank saved or sent.  Raises LayoutError on another rank, whose part it is not."""
    spec = spec_from(about["spec"], mesh_from(about["mesh"]))
    here, there = (runtime.RT.rank, runtime.RT.world), (about["rank"], about["world"])
    if here != there and is_part(spec):
        raise LayoutError(
            f"this is the part that rank {there[0]} of {there[1]} holds of {spec!r} on {spec.mesh!r}, and here is rank "
            f"{here[0]} of {here[1]}: each rank saves and loads a file of its own, after mw.init_mesh; for one file "
            "save global values, mw.unshard(x) on every rank, and bring what was loaded back with mw.shard_tensor or "
            "load_state_dict"
        )
    made = wrap(local, spec)
    made.requires_grad_(about["requires_grad"])
    if about["parameter"]:
        made._is_param = True
    return made


# What torch.load(weights_only=True) may call: it gets a tensor, and otherwise only dicts, lists, words and numbers.
torch.serialization.add_safe_globals([_rebuild])


def is_part(spec: Spec) -> bool:
    """Whether what a rank holds is not the global value, on any rank."""
    layout = spec.layout
    return any(n > 1 and not isinstance(p, Replicate) for n, p in zip(spec.mesh.sizes, layout.placements, strict=True))


# ---------------------------------------------------------------------------------------------- values


def _keeps_layout(t: DistTensor) -> bool:
    """Whether others count on the layout of ``t``: an optimizer's states, and graphs that will add to its gradient."""
    return marks_of(t._spec).stored or t.requires_grad or getattr(t, "_is_param", False)


def _resized(spec: Spec, shape: torch.Size) -> Spec:
    """The same placements for global values of another shape; a rank's part is no such shape."""
    if len(shape) != spec.ndim or any(spec.local_shape(c) == tuple(shape) for c in spec.mesh.coordinates()):
        return spec
    return Spec(shape, spec.dtype, spec.layout, accumulate_dtype=spec.accumulate_dtype)


def local_of(value: Tensor, spec: Spec) -> Tensor:
    """Local part of ``value`` brought to the types of ``spec``."""
    if not isinstance(value, DistTensor):
        value = as_layout_of(value, spec)
    itself(value)
    refresh(value, call_enabled)
    with disabled():
        source = value._spec.decided()
        if value.requires_grad:
            resolve_types(value, source)
        return executor.apply(planner.plan(source, spec.with_(dtype=source.dtype, undecided_mask=0)).steps, value)


def as_layout_of(value: Tensor, spec: Spec) -> DistTensor:
    """A plain tensor in the place of a distributed one: a global value (the same everywhere), or a local part."""
    here = spec.mesh.coordinate(runtime.RT.rank)
    if tuple(value.shape) == tuple(spec.shape):
        collective.check_replicated_inputs(
            "what takes the place of a DistTensor", [value], lambda: collective.group(spec.mesh)
        )
        source = Spec(spec.shape, value.dtype, Layout(spec.mesh))
        target = spec.with_(dtype=value.dtype, undecided_mask=0)
        local = executor.apply(planner.plan(source, target).steps, value)
        return wrap(local.detach() if local is value else local, target)
    raise LayoutError(
        f"a plain tensor of shape {tuple(value.shape)} was given for a DistTensor of global shape {tuple(spec.shape)} "
        f"(local {spec.local_shape(here)}); plain tensors stand for global values: use mw.from_local for a local part"
    )


def whole(t: DistTensor) -> Tensor:
    """The global value as a plain tensor, on every rank; differentiable."""
    spec = t._spec
    made = local_of(t, Spec(spec.shape, spec.dtype, Layout(spec.mesh)))
    return t.to_local() if isinstance(made, DistTensor) else made


def seen(t: DistTensor) -> Tensor:
    """The global value where the user's code looks at it."""
    return read(_detached(t))


def read(t: DistTensor) -> Tensor:
    """The global value that the user's code asks for; differentiable.  What ranks read together they read at one place.

    Nothing else tells ``loss.item()`` on one rank from ``accuracy.item()`` on another, or the weights that the first
    rank alone gathers for its log from those that all gather next, of the same shape: it would get a half of each.
    """
    rt, spec = runtime.RT, t._spec
    if spec.layout.is_replicated():
        return whole(t)
    rt.tag = runtime.user_line(exactly=True)
    try:
        if rt.sim is None:  # simulated ranks compare all
            for a, (n, p) in enumerate(zip(spec.mesh.sizes, spec.layout.placements, strict=True)):
                if n == 1 or isinstance(p, Replicate):
                    continue
                group, op = collective.group(spec.mesh, (a,)), getattr(p, "op", "")
                if spec.ndim or not collective.carries_signature(group, spec.dtype, op):
                    collective.compare_progress((), group, f"to read what is read at {rt.tag}")()
        return whole(t)
    finally:
        rt.tag = ""


def local_data(t: Tensor) -> Tensor:
    """The values that this rank has of any tensor: plain, without history, sharing memory."""
    return bare(t) if isinstance(t, DistTensor) else t.detach()
