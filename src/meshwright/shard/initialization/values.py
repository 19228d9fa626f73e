"""Memory and values for a model that was built on the meta device; an error for what nothing wrote."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ... import compat
from ...dispatch import disabled
from ...errors import ShardError
from ...local_tensor import bare
from ...ranks import runtime
from ...ranks.generators import random_states, set_random_states
from ...tensor import DistTensor
from ...tensor.api import unshard
from ..parameters.names import Names
from .libraries import initialisation_of
from .recording import Recording, Ref, needed, recorded
from .replay import Replay

Tensor = torch.Tensor
Init = Callable[[nn.Module], Any] | str | None
LOAD = "load"
_AWAITED = "_awaits_values"  # in the dict of a module: tensor names to how often they had been written to
_WAITING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have such
_HOOK = "_checks_values"
_FIX = (
    'build the model under `with torch.device("meta")` after mw.init_mesh, so that its constructor is recorded; or '
    'give the modules a reset_parameters(); or pass init=fn; or pass init="load" and call mw.load_weights'
)


@dataclass(frozen=True)
class ValueOrigin:
    """A tensor on the meta device before it gets memory: what is known of its values.

    Attributes:
        ref, recording: where its constructor was recorded; None where it was not.
        version: how often it had been written to.
    """

    ref: Ref | None
    recording: Recording | None
    version: int


def origins_of(tensors: Mapping[str, Tensor]) -> dict[str, ValueOrigin]:
    """What is known of the values of the meta tensors among ``tensors``, by name.

    Raises:
        ShardError: a tensor that was recorded and then written to where nothing is recorded.
    """
    found = {}
    for name, t in tensors.items():
        if not t.is_meta:
            continue
        known = recorded(t)
        complete = known is not None and _complete(known[1], known[0].memory)
        if known is None or (not complete and known[0].memory not in known[1].lost):
            found[name] = ValueOrigin(None, None, t._version)
            continue
        ref, recording = known
        if not recording.has_all_of(t, ref.memory):
            raise ShardError(
                f'shard_module: {name} was written to on the meta device outside of `with torch.device("meta")`, where '
                "nothing is recorded. Do it inside, with model.apply(fn), or after shard_module."
            )
        found[name] = ValueOrigin(ref, recording, t._version)
    return found


def _complete(recording: Recording, memory: int) -> bool:
    """Whether all that a tensor was made from is in the recording."""
    entries = needed(recording.entries, {memory})
    made = {m for e in entries for m in e.makes}
    return memory in made and all(m in made for e in entries for m in e.reads)


def digest_of(origins: Mapping[str, ValueOrigin]) -> int:
    """What constructors did, as a number that all ranks must share."""
    found = 0
    for recording in _recordings(origins):
        for e in recording.entries:
            shapes = [o.shape for o in e.outputs]
            found = zlib.crc32(f"{e.func} {shapes} {_numbers((e.args, e.kwargs))}".encode(), found)
    return found


def _numbers(a: Any) -> list[Any]:
    return [x for x in compat.tree_leaves(a) if isinstance(x, bool | int | float | str)]


def _recordings(origins: Mapping[str, ValueOrigin]) -> list[Recording]:
    found = {id(o.recording): o.recording for o in origins.values() if o.recording is not None}
    return sorted(found.values(), key=lambda r: r.number)


def become(t: Tensor, made: Tensor) -> None:
    """Let ``t``, which is on the meta device, be the plain tensor ``made``: who holds it goes on with it.

    Raises:
        ShardError: a graph holds ``t``.
    """
    with torch.no_grad(), disabled():
        hooks, after = t._backward_hooks, t._post_accumulate_grad_hooks
        t.grad = None
        made.requires_grad_(t.requires_grad)
        try:
            compat.swap_tensor_impl(t, made)
        except RuntimeError as error:
            raise ShardError(
                f"shard_module: a parameter of shape {tuple(t.shape)} on the meta device is part of a graph. Delete "
                "what was computed from it first."
            ) from error
        t._backward_hooks = hooks
        t._post_accumulate_grad_hooks = after


def give_values(model: nn.Module, names: Names, origins: Mapping[str, ValueOrigin], device: Any, init: Init) -> None:
    """Give the tensors that were on the meta device their values: those that one device gets from the same seed.

    Distributed tensors among them have memory already.

    Raises:
        ShardError: a tensor that nothing wrote, by name.
    """
    now = names.current()
    there = {n: t for n, t in now.items() if n in origins}
    known = {n: o for n, o in origins.items() if o.ref is not None}
    kept = {n for n, m, k in _buffers(names) if k in m._non_persistent_buffers_set}
    if init == LOAD:
        known = {n: o for n, o in known.items() if n in kept}
    elif init is not None:
        known = {n: o for n, o in known.items() if not isinstance(names.tensors[n], nn.Parameter)}
    else:
        _raise_where_failed(origins)
    written = _replayed(known, there, device, draws=init is None)
    for t in there.values():
        if t.is_meta:
            become(t, torch.zeros(t.shape, dtype=t.dtype, device=device))
    left = {n: t for n, t in there.items() if n not in written}
    before = {n: t._version for n, t in left.items()}
    if init == LOAD:
        _await(model, names, left)
        computed = {id(t) for n, t in left.items() if n in kept}
        for module in construction_order(model) if computed else ():
            computed -= _initialise(module, computed)
        return
    if callable(init):
        with torch.no_grad():
            init(model)
    elif init is None:
        _reset(model, left)
        _refuse_lost(left, origins, before)
    # Of a part without elements no write is counted.
    nothing = [n for n, t in left.items() if t._version == before[n] and bare(t).numel()]
    if nothing:
        of = {n: type(names.places(n)[0][0]).__name__ for n in nothing}
        raise ShardError(
            "shard_module: on the meta device, and neither a recorded constructor nor reset_parameters() nor init= "
            f"writes {', '.join(f'{n} of {of[n]}' for n in nothing)}: {_FIX}"
        )


def _raise_where_failed(origins: Mapping[str, ValueOrigin]) -> None:
    failed = [line for recording in _recordings(origins) for line in recording.failed]
    if failed:
        raise ShardError(
            f"shard_module: on the meta device {failed[0]}. Build the model on the CPU, or pass init=fn; or pass "
            'init="load" and call mw.load_weights.'
        )


def _buffers(names: Names) -> Iterator[tuple[str, nn.Module, str]]:
    for name in names.tensors:
        for module, key, _ in names.places(name):
            if key in module._buffers:
                yield name, module, key


def _replayed(known: Mapping[str, ValueOrigin], there: Mapping[str, Tensor], device: Any, draws: bool) -> set[str]:
    """Give values to the tensors whose constructors were recorded; the names of those that something wrote."""
    written = set()
    for recording in _recordings(known):
        of = {n: o.ref for n, o in known.items() if o.recording is recording and o.ref is not None}
        targets = {ref: t if isinstance(t := there[n], DistTensor) else None for n, ref in of.items()}
        replay = Replay(recording, targets, device, draws)
        with _from_its_start(recording, str(device)) if draws else contextlib.nullcontext():
            values = replay.run()
        for name, ref in of.items():
            if ref not in values:
                continue
            written.add(name)
            t, value = there[name], values[ref]
            if isinstance(t, DistTensor):
                if ref not in replay.placed:
                    with torch.no_grad():
                        t.detach().copy_(value)
            else:
                become(t, unshard(value).detach())
    return written


@contextlib.contextmanager
def _from_its_start(recording: Recording, device: str) -> Iterator[None]:
    """A second model of one recording draws as on one device, where nothing was drawn or seeded since the first."""
    states = random_states(device)
    if recording.end and all(k in recording.end and torch.equal(s, recording.end[k]) for k, s in states.items()):
        set_random_states(recording.start)
    else:
        recording.start = states
    yield
    recording.end = random_states(device)


# ---------------------------------------------------------------------------------------------- without a recording


def _reset(model: nn.Module, left: Mapping[str, Tensor]) -> None:
    """Call ``reset_parameters()`` of the modules that have tensors without values, children before their parents."""
    done: set[int] = set()
    lacks = {id(t) for t in left.values()}
    for module in construction_order(model):
        own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        deep = not own and any(id(t) in lacks for t in module.parameters())
        if callable(reset) and (deep or any(id(t) in lacks for t in own)):
            with _apart(module, done):
                reset()
            done.update(id(p) for p in module.parameters(recurse=False))
        lacks -= _initialise(module, lacks)


def _initialise(module: nn.Module, lacking: set[int]) -> set[int]:
    """Let a model of a library initialise its own tensors among those with the ids ``lacking``, which it returns."""
    found = initialisation_of(module) if lacking else None
    own = lacking & {id(t) for t in (*module.parameters(), *module.buffers())} if found is not None else set()
    if found is not None and own:
        with torch.no_grad():
            found.run(module, own)
    return own


@contextlib.contextmanager
def _apart(module: nn.Module, done: set[int]) -> Iterator[None]:
    """Let a module draw for tied parameters that have their values already, but into scratch memory."""
    tied = {k: p for k, p in module._parameters.items() if p is not None and id(p) in done}
    module._parameters.update({k: copy.deepcopy(p) for k, p in tied.items()})
    try:
        yield
    finally:
        module._parameters.update(tied)


def construction_order(model: nn.Module) -> Iterable[nn.Module]:
    """Children before their parent, which initialises its own parameters after having made them."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        if id(module) not in found:
            for child in module.children():
                visit(child)
            found[id(module)] = module

    visit(model)
    return list(found.values())


