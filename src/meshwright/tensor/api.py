"""Making, moving and reading distributed tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import NoneType
from typing import Any, cast

import torch
import torch.nn as nn

from .. import collective
from ..collective import Fact, together
from ..dispatch import forget_ops
from ..errors import LayoutError, MeshError, RuleError, takes
from ..generator import materialize
from ..layout import At, Layout, Partial, Placements, Replicate, Shard, Spec
from ..mesh import Mesh
from ..ranks import runtime
from ..ranks.launchers import launched
from ..resharding import executor, planner
from ..rules import Rule, checked_strategies
from ..rules import rule as _rule
from ..rules.factor_notation import TAKEN_WHERE
from ..rules.strided import ROW_MAJOR
from . import DistTensor, Inference, graph_marks, infer, wrap
from . import autograd_functions as _functions  # noqa: F401 (guards what would take a rank's part for the whole)

Tensor = torch.Tensor


MESH_WANTED = (Mesh, "take mw.init_mesh({...}), or mw.Mesh({...}) without processes")
_DIST = (DistTensor, "mw.shard_tensor(t, mesh, placements) lays a plain tensor on a mesh; of several, one at a time")
_TENSOR = (Tensor, "torch.as_tensor(x) makes a tensor of numbers and arrays; of several, one at a time")


def init_mesh(
    axes: dict[str, int], *, device: str = "cpu", timeout: float | None = None, check: bool = False,
    watch: float | None = 10.0,
) -> Mesh:  # fmt: skip
    """A mesh over the running processes: those of the process group, or those that a launcher started.

    Without a process group it makes one, from what torchrun, ``accelerate launch``, mpirun or srun say (see
    ``docs/launchers.md``).

    Args:
        axes: axis name to size; the product must be the number of processes.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (NCCL; a process group of gloo that is there will do, and lets processes
            share a GPU).  Of several GPUs the process gets that of its local rank.
        timeout: seconds that a rank waits in a collective for the others before it raises; 300 unless given.  Ranks
            that disagree are told within seconds, so it only bounds how long a rank may be stopped, or do something
            alone (write a checkpoint, read data).  After 30 seconds a warning says who waits for whom.
        check: compare at every collective what the ranks are about to do, and by digest the values that must be the
            same (see ``docs/agreement.md``).  Slower: to find out what is wrong.
        watch: seconds that a process may be stopped, or a machine silent, until it counts as lost; a process that
            dies is noticed at once, and all ranks leave (see ``docs/faults.md``).  None: nobody watches.  The first
            call for a process group says.

    Raises:
        MeshError: on every rank, when the mesh does not match the number of processes.
        DesyncError: on every rank, when they were started with different arguments.
    """
    import torch.distributed as dist

    mesh = Mesh(axes, device=device)
    if timeout is not None and not timeout > 0:
        raise MeshError(f"init_mesh: timeout={timeout!r} is not a number of seconds above 0")
    if watch is not None and not watch >= 1:
        raise MeshError(f"init_mesh: watch={watch!r}: at least 1 second was expected, or None")
    if runtime.RT.sim is None:
        started = dist.is_initialized()
        launch = None if started else launched()
        if launch is not None:
            _own_device(device, launch.local_rank)
            limit: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
            with collective.meeting(launch, timeout) as how:
                dist.init_process_group("nccl" if device == "cuda" else "gloo", **how, **limit)
            started = True
        world = dist.get_world_size() if started else 1
        if mesh.size != world:
            sizes = " x ".join(map(str, mesh.sizes))
            raise MeshError(
                f"{mesh!r} needs {sizes} = {mesh.size} processes, {world} {'are' if world != 1 else 'is'} running: "
                f"start it with torchrun --nproc-per-node {mesh.size}, or change the sizes"
            )
        if started:
            runtime.RT.timeout = timeout
            collective.connect(mesh)
    runtime.RT.check = False
    _agree("init_mesh", f"{mesh!r}, timeout={timeout}, check={check}, watch={watch}", mesh)
    if watch is not None:
        collective.watch_over(mesh, watch)
    runtime.RT.check = check
    return mesh


def _own_device(device: str, local_rank: int) -> None:
    """Each process of a machine gets a GPU of its own, where there are several: with NCCL two cannot share one."""
    if device == "cuda" and torch.cuda.device_count() > 1:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def _spec_for(shape: Any, dtype: torch.dtype, mesh: Mesh, placements: Placements, order: Any = None) -> Spec:
    layout = Layout(mesh, placements, order=order, ndim=len(shape))
    return Spec(shape, dtype, layout, undecided=mesh.everywhere)


def _agree(what: str, value: Any, mesh: Mesh) -> None:
    """Raise DesyncError on every rank where ranks of the mesh do not bring the same value."""
    with together(mesh, what, fix="every rank must make the same call") as facts:
        facts.append(Fact(str(value)))


@takes(LayoutError, t=_TENSOR, mesh=MESH_WANTED)
def shard_tensor(t: Tensor, mesh: Mesh, placements: Placements, *, order: Any = None, check: bool = True) -> DistTensor:
    """Lay a global tensor on a mesh.

    Args:
        t: the global tensor, the same on every rank.
        mesh: the mesh.
        placements: axis name to placement (axes not named: Replicate), or one per axis.
        order: dim to the axes that split it, major first.
        check: compare shapes, dtypes, placements and, by digest, values between ranks (one small exchange).

    Returns:
        A leaf that holds a copy of this rank's part; requires grad if ``t`` does.

    Raises:
        LayoutError: a placement for a dim that does not exist.
        DesyncError: ranks that pass different shapes, placements or values.
    """
    if isinstance(t, DistTensor):
        raise LayoutError("shard_tensor takes a plain tensor; mw.reshard changes the layout of a DistTensor")
    spec = _spec_for(t.shape, t.dtype, mesh, placements, order)
    if check:
        values = f"values of digest {collective.digests([t])[0]:x}" if mesh.size > 1 and not t.is_meta else ""
        _agree("shard_tensor", (tuple(t.shape), str(t.dtype), repr(spec.layout), values), mesh)
    source = Spec(t.shape, t.dtype, Layout(mesh))
    with torch.no_grad():
        local = executor.apply(planner.plan(source, spec.decided()).steps, t.detach())
        local = local.clone(memory_format=torch.contiguous_format)
    made = wrap(local, spec)
    made.__dict__[ROW_MAJOR] = True
    made.requires_grad_(t.requires_grad)
    if isinstance(t, nn.Parameter):
        made._is_param = True
    return made


@takes(LayoutError, local=_TENSOR, mesh=MESH_WANTED, shape=((tuple, list, NoneType), "give one size per dim"))
def from_local(
    local: Tensor,
    mesh: Mesh,
    placements: Placements,
    *,
    shape: Any = None,
    order: Any = None,
    check: bool = True,
) -> DistTensor:
    """A distributed tensor from the part that each rank brings; differentiable.

    Args:
        local: this rank's part (not copied).
        mesh, placements, order: as for ``shard_tensor``.
        shape: the global shape; else the parts' lengths are added up along sharded dims.
        check: compare between ranks (one small exchange); without it parts are taken to be even.

    Raises:
        LayoutError: parts whose sizes are not those of ``torch.chunk``.
        DesyncError: ranks that pass different dtypes or placements.
    """
    if isinstance(local, DistTensor):
        raise LayoutError("from_local takes the plain tensor that this rank holds: mw.reshard changes a DistTensor")
    runtime.RT.batches.lay(mesh.ranks)
    layout = Layout(mesh, placements, order=order, ndim=local.dim())
    if check:
        _agree("from_local", (local.dim(), str(local.dtype), repr(layout)), mesh)
    here = mesh.coordinate(runtime.RT.rank)
    if shape is None:
        shape = _global_shape(local, layout, check)
    spec = Spec(shape, local.dtype, layout, undecided=mesh.everywhere)
    want = spec.local_shape(here)
    fits = tuple(local.shape) == want
    seen = collective.all_gather_object(fits, collective.group(mesh)) if check and mesh.size > 1 else [fits]
    if not all(seen):
        raise LayoutError(
            f"from_local: rank {mesh.ranks[seen.index(False)]} brought a part that does not fit; here it is "
            f"{tuple(local.shape)} and {tuple(shape)} as {layout!r} asks for {want} (torch.chunk sizes): pass shape=, "
            "or cut the parts so"
        )
    if local.requires_grad and (not local.is_leaf or torch.is_grad_enabled()):
        return wrap(local.view_as(local), spec.decided())
    made = wrap(local.detach(), spec)
    made.requires_grad_(local.requires_grad)
    return made


def _global_shape(local: Tensor, layout: Layout, check: bool) -> list[int]:
    shape = list(local.shape)
    split = layout.dim_axes()
    if held := [a for a, p in enumerate(layout.placements) if isinstance(p, At)]:
        if not check:
            raise LayoutError(f"from_local(check=False): {layout!r} leaves ranks without rows; pass shape=")
        split[0] = (*split.get(0, ()), *held)
    for d, axes in split.items():
        group = collective.group(layout.mesh, tuple(sorted(axes)))
        if check and group.size > 1:
            shape[d] = sum(collective.all_gather_object(local.shape[d], group))
        else:
            shape[d] *= group.size
    return shape


@takes(
    LayoutError,
    factory=(Callable, "take what makes a tensor, e.g. torch.randn"),
    shape=((tuple, list), "give one size per dim"),
    mesh=MESH_WANTED,
)
def sharded(
    factory: Callable[..., Tensor],
    shape: Any,
    mesh: Mesh,
    placements: Placements = (),
    *,
    dtype: torch.dtype | None = None,
    order: Any = None,
    requires_grad: bool = False,
) -> DistTensor:
    """A tensor made shard by shard, never whole: ``sharded(torch.randn, (4096, 4096), mesh, {"tp": Shard(0)})``.

    Values are those that one device would get from the same seed.
    """
    spec = _spec_for(tuple(shape), dtype or torch.get_default_dtype(), mesh, placements, order)
    here = mesh.coordinate(runtime.RT.rank)
    local = materialize(factory, tuple(shape), spec.dtype, spec, here)
    made = wrap(local, spec)
    made.requires_grad_(requires_grad)
    return made


@takes(LayoutError, x=_DIST)
def reshard(x: DistTensor, placements: Placements, *, order: Any = None) -> DistTensor:
    """``x`` in another layout, by the cheapest sequence of conversions; differentiable (the backward is its transpose).

    Args:
        x: a DistTensor of any layout, Partial too.
        placements: axis name to placement; axes not named keep theirs.
        order: dim to the axes that split it, major first.

    Raises:
        LayoutError: a placement that does not fit.
    """
    return x.redistribute(placements, order=order)


@takes(LayoutError, x=(Tensor, "of several, one at a time, e.g. {k: mw.unshard(t) for k, t in state.items()}"))
def unshard(x: Tensor) -> Tensor:
    """The global value as a plain tensor, on every rank; differentiable.  Every rank must call it, at one place.

    It is a copy, however ``x`` lies: what is kept of it stays as it is when ``x`` is written to.  A plain tensor is
    returned as it is.
    """
    return x.full_tensor() if isinstance(x, DistTensor) else x


@takes(LayoutError, x=_TENSOR)
def constrain(x: Tensor, placements: Placements) -> Tensor:
    """A constraint of a layout inside a model: reshards a DistTensor; a plain tensor is returned as it is.

    Where the model is being captured (``compile_step``) it becomes part of the program.
    """
    if isinstance(x, DistTensor):
        return reshard(x, placements)
    return graph_marks.mark(x, placements) if graph_marks.exporting() else x


@contextmanager
def strategies(wished: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Inside, ops that can be computed in several ways take these; those not named take what sends fewest bytes.

    Args:
        wished: op to axis to strategy: ``{"scaled_dot_product_attention": {"cp": "heads"}}`` (or ``"gather"``). With
            ``"gather:max_bytes=1000000"`` attention goes in groups of heads, which bring at most so many bytes each.

    A change makes all plans anew: once around the training, not around each step.  What no call inside could take, as
    the axis does not split what it is about, is a warning at the end.

    Raises:
        RuleError: an op or a strategy that does not exist.
    """
    checked_strategies(wished)
    rt = runtime.RT
    if rt.strategies == wished:  # nothing is planned anew
        yield
        return
    before, rt.met = rt.met, set()
    try:
        with runtime.preferring(wished):
            yield
        for op, axis, name in [(op, axis, name) for op, axes in wished.items() for axis, name in axes.items()]:
            if (op, axis) not in rt.met:
                warnings.warn(
                    f"strategies: no {op} inside had {TAKEN_WHERE[op]} split over {axis!r}, so none took {name!r}: lay "
                    "them so, or leave it out",
                    stacklevel=runtime.users_level(),
                )
    finally:
        rt.met = before


