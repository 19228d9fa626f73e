"""Capture: model and loss as one graph of global ops, from ``torch.export``.

The graph is that of one device: shapes are global, nothing knows of the mesh.  It is made on fake tensors, so nothing
of the model exists that did not exist before.  Names are those of the model; every node knows the user's line.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.fx as fx
import torch.nn as nn
from torch.export.graph_signature import InputKind
from torch.fx.traceback import annotate, preserve_node_meta

from ... import compat
from ...compat import FakeTensor, FakeTensorMode, pytree
from ...dispatch import disabled
from ...errors import CaptureError
from ...shard.parameters.precision import Dtypes
from ...tensor import DistTensor
from ...tensor.graph_marks import gradients_marked
from ...torch_changes import note
from ..ir.regions import Path
from ..ir.strides import Strides, dense
from . import shared_export
from .autograd_functions import OpaqueFunctions, functions_as_ops, has_calls
from .checkpoint_calls import Regions
from .constant_documents import forget_single_documents
from .fakes import modes_for_users_calls, replaced
from .flat_linear import keep_dims_apart
from .free_variables import Assigned, Place, attribute, buffers_written, forget_attributes, noting_attributes, places
from .out_arguments import copy_into_out
from .refusals import (
    GENERATOR,
    Shapes,
    derived,
    generators,
    inference_without_gradients,
    refused,
    without_mask_hints,
    without_validation,
)
from .row_picks import pick_within_rows
from .shared_export import Exported, pointer
from .source_lines import (
    check_returned,
    files_of,
    instead,
    line_of,
    naming_the_line,
    noting_users_frames,
    own_loss,
    refusal_at,
    used_by,
)

aten = torch.ops.aten
Tensor = torch.Tensor
ParamDtypes = Mapping[str, Dtypes]
LossFn = Callable[[nn.Module, Any], Any]
_RETURNED = (Tensor, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True)
class Source:
    """One input of the captured graph.

    Attributes:
        node: name of its placeholder.
        kind: ``"param"``, ``"buffer"``, ``"batch"`` or ``"constant"``.
        name: name in the model; ``batch``, ``batch.0``, ``batch.x`` for what is trained on.
        fake: stand-in of global shape.
        value: the tensor itself, of constants only.
        leaf: of a batch tensor, its place among the leaves of the batch.
        strides: of the tensor that stands behind it (its local part where it lies on a mesh); None where it is laid
            anew, row-major.
    """

    node: str
    kind: str
    name: str
    fake: Tensor
    value: Tensor | None = None
    leaf: int = 0
    strides: Strides | None = None


@dataclass(frozen=True)
class Captured:
    """A step of one device: what the model and the loss do with global tensors.

    Attributes:
        module: the graph.
        sources: its inputs, in order.
        outputs: the nodes that the loss function returned, flat: first the loss.
        out_tree: structure of what it returned; None if that was the loss alone.
        tied: other name of a parameter or buffer to the first one.
        regions: checkpointed calls, by the word for them that nodes have.
        mode: of the fake tensors.
        places: where the step found tensors that are not of the model's state.
        answers: of ``shared_export.answered``.
    """

    module: fx.GraphModule
    sources: tuple[Source, ...]
    outputs: tuple[Any, ...]
    out_tree: Any
    tied: dict[str, str] = field(default_factory=dict)
    regions: dict[str, Path] = field(default_factory=dict)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode, repr=False)
    places: tuple[Place, ...] = ()
    answers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def graph(self) -> fx.Graph:
        """The graph of the step."""
        return self.module.graph


class StepModule(nn.Module):
    """Model and loss as one module; takes the leaves of a batch."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, batch: Any, dtypes: ParamDtypes | None = None) -> None:
        super().__init__()
        self.model, self.dtypes = model, dtypes or {}
        leaves, self.tree = pytree.tree_flatten(batch)
        self.loss_fn = loss_fn or own_loss
        self.assigned = Assigned()
        self.fixed = [None if isinstance(x, Tensor) else x for x in leaves]
        self.tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.caches = torch.is_autocast_cache_enabled()

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self.fixed)
        for i, t in zip(self.tensors, tensors, strict=True):
            leaves[i] = t
        with (
            noting_attributes(self.assigned), buffers_written(self.model, self.assigned),
            refused(*derived(), *generators()), inference_without_gradients(), functions_as_ops(),
            without_validation(), without_mask_hints(), _autocast_caches(self.caches), Shapes(tensors),
        ):  # fmt: skip
            made = self.loss_fn(self.model, pytree.tree_unflatten(leaves, self.tree))
        check_returned(self.loss_fn, self.model, made)
        # A cache of keys, which models of transformers return beside the loss, is no value of a program.
        return pytree.tree_map(lambda x: x if isinstance(x, _RETURNED) else None, made)

    def grad_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the gradient of a value: of a parameter the one in which it is reduced."""
        for name, p in self.model.named_parameters():
            if p is x and name in self.dtypes:
                return self.dtypes[name].reduce
        return x.dtype


@contextlib.contextmanager
def _autocast_caches(enabled: bool) -> Iterator[None]:
    """Inside, regions of autocast keep casts of weights where the user's code says so; torch.export says that none
    does, also in the program that it makes."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def capture(
    model: nn.Module, loss_fn: LossFn | None, batch: Any, device: str = "cpu", dtypes: ParamDtypes | None = None
) -> Captured:
    """The step of one device on batches like ``batch``.

    Args:
        model: with parameters of any kind: plain, on the meta device, or distributed already.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, or a tuple that begins with it; None: the model does.
        batch: an example: a tensor, or tuples, lists and dicts of tensors; global shapes.
        device: type of the device that the program will run on.
        dtypes: name of a parameter to its dtypes, where it has a precision.

    Raises:
        CaptureError: the model decides by values what to do, or calls what cannot be captured; names the user's line.
    """
    _check_batch(batch)
    step = StepModule(model, loss_fn, batch, dtypes)
    leaves, names = [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)], leaf_names(batch)
    done = _exported(step, model, batch, leaves, device)
    exported, fakes, tied, given, mode = done.program, done.fakes, done.tied, done.given, done.mode
    sources: list[Source] = []
    own = {pointer(t): n for n, t in (*step.named_buffers(), *step.named_parameters()) if not isinstance(t, DistTensor)}
    placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and str(spec.target) in fakes:
            kind, fake = "param" if spec.kind is InputKind.PARAMETER else "buffer", fakes[str(spec.target)]
            name = str(spec.target).removeprefix("model.")
            sources.append(Source(node.name, kind, tied.get(name, name), fake, strides=_held(step, str(spec.target))))
        elif spec.kind is InputKind.USER_INPUT:
            i = len([s for s in sources if s.kind == "batch"])
            where = _strides(leaves[i])
            sources.append(Source(node.name, "batch", names[i], given[i], leaf=step.tensors[i], strides=where))
        else:
            value = done.own(_constant(exported, step, node, str(spec.target)))
            twin = own.get(pointer(value))
            if twin is not None:  # a parameter that the loss function closes over
                kind = "param" if isinstance(fakes[twin], nn.Parameter) else "buffer"
                sources.append(Source(node.name, kind, tied.get(twin[6:], twin[6:]), fakes[twin]))
                continue
            sources.append(Source(node.name, "constant", str(spec.target), fake_of(value, mode, device), value))
    forget_attributes(step, step.assigned, {s.name for s in sources if s.kind == "constant"})
    (output,) = exported.graph.find_nodes(op="output")
    returned = exported.call_spec.out_spec
    return Captured(
        exported.graph_module, tuple(sources), tuple(output.args[0]), None if returned.is_leaf() else returned,
        tied, done.regions, mode, _places(step.loss_fn, model, sources), done.answers,
    )  # fmt: skip


