"""A process group as its ranks use it, and how to leave it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import zlib
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

from .simulation import Call

TIMEOUT = 300.0  # longer than what one rank does alone (a checkpoint, a look at data), short enough to be sat through
RECENT = 32
OPENING = threading.Lock()  # held while a socket that is no backend's is opened and noted
OTHERS: set[int] = set()  # file descriptors of these


class Link:
    """A process group as its ranks use it: how far each is, and with what.

    Attributes:
        pg: torch's ProcessGroup.
        ranks: global ranks of its members.
        gloo: whether gloo carries it.
        count: collectives that this rank has begun.
        trace: digest of all their signatures, in order.
        recent: (number, signature) of the last ones.
        telling: whether the ranks know that they differ, and tell each other.
        broken: why nothing more can be sent, or empty.
        lane: what tells it from other groups of the same ranks.
        side: a gloo group of the same ranks for what they compare, where another backend carries the tensors.
        callers: threads of this process that began a collective of any group, with their names.
    """

    __slots__ = ("broken", "count", "gloo", "lane", "pg", "ranks", "recent", "side", "sockets", "telling", "trace")
    latest: ClassVar[deque[tuple[int, Call]] | None] = None  # ``recent`` of the link that was used last
    callers: ClassVar[dict[int, str]] = {}

    def __init__(
        self,
        pg: Any,
        ranks: tuple[int, ...],
        gloo: bool,
        sockets: dict[int, str] | None = None,
        lane: str = "",
        side: Link | None = None,
    ) -> None:
        self.pg, self.ranks, self.gloo = pg, ranks, gloo
        self.lane, self.side = lane, side
        self.sockets = sockets or {}
        self.count = self.trace = 0
        self.recent: deque[tuple[int, Call]] = deque(maxlen=RECENT)
        self.broken, self.telling = "", False

    def began(self, call: Call) -> int:
        """Note a collective; its number in this group."""
        self.count += 1
        self.trace = (self.trace * 1000003 + mark(call)) & 0x7FFFFFFFFFFFFFFF
        self.recent.append((self.count, call))
        Link.latest = self.recent
        if (thread := threading.get_ident()) not in Link.callers:
            Link.callers[thread] = threading.current_thread().name
        return self.count

    def leave(self, why: str) -> None:
        """Nothing more is sent: the others hear of it at once, and no thread of the backend waits for ever."""
        self.broken = why
        if self.side is not None:
            self.side.leave(why)
        for fd, inode in self.sockets.items():
            with contextlib.suppress(OSError):
                if _inode(fd) == inode:
                    with socket.socket(fileno=os.dup(fd)) as own:
                        own.getpeername()  # raises for one that listens
                        own.shutdown(socket.SHUT_RDWR)


def by_threads() -> str:
    """What to say of ranks that disagree where several threads of this one began collectives; empty where one did."""
    names = sorted({name for name in Link.callers.values() if not name.startswith("Dummy-")})  # autograd has these
    if len(names) < 2:
        return ""
    return (
        f"; on this rank several threads communicate ({', '.join(names)}), which take turns otherwise on each rank: "
        "let one thread do all that does, or have the others wait for it"
    )


def links(groups: Iterable[Any]) -> list[Link]:
    """The links among what a runtime keeps of groups, once each."""
    found = (one if isinstance(one, Link) else getattr(one, "link", None) for one in list(groups))
    own = [link for link in found if link is not None]
    return list({id(link): link for link in (*own, *(link.side for link in own)) if link is not None}.values())


@lru_cache(maxsize=4096)
def mark(call: Call) -> int:
    """A signature as a number, the same in every process; without what may differ from rank to rank."""
    shape = tuple(-1 if i in call.free_dims else n for i, n in enumerate(call.shape))
    return zlib.crc32(repr((call.kind, call.op, call.dtype, shape, call.args, call.tag)).encode())


def _inode(fd: int | str) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def open_sockets() -> dict[int, str]:
    """File descriptors of the sockets of this process, with what they are; empty where the system does not say."""
    found = {}
    with OPENING, contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (inode := _inode(fd)).startswith("socket:") and int(fd) not in OTHERS:
                    found[int(fd)] = inode
    return found


__all__ = ["OPENING", "OTHERS", "TIMEOUT", "Link", "links", "mark", "open_sockets"]
