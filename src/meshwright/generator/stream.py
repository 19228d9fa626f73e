"""Random values as one device draws them, whatever the layout and the mesh.

Every rank draws the stream of the global tensor, chunk by chunk, and keeps its own part; nothing of the global size is
held, and the generator ends where the single device's would.  Generators must agree between ranks: seed them alike.

On an accelerator which thread draws which number depends on the size of the tensor: there each rank draws the whole of
it, in the order of memory, as one device does, and keeps its part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from ..compat import FakeTensor
from ..layout import REPLICATE, Partial, Spec, own_ranges

Tensor = torch.Tensor
Generator = torch.Generator
Draw = Callable[[Tensor, "Generator | None"], Any]  # fills a contiguous tensor in place
Bounds = Sequence[tuple[int, int]]

CHUNK = 1 << 16  # elements drawn at a time
NORMAL_BLOCK = 16  # normal_ makes this many values from as many uniform ones, see _normal_stream

# ---------------------------------------------------------------------------------------------- streams


def fill(
    local: Tensor, spec: Spec, here: Sequence[int], draw: Draw, kind: str, generator: Generator | None = None
) -> Tensor:
    """Fill the part ``local`` of a tensor of ``spec``, in place, with what ``draw`` gives one device.

    Args:
        local: what the rank at coordinate ``here`` holds; its order of elements is the logical one.  On another device
            than the mesh's (a parameter that is stored on the host) it gets what the mesh's draws.
        spec: spec of the whole tensor.
        here: coordinate of the rank.
        draw: called with a contiguous scratch tensor and the generator; fills the scratch.
        kind: name of the drawing method (``"uniform_"``, ``"normal_"``...): how it uses up the stream.
        generator: instead of the default one.  It ends in the state that one device leaves it in.
    """
    return one_holder(draw_own(local, spec, here, draw, kind, generator), spec, here)


def draw_own(
    local: Tensor, spec: Spec, here: Sequence[int], draw: Draw, kind: str, generator: Generator | None
) -> Tensor:
    """As :func:`fill`, with the same values on all ranks where the tensor is Partial."""
    if local.device.type not in (spec.mesh.device, "meta"):  # one device would have drawn it there
        drawn = torch.empty_like(local, device=spec.mesh.device)
        with torch.no_grad():
            return local.copy_(draw_own(drawn, spec, here, draw, kind, generator))
    order = _memory_order(local, spec)
    if spec.layout.blocks:  # the rows between those that it has are drawn and left out
        layout = spec.layout
        for a in spec.layout.blocks.values():
            layout = layout.replace(a, REPLICATE)
        within = spec.with_(layout=layout)
        drawn = local.new_empty([within.local_shape(here)[d] for d in order]).permute(
            [order.index(d) for d in range(local.ndim)]
        )
        draw_own(drawn, within, here, draw, kind, generator)
        with torch.no_grad():
            for d, a in spec.layout.blocks.items():
                ranges = own_ranges(spec.layout.placements[a], spec.shape[d], spec.mesh.sizes[a], here[a])
                drawn = torch.cat([drawn.narrow(d, lo, hi - lo) for lo, hi in ranges], d)
            return local.copy_(drawn)
    shape, bounds = tuple(spec.shape), spec.layout.local_bounds(spec.shape, here)
    if order != list(range(local.ndim)) and kind == "normal_" and _serial(local):
        draw, kind = _strided(draw), "strided"  # what is not in the order of its elements gets its numbers otherwise
    shape, bounds = tuple(shape[d] for d in order), [bounds[d] for d in order]
    _fill(local.permute(order), shape, bounds, draw, kind, generator)
    return local


def skip(size: int, like: Tensor, draw: Draw, kind: str, generator: Generator | None = None) -> None:
    """Use up the numbers that ``draw`` takes for a tensor of ``size`` elements, and keep none."""
    with torch.no_grad():
        if like.is_complex():
            size, like = 2 * size, torch.view_as_real(like)
        for _ in _stream(size, like, draw, kind, generator, (0, 0)):
            pass


def one_holder(local: Tensor, spec: Spec, here: Sequence[int]) -> Tensor:
    """Make the same values on all ranks a Partial: one rank brings them, the others what changes nothing.

    For the average, the extrema and the like, the same values everywhere are right.
    """
    for a, placement in enumerate(spec.layout.placements):
        if isinstance(placement, Partial) and here[a] != 0 and placement.op in ("sum", "product"):
            with torch.no_grad():
                local.fill_(0 if placement.op == "sum" else 1)
    return local


def _fill(
    local: Tensor, shape: tuple[int, ...], bounds: Bounds, draw: Draw, kind: str, generator: Generator | None
) -> Tensor:
    with torch.no_grad():
        if local.is_complex():
            _fill(torch.view_as_real(local), (*shape, 2), [*bounds, (0, 2)], draw, kind, generator)
        elif all(b == (0, n) for b, n in zip(bounds, shape, strict=True)) and local.is_contiguous():
            draw(local, generator)
        elif isinstance(local, FakeTensor):  # a program is being captured: one draw, not one node per chunk
            whole = local.new_empty(shape)
            draw(whole, generator)
            local.copy_(_cut(whole, bounds))
        else:
            own = _own_range(shape, bounds)
            for start, values in _stream(math.prod(shape), local, draw, kind, generator, own):
                _place(values, start, shape, bounds, local)
    return local


def _memory_order(local: Tensor, spec: Spec) -> list[int]:
    """The dims from the slowest to the fastest in memory, in which a device fills a tensor.

    Of dims of one element or none strides tell nothing.  Where any rank may have such a part, all take the order of
    the elements: they must use up the generator alike.
    """
    smallest = spec.local_shape(tuple(n - 1 for n in spec.mesh.sizes))
    if any(n != 1 and part < 2 for n, part in zip(spec.shape, smallest, strict=True)):
        return list(range(local.ndim))
    strides = local.stride()
    return sorted(range(local.ndim), key=lambda d: -strides[d])


def _strided(draw: Draw) -> Draw:
    def run(scratch: Tensor, generator: Generator | None) -> Any:
        apart = scratch.new_empty((*scratch.shape, 2))[..., 0]
        draw(apart, generator)
        return scratch.copy_(apart)

    return run


def _stream(
    size: int, like: Tensor, draw: Draw, kind: str, generator: Generator | None, own: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    """(start, values) of consecutive pieces of what ``draw`` gives a tensor of ``size`` elements."""
    if not _serial(like):
        whole = torch.empty(size, dtype=like.dtype, device=like.device)
        draw(whole, generator)
        yield 0, whole
        return
    if kind == "normal_" and size >= NORMAL_BLOCK:
        yield from _normal_stream(size, like, draw, generator, own)
        return
    if kind == "normal_" or not _in_pieces(kind, like.dtype, draw):
        # Bernoulli's values need a byte each; what does not come in pieces is drawn whole.
        whole = torch.empty(size, dtype=torch.bool if kind == "bernoulli_" else like.dtype, device=like.device)
        draw(whole, generator)
        yield 0, whole
        return
    scratch = torch.empty(min(CHUNK, size), dtype=like.dtype, device=like.device)
    for start in range(0, size, CHUNK):
        values = scratch[: min(CHUNK, size - start)]
        draw(values, generator)
        yield start, values


def _serial(t: Tensor) -> bool:
    """Whether a generator of the tensor's device gives one number after the other."""
    return t.device.type == "cpu"


