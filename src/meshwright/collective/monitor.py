"""Collectives of real ranks, watched: what fails, hangs or does not fit says who was where.

Backends know neither ops nor lines.  So each call leaves its signature, and a rank that has waited for a while tells
the others through the store where it waits, and hears where they do.  From the same words all ranks come to the same
verdict: ranks that called different collectives, or wait for each other, are told within seconds; a rank that is
stopped, or busy for too long, ends the wait of the others after ``init_mesh(timeout=)``.
"""

from __future__ import annotations

import itertools
import re
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ..errors import CollectiveError, DesyncError, RankFailedError
from ..failures.report import failed
from ..ranks import runtime
from ..ranks.process_group import TIMEOUT, by_threads, links, mark
from ..ranks.simulation import Call
from . import ranges, store_messages
from .groups import Group
from .ranges import profiler
from .store_messages import RankStatus

TICK = timedelta(seconds=0.5)  # between two looks, so that signals are handled while a rank waits
SPEAK = 3.0  # seconds of waiting after which a rank tells the others, and again after as many
MOMENT = 1.0  # seconds after which what a rank has sent before its end is here
NOTICE = 30.0  # seconds of waiting after which it is said aloud
CLOSED = re.compile("closed by peer|reset by peer|Broken pipe", re.IGNORECASE)
CHECK = "mw.init_mesh(..., check=True) compares every collective before it runs"


# ---------------------------------------------------------------------------------------------- one collective


def started(group: Group, call: Call, start: Callable[..., Any], *args: Any) -> Underway:
    """Start a collective of real ranks: ``start(*args)``.

    Raises:
        RankFailedError: a rank is gone.
        DesyncError: it could not be started; in check mode, if the ranks are about to do different things.
        CollectiveError: the group belongs to a process group that was destroyed.
    """
    link = group.link
    assert link is not None
    if group.home is not runtime.RT:
        raise CollectiveError(
            f"{call}: its group was made for a process group that was destroyed; what was prepared for it (a captured "
            "step, say) must be made anew after init_process_group"
        )
    if link.broken:
        if (lost := _lost(group, call)) is not None:
            raise lost
        raise DesyncError(
            f"{call}: this group of ranks is broken since an earlier collective failed: {link.broken}. Start the "
            "processes again, from the last checkpoint, or make new groups on all ranks (destroy_process_group, "
            "init_process_group, mw.init_mesh)"
        )
    number = link.began(call)
    try:
        if profiler._is_profiler_enabled:
            name = ranges.named(group, call)
            return _Profiled(ranges.started_in(name, start, args), group, call, number, name)
        return Underway(start(*args), group, call, number)
    except RuntimeError as error:
        raise failure(group, call, number, first_line(error)) from error


