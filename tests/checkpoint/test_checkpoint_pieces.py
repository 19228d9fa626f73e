"""Which part of a tensor each rank writes and reads: every element once, by brute force over meshes and layouts."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshwright as mw
from meshwright.layout import Spec, pieces

MESHES = [mw.Mesh({"a": 1}), mw.Mesh({"a": 3}), mw.Mesh({"a": 2, "b": 3}), mw.Mesh({"a": 2, "b": 2, "c": 2})]
SHAPES = [(), (1,), (7,), (5, 4), (2, 9), (0, 3), (1, 1, 6)]


def specs(mesh: mw.Mesh, shape: tuple[int, ...]) -> list[Spec]:
    choices = [mw.Replicate(), *(mw.Shard(d) for d in range(len(shape)))]
    made = []
    for placements in itertools.product(choices, repeat=mesh.ndim):
        axes = [a for a, p in zip(mesh.axes, placements, strict=True) if p == mw.Shard(0)]
        orders = [None, {0: axes[::-1]}] if len(axes) > 1 else [None]
        for order in orders:
            made.append(Spec(shape, torch.float32, mw.Layout(mesh, placements, order=order, ndim=len(shape))))
    return made


def cut(box: pieces.Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("small", [4, 1 << 16])
def test_every_element_is_written_once(mesh: mw.Mesh, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALL", small)
    pieces.overlapping.cache_clear()
    for shape in SHAPES:
        for turn, spec in enumerate(specs(mesh, shape)):
            written, boxes = torch.zeros(shape), {}
            for rank, at in zip(mesh.ranks, mesh.coordinates(), strict=True):
                box = pieces.own_piece(spec, at, turn)
                if box is None:
                    continue
                assert not pieces.nothing(box)
                written[cut(box)] += 1
                boxes[rank] = box
                held = spec.layout.local_bounds(shape, at)
                assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, box, strict=True))
            assert (written == 1).all(), (spec, boxes)
            for lo, hi in ((0.0, 1.0), (0.3, 0.6), (0.5, 1.0)):
                wanted = tuple((int(lo * n), max(int(lo * n), int(hi * n))) for n in shape)
                found = {p.rank: p.box for p in pieces.overlapping(spec, wanted, turn)}
                meets = {r: b for r, b in boxes.items() if not pieces.nothing(pieces.common(b, wanted))}
                assert found == meets, (spec, wanted)
    pieces.overlapping.cache_clear()


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_element_is_read_once(mesh: mw.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in whole rows of what was stored, whatever the target; small ones by all."""
    monkeypatch.setattr(pieces, "SMALL", 4)
    for shape in [s for s in SHAPES if s]:
        for stored, target in itertools.product(specs(mesh, shape)[::2], specs(mesh, shape)[::3]):
            read = torch.zeros(shape)
            spec = pieces.read_spec(stored, target)
            for at in mesh.coordinates():
                box = tuple(spec.layout.local_bounds(shape, at))
                read[cut(box)] += 1
                for piece in pieces.overlapping(stored, box, 0):
                    wanted = pieces.common(piece.box, box)
                    in_rows = all(wanted[d] == piece.box[d] for d in range(1, len(shape)))
                    # Ranks share short ones along a longer dim.
                    assert in_rows or shape[0] < mesh.size or spec is target, (stored, target, piece, box)
            assert spec is target or (read == 1).all(), (stored, target)


def test_plans_of_large_meshes_are_quick() -> None:
    """A rank's plan of a save is in proportion to the tensors, that of a load to what it reads; not to the ranks."""
    mesh = mw.Mesh({"dp": 256, "tp": 64})
    spec = Spec((8192, 8192), torch.float32, mw.Layout(mesh, {"tp": mw.Shard(0)}))
    assert pieces.own_piece(spec, (3, 5), 0) == ((646, 648), (0, 8192))  # 4 MiB, held 256 times: 64 shares
    assert pieces.own_piece(spec, (64, 5), 0) is None
    assert pieces.own_piece(spec, (64, 5), 1) == ((766, 768), (0, 8192))
    assert len(pieces.overlapping(spec, ((640, 768), (0, 8192)), 0)) == 64
    assert len(pieces.overlapping(spec, ((640, 644), (0, 64)), 0)) == 2
