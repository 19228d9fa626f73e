"""Optimizers on distributed parameters: the native step on local tensors.

For the time of ``step()`` parameters and gradients are what they are underneath: plain local tensors.  So
foreach and fused kernels run as on one device, and the optimizer's own state is local.  This serves every
optimizer that treats elements one by one, through PyTorch's global step hooks; ``shard_optimizer`` adds what
needs to be asked for.
"""

from __future__ import annotations

import types
from types import NoneType
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import convert, runtime
from ..dispatch import disabled, refresh, write_through
from ..errors import LayoutError, ShardError, takes
from ..layout import Layout, Partial, Spec
from ..raw import as_plain, bare, get_grad, set_grad
from ..reshard import plan as plan_conversion
from ..tensor import DistTensor, call_enabled, hold, stamp
from .states import Chunks, Shadow, check_size

Tensor = torch.Tensor

ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
}  # fmt: skip
MIXING = {
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalises whole matrices",
    "Adafactor": "averages over whole rows and columns",
    "SparseAdam": "expects sparse gradients",
}


class Binding:
    """What Meshwright knows of one optimizer.

    Args:
        opt: the optimizer.
        elementwise: the caller's word that a step of an unknown class treats elements one by one.
        reshards: bring gradients of other layouts to the parameter's, instead of refusing them.
        states_over: the axis that states are split over.
    """

    def __init__(
        self,
        opt: Optimizer,
        *,
        elementwise: bool = False,
        reshards: bool = False,
        states_over: str | None = None,
    ) -> None:
        self.elementwise, self.reshards, self.states_over = elementwise, reshards, states_over
        self.chunks = Chunks(states_over, ()) if states_over is not None else None
        self.shadow: Shadow | None = None
        self.count: tuple[int, ...] = ()
        self.params: list[DistTensor] = []
        self.copies: list[DistTensor] = []
        self.specs: list[Spec] = []
        self.wanted: list[Spec] = []
        self.swapped: as_plain | None = None
        self.follow(opt)
        if _state_out not in opt._optimizer_state_dict_post_hooks.values():
            opt.register_state_dict_post_hook(_state_out)
            opt.register_load_state_dict_post_hook(_state_in)

    def follow(self, opt: Optimizer) -> None:
        """Look at the parameters (again): groups may have been added."""
        count = tuple(len(g["params"]) for g in opt.param_groups)
        if count == self.count:
            return
        self.count = count
        self.params = [p for g in opt.param_groups for p in g["params"] if isinstance(p, DistTensor)]
        check_class(opt, self.params, self.elementwise, self.chunks is not None)
        if self.chunks is not None:
            self.chunks.add(self.params)
            self.params = [p for p in self.params if self.chunks.spec(p) is None]
        self.specs = [p._spec for p in self.params]
        self.copies = [p for p in self.params if p._spec.copied]  # views of others: those see the update too
        self.wanted = [_own(s) for s in self.specs]

    def state_spec(self, p: DistTensor) -> Spec:
        """How the states of a parameter lie."""
        return (self.chunks.spec(p) if self.chunks is not None else None) or _own(p._spec)

    def swap(self, opt: Optimizer) -> None:
        """Make parameters and gradients plain.

        Raises ShardError, with nothing changed, for gradients of other layouts and states of other sizes.
        """
        swapped: list[Tensor] = []
        with disabled():
            for i, p in enumerate(self.params):
                g = p.grad if "_held" in p.__dict__ else get_grad(p)
                if g is None:
                    continue
                if g.__class__ is not DistTensor or g._spec is not self.wanted[i]:
                    g = self._fitted(i, p, g, opt)
                swapped.append(g)
            swapped += self.params
            self.swapped = as_plain(*swapped)
            self.swapped.__enter__()

    def restore(self) -> None:
        """Make them distributed again."""
        if self.swapped is not None:
            self.swapped.__exit__()
        self.swapped = None

    def _fitted(self, i: int, p: DistTensor, g: Tensor, opt: Optimizer) -> Tensor:
        """A gradient in the layout of its parameter."""
        if p._spec is not self.specs[i]:
            check_size(opt, p, self.specs[i])
            self.specs[i], self.wanted[i] = p._spec, _own(p._spec)
        own: Spec = g.__dict__.get("_spec") or p._spec.grad()
        wanted = self.wanted[i]
        if own.layout == wanted.layout:
            return stamp(g, wanted)
        if not self.reshards and not _interrupted(p):
            raise ShardError(_unfit(p, own))
        plan = plan_conversion(own.with_(undecided=0), wanted.with_(dtype=own.dtype))
        with torch.no_grad():
            made = stamp(convert.apply(plan.steps, g), wanted)
        hold(p, None)
        set_grad(p, made)
        return made


