"""How processes of one attempt find each other where the store outlives them, as that of torchrun's agent does.

An attempt that failed leaves what its processes wrote: gloo would connect to addresses of processes that are dead.  So
the first rank, which is alive, gives each attempt a name of its own; a name that was left is never asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from ..launchers import Launch, keeps_store

LONG = 600.0  # seconds for the first rank to start
STORES: Any = dist  # has them, and does not say so to type checkers
POLL = 0.02  # seconds between two looks whether a rank asks


@contextmanager
def meeting(launch: Launch, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Inside, ``init_process_group`` with these arguments makes the group of the processes that were started together.

    Args:
        timeout: seconds that a process waits for the first one.

    Raises:
        RuntimeError: the first rank does not answer in time.
    """
    here = {"rank": launch.rank, "world_size": launch.world}
    if launch.by == "torchrun" and not keeps_store():
        yield {}  # as the environment says
    elif launch.by != "torchrun":
        yield {**here, "init_method": f"tcp://{launch.address}:{launch.port}"}
    else:
        with _named(launch, timedelta(seconds=timeout or LONG)) as store:
            yield {**here, "store": store}


@contextmanager
def _named(launch: Launch, timeout: timedelta) -> Iterator[Any]:
    """The store of this attempt; inside, the first rank tells the others which that is."""
    store = STORES.TCPStore(launch.address, launch.port, launch.world, False, timeout, wait_for_workers=False)
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
