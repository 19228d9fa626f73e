"""What constructors do to tensors on the meta device, recorded, to be done again once the model has memory.

``torch.device("meta")`` is a function mode of PyTorch: while it is on, it is asked at each function.  From the first
mesh on it also notes the ATen ops of that function which make meta tensors or write to them.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from ... import compat, torch_changes
from ...compat import TorchDispatchMode, tree_leaves, tree_map_only
from ...local_tensor import storage_of
from . import libraries

Tensor = torch.Tensor
KINDS = (Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class Ref:
    """A tensor of a recording: which memory, and which part of it."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Constant:
    """A tensor with values that was copied to the meta device."""

    value: Tensor
    version: int


@dataclass(frozen=True)
class RecordedCall:
    """One call of a recording.

    Attributes:
        func: an ATen op, or a function of ``torch.nn.init`` that does nothing to meta tensors by itself.
        args, kwargs: of the call, with references in the place of tensors.
        outputs: what it returned, in order.
        makes: memory that is new, with what it holds.
        writes: memory that it wrote to.
        reads: all memory of its arguments.
        seed: of the default generator, where that was seeded again since the last random call.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref, ...]
    makes: frozenset[int]
    writes: frozenset[int]
    reads: frozenset[int]
    random: bool
    seed: int | None = None


@dataclass
class Recording:
    """The calls under one ``torch.device("meta")``, in order.

    Attributes:
        versions: memory to how often its tensors had been written to when it was last seen.
        number: of recordings, in the order in which they began.
        start, end: states of the default generators around the first replay, by device.
        failed: initialisations that raised on the meta device, with what they raised.
        lost: memory that was written to where nothing is recorded, and what was computed from it.
    """

    entries: list[RecordedCall] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    number: int = field(default_factory=itertools.count().__next__)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)
    drawn: Tensor | None = None  # state of the default generator at the last random call
    pruned: int = 0
    failed: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    joined: Recording | None = None  # the one that goes on with it

    def current(self) -> Recording:
        """The recording that this one is a part of by now."""
        return self if self.joined is None else self.joined.current()

    def join(self, other: Recording) -> Recording:
        """One recording of two, of which the later one goes on with tensors of the earlier one."""
        first, then = sorted((self.current(), other.current()), key=lambda r: r.number)
        if first is not then:
            first.entries += then.entries
            first.versions |= then.versions
            first.failed += then.failed
            first.lost |= then.lost
            then.joined, then.entries = first, []
        return first

    def has_all_of(self, t: Tensor, memory: int) -> bool:
        """Whether all writes to a tensor were recorded."""
        return memory not in self.lost and t._version <= self.versions.get(memory, 0)

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Enter a call that has run."""
        given, made = _plain_tensors((args, kwargs)), _plain_tensors(out)
        if given is None or made is None or not any(t.is_meta for t in (*given, *made)):
            return
        into = self.current()
        for t in given:
            found = recorded(t) if t.is_meta else None
            if found is not None and found[1] is not into:
                into = into.join(found[1])
        into._enter(func, args, kwargs, given, made)

    def _enter(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> None:
        written = [t for t in _written(func, args, kwargs) if t.is_meta]
        reads = frozenset(_MEMORY.known(t, self).memory for t in given if t.is_meta)
        self.lost.update(m for t in given if t.is_meta and not self.has_all_of(t, m := _MEMORY.known(t, self).memory))
        outputs = tuple(_MEMORY.known(t, self) for t in made if t.is_meta)
        makes = frozenset(r.memory for r in outputs) - reads
        if not (makes or written or outputs):
            return
        writes = frozenset(_MEMORY.known(t, self).memory for t in written)
        for t in written:
            at = _MEMORY.known(t, self).memory
            self.versions[at] = max(self.versions.get(at, 0), t._version + (func not in INITIALISERS))
        if not self.lost.isdisjoint(reads):
            self.lost |= makes | writes
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or func in INITIALISERS
        seed = self._reseeded() if random else None
        kept = self._kept(args), self._kept(kwargs)
        self.entries.append(RecordedCall(func, *kept, outputs, makes, writes, reads, random, seed))
        if len(self.entries) > max(20_000, 2 * self.pruned):
            self.entries = needed(self.entries, _MEMORY.alive(self), draws=True)
            self.pruned = len(self.entries)

    def _kept(self, a: Any) -> Any:
        def keep(t: Tensor) -> Ref | Constant:
            return _MEMORY.known(t, self) if t.is_meta else Constant(t.detach(), t._version)

        return tree_map_only(Tensor, keep, a)

    def _reseeded(self) -> int | None:
        state, before = torch.default_generator.get_state(), self.drawn
        self.drawn = state
        if before is None or torch.equal(state, before):
            return None
        seed = torch.default_generator.initial_seed()
        return seed if torch.equal(state, torch.Generator().manual_seed(seed).get_state()) else None


def needed(entries: Sequence[RecordedCall], memory: set[int], draws: bool = False) -> list[RecordedCall]:
    """The entries that give ``memory`` its values; with ``draws`` also those that use up random numbers."""
    wanted, kept = set(memory), list[RecordedCall]()
    for e in reversed(entries):
        view = not e.makes and not e.writes
        if not wanted.isdisjoint(e.reads if view else e.makes | e.writes):
            wanted |= e.reads | e.writes
            kept.append(e)
        elif draws and e.random:
            kept.append(e)
    return kept[::-1]


class _Memory:
    """Which memory of meta tensors belongs to which recording.

    An address is not used again while a weak reference to it is held.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, int, Recording]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def known(self, t: Tensor, into: Recording) -> Ref:
        """The reference of a meta tensor, new where it has none yet."""
        found = self.find(t)
        if found is not None:
            return found[0]
        storage = t.untyped_storage()
        with self._lock:
            if len(self._found) % 1024 == 1023:
                self._forget()
            number = next(self._numbers)
            self._found[storage._cdata] = (_weak(storage), number, into)
        return _ref(t, number)

    def lose(self, t: Tensor, into: Recording) -> None:
        """Note that ``t`` has values that no recording has."""
        into.lost.add(self.known(t, into).memory)

    def find(self, t: Tensor) -> tuple[Ref, Recording] | None:
        """The reference of a meta tensor and its recording; None where nothing is known of it."""
        found = self._found.get(storage_of(t))
        return None if found is None or found[0].expired() else (_ref(t, found[1]), found[2].current())

    def alive(self, of: Recording) -> set[int]:
        """The memory of a recording that somebody holds."""
        with self._lock:
            return {n for weak, n, r in self._found.values() if r.current() is of and not weak.expired()}

    def _forget(self) -> None:
        self._found = {at: f for at, f in self._found.items() if not f[0].expired()}


def _weak(storage: Any) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)


def _ref(t: Tensor, memory: int) -> Ref:
    return Ref(memory, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()), t.dtype)


_MEMORY = _Memory()
recorded, lose = _MEMORY.find, _MEMORY.lose


def _plain_tensors(a: Any) -> list[Tensor] | None:
    """The tensors of arguments or results; None where one is more than a plain tensor."""
    found = [t for t in tree_leaves(a) if isinstance(t, Tensor)]
    return found if all(type(t) in KINDS and t.layout is torch.strided for t in found) else None


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call writes to."""
    if func in INITIALISERS:
        return [kwargs["tensor"]]
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = zip([a.name for a in schema.arguments], args, strict=False)
    values = {**dict(named), **kwargs}
    into = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(into) if isinstance(t, Tensor)]


