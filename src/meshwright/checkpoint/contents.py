"""What a checkpoint has of a model, optimizers, schedulers, loaders and a captured step."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer

from ..collective import Fact, together
from ..dispatch import disabled
from ..errors import CheckpointError
from ..layout import Layout, Spec
from ..local_tensor import bare
from ..mesh import Mesh
from ..ranks.generators import random_states
from ..resharding import executor
from ..resharding.planner import plan as plan_conversion
from ..shard.optimizers.blocks import opaque
from ..shard.optimizers.optimizer import binding_of
from ..shard.parameters.names import Names
from ..tensor import DistTensor, wrap
from .arrays import NAMES
from .files import as_stored
from .manifest import CONFIGURATIONS
from .merging import merge_state, reduced
from .values import encoded

Tensor = torch.Tensor
OPTIMIZER, OTHERS = "optimizer/", "other/"  # how names of tensors begin that are none of the model's
RANDOM, GRADIENT, EXTRA = OTHERS + "random", OTHERS + "gradient/", OTHERS + "extra/"


@dataclass(frozen=True)
class Roles:
    """What a user gives to ``save`` and ``load``, each kind as a list.

    Raises:
        CheckpointError: what is none of these.
    """

    model: nn.Module | None
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    program: Any

    @staticmethod
    def of(model: Any, optimizer: Any, scheduler: Any, loader: Any, program: Any) -> Roles:
        """From the arguments; a captured step brings its model and optimizers."""
        if program is not None:
            if not hasattr(program, "micro_step"):
                raise CheckpointError(
                    f"program= cannot be a {type(program).__name__}: give the step that mw.compile_step or "
                    "mw.capture_local returned"
                )
            model = program.model if model is None else model
            optimizer = program.optimizer if optimizer is None else optimizer
        if model is not None and not isinstance(model, nn.Module):
            raise CheckpointError(
                f"model= cannot be a {type(model).__name__}: give an nn.Module (of several, an nn.ModuleList)"
            )
        optimizers = [one for part in _listed(optimizer) for one in getattr(part, "parts", (part,))]
        for one in optimizers:
            if not isinstance(one, Optimizer):
                raise CheckpointError(
                    f"optimizer= cannot be a {type(one).__name__}: give a torch.optim.Optimizer or a list"
                )
        if optimizers and model is None:
            raise CheckpointError(
                "optimizer= needs model=: its states are saved by the names of the model's parameters"
            )
        for word, given in (("scheduler", scheduler), ("loader", loader)):
            for one in _listed(given):
                if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                    raise CheckpointError(
                        f"{word}= cannot be a {type(one).__name__}, which has no state_dict() and load_state_dict()"
                        + ("; see mw.shard_dataloader" if word == "loader" else "")
                    )
        return Roles(model, optimizers, _listed(scheduler), _listed(loader), program)

    def kinds(self) -> dict[str, list[str]]:
        """The classes of what was given, by the word that it was given as."""
        listed = {
            "model": _listed(self.model),
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "loader": self.loaders,
            "program": _listed(self.program),
        }
        return {f"{word}=": [kind_of(one) for one in ones] for word, ones in listed.items()}

    def distributed(self) -> Iterator[DistTensor]:
        """Distributed tensors of the model and the optimizers."""
        params = [p for one in self.optimizers for g in one.param_groups for p in g["params"]]
        of_model = () if self.model is None else (*self.model.parameters(), *self.model.buffers())
        yield from (t for t in (*of_model, *params) if isinstance(t, DistTensor))


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def kind_of(one: object) -> str:
    """The class of an object, as manifests name it."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


