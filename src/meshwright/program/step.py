"""``compile_step``: a training step captured once and run without Python dispatch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn as nn
import torch.utils._pytree as pytree

from .. import collective, runtime
from ..collective import COLLECTIVES
from ..convert import apply
from ..dispatch import disabled
from ..errors import DesyncError, MeshwrightError, ProgramError
from ..layout import Layout, Placements, Spec
from ..mesh import Mesh
from ..reshard import plan as plan_conversion
from ..shard.module import lay_module
from ..shard.optimizer import shard_optimizer
from ..tensor import DistTensor, stamp
from .build import Built, Globs, Plan, build, checked_mesh
from .capture import LossFn, batch_sources
from .core import Input, Program
from .inductor import with_inductor
from .run import Runner, compile_program
from .trace import Value
from .update import update_of

Tensor = torch.Tensor


def compile_step(
    model: nn.Module,
    loss_fn: LossFn | None,
    optimizer: torch.optim.Optimizer | None,
    example_batch: Any,
    *,
    mesh: Mesh,
    layouts: Globs | None = None,
    batch: Placements | Mapping[str, Placements] | None = None,
    inputs: Globs | None = None,
    outputs: Globs | None = None,
    stored_over: str | Mapping[str, str] | None = None,
    regather: bool = True,
    clip_grad_norm: float | None = None,
    gradients: bool = False,
    passes: Sequence[Any] = (),
    init: Callable[[nn.Module], Any] | None = None,
    backend: str | None = None,
) -> Step:
    """Capture a training step of ``model`` on a mesh as one static program.

    Args:
        model: for one device.  Plain (the same on every rank), on the meta device, or from
            ``shard_module(sync=False)``.  Its parameters are laid on the mesh, as completion decides.
        loss_fn: ``loss_fn(model, batch)`` returns the loss (global values), or a tuple that begins with it; None: the
            model returns the loss, given the batch.
        optimizer: over the model's parameters.  SGD, Adam and AdamW become part of the program; others run after it, on
            local tensors.  None: the program computes gradients only.
        example_batch: a tensor, or tuples, lists and dicts of tensors, of global shapes; values do not matter.
        mesh: connected (or simulated).
        layouts: glob over names of parameters, buffers, batch tensors (``batch.0``) or values of the program to
            placements.  All others follow by completion.
        batch: placements of all batch tensors.
        inputs, outputs: glob over module names to placements of their inputs and outputs.
        stored_over: store parameters split over this axis, gather them for use (ZeRO-3).
        regather: with ``stored_over``: gather again for the backward instead of keeping gathered parameters.
        clip_grad_norm: clip the global norm of the gradients before the update.
        gradients: set ``parameter.grad`` after each step.
        passes: applied to the program, in order.
        init: as for ``shard_module``.
        backend: ``"inductor"`` compiles what lies between collectives.

    Returns:
        A step: ``loss = step(batch)``.

    Raises:
        CaptureError, LayoutError, ShardError: on all ranks, before anything runs.
        DesyncError: ranks whose programs differ.
    """
    plan = Plan(
        dict(layouts or {}), batch, dict(inputs or {}), dict(outputs or {}), stored_over, regather, clip_grad_norm,
        gradients,
    )  # fmt: skip
    return Step(model, loss_fn, optimizer, example_batch, checked_mesh(mesh), plan, init=init, backend=backend)


class Step:
    """A captured training step.  Call it with a batch; it returns the loss, as a DistTensor.

    Attributes:
        program: this rank's program for the batches of the last call (or for the example).
        built: all that the stages returned for it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: torch.optim.Optimizer | None,
        example_batch: Any,
        mesh: Mesh,
        plan: Plan,
        *,
        init: Callable[[nn.Module], Any] | None = None,
        backend: str | None = None,
    ) -> None:
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.mesh, self.plan, self.backend = mesh, plan, backend
        if backend not in BACKENDS:
            raise ProgramError(f"backend={backend!r}: None or 'inductor' was expected")
        self.training = True
        self._ready: dict[Any, _Ready] = {}
        self._places: list[list[tuple[dict[str, Any], str, Tensor]]] = []
        names = {id(p): n for n, p in model.named_parameters()}
        with _together(mesh, "compile_step"):
            self.built = build(model, loss_fn, optimizer, example_batch, mesh, plan, rank=runtime.RT.rank)
        lay_module(model, mesh, self.built.stored, init)
        if optimizer is not None:
            _follow(optimizer, names, dict(model.named_parameters()))
            self.update = update_of(optimizer, {id(p): n for n, p in model.named_parameters()})
            if self.update is None:
                shard_optimizer(optimizer)
            self._numbers = _numbers(optimizer)
        self._tree = pytree.tree_flatten(example_batch)[1]
        self._current = self._install(example_batch, self.built)

    # -- compiling ------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """This rank's program for the batches of the last call."""
        return self._current.built.program

    def _install(self, batch: Any, built: Built) -> _Ready:
        _agree(built.program)
        made = _Ready(self, built)
        self._ready[self._signature(batch)] = made
        return made

    def _signature(self, batch: Any) -> Any:
        leaves = pytree.tree_leaves(batch)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        return (self.training, shapes)

    def _for(self, batch: Any) -> _Ready:
        found = self._ready.get(self._signature(batch))
        if found is not None:
            return found
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self._tree:
            raise ProgramError(
                f"the batch is {tree}, the step was captured for {self._tree}: give it what it was captured for"
            )
        first = next(iter(self._ready))[1]
        for i, (leaf, old) in enumerate(zip(leaves, first, strict=True)):
            if isinstance(leaf, Tensor) and (leaf.dtype != old[1] or leaf.ndim != len(old[0])):
                raise ProgramError(
                    f"batch tensor {i} is {leaf.dtype} of shape {tuple(leaf.shape)}, the step was captured for {old[1]} "
                    f"of shape {old[0]}: dtype and number of dims must be the same (sizes may differ: the step is then "
                    "captured again)"
                )
        with _together(self.mesh, "a batch of another shape"):
            built = build(
                self.model, self.loss_fn, self.optimizer, batch, self.mesh, self.plan,
                rank=runtime.RT.rank, train=self.training,
            )  # fmt: skip
        return self._install(batch, built)

    # -- running --------------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Any:
        """One step on ``batch``: plain tensors hold global values, DistTensors lie as the program expects.

        Returns:
            The loss (and what the loss function returned beside it), not reduced until its value is asked for.

        Raises:
            ProgramError: a batch that does not fit, an optimizer that was changed; before anything runs, on all ranks.
        """
        ready = self._current = self._for(batch)
        if self.optimizer is not None and self.training:
            self._unchanged(self.optimizer)
        return ready(batch)

    def _unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        if self.update is None:
            return
        numbers = _numbers(optimizer)
        if numbers != self._numbers:
            raise ProgramError(
                f"the optimizer was changed after the step was captured: it had {_difference(self._numbers, numbers)}. "
                "The learning rate may change; for anything else call compile_step again"
            )

    def train(self, mode: bool = True) -> Step:
        """Train (or, with False, only compute the loss) from now on; the model's modules are switched too."""
        self.training = mode
        self.model.train(mode)
        return self

    def eval(self) -> Step:
        """From now on steps compute the loss only, without dropout."""
        return self.train(False)

    def __repr__(self) -> str:
        return f"<Step of {type(self.model).__name__}: {self.program!r}>"


