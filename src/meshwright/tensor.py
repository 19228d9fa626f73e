"""DistTensor: a local tensor that knows how it lies on a mesh.

It is the local tensor itself with its class set to ``DistTensor`` and a spec attached: no wrapper, no copy, no alias
node.  Calls are intercepted above autograd (``__torch_function__``), so autograd runs natively on locals; during the
backward only transposed conversions run Python.  Making, moving and reading distributed tensors is in ``api``.
"""

from __future__ import annotations

import contextlib
import functools
import types as _types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import redispatch_function

from . import convert, reshard, runtime
from .dispatch import (
    call_disabled,
    disabled,
    execute,
    execute_swift,
    forget_ops,
    key_part,
    map_tensors,
    op_name,
    plan_call,
    refuse_copy,
    resolve,
    settle,
    settle_after,
    tensors_in,
    warn_gathered,
)
from .errors import DispatchError, LayoutError
from .layout import Layout, Partial, Placement, Replicate, Spec
from .mesh import Mesh

Tensor = torch.Tensor
_NO: dict[str, Any] = {}
_MAX_PLANS = 16384
# Composites over long lists of tensors (torch._foreach_*): no plan, so no key of all their specs either.
LISTED: dict[Any, Callable[..., Any]] = {}


class DistTensor(torch.Tensor):
    """A tensor laid out on a mesh.  Behaves as the global tensor; holds this rank's part.

    Made by ``shard_tensor``, ``from_local``, ``sharded`` and by every op on another DistTensor.
    """

    # The local tensor itself with its class set: dispatch may set it back to Tensor for a while.
    class_set = True
    _spec: Spec

    @staticmethod
    def __torch_function__(
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look up the plan of this call; where it needs nothing, run the native op on locals and stamp the result."""
        key: Any
        if len(args) == 2 and args[0].__class__ is DistTensor and args[1].__class__ is DistTensor:
            key = (func, args[0]._spec, args[1]._spec)
        else:
            if args and args[0].__class__ is list and func in LISTED:
                return LISTED[func](*args, **kwargs or _NO)
            key = (func, *[a._spec if a.__class__ is DistTensor else key_part(a, func) for a in args])
        if kwargs:
            key = (key, *[(k, key_part(v, func)) for k, v in kwargs.items()])
        entry = runtime.RT.fast.get(key)
        if entry is None:
            return _general(key, func, types, args, kwargs or _NO)
        spec, untyped, native = entry
        if untyped == 2 and _any_tied(args):
            return _general(key, func, types, args, kwargs or _NO, typed=False)
        if native is None:
            out = call_disabled(func, types, args, kwargs or _NO)
        else:
            try:
                out = call_disabled(native.fn, types, (args[0], *native.static), _NO)
            except RuntimeError:  # a view that this shard's strides do not allow
                return _general(key, func, types, args, kwargs or _NO)
        if out.__class__ is not Tensor:  # in place, or an op that returned its input
            return out
        if untyped and out.requires_grad:  # leaves get their types now
            return settle_after(runtime.RT.plans[key], args, kwargs, out, stamp)
        if out.dtype is not spec.dtype:  # autocast
            spec = spec.with_(dtype=out.dtype)
        out.__class__ = DistTensor
        out._spec = spec  # type: ignore[attr-defined]
        return out

    # -- what the tensor is -------------------------------------------------------------------------------

    @property
    def spec(self) -> Spec:
        """Global shape, dtype and layout."""
        return self._spec

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How the tensor lies on its mesh (torch's memory layout is always strided here)."""
        return self._spec.layout

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
        with disabled():
            if self._spec.undecided and self.requires_grad:
                settle(self, self._spec.with_(undecided=0))
            spec = self._spec
            if spec.reduced and self.requires_grad and torch.is_grad_enabled():
                # Each rank's gradient would be a part of the sum; what users write for locals gives whole ones.
                return _plain(convert.apply(reshard.plan(spec, spec.with_(reduced=0)).steps, self))
            return self.view_as(self) if _GET_LAYOUT(self) is torch.strided else self.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self._spec
        if any(isinstance(p, Partial) for p in spec.layout.placements):
            local, what = whole(self.detach()), "reduced value"
        else:
            local, what = self.to_local().detach(), "value" if spec.layout.is_replicated() else "local part"
        return f"DistTensor({what}={local!r}, shape={tuple(spec.shape)}, layout={spec.layout!r})"

    def __str__(self) -> str:
        return self.__repr__()

    def __format__(self, format_spec: str) -> str:
        return format(self.item() if self.ndim == 0 and format_spec else str(self), format_spec)

    def item(self) -> Any:
        """The one value as a Python number.  A Partial is reduced first: every rank must call it."""
        return whole(self.detach()).item()

    def tolist(self) -> Any:
        """The global values as nested lists.  Every rank must call it."""
        return whole(self.detach()).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The global values as an array.  Every rank must call it."""
        return whole(self.detach() if force else self).numpy(force=force)

    def __bool__(self) -> bool:
        return bool(whole(self.detach()))

    def __float__(self) -> float:
        return float(whole(self.detach()))

    def __int__(self) -> int:
        return int(whole(self.detach()))

    def __index__(self) -> int:
        return whole(self.detach()).__index__()

    def __complex__(self) -> complex:
        return complex(whole(self.detach()))

    def __contains__(self, element: Any) -> bool:
        return bool((self == element).any())

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if id(self) in memo:
            return cast(DistTensor, memo[id(self)])
        with disabled():
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors can be deep-copied; use .detach().clone()")
            made = stamp(Tensor.clone(Tensor.detach(self)), self._spec.with_(copied=False))
            made.requires_grad_(self.requires_grad)
            grad = _raw_grad(self)
            if grad is not None:
                spec = grad.__dict__.get("_spec", self._spec.grad())
                made.grad = stamp(Tensor.clone(Tensor.detach(grad)), spec)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        with disabled():
            local = Tensor.detach(self)
        local.__class__ = Tensor
        return _rebuild, (local, self._spec, self.requires_grad, getattr(self, "_is_param", False))

    # -- gradients ----------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for this tensor."""
        return cast(bool, call_disabled(_GET_REQUIRES, (), (self,), _NO))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with disabled():
            self.requires_grad_(value)

    @property
    def grad(self) -> DistTensor | None:
        """The gradient so far, in the layout that the backward gave it (Partial before it is synchronised)."""
        found = call_disabled(_GET_GRAD, (), (self,), _NO)
        if found is not None and found.__class__ is not DistTensor:
            stamp(found, self._spec.grad())
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            call_disabled(_SET_GRAD, (), (self, None), _NO)
            return
        if value.__class__ is not DistTensor:
            value = _as_layout_of(value, self._spec)
        own, given = self._spec.grad(), value._spec
        if given.shape != own.shape:
            raise RuntimeError(
                f"assigned grad has shape {tuple(given.shape)}, its tensor has {tuple(own.shape)}: they must be equal"
            )
        call_disabled(_SET_GRAD, (), (self, value), _NO)
        # An undecided leaf may turn out to want another layout of its gradient.
        if given is not own and (given.layout != own.layout or self._spec.undecided) and self.requires_grad:
            _guard_accumulation(self)

    @grad.deleter
    def grad(self) -> None:
        with disabled():
            _SET_GRAD(self, None)

    @property
    def data(self) -> DistTensor:
        """The tensor without its history, sharing memory (writes to one are not counted for the other)."""
        made = stamp(call_disabled(_GET_DATA, (), (self,), _NO), self._spec.with_(undecided=_all(self._spec)))
        _share(self, made)
        return made

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, DistTensor):
            value = _as_layout_of(value, self._spec)
        with disabled():
            _SET_DATA(self, value)
        _share(self, value)
        old = self._spec
        self._spec = value._spec.with_(reduced=old.reduced, undecided=old.undecided)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Gradients of the leaves, as on one device: the global value is what is differentiated."""
        _autograd_backward(None, (), (self, gradient, retain_graph, create_graph, inputs), _NO)

    def detach(self) -> DistTensor:
        """The tensor without its history, sharing memory.

        It has no type yet: what is made a leaf of it starts undecided.  A method and not an op, because code that
        runs inside native ops (checkpoints) detaches what they save and compares the shapes.
        """
        spec = self._spec
        return stamp(call_disabled(_DETACH, (), (self,), _NO), spec.with_(reduced=0, undecided=_all(spec)))

    def register_hook(self, hook: Callable[[DistTensor], DistTensor | None]) -> Any:
        """``hook(grad)`` with the gradient as a DistTensor; it may return another one of any layout."""

        def on_local(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            spec = self._spec.grad().with_(dtype=grad.dtype)
            with disabled():
                given = stamp(grad.view_as(grad), spec)
            made = hook(given)
            return None if made is None else _plain(_local_of(made, spec.with_(dtype=made.dtype)))

        with disabled():
            return Tensor.register_hook(self, on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DistTensor], None]) -> Any:
        """``hook(tensor)`` after the gradient was accumulated into ``tensor.grad``."""
        with disabled():
            return Tensor.register_post_accumulate_grad_hook(self, hook)

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


_DETACH = Tensor.detach
_BASE: Any = Tensor  # its properties as descriptors
_GET_REQUIRES = _BASE.requires_grad.__get__
_GET_GRAD = _BASE.grad.__get__
_SET_GRAD = _BASE.grad.__set__
_GET_DATA = _BASE.data.__get__
_GET_LAYOUT = _BASE.layout.__get__
_SET_DATA = _BASE.data.__set__


def _share(*tensors: Tensor) -> None:
    """These have the same memory and their own version counters: what is converted from them cannot be kept."""
    for t in tensors:
        t.__dict__["_shared"] = True
        t.__dict__.pop("_memo", None)


def _raw_grad(t: Tensor) -> Tensor | None:
    return cast("Tensor | None", call_disabled(_GET_GRAD, (), (t,), _NO))


def _all(spec: Spec) -> int:
    return (1 << spec.mesh.ndim) - 1


def stamp(local: Tensor, spec: Spec) -> DistTensor:
    """Make ``local`` the DistTensor of ``spec``, in place: the object stays the same."""
    if local.dtype is not spec.dtype and type(local) is Tensor:
        spec = spec.with_(dtype=local.dtype)
    local.__class__ = DistTensor
    made = cast(DistTensor, local)
    made._spec = spec
    return made


def _rebuild(local: Tensor, spec: Spec, requires_grad: bool, is_param: bool) -> DistTensor:
    made = stamp(local, spec)
    made.requires_grad_(requires_grad)
    if is_param:
        made._is_param = True
    return made


# ---------------------------------------------------------------------------------------------- calls


def _general(key: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], typed: bool = True) -> Any:
    """A call that is not (yet) known to be one native op with one output."""
    plan = runtime.RT.plans.get(key)
    if plan is None:
        return _slow(key, func, types, args, kwargs)
    if (
        typed
        and plan.fast
        and (plan.plain or not torch.is_grad_enabled())
        and not (plan.untyped == 2 and _any_tied(args))
    ):
        native = plan.native
        try:
            if native is None:
                out = call_disabled(func, types, args, kwargs)
            else:
                out = call_disabled(native.fn, types, (args[0], *native.static), _NO)
        except (RuntimeError, IndexError, TypeError):
            return _run(plan, func, types, args, kwargs)
        if out.__class__ is DistTensor:
            if plan.plain:
                runtime.RT.fast[key] = (plan.spec, plan.untyped, native)
            return out
        if plan.plain and out.__class__ is Tensor:
            runtime.RT.fast[key] = (plan.spec, plan.untyped, native)
        many = out if out.__class__ is not Tensor else (out,)
        if plan.untyped and any(t.requires_grad for t in many):
            return settle_after(plan, args, kwargs, out, stamp)
        for t, spec in zip(many, plan.outputs, strict=True):
            stamp(t, spec)
        return out
    if plan.swift and plan.checked:
        with disabled():
            out = execute_swift(plan, func, args, kwargs)
        if out.__class__ is Tensor:
            return stamp(out, plan.spec)
        for t, spec in zip(out, plan.outputs, strict=True):
            stamp(t, spec)
        return out
    return _run(plan, func, types, args, kwargs)


def _any_tied(args: Any) -> bool:
    return any(a.__class__ is DistTensor and "_tied" in a.__dict__ for a in args)


def _slow(key: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op_name(func)
    if name in ("__get__", "__set__", "__delete__") or name in _NATIVE:
        return call_disabled(func, types, args, kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(func, types, args, kwargs)
    if kwargs.get("out") is not None:
        return _with_out(func, args, kwargs)
    swift = all(isinstance(a, Tensor) for a in args[: len(tensors_in(args))]) and not tensors_in(kwargs)
    resolve(func)  # so that the key of the next call knows whether the op is pointwise
    plan = plan_call(func, args, kwargs)
    if plan.run is not None and args and args[0].__class__ is list:
        LISTED[func] = plan.run
    plan.swift = plan.swift and swift
    plans = runtime.RT.plans
    if len(plans) >= _MAX_PLANS:
        plans.clear()
        runtime.RT.fast.clear()
    with contextlib.suppress(TypeError):  # an unhashable argument: planned anew each time
        plans[(func, *[key_part(a, func) for a in args]) if not kwargs else _full_key(func, args, kwargs)] = plan
    return _run(plan, func, types, args, kwargs)


def _full_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = (func, *[key_part(a, func) for a in args])
    return (first, *[(k, key_part(v, func)) for k, v in kwargs.items()])


def _run(plan: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if plan.run is not None:
        return plan.run(*args, **kwargs)
    if plan.redispatch:
        return redispatch_function(func, types, args, kwargs)
    if plan.gathered:
        warn_gathered(plan)
    with disabled():
        return execute(plan, func, args, kwargs, stamp)


def _with_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: compute, convert to the layout that ``out`` has, and copy into it."""
    given = kwargs["out"]
    made = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    for target, value in zip(tensors_in(given), tensors_in(made), strict=True):
        if not isinstance(target, DistTensor):
            raise DispatchError(
                f"{op_name(func)}: out= is a plain tensor and the result is distributed; give a DistTensor, e.g. "
                "torch.empty_like of an operand"
            )
        refuse_copy(f"{op_name(func)}: out=", target)
        if target.shape != value.shape:
            raise DispatchError(
                f"{op_name(func)}: out= has shape {tuple(target.shape)}, the result {tuple(value.shape)}; distributed "
                "tensors are not resized"
            )
        local = _local_of(value, target._spec)
        with disabled():
            target.copy_(local)
    return given


