"""The optimizer's update as part of a program: a few nodes per parameter group, whatever the number of parameters.

SGD, Adam and AdamW are torch's own fused updates on the lists of local parameters, gradients and states.  What a
scheduler may change (the learning rate) is an input of the program, everything else a constant of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from ...errors import ProgramError
from ...layout import Layout, Partial, Spec, cuts
from ...mesh import Mesh
from ...resharding import executor, record
from ...resharding.copies import TO_HOST
from ...resharding.planner import plan as plan_conversion
from ...shard.optimizers.kinds import check_fused, forgets, own_work
from ..ir.nodes import Value, annotate, checked_value
from ..ir.program import Input
from ..ir.strides import LAID, Strides, dense, is_dense, same, unless_row_major
from ..ir.trace import Recorder
from .optimizers import parts_of
from .scale import Scaling

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(frozen=True)
class ParameterGroup:
    """One parameter group: names of its parameters, and the numbers that are constants of the program.

    Attributes:
        kind: that of :class:`Fused`.
        part, number: which optimizer it belongs to; its place among the groups of all.
    """

    params: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]
    kind: str
    part: int = 0
    number: int = 0

    def __getitem__(self, key: str) -> Any:
        return dict(self.options)[key]


@dataclass(frozen=True)
class Update:
    """The optimizers that a program can contain: their parameter groups, in order."""

    groups: tuple[ParameterGroup, ...]

    @property
    def text(self) -> str:
        """In words."""
        parts: dict[int, list[ParameterGroup]] = {}
        for g in self.groups:
            parts.setdefault(g.part, []).append(g)
        return "; ".join(
            f"{p[0].kind} on {sum(len(g.params) for g in p)} parameters in {len(p)} group(s)" for p in parts.values()
        )

    def of(self, part: int) -> Update:
        """The groups of one of the optimizers."""
        return Update(tuple(g for g in self.groups if g.part == part))


@dataclass(frozen=True)
class Fused:
    """An optimizer with a kernel for its update, which a program can hold.

    Attributes:
        kind: its name in programs.
        options: keys of a parameter group that are constants of the program, and keywords of the kernel.
        states: what the kernel takes behind parameters and gradients, as ``optimizer.state`` calls it, and the option
            without which there is none.
        kernel: torch's operator.
        more: other keywords of the kernel.
    """

    kind: str
    options: tuple[str, ...]
    states: Mapping[str, str | None]
    kernel: Any
    more: Mapping[str, Any] = field(default_factory=dict)

    def states_of(self, group: ParameterGroup) -> list[str]:
        """Names of the states that a parameter of the group has."""
        return [state for state, option in self.states.items() if option is None or group[option]]

    def emit(
        self, recorder: Recorder, group: ParameterGroup, lists: Mapping[str, list[fx.Node]], given: dict[str, Any]
    ) -> None:
        """Record the kernel on lists of parameters, gradients and states."""
        options = {**given, **self.more, **dict(group.options)}
        if "betas" in options:
            options["beta1"], options["beta2"] = options.pop("betas")
        args = tuple(lists.get(name, []) for name in ("params", "grads", *self.states))
        recorder.emit(self.kernel, args, options)


_ADAM = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
_MOMENTS = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad", "step": None}
FUSED: dict[type[torch.optim.Optimizer], Fused] = {
    torch.optim.SGD: Fused(
        "sgd", ("momentum", "dampening", "nesterov", "weight_decay", "maximize"), {"momentum_buffer": "momentum"},
        aten._fused_sgd_.tensor_lr, {"is_first_step": False},
    ),
    torch.optim.Adam: Fused("adam", _ADAM, _MOMENTS, aten._fused_adam_.tensor_lr),
    torch.optim.AdamW: Fused("adamw", _ADAM, _MOMENTS, aten._fused_adamw_.tensor_lr),
}  # fmt: skip
_KINDS = {fused.kind: fused for fused in FUSED.values()}


def update_of(optimizer: Any, names: Mapping[int, str]) -> Update | None:
    """What of an optimizer, or of several, a program can contain, or None if all must run after the program.

    Args:
        names: id of a parameter to its name.
    """
    made: list[ParameterGroup] = []
    for part, one in enumerate(parts_of(optimizer)):
        groups = _groups_of(one, names)
        if groups is None:
            return None
        made += [replace(g, part=part, number=len(made) + i) for i, g in enumerate(groups)]
    return Update(tuple(made)) if made else None


def _groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[ParameterGroup] | None:
    fused = FUSED.get(type(optimizer))
    if fused is None or own_work(optimizer) or any(g.get("differentiable") for g in optimizer.param_groups):
        return None
    if any(isinstance(g[k], Tensor) for g in optimizer.param_groups for k in fused.options):
        return None
    check_fused(optimizer)
    if forgets(optimizer, fused=True) is not None:
        return None
    if any(g.get("momentum") and g.get("dampening") for g in optimizer.param_groups):
        return None  # its first step is another one than the others
    if any(g.get("decoupled_weight_decay") for g in optimizer.param_groups) and fused.kind == "adam":
        fused = FUSED[torch.optim.AdamW]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ProgramError(
                    f"parameter {i} of a group of the optimizer, of shape {tuple(p.shape)}, is none of the model's: "
                    "make the optimizer from the parameters of the model that is passed, after PEFT and the like"
                )
    return [
        ParameterGroup(tuple(names[id(p)] for p in g["params"]), tuple((k, g[k]) for k in fused.options), fused.kind)
        for g in optimizer.param_groups
    ]


def emit_update(
    recorder: Recorder,
    update: Update,
    params: Mapping[str, fx.Node],
    grads: Mapping[str, fx.Node],
    specs: Mapping[str, Spec],
    hosted: Collection[str] = (),
    scaling: Scaling | None = None,
) -> list[Input]:
    """Record the update of all groups; the inputs (states and learning rates) that it adds.

    Args:
        hosted: names of those that are updated on the host, with their gradients and states.
        scaling: skip the update where this found gradients that are not finite.

    Parameters without a gradient are left alone, as optimizers do.
    """
    inputs: list[Input] = []
    for group in update.groups:
        members = [n for n in group.params if n in grads]
        rates: list[fx.Node] = []
        for on_host in (False, True):  # a kernel works in one memory
            if names := [n for n in members if (n in hosted) is on_host]:
                _emit(recorder, group, names, params, grads, specs, on_host, scaling, rates, inputs)
    return inputs


def _emit(
    recorder: Recorder,
    group: ParameterGroup,
    names: Sequence[str],
    params: Mapping[str, fx.Node],
    grads: Mapping[str, fx.Node],
    specs: Mapping[str, Spec],
    on_host: bool,
    scaling: Scaling | None,
    rates: list[fx.Node],
    inputs: list[Input],
) -> None:
    """Record the kernel of parameters of a group that are updated in one place; inputs are added, and the rate of the
    group, if it has none yet."""

    def here(node: fx.Node) -> fx.Node:
        """A number where the update is made."""
        if not on_host:
            return node
        made = recorder.emit(TO_HOST, (node,))
        annotate(made, value=checked_value(node).fresh(_number(recorder)))
        return made

    fused = _KINDS[group.kind]
    made: dict[str, list[fx.Node]] = {}
    for state in fused.states_of(group):
        made[state] = []
        for n in names:
            spec = Spec((), torch.float32, Layout(specs[n].mesh)) if state == "step" else specs[n]
            made[state].append(_input(recorder, Input(f"{n}.{state}", "state", spec, n), params[n], inputs))
    if not rates:
        rates.append(_input(recorder, Input(f"lr.{group.number}", "hyper"), None, inputs))
    given: dict[str, Any] = {"lr": rates[0]}
    if scaling is not None:
        given["found_inf"] = here(scaling.found_inf())
    if "step" in made:
        one = (aten._foreach_add_.Scalar, 1) if scaling is None else (aten._foreach_add_.Tensor, here(scaling.taken()))
        recorder.emit(one[0], (made["step"], one[1]))  # skipped updates do not count
    own = [_without_gaps(recorder, params[n]) for n in names]
    beside = [_beside(recorder, grads[n], p) for n, p in zip(names, own, strict=True)]
    lists = {"params": own, "grads": beside, **made}
    fused.emit(recorder, group, {k: [_real(recorder, n) for n in v] for k, v in lists.items()}, given)
    for n, p in zip(names, own, strict=True):
        if p is not params[n]:
            annotate(recorder.emit(aten.copy_.default, (params[n], p)), value=checked_value(params[n]))


# A fused update walks through the memory of parameters, gradients and states side by side: all lie as the parameter.


def _without_gaps(recorder: Recorder, node: fx.Node) -> fx.Node:
    """A parameter, or a copy of one that does not fill its memory."""
    value = checked_value(node)
    return (
        node
        if is_dense(value.shape, value.strides)
        else _with_strides(recorder, node, dense(value.shape, value.strides))
    )


def _beside(recorder: Recorder, grad: fx.Node, param: fx.Node) -> fx.Node:
    """A gradient that lies in memory as its parameter."""
    value, want = checked_value(grad), checked_value(param).strides
    if same(value.shape, value.strides, want) and not value.dtype.is_complex:  # which may be conjugate by name only
        return grad
    return _with_strides(recorder, grad, want)


def _with_strides(recorder: Recorder, node: fx.Node, strides: Strides) -> fx.Node:
    made = recorder.emit(LAID.default, (node, list(strides)))
    value = checked_value(node).fresh(_number(recorder))
    annotate(made, value=replace(value, given=unless_row_major(value.shape, strides)))
    return made


def _real(recorder: Recorder, node: fx.Node) -> fx.Node:
    """Complex numbers as pairs: their parts are updated one by one, as torch's optimizers do."""
    value = checked_value(node)
    if not value.dtype.is_complex:
        return node
    made = recorder.emit(aten.view_as_real.default, (node,))
    strides = value.given and (*(2 * s for s in value.given), 1)
    annotate(made, value=replace(value, shape=(*value.shape, 2), dtype=value.dtype.to_real(), given=strides))
    return made