BACKENDS: dict[str | None, Callable[[Program], Program]] = {None: lambda program: program, "inductor": with_inductor}


class _Ready:
    """A program bound to a model's tensors and an optimizer's states."""

    def __init__(self, step: Step, built: Built) -> None:
        self.step, self.built = step, built
        program = self.program = built.program
        self.run: Runner = compile_program(BACKENDS[step.backend](program))
        tensors = dict((*step.model.named_parameters(), *step.model.named_buffers()))
        self.batch: list[tuple[int, int, Spec]] = []  # place among the inputs, leaf of the batch, its spec
        self.numbers: list[tuple[int, int, Tensor]] = []
        self.inputs: list[Any] = []
        self.bound: list[tuple[int, str, DistTensor | Tensor]] = []
        leaves = _leaf_places(built)
        for i, given in enumerate(program.inputs):
            if given.kind in ("param", "buffer"):
                t = tensors[given.name]
                self.bound.append((i, given.name, t))
                self.inputs.append(_local(t))
            elif given.kind == "batch":
                assert given.spec is not None
                self.batch.append((i, leaves[given.name], given.spec))
                self.inputs.append(None)
            elif given.kind == "constant":
                self.inputs.append(program.constants[given.name])
            elif given.kind == "hyper":
                number = torch.tensor(0.0, dtype=torch.float64)
                self.numbers.append((i, int(given.name.rpartition(".")[2]), number))
                self.inputs.append(number)
            else:
                self.inputs.append(self._state(given, tensors[given.owner]))
        self.written = [self.inputs[i] for i, _, _ in self.bound]
        self.grads = [(k, o.name, _known(o.spec)) for k, o in enumerate(program.outputs) if o.kind == "grad"]
        self.returned = [(k, _known(o.spec)) for k, o in enumerate(program.outputs) if o.kind in ("loss", "aux")]

    def _state(self, given: Input, p: Tensor) -> Tensor:
        """A state of the optimizer, made if it is not there; the optimizer keeps it as its own."""
        optimizer = self.step.optimizer
        assert optimizer is not None
        name = given.name.rpartition(".")[2]
        states = optimizer.state[p]
        if name not in states:
            states[name] = torch.zeros(()) if name == "step" else torch.zeros_like(_local(p))
        found: Tensor = states[name]
        return found

    def __call__(self, batch: Any) -> Any:
        leaves = pytree.tree_leaves(batch)
        inputs = self.inputs
        for i, leaf, spec in self.batch:
            inputs[i] = _part(leaves[leaf], spec)
        groups = self.step.optimizer.param_groups if self.step.optimizer is not None else ()
        for _, group, number in self.numbers:
            number.fill_(float(groups[group]["lr"]))
        made = self.run(inputs)
        if self.numbers:
            self.step.optimizer._opt_called = True  # type: ignore[union-attr]  # schedulers ask for it
        torch.autograd.graph.increment_version(self.written)
        for i, _, _ in self.batch:
            inputs[i] = None
        if self.grads:
            self._give_gradients(made)
        out = [stamp(made[k], spec) for k, spec in self.returned]
        tree = self.built.captured.out_tree
        return out[0] if tree is None else pytree.tree_unflatten(out, tree)

    def _give_gradients(self, made: list[Tensor]) -> None:
        tensors = dict(self.step.model.named_parameters())
        for k, name, spec in self.grads:
            tensors[name].grad = stamp(made[k], spec)
        optimizer = self.step.optimizer
        if optimizer is not None and self.step.update is None and self.step.training:
            optimizer.step()
            if not self.step.plan.gradients:
                optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------- parts


