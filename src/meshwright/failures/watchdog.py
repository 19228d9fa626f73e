"""The watcher: one thread of each process that hears when another rank is gone, and makes this one leave.

What is asked is the kernel, never a heartbeat: a thread that beats shows that Python's lock is free, which it is not in
a long call of C; a process that beats beside it shows that the host lives.  A connection that ends is a death,
within milliseconds and whatever the process was doing; the state of a process on this machine says that it is stopped;
the keepalive of TCP, which the kernel answers, says that a host lives.  So a rank may be busy for as long as it likes.

Ranks of one machine are connected to the first of them, and those to the first of all.  Who comes to its end says so,
and stays until it is known: until the rank that it calls has passed it on, and those that are to call it have.  Then
the next one takes its place.  Nothing is sent while nothing happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from ..errors import RankFailedError
from ..ranks import runtime
from ..ranks.launchers import launched
from ..ranks.process_group import OPENING, OTHERS, links
from . import process, report
from .report import Obituary

LOOK = 0.5  # seconds between two looks at the processes of this machine
GRACE = 0.7  # seconds for an error to come out of a collective, or for Python to end once nobody caught it
STAY = 5.0  # seconds that a rank which comes to its end stays for the others to know, busy as they may be
STOPPED = "was stopped (SIGSTOP, SIGTSTP)"
LIMIT = 1 << 16  # bytes of a message, all that is kept of what a stranger sends


class Endpoint(NamedTuple):
    """Where a rank is.

    Attributes:
        machine: what it has alike with the ranks whose processes it sees.
        host: its name, for people.
        born: when the process was started.
        addresses: by which other machines may reach it.
        port: where it listens.
        word: of the first rank: what strangers do not know.
        error: why it does not listen, or empty.
    """

    machine: str
    host: str
    pid: int
    born: str
    addresses: tuple[str, ...]
    port: int
    word: str
    error: str


class _Line:
    """A connection to another rank."""

    def __init__(self, sock: socket.socket, rank: int | None = None) -> None:
        self.sock, self.rank, self.buffer = sock, rank, b""


def listen() -> socket.socket:
    """A socket at which other ranks may call."""
    with OPENING:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        made = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        OTHERS.add(made.fileno())
    made.setblocking(False)
    return made


def here(server: socket.socket | None, error: str) -> Endpoint:
    """The endpoint of this rank, without its addresses."""
    pid, port, word = os.getpid(), server.getsockname()[1] if server else 0, os.urandom(16).hex()
    return Endpoint(process.machine(), socket.gethostname(), pid, process.born(pid), (), port, word, error)


def addresses() -> tuple[str, ...]:
    """By which other machines may reach this one: what the launcher said of the first rank, those of its name."""
    found = [launch.address] if (launch := launched()) is not None and launch.rank == 0 else []
    with contextlib.suppress(OSError):
        found += [str(to[0]) for *_, to in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return tuple(dict.fromkeys([a for a in found if not a.startswith("127.") and a != "::1"] + [socket.gethostname()]))


class Watcher:
    """Hears of ranks that are gone, tells the others of it, and ends what this rank waits for.

    Args:
        rank: this one.
        endpoints: of all ranks.
        server: of this one, from :func:`listen`.
        patience: seconds that a rank may be stopped, or a host silent.

    Attributes:
        gone: rank to how it left.
        fatal: the first of them that all leave for, or None.
        caught: whether its error was raised in the thread that trains.
    """

    def __init__(self, rank: int, endpoints: dict[int, Endpoint], server: socket.socket, patience: float) -> None:
        self.rank, self.endpoints, self.server, self.patience = rank, endpoints, server, patience
        self.own, self.pid = endpoints[rank], os.getpid()
        self.word = endpoints[min(endpoints)].word
        self.gone: dict[int, Obituary] = {}
        self.fatal: Obituary | None = None
        self.heard = threading.Event()
        self.caught, self.deadline = False, float("inf")
        self.trains = threading.get_ident()
        self.lines: list[_Line] = []
        self.up: int | None = None  # the rank that this one calls
        self.noted: set[int] = set()  # ranks that passed on that this one has come to its end, or cannot be reached
        self.stopped: dict[int, int] = {}  # rank to the number of looks, to the last one, that found it stopped
        self.ended: set[int] = set()  # ranks that a look found to have ended
        self.tries, self.over = 0, False
        self.lock = threading.RLock()
        self.closed = False
        self.woken, self.wakes = os.pipe()
        self.selector = selectors.DefaultSelector()
        self.selector.register(server, selectors.EVENT_READ, None)
        self.selector.register(self.woken, selectors.EVENT_READ, None)
        self.thread = threading.Thread(target=self._run, name="meshwright watches", daemon=True)
        self.hook = sys.excepthook
        sys.excepthook = self._uncaught
        # Processes of multiprocessing end without atexit.
        self.finalizer = Finalize(None, _close, (weakref.ref(self),), exitpriority=100)
        _ALIVE.add(self)
        self.thread.start()

    # -- who is where ---------------------------------------------------------------------------------

    def _near(self, rank: int) -> bool:
        return self.endpoints[rank].machine == self.own.machine

    def _neighbours(self) -> tuple[int | None, list[int]]:
        """The rank that this one calls, and those that call it.

        The first on a machine is called by the others there, the first of all by the first of each machine.
        """
        left = [r for r in sorted(self.endpoints) if r not in self.gone or r == self.rank]
        firsts: dict[str, int] = {}
        for rank in left:
            firsts.setdefault(self.endpoints[rank].machine, rank)
        calls = {r: first if (first := firsts[self.endpoints[r].machine]) != r else left[0] for r in left}
        up = calls.pop(self.rank)
        return up if up != self.rank else None, [r for r, called in calls.items() if called == self.rank]

    def _looked_at(self) -> list[int]:
        """The ranks whose processes this one looks at: the one that looks at it; of the first here all others."""
        near = [r for r in sorted(self.endpoints) if self._near(r) and r not in self.gone]
        return near[1:] if near[:1] == [self.rank] else near[:1]

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        next_look = time.monotonic()
        while not self.closed:
            if self.fatal is None and (up := self._neighbours()[0]) != self.up:
                self._call(up)
            wait = max(0.01, min(next_look, self.deadline) - time.monotonic())
            for key, _ in self.selector.select(wait):
                if key.fileobj is self.server:
                    self._accept()
                elif key.data is not None:
                    self._read(key.data)
                else:
                    os.read(self.woken, 64)
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK
            if time.monotonic() >= self.deadline:
                self._end()
        self._shut()

    def _call(self, rank: int | None) -> None:
        """Connect to the rank that is to be called now."""
        if rank is None:
            self.up = None
            return
        endpoint = self.endpoints[rank]
        for address in ("127.0.0.1", "::1") if self._near(rank) else endpoint.addresses:
            with contextlib.suppress(OSError):
                sock = _connected(address, endpoint.port, self.patience / 2)
                sock.sendall(_text({"rank": self.rank, "word": self._proof(self.rank)}))
                self.up, self.tries = rank, 0
                self._join(_Line(sock, rank))
                return
        self.tries += 1
        if self.tries > 5:  # it cannot be reached from here: then this rank is as without a watcher
            self.up, self.tries = rank, 0
            self.noted.add(rank)

    def _accept(self) -> None:
        with contextlib.suppress(OSError), OPENING:
            sock, _ = self.server.accept()
            OTHERS.add(sock.fileno())
            self._join(_Line(sock))

    def _join(self, line: _Line) -> None:
        """Listen to a connection; the kernel says when its host no longer answers."""
        line.sock.settimeout(1.0)
        for level, name, value in (
            (socket.SOL_SOCKET, "SO_KEEPALIVE", 1), (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
            (socket.IPPROTO_TCP, "TCP_KEEPIDLE", max(1, int(self.patience * 0.4))),
            (socket.IPPROTO_TCP, "TCP_KEEPINTVL", max(1, int(self.patience * 0.2))),
            (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
            (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", int(self.patience * 1000)),
        ):  # fmt: skip
            if hasattr(socket, name):
                line.sock.setsockopt(level, getattr(socket, name), value)
        with self.lock:
            self.lines.append(line)
            self.selector.register(line.sock, selectors.EVENT_READ, line)
        if line.rank is not None:
            self._greet(line)

    def _greet(self, line: _Line) -> None:
        """Say who is gone; the thread that trains may be about to say that it is."""
        with self.lock:
            for one in self.gone.values():
                with contextlib.suppress(OSError):
                    line.sock.sendall(_text(one._asdict()))

    def _proof(self, rank: int) -> str:
        return hashlib.sha256(f"{self.word}/{rank}".encode()).hexdigest()

    def _read(self, line: _Line) -> None:
        try:
            data = line.sock.recv(LIMIT)
        except OSError:
            data = b""
        *texts, line.buffer = (line.buffer + data).split(b"\n")
        for text in texts:
            try:
                said = json.loads(text)
                if line.rank is None:
                    rank = int(said["rank"])
                    if not (rank in self.endpoints and hmac.compare_digest(said["word"], self._proof(rank))):
                        raise ValueError
                    line.rank = rank
                    self._greet(line)
                elif "noted" in said:
                    self.noted.add(line.rank)
                else:
                    self._hear(one := Obituary(**said), line)
                    if one.rank == line.rank:
                        with contextlib.suppress(OSError):
                            line.sock.sendall(_text({"noted": one.rank}))
            except (ValueError, TypeError, KeyError):  # a stranger
                self._drop(line)
                return
        if not data or len(line.buffer) > LIMIT:
            self._drop(line)
            if line.rank is not None:
                self._lost(line.rank)

    def _drop(self, line: _Line) -> None:
        with self.lock:
            if line in self.lines:
                self.lines.remove(line)
                self.selector.unregister(line.sock)
                OTHERS.discard(line.sock.fileno())
                line.sock.close()

    def _lost(self, rank: int) -> None:
        """The connection to a rank ended: without a word before, it died."""
        if rank in self.gone or self.closed:
            return
        endpoint, code = self.endpoints[rank], None
        host = "has ended without a word, or its host does not answer"
        if self._near(rank):
            for _ in range(20):  # its files are closed a moment before it is seen to have ended
                code = process.status(endpoint.pid, endpoint.born)
                if code is not None or process.state(endpoint.pid, endpoint.born) == "ended":
                    break
                time.sleep(0.01)
        cause = process.how(code) if self._near(rank) else host
        if self.stopped.get(rank):
            cause = f"{STOPPED}, and {cause}"
        self._hear(Obituary(rank, endpoint.host, code != 0, cause))

    def _look(self) -> None:
        """Look at processes of this machine: a child of theirs may hold their connections, and stops close none."""
        for rank in self._looked_at():
            endpoint = self.endpoints[rank]
            found = process.state(endpoint.pid, endpoint.born)
            if found == "ended":
                if rank in self.ended:  # at the second look: its last word is heard first
                    self._lost(rank)
                self.ended.add(rank)
                continue
            self.stopped[rank] = self.stopped.get(rank, 0) + 1 if found == "stopped" else 0
            if self.stopped[rank] * LOOK > self.patience:
                self._hear(Obituary(rank, endpoint.host, True, f"{STOPPED} for {self.patience:g} s, and is ended"))
                with contextlib.suppress(OSError):
                    os.kill(endpoint.pid, signal.SIGKILL)

    # -- what is heard, and told ----------------------------------------------------------------------

    def _hear(self, one: Obituary, source: _Line | None = None) -> None:
        """Note how a rank left, tell those who may not know, and leave if it is to be left for."""
        with self.lock:
            if one.rank in self.gone or one.rank not in self.endpoints:
                return
            self.gone[one.rank] = one
            text = _text(one._asdict())
            for line in self.lines:
                if line is not source and line.rank is not None:
                    with contextlib.suppress(OSError):
                        line.sock.sendall(text)
            if one.fatal and one.rank != self.rank and self.fatal is None:
                self._leave(one)

    def _leave(self, one: Obituary) -> None:
        self.fatal, self.deadline = one, time.monotonic() + GRACE
        for link in links(runtime.RT.groups.values()):
            link.leave(one.cause)
            if not link.gloo:
                with contextlib.suppress(Exception):  # NCCL: frees the host and the device
                    link.pg.abort()
        self.heard.set()

    def _end(self) -> None:
        """The time for an error to be raised is over."""
        self.deadline = float("inf")
        if self.over:
            os._exit(1)
        leaves = self.caught or self.rank in self.gone or self.closed  # with an error of its own, or ours
        if self.fatal is not None and not leaves and not report.interactive():
            report.end_process(report.failed([self.fatal], ""), self.trains)

    def error(self, where: str, what: str = "") -> RankFailedError | None:
        """The error that a collective raises now, if a rank is gone that all leave for; it may be this one."""
        one = self.fatal or self.gone.get(self.rank)
        if one is None or not one.fatal:
            return None
        if threading.get_ident() == self.trains or threading.current_thread() is threading.main_thread():
            self.caught = True
        return report.failed([one], where, what)

    def missed(self, ranks: tuple[int, ...]) -> list[Obituary]:
        """Those of ``ranks`` that have come to their end."""
        return [self.gone[r] for r in ranks if r in self.gone] if self.gone else []

    def tell(self, error: BaseException | None, *, ending: bool = True) -> None:
        """Say how this rank leaves: with an error, or as it should; not ``ending``: its process goes on."""
        self._hear(Obituary.of(self.rank, self.own.host, error, ending))

    def _uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        """An error that nobody caught: the others are told at once, and nothing keeps this process."""
        if os.getpid() != self.pid or self.closed or report.interactive():
            return self.hook(kind, error, trace)
        self.tell(error)
        self.hook(kind, error, trace)
        if isinstance(error, RankFailedError):
            report.note_error(str(error), "")
            self.over, self.deadline = True, time.monotonic() + GRACE
            self._wake()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave: this rank came to its end, or its process group did."""
        if os.getpid() != self.pid or self.closed:
            return
        self.tell(sys.exc_info()[1], ending=_ending())
        if threading.current_thread() is not self.thread:
            self._stay()
        self.closed = True
        self.finalizer.cancel()
        if sys.excepthook == self._uncaught:
            sys.excepthook = self.hook
        self._wake()
        if threading.current_thread() is not self.thread:
            self.thread.join(1.0)

    def _stay(self) -> None:
        """Wait until the neighbours know that this rank has come to its end: a connection without a word is a death."""
        end = time.monotonic() + STAY
        while self.thread.is_alive() and self.fatal is None and time.monotonic() < end:
            with self.lock:
                (up, callers), called = self._neighbours(), {line.rank for line in self.lines}
            if (up is None or up in self.noted) and called.issuperset(callers):
                return
            self._wake()
            time.sleep(0.002)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self.wakes, b"x")

    def _shut(self) -> None:
        _ALIVE.discard(self)
        for line in list(self.lines):
            self._drop(line)
        self.forget()

    def forget(self) -> None:
        """Close what this process holds, without a word."""
        self.closed = True
        self.selector.close()
        for sock in (self.server, *(line.sock for line in self.lines)):
            OTHERS.discard(sock.fileno())
            sock.close()
        for fd in (self.woken, self.wakes):
            with contextlib.suppress(OSError):
                os.close(fd)


