"""``capture_local``: a training step that a user wrote for one rank, with ``torch.distributed``, as a program.

The step runs once on fake tensors: forward, autograd's backward, the collectives that it calls and the optimizer's
update are recorded one after the other, with the vocabulary of the programs that partition makes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ... import compat
from ...collective import as_rank
from ...compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    engine_run_backward,
    pytree,
)
from ...errors import CaptureError
from ...layout import Layout, Spec
from ...mesh import Mesh
from ...passes.pass_manager import PassManager
from ...passes.recompute import Recompute
from ...passes.split_checkpoints import SplitCheckpoints
from ...ranks import runtime
from ..check.flow import updates
from ..ir.inplace import functional, note_writes, storages, written
from ..ir.nodes import Value, annotate, info_of, is_mutating, remove_dead
from ..ir.program import Input, Output, Program
from ..ir.regions import Path
from ..ir.trace import Recorder
from .checkpoint_calls import Regions
from .distributed_calls import DistCalls
from .fakes import like, named_in, replaced, stand_ins, writing_nothing
from .naming import join, settle
from .optimizers import check_unscaled, parts_of
from .refusals import GENERATOR, generators, refused, without_anomaly_mode
from .update import Update, emit_update

Tensor = torch.Tensor
StepFn = Callable[[Any], Any]


# ---------------------------------------------------------------------------------------------- recording


@dataclass(frozen=True)
class HandWritten:
    """A step by hand, and what it works on."""

    step_fn: StepFn
    mesh: Mesh
    rank: int
    model: nn.Module
    optimizer: Any
    batch: Any
    update: Update | None


@without_anomaly_mode()
def record_step(local: HandWritten) -> tuple[Program, Any]:
    """The program of a step by hand, and the structure of what it returns (None: one tensor, or nothing).

    Raises:
        CaptureError: see :func:`capture_local`.
    """
    first = _Recording(local, held=False)
    first.run()
    if not first.left:
        return first.program(), first.tree
    # The step leaves gradients: it must be one that clears them before it makes others.
    again = _Recording(local, held=True)
    again.run()
    again.check_cleared()
    return again.program(), again.tree


class _StepRecorder(Recorder):
    """A recorder for code that runs as it was written: lines come from the stack, collectives from torch's own.

    What autograd's own nodes compute (not hooks, nor functions of the user's) is ``transposed``: linear in the gradient
    that they are given.
    """

    def __init__(self, calls: DistCalls) -> None:
        super().__init__()
        self.calls = calls
        self.by_hand: list[fx.Node] = []  # writes from the backward on: the step's own, to gradients mostly
        self.updated = set[int]()  # storages of parameters
        self.behind: list[fx.Node] = []  # what follows on optimizer.step()
        self.engine = False
        self.then = "forward"  # role of what comes outside of a forward, since the last backward or update

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.engine = _called_by_autograd()
        if compat.current_autograd_node() is None:
            runtime.RT.line = None
            self.begin("", runtime.user_line(), self.regions)
            # Another forward may follow: the next micro-batch, the other network.
            tensors = pytree.tree_leaves((args, kwargs)) if self.then != "forward" and torch.is_grad_enabled() else ()
            again = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
            self.role = "forward" if again or self.regions else self.then
        if any(isinstance(a, torch.Generator) for a in (kwargs or {}).values()):
            raise CaptureError(f"{runtime.user_line()}: {GENERATOR}")
        if func.namespace == "c10d":
            with self:
                return self.calls(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextlib.contextmanager
    def inside(self, path: Path) -> Iterator[None]:
        """While a checkpointed function runs."""
        outer = self.regions
        self.begin("", "", path)
        try:
            yield
        finally:
            self.begin("", "", outer)

    def emit(self, target: Any, args: Any, kwargs: Any = None, value: Value | None = None) -> fx.Node:
        """As the base, with notes of what autograd made and of writes from the backward on."""
        node = super().emit(target, args, kwargs, value)
        if self.engine:
            annotate(node, transposed=True)
        if self.role != "forward" and is_mutating(node):
            self.by_hand.append(node)
            if not self.updated.isdisjoint(written(node)):  # an update by hand: weight decay, say
                annotate(node, role="optimizer")
        if self.then == "optimizer" and self.role != "forward":
            self.behind.append(node)
        return node


def _called_by_autograd() -> bool:
    """Whether the op that a recorder is given comes straight from autograd's engine: no Python lies in between."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch._compile", "torch._dynamo")
    ):
        frame = frame.f_back
    return frame.f_code is engine_run_backward.__code__