def _refuse_lost(left: Mapping[str, Tensor], origins: Mapping[str, ValueOrigin], before: Mapping[str, int]) -> None:
    """Say of which tensors the values are lost that they had before reset_parameters() wrote to them.

    Their constructor was not recorded, and wrote more often than reset_parameters(), or made them with their values.

    Raises:
        ShardError: for a model of which another part was recorded.
    """
    lost = [
        n
        for n, t in left.items()
        if t._version > before[n] and not 0 < origins[n].version <= t._version - before[n]
    ]  # fmt: skip
    if not lost:
        return
    named = f"{', '.join(lost[:8])}{' and others' if lost[8:] else ''}"
    if any(o.recording is not None for o in origins.values()):
        raise ShardError(
            f'shard_module: {named} got values on the meta device outside of `with torch.device("meta")`, where '
            "nothing is recorded. Do it inside, or after shard_module, or pass init=fn."
        )
    warnings.warn(
        f"shard_module: {named} got values from reset_parameters(), and what else wrote to them on the meta device was "
        "not recorded (such as self.apply(init), or a parameter that was made anew): build the model under "
        '`with torch.device("meta")` after mw.init_mesh, or pass init=fn',
        stacklevel=runtime.users_level(),
    )


# ---------------------------------------------------------------------------------------------- values that are loaded


