"""Runs of plans, by hand: what is said of conversions, aliases, writes in place, answers of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

import meshwright as mw
from meshwright.dispatch.execution import _aliases
from meshwright.dispatch.results import Result, _described, ask
from meshwright.layout import Layout, Spec

Tensor = torch.Tensor
MESH = mw.Mesh({"a": 2})
ROWS, COLUMNS = {"a": mw.Shard(0)}, {"a": mw.Shard(1)}
F64 = torch.float64


def given(*shape: int, at: Any, grad: bool = False) -> Tensor:
    return mw.shard_tensor(torch.ones(*shape, dtype=F64), MESH, at).requires_grad_(grad)


def test_a_reduction_says_who_made_the_parts() -> None:
    def run() -> None:
        x, w = given(4, 4, at=COLUMNS), given(4, 4, at=ROWS)
        with mw.explain() as why:
            made = x @ w
            made.relu()
            (x @ w + w.t() @ x.t()).relu()
        first, second = why.records
        assert "it is Partial since matmul at test_runs_by_hand.py:" in first.reason
        assert "where k of ... m k, ... k n -> m n is split" in first.reason
        assert "Partial since" in second.reason

    mw.simulate(run, MESH)


def test_aliases_are_of_distributed_tensors_alone() -> None:
    def run() -> None:
        x, plain = given(4, 4, at=ROWS), torch.zeros(2)
        with torch._C.DisableTorchFunctionSubclass():
            one, two = _aliases([x, plain])
            assert one is not x
            assert one.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (one.shape, one.stride(), "_spec" in one.__dict__) == (torch.Size((2, 4)), (4, 1), False)
        assert two is plain

    mw.simulate(run, MESH)


def test_a_write_whose_gradient_goes_back_to_another_layout() -> None:
    """A target without history, and a value with one, or the other way round; on one device too."""
    torch.manual_seed(0)
    t, v = torch.randn(4, 4, dtype=F64), torch.randn(4, 4, dtype=F64)

    def written(t: Any, v: Any, of: str) -> tuple[Any, Any]:
        t, v = t.requires_grad_("t" in of), v.requires_grad_("v" in of)
        made = t * 1.0
        made.mul_(v * 2.0)
        made.square().sum().backward()
        return t.grad, v.grad

    for of in ("t", "v", "tv"):
        want = written(t.clone(), v.clone(), of)

        def run(of: str = of, want: Any = want) -> None:
            for at, to in ((ROWS, COLUMNS), (COLUMNS, ROWS), ({}, ROWS), (ROWS, {})):
                made = written(mw.shard_tensor(t, MESH, at), mw.shard_tensor(v, MESH, to), of)
                for got, one in zip(made, want, strict=True):
                    assert (got is None) == (one is None)
                    if got is not None:
                        torch.testing.assert_close(mw.unshard(got), one, rtol=1e-12, atol=1e-12)

        mw.simulate(run, MESH)


def test_answers_of_pytorch() -> None:
    """Of tensors, of None (which is what a write to the first gives) and of what is no tensor."""
    spec = Spec((4, 3), F64, Layout(MESH))
    assert _described(None, [spec], []) == Result([(spec.shape, F64)])
    assert _described(3, [spec], []) == Result(None)
    x = torch.empty(4, 3)
    assert _described((x, x[:2]), [spec], [x]) == Result([(x.shape, x.dtype), (torch.Size((2, 3)), x.dtype)], True)
    assert _described([x.clone()], [spec], [x]) == Result([(x.shape, x.dtype)])
    t = torch.empty(4, 3, dtype=F64)
    assert ask(torch.sum, [spec], (t,), {"dim": 0}) == Result([(torch.Size((3,)), F64)])
    assert ask(torch.nonzero, [spec], (t,), {}) == Result(None)
    assert ask(torch.sum, [spec], (t, 5), {}) == Result(None, refused=True)