def _exported(step: StepModule, model: nn.Module, batch: Any, leaves: Sequence[Tensor], device: str) -> Exported:
    """Export a step, or take the export of another simulated rank that asked for the same."""
    roots = (step.loss_fn, model, batch, device, dict(step.dtypes))
    request = shared_export.request_of(*roots) if shared_export.is_shared() else None
    if request is not None and (done := shared_export.find(request)) is not None:
        return done
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes, tied = fake_state(step, mode, device)
    given = [fake_of(t, mode, device) for t in leaves]
    with shared_export.noting_rank() as asked:
        program, regions = export(step, model, fakes, given)
    graph = program.graph_module.graph
    _check_nodes(model, graph)
    _check_mapped(graph)
    copy_into_out(graph)
    forget_single_documents(graph)
    pick_within_rows(graph)
    keep_dims_apart(graph)
    done = Exported(program, regions, fakes, tied, given, mode)
    # Where tracing changed the model, asked for the rank or left calls of the user's in the graph, each rank traces.
    own = asked or has_calls() or not {m for m, _ in step.assigned}.isdisjoint(step.modules())
    if request is not None and not own and shared_export.request_of(*roots).tokens == request.tokens:
        shared_export.keep(request, done)
    return done


def export(
    step: StepModule, model: nn.Module, fakes: dict[str, Tensor], given: Sequence[Tensor], dynamic: Any = None
) -> tuple[Any, dict[str, Path]]:
    """What ``torch.export`` makes of a step, and its checkpointed calls.

    Args:
        fakes: name of each parameter and buffer to its stand-in.
        given: the leaves of a batch.
        dynamic: of each leaf, its dims of which the size is open.
    """
    regions: dict[str, Path] = {}
    with (
        _swapped(step, fakes), naming_the_line(model, step.loss_fn), _quiet(), modes_for_users_calls(),
        noting_users_frames(StepModule.forward.__code__.co_filename),
        gradients_marked(step.grad_dtype), preserve_node_meta(), Regions(partial(_annotated, regions)).noted(),
        OpaqueFunctions(), _regions_flat(),
    ):  # fmt: skip
        return torch.export.export(step, tuple(given), strict=False, dynamic_shapes=dynamic), regions


