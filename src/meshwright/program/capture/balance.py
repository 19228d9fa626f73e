"""Where a captured step is cut so that its stages take equally long: ``stages={"pp": "auto"}``.

No names are looked at: a step is the sequence of what it computes, and may be cut between any two ops that are not
part of one checkpointed call.  Of the ways to cut it whose slowest stage is nearly as fast as can be, the one that
sends least is taken, and of those the one that cuts the fewest modules.  So blocks stay whole, unless much waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
import torch.fx as fx

from ...errors import LayoutError
from .export import Captured, region_of
from .work import OpWork, bytes_in

Tensor = torch.Tensor
_NEARLY = 1.1  # times the fastest; as good, if it sends less
_HELD = 2  # a stage has at most so many times its part of the parameters, unless it must
_BACK = {False: 3, True: 4}  # forward, and twice as much backward; a checkpointed call runs again


def works(captured: Captured) -> dict[fx.Node, float]:
    """What each op of a captured step takes with its backward, in bytes that could be moved meanwhile."""
    counted = OpWork()
    return {
        node: _BACK[bool(region_of(node))] * counted.of(node).in_bytes
        for node in captured.graph.nodes
        if node.op == "call_function"
    }


def balanced(captured: Captured, lent: Collection[fx.Node], stages: int) -> dict[fx.Node, int]:
    """The stage of each op, of those that the batch decides.

    Args:
        lent: what parameters alone give: it says nothing of where it belongs.

    Raises:
        LayoutError: fewer places to cut at than there are stages.
    """
    calls = [n for n in captured.graph.nodes if n.op == "call_function" and n not in lent]
    params = {s.node for s in captured.sources if s.kind == "param"}
    own = [{u.name for u in n.all_input_nodes if u.name in params or u in lent} for n in calls]
    sizes = {s.node: s.fake.numel() * s.fake.dtype.itemsize for s in captured.sources if s.kind == "param"}
    took = works(captured)
    seen = set[str]()
    held = list[float]()
    for names in own:  # by their first use
        held.append(sum(sizes.get(n, 0) for n in names - seen))
        seen |= names
    places = _places(calls, own, _crossing(calls, params, lent))
    if len(places) + 1 < stages:
        raise LayoutError(
            f"stages: the step can be cut into {len(places) + 1} parts with parameters, which is less than {stages} "
            "stages: take fewer stages (or fewer chunks), or checkpoint less at once: a checkpointed call is not cut"
        )
    ends = [0, *(i for i, _, _ in places), len(calls)]
    prices = [0.0, *(64.0 * sent + depth for _, sent, depth in places), 0.0]
    time, memory = _shares([took[n] for n in calls], ends), _shares(held, ends)
    cuts = [ends[k] for k in _cut(time, memory, prices, stages)]
    return {n: sum(i >= c for c in cuts) for i, n in enumerate(calls)}


def _shares(values: Sequence[float], ends: Sequence[int]) -> list[float]:
    """What lies before each place, of all."""
    sums = [0.0, *accumulate(values)]
    return [sums[i] / (sums[-1] or 1.0) for i in ends]


def _crossing(calls: Sequence[fx.Node], params: Collection[str], lent: Collection[fx.Node]) -> list[float]:
    """Bytes that are sent where the step is cut before each op: what needs no parameter, every stage has by itself."""
    place = {n: i for i, n in enumerate(calls)}
    change, needing = [0.0] * (len(calls) + 1), set[fx.Node]()
    for i, n in enumerate(calls):
        if any(u.name in params or u in needing or u in lent for u in n.all_input_nodes):
            needing.add(n)
            later = [place[u] for u in n.users if u in place]
            if later and isinstance(n.meta.get("val"), Tensor):
                change[i + 1] += bytes_in(n.meta["val"])
                change[max(later) + 1] -= bytes_in(n.meta["val"])
    return list(accumulate(change))


def _places(
    calls: Sequence[fx.Node], own: Sequence[Collection[str]], sent: Sequence[float]
) -> list[tuple[int, float, int]]:
    """Where to cut, of all places between two ops with parameters the best: before which op, bytes, modules cut."""
    best: list[tuple[int, float, int]] = []
    found: tuple[float, int, int] | None = None
    behind = False  # an op with parameters
    for i, (n, names) in enumerate(zip(calls, own, strict=True)):
        region = region_of(n).partition("/")[0]
        inside = i and region and region == region_of(calls[i - 1]).partition("/")[0]
        if behind and not inside and not isinstance(calls[i - 1].meta.get("val"), (list, tuple)):
            depth = len(_common(calls[i - 1], n))
            found = min(found or (math.inf, 0, 0), (sent[i], depth, i))
        if names:
            if found is not None:
                best.append((found[2], found[0], found[1]))
            found, behind = None, True
    return best


def _common(a: fx.Node, b: fx.Node) -> list[str]:
    """The calls of modules that two ops are both part of."""
    stacks = [list(n.meta.get("nn_module_stack", {})) for n in (a, b)]
    return [x for x, y in zip(*stacks, strict=False) if x == y]


def _cut(time: Sequence[float], memory: Sequence[float], prices: Sequence[float], stages: int) -> list[int]:
    """The places at which stages begin, but the first: by dynamic programming over how many there are."""
    t, m = (torch.tensor(x, dtype=torch.float64) for x in (time, memory))
    n = len(time)
    none = torch.arange(n)[:, None] >= torch.arange(n)[None]
    cost, held = ((x[None] - x[:, None]).masked_fill(none, math.inf) for x in (t, m))
    cost = cost.masked_fill(held > max(_HELD / stages, _least(held, stages)), math.inf)
    bound = _least(cost, stages) * _NEARLY
    # Each cut has its price; of the same prices the most even.
    priced = torch.where(cost <= bound, cost.square(), math.inf)
    reached = [priced[0]]
    for _ in range(stages - 1):
        reached.append(((reached[-1] + torch.tensor(prices, dtype=torch.float64))[:, None] + priced).amin(0))
    cuts, at = list[int](), n - 1
    for before in reversed(reached[:-1]):
        ways = (before + torch.tensor(prices, dtype=torch.float64)) + priced[:, at]
        at = int((ways == ways.min()).nonzero()[0])
        cuts.append(at)
    return cuts[::-1]


def _least(cost: Tensor, stages: int) -> float:
    """Of all ways to cut, the least that the stage with the most has."""
    most = cost[0]
    for _ in range(stages - 1):
        most = torch.maximum(most[:, None], cost).amin(0)
    return float(most[-1])


def described(nodes: Mapping[fx.Node, int], paths: Mapping[fx.Node, str], stages: int) -> list[str]:
    """The modules of each stage: the outermost that it has whole, and else what lies in them."""
    at: dict[str, set[int]] = {}
    for n, stage in nodes.items():
        path = paths[n]
        while path:
            at.setdefault(path, set()).add(stage)
            path = path.rpartition(".")[0]
    told = []
    for s in range(stages):
        mine: dict[str, None] = {}
        for n, stage in nodes.items():
            parts = paths[n].split(".") if paths[n] else []
            ways = [".".join(parts[: i + 1]) for i in range(len(parts))]
            outer = next((w for w in ways if at[w] == {s}), None)
            if stage == s and outer is not None:
                mine[outer] = None
        told.append(", ".join(_ranges(list(mine))) or "no module by itself")
    return told


def _ranges(names: Sequence[str]) -> list[str]:
    """Modules of a list that follow each other as its first and its last one."""
    runs: list[list[str]] = []
    for name in names:
        head, _, number = name.rpartition(".")
        before, _, last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        follows = bool(runs) and before == head and last.isdigit() and number == str(int(last) + 1)
        if follows:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [r[0] if len(r) == 1 else f"{r[0]} to {r[-1].rpartition('.')[2]}" for r in runs]


__all__ = ["balanced", "described", "works"]