def _local_of(value: Tensor, spec: Spec) -> Tensor:
    """Local part of ``value`` brought to the types of ``spec``."""
    if not isinstance(value, DistTensor):
        value = _as_layout_of(value, spec)
    with disabled():
        source = value._spec.with_(undecided=0)
        if value.requires_grad:
            settle(value, source)
        return convert.apply(reshard.plan(source, spec.with_(dtype=source.dtype, undecided=0)).steps, value)


def _as_layout_of(value: Tensor, spec: Spec) -> DistTensor:
    """A plain tensor in the place of a distributed one: a global value (the same everywhere), or a local part."""
    here = spec.mesh.coordinate(runtime.RT.rank)
    if tuple(value.shape) == tuple(spec.shape):
        source = Spec(spec.shape, value.dtype, Layout(spec.mesh))
        target = spec.with_(dtype=value.dtype, undecided=0)
        local = convert.apply(reshard.plan(source, target).steps, value)
        return stamp(local.detach() if local is value else local, target)
    raise LayoutError(
        f"a plain tensor of shape {tuple(value.shape)} was given for a DistTensor of global shape {tuple(spec.shape)} "
        f"(local {spec.local_shape(here)}); plain tensors stand for global values: use mw.from_local for a local part"
    )


def whole(t: DistTensor) -> Tensor:
    """The global value as a plain tensor, on every rank; differentiable."""
    spec = t._spec
    made = _local_of(t, Spec(spec.shape, spec.dtype, Layout(spec.mesh)))
    return t.to_local() if isinstance(made, DistTensor) else made