def _connected(address: str, port: int, timeout: float) -> socket.socket:
    """A connection that is noted as no backend's before it is open."""
    family, kind, proto, _, to = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with OPENING:
        sock = socket.socket(family, kind, proto)
        OTHERS.add(sock.fileno())
    sock.settimeout(timeout)
    try:
        sock.connect(to)
    except OSError:
        OTHERS.discard(sock.fileno())
        sock.close()
        raise
    return sock


def _text(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode()[: LIMIT - 1] + b"\n"


def _close(watcher: weakref.ref[Watcher]) -> None:
    found = watcher()
    if found is not None:
        found.close()


def _ending() -> bool:
    """Whether this is called since the process ends, and not from code of the user's that handles an error."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "_exit_function" and frame.f_globals.get("__name__") == "multiprocessing.util":
            return True
        frame = frame.f_back
    return False


_ALIVE: weakref.WeakSet[Watcher] = weakref.WeakSet()


def _in_child() -> None:
    OPENING._at_fork_reinit()  # type: ignore[attr-defined]  # the thread that held it is not here
    for watcher in list(_ALIVE):  # a child that holds them would keep the others from seeing that its parent died
        watcher.forget()
    _ALIVE.clear()


os.register_at_fork(after_in_child=_in_child)

__all__ = ["Endpoint", "Watcher", "addresses", "here", "listen"]
