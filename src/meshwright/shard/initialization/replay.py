"""A recording done again on tensors with memory: what is sharded is drawn and computed shard by shard.

A tensor that becomes a parameter, and what that is computed from element by element, is distributed from the start.
Everything else is computed whole, on every rank, as one device does.  Random numbers are those of one device: also
what a constructor drew in vain (for weights that it replaced later) is drawn again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...compat import tree_leaves, tree_map_only
from ...errors import ShardError
from ...generator.stream import drawing, materialize, skip
from ...layout import Spec
from ...ranks import runtime
from ...tensor import DistTensor, wrap
from ...tensor.api import unshard
from .recording import INITIALISERS, Constant, RecordedCall, Recording, Ref, needed, unrecorded

Tensor = torch.Tensor
_ATEN = torch.ops.aten
_CONSTANT = {"empty", "zeros", "ones", "full"}
_DRAWN = {"rand": "uniform_", "randn": "normal_"}
_FILLS = {"uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "bernoulli_"}
_COPIES = {"copy_", "clone", "_to_copy", "fill_", "zero_", "full_like", "zeros_like", "ones_like", "empty_like"}
_SAME = {"detach", "alias", "lift_fresh", "view_as"}
_LIKE = {"rand_like", "randn_like"}


class Replay:
    """Runs the entries of a recording that give values to some tensors.

    Args:
        recording: what constructors did.
        targets: references of the tensors that need values; those that are distributed with what takes the values.
        device: where everything else is computed.
        draws: use up the random numbers of what is not needed, too.
    """

    def __init__(
        self, recording: Recording, targets: Mapping[Ref, DistTensor | None], device: Any, draws: bool = True
    ) -> None:
        self.recording, self.targets, self.device, self.draws = recording, targets, torch.device(device), draws
        self.placed: set[Ref] = set()  # targets that were filled in place
        self.tensors: dict[int, dict[Ref, Tensor]] = {}
        self.homes: dict[int, Ref] = {}  # memory to the tensor that it was made as
        self.written: set[int] = set()
        wanted = {r.memory for r in targets}
        entries = recording.entries
        self.kept = {id(e) for e in needed(entries, wanted)}
        self.wishes = self._wished([e for e in entries if id(e) in self.kept])
        self.last = {m: i for i, e in enumerate(entries) if id(e) in self.kept for m in (*e.reads, *e.makes)}
        for m in wanted:
            self.last.pop(m, None)

    def _wished(self, entries: Sequence[RecordedCall]) -> dict[int, Spec]:
        """Memory to the layout in which it is made: that of the parameter that it becomes."""
        wishes: dict[int, Spec] = {}
        shapes: dict[int, tuple[int, ...]] = {}
        for ref, t in self.targets.items():
            if t is not None:
                wishes[ref.memory], shapes[ref.memory] = t._spec, ref.shape
        for e in reversed(entries):
            into = [m for m in (*e.makes, *e.writes) if m in wishes]
            if not into or not _elementwise(e.func):
                continue
            for r in _refs(e):
                if r.shape == shapes[into[0]] and r.memory not in wishes:
                    wishes[r.memory], shapes[r.memory] = wishes[into[0]], r.shape
        return wishes

    def run(self) -> dict[Ref, Tensor]:
        """The values of the targets."""
        with unrecorded(), torch.no_grad(), torch.device(self.device):
            for i, e in enumerate(self.recording.entries):
                if e.seed is not None:
                    torch.manual_seed(e.seed)
                if id(e) in self.kept:
                    self._run(e)
                elif e.random and self.draws:
                    self._in_vain(e)
                for m in e.reads | e.makes:
                    if self.last.get(m) == i:
                        self.tensors.pop(m, None)
            return {ref: self._value(ref) for ref in self.targets if ref.memory in self.written}

    def _run(self, e: RecordedCall) -> None:
        name = e.func.__name__.partition(".")[0]
        args, kwargs = self._filled(e, e.args), self._filled(e, e.kwargs)
        self.written |= e.writes
        if not e.reads and len(e.outputs) == 1 and not any(isinstance(a, Tensor) for a in tree_leaves((args, kwargs))):
            self._keep(e.outputs[0], self._factory_result(e, name, args, kwargs))
            if name not in ("empty", "empty_strided", "empty_permuted"):
                self.written |= e.makes
            return
        if not e.writes and not e.makes and all(r in self.tensors.get(r.memory, {}) for r in e.outputs):
            return
        outs = self._called(e, name, args, kwargs)
        for ref, value in zip(e.outputs, outs, strict=True):
            if ref.memory in e.makes or ref not in self.tensors[ref.memory]:
                self._keep(ref, value)
        if not name.startswith(("empty_like", "new_empty")):
            self.written |= e.makes

    def _factory_result(self, e: RecordedCall, name: str, args: Any, kwargs: Any) -> Tensor:
        """What a factory gives: the part of a rank, where it becomes a parameter."""
        ref = e.outputs[0]
        wish = self.wishes.get(ref.memory)
        if wish is None or wish.shape != ref.shape:
            empty = name.startswith("empty")
            made: Tensor = e.func(*args, **kwargs)
            return made.zero_() if empty else made
        target = self.targets.get(ref)
        spec = wish.with_(dtype=ref.dtype).untyped()
        here = spec.mesh.coordinate(runtime.RT.rank)
        factory: Any = functools.partial(e.func, *args, **kwargs)
        if name in _CONSTANT:
            value = args[1] if name == "full" else 1 if name == "ones" else 0
            factory = functools.partial(torch.full, fill_value=value, device=self.device)
        elif name in _DRAWN:
            generator = kwargs.get("generator")
            factory = functools.partial(getattr(torch, name), device=self.device, generator=generator)
        else:
            factory = lambda shape, dtype: e.func(*args, **kwargs)  # noqa: E731
        local = materialize(factory, ref.shape, ref.dtype, spec, here)
        made = wrap(local, spec)
        if target is not None and target.dtype is ref.dtype:  # filled where it stays
            home = target.detach()
            home.copy_(made)
            self.placed.add(ref)
            return home
        return made

    def _called(self, e: RecordedCall, name: str, args: Any, kwargs: Any) -> list[Tensor]:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, DistTensor)]
        if not given or _elementwise(e.func) or _is_view(e):
            out = e.func(*args, **kwargs)
        else:  # what mixes elements is computed of the whole, so that its bits are those of one device
            whole = {id(t): unshard(t) for t in given}
            out = e.func(*tree_map_only(DistTensor, lambda t: whole[id(t)], args),
                         **tree_map_only(DistTensor, lambda t: whole[id(t)], kwargs))  # fmt: skip
            for ref in _refs(e):
                if ref.memory in e.writes and isinstance(t := self._value(ref), DistTensor):
                    t.copy_(whole[id(t)])
            out = [] if e.writes else out
        return [t for t in tree_leaves(out) if isinstance(t, Tensor)] if e.makes or not e.writes else [
            self._value(r) for r in e.outputs
        ]  # fmt: skip

    def _keep(self, ref: Ref, value: Tensor) -> None:
        self.tensors.setdefault(ref.memory, {})[ref] = value
        self.homes.setdefault(ref.memory, ref)

    def _value(self, ref: Ref) -> Tensor:
        found = self.tensors[ref.memory].get(ref)
        if found is None:  # a view that no op of its own made
            home = self.tensors[ref.memory][self.homes[ref.memory]]
            whole = unshard(home) if isinstance(home, DistTensor) else home
            found = whole.as_strided(ref.shape, ref.stride, ref.offset)
            if not isinstance(home, DistTensor):
                self.tensors[ref.memory][ref] = found
        return found

    def _filled(self, e: RecordedCall, a: Any) -> Any:
        """Arguments with the tensors that references mean, on the device."""
        a = tree_map_only(Ref, self._value, a)
        a = tree_map_only(Constant, functools.partial(_unchanged, device=self.device), a)
        a = tree_map_only(torch.device, lambda d: self.device if d.type == "meta" else d, a)
        if isinstance(a, dict) and e.outputs and _takes_dtype(e.func):
            a["dtype"] = e.outputs[0].dtype  # the default dtype may be another one now
        return a

    def _in_vain(self, e: RecordedCall) -> None:
        """Use up the random numbers of a call whose values nobody has any more."""
        name = e.func.__name__.partition(".")[0]
        generator = e.kwargs.get("generator")
        ref = e.outputs[0] if e.outputs else next(iter(_refs(e)))
        if name in _FILLS | set(_DRAWN) | _LIKE and not any(isinstance(a, Ref) for a in e.args[1:]):
            kind = {**_DRAWN, "rand_like": "uniform_", "randn_like": "normal_"}.get(name, name)
            numbers = e.args[1:] if name in _FILLS else ()
            like = torch.empty(0, dtype=ref.dtype, device=self.device)
            named = {k: v for k, v in e.kwargs.items() if k != "generator"} if name in _FILLS else {}
            draw = drawing(kind, (*numbers, *named.values()), ref.dtype.is_complex)
            skip(math.prod(ref.shape), like, draw, kind, generator)
            return

        def make(r: Ref) -> Tensor:
            return torch.zeros(r.shape, dtype=r.dtype, device=self.device)

        args, kwargs = tree_map_only(Ref, make, (e.args, e.kwargs))
        held, self.tensors = self.tensors, {}
        try:
            e.func(*self._filled(e, args), **self._filled(e, dict(kwargs)))
        finally:
            self.tensors = held


@functools.cache
def _takes_dtype(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    return schema is not None and any(a.name == "dtype" for a in schema.arguments)


def _refs(e: RecordedCall) -> list[Ref]:
    return [a for a in tree_leaves((e.args, e.kwargs)) if isinstance(a, Ref)]


def _is_view(e: RecordedCall) -> bool:
    return not e.makes and not e.writes


@functools.cache
def _elementwise(func: Any) -> bool:
    """Whether each element of the result comes from the same element of each argument, or from a stream of them."""
    if func in INITIALISERS:
        return bool(func.__name__ == "_no_grad_trunc_normal_")
    name = func.__name__.partition(".")[0]
    return torch.Tag.pointwise in func.tags or name in _FILLS | _COPIES | _SAME | _LIKE


def _unchanged(c: Constant, device: Any) -> Tensor:
    if c.value._version != c.version:
        raise ShardError(
            "shard_module: a tensor that the constructor copied to the meta device was written to since. Copy a clone."
        )
    return c.value.to(device)


__all__ = ["Replay"]
