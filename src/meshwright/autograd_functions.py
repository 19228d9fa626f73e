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
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from . import compat
from .collective import refuse_by_hand
from .compat import CheckpointFrame, apply_function
from .dispatch import AS_OP, disabled, map_tensors, mesh_of, tensors_in
from .errors import ShardError
from .generator.dropout import run_alike
from .layout import Layout, Replicate, Spec, widest
from .local_tensor import bare
from .split_checkpoints import KeptInputs, asked_again, check_reentrant
from .tensor import OPEN, DistTensor, whole, within, wrap

_enabled = compat.is_torch_function_enabled
_warned: set[str] = set()


def _is_dist(a: Any) -> bool:
    return isinstance(a, DistTensor)


def _guarded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    # With dispatch disabled the caller works on locals: conversions do.
    if _enabled() and any(map(_is_dist, args)) and cls is not CheckpointFunction:
        if cls.__module__.startswith("torch.distributed."):
            refuse_by_hand(f"nn.{cls.__name__.strip('_')}", next(filter(_is_dist, args))._spec)
        return _gathered(cls, args)
    if cls is CheckpointFunction:
        check_reentrant()
        args = (run_alike(args[0]), *args[1:])
    return apply_function(cls, *args, **kwargs)


def _gathered(cls: Any, args: tuple[Any, ...]) -> Any:
    tensors = tensors_in(args)
    mesh = mesh_of(tensors, cls.__name__)
    split = any(not isinstance(p, Replicate) for t in tensors if isinstance(t, DistTensor) for p in t.placements)
    if split and cls.__name__ not in _warned:
        _warned.add(cls.__name__)
        warnings.warn(
            f"the autograd.Function {cls.__name__} has no rule: its inputs are gathered on every rank. {AS_OP}",
            stacklevel=3,
        )
    made = apply_function(cls, *map_tensors(args, lambda t: whole(t) if isinstance(t, DistTensor) else t))
    sums = widest(t._spec for t in tensors if isinstance(t, DistTensor))
    with disabled():
        for t in tensors_in(made):
            if type(t) is torch.Tensor:
                undecided = 0 if t.requires_grad else mesh.everywhere
                wrap(t, Spec(t.shape, t.dtype, Layout(mesh), undecided=undecided, sums=sums))
    return made


def _refusal(wrapper: str, instead: str) -> ShardError:
    return ShardError(
        f"{wrapper} was given a module with DistTensors, of which it would take this rank's part for the whole: "
        f"{_by_stack() or f'leave it out, {instead}'}"
    )


_SYNC = (
    'mw.shard_module synchronises gradients itself (mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)}) lays the '
    "batches)"
)
_STORED = 'mw.shard_module(model, mesh, ..., stored_over="dp") stores parameters split and gathers them for use'
# What wraps models for their users, by the package that calls, the outer one first: what its user can do.
_STACKS = {
    "transformers": (
        "Trainer lets accelerate wrap it; say model._is_accelerate_prepared = True behind mw.shard_module, and have "
        "get_train_dataloader() of a subclass of Trainer return mw.shard_dataloader(loader, mesh, "
        '{"dp": mw.Shard(0)}), or write the loop yourself'
    ),
    "accelerate": (
        "leave the model out of accelerator.prepare(), and lay batches with mw.shard_dataloader(loader, mesh, "
        '{"dp": mw.Shard(0)}) in place of prepared loaders; mw.shard_module synchronises gradients itself'
    ),
    "ray": f"leave out prepare_model of Ray Train, {_SYNC}",
}
_STACKS |= dict.fromkeys(
    ("lightning", "lightning_fabric", "pytorch_lightning"),
    "leave the model out of fabric.setup(), and loaders out of fabric.setup_dataloaders(), and call loss.backward(): "
    f"{_SYNC}; a Trainer of Lightning wraps every model, so write the loop yourself",
)


def _by_stack() -> str:
    """What to do, in the words of the package whose call led here; empty where that is the user's own."""
    frame: types.FrameType | None = sys._getframe(1)
    callers = set()
    while frame is not None:
        callers.add(str(frame.f_globals.get("__name__")).partition(".")[0])
        frame = frame.f_back
    return next((fix for package, fix in _STACKS.items() if package in callers), "")


def _guard_wrapper(wrapper: Any, instead: str, called: str = "") -> None:
    original = wrapper.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        # Of fully_shard it is what wraps each parameter.
        given = (module,) if isinstance(module, torch.Tensor) else (*module.parameters(), *module.buffers())
        if any(map(_is_dist, given)):
            raise _refusal(called or wrapper.__name__, instead)
        original(self, module, *args, **kwargs)

    wrapper.__init__ = init