class OpRecorder(TorchDispatchMode):
    """Notes the ATen ops of one function."""

    def __init__(self, into: Recording) -> None:
        super().__init__()
        self.into = into

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self.into.note(func, args, kwargs or {}, out)
        return out


# ---------------------------------------------------------------------------------------------- what is recorded

# Of torch.nn.init, what returns at once from a meta tensor: it asks ``tensor.is_meta``.
_SKIPS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
INITIALISERS = {getattr(nn.init, name) for name in _SKIPS}
_BY_CODE = {func.__code__: func for func in INITIALISERS}  # what torch.nn.init has may be replaced for a while
_FROM_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor")


class _State(threading.local):
    busy = False


_STATE = _State()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, nothing is recorded in this thread."""
    before, _STATE.busy = _STATE.busy, True
    try:
        yield
    finally:
        _STATE.busy = before


@torch_changes.replace(
    "torch.utils._device.DeviceContext.__torch_function__",
    why="what constructors do to tensors on the meta device is recorded, and done again where the model gets memory",
)
def _recording(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def noted(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device.type != "meta" or _STATE.busy or compat.len_torch_dispatch_stack():
            return original(self, func, types, args, kwargs)
        if any(t not in KINDS for t in types):
            return original(self, func, types, args, kwargs)
        with unrecorded():
            if libraries.import_integrations() and libraries.is_loading():
                _outermost(self).__dict__["_recording"] = None  # it fills the model itself
        into = _recording_of(self)
        if into is None:
            return original(self, func, types, args, kwargs)
        if func == _IS_META:
            _note_skipped(into, args[0], sys._getframe(1))
            return original(self, func, types, args, kwargs)
        with unrecorded():
            try:
                with OpRecorder(into):
                    out = original(self, func, types, args, dict(kwargs or {}))
            except NotImplementedError as error:
                # Whoever catches it, as register_parametrization does, goes on with other values than one device.
                into.current().failed.append(f"{func.__name__} raises NotImplementedError ({_first_line(error)})")
                raise
            if type(out) is Tensor and out.is_meta and func.__name__ in _FROM_VALUES and recorded(out) is None:
                _note_values(into, func, args, kwargs or {}, out)
        return out

    return noted


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]


_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def recording_now() -> Recording | None:
    """The recording of what is done in this thread now; None where nothing is recorded."""
    if _STATE.busy or compat.len_torch_dispatch_stack():
        return None
    modes = compat.get_current_function_mode_stack()
    found = (m.__dict__.get("_recording") for m in modes)
    return next((r.current() for r in found if isinstance(r, Recording)), None)


def _recording_of(context: Any) -> Recording | None:
    """The recording of the outermost ``torch.device("meta")`` around a call; None where nothing is recorded."""
    made: Recording | None = _outermost(context).__dict__.setdefault("_recording", Recording())
    return made


def _outermost(context: Any) -> Any:
    """The outermost ``torch.device("meta")`` around a call."""
    modes = compat.get_current_function_mode_stack()
    return next((m for m in modes if type(m) is type(context) and m.device.type == "meta"), context)


def _note_skipped(into: Recording, t: Tensor, frame: Any) -> None:
    """Enter the call of a function of ``torch.nn.init`` that asks whether its tensor is a meta tensor."""
    code = frame.f_code
    func: Any = _BY_CODE.get(code)
    if not t.is_meta or func is None:
        return
    with unrecorded():
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        into.note(func, (), {n: frame.f_locals[n] for n in names}, ())


def _note_values(into: Recording, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
    """Enter a tensor made of numbers, which are kept: what they are in may change."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not any(t.is_meta for t in given):
        plain = {k: v for k, v in kwargs.items() if k != "requires_grad"}
        value = func(*args, **{**plain, "device": "cpu"}).detach().clone()
        into.note(torch.ops.aten._to_copy.default, (value,), {"dtype": out.dtype, "device": out.device}, out)


