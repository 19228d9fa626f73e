"""Writes in captured steps: ``out=``, rows by index into split dims, views that are copies; against one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import meshwright as mw
from conformance.fuzz import Leaf, Program, judge

S0, S1 = {"a": mw.Shard(0)}, {"a": mw.Shard(1)}


def program(lines: str, layout: dict[str, mw.Shard], ranks: int = 2) -> Program:
    """``v0`` (with a gradient) and ``v1`` of 5 x 3; ``v2 = v1 * 2``, then ``lines``; the loss is made of ``v3``."""
    mesh = mw.Mesh({"a": ranks})
    placed = mw.Layout(mesh, layout, ndim=2)
    leaves = tuple(Leaf(f"v{i}", (5, 3), torch.float64, 3 + i, placed, grad=not i) for i in range(2))
    return Program(mesh, leaves, ("v2 = v1 * 2", *lines.splitlines(), "v3 = v0 * v2"), ("v3",))


OUT = {
    "in place": "torch.add(v2, v1, out=v2)",
    "result": "v4 = torch.add(v2, v1, out=v2)\nv4.mul_(2)",
    "several": "v4 = vals((3,), 1) * 1\nv5 = ints((3,), 2, 1) * 1\nv2 = torch.max(v1, 0, out=(v4, v5))[0] + v5",
    "empty": "v2 = torch.empty(0, dtype=torch.float64)\ntorch.exp(v1, out=v2)",
    "another dtype": "v2 = torch.empty(5, 3)\ntorch.exp(v1, out=v2)",
    "a view": "v4 = v2[1:4].mT\ntorch.exp(v1[:3].mT, out=v4)",
    "of a contraction": "torch.matmul(v1, v1.mT[:, :3], out=v2)",
}
ROWS = {
    "tensor": "v2[distinct(3, 5, 1)] = v0[:3]",
    "twice": "v2[ints((3,), 2, 1)] = v0[:3].detach()",
    "one for all": "v2[distinct(2, 5, 1)] = v0[0]",
    "number": "v2[[-1, 0]] = 3",
    "augmented": "v2[[4, 1]] *= v0[:2]",
    "columns": "v2[:, distinct(2, 3, 1)] = v0[:, :2]",
    "two tensors": "v2[distinct(2, 3, 1), distinct(2, 3, 1)] = v0[0, :2]",
    "two dims": "v2[torch.tensor([[0, 1], [2, 4]])] = v0[:4].reshape(2, 2, 3)",
    "none": "v2[ints((0,), 5, 1)] = v0[:0]",
    "added": "v2 = v2.index_put((ints((4,), 5, 1),), v0[:4], accumulate=True)",
    "added twice": "v2.index_put_((ints((4,), 2, 1),), v0[0, 0], accumulate=True)",
    "in a copy": "v2[1:4][distinct(2, 3, 1)] = v0[:2]",
}
READS = {
    "read after a write to the base": "v4 = v2.view(-1)[1:5]; v2.mul_(0.75)\nv2 = v4 * v4\nv0 = v0[0, 0]",
    "differentiated past a conversion": "v2 = v0 + reshard(v0 * 2, {'a': R}, None) * v2",
}


@pytest.mark.parametrize("layout", [S0, S1], ids=["S0", "S1"])
@pytest.mark.parametrize("name", {**OUT, **ROWS, **READS})
@pytest.mark.thin(3)
def test_equals_one_device(name: str, layout: dict[str, mw.Shard]) -> None:
    given = program({**OUT, **ROWS, **READS}[name], layout)
    found = judge(given, static=True)
    assert found.kind == "equal", found.why


@pytest.mark.parametrize("ranks", [3, 6])
@pytest.mark.parametrize("name", ROWS)
def test_rows_with_second_gradients(name: str, ranks: int) -> None:
    found = judge(replace(program(ROWS[name], S0, ranks), second=True))
    assert found.kind == "equal", found.why


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_index_out_of_range_is_the_same_error_on_every_rank(size: int) -> None:
    mesh = mw.Mesh({"a": 3})
    fns = [
        lambda x, i: x.__setitem__(i, 1.0),
        lambda x, i: x.index_put((i,), torch.ones(())),
        lambda x, i: x.index_add(0, i, torch.ones(len(i), 2)),
        lambda x, i: x.index_fill(0, i, 1.0),
    ]
    for number, fn in enumerate(fns):
        for index in ([0, size], [-size - 1, 0]):

            def message(x: torch.Tensor, fn: object = fn, index: list[int] = index) -> str:
                try:
                    fn(x, torch.tensor(index))  # type: ignore[operator]
                except (IndexError, RuntimeError) as error:
                    return str(error)
                return "no error"

            want = message(torch.zeros(size, 2))
            got = mw.simulate(lambda message=message: message(mw.shard_tensor(torch.zeros(size, 2), mesh, S0)), mesh)
            assert set(got) == {want}, (number, index, want, got)
