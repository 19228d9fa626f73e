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
from ..rules.factor_notation import APPLIES_TO
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
    """Create a mesh over the running processes.

    It uses the process group if there is one. Else it creates one, from the environment of torchrun, `accelerate
    launch`, mpirun or srun (see the page on launchers).

    DTensor: `init_device_mesh`.

    Args:
        axes: Axis name to size, outermost first. The product must be the number of processes.
        device: `"cpu"` (gloo) or `"cuda"` (NCCL). A gloo group that exists already also serves CUDA, and lets processes
            share a GPU. Of several GPUs, the process uses that of its local rank.
        timeout: Seconds a rank waits in a collective before it raises. Default: 300. Ranks that diverge raise within
            seconds anyway, so it only bounds how long a rank may be stopped or work alone (write a checkpoint, read
            data). After 30 seconds a warning names who waits for whom.
        check: Compare before every collective what ranks are about to do, and digests of values that must be equal.
            Slower; for debugging.
        watch: Seconds until a stopped process or a silent machine counts as lost, at least 1. A dead process is noticed
            at once, and all ranks leave. `None` turns it off. The first call for a process group decides.

    Raises:
        MeshError: On every rank, if the sizes do not match the number of processes.
        DesyncError: On every rank, if ranks pass different arguments.

    Examples:
        ```python
        def train():
            mesh = mw.init_mesh({"dp": 2, "tp": 2})  # torchrun --nproc-per-node 4 train.py
            return mesh.size


        assert mw.simulate(train, mw.Mesh({"dp": 2, "tp": 2})) == [4] * 4  # or without processes
        ```
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
            more: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
            if device == "cuda":
                more["device_id"] = own_device(launch.local_rank)
            with collective.meeting(launch, timeout) as how:
                dist.init_process_group("nccl" if device == "cuda" else "gloo", **how, **more)
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


def own_device(local_rank: int) -> torch.device:
    """Take the GPU of a process, one for each of a machine where there are several: with NCCL two cannot share one.

    Bound to it (``device_id=``), groups connect when they are made: ranks that cannot reach each other say so there.
    """
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _spec_for(shape: Any, dtype: torch.dtype, mesh: Mesh, placements: Placements, order: Any = None) -> Spec:
    layout = Layout(mesh, placements, order=order, ndim=len(shape))
    return Spec(shape, dtype, layout, undecided_mask=mesh.everywhere)


def _agree(what: str, value: Any, mesh: Mesh) -> None:
    """Raise DesyncError on every rank where ranks of the mesh do not bring the same value."""
    with together(mesh, what, fix="every rank must make the same call") as facts:
        facts.append(Fact(str(value)))


@takes(LayoutError, t=_TENSOR, mesh=MESH_WANTED)
def shard_tensor(t: Tensor, mesh: Mesh, placements: Placements, *, order: Any = None, check: bool = True) -> DistTensor:
    """Create a DistTensor from a global tensor that every rank has.

    DTensor: `distribute_tensor`. JAX: `jax.device_put` with a `NamedSharding`.

    Args:
        t: The global tensor, the same on every rank.
        mesh: The mesh.
        placements: Axis name to placement (default: `Replicate`), or one per axis.
        order: Dim to the axes that shard it, major first.
        check: Compare shapes, dtypes, placements and digests of values between ranks, with one small exchange.

    Returns:
        A leaf that holds a copy of this rank's shard. It requires grad if `t` does.

    Raises:
        LayoutError: If a dim does not exist, or `t` is no leaf of autograd.
        DesyncError: If ranks pass different shapes, placements or values.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def shard():
            x = mw.shard_tensor(torch.arange(5.0), mesh, {"dp": mw.Shard(0)})
            return x.to_local().tolist()


        assert mw.simulate(shard, mesh) == [[0, 1, 2], [3, 4]]
        ```
    """
    if isinstance(t, DistTensor):
        raise LayoutError("shard_tensor takes a plain tensor; mw.reshard changes the layout of a DistTensor")
    if t.grad_fn is not None:
        raise LayoutError(
            f"shard_tensor: the tensor of shape {tuple(t.shape)} was computed ({t.grad_fn.name()}) from others that "
            "need gradients, and a leaf would cut them off: say mw.from_local(t, mesh, {}) and mw.reshard it, or "
            "give t.detach()"
        )
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
    """Create a DistTensor from the shard that each rank passes. Differentiable.

    DTensor: `DTensor.from_local`.

    Args:
        local: This rank's shard. It is not copied.
        mesh: The mesh.
        placements: Axis name to placement (default: `Replicate`), or one per axis.
        shape: Global shape. Default: lengths are added up along sharded dims.
        order: Dim to the axes that shard it, major first.
        check: Compare shapes, dtypes and placements between ranks, with one small exchange. `False` assumes even
            shards.

    Raises:
        LayoutError: If the sizes are not those of `torch.chunk`.
        DesyncError: If ranks pass different dtypes or placements.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def join():
            rows = torch.full((2 - mw.rank(), 3), float(mw.rank()))  # 2 rows on rank 0, 1 row on rank 1
            return mw.from_local(rows, mesh, {"dp": mw.Shard(0)}).shape


        assert mw.simulate(join, mesh) == [(3, 3), (3, 3)]
        ```
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
    spec = Spec(shape, local.dtype, layout, undecided_mask=mesh.everywhere)
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
    """Create a DistTensor shard by shard, never in full.

    Values are those that one device gets from the same seed.

    DTensor: `torch.distributed.tensor.randn`, `zeros` and others.

    Args:
        factory: A factory function, such as `torch.randn`, `torch.zeros`, `functools.partial(torch.full,
            fill_value=3)`.
        shape: Global shape.
        mesh: The mesh.
        placements: Axis name to placement (default: `Replicate`), or one per axis.
        dtype: Dtype. Default: `torch.get_default_dtype()`.
        order: Dim to the axes that shard it, major first.
        requires_grad: Whether the result requires grad.

    Raises:
        LayoutError: If a dim does not exist, or `factory` cannot be run shard by shard.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})
        torch.manual_seed(0)
        expected = torch.randn(4, 6)


        def draw():
            torch.manual_seed(0)
            return mw.unshard(mw.sharded(torch.randn, (4, 6), mesh, {"tp": mw.Shard(1)}))


        assert torch.equal(mw.simulate(draw, mesh)[0], expected)
        ```
    """
    spec = _spec_for(tuple(shape), dtype or torch.get_default_dtype(), mesh, placements, order)
    here = mesh.coordinate(runtime.RT.rank)
    local = materialize(factory, tuple(shape), spec.dtype, spec, here)
    made = wrap(local, spec)
    made.requires_grad_(requires_grad)
    return made


