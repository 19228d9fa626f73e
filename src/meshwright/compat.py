"""What Meshwright needs of PyTorch beyond its documented interface, and what differs between its versions.

All of it is here, each name with what it is for; ``meshwright doctor`` prints it.  A name is looked up when it is first
asked for, so that a PyTorch without it says which one is missing.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

import torch

from .errors import MeshwrightError

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
TESTED = ("2.13", "2.15")  # the oldest and the newest PyTorch that the demo and tests have passed on

# Name here: (where it is, what it is for).
PRIVATE: dict[str, tuple[str, str]] = {
    "AllgatherOptions": ("torch._C._distributed_c10d.AllgatherOptions", "collectives"),
    "AllreduceOptions": ("torch._C._distributed_c10d.AllreduceOptions", "collectives"),
    "AllToAllOptions": ("torch._C._distributed_c10d.AllToAllOptions", "collectives"),
    "amp_foreach_non_finite_check_and_unscale_": ("torch._amp_foreach_non_finite_check_and_unscale_", "GradScaler"),
    "AutoDispatchBelowAutograd": ("torch._C._AutoDispatchBelowAutograd", "programs whose backward is written out"),
    "BarrierOptions": ("torch._C._distributed_c10d.BarrierOptions", "collectives"),
    "BroadcastOptions": ("torch._C._distributed_c10d.BroadcastOptions", "collectives"),
    "C_NN": ("torch._C._nn", "ops of torch.nn.functional"),
    "checkpoint_determinism_checks": (
        "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
        "torch.utils.checkpoint",
    ),
    "CheckpointFrame": ("torch.utils.checkpoint._CheckpointFrame", "torch.utils.checkpoint"),
    "compile_fx": ("torch._inductor.compile_fx.compile_fx", "captured steps compiled by inductor"),
    "current_autograd_node": ("torch._C._current_autograd_node", "which node of the backward runs"),
    "current_graph_task_id": ("torch._C._current_graph_task_id", "which backward runs"),
    "CustomOpDef": ("torch._library.custom_ops.CustomOpDef", "custom ops"),
    "DataDependentOutputException": ("torch._subclasses.fake_tensor.DataDependentOutputException", "captured programs"),
    "disable_current_modes": ("torch.utils._python_dispatch._disable_current_modes", "dispatch modes of users"),
    "disabled_torch_function_impl": ("torch._C._disabled_torch_function_impl", "calls on local tensors"),
    "DisableTorchFunctionSubclass": ("torch._C.DisableTorchFunctionSubclass", "calls on local tensors"),
    "dispatch_find_schema_or_throw": ("torch._C._dispatch_find_schema_or_throw", "signatures of ops"),
    "dispatch_has_kernel": ("torch._C._dispatch_has_kernel", "which ops a program file may name"),
    "dispatch_has_kernel_for_dispatch_key": ("torch._C._dispatch_has_kernel_for_dispatch_key", "reads of memory"),
    "distributed_world": ("torch.distributed.distributed_c10d._world", "processes forked from a rank"),
    "DispatchKey": ("torch._C.DispatchKey", "kernels of a class of our own"),
    "DispatchKeySet": ("torch._C.DispatchKeySet", "kernels of a class of our own"),
    "DynamicOutputShapeException": ("torch._subclasses.fake_tensor.DynamicOutputShapeException", "captured programs"),
    "eager_transforms": ("torch._functorch.eager_transforms", "torch.func on distributed tensors is refused"),
    "EnableTorchFunction": ("torch._C._EnableTorchFunction", "calls of users' code from inside of an op"),
    "engine_run_backward": ("torch.autograd.graph._engine_run_backward", "backward of distributed tensors"),
    "execution_engine": ("torch.autograd.Variable._execution_engine", "what is done when a backward ends"),
    "FakeTensor": ("torch._subclasses.fake_tensor.FakeTensor", "captured programs"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor.FakeTensorMode", "captured programs"),
    "FakeWork": ("torch._C._distributed_c10d.FakeWork", "collectives of a step that is captured"),
    "force_original_view_tracking": (
        "torch.autograd.grad_mode._force_original_view_tracking",
        "views in inference mode",
    ),
    "foreach_utils": ("torch.utils._foreach_utils", "foreach optimizers take distributed tensors"),
    "functorch_vmap": ("torch._functorch.vmap", "torch.func on distributed tensors is refused"),
    "get_current_function_mode_stack": ("torch.overrides._get_current_function_mode_stack", "dropout under a mode"),
    "get_dispatch_stack_at": ("torch._C._get_dispatch_stack_at", "dispatch modes of users"),
    "get_sequence_nr": ("torch._C._autograd._get_sequence_nr", "which forward call a node of the backward is of"),
    "graph_sources": ("torch.fx.graph_module._loader", "captured programs"),
    "has_compatible_shallow_copy_type": ("torch._has_compatible_shallow_copy_type", "Module.to and its kind"),
    "HigherOrderOperator": ("torch._ops.HigherOrderOperator", "captured programs"),
    "is_any_autocast_enabled": ("torch._C._is_any_autocast_enabled", "autocast"),
    "is_torch_function_enabled": ("torch._C._is_torch_function_enabled", "whether a call is one of ours on locals"),
    "jit_builtins": ("torch.jit._builtins", "TorchScript beside replaced functions"),
    "jit_get_schemas_for_operator": ("torch._C._jit_get_schemas_for_operator", "signatures of ops"),
    "len_torch_dispatch_stack": ("torch._C._len_torch_dispatch_stack", "dispatch modes of users"),
    "len_torch_function_stack": ("torch._C._len_torch_function_stack", "function modes of users"),
    "OpOverload": ("torch._ops.OpOverload", "ops by their signature"),
    "OpOverloadPacket": ("torch._ops.OpOverloadPacket", "ops by their name"),
    "peek_interpreter_stack": ("torch._C._functorch.peek_interpreter_stack", "whether torch.func transforms a call"),
    "pop_saved_tensors_default_hooks": (
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "saved tensors of stored parameters",
    ),
    "profiler_enabled": ("torch._C._autograd._profiler_enabled", "profiles of simulated ranks"),
    "push_saved_tensors_default_hooks": (
        "torch._C._autograd._push_saved_tensors_default_hooks",
        "saved tensors of stored parameters",
    ),
    "python_dispatch": ("torch.utils._python_dispatch", "whether a dispatch mode is on"),
    "pytree": ("torch.utils._pytree", "batches and results in containers"),
    "ReduceScatterOptions": ("torch._C._distributed_c10d.ReduceScatterOptions", "collectives"),
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


# A classmethod of Python up to torch 2.13, and one of C from 2.14 on.
_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.Function.apply`` as torch has it, whatever has taken its place since."""
    return _apply.__get__(None, cls)(*args, **kwargs)
