"""Precision by layout: the dtype in which ops see a parameter, and that in which its gradient is reduced.

A parameter is *stored* in its own dtype.  Ops see it cast to ``compute``: cast first and gathered then, so that what is
sent has that dtype.  Backwards, contributions are brought to ``reduce``, reduced, and become a gradient as stored.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.nn.utils.rnn import PackedSequence

from ...collective import travelled
from ...errors import ShardError
from ...layout import CASTS, Float8, Wire, wire_name
from .names import Names, inside, outermost

Tensor = torch.Tensor
_KNOWN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Precision:
    """Dtypes of compute, reduction and communication of a model.

    Parameters keep the dtype they are stored in. Optimizer states and updates use that dtype.

    FSDP2: `MixedPrecisionPolicy(param_dtype, reduce_dtype, output_dtype, cast_forward_inputs)` is
    `Precision(compute, reduce, outputs, inputs)`.

    Attributes:
        compute: Dtype in which ops see parameters, and in which they are all-gathered. Default: the stored dtype.
        reduce: Dtype in which gradients of parameters are reduced over ranks and summed over micro-batches. Default:
            the stored dtype.
        accumulate: Least dtype in which Partial activations and gradients of activations are summed over ranks. Values
            computed from a value inherit it; the widest wins. Default: their own dtype.
        inputs: Cast floating-point inputs to `compute`: those of the model (of the outermost modules a glob matches),
            and of each module that has parameters.
        outputs: Dtype to which floating-point outputs of the model (of the outermost modules a glob matches) are cast.
        grad_comm: Format in which gradients of parameters are sent: `torch.bfloat16`, `torch.float16` or a
            [Float8][meshwright.Float8]. The receiving rank sums them in float32. Default: the backend reduces in
            `reduce`.
        gather: Format in which sharded parameters are all-gathered, of the same kinds. Ops see what arrives. Default:
            `compute`.

    Raises:
        ShardError: If a dtype is none of float16, bfloat16, float32 and float64, or a format is none of the above.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})
        policy = mw.Precision(compute=torch.bfloat16, reduce=torch.float32)


        def output_dtype():
            model = mw.shard_module(nn.Linear(4, 4), mesh, precision=policy)
            return model.weight.dtype, model(torch.ones(2, 4)).dtype


        assert mw.simulate(output_dtype, mesh)[0] == (torch.float32, torch.bfloat16)
        ```
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    inputs: bool = True
    outputs: torch.dtype | None = None
    grad_comm: Wire | None = None
    gather: Wire | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "accumulate", "outputs"):
            value = getattr(self, name)
            if value is not None and value not in _KNOWN:
                kinds = ", ".join(map(str, _KNOWN))
                raise ShardError(f"mw.Precision: {name}={value!r}: one of {kinds} was expected, or None")
        for name in ("grad_comm", "gather"):
            value = getattr(self, name)
            if value is not None and value not in CASTS and not isinstance(value, Float8):
                raise ShardError(
                    f"mw.Precision: {name}={value!r}: {', '.join(map(str, CASTS))} or mw.Float8() was expected, or None"
                )
        if not isinstance(self.inputs, bool):
            raise ShardError(f"mw.Precision: inputs={self.inputs!r}: True or False was expected")


Precisions = Precision | Mapping[str, Precision]
PRECISION_WANTED = (
    (Precision, Mapping, NoneType),
    "give a mw.Precision, or a dict, glob of names of parameters or modules to those",
)


class Dtypes(NamedTuple):
    """Of one parameter: the dtypes in which ops see it, in which its gradient is reduced, and in which what is made of
    it is summed over ranks at least; in what its gradient travels, as its spec says too, and in what it is gathered."""

    compute: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype | None = None
    grad_comm: Wire | None = None
    gather: Wire | None = None

    def __str__(self) -> str:
        sent = "" if self.grad_comm is None else f", sent as {wire_name(self.grad_comm)}"
        sent += "" if self.gather is None else f", gathered as {wire_name(self.gather)}"
        return f"computed in {self.compute}, reduced in {self.reduce}, Partial in {self.accumulate or 'its own'}{sent}"


def put(own: Tensor, seen: Tensor, wire: Wire | None = None) -> None:
    """Bring what was written to a parameter as seen to the parameter: elements that were not keep what a cast, and the
    format in which it was gathered, loses."""
    if wire is not None or seen.dtype is not own.dtype:
        before = own.to(seen.dtype)
        seen = torch.where(seen == (before if wire is None else travelled(before, wire)), own, seen)
    own.copy_(seen)


@dataclass(frozen=True)
class Casts:
    """What precisions mean for one model.

    Attributes:
        dtypes: first name of each parameter that is seen or reduced otherwise than as it is stored.
        inputs, outputs: name of a module to what its inputs, or outputs, are cast to.
    """

    dtypes: Mapping[str, Dtypes]
    inputs: Mapping[str, torch.dtype]
    outputs: Mapping[str, torch.dtype]

    def parts(self) -> Iterator[Any]:
        """What ranks have alike."""
        for said in (self.dtypes, self.inputs, self.outputs):
            yield from said.items()

    def attach(self, model: nn.Module) -> Iterator[Any]:
        """Have modules cast what they are given and return; the handles."""
        modules = dict(model.named_modules())
        for name, dtype in self.inputs.items():
            yield modules[name].register_forward_pre_hook(CastInputs(dtype), prepend=True, with_kwargs=True)
        for name, dtype in self.outputs.items():
            yield modules[name].register_forward_hook(CastOutputs(dtype))


def casts_of(model: nn.Module, names: Names, given: Precisions | None) -> Casts:
    """What ``precision=`` says of a model; of several globs that match a name the last one counts.

    Raises:
        ShardError: a glob that matches nothing; a parameter that is no floating-point one, by its name.
    """
    if given is None:
        return Casts({}, {}, {})
    globs = {"*": given} if isinstance(given, Precision) else given
    for glob, policy in globs.items():
        if not isinstance(policy, Precision):
            raise ShardError(f"precision: {glob!r} is given {policy!r}: a mw.Precision was expected")
    params, chosen = names.params, names.said(globs, "precision")
    for name in chosen:
        if name in globs and not names.tensors[params[name]].is_floating_point():
            raise ShardError(
                f"precision: {name} is {names.tensors[params[name]].dtype}, and only floating-point ones can be cast"
            )
    modules = dict(model.named_modules())
    inputs, outputs = _around(names, modules, globs)
    dtypes = _dtypes(names, params, chosen)
    chosen = {first: chosen[name] for name, first in params.items() if name in chosen}
    for name, module in modules.items():
        own = {names.all[f"{name}.{k}" if name else k] for k, p in module._parameters.items() if p is not None}
        own = {n for n in own if names.tensors[n].is_floating_point()}
        seen = {dtypes[n].compute if n in dtypes else names.tensors[n].dtype for n in own}
        if len(seen) == 1 and any(n in chosen and chosen[n].inputs for n in own):
            inputs[name] = seen.pop()
    return Casts(dtypes, inputs, outputs)


def _around(
    names: Names, modules: Mapping[str, nn.Module], globs: Mapping[str, Precision]
) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """Names of the outermost modules that globs name, to what their inputs, and their outputs, are cast to."""
    inputs: dict[str, torch.dtype] = {}
    outputs: dict[str, torch.dtype] = {}
    first = {id(module): name for name, module in modules.items()}
    for glob, policy in globs.items():
        for name in outermost([n for n in names.modules if fnmatch.fnmatchcase(n, glob)]):
            m = first[id(names.modules[name])]  # a module that is there twice is called under its first name
            for other in [n for n in inputs if inside(n, m)]:
                del inputs[other]
            if policy.inputs and policy.compute is not None:
                inputs[m] = policy.compute
            if policy.outputs is not None:
                outputs[m] = policy.outputs
    return inputs, outputs


def _dtypes(names: Names, params: Mapping[str, str], chosen: Mapping[str, Precision]) -> dict[str, Dtypes]:
    """By first names.  Raises ShardError where the names of a tied parameter are told different things."""
    found: dict[str, Dtypes] = {}
    for name, first in params.items():
        t, policy = names.tensors[first], chosen.get(name, Precision())
        if t.is_floating_point():
            compute, reduce = policy.compute or t.dtype, policy.reduce or t.dtype
            said = Dtypes(compute, reduce, policy.accumulate, policy.grad_comm, policy.gather)
            if found.setdefault(first, said) != said:
                raise ShardError(
                    f"precision: {first} and {name} are one parameter (tied), and would be {found[first]}, and {said}: "
                    "end with globs that say the same of both"
                )
    named = {params[name] for name in chosen}
    return {first: said for first, said in found.items() if first in named}


def check_autocast(named: Iterable[tuple[str, Dtypes]], device: str) -> None:
    """Raises ShardError where autocast would compute in another dtype than the precision of parameters says."""
    if not torch.is_autocast_enabled(device):
        return
    asked = torch.get_autocast_dtype(device)
    for name, dtypes in named:
        if dtypes.compute not in (asked, torch.float32, torch.float64):
            raise ShardError(
                f"{name} is computed in {dtypes.compute} (precision=), and autocast asks for {asked}: leave one of "
                "them out, or let both say the same"
            )


@dataclass
class CastInputs:
    """Casts the floating-point tensors that a module is given.  An object: it can be copied and pickled."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple([_cast(a, self.dtype) for a in args]), {k: _cast(v, self.dtype) for k, v in kwargs.items()}


@dataclass
class CastOutputs:
    """Casts the floating-point tensors that a module returns."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A value with the floating-point tensors in it cast: in containers of the kinds that they were, copied."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, PackedSequence):
        return value.to(dtype)
    if isinstance(value, Mapping):
        made = {k: _cast(v, dtype) for k, v in value.items()}
        if all(made[k] is v for k, v in value.items()):
            return value
        copied: Any = copy.copy(value)  # with the attributes, and the default, of its class
        for k, v in made.items():
            copied[k] = v
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(v, dtype) for v in value))
    if type(value) in (list, tuple):
        return type(value)(_cast(v, dtype) for v in value)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = [_cast(v, dtype) for v in value]
        return copied
    attributes = getattr(value, "__dict__", None)
    if attributes and (is_dataclass(value) or isinstance(value, SimpleNamespace)) and not isinstance(value, type):
        changed = {k: c for k, v in attributes.items() if (c := _cast(v, dtype)) is not v}
        copied = copy.copy(value) if changed else value
        for k, v in changed.items():
            object.__setattr__(copied, k, v)
        return copied
    return value


__all__ = [
    "PRECISION_WANTED",
    "Casts",
    "Dtypes",
    "Precision",
    "Precisions",
    "casts_of",
    "check_autocast",
    "put",
]