def _number(recorder: Recorder) -> int:
    """A number for a storage of its own."""
    return len(recorder.graph.nodes) + (1 << 40)


def _input(recorder: Recorder, given: Input, like: fx.Node | None, inputs: list[Input]) -> fx.Node:
    node = recorder.late_placeholder(given.name.replace(".", "_"))
    number = _number(recorder)
    one = like is None or given.name.endswith(".step")
    annotate(node, value=Value((), torch.float32, number, 4) if one else checked_value(like).fresh(number))
    inputs.append(given)
    return node


# ---------------------------------------------------------------------------------------------- clipping


def clip(grads: Mapping[str, Tensor], max_norm: float, mesh: Mesh) -> dict[str, Tensor]:
    """Gradients scaled so that the norm of all of them together is at most ``max_norm``.

    One all-reduce of a number for all gradients that are split over the same axes.  As ``clip_grad_norm_``.
    """
    split: dict[tuple[int, ...], list[Tensor]] = {}
    for g in grads.values():
        placements = g.__dict__["_spec"].layout.placements
        axes = tuple(a for a, p in enumerate(placements) if cuts(p))
        split.setdefault(axes, []).append(g)
    total: Any = None
    for axes, listed in split.items():
        norms = torch._foreach_norm(listed)
        part = torch.linalg.vector_norm(torch.stack([n.to(norms[0].dtype) for n in norms])) ** 2
        if axes:
            part = _over_ranks(part, axes, mesh)
        total = part if total is None else total + part
    scale = torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0)
    made = torch._foreach_mul(list(grads.values()), scale)
    for (_, old), new in zip(grads.items(), made, strict=True):
        new.__dict__["_spec"] = old.__dict__["_spec"]
    return dict(zip(grads, made, strict=True))


def _over_ranks(part: Tensor, axes: tuple[int, ...], mesh: Mesh) -> Tensor:
    """The sum over the ranks that hold other parts of the same gradients."""
    whole = Layout(mesh)
    split = Layout(mesh, [Partial() if a in axes else p for a, p in enumerate(whole.placements)])
    plan = plan_conversion(Spec((), part.dtype, split), Spec((), part.dtype, whole))
    names = ", ".join(mesh.axes[a] for a in axes)
    why = f"gradients that are split over {names}: the squares of their parts are summed"
    with record.asked("norm of the gradients", plan, why):
        return executor.apply(plan.steps, part)
