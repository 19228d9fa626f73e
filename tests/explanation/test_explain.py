"""mw.explain says what moved, where and why; mw.explicit refuses what was not asked for, before anything is sent."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright import collective
from meshwright.errors import ExplicitError
from meshwright.ranks import runtime
from tests.support.compare import FOUR, GRID, S0, S1, P, R, on_ranks, ramp
from tests.support.processes import run_processes


def dist(t, *p, mesh=FOUR):
    return mw.shard_tensor(t, mesh, p, check=False)


def line() -> int:
    return inspect.currentframe().f_back.f_lineno


# ------------------------------------------------------------------------------------------ explain


def test_a_record_has_op_line_bytes_and_reason():
    def run():
        x, w = dist(ramp(8, 4), S1), dist(ramp(6, 4), S1)
        with mw.explain() as why:
            h = F.linear(x, w)
            at = line() + 1
            y = torch.relu(h)
        assert y.placements == (R,)
        (record,) = why.records
        assert record.op == "relu"
        assert record.argument == 0
        assert record.kinds == ("all_reduce",)
        assert record.axes == ("x",)
        assert record.shape == (8, 6)
        assert (repr(record.src), repr(record.dst)) == ("<x: Partial()>", "<x: Replicate()>")
        assert record.bytes == 2 * 3 / 4 * 8 * 6 * 8
        assert record.line == f"test_explain.py:{at}"
        assert "a Partial value is reduced before relu (" in record.reason
        assert why.bytes == record.bytes
        assert why.counts.kinds == {"all_reduce": 1}
        with mw.explain() as gathered:
            dist(ramp(8, 4), S0) @ dist(ramp(4, 4), S0).requires_grad_()
        (record,) = gathered.records
        assert (record.bytes, record.backward_bytes) == (3 / 4 * 16 * 8, 3 / 4 * 16 * 8)
        return str(why)

    for text in on_ranks(run):
        assert (
            "relu argument 0 [8, 6]: all_reduce over x, 576 bytes of float64 (<x: Partial()> -> <x: Replicate()>)"
            in text
        )
        assert "1 implied conversions; ran in all: 1 all_reduce (576 bytes)" in text


def test_of_a_function_with_its_result_and_the_backward():
    def run():
        x = dist(ramp(8, 4), S0).requires_grad_()
        w = dist(ramp(4, 4), S0).requires_grad_()

        def step(scale, *, shift):
            loss = ((x @ w).softmax(0) * scale + shift).sum()
            loss.backward()
            return loss.item()

        why = mw.explain(step, 2.0, shift=1.0)
        assert why.result == pytest.approx(2.0 * 4 + 32)
        assert why.counts.total > len(why.records)
        data = json.loads(why.to_json())
        assert data["collectives"] == why.counts.kinds
        assert [r["op"] for r in data["records"]] == [r.op for r in why.records]
        assert data["records"][0]["line"].startswith("test_explain.py:")

    on_ranks(run)


def test_nothing_moved():
    def run():
        x = dist(ramp(8, 4), S0)
        why = mw.explain(lambda: (x * 2 + 1).tanh().sum())
        assert why.records == []
        assert str(why) == repr(why) == "no communication"

    on_ranks(run)


def test_reshard_is_asked_for_not_implied():
    def run():
        x = dist(ramp(8, 4), S0)
        why = mw.explain(lambda: mw.reshard(x, [R]))
        assert [(r.asked, r.kinds) for r in why.records] == [(True, ("all_gather",))]
        assert why.counts.kinds == {"all_gather": 1}

    on_ranks(run)


def test_a_conversion_that_is_shared_is_recorded_once():
    def run():
        x = dist(ramp(8, 4), S1) @ dist(ramp(4, 4), S0)
        why = mw.explain(lambda: (x.exp(), x.tanh(), x.sigmoid()))
        assert [r.op for r in why.records] == ["exp"]
        assert why.counts.kinds == {"all_reduce": 1}

    on_ranks(run)


def test_nested_and_after_an_error():
    def run():
        x = dist(ramp(8, 4), P)
        with mw.explain() as outer:
            x.exp()
            with mw.explain() as inner:
                (dist(ramp(8, 4), P) * 2).exp()
            with pytest.raises(RuntimeError):
                x @ torch.zeros(7, 7, dtype=torch.float64)
        assert len(inner.records) == 1
        assert [r.op for r in outer.records] == ["exp"]
        assert runtime.RT.records is None or runtime.RT.records is not outer.records

    on_ranks(run)


def test_around_simulate():
    with mw.explain() as why:
        on_ranks(lambda: dist(ramp(8, 4), P).exp())
    assert [r.op for r in why.records] == ["exp"]


def test_several_axes_in_one_record():
    def run():
        with mw.explain() as why:
            dist(ramp(8, 4), P, P, mesh=GRID).exp()
        return why.records

    for records in on_ranks(run, GRID):
        assert [r.axes for r in records] == [("dp", "tp")]

    def reduced_and_gathered():
        with mw.explain() as why:
            dist(ramp(8, 4), P, S0, mesh=GRID).sort(0)
        return why.records

    for (record,) in on_ranks(reduced_and_gathered, GRID):
        assert "all_gather" in record.kinds
        assert record.reason.startswith("a Partial value is reduced before sort (")


# ------------------------------------------------------------------------------------------ explicit


def test_explicit_raises_before_anything_is_sent():
    def run():
        x, w = dist(ramp(8, 4), S1), dist(ramp(6, 4), S1)
        with collective.counting() as counts, mw.explicit():
            h = F.linear(x, w)
            with pytest.raises(ExplicitError, match="relu") as caught:
                torch.relu(h)
            with pytest.raises(ExplicitError):
                x.t() @ x
        assert counts.total == 0
        torch.relu(h)  # allowed again outside
        return str(caught.value)

    texts = on_ranks(run)
    assert len(set(texts)) == 1
    assert "mw.reshard(x, placements) before the call" in texts[0]
    assert "test_explain.py:" in texts[0]


def test_explicit_allows_what_is_asked_for():
    def run():
        x, w = dist(ramp(8, 4), S1), dist(ramp(6, 4), S1)
        with mw.explicit():
            h = mw.reshard(F.linear(x, w), [R])
            y = torch.relu(h)
            total = mw.unshard((mw.constrain(y, [S0]) * 2).sum())
            x.requires_grad_()
            F.linear(x, w).sum().backward()
        return total.item(), mw.unshard(x.grad)

    total = (F.linear(ramp(8, 4), ramp(6, 4)).relu() * 2).sum().item()
    for got, _ in on_ranks(run):
        assert got == pytest.approx(total)


def test_explicit_is_undone_after_an_error():
    def run():
        with pytest.raises(ZeroDivisionError), mw.explicit():
            _ = 1 / 0
        assert not runtime.RT.explicit
        dist(ramp(8, 4), P).exp()

    on_ranks(run)


def test_explicit_sees_conversions_that_were_made_before():
    """What was converted once is not sent again: nothing to ask for."""

    def run():
        x = dist(ramp(8, 4), P)
        x.exp()
        with mw.explicit(), collective.counting() as counts:
            x.tanh()
        assert counts.total == 0

    on_ranks(run)


def test_explicit_of_ops_without_a_rule():
    def run():
        x = dist(ramp(8, 4), S0)
        with mw.explicit(), pytest.raises(ExplicitError), collective.counting() as counts:
            torch.linalg.qr(x)
        assert counts.total == 0

    on_ranks(run)


def _explicit_on_processes() -> str:
    mesh = mw.init_mesh({"x": 2})
    x = mw.shard_tensor(ramp(8, 4), mesh, [P])
    with mw.explicit(), pytest.raises(ExplicitError) as caught:
        x.exp()
    assert torch.allclose(mw.unshard(x), ramp(8, 4))
    return str(caught.value)


@pytest.mark.processes
def test_explicit_on_real_processes():
    texts = run_processes(_explicit_on_processes, 2)
    assert texts[0] == texts[1]
