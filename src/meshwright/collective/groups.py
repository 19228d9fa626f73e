"""Groups of ranks: made once per mesh and axes, for real or simulated ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import compat
from ..errors import CollectiveError
from ..mesh import Mesh
from ..ranks import runtime
from ..ranks.process_group import TIMEOUT, Link, open_sockets
from . import direct_calls, store_messages


class Group:
    """The ranks that one collective joins.

    Attributes:
        ranks: their global ranks; position in this tuple is the position in the group.
        size: how many they are.
        index: own position.
        axes: names of the mesh axes that the group spans, for the accounts.
        device: type of the device whose tensors it moves.
        pg: torch's ProcessGroup; None if the group is simulated or has one rank.
        link: what is known of its use; None where pg is.
        words: the group in which its ranks compare what they did: itself, a gloo group beside another backend, or None.
        home: the runtime that it belongs to: with another process group there is another one.
    """

    __slots__ = ("axes", "device", "gloo", "home", "index", "link", "pg", "plain", "ranks", "scatters", "size", "words")

    def __init__(
        self, ranks: tuple[int, ...], index: int, axes: tuple[str, ...], device: str, pg: Any = None,
        link: Link | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.index, self.axes, self.device, self.pg = ranks, index, axes, device, pg
        self.size = len(ranks)
        # A Python subclass need only have allreduce, allgather and broadcast.
        self.plain = type(pg) is dist.ProcessGroup
        self.gloo = self.plain and (link.gloo if link is not None else backend_name(pg, device) == "gloo")
        self.scatters = self.plain and not self.gloo
        self.link = link or (Link(pg, ranks, self.gloo) if pg is not None else None)
        self.home = runtime.RT
        side = self.link.side if self.link is not None else None
        self.words: Group | None = self if pg is None or self.gloo else None
        if side is not None:
            self.words = Group(ranks, index, axes, "cpu", side.pg, side)

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, *, axes: tuple[str, ...] = (), device: str = "cpu") -> Group:
        """Wrap a ProcessGroup, which may be a Python subclass with ``allreduce`` (and, for the other
        collectives, ``allgather`` and ``broadcast``) only.

        A group that torch does not know gets the ranks ``0..size-1``.
        """
        try:
            ranks = tuple(dist.get_process_group_ranks(pg))
        except (KeyError, ValueError, RuntimeError):
            ranks = tuple(range(pg.size()))
        return cls(ranks, pg.rank(), axes, device, pg)

    def __repr__(self) -> str:
        return f"Group({','.join(self.axes) or 'no axis'}, ranks={self.ranks}, index={self.index})"


def backend_name(pg: Any, device: str) -> str:
    try:
        return str(pg._get_backend(torch.device(device)).name()).lower()
    except RuntimeError:  # no backend for this device: torch will say so when the group is used
        return ""


def group(mesh: Mesh, axes: tuple[int, ...] | None = None) -> Group:
    """The group of this rank over the given axes (indices) of ``mesh``, or all; the same object at each call.

    Made at the first use, and then by all ranks of the mesh together: call it in the same order everywhere.

    Raises:
        MeshError: this rank is not in the mesh, or no such axis.
        CollectiveError: there are no ranks to talk to.
    """
    axes = tuple(range(mesh.ndim)) if axes is None else axes
    groups = runtime.RT.groups
    try:
        found: Group = groups[mesh, axes]
    except KeyError:
        ordered = tuple(sorted({mesh.axis_index(a) for a in axes}))
        found = groups.get((mesh, ordered)) or _make_group(mesh, ordered)
        groups[mesh, axes] = groups[mesh, ordered] = found
    return found


def _make_group(mesh: Mesh, axes: tuple[int, ...]) -> Group:
    rt = runtime.RT
    ranks = mesh.group_ranks(rt.rank, axes)
    names = tuple(mesh.axes[a] for a in axes)
    link = None
    if rt.sim is None and len(ranks) > 1:
        _need_processes(mesh)
        link = _process_group(mesh, axes)
    return Group(ranks, ranks.index(rt.rank), names, mesh.device, link and link.pg, link)


def _need_processes(mesh: Mesh) -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise CollectiveError(
            f"{mesh!r} has {mesh.size} ranks but this is a single process: start it with torchrun and call "
            "init_mesh, or run the function on simulated ranks with simulate(fn, mesh)"
        )
    world = dist.get_world_size()
    if max(mesh.ranks) >= world:  # a mesh of an earlier, larger process group, say
        raise CollectiveError(
            f"{mesh!r} names rank {max(mesh.ranks)} but there are {world} processes: make a mesh of these, and "
            "distribute models and tensors anew"
        )


def _process_group(mesh: Mesh, axes: tuple[int, ...]) -> Link:
    """This rank's torch ProcessGroup over ``axes``, made by all ranks of the mesh together."""
    parts = tuple(dict.fromkeys(mesh.group_ranks(r, axes) for r in mesh.ranks))
    made: dict[Any, Any] = runtime.RT.groups
    key = ("process group", parts)  # shared by all meshes that split the ranks alike
    if key not in made:
        if not any(isinstance(k, tuple) and k[0] == "process group" for k in made):
            direct_calls.guard()
            store_messages.announce()
        made[key] = new_link(parts, mesh.device)
    found: Link = made[key]
    return found


