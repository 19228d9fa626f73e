"""Gradient synchronisation: gradients born Partial are reduced once per backward, in buckets, while it runs.

A parameter that rank-dependent work used on an axis gets, on each rank, that rank's contribution.
Contributions are copied into flat buffers ("buckets"), each reduced by one collective as soon as its last
gradient is there, in an order that is the same on all ranks.  When the backward ends ``p.grad`` is a view of
the reduced buffer.  Nothing is divided by the number of ranks: the loss is the global one, so the sum of the
contributions is its gradient.

What belongs to one backward is in an object that dies with it, however it ends (``backward``); gradients on their way
are held by their parameters.  So after a backward that raised a parameter has what it would have on one device: what
was accumulated before, Partial where its bucket had not left yet.

The idea of buckets that follow the order of the backward is that of PyTorch's DistributedDataParallel (Li et
al., 2020).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ... import collective, compat, torch_changes
from ...dispatch import disabled
from ...errors import DesyncError, ShardError, takes
from ...layout import Replicate
from ...local_tensor import Aliases, bare, get_grad, set_grad
from ...mesh import Mesh
from ...ranks import runtime
from ...resharding import executor
from ...resharding.planner import plan as plan_conversion
from ...tensor import DistTensor, accumulates, beside_slot, stash_assigned_grad, wrap
from ..parameters.stored import UNSHARDED, on_host, stored
from .backward import Backward, begin, call_after
from .batches import SameBatches
from .buckets import Buckets
from .reductions import hold_beside
from .replicas import first_divergent_replica

Tensor = torch.Tensor
DRIFT = (
    "did one rank update with other options, from another state or other gradients, leave out zero_grad(), or draw "
    "other random numbers?"
)
WORD = 1 << 62  # what is compared of a sum
BUCKET_BYTES = 8 << 20  # small enough for most of the work to overlap with the backward, large enough for bandwidth


def _sampled(n: int) -> bool:
    """Whether values are compared at the backward of this number: what costs time then costs none on the whole."""
    return n <= 8 or n % 64 == 0 or n in (16, 32)


class GradSync:
    """Reduces the gradients of a set of parameters; one per sharded model.  A parameter belongs to one of them.

    Args:
        mesh: the mesh that the parameters lie on.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.bucket_bytes = mesh, BUCKET_BYTES
        self.names: list[str] = []
        self.params: list[DistTensor] = []
        self.enabled = True
        self.apart: set[int] = set()  # parameters whose gradients come another way (see zero)
        self._start()

    def cover(self, params: Mapping[str, DistTensor], bucket_bytes: int = BUCKET_BYTES) -> list[GradSync]:
        """From now on reduce the gradients of these parameters, but of those that others do.

        Args:
            params: each once, in the order of the model.
            bucket_bytes: gradients are collected up to this size; larger ones travel alone and are not copied.

        Returns:
            The others.
        """
        others = {n: sync for n, p in params.items() if (sync := sync_of(p)) not in (None, self)}
        own = {n: p for n, p in params.items() if n not in others}
        self.names, self.params, self.bucket_bytes = list(own), list(own.values()), bucket_bytes
        self.apart = {i for i, p in enumerate(self.params) if stored(p).axes or stored(p).device}
        self._begin()
        return [sync for sync in dict.fromkeys(others.values()) if sync is not None]

    def _start(self) -> None:
        # By graph task, and by thread: a nested one belongs to that around it.
        self.running: weakref.WeakValueDictionary[tuple[str, int], Backward] = weakref.WeakValueDictionary()
        self.beginning = threading.Lock()
        self.interrupted = False  # the last backward raised: gradients may be left Partial
        self.reduce: Any = None  # starts the reduction of what stored parameters have been brought (see units)
        self._begin()

    def _begin(self) -> None:
        self.divided: Buckets | None = None
        self.order: list[int] | None = None  # in which the first backward brought the gradients
        self.backwards = 0  # that were compared
        self.added = 0  # gradients that were added to others
        self.updated = 0  # a sum over all updates of digests of the numbers that they were made with
        self.numbers: dict[int, dict[str, Any]] = {}  # those of the last one, by parameter group
        self.digests: dict[int, int] = {}  # of these
        self.batches = SameBatches()
        # What was done when it was last compared, over which axes.
        self.marks: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.first = self._done()
        for i, p in enumerate(self.params):
            member = _member(p)
            member.sync, member.i = weakref.ref(self), i
            p.__dict__["_param_name"] = self.names[i]  # for messages

    def replan(self) -> None:
        """Divide anew before the next backward: what is wanted of the gradients has changed."""
        self.divided = None

    def buckets(self) -> Buckets:
        """How the gradients of the next backward are divided."""
        if self.divided is None or not self.divided.fits():
            order = self.order or range(len(self.params) - 1, -1, -1)
            self.divided = Buckets(self.params, order, self.bucket_bytes, self.apart)
        return self.divided

    def follow(self, seen: Sequence[int]) -> None:
        """From now on buckets follow the order of the first whole backward, as the first rank saw it."""
        group = collective.group(self.mesh)
        first = collective.all_gather_object(list(dict.fromkeys(seen)), group)[0]
        known = set(first)
        self.order = first + [i for i in range(len(self.params) - 1, -1, -1) if i not in known]
        self.replan()

    # -- what the ranks did ---------------------------------------------------------------------------

    def note(self, i: int, numbers: dict[str, Any]) -> None:
        """An optimizer updates its parameter group ``i`` with these."""
        if numbers != self.numbers.get(i):
            self.numbers[i], self.digests[i] = numbers, zlib.crc32(repr(numbers).encode(), i)
        self.updated += self.digests[i]

    def _done(self) -> tuple[int, ...]:
        """What was done so far: writes to parameters, gradients added to others, updates, seeds drawn."""
        with disabled():
            written = sum(p._version for p in self.params)
        return written, self.added, self.updated, runtime.RT.drawn

    def compare(self) -> list[Callable[[], None]]:
        """Start to compare with the other ranks what was done since the last time; the answers raise.

        Only one rank left a step or a batch out, took one alone, or went on after an error: its gradients would be
        added to those of another step, or to those for other weights.

        It travels beside the gradients.  At some backwards a sample of the values goes with it.  Where gradients do not
        go over the whole mesh this does: with a sample, and at each backward where a loader gives batches.
        """
        self.backwards += 1
        now, over, sampled = self._done(), list(self.buckets().groups), _sampled(self.backwards) or runtime.RT.check
        if {a for a, n in enumerate(self.mesh.sizes) if n > 1} > {a for axes in over for a in axes}:
            loads = self.batches.loads(self.mesh.ranks)
            whole = [tuple(range(self.mesh.ndim))] if sampled or loads else []
            over = whole + ([] if loads and not sampled else over)  # first: what differs is an error on all ranks then
        answers: list[Callable[[], None]] = []
        for axes in over:
            group = collective.group(self.mesh, axes)
            words = [(n - before) % WORD for n, before in zip(now, self.marks.get(axes, self.first), strict=True)]
            sample = zlib.crc32(repr(collective.digests(self._replicas(axes), whole=False)).encode()) if sampled else 0
            self.marks[axes] = now
            words += [sample, *self.batches.words(group)]
            answers.append(functools.partial(self._judge, group, collective.compare_progress(words, group)))
        return [*answers, self._compare_values] if runtime.RT.check else answers

    def _replicas(self, axes: Sequence[int]) -> list[Tensor]:
        """Parameters that lie whole on these axes."""
        return [bare(p) for p in self.params if all(isinstance(p._spec.layout.placements[a], Replicate) for a in axes)]

    def _compare_values(self) -> None:
        """Check mode: raise on every rank where replicas of parameters or gradients differ."""
        values = {n: (p._spec.layout, bare(p)) for n, p in zip(self.names, self.params, strict=True)}
        with disabled():
            for name, p in zip(self.names, self.params, strict=True):
                g = get_grad(p)
                spec = None if g is None else g.__dict__.get("_spec")
                if g is not None and spec is not None:
                    values[f"the gradient of {name}"] = spec.layout, bare(g)
        first = first_divergent_replica(values, collective.group(self.mesh))
        if first:
            raise DesyncError(f"the ranks hold {first}, after the backward at {runtime.user_line()}: {DRIFT}")

    def _judge(self, group: collective.Group, answer: Callable[[], list[tuple[int, ...]]]) -> None:
        written, added, updated, drawn, sample, loaded, laid = zip(*answer(), strict=True)
        self.batches.judge(group, list(zip(loaded, laid, strict=True)))
        if len(set(written)) > 1:
            self._judge_writes(group, written)
        if len(set(added)) > 1:
            counts = ", ".join(f"{n} on rank {r}" for r, n in zip(group.ranks, added, strict=True))
            raise DesyncError(
                f"the ranks added gradients to those of an earlier backward for different parameters ({counts}): did "
                "one rank leave out zero_grad()?"
            )
        if len(set(updated)) > 1:
            items = ((i, k, v) for i, listed in sorted(self.numbers.items()) for k, v in listed.items())
            found, _ = collective.difference(group, [collective.Fact(f"{k} of group {i}", v) for i, k, v in items])
            text = f"with {found}" if found else "differently often, or with different numbers"
            raise DesyncError(
                f"the ranks updated {text}: did one rank set an option of the optimizer, or its scheduler, by a value "
                "of its own?"
            )
        if len(set(drawn)) > 1:
            raise DesyncError(
                "the ranks drew different seeds of dropout since the last backward: did one rank draw random numbers "
                "alone? Draw those from a torch.Generator of their own, or inside torch.random.fork_rng()"
            )
        if len(set(sample)) > 1:
            self._judge_values(group)

    def _judge_values(self, group: collective.Group) -> None:
        first = self._first_divergent(group)
        if first:
            raise DesyncError(f"the ranks hold {first}, after the backward at {runtime.user_line()}: {DRIFT}")

    def _first_divergent(self, group: collective.Group) -> str:
        return first_divergent_replica(
            {n: (p._spec.layout, bare(p)) for n, p in zip(self.names, self.params, strict=True)}, group
        )

    def _judge_writes(self, group: collective.Group, written: Sequence[int]) -> None:
        # Where the values are still the same on all ranks (weights swapped and put back, say) nothing is wrong.
        first = self._first_divergent(group)
        counts = ", ".join(f"{n} on rank {r}" for r, n in zip(group.ranks, written, strict=True))
        text = (
            f"parameters were not written to equally often on all ranks since the last backward ({counts}): did one "
            "rank leave out an optimizer step, or take one alone?"
        )
        if first:
            raise DesyncError(f"the ranks hold {first}; {text}")
        over = [self.mesh.axis_index(a) for a in group.axes]
        if any(not isinstance(p._spec.layout.placements[a], Replicate) for p in self.params for a in over):
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def say_unused(self) -> None:
        """Warn, after the first backward, of axes over which no parameter is split and nothing was sent."""
        sent = {name for _, axes in runtime.RT.counts.table for name in axes}
        for a, (name, size) in enumerate(zip(self.mesh.axes, self.mesh.sizes, strict=True)):
            if size == 1 or name in sent or runtime.RT.rank != self.mesh.ranks[0]:
                continue
            if all(isinstance(p._spec.layout.placements[a], Replicate) for p in self.params):
                warnings.warn(
                    f"nothing is split over the axis {name!r} of the mesh: its {size} ranks do the same work. Split "
                    f"the batch over it (mw.shard_tensor(x, mesh, {{{name!r}: mw.Shard(0)}})) or parameters "
                    "(mw.layouts finds how), or leave it out of the mesh",
                    RuntimeWarning, stacklevel=runtime.users_level(),
                )  # fmt: skip

    # -- copies of the model --------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        kept = ("mesh", "names", "params", "bucket_bytes", "enabled", "apart")
        return {k: self.__dict__[k] for k in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    # -- the backward ---------------------------------------------------------------------------------

    def backward(self) -> Backward:
        """The backward that this thread is in; of nested ones the outermost that has come to these parameters.

        One may run in two threads: autograd serves leaves on the host in the one that asked for it, and what a device
        computes in the device's.
        """
        task, thread = ("task", compat.current_graph_task_id()), ("thread", threading.get_ident())
        found = self.running.get(task)
        if found is None or found.over:
            with self.beginning:
                found = next((b for k in (task, thread) if (b := self.running.get(k)) and not b.over), None)
                found = self.running[task] = self.running[thread] = found or begin(self)
        return found

    def ready(self, i: int, reached: bool) -> None:
        """The gradient of parameter ``i`` was accumulated (called inside the backward).

        Args:
            reached: whether there was one.  Parameters that are gathered together are one node of autograd's, which
                comes to all of them; of those that no gradient reached no hook is called.
        """
        p = self.params[i]
        if on_host(p):  # in another thread than what a device computes, which alone sends
            if self.enabled:
                self.backward().note(i, reached)
            elif reached:
                call_after(p)
            return
        if i in self.apart:
            reached = self.backward().complete(p) or reached
        elif stored(p) is UNSHARDED:  # a leaf of its own, where PyTorch calls hooks as we do
            reached = True
        if self.enabled:
            self.backward().ready(i, reached)
        elif reached:
            call_after(p)

    def before(self, i: int) -> None:
        """Something will be added to the gradient of parameter ``i``: lay a reduced one beside the slot.

        It stays what it is, whoever else looks at it; what comes is reduced and added to it, in place.
        """
        p = self.params[i]
        if beside_slot(p).assigned is not None:
            if self.enabled and accumulates(p):
                self.backward()  # whose end comes first
            if stash_assigned_grad(p):
                self.added += 1
                return
        with disabled():
            g = get_grad(p)
            own = g.__dict__.get("_spec") if g is not None else None
            if g is None or own is None or not p._spec.grad_partial_mask:
                return
            self.added += 1
            partial = p._spec.grad()
            if own.layout == partial.layout or not accumulates(p):
                return
            if g.requires_grad:
                made = executor.apply(plan_conversion(own.decided(), partial).steps, g)
                set_grad(p, wrap(made.clone() if made is g else made, partial))
                return
            set_grad(p, None)
            hold_beside(p, wrap(g, own))


def _nowhere() -> None:
    """Of a parameter whose gradient nobody reduces."""


@dataclass
class _Member:
    """Where a parameter is among those whose gradients are reduced together, and its hooks, which look there."""

    sync: Callable[[], GradSync | None] = _nowhere
    i: int = 0
    reached: bool = False  # whether what is being accumulated is a gradient

    def ready(self, _: Tensor) -> None:
        own = self.sync()
        if own is not None:
            own.ready(self.i, self.reached)

    def before(self, grad: Tensor | None) -> None:
        self.reached = grad is not None
        own = self.sync()
        if own is not None and grad is not None:
            own.before(self.i)


def sync_of(p: Tensor) -> GradSync | None:
    """What reduces the gradients of a parameter."""
    member: _Member | None = p.__dict__.get("_sync")
    return None if member is None else member.sync()


def _member(p: DistTensor) -> _Member:
    """Of a parameter of which autograd tells us; the user's hooks after accumulation are called by us."""
    if "_sync" in p.__dict__:
        found: _Member = p.__dict__["_sync"]
        return found
    member = p.__dict__["_sync"] = _Member()
    with disabled():
        theirs = p._post_accumulate_grad_hooks
        p.__dict__["_after"] = OrderedDict() if theirs is None else theirs  # handles of hooks know this dict
        if p.is_floating_point() or p.is_complex():
            kept = p.requires_grad
            p.requires_grad_(True)  # hooks of a frozen parameter serve when it is thawed
            p._post_accumulate_grad_hooks = OrderedDict({-1: member.ready})
            Tensor.register_hook(p, member.before)
            p.requires_grad_(kept)
    return member


@torch_changes.replace(
    "torch.utils.swap_tensors", why="a parameter that is given all that another tensor is stays where it is"
)
def _keep_places(original: Any, name: str) -> Any:
    """Hooks and places go with what a tensor is; the gradient of what comes is reduced where that of the other was."""

    @functools.wraps(original)
    def swap(t1: Tensor, t2: Tensor) -> None:
        both = (t1, t2)
        members = [getattr(t, "__dict__", {}).get("_sync") for t in both]
        places = [(_nowhere, 0) if m is None else (m.sync, m.i) for m in members]
        with disabled():
            hooks = t2._backward_hooks, t1._backward_hooks
        original(t1, t2)
        Aliases.now = object()
        if members == [None, None]:
            return
        with disabled():  # PyTorch leaves them with the object, where no hook reaches what that is now
            t1._backward_hooks, t2._backward_hooks = hooks
        for t, (sync, i) in zip(both, places, strict=True):
            if isinstance(t, DistTensor) and ((own := sync()) is not None or "_sync" in t.__dict__):
                member = _member(t)
                member.sync, member.i = sync, i
                if own is not None:
                    t.__dict__["_param_name"] = own.names[i]

    return swap


def syncs_of(model: nn.Module) -> list[GradSync]:
    """The gradient synchronisations of a model and of its parts."""
    held = [m.__dict__ for m in model.modules() if "_gradient_sync" in m.__dict__]
    found = [sync for d in held for sync in (d["_gradient_sync"], *d["_others_sync"])]
    if not found:
        raise ShardError("no_sync: this model was not sharded; call mw.shard_module(model, mesh, placements) first")
    return list(dict.fromkeys(found))


@takes(ShardError, model=(torch.nn.Module, "give the model that mw.shard_module returned"))
@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Skip gradient synchronization inside: gradients stay Partial and accumulate on each rank.

    The next backward outside reduces the accumulated sum, once.

    DDP: `no_sync()`. FSDP2: `set_requires_gradient_sync(False)`.

    Args:
        model: A model from `shard_module`.

    Raises:
        ShardError: If the model does not come from `shard_module`.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def accumulate():
            model = mw.shard_module(nn.Linear(4, 1), mesh)
            batches = [mw.shard_tensor(torch.ones(4, 4), mesh, {"dp": mw.Shard(0)}) for _ in range(2)]
            with mw.no_sync(model):
                model(batches[0]).sum().backward()  # nothing is sent
            model(batches[1]).sum().backward()  # one all-reduce
            return mw.unshard(model.bias.grad).item()


        assert mw.simulate(accumulate, mesh) == [8.0, 8.0]
        ```
    """
    syncs = syncs_of(model)
    before = [s.enabled for s in syncs]
    for s in syncs:
        s.enabled = False
    try:
        yield
    finally:
        for s, was in zip(syncs, before, strict=True):
            s.enabled = was


__all__ = ["BUCKET_BYTES", "GradSync", "no_sync", "sync_of", "syncs_of"]
