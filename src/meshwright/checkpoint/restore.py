"""What a checkpoint is loaded into: every check is made, and memory is there, before anything is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..errors import CheckpointError, MeshwrightError
from ..layout import Layout, Spec, marks_of
from ..local_tensor import bare
from ..mesh import Mesh
from ..ranks import runtime
from ..shard.data.batches import BatchesOnMesh
from ..shard.optimizers.kinds import builtin
from ..shard.optimizers.optimizer import binding_of
from ..tensor import DistTensor, wrap
from ..untrusted_files import making_sense
from .contents import (
    GRADIENT,
    OPTIMIZER,
    OTHERS,
    RANDOM,
    ModelTensors,
    Roles,
    check_host_generators,
    group_names,
    kind_of,
    model_tensors,
    set_host_generators,
)
from .coordination import close_to
from .manifest import Manifest
from .merging import restore_merge
from .values import decoded

Tensor = torch.Tensor


@dataclass
class Target:
    """A tensor that is filled.

    Attributes:
        name: of the tensor in the checkpoint.
        spec: how it lies here.
        local: memory of this rank's part.
        counted: the same memory with the version of the tensor: how often that is written to must not differ by rank.
    """

    name: str
    spec: Spec
    local: Tensor
    counted: Tensor

    def __post_init__(self) -> None:
        if any(n > 1 and not step for n, step in zip(self.local.shape, self.local.stride(), strict=True)):
            raise CheckpointError(
                f"{self.name} cannot be filled here: some of its elements are one in memory (expand); give the model a "
                "tensor of its own, with .contiguous()"
            )


@dataclass
class Restore:
    """What is to be done: tensors to be filled, then steps that put them and everything else into place."""

    mesh: Mesh
    manifest: Manifest
    targets: list[Target] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)

    def finish(self) -> None:
        """Do the steps, in order.  Raises CheckpointError where something cannot take what was saved of it."""
        with making_sense("what was saved", CheckpointError, passing=MeshwrightError):
            for step in self.steps:
                step()

    def fill(self, name: str, t: Tensor, spec: Spec | None = None) -> Tensor:
        """Fill a tensor that is there; how it lies, where it does not say so itself.  Returns it."""
        given = t.spec if isinstance(t, DistTensor) else spec or Spec(t.shape, t.dtype, Layout(self.mesh))
        own = Spec(given.shape, t.dtype, given.layout)
        counted = memory_of(name, t)
        self.targets.append(Target(name, own, counted.data, counted))
        return t

    def whole(self, name: str) -> Tensor:
        """A new tensor on the host, whole on all ranks."""
        spec = self.manifest.tensors[name]
        return self.fill(name, torch.empty(tuple(spec.shape), dtype=spec.dtype, device="cpu"))


def memory_of(name: str, t: Tensor, error: type[MeshwrightError] = CheckpointError) -> Tensor:
    """The local memory of a tensor that is to be filled.

    Raises:
        MeshwrightError: of the given class, where it is a part of another tensor that had to be copied on the mesh.
    """
    if not isinstance(t, DistTensor):
        return t.detach()
    if marks_of(t._spec).copied:
        raise error(
            f"{name} ({t.spec!r}) is a part of another tensor, copied as its shards are divided otherwise; filling it "
            "would not reach that tensor. Give the whole tensor, or fill a new one and assign it: whole[2:6] = new"
        )
    return bare(t)


def plan_restore(roles: Roles, manifest: Manifest, mesh: Mesh) -> Restore:
    """Check everything that is asked for against a checkpoint.

    Raises:
        CheckpointError: with what does not fit; nothing was changed.
    """
    with making_sense("what was saved", CheckpointError, passing=MeshwrightError):
        return _plan(Restore(mesh, manifest), roles)


def _plan(made: Restore, roles: Roles) -> Restore:
    manifest = made.manifest
    if roles.model is not None:
        found = model_tensors(roles.model)
        _model(made, roles, found)
        if roles.optimizers:
            for one, saved in zip(roles.optimizers, _saved(made, "optimizer", roles.optimizers), strict=True):
                _optimizer(made, one, saved, found)
        if "gradients" in manifest.values:
            _gradients(made, roles, found)
    for word, ones in (("scheduler", roles.schedulers), ("loader", roles.loaders)):
        if ones:
            for one, saved in zip(ones, _saved(made, word, ones), strict=True):
                _check_class(made, word, one, saved)
                _object(made, one, decoded(saved["state"], made.whole))
    if roles.program is not None and "program" in manifest.values:
        made.steps += restore_merge(roles.program, manifest.values["program"], made.fill, made.whole)
    elif roles.program is not None and roles.program.micro_step:
        raise CheckpointError(
            "program= is inside an accumulation, the checkpoint holds whole updates. Call step.flush() before loading."
        )
    elif micro := manifest.values.get("program", {}).get("micro_step"):
        raise CheckpointError(
            f"it was saved after micro-step {micro} of a merge, with sums of gradients: give program=, a step with "
            "gradient-merge"
        )
    _random(made)
    return made


def _saved(made: Restore, word: str, ones: Any) -> list[Any]:
    """What was saved of the schedulers, say.  Raises where it is not of as many."""
    saved = made.manifest.values.get(word)
    if saved is None:
        raise CheckpointError(f"it was saved without {word}=, so none can be loaded: leave {word}= out")
    if len(saved) != len(ones):
        raise CheckpointError(f"it has {len(saved)} of {word}=, and {len(ones)} were given")
    listed: list[Any] = saved
    return listed


def _check_class(made: Restore, word: str, one: object, saved: Mapping[str, Any]) -> None:
    if saved["class"] != kind_of(one):
        raise CheckpointError(f"{word}= was a {saved['class']} when it was saved, and is a {kind_of(one)}")


def _object(made: Restore, one: Any, state: Any) -> None:
    if isinstance(one, BatchesOnMesh):
        one.check_state(state)
    made.steps.append(lambda: one.load_state_dict(state))


# ---------------------------------------------------------------------------------------------- the model


def _model(made: Restore, roles: Roles, found: ModelTensors) -> None:
    manifest = made.manifest
    if "model" not in manifest.values:
        raise CheckpointError("it was saved without model=, so none can be loaded")
    saved = {n: n for n in manifest.tensors if not n.startswith((OPTIMIZER, OTHERS))} | dict(manifest.aliases)
    wanted = found.firsts
    missing = [n for n in wanted if n not in saved]
    extra = [n for n in saved if n not in wanted]
    if missing or extra:
        raise CheckpointError(misnamed(missing, extra))
    for name in found.tensors:
        first = manifest.aliases.get(name, name)
        if wanted[first] != name:
            raise CheckpointError(f"{name} has values of its own here, and was tied to {first}")
    for name, first in found.aliases.items():
        if saved[name] != saved[first]:
            raise CheckpointError(f"{name} is tied to {first} here, and had values of its own when it was saved")
    for name, t in found.tensors.items():
        spec = manifest.tensors[saved[name]]
        shape = t.spec.shape if isinstance(t, DistTensor) else t.shape
        if (tuple(spec.shape), spec.dtype) != (tuple(shape), t.dtype):
            raise CheckpointError(
                f"{name} is {t.dtype} of shape {tuple(shape)} here, and was {spec.dtype} of shape {tuple(spec.shape)}"
            )
        if t.is_meta:
            raise CheckpointError(f"{name} is on the meta device: give the model memory first, with mw.shard_module")
        made.fill(saved[name], t)
    extras = manifest.values["model"]
    if set(extras) != set(found.extra):
        other = sorted(set(extras) ^ set(found.extra))[0]
        lacks = "model" if other in extras else "checkpoint"
        raise CheckpointError(
            f"module {other!r}: the {lacks} has no extra state of it. Load into the model that was saved."
        )
    assert roles.model is not None
    for prefix, data in extras.items():
        module, state = roles.model.get_submodule(prefix), decoded(data, made.whole)
        made.steps.append(partial(module.set_extra_state, state))


def misnamed(missing: list[str], extra: list[str]) -> str:
    """What of a model is not there, and the other way round, in words."""
    parts = []
    if missing:
        listed = ", ".join(n + close_to(n, extra) for n in missing[:4])
        parts.append(f"it lacks {len(missing)} of the model's tensors: {listed}{', ...' * (len(missing) > 4)}")
    if extra:
        listed = ", ".join(n + close_to(n, missing) for n in extra[:4])
        parts.append(f"the model lacks {len(extra)} of its tensors: {listed}{', ...' * (len(extra) > 4)}")
    return "; ".join(parts)


def _gradients(made: Restore, roles: Roles, found: ModelTensors) -> None:
    """Put gradients back, in the middle of an accumulation; what had none has none."""
    if roles.program is not None:
        raise CheckpointError(
            "it was saved with gradients, in the middle of an accumulation of eager code: load it without program=, or "
            "one that was saved between updates"
        )
    saved = {found.firsts[name]: name for name in made.manifest.values["gradients"]}
    for name, p in found.tensors.items():
        if not isinstance(p, nn.Parameter):
            continue
        if name not in saved:
            made.steps.append(partial(setattr, p, "grad", None))
            continue
        stored = GRADIENT + saved[name]
        t = torch.empty_like(bare(p) if isinstance(p, DistTensor) else p, requires_grad=False)
        spec = Spec(p.spec.shape, p.dtype, p.spec.layout) if isinstance(p, DistTensor) else None
        made.fill(stored, t, spec)
        made.steps.append(partial(setattr, p, "grad", t if spec is None else wrap(t, spec)))


# ---------------------------------------------------------------------------------------------- optimizers


def _optimizer(made: Restore, one: Optimizer, saved: Mapping[str, Any], found: ModelTensors) -> None:
    names, params, firsts = found.names, found.tensors, found.firsts
    _check_class(made, "optimizer", one, saved)
    groups, here = saved["groups"], group_names(one, names)
    if len(groups) != len(here):
        raise CheckpointError(f"the optimizer had {len(groups)} parameter groups, and has {len(here)}")
    for i, (group, listed) in enumerate(zip(groups, here, strict=True)):
        had = {firsts[n] for n in group["params"]}
        if had != {*listed}:
            extra, lacks = sorted({*listed} - had), sorted(had - {*listed})
            first = f"has {extra[0]}, which it did not have" if extra else f"lacks {lacks[0]}, which it had"
            raise CheckpointError(f"group {i} of the optimizer {first} when it was saved: make the same groups")
    binding = binding_of(one)
    if binding is not None:
        binding.follow(one)
    states: dict[str, dict[str, Any]] = {}
    if builtin(one):
        _of_a_kind(saved["states"])
    for name, entry in ((firsts[n], entry) for n, entry in saved["states"].items()):
        groups_of = (g for g, listed in zip(one.param_groups, here, strict=True) if name in listed)
        own: Mapping[str, Any] = next(groups_of, {})
        states[name] = _states(made, one, params[name], entry, own, binding)
    options = [decoded(g["options"], made.whole) for g in groups]

    def put() -> None:
        for group, given in zip(one.param_groups, options, strict=True):
            group.update((key, value) for key, value in given.items() if key != "param_names")  # in another order here
        for p in [p for p in one.state if names[id(p)] not in states]:
            del one.state[p]
        for name, entry in states.items():
            held = one.state[params[name]]  # the same dict: captured steps hold it
            held.clear()
            held.update(entry)

    made.steps.append(put)


def _of_a_kind(states: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises CheckpointError where a state is a tensor of one parameter and something else of another."""
    tensors: dict[str, tuple[str, bool]] = {}
    for name, entry in states.items():
        for key, data in entry.items():
            first, is_tensor = tensors.setdefault(key, (name, _is_tensor(data)))
            if data is not None and _is_tensor(data) is not is_tensor:
                raise CheckpointError(
                    f"the optimizer's {key} is a tensor for one of {first} and {name}, and not for the other"
                )


