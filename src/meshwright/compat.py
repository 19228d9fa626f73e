"""What Meshwright needs of PyTorch beyond its documented interface, and what differs between its versions.

All of it is here, each name with what it is for; ``meshwright doctor`` prints it.  A name is looked up when it is first
asked for, so that a PyTorch without it says which one is missing.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch.autograd.graph import GradientEdge
from torch.overrides import handle_torch_function, has_torch_function, is_tensor_like

from .errors import MeshwrightError
from .torch_changes import replace

if TYPE_CHECKING:
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._library.custom_ops import CustomOpDef as CustomOpDef
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# What PyTorch imports when the first step is captured: a process that forks ranks has it before, once for all of them.
EXPORTER = ("torch.export", "torch._dynamo", "torch._functorch.aot_autograd")
TESTED = ("2.10", "2.15")  # the oldest and the newest PyTorch that the demo and tests have passed on

# Name here: (where it is, what it is for).
PRIVATE: dict[str, tuple[str, str]] = {
    "AllgatherOptions": ("torch._C._distributed_c10d.AllgatherOptions", "collectives"),
    "AllreduceOptions": ("torch._C._distributed_c10d.AllreduceOptions", "collectives"),
    "AllToAllOptions": ("torch._C._distributed_c10d.AllToAllOptions", "collectives"),
    "amp_foreach_non_finite_check_and_unscale_": ("torch._amp_foreach_non_finite_check_and_unscale_", "GradScaler"),
    "AutoDispatchBelowAutograd": ("torch._C._AutoDispatchBelowAutograd", "programs whose backward is written out"),
    "autocast_pass": (
        "torch._export.passes.replace_autocast_with_hop_pass",
        "regions of torch.autocast in captured programs",
    ),
    "autograd_profiler": ("torch.autograd.profiler", "whether somebody profiles"),
    "BarrierOptions": ("torch._C._distributed_c10d.BarrierOptions", "collectives"),
    "BroadcastOptions": ("torch._C._distributed_c10d.BroadcastOptions", "collectives"),
    "C_NN": ("torch._C._nn", "ops of torch.nn.functional"),
    "compile_fx": ("torch._inductor.compile_fx.compile_fx", "captured steps compiled by inductor"),
    "current_autograd_node": ("torch._C._current_autograd_node", "which node of the backward runs"),
    "current_graph_task_id": ("torch._C._current_graph_task_id", "which backward runs"),
    "CustomOpDef": ("torch._library.custom_ops.CustomOpDef", "custom ops"),
    "DataDependentOutputException": ("torch._subclasses.fake_tensor.DataDependentOutputException", "captured programs"),
    "default_device": ("torch._C._get_default_device", "answers of ops on fakes, captured programs"),
    "dispatch_keys": ("torch._C._dispatch_keys", "answers of ops on fakes, captured programs"),
    "dispatch_modes": ("torch._C._len_torch_dispatch_stack", "whether a dispatch mode is on"),
    "disable_current_modes": ("torch.utils._python_dispatch._disable_current_modes", "dispatch modes of users"),
    "disabled_torch_function_impl": ("torch._C._disabled_torch_function_impl", "calls on local tensors"),
    "DisableTorchDispatch": ("torch._C._DisableTorchDispatch", "answers of ops on fakes, captured programs"),
    "DisableTorchFunction": ("torch._C.DisableTorchFunction", "casts of weights by autocast's cache"),
    "DisableTorchFunctionSubclass": ("torch._C.DisableTorchFunctionSubclass", "calls on local tensors"),
    "dispatch_find_schema_or_throw": ("torch._C._dispatch_find_schema_or_throw", "signatures of ops"),
    "dispatch_has_kernel": ("torch._C._dispatch_has_kernel", "which ops a program file may name"),
    "dispatch_has_kernel_for_dispatch_key": ("torch._C._dispatch_has_kernel_for_dispatch_key", "reads of memory"),
    "distributed_world": ("torch.distributed.distributed_c10d._world", "processes forked from a rank"),
    "DispatchKey": ("torch._C.DispatchKey", "kernels of a class of our own"),
    "DispatchKeySet": ("torch._C.DispatchKeySet", "kernels of a class of our own"),
    "DynamicOutputShapeException": ("torch._subclasses.fake_tensor.DynamicOutputShapeException", "captured programs"),
    "EnableTorchFunction": ("torch._C._EnableTorchFunction", "calls of users' code from inside of an op"),
    "ensure_device_guard": ("torch._C._ensureCUDADeviceGuardSet", "a torch for GPUs on a machine without one"),
    "engine_run_backward": ("torch.autograd.graph._engine_run_backward", "backward of distributed tensors"),
    "enter_autocast": ("torch.amp.autocast_mode._enter_autocast", "regions of torch.autocast in captured programs"),
    "exit_autocast": ("torch.amp.autocast_mode._exit_autocast", "regions of torch.autocast in captured programs"),
    "execution_engine": ("torch.autograd.Variable._execution_engine", "what is done when a backward ends"),
    "FakeTensor": ("torch._subclasses.fake_tensor.FakeTensor", "captured programs"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor.FakeTensorMode", "captured programs"),
    "FakeWork": ("torch._C._distributed_c10d.FakeWork", "collectives of a step that is captured"),
    "force_original_view_tracking": (
        "torch.autograd.grad_mode._force_original_view_tracking",
        "views in inference mode",
    ),
    "foreach_utils": ("torch.utils._foreach_utils", "foreach optimizers take distributed tensors"),
    "function_base": ("torch._C._FunctionBase", "autograd functions of users on distributed tensors"),
    "get_current_function_mode_stack": ("torch.overrides._get_current_function_mode_stack", "dropout under a mode"),
    "get_dispatch_stack_at": ("torch._C._get_dispatch_stack_at", "dispatch modes of users"),
    "get_sequence_nr": ("torch._C._autograd._get_sequence_nr", "which forward call a node of the backward is of"),
    "graph_sources": ("torch.fx.graph_module._loader", "captured programs"),
    "has_compatible_shallow_copy_type": ("torch._has_compatible_shallow_copy_type", "Module.to and its kind"),
    "HigherOrderOperator": ("torch._ops.HigherOrderOperator", "captured programs"),
    "is_any_autocast_enabled": ("torch._C._is_any_autocast_enabled", "autocast"),
    "is_torch_function_enabled": ("torch._C._is_torch_function_enabled", "whether a call is one of ours on locals"),
    "is_torch_function_mode_enabled": (
        "torch._C._is_torch_function_mode_enabled",
        "reads of .data under function modes",
    ),
    "jit_builtins": ("torch.jit._builtins", "TorchScript beside replaced functions"),
    "jit_get_schemas_for_operator": ("torch._C._jit_get_schemas_for_operator", "signatures of ops"),
    "len_torch_dispatch_stack": ("torch._C._len_torch_dispatch_stack", "dispatch modes of users"),
    "len_torch_function_stack": ("torch._C._len_torch_function_stack", "function modes of users"),
    "new_group_with_tag": ("torch.distributed.distributed_c10d._new_group_with_tag", "groups before torch 2.12"),
    "OpOverload": ("torch._ops.OpOverload", "ops by their signature"),
    "OpOverloadPacket": ("torch._ops.OpOverloadPacket", "ops by their name"),
    "parametrize": ("torch.nn.utils.parametrize", "parametrize.cached() on simulated ranks"),
    "peek_interpreter_stack": ("torch._C._functorch.peek_interpreter_stack", "whether torch.func transforms a call"),
    "pop_saved_tensors_default_hooks": (
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "saved tensors of stored parameters",
    ),
    "RecordFunctionFast": ("torch._C._profiler._RecordFunctionFast", "profiles"),
    "preserve_version_counter": (
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "copies of views that get another history and the same value",
    ),
    "profiler_enabled": ("torch._C._autograd._profiler_enabled", "profiles of simulated ranks"),
    "push_saved_tensors_default_hooks": (
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "saved tensors of stored parameters",
    ),
    "python_dispatch": ("torch.utils._python_dispatch", "whether a dispatch mode is on"),
    "pytree": ("torch.utils._pytree", "batches and results in containers"),
    "ReduceScatterOptions": ("torch._C._distributed_c10d.ReduceScatterOptions", "collectives"),
    "set_grad_pass": (
        "torch._export.passes.replace_set_grad_with_hop_pass",
        "regions of torch.no_grad in captured programs",
    ),
    "set_throw_on_data_ptr": ("torch._C._set_throw_on_mutable_data_ptr", "answers of ops on fakes, captured programs"),
    "set_warn_on_data_ptr": (
        "torch._C._set_warn_deprecated_on_mutable_data_ptr",
        "answers of ops on fakes, captured programs",
    ),
    "storage_use_count": ("torch._C._storage_Use_Count", "whether anyone else holds a storage"),
    "swap_tensor_impl": ("torch._C._swap_tensor_impl", "parameters as fakes while a step is captured"),
    "top_saved_tensors_default_hooks": (
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "hooks of saved tensors that are on",
    ),
    "TorchDispatchMode": ("torch.utils._python_dispatch.TorchDispatchMode", "dispatch modes of users"),
    "tree_leaves": ("torch.utils._pytree.tree_leaves", "batches and results in containers"),
    "tree_map_only": ("torch.utils._pytree.tree_map_only", "batches and results in containers"),
    "will_engine_execute_node": ("torch._C._will_engine_execute_node", "which gradients a backward will bring"),
}


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = look_up(name)
    return found


def look_up(name: str) -> Any:
    """What PyTorch has at the place of ``name``.

    Raises:
        MeshwrightError: this PyTorch has nothing there.
    """
    path, needed = PRIVATE[name]
    module, rest = "torch", path.split(".")[1:]
    found: Any = torch
    try:
        for part in rest:
            module += "." + part
            if not hasattr(found, part):
                importlib.import_module(module)
            found = getattr(found, part)
    except (AttributeError, ImportError) as error:
        raise MeshwrightError(
            f"torch {torch.__version__} has no {path}, which is needed for {needed}; Meshwright is tested with torch "
            f"{TESTED[0]} to {TESTED[1]}"
        ) from error
    return found


def outside_modes() -> AbstractContextManager[Any]:
    """Inside, dispatch modes of users (of selective checkpoints, of counters) see nothing of what runs."""
    here: Any = sys.modules[__name__]
    made: AbstractContextManager[Any] = here.disable_current_modes() if here.dispatch_modes() else nullcontext()
    return made


# ---------------------------------------------------------------------------------------------- versions


def numbers_of(version: str) -> tuple[int, int]:
    """``2.13.0+cpu`` is ``(2, 13)``."""
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def untested(version: str) -> str:
    """What to be told of a PyTorch that the tests have not passed on; empty where they have."""
    oldest, newest = map(numbers_of, TESTED)
    if oldest <= numbers_of(version) <= newest:
        return ""
    return (
        f"Meshwright is tested with torch {TESTED[0]} to {TESTED[1]}, and this is torch {version}: run `meshwright "
        "doctor` to see whether it has what is needed, and compare a step with one device (meshwright train --verify)"
    )


if untested(torch.__version__):
    warnings.warn(untested(torch.__version__), stacklevel=2)


# Name here: (the PyTorch from which on it is there, what it is, and what is done before).
DIFFERENT: dict[str, tuple[str, str]] = {
    "around_checkpoints": (
        "2.15",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl; before, the function without _impl",
    ),
    "apply_function": ("2.14", "torch.autograd.Function.apply as a method of C; before, one of Python"),
    "redispatch_function": (
        "2.13",
        "torch.overrides.redispatch_function; before, a copy of the function to which nothing has overrides",
    ),
    "in_order": ("2.12", "torch.distributed.new_group(sort_ranks=False); before, a copy of it that does not sort"),
    "saving_frame": (
        "2.12",
        "torch.utils.checkpoint._CheckpointFrame.save_inputs; before, an autograd.Function saves them, led there",
    ),
    "hold_device_guard": (
        "2.12",
        "fakes of threads that end, in a torch for GPUs; before, one that stays is first",
    ),
    "selective_context": ("2.12", "SelectiveCheckpointContext(op_output=); before, policies are not told"),
    "backward": ("2.11", "torch.autograd.backward asks for overrides; before, a function around it does"),
}


def stood_in(version: str) -> list[str]:
    """The names here that stand in for what this PyTorch has not yet."""
    return [name for name, (since, _) in DIFFERENT.items() if numbers_of(version) < numbers_of(since)]


class _Names(dict[str, Any]):
    """The names that a copy of a function sees: a few of its own, and all others as its module has them now."""

    def __init__(self, names: dict[str, Any], own: dict[str, Any]) -> None:
        super().__init__(own, __builtins__=builtins)
        self.names = names

    def __missing__(self, name: str) -> Any:
        return self.names[name]


def _with_names(fn: Any, own: dict[str, Any], cells: tuple[Any, ...] | None = None) -> Callable[..., Any]:
    """A copy of ``fn`` to which the names ``own`` mean these values; what it calls is not copied."""
    names = _Names(fn.__globals__, own)
    made = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, cells or fn.__closure__)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


# ---------------------------------------------------------------------------------------------- classes of users

# A classmethod of Python up to torch 2.13, and one of C from 2.14 on.
_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` as torch has it, whatever has taken its place since."""
    return _apply.__get__(None, cls)(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- hooks


def add_hook(t: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``t.register_hook(hook)``, of a view too whose base was written to.

    torch makes the ``grad_fn`` of such a view anew when it is next asked for.  Where that is inside of
    ``register_hook``, the hooks that it is about to add are forgotten meanwhile, and the process ends (2.10 to 2.15).
    """
    _ = t.grad_fn
    return torch.Tensor.register_hook(t, hook)


# ---------------------------------------------------------------------------------------------- overrides


def _no_override(*args: Any) -> bool:
    return False


class _Without:
    """A module in which nothing has overrides."""

    has_torch_function = has_torch_function_unary = has_torch_function_variadic = staticmethod(_no_override)

    def __init__(self, module: Any, **own: Any) -> None:
        self.__dict__.update(own, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


_ASKED = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _hands_on(fn: FunctionType) -> bool:
    """Whether the function itself hands the call to overrides, where there are any."""
    return "handle_torch_function" in fn.__code__.co_names


@functools.cache
def _without_overrides(fn: FunctionType, deep: int = 3) -> Callable[..., Any]:
    """``fn`` to which nothing has overrides, nor to what hands on in its place, up to so many calls below it."""
    overrides = _Without(torch.overrides)
    own: dict[str, Any] = dict.fromkeys(_ASKED, _no_override)
    own |= {"overrides": overrides, "torch": _Without(torch, overrides=overrides)}
    if _hands_on(fn):
        return _with_names(fn, own)

    def below(found: Any) -> Any:
        return _without_overrides(found, deep - 1) if deep and isinstance(found, FunctionType) else found

    near = {name: fn.__globals__.get(name) for name in fn.__code__.co_names}
    own |= {n: below(f) for n, f in near.items() if isinstance(f, FunctionType) and f.__module__ == fn.__module__}
    return _with_names(fn, own, tuple(CellType(below(c.cell_contents)) for c in fn.__closure__ or ()))


def _redispatch_function(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """``func``, whose own look for overrides finds none; what it calls is looked at as ever."""
    while isinstance(func, FunctionType) and not _hands_on(func) and hasattr(func, "__wrapped__"):
        func = func.__wrapped__  # somebody has wrapped it, and the wrapper has run already
    if isinstance(func, FunctionType):
        return _without_overrides(func)(*args, **kwargs)
    with torch._C.DisableTorchFunction():  # a function of C calls nothing that has overrides
        return func(*args, **kwargs)


def _asking(original: Any, name: str) -> Any:
    """A function of PyTorch that takes ``tensors`` and first looks for their overrides, as newer versions do."""

    @functools.wraps(original)
    def asking(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        listed = (tensors,) if is_tensor_like(tensors) or isinstance(tensors, GradientEdge) else tuple(tensors)
        asked = tuple(filter(is_tensor_like, listed))
        if has_torch_function(asked):
            return handle_torch_function(asking, asked, listed, *args, **kwargs)
        return original(listed, *args, **kwargs)

    return asking


if not _hands_on(torch.autograd.backward):  # type: ignore[arg-type]
    replace("torch.autograd.backward", why="gradients of DistTensors, as newer versions have it")(_asking)

redispatch_function: Callable[..., Any] = getattr(torch.overrides, "redispatch_function", _redispatch_function)

# ---------------------------------------------------------------------------------------------- process groups


def in_order(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.distributed.new_group`` of ranks in the order in which they are given."""
    if "sort_ranks" in inspect.signature(new_group).parameters:
        return functools.partial(new_group, sort_ranks=False)
    return _unsorted()


def _unsorted() -> Callable[..., Any]:
    return _with_names(look_up("new_group_with_tag"), {"sorted": list})


# ---------------------------------------------------------------------------------------------- checkpoints, captured


def around_checkpoints(module: Any, around: Callable[..., Any]) -> dict[str, Any]:
    """What ``module`` calls to run around a checkpointed call, by name, to be replaced by ``around(context_fn)``."""
    noop = torch.utils.checkpoint.noop_context_fn

    def spread(fn: Any, preserve_rng_state: bool = True, context_fn: Any = noop, *_: Any, **__: Any) -> Any:
        return around(context_fn)

    def listed(fn: Any, args: Any, kwargs: Any, *, context_fn: Any = noop, **_: Any) -> Any:
        return around(context_fn)

    name = "_checkpoint_without_reentrant_generator"
    return {n: f for n, f in ((name, spread), (name + "_impl", listed)) if hasattr(module, n)}


def selective_context(output: Any) -> Any:
    """What a policy of ``torch.utils.checkpoint`` is told of an op that ran; older policies ask for no output."""
    context = torch.utils.checkpoint.SelectiveCheckpointContext
    if "op_output" in inspect.signature(context).parameters:
        return context(is_recompute=False, op_output=output)
    return context(is_recompute=False)


# ---------------------------------------------------------------------------------------------- devices


@functools.cache
def hold_device_guard() -> None:
    """To be called before threads that make fake tensors, by one that outlives them.

    Where torch is built for GPUs and there is none, a fake mode makes something that lies in the memory of the thread
    that is first to enter one, and every later one reads it: with that thread at its end, the process crashes.
    """
    if not torch.cuda.is_available():
        look_up("ensure_device_guard")()


# ---------------------------------------------------------------------------------------------- checkpoints


class _Saver:
    """In place of the ``autograd.Function`` that saves the inputs of a checkpoint: they are the frame's to save.

    ``apply`` gives what the frame is handed as ``input_saver``; what it gives as that is asked for them.
    """

    saved_tensors = None

    def __init__(self, frame: Any, inputs: tuple[Any, ...], grad: bool) -> None:
        self.frame, self.inputs, self.grad_fn = frame, inputs, self if grad else None

    @classmethod
    def apply(cls, dummy: torch.Tensor, *inputs: Any) -> _Saver:
        return cls(None, inputs, torch.is_grad_enabled())

    def get_args(self, saved: None) -> list[Any]:
        made: list[Any] = self.frame.get_inputs()
        return made


def saving_frame(module: Any) -> Any:
    """The frame of a checkpoint, with the methods that it has from torch 2.12 on."""
    frame, function = module._CheckpointFrame, getattr(module, "_NoopSaveInputs", None)
    if function is None:
        return frame

    def given(self: Any) -> _Saver | None:
        return None if self.node is _NOTHING else _Saver(self, (), self.node is not None)

    def hand(self: Any, saver: _Saver | None) -> None:
        self.node = _NOTHING if saver is None else None
        if saver is not None and saver.grad_fn is not None:
            self.save_inputs(*saver.inputs)

    def save_inputs(self: Any, *args: Any) -> None:
        self.node = apply_function(function, torch.empty((0,), requires_grad=True), *args)

    def get_inputs(self: Any) -> list[Any]:
        node = self.node.grad_fn
        return list(node.get_args(node.saved_tensors))

    frame.input_saver, frame.save_inputs, frame.get_inputs = property(given, hand), save_inputs, get_inputs
    module._NoopSaveInputs = _Saver
    return frame


_NOTHING = object()