def _own(spec: Spec) -> Spec:
    return spec.with_(reduced=0, undecided=0, stored=False)


def _interrupted(p: DistTensor) -> bool:
    """Whether the last backward raised: a gradient may then be left Partial, which nobody could have seen to."""
    sync = p.__dict__["_sync"]() if "_sync" in p.__dict__ else None
    return sync is not None and sync.interrupted


def name_of(p: Tensor) -> str:
    """Name of a parameter in its model, where known."""
    name = p.__dict__.get("_param_name")
    return f"{name}" if name else f"a parameter of shape {tuple(p.shape)}"


def _unfit(p: DistTensor, own: Spec) -> str:
    if any(isinstance(q, Partial) for q in own.layout.placements):
        return (
            f"the gradient of {name_of(p)} is still Partial ({own.layout!r}): each rank holds its own "
            "contribution. "
            "Synchronise it: shard the model with mw.shard_module, leave mw.no_sync before the last "
            "backward, or set "
            "p.grad = mw.reshard(p.grad, p.layout)"
        )
    return (
        f"the gradient of {name_of(p)} lies as {own.layout!r}, the parameter as {p.layout!r}: set "
        "p.grad = mw.reshard(p.grad, p.layout), or have it done with mw.shard_optimizer(optimizer)"
    )


def check_class(opt: Optimizer, params: list[DistTensor], elementwise: bool, splits: bool = False) -> None:
    """Refuse optimizers that mix elements, unless every rank holds all of them (and no states are split).

    Raises:
        ShardError: with the reason.
    """
    kind = type(opt)
    builtin = kind.__module__.startswith("torch.optim")
    if elementwise or (builtin and kind.__name__ in ELEMENTWISE):
        return
    split = next((p for p in params if not p.layout.is_replicated()), None)
    if kind.__name__ == "SparseAdam" and builtin:
        raise ShardError("SparseAdam expects sparse gradients, which distributed parameters do not have: use Adam")
    if split is None and not splits:
        return
    where = f"{name_of(split)} lies as {split.layout!r}" if split is not None else "states_over splits its states"
    if builtin and kind.__name__ in MIXING:
        raise ShardError(
            f"{kind.__name__} {MIXING[kind.__name__]}, which a rank cannot do with its part alone "
            f"({where}): replicate "
            "these parameters, or use an elementwise optimizer such as AdamW"
        )
    raise ShardError(
        f"{kind.__name__} is not known to treat elements one by one, and {where}: if it does, say so with "
        "mw.shard_optimizer(optimizer, elementwise=True)"
    )


# ---------------------------------------------------------------------------------------------- steps


def binding_of(opt: Optimizer) -> Binding | None:
    """The binding of an optimizer, made at its first step; None if it has no distributed parameters."""
    found: Binding | None = opt.__dict__.get("_meshwright")
    if found is None and any(isinstance(p, DistTensor) for g in opt.param_groups for p in g["params"]):
        said = opt.__dict__.pop(_SAID, None)
        if said is not None:  # a copy of one that was prepared
            return binding_of(shard_optimizer(opt, **said))
        found = opt.__dict__["_meshwright"] = Binding(opt)
        _state_in(opt)
    return found


