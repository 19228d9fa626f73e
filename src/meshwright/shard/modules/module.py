"""Sharding of modules: parameters become DistTensors, constraints of activations become hooks."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from types import NoneType
from typing import Any

import torch
import torch.nn as nn

from ... import compat
from ...collective import Fact, together
from ...dispatch import disabled
from ...errors import LayoutError, MeshwrightError, ShardError, takes
from ...layout import Layout, LayoutTable, Placements, Spec, read_layouts
from ...local_tensor import bare, storage_of
from ...mesh import Mesh
from ...ranks import runtime
from ...rules import COMPOSITES
from ...tensor import DistTensor, GradientHook, wrap
from ...tensor.api import MESH_WANTED, shard_tensor
from ...tensor.autograd_functions import guard_scripts
from ..gradients.sync import BUCKET_BYTES, GradSync
from ..initialization.values import Init, ValueOrigin, become, give_values, origins_of
from ..parameters.host import HOST, in_host_memory
from ..parameters.made_for import check_plan_matches, planned_for
from ..parameters.names import Globs, Names, inside, matching
from ..parameters.precision import PRECISION_WANTED, Dtypes, Precisions, casts_of
from ..parameters.stored import ON_WANTED, OVER_WANTED, UNSHARDED, Over, Storage, Stored, on_host, stored
from ..units import stored as units
from .constraints import Inputs, Outputs, hooked
from .facts import facts_of

Tensor = torch.Tensor


_FIX = 'give a dict, glob of names to placements: {"*.weight": {"tp": mw.Shard(0)}}'
_GLOBS = ((Mapping, NoneType), _FIX)


@takes(
    ShardError,
    mesh=MESH_WANTED,
    placements=((Mapping, str, PathLike, NoneType), _FIX),
    inputs=_GLOBS,
    outputs=_GLOBS,
    fsdp=OVER_WANTED,
    offload=ON_WANTED,
    precision=PRECISION_WANTED,
    bucket_bytes=((int, float), "give a number of bytes"),
)
def shard_module(
    model: nn.Module,
    mesh: Mesh,
    placements: Globs | str | PathLike[str] | None = None,
    *,
    inputs: Globs | None = None,
    outputs: Globs | None = None,
    fsdp: Over | None = None,
    offload: str | Mapping[str, str] | None = None,
    reshard_after_forward: bool = True,
    precision: Precisions | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    sync: bool = True,
    init: Init = None,
) -> nn.Module:
    """Shard a model's parameters over `mesh`, in place, and synchronize its gradients.

    Every rank calls it with the same model. The model keeps its class, `forward` and parameter names. Gradients are
    reduced during the backward pass.

    FSDP2: `fully_shard`. DTensor: `parallelize_module`, `distribute_module`. DDP: `DistributedDataParallel`.

    Args:
        model: A module for one device, with the same values on every rank (same seed, or one file). A module on the
            meta device is initialized shard by shard, with the values one device draws from the same seed.
        mesh: The mesh.
        placements: Globs of parameter and buffer names to placements, `{"*.qkv.weight": {"tp": mw.Shard(0)}}`; or a
            [LayoutTable][meshwright.LayoutTable] or the path of one. The last glob that matches wins. Other parameters
            are replicated. Other buffers stay plain tensors, which count as replicated.
        inputs: Globs of module names to placements. Floating-point DistTensors among the positional inputs are
            redistributed to them. With `outputs`, this is sequence parallelism.
        outputs: The same for outputs.
        fsdp: Axis or axes over which parameters are stored sharded and all-gathered for use (ZeRO-3); or globs of names
            of parameters or modules to axes. FSDP2: `fully_shard`.
        offload: `"cpu"` stores parameters, gradients and optimizer states on the CPU, and copies parameters to the
            mesh's device for use; or globs of names. FSDP2: `CPUOffloadPolicy`.
        reshard_after_forward: With `fsdp` or `offload`: free parameters after forward, and gather or copy them again
            for backward. FSDP2: `reshard_after_forward`.
        precision: Dtypes of compute and reduction, see [Precision][meshwright.Precision]; or globs of names of
            parameters or modules. The last glob that matches wins. FSDP2: `MixedPrecisionPolicy`.
        bucket_bytes: Maximum size of a bucket of gradients, in bytes. DDP: `bucket_cap_mb`.
        sync: `False` leaves gradients Partial where ranks did different work; `mw.reshard(p.grad, ...)` reduces one.
        init: For a model on the meta device: called with the model once it has memory, to write its parameters.
            `"load"`: weights are loaded next (`mw.load_weights`, `load_state_dict`); the first call raises if one was
            not. Default: repeat what the constructor did, shard by shard.

    Returns:
        The same model. Its parameters are the same objects.

    Raises:
        ShardError: If a glob matches nothing, a parameter is sharded already, or nothing initializes a meta tensor.
        LayoutError: If a placement names a dim that the parameter does not have.
        DesyncError: If ranks pass different models or placements.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2, "tp": 2})
        columns, rows = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}


        def train():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
            model = mw.shard_module(model, mesh, {"0.*": columns, "2.weight": rows}, fsdp="dp")
            x = mw.shard_tensor(torch.randn(6, 8), mesh, {"dp": mw.Shard(0)})
            model(x).square().mean().backward()
            return model[0].weight.grad.shape


        assert mw.simulate(train, mesh) == [(16, 8)] * 4
        ```
    """
    _check_model(model)
    guard_scripts()
    _check_sync(sync, fsdp, offload, precision)
    around = {"inputs": inputs or {}, "outputs": outputs or {}}
    if isinstance(placements, (str, PathLike)):
        with together(mesh, "shard_module"):
            placements = read_layouts(placements)
    if isinstance(placements, LayoutTable):
        with together(mesh, "shard_module"):
            check_plan_matches(model, mesh, planned_for(placements))
            _check_eager(placements)
        around = {k: {**getattr(placements, k), **said} for k, said in around.items()}
        fsdp = placements.options.get("fsdp") if fsdp is None else fsdp
        reshard_after_forward = reshard_after_forward and placements.options.get("reshard_after_forward", True)
    names, kept, origins = _shard_tensors(
        model, mesh, placements or {}, around, Storage(fsdp=fsdp, offload=offload), precision
    )
    params = {n: t for n, t in names.current().items() if isinstance(t, DistTensor) and isinstance(t, nn.Parameter)}
    if origins:
        give_values(model, names, origins, mesh.device, init)
    if not sync:
        return model
    before: GradSync | None = model.__dict__.get("_gradient_sync")  # it was sharded before, and got other parameters
    synced = before if before is not None and before.mesh == mesh else GradSync(mesh)
    if kept:
        units.install(
            model,
            mesh,
            synced,
            {id(params[n]): how for n, how in kept.items()},
            reshard_after_forward=reshard_after_forward,
        )
    model.__dict__.update(_gradient_sync=synced, _others_sync=synced.cover(params, bucket_bytes))
    return model


def _check_eager(table: LayoutTable) -> None:
    """Raises ShardError for options of a plan that eager steps do not have."""
    for option, instead in (
        ("stages", "mw.compile_step(layouts=...)"),
        (
            "recompute",
            "mw.compile_step(layouts=...), or call torch.utils.checkpoint in the model and delete the option",
        ),
    ):
        if table.options.get(option):
            raise ShardError(f"shard_module: the plan has {option}={table.options[option]!r}. Use {instead}.")


def _shard_tensors(
    model: nn.Module,
    mesh: Mesh,
    placements: Any,
    constraints: dict[str, Globs],
    storage: Storage,
    precision: Precisions | None,
) -> tuple[Names, dict[str, Stored], dict[str, ValueOrigin]]:
    """Lay tensors and attach constraints, or raise the same on all ranks; records of parameters and origins by name."""
    names, modules = Names(model), dict(model.named_modules())
    with together(mesh, "shard_module", fix="build the same model everywhere") as facts:
        plan = _plan(names, mesh, placements)
        casts = casts_of(model, names, precision)
        for name, dtypes in casts.dtypes.items():
            if name in plan:
                plan[name] = plan[name].with_(comm_formats=(None, dtypes.grad_comm))
        kept = storage.records(names, mesh, plan, casts.dtypes)
        _check_storage_unchanged(names, storage, casts.dtypes)
        _check_scripted(names, plan)
        _check_memory(names, plan)
        hooks = [hooked(modules, globs, what) for what, globs in constraints.items()]
        origins = origins_of(names.tensors)
        facts += [*facts_of(names, plan, origins), *(Fact(f"precision {part!r}") for part in casts.parts())]
        facts += [Fact(f"{name} is {how.text(mesh)}") for name, how in kept.items()]
    for name, spec in plan.items():
        _lay(names, name, spec, hosted=kept.get(name, UNSHARDED).device is not None)
    list(casts.attach(model))  # in front of the constraints: what those send has the dtype
    for found, kind in zip(hooks, (Inputs, Outputs), strict=True):
        for module, constraint in found:
            kind(mesh, constraint).attach(module)
    return names, kept, origins


def _check_memory(names: Names, plan: Mapping[str, Spec]) -> None:
    """Raises ShardError for tensors of one memory that would get memory of their own, and follow each other no more."""
    seen: dict[tuple[int, int], str] = {}
    for name, t in names.tensors.items():
        if isinstance(t, DistTensor) or not t.numel():
            continue
        other = seen.setdefault((storage_of(t), int(t.storage_offset())), name)
        if other != name and not plan.keys().isdisjoint((name, other)):
            raise ShardError(
                f"shard_module: {other} and {name} are two tensors of one memory, and would not follow each other any "
                "more. Assign the parameter itself to both modules (head.weight = embedding.weight; Transformers: "
                "model.tie_weights()), or a clone."
            )


def _check_scripted(names: Names, plan: Mapping[str, Spec]) -> None:
    """Raises ShardError for modules of TorchScript whose tensors would be split: C++ takes a part for the whole."""
    for prefix, module in names.modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            held = {names.all[n] for n in names.all if inside(n, prefix)}
            split = next((n for n in held if n in plan and plan[n].layout != Layout(plan[n].mesh)), None)
            if split is not None:
                raise ShardError(
                    f"{split} would be split, and {prefix or 'the model'} is a module of TorchScript, which runs in "
                    "C++ and would take this rank's part for the whole: shard the module that it was made from"
                )


def _check_storage_unchanged(names: Names, storage: Storage, said: Mapping[str, Dtypes]) -> None:
    """Raises ShardError for what was sharded before and is kept otherwise."""
    laid = {n: t for n, t in names.tensors.items() if isinstance(t, DistTensor)}
    for name in storage.hosted(names):
        if name in laid and not on_host(laid[name]):
            raise ShardError(f"offload: {name} is sharded already, and not so: say offload= where it is sharded first")
    for name, dtypes in said.items():
        if name in laid:
            how, spec = stored(laid[name]), laid[name]._spec
            have = (how.dtypes or Dtypes(spec.dtype, spec.dtype))._replace(grad_comm=spec.grad_comm_format)
            if have != (dtypes if how.axes else dtypes._replace(gather=None)):
                raise ShardError(
                    f"precision: {name} is sharded already, {have}: say precision= where it is sharded first, and the "
                    "same here"
                )


def _check_sync(sync: bool, fsdp: Any, offload: Any, precision: Any) -> None:
    """Raises ShardError for options that do nothing without the synchronisation of gradients."""
    fix = "needs the synchronisation of gradients: leave out sync=False"
    if fsdp and not sync:
        raise ShardError(f"fsdp= {fix}")
    if offload and not sync:
        raise ShardError(f"offload= {fix}")
    if precision and not sync:
        raise ShardError(f"precision= {fix}; mw.compile_step takes precision= itself")


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
                "shard_module does: pass the module inside, unwrapped (fsdp= is what FSDP does)"
            )
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ShardError(
                f"{name or 'the model'} is compiled by torch.compile, which cannot trace DistTensors: shard the module "
                'that was compiled; mw.compile_step(..., backend="inductor") captures a whole step and compiles what '
                "lies between collectives"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ShardError(
                f"{name or 'the model'} is an {type(module).__name__} with sparse=True, and sparse gradients cannot be "
                "synchronised: build it with sparse=False, or set its attribute sparse to False"
            )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if type(t).__module__.startswith("torch.distributed"):
            raise ShardError(
                f"{name} is a {type(t).__name__} of PyTorch: build the model with plain tensors and give their layout "
                "in placements=, or bring one over with mw.from_dtensor"
            )
        if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ and not isinstance(t, compat.FakeTensor):
            raise ShardError(
                f"{name} is a {type(t).__name__} of {type(t).__module__.partition('.')[0]}, which mw.shard_module does "
                "not split: shard the model with plain tensors, and leave out what makes others of them (quantize_)"
            )
        if nn.parameter.is_lazy(t):
            raise ShardError(f"{name} has no shape yet: run one batch through the model before it is sharded")
        if t.is_inference():
            raise ShardError(
                f"{name} was made under torch.inference_mode(), and can never be trained: leave that first"
            )


def lay_module(
    model: nn.Module,
    mesh: Mesh,
    specs: Mapping[str, Spec],
    kept: Mapping[str, Stored],
    init: Init = None,
) -> dict[str, DistTensor]:
    """Lay the parameters and buffers of a model as ``specs`` and records say (by their first names); nothing else is
    done to it.

    Tensors that lie on the mesh already must lie so; they are brought to the host where they are stored there.  Returns
    the distributed ones by name.

    Raises:
        ShardError: a tensor that lies otherwise already; a module that cannot initialise itself.
        DesyncError: ranks that pass different models or specs.
    """
    names = Names(model)
    plan = {n: s for n, s in specs.items() if not isinstance(names.tensors[n], DistTensor)}
    with together(mesh, "shard_module", fix="build the same model everywhere") as facts:
        for name, spec in specs.items():
            t = names.tensors[name]
            have = t._spec.layout if isinstance(t, DistTensor) else spec.layout
            if have != spec.layout:
                raise ShardError(f"{name} is sharded already, as {have!r}, and the program needs {spec.layout!r}")
        _check_memory(names, plan)
        origins = origins_of(names.tensors)
        facts += facts_of(names, plan, origins)
    for name in specs:
        t, hosted = names.tensors[name], kept.get(name, UNSHARDED).device is not None
        if name in plan:
            _lay(names, name, plan[name], hosted=hosted)
        elif hosted:
            with torch.no_grad(), disabled():
                t.data = in_host_memory(bare(t), mesh.device)
    if origins:
        give_values(model, names, origins, mesh.device, init)
    return {n: t for n, t in names.current().items() if isinstance(t, DistTensor)}


# ---------------------------------------------------------------------------------------------- names


def _plan(names: Names, mesh: Mesh, placements: Globs) -> dict[str, Spec]:
    """First name of each tensor to be laid on the mesh, to its spec."""
    chosen: dict[str, Placements] = {}
    for axis, placement in placements.items():
        if axis in mesh.axes and not isinstance(placement, (Mapping, Layout, list, tuple)):
            raise ShardError(
                f"shard_module: placements gives the axis {axis!r} {placement!r}, and no names of parameters. Pass "
                f'{{"*.weight": {{{axis!r}: {placement!r}}}}}; for data parallelism pass no placements, and shard the '
                "batch."
            )
    for glob, matched in matching(placements, names.all, "parameter or buffer", names.modules).items():
        for name in matched:
            # A pattern for weights meets counters too (num_batches_tracked), of which there is nothing to split.
            if names.tensors[names.all[name]].ndim or name == glob:
                chosen[names.all[name]] = placements[glob]
    plan = {}
    for name, t in names.tensors.items():
        if isinstance(t, DistTensor):
            if name in chosen:
                raise ShardError(
                    f"{name} is sharded already, as {t._spec.layout!r}: change it with mw.reshard, or build the model "
                    "again"
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
        plan[name] = Spec(t.shape, t.dtype, layout, undecided_mask=mesh.everywhere)
    return plan


def _lay(names: Names, name: str, spec: Spec, *, hosted: bool = False) -> None:
    """Make one tensor of the model distributed: the same object, which an optimizer may hold already."""
    t = names.tensors[name]
    mesh = spec.mesh
    here = mesh.coordinate(runtime.RT.rank)
    param = isinstance(t, nn.Parameter)
    if t.is_meta:
        part = torch.empty(spec.local_shape(here), dtype=t.dtype, device=HOST if hosted else mesh.device)
        become(t, in_host_memory(part, mesh.device) if hosted else part)
    else:
        local = shard_tensor(t.detach(), mesh, spec.layout, order=dict(spec.layout.order), check=False)
        with torch.no_grad(), disabled():
            t.grad = None
            if t.requires_grad:
                # A graph from before (weight_norm, prune) may keep the node to which gradients of the old shape go;
                # only data of another dtype have it made anew.
                t.data = t.new_empty(0, dtype=torch.float16 if t.dtype is not torch.float16 else torch.float32)
            put = in_host_memory(local, mesh.device) if hosted else Tensor.to(local, mesh.device)
            t.data = put.as_subclass(Tensor)
    wrap(t, spec)
    hooks: Any = t._backward_hooks or {}
    for at, hook in hooks.items():  # autograd would call them with local gradients
        hooks[at] = GradientHook(t, hook)
    if param:
        t._is_param = True


def _compatible(a: Tensor, b: Tensor) -> bool:
    """Asked by ``Module.to`` of a parameter and its conversion."""
    with disabled():
        return compat.has_compatible_shallow_copy_type(a, b)


COMPOSITES["_has_compatible_shallow_copy_type"] = _compatible

__all__ = ["lay_module", "shard_module"]
