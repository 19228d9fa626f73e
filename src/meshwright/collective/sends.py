"""Sends from one rank to another, as a pipeline has them: lanes, each of one direction between two ranks.

A lane is a group of its own, whose first rank sends and whose second one receives, in one order at both ends.  So no
direction waits for the other one, and what watches collectives watches sends as well.  A send is done when its value is
on its way; the sender goes on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..compat import BroadcastOptions
from ..mesh import Mesh
from ..ranks import runtime
from ..ranks.process_group import Link
from ..ranks.simulation import Call
from . import groups
from .groups import Group
from .monitor import started
from .transport import MOVABLE, Pending, as_bytes, contiguous

Tensor = torch.Tensor
SEND = "send"  # as counts and explanations call it


def lane(mesh: Mesh, axis: int, src: int, dst: int) -> Group | None:
    """The lane from the rank at coordinate ``src`` of an axis to that at ``dst``, with this rank's other coordinates.

    None on ranks at neither.  Made at the first use, by all ranks of the mesh together, in one order: those at neither
    too, since process groups are told apart by how many were made before.
    """
    rt = runtime.RT
    key = (mesh, ("lane", axis, src, dst))
    if key in rt.groups:
        kept: Group | None = rt.groups[key]
        return kept
    line = mesh.group_ranks(rt.rank, (axis,))
    ranks, link, found = (line[src], line[dst]), None, None
    if rt.sim is None:
        pairs = tuple((one[src], one[dst]) for one in dict.fromkeys(mesh.group_ranks(r, (axis,)) for r in mesh.ranks))
        beside = sorted(set(mesh.ranks) - {r for pair in pairs for r in pair})
        link = groups.new_link(pairs, mesh.device, f"lane {src}>{dst}", beside)
    if rt.rank in ranks:
        found = Group(ranks, ranks.index(rt.rank), (mesh.axes[axis],), mesh.device, link and link.pg, link)
    rt.groups[key] = found
    return found


def send(t: Tensor, what: str, to: Group) -> Pending:
    """Start to send a tensor along a lane; it must stay as it is until the send is waited for.

    Args:
        what: it is, which the receiver has to know it as.
    """
    x = t.detach().contiguous()
    runtime.RT.counts.add(SEND, to.axes, x.nbytes)
    call = _call(what, x.dtype, x.shape)
    sim: Any = runtime.RT.sim
    if sim is not None:
        return Pending(sim.post(to.ranks, call, x), x)
    return _started(x, to, call)


def receive(what: str, shape: Sequence[int], dtype: torch.dtype, along: Group) -> Pending:
    """Start to receive the tensor that comes next along a lane."""
    call = _call(what, dtype, shape)
    sim: Any = runtime.RT.sim
    if sim is not None:
        return Pending(None, None, lambda _: sim.fetch(along.ranks, call))
    return _started(torch.empty(tuple(shape), dtype=dtype, device=along.device), along, call)


def _call(what: str, dtype: torch.dtype, shape: Sequence[int]) -> Call:
    return Call(SEND, "", dtype, tuple(shape), (("what", what),))


def _started(x: Tensor, along: Group, call: Call) -> Pending:
    """Bring a tensor from the first rank of a lane to the second."""
    if not x.nbytes:
        return Pending(None, x)
    wire = x if x.dtype in MOVABLE else as_bytes(x)
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    work = started(along, call, along.pg.broadcast, [wire], options)
    if wire is x:
        return Pending(work, x)
    return Pending(work, wire, lambda filled: contiguous(filled.view(x.dtype).squeeze(-1)))


def cut_off(lanes: Sequence[Group], why: str) -> None:
    """Nothing more goes along these lanes: ranks no longer know what comes next."""
    for one in lanes:
        link: Link | None = one.link
        if link is not None and not link.broken:
            link.broken = why


__all__ = ["SEND", "cut_off", "lane", "receive", "send"]
