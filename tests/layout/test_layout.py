"""Placements, layouts and specs: sizes of shards, orders of axes, other notations, messages."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial as TPartial
from torch.distributed.tensor import Replicate as TReplicate
from torch.distributed.tensor import Shard as TShard

import meshwright as mw
from conformance.paddle import from_dims_mapping
from meshwright.errors import LayoutError, MeshError
from meshwright.layout import NO_MARKS, REDUCE_OPS, Marks, as_placement, chunk_bounds, chunk_sizes, marked, marks_of
from meshwright.layout.placement import placement_from
from meshwright.layout.spec import layout_data, layout_from
from tests.support.strategies import layouts, mesh_of, meshes, shapes, specs

OPS = ("sum", "avg", "max")
TWO = mw.Mesh({"dp": 2, "tp": 4})


# ------------------------------------------------------------------------------------------ sizes of shards


@given(size=st.integers(0, 40), parts=st.integers(1, 9))
def test_sizes_are_those_of_torch_chunk(size, parts):
    if size == 0:
        assert chunk_sizes(size, parts) == [0] * parts
        return
    want = [len(c) for c in torch.arange(size).chunk(parts)]
    assert chunk_sizes(size, parts) == want + [0] * (parts - len(want))
    bounds = [chunk_bounds(size, parts, i) for i in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))


def test_uneven_and_empty():
    assert chunk_sizes(10, 4) == [3, 3, 3, 1]
    assert chunk_sizes(10, 6) == [2, 2, 2, 2, 2, 0]
    layout = mw.Layout(mw.Mesh({"x": 4}), {"x": mw.Shard(0)})
    assert [layout.local_shape((5, 2), (i,)) for i in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    assert [layout.local_offset((5, 2), (i,)) for i in range(4)] == [(0, 0), (2, 0), (4, 0), (5, 0)]


@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_parts_tile_the_tensor(mesh, shape, data):
    """Every element is held by as many ranks as replicate it, and local bounds are shape and offset."""
    layout = data.draw(layouts(mesh, len(shape)))
    held = torch.zeros(shape)
    for at in mesh.coordinates():
        bounds = layout.local_bounds(shape, at)
        assert tuple(b - a for a, b in bounds) == layout.local_shape(shape, at)
        assert tuple(a for a, _ in bounds) == layout.local_offset(shape, at)
        held[tuple(slice(a, b) for a, b in bounds)] += 1
    copies = 1
    for n, p in zip(mesh.sizes, layout.placements, strict=True):
        copies *= 1 if isinstance(p, mw.Shard) else n
    assert torch.equal(held, torch.full(shape, float(copies)))


@given(mesh=meshes([(2, 3), (3, 2), (2, 2, 2)]), size=st.integers(0, 20), data=st.data())
def test_the_major_axis_cuts_first(mesh, size, data):
    order = data.draw(st.permutations(range(mesh.ndim)))
    layout = mw.Layout(mesh, [mw.Shard(0)] * mesh.ndim, order={0: order})
    assert layout.dim_axes() == {0: tuple(order)}
    value = torch.arange(size)
    for at in mesh.coordinates():
        part = value
        for a in order:
            cut = list(part.tensor_split([chunk_bounds(len(part), mesh.sizes[a], i)[1] for i in range(mesh.sizes[a])]))
            part = cut[at[a]]
        lo, hi = layout.local_bounds((size,), at)[0]
        assert part.tolist() == value[lo:hi].tolist()


# ------------------------------------------------------------------------------------------ ways to say it


def test_mapping_sequence_and_single_placement():
    want = mw.Layout(TWO, {"tp": mw.Shard(0)})
    assert want.placements == (mw.Replicate(), mw.Shard(0))
    assert mw.Layout(TWO, [mw.Replicate(), mw.Shard(0)]) == want
    assert mw.Layout(TWO, {1: mw.Shard(0)}) == want
    assert mw.Layout(TWO, want) == want
    assert mw.Layout(TWO).is_replicated()
    assert mw.Layout(mw.Mesh({"x": 2}), mw.Shard(1)).placements == (mw.Shard(1),)


def test_negative_dims_are_resolved_where_the_number_of_dims_is_known():
    assert mw.Layout(TWO, {"tp": mw.Shard(-1)}, ndim=3) == mw.Layout(TWO, {"tp": mw.Shard(2)}, ndim=3)
    later = mw.Layout(TWO, {"tp": mw.Shard(-1), "dp": mw.Shard(-2)})
    assert later.with_ndim(2).placements == (mw.Shard(0), mw.Shard(1))
    spec = mw.Spec((4, 6), torch.float32, mw.Layout(TWO, {"tp": mw.Shard(-1)}))
    assert spec.layout.placements[1] == mw.Shard(1)
    assert mw.Layout(TWO, [mw.Shard(-1), mw.Shard(-1)], order={-1: ["tp", "dp"]}, ndim=2).dims == {1: ("tp", "dp")}


def test_order_is_said_only_where_it_is_not_that_of_the_mesh():
    both = [mw.Shard(0), mw.Shard(0)]
    assert mw.Layout(TWO, both, order={0: ["dp", "tp"]}) == mw.Layout(TWO, both)
    other = mw.Layout(TWO, both, order={0: ["tp", "dp"]})
    assert other != mw.Layout(TWO, both)
    assert other.dims == {0: ("tp", "dp")}
    assert repr(other) == "<dp: Shard(0), tp: Shard(0); dim 0 by tp then dp>"
    assert mw.Layout(TWO, other).dims == other.dims


@given(mesh=meshes(), ndim=st.integers(0, 3), data=st.data())
def test_torch_placements_round_trip(mesh, ndim, data):
    layout = data.draw(layouts(mesh, ndim, OPS, orders=False))
    theirs = layout.to_torch()
    assert all(isinstance(p, (TShard, TReplicate, TPartial)) for p in theirs)
    assert mw.Layout(mesh, theirs, ndim=ndim) == layout


def test_torch_cannot_say_orders():
    layout = mw.Layout(TWO, [mw.Shard(0), mw.Shard(0)], order={0: ["tp", "dp"]})
    with pytest.raises(LayoutError, match=r"torch's placements cannot express .* not in mesh order"):
        layout.to_torch()


@given(mesh=meshes(), ndim=st.integers(0, 4), data=st.data())
def test_paddle_view_round_trips(mesh, ndim, data):
    layout = data.draw(layouts(mesh, ndim, OPS))
    if any(len(axes) > 1 for axes in layout.dims.values()):
        with pytest.raises(LayoutError, match=r"dims_mapping cannot express .*: dim \d is split by \d axes"):
            _ = layout.dims_mapping
        return
    assert len(layout.dims_mapping) == ndim
    assert from_dims_mapping(mesh, layout.dims_mapping, layout.partial) == layout


def test_paddle_view():
    layout = mw.Layout(TWO, {"tp": mw.Shard(1), "dp": mw.Partial()}, ndim=3)
    assert layout.dims_mapping == [-1, 1, -1]
    assert layout.partial == {0: "sum"}
    assert from_dims_mapping(TWO, [-1, 1, -1], {0: "SUM"}) == layout
    both = [mw.Shard(0), mw.Shard(0)]
    for axes in ([0, 1], [1, 0]):
        layout = mw.Layout(TWO, both, order={0: axes}, ndim=2)
        assert from_dims_mapping(TWO, [axes, -1]) == layout
        with pytest.raises(LayoutError, match=r"cannot express .* dim 0 is split by 2 axes"):
            layout.dims_mapping  # noqa: B018


@given(mesh=meshes(), ndim=st.integers(0, 3), data=st.data())
def test_equal_hash_pickle_copy(mesh, ndim, data):
    turned = mw.Layout(mw.Mesh({"a": 2, "b": 3}), [mw.Shard(0), mw.Shard(0)], order={0: ["b", "a"]}, ndim=2)
    for layout in (data.draw(layouts(mesh, ndim, OPS)), turned):
        again = mw.Layout(layout.mesh, layout.placements, order=dict(layout.order), ndim=layout.ndim)
        for other in (again, pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
            assert other == layout
            assert hash(other) == hash(layout)
            assert other.ndim == layout.ndim
        assert layout != layout.placements


def test_layouts_that_differ_in_one_part_differ_in_every_form():
    """Compared, hashed, printed, pickled, and written to a file."""
    placements = [mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Shard(0, blocks=(2, 4)), mw.Shard(0, blocks=(4, 2)),
                  mw.At(0), mw.At(1), *map(mw.Partial, REDUCE_OPS)]  # fmt: skip
    for p, q in itertools.product(placements, repeat=2):
        assert (p == q) is (repr(p) == repr(q)) is (p is q)
        assert len({p, q}) == 1 + (p is not q)
    mesh, other = mw.Mesh({"a": 2, "b": 3}), mw.Mesh({"a": 3, "b": 2})
    made = [mw.Layout(mesh, [p, mw.Replicate()], ndim=2) for p in placements]
    both = [mw.Shard(0), mw.Shard(0)]
    made += [mw.Layout(mesh, both, ndim=2), mw.Layout(mesh, both, order={0: ["b", "a"]}, ndim=2)]
    made += [mw.Layout(mesh, [mw.Replicate(), mw.Partial("max")], ndim=2)]
    assert made[1] != mw.Layout(other, made[1].placements, ndim=2)
    for x, y in itertools.product(made, repeat=2):
        forms = (repr, layout_data, lambda layout: pickle.loads(pickle.dumps(layout)))
        assert [f(x) == f(y) for f in forms] == [x is y] * 3
        assert (x == y) is (x is y)
        assert len({x, y}) == 1 + (x is not y)
    for x in made:
        assert [placement_from(repr(p)) for p in x.placements] == list(x.placements)
        assert layout_from(json.loads(json.dumps(layout_data(x))), mesh, 2) == x


@given(mesh=meshes(), ndim=st.integers(1, 3), data=st.data())
def test_replace_makes_the_axis_the_minor_one(mesh, ndim, data):
    layout = data.draw(layouts(mesh, ndim, OPS))
    axis = data.draw(st.integers(0, mesh.ndim - 1))
    dim = data.draw(st.integers(0, ndim - 1))
    moved = layout.replace(axis, mw.Shard(dim))
    assert moved.dim_axes()[dim][-1] == axis
    assert moved.replace(axis, mw.Replicate()).placements[axis] == mw.Replicate()
    for a in range(mesh.ndim):
        if a != axis:
            assert moved.placements[a] == layout.placements[a]


# ------------------------------------------------------------------------------------------ specs


@given(mesh=meshes(), data=st.data())
def test_specs_are_interned_and_pickle_to_themselves(mesh, data):
    spec = data.draw(specs(mesh, ops=OPS))
    assert pickle.loads(pickle.dumps(spec)) is spec
    again = mw.Spec(spec.shape, spec.dtype, mw.Layout(mesh, spec.layout))
    assert again is spec
    assert copy.deepcopy(spec) is spec
    assert spec.with_() is spec
    assert spec.nbytes == torch.Size(spec.shape).numel() * spec.dtype.itemsize


@given(mesh=meshes(), data=st.data())
def test_marked_specs_are_interned_and_what_is_derived_of_them_is_plain(mesh, data):
    spec = data.draw(specs(mesh, ops=OPS))
    marks = Marks(copied=True, stored=data.draw(st.booleans()), known=spec)
    carried = marked(spec, marks)
    assert carried is not spec
    assert carried is marked(spec, Marks(copied=True, stored=marks.stored, known=spec))
    assert pickle.loads(pickle.dumps(carried)) is carried
    assert marks_of(carried) == marks
    assert marks_of(spec) == NO_MARKS
    assert marks.after_write() == Marks(copied=True, stored=marks.stored)
    for name in ("decided", "invariant", "untyped", "dual", "with_"):
        made = getattr(carried, name)()
        assert made is getattr(spec, name)()
        assert type(made) is mw.Spec
    assert marked(carried, NO_MARKS) is spec
    assert marked(carried, Marks(stored=True)) is marked(spec, Marks(stored=True))
    assert repr(carried) == repr(spec)


@given(mesh=meshes(), data=st.data())
def test_the_gradient_of_a_gradient_lies_as_the_tensor(mesh, data):
    spec = data.draw(specs(mesh)).with_(grad_partial_mask=data.draw(st.integers(0, 7)))
    again = spec.grad().grad()
    assert again.layout == spec.layout
    assert again.grad_partial_mask == spec.grad_partial_mask


def test_repr():
    spec = mw.Spec((4, 6), torch.bfloat16, mw.Layout(TWO, {"dp": mw.Partial("max"), "tp": mw.Shard(0)}))
    assert repr(spec) == "bfloat16[4, 6] <dp: Partial('max'), tp: Shard(0)>"
    assert repr(mw.Partial()) == "Partial()"
    assert repr(mw.Layout(TWO)) == "<dp: Replicate(), tp: Replicate()>"


def test_picture():
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    layout = mw.Layout(mesh, {"dp": mw.Shard(0), "tp": mw.Partial()})
    assert layout.picture((1, 3)) == "\n".join(
        [
            "(1, 3) on Mesh(dp=2, tp=2): <dp: Shard(0), tp: Partial()>",
            "  rank 0 (dp0,tp0)  [:, :] part of sum over tp",
            "  rank 1 (dp0,tp1)  [:, :] part of sum over tp",
            "  rank 2 (dp1,tp0)  [1:1, :] (empty) part of sum over tp",
            "  rank 3 (dp1,tp1)  [1:1, :] (empty) part of sum over tp",
        ]
    )


# ------------------------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mw.Partial("mean"), "unknown reduction 'mean' for Partial: take one of " + ", ".join(REDUCE_OPS)),
        (lambda: mw.Shard("rows"), "Shard takes a dim number, not 'rows'"),
        (lambda: mw.Shard(True), "Shard takes a dim number, not True"),
        (lambda: as_placement("dp"), "'dp' is not a placement: take mw.Shard(dim), mw.Replicate(), mw.Partial(op) "
         "or mw.At(i)"),
        (lambda: mw.Layout(TWO, [mw.Shard(0)]), '1 placements for the 2 axes of Mesh(dp=2, tp=4): give one per axis, '
         'or name them: {"dp": mw.Shard(0)}'),
        (lambda: mw.Layout(TWO, {"dp": mw.Shard(2)}, ndim=2), "Shard(2) on axis 'dp': the tensor has 2 dims, so dims "
         "-2 to 1 exist"),
        (lambda: mw.Layout(TWO, {"tp": mw.Shard(-3)}, ndim=2), "Shard(-3) on axis 'tp': the tensor has 2 dims"),
        (lambda: mw.Layout(TWO, {"tp": mw.Shard(0)}, ndim=0), "the tensor has 0 dims, nothing to split"),
        (lambda: mw.Spec((3,), torch.float32, mw.Layout(TWO, {"tp": mw.Shard(1)})), "Shard(1) on axis 'tp': the "
         "tensor has 1 dim, so dims -1 to 0 exist"),
        (lambda: mw.Layout(TWO, {"tp": mw.Shard(0)}, order={0: ["tp", "dp"]}), "order of dim 0 names ['tp', 'dp'], "
         "but the axes that split it are ['tp']"),
        (lambda: mw.Layout(TWO, [mw.Shard(0)] * 2, order={0: ["tp", "tp"]}), "order of dim 0 names ['tp', 'tp']"),
        (lambda: mw.Layout(TWO, [mw.Shard(0, blocks=(4, 4)), mw.Shard(0)], ndim=1), "a dim that is split by blocks is "
         "split by no other axis"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_be(make, message):
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_unknown_axis():
    with pytest.raises(MeshError, match=re.escape("unknown axis 'pp': Mesh(dp=2, tp=4) has the axes dp, tp")):
        mw.Layout(TWO, {"pp": mw.Shard(0)})
    with pytest.raises(MeshError, match="unknown axis 'pp'"):
        mw.Layout(TWO, [mw.Shard(0), mw.Shard(0)], order={0: ["pp", "tp"]})
    with pytest.raises(MeshError, match="unknown axis"):
        mw.Layout(mesh_of((2,)), {1: mw.Shard(0)})