@contextmanager
def _regions_flat() -> Iterator[None]:
    """Inside, what enters and leaves ``torch.autocast`` and ``torch.no_grad`` stays a call among the others.

    torch.export would make a node of each region, with a graph of its own, and forget a ``no_grad`` inside an autocast.
    """

    def as_it_is(module: fx.GraphModule, signature: Any) -> tuple[fx.GraphModule, Any]:
        return module, signature

    with (
        replaced(compat.autocast_pass, replace_autocast_with_hop_pass=as_it_is),
        replaced(compat.set_grad_pass, replace_set_grad_with_hop_pass=as_it_is),
    ):
        yield


def _places(loss_fn: LossFn | None, model: nn.Module, sources: Sequence[Source]) -> tuple[Place, ...]:
    """Where the step has its constants; those that would get a gradient are told by their fakes."""
    found = places([loss_fn, model], [s.value for s in sources if s.value is not None], model)
    learnt = {p.value.data_ptr() for p in found if isinstance(p.value, Tensor) and p.value.requires_grad}
    for s in sources:
        if s.value is not None and s.value.data_ptr() in learnt:
            s.fake.requires_grad_()  # partition refuses what would get a gradient
    return found


_DETACH = "say .detach(), and write to it under torch.no_grad()"


def _constant(exported: Any, step: StepModule, node: fx.Node, name: str) -> Tensor:
    """The tensor that the graph takes as a constant.  Raises CaptureError for what is none of the user's."""
    value = attribute(step, name)
    if value is None:
        value = {**exported.state_dict, **exported.constants}[name]
    if isinstance(value, torch.Generator):
        user = used_by(node)
        raise CaptureError(f"{'' if user is None else line_of(user)}: {GENERATOR}")
    if isinstance(value, FakeTensor):
        user = used_by(node)
        line = "" if user is None else line_of(user)
        raise CaptureError(
            f"{line + ': ' if line else ''}the model uses .data of a tensor, or makes a constant from values "
            f"of others, which a captured program does not see: {instead(user, _DETACH)}"
        )
    return cast("Tensor", value)


# ---------------------------------------------------------------------------------------------- stand-ins


def fake_of(t: Tensor, mode: FakeTensorMode, device: str, dtype: torch.dtype | None = None) -> Tensor:
    shape, dtype, strides = tuple(t.shape), dtype or t.dtype, _strides(t)
    with mode, disabled():
        return torch.empty_strided(shape, dense(shape, strides), dtype=dtype, device=device)


def _strides(t: Tensor) -> Strides:
    """How a tensor lies in memory: of one that lies on a mesh, its local part."""
    with disabled():
        return tuple(t.stride())