_SAID = "_meshwright_said"
_getstate: Any = Optimizer.__getstate__


def _with_options(opt: Optimizer) -> dict[str, Any]:
    """What is copied and pickled of an optimizer, with what ``shard_optimizer`` was told, for the copy's first step."""
    state: dict[str, Any] = _getstate(opt)
    binding: Binding | None = opt.__dict__.get("_meshwright")
    if binding is not None and binding.reshards:
        return {**state, _SAID: {"states_over": binding.states_over, "elementwise": binding.elementwise}}
    return {**state, _SAID: opt.__dict__[_SAID]} if _SAID in opt.__dict__ else state


Optimizer.__getstate__ = _with_options  # type: ignore[method-assign,assignment]


def _before_step(opt: Optimizer, args: Any, kwargs: Any) -> Any:
    binding = binding_of(opt)
    if binding is None:
        return None
    binding.restore()  # after a step that raised
    binding.follow(opt)
    for p in binding.copies:
        refresh(p, call_enabled)
    args, kwargs = _with_closure(opt, binding, args, kwargs)
    binding.swap(opt)
    if binding.chunks is not None:
        binding.shadow = Shadow(opt, binding.chunks)
        args = (binding.shadow.made, *args[1:])
    return args, kwargs


def _with_closure(opt: Optimizer, binding: Binding, args: Any, kwargs: Any) -> Any:
    """A closure runs the model: for that the parameters must be distributed again."""
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        return args, kwargs

    def distributed() -> Any:
        binding.restore()
        try:
            loss = closure()
            return loss.item() if isinstance(loss, DistTensor) and _mixes(opt) else loss
        finally:
            binding.swap(opt)
            if binding.shadow is not None:
                binding.shadow.refresh()

    return args[:1], {**kwargs, "closure": distributed}


def _mixes(opt: Optimizer) -> bool:
    return type(opt).__name__ in MIXING


def _after_step(opt: Optimizer, args: Any, kwargs: Any) -> None:
    binding: Binding | None = opt.__dict__.get("_meshwright")
    if binding is not None:
        binding.restore()
        shadow, binding.shadow = binding.shadow, None
        if shadow is not None:
            shadow.settle()
        with torch.no_grad():
            for p in binding.copies:
                write_through(p, call_enabled)


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)


@takes(ShardError, states_over=((str, NoneType), "give one axis of the mesh"))
def shard_optimizer(opt: Optimizer, *, states_over: str | None = None, elementwise: bool = False) -> Optimizer:
    """Prepare an optimizer for distributed parameters; the same object is returned.

    Plain optimizers work on distributed parameters whose gradients lie as they do.  This adds: gradients of
    other layouts are brought to the parameter's, and classes of your own may be declared elementwise.
    ``state_dict()`` gives the states as DistTensors; ``load_state_dict()`` takes whole tensors, or
    DistTensors of any layout.

    Args:
        opt: an optimizer over the parameters of a sharded model.
        states_over: axis over which states are split (ZeRO-1), and with them the gradients of a model that was
            sharded with ``shard_module`` (ZeRO-2): each rank updates its chunk of every parameter that is
            replicated on the axis, then the chunks are gathered.
        elementwise: a class of your own treats elements one by one.

    Raises:
        MeshError: no such axis.
        ShardError: an optimizer that mixes elements of parameters that are split.
    """
    if not isinstance(opt, Optimizer):
        raise ShardError(f"shard_optimizer takes a torch.optim.Optimizer, not {type(opt).__name__}")
    if not any(isinstance(p, DistTensor) for g in opt.param_groups for p in g["params"]):
        raise ShardError(
            "none of the optimizer's parameters is distributed: call mw.shard_module(model, mesh, ...) first, and make "
            "the optimizer after it from the model's own parameters; what replaces or adds parameters (PEFT, the meta "
            "device) comes before both"
        )
    found: Binding | None = opt.__dict__.pop("_meshwright", None)
    made = Binding(
        opt,
        elementwise=elementwise or (found is not None and found.elementwise),
        reshards=True,
        states_over=states_over,
    )
    opt.__dict__["_meshwright"] = made
    _state_in(opt)
    _protect(opt)
    return opt