# ---------------------------------------------------------------------------------------------- autograd


def _seed(y: DistTensor, gradient: Tensor | None) -> Tensor:
    """The cotangent of ``y`` in the layout of its gradient, as a local tensor."""
    with disabled():
        if y._spec.undecided:
            settle(y, y._spec.with_(undecided=0))
    spec = y._spec
    if gradient is None:
        if spec.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return _ones(y)
    if not isinstance(gradient, DistTensor) and torch._C._current_graph_task_id() != -1:
        raise DispatchError(
            "a backward inside a backward was given a plain gradient for a DistTensor, which is this rank's part of it "
            "and not the global value (reentrant checkpoints do so): use torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=False)"
        )
    if gradient.shape != spec.shape:
        raise RuntimeError(
            f"Mismatch in shape: grad_output has a shape of {tuple(gradient.shape)} and output has a shape of "
            f"{tuple(spec.shape)}."
        )
    local = _plain(_local_of(gradient, spec.grad().with_(dtype=gradient.dtype)))
    for a, p in enumerate(spec.layout.placements):
        if isinstance(p, Partial) and p.op == "avg":
            local = local / spec.mesh.sizes[a]
    return local


def _ones(y: DistTensor) -> Tensor:
    """The cotangent 1 of a global scalar: on every rank, or on the first one where parts are added up."""
    spec = y._spec
    here = spec.mesh.coordinate(runtime.RT.rank)
    value = 1.0
    for a, p in enumerate(spec.layout.placements):
        if isinstance(p, Partial) and p.op == "avg":
            value /= spec.mesh.sizes[a]
        elif spec.reduced >> a & 1 and here[a]:
            value = 0.0
    with disabled():
        return torch.full(spec.local_shape(here), value, dtype=y.dtype, device=y.device)


