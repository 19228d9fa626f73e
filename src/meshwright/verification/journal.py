"""The values of one device, those of the ranks as they come, and the first that departs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import CaptureError, LayoutError, MeshError, PassError, ShardError
from ..testing.values import tolerance_of
from .values import NOISE, UPDATED, Difference, Tensor, apart, assemble, differing
from .watch import RAISED, Key, Observed

ROUNDINGS = 100.0  # how much more ranks may round than one device in another order


@dataclass(frozen=True)
class Departure:
    """Where ranks first compute something else than one device.

    Attributes:
        mode: ``"eager"`` or ``"captured"``.
        step: of the run, from 0.
        phase: ``"forward"``, ``"backward"``, ``"gradients"``, ``"clipping"``, ``"update"``, ``"buffers"``,
            ``"random"``, ``"load"``, ``"capture"`` or ``"error"``.
        op, line: what computes the value, and where in the user's code; of a gradient the op whose backward does.
        others: further ops that may be the culprit: a gradient is a sum over all uses of its value.
        value: which value, in words.
        layout: in which the ranks hold it.
        text: the difference, in words.
        relative: the largest difference, by the largest number of one device.
    """

    mode: str
    step: int
    phase: str
    op: str
    line: str
    others: tuple[str, ...]
    value: str
    layout: str
    text: str
    relative: float

    def __str__(self) -> str:
        others = f" (or {', '.join(self.others)})" if self.others else ""
        layout = f", {self.layout}" if self.layout else ""
        return (
            f"{self.mode}, step {self.step}, {self.phase}: {self.op} at {self.line}{others}: {self.value}{layout}: "
            f"{self.text}"
        )


@dataclass
class Journal:
    """What one device computed in a run, to be compared with what ranks do.

    Attributes:
        size: how many ranks there are.
        seen: by step and key, in the order of one device; ``tolerance``: what rounding explains of each, by its largest
            number; ``noise``: what it explains whatever the numbers are, of sums whose terms cancel.
        uses: by step and key, the ops that were given the value.
        again: keys of several values: gradients that the loss itself asks for come before those of the loss.
    """

    size: int
    seen: dict[Key, Observed] = field(default_factory=dict)
    tolerance: dict[Key, float] = field(default_factory=dict)
    noise: dict[Key, float] = field(default_factory=dict)
    uses: dict[Key, list[tuple[str, str]]] = field(default_factory=dict)
    again: set[Key] = field(default_factory=set)
    _loosest: float = 1e-9

    def note(self, step: int, seen: Observed) -> None:
        """A value of one device."""
        if seen.key[0] == "forward" and isinstance(seen.value, Tensor):
            self._loosest = max(self._loosest, tolerance_of(seen.value))
        key = (step, *seen.key)
        if key in self.seen:
            self.again.add(key)
            return
        self.seen[key], self.tolerance[key] = seen, self._loosest

    def differing(self, key: Key, got: Any) -> Difference | None:
        """How a value differs from that of one device by more than rounding explains."""
        return differing(got, self.seen[key].value, self.tolerance[key], self.noise_of(key))

    def noise_of(self, key: Key) -> float:
        """What rounding explains of a value whatever its numbers are."""
        return max(self.noise.get(key, 0.0), UPDATED if key[1] in ("param", "loaded") else NOISE)

    def used(self, step: int, calls: Iterable[tuple[str, str, tuple[Key, ...]]]) -> None:
        """Which ops were given which values."""
        for op, line, keys in calls:
            for key in filter(None, keys):
                self.uses.setdefault((step, *key), []).append((op, line))


class Rounding:
    """What rounding makes of each value of a journal: measured in a run that rounds otherwise.

    A gradient that is nothing but what is left of terms that cancel (of a bias in front of a batch norm, of keys) has
    no scale of its own, and what Adam makes of it is of the size of its rate.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal, self.told = journal, set[Key]()

    def note(self, step: int, seen: Observed) -> None:
        """A value of the other run."""
        key = (step, *seen.key)
        if key in self.told or (first := self.journal.seen.get(key)) is None:
            return
        self.told.add(key)
        a, b = first.value, seen.value
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.is_floating_point():
            off = apart(b, a)
            if 0 < off < math.inf:
                self.journal.noise[key] = ROUNDINGS * off


