"""What ranks compare with each other: always where it costs nothing, everything in check mode."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CollectiveError, DesyncError
from ..local_tensor import bare, mine
from ..ranks import runtime
from ..ranks.process_group import mark
from ..ranks.simulation import Call
from . import ranges
from .claims import PLAIN, Row, Window, claim, verdict, window, word
from .digest import digests
from .groups import Group
from .monitor import disagreement, failure, started
from .transport import GATHER, Pending

Tensor = torch.Tensor
_FOLD: dict[str, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}
WORDS = 8  # that a small message has
_ABOUT = Call("check")
_APART = "are about to run different collectives"
_OBJECTS = Call("all_gather_object")
_SO_FAR = Call("what was done so far")
_CLAIMS = Call("plain tensors")


def _exchanged(words: Sequence[int] | Tensor, group: Group, call: Call) -> Callable[[], Tensor]:
    """Start to send a few words (up to ``WORDS``) to all real ranks; the answer has a row of each.  Not counted.

    All such messages are of one size and begin with a signature of all collectives of the group so far, so whichever
    of them meet, nothing of what came is used before it is known to be what was asked for.  What the rank claimed of
    plain tensors since the last one travels with it.

    Raises:
        DesyncError: on every rank, from the answer: they ran different collectives in this group, or claimed other
            values.
    """
    link, over = group.link, group.words or group
    assert link is not None
    claimed = ReplicaCheck(group)
    row = torch.zeros(2 + WORDS, dtype=torch.int64, device="cpu")
    row[0], row[1] = link.trace ^ mark(call), claimed.word
    row[2 : 2 + len(words)] = torch.as_tensor(words, device="cpu")
    if over is not group:
        link.began(call)  # as where the group itself carries it: what ranks are told names it
    rows = _gathered(row.to(over.device), over, call)

    def answer() -> Tensor:
        found = rows().cpu()
        same_so_far(found[:, 0].tolist(), group)
        claimed.judge(found[:, 1].tolist())
        return found[:, 2 : 2 + len(words)]

    return answer


def _gathered(row: Tensor, group: Group, call: Call) -> Callable[[], Tensor]:
    """Start to gather rows (one dim, one length) of all real ranks; the answer has one below the other."""
    out = row.new_empty(group.size * row.numel())
    if group.plain:
        work = started(group, call, group.pg._allgather_base, out, row, GATHER[True])
    else:  # a Python group
        parts = list(out.view(group.size, -1).unbind(0))
        work = started(group, call, group.pg.allgather, [parts], [row], GATHER[True])

    def arrived() -> Tensor:
        work.wait()
        return out.view(group.size, -1)

    return arrived


def compare_progress(numbers: Sequence[int], group: Group, doing: str = "") -> Callable[[], list[tuple[int, ...]]]:
    """Start to compare what the ranks have done so far; call the answer for the ``numbers`` of each rank.

    Over gloo, where a message of a few bytes costs no device a wait; where there is none nothing is sent.

    Args:
        numbers: up to ``WORDS`` of them, of 64 bits.
        doing: what the ranks do together, if they say so: what is another is an error.

    Raises:
        DesyncError: on every rank, from the answer: they ran different collectives in this group.
    """
    own = tuple(numbers)
    if group.size == 1 or group.words is None:
        return lambda: [own]
    call = Call(doing) if doing else _SO_FAR
    if runtime.RT.check:
        about_to(group, call)
    if group.pg is None:
        seen: list[tuple[int, ...]] = simulated(own, group, call)
        return lambda: seen
    rows = _exchanged(own, group, call)
    return lambda: [tuple(row) for row in rows().tolist()]


def simulated(obj: Any, group: Group, call: Call) -> list[Any]:
    """What all simulated ranks bring; as among real ones, what they claimed of plain tensors goes with it."""
    claimed, sim = ReplicaCheck(group), _simulation(group)
    if claimed.window is None:
        made: list[Any] = sim.rendezvous(group.ranks, call, obj, _to_all)
        return made
    seen = sim.rendezvous(group.ranks, call, (obj, claimed.word), _to_all)
    claimed.judge([w for _, w in seen])
    return [o for o, _ in seen]


def rendezvous(group: Group, call: Call, t: Any, compute: Callable[[list[Any]], list[Any]]) -> Any:
    """A collective of simulated ranks: what plain tensors were taken for goes with it, where it is time for that."""
    sim = _simulation(group)
    t = tuple(map(_bared, t)) if isinstance(t, tuple) else _bared(t)  # another rank's thread computes with it
    own: Window | None = window(group)
    if own is None or not own.due():
        return sim.rendezvous(group.ranks, call, t, compute)
    claimed = ReplicaCheck(group)

    def both(parts: list[Any]) -> list[Any]:
        words = [word for _, word in parts]
        return [(made, words) for made in compute([x for x, _ in parts])]

    made, words = sim.rendezvous(group.ranks, call, (t, claimed.word), both)
    claimed.judge(words)
    return made


def met(
    group: Group, call: Call, t: Any, compute: Callable[[list[Any]], list[Any]], finish: Callable[[Tensor], Tensor],
    *, sync: bool, writes: Tensor | None = None,
) -> Pending:  # fmt: skip
    """A collective of simulated ranks, started; ``finish`` gets what this rank receives.

    Ranks meet at the start, unless the simulation has a ``start`` of its own, which delivers later.

    Args:
        sync: the caller waits at once.
        writes: the tensor whose memory the collective works in.
    """
    start = None if sync else getattr(_simulation(group), "start", None)
    if start is None:
        return Pending(None, finish(rendezvous(group, call, t, compute)))
    work = start(group.ranks, call, _bared(t), compute, writes)
    return Pending(work, work, lambda w: finish(w.result()))


def _bared(t: Any) -> Any:
    return bare(t) if isinstance(t, Tensor) and type(t) is not Tensor and mine(t) else t


def _simulation(group: Group) -> Any:
    if runtime.RT.sim is None:
        raise CollectiveError(f"{group!r} belongs to a simulation that has ended")
    return runtime.RT.sim


def _to_all(parts: list[Any]) -> list[list[Any]]:
    return [list(parts) for _ in parts]


class ReplicaCheck:
    """What this rank claimed of plain tensors, on its way to a group."""

    def __init__(self, group: Group) -> None:
        self.group, self.window = group, window(group)
        self.rows: list[Row] = [] if self.window is None else self.window.take()
        self.word = word(self.rows)

    def judge(self, words: Sequence[int]) -> None:
        """Raise on every rank if they claimed different values; ``words`` are those of all."""
        if self.window is None:
            return
        self.window.heard(words)
        if len(set(words)) == 1:
            return
        if self.group.pg is None:
            told = simulated(self.rows, self.group, _CLAIMS)
        else:
            told = objects(self.rows, self.group)
        found = verdict(dict(zip(self.group.ranks, told, strict=True)))
        if found:
            raise DesyncError(found)


def beside(group: Group, call: Call) -> None:
    """A collective of real ranks is about to run: first compare what plain tensors were taken for, if it is time.

    Whoever waits there waits for the others in that collective, and is said to.

    Raises:
        DesyncError: on every rank, if they were given different values.
    """
    own: Window | None = window(group) if group.pg is not None else None
    if own is not None and own.due():
        with ranges.uncounted("what plain tensors were taken for, compared before it"):
            _exchanged((), group, call)()


def objects(obj: Any, group: Group, doing: str = "") -> list[Any]:
    """The picklable objects of all real ranks.  Raises DesyncError if they ran different collectives before."""
    data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    sizes = _exchanged([data.numel()], group, Call(doing) if doing else _OBJECTS)().view(-1).tolist()
    over = group.words or group
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=over.device)
    padded[: data.numel()] = data
    whole = _gathered(padded, over, _OBJECTS)().cpu()
    return [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(whole, sizes, strict=True)]


def small_all_reduce(x: Tensor, op: str, group: Group, call: Call) -> Tensor:
    """An all-reduce of a few bytes on gloo: gathered together with a signature, and reduced here.

    A message takes as long with as without it.  The signature is that of all collectives of the group so far, so ranks
    that read different values, or that went different ways before, are told.
    """
    words = torch.empty(-(-x.nbytes // 8), dtype=torch.int64, device="cpu")
    words.view(x.dtype)[: x.numel()] = x.reshape(-1)
    parts = _exchanged(words, group, call)().contiguous().view(x.dtype)[:, : x.numel()]
    folded: Tensor = _FOLD[op](parts, 0).to(device=x.device, dtype=x.dtype).view(x.shape)  # parts are on the host
    return folded


def same_so_far(traces: Sequence[int], group: Group) -> None:
    """Raise on every rank if they ran different collectives in this group, this one included."""
    if len(set(traces)) == 1:
        return
    link = group.link
    assert link is not None
    if link.telling:  # the others do not know that they differ
        raise failure(group, _OBJECTS, link.count, "the other ranks are in another collective")
    everyone = _texts([(n, mark(c), str(c)) for n, c in list(link.recent)], runtime.user_line(), group)
    base = {n: (m, text) for n, m, text in everyone[0][0]}
    for rank, (recent, line) in zip(group.ranks[1:], everyone[1:], strict=True):
        for n, m, text in recent:
            if n in base and base[n][0] != m:
                sides = {group.ranks[0]: f"{base[n][1]}; now at {everyone[0][1]}", rank: f"{text}; now at {line}"}
                raise DesyncError(disagreement(group.ranks, sides, n))
    sides = {
        r: f"{t[0][-1][2]}, its number {t[0][-1][0]}; now at {t[1]}" for r, t in zip(group.ranks, everyone, strict=True)
    }
    raise DesyncError(disagreement(group.ranks, sides, link.count))


def about_to(group: Group, call: Call) -> None:
    """Check mode: raise on every rank if they are about to run different collectives, or from different lines."""
    doing, runtime.RT.doing = runtime.RT.doing, ""
    over = ",".join(group.axes)
    text = f"{call}{f' for {doing}' if doing else ''} over {over} at {runtime.user_line()}"
    same = (mark(call), doing, over, runtime.user_line())
    compare(group, same, text, _APART)


def compare(group: Group, same: Any, text: str, what: str, fix: str = "") -> None:
    """Raise on every rank if ``same`` differs; ``text`` says what this rank has.

    Raises:
        DesyncError: naming the first two sides that differ.
    """
    if group.size == 1:
        return
    own = zlib.crc32(repr((same, what)).encode())
    if group.pg is None:
        sim: Any = runtime.RT.sim
        seen = sim.rendezvous(group.ranks, _ABOUT, (own, (text, what, fix)), lambda parts: [list(parts) for _ in parts])
        marks, texts = [s[0] for s in seen], [s[1] for s in seen]
    else:
        marks = _exchanged([own], group, _ABOUT)().view(-1).tolist()
        if len(set(marks)) == 1:
            return
        texts = [t for (_, t) in _texts(None, (text, what, fix), group)]
    for i, m in enumerate(marks):
        if m != marks[0]:
            (a, *said), (b, *other) = texts[0], texts[i]
            # One may be about to send what the other one is still comparing.
            what, fix = said if said == other else (_APART, "")
            sides = f"\n  rank {group.ranks[0]}: {a}\n  rank {group.ranks[i]}: {b}"
            raise DesyncError(f"ranks {group.ranks} {what}{sides}{fix and chr(10) + fix}")


def _texts(recent: Any, line: Any, group: Group) -> list[Any]:
    """What all ranks have, once they know that they differ."""
    link = group.link
    assert link is not None
    link.trace, link.telling = 0, True  # they differ, and know it
    try:
        return objects((recent, line), group)
    finally:
        link.telling = False


def check_replicated_inputs(what: str, tensors: Sequence[Tensor], of: Callable[[], Group]) -> None:
    """This rank takes plain tensors for what all ranks of a group have: compared later, or in check mode now.

    Args:
        what: they are, or what they are arguments of.
        of: the group, where it is asked for.

    Raises:
        DesyncError: on every rank, in check mode.
    """
    if not runtime.RT.check:
        claim(what, tensors)
        return
    for t in tensors:
        if type(t) in PLAIN and not t.is_meta and runtime.RT.world > 1:
            same_values(t, f"plain, {what}", of())


def same_values(t: Tensor, layout: str, group: Group) -> None:
    """Check mode: raise on every rank of the group if they hold different values of a replicated tensor."""
    text = f"other values of {str(t.dtype).removeprefix('torch.')}{list(t.shape)} ({layout}) at {runtime.user_line()}"
    what = f"hold different values of a tensor that is the same on {','.join(group.axes)}"
    compare(group, (tuple(t.shape), digests([t])), text, what, "give all ranks the same: same seed, same data")
