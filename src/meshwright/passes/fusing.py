"""Fused reductions in a graph: buffers that gradients are written into, starts and waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx

from .. import compat
from ..collective import COLLECTIVES, STARTS, WAIT_OP
from ..program.ir.inplace import storages
from ..program.ir.nodes import VIEWS, annotate, checked_value, info_of, value_of
from ..program.ir.packed import PACK
from ..program.ir.program import Program
from ..program.ir.subgraphs import Rewrite, read_instead
from ..shard.parameters.packing import Packing, aligned
from .gradients import Gradients, SentGradient, is_view
from .order import Order, Start
from .splitting import split_updates

aten = torch.ops.aten

ALIGNED = 256  # bytes: at multiples of them gradients begin in a buffer, as memory of their own does


@dataclass(frozen=True)
class _Started:
    """A collective that was started: of these gradients, which begin at these elements of what it gives (None: it gives
    the only one)."""

    node: fx.Node
    members: Sequence[SentGradient]
    offsets: Sequence[int] | None


class Fusing(Rewrite):
    """Puts buckets into a program.

    Args:
        program: its graph is changed.
        overlap: start as soon as the gradients exist and wait at the first use; otherwise both behind the backward.

    Attributes:
        in_place: gradients that their producers write where they are sent from.
    """

    def __init__(self, program: Program, gradients: Gradients, overlap: bool) -> None:
        super().__init__(program)
        self.gradients, self.overlap = gradients, overlap
        self.tail: dict[int, fx.Node] = {}  # place to the last node that was put behind it
        self.in_place = 0
        self.splits = True  # whether what has arrived is updated while the last sums are under way
        self.sums: dict[fx.Node, fx.Node] = {}  # reduction to what takes its place
        self.waits: dict[fx.Node, fx.Node] = {}  # what takes the place of a reduction to the wait that it is from

    def done(self) -> Program:
        """The program with what was put into it, without the reductions that others took the place of."""
        read_instead(dict.fromkeys(u for n in self.sums for u in n.users), self.sums)
        for node in self.sums:
            self.graph.erase_node(node)
        if self.overlap and self.splits:
            split_updates(self.graph, list(dict.fromkeys(self.waits.values())), self.waits)
        return super().done()

    def run(self, order: Order, starts: Sequence[Start]) -> None:
        """Let the reductions of each bucket run as one, which starts where all ranks start it."""
        made, met = list[_Started](), list[int]()
        for k, start in enumerate(starts):
            made.append(self._started(start))
            if COLLECTIVES[made[k].node.target].staged:
                met.append(k)
            else:
                self._wait(made[k], None)
        # Ranks meet in these waits, too: ahead of the same start or fence, one after the other.
        ends, limits = order.ends(starts) if met else [], dict[int, fx.Node]()
        for k in reversed(met):
            fence, later = order.event(ends[k], starts)
            end = self.gradients.order[fence] if later is None else made[later].node
            limits[ends[k]] = self._wait(made[k], limits.get(ends[k], end))

    def _started(self, start: Start) -> _Started:
        members, place = start.bucket.members, start.place
        if not members[0].kind.scatters:
            return self._sum(members, place)
        return self._scatter_together(members, place) if len(members) > 1 else self._scatter(members[0], place)

    def _sum(self, members: Sequence[SentGradient], place: int) -> _Started:
        offsets, count = _offsets(members)
        buffer = self._buffer(members, count)
        for r, offset in zip(members, offsets, strict=True):
            self._write(r, buffer, offset, place)
        first = members[0].node
        started = self._behind(place, first, STARTS[first.target], buffer, *first.args[1:])
        annotate(started, cause=self._cause(members, started))
        if len(members) > 1:
            annotate(started, sync=", ".join(r.name for r in members))
        return _Started(started, members, offsets)

    # -- where ----------------------------------------------------------------------------------------

    def _behind(self, place: int, like: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A node behind a place, and behind what was put there before."""
        at = self.tail.get(place, self.gradients.order[place])
        with self.after(at, info_of(like).beside(sync=info_of(like).sync)) as emit:
            self.tail[place] = emit(target, *args)
        return self.tail[place]

    # -- buffers --------------------------------------------------------------------------------------

    def _buffer(self, members: Sequence[SentGradient], count: int) -> fx.Node:
        """Memory for all gradients of a bucket, made right before the first of them."""
        value = checked_value(members[0].gradient)
        origins = [_origin(r.gradient) for r in members]
        at = min(self.gradients.place[n] for n in origins)
        first = self.gradients.order[max(at, self.gradients.inputs)]
        options = {"dtype": value.dtype, "device": torch.device(self.program.mesh.device)}
        # What lies between gradients is encoded with them, where several elements are together.
        gaps = members[0].step > 1 and count != sum(_numel(r.gradient) for r in members)
        target = aten.zeros.default if gaps else aten.empty.memory_format
        with self.before(first, info_of(first).beside()) as emit:
            buffer = emit(target, [count], **options)
        if at < self.gradients.inputs:  # an input is copied behind this, and not right behind the inputs
            self.tail[self.gradients.inputs - 1] = buffer
        return buffer

    def _write(self, r: SentGradient, buffer: fx.Node, offset: int, place: int) -> None:
        """Have a gradient written into its part of the buffer: by what makes it, or copied."""
        origin = _origin(r.gradient)
        out = self._out(r, origin, place)
        if out is None:
            shape = checked_value(r.gradient).shape
            part = self._part(buffer, shape, offset)
            # Behind the last write to the gradient; its own memory is free from there on.
            copied = self._behind(r.ready, r.node, aten.copy_.default, part, r.gradient)
            copied.prepend(part)
            return
        part = self._part(buffer, checked_value(origin).shape, offset)
        origin.prepend(part)
        old = storages(origin)[0]
        origin.target = out
        origin.kwargs = {**origin.kwargs, "out": part}
        for i in self.gradients.touched[old]:
            node = self.gradients.order[i]
            value = value_of(node)
            if value is not None and value.storage == old:
                whole = checked_value(buffer)
                annotate(node, value=replace(value, storage=whole.storage, nbytes=whole.nbytes))
        self.in_place += 1

    def _part(self, buffer: fx.Node, shape: Sequence[int], offset: int) -> fx.Node:
        with self.after(buffer, info_of(buffer).beside()) as emit:
            return emit(aten.as_strided.default, buffer, list(shape), _strides(shape), offset)

    def _out(self, r: SentGradient, origin: fx.Node, place: int) -> Any:
        """The overload of the producer that writes into given memory, where it may be used."""
        value, given = value_of(origin), value_of(r.gradient)
        # What is written to lies row-major, and what is recorded of the gradient and its views must stay true.
        if origin.op != "call_function" or value is None or given is None or is_view(origin):
            return None
        if (
            value.given is not None
            or value.dtype is not given.dtype
            or _numel(origin) != _numel(r.gradient)
            or not _row_major(r.gradient, origin)
        ):
            return None
        made_here = value.nbytes == _numel(origin) * value.dtype.itemsize
        if not made_here or not self.gradients.alone_after(origin, r.ready, r.node):
            return None
        return _out_of(origin.target)

    # -- starts and waits -----------------------------------------------------------------------------

    def _wait(self, one: _Started, end: fx.Node | None) -> fx.Node:
        """Wait at the first use of one of the sums, and ahead of ``end``; each is a part of what was sent."""
        started, info = one.node, info_of(one.node).beside(sync=info_of(one.node).sync)
        ends = [*dict.fromkeys(u for r in one.members for u in r.node.users), *([] if end is None else [end])]
        early = self.overlap and ends
        with self.before(min(ends), info) if early else self.after(started, info) as emit:
            waited = emit(WAIT_OP, started)
        if one.offsets is None:
            (r,) = one.members
            waited.meta["info"] = replace(info_of(r.node), cause=None)
            self.sums[r.node] = self.waits[waited] = waited
            return waited
        at = waited
        for r, offset in zip(one.members, one.offsets, strict=True):
            shape = checked_value(r.node).shape
            with self.after(at, replace(info_of(r.node), cause=None)) as emit:
                at = emit(aten.as_strided.default, waited, list(shape), _strides(shape), offset)
            self.sums[r.node] = at
            self.waits[at] = waited
        return waited

    def _scatter(self, r: SentGradient, place: int) -> _Started:
        """A reduce-scatter of one gradient, started."""
        started = self._behind(place, r.node, STARTS[r.node.target], *r.node.args)
        annotate(started, cause=info_of(r.node).cause)
        return _Started(started, [r], None)

    def _scatter_together(self, members: Sequence[SentGradient], place: int) -> _Started:
        """Reduce-scatters of several gradients as one: each rank gets a row with its chunks of all."""
        first = members[0].node
        _, op, _, sizes, index, *rest = first.args
        n = len(sizes)  # type: ignore[arg-type]
        values = [checked_value(r.gradient) for r in members]
        dims = [int(r.node.args[2]) for r in members]  # type: ignore[arg-type]
        packing = Packing([v.shape for v in values], dims, (n,), members[0].step)
        buffer = self._buffer(members, n * packing.row)
        for r, dim, offset in zip(members, dims, packing.offsets, strict=True):
            self._behind(r.ready, r.node, PACK.default, buffer, r.gradient, dim, n, offset)
        started = self._behind(place, first, STARTS[first.target], buffer, op, 0, packing.sizes, index, *rest)
        annotate(started, sync=", ".join(r.name for r in members), cause=self._cause(members, started))
        return _Started(started, members, packing.offsets)

    def _cause(self, members: Sequence[SentGradient], started: fx.Node) -> int:
        """Number of a record that says what one collective serves."""
        known, names = info_of(members[0].node).cause, [r.name for r in members]
        if len(members) == 1 and known is not None:
            return known
        return self.sent_together(
            [r.node for r in members], started, f"gradients of {names[0]} ... {names[-1]}", ("Partial", "summed"),
            f"{len(names)} gradients are summed over {started.args[-2]} together", "backward",
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- values


def _offsets(members: Sequence[SentGradient]) -> tuple[list[int], int]:
    """At which element of a buffer each gradient begins, and how many elements the buffer has."""
    step = math.lcm(ALIGNED // checked_value(members[0].gradient).dtype.itemsize, members[0].step)
    return aligned([_numel(r.gradient) for r in members], step)


def _numel(node: fx.Node) -> int:
    return math.prod(checked_value(node).shape)


def _strides(shape: Sequence[int]) -> list[int]:
    made, step = [], 1
    for n in reversed(shape):
        made.append(step)
        step *= max(n, 1)
    return made[::-1]


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory a view looks at, through ops of one input."""
    while is_view(node) and node.target in VIEWS and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _row_major(node: fx.Node, origin: fx.Node) -> bool:
    """Whether a view of a row-major tensor is row-major and begins where it begins."""
    chain = [node]
    while chain[-1] is not origin:
        chain.append(chain[-1].all_input_nodes[0])
    value = checked_value(origin)
    t = torch.empty(value.shape, dtype=value.dtype, device="meta")
    for n in reversed(chain[:-1]):
        args, kwargs = fx.map_arg((n.args, n.kwargs), {n.all_input_nodes[0]: t}.__getitem__)
        t = n.target(*args, **kwargs)  # type: ignore[operator]
    return t.is_contiguous() and t.storage_offset() == 0


@lru_cache(maxsize=1024)
def _out_of(target: Any) -> Any:
    """The overload with the same arguments that writes its result into ``out``; None if there is none."""
    if not isinstance(target, compat.OpOverload) or target._schema.is_mutable or len(target._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    packet = target._overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        *rest, last = other._schema.arguments or [None]
        if last is None or last.name != "out" or str(last.type) != "Tensor":
            continue
        # A generated one makes the result elsewhere and copies it.
        if torch.Tag.generated not in other.tags and [(a.name, str(a.type)) for a in rest] == wanted:
            return other
    return None


__all__ = ["Fusing"]
