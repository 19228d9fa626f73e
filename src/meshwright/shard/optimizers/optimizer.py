"""Optimizers on distributed parameters: the native step on local tensors.

While an optimizer's own step function runs, parameters, gradients and states are what they are underneath: plain
local tensors.  So foreach and fused kernels run as on one device.  Hooks of steps, closures and everything else see
them distributed.  This serves every optimizer that treats elements one by one; ``shard_optimizer`` adds what needs
to be asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from types import NoneType
from typing import Any
from weakref import WeakSet

import torch
import torch.optim.optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from ... import compat, torch_changes
from ...dispatch import disabled, refresh, write_through
from ...errors import ShardError, takes
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
from ..parameters.host import check_device
from ..parameters.stored import Axes
from .blocks import Apart
from .collected import StateContents, same
from .hyperparameters import is_fixed, numbers_of
from .kinds import builtin, check_class, check_fused, counts_writes, hooks_of, mixes, reads_no_shapes
from .shadow import Shadow
from .states import Chunks, check_state, held_state, own_spec, unfit

Tensor = torch.Tensor


class OptimizerBinding:
    """What Meshwright knows of one optimizer.

    Args:
        opt: the optimizer.
        elementwise: the caller's word that a step of an unknown class treats elements one by one.
        reshards: bring gradients of other layouts to the parameter's, instead of refusing them.
        shard_states: the axes that states are split over.
        offload_states: the device that they lie on, where that is not the parameters'.
    """

    def __init__(
        self,
        opt: Optimizer,
        *,
        elementwise: bool = False,
        reshards: bool = False,
        shard_states: Axes | None = None,
        offload_states: str | None = None,
    ) -> None:
        self.elementwise, self.reshards = elementwise, reshards
        self.shard_states, self.offload_states = shard_states, offload_states
        self.chunks = Chunks(shard_states or (), offload_states, ()) if shard_states or offload_states else None
        self.shadow: Shadow | None = None
        self.apart = Apart()
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
        if sizes == self.sizes and same(known, self.known):
            return
        every = [p for p in known if isinstance(p, DistTensor)]
        check_class(opt, every, self.elementwise, bool(self.shard_states))
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

    def open(self, opt: Optimizer) -> Optimizer:
        """Make parameters, gradients and states plain, where that can be told; what the own step is called with.

        Raises ShardError, with nothing changed, for gradients of other layouts and states of other sizes.
        """
        check_fused(opt)
        self._hold_states(opt)
        with disabled():
            grads = self._gradients()
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

    @contextlib.contextmanager
    def outside(self) -> Iterator[Optimizer | None]:
        """For what an optimizer's own step calls and what is none of it: closures, hooks."""
        opt = self.inside
        if opt is None:
            yield None
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
        self.apart.judge(opt, self.lies)
        for p, entry in opt.state.items():
            if id(p) in self.lies and id(p) not in self.apart.found:
                for v in entry.values():
                    if v.__class__ is Tensor and v.dim():
                        spec = self.lies[id(p)][1]
                        if v.shape == spec.local_shape(spec.mesh.coordinate(runtime.RT.rank)):
                            wrap(v, spec)


_SPEC, _PARAMS, _VALUES = attrgetter("_spec"), itemgetter("params"), methodcaller("values")


def _interrupted(p: DistTensor) -> bool:
    """Whether the last backward raised: a gradient may then be left Partial, which nobody could have seen to."""
    sync = sync_of(p)
    return sync is not None and sync.interrupted


# ---------------------------------------------------------------------------------------------- steps


def binding_of(opt: Optimizer) -> OptimizerBinding | None:
    """The binding of an optimizer, made at its first step; None if it has no distributed parameters."""
    found: OptimizerBinding | None = opt.__dict__.get("_meshwright")
    if found is None and any(isinstance(p, DistTensor) for g in opt.param_groups for p in g["params"]):
        said = opt.__dict__.pop(_SAID, None)
        if said is not None:  # a copy of one that was prepared
            return binding_of(shard_optimizer(opt, **said))
        found = opt.__dict__["_meshwright"] = OptimizerBinding(opt)
    return found


