"""Simulated ranks: all ranks of a mesh in one process, for notebooks, tests and rule checking.

A thread per rank, and a baton: exactly one thread runs at any time.  The baton is handed on only where ranks
meet (in a collective) and where a rank ends, in a fixed round robin.  So a run is deterministic, module-level
state can be swapped at each switch, and a deadlock is a fact to report rather than a time-out.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import compat, torch_changes
from ..errors import CollectiveError, DesyncError, MeshError, MeshwrightError, takes
from ..mesh import Mesh
from . import runtime
from .generators import random_states, set_random_states

LEAVE = 1.0  # seconds that ranks have to end in, at each step, where a simulation is left before its end
_HOME = threading.local()  # of the thread of a simulated rank: its simulation

READY, WAITING, DONE, FAILED = "ready", "waiting", "done", "failed"


class Call(NamedTuple):
    """A collective as its ranks must agree on it."""

    kind: str
    op: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    args: tuple[tuple[str, Any], ...] = ()
    free_dims: tuple[int, ...] = ()  # dims of the shape that may differ from rank to rank
    tag: str = ""  # for what the user's code reads: where

    def agrees(self, other: Call) -> bool:
        """Whether both are the same collective."""
        if self[:3] != other[:3] or self[4:] != other[4:] or len(self.shape) != len(other.shape):
            return False
        pairs = enumerate(zip(self.shape, other.shape, strict=True))
        return all(a == b or i in self.free_dims for i, (a, b) in pairs)

    def __str__(self) -> str:
        inner = [self.op] if self.op else []
        inner += [f"{name}={value}" for name, value in self.args]
        text = f"{self.kind}({', '.join(inner)})" if inner else self.kind
        if self.dtype is not None:
            text += f" of {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        read = f", for the value read at {self.tag} (read it on every rank: v = x.item(), then print v on one)"
        return text + read if self.tag else text


class _Left(BaseException):
    """Ends a rank of a simulation that nobody waits for any more."""


@dataclass
class _Rendezvous:
    """One collective under way."""

    ranks: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    payloads: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    error: str = ""

    def table(self, line_of: Callable[[int], str]) -> str:
        """A line per rank: what it called, and where."""
        return "".join(f"\n  rank {r}: {self.calls[r]} at {line_of(r)}" for r in self.ranks if r in self.calls)


class _Lane(_Rendezvous):
    """A receive: the second rank waits for what the first one sends."""


_ATTENTION = [
    (getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
    for kind in ("flash", "mem_efficient", "math", "cudnn")
]


class _Flags(NamedTuple):
    """What PyTorch keeps for the whole process and ``with`` blocks change: each rank has its own."""

    dtype: torch.dtype
    anomaly: tuple[bool, bool]
    deterministic: tuple[bool, bool]
    attention: tuple[bool, ...]  # which kernels it may choose
    parametrized: tuple[int, dict[Any, Any]]  # how many ``parametrize.cached()`` are open, and what they keep

    @classmethod
    def now(cls) -> _Flags:
        return cls(
            torch.get_default_dtype(),
            (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            tuple([enabled() for enabled, _ in _ATTENTION]),
            (compat.parametrize._cache_enabled, compat.parametrize._cache),
        )

    def set(self) -> None:
        compat.parametrize._cache_enabled, compat.parametrize._cache = self.parametrized
        if self[:-1] != _Flags.now()[:-1]:  # not what tensors are kept, which would be compared
            torch.set_default_dtype(self.dtype)
            torch.set_anomaly_enabled(*self.anomaly)
            torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
            for (_, enable), value in zip(_ATTENTION, self.attention, strict=True):
                enable(value)


class Simulation:
    """The ranks of one ``simulate`` call and their scheduler."""

    meets = True  # its ranks run now, and are not recorded

    def __init__(self, mesh: Mesh) -> None:
        self.ranks = mesh.ranks
        self.runtimes = {r: runtime.Runtime(r, mesh.size, self) for r in self.ranks}
        self.state = dict.fromkeys(self.ranks, READY)
        self.waits: dict[int, _Rendezvous] = {}  # rank to what it waits in
        self.underway: dict[tuple[int, ...], _Rendezvous] = {}
        self.mail: dict[tuple[int, ...], deque[tuple[Call, Any]]] = {}  # (from, to): what was sent and is not taken yet
        self.turns = {r: threading.Semaphore(0) for r in self.ranks}
        self.device = mesh.device
        self.rng = dict.fromkeys(self.ranks, random_states(self.device))
        flags = _Flags.now()
        self.flags = {r: flags._replace(parametrized=(flags.parametrized[0], {})) for r in self.ranks}
        self.results: dict[int, Any] = {}
        self.shared: dict[str, Any] = {}  # what one rank computed for all, by the layer that owns it
        self.failures: list[tuple[int, BaseException]] = []
        self.aborted = ""
        self.finished = threading.Event()
        self.threads: dict[int, threading.Thread] = {}
        self.leaving = False  # every rank is to end where it meets others
        self.left = False  # the caller has gone on: the module-level state is its own again
        self.switches = 0
        self.running = self.ranks[0]

    # -- the baton ------------------------------------------------------------------------------------

    def _pass_on(self, rank: int) -> None:
        """Hand the baton from ``rank`` to the next rank that can run; end the simulation if all ended."""
        if self.left:
            return
        self.rng[rank], self.flags[rank] = random_states(self.device), _Flags.now()
        following = self._next(rank)
        if following is None and self.waits:
            table = "".join(
                f"\n  rank {r}: waits in {m.calls[r]} over ranks {m.ranks} at {self._line_of(r)}"
                for r, m in sorted(self.waits.items())
            )
            self._break(self.waits, f"deadlock: every rank waits for another one{table}")
            following = self._next(rank)
        if following is None:
            self.finished.set()
            return
        self.switches += 1
        self.running = following
        runtime.RT = self.runtimes[following]
        set_random_states(self.rng[following])
        self.flags[following].set()
        self.turns[following].release()

    def _line_of(self, rank: int) -> str:
        """The user's line at which a rank is."""
        thread = self.threads[rank].ident if rank in self.threads else None
        frame = None if thread is None else sys._current_frames().get(thread)
        while frame is not None and runtime.is_users(frame.f_code.co_filename):
            frame = frame.f_back  # it waits in the threading module, for the baton
        return runtime.user_line(frame=frame)

    def _next(self, rank: int) -> int | None:
        at = self.ranks.index(rank)
        order = self.ranks[at + 1 :] + self.ranks[: at + 1]
        return next((r for r in order if self.state[r] == READY), None)

    def _break(self, ranks: Sequence[int] | dict[int, _Rendezvous], error: str) -> None:
        """Wake the given waiting ranks with a DesyncError."""
        for r in list(ranks):
            one = self.waits.pop(r)
            one.error = error
            if self.underway.get(one.ranks) is one:
                del self.underway[one.ranks]
            self.state[r] = READY

    # -- where ranks meet -----------------------------------------------------------------------------

    def rendezvous(
        self,
        ranks: tuple[int, ...],
        call: Call,
        payload: Any,
        compute: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Bring ``payload`` to the collective of ``ranks`` and return the own result.

        The last rank to arrive runs ``compute`` on all payloads (in the order of ``ranks``), once, and every
        rank takes its entry of what comes back.

        Raises:
            DesyncError: on every rank that takes part, if the calls disagree, a rank failed or finished, or
                every rank waits.
        """
        if getattr(_HOME, "simulation", self) is not self or self.leaving:
            raise _Left("this rank belongs to a simulation that was left")
        rank = runtime.RT.rank  # not the thread: a backward may run in another one
        self._refuse(ranks, call)
        one = self.underway.setdefault(ranks, _Rendezvous(ranks))
        one.calls[rank], one.payloads[rank] = call, payload
        if len(one.calls) < len(ranks):
            self._wait_in(one, rank)
        else:
            self._complete(one, compute)
        if one.error:
            raise DesyncError(one.error)
        return one.results.pop(rank)

    def _wait_in(self, one: _Rendezvous, rank: int) -> None:
        self.state[rank] = WAITING
        self.waits[rank] = one
        self._pass_on(rank)
        self.turns[rank].acquire()
        if self.leaving:
            raise _Left(self.aborted)

    # -- sends ----------------------------------------------------------------------------------------

    def post(self, lane: tuple[int, ...], call: Call, payload: torch.Tensor) -> Any:
        """Send a copy of ``payload`` along a lane, from its first rank to its second, which need not be there yet.

        Returns:
            What the sender waits for; nothing here.
        """
        if getattr(_HOME, "simulation", self) is not self or self.leaving:
            raise _Left("this rank belongs to a simulation that was left")
        if self.aborted:
            raise DesyncError(self.aborted)
        self.mail.setdefault(lane, deque()).append((call, payload.clone()))
        one = self.waits.get(lane[1])
        if isinstance(one, _Lane) and one.ranks == lane:
            del self.waits[lane[1]]
            self.state[lane[1]] = READY

    def fetch(self, lane: tuple[int, ...], call: Call) -> Any:
        """What comes next along a lane, for its second rank.

        Raises:
            DesyncError: something else comes, the sender ended without it, a rank failed, or every rank waits.
        """
        if getattr(_HOME, "simulation", self) is not self or self.leaving:
            raise _Left("this rank belongs to a simulation that was left")
        box = self.mail.setdefault(lane, deque())
        if not box:
            self._refuse(lane, call)
            one = _Lane(lane)
            one.calls[lane[1]] = call
            self._wait_in(one, lane[1])
            if one.error:
                raise DesyncError(one.error)
        sent, payload = box.popleft()
        if not sent.agrees(call):
            raise DesyncError(f"rank {lane[0]} sent {sent}, rank {lane[1]} waits for {call}")
        return payload

    def _refuse(self, ranks: tuple[int, ...], call: Call) -> None:
        """Raise at once if this collective can never complete."""
        if self.aborted:
            raise DesyncError(self.aborted)
        outside = [r for r in ranks if r not in self.state]
        if outside:
            raise CollectiveError(f"{call}: ranks {outside} are not simulated (ranks here: {list(self.ranks)})")
        gone = next((r for r in ranks if self.state[r] == DONE), None)
        if gone is None:
            return
        error = f"rank {gone} finished without {call} over ranks {ranks}"
        one = self.underway.get(ranks)
        self._break([r for r in ranks if one is not None and self.waits.get(r) is one], error)
        raise DesyncError(error)

    def _complete(self, one: _Rendezvous, compute: Callable[[list[Any]], Sequence[Any]]) -> None:
        first = one.calls[one.ranks[0]]
        if all(first.agrees(other) for other in one.calls.values()):
            try:
                with compat.outside_modes():  # of the rank that came last, which has no more to do with it
                    results = compute([one.payloads[r] for r in one.ranks])
                one.results = dict(zip(one.ranks, results, strict=True))
            except MeshwrightError as e:
                one.error = str(e)
            except Exception as e:  # all ranks must hear of it, or they wait for ever
                one.error = f"{first} over ranks {one.ranks} failed: {type(e).__name__}: {e}"
        else:
            one.error = f"ranks {one.ranks} disagree in one collective{one.table(self._line_of)}"
        one.payloads.clear()
        del self.underway[one.ranks]
        for r in one.ranks:
            if self.waits.pop(r, None) is not None:
                self.state[r] = READY

    # -- the life of a rank ---------------------------------------------------------------------------

    def _live(self, rank: int, fn: Callable[[], Any], modes: Callable[[], Any]) -> None:
        """Body of the thread of one rank."""
        self.turns[rank].acquire()
        _HOME.simulation = self
        try:
            if self.leaving:
                raise _Left
            with modes():
                self.results[rank] = fn()
            self.state[rank] = DONE
        except BaseException as e:
            if self.left:
                return
            self.failures.append((rank, e))
            self.state[rank] = FAILED
        if self.state[rank] == FAILED:
            first = self.failures[0][1]
            self.aborted = self.aborted or f"rank {rank} failed: {type(first).__name__}: {first}"
            self._break(self.waits, self.aborted)
        for r, waited in list(self.waits.items()):
            if isinstance(waited, _Lane) and rank in waited.ranks:
                self._break([r], f"rank {rank} finished without {waited.calls[r]} over ranks {waited.ranks}")
        for ranks, one in list(self.underway.items()):
            if rank in ranks:
                call = next(iter(one.calls.values()))
                self._break(list(one.calls), f"rank {rank} finished without {call} over ranks {ranks}")
        self._pass_on(rank)

    def run(self, fn: Callable[[], Any], timeout: float) -> list[Any]:
        """Run all ranks to their end.  Must be called with no other simulation running."""
        modes = _caller_modes()
        for r in self.ranks:
            # Each thread gets its own copy of the caller's context variables.
            run = contextvars.copy_context().run
            name = f"simulated rank {r}"
            self.threads[r] = threading.Thread(target=run, args=(self._live, r, fn, modes), name=name, daemon=True)
            self.threads[r].start()
        outer, flags = runtime.RT, _Flags.now()
        for rt in self.runtimes.values():
            rt.explicit, rt.budget = outer.explicit, outer.budget
        self.runtimes[self.ranks[0]].records, self.runtimes[self.ranks[0]].notes = outer.records, outer.notes
        runtime.RT = self.runtimes[self.ranks[0]]
        try:
            self.flags[self.ranks[0]].set()
            self.turns[self.ranks[0]].release()
            self._wait(timeout)
        except BaseException as e:
            self._leave(self.aborted or f"the simulation was left: {type(e).__name__}")
            raise
        finally:
            runtime.RT = outer
            set_random_states(self.rng[self.ranks[0]])
            flags.set()
        self._raise()
        return [self.results[r] for r in self.ranks]

    def _wait(self, timeout: float) -> None:
        seen = -1
        while not self.finished.wait(timeout):
            if self.switches == seen:
                self.aborted = f"rank {self.running} has been running for {timeout:g} s without a collective"
                raise DesyncError(f"{self.aborted}: raise simulate's timeout if that is meant")
            seen = self.switches

    def _leave(self, why: str) -> None:
        """End all ranks before their time; the one that runs is asked where it meets others, then interrupted.

        What is left of a rank that does not end (it sleeps, say) can do nothing to what the caller does next.
        """
        self.aborted, self.leaving = why, True
        with contextlib.suppress(KeyboardInterrupt):  # again: at once
            if not self.finished.wait(LEAVE):
                thread = self.threads[self.running]
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Left))
                self.finished.wait(LEAVE)
        self.left = True
        for turn in self.turns.values():
            turn.release()
        self.failures.clear()
        self.results.clear()

    def _raise(self) -> None:
        if not self.failures:
            return
        rank, first = self.failures[0]
        same = all(type(e) is type(first) and str(e) == str(first) for _, e in self.failures)
        if len(self.failures) < len(self.ranks) or not same:
            first.add_note(f"[simulated rank {rank}]")
        try:
            raise first
        finally:
            # The traceback holds this frame: without this the error and all ranks' tensors are one cycle.
            self.failures.clear()
            del first


def _caller_modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager factory that sets this thread's grad mode, inference mode and autocast."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, dtype in casts:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=caches))
            yield

    return modes


_PROFILER = (
    "torch.profiler follows one thread and simulated ranks are several, which crashes it: profile real processes "
    "(torchrun), or see mw.explain for what is sent"
)


@torch_changes.replace(
    "torch.autograd.profiler.profile._prepare_trace",
    why="a profiler follows one thread, and simulated ranks, which are several, crash it: refused there",
)
def _refuse_profiler(prepare: Any, name: str) -> Any:
    @functools.wraps(prepare)
    def guarded(self: Any) -> Any:
        if runtime.RT.sim is not None:
            raise CollectiveError(_PROFILER)
        return prepare(self)

    return guarded


@takes(
    MeshError,
    fn=(Callable, "give a function without arguments: simulate(lambda: step(batch), mesh)"),
    mesh=(Mesh, 'give a mesh: mw.Mesh({"dp": 2})'),
)
def simulate(fn: Callable[[], Any], mesh: Mesh, *, timeout: float = 60.0, check: bool = False) -> list[Any]:
    """Run `fn()` once per rank of `mesh`, in this process, and return the results in rank order.

    Each rank is a thread; one runs at a time, and they take turns at collectives. All start from the caller's CPU
    random state; afterwards the caller has that of rank 0. Default dtype, anomaly mode and deterministic algorithms
    start from the caller's, whose own do not change. Each rank counts its own collectives.

    Args:
        fn: The work of a rank. `mw.rank()` says which rank runs it.
        mesh: The mesh; it needs no processes.
        timeout: Seconds that one rank may run without meeting another. It catches endless loops.
        check: As for [init_mesh][meshwright.init_mesh].

    Returns:
        A list with the result of each rank.

    Raises:
        Exception: The first exception of a rank, with a note that names the rank unless all raised the same.
        DesyncError: If ranks call different collectives, wait for each other, or one ends early.
        CollectiveError: If called inside a simulation.

    Examples:
        ```python
        mesh = mw.Mesh({"dp": 2})
        assert mw.simulate(lambda: mw.rank() * 10, mesh) == [0, 10]
        ```
    """
    if runtime.RT.sim is not None and not isinstance(runtime.RT.sim, runtime.Forked):
        raise CollectiveError("simulate was called inside simulate: call it from the outermost level only")
    if compat.profiler_enabled():
        raise CollectiveError(_PROFILER)
    compat.hold_device_guard()
    simulation = Simulation(mesh)
    for rt in simulation.runtimes.values():
        rt.check = check
    return simulation.run(fn, timeout)