def _is_tensor(data: Any) -> bool:
    return isinstance(data, Mapping) and "$tensor" in data


def _states(
    made: Restore, one: Optimizer, p: Tensor, entry: Mapping[str, Any], group: Mapping[str, Any], binding: Any
) -> dict[str, Any]:
    """The states of a parameter, with memory for their tensors: what is there, where that fits."""
    before = one.state.get(p, {})
    if isinstance(p, DistTensor) and not (builtin(one) or binding.owns(p) or binding.replicates(p)):
        _per_element(made, one, p, entry)

    def get(key: str, name: str) -> Tensor:
        stored = made.manifest.tensors[name]
        spec = Spec(stored.shape, stored.dtype, Layout(made.mesh))
        owned = stored.ndim and isinstance(p, DistTensor) and (stored.shape == p.spec.shape or binding.owns(p))
        if owned:
            spec = Spec(stored.shape, stored.dtype, binding.state_spec(p).layout)
        held = before.get(key)
        if isinstance(held, Tensor) and _fits(held, spec):
            return made.fill(name, held)
        on_device = stored.ndim or group.get("capturable") or group.get("fused")
        here = made.mesh.coordinate(runtime.RT.rank)
        t = torch.empty(spec.local_shape(here), dtype=spec.dtype, device=p.device if on_device else "cpu")
        made.fill(name, t, spec)
        return wrap(t, spec) if owned else t

    return {key: decoded(data, partial(get, key)) for key, data in entry.items()}