_SAID = "_meshwright_said"
_reduce_ex: Any = Optimizer.__reduce_ex__


def _with_options(opt: Optimizer, protocol: Any) -> Any:
    """What is copied and pickled of an optimizer, with what ``shard_optimizer`` was told, for the copy's first step."""
    make, args, *rest = _reduce_ex(opt, protocol)
    binding: OptimizerBinding | None = opt.__dict__.get("_meshwright")
    said = opt.__dict__.get(_SAID)
    if binding is not None and binding.reshards:
        said = {name: getattr(binding, name) for name in ("shard_states", "offload_states", "elementwise")}
    if rest and isinstance(rest[0], dict):  # a class may keep all that it has
        rest[0] = {k: v for k, v in rest[0].items() if k not in ("_meshwright", _SAID)}
    return (make, args, *rest) if said is None else (_remade, (said, make, *args), *rest)


def _remade(said: dict[str, Any], make: Any, *args: Any) -> Any:
    opt = make(*args)
    opt.__dict__[_SAID] = said
    return opt


@torch_changes.replace(
    "torch.optim.Optimizer.__reduce_ex__",
    why="a copied or unpickled optimizer keeps what shard_optimizer was told",
)
def _keep_options(original: Any, name: str) -> Any:
    return _with_options


def _on_locals(own: Callable[..., Any]) -> Callable[..., Any]:
    """A class's own step function, with parameters, gradients and states plain while it runs."""

    @functools.wraps(own)
    def step(opt: Optimizer, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(opt)
        if binding is None:
            return own(opt, *args, **kwargs)
        binding.follow(opt)
        for p in binding.copies:
            refresh(p, call_enabled)
        losses: list[Any] = []
        args, kwargs = _with_closure(opt, binding, args, kwargs, losses)
        try:
            plain = binding.open(opt)
            binding.tell(opt)
            with disabled():
                made = own(plain, *args, **kwargs)
            return losses[0] if losses and mixes(opt) else made  # what it was given there are numbers
        finally:
            runtime.RT.updates += 1
            binding.close()
            if binding.chunks is not None:
                binding.shadow = None  # copies that it has of parameters may be large
            if binding.copies:
                with torch.no_grad():
                    for p in binding.copies:
                        write_through(p, call_enabled)

    return step


def _with_closure(opt: Optimizer, binding: OptimizerBinding, args: Any, kwargs: Any, losses: list[Any]) -> Any:
    """A closure runs the model: for that the parameters must be distributed again."""
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs

    def distributed() -> Any:
        with binding.outside():
            loss = closure()
            losses.append(loss)
            return loss.item() if isinstance(loss, DistTensor) and mixes(opt) else loss

    return ((distributed, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": distributed})


_profile_hook_step: Any = Optimizer.profile_hook_step


def _hooked(own: Callable[..., Any]) -> Callable[..., Any]:
    """What PyTorch makes of a class's step function: hooks around it, which see DistTensors."""
    whole = _profile_hook_step(_on_locals(own))

    @functools.wraps(own)
    def step(opt: Optimizer, *args: Any, **kwargs: Any) -> Any:
        binding: OptimizerBinding | None = opt.__dict__.get("_meshwright")
        if binding is None or binding.inside is None:
            return whole(opt, *args, **kwargs)
        if not hooks_of(opt):  # the step of a class calls that of its base
            return own(opt, *args, **kwargs)
        with binding.outside() as real:
            return whole(real, *args, **kwargs)

    return step


def _classes(kind: type[Optimizer]) -> Iterator[type[Optimizer]]:
    yield kind
    for sub in kind.__subclasses__():
        yield from _classes(sub)


@torch_changes.install(
    "torch.optim.Optimizer.profile_hook_step",
    "torch.optim.Optimizer.step",
    why="steps of optimizers on distributed parameters run on the parts that a rank holds, and hooks of steps do not",
)
def _step_on_locals() -> None:
    Optimizer.profile_hook_step = staticmethod(_hooked)  # type: ignore[method-assign,assignment]
    for kind in set(_classes(Optimizer)):  # optimizers have been made of some already
        step: Any = kind.__dict__.get("step")
        if getattr(step, "hooked", False) and step.__globals__["__name__"] == torch_optimizer.__name__:
            kind.step = _hooked(step.__wrapped__)  # type: ignore[method-assign]
            kind.step.hooked = True  # type: ignore[attr-defined]
            # Schedulers that were made before keep the old one, which goes on to what its variable says.
            own = step.__code__.co_freevars.index("func")
            step.__closure__[own].cell_contents = _on_locals(step.__wrapped__)


@takes(ShardError, shard_states=((str, list, tuple, NoneType), "give an axis of the mesh, or several"))
def shard_optimizer(
    opt: Optimizer, *, shard_states: Axes | None = None, offload_states: str | None = None, elementwise: bool = False
) -> Optimizer:
    """Prepare an optimizer for DistTensor parameters; return the same object.

    Plain optimizers already work if gradients have their parameters' layouts. This adds: gradients of other layouts are
    redistributed, states may be sharded or offloaded, and classes of your own may run. `state_dict()` returns states as
    DistTensors; `load_state_dict()` takes full tensors or DistTensors of any layout.

    DeepSpeed: ZeRO-1/2. PyTorch: `ZeroRedundancyOptimizer`.

    Args:
        opt: An optimizer over the parameters of a sharded model.
        shard_states: Axis or axes over which states are sharded (ZeRO-1), and gradients of a model from `shard_module`
            (ZeRO-2). Each rank updates its chunk of every parameter that is replicated on them; then chunks are
            gathered.
        offload_states: `"cpu"` keeps states and the update on the CPU: gradients and parameters are copied there,
            updated parameters back. With `shard_states`, each rank's chunks.
        elementwise: Declare a class of your own elementwise, so that it may update shards.

    Raises:
        MeshError: If there is no such axis.
        ShardError: If the optimizer mixes elements of sharded parameters.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})


        def state_sizes():
            model = mw.shard_module(nn.Linear(4, 4), mesh)
            optimizer = mw.shard_optimizer(torch.optim.AdamW(model.parameters()), shard_states="dp")
            model(mw.shard_tensor(torch.ones(2, 4), mesh, {"dp": mw.Shard(0)})).sum().backward()
            optimizer.step()
            return optimizer.state[model.weight]["exp_avg"].to_local().numel()


        assert mw.simulate(state_sizes, mesh) == [8, 8]  # of 16 elements
        ```
    """
    if offload_states is not None:
        check_device(offload_states, "offload_states")
    if not isinstance(opt, Optimizer):
        raise ShardError(f"shard_optimizer takes a torch.optim.Optimizer, not {type(opt).__name__}")
    if not any(isinstance(p, DistTensor) for g in opt.param_groups for p in g["params"]):
        raise ShardError(
            "none of the optimizer's parameters is distributed: call mw.shard_module(model, mesh, ...) first, and make "
            "the optimizer after it from the model's own parameters; what replaces or adds parameters (PEFT, the meta "
            "device) comes before both"
        )
    found: OptimizerBinding | None = opt.__dict__.pop("_meshwright", None)
    made = OptimizerBinding(
        opt,
        elementwise=elementwise or (found is not None and found.elementwise),
        reshards=True,
        shard_states=shard_states,
        offload_states=offload_states,
    )
    opt.__dict__["_meshwright"] = made
    _hold_states(opt)
    return opt


# ---------------------------------------------------------------------------------------------- state


def _check_loaded(opt: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state that fits no parameter, before anything is loaded."""
    saved = [i for g in state_dict["param_groups"] for i in g["params"]]
    params = [p for g in opt.param_groups for p in g["params"]]
    for index, p in zip(saved, params, strict=False):  # PyTorch says where there are more of one
        entry = state_dict["state"].get(index)
        if isinstance(p, DistTensor) and isinstance(entry, dict):
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


__all__ = ["OptimizerBinding", "binding_of", "shard_optimizer"]