class _Recording:
    """One run of a step on fakes.

    Args:
        held: whether parameters have gradients when the step begins.
    """

    def __init__(self, local: HandWritten, held: bool) -> None:
        self.local, self.held = local, held
        self.named = named_in(local.model, local.optimizer)
        self.recorder = _StepRecorder(DistCalls(local.mesh, local.rank))
        self.inputs: list[Input] = []
        self.params: dict[fx.Node, str] = {}
        self.late: list[Input] = []
        self.outputs: list[tuple[Output, fx.Node]] = []
        self.gradients: dict[str, list[fx.Node]] = {}  # name of a parameter to its gradients as autograd gave them
        self.asked: dict[str, list[fx.Node]] = {}  # and to what ``autograd.grad`` gave: gradients once they are used
        self.before: dict[str, fx.Node] = {}  # gradients of the step before
        self.taken = set[fx.Node]()  # gradients that were updated from
        self.updated = set[int]()  # which optimizers have stepped
        self.left = False
        self.tree: Any = None

    def run(self) -> None:
        """Run the step."""
        local, mode = self.local, FakeTensorMode(allow_non_fake_inputs=True)
        tensors = {**self.named, **dict(local.model.named_buffers())}
        with as_rank(local.mesh, local.rank), stand_ins(tensors, mode, self._born), writing_nothing():
            self._inputs(tensors)
            leaves, structure = pytree.tree_flatten(local.batch)
            with mode:
                fakes = [like(x) if isinstance(x, Tensor) else x for x in leaves]
            for i, (x, fake) in enumerate(zip(leaves, fakes, strict=True)):
                if isinstance(x, Tensor):
                    self._input(fake, f"batch_{i}", Input(f"batch.{i}", "batch"))
            made = self._watched(mode, pytree.tree_unflatten(fakes, structure))
            self._results(made)
            self.left = any(p.grad is not None for p in self.named.values())

    def _inputs(self, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            kind = "param" if name in self.named else "buffer"
            node = self._input(t, f"{kind}_{name}", Input(name, kind))
            if kind == "param":
                self.params[node] = name
                self.recorder.updated.update(storages(node))
            if kind == "param" and t.requires_grad and self.held:
                t.grad = torch.empty_like(t, requires_grad=False)
                self.before[name] = self._input(t.grad, f"before_{name}", None)

    def _input(self, t: Tensor, name: str, given: Input | None) -> fx.Node:
        node = self.recorder.placeholder(name.replace(".", "_"), t)
        if given is not None:
            self.inputs.append(given)
        return node

    def _born(self, name: str, p: Tensor) -> None:
        assert p.grad is not None
        node, known = self.recorder.node_of(p.grad), self.gradients.setdefault(name, [])
        at: Any = node if known and known[-1] not in self.taken else None
        while isinstance(at, fx.Node) and at is not known[-1]:
            at = next(iter(at.args), None)
        if isinstance(at, fx.Node):
            known.pop()  # this one was added to it; others began anew, behind an update
        known.append(node)

    def _watched(self, mode: FakeTensorMode, batch: Any) -> Any:
        """Run the step's own code."""
        backward, grad, recorder = torch.autograd.backward, torch.autograd.grad, self.recorder

        def begins(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            recorder.role = recorder.then = "backward"
            backward(tensors, self._seeds(tensors, grad_tensors), *args, **kwargs)

        def asks(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            recorder.role = recorder.then = "backward"
            made = grad(outputs, inputs, self._seeds(outputs, grad_outputs), *args, **kwargs)
            names = {id(p): n for n, p in self.named.items()}
            for x, g in zip([inputs] if isinstance(inputs, Tensor) else inputs, made, strict=False):
                if id(x) in names and g is not None:
                    self.asked.setdefault(names[id(x)], []).append(recorder.node_of(g))
            return made

        with contextlib.ExitStack() as stack:
            patched = replaced(torch.autograd, backward=begins, grad=asks)
            for made in (mode, recorder, patched, _refused(), refused(*generators()), Regions(recorder.inside).noted()):
                stack.enter_context(made)
            for i, part in enumerate(parts_of(self.local.optimizer)):
                stack.enter_context(replaced(part, step=partial(self._step, i)))
            try:
                return self.local.step_fn(batch)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CaptureError(
                    f"{recorder.line}: the step reads the value of a tensor ({error.func}): a captured step cannot. "
                    "Return the tensor instead of calling item(), float(), bool() or print() in the step"
                ) from error

    def _seeds(self, tensors: Any, given: Any) -> Any:
        """What a backward starts from: the same 1 as autograd's own, as a node that says so; cotangents of the step's
        own stay what they are."""
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        grads: list[Any] = (
            [None] * len(listed) if given is None else [given] if isinstance(given, Tensor) else list(given)
        )
        for i, (t, grad) in enumerate(zip(listed, grads, strict=False)):  # torch itself says what is missing
            if grad is None and isinstance(t, Tensor) and t.numel() == 1:
                grads[i] = seed = torch.full(t.shape, 1.0, dtype=t.dtype, device=t.device)
                annotate(self.recorder.node_of(seed), seed=True)
        return grads

    def _step(self, part: int, closure: Any = None) -> None:
        """What ``optimizer.step()`` is while recording."""
        if closure is not None:
            raise CaptureError("optimizer.step(closure) may run the step many times: it cannot be captured")
        if part in self.updated:
            raise CaptureError("the step calls optimizer.step() more than once: capture one update at a time")
        check_unscaled(parts_of(self.local.optimizer)[part])
        self.updated.add(part)
        own = {id(p) for g in parts_of(self.local.optimizer)[part].param_groups for p in g["params"]}
        grads = {n: p.grad for n, p in self.named.items() if p.grad is not None and id(p) in own}
        for n, g in grads.items():  # fused kernels look at no shapes
            if g.shape != self.named[n].shape:
                raise CaptureError(
                    f"{n}.grad has the shape {tuple(g.shape)} at optimizer.step(), and {n} {tuple(self.named[n].shape)}"
                )
        recorder = self.recorder
        recorder.role = recorder.then = "optimizer"
        self.taken.update(g for n in grads for g in self.gradients.get(n, ()))
        nodes = {n: recorder.node_of(g) for n, g in grads.items()}
        if self.local.update is None:
            self.outputs += [(Output(n, "grad"), node) for n, node in nodes.items()]
            return
        params = {n: recorder.node_of(self.named[n]) for n in nodes}
        whole = Layout(self.local.mesh)
        specs = {n: Spec(self.named[n].shape, self.named[n].dtype, whole) for n in nodes}
        made = emit_update(recorder, self.local.update.of(part), params, nodes, specs)
        self.late += [replace(i, spec=None) for i in made]

    def _results(self, made: Any) -> None:
        missing = [type(o).__name__ for i, o in enumerate(parts_of(self.local.optimizer)) if i not in self.updated]
        if missing:
            raise CaptureError(
                f"the step did not call optimizer.step() of the optimizer that capture_local was given ({missing[0]})"
            )
        leaves, tree = pytree.tree_flatten(made)
        if made is None:
            return
        self.tree = None if isinstance(made, Tensor) else tree
        for i, t in enumerate(leaves):
            if not isinstance(t, Tensor):
                raise CaptureError(f"the step returned {t!r}: return tensors only")
            name, kind = (f"aux.{i - 1}", "aux") if i else ("loss", "loss")
            self.outputs.insert(i, (Output(name, kind), self.recorder.node_of(t)))

    def check_cleared(self) -> None:
        """Raises CaptureError if gradients of the step before are used."""
        for name, node in self.before.items():
            if node.users:
                raise CaptureError(
                    f"the step adds to the gradient of {name} that the step before left: clear gradients in the step, "
                    "with optimizer.zero_grad() (set_to_none=True, the default)"
                )

    # -- the result -----------------------------------------------------------------------------------

    def program(self) -> Program:
        """What was recorded, with gradients named and writes into them turned into values."""
        graph = self.recorder.graph
        graph.output(tuple(node for _, node in self.outputs))
        for name, given in self.gradients.items():
            for node in given:
                annotate(node, grad_of=(*info_of(node).grad_of, (name, self._unknown(name))))
        functional(graph, self.recorder.by_hand)
        remove_dead(graph)
        if self.asked:
            self._join(graph)
        for node in self.before.values():
            graph.erase_node(node)
        if self.local.update is None:
            _nothing_after(n for n in self.recorder.behind if n.graph is graph)
        constants = dict(self.recorder.constants)
        inputs = self._in_order(graph, constants)
        note_writes(graph)
        graph.lint()
        made = Program(
            self.local.mesh, self.local.rank, graph, inputs, tuple(o for o, _ in self.outputs),
            tuple(self.recorder.causes), (), constants, "" if self.local.update is None else self.local.update.text,
        )  # fmt: skip
        settle(made)
        return PassManager([Recompute(), SplitCheckpoints()])(made)

    def _in_order(self, graph: fx.Graph, constants: dict[str, Tensor]) -> tuple[Input, ...]:
        first, late = iter(self.inputs), iter(self.late)
        made = []
        for node in (n for n in graph.nodes if n.op == "placeholder"):
            if str(node.target) in constants:
                made.append(Input(str(node.target), "constant"))
            else:
                found = next(first, None)
                made.append(found if found is not None else next(late))
        return tuple(made)

    def _join(self, graph: fx.Graph) -> None:
        """Name the gradients that came from ``autograd.grad``."""
        used = {self.params[p]: g for node in graph.nodes for p, g in updates(node) if p in self.params}
        used.update((o.name, node) for o, node in self.outputs if o.kind == "grad")
        for name, sources in self.asked.items():
            if name in used:
                join(name, used[name], set(sources), self._unknown(name))

    def _unknown(self, name: str) -> Spec:
        p = self.named[name]
        return Spec(p.shape, p.dtype, Layout(self.local.mesh))


def _nothing_after(behind: Iterable[fx.Node]) -> None:
    """Raises CaptureError if the program goes on with parameters behind an update that it does not contain."""
    for node in behind:
        for used in node.all_input_nodes:
            if used.op == "placeholder" and used.name.startswith("param_"):
                raise CaptureError(
                    f"{info_of(node).line}: the step reads {used.name} after optimizer.step(), which runs behind "
                    "the program for this optimizer: do it outside of the step, or use SGD, Adam or AdamW"
                )


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """Inside, what would keep fakes or numbers of this one run in objects that the step was not given is an error."""

    def unknown(optimizer: Any, *_: Any) -> None:
        raise CaptureError(
            f"the step calls step() of {type(optimizer).__name__}, an optimizer that capture_local was not given: give "
            "it all, as a list"
        )

    def scales(original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            raise CaptureError(
                "torch.amp.GradScaler asks for values on the host, which a captured step cannot: use "
                "compile_step(loss_scale='dynamic'), or multiply the loss by a number and the gradients by its inverse"
            )
        return original(scaler, *args, **kwargs)

    scaler = torch.amp.GradScaler
    names = ("scale", "unscale_", "step", "update")
    changed: dict[str, Any] = {n: partialmethod(partial(scales, getattr(scaler, n))) for n in names}
    handle = register_optimizer_step_pre_hook(unknown)
    try:
        with replaced(scaler, **changed):
            yield
    finally:
        handle.remove()


__all__ = ["HandWritten", "StepFn", "record_step"]
