"""How processes of one attempt find each other where the store outlives them, as that of torchrun's agent does.

An attempt that failed leaves what its processes wrote: gloo would connect to addresses of processes that are dead.  So
the first rank, which is alive, gives each attempt a name of its own; a name that was left is never asked for.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from ..errors import MeshError
from ..ranks.launchers import Launch, keeps_store

LONG = 600.0  # seconds for the first rank to start
STORES: Any = dist  # has them, and does not say so to type checkers
POLL = 0.02  # seconds between two looks whether a rank asks
LOOK, MUTE = 1.0, 30  # seconds between two looks whether the store answers; looks that find one that does not
FREE = "set MASTER_PORT to one that is free, on all ranks alike"


@contextmanager
def meeting(launch: Launch, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Inside, ``init_process_group`` with these arguments makes the group of the processes that were started together.

    Args:
        timeout: seconds that a process waits for the first one.

    Raises:
        RuntimeError: the first rank does not answer in time.
        MeshError: another program has the port where the ranks are to meet.
    """
    here, limit = {"rank": launch.rank, "world_size": launch.world}, timedelta(seconds=timeout or LONG)
    if launch.by == "torchrun" and keeps_store():
        with _named(launch, limit) as store:
            yield {**here, "store": store}
        return
    if launch.rank:
        _store(launch, limit)
    try:  # of torchrun as the environment says
        yield {} if launch.by == "torchrun" else {**here, "init_method": f"tcp://{launch.address}:{launch.port}"}
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise MeshError(f"init_mesh: another program has port {launch.port} here: {FREE}") from error
        raise


def _store(launch: Launch, timeout: timedelta) -> Any:
    """The store of the processes, once it answers.

    torch's client waits without end for the answer of a program that takes the connection and is none: so it waits in a
    thread, which nobody waits for.

    Raises as :func:`meeting`.
    """
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(
                STORES.TCPStore(launch.address, launch.port, launch.world, False, timeout, wait_for_workers=False)
            )
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, daemon=True, name="meshwright connects")
    thread.start()
    thread.join(LOOK)
    mute = 0
    while not made:
        mute = mute + 1 if _listens(launch) else 0
        if mute > MUTE:
            raise MeshError(
                f"init_mesh: what listens at {launch.address}:{launch.port} does not answer as the store of rank 0 "
                f"does: another program has the port; {FREE}"
            )
        thread.join(LOOK)
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _listens(launch: Launch) -> bool:
    """Whether anybody takes connections where the first rank is to be."""
    try:
        socket.create_connection((launch.address, launch.port), LOOK).close()
    except OSError:
        return False
    return True


@contextmanager
def _named(launch: Launch, timeout: timedelta) -> Iterator[Any]:
    """The store of this attempt; inside, the first rank tells the others which that is."""
    store = _store(launch, timeout)
    own = uuid4().hex
    if launch.rank == 0:
        done = threading.Event()
        telling = threading.Thread(target=_answer, args=(launch, own, done), daemon=True, name="meshwright joins")
        telling.start()
        try:
            yield STORES.PrefixStore(f"meshwright/{own}", store)
        finally:
            done.set()
            telling.join()
        return
    number = store.add("meshwright/asks", 1)
    store.set(f"meshwright/ask/{number}", own)
    yield STORES.PrefixStore(f"meshwright/{store.get(f'meshwright/answer/{own}').decode()}", store)


def _answer(launch: Launch, name: str, done: threading.Event) -> None:
    """Answer whoever asks, also ranks that died since; by a connection of its own, as who waits in one keeps it."""
    store = STORES.TCPStore(launch.address, launch.port, None, False, wait_for_workers=False)
    told, open_ = 0, set[int]()
    while not done.wait(POLL):
        asked = store.add("meshwright/asks", 0)
        open_ |= set(range(told + 1, asked + 1))
        told = asked
        for number in sorted(open_):
            if store.check([f"meshwright/ask/{number}"]):  # else it is about to be
                who = store.get(f"meshwright/ask/{number}").decode()
                store.set(f"meshwright/answer/{who}", name)
                open_.discard(number)


__all__ = ["meeting"]
