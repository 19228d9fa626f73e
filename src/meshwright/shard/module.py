"""Sharding of modules: parameters become DistTensors, wishes about activations become hooks."""

from __future__ import annotations

import contextlib
import copy
import difflib
import fnmatch
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.nn as nn

from .. import collective, runtime
from ..api import MESH_WANTED, constrain, shard_tensor
from ..dispatch import disabled, map_tensors
from ..errors import DesyncError, LayoutError, MeshwrightError, ShardError, takes
from ..layout import Layout, Placements, Replicate, Shard, Spec
from ..mesh import Mesh
from ..rules import COMPOSITES
from ..tensor import DistTensor, GradientHook, stamp
from . import zero
from .packing import chunk_dim
from .sync import BUCKET_BYTES, GradSync

Tensor = torch.Tensor
Globs = Mapping[str, Placements]


_GLOBS = ((Mapping, NoneType), 'give a dict, glob of names to placements: {"*.weight": {"tp": mw.Shard(0)}}')


@takes(
    ShardError,
    mesh=MESH_WANTED,
    placements=_GLOBS,
    inputs=_GLOBS,
    outputs=_GLOBS,
    stored_over=((str, Mapping, NoneType), "give an axis, or a dict, glob of names to axis"),
    bucket_bytes=((int, float), "give a number of bytes"),
)
def shard_module(
    model: nn.Module,
    mesh: Mesh,
    placements: Globs | None = None,
    *,
    inputs: Globs | None = None,
    outputs: Globs | None = None,
    stored_over: str | Mapping[str, str] | None = None,
    regather: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    sync: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Lay the parameters of a model on a mesh, in place; their gradients are synchronised in the backward.

    Args:
        model: every rank passes the same values (same seed, or loaded from one file).  On the meta device it
            is materialised shard by shard, never whole, with the values that one device gets from the same
            seed.
        mesh: the mesh.
        placements: glob of parameter and buffer names to placements, e.g. ``{"*.qkv.weight": {"tp":
            mw.Shard(0)}}``. Where several globs match a name the last one counts.  Parameters that none
            matches are replicated; buffers that none matches stay plain tensors, which count as replicated.
        inputs, outputs: glob of module names to the placements that the floating-point DistTensors among the
            positional inputs, or the outputs, are brought to.  This is how sequence parallelism is said.
        stored_over: axis over which parameters are stored split and gathered for use (ZeRO-3); or glob to
        axis.
        regather: with ``stored_over``: gather again for the backward instead of keeping gathered parameters.
        bucket_bytes: gradients travel together up to this size.
        sync: False: nothing reduces the gradients, they stay Partial where their parameter was used in
            rank-dependent work (``mw.reshard(p.grad, ...)`` reduces one).
        init: called with a meta-device model once its parameters have (uninitialised) memory, in place of the
            ``reset_parameters()`` of each module.

    Returns:
        The model.  Its parameters are the same objects as before (new ones, if it was on the meta device).

    Raises:
        ShardError: a glob that matches nothing, a parameter that is sharded already, a module on the meta
            device that cannot initialise itself.
        LayoutError: a placement for a dim that the parameter does not have.
        DesyncError: ranks that pass different models or placements.
    """
    _check_model(model)
    names = _Names(model)
    try:
        plan = _plan(names, mesh, placements or {})
        stored = _stored(names, mesh, plan, stored_over)
        modules = dict(model.named_modules())
        hooks = hooked(modules, inputs or {}, "inputs"), hooked(modules, outputs or {}, "outputs")
        problem = None
    except MeshwrightError as error:
        plan, stored, hooks, problem = {}, {}, ([], []), error
    _agree(mesh, names, plan, problem)
    meta = any(t.is_meta for t in names.tensors.values())
    for name, spec in plan.items():
        _lay(names, name, spec)
    for found, kind in zip(hooks, (Inputs, Outputs), strict=True):
        for module, wish in found:
            kind(mesh, wish).attach(module)
    params = {n: t for n, t in names.current().items() if isinstance(t, DistTensor) and isinstance(t, nn.Parameter)}
    if meta:
        _materialise(model, names, mesh, init)
    if not sync:
        if stored:
            raise ShardError("stored_over= needs the synchronisation of gradients: leave out sync=False")
        return model
    made = GradSync(mesh, list(params), list(params.values()), bucket_bytes)
    if stored:
        made.apart = {i for i, name in enumerate(params) if name in stored}
        axes = {id(params[name]): axis for name, axis in stored.items()}
        zero.install(model, mesh, made, axes, regather=regather)
    model.__dict__["_gradient_sync"] = made
    return model


def _check_model(model: nn.Module) -> None:
    """Raises ShardError for what is no module, or one whose tensors somebody else lays out or synchronises."""
    if not isinstance(model, nn.Module):
        raise ShardError(
            f"shard_module takes an nn.Module, not {type(model).__name__}: shard the modules of a list one by one, or "
            "put them into an nn.ModuleList"
        )
    wrappers = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
    for name, module in model.named_modules():
        if any(kind.__name__ in wrappers for kind in type(module).__mro__):
            raise ShardError(
                f"{name or 'the model'} is wrapped as {type(module).__name__}, which would synchronise or split what "
                "shard_module does: pass the module inside, unwrapped (stored_over= is what FSDP does)"
            )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t).__module__.startswith("torch.distributed"):
            raise ShardError(
                f"{name} is a {type(t).__name__} of PyTorch: build the model with plain tensors and give their layout "
                "in placements=, or bring one over with mw.from_dtensor"
            )


def lay_module(
    model: nn.Module, mesh: Mesh, specs: Mapping[str, Spec], init: Callable[[nn.Module], Any] | None = None
) -> dict[str, DistTensor]:
    """Lay the parameters and buffers of a model as ``specs`` say (by their first names); nothing else is done to it.

    Tensors that lie on the mesh already must lie so.  Returns the distributed ones by name.

    Raises:
        ShardError: a tensor that lies otherwise already; a module that cannot initialise itself.
        DesyncError: ranks that pass different models or specs.
    """
    names = _Names(model)
    plan, problem = {}, None
    for name, spec in specs.items():
        t = names.tensors[name]
        if not isinstance(t, DistTensor):
            plan[name] = spec
        elif t._spec.layout != spec.layout:
            problem = ShardError(f"{name} is sharded already, as {t.layout!r}, and the program needs {spec.layout!r}")
    _agree(mesh, names, plan, problem)
    meta = any(t.is_meta for t in names.tensors.values())
    for name, spec in plan.items():
        _lay(names, name, spec)
    if meta:
        _materialise(model, names, mesh, init)
    return {n: t for n, t in names.current().items() if isinstance(t, DistTensor)}


def stored_specs(
    model: nn.Module, mesh: Mesh, specs: Mapping[str, Spec], stored_over: str | Mapping[str, str] | None
) -> dict[str, Spec]:
    """Of parameters that are to be stored split over an axis, the specs as stored; ``specs`` are as the ops see them.

    Raises as :func:`shard_module`.
    """
    plan = dict(specs)
    return {name: plan[name] for name in _stored(_Names(model), mesh, plan, stored_over)}


# ---------------------------------------------------------------------------------------------- names


class _Names:
    """Parameters and buffers of a model by name; a tied one has several names and is one object."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[int, list[tuple[nn.Module, str, str]]] = {}  # id of the tensor to where it is registered
        self.tensors: dict[str, Tensor] = {}  # first name to tensor
        self.all: dict[str, str] = {}  # every name to the first one
        first: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, t in (*module._parameters.items(), *module._buffers.items()):
                if t is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if id(t) not in first:
                    first[id(t)] = name
                    self.tensors[name] = t
                self.all[name] = first[id(t)]
                self.owners.setdefault(id(t), []).append((module, key, name))

    def places(self, name: str) -> list[tuple[nn.Module, str, str]]:
        """Modules and attribute names under which a tensor is registered."""
        return self.owners[id(self.tensors[name])]

    def current(self) -> dict[str, Tensor]:
        """First name to the tensor that is registered there now."""
        found = {}
        for name in self.tensors:
            module, key, _ = self.places(name)[0]
            found[name] = getattr(module, key)
        return found


def matching(globs: Iterable[str], names: Iterable[str], what: str) -> dict[str, list[str]]:
    """Glob to the names that it matches.  Raises ShardError for one that matches nothing."""
    names = list(names)
    found = {g: [n for n in names if fnmatch.fnmatchcase(n, g)] for g in globs}
    for g, matched in found.items():
        if not matched:
            close = difflib.get_close_matches(g.replace("*", ""), names, n=3, cutoff=0.4)
            near = f"; close ones: {', '.join(close)}" if close else ""
            some = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
            raise ShardError(f"{g!r} matches no {what}{near}; the names are: {some or '(none)'}")
    return found


def _plan(names: _Names, mesh: Mesh, placements: Globs) -> dict[str, Spec]:
    """First name of each tensor to be laid on the mesh, to its spec."""
    chosen: dict[str, Placements] = {}
    for glob, matched in matching(placements, names.all, "parameter or buffer").items():
        for name in matched:
            # A pattern for weights meets counters too (num_batches_tracked), of which there is nothing to split.
            if names.tensors[names.all[name]].ndim or name == glob:
                chosen[names.all[name]] = placements[glob]
    plan = {}
    for name, t in names.tensors.items():
        if isinstance(t, DistTensor):
            if name in chosen:
                raise ShardError(
                    f"{name} is sharded already, as {t.layout!r}: change it with mw.reshard, or build anew"
                )
            continue
        if name not in chosen and not isinstance(t, nn.Parameter):
            continue
        try:
            layout = Layout(mesh, chosen.get(name, ()), ndim=t.ndim)
        except MeshwrightError as error:
            error.args = (f"{name}, of shape {tuple(t.shape)}: {error}",)
            raise
        if layout.partial:
            raise LayoutError(f"{name}: a parameter cannot be Partial; use mw.Shard or mw.Replicate")
        plan[name] = Spec(t.shape, t.dtype, layout, undecided=mesh.everywhere)
    return plan


def _stored(
    names: _Names, mesh: Mesh, plan: dict[str, Spec], stored_over: str | Mapping[str, str] | None
) -> dict[str, int]:
    """Parameters to be stored split, to the axis; their specs in ``plan`` become those of the stored
    tensors."""
    if stored_over is None:
        return {}
    globs = {"*": stored_over} if isinstance(stored_over, str) else stored_over
    params = [n for n, first in names.all.items() if isinstance(names.tensors[first], nn.Parameter)]
    axes: dict[str, int] = {}
    for glob, matched in matching(globs, params, "parameter").items():
        for name in matched:
            axes[names.all[name]] = mesh.axis_index(globs[glob])
    found = {}
    for name, axis in axes.items():
        spec = plan.get(name)
        if spec is None:
            continue
        if not isinstance(spec.layout.placements[axis], Replicate):
            raise ShardError(
                f"{name} is split over {mesh.axes[axis]!r} as the ops see it ({spec.layout!r}), so it "
                "cannot be "
                "stored over that axis too: give another axis, or leave it out of stored_over"
            )
        dim = chunk_dim(spec, axis)
        if dim is not None:
            plan[name] = Spec(spec.shape, spec.dtype, spec.layout.replace(axis, Shard(dim)), undecided=mesh.everywhere)
            found[name] = axis
    return found


def _agree(mesh: Mesh, names: _Names, plan: Mapping[str, Spec], problem: MeshwrightError | None) -> None:
    """All ranks must shard the same model in the same way; a mistake found on one rank is raised on all."""
    if mesh.size == 1:
        if problem is not None:
            raise problem
        return
    lines = [f"{n} {s!r}" for n, s in plan.items()]
    values = {} if problem is not None else _values(names)
    digest = hashlib.sha1("\n".join(lines).encode()).hexdigest()
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    of_values = hashlib.sha1(repr(values).encode()).hexdigest()
    seen = collective.all_gather_object((digest, str(problem or ""), of_values), group)
    if problem is not None:
        raise problem
    for rank, (_, error, _) in zip(mesh.ranks, seen, strict=True):
        if error:
            raise DesyncError(f"shard_module failed on rank {rank}: {error}")
    if len({d for d, _, _ in seen}) > 1:
        everyone = collective.all_gather_object(lines, group)
        raise DesyncError(f"shard_module: the ranks disagree; {_difference(mesh, everyone)}")
    if len({v for _, _, v in seen}) > 1:
        raise DesyncError(_other_values(mesh, collective.all_gather_object(values, group)))


_GENERATOR = "the default random generator"


def _values(names: _Names) -> dict[str, int]:
    """Digests of what must be the same on all ranks: what the model holds, or what its values will be drawn from."""
    plain = {n: t for n, t in names.tensors.items() if not isinstance(t, DistTensor)}
    there = {n: t for n, t in plain.items() if not t.is_meta}
    with disabled():
        found = dict(zip(there, collective.digests(list(there.values())), strict=True))
        if len(there) < len(plain):
            found[_GENERATOR] = collective.digests([torch.random.get_rng_state()])[0]
    return found


def _other_values(mesh: Mesh, everyone: list[dict[str, int]]) -> str:
    """Names the first values that differ, the ranks, and the fix."""
    first = everyone[0]
    name = next(n for n in first if any(other.get(n) != first[n] for other in everyone))
    rank, other = next((r, o) for r, o in zip(mesh.ranks, everyone, strict=True) if o.get(name) != first[name])
    count = sum(any(o.get(n) != first[n] for o in everyone) for n in first)
    more = f" (and {count - 1} more differ)" if count > 1 else ""
    fix = (
        "call torch.manual_seed with the same seed on all ranks, not seed + rank, before the model is built, or load "
        "the same weights everywhere"
    )
    return (
        f"shard_module: the ranks bring different values of {name}{more}: digest {first[name]:x} on rank "
        f"{mesh.ranks[0]}, {other.get(name, 0):x} on rank {rank}; {fix}"
    )


def _difference(mesh: Mesh, everyone: list[list[str]]) -> str:
    for rank, lines in zip(mesh.ranks[1:], everyone[1:], strict=True):
        longest = max(len(lines), len(everyone[0]))
        for i in range(longest):
            a, b = (one[i] if i < len(one) else "nothing" for one in (everyone[0], lines))
            if a != b:
                return f"rank {mesh.ranks[0]} has {a}, rank {rank} has {b}"
    return "build the same model everywhere"


# ---------------------------------------------------------------------------------------------- parameters


def _lay(names: _Names, name: str, spec: Spec) -> None:
    """Make one tensor of the model distributed: the same object, unless it is on the meta device."""
    t = names.tensors[name]
    mesh = spec.mesh
    here = mesh.coordinate(runtime.RT.rank)
    if t.is_meta:
        made = stamp(torch.empty(spec.local_shape(here), dtype=t.dtype, device=mesh.device), spec)
        made.__dict__.update({k: v for k, v in t.__dict__.items() if k not in made.__dict__})
        made.requires_grad_(t.requires_grad)
        made._is_param = isinstance(t, nn.Parameter)
        for module, key, _ in names.places(name):
            _registry(module, key)[key] = made
        return
    param = isinstance(t, nn.Parameter)
    local = shard_tensor(t.detach(), mesh, spec.layout, order=dict(spec.layout.order), check=False)
    with torch.no_grad(), disabled():
        t.grad = None
        if t.requires_grad:
            # A graph from before (weight_norm, prune) may keep the node to which gradients of the old shape go; only
            # data of another dtype have it made anew.
            t.data = t.new_empty(0, dtype=torch.float16 if t.dtype is not torch.float16 else torch.float32)
        t.data = Tensor.to(local, mesh.device).as_subclass(Tensor)
    stamp(t, spec)
    hooks: Any = t._backward_hooks or {}
    for at, hook in hooks.items():  # autograd would call them with local gradients
        hooks[at] = GradientHook(t, hook)
    if param:
        t._is_param = True


def _registry(module: nn.Module, key: str) -> dict[str, Any]:
    return module._parameters if key in module._parameters else module._buffers


def _materialise(model: nn.Module, names: _Names, mesh: Mesh, init: Callable[[nn.Module], Any] | None) -> None:
    """Give a model from the meta device its values: those that its construction draws from the same seed."""
    for name, t in names.current().items():
        if t.is_meta:  # a buffer: small, the same everywhere
            made = torch.empty_like(t, device=mesh.device)
            for module, key, _ in names.places(name):
                module._buffers[key] = made
    if init is not None:
        with torch.no_grad():
            init(model)
        return
    helpless = []
    done: set[int] = set()
    for prefix, module in _construction_order(model):
        own = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            with _apart(module, done):
                reset()
            done.update(id(p) for p in module.parameters(recurse=False))
        elif own:
            helpless.append(f"{prefix or type(module).__name__} ({type(module).__name__}: {', '.join(own)})")
    if helpless:
        raise ShardError(
            "on the meta device, and without reset_parameters() to initialise themselves: "
            f"{'; '.join(helpless)}. Give "
            "these modules a reset_parameters(), pass shard_module(..., init=fn), or build the model on a "
            "real device"
        )


@contextlib.contextmanager
def _apart(module: nn.Module, done: set[int]) -> Iterator[None]:
    """Let a module draw for tied parameters that have their values already, but into scratch memory."""
    tied = {k: p for k, p in module._parameters.items() if p is not None and id(p) in done}
    module._parameters.update({k: copy.deepcopy(p) for k, p in tied.items()})
    try:
        yield
    finally:
        module._parameters.update(tied)


def _construction_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children before their parent, which initialises its own parameters after having made them."""
    found: dict[int, tuple[str, nn.Module]] = {}

    def visit(prefix: str, module: nn.Module) -> None:
        if id(module) in found:
            return
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}.{key}" if prefix else key, child)
        found[id(module)] = (prefix, module)

    visit("", model)
    return list(found.values())


# ---------------------------------------------------------------------------------------------- hooks


@dataclass
class _Wish:
    """A wish about activations of a module.  An object and not a closure: it can be copied and pickled."""

    mesh: Mesh
    placements: Placements

    def bring(self, value: Any) -> Any:
        """Every floating-point DistTensor in ``value`` brought to the wished placements."""
        return map_tensors(value, self._one)

    def attach(self, module: nn.Module) -> None:
        """Have the module call this object."""
        raise NotImplementedError

    def _one(self, t: Tensor) -> Tensor:
        return constrain(t, self.placements) if t.dtype.is_floating_point or t.dtype.is_complex else t


class Inputs(_Wish):
    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> Any:
        return self.bring(args)


class Outputs(_Wish):
    def attach(self, module: nn.Module) -> None:
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.bring(output)


def hooked(modules: Mapping[str, nn.Module], globs: Globs, what: str) -> list[tuple[nn.Module, Placements]]:
    """Modules and the last wish that matches each."""
    chosen: dict[str, Placements] = {}
    for glob, matched in matching(globs, modules, f"module (in {what})").items():
        for name in matched:
            chosen[name] = globs[glob]
    return [(modules[name], wish) for name, wish in chosen.items()]


def _compatible(a: Tensor, b: Tensor) -> bool:
    """Asked by ``Module.to`` of a parameter and its conversion."""
    with disabled():
        return torch._has_compatible_shallow_copy_type(a, b)


COMPOSITES["_has_compatible_shallow_copy_type"] = _compatible

__all__ = ["lay_module", "shard_module", "stored_specs"]
