"""Which strands are split: cheapest first, as long as they do not cross, and only what is worth what it sends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..program.capture.complete import Key
from .strands import Strand, Strands

_LINE = "small, and what it meets is whole"


@dataclass
class Chosen:
    """What was found.

    Attributes:
        dims: input of the graph to the dim that is split, and why.
        whole: parameter to why it is not split.
        notes: what is gathered all the same.
    """

    dims: dict[Key, tuple[int, str]] = field(default_factory=dict)
    whole: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose_strands(strands: Strands, plan: Mapping[str, tuple[int, str]]) -> Chosen:
    """Choose among all strands.

    Args:
        plan: name of a parameter to the dim that the model's own plan splits, and the plan's word.
    """
    found, made = strands.found(), Chosen()
    taken: set[str] = set()
    told = {id(s): _told(strands, s, plan) for s in found}
    refused: dict[Key, str] = {}
    for strand in sorted(found, key=lambda s: (not told[id(s)], s.bytes / s.work if s.work else math.inf)):
        params = [k for k in strand.slots if k in strands.params]
        reason = _refusal(strands, strand, params)
        if not reason and (strand.taken & taken or any(k in made.dims for k in params)):
            reason = "what could be split of it crosses what is split already"
        if reason:
            for k in params:
                refused.setdefault(k, reason)
            continue
        taken |= strand.taken
        made.dims.update(_reasons(strands, strand, plan))
        for key, (sent, op) in strand.gathered.items():
            made.notes.append(f"{key[0]} is gathered for {strands.at(op)}: {_size(sent)} a step")
    made.whole = {k: _LINE if len(strands.values[k].shape) < 2 else r for k, r in refused.items() if k not in made.dims}
    return made


def _told(strands: Strands, strand: Strand, plan: Mapping[str, tuple[int, str]]) -> bool:
    """Whether the model's own plan splits what a strand splits."""
    named = [(plan.get(strands.params[k], (None, ""))[0], d) for k, d in strand.slots.items() if k in strands.params]
    return any(p is not None for p, _ in named) and all(p in (None, d) for p, d in named)


def _refusal(strands: Strands, strand: Strand, params: list[Key]) -> str:
    """Why a strand is not worth what it sends; empty where it is."""
    stored = sum(strands.size(k) for k in params)
    lost = sum(strand.lost)
    worth = strand.bytes <= 2 * stored
    if not strand.work:
        if not strand.ends or strand.gathered or len(params) > 1:
            return "nothing that contracts is split with it"
        if not all(strands.fed(op) for op in strand.taken):
            return "a table whose rows are read in order: all of it is read by every rank"
        return (
            ""
            if worth
            else f"a table smaller than what is read from it: {_size(strand.bytes)} would be sent for {_size(stored)}"
        )
    kinds = {*strand.contractions.values()}
    if kinds == {True, False} and lost <= sum((*strand.begins.values(), *strand.ends.values())):
        return ""
    if kinds == {False} and not strand.gathered and not strand.cut:
        return ""
    if strand.contractions and worth:
        return ""
    if strand.gathered:
        (sent, op), key = max((g, k) for k, g in strand.gathered.items())
        return f"no pair: {_size(sent)} of {key[0]} would be gathered for {strands.at(op)}"
    return "no pair: what comes of it is summed alone"


def _reasons(strands: Strands, strand: Strand, plan: Mapping[str, tuple[int, str]]) -> dict[Key, tuple[int, str]]:
    """Each input of the graph that a strand splits: the dim, and why."""
    roles: dict[Key, tuple[bool, str]] = {}
    for fact in strands.facts:
        if fact.name in strand.contractions:
            for k in fact.inputs:
                if k in strands.params and k in strand.slots:
                    roles.setdefault(k, (strand.contractions[fact.name], fact.name))
    firsts = [strands.params[k] for k, (end, _) in roles.items() if not end]
    lasts = [strands.params[k] for k, (end, _) in roles.items() if end]
    made = {}
    for key, dim in strand.slots.items():
        if key not in strands.inputs:
            continue
        word = plan.get(strands.params.get(key, ""), (None, ""))
        own = f"the model's own plan ({word[1]}); " if word[0] == dim else ""
        end, op = roles.get(key, (None, ""))
        if end is None and not strand.work:
            why = "a table, split by rows: what is read of it is summed"
        elif end is None:
            why = "lies along what is split"
        elif end:
            why = f"by inputs, end of a pair with {_some(firsts)}: summed" if firsts else "by inputs: summed"
        else:
            why = f"by outputs, pair with {_some(lasts)}" if lasts else "by outputs, which stay split up to the loss"
        made[key] = dim, f"{own}{why}" + (f" ({strands.at(op)})" if op else "")
    return made


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _size(sent: float) -> str:
    for unit in ("B", "kB", "MB"):
        if sent < 1000:
            return f"{sent:.3g} {unit}"
        sent /= 1000
    return f"{sent:.3g} GB"


__all__ = ["Chosen", "choose_strands"]
