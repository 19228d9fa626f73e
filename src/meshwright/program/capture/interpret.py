"""Running the captured graph on fake local tensors, through the same dispatch as eager code.

The fakes are local; what they are globally is their spec.  Calls go through ``plan_call`` and ``execute`` as an eager
call does (``tensor.global_calls``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ... import compat
from ...dispatch import (
    convert_layout,
    gradient_types,
    refresh,
    resolve_types,
    root,
    unit_cotangent,
    wanted,
    wanting_gradients,
)
from ...errors import CaptureError, MeshwrightError
from ...layout import NO_MARKS, Spec, dtype_from, marked
from ...rules.strided import ROW_MAJOR
from ...tensor import GlobalCalls
from ...tensor import tell as wrap
from ...tensor.graph_marks import CONSTRAIN, GRAD, read_placements
from ..ir.nodes import annotate, info_of
from ..ir.regions import Path
from ..ir.trace import Recorder
from .export import region_of
from .source_lines import line_of

Tensor = torch.Tensor


def spec_at(t: Tensor) -> Spec | None:
    """What a fake is globally; None for a plain tensor, which is the same on all ranks."""
    spec = t.__dict__.get("_spec")
    return None if spec is None else marked(spec, NO_MARKS)


def _differentiated_by(node: fx.Node) -> bool:
    """Whether a gradient that is part of the loss is one with respect to this value."""
    return any(u.target is GRAD.default and node in u.args[1] for u in node.users)  # type: ignore[operator]


def _as_leaf(node: fx.Node, value: Any) -> Any:
    """The value of a node; one that needs no gradient, but for those of the loss, is a leaf of these."""
    if isinstance(value, Tensor) and not value.requires_grad and _differentiated_by(node):
        value.requires_grad_()
    return value


def _is_row_major(node: Any) -> bool:
    """Whether the single device has a captured value as all of its memory, in row-major order."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or not made.is_contiguous() or made.storage_offset():
        return False
    return made.untyped_storage().nbytes() == made.numel() * made.element_size()


_ASSERTIONS = {torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_scalar.default}