class RankJournal:
    """Values of ranks, compared with a journal as soon as all ranks have told theirs.

    Attributes:
        compared: how many values were.
        departed: by step and key, in what they differ.
    """

    def __init__(self, journal: Journal, mode: str) -> None:
        self.journal, self.mode = journal, mode
        self.waiting: dict[Key, dict[int, Observed]] = {}
        self.departed: dict[Key, tuple[Observed, Difference]] = {}
        self.compared: dict[Key, None] = {}
        self.steps: dict[int, int] = {}  # of each rank, where it is
        self.raised: Departure | None = None
        self.terms: set[Key] = set()  # gradients that ranks are given in several terms, and one device in one

    def tell(self, step: int, rank: int, seen: Observed) -> None:
        """A value of one rank."""
        key = (step, *seen.key)
        self.steps[rank] = step
        want = self.journal.seen.get(key)
        if want is None or (self.mode == "captured" and key in self.journal.again):
            return  # programs add up gradients of one value where they like
        if key in self.compared or (key[1] == "backward" and rank in self.waiting.get(key, ())):
            if key[1] == "backward" and key not in self.journal.again:
                self.terms.add(key)
                self.departed.pop(key, None)
            return
        table = self.waiting.setdefault(key, {})
        table[rank] = seen
        if len(table) == self.journal.size:
            del self.waiting[key]
            self._compare(key, [table[r] for r in sorted(table)], want)

    def _compare(self, key: Key, parts: list[Observed], want: Observed) -> None:
        self.compared[key] = None
        first, found = parts[0], None
        if any(p.spec is not first.spec and (p.spec is None or first.spec is None) for p in parts):
            found = Difference("distributed on some ranks and not on others")
        elif isinstance(first.value, Tensor):
            if first.spec is None and isinstance(want.value, Tensor) and first.value.shape != want.value.shape:
                return  # a rank's own part, by the user's hand
            whole, words = assemble([p.value for p in parts], first.spec, self.journal.noise_of(key))
            copies = first.spec is not None  # else, and where no result departs, a rank's own by the user's hand
            found = Difference(words, copies=copies) if words else self.journal.differing(key, whole)
        else:
            for p in parts:
                found = found or self.journal.differing(key, p.value)
        if found is not None and key not in self.terms:
            self.departed[key] = first, found

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Inside, an error that one device did not have is kept as what departs; one that says what to ask for
        otherwise is raised."""
        try:
            yield
        except (LayoutError, ShardError, CaptureError, PassError, MeshError):
            raise
        except Exception as error:
            op, line = getattr(error, RAISED, ("the step", "no op of the user's"))
            step, text = max(self.steps.values(), default=0), f"{type(error).__name__}: {error}"
            self.raised = Departure(self.mode, step, "error", op, line, (), "what it gives", "", text, math.inf)

    # -- the culprit ----------------------------------------------------------------------------------

    def first(self) -> Departure | None:
        """The first value that departs, in the order of one device; None where no result does."""
        if not self.wrong and (self.raised is None or not self.departed):
            return self.raised
        # Where a generator stands matters by what is drawn from it: numbers that differ are named before.
        order = [k for k in self.journal.seen if k in self.departed]
        key = next((k for k in order if k[-2] != "random"), order[0])
        return self._departure(key)

    @property
    def wrong(self) -> bool:
        """Whether a result departs, or copies do; else what departs reaches none: memory that nobody writes, signs that
        may be either."""
        inside = ("forward", "backward")
        return any(key[1] not in inside or found.copies for key, (_, found) in self.departed.items())

    @property
    def harmless(self) -> Departure | None:
        """The first value that departs where no result does."""
        key = next((k for k in self.journal.seen if k in self.departed), None)
        return None if key is None or self.wrong or self.raised is not None else self._departure(key)

    def _departure(self, key: Key) -> Departure:
        want, (seen, found) = self.journal.seen[key], self.departed[key]
        step, what, *_ = key
        phase, op, line = PHASES.get(what, (what, want.op, want.line))
        value = _in_words(want)
        others: tuple[str, ...] = ()
        if (lost := self._not_computed(key, want, seen)) is not None:
            step, inside, *_ = lost
            made = self.journal.seen[lost]
            verb = "ranks do not compute it" if inside == "forward" else "it gets no gradient on ranks"
            text = f"{verb}; so {value}: {found.text}"
            return Departure(self.mode, step, inside, made.op, made.line, (), _in_words(made), "", text, found.relative)
        if what == "backward" or (what in ("grad", "stepped") and not self._contributed(step, want.name)):
            users = self.journal.uses.get((step, "forward", *key[2:]), [])
            users = users or self.journal.uses.get((step, "forward", "leaf", want.name), [])
            (op, line), *rest = dict.fromkeys(users) or [(want.op, want.line)]
            phase, others = "backward", tuple(f"{o} at {x}" for o, x in rest)
            value = f"the gradient of {value}"
        layout = "" if seen.spec is None else repr(seen.spec.layout)
        return Departure(self.mode, step, phase, op, line, others, value, layout, found.text, found.relative)

    def _not_computed(self, key: Key, want: Observed, seen: Observed) -> Key | None:
        """What one device computed for the op that departs and ranks did not, since they ran another op there; or the
        first value in the backward that has no gradient on ranks, where a parameter has none."""
        step, what, *_ = key
        if what in ("grad", "stepped") and seen.value is None:
            outs = (k for k in self.journal.seen if k[0] == step and k[1] == "backward" and k[-2] == "out")
            return next((k for k in outs if k not in self.compared), None)
        if what != "forward" or want.key[-2] != "out":
            return None
        given = (k for k, users in self.journal.uses.items() if (want.op, want.line) in users and k[0] == step)
        return next((k for k in given if k[1] == "forward" and self._lost(k)), None)

    def _lost(self, key: Key) -> bool:
        """Whether ranks told nothing of a value of one device that no program could do without."""
        seen = self.journal.seen.get(key)
        return seen is not None and key not in self.compared and not seen.folded

    def _contributed(self, step: int, name: str) -> bool:
        """Whether what ranks contribute to the gradient of a parameter was compared, and adds up to it."""
        key = (step, "backward", "leaf", name)
        return key in self.compared and key not in self.departed and key not in self.terms


PHASES = {
    "loss": ("forward", "the loss", "the loss function"),
    "grad": ("gradients", "the reduction of the gradient over ranks", "the backward"),
    "stepped": (
        "gradients",
        "the reduction of the gradient over ranks, or optimizer.step",
        "the backward or the optimizer",
    ),
    "clipped": ("clipping", "clip_grad_norm_", "the step"),
    "param": ("update", "optimizer.step", "the optimizer"),
    "state": ("update", "optimizer.step", "the optimizer"),
    "buffer": ("buffers", "a write to a buffer", "the model"),
    "random": ("random", "a draw of random numbers", "the step"),
    "loaded": ("load", "the save and the load", "the checkpoint"),
}


def _in_words(seen: Observed) -> str:
    if seen.name:
        return seen.name
    what, place = seen.key[-2:]
    if what == "in":
        return f"argument {place} of {seen.op}, which no op of torch's made"
    if what == "random" and seen.op:
        return f"the state of the random generator after {seen.op}"
    return f"what {seen.op} at {seen.line} gives"