@takes(LayoutError, x=_DIST)
def reshard(x: DistTensor, placements: Placements, *, order: Any = None) -> DistTensor:
    """Redistribute a DistTensor by the cheapest sequence of collectives. Differentiable.

    The backward is its transpose.

    DTensor: `DTensor.redistribute`. The same as `x.redistribute(placements)`.

    Args:
        x: A DistTensor of any layout, also Partial.
        placements: Axis name to placement. Axes that are not named keep theirs.
        order: Dim to the axes that shard it, major first.

    Raises:
        LayoutError: If a placement does not fit.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def gather():
            x = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)})
            return mw.reshard(x, {"dp": mw.Replicate()}).to_local().tolist()


        assert mw.simulate(gather, mesh) == [[0, 1, 2, 3]] * 2
        ```
    """
    return x.redistribute(placements, order=order)


@takes(LayoutError, x=(Tensor, "of several, one at a time, e.g. {k: mw.unshard(t) for k, t in state.items()}"))
def unshard(x: Tensor) -> Tensor:
    """Return the global value as a plain tensor, on every rank. Differentiable.

    A collective: every rank must call it, on one line. The result is a copy. A plain tensor is returned as it is.

    DTensor: `full_tensor()`. The same as `x.full_tensor()`, except that it also takes plain tensors.

    Args:
        x: A DistTensor or a plain tensor.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def back():
            return mw.unshard(mw.shard_tensor(torch.arange(3.0), mesh, {"dp": mw.Shard(0)})).tolist()


        assert mw.simulate(back, mesh) == [[0, 1, 2]] * 2
        ```
    """
    return x.full_tensor() if isinstance(x, DistTensor) else x