class Interpreter:
    """Runs captured nodes one by one.

    Args:
        recorder: told which captured node is being run.
        constraints: node name to the placements that its value is to be brought to.
        regions: of checkpointed calls, by the word for them that captured nodes have.
        leaf_of: maps the value that ops see of a parameter to the leaf that autograd differentiates for; others to
            themselves.
    """

    def __init__(
        self,
        recorder: Recorder,
        constraints: dict[str, Any],
        regions: dict[str, Path],
        leaf_of: Callable[[Tensor], Tensor],
    ) -> None:
        self.recorder, self.constraints, self.regions, self.leaf_of = recorder, constraints, regions, leaf_of
        self.calls = GlobalCalls()
        self.autocasts: list[torch.autocast] = []  # that are entered

    def run(self, module: fx.GraphModule, read: Callable[[fx.Node], Any]) -> Any:
        """Run a graph; ``read`` gives the value of a placeholder when it is first needed."""
        outside = torch.is_grad_enabled()
        with torch.set_grad_enabled(outside):
            try:
                return self._run(module, read, outside)
            finally:
                while self.autocasts:
                    self.autocasts.pop().__exit__(None, None, None)

    def _run(self, module: fx.GraphModule, read: Callable[[fx.Node], Any], outside: bool) -> Any:
        env: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node not in env:
                with self._outside(outside):
                    made = read(node) if node.op == "placeholder" else getattr(module, str(node.target))
                env[node] = _as_leaf(node, made)
            return env[node]

        last = {n: user for user in module.graph.nodes for n in user.all_input_nodes}
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], value)
            if node.op in ("placeholder", "get_attr"):
                continue
            regions = self.regions.get(region_of(node), ())
            self.recorder.begin(node.name, line_of(node), regions)
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            try:
                env[node] = self._node(node, args, kwargs)
            except MeshwrightError as error:
                where = line_of(node)
                if where and not getattr(error, "_located", False):
                    error._located = True  # type: ignore[attr-defined]
                    error.args = (f"{where}: {error}", *error.args[1:])
                raise
            if torch.is_grad_enabled() and isinstance(env[node], Tensor) and env[node].requires_grad:
                self._name_gradient(node.name, env[node])
            for n in node.all_input_nodes:
                if last[n] is node:  # what nobody needs any more must not keep memory or graphs alive
                    env.pop(n, None)
        raise AssertionError("a graph without an output")

    def _outside(self, grad: bool) -> contextlib.ExitStack:
        """Outside of all regions: what is the first use of a parameter brings it for the others, too."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        for region in self.autocasts:
            stack.enter_context(torch.autocast(region.device, enabled=False))
        return stack

    def _name_gradient(self, name: str, made: Tensor) -> None:
        """Have the gradient of a captured value say whose it is, and how it lies."""
        recorder, types = self.recorder, gradient_types(made)

        def note(grad: Tensor | None) -> None:  # none: differentiated past it
            spec = types()
            if grad is None or spec is None:
                return
            if "_node" in grad.__dict__ and "product" not in spec.layout.partial.values():
                node = recorder.node_of(grad)
                annotate(node, gradient_at=(*info_of(node).gradient_at, (name, spec.grad())))

        compat.add_hook(made, note)

    def _node(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        func: Any = node.target
        if func in _ASSERTIONS:  # torch.export's own, about what capture has fixed
            return None
        if isinstance(func, compat.HigherOrderOperator):
            raise CaptureError(f"{func} inside a model cannot be captured: train it eagerly, or write it without")
        if func is compat.enter_autocast:
            device, dtype, enabled, cache = args
            self.autocasts.append(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
            return self.autocasts[-1].__enter__()
        if func is compat.exit_autocast:
            return self.autocasts.pop().__exit__(None, None, None)
        made: Any
        if func is GRAD.default:
            made = self._differentiated(*args)
        elif func is CONSTRAIN.default:
            made = self._brought(args[0], read_placements(args[1]))
        elif isinstance(func, compat.OpOverload):
            if str(func.overloadpacket).startswith("aten.as_strided") and _is_row_major(node.args[0]):
                args[0].__dict__[ROW_MAJOR] = True
            made = self.calls.call(func, tuple(args), dict(kwargs))
        else:
            made = func(*args, **kwargs)  # operator.getitem and arithmetic on numbers
        if node.name in self.constraints:
            made = self._brought(made, self.constraints[node.name])
        made = _as_leaf(node, made)
        if isinstance(made, Tensor):
            graph_node = self.recorder.node_of(made) if "_node" in made.__dict__ else None
            if graph_node is not None and info_of(graph_node).spec is None:
                annotate(graph_node, spec=spec_at(made))
        return made

    def _differentiated(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        cotangents: Sequence[Tensor],
        create: bool,
        dtypes: str,
    ) -> list[Tensor]:
        """Gradients that are part of the loss: autograd's own, each in the layout that the type of its primal says.

        That of a parameter is for the leaf, in the layout in which it is stored: conversions of the value that ops see
        are differentiated past that value, so it has a part of the gradient at most.
        """
        seeds = []
        outputs = [root(y, wrap) for y in outputs]
        for i, y in enumerate(outputs):
            spec = y.__dict__["_spec"].decided()
            resolve_types(y, spec)
            if not cotangents:
                if y.__dict__["_spec"].shape.numel() != 1:
                    raise CaptureError("autograd.grad of a value that is no scalar needs grad_outputs")
                seeds.append(unit_cotangent(spec, spec.mesh.device))
            else:
                seeds.append(convert_layout(cotangents[i], spec.grad().with_(dtype=cotangents[i].dtype), wrap))
        inputs = [self.leaf_of(x) for x in inputs]
        with wanting_gradients(inputs):
            made = torch.autograd.grad(
                outputs, inputs, seeds, retain_graph=True, create_graph=create, allow_unused=True
            )
        found = []
        for x, g, name in zip(inputs, made, dtypes.split(","), strict=True):
            resolve_types(x, x.__dict__["_spec"].decided())
            spec, dtype = x.__dict__["_spec"].grad(), dtype_from(name)
            g = torch.zeros(x.shape, dtype=dtype, device=x.device) if g is None else g.to(dtype)
            found.append(wrap(g.view_as(g), spec if dtype is spec.dtype else spec.summed_as(dtype)))
        return found

    def _brought(self, x: Any, placements: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(self._brought(t, placements) for t in x)
        spec = spec_at(x)
        if spec is None or not (x.dtype.is_floating_point or x.dtype.is_complex):
            return x
        refresh(x, self.calls.enabled)
        target = wanted(spec, placements)
        return x if target is spec else convert_layout(x, target, wrap)
