"""Ops along a dim that stays split: what crosses the borders of parts is sent, and nothing else.

A *crossing* factor may be split though values of one part go into another.  The local function says which rows of the
input each rank needs for its own rows of the output, which all ranks know; these are brought (halos of windows, the
rows of a roll), or one row of each part before (the totals of a scan).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .dims import nothing
from .factor_notation import Arg, Local, LocalFn, Rule, notation

Tensor = torch.Tensor
Span = tuple[int, int]
Needs = Callable[[int, int], Sequence[Span]]  # the rows of the input that rows start:stop of an output are made of


def brought(ctx: Local, x: Tensor, dim: int, factor: str, needs: Needs, why: str) -> Tensor:
    """The rows of ``x`` that this rank's rows of the output are made of."""
    made = ctx.spans(factor, ctx.rule.crossing[factor])
    wanted = [needs(*span) if span[0] < span[1] else () for span in made]
    return ctx.comm.fetch_rows(x, dim, ctx.axes(factor), [[s] for s in ctx.spans(factor)], wanted, why)


def own_rows(ctx: Local, factor: str) -> Span:
    """(start, stop) of this rank's rows of the output."""
    return ctx.spans(factor, ctx.rule.crossing[factor])[ctx.place_in(factor)]


# ---------------------------------------------------------------------------------------------- scans

Scan = Callable[..., Tensor]


def scan(
    x: Arg, dim: Any, total: Scan, combine: Callable[[Tensor, Tensor], Tensor], op: Scan,
    unsplit: Callable[[Local], LocalFn | None] | None = None, **flags: Any,
) -> Rule:  # fmt: skip
    """A scan along ``dim``: each part is scanned by itself and combined with the totals of the parts before it.

    Args:
        total: ``total(x, dim, dtype)``: of all rows one, of none the neutral one, also of such totals.
        combine: of a part's scan and what is before it.
        op: the op itself.
        unsplit: the local function where ``dim`` is not split.
    """
    d, letters = x.dim(dim), x.letters
    factor = letters[d : d + 1]

    def local(ctx: Local) -> LocalFn | None:
        if not factor or not ctx.is_split(*factor):
            return None if unsplit is None else unsplit(ctx)
        parts, axes = ctx.parts(factor[0]), ctx.axes(factor[0])
        held, wanted = [[(p, p + 1)] for p in parts], [[(0, p)] for p in parts]
        first = parts[ctx.place_in(factor[0])] == 0

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            made = op(x, *args, **kwargs)
            own = total(x, d, made.dtype)
            before = ctx.comm.fetch_rows(
                own, d, axes, held, wanted, "each part of a scan begins with the totals before it"
            )
            if not first:
                return combine(made, total(before, d, made.dtype))
            # Who has nothing before it is in the graph of the others all the same, and if these combine by what is not
            # linear, in that of gradients of gradients.
            return made + nothing((), before) if "linear" in flags else made * (1 + nothing((), before))

        return run

    crossing = {f: x.shape[d] for f in factor if f != "1"}
    return notation({x: letters}, letters, local=local, crossing=crossing, **flags)