def _per_element(made: Restore, one: Optimizer, p: DistTensor, entry: Any) -> None:
    """Raises CheckpointError for states of which this rank's part is not a part of the values."""

    def get(name: str) -> Tensor:
        stored = made.manifest.tensors[name]
        if math.prod(stored.shape) != 1 and stored.shape != p.spec.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(stored.shape)}, the parameter {tuple(p.spec.shape)}: a state of "
                f"{type(one).__name__} that is not one value per element cannot be cut for a parameter whose states "
                "are split. Load the model without the optimizer and begin with new states"
            )
        return torch.empty(0)

    decoded(entry, get)


def _fits(held: Tensor, spec: Spec) -> bool:
    if isinstance(held, DistTensor):
        return held.spec.layout == spec.layout and held.spec.shape == spec.shape and held.dtype is spec.dtype
    return spec.layout.is_replicated() and held.shape == spec.shape and held.dtype is spec.dtype


def _random(made: Restore) -> None:
    """The default generators last: what comes before may draw from them."""
    if generators := made.manifest.values.get("generators"):
        check_host_generators(generators)
        made.steps.append(partial(set_host_generators, generators))
    cpu = made.whole(f"{RANDOM}/cpu")
    made.steps.append(lambda: torch.random.set_rng_state(cpu))
    if made.mesh.device == "cuda" and f"{RANDOM}/cuda" in made.manifest.tensors:
        cuda = made.whole(f"{RANDOM}/cuda")
        made.steps.append(lambda: torch.cuda.set_rng_state(cuda))


__all__ = ["Restore", "Target", "misnamed", "plan_restore"]
