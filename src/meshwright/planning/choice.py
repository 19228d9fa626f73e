"""Which strands are split: cheapest first, as long as they do not cross, and only what is worth what it sends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..layout import Shard
from ..program.capture.complete import Key
from .strands import Strand, Strands

_LINE, _CROSSES = "small, and what it meets is whole", "what could be split of it crosses what is split already"
_LARGE = 0.01  # share of the parameters from which on one is split though values of its ops are gathered for it


@dataclass
class Chosen:
    """What was found.

    Attributes:
        dims: input of the graph to how it is split, and why.
        whole: parameter to why it is not split.
        notes: what is gathered all the same.
    """

    dims: dict[Key, tuple[Shard, str]] = field(default_factory=dict)
    whole: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def choose_strands(strands: Strands, plan: Mapping[str, tuple[int, str]], *, pairs: bool = False) -> Chosen:
    """Choose among all strands.

    Args:
        plan: name of a parameter to the dim that the model's own plan splits, and the plan's word.
        pairs: split nothing but pairs.
    """
    found, made = strands.found(), Chosen()
    told = {id(s): _splits_as_planned(strands, s, plan) for s in found}
    found.sort(key=lambda s: (not told[id(s)], not s.pairs, s.bytes / s.work if s.work else math.inf))
    params = {id(s): [k for k in s.slots if k in strands.params] for s in found}
    taken: set[str] = set()
    refused: dict[Key, str] = {}
    gathered: Counter[str] = Counter()
    every = sum(map(strands.size, strands.params))
    for alone in (
        (False,) if pairs else (False, True)
    ):  # first what is split for nothing but its sums, then what is large
        for strand in found:
            members = params[id(strand)]
            reason = _refusal(strands, strand, members, pairs)
            if alone and reason and strand.contractions and sum(map(strands.size, members)) >= _LARGE * every:
                reason = ""
            elif alone and not reason:
                continue
            if not reason and (strand.taken & taken or any(k in made.dims for k in members)):
                reason = _CROSSES
            if reason:
                refused.update({k: reason for k in members if refused.get(k, _CROSSES) == _CROSSES})
                continue
            taken |= strand.taken
            made.dims.update(_reasons(strands, strand, plan))
            for key, (sent, op) in strand.gathered.items():
                gathered[f"{strands.at(key[0])} is gathered for {strands.at(op)}, {_size(sent)} a step"] += 1
    made.notes += [f"{text}{f', {n} times' if n > 1 else ''}" for text, n in gathered.items()]
    made.whole = {k: _LINE if len(strands.values[k].shape) < 2 else r for k, r in refused.items() if k not in made.dims}
    return made


def _splits_as_planned(strands: Strands, strand: Strand, plan: Mapping[str, tuple[int, str]]) -> bool:
    """Whether the model's own plan splits what a strand splits."""
    named = [
        (plan.get(strands.params[k], (None, ""))[0], p.dim) for k, p in strand.slots.items() if k in strands.params
    ]
    return any(p is not None for p, _ in named) and all(p in (None, d) for p, d in named)


def _refusal(strands: Strands, strand: Strand, params: list[Key], pairs: bool) -> str:
    """Why a strand is not worth what it sends; empty where it is."""
    stored = sum(strands.size(k) for k in params)
    lost = sum(strand.lost)
    worth = strand.bytes <= 2 * stored
    if not strand.work:
        if not strand.ends or strand.gathered or len(params) > 1 or pairs:
            return "nothing that contracts is split with it"
        if not all(strands.fed(op) for op in strand.taken):
            return "a table whose rows are read in order: all of it is read by every rank"
        return (
            ""
            if worth
            else f"a table smaller than what is read from it: {_size(strand.bytes)} would be sent for {_size(stored)}"
        )
    if strand.pairs and lost <= sum((*strand.begins.values(), *strand.ends.values())):
        return ""
    if (
        not any(strand.contractions.values())
        and strand.contractions
        and not pairs
        and not strand.gathered
        and not strand.cut
    ):
        return ""
    if strand.contractions and worth and not pairs:
        return ""
    if strand.gathered:
        (sent, op), key = max((g, k) for k, g in strand.gathered.items())
        return f"no pair: {_size(sent)} of {key[0]} would be gathered for {strands.at(op)}"
    return "no pair: what comes of it is summed alone"


def _reasons(strands: Strands, strand: Strand, plan: Mapping[str, tuple[int, str]]) -> dict[Key, tuple[Shard, str]]:
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
    for key, p in strand.slots.items():
        if key not in strands.inputs:
            continue
        word = plan.get(strands.params.get(key, ""), (None, ""))
        own = f"the model's own plan ({word[1]}); " if word[0] == p.dim else ""
        end, op = roles.get(key, (None, ""))
        if end is None and not strand.work:
            why = "a table, split by rows: what is read of it is summed"
        elif end is None:
            why = "lies along what is split"
        elif end:
            why = f"by inputs, end of a pair with {_some(firsts)}: summed" if firsts else "by inputs: summed"
        else:
            open_end = "what comes of it is gathered" if strand.gathered else "which stay split up to the loss"
            why = f"by outputs, pair with {_some(lasts)}" if lasts else f"by outputs, {open_end}"
        made[key] = p, f"{own}{why}" + (f" ({strands.at(op)})" if op else "")
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