@takes(LayoutError, x=_TENSOR)
def constrain(x: Tensor, placements: Placements) -> Tensor:
    """Redistribute a value inside a model; return a plain tensor as it is.

    Models that use it run on one device and on a mesh. During capture (`compile_step`) it becomes part of the program.

    JAX: `jax.lax.with_sharding_constraint`.

    Args:
        x: A DistTensor or a plain tensor.
        placements: Axis name to placement. Axes that are not named keep theirs.

    Raises:
        LayoutError: If a placement does not fit.

    Examples:
        ```python
        def forward(x):
            return mw.constrain(x * 2, {"tp": mw.Replicate()})


        assert torch.equal(forward(torch.ones(2)), torch.full((2,), 2.0))  # no mesh: nothing to do
        ```
    """
    if isinstance(x, DistTensor):
        return reshard(x, placements)
    return graph_marks.mark(x, placements) if graph_marks.exporting() else x


@contextmanager
def strategies(choices: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Choose the algorithm of ops that have several. Other ops use the one that sends fewest bytes.

    A change drops all cached plans: use it once around training, not around each step. A choice that no call inside
    could use warns at the end.

    Args:
        choices: Op to axis to strategy, `{"scaled_dot_product_attention": {"cp": "heads"}}` or `"gather"`. With
            `"gather:max_bytes=1000000"`, attention runs in groups of heads that receive at most so many bytes each.

    Raises:
        RuleError: If an op or a strategy does not exist.

    Examples:
        ```python
        mesh = mw.Mesh({"cp": 2})


        def attend():
            q, k, v = (mw.shard_tensor(torch.ones(1, 2, 8, 4), mesh, {"cp": mw.Shard(2)}) for _ in range(3))
            with mw.strategies({"scaled_dot_product_attention": {"cp": "heads"}}):
                return F.scaled_dot_product_attention(q, k, v).placements


        assert mw.simulate(attend, mesh)[0] == (mw.Shard(2),)
        ```
    """
    checked_strategies(choices)
    rt = runtime.RT
    if rt.strategies == choices:  # nothing is planned anew
        yield
        return
    before, rt.met = rt.met, set()
    try:
        with runtime.preferring(choices):
            yield
        for op, axis, name in [(op, axis, name) for op, axes in choices.items() for axis, name in axes.items()]:
            if (op, axis) not in rt.met:
                warnings.warn(
                    f"strategies: no {op} inside had {APPLIES_TO[op]} split over {axis!r}, so none took {name!r}: lay "
                    "them so, or leave it out",
                    stacklevel=runtime.users_level(),
                )
    finally:
        rt.met = before


@takes(LayoutError, x=_DIST)
def to_dtensor(x: DistTensor) -> Any:
    """Return a DistTensor's data as `torch.distributed.tensor.DTensor`, without a copy.

    For libraries that take DTensors, such as `torch.distributed.checkpoint`. Gradients pass through. Needs processes.

    Args:
        x: A DistTensor.

    Raises:
        LayoutError: If DTensor has no such placement.

    Examples:
        ```python
        def state_of(model: nn.Module) -> dict[str, object]:  # on running processes
            return {k: mw.to_dtensor(v) if isinstance(v, mw.DistTensor) else v for k, v in model.state_dict().items()}
        ```
    """
    from torch.distributed.tensor import DTensor

    stride = torch.empty(x.shape, device="meta").stride()
    return DTensor.from_local(
        x.to_local(), x.mesh.device_mesh(), x.spec.layout.to_torch(), run_check=False, shape=x.shape, stride=stride
    )


def from_dtensor(d: Any, mesh: Mesh | None = None) -> DistTensor:
    """Create a DistTensor on the data of a `torch.distributed.tensor.DTensor`, without a copy.

    Gradients pass through.

    Args:
        d: The DTensor.
        mesh: Mesh to use. Default: that of the DTensor, with its dim names, else `axis0`, `axis1` and so on.

    Raises:
        LayoutError: If `d` is no DTensor, or its placements do not exist here.

    Examples:
        ```python
        from torch.distributed.tensor import DTensor


        def add_one(d: DTensor) -> DTensor:  # on running processes
            return mw.to_dtensor(mw.from_dtensor(d) + 1)
        ```
    """
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
    """Return what eager code does for an op on inputs of these specs: layouts, strategy and bytes.

    Nothing runs and nothing is sent.

    Args:
        op: ATen name before autograd (`"linear"`), or a function's name (`"F.cross_entropy"`).
        *args: The op's arguments, with a [Spec][meshwright.Spec] for each tensor. `mw.Spec(shape, dtype, layout)` is
            the spec of a leaf that no op has used yet, as `mw.shard_tensor` makes it.
        **kwargs: The op's keyword arguments, likewise.

    Returns:
        An `Inference`. Its `kind` is `"gathered"` for ops without a rule, which run on all-gathered inputs.

    Raises:
        RuleError: If there is no such op, PyTorch refuses the arguments, or the result depends on values.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})
        x = mw.Spec((4, 8), torch.float32, mw.Layout(mesh, {"tp": mw.Shard(1)}))
        w = mw.Spec((6, 8), torch.float32, mw.Layout(mesh, {"tp": mw.Shard(1)}))
        assert mw.infer_forward("linear", x, w).outputs[0].layout.placements == (mw.Partial("sum"),)
        ```
    """
    return infer(op, args, kwargs)


@takes(RuleError, op=_OP, outputs=(list, "give a Spec for each output, in a list"))
def infer_backward(op: str, *args: Any, outputs: list[Spec | None], **kwargs: Any) -> Inference:
    """Return the layouts that inputs should have, given those that outputs should have.

    Args:
        op: As for [infer_forward][meshwright.infer_forward].
        *args: As for `infer_forward`; the specs say what layouts the inputs have now.
        outputs: A spec for each output, or `None` for one of any layout.
        **kwargs: As for `infer_forward`.

    Raises:
        RuleError: As for `infer_forward`; or if the op has other outputs, in number, shapes or dtypes.

    Examples:
        ```python
        mesh = mw.Mesh({"tp": 2})
        spec = mw.Spec((4, 6), torch.float32, mw.Layout(mesh))
        columns = mw.Spec((4, 6), torch.float32, mw.Layout(mesh, {"tp": mw.Shard(1)}))
        inferred = mw.infer_backward("relu", spec, outputs=[columns])
        assert inferred.inputs[0].layout == columns.layout
        ```
    """
    return infer(op, args, kwargs, outputs)


def rule(*names: str) -> Callable[[Callable[..., Rule | None]], Callable[..., Rule | None]]:
    """Register the sharding rule of one or more ops.

    The decorated function has the op's signature. It returns a line of notation, see the page on rules. The backward
    follows from it.

    Args:
        *names: Names of ops, `"mylib::op"`.

    Returns:
        A decorator that returns the function.

    Raises:
        RuleError: If an op does not exist.

    Examples:
        ```python
        from meshwright.rules import notation


        @torch.library.custom_op("docs::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2


        double.register_fake(torch.empty_like)
        double.register_autograd(lambda ctx, grad: grad * 2)


        @mw.rule("docs::double")
        def double_rule(x):
            return notation("... d -> ... d", x)  # any dim may be sharded


        assert mw.check_rule("docs::double", torch.randn(5, dtype=torch.float64), mesh=mw.Mesh({"dp": 2})).cases > 0
        ```
    """
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
