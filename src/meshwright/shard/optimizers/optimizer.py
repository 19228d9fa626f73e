"""Optimizers on distributed parameters: the native step on local tensors.

While an optimizer's own step function runs, parameters, gradients and states are what they are underneath: plain
local tensors.  So foreach and fused kernels run as on one device.  Hooks of steps, closures and everything else see
them distributed.  This serves every optimizer that treats elements one by one; ``shard_optimizer`` adds what needs
to be asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer

from ... import torch_changes
from ...dispatch import disabled, refresh, write_through
from ...errors import ShardError, takes
from ...layout import At
from ...local_tensor import bare
from ...ranks import runtime
from ...tensor import DistTensor, call_enabled, wrap
from ..parameters.host import check_device
from ..parameters.stored import Axes
from .binding import OptimizerBinding
from .kinds import WORDS, hooks_of

Tensor = torch.Tensor


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
        said = {name: getattr(binding, name) for name in ("shard_states", "offload_states", "by")}
    if rest and isinstance(rest[0], dict):  # a class may keep all that it has
        rest[0] = {k: v for k, v in rest[0].items() if k not in ("_meshwright", _SAID)}
    return (make, args, *rest) if said is None else (_rebuilt, (said, make, *args), *rest)


def _rebuilt(said: dict[str, Any], make: Any, *args: Any) -> Any:
    opt = make(*args)
    opt.__dict__[_SAID] = said
    return opt


@torch_changes.replace(
    "torch.optim.Optimizer.__reduce_ex__",
    why="a copied or unpickled optimizer keeps what shard_optimizer was told",
)
def _keep_options(original: Any, name: str) -> Any:
    return _with_options


@torch_changes.replace(
    "torch.optim.Optimizer._process_value_according_to_param_policy",
    why="load_state_dict casts states where they are: an op would gather what one rank alone has",
)
def _cast_at_owners(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def cast(param: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, DistTensor) or not any(isinstance(p, At) for p in value._spec.layout.placements):
            return original(param, value, *args, **kwargs)
        with torch.no_grad(), disabled():
            made = original(param, bare(value), *args, **kwargs)
        return wrap(made, value._spec.with_(dtype=made.dtype))

    return staticmethod(cast)


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
            made = None
            if binding.wholes is None or plain.param_groups:  # else others update all parameters
                with disabled():
                    made = own(plain, *args, **kwargs)
            return losses[0] if losses and binding.word != "element" else made  # what it was given there are numbers
        except Exception as error:
            binding.error = error
            raise
        finally:
            runtime.RT.updates += 1
            try:
                binding.close()
            finally:
                binding.error = None
                if binding.chunks is not None:
                    binding.shadow = None  # copies that it has of parameters may be large
                if binding.wholes is not None:
                    binding.wholes.release()
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

    def number(loss: Any) -> Any:
        losses.append(loss)
        return loss.item() if isinstance(loss, DistTensor) and binding.word != "element" else loss

    def distributed() -> Any:
        if binding.word == "parameter":  # before: owners alone run the step
            if len(losses) > 1:
                raise ShardError(
                    f"{type(opt).__name__} calls its closure again within a step, and only owners of parameters would: "
                    "pass by='model' to mw.shard_optimizer"
                )
            losses.append(losses[0])
            return loss
        with binding.outside(closure=True):
            return number(closure())

    if binding.word == "parameter":
        with torch.enable_grad():
            loss = number(closure())

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
        if not hooks_of(opt) or binding.word == "parameter":  # the step of a class calls that of its base
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
    opt: Optimizer, *, shard_states: Axes | None = None, offload_states: str | None = None, by: str | None = None
) -> Optimizer:
    """Prepare an optimizer for DistTensor parameters; return the same object.

    Plain optimizers already work if gradients have their parameters' layouts. This adds: gradients of other layouts are
    redistributed, states may be sharded or offloaded, and `by` declares classes of your own. `state_dict()` returns
    states as DistTensors; `load_state_dict()` takes full tensors or DistTensors of any layout.

    DeepSpeed: ZeRO-1/2. PyTorch: `ZeroRedundancyOptimizer`.

    Args:
        opt: An optimizer over the parameters of a sharded model.
        shard_states: Axis or axes over which states are sharded (ZeRO-1), and gradients of a model from `shard_module`
            (ZeRO-2). Each rank updates its chunk of every parameter that is replicated on them; then chunks are
            gathered.
        offload_states: `"cpu"` keeps states and the update on the CPU: gradients and parameters are copied there,
            updated parameters back. With `shard_states`, each rank's chunks.
        by: What an update of a class of your own takes together. `"element"`: each rank updates its shards.
            `"parameter"`: each parameter is updated whole by one owner, which keeps its states. `"model"`: each rank
            updates all parameters whole. PyTorch's classes, and Shampoo, SOAP, Lamb and Prodigy by their names, are
            known; other classes default to `"model"` with a warning.

    Raises:
        MeshError: If there is no such axis.
        ShardError: If the class, run on small tensors, takes more together than `by`; if it takes the model together
            and `shard_states` is set.

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
    if by is not None and by not in WORDS:
        raise ShardError(f"shard_optimizer: by={by!r}, expected 'element', 'parameter', 'model' or None")
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
        by=by or (found.by if found is not None else None),
        reshards=True,
        shard_states=shard_states,
        offload_states=offload_states,
    )
    opt.__dict__["_meshwright"] = made
    made._hold_states(opt)
    return opt


__all__ = ["OptimizerBinding", "binding_of", "shard_optimizer"]
