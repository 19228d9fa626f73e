"""Who am I: the rank, and what is kept per rank.

``RT`` is the Runtime of the running rank.  With real processes there is one.  Under ``simulate`` each rank
has its own, and the scheduler installs the running one at every switch.  So write ``from . import runtime``
and ``runtime.RT.rank``: a name imported from here would go stale.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

# Not used, but imported while there is no process group: the defaults of its functions hold the one that they find,
# and PyTorch imports it in the middle of a run.  A group that is held is not destroyed, and its threads, which drop
# their tensors when they come to it, abort a process that is about to exit.
import torch.distributed.nn.functional
import typing_extensions

from .. import compat, torch_changes
from ..errors import CollectiveError, MeshError
from ..layout import dtype_name
from .batches import Batches
from .launchers import launched

OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The main job is user code.
_EXAMPLES = os.path.join(OWN, "train")
PROGRAM = "<program of rank "  # how the file of a captured step's code is called
_DECORATORS = (contextlib.__file__, warnings.__file__, typing_extensions.__file__)  # around functions of torch's
_NOT_USERS = (OWN, os.path.dirname(os.path.abspath(torch.__file__)), *_DECORATORS, PROGRAM)


LEAST, MOST = 512, 4096  # plans, and conversions ready to run, in each of two generations


class Counts:
    """How often each kind of collective ran, and the bytes that it moved.

    ``table`` maps (kind, axis names) to [count, bytes].  The bytes are those of one rank in the ring model,
    for n ranks: all-gather and reduce-scatter (n-1)/n of the full tensor, all-reduce twice that, all-to-all
    (n-1)/n of the local tensor, broadcast the tensor.  ``narrow`` maps (kind, axis names, dtype, ranks) to the
    number of those that sum many ranks in few bits (``collective.rounds``).  ``copies`` maps ``"to_device"`` and
    ``"to_host"`` to [count, bytes] of what is stored on the host; they are no collectives, and in no total.  ``last``
    has kind and bytes of the last one, until the range of a profile is named by them.
    """

    __slots__ = ("copies", "last", "narrow", "table")

    def __init__(self) -> None:
        self.table: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self.narrow: dict[tuple[str, tuple[str, ...], str, int], int] = {}
        self.copies: dict[str, list[int]] = {}
        self.last: tuple[str, int] | None = None

    def add(self, kind: str, axes: tuple[str, ...], nbytes: int) -> None:
        """Record one collective of ``kind`` over ``axes`` that moves ``nbytes`` bytes."""
        try:
            entry = self.table[kind, axes]
        except KeyError:
            entry = self.table[kind, axes] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes
        self.last = kind, nbytes

    def add_copy(self, way: str, nbytes: int) -> None:
        """Record one copy between the host and the mesh's device."""
        entry = self.copies.setdefault(way, [0, 0])
        entry[0] += 1
        entry[1] += nbytes

    def add_narrow(self, kind: str, axes: tuple[str, ...], dtype: torch.dtype, ranks: int) -> None:
        """Note that one collective sums many ranks in few bits."""
        key = kind, axes, dtype_name(dtype), ranks
        self.narrow[key] = self.narrow.get(key, 0) + 1

    def copy(self) -> Counts:
        """A snapshot."""
        made = Counts()
        made.table = {key: list(entry) for key, entry in self.table.items()}
        made.narrow = dict(self.narrow)
        made.copies = {way: list(entry) for way, entry in self.copies.items()}
        return made

    def since(self, before: Counts) -> Counts:
        """What was added after the snapshot ``before``; kinds that did not run are left out."""
        made = Counts()
        for key, (count, nbytes) in self.table.items():
            count0, nbytes0 = before.table.get(key, (0, 0))
            if count > count0:
                made.table[key] = [count - count0, nbytes - nbytes0]
        for way, (count, nbytes) in self.copies.items():
            count0, nbytes0 = before.copies.get(way, (0, 0))
            if count > count0:
                made.copies[way] = [count - count0, nbytes - nbytes0]
        made.narrow = {k: n for k, c in self.narrow.items() if (n := c - before.narrow.get(k, 0)) > 0}
        return made

    def _sum(self, column: int, part: int) -> dict[Any, int]:
        out: dict[Any, int] = {}
        for key, entry in self.table.items():
            out[key[part]] = out.get(key[part], 0) + entry[column]
        return out

    @property
    def kinds(self) -> dict[str, int]:
        """Kind to number of collectives."""
        return self._sum(0, 0)

    @property
    def bytes(self) -> dict[str, int]:
        """Kind to bytes."""
        return self._sum(1, 0)

    @property
    def bytes_by_axes(self) -> dict[tuple[str, ...], int]:
        """Names of the axes to bytes."""
        return self._sum(1, 1)

    @property
    def total(self) -> int:
        """Number of collectives."""
        return sum(entry[0] for entry in self.table.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(entry[1] for entry in self.table.values())

    def __repr__(self) -> str:
        parts = (f"{k}[{','.join(a)}]: {n} × {b} B" for (k, a), (n, b) in self.table.items())
        return f"Counts({'; '.join(parts)})"


class Recent(dict[Any, Any]):
    """A table of bounded size: the youngest ``most`` entries, and of those before them what was asked for since.

    Two generations: when the young one is full it becomes the old one, which is dropped.  A hit in the young one is the
    plain ``get`` of a dict; after a miss there, ``find`` looks in both.  What is dropped is made anew when it is asked
    for: so it must be what would be made again alike, and making it must not communicate.

    Ever new keys (lengths of sequences) are dropped early: ``most`` starts small.  Where more than half of a generation
    came back from the old one, or from those dropped lately, the table is too small for its use: ``most`` doubles, up
    to ``limit``.
    """

    __slots__ = ("_beside", "_dropped", "_old", "_returned", "limit", "most")

    def __init__(self, most: int, beside: dict[Any, Any] | None = None, limit: int = 0) -> None:
        """``beside``: a table of what is true while its keys are young, emptied when the generations change."""
        super().__init__()
        self.most = most
        self.limit = max(most, limit)
        self._beside = beside
        self._old: dict[Any, Any] = {}
        self._dropped: set[int] = set()  # hashes of keys
        self._returned = 0

    def find(self, key: Any) -> Any:
        """What is kept for a key, young from now on; None where nothing is."""
        found = self.get(key)
        if found is None:
            found = self._old.pop(key, None)
            if found is not None:
                self._returned += 1
                self.keep(key, found)
        return found

    def keep(self, key: Any, value: Any) -> None:
        """Keep ``value`` for ``key``."""
        if key not in self:
            if hash(key) in self._dropped:
                self._dropped.remove(hash(key))
                self._returned += 1
            if len(self) >= self.most:
                self._change_generations()
        self[key] = value

    def _change_generations(self) -> None:
        grow, self._returned = 2 * self._returned > len(self) and self.most < self.limit, 0
        if grow:
            self.most = min(2 * self.most, self.limit)
            return
        if self.most < self.limit:
            if len(self._dropped) >= self.limit:
                self._dropped.clear()
            self._dropped.update(map(hash, self._old))
        self._old = dict(self)
        super().clear()
        if self._beside is not None:
            self._beside.clear()

    def clear(self) -> None:
        """Drop both generations."""
        super().clear()
        self._old = {}
        self._dropped = set()
        self._returned = 0


class Simulator(Protocol):
    """What a Runtime knows of the simulation that it belongs to."""

    def rendezvous(
        self,
        ranks: tuple[int, ...],
        call: Any,
        payload: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Bring ``payload``, wait for the other ``ranks``, and take the own one of ``compute(payloads)``."""
        ...


class Runtime:
    """The state of one rank.

    Attributes:
        rank, world: own global rank, and the number of ranks.  Unless given they are read from
            ``torch.distributed`` at the first use after it was initialised; rank 0 of 1 until then.
        sim: the simulation that this rank is part of, or None.
        plans: cache owned by dispatch.
        fast: of these, the calls that are one native op on locals: key to (spec of the output, whether it is
            untyped, native call).
        groups: cache owned by collective.
        memo: scratch for the other layers.
        records: list that explain collects into, or None.
        notes: what else explain is to say, each once, or None.
        told: what is told of each call that is executed in full, or None; with records, that is every call.
        after_call: what gets each of these calls when it has run, with what it gave, or None.
        cause: the record that communication started now serves, or None; kept only while there are records, and in
            words while somebody profiles.
        line: the user's line that records are to show, where the call stack cannot tell, or None.
        explicit: whether communication must be asked for by name.
        budget: axes to bytes that may be sent, or None.
        strategies: of ops that have several, which one an axis is to take: op to axis to name.
        spared: axes, as bits, that no conversion takes on its way which does not change them itself.
        met: ops and axes of calls in which there was such a choice, since these are asked for.
        counts: the collectives that ran.
        timeout: seconds that a collective may take, or None for the default.
        check: whether every collective compares first what the ranks are about to do (``init_mesh(check=True)``).
        doing: in check mode the conversion that the next collective is part of.
        tag: where the user's code reads the value that the next collective makes, or empty.
        was: the rank under the process group before this one, or None.
        drawn: a sum over the seeds of dropout that were drawn.
        updates: steps of optimizers that this rank has made.
        batches: those that this rank has taken.
        writes: under inference mode, which counts none: writes to memory, by its address; None: to any.
        claims: owned by collective: what plain tensors were taken for, by the ranks that compare it.
        watcher: what hears of ranks that are gone, or None.
    """

    rank: int
    world: int

    def __init__(self, rank: int | None = None, world: int | None = None, sim: Simulator | None = None) -> None:
        if rank is not None and world is not None:
            self.rank, self.world = rank, world
        self.sim = sim
        self.writes: dict[int | None, int] = {}
        self.fast: dict[Any, Any] = {}
        self.plans = Recent(LEAST, self.fast, MOST)
        self.groups: dict[Any, Any] = {}
        self.memo = Recent(LEAST, limit=MOST)
        self.records: list[Any] | None = None
        self.notes: dict[str, None] | None = None
        self.told: Callable[[Any], None] | None = None
        self.after_call: Callable[[Any, Any], None] | None = None
        self.cause: Any = None
        self.line: str | None = None
        self.explicit = False
        self.budget: Mapping[str, Any] | None = None
        self.strategies: Mapping[str, Mapping[str, str]] = {}
        self.spared = 0
        self.met: set[tuple[str, str]] = set()
        self.counts = Counts()
        self.timeout: float | None = None
        self.check = False
        self.doing = ""
        self.tag = ""
        self.was: int | None = None
        self.drawn = 0
        self.updates = 0
        self.batches = Batches()
        self.claims: dict[tuple[int, ...], Any] = {}
        self.watcher: Any = None

    def __getattr__(self, name: str) -> int:
        # Reached only while the attribute is unset: afterwards rank and world are plain attributes.
        if name not in ("rank", "world"):
            raise AttributeError(f"Runtime has no attribute {name!r}")
        if not dist.is_available() or not dist.is_initialized():
            return 0 if name == "rank" else 1
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        return self.rank if name == "rank" else self.world

    def __repr__(self) -> str:
        kind = "simulated " if self.sim is not None else ""
        return f"Runtime({kind}rank {self.rank} of {self.world})"


RT = Runtime()


@contextlib.contextmanager
def serving(cause: Any) -> Iterator[None]:
    """Inside, communication that is started serves this record."""
    rt = RT
    before, rt.cause = rt.cause, cause
    try:
        yield
    finally:
        rt.cause = before


@contextlib.contextmanager
def preferring(strategies: Mapping[str, Mapping[str, str]], spared: int = 0) -> Iterator[None]:
    """Inside, ops take these strategies, and conversions spare these axes; plans of others are forgotten."""
    rt = RT
    before = rt.strategies, rt.spared

    def change(to: tuple[Mapping[str, Mapping[str, str]], int]) -> None:
        if (rt.strategies, rt.spared) != to:
            rt.strategies, rt.spared = to
            rt.plans.clear()
            rt.fast.clear()

    change((strategies, spared))
    try:
        yield
    finally:
        change(before)


def reset() -> None:
    """Start afresh, as after ``destroy_process_group``: groups, caches, counts and the known rank are dropped."""
    global RT
    if RT.watcher is not None:
        RT.watcher.close()
    for table in (RT.groups, RT.memo, RT.plans, RT.fast):  # whoever still holds the old one holds no groups
        table.clear()
    RT = Runtime()


# After destroy_process_group the groups kept here are the last ones: their threads end while Python still runs.
atexit.register(reset)


# -- the process group that a runtime belongs to -----------------------------------------------------------


class _Stale:
    """In place of the spec of a tensor that this process holds as a rank that it no longer is."""

    def __init__(self, was: int, now: int) -> None:
        self.was, self.now = was, now

    def __getattr__(self, name: str) -> NoReturn:
        raise MeshError(
            f"this tensor was distributed when the process was rank {self.was}, and it is rank {self.now} now: its "
            "local part belongs to another place of the mesh; distribute it anew, from a checkpoint or another rank"
        )


def _belong_to(pg: Any) -> None:
    """The default process group was made or destroyed: what was known of ranks and groups went with the old one."""
    if RT.sim is not None and not isinstance(RT.sim, Forked):
        return
    known = RT.__dict__.get("rank", RT.was)
    reset()
    RT.was = known
    if pg is None or known is None or (pg.rank() == known):
        return
    for t in gc.get_objects():  # rare: only where a process became another rank and has tensors of its old place
        if issubclass(type(t), torch.Tensor) and "_spec" in t.__dict__:
            t.__dict__["_spec"] = _Stale(known, pg.rank())


def _follow_process_group(inner: Any, name: str) -> Any:
    # The one place that init_process_group and destroy_process_group both pass, however they were imported.
    if RT.sim is None:  # who this process was before it had a mesh says nothing
        RT.__dict__.pop("rank", None)
        RT.__dict__.pop("world", None)

    def update(pg: Any) -> None:
        inner(pg)
        _belong_to(pg)

    return update


class Forked:
    """The ``sim`` of a process that was forked from a rank: it is no rank, and the groups are its parent's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def rendezvous(self, ranks: Any, call: Any, payload: Any, compute: Any) -> NoReturn:
        """Refuse."""
        raise CollectiveError(
            f"{call}: this process was forked from rank {self.rank} after init_mesh and is no rank itself: call "
            "collectives in the parent only, or start the process with 'spawn' and give it a process group of its own"
        )


def _after_fork() -> None:
    global RT
    if dist.is_available() and dist.is_initialized() and not isinstance(RT.sim, Forked):
        sim = Forked(RT.rank)
        # A process group that ends waits for its threads, which are not here: a child would never end.
        for pg in compat.distributed_world.pg_map:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pg))
        RT = Runtime(RT.rank, RT.world, sim)


