"""Many tensors in one collective: chunks of each along a dim, one row per rank.

Row ``r`` of the packed buffer holds chunk ``r`` of every tensor, each in a slot as long as the largest
chunk.  A reduce-scatter of the buffer gives every rank its chunks of all tensors; an all-gather of a rank's
row is the reverse. The idea is that of FSDP2 (Zhao et al., 2023; Feng et al., TorchTitan).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ...layout import REPLICATE, Layout, Shard, Spec, chunk_sizes
from ...mesh import Mesh
from ...ranks import runtime

Tensor = torch.Tensor


class Packing:
    """Where the chunks of some tensors lie in a buffer of ``n`` rows.

    Args:
        shapes: shapes of the whole tensors.
        dims: the dim along which each is cut, in ``torch.chunk`` parts.
        cuts: sizes of the axes that cut it, one after the other, the major one first.
        step: elements that are encoded together on the wire: at multiples of it chunks begin.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], dims: Sequence[int], cuts: tuple[int, ...], step: int = 1
    ) -> None:
        self.shapes, self.dims, self.cuts, self.n = [tuple(s) for s in shapes], list(dims), cuts, math.prod(cuts)
        longest = [math.prod(self.chunk_shape(s, d, 0)) for s, d in zip(self.shapes, self.dims, strict=True)]
        self.offsets, end = aligned(longest, step)
        self.row = -(-end // step) * step  # elements in a row
        self.gaps = step > 1 and self.n * self.row != sum(map(math.prod, self.shapes))

    def chunk_shape(self, shape: tuple[int, ...], dim: int, rank: int) -> tuple[int, ...]:
        """Shape of the chunk of one rank."""
        return (*shape[:dim], _lengths(shape[dim], self.cuts)[rank], *shape[dim + 1 :])

    @property
    def sizes(self) -> list[int]:
        """Elements of each rank in the flat buffer."""
        return [self.row] * self.n

    def _in_rows(self, rows: Tensor, wholes: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the rows and views of the whole tensors that correspond."""
        n = self.n
        packed: list[Tensor] = []
        cut: list[Tensor] = []
        for t, shape, dim, offset in zip(wholes, self.shapes, self.dims, self.offsets, strict=True):
            if shape[dim] % n == 0:
                chunk = self.chunk_shape(shape, dim, 0)
                packed.append(rows[:, offset : offset + math.prod(chunk)].unflatten(1, chunk))
                cut.append(t.unflatten(dim, (n, chunk[dim])).movedim(dim, 0) if dim else t.view(n, *chunk))
                continue
            for r, part in enumerate(t.split(_lengths(shape[dim], self.cuts), dim)):
                if part.numel():
                    packed.append(rows[r, offset : offset + part.numel()].view(part.shape))
                    cut.append(part)
        return packed, cut

    def pack(self, wholes: Sequence[Tensor]) -> Tensor:
        """A new flat buffer that holds the tensors, and zeros between them where those would be encoded too."""
        flat = (wholes[0].new_zeros if self.gaps else wholes[0].new_empty)(self.n * self.row)
        self.place(flat.view(self.n, self.row), wholes)
        return flat

    def unpack(self, flat: Tensor, wholes: Sequence[Tensor]) -> None:
        """Fill the (contiguous) tensors from a buffer."""
        self.take(flat.view(self.n, self.row), wholes)

    def place(self, rows: Tensor, wholes: Sequence[Tensor]) -> None:
        """Fill rows, which may be parts of longer ones, from the tensors."""
        packed, cut = self._in_rows(rows, [t if t.is_contiguous() else t.contiguous() for t in wholes])
        _copy(packed, cut)

    def take(self, rows: Tensor, wholes: Sequence[Tensor]) -> None:
        """Fill the (contiguous) tensors from rows, which may be parts of longer ones."""
        packed, cut = self._in_rows(rows, wholes)
        _copy(cut, packed)

    def pack_row(self, chunks: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """One rank's row from its chunks, cast on the way where a dtype is given."""
        row = (chunks[0].new_zeros if self.gaps else chunks[0].new_empty)(self.row, dtype=dtype)
        views = [row[o : o + c.numel()].view(c.shape) for o, c in zip(self.offsets, chunks, strict=True)]
        _copy(views, list(chunks))
        return row

    def chunks(self, row: Tensor, rank: int) -> list[Tensor]:
        """Views of the chunks in a rank's row."""
        made = []
        for shape, dim, offset in zip(self.shapes, self.dims, self.offsets, strict=True):
            chunk = self.chunk_shape(shape, dim, rank)
            made.append(row[offset : offset + math.prod(chunk)].view(chunk))
        return made


def _lengths(size: int, cuts: tuple[int, ...]) -> list[int]:
    """Of the parts of a dim that axes of these sizes cut one after the other."""
    parts = [size]
    for n in cuts:
        parts = [c for p in parts for c in chunk_sizes(p, n)]
    return parts


def aligned(sizes: Sequence[int], step: int) -> tuple[list[int], int]:
    """At which element of a buffer each of some tensors begins, multiples of ``step``, and where the last one ends."""
    made, end = [], 0
    for size in sizes:
        made.append(-(-end // step) * step)
        end = made[-1] + size
    return made, end


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    """All of them in one call, which does not take lists of none: where a rank's parts are empty."""
    if into:
        torch._foreach_copy_(into, values)


def chunk_dim(spec: Spec, axes: tuple[int, ...], *, first: bool = False) -> int | None:
    """The dim along which a tensor is cut over further axes; None where it stays as it is.

    Of the dims that no other axis splits: the first one that the axes divide evenly, else the longest.  A
    tensor none of whose dims is as long as the axes have ranks stays whole.
    """
    n = math.prod(spec.mesh.sizes[a] for a in axes)
    split = spec.layout.dim_axes()
    free = [d for d, size in enumerate(spec.shape) if d not in split and size >= n]
    if n == 1 or not free:
        return None
    if first and free[0] == 0:
        return 0
    even = [d for d in free if spec.shape[d] % n == 0]
    return even[0] if even else max(free, key=lambda d: (spec.shape[d], -d))


def cut(spec: Spec, axes: tuple[int, ...], *, first: bool = False) -> tuple[tuple[int, ...], Layout]:
    """The layout of a tensor that is cut over further axes, and those that cut it: too small a one is cut over the
    minor ones alone, or over none.

    Args:
        axes: in the order of the mesh; they cut one dim, the major one first.
        first: the first dim, however the axes divide it.
    """
    for own in (axes[i:] for i in range(len(axes))):
        dim = chunk_dim(spec, own, first=first)
        if dim is not None:
            layout = spec.layout
            for a in own:
                layout = layout.replace(a, Shard(dim))
            return own, layout
    return (), spec.layout


@functools.lru_cache(4096)  # of parameters, of which there are few
def whole_over(spec: Spec, axes: tuple[int, ...]) -> Layout:
    """The layout of a spec with some axes no longer cutting it."""
    layout = spec.layout
    for a in axes:
        layout = layout.replace(a, REPLICATE)
    return layout


def split_dim(spec: Spec, axes: tuple[int, ...]) -> int:
    """The dim that axes split."""
    p = spec.layout.placements[axes[0]]
    assert isinstance(p, Shard)
    return p.dim


def cut_axes(have: Spec, want: Spec) -> tuple[int, ...]:
    """The axes on which two layouts differ: those that cut one of them further."""
    pairs = zip(have.layout.placements, want.layout.placements, strict=True)
    return tuple(a for a, (p, q) in enumerate(pairs) if p != q)


def own_part(local: Tensor, have: Spec, want: Spec) -> Tensor:
    """What is this rank's of a tensor in a layout that cuts it further: a view of what it has."""
    here = have.mesh.coordinate(runtime.RT.rank)
    bounds = want.layout.without_blocks().local_bounds(want.shape, here)
    within = have.layout.without_blocks().local_offset(have.shape, here)
    for d, ((lo, hi), start) in enumerate(zip(bounds, within, strict=True)):
        if d in have.layout.blocks:  # no other axis cuts that
            continue
        local = local.narrow(d, lo - start, hi - lo) if local.shape[d] != hi - lo else local
    return local


def axes_of(mesh: Mesh, said: str | Sequence[str]) -> tuple[int, ...]:
    """One axis or several, as indices in the order of the mesh.  Raises MeshError for an unknown one."""
    return tuple(sorted({mesh.axis_index(a) for a in ((said,) if isinstance(said, str) else said)}))


__all__ = ["Packing", "aligned", "axes_of", "cut", "cut_axes", "own_part", "split_dim", "whole_over"]
