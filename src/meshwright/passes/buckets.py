"""Which gradients share a collective, by a limit of bytes or from latency and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch.utils.flop_counter import flop_registry

from ..collective import COLLECTIVES, group_size
from ..layout import bytes_each, chunk_sizes
from ..machines import Network
from ..program.ir.nodes import VIEWS, checked_value, info_of
from .gradients import Gradients, SentGradient

_LAUNCH = 50e-6  # seconds of this rank's own time that starting and waiting for a collective takes
# The model of time is rough: a bucket takes at most this part of all that is sent (unless latency would tell), so that
# no more than that can come late.
_MOST = 1 / 12
_LATENCIES = 4
_LATER = 0.05  # part of the time behind the backward by which fewer buckets may end later
_WINDOW = 256  # gradients in one bucket at most


class SeenByAll(Protocol):
    """What all ranks see of the reductions together (``order.Order``)."""

    def fusible(self, r: SentGradient) -> bool:
        """Whether on every rank a reduction can share a buffer with others."""

    def born(self, r: SentGradient) -> float:
        """When a gradient is complete, on the rank where that is latest."""

    def fitting(self) -> Callable[[SentGradient], bool]:
        """A function that is given one reduction after the other, and says whether all of them may start together."""


@dataclass(frozen=True)
class FusedBucket:
    """Reductions that run as one.

    Attributes:
        members: in the order of the backward.
        why: of a single one, why it is alone.
    """

    members: tuple[SentGradient, ...]
    why: str = ""

    @property
    def nbytes(self) -> int:
        """Of all members, on the rank that has most."""
        return sum(r.nbytes for r in self.members)


def by_limit(reductions: Sequence[SentGradient], limit: int, order: SeenByAll) -> list[FusedBucket]:
    """Buckets of at most ``limit`` bytes: neighbours in the order of the backward; larger gradients alone."""
    made: list[FusedBucket] = []
    open_: dict[Any, list[SentGradient]] = {}

    def close(group: Any, why: str) -> None:
        members = open_.pop(group, [])
        if members:
            made.append(FusedBucket(tuple(members), why if len(members) == 1 else ""))

    for r in reductions:
        if not order.fusible(r) or r.nbytes >= limit:
            made.append(FusedBucket((r,), f"{r.nbytes} bytes fill a bucket" if order.fusible(r) else _UNFUSIBLE))
            continue
        members = open_.setdefault(r.group, [])
        if members and not together([*members, r], order):
            close(r.group, "used before the next gradient exists")
        elif sum(m.nbytes for m in members) + r.nbytes > limit:
            close(r.group, "the next one does not fit into its bucket")
        open_.setdefault(r.group, []).append(r)
    for group in list(open_):
        close(group, "no other gradient of its group and dtype is left")
    return in_order(made)


_UNFUSIBLE = "a reduce-scatter of the step's own, into other parts"


def fusible(r: SentGradient) -> bool:
    """Whether a reduction can share a buffer with others."""
    if not r.kind.scatters:
        return True
    value, (_, _, dim, sizes, *_) = checked_value(r.gradient), r.node.args
    return list(sizes) == chunk_sizes(value.shape[dim], len(sizes))  # type: ignore[arg-type, index]


def by_unit(reductions: Sequence[SentGradient], order: SeenByAll) -> list[FusedBucket]:
    """Buckets of what is scattered to where it is stored: one per unit, whatever its size, as in eager code."""
    open_: dict[Any, list[SentGradient]] = {}
    made: list[FusedBucket] = []
    for r in reductions:
        members = open_.get(r.group, []) if order.fusible(r) else []
        if members and not together([*members, r], order):
            made.append(FusedBucket(tuple(open_.pop(r.group)), "used before the next gradient exists"))
        if order.fusible(r):
            open_.setdefault(r.group, []).append(r)
        else:
            made.append(FusedBucket((r,), _UNFUSIBLE))
    made += [FusedBucket(tuple(m), "the only one of its unit and dtype") for m in open_.values()]
    return made


def together(members: Sequence[SentGradient], order: SeenByAll) -> bool:
    """Whether on no rank one of the sums is used before the last of the gradients exists."""
    fits = order.fitting()
    return [fits(r) for r in members][-1]


def in_order(buckets: list[FusedBucket]) -> list[FusedBucket]:
    """Buckets in the order in which they can start."""
    return sorted(buckets, key=lambda b: max(r.key for r in b.members))


def by_time(reductions: Sequence[SentGradient], network: Network, order: SeenByAll) -> list[FusedBucket]:
    """Buckets such that the last collective ends soonest after the backward, by a model of both.

    One wire carries the collectives of a group one after the other.  When the best way to send the first gradients is
    known, so is that of one more (dynamic programming over where the last bucket begins).
    """
    made: list[FusedBucket] = []
    groups: dict[Any, list[SentGradient]] = {}
    for r in reductions:
        if order.fusible(r):
            groups.setdefault(r.group, []).append(r)
        else:
            made.append(FusedBucket((r,), _UNFUSIBLE))
    for listed in groups.values():
        for members in _cut(listed, network, order):
            why = "sending it with its neighbours would end later" if len(members) == 1 else ""
            made.append(FusedBucket(tuple(members), why))
    return in_order(made)


def _cut(listed: list[SentGradient], network: Network, order: SeenByAll) -> list[list[SentGradient]]:
    """Neighbours in the order of the backward that run as one."""
    wire = [0.0]  # seconds that the first gradients take on the wire, latency apart
    for r in listed:
        wire.append(wire[-1] + _wire_bytes(r) / network.bandwidth)
    exists = [0.0]  # time at which the first gradients exist
    for r in listed:
        exists.append(max(exists[-1], order.born(r) + _LAUNCH))
    ends = _first_members(listed, wire, max(wire[-1] * _MOST, network.latency * _LATENCIES), order)

    def done(i: int, j: int, before: float) -> float:
        """Time at which a bucket of the gradients i to j is sent, if those before it are sent at a time."""
        return max(before, exists[j]) + network.latency + wire[j] - wire[i]

    best = [0.0]  # soonest time at which the first gradients are sent
    for j in range(1, len(wire)):
        best.append(min(done(i, j, best[i]) for i in range(ends[j], j)))
    # As few buckets as end no later than that (or hardly): from the last one, each as large as time allows.
    cuts, j = [], len(listed)
    until = best[j] + max(_LAUNCH, _LATER * (best[j] - exists[j]))
    while j:
        i = next(i for i in range(ends[j], j) if done(i, j, best[i]) <= until)
        until -= network.latency + wire[j] - wire[i]
        cuts.append(listed[i:j])
        j = i
    return cuts[::-1]


def _first_members(listed: list[SentGradient], wire: list[float], most: float, order: SeenByAll) -> list[int]:
    """Of a bucket that ends before each place, the first place at which it may begin."""
    made = [0]
    for j in range(1, len(wire)):
        fits, i = order.fitting(), j
        while i > max(0, j - _WINDOW):
            fit = fits(listed[i - 1])
            if i < j and (wire[j] - wire[i - 1] > most or not fit):
                break
            i -= 1
        made.append(i)
    return made


def _wire_bytes(r: SentGradient) -> float:
    dtype, (*options, axes, mesh) = checked_value(r.gradient).dtype, r.node.args[1:]
    before = r.nbytes / dtype.itemsize * bytes_each(r.kind.format(dtype, options))
    return r.kind.bytes(round(before), 0, group_size(str(axes), str(mesh)))


# ---------------------------------------------------------------------------------------------- time


def times(gradients: Gradients, network: Network) -> dict[fx.Node, float]:
    """Seconds from the start of the program to when each gradient exists on this rank, roughly."""
    clock, now = [], 0.0
    for node in gradients.order:
        now += seconds_of(node, network)
        clock.append(now)
    return {r.node: clock[r.ready] for r in gradients.reductions}


def seconds_of(node: fx.Node, network: Network) -> float:
    """What a node of a program takes on its rank, without collectives."""
    if node.op != "call_function" or node.target in VIEWS or node.target in COLLECTIVES:
        return 0.0
    count = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if count is not None:
        args = fx.map_arg((node.args, node.kwargs), _meta)
        out = _meta(node)
        return float(count(*args[0], **args[1], out_val=out)) / network.flops + network.launch
    moved = sum(v.nbytes for n in (node, *node.all_input_nodes) for v in info_of(n).values)
    return moved / network.memory + network.launch


def _meta(node: fx.Node) -> Any:
    value = info_of(node).value
    if isinstance(value, tuple):
        return tuple(None if v is None else torch.empty(v.shape, dtype=v.dtype, device="meta") for v in value)
    return None if value is None else torch.empty(value.shape, dtype=value.dtype, device="meta")


__all__ = ["FusedBucket", "Network", "by_limit", "by_time", "by_unit", "fusible", "in_order", "seconds_of", "times"]