@dataclass
class Contents:
    """What is saved: tensors by name, with their specs; further names of them; and everything else as JSON."""

    mesh: Mesh
    tensors: dict[str, Tensor] = field(default_factory=dict)
    specs: dict[str, Spec] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, name: str, t: Tensor) -> str:
        """Take a tensor.  Returns what it is called: something else than ``name`` where that is taken."""
        if t.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values to save")
        if opaque(t):
            raise CheckpointError(
                f"{name} is a {type(t).__qualname__}, which holds several tensors: a checkpoint has plain ones. "
                "Save the model without the optimizer and begin with new states"
            )
        if not isinstance(t, DistTensor) and t.layout is not torch.strided:
            raise CheckpointError(f"{name} is a {t.layout} tensor: only dense tensors can be saved")
        if as_stored(t.dtype)[0] not in NAMES:
            raise CheckpointError(f"{name} is {t.dtype}, which a checkpoint cannot hold")
        name = next(n for i in itertools.count() if (n := f"{name}~{i}" if i else name) not in self.specs)
        self.specs[name] = stored_spec(t, self.mesh, name)
        self.tensors[name] = t
        return name

    def in_own_order(self) -> None:
        """Bring what is split by blocks to a plain split, so that a checkpoint knows no blocks.  All ranks call it."""
        for name, spec in self.specs.items():
            if spec.layout.blocks:
                split = spec.with_(layout=spec.layout.without_blocks())
                with torch.no_grad(), disabled():
                    t = executor.apply(plan_conversion(spec, split).steps, bare(self.tensors[name]))
                self.tensors[name], self.specs[name] = wrap(t, split), split


def stored_spec(t: Tensor, mesh: Mesh, name: str) -> Spec:
    """How a checkpoint says that a tensor lies; a plain one is the same on all ranks."""
    if not isinstance(t, DistTensor):
        return Spec(t.shape, t.dtype, Layout(mesh))
    if t.mesh != mesh:
        raise CheckpointError(f"{name} lies on {t.mesh!r}, others on {mesh!r}: a checkpoint has tensors of one mesh")
    if t.spec.layout.partial:
        raise CheckpointError(f"{name} is Partial ({t.spec!r}): reduce it with mw.reshard before it is saved")
    return Spec(t.spec.shape, t.spec.dtype, t.spec.layout)


def gather(roles: Roles, mesh: Mesh, gradients: bool) -> Contents:
    """What there is to be saved, on this rank; with gradients all ranks call it, since some are reduced.

    Raises:
        CheckpointError: what cannot be.
    """
    made = Contents(mesh)
    if roles.model is not None:
        found = model_tensors(roles.model)
        for name, t in found.tensors.items():
            made.put(name, t)
        made.aliases.update(found.aliases)
        made.values["model"] = {n: encoded(v, EXTRA + n, made.put) for n, v in found.extra.items()}
        made.values["config"] = configurations(roles.model)
        names = found.names
        if gradients:
            made.values["gradients"] = _gradients(found, made)
    if roles.optimizers:
        made.values["optimizer"] = [_optimizer(one, names, made) for one in roles.optimizers]
    for word, ones in (("scheduler", roles.schedulers), ("loader", roles.loaders)):
        if ones:
            made.values[word] = [
                {"class": kind_of(one), "state": encoded(one.state_dict(), f"{OTHERS}{word}/{i}", made.put)}
                for i, one in enumerate(ones)
            ]
    if roles.program is not None:
        made.values["program"] = merge_state(roles.program, made.put)
    for device, state in random_states(mesh.device).items():
        made.put(f"{RANDOM}/{device}", state)
    return made


def host_generators() -> dict[str, Any]:
    """States of Python's and NumPy's global generators, as JSON."""
    version, words, gauss = random.getstate()
    made: dict[str, Any] = {"python": [version, list(words), gauss]}
    state: Any = numpy.random.get_state()
    if isinstance(state, tuple):
        kind, keys, *others = state
        made["numpy"] = [kind, keys.tolist(), *others]
    return made