class Underway:
    """A collective of real ranks that was started."""

    __slots__ = ("call", "group", "number", "work")

    def __init__(self, work: Any, group: Group, call: Call, number: int) -> None:
        self.work, self.group, self.call, self.number = work, group, call, number

    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self.work is None or bool(self.work.is_completed())

    def wait(self) -> None:
        """Until it is complete.

        Raises:
            RankFailedError: a rank is gone.
            DesyncError: it failed, ranks disagree, or it took longer than the time-out.
        """
        work, self.work = self.work, None
        if work is None:
            return
        link = self.group.link
        assert link is not None
        try:
            if not link.gloo:
                work.wait()
                return
            try:
                work.wait(TICK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # it was complete just now, or says why it failed
                    return
            _Watch(self.group, self.call, self.number).wait(work)
        except DesyncError:
            raise
        except RuntimeError as error:
            raise failure(self.group, self.call, self.number, first_line(error)) from error
        except BaseException as error:  # Ctrl-C
            _give_up(self.group, self.call, self.number, f"{type(error).__name__} on rank {runtime.RT.rank}")
            raise


class _Profiled(Underway):
    """One that was started while somebody profiles: the wait has a range too."""

    __slots__ = ("name",)

    def __init__(self, work: Any, group: Group, call: Call, number: int, name: str) -> None:
        super().__init__(work, group, call, number)
        self.name = name

    def wait(self) -> None:
        if self.work is None:
            return
        with ranges.waiting_for(self.name):
            super().wait()


class _Watch:
    """One wait that takes long."""

    def __init__(self, group: Group, call: Call, number: int) -> None:
        self.group, self.call, self.number = group, call, number
        self.began = time.monotonic()
        self.limit = runtime.RT.timeout or TIMEOUT
        self.suspected = ""
        self.alone = 0.0  # seconds that were waited when all ranks of the group were last there

    def wait(self, work: Any) -> None:
        """Wait for ``work``, speaking to the others now and then."""
        spoken, noticed = 0, False
        while True:
            waited = time.monotonic() - self.began
            self._missed(waited)
            if waited >= self.limit:
                raise failure(self.group, self.call, self.number, f"not complete after {self.limit:g} s", late=True)
            if waited >= SPEAK * (spoken + 1):
                spoken += 1
                self._confer()
            if waited >= NOTICE and not noticed:
                noticed = True
                self._notice()
            try:
                work.wait(TICK)
            except RuntimeError:
                if not work.is_completed():
                    continue
                work.wait()
            if spoken:
                store_messages.say(None)
            return

    def _missed(self, waited: float) -> None:
        """Raise if a rank of the group has come to its end; what it sent before has arrived after a moment."""
        watcher = runtime.RT.watcher
        gone = watcher.missed(self.group.ranks) if watcher is not None else []
        if not gone:
            self.alone = waited
        elif waited - self.alone >= MOMENT:
            raise failure(self.group, self.call, self.number, "ranks of the group have left", late=True)

    def _confer(self) -> None:
        """Tell where this rank waits, hear where the others do, and raise if that can never end."""
        own = _word("waits", self.group, self.call, self.number, "")
        store_messages.say(own)
        heard = store_messages.hear({runtime.RT.rank: own}, self.group.ranks)
        verdict = judge(heard, runtime.RT.rank)
        if verdict and verdict == self.suspected:  # heard twice: nobody was just about to go on
            raise failure(self.group, self.call, self.number, verdict, told=True)
        self.suspected = verdict

    def _notice(self) -> None:
        warnings.warn(
            f"{_where(self.group, self.call)} waits for {NOTICE:g} s now"
            f"{_peers(self.group, store_messages.hear({}, self.group.ranks))}\n"
            f"It is an error after {self.limit:g} s; mw.init_mesh(..., timeout=seconds) says how long",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- verdicts


def _word(state: str, group: Group, call: Call, number: int, text: str) -> RankStatus:
    counts: dict[str, int] = {}
    for link in links(runtime.RT.groups.values()):
        key = store_messages.key_of(link.ranks, link.lane)
        counts[key] = max(counts.get(key, 0), link.count)
    recent = [(n, mark(c), str(c)) for n, c in list(group.link.recent)] if group.link else []
    lane = group.link.lane if group.link else ""
    return RankStatus(state, group.ranks, number, _where(group, call), counts, recent, text, lane)


def judge(heard: dict[int, RankStatus], me: int) -> str:
    """What is wrong, as far as the words of the waiting ranks say; empty where the wait may still end well."""
    own = heard[me]
    for rank in own.ranks:
        word = heard.get(rank)
        if word is not None and word.state != "waits":
            return word.text
        if word is not None and rank != me and word.key == own.key:
            theirs = {n: (m, text) for n, m, text in word.recent}
            for n, m, text in own.recent:
                if n in theirs and theirs[n][0] != m:
                    sides = {me: _side(own, n, text), rank: _side(word, n, theirs[n][1])}
                    return disagreement(own.ranks, sides, n)
    stuck = _stuck(heard, me)
    if stuck:
        lines = "".join(f"\n  rank {r}: waits in {heard[r].where}" for r in sorted(stuck))
        return f"deadlock: every rank waits for another one{lines}"
    return ""


def _side(word: RankStatus, number: int, text: str) -> str:
    return word.where if number == word.number else f"{text}; now in {word.where}"


def _stuck(heard: dict[int, RankStatus], me: int) -> set[int]:
    """The ranks that wait for each other in a circle that ``me`` waits for; empty if there is none."""
    seen: set[int] = set()
    todo = [me]
    while todo:
        rank = todo.pop()
        if rank in seen:
            continue
        seen.add(rank)
        word = heard.get(rank)
        if word is None or word.state != "waits":
            return set()
        missing = [r for r in word.ranks if r not in heard or heard[r].counts.get(word.key, 0) < word.number]
        if not missing:
            return set()  # all have come: slow, not stuck
        todo += missing
    return seen


def disagreement(ranks: Sequence[int], calls: dict[int, str], number: int) -> str:
    """The text of an error that names the sides."""
    table = "".join(f"\n  rank {r}: {calls[r]}" for r in sorted(calls))
    return (
        f"ranks {tuple(ranks)} disagree in one collective (number {number} of their group){table}\n"
        f"every rank must run the same ops in the same order; .item(), print and mw.unshard count too{by_threads()}"
    )


# ---------------------------------------------------------------------------------------------- errors


def first_line(error: BaseException) -> str:
    """What a backend says, without what it says on top."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.split("] ", 1)[-1].split(". This is typically", 1)[0]


def _where(group: Group, call: Call) -> str:
    over = ",".join(group.axes) or "a group of"
    return f"{call} over {over} (ranks {', '.join(map(str, group.ranks))}) at {runtime.user_line()}"


def _give_up(group: Group, call: Call, number: int, text: str, state: str = "failed") -> None:
    store_messages.say(_word(state, group, call, number, text))
    if group.link is not None:
        group.link.leave(text)


def failure(group: Group, call: Call, number: int, what: str, *, told: bool = False, late: bool = False) -> DesyncError:
    """The error for a collective that failed; the others are told.

    Args:
        what: what went wrong.
        told: it says who was where already.
        late: it was given up.
    """
    lost = _lost(group, call, what)
    if lost is not None:
        return lost
    where = f"rank {runtime.RT.rank}: {_where(group, call)}"
    if told:
        _give_up(group, call, number, what)
        return DesyncError(f"{where}: {what}")
    watcher = runtime.RT.watcher
    heard = store_messages.hear({}, group.ranks, 0.0 if late else 1.0, lambda: watcher is not None and watcher.fatal)
    lost = _lost(group, call, what)
    if lost is not None:
        return lost
    said = next((w for w in heard.values() if w.state != "waits" and w.text), None)
    text = f"{where} failed: {what}{_peers(group, heard)}"
    ended = [r for r in group.ranks[:16] if "has ended" in store_messages.process_of(r)]
    gone = said.state == "gone" if said is not None else bool(ended or CLOSED.search(what))
    missed = watcher.missed(group.ranks) if watcher is not None else []
    if missed and (gone or said is None):
        _give_up(group, call, number, str(missed[0]), "gone")
        return failed(missed, _where(group, call), what)
    _give_up(group, call, number, said.text if said is not None else f"{where} failed: {what}", *["gone"] * gone)
    if gone:
        ranks = tuple(ended or (r for r in group.ranks if r not in heard and r != runtime.RT.rank))
        cause = "has ended" if ended else "is presumed to be gone"
        return RankFailedError(text, ranks, "", cause, _where(group, call), runtime.RT.updates)
    fix = "raise mw.init_mesh(..., timeout=) if a rank may take that long, or look at what it does" if late else CHECK
    return DesyncError(f"{text}\n{fix}")


def _lost(group: Group, call: Call, what: str = "") -> RankFailedError | None:
    """The error, if the watcher has heard of a rank that is gone."""
    watcher = runtime.RT.watcher
    found: RankFailedError | None = watcher.error(_where(group, call), what) if watcher is not None else None
    return found


def _peers(group: Group, heard: dict[int, RankStatus]) -> str:
    """A line for each other rank: what is known of it."""
    lines = []
    for rank in itertools.islice((r for r in group.ranks if r != runtime.RT.rank), 16):
        word, process = heard.get(rank), store_messages.process_of(rank)
        if word is None:
            said = "has not come to a collective that it had to wait in: it computes, reads data, or has ended"
            said = process or said
        elif word.state != "waits":
            said = f"failed: {word.text}"
        else:
            said = f"waits in {word.where}" + (f" ({process})" if process else "")
        lines.append(f"\n  rank {rank}: {said}")
    return "".join(lines)
