"""One backward of a sharded model: what it has brought and sent.

Autograd's engine alone holds a :class:`_End` of it.  It is called when the graph task ends, and gone when the task is,
so a backward that raises leaves nothing behind that another one, or another thread, could take for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from ... import collective, compat
from ...collective import serving
from ...dispatch import disabled
from ...errors import ShardError
from ...layout import Spec, block_of
from ...local_tensor import bare, get_grad, set_grad
from ...mesh import Mesh
from ...resharding import executor
from ...resharding.planner import plan as plan_conversion
from ...tensor import DistTensor, beside_slot, held, hold, in_spec, stash_assigned_grad, wrap
from ..parameters.names import names_of
from ..parameters.packing import Packing, split_dim
from ..parameters.stored import near, on_host, reduce_dtype
from .buckets import Bucket, Buckets
from .reductions import PendingReduction, Reduction, Scattering, give

Tensor = torch.Tensor
_engine: Any = compat.execution_engine


class Synced(Protocol):
    """Parameters whose gradients are synchronised (``sync.GradSync``)."""

    mesh: Mesh
    names: list[str]
    params: list[DistTensor]
    enabled: bool
    interrupted: bool  # the last backward raised: gradients may be left Partial
    apart: set[int]
    order: list[int] | None
    # Starts the reduction of stored parameters' sums.
    reduce: Callable[[Sequence[DistTensor]], list[PendingReduction]] | None

    def buckets(self) -> Buckets:
        """How the gradients of the next backward are divided."""
        ...

    def follow(self, seen: Sequence[int]) -> None:
        """Divide by this order from now on."""
        ...

    def say_unused(self) -> None:
        """Warn of axes that nothing uses."""

    def compare(self) -> list[Callable[[], None]]:
        """Start to compare what the ranks have done so far; the answers raise."""
        ...


def call_after(p: DistTensor) -> None:
    """Call the user's hooks on the accumulated (and synchronised) gradient of a parameter."""
    for hook in list(p.__dict__["_after"].values()):
        hook(p)


class _End:
    """The end of a backward, as the engine sees it."""

    backward: Backward | None = None  # an interrupt may land before it is set

    def __init__(self, backward: Backward) -> None:
        self.backward = backward

    def __call__(self) -> None:
        assert self.backward is not None
        self.backward.finish()

    def __del__(self) -> None:
        if self.backward is not None:
            self.backward.leave()


def begin(sync: Synced) -> Backward:
    """Of the graph task that runs in this thread."""
    made = Backward(sync)
    _engine.queue_callback(_End(made))
    return made


