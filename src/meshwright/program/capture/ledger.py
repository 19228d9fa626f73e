"""What a user asked of a captured step, and what became of each request: nothing is ignored without a word.

What cannot be done is an error that names it, before there is a step.  What is left either was applied, or is without
effect here, for a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...layout import Placements, Shard
from ...shard.optimizers.kinds import reads_no_shapes
from ...shard.parameters.names import Names, matching
from ...shard.parameters.precision import Precision
from ..ir.program import Input, Output, Program
from .build import Built, Plan
from .optimizers import parts_of

_SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class OptionUse:
    """One request.

    Attributes:
        option: ``"layouts"``, ``"batch"``, ``"fsdp"``, ``"pass"``, ``"mesh"``...
        asked: what was said, as text: a glob and its placements, a value.
        applied: whether it has an effect on this step.
        why: what it does, or why it does nothing.
    """

    option: str
    asked: str
    applied: bool
    why: str

    def __str__(self) -> str:
        return f"{self.option} {self.asked}: {'applied' if self.applied else 'WITHOUT EFFECT'}: {self.why}"


def ledger_of(
    model: nn.Module, optimizer: Any, plan: Plan, built: Built, program: Program, passes: Sequence[Any] = (),
    more: Mapping[str, Any] | None = None,
) -> tuple[OptionUse, ...]:  # fmt: skip
    """What became of each request.

    Args:
        program: after the passes.
        passes: that were asked for.
        more: options that are none of the plan's: ``init``, ``backend`` (and what its ``graphs`` hold).
    """
    of = _Ledger(model, optimizer, plan, built, program)
    found = (
        of.layouts(), of.batch(), of.activations(), of.storage(), of.states(), of.numbers(), of.precision(),
        of.strategies(), of.passes(passes), of.others(more or {}), of.axes(),
    )  # fmt: skip
    return tuple(entry for part in found for entry in part)


@dataclass(frozen=True)
class _Ledger:
    model: nn.Module
    optimizer: Any
    plan: Plan
    built: Built
    program: Program

    def _single(self, axes: Iterable[str]) -> str:
        """Why axes split nothing; empty where one of them has several ranks."""
        mesh, axes = self.program.mesh, list(axes)
        one = bool(axes) and all(mesh.axis_size(a) == 1 for a in axes)
        return f"the axis {', '.join(axes)} has one rank" if one else ""

    def layouts(self) -> Iterator[OptionUse]:
        for glob, placements in self.plan.layouts.items():
            names = self.built.decided.get(glob, ())
            alone = self._single(placements) if isinstance(placements, Mapping) else ""
            lost = "later globs match all that it matches"
            yield OptionUse(
                "layouts", _option_text(glob, placements), bool(names) and not alone, alone or _of(names) or lost
            )

    def batch(self) -> Iterator[OptionUse]:
        if self.plan.batch is None:
            return
        layouts = self.built.decided.values()
        batch = {s.name: s.fake for s in self.built.captured.sources if s.kind == "batch"}
        own = [n for n, t in batch.items() if t.ndim and not any(n in names for names in layouts)]
        given = self.plan.batch
        alone = self._single(given) if isinstance(given, Mapping) and set(given) <= set(self.program.mesh.axes) else ""
        none = "layouts= says it of every tensor of the batch, or they are numbers"
        yield OptionUse("batch", repr(given), bool(own) and not alone, alone or _of(own) or none)

    def activations(self) -> Iterator[OptionUse]:
        modules = dict(self.model.named_modules())
        for option in ("inputs", "outputs"):
            globs: Mapping[str, Placements] = getattr(self.plan, option) or {}
            found = matching(globs, modules, f"module (in {option})")
            last = {name: glob for glob, matched in found.items() for name in matched}
            for glob, placements in globs.items():
                own = [n for n in found[glob] if last[n] == glob]
                met = [n for n in own if (option, n) in self.built.met]
                why = "later globs say something else of all that it matches"
                if own:
                    verb = "is given by place" if option == "inputs" else "returns"
                    why = f"the step calls no such module that {verb} a floating-point tensor"
                yield OptionUse(option, _option_text(glob, placements), bool(met), _of(met, len(own)) or why)

    def storage(self) -> Iterator[OptionUse]:
        names = Names(self.model)
        for option in ("fsdp", "offload"):
            given = getattr(self.plan, option)
            for glob, value in (given if isinstance(given, Mapping) else {"": given} if given else {}).items():
                matched = names.said({glob or "*": value}, option)
                firsts = dict.fromkeys(names.all[n] for n in matched)
                kept = [n for n in firsts if (how := self.built.kept.get(n)) and (how.axes or option != "fsdp")]
                alone = self._single([value] if isinstance(value, str) else value) if option == "fsdp" else ""
                none = "no dim of what it matches can be cut into as many parts, or a later glob says something else"
                asked = _option_text(glob, value) if glob else repr(value)
                yield OptionUse(option, asked, bool(kept) and not alone, alone or _of(kept, len(firsts)) or none)
        if not self.plan.reshard_after_forward:
            kept = [n for n, how in self.built.kept.items() if how.axes or how.device]
            yield OptionUse(
                "reshard_after_forward", "False", bool(kept), _of(kept) or "no parameter is gathered or copied for use"
            )

    def states(self) -> Iterator[OptionUse]:
        over, on = self.plan.shard_states, self.plan.offload_states
        kind = (
            "no optimizer" if self.optimizer is None else ", ".join(type(o).__name__ for o in parts_of(self.optimizer))
        )
        states = [i for i in self.program.inputs if i.kind == "state"]
        for option, given in (("shard_states", over), ("offload_states", on)):
            if given is None:
                continue
            axes = [given] if isinstance(given, str) else list(given)
            alone = self._single(axes) if option == "shard_states" else ""
            if self.optimizer is None or alone:
                yield OptionUse(option, repr(given), False, alone or "there is no optimizer")
            elif self.built.update is None:
                yield OptionUse(option, repr(given), True, f"{kind} updates behind the program, and its states follow")
            else:
                mine = states if option == "offload_states" else [i for i in states if self._cut(i, axes)]
                why = f"{len(mine)} of {len(states)} states" if states else f"{kind} keeps no states; gradients follow"
                yield OptionUse(option, repr(given), bool(mine or not states), why)
        if self.plan.by is not None:
            own = [type(o).__name__ for o in parts_of(self.optimizer) if not reads_no_shapes(o)]
            known = f"{kind}, of which that is known" if self.optimizer is not None else "there is no optimizer"
            yield OptionUse("by", repr(self.plan.by), bool(own), ", ".join(own) or known)

    def _cut(self, given: Input, axes: Iterable[str]) -> bool:
        layout = None if given.spec is None else given.spec.layout
        mesh = self.program.mesh
        return layout is not None and any(isinstance(layout.placements[mesh.axis_index(a)], Shard) for a in axes)

    def numbers(self) -> Iterator[OptionUse]:
        plan, does = self.plan, "gradients before the update" if self.optimizer is not None else "gradients returned"
        if plan.clip_grad_norm is not None:
            yield OptionUse("clip_grad_norm", repr(plan.clip_grad_norm), True, does)
        if plan.loss_scale is not None:
            yield OptionUse(
                "loss_scale", repr(plan.loss_scale), True, "the loss, and updates that overflow are skipped"
            )
        if plan.gradients:
            yield OptionUse("gradients", "True", True, "parameter.grad is set after each step")
        if plan.stages is not None:
            stored = [n for n, s in self.built.stored.items() if "At(" in repr(s.layout)]
            yield OptionUse("stages", repr(plan.stages), bool(stored), _of(stored) or "no parameter lies in a stage")
            cut = self.built.stages
            shares = () if cut is None else tuple(zip(cut.modules, cut.shares, strict=True))
            for s, (modules, share) in enumerate(shares):
                yield OptionUse("stages", f"stage {s} of {len(shares)}", True, f"{share:.1%} of the work: {modules}")

    def precision(self) -> Iterator[OptionUse]:
        given = self.plan.precision
        if given is None:
            return
        names = Names(self.model)
        for glob, policy in ({"*": given} if isinstance(given, Precision) else given).items():
            own = dict.fromkeys(names.all[n] for n in names.said({glob: policy}, "precision"))
            yield from self._parts(glob, policy, {n: names.tensors[n] for n in own})

    def _parts(self, glob: str, policy: Precision, own: Mapping[str, torch.Tensor]) -> Iterator[OptionUse]:
        over = [n for n in own if (how := self.built.kept.get(n)) is not None and how.axes]
        several = self.program.mesh.size > 1
        for part in ("compute", "reduce", "accumulate", "outputs", "grad_comm", "gather"):
            value = getattr(policy, part)
            if value is None:
                continue
            asked = _option_text(glob, f"{part}={value}")
            if part in ("compute", "reduce"):
                other = [n for n, t in own.items() if t.dtype is not value and t.is_floating_point()]
                yield OptionUse("precision", asked, bool(other), _of(other) or f"all it matches is {value} already")
            elif part == "gather":
                yield OptionUse("precision", asked, bool(over), _of(over) or "nothing that it matches is fsdp an axis")
            else:
                yield OptionUse(
                    "precision",
                    asked,
                    several or part == "outputs",
                    "one rank sends nothing" if not several else _of(own),
                )

    def strategies(self) -> Iterator[OptionUse]:
        laid = {o.value: o.layout for o in self.built.completed.origins}
        laid |= {n: s.layout for n, s in self.built.laid.specs.items()}
        nodes = [n for n in self.built.captured.graph.nodes if n.op == "call_function"]
        for op, by_axis in (self.plan.strategies or {}).items():
            mine = [n for n in nodes if op in str(n.target)]
            for axis, name in by_axis.items():
                index = self.program.mesh.axis_index(axis)
                split = [n for n in mine if op != _SDPA or _splits_sequence(laid, n, index)]
                none = (
                    f"{axis} does not split the sequence of any of {len(mine)} {op}" if mine else f"no {op} in the step"
                )
                alone = self._single([axis])
                if op == "experts" and name == "rows":
                    sent = any("gather_rows" in r.kinds and axis in r.axes for r in self.program.causes)
                    split = split if sent else []
                    none = f"{axis} splits not both tokens and experts of any of {len(mine)} experts" if mine else none
                why = alone or (f"{len(split)} of {len(mine)} {op}" if split else none)
                yield OptionUse("strategies", f"{op}: {axis}={name}", bool(split) and not alone, why)

    def passes(self, asked: Sequence[Any]) -> Iterator[OptionUse]:
        done = {r.name: r for r in self.program.passes if not isinstance(r, str)}
        for p in asked:
            record = done.get(p.name)
            text = f"{p.name}({p.options})" if p.options else p.name
            yield OptionUse(
                "pass", text, record is not None, "there is nothing to do" if record is None else record.summary
            )

    def others(self, more: Mapping[str, Any]) -> Iterator[OptionUse]:
        if more.get("init") is not None:
            empty = [n for n, t in self.model.named_parameters() if t.is_meta]
            yield OptionUse("init", repr(more["init"]), bool(empty), _of(empty) or "no parameter is on the meta device")
        if more.get("backend") is not None:
            effect = more.get("graphs", "what lies between collectives is compiled")
            yield OptionUse("backend", repr(more["backend"]), True, effect)

    def axes(self) -> Iterator[OptionUse]:
        """Axes of the mesh that nothing uses."""
        mesh = self.program.mesh
        used = {a for n in self.program.collectives() for a in str(n.args[-2]).split(",")}
        ends: tuple[Input | Output, ...] = (*self.program.inputs, *self.program.outputs)
        lie = [x.spec.layout.placements for x in ends if x.spec is not None]
        for i, axis in enumerate(mesh.axes):
            split = axis in used or any(repr(p[i]) != "Replicate()" for p in lie)
            if not split and mesh.sizes[i] > 1:
                yield OptionUse(
                    "mesh", f"{axis}={mesh.sizes[i]}", False, "nothing is split over it: its ranks do the same work"
                )


def _splits_sequence(laid: Mapping[str, Any], node: Any, axis: int) -> bool:
    layout = laid.get(node.args[0].name) or laid.get(node.name)
    if layout is None:
        return False  # what nobody splits has no layout
    ndim = node.args[0].meta["val"].ndim
    p = layout.placements[axis]
    return isinstance(p, Shard) and p.dim % ndim == ndim - 2


def _of(names: Iterable[str], whole: int | None = None) -> str:
    """How many, and the first of them; empty for none."""
    found = list(names)
    if not found:
        return ""
    count = str(len(found)) if whole is None or whole == len(found) else f"{len(found)} of {whole}"
    return f"{count}: {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"


def _option_text(glob: str, value: Any) -> str:
    return f"{glob!r}: {value}" if glob else str(value)


__all__ = ["OptionUse", "ledger_of"]
