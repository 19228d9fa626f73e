"""What local functions send, by hand: values, gradients and records; and arguments that calls write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch.local_comm import LocalComm
from meshwright.dispatch.rows import RowExchange
from meshwright.dispatch.written_arguments import into, written
from meshwright.errors import DispatchError
from meshwright.ranks import runtime
from meshwright.rules.strategies import AllToAllSpec

Tensor = torch.Tensor
N = 3
MESH = mw.Mesh({"a": N, "b": 2})
F64 = torch.float64


def own(*shape: int) -> Tensor:
    """Numbers that tell of which rank, and where, they are."""
    at = MESH.coordinate(runtime.RT.rank)[0]
    return (torch.arange(float(torch.Size(shape).numel()), dtype=F64).view(shape) + 100 * at).requires_grad_()


def of_rank(at: int, *shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=F64).view(shape) + 100 * at


def ran(send: Callable[[LocalComm, Tensor], Tensor], *shape: int) -> list[Any]:
    """Of the ranks along the first axis: what arrives, the gradient of its sum with its own numbers, and records."""

    def rank() -> Any:
        runtime.RT.records = []
        try:
            x = own(*shape)
            made = send(LocalComm("an op", MESH), x)
            if made.requires_grad:
                (made * made.detach()).sum().backward()
            return made.detach(), x.grad, list(runtime.RT.records)
        finally:
            runtime.RT.records = None

    found = mw.simulate(rank, MESH)
    for i in range(N):
        torch.testing.assert_close(found[2 * i][:2], found[2 * i + 1][:2], msg="the other axis is no part of it")
    return found[::2]


def told(records: list[Any]) -> list[tuple[Any, ...]]:
    assert all((r.op, r.axes, r.src, r.dst, r.dtypes, r.sums) == ("an op", ("a",), "local", "local", ("float64",), (0,))
               for r in records)  # fmt: skip
    assert all("test_sending.py" in r.line for r in records)
    return [(r.kinds, r.shape, r.bytes, r.backward_bytes, r.reason, r.phase) for r in records]


BACK = "its gradient: since"


def test_a_rank_sends_to_another_one() -> None:
    """0 to 1, 1 to 0, and 2 to itself, which sends nothing."""
    found = ran(lambda s, x: s.permute(x, (0,), [1, 0, 2], "since"), 2, 2)
    for i, (made, grad, records) in enumerate(found):
        torch.testing.assert_close(made, of_rank((1, 0, 2)[i], 2, 2))
        torch.testing.assert_close(grad, of_rank(i, 2, 2))
        sent = 32 if i < 2 else 0
        assert told(records) == [
            (("permute",), (2, 2), sent, sent, "since", "forward"), (("permute",), (2, 2), sent, 0.0, BACK, "backward"),
        ]  # fmt: skip
    around = ran(lambda s, x: s.permute(x, (0,), [1, 2, 0], "since"), 2)
    for i, (made, grad, _) in enumerate(around):
        torch.testing.assert_close(made, of_rank((i - 1) % N, 2))
        torch.testing.assert_close(grad, of_rank(i, 2))


def test_all_ranks_have_the_parts_of_all() -> None:
    found = ran(lambda s, x: s.all_gather(x, (0,), 0, [2] * N, "since"), 2, 2)
    whole = torch.cat([of_rank(i, 2, 2) for i in range(N)])
    for i, (made, grad, records) in enumerate(found):
        torch.testing.assert_close(made, whole)
        torch.testing.assert_close(grad, N * of_rank(i, 2, 2), msg="gradients are added up")
        assert told(records) == [
            (("all_gather",), (2, 2), 2 * 32, 2 * 32, "since", "forward"),
            (("reduce_scatter",), (2, 2), 2 * 32, 0.0, BACK, "backward"),
        ]  # fmt: skip


def test_each_rank_has_its_part_of_the_sum() -> None:
    found = ran(lambda s, x: s.reduce_scatter(x, (0,), 1, [2, 2, 1], "since"), 2, 5)
    whole = sum(of_rank(i, 2, 5) for i in range(N))
    assert isinstance(whole, Tensor)
    for (made, grad, records), part in zip(found, whole.split([2, 2, 1], 1), strict=True):
        torch.testing.assert_close(made, part)
        torch.testing.assert_close(grad, whole)
        assert told(records)[0] == (("reduce_scatter",), (2, 5), 80 * 2 // 3, 80 * 2 // 3, "since", "forward")
        assert told(records)[1][0] == ("all_gather",)


def test_dims_change_places() -> None:
    """Six columns of a rank's two rows become two columns of all six rows."""
    way = AllToAllSpec(1, (2, 2, 2), 0, (2, 2, 2))
    found = ran(lambda s, x: s.all_to_all(x, (0,), way, "since"), 2, 6)
    whole = torch.cat([of_rank(i, 2, 6) for i in range(N)])
    for i, (made, grad, records) in enumerate(found):
        torch.testing.assert_close(made, whole[:, 2 * i : 2 * i + 2])
        torch.testing.assert_close(grad, of_rank(i, 2, 6))
        assert [r[0] for r in told(records)] == [("all_to_all",)] * 2
        assert told(records)[0][2:4] == (96 * 2 // 3, 96 * 2 // 3)


def test_what_belongs_to_a_backward_is_sent_once() -> None:
    for send in (
        lambda s, x: s.all_gather(x.detach(), (0,), 0, [2] * N, "since", "backward"),
        lambda s, x: s.reduce_scatter(x.detach(), (0,), 0, [2, 0, 0], "since", "backward"),
        lambda s, x: s.all_to_all(x.detach(), (0,), AllToAllSpec(1, (2, 2, 2), 0, (2, 2, 2)), "since", "backward"),
    ):
        for _, grad, records in ran(send, 2, 6):
            assert grad is None
            ((*_, again, why, phase),) = told(records)
            assert (again, why, phase) == (0.0, "since", "backward")
    for _, _, records in ran(lambda s, x: s.all_gather(x, (0,), 0, [2] * N, "since", "backward"), 2, 6):
        assert [r[-2:] for r in told(records)] == [("since", "backward")] * 2


def test_numbers_of_all_ranks_take_no_gradient() -> None:
    whole = torch.cat([of_rank(i, 2) for i in range(N)])
    for made, grad, records in ran(lambda s, x: s.gather_numbers(x, (0,), "since"), 2):
        torch.testing.assert_close(made, whole)
        assert grad is None
        assert told(records) == [(("all_gather",), (2,), 32, 0.0, "since", "forward")]


def test_without_records_nothing_is_recorded() -> None:
    def rank() -> Any:
        x = own(2, 2)
        made = LocalComm("an op", MESH).all_gather(x, (0,), 0, [2] * N, "since")
        made.sum().backward()
        assert runtime.RT.records is None
        return made.detach(), x.grad

    for made, grad in mw.simulate(rank, MESH):
        assert made.shape == (6, 2)
        assert grad.tolist() == [[3.0, 3.0]] * 2


def test_rows_that_ranks_want() -> None:
    """Two rows of three columns on each rank: a rank has at most all rows of the others, 2/3 of what there is."""
    wanted = torch.ones(N, 2 * N, dtype=torch.bool)

    def exchange(s: LocalComm) -> RowExchange:
        return RowExchange(s.op, s.mesh, (0,), (2,) * N, "since")

    whole = torch.cat([of_rank(i, 2, 3) for i in range(N)])
    most = (N - 1) * 6 * 8 // N
    for made, grad, records in ran(lambda s, x: exchange(s).all(x.detach()), 2, 3):
        torch.testing.assert_close(made, whole)
        assert grad is None
        assert told(records) == [(("all_gather",), (2, 3), 3 * most, 0, "since", "forward")]
    for i, (made, grad, records) in enumerate(ran(lambda s, x: exchange(s).gather(wanted, x)[0], 2, 3)):
        torch.testing.assert_close(made, whole)
        torch.testing.assert_close(grad, N * of_rank(i, 2, 3))
        assert told(records) == [
            (("gather_rows",), (2, 3), 3 * most, 3 * most, "since", "forward"),
            (("scatter_rows",), (2, 3), 3 * most, 0.0, BACK, "backward"),
        ]  # fmt: skip
    for _, _, records in ran(lambda s, x: exchange(s).gather(wanted, x, x.detach())[0], 2, 3):
        assert told(records)[0] == (("gather_rows",), (2, 6), 6 * most, 3 * most, "since", "forward")


# -- arguments that are written to -----------------------------------------------------------------------


@torch.library.custom_op("mwsending::fill", mutates_args=("x", "z"))
def fill(x: Tensor, y: Tensor, z: Tensor) -> None:
    """Writes to two of three."""
    x.copy_(y)
    z.copy_(y)


def test_which_arguments_are_written() -> None:
    x, y, z = torch.zeros(2), torch.ones(2), torch.zeros(2)
    for func in (fill, torch.ops.mwsending.fill, torch.ops.mwsending.fill.default):
        assert [(n, v is w) for (n, v), w in zip(written(func, (x, y, z), {}), (x, z), strict=True)] == [
            ("x", True), ("z", True),
        ]  # fmt: skip
        assert [(n, v is w) for (n, v), w in zip(written(func, (x,), {"y": y, "z": z}), (x, z), strict=True)] == [
            ("x", True), ("z", True),
        ]  # fmt: skip
        ((_, a), (_, b)) = written(func, (), {"x": x, "y": y})
        assert a is x
        assert b is None
    assert list(written(torch.add, (x, y), {})) == []
    assert list(written(torch.ops.aten.add.Tensor, (x, y), {})) == []


def test_out() -> None:
    x, out = torch.arange(3.0), torch.zeros(3, dtype=F64)
    assert into(torch.neg, x, out=out) is out
    assert out.tolist() == [0.0, -1.0, -2.0]
    empty = torch.empty(0)
    assert into(torch.add, x, 1, out=empty).tolist() == [1.0, 2.0, 3.0]
    values, indices = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    into(torch.max, x, 0, out=(values, indices))
    assert (values.item(), indices.item()) == (2.0, 2)
    with pytest.raises(DispatchError, match=r"^neg: out= has shape \(2,\), the result \(3,\)"):
        into(torch.neg, x, out=torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"^neg: result type torch.float32 can't be cast to .* torch.int64"):
        into(torch.neg, x, out=torch.zeros(3, dtype=torch.int64))
    leaf = x.clone().requires_grad_()
    for args, kwargs, target in (
        ((leaf,), {}, out),
        ((), {"input": leaf}, out),
        ((x,), {}, out.clone().requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match=r"^neg\(\): functions with out=... arguments don't support"):
            into(torch.neg, *args, out=target, **kwargs)
        with torch.no_grad():
            into(torch.neg, *args, out=target, **kwargs)