def _known(spec: Spec | None) -> Spec:
    assert spec is not None
    return spec


def _local(t: Tensor) -> Tensor:
    """The local tensor as a plain alias that shares memory and version."""
    with torch.no_grad(), disabled():
        return t.detach().as_subclass(Tensor) if not isinstance(t, DistTensor) else _bare(t)


def _bare(t: DistTensor) -> Tensor:
    made = Tensor.detach(t)
    made.__class__ = Tensor
    return made


def _part(t: Any, spec: Spec) -> Tensor:
    """This rank's part of a batch tensor."""
    if isinstance(t, DistTensor):
        if t._spec.layout != spec.layout:
            raise ProgramError(
                f"a batch tensor of shape {tuple(t.shape)} lies as {t.layout!r}, the program expects {spec.layout!r}: "
                "give it so (shard_dataloader), or give plain tensors with the global values"
            )
        return _bare(t)
    whole = Spec(spec.shape, spec.dtype, Layout(spec.mesh))
    with torch.no_grad():
        made = apply(plan_conversion(whole, spec.with_(undecided=0, reduced=0)).steps, t)
    return made if made.device.type == spec.mesh.device else made.to(spec.mesh.device)


def _leaf_places(built: Built) -> dict[str, int]:
    return {s.name: s.leaf for s in batch_sources(built.captured.sources)}