class Initialisers(TorchFunctionMode):
    """Notes the functions of ``torch.nn.init`` that skip meta tensors."""

    def __init__(self, into: Recording) -> None:
        super().__init__()
        self.into = into

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            _note_skipped(self.into, args[0], sys._getframe(1))
        return func(*args, **kwargs or {})


@contextmanager
def recording_outside(module: nn.Module) -> Iterator[None]:
    """Inside, what is done to the recorded tensors of a module goes on in their recording."""
    found = None
    if not _STATE.busy and not compat.len_torch_dispatch_stack():
        held = (t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        found = next((r for t in held if type(t) in KINDS and t.is_meta and (r := recorded(t))), None)
    if found is None:
        yield
        return
    with unrecorded(), OpRecorder(found[1]), Initialisers(found[1]):
        yield


@torch_changes.replace(
    "torch.nn.Module.apply",
    "torch.nn.Module._apply",
    why="what is done to a model on the meta device after it was built (apply(init), to(dtype)) is recorded, too",
)
def _recording_after(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def applied(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recording_outside(self):
            return original(self, *args, **kwargs)

    return applied


@torch_changes.replace(
    "torch.nn.Parameter.__deepcopy__",
    "torch.Tensor.__deepcopy__",
    why="a copy of a model on the meta device gets the values of what it was copied from",
)
def _recording_copies(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def copied(self: Any, memo: Any) -> Any:
        known = recorded(self) if type(self) in KINDS and self.is_meta and not _STATE.busy else None
        if known is None or compat.len_torch_dispatch_stack():
            return original(self, memo)
        with unrecorded(), OpRecorder(known[1]):
            return original(self, memo)

    return copied


__all__ = [
    *("INITIALISERS", "Constant", "Initialisers", "RecordedCall", "Recording", "Ref"),
    *("KINDS", "OpRecorder", "lose", "needed", "recorded", "recording_now", "unrecorded"),
]