def _await(model: nn.Module, names: Names, left: Mapping[str, Tensor]) -> None:
    """Fill with NaN what is to be loaded; modules raise at their first call for what was not."""
    with torch.no_grad():
        for t in left.values():
            if t.is_floating_point() or t.is_complex():
                t.detach().fill_(float("nan"))
    for name, t in left.items():
        for module, _, _ in names.places(name) if t.numel() else ():
            module.__dict__.setdefault(_AWAITED, {})[name] = (t, t._version)
            _WAITING.add(module)
    for module in {model, *(m for m in model.modules() if m in _WAITING)}:
        module.__dict__[_HOOK] = module.register_forward_pre_hook(_check_first)


def _check_first(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_exporting():  # captured steps check at each call
        return
    check_loaded(module)
    module.__dict__.pop(_HOOK).remove()


def check_loaded(model: nn.Module) -> None:
    """Raises ShardError for tensors that ``shard_module(init="load")`` left without values and nothing wrote since."""
    for module in (m for m in model.modules() if m in _WAITING) if _WAITING else ():
        left = [n for n, (t, version) in module.__dict__[_AWAITED].items() if t._version == version]
        if left:
            raise ShardError(
                f'shard_module(init="load"): nothing has written {", ".join(left)} since. Load them with '
                "mw.load_weights or load_state_dict before the first step."
            )
        _WAITING.discard(module)
        del module.__dict__[_AWAITED]


__all__ = ["LOAD", "Init", "ValueOrigin", "become", "check_loaded", "digest_of", "give_values", "origins_of"]