if dist.is_available():
    torch_changes.replace(
        "torch.distributed.distributed_c10d._update_default_pg",
        why="a process that gets another process group keeps nothing of the old one's ranks and groups",
    )(_follow_process_group)
os.register_at_fork(after_in_child=_after_fork)


def rank() -> int:
    """Return this rank's number, 0 to the number of ranks - 1.

    In `simulate` it is that of the simulated rank. Before the process group exists it is the launcher's; without a
    launcher it is 0. Read values on every rank; print or write them on one.

    PyTorch: `torch.distributed.get_rank()`.

    Examples:
        ```python
        loss = torch.tensor(2.0)
        value = loss.item()  # every rank calls it: it may have to reduce over ranks
        if mw.rank() == 0:
            print(value)
        ```
    """
    if "rank" in RT.__dict__ or (dist.is_available() and dist.is_initialized()):
        return RT.rank
    launch = launched()
    return 0 if launch is None else launch.rank


# -- the user's code ---------------------------------------------------------------------------------------


def is_users(file: str) -> bool:
    """Whether a file of code is the user's, and not ours or torch's."""
    return not file.startswith(_NOT_USERS) or file.startswith(_EXAMPLES)


def users_level() -> int:
    """The ``stacklevel`` with which a warning of the caller names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def _column(frame: types.FrameType) -> int:
    """Where in its line a frame is.  Not the instruction: one call is several, and which shows depends on how warm the
    code is on this rank."""
    *_, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return 0 if column is None else column + 1


def user_line(*, exactly: bool = False, frame: types.FrameType | None = None) -> str:
    """``file:line`` of the nearest frame outside this package and torch; ``exactly``: and the column there.

    ``frame``: the innermost one, of another thread.
    """
    if RT.line is not None and frame is None:
        return RT.line
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            where = f"{os.path.basename(name)}:{frame.f_lineno}"
            return f"{where}:{_column(frame)}" if exactly else where
        frame = frame.f_back
    return "?"