def _normal_stream(
    size: int, like: Tensor, draw: Draw, generator: Generator | None, own: tuple[int, int]
) -> Iterator[tuple[int, Tensor]]:
    """``normal_`` turns 16 uniform numbers at a time into 16 normal ones, in place.

    Where 16 does not divide the size, the last 16 elements are drawn once more; in most dtypes the numbers of
    the incomplete block were drawn, too, in vain.
    """
    scratch = torch.empty(min(CHUNK, max(size, NORMAL_BLOCK)), dtype=like.dtype, device=like.device)
    rest = size % NORMAL_BLOCK
    for start in range(0, size - rest, CHUNK):
        values = scratch[: min(CHUNK, size - rest - start)]
        if start < own[1] and start + len(values) > own[0]:
            draw(values, generator)
            yield start, values
        else:  # the same numbers are used up, without the logarithms
            values.uniform_(generator=generator)
    if rest:
        if _wastes(like.dtype):
            scratch[:rest].uniform_(generator=generator)
        draw(scratch[:NORMAL_BLOCK], generator)
        yield size - NORMAL_BLOCK, scratch[:NORMAL_BLOCK]


@cache
def _wastes(dtype: torch.dtype) -> bool:
    """Whether ``normal_`` draws numbers for an incomplete block: tried once, with a generator of our own."""
    one, other = (torch.Generator().manual_seed(7) for _ in range(2))
    torch.empty(NORMAL_BLOCK + 1, dtype=dtype).normal_(generator=one)
    for size in (NORMAL_BLOCK, 1, NORMAL_BLOCK):
        torch.empty(size, dtype=dtype).uniform_(generator=other)
    return torch.equal(one.get_state(), other.get_state())


_PIECES: dict[tuple[str, torch.dtype], bool] = {}


