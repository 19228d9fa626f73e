"""What Meshwright knows of one optimizer: how its parameters, gradients and states lie, and what its step runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer

from ... import compat
from ...dispatch import disabled, refresh
from ...errors import ShardError
from ...layout import Spec, marks_of
from ...local_tensor import OPEN, bare, close_tensors, get_grad, mine, open_tensors, set_grad
from ...ranks import runtime
from ...resharding import executor
from ...resharding.planner import plan as plan_conversion
from ...tensor import (
    GRADIENT,
    DistTensor,
    LentGradient,
    assigned_grad,
    beside_slot,
    call_enabled,
    guard,
    hold,
    in_slot,
    wrap,
)  # fmt: skip
from ..gradients.sync import sync_of
from ..parameters.stored import Axes
from .blocks import OpaqueStates
from .collected import StateContents, same
from .hyperparameters import is_fixed, numbers_of
from .kinds import builtin, check_fused, counts_writes, fill_meta_states, reads_no_shapes, word_of
from .owners import Wholes
from .shadow import Shadow
from .states import Chunks, check_state, held_state, own_spec, unfit

Tensor = torch.Tensor


class OptimizerBinding:
    """What Meshwright knows of one optimizer.

    Args:
        opt: the optimizer.
        by: the caller's word for what a step of an unknown class takes together.
        reshards: bring gradients of other layouts to the parameter's, instead of refusing them.
        shard_states: the axes that states are split over.
        offload_states: the device that they lie on, where that is not the parameters'.
    """

    def __init__(
        self,
        opt: Optimizer,
        *,
        by: str | None = None,
        reshards: bool = False,
        shard_states: Axes | None = None,
        offload_states: str | None = None,
    ) -> None:
        self.by, self.reshards = by, reshards
        self.shard_states, self.offload_states = shard_states, offload_states
        self.chunks: Chunks | None = None
        self.wholes: Wholes | None = None  # these, where a step takes parameters whole
        self.word = ""  # what a step takes together
        self.error: Exception | None = None  # that the running step has raised
        self.shadow: Shadow | None = None
        self.apart = OpaqueStates()
        self.known: list[Any] = []  # all parameters; the same list as long as they are the same
        self.sizes: list[int] = []  # of the groups
        self.lies: dict[int, tuple[Spec, Spec]] = {}  # of a parameter and of its states
        self.every: list[DistTensor] = []
        self.specs: list[Spec] = []  # of these
        self.params: list[DistTensor] = []  # those that have no chunks
        self.wanted: list[Spec] = []  # of the gradients of these
        self.copies: list[DistTensor] = []
        self.inside: Optimizer | None = None  # whose own step runs
        self.told: list[Any] = []  # options of its groups when they were last read, where they cannot change in place
        self.numbers: list[dict[str, Any]] = []  # that were read
        self.kept = 0  # parameters with states, then
        self.swapped: list[Tensor] = []
        self.lent: list[LentGradient] = []  # gradients in other layouts that users gave, as a step reads them
        self.states: list[Tensor] = []  # of one value per element
        self.laid: list[Any] = []  # the specs of these
        self.seen = StateContents({})  # what the state had when it was looked through
        self.follow(opt)
        if _check_loaded not in opt._optimizer_load_state_dict_pre_hooks.values():
            opt.register_load_state_dict_pre_hook(_check_loaded)
            opt.register_load_state_dict_post_hook(_hold_states)
            opt.register_state_dict_pre_hook(_check_whole)

    def follow(self, opt: Optimizer) -> None:
        """Look at the parameters (again): some may have been added."""
        listed = list(map(_PARAMS, opt.param_groups))
        known, sizes = [*chain.from_iterable(listed)], list(map(len, listed))
        if sizes == self.sizes and same(known, self.known) and not self._moved():
            return
        every = [p for p in known if isinstance(p, DistTensor)]
        fill_meta_states(opt)
        self.word = self.word or word_of(opt, every, self.by)
        if self.chunks is None:
            self.chunks = self._chunks(opt, every)
            self.wholes = self.chunks if isinstance(self.chunks, Wholes) else None
        if self.chunks is not None:
            self.chunks.add(every)
        self.known, self.sizes, self.every = known, sizes, every
        self.params = [p for p in every if self.chunks is None or self.chunks.spec(p) is None]
        self.lies = {id(p): (p._spec, self.state_spec(p)) for p in every}
        self.specs = [p._spec for p in every]
        self.copies = [p for p in self.params if marks_of(p._spec).copied]  # views of others: those see the update too
        self.wanted = [own_spec(p._spec) for p in self.params]
        # Of each group: who compares what it is updated with.
        self.syncs = [WeakSet(s for p in g["params"] if (s := sync_of(p)) is not None) for g in opt.param_groups]

    def _chunks(self, opt: Optimizer, every: list[DistTensor]) -> Chunks | None:
        """What stands in for parameters; None: they do themselves."""
        over, on = self.shard_states or (), self.offload_states
        if self.word == "element":
            return Chunks(over, on, ()) if over or on else None
        if self.word == "model" and over:
            raise ShardError(
                f"shard_optimizer: shard_states={over!r}, but {type(opt).__name__} updates the whole model together, "
                "with its states whole on each rank. Leave shard_states out"
            )
        whole = self.word == "model" and all(map(_is_whole, every))
        return None if whole and on is None else Wholes(self.word, over, on, ())

    def _moved(self) -> bool:
        """Whether parameters are sharded now that were whole on each rank."""
        return self.word == "model" and self.chunks is None and not all(map(_is_whole, self.every))

    def tell(self, opt: Optimizer) -> None:
        """Note what the parameters are updated with: ranks compare it after their next backward."""
        groups, kept = opt.param_groups, self.seen.kept
        options = [*chain.from_iterable(groups), *chain.from_iterable(map(_VALUES, groups))]
        if kept != self.kept or not same(options, self.told):
            fixed = all(is_fixed(v) for g in groups for k, v in g.items() if k != "params")
            self.told, self.kept, self.numbers = options if fixed else [], kept, numbers_of(opt)
        for i, (syncs, numbers) in enumerate(zip(self.syncs, self.numbers, strict=True)):
            for sync in syncs:
                sync.note(i, numbers)

    def state_spec(self, p: DistTensor) -> Spec:
        """How the states of a parameter lie."""
        return (self.chunks.spec(p) if self.chunks is not None else None) or own_spec(p._spec)

    def owns(self, p: DistTensor) -> bool:
        """Whether the states of a parameter are whole at one rank, whatever their shapes."""
        return self.wholes is not None and not self.replicates(p)

    def replicates(self, p: DistTensor) -> bool:
        """Whether the states of a parameter are whole at all ranks."""
        return self.state_spec(p).layout.is_replicated()

    def open(self, opt: Optimizer) -> Optimizer:
        """Make parameters, gradients and states plain, where that can be told; what the own step is called with.

        Raises ShardError, with nothing changed, for gradients of other layouts and states of other sizes.
        """
        check_fused(opt)
        self._hold_states(opt)
        with disabled():
            grads = self._gradients()
            if self.wholes is not None:
                self.wholes.bring(self.every, not builtin(opt), not self.reshards)
            if self._on_stand_ins(opt):
                shadow = self.shadow = self.shadow or Shadow(opt, self.chunks)
                shadow.load(self.known, self.seen, self.params, grads)
                self.inside = opt
                return shadow.made
            self.shadow = None  # of a step before, whose options and attributes are not this one's
            pairs = zip(self.params, grads, strict=True)
            self.lent = [LentGradient(p, g) for p, g in pairs if g is not None and get_grad(p) is not g and not mine(p)]
        opened = [t for t in (*grads, *self.params) if isinstance(t, DistTensor) and not mine(t)]
        swapped: list[Tensor] = [*opened, *self.states]
        open_tensors(swapped)
        self.swapped, self.inside = swapped, opt
        return opt

    def close(self) -> None:
        """Make them distributed again; of a step that raised, too: what it has updated goes to all ranks."""
        opt, self.inside = self.inside, None
        close_tensors(self.swapped)
        self.swapped = []
        with disabled():
            while self.lent:
                self.lent.pop().restore()
        if opt is None:
            return
        shadow = self.shadow
        if not counts_writes(opt):
            if shadow is not None and shadow.lists.ready:  # aliases, which count for all that have the memory
                written = shadow.aliases
            else:
                with disabled():  # one of PyTorch's leaves parameters without a gradient alone
                    written = [*self.states, *(p for p in self.params if not builtin(opt) or get_grad(p) is not None)]
            torch.autograd.graph.increment_version(written)
        if shadow is None:
            self._wrap_states(opt)
            return
        # An optimizer of PyTorch's leaves parameters without a gradient alone.
        updated = shadow.updated(everything=not builtin(opt))
        changed = shadow.settle()
        shadow.release()
        if changed:
            self._wrap_states(opt)
        if self.chunks is not None:
            self.chunks.gather(updated)
        if self.wholes is not None:
            self.wholes.tell(opt, self.every, self.error)

    @contextlib.contextmanager
    def outside(self, closure: bool = False) -> Iterator[Optimizer | None]:
        """For what an optimizer's own step calls and what is none of it: closures, hooks.

        Args:
            closure: what is called leaves states alone.
        """
        opt, wholes = self.inside, self.wholes
        if opt is None:
            yield None
            return
        if closure and wholes is not None:  # the step may go on with dicts of states that it has looked up
            wholes.gather(())
            self.inside = None
            try:
                with compat.EnableTorchFunction():
                    yield opt
            finally:
                wholes.bring(self.every, not builtin(opt), not self.reshards)
                self.inside = opt
            return
        self.close()
        try:
            with compat.EnableTorchFunction():
                yield opt
        finally:
            self.open(opt)

    def _on_stand_ins(self, opt: Optimizer) -> bool:
        """Whether its step runs on others in the place of its parameters: what it knows of them it asks them."""
        if self.chunks is not None:
            return True
        differentiable = any(g.get("differentiable") for g in opt.param_groups)
        plain = differentiable or "_init_group" in opt.__dict__ or torch.is_inference_mode_enabled()
        return reads_no_shapes(opt) and not plain

    def _gradients(self) -> list[Tensor | None]:
        """Of each parameter the gradient in its layout.  Dispatch must be disabled."""
        found: list[Tensor | None] = list(map(get_grad, self.params))
        try:
            if list(map(_SPEC, found)) == self.wanted and not [
                p for p in self.params if GRADIENT in p.__dict__ and p.__dict__[GRADIENT].held is not None
            ]:
                return found
        except AttributeError:  # not all have one, or those that autograd has made lie in their slots
            pass
        found = []
        for i, p in enumerate(self.params):
            g = get_grad(p) if beside_slot(p).held is None else in_slot(p)
            fits = g is None or (g.__class__ is DistTensor and g._spec is self.wanted[i])
            if not fits and (OPEN not in p.__dict__ or not mine(p)):  # not inside of another optimizer's step
                g = self._fitted(i, p, g)  # type: ignore[arg-type]
            found.append(g)
        return found

    def _fitted(self, i: int, p: DistTensor, g: Tensor) -> Tensor:
        """A gradient in the layout of its parameter."""
        own: Spec = g.__dict__.get("_spec") or p._spec.grad()
        wanted, given = self.wanted[i], assigned_grad(p, g)
        copied = marks_of(own).copied
        if copied:  # of one flat tensor, maybe, which nobody could have laid as all parameters are
            refresh(g, call_enabled)
            if own.layout == wanted.layout and g.dtype is wanted.dtype:
                return wrap(bare(g), wanted)  # and it stays a copy, which knows of what
        if own.layout == wanted.layout and g.dtype is wanted.dtype:
            return wrap(g, wanted) if isinstance(g, DistTensor) else g
        if not self.reshards and not copied and not _interrupted(p):
            raise ShardError(unfit(p, own))
        plan = plan_conversion(own.decided(), wanted.with_(dtype=own.dtype))
        with torch.no_grad():
            # It may be in what it is reduced in, and where.
            made = wrap(executor.apply(plan.steps, g).to(p.device, wanted.dtype), wanted)
        if not given:  # else somebody may have its memory
            hold(p, None)
            set_grad(p, made)
            guard(p, wanted)  # the next backward adds to it, if nobody clears it before
        return made

    def _hold_states(self, opt: Optimizer) -> None:
        """Note the states of one value per element, brought to how their parameters' states lie."""
        if self.wholes is not None:
            self.wholes.hold(opt)
            self.seen = StateContents(opt.state)
            return
        if self.seen.still(opt.state) and self._lie_as_before():
            return
        self.specs, self.wanted = [p._spec for p in self.every], [own_spec(p._spec) for p in self.params]
        for q in self.every:  # also those without a state: the next step may make one
            if self.lies[id(q)][0] is not q._spec:
                self.lies[id(q)] = (q._spec, self.state_spec(q))
        found: list[Tensor] = []
        for p, entry in opt.state.items():
            if id(p) not in self.lies:
                continue
            spec = self.lies[id(p)][1]
            if self.apart.holds(opt, p, entry, spec):  # type: ignore[arg-type]
                continue
            for k, v in entry.items():
                if self.offload_states is not None and isinstance(v, Tensor) and v.device.type != self.offload_states:
                    v = entry[k] = self.chunks.placed(v)  # type: ignore[union-attr]
                if not isinstance(v, DistTensor):
                    if not isinstance(v, Tensor) or not v.dim():
                        continue
                    v = entry[k] = held_state(v, spec, k, p, opt)
                elif v._spec is not spec and (v._spec.layout != spec.layout or v._spec.shape != spec.shape):
                    v = entry[k] = held_state(v, spec, k, p, opt)
                if isinstance(v, DistTensor):
                    found.append(v)
        self.states, self.laid, self.seen = found, list(map(_SPEC, found)), StateContents(opt.state)

    def _lie_as_before(self) -> bool:
        """Whether the parameters, and the states that there were, are what they were."""
        if list(map(_SPEC, self.every)) != self.specs:
            return False
        if self.shadow is not None and self.chunks is None:
            return self.shadow.in_place()
        return list(map(_SPEC, self.states)) == self.laid

    def _wrap_states(self, opt: Optimizer) -> None:
        """States that a step has made become DistTensors."""
        if self.seen.still(opt.state):  # a step writes to what is there
            return
        if self.wholes is not None:
            self.wholes.hold(opt)
            return
        self.apart.judge(opt, self.lies)
        for p, entry in opt.state.items():
            if id(p) in self.lies and id(p) not in self.apart.found:
                for v in entry.values():
                    if v.__class__ is Tensor and v.dim():
                        spec = self.lies[id(p)][1]
                        if v.shape == spec.local_shape(spec.mesh.coordinate(runtime.RT.rank)):
                            wrap(v, spec)


