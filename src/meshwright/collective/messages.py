"""What ranks tell one another beside the collectives, from threads too: the first rank hears all, and all hear it."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch.distributed as dist

from ..errors import CollectiveError
from ..failures import process
from ..failures.watchdog import Endpoint, Watcher, addresses, here, listen
from ..mesh import Mesh
from ..ranks import runtime
from ..ranks.process_group import TIMEOUT
from .groups import backend_name, group
from .ops import all_gather_object

POLL = 0.005, 0.2  # seconds between two looks: at first, at most


class StoreMailbox:
    """One round of words between the ranks of a mesh, through the store by which they met.

    Made, and used once, by all ranks of the mesh together; :meth:`collect` and :meth:`announce` may be called in a
    thread, except on simulated ranks.

    Args:
        subject: what it is about; the same on all ranks, and never used before.
    """

    def __init__(self, mesh: Mesh, subject: str) -> None:
        rt = runtime.RT
        self.subject = subject
        self.mesh, self.rank, self.alone = mesh, rt.rank, mesh.size == 1
        self.first = self.rank == mesh.ranks[0]
        self.simulated, self.timeout = rt.sim is not None, rt.timeout or TIMEOUT
        if not self.alone and not self.simulated:
            store: Any = dist.distributed_c10d._get_default_store()
            self.store = dist.distributed_c10d.PrefixStore(f"meshwright/{subject}", store)

    def collect(self, word: str) -> list[str]:
        """On the first rank the words of all, in the order of the mesh; elsewhere nothing is waited for.

        Raises:
            CollectiveError: a rank says nothing within the time that a collective may take.
        """
        if self.alone:
            return [word]
        if self.simulated:
            return all_gather_object(word, group(self.mesh))
        self.store.set(str(self.rank), word)
        return [self._heard(str(rank), rank) for rank in self.mesh.ranks] if self.first else []

    def announce(self, word: str) -> str:
        """What the first rank says, on every rank.  Raises as :meth:`collect`."""
        if self.alone:
            return word
        if self.simulated:
            return all_gather_object(word, group(self.mesh))[0]
        if self.first:
            self.store.set("first", word)
            return word
        return self._heard("first", self.mesh.ranks[0])

    def _heard(self, key: str, rank: int) -> str:
        """A word, when it is there.  Asked for again and again: who waits in the store keeps other threads from it."""
        wait, longest = POLL
        end = time.monotonic() + self.timeout
        while not self.store.check([key]):
            watcher = runtime.RT.watcher
            if watcher is not None and (lost := watcher.error(f"a round of words about {self.subject}")):
                raise lost
            if time.monotonic() > end:
                raise CollectiveError(
                    f"rank {rank} did not answer for {self.timeout:g} s. It is stopped or has exited."
                )
            time.sleep(wait)
            wait = min(2 * wait, longest)
        word: bytes = self.store.get(key)
        return word.decode()


def watch_over(mesh: Mesh, patience: float) -> None:
    """Watch the ranks of a mesh from now on; they call it together.  The watcher there is stays.

    Args:
        patience: seconds that a rank may be stopped, or a machine silent.
    """
    rt, everyone = runtime.RT, group(mesh)
    if rt.watcher is not None or rt.sim is not None or mesh.size == 1:
        return
    if backend_name(everyone.pg, mesh.device) == "fake":  # which reaches nobody: there are no others
        return
    try:
        server = listen()
    except OSError as error:  # no rank of it is heard: then none is
        server, why = None, str(error)
    own = here(server, "" if server else why)
    found = [Endpoint(*given) for given in all_gather_object(tuple(own), everyone)]
    if silent := next((f"{one.host}: {one.error}" for one in found if one.error), ""):
        if rt.rank == mesh.ranks[0]:
            warnings.warn(f"nobody watches for ranks that die: no port on {silent}", RuntimeWarning, stacklevel=3)
        return
    assert server is not None
    if len({endpoint.machine for endpoint in found}) > 1:
        own = own._replace(addresses=addresses())
        found = [Endpoint(*given) for given in all_gather_object(tuple(own), everyone)]
    rt.watcher = Watcher(rt.rank, dict(zip(mesh.ranks, found, strict=True)), server, patience)


def on_one_machine(mesh: Mesh) -> bool:
    """Whether all ranks of a mesh are processes of one running system; asked once, by all together.

    Simulated ranks stand for those of any machines.
    """
    rt = runtime.RT
    if mesh.size == 1 or rt.sim is not None:
        return mesh.size == 1
    key = "on one machine", mesh.ranks
    if key not in rt.groups:
        rt.groups[key] = len(set(all_gather_object(process.machine(), group(mesh)))) == 1
    answer: bool = rt.groups[key]
    return answer


def leave_with(error: BaseException) -> None:
    """Tell the others that this rank leaves with an error that is caught further up: they need not wait for its end."""
    if runtime.RT.watcher is not None:
        runtime.RT.watcher.tell(error)


__all__ = ["StoreMailbox", "leave_with", "on_one_machine", "watch_over"]
