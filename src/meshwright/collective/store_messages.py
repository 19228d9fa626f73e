"""What ranks tell each other beside the collectives: through the store that they met by, and never for long."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from ..failures import process
from ..ranks import runtime

PATIENCE = 2.0  # seconds for the store to answer: the process that holds it may be the one that is stopped


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is.

    Attributes:
        state: ``waits``, ``failed``, or ``gone`` where it failed since another rank is.
        ranks, number: the group that it waits in, and the number of the collective there.
        where: the collective with its group and the user's line.
        counts: group to the number of collectives that the rank has begun there.
        recent: number, mark and text of the last ones in this group.
        text: why it failed.
        lane: what tells the group from others of the same ranks.
    """

    state: str
    ranks: tuple[int, ...]
    number: int
    where: str
    counts: dict[str, int]
    recent: list[tuple[int, int, str]]
    text: str
    lane: str = ""

    @property
    def key(self) -> str:
        """The group that it waits in."""
        return key_of(self.ranks, self.lane)


def key_of(ranks: Sequence[int], lane: str = "") -> str:
    """A group as a key."""
    return ",".join(map(str, ranks)) + lane


def announce() -> None:
    """Say which process this rank is."""
    here = json.dumps([process.machine(), os.getpid(), process.born(os.getpid())])
    rank = runtime.RT.rank

    def tell(store: Any) -> None:
        store.set(f"who/{rank}", here)
        store.set(f"word/{rank}", "")  # the store may be that of an earlier process group

    _ask(tell)


def say(word: RankStatus | None) -> None:
    """Leave a word for the others; None takes it back."""
    text = "" if word is None else json.dumps(asdict(word))
    rank = runtime.RT.rank
    _ask(lambda store: store.set(f"word/{rank}", text))


def hear(
    known: dict[int, RankStatus], ranks: Sequence[int], patience: float = 0.0, until: Callable[[], Any] = lambda: None
) -> dict[int, RankStatus]:
    """The words of ``ranks``, and of the ranks that these wait for.

    Args:
        known: words that are known already.
        patience: seconds to wait for the word of a rank that says why it failed.
        until: true once what it waits for was heard otherwise.
    """
    heard, todo, end = dict(known), [r for r in ranks if r not in known], time.monotonic() + patience
    silent: list[int] = []
    asked: set[int] = set(known) | {runtime.RT.rank}
    while todo:
        rank = todo.pop()
        if rank in asked:
            continue
        asked.add(rank)
        word = _read(rank)
        if word is None:
            silent.append(rank)
            continue
        heard[rank] = word
        todo += word.ranks
    while silent and time.monotonic() < end and not until() and not any(w.state != "waits" for w in heard.values()):
        time.sleep(0.05)
        heard.update({r: w for r in silent if (w := _read(r)) is not None})
    return heard


def _read(rank: int) -> RankStatus | None:
    text = _ask(lambda store: store.get(f"word/{rank}") if store.check([f"word/{rank}"]) else b"")
    if not text:
        return None
    given = json.loads(text)
    given["ranks"], given["recent"] = tuple(given["ranks"]), [tuple(r) for r in given["recent"]]
    return RankStatus(**given)


def process_of(rank: int) -> str:
    """What the system says of the process of a rank on this machine, where it is not running."""
    text = _ask(lambda store: store.get(f"who/{rank}") if store.check([f"who/{rank}"]) else b"")
    if not text:
        return ""
    machine, pid, born = json.loads(text)
    found = process.state(pid, born) if machine == process.machine() else ""
    said = {"ended": f"its process {pid} has ended", "stopped": f"its process {pid} is stopped (SIGSTOP, SIGTSTP)"}
    return said.get(found, "")


def _ask(question: Callable[[Any], Any]) -> Any:
    """The answer of the store, or None: in a thread that is left behind where it does not come."""
    if not dist.is_initialized():
        return None
    answer: list[Any] = []

    def ask() -> None:
        try:
            store = dist.distributed_c10d.PrefixStore("meshwright", dist.distributed_c10d._get_default_store())
            answer.append(question(store))
        except Exception:  # the store is gone with the rank that held it: then nothing is known
            answer.append(None)

    asking = threading.Thread(target=ask, daemon=True, name="meshwright asks the store")
    asking.start()
    asking.join(PATIENCE)
    return answer[0] if answer else None
