"""What PyTorch offers that does not ask its arguments who they are: ``autograd.Function``, and wrappers of modules.

``Function.apply`` does not ask its arguments who they are: the user's forward would see distributed tensors, autograd
local ones, and the gradient of a replicated input of rank-dependent work would not be summed, without a word.  So it
is treated as every op without a rule: its inputs are gathered, it runs on every rank on plain tensors, and a warning
names it.

``DistributedDataParallel``, FSDP and TorchScript hand parameters to C++ or lay them out anew, as if this rank's part
were the whole: refused.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from .. import compat, torch_changes
from ..collective import refuse_by_hand
from ..compat import apply_function
from ..dispatch import AS_OP, disabled, map_tensors, mesh_of, tensors_in
from ..errors import ShardError
from ..generator.dropout import run_alike
from ..layout import Layout, Replicate, Spec, widest_accumulate_dtype
from ..local_tensor import bare
from . import OPEN, DistTensor, whole, within, wrap
from .split_checkpoints import SavedInputs, asked_again, check_reentrant

_enabled = compat.is_torch_function_enabled
_APPLY_IN_C = inspect.getattr_static(compat.function_base, "apply").__get__
_warned: set[str] = set()
_INSTEAD = {
    "BackwardHookFunction": (
        "It is PyTorch's, around modules with register_full_backward_hook (or _pre_hook): what goes in "
        "and comes out of such a module is whole on each rank, and so is the work behind it. A hook of the tensor "
        "(output.register_hook, in a forward hook) gathers nothing"
    )
}


def _is_dist(a: Any) -> bool:
    return isinstance(a, DistTensor)


def _guarded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # With dispatch disabled the caller works on locals: conversions do.
    if _enabled() and any(map(_is_dist, (*args, *kwargs.values()))) and cls is not CheckpointFunction:
        return _gathered(cls, args, kwargs)
    if cls is CheckpointFunction:
        check_reentrant()
        args = (run_alike(args[0]), *args[1:])
    return _APPLY_IN_C(None, cls)(*args, **kwargs)


def _gathered(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if cls.__module__.startswith("torch.distributed."):
        refuse_by_hand(f"nn.{cls.__name__.strip('_')}", next(filter(_is_dist, (*args, *kwargs.values())))._spec)
    tensors = tensors_in((args, kwargs))
    mesh = mesh_of(tensors, cls.__name__)
    split = any(not isinstance(p, Replicate) for t in tensors if isinstance(t, DistTensor) for p in t.placements)
    if split and cls.__name__ not in _warned:
        _warned.add(cls.__name__)
        fix = _INSTEAD.get(cls.__name__, AS_OP)
        warnings.warn(
            f"the autograd.Function {cls.__name__} has no rule: its inputs are gathered on every rank. {fix}",
            stacklevel=3,
        )
    args, kwargs = map_tensors((args, kwargs), lambda t: whole(t) if isinstance(t, DistTensor) else t)
    made = apply_function(cls, *args, **kwargs)
    sums = widest_accumulate_dtype(t._spec for t in tensors if isinstance(t, DistTensor))
    with disabled():
        for t in tensors_in(made):
            if type(t) is torch.Tensor:
                undecided = 0 if t.requires_grad else mesh.everywhere
                wrap(t, Spec(t.shape, t.dtype, Layout(mesh), undecided_mask=undecided, accumulate_dtype=sums))
    return made


_WHY = "autograd functions do not ask whose tensors they are given: inputs are gathered, as those of ops without a rule"


def _applying(original: Any, name: str) -> Any:
    return classmethod(_guarded)


def _applying_transformed(original: Any, name: str) -> Any:
    """What ``Function.apply`` calls where torch.func transforms."""

    @functools.wraps(original)
    def call(self: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled() and any(map(_is_dist, (*args, *kwargs.values()))):
            return _gathered(cls, args, kwargs)
        return original(self, cls, *args, **kwargs)

    return call


if isinstance(inspect.getattr_static(torch.autograd.Function, "apply"), classmethod):
    # Users take names (``scaled = Scaled.apply``) long before they make a mesh: what such a name calls is looked up
    # when it is called.
    torch_changes.replace("torch.autograd.function._SingleLevelFunction.apply", why=_WHY)(_applying)
    torch_changes.replace("torch._functorch.autograd_function.CustomFunctionHigherOrderOperator.__call__", why=_WHY)(
        _applying_transformed
    )
else:  # a method of C, which looks up nothing: what is taken of it earlier is never reached again
    torch_changes.note(
        "torch.autograd.Function.apply", why=_WHY, since="the import of meshwright", until=torch_changes.NEVER
    )
    torch_changes.put("torch.autograd.Function.apply", _applying)


def _has_dist(module: torch.nn.Module) -> bool:
    return any(map(_is_dist, (*module.parameters(), *module.buffers())))


def _refusal(wrapper: str, instead: str) -> ShardError:
    return ShardError(
        f"{wrapper}: mw.shard_module sharded this module, and {wrapper} would take a rank's shards for full tensors. "
        f"{_by_stack() or f'Leave it out: {instead}'}"
    )


_SYNC = (
    "mw.shard_module reduces gradients itself, and "
    'mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)}) shards batches.'
)
_STORED = 'mw.shard_module(model, mesh, ..., fsdp="dp") stores parameters sharded and all-gathers them for use.'
# What wraps models for their users, by the package that calls, the outer one first: what its user can do.
_STACKS = {
    "transformers": (
        "Take meshwright.integrations.trainer.MeshTrainer in place of Trainer, or its mixin OnMesh for a trainer "
        "that derives from it."
    ),
    "accelerate": (
        "Call meshwright.integrations.accelerate.one_device() before accelerator.prepare(), and shard batches with "
        'mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)}).'
    ),
    "ray": f"Leave out prepare_model of Ray Train: {_SYNC}",
}
_STACKS |= dict.fromkeys(
    ("lightning", "lightning_fabric", "pytorch_lightning"),
    "Fabric(strategy=meshwright.integrations.fabric.MeshStrategy(...)) shards it in fabric.setup(). A Trainer of "
    f"Lightning wraps every model: write the loop with Fabric or yourself. {_SYNC}",
)


def _by_stack() -> str:
    """What to do, in the words of the package whose call led here; empty where that is the user's own."""
    frame: types.FrameType | None = sys._getframe(1)
    callers = set()
    while frame is not None:
        callers.add(str(frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.f_back
    return next((fix for package, fix in _STACKS.items() if package in callers), "")


def _refusing(original: Any, name: str, wrapper: str, instead: str) -> Any:
    """``__init__`` of what wraps a module, or a parameter of one, that refuses DistTensors."""

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # Of fully_shard it is what wraps each parameter.
        if _is_dist(module) if isinstance(module, torch.Tensor) else _has_dist(module):
            raise _refusal(wrapper, instead)
        original(self, module, *args, **kwargs)

    return init


for _name in ("DataParallel", "DistributedDataParallel"):
    torch_changes.replace(
        f"torch.nn.parallel.{_name}.__init__",
        why="a module of DistTensors has its gradients synchronised already, and would be handed to C++: refused",
    )(functools.partial(_refusing, wrapper=_name, instead=_SYNC))


def _refusing_modules(original: Any, name: str) -> Any:
    """``fully_shard`` that refuses DistTensors before it looks for a process group."""

    @functools.wraps(original)
    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        modules = module if isinstance(module, (list, tuple)) else (module,)
        if any(_has_dist(m) for m in modules if isinstance(m, torch.nn.Module)):
            raise _refusal(name, _STORED)
        return original(module, *args, **kwargs)

    return shard


class _Later(importlib.abc.MetaPathFinder):
    """Guards FSDP when it is imported: importing it here would take a second."""

    names: ClassVar[dict[str, str]] = {
        "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
        "torch.distributed.fsdp._fully_shard._fsdp_param": "FSDPParam",  # for a fully_shard imported by its users
        "torch.distributed.fsdp._fully_shard._fully_shard": "fully_shard",
    }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, which guards the class once the module has run."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.names else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                self.guard(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def guard(self, module: Any) -> None:
        """Guard the class, or the function, of an imported module."""
        name = self.names[module.__name__]
        original = getattr(module, name)
        if isinstance(original, type):
            called = "fully_shard" if name == "FSDPParam" else name
            original.__init__ = _refusing(original.__init__, "__init__", called, _STORED)  # type: ignore[misc]
            return
        guarded = _refusing_modules(original, name)
        for package in ("", "._fully_shard", "._fully_shard._fully_shard"):
            holder = sys.modules.get(f"torch.distributed.fsdp{package}")
            if holder is not None and holder.__dict__.get(name) is original:
                setattr(holder, name, guarded)


@torch_changes.install(
    *(f"{module}.{name}" + ".__init__" * (name != "fully_shard") for module, name in _Later.names.items()),
    why="FSDP would lay out anew what is a part already: DistTensors are refused, from its import on (sys.meta_path)",
)
def _guard_later() -> None:
    later = _Later()
    sys.meta_path.insert(0, later)
    for name in later.names:
        if name in sys.modules:
            later.guard(sys.modules[name])


@torch_changes.replace(
    "torch.compile", why="Dynamo would trace the part that a rank holds of a DistTensor: a module of them is refused"
)
def _compiling(compiling: Any, name: str) -> Any:
    """Dynamo traces what a DistTensor holds, and would take it for the whole."""

    @functools.wraps(compiling)
    def guarded(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        module = getattr(model, "__self__", model)  # Module.compile compiles a method
        if isinstance(module, torch.nn.Module) and _has_dist(module):
            raise ShardError(
                "torch.compile: mw.shard_module sharded this module, and Dynamo cannot trace DistTensors. Use "
                'mw.compile_step(..., backend="inductor"): it captures the whole step and compiles the code between '
                "collectives."
            )
        return compiling(model, *args, **kwargs)

    return guarded


_SCRIPTED = (
    "TorchScript runs in C++, which would take this rank's part for the whole: build what is traced or scripted on one "
    "device, with values from mw.unshard; mw.compile_step captures a step of the mesh"
)


@functools.cache
def guard_scripts() -> None:
    """From the first sharded model on, TorchScript, which does not ask whose tensors it is given, meets none of a mesh.

    Scripted functions are given whole tensors, as every op without a rule.
    """
    for name in ("torch.jit.script", "torch.jit.trace"):
        torch_changes.put(name, _guard_script)
    torch_changes.put("torch.jit.ScriptFunction.__call__", _whole_for_scripts)


torch_changes.note(
    *("torch.jit.script", "torch.jit.trace", "torch.jit.ScriptFunction.__call__"),
    why="TorchScript does not ask whose tensors it is given: it is given whole ones, or refused",
    since="the first shard_module",
    until=torch_changes.NEVER,
)


def _whole_for_scripts(run: Any, name: str) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled() and any(map(_is_dist, tensors_in((args, kwargs)))):
            return DistTensor.__torch_function__(self, (DistTensor,), args, kwargs)
        return run(self, *args, **kwargs)

    return called


def _guard_script(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def guarded(what: Any, *args: Any, **kwargs: Any) -> Any:
        held = (*what.parameters(), *what.buffers()) if isinstance(what, torch.nn.Module) else ()
        if any(map(_is_dist, (*held, *tensors_in((args, kwargs))))):
            raise ShardError(f"torch.jit.{name} was given DistTensors: {_SCRIPTED}")
        if name == "script":  # it looks up the names of a class in the frame of its caller, one above this one
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        return original(what, *args, **kwargs)

    return guarded


@torch_changes.install(
    "torch.utils.checkpoint._CheckpointFrame.save_inputs",
    "torch.utils.checkpoint._CheckpointFrame.get_inputs",
    why="inputs of a checkpoint keep their layouts, and its second run draws and reads what the first one did",
)
def _keep_layouts() -> None:
    """Inputs of a checkpoint keep their layouts through hooks around it that pack what is saved (another checkpoint's).

    What such hooks give back is a tensor of its own, which knows nothing of a mesh.  The second run reads the stand-ins
    that the first one did.
    """
    frame = compat.saving_frame(torch.utils.checkpoint)
    save, get = frame.save_inputs, frame.get_inputs

    @functools.wraps(save)
    def saved(self: Any, *args: Any) -> None:
        self.recompute_fn = asked_again(within(OPEN.scopes, run_alike(self.recompute_fn)))
        self._kept = SavedInputs(args)
        save(self, *self._kept.args)
        self._kept.args = []

    @functools.wraps(get)
    def given(self: Any) -> list[Any]:
        made: list[Any] = get(self)
        return self._kept.given(made) if hasattr(self, "_kept") else made

    frame.save_inputs, frame.get_inputs = saved, given


@torch_changes.install(
    "torch.autograd.graph.saved_tensors_hooks.__enter__",
    why="hooks that pack what autograd saves are given the part that a rank holds, as a plain tensor",
)
def _save_parts() -> None:
    """Hooks that pack what autograd saves are given this rank's parts, as plain tensors.

    Autograd packs the same memory now as a distributed tensor, now as a plain one, and goes on with what comes back as
    the part.  A hook that makes a tensor of the global shape (``save_on_cpu(pin_memory=True)``), or reads the global
    value of a Partial, would give it something else; and the two runs of a checkpoint are compared by shapes.
    """
    on = []  # those around the making of the first mesh, the inner one first
    while (top := compat.top_saved_tensors_default_hooks(True)) is not None:
        on.append(top)
        compat.pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(on):
        compat.push_saved_tensors_default_hooks(_of_parts(pack), unpack)

    hooks = torch.autograd.graph.saved_tensors_hooks
    enter = hooks.__enter__

    @functools.wraps(enter)
    def entered(self: Any) -> None:
        if not hasattr(self.pack_hook, _OF_PARTS):
            self.pack_hook = _of_parts(self.pack_hook)
        enter(self)

    hooks.__enter__ = entered  # type: ignore[method-assign]


_OF_PARTS = "_meshwright_of_parts"


def _of_parts(pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(pack)  # whose module tells whose hooks they are
    def packed(t: torch.Tensor) -> Any:
        # An index that a call gives is plain as it is saved, and distributed a moment later: hooks may keep the object.
        return pack(bare(t) if _is_dist(t) or not (t.requires_grad or _enabled()) else t)

    setattr(packed, _OF_PARTS, True)
    return packed