class _Later(importlib.abc.MetaPathFinder):
    """Guards FSDP when it is imported: importing it here would take a second."""

    classes: ClassVar[dict[str, str]] = {
        "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
        "torch.distributed.fsdp._fully_shard._fsdp_param": "FSDPParam",  # of fully_shard
    }

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, which guards the class once the module has run."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in self.classes else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                self.guard(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def guard(self, module: Any) -> None:
        """Guard the class of an imported module."""
        name = self.classes[module.__name__]
        _guard_wrapper(getattr(module, name), _STORED, "fully_shard" if name == "FSDPParam" else "")


def _guard_compile() -> None:
    """Dynamo traces what a DistTensor holds, and would take it for the whole."""
    compiling = torch.compile

    @functools.wraps(compiling)
    def guarded(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        module = getattr(model, "__self__", model)  # Module.compile compiles a method
        if isinstance(module, torch.nn.Module) and any(map(_is_dist, (*module.parameters(), *module.buffers()))):
            raise ShardError(
                "torch.compile was given a module with DistTensors, which it cannot trace: mw.compile_step(..., "
                'backend="inductor") captures the whole step and compiles what lies between collectives'
            )
        return compiling(model, *args, **kwargs)

    torch.compile = guarded


_SCRIPTED = (
    "TorchScript runs in C++, which would take this rank's part for the whole: build what is traced or scripted on one "
    "device, with values from mw.unshard; mw.compile_step captures a step of the mesh"
)


@functools.cache
def guard_scripts() -> None:
    """From the first sharded model on, TorchScript, which does not ask whose tensors it is given, meets none of a mesh.

    Scripted functions are given whole tensors, as every op without a rule.
    """
    for name in ("script", "trace"):
        _guard_script(name)
    run = torch.jit.ScriptFunction.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _enabled() and any(map(_is_dist, tensors_in((args, kwargs)))):
            return DistTensor.__torch_function__(self, (DistTensor,), args, kwargs)
        return run(self, *args, **kwargs)

    torch.jit.ScriptFunction.__call__ = called  # type: ignore[method-assign]


def _guard_script(name: str) -> None:
    original = getattr(torch.jit, name)

    @functools.wraps(original)
    def guarded(what: Any, *args: Any, **kwargs: Any) -> Any:
        held = (*what.parameters(), *what.buffers()) if isinstance(what, torch.nn.Module) else ()
        if any(map(_is_dist, (*held, *tensors_in((args, kwargs))))):
            raise ShardError(f"torch.jit.{name} was given DistTensors: {_SCRIPTED}")
        return original(what, *args, **kwargs)

    setattr(torch.jit, name, guarded)


def _keep_layouts() -> None:
    """Inputs of a checkpoint keep their layouts through hooks around it that pack what is saved (another checkpoint's).

    What such hooks give back is a tensor of its own, which knows nothing of a mesh.  The second run reads the stand-ins
    that the first one did.
    """
    save, get = CheckpointFrame.save_inputs, CheckpointFrame.get_inputs

    @functools.wraps(save)
    def saved(self: Any, *args: Any) -> None:
        self.recompute_fn = asked_again(within(OPEN.scopes, run_alike(self.recompute_fn)))
        self._kept = KeptInputs(args)
        save(self, *self._kept.args)
        self._kept.args = []

    @functools.wraps(get)
    def given(self: Any) -> list[Any]:
        made: list[Any] = get(self)
        return self._kept.given(made) if hasattr(self, "_kept") else made

    CheckpointFrame.save_inputs, CheckpointFrame.get_inputs = saved, given


def _save_parts() -> None:
    """Hooks that pack what autograd saves are given this rank's parts, as plain tensors.

    Autograd packs the same memory now as a distributed tensor, now as a plain one, and goes on with what comes back as
    the part.  A hook that makes a tensor of the global shape (``save_on_cpu(pin_memory=True)``), or reads the global
    value of a Partial, would give it something else; and the two runs of a checkpoint are compared by shapes.
    """
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


def install() -> None:
    """Guard them; plain tensors pass through."""
    torch.autograd.Function.apply = classmethod(_guarded)  # type: ignore[assignment,method-assign]
    _guard_wrapper(torch.nn.parallel.DistributedDataParallel, _SYNC)
    _guard_wrapper(torch.nn.DataParallel, _SYNC)
    _guard_compile()
    _keep_layouts()
    _save_parts()
    later = _Later()
    sys.meta_path.insert(0, later)
    for name in later.classes:
        if name in sys.modules:
            later.guard(sys.modules[name])


install()