@takes(LayoutError, x=_DIST)
def to_dtensor(x: DistTensor) -> Any:
    """The same data as torch's DTensor (no copy), for torch's checkpointing and friends."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(
        x.to_local(), x.mesh.device_mesh(), x.spec.layout.to_torch(), run_check=False, shape=x.shape, stride=stride
    )


def from_dtensor(d: Any, mesh: Mesh | None = None) -> DistTensor:
    """A DistTensor on the data of torch's DTensor (no copy)."""
    if not hasattr(d, "device_mesh"):
        raise LayoutError(f"from_dtensor takes a DTensor of PyTorch, not {type(d).__name__}: see mw.shard_tensor")
    device_mesh = d.device_mesh
    if mesh is None:
        names = device_mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(device_mesh.ndim))
        axes = dict(zip(names, device_mesh.mesh.shape, strict=True))
        mesh = Mesh(axes, device=device_mesh.device_type, ranks=device_mesh.mesh.flatten().tolist())
    return from_local(d.to_local(), mesh, list(d.placements), shape=tuple(d.shape), check=False)


# ---------------------------------------------------------------------------------------------- torch's checkpoints


def _chunks(x: DistTensor) -> list[Any]:
    """This rank's part, as ``torch.distributed.checkpoint`` describes parts; none where the part is empty."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec = x._spec
    if spec.layout.partial:
        raise LayoutError(f"a checkpoint cannot hold {spec!r}, whose value is not reduced: reduce it with mw.reshard")
    here = spec.mesh.coordinate(runtime.RT.rank)
    sizes, offsets = torch.Size(spec.local_shape(here)), torch.Size(spec.local_offset(here))
    return [ChunkStorageMetadata(offsets, sizes)] if sizes.numel() or not spec.shape.numel() else []


def _write_items(self: DistTensor, fqn: str, obj: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    about = TensorProperties(dtype=self.dtype, requires_grad=self.requires_grad)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, about, self.shape),
        )
        for chunk in _chunks(self)
    ]


def _shard_at(self: DistTensor, index: Any) -> Tensor:
    return self.detach().to_local()


# The protocol by which torch.distributed.checkpoint saves and loads tensors that are not its own: in place, each rank
# its part, from and to any layout and number of ranks.
DistTensor.__create_write_items__ = _write_items  # type: ignore[attr-defined]
DistTensor.__create_chunk_list__ = _chunks  # type: ignore[attr-defined]
DistTensor.__get_tensor_shard__ = _shard_at  # type: ignore[attr-defined]


_OP = (str, 'give the name of the op before autograd, e.g. "linear"')


@takes(RuleError, op=_OP)
def infer_forward(op: str, *args: Any, **kwargs: Any) -> Inference:
    """What eager code does when it calls ``op`` on inputs of these specs: layouts wanted, layouts made, bytes.

    Args:
        op: ATen name before autograd (``"linear"``), or a function's (``"F.cross_entropy"``).
        args, kwargs: the op's arguments with a ``Spec`` for each tensor.

    Raises:
        RuleError: no op of this name, arguments that PyTorch refuses, or an op of which what it gives hangs on values.
            An op without a rule answers as it runs, on whole inputs: ``kind`` of the answer is then ``"gathered"``.
    """
    return infer(op, args, kwargs)


@takes(RuleError, op=_OP, outputs=(list, "give a Spec for each output, in a list"))
def infer_backward(op: str, *args: Any, outputs: list[Spec | None], **kwargs: Any) -> Inference:
    """What the inputs should be, given the layouts that the outputs should have (and the inputs' own).

    Args:
        op, args, kwargs: as of :func:`infer_forward`.
        outputs: a spec for each output, or None for one that may have any layout.

    Raises:
        RuleError: as for :func:`infer_forward`, or the op gives other outputs: in number, shapes or dtypes.
    """
    return infer(op, args, kwargs, outputs)


def rule(*names: str) -> Callable[[Callable[..., Rule | None]], Callable[..., Rule | None]]:
    """Give ops a rule: ``@mw.rule("mylib::op")``.  See ``meshwright.rules.factor_notation`` for what it returns."""
    if not names or not all(isinstance(n, str) for n in names):
        raise RuleError(f'rule takes names of ops, not {names!r}: @mw.rule("mylib::op")')
    register = _rule(*names)

    def wrap(fn: Callable[..., Rule | None]) -> Callable[..., Rule | None]:
        made = register(fn)
        forget_ops()
        return made

    return wrap


__all__ = [
    "Partial", "Replicate", "Shard", "cast", "constrain", "from_dtensor", "from_local", "infer_backward",
    "infer_forward", "init_mesh", "reshard", "rule", "shard_tensor", "sharded", "to_dtensor", "unshard",
]  # fmt: skip