def _protect(opt: Optimizer) -> None:
    """A step that raises must leave the parameters distributed."""
    before = opt.__dict__.get("step")  # a scheduler may have wrapped it
    if getattr(before, "_meshwright", False):
        return

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return before(*args, **kwargs) if before is not None else type(self).step(self, *args, **kwargs)
        finally:
            self.__dict__["_meshwright"].restore()

    step._meshwright = True  # type: ignore[attr-defined]
    if before is not None:
        step.__dict__.update(before.__dict__)
    opt.__dict__["step"] = types.MethodType(step, opt)  # bound: schedulers rebind plain functions


# ---------------------------------------------------------------------------------------------- state


def _state_out(opt: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """States of one value per element become DistTensors that lie as their parameter (sharing memory)."""
    binding: Binding = opt.__dict__["_meshwright"]
    params = [p for g in opt.param_groups for p in g["params"]]
    indices = [i for g in state_dict["param_groups"] for i in g["params"]]
    by_index = dict(zip(indices, params, strict=True))
    state = {}
    for index, entry in state_dict["state"].items():
        p = by_index.get(index)
        state[index] = _stamped(entry, p, binding) if isinstance(p, DistTensor) else entry
    return {**state_dict, "state": state}


def _stamped(entry: dict[str, Any], p: DistTensor, binding: Binding) -> dict[str, Any]:
    spec = binding.state_spec(p)
    shape = spec.local_shape(spec.mesh.coordinate(runtime.RT.rank))

    def one(value: Any) -> Any:
        with disabled():
            if not isinstance(value, Tensor) or isinstance(value, DistTensor) or not value.dim():
                return value
            if tuple(value.shape) != shape:
                return value
            return stamp(value.view_as(value), spec.with_(dtype=value.dtype))

    return {k: one(v) for k, v in entry.items()}


def _state_in(opt: Optimizer) -> None:
    """Loaded states, whole or of any layout, become this rank's local parts."""
    binding: Binding = opt.__dict__["_meshwright"]
    for p, entry in opt.state.items():
        if isinstance(p, DistTensor):
            for k, v in entry.items():
                entry[k] = local_state(v, binding.state_spec(p), f"state {k!r} of {name_of(p)}")


def local_state(value: Any, spec: Spec, what: str) -> Any:
    """This rank's part of a state that is whole, distributed, or local already."""
    if not isinstance(value, Tensor):
        return value
    target = _own(spec).with_(dtype=value.dtype)
    with torch.no_grad(), disabled():
        if isinstance(value, DistTensor):
            source = value._spec.with_(undecided=0, reduced=0)
            if source.shape != spec.shape:
                return value.as_subclass(Tensor)
            made = convert.apply(plan_conversion(source, target).steps, value)
            return bare(made)
        shape, own = tuple(value.shape), spec.local_shape(spec.mesh.coordinate(runtime.RT.rank))
        if not shape or shape == own:
            return value
        if shape == tuple(spec.shape):
            whole = Spec(spec.shape, value.dtype, Layout(spec.mesh))
            return convert.apply(plan_conversion(whole, target).steps, value).clone()
    raise LayoutError(
        f"{what} has shape {shape}: expected the global shape {tuple(spec.shape)}, or a DistTensor of that shape"
    )


__all__ = ["ELEMENTWISE", "Binding", "binding_of", "local_state", "name_of", "shard_optimizer"]