def _in_pieces(kind: str, dtype: torch.dtype, draw: Draw) -> bool:
    """Whether drawing a tensor in pieces gives the same as drawing it whole: tried once, with other
    generators.

    It depends on the machine: with MKL on some processors ``bernoulli_`` and ``exponential_`` take one seed
    per call.
    """
    known = _PIECES.get((kind, dtype))
    if known is None:
        one, other = (torch.Generator().manual_seed(7) for _ in range(2))
        whole, pieces = torch.empty(512, dtype=dtype), torch.empty(512, dtype=dtype)
        draw(whole, one)
        draw(pieces[:320], other)
        draw(pieces[320:], other)
        same = torch.equal(whole, pieces) and torch.equal(one.get_state(), other.get_state())
        known = _PIECES[kind, dtype] = same
    return known


def _own_range(shape: Sequence[int], bounds: Bounds) -> tuple[int, int]:
    """(first, last + 1) row-major index of the elements in the box; (0, 0) where it is empty."""
    if any(a >= b for a, b in bounds):
        return 0, 0
    first = last = 0
    for n, (a, b) in zip(shape, bounds, strict=True):
        first, last = first * n + a, last * n + b - 1
    return first, last + 1


def _cut(whole: Tensor, bounds: Bounds) -> Tensor:
    for d, (a, b) in enumerate(bounds):
        whole = whole.narrow(d, a, b - a)
    return whole


def _place(values: Tensor, start: int, shape: Sequence[int], bounds: Bounds, local: Tensor) -> None:
    """Copy what of ``values``, which begin at row-major index ``start`` of ``shape``, lies in the box to
    ``local``."""
    if not shape:
        local.copy_(values[0])
        return
    (lo, hi), inner = bounds[0], math.prod(shape[1:])
    if not len(values) or lo == hi:
        return
    row, skip = divmod(start, inner)
    if skip:  # the end of a row that began in an earlier piece
        part = values[: inner - skip]
        if lo <= row < hi:
            _place(part, skip, shape[1:], bounds[1:], local[row - lo])
        values, row = values[len(part) :], row + 1
    stop = row + len(values) // inner
    a, b = max(row, lo), min(stop, hi)
    if a < b:
        block = values[(a - row) * inner : (b - row) * inner].view(b - a, *shape[1:])
        local[a - lo : b - lo].copy_(_cut(block, [(0, b - a), *bounds[1:]]))
    rest = values[(stop - row) * inner :]
    if len(rest) and lo <= stop < hi:
        _place(rest, 0, shape[1:], bounds[1:], local[stop - lo])


# ---------------------------------------------------------------------------------------------- factories

_CONSTANT = {torch.zeros, torch.ones, torch.empty, torch.full}
_STREAMED = {torch.rand: "uniform_", torch.randn: "normal_", torch.randint: "random_"}


def materialize(
    factory: Callable[..., Tensor],
    shape: Sequence[int],
    dtype: torch.dtype | None,
    spec: Spec,
    here: Sequence[int],
) -> Tensor:
    """The part of ``factory(shape, dtype=dtype)`` that the rank at ``here`` holds, without making the whole.

    ``torch.rand``, ``randn`` and ``randint`` are drawn as streams; ``zeros``, ``ones``, ``empty`` and
    ``full`` make the local shape; all of them may be wrapped in ``functools.partial``.  Any other factory is
    called for the whole tensor, of which a part is kept.
    """
    base: Any = factory
    before: list[Any] = []
    options: dict[str, Any] = {}
    while isinstance(base, functools.partial):
        before, options, base = [*base.args, *before], {**base.keywords, **options}, base.func
    local_shape = spec.local_shape(tuple(here))
    typed = {} if dtype is None else {"dtype": dtype}
    if base in _CONSTANT:
        return one_holder(factory(local_shape, **typed), spec, here)
    if base not in _STREAMED:
        whole = factory(tuple(shape), **typed)
        return one_holder(spec.part(whole, here).clone(), spec, here)
    limits: tuple[int, ...] = ()
    if base is torch.randint:
        high = options.pop("high") if "high" in options else before.pop()
        limits = options.pop("low", before.pop() if before else 0), high
        options.setdefault("dtype", torch.int64)
    generator = options.pop("generator", None)
    local = torch.empty(local_shape, **{**options, **typed})
    kind = _STREAMED[base]
    return fill(local, spec, here, drawing(kind, limits, local.is_complex()), kind, generator)


def drawing(kind: str, args: tuple[Any, ...], is_complex: bool = False) -> Draw:
    """``x.<kind>(*args)`` as a function of (scratch, generator)."""
    if is_complex and kind == "normal_":  # a standard complex normal number has half the variance in each part
        mean, std = (*args, 0.0, 1.0)[:2] if len(args) != 1 else (args[0], 1.0)
        args = (mean, std / math.sqrt(2))
    method = getattr(Tensor, kind)
    return lambda scratch, generator: method(scratch, *args, generator=generator)