def new_link(
    parts: tuple[tuple[int, ...], ...], device: str, lane: str = "", beside: Sequence[int] = ()
) -> Link | None:
    """A process group of this rank's part of the ranks; all of them call it together, in one order.

    Args:
        lane: what tells it from other groups of the same ranks.
        beside: ranks that call it too, and are in no part.

    Returns:
        None on ranks in no part.
    """
    rank, world = runtime.RT.rank, dist.get_world_size()
    if runtime.RT.watcher is not None and (lost := runtime.RT.watcher.error("while groups were made")):
        raise lost
    own: Any = None
    # torch wants every rank of the world to make every group, in one order; but ranks outside the mesh are
    # not here to do so, and then each group is made by its members alone.
    apart = sum(map(len, parts)) + len(beside) < world
    everyone = dist.group.WORLD
    assert everyone is not None
    # gloo's group of all ranks may carry the user's collectives and waits for half an hour: an own one costs little.
    shared = backend_name(everyone, device) != "gloo" and not lane
    # The backend's own end of waiting comes after ours, which says more.
    limit = timedelta(seconds=(runtime.RT.timeout or TIMEOUT) + 10)
    before = open_sockets()
    # Names of groups that members make alone have how many groups a rank is in: so it is in as many as the others.
    for ranks in (*parts, *(((rank,),) if apart and rank in beside else ())):
        if ranks == tuple(range(world)) and shared:
            pg: Any = everyone
        elif apart and rank not in ranks:
            continue
        else:
            pg = _new_process_group(ranks, limit, apart)
        if rank in ranks:
            own = pg, ranks
    if rank in beside:
        return None
    sockets = {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}
    name = backend_name(own[0], device)
    gloo = type(own[0]) is dist.ProcessGroup and name == "gloo"
    alone = gloo or lane or name in ("", "fake") or not dist.is_gloo_available()  # a fake backend reaches nobody
    side = None if alone else _side_link(parts, own[1], limit, apart)
    return Link(own[0], own[1], gloo, sockets, lane, side)


def _new_process_group(ranks: Sequence[int], limit: timedelta, apart: bool, backend: str | None = None) -> Any:
    """torch's ``new_group``, which never splits it off the group of all ranks.

    Where that is bound to a device (``init_process_group(device_id=)``), torch would call ``ncclCommSplit``, which
    waits for all ranks.  Ranks outside of a gloo group call it and members do not (pytorch/pytorch#145376), and a
    group that its members make alone is never finished.  A communicator of its own is connected as early.
    """
    everyone = dist.group.WORLD
    assert everyone is not None
    bound = everyone.bound_device_id
    everyone.bound_device_id = None
    try:
        return compat.in_order(dist.new_group)(
            list(ranks), limit, backend, use_local_synchronization=apart, device_id=None if backend else bound
        )
    finally:
        everyone.bound_device_id = bound


def _side_link(parts: tuple[tuple[int, ...], ...], own: tuple[int, ...], limit: timedelta, apart: bool) -> Link | None:
    """A gloo group of the ranks of another backend's, for what they compare; all make theirs in one order."""
    before, found = open_sockets(), None
    for ranks in parts:
        if not apart or ranks == own:
            pg = _new_process_group(ranks, limit, apart, "gloo")
            found = pg if ranks == own else found
    sockets = {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}
    return Link(found, own, True, sockets, "side")


def connect(mesh: Mesh) -> None:
    """Make the process groups of all single axes and of the whole mesh; all its ranks call it together.

    A no-op for simulated ranks, and on a rank outside the mesh.

    Raises:
        CollectiveError: ``torch.distributed`` is not initialised, or has fewer ranks than the mesh.
    """
    if runtime.RT.sim is not None or mesh.size == 1:
        return
    _need_processes(mesh)
    if runtime.RT.rank not in mesh.ranks:
        return
    for axes in (*((a,) for a in range(mesh.ndim)), tuple(range(mesh.ndim))):
        if math.prod(mesh.sizes[a] for a in axes) > 1:
            _process_group(mesh, axes)


def override_group(mesh: Mesh, axes: tuple[int, ...], pg: dist.ProcessGroup) -> Group:
    """From now on use ``pg`` (a user's own ProcessGroup) for these axes of ``mesh``; returns the group.

    Raises:
        CollectiveError: its size differs from that of the axes.
    """
    ordered = tuple(sorted({mesh.axis_index(a) for a in axes}))
    ranks = mesh.group_ranks(runtime.RT.rank, ordered)
    names = tuple(mesh.axes[a] for a in ordered)
    if pg.size() != len(ranks):
        raise CollectiveError(
            f"the process group has {pg.size()} ranks but {', '.join(names)} of {mesh!r} has {len(ranks)}"
        )
    made = Group(ranks, pg.rank(), names, mesh.device, pg)
    runtime.RT.groups[mesh, axes] = runtime.RT.groups[mesh, ordered] = made
    return made
