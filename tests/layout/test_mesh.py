"""The mesh: names, coordinates, groups, what cannot be, and its match with the running processes."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.errors import MeshError
from meshwright.mesh import parse_mesh
from tests.support.processes import run_processes
from tests.support.strategies import meshes


@given(mesh=meshes())
def test_coordinates_are_row_major_and_invert(mesh):
    at = mesh.coordinates()
    assert at == list(itertools.product(*(range(n) for n in mesh.sizes)))
    assert [mesh.rank_at(c) for c in at] == list(mesh.ranks)
    assert [mesh.coordinate(r) for r in mesh.ranks] == at


@given(mesh=meshes(), data=st.data())
def test_groups_tile_the_mesh(mesh, data):
    axes = data.draw(st.lists(st.integers(0, mesh.ndim - 1), unique=True))
    groups = {mesh.group_ranks(r, axes) for r in mesh.ranks}
    assert sorted(itertools.chain(*groups)) == list(mesh.ranks)
    for ranks in groups:
        rest = {tuple(c for a, c in enumerate(mesh.coordinate(r)) if a not in axes) for r in ranks}
        assert len(rest) == 1


def test_other_ranks():
    mesh = mw.Mesh({"dp": 2, "tp": 2}, ranks=[6, 2, 4, 0])
    assert mesh.coordinate(2) == (0, 1)
    assert mesh.rank_at((1, 0)) == 4
    assert mesh.group_ranks(0, [0]) == (2, 0)
    assert mesh != mw.Mesh({"dp": 2, "tp": 2})


@given(mesh=meshes())
def test_equal_hash_pickle_copy(mesh):
    again = mw.Mesh(dict(zip(mesh.axes, mesh.sizes, strict=True)))
    for other in (again, pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh)):
        assert other == mesh
        assert hash(other) == hash(mesh)
    assert mesh != mw.Mesh({"other": mesh.size})
    assert mesh != "a mesh"


def test_names_and_sizes():
    mesh = mw.Mesh({"dp": 2, "tp": 4})
    assert (mesh.axes, mesh.sizes, mesh.shape, mesh.ndim, mesh.size) == (("dp", "tp"), (2, 4), (2, 4), 2, 8)
    assert mesh.axis_index("tp") == mesh.axis_index(1) == mesh.axis_index(-1) == 1
    assert mesh.axis_size("tp") == 4
    assert repr(mesh) == "Mesh(dp=2, tp=4)"
    assert repr(mw.Mesh({"dp": 2}, device="cuda")) == "Mesh(dp=2, device='cuda')"


def test_parse():
    assert parse_mesh("dp=2, tp=4") == mw.Mesh({"dp": 2, "tp": 4})
    for text, message in [
        ("dp", "cannot read 'dp' in mesh 'dp': write axis=size, e.g. dp=2,tp=4"),
        ("dp=two", "cannot read 'dp=two'"),
        ("dp=2,dp=2", "axis 'dp' appears twice"),
        ("dp=0", "axis 'dp' has size 0"),
        ("", "a mesh needs at least one axis"),
    ]:
        with pytest.raises(MeshError, match=message):
            parse_mesh(text)


@pytest.mark.parametrize(
    ("axes", "ranks", "message"),
    [
        ({}, None, r'a mesh needs at least one axis, e\.g\. Mesh\({"dp": 2}\)'),
        ({"a b": 2}, None, "axis name 'a b' is not usable: take an identifier such as 'dp'"),
        ({3: 2}, None, "axis name 3 is not usable"),
        ({"dp": 0}, None, "axis 'dp' has size 0: a whole number of at least 1 was expected"),
        ({"dp": True}, None, "axis 'dp' has size True"),
        ({"dp": 2.0}, None, "axis 'dp' has size 2.0"),
        ({"dp": 2}, [0, 0], "has 2 places but 1 distinct ranks were given"),
        ({"dp": 2}, [0, 1, 2], "has 2 places but 3 distinct ranks were given"),
    ],
)
def test_meshes_that_cannot_be(axes, ranks, message):
    with pytest.raises(MeshError, match=message) as caught:
        mw.Mesh(axes, ranks=ranks)
    assert isinstance(caught.value, ValueError)


def test_unknown_axes_and_ranks():
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    for axis in ("pp", 2, -3):
        with pytest.raises(MeshError, match=rf"unknown axis {axis!r}: Mesh\(dp=2, tp=2\) has the axes dp, tp"):
            mesh.axis_index(axis)
    with pytest.raises(MeshError, match=r"rank 4 is not in .*its ranks: \[0, 1, 2, 3\]"):
        mesh.coordinate(4)


def test_init_mesh_of_one_process_and_simulated():
    mesh = mw.init_mesh({"dp": 1})
    assert mesh.size == 1
    with pytest.raises(MeshError, match=r"needs 2 x 2 = 4 processes, 1 is running: start it with torchrun"):
        mw.init_mesh({"dp": 2, "tp": 2})
    two = mw.Mesh({"dp": 2})
    assert mw.simulate(lambda: mw.init_mesh({"dp": 2}) == two, two) == [True, True]


def _init_meshes() -> tuple[str, float, tuple[int, ...]]:
    try:
        mw.init_mesh({"dp": 2, "tp": 2})
        message = "no error"
    except MeshError as error:
        message = str(error)
    mesh = mw.init_mesh({"dp": 2})
    x = mw.shard_tensor(torch.arange(5.0), mesh, {"dp": mw.Shard(0)})
    device_mesh = mesh.device_mesh()
    assert device_mesh.mesh_dim_names == ("dp",)
    assert mesh.device_mesh() is device_mesh
    return message, x.sum().item(), tuple(x.to_local().shape)


@pytest.mark.processes
def test_init_mesh_of_processes():
    results = run_processes(_init_meshes, 2)
    assert [r[2] for r in results] == [(3,), (2,)]
    for message, total, _ in results:
        assert message == (
            "Mesh(dp=2, tp=2) needs 2 x 2 = 4 processes, 2 are running: start it with torchrun --nproc-per-node 4, "
            "or change the sizes"
        )
        assert total == 10.0


@settings(max_examples=20)
@given(mesh=meshes())
def test_a_mesh_only_describes(mesh):
    """No process group is needed, or made."""
    assert not torch.distributed.is_initialized()
    assert mw.Layout(mesh, [mw.Shard(0)] * mesh.ndim).local_shape((12,), mesh.coordinate(0)) != ()