class Contributors:
    """Stored parameters that one node of the backward brought gradients of; reduced together when all are complete."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.complete: list[DistTensor] = []


class Backward:
    """The state of one running backward."""

    def __init__(self, sync: Synced) -> None:
        self.sync, self.over = sync, False
        self.plan = sync.buckets()
        self.left = [set(b.members) for b in self.plan.buckets]  # gradients that it has not brought yet
        self.launched = self.served = self.settled = 0
        self.in_flight: list[PendingReduction] = []
        self.staged: list[PendingReduction] = []  # those of them that have a second collective
        self.order: list[int] = []
        # Whether there is something for its end: one that only gathers weights again, some ranks do not have.
        self.brought = False
        self.hooked: set[int] = set()  # parameters whose hooks are to be called when their gradient is synchronised
        # Of parameters that are stored split:
        self.wholes: dict[Any, tuple[Any, list[Tensor]]] = {}  # unit to what was gathered for this, of which state
        self.ahead: dict[Any, Any] = {}  # unit to its gather under way
        self.sums: dict[int, DistTensor] = {}  # id of a parameter to its contributions so far
        self.groups: dict[int, Contributors] = {}
        self.ran: set[Any] = set()  # nodes that have brought contributions to parameters that are stored on the host

    def leave(self) -> None:
        """The graph task is gone.  What is left of this object, a traceback may keep."""
        if not self.over:
            self.over = True
            self.sync.interrupted = self.sync.interrupted or self.sync.enabled
        self.wholes.clear()
        self.ahead.clear()

    # -- gradients as they come -----------------------------------------------------------------------

    def note(self, i: int, reached: bool) -> None:
        """The gradient of a parameter was accumulated, if one reached it; nothing is sent for it before the end."""
        self.brought = True
        self.order.append(i)
        if reached and self.sync.params[i].__dict__["_after"]:
            self.hooked.add(i)

    def ready(self, i: int, reached: bool) -> None:
        """The gradient of a parameter was accumulated, if one reached it."""
        self.note(i, reached)
        k = self.plan.where[i]
        if k is None:
            if beside_slot(self.sync.params[i]).aside is None:  # else a hook that reads it sends, in the engine's order
                self._serve([i])
            return
        self.left[k].discard(i)
        if not self.left[k]:
            self._advance()

    def _advance(self) -> None:
        """Launch the buckets that are complete, in order: the same order on all ranks."""
        while self.launched < len(self.left) and not self.left[self.launched]:
            self._launch(self.launched)
        if self.hooked:  # one bucket later, so that hooks wait while the next one travels
            self._serve_buckets(self.launched - 1)

    def _serve_buckets(self, end: int) -> None:
        while self.served < end:
            self.served += 1
            self._serve(self.plan.buckets[self.served - 1].members)

    def _serve(self, members: Sequence[int]) -> None:
        for i in members:
            if i in self.hooked:
                self.hooked.discard(i)
                call_after(self.sync.params[i])

    def _launch(self, k: int) -> None:
        """Take the gradients of a bucket from their parameters and start their reduction."""
        self.launched = k + 1
        self._advance_sums()
        bucket = self.plan.buckets[k]
        with torch.no_grad(), disabled():
            grads: list[Tensor] = []
            members: list[int] = []
            for i in bucket.members:
                p = self.sync.params[i]
                g = get_grad(p)
                if g is None or g.requires_grad or not self._is_partial(i, g):
                    continue  # unused, or to be differentiated again (see _finish_differentiable)
                if g.is_sparse:
                    raise ShardError(
                        f"{self.sync.names[i]} has a sparse gradient, which cannot be synchronised: use sparse=False"
                    )
                grads.append(near(p, g).to(bucket.dtype))
                members.append(i)
                # What comes later in this backward starts a new gradient and is added at the end.
                set_grad(p, None)
            if grads:
                with serving("gradient", partial(names_of, [self.sync.params[i] for i in members])):
                    self._send([self._start(bucket, members, grads)])

    def _advance_sums(self) -> None:
        """Start the second collective of reductions that have two, where all ranks do."""
        with torch.no_grad(), disabled():
            for earlier in self.staged:
                earlier.advance()

    def _send(self, started: Sequence[PendingReduction]) -> None:
        """Keep reductions that were started."""
        self.in_flight += started
        self.staged += [s for s in started if s.pending.staged]

    def _start(self, bucket: Bucket, members: list[int], grads: list[Tensor]) -> PendingReduction:
        """Start the reduction of gradients that were taken from their parameters."""
        mesh = self.sync.mesh
        params, specs = [self.sync.params[i] for i in members], [self.plan.synced[i] for i in members]
        grads = [bare(g) for g in grads]  # one that was read has the shape of the whole
        if bucket.scatter:
            dims, cuts = [split_dim(s, bucket.scatter) for s in specs], tuple(mesh.sizes[a] for a in bucket.scatter)
            packing = Packing([g.shape for g in grads], dims, cuts, block_of(bucket.wire))
            others = tuple(a for a in bucket.axes if a not in bucket.scatter)
            return Scattering(params, grads, specs, packing, bucket.scatter, others)
        group = collective.group(mesh, bucket.axes)
        flat, views = (grads[0], grads) if len(grads) == 1 else bucket.filled(grads)
        return Reduction(params, specs, views, collective.sum_async(flat, group, bucket.wire))

    # -- stored parameters ----------------------------------------------------------------------------

    def collect(self, params: Sequence[DistTensor], specs: Sequence[Spec], grads: Sequence[Tensor | None]) -> None:
        """Contributions to the gradients of stored parameters, which their :meth:`complete` follows."""
        self.brought = True
        group = Contributors()
        for p, spec, g in zip(params, specs, grads, strict=True):
            if g is None:
                continue
            before = self.sums.get(id(p))
            with torch.no_grad(), disabled():
                self.sums[id(p)] = wrap(g.detach() if before is None else Tensor.add(before, g), spec)
            earlier = self.groups.pop(id(p), None)
            if earlier is not None:
                self._close(earlier, p)
            self.groups[id(p)] = group
            group.open.add(id(p))

    def complete(self, p: DistTensor) -> bool:
        """No further contribution to a stored parameter will come in this graph task; whether there were some."""
        made, group = self.sums.pop(id(p), None), self.groups.pop(id(p), None)
        if made is None or group is None:
            return False
        stash_assigned_grad(p)
        before = held(p)
        with torch.no_grad(), disabled():
            if before is not None:
                more = in_spec(before, before._spec, made._spec).to(made.device)
                made = wrap(Tensor.add(more, made), made._spec)
            hold(p, made)
        group.complete.append(p)
        self._close(group, p)
        return True

    def _close(self, group: Contributors, p: DistTensor) -> None:
        group.open.discard(id(p))
        if not group.open and self.sync.enabled and self.sync.reduce is not None:
            with torch.no_grad(), disabled():
                self._advance_sums()
                while self.settled < len(self.in_flight) - 1:  # else whole gradients of all units are there in the end
                    self.in_flight[self.settled].settle()
                    self.settled += 1
            self._send(self.sync.reduce(group.complete))

    # -- the end --------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Launch what is left, wait, and give the parameters their gradients."""
        try:
            for p in [p for p in self.sync.params if id(p) in self.sums and on_host(p)]:
                self.complete(p)  # of a node that was left out, others waited for
            if self.sync.enabled and self.brought:
                self._finish()
        finally:
            self.over = True

    def _finish(self) -> None:
        sync = self.sync
        sync.interrupted = True
        while self.launched < len(self.left):
            self._launch(self.launched)
        if sync.reduce is not None:  # contributions that other backwards left
            self._send(sync.reduce([sync.params[i] for i in sorted(sync.apart)]))
        self._advance_sums()
        answers = sync.compare()
        late = self._late()
        for p in sync.params:
            held(p)  # finalizes it
        with torch.no_grad(), disabled():
            for i, g in late:
                give(sync.params[i], in_spec(g, self.plan.partial[i], self.plan.synced[i]), self.plan.synced[i])
        self._finish_differentiable()
        for answer in answers:
            answer()
        sync.interrupted = False
        self._serve_buckets(len(self.left))
        self._serve(sorted(self.hooked))
        if sync.order is None:
            sync.follow(self.order)
            sync.say_unused()

    def _is_partial(self, i: int, g: Tensor) -> bool:
        """Whether a gradient still waits for its reduction."""
        own = g.__dict__.get("_spec")
        return own is None or own.layout == self.plan.partial[i].layout

    def _late(self) -> list[tuple[int, Tensor]]:
        """Gradients that came after the bucket of their parameter had left (by a nested backward)."""
        taken = []
        with disabled():
            for i, p in enumerate(self.sync.params):
                g = get_grad(p) if self.plan.where[i] is not None else None
                if g is not None and not g.requires_grad and self._is_partial(i, g):
                    taken.append((i, g))
                    set_grad(p, None)
        return taken

    def _finish_differentiable(self) -> None:
        """Gradients made with ``create_graph=True`` are reduced one by one, differentiably."""
        for i, p in enumerate(self.sync.params):
            with disabled():
                g = get_grad(p)
            if g is None or not g.requires_grad or not p._spec.grad_partial_mask or not self._is_partial(i, g):
                continue
            with disabled(), torch.enable_grad():
                source = g.__dict__.get("_spec") or p._spec.grad()
                target = p._spec.invariant()
                made = executor.apply(plan_conversion(source, target).steps, g.to(reduce_dtype(p))).to(target.dtype)
                set_grad(p, wrap(made.view_as(made) if made is g else made, target))


__all__ = ["Backward", "begin"]