def _follow(optimizer: torch.optim.Optimizer, names: dict[int, str], params: dict[str, Tensor]) -> None:
    """Have an optimizer hold the tensors that took the place of those of a model on the meta device."""
    for group in optimizer.param_groups:
        group["params"] = [params[names[id(p)]] if id(p) in names else p for p in group["params"]]
    for p in [p for p in optimizer.state if id(p) in names and params[names[id(p)]] is not p]:
        optimizer.state[params[names[id(p)]]] = optimizer.state.pop(p)


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What of an optimizer is a constant of the program."""
    skip = {"params", "lr", "initial_lr"}
    return [
        {"params": len(g["params"]), **{k: v for k, v in g.items() if k not in skip}} for g in optimizer.param_groups
    ]


def _difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    if len(old) != len(new):
        return f"{len(old)} parameter groups and has {len(new)}"
    for i, (a, b) in enumerate(zip(old, new, strict=True)):
        for k in a:
            if a[k] != b.get(k):
                return f"{k}={a[k]!r} in group {i} and has {b.get(k)!r}"
    return "other options"


class _together:
    """A mistake found on one rank is raised on all, before any of them runs the program."""

    def __init__(self, mesh: Mesh, what: str) -> None:
        self.mesh, self.what = mesh, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.mesh.size == 1 or (error is not None and not isinstance(error, MeshwrightError)):
            return
        group = collective.group(self.mesh, tuple(range(self.mesh.ndim)))
        seen = collective.all_gather_object(str(error or ""), group)
        if error is None:
            for rank, text in zip(self.mesh.ranks, seen, strict=True):
                if text:
                    raise DesyncError(f"{self.what} failed on rank {rank}: {text}")


def meetings(program: Program) -> list[str]:
    """What ranks must do alike: the inputs and outputs, and every collective in order with all that they agree on.

    Local ops may differ: a rank with an empty shard takes other kernels.
    """
    lines = [f"input {i.kind} {i.name}" for i in program.inputs]
    for node in program.collectives():
        value = node.all_input_nodes[0].meta.get("value")
        dtype = value.dtype if isinstance(value, Value) else None
        kind = COLLECTIVES[node.target]
        options = [a for i, a in enumerate(node.args[1:-1]) if (kind, i) not in _OWN_PLACE]
        lines.append(f"{kind}{options} of {dtype}")
    return [*lines, *(f"output {o.kind} {o.name}" for o in program.outputs)]


_OWN_PLACE = {("reduce_scatter", 3), ("all_to_all", 4)}  # the argument that says which rank this is


def _agree(program: Program) -> None:
    """All ranks must meet in the same collectives, in one order."""
    mesh = program.mesh
    if mesh.size == 1:
        return
    lines = meetings(program)
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    seen = collective.all_gather_object(hashlib.sha1("\n".join(lines).encode()).hexdigest(), group)
    if len(set(seen)) == 1:
        return
    everyone = collective.all_gather_object(lines, group)
    for rank, other in zip(mesh.ranks[1:], everyone[1:], strict=True):
        for a, b in zip_longest(everyone[0], other, fillvalue="nothing more"):
            if a != b:
                raise DesyncError(
                    f"the ranks captured different steps: where rank {mesh.ranks[0]} has {a}, rank {rank} has {b}; "
                    "build the same model, loss and batch shapes on all ranks"
                )


__all__ = ["Step", "compile_step"]
