"""Plain tensors among distributed ones: a rank that mixes them says that every rank has the same.

Each such use is a claim.  Nothing is sent for it: of each place, which is an op with a shape and a dtype, the first use
since ranks last met is kept as a digest, and the others are counted.  What was kept travels as one word where ranks of
a group meet anyway, and beside one in so many of their other collectives, by a count that they share.  Only where the
words differ are the places compared, and of these only those that all ranks used equally often: what one rank computes
alone is its own business.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat import DisableTorchFunctionSubclass, outside_modes
from ..ranks import runtime
from .digest import digest
from .groups import Group

Tensor = torch.Tensor
PLACES = 256  # of one group that are kept until it meets; further ones are not compared
FEWEST, MOST = 32, 64  # collectives between two words that are sent for their own sake: with claims, and without
FIX = (
    "a plain tensor among DistTensors is the global value, the same on all ranks. Where ranks share their data give "
    "them the same (one seed, one order, no DistributedSampler); where each has its own, split it over an axis: "
    'mw.shard_dataloader(loader, mesh, {"dp": mw.Shard(0)}), or mw.from_local(part, mesh, {"dp": mw.Shard(0)})'
)
Row = tuple[str, int, int, str]  # place, uses, digest of the first one, the line of it


@dataclass(slots=True)
class _Use:
    """The first use of a place, and how many there were."""

    digest: Tensor
    line: str
    count: int = 1


@dataclass(slots=True)
class Window:
    """What a rank claimed since its group last met, and when it will meet for that alone.

    Attributes:
        leaving: with digests on their way to the CPU, what the next meeting takes; None where they are there at once.
    """

    uses: dict[Any, _Use] = field(default_factory=dict)
    gap: int = 1
    left: int = 1
    leaving: _Leaving | None = None

    def take(self) -> list[Row]:
        """What was claimed; from now on anew."""
        uses, self.uses = self.uses, {}
        if self.leaving is not None:  # on all ranks, with claims or without: they compare what belongs together
            before, self.leaving = self.leaving, _Leaving(uses)
            return before.rows()
        return _rows(uses, _numbers([u.digest for u in uses.values()]).tolist()) if uses else []

    def due(self) -> bool:
        """Whether the collective that is about to run is one beside which a word travels."""
        self.left -= 1
        return self.left <= 0

    def heard(self, words: Sequence[int]) -> None:
        """Ranks have met, with these words: the next time is the later the less there was to say."""
        if self.left <= 0:  # for that alone
            self.gap *= 2
        self.left = self.gap = min(self.gap, FEWEST if any(words) else MOST)


def window(group: Group) -> Window | None:
    """The claims that the ranks of a group compare; None where they do not."""
    sim = runtime.RT.sim
    if group.size == 1 or (group.words is None if sim is None else not getattr(sim, "meets", False)):
        return None
    kept: dict[Any, Window] = runtime.RT.claims
    found = kept.get(group.ranks)
    if found is None:
        before = kept.get(_BEFORE, Window())
        found = kept[group.ranks] = Window({k: _Use(u.digest, u.line, u.count) for k, u in before.uses.items()})
        if group.device != "cpu":
            found.leaving = _Leaving({})
    return found


class _Leaving:
    """Claims whose digests a device still computes: to read them at once would wait for all that it was given."""

    def __init__(self, uses: dict[Any, _Use]) -> None:
        self.uses, self.event = uses, None
        if not uses:
            return
        self.numbers = made = _numbers([u.digest for u in uses.values()])
        if made.is_cuda:
            self.numbers = torch.empty(made.shape, dtype=made.dtype, device="cpu", pin_memory=True)
            self.numbers.copy_(made, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def rows(self) -> list[Row]:
        if self.event is not None:
            self.event.synchronize()
        return _rows(self.uses, self.numbers.tolist()) if self.uses else []


def _rows(uses: dict[Any, _Use], values: Sequence[int]) -> list[Row]:
    return [(_text(*place), u.count, n, u.line) for (place, u), n in zip(uses.items(), values, strict=True)]


_BEFORE = ()  # in place of a group: for those that have not met yet


def claim(what: str, tensors: Iterable[Tensor]) -> None:
    """This rank takes plain tensors for what all ranks have, as arguments of ``what``."""
    rt = runtime.RT
    if rt.world == 1:
        return
    kept = rt.claims
    if not kept:
        kept[_BEFORE] = Window()
    for t in tensors:
        if type(t) not in PLAIN or t.is_meta:
            continue
        place, made = (what, t.shape, t.dtype), None
        for w in tuple(kept.values()):
            use = w.uses.get(place)
            if use is not None:
                use.count += 1
            elif len(w.uses) < PLACES:
                if made is None:
                    made = _digest(t), runtime.user_line()
                w.uses[place] = _Use(*made)


PLAIN = {Tensor, torch.nn.Parameter}


def _digest(t: Tensor) -> Tensor:
    with torch.no_grad(), DisableTorchFunctionSubclass(), outside_modes():
        return digest(t, whole=False)


def _numbers(digests: Sequence[Tensor]) -> Tensor:
    with torch.no_grad(), DisableTorchFunctionSubclass(), outside_modes():
        return torch.stack([d.to(digests[0].device) for d in digests])


def _text(what: str, shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} of {what}"


def word(rows: Sequence[Row]) -> int:
    """What was claimed as one number; 0 for nothing."""
    return zlib.crc32(repr(sorted(r[:3] for r in rows)).encode()) | 1 << 32 if rows else 0


def verdict(told: Mapping[int, Sequence[Row]]) -> str:
    """The error for what ranks claimed; empty where they may go on.

    Args:
        told: rank to what it claimed since they last met.
    """
    sides = [{place: (count, value) for place, count, value, _ in rows} for rows in told.values()]
    for place, count, _, line in next(iter(told.values())):
        held = [side.get(place, (0, 0)) for side in sides]
        if {n for n, _ in held} == {count} and len({value for _, value in held}) > 1:
            by_value: dict[str, list[int]] = {}
            for rank, (_, value) in zip(told, held, strict=True):
                by_value.setdefault(f"digest {value & MASK:x}", []).append(rank)
            return f"the ranks gave different values of a plain tensor, {place} at {line}: {listed(by_value)}; {FIX}"
    return ""


MASK = (1 << 64) - 1


def listed(sides: Mapping[str, Sequence[int]]) -> str:
    """Who has what: ``rank 0: a; ranks 1, 2: b``."""
    return "; ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}: {text}" for text, r in sides.items())


__all__ = ["FIX", "PLAIN", "Row", "Window", "claim", "listed", "verdict", "window", "word"]