def sum_of(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The sum along a dim, which stays."""
    return torch.sum(x, dim, True, dtype=dtype)


# ---------------------------------------------------------------------------------------------- along one dim


@dataclass(frozen=True)
class Along:
    """What an op does along one dim.

    Attributes:
        size: of the output.
        needs: the rows of the input that rows ``start:stop`` of the output are made of; of some rows, not of none.
        part: ``part(x, start, stop)``: these rows, from those.
        whole: the op along a dim that is whole.
    """

    size: int
    needs: Callable[[int, int], Sequence[Span]]
    part: Callable[[Tensor, int, int], Tensor]
    whole: Callable[[Tensor], Tensor]


def rolled(d: int, n: int, shift: int) -> Along:
    """``torch.roll`` along a dim of ``n``."""

    def needs(start: int, stop: int) -> list[Span]:
        first = (start - shift) % n
        last = first + stop - start
        return [(first, min(last, n)), (0, last - n)] if last > n else [(first, last)]

    return Along(n, needs, lambda x, a, b: x, lambda x: torch.roll(x, shift, d))


def flipped(d: int, n: int) -> Along:
    """``torch.flip`` along a dim of ``n``."""
    return Along(n, lambda a, b: [(n - b, n - a)], lambda x, a, b: x.flip(d), lambda x: x.flip(d))


CUT = "rows were cut off, and the rest is divided anew"


def sliced(d: int, n: int, start: int, size: int, step: int = 1) -> Along | None:
    """``size`` rows from ``start`` on, every ``step``-th; None where few are left: these are gathered or picked."""
    if 2 * size < n or size < 2:
        return None

    def taken(x: Tensor, first: int, stop: int) -> Tensor:
        return x[(slice(None),) * d + (slice(first, stop, step),)]

    return Along(
        size, lambda a, b: [(start + a * step, start + (b - 1) * step + 1)], lambda x, a, b: taken(x, 0, x.shape[d]),
        lambda x: taken(x, start, start + (size - 1) * step + 1),
    )  # fmt: skip


def padded(d: int, n: int, before: int, after: int, value: Any) -> Along:
    """``constant_pad_nd`` of one dim; negative: rows are cut off."""

    def source(start: int, stop: int) -> Span:
        return max(start - before, 0), min(stop - before, n)

    def part(x: Tensor, start: int, stop: int) -> Tensor:
        first, last = source(start, stop)
        ends = (first + before - start, stop - last - before) if first < last else (stop - start, 0)
        return filled(x, d, *ends, value)

    def needs(start: int, stop: int) -> list[Span]:
        first, last = source(start, stop)
        return [(first, last)] if first < last else []

    return Along(n + before + after, needs, part, lambda x: filled(x, d, before, after, value))


def filled(x: Tensor, d: int, before: int, after: int, value: Any = 0) -> Tensor:
    """``x`` with rows of a value around it, or fewer rows."""
    pads = [0] * (2 * (x.ndim - d % x.ndim))
    pads[-2:] = before, after
    return torch.constant_pad_nd(x, pads, value)


def windows(d: int, size: int, span: int, step: int, op: Callable[[Tensor], Tensor]) -> Along:
    """Output ``i`` along ``d`` is made of the ``span`` rows from ``i * step`` on, by ``op``."""

    def part(x: Tensor, start: int, stop: int) -> Tensor:
        return op(x) if start < stop else op(filled(x, d, span, 0)).narrow(d, 0, 0)

    return Along(size, lambda a, b: [(a * step, (b - 1) * step + span)], part, op)


def in_reach(d: int, n: int, size: int, span: int, step: int, ends: Span, value: Any = 0) -> Along:
    """The rows around which a window of ``span`` moves by ``step``, with a value at the ends; op is left to the caller.

    Where a rank has no window, its rows are those of one, of zeros.
    """
    wide = padded(d, n, *ends, value)

    def part(x: Tensor, start: int, stop: int) -> Tensor:
        if start == stop:
            return filled(x, d, span, 0)
        return wide.part(x, start * step, (stop - 1) * step + span)

    return Along(size, lambda a, b: wide.needs(a * step, (b - 1) * step + span), part, wide.whole)


def along(x: Arg, ways: Mapping[int, Along], *, behind: Sequence[str] = (), why: str, **flags: Any) -> Rule:
    """The rule of an op that works along some dims, each by itself.

    Args:
        behind: letters behind those of ``x`` in the output.
        why: values cross, for the record.
    """
    letters = x.letters
    crossing = {letters[d]: way.size for d, way in ways.items() if min(x.shape[d], way.size) > 1}
    made = {f"m{d}": way.size for d, way in ways.items() if letters[d] not in crossing}
    sizes, whole = dict(flags.pop("sizes", {})), list(flags.pop("whole", ()))
    out = [f"m{d}" if f"m{d}" in made else f for d, f in enumerate(letters)]
    whole += [*made, *(letters[d] for d in ways if letters[d] not in crossing and letters[d] != "1")]

    def local(ctx: Local) -> LocalFn | None:
        spans = {d: own_rows(ctx, letters[d]) for d in ways if ctx.is_split(letters[d])}
        if not spans:
            return None

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            for d, way in ways.items():
                x = way.part(brought(ctx, x, d, letters[d], way.needs, why), *spans[d]) if d in spans else way.whole(x)
            return x

        return run

    return notation(
        {x: letters}, [*out, *behind], whole=whole, sizes=sizes | made, local=local, crossing=crossing, **flags
    )