def _held(step: nn.Module, name: str) -> Strides | None:
    """Strides of a parameter or buffer, where it stays as it is."""
    owner, _, key = name.rpartition(".")
    t = getattr(step.get_submodule(owner), key)
    return _strides(t) if isinstance(t, DistTensor) or not isinstance(t, nn.Parameter) else None


def fake_state(step: StepModule, mode: FakeTensorMode, device: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every name of a parameter or buffer to its stand-in (tied ones share it), and tied names to first names."""
    made: dict[int, Tensor] = {}
    first: dict[int, str] = {}
    named: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    given = (*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False))
    for name, t in given:
        if id(t) not in made:
            dtypes = step.dtypes.get(name.removeprefix("model."))
            fake = fake_of(t, mode, device, None if dtypes is None else dtypes.compute)
            made[id(t)] = nn.Parameter(fake, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else fake
            first[id(t)] = name
        elif first[id(t)] != name:
            tied[name.removeprefix("model.")] = first[id(t)].removeprefix("model.")
        named[name] = made[id(t)]
    return named, tied


@contextmanager
def _swapped(step: nn.Module, fakes: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the stand-ins are the module's parameters and buffers."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    for prefix, module in step.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, t in table.items():
                if t is not None:
                    held.append((table, key, t))
                    table[key] = fakes[f"{prefix}.{key}" if prefix else key]
    try:
        yield
    finally:
        for table, key, t in reversed(held):
            table[key] = t


def leaf_names(batch: Any) -> list[str]:
    """Names of the tensors of a batch, in order: ``batch``, ``batch.0``, ``batch.x.y``."""
    found = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor):
            keys = [str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path]
            found.append(".".join(("batch", *keys)))
    return found


# ---------------------------------------------------------------------------------------------- frames and checks

_REGION = "meshwright_region"


def _annotated(regions: dict[str, Path], path: Path) -> AbstractContextManager[Any]:
    """Inside, nodes have a word for a path of checkpointed calls."""
    word = "/".join(str(r.number) for r in path)
    regions[word] = path
    return annotate({_REGION: word})


def region_of(node: fx.Node) -> str:
    """The word for the checkpointed calls that a node is part of; empty if there are none."""
    return str((node.meta.get("custom") or {}).get(_REGION, ""))


note("torch.nn.Module.__setattr__", why="assigned attributes are noted with the user's lines")


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, torch.export keeps its opinion to itself: what goes wrong is raised, with the user's line."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _check_nodes(model: nn.Module, graph: fx.Graph) -> None:
    """Raises CaptureError where a value's shape depends on values."""
    for node in graph.nodes:
        for t in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(t, torch.SymInt) or (isinstance(t, Tensor) and any(not isinstance(n, int) for n in t.shape)):
                raise CaptureError(f"{type(model).__name__} cannot be captured: {refusal_at(node, files_of(model))}")


_VALUES = (Tensor, int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)


def _check_batch(batch: Any) -> None:
    """Raises CaptureError for what a batch cannot be."""
    for leaf in pytree.tree_leaves(batch):
        if not isinstance(leaf, _VALUES):
            raise CaptureError(
                f"the batch has a {type(leaf).__name__}: a batch is a tensor, or tuples, lists, dicts and named tuples "
                "of tensors, numbers and strings; register other classes (torch.utils._pytree.register_dataclass)"
            )


def _check_mapped(graph: fx.Graph) -> None:
    """Raises CaptureError where torch.func.vmap gets what may lie on the mesh: it would map over this rank's part."""
    given, inside = set[fx.Node](), 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        inside += (name == "_vmap_increment_nesting") - (name == "_vmap_decrement_nesting")
        if node.op == "placeholder" or not given.isdisjoint(node.all_input_nodes):
            given.add(node)
            if inside:
                raise CaptureError(
                    f"{line_of(node)}: torch.func.vmap of tensors of the model or the batch cannot be captured: write "
                    "it as ops on the whole batch"
                )


def batch_sources(sources: Sequence[Source]) -> list[Source]:
    """The inputs that a batch brings, in the order of its leaves."""
    return [s for s in sources if s.kind == "batch"]