def set_host_generators(saved: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's global generators where they were."""
    python, of_numpy = _host_states(saved)
    random.setstate(python)
    if of_numpy is not None:
        numpy.random.set_state(of_numpy)


def check_host_generators(saved: Mapping[str, Any]) -> None:
    """Raise something for states that :func:`set_host_generators` cannot take."""
    python, of_numpy = _host_states(saved)
    random.Random().setstate(python)
    if of_numpy is not None:
        numpy.random.RandomState().set_state(of_numpy)


def _host_states(saved: Mapping[str, Any]) -> tuple[Any, Any]:
    version, words, gauss = saved["python"]
    if "numpy" not in saved:
        return (version, tuple(words), gauss), None
    kind, keys, *others = saved["numpy"]
    return (version, tuple(words), gauss), (kind, numpy.array(keys, dtype=numpy.uint32), *others)


# ---------------------------------------------------------------------------------------------- models


@dataclass
class ModelTensors:
    """Parameters and persistent buffers of a model.

    Attributes:
        tensors: by their first names.
        aliases: further name to the first one, of tied tensors.
        extra: what ``get_extra_state()`` of modules returns, by name of the module.
        names: id of a parameter to its first name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def firsts(self) -> dict[str, str]:
        """Every name to the first one."""
        return {n: n for n in self.tensors} | self.aliases


def model_tensors(model: nn.Module) -> ModelTensors:
    """What of a model is saved: what is in its ``state_dict()``.  Raises CheckpointError for names that are taken."""
    made, names = ModelTensors(), Names(model)
    for name, first in names.all.items():
        t = names.tensors[first]
        if name.startswith((OPTIMIZER, OTHERS)):
            raise CheckpointError(f"{name}: names that begin with {OPTIMIZER!r} or {OTHERS!r} are taken: rename it")
        if not any(
            key in module._parameters or key not in module._non_persistent_buffers_set
            for module, key, _ in names.places(first)
        ):
            continue
        if name == first:
            made.tensors[name] = t
            made.names[id(t)] = name
        else:
            made.aliases[name] = first
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            made.extra[prefix] = module.get_extra_state()
    return made


def _gradients(found: ModelTensors, made: Contents) -> list[str]:
    """The names of the parameters that have one.  What is Partial is reduced."""
    held = {n: g for n, t in found.tensors.items() if isinstance(t, nn.Parameter) and (g := t.grad) is not None}
    with together(made.mesh, "save", fix="run the same backwards on all ranks, and zero_grad() on all") as facts:
        facts += [
            Fact(f"the gradient of {n}", repr(g.spec if isinstance(g, DistTensor) else g.shape))
            for n, g in held.items()
        ]
    for name, g in held.items():
        made.put(
            GRADIENT + name, reduced(bare(g), g.spec) if isinstance(g, DistTensor) and g.spec.layout.partial else g
        )
    return list(held)


def configurations(model: nn.Module) -> dict[str, str]:
    """Of a model of transformers, the files that ``from_pretrained`` reads beside the weights: name to text."""
    made = {}
    for file in CONFIGURATIONS:
        part = file.removesuffix(".json")
        text = getattr(getattr(model, part, None), "to_json_string", None)
        if text is not None:
            data = json.loads(text())
            if part == "config" and not data.get("architectures"):
                data["architectures"] = [type(model).__name__]
            made[file] = json.dumps(data, indent=2, sort_keys=True) + "\n"
    return made


# ---------------------------------------------------------------------------------------------- optimizers


def _optimizer(one: Optimizer, names: Mapping[int, str], made: Contents) -> dict[str, Any]:
    groups = group_names(one, names)
    binding = binding_of(one)
    if binding is not None and (refused := binding.apart.refusal("a checkpoint")):
        raise CheckpointError(refused)
    options = [
        {k: encoded(v, f"{OTHERS}option/{kind_of(one)}.{k}/{i}", made.put) for k, v in g.items() if k != "params"}
        for i, g in enumerate(one.param_groups)
    ]
    states = {}
    for p, state in one.state.items():
        if id(p) not in names:
            raise CheckpointError(f"{kind_of(one)} has a state for {_unnamed(p)}, which is none of its parameters")
        name = names[id(p)]
        states[name] = {k: encoded(v, f"{OPTIMIZER}{name}/{k}", made.put) for k, v in state.items()}
    return {
        "class": kind_of(one),
        "groups": [{"params": listed, "options": given} for listed, given in zip(groups, options, strict=True)],
        "states": states,
    }


def group_names(one: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Names of the parameters of each group.  Raises CheckpointError for one that is none of the model's."""
    for g in one.param_groups:
        for p in g["params"]:
            if id(p) not in names:
                raise CheckpointError(
                    f"{kind_of(one)} updates {_unnamed(p)}, which is none of the model's parameters: give the model "
                    "that it was made from (of several, an nn.ModuleList)"
                )
    return [[names[id(p)] for p in g["params"]] for g in one.param_groups]


def _unnamed(p: Tensor) -> str:
    return f"a parameter of shape {tuple(p.shape)}"


__all__ = [
    "GRADIENT", "OPTIMIZER", "OTHERS", "RANDOM", "Contents", "ModelTensors", "Roles", "check_host_generators",
    "configurations", "gather", "group_names", "host_generators", "kind_of", "model_tensors",
    "set_host_generators", "stored_spec",
]  # fmt: skip