_SPEC, _PARAMS, _VALUES = attrgetter("_spec"), itemgetter("params"), methodcaller("values")


def _is_whole(p: DistTensor) -> bool:
    return p._spec.layout.is_replicated()


def _interrupted(p: DistTensor) -> bool:
    """Whether the last backward raised: a gradient may then be left Partial, which nobody could have seen to."""
    sync = sync_of(p)
    return sync is not None and sync.interrupted


# ---------------------------------------------------------------------------------------------- state


def _check_loaded(opt: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state that fits no parameter, before anything is loaded."""
    saved = [i for g in state_dict["param_groups"] for i in g["params"]]
    params = [p for g in opt.param_groups for p in g["params"]]
    for index, p in zip(saved, params, strict=False):  # PyTorch says where there are more of one
        entry = state_dict["state"].get(index)
        if isinstance(p, DistTensor) and isinstance(entry, dict) and opt.__dict__["_meshwright"].wholes is None:
            spec = opt.__dict__["_meshwright"].state_spec(p)
            for k, v in entry.items():
                if isinstance(v, Tensor):
                    check_state(v, spec, k, p, opt)


def _hold_states(opt: Optimizer) -> None:
    """States that are there, whole or of any layout, become DistTensors that lie as their parameters' states do."""
    opt.__dict__["_meshwright"]._hold_states(opt)


def _check_whole(opt: Optimizer) -> None:
    """Refuse to give states as whole that are a rank's own."""
    if refused := opt.__dict__["_meshwright"].apart.refusal("state_dict()"):
        raise ShardError(refused)


__all__ = ["OptimizerBinding"]