def _autograd_grad(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad`` on distributed tensors: seeds in, gradients out, each in its own layout."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("is_grads_batched"):
        raise DispatchError(
            "autograd.grad(is_grads_batched=True) maps conversions over a batch, which they cannot do: loop over the "
            "rows of grad_outputs and pass retain_graph=True"
        )
    outputs, inputs = _listed(given["outputs"]), _listed(given["inputs"])
    create = bool(given.get("create_graph"))
    materialize = bool(given.get("materialize_grads"))
    allow = given.get("allow_unused")
    seeds = _seeds(outputs, given.get("grad_outputs"))
    made = _run_engine(
        outputs, seeds, given.get("retain_graph"), create, inputs, bool(materialize if allow is None else allow), False
    )
    with disabled():
        # Autograd may hand out one object twice, or the caller's own cotangent: stamp an alias of it.
        found = [
            stamp(g.view_as(g), x._spec.grad()) if isinstance(x, DistTensor) and g is not None else g
            for x, g in zip(inputs, made, strict=True)
        ]
    if materialize:
        found = [
            torch.zeros_like(x, requires_grad=create) if g is None else g for x, g in zip(inputs, found, strict=True)
        ]
    return tuple(found)


def _autograd_backward(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.backward`` and ``DistTensor.backward``."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = _listed(given["tensors"])
    inputs = given.get("inputs")
    listed = () if inputs is None else tuple(_listed(inputs))
    if inputs is not None and not listed:
        raise RuntimeError("`inputs` argument to `backward()` cannot be empty.")
    seeds = _seeds(tensors, given.get("grad_tensors"))
    _run_engine(tensors, seeds, given.get("retain_graph"), bool(given.get("create_graph")), listed, True, True)


def _seeds(outputs: list[Any], given: Any) -> list[Any]:
    listed = _listed(given) if given is not None else [None] * len(outputs)
    if len(listed) != len(outputs):
        raise RuntimeError(f"{len(outputs)} tensors to differentiate, but {len(listed)} gradients for them")
    made: list[Any] = []
    for y, g in zip(outputs, listed, strict=True):
        if isinstance(y, DistTensor):
            made.append(_seed(y, g) if y.requires_grad else g)
        elif g is None and isinstance(y, Tensor):
            if y.requires_grad and y.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            made.append(torch.ones_like(y) if y.requires_grad else None)
        else:
            made.append(_plain(whole(g)) if isinstance(g, DistTensor) else g)
    return made


def _run_engine(
    outputs: Sequence[Any],
    seeds: Sequence[Any],
    retain_graph: bool | None,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unused: bool,
    accumulate: bool,
) -> tuple[Any, ...]:
    """Autograd's engine itself, with dispatch on: user code may run inside a backward.

    Hooks, recomputed checkpoints and custom functions all see distributed tensors as they do in a forward;
    ``torch.autograd.backward`` would come back here.
    """
    keep = create_graph if retain_graph is None else retain_graph
    made = _engine_run_backward(
        tuple(outputs), tuple(seeds), keep, create_graph, tuple(inputs), allow_unused, accumulate_grad=accumulate
    )
    return cast(tuple[Any, ...], made)


def _plain(t: Tensor) -> Tensor:
    """The local tensor of a distributed one as a plain alias, in the same graph."""
    if t.__class__ is not DistTensor:
        return t
    with disabled():
        return t.view_as(t)


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


def _guard_accumulation(t: DistTensor) -> None:
    """A gradient of another layout than the backward's was put in place: convert it before more is added to it."""
    if "_guarded" in t.__dict__:
        return

    def before(grad: Tensor) -> None:
        found, spec = _raw_grad(t), t._spec.grad()
        own = found.__dict__.get("_spec") if found is not None else None
        if own is not None and own is not spec and own.with_(undecided=0) is not spec:
            with torch.no_grad():
                local = _local_of(cast(DistTensor, found), spec.with_(dtype=own.dtype))
                with disabled():
                    _SET_GRAD(t, stamp(local.clone() if local is found else local, spec))

    with disabled():
        t.__dict__["_guarded"] = Tensor.register_hook(t, before)


# ---------------------------------------------------------------------------------------------- methods

_TYPES = (DistTensor,)
_dispatch = DistTensor.__torch_function__
_enabled = torch._C._is_torch_function_enabled
_modes = torch._C._len_torch_function_stack


def _method(name: str, func: Any) -> Any:
    """A method of Tensor that enters dispatch directly.

    The same call through C would first parse its arguments, find the overriding type and build a tuple of types: more
    than the op itself where tensors are small.  Inside modes, and with dispatch disabled, it takes the usual way.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _modes() or not _enabled():
            return func(self, *args, **kwargs)
        return _dispatch(func, _TYPES, (self, *args), kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = func.__doc__
    return method


def _operator(name: str, func: Any) -> Any:
    """As :func:`_method`, for ``x + y`` and friends, which answer NotImplemented to what is not a number or tensor."""

    def operator(self: Any, other: Any) -> Any:
        if _modes() or not _enabled() or not isinstance(other, (Tensor, float, int, complex)):
            return func(self, other)
        return _dispatch(func, _TYPES, (self, other), _NO)

    operator.__name__ = operator.__qualname__ = name
    return operator


def _getter(name: str) -> Any:
    """A property that says the same of the local tensor and of the global one, without a detour through dispatch."""
    get = getattr(_BASE, name).__get__
    return property(lambda self: call_disabled(get, (), (self,), _NO), doc=getattr(_BASE, name).__doc__)


for _name in ("device", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta", "is_sparse", "_base", "_version"):
    setattr(DistTensor, _name, _getter(_name))
setattr(DistTensor, "dtype", property(lambda self: self._spec.dtype, doc="Element type."))  # noqa: B010

_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "pow")
_METHODS = (
    "abs", "add", "add_", "amax", "amin", "bmm", "chunk", "clone", "contiguous", "copy_", "cos", "div", "div_", "exp",
    "expand", "flatten", "float", "gather", "log", "masked_fill", "matmul", "mean", "mm", "mul", "mul_", "neg",
    "permute",     "pow", "relu", "reshape", "rsqrt", "select", "sigmoid",
    "sin", "softmax", "split", "sqrt", "squeeze", "sub", "sub_",
    "sum", "tanh", "to", "transpose", "type_as", "unbind", "unsqueeze", "view", "view_as", "zero_", "__getitem__",
    "__neg__",
)  # fmt: skip
for _name in _METHODS:
    setattr(DistTensor, _name, _method(_name, getattr(Tensor, _name)))
for _name in _OPERATORS:
    setattr(DistTensor, f"__{_name}__", _operator(f"__{_name}__", getattr(Tensor, f"__{_name}__")))


# ---------------------------------------------------------------------------------------------- special calls

# Questions about the object or its memory, and autograd's own bookkeeping: the same for local and global.
_NATIVE = {
    "is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_pinned", "is_conj", "is_neg", "is_signed",
    "retain_grad", "requires_grad_", "storage_offset", "data_ptr", "element_size", "get_device", "is_set_to",
    "untyped_storage", "storage", "_typed_storage", "__hash__", "stride", "dim_order", "is_shared", "share_memory_",
    "has_names", "is_same_size", "is_nonzero", "_is_view", "_backward_hooks", "is_distributed", "is_coalesced",
    "record_stream", "_has_symbolic_sizes_strides", "is_vulkan_available",
}  # fmt: skip


def _refuse_transforms() -> None:
    """torch.func works below ``__torch_function__``: it would silently transform this rank's local tensors."""
    from torch._functorch import eager_transforms, vmap

    def guard(module: Any, name: str) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if any(a.__class__ is DistTensor for a in args):
                raise DispatchError(
                    "torch.func does not support DistTensors: use torch.autograd.grad (create_graph=True to "
                    "differentiate again), or apply the transform to plain tensors, from mw.unshard(x) or x.to_local()"
                )
            return original(*args, **kwargs)

        setattr(module, name, guarded)

    guard(eager_transforms, "_wrap_for_grad")
    guard(vmap, "_add_batch_dim")


_refuse_transforms()

_T_co = TypeVar("_T_co")


def _detach(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach()


def _detach_in_place(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    call_disabled(func, types, args, kwargs)
    x._spec = x._spec.with_(reduced=0, undecided=_all(x._spec))
    return x


def _no_forward_mode(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise DispatchError(
        "forward-mode differentiation does not support DistTensors: for a Jacobian-vector product differentiate "
        "torch.autograd.grad(y, x, v, create_graph=True) with respect to v"
    )


_SPECIAL: dict[str, Callable[..., Any]] = {
    "_make_dual": _no_forward_mode,
    "grad": _autograd_grad,
    "backward": _autograd_backward,
    "detach": _detach,
    "detach_": _detach_in_place,
}


def is_function(f: Any) -> bool:
    """Whether ``f`` is a Python function (and not one of torch's own in C)."""
    return isinstance(f, _types.FunctionType)


__all__ = [
    "DistTensor", "Replicate", "Sequence", "forget_ops", "map_tensors", "stamp", "whole",
]  # fmt: skip
