"""The step of a rank of a pipeline: its actions in order, with what it receives and sends, as lines of Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ...mesh import Mesh
from ..ir.nodes import Value
from ..ir.program import Message, Staging
from ..ir.schedules import Action, StagePart
from ..run.bind import BoundProgram
from . import helpers
from .bundle import Bundle
from .functions import wrapped


class StageActions:
    """Writes the function ``step`` of a rank that computes stages.

    Args:
        how: The stages.
        parts: The programs of this rank, by name.
        names: Part to the name of its function.
    """

    def __init__(
        self,
        how: Staging,
        parts: Mapping[str, BoundProgram],
        names: Mapping[str, str],
        bundle: Bundle,
        mesh: Mesh,
        rank: int,
    ) -> None:
        self.how, self.parts, self.names, self.bundle, self.mesh, self.rank = how, parts, names, bundle, mesh, rank
        self.place = mesh.coordinate(rank)
        self.here = self.place[self.how.axis]
        self.gathered: set[tuple[int, str]] = set()
        self.came: dict[int, set[str]] = {}
        self.lists: dict[tuple[str, ...], str] = {}  # names of values to the name of their list

    def lines(self) -> Iterator[str]:
        """The function."""
        for helper in (helpers.cut_rows, helpers.send, helpers.receive):
            self.bundle.add(helper)
        body = list(self._body())
        for names, name in self.lists.items():
            yield from wrapped(f"{name} = [", ", ".join(map(json.dumps, names)), "]")
        yield from ["", "", *body] if self.lists else body

    def _body(self) -> Iterator[str]:
        how, n = self.how, self.how.schedule.micro_batches
        yield "def step(w, batch):"
        yield f'    """Train on a global batch in {n} micro-batches ({how.schedule.name}); the loss."""'
        yield f"    micros, sent, reduced = cut_rows(batch, {n}), [], {{}}"
        if "accumulate" in self.parts:
            yield f"    for micro in micros:\n        {self._name('accumulate')}(w, micro, {{}})"
        else:
            yield from self._every()
        yield f"    loss = {self._name('flush')}(w, batch, reduced)"
        yield "    for work, _ in sent:"
        yield "        work.wait()"
        yield "    return loss"
        yield from ["", ""]

    def _every(self) -> Iterator[str]:
        yield "    held, gathered, came = {}, {}, {}  # by stage and micro-batch; by stage"
        place = 0
        for a in self.how.actions(self.here):
            if a.part.once:
                yield from self._once(a)
                continue
            yield from self._one(a)
            if self.how.ends(self.here, place):
                self.gathered = {key for key in self.gathered if key[0] != a.stage}
                yield f"    gathered.pop({a.stage}, None)"
            place += 1

    def _name(self, part: str) -> str:
        return self.names[part]

    def _list(self, names: list[str]) -> str:
        """The name of a list of values."""
        return self.lists.setdefault(tuple(names), f"VALUES_{len(self.lists)}")

    def _messages(self, a: Action) -> list[Message]:
        return [m for m in self.how.messages if m.part is a.part.carrier and a.stage in (m.src, m.dst)]

    def _one(self, a: Action) -> Iterator[str]:
        part = self.how.name(a.part, a.stage)
        bound, key = self.parts[part], f"({a.stage}, {a.micro})"
        yield f"    # {part} of micro-batch {a.micro}"
        wanted = [given.name for _, given, _ in bound.passed if given.kind == "gathered"]
        if wanted:
            yield from self._gather(a, wanted)
        last = a.part.ends
        parts = [f"held.pop({key})" if last else f"held.setdefault({key}, {{}})"]
        if wanted:
            parts.append(f"{{k: came[{a.stage}].get(k, gathered[{a.stage}].get(k)) for k in {self._list(wanted)}}}")
        parts += [self._received(m, a.micro) for m in self._messages(a) if m.dst == a.stage]
        yield f"    made = {self._name(part)}(w, micros[{a.micro}], {' | '.join(parts)})"
        if not last:
            names = [o.name for o in bound.program.outputs if o.kind == "held"]
            yield f"    held[{key}] |= {{k: made[k] for k in {self._list(names)}}}" if names else "    pass"
        yield from self._sent(a, a.micro)

    def _gather(self, a: Action, wanted: list[str]) -> Iterator[str]:
        if a.stage not in self.came:
            of = [m for m in self.how.messages if m.part is StagePart.SEND_PARAMS and m.dst == a.stage]
            self.came[a.stage] = {m.name for m in of}
            yield f"    came[{a.stage}] = {' | '.join(self._received(m, 0) for m in of) or '{}'}"
        if f"gathered.{a.stage}" not in {f"gathered.{s}" for s, _ in self.gathered}:
            yield f"    gathered.setdefault({a.stage}, {{}})"
        if any((a.stage, k) not in self.gathered and k not in self.came[a.stage] for k in wanted):
            g = self.how.name(StagePart.UNSHARD, a.stage)
            outputs = [o.name for o in self.parts[g].program.outputs]
            self.gathered |= {(a.stage, name) for name in outputs}
            yield f"    gathered[{a.stage}] |= {self._name(g)}(w, micros[{a.micro}], dict(came[{a.stage}]))"

    def _once(self, a: Action) -> Iterator[str]:
        part = self.how.name(a.part, a.stage)
        bound = self.parts.get(part)
        if a.part is StagePart.REDUCE_GRAD:
            yield f"    came.pop({a.stage}, None)"
        if bound is None:
            return
        came = [self._received(m, 0) for m in self._messages(a) if m.dst == a.stage and a.part is StagePart.REDUCE_GRAD]
        yield f"    made = {self._name(part)}(w, batch, {' | '.join(came) or '{}'})"
        names = [o.name for o in bound.program.outputs if o.kind == "reduced"]
        if names:
            yield f"    reduced |= {{k: made[k] for k in {self._list(names)}}}"
        yield from self._sent(a, 0)

    def _sent(self, a: Action, micro: int) -> Iterator[str]:
        for m in self._messages(a):
            if m.src == a.stage:
                to, tag = self._rank(m.dst), self._tag(m, micro)
                if to == self.rank:
                    yield f"    held[{tag}] = {{{json.dumps(m.name)}: made[{json.dumps(m.name)}]}}  # to stage {m.dst}"
                else:
                    yield f"    sent.append(send(made[{json.dumps(m.name)}], {to}, {tag}))  # to stage {m.dst}"

    def _received(self, m: Message, micro: int) -> str:
        source, tag, value = self._rank(m.src), self._tag(m, micro), self._value(m)
        if source == self.rank:
            return f"held.pop({tag})"
        text = f"receive({list(value.shape)}, {value.dtype}, {source}, {tag})"
        return f"{{{json.dumps(m.name)}: {text}}}"

    def _rank(self, stage: int) -> int:
        """The rank that has a stage, beside this one."""
        at: Any = list(self.place)
        at[self.how.axis] = self.how.schedule.homes[stage]
        return self.mesh.rank_at(tuple(at))

    def _tag(self, m: Message, micro: int) -> int:
        return self.how.messages.index(m) * self.how.schedule.micro_batches + micro

    def _value(self, m: Message) -> Value:
        for part in m.part.readers:
            bound: BoundProgram | None = self.parts.get(self.how.name(part, m.dst))
            for _, given, value in bound.passed if bound is not None else ():
                if given.name == m.name:
                    return value
        raise AssertionError(m.name)


__all__ = ["StageActions"]
