"""Answers of ops on fakes during a capture: kept for equal calls, and the same as PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode

import meshwright as mw
from meshwright.program import Plan, build
from meshwright.program.capture import fake_answers, fakes
from meshwright.program.capture.fakes import writing_nothing

Tensor = torch.Tensor


def _blocks(n: int, block: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *[block() for _ in range(n)], nn.Linear(8, 3))


def _build(model: nn.Module, axes: dict[str, int], batch: Tensor, **options: Any) -> Any:
    mesh = mw.Mesh(axes)
    plan = Plan(options.pop("layouts", {}), batch={"dp": mw.Shard(0)}, **options)
    return build(model, lambda m, x: m(x).square().sum(), torch.optim.AdamW(model.parameters()), batch, mesh, plan)


def test_equal_blocks_ask_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    keep = fake_answers.FakeAnswers.keep

    def counted(self: Any, key: Any, *rest: Any) -> None:
        asked.append(key)
        keep(self, key, *rest)

    monkeypatch.setattr(fake_answers.FakeAnswers, "keep", counted)
    counts = []
    for n in (2, 2, 5):  # PyTorch asks itself more at first
        asked.clear()
        block = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
        _build(_blocks(n, block), {"dp": 2}, torch.randn(4, 3, 6))
        counts.append(len(asked))
    assert counts[1] == counts[2] > 20


def _shown(t: Any, args: list[Tensor]) -> Any:
    if not isinstance(t, Tensor):
        return t
    storage = t.untyped_storage()
    return (
        type(t), tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, storage.nbytes(),
        [a.untyped_storage()._cdata == storage._cdata for a in args], torch._C._dispatch_keys(t), t.__dict__,
        any(t is a for a in args), t.is_inference(),
    )  # fmt: skip


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Each answer is compared with PyTorch's; gives the ops."""
    ops: list[Any] = []
    answered = fakes.answered

    def checked(ask: Any, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = answered(ask, mode, func, types, args, kwargs)
        if fake_answers._is_function_of_metadata(func):
            ops.append(func)
            want = ask(mode, func, types, args, kwargs)
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            outs = [made, want] if isinstance(made, Tensor) else [*zip(made, want, strict=True)]
            pairs = [tuple(outs)] if isinstance(made, Tensor) else outs
            assert isinstance(made, Tensor) is isinstance(want, Tensor)  # PyTorch's tuple has names at first
            with torch._C._DisableTorchDispatch():
                for a, b in pairs:
                    assert _shown(a, tensors) == _shown(b, tensors), func
        return made

    monkeypatch.setattr(fakes, "answered", checked)
    return ops


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        a, b = y.transpose(1, 2).split([3, 5], 1)
        return torch.cat([b, a.expand_as(a)], 1).transpose(1, 2).cumsum(1) + torch.arange(8) * 0.5


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize("block", [lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), _Recurrent])
def test_answers_are_those_of_pytorch(block: Any, axes: dict[str, int], compared: list[Any]) -> None:
    layouts = {"*linear1.weight": {"tp": mw.Shard(0)}, "0.weight": {"tp": mw.Shard(0)}} if "tp" in axes else {}
    layouts = layouts if block is not _Recurrent else {}
    _build(_blocks(2, block), axes, torch.randn(3, 3, 6), layouts=layouts, fsdp="dp")
    assert len(compared) > 100
    assert torch.ops.meshwright.reduce_scatter.default in compared


def test_calls_that_differ_in_little(compared: list[Any]) -> None:
    with writing_nothing(), FakeTensorMode() as mode:
        x, ints = torch.empty(2, 3, 1), torch.empty(4, dtype=torch.int64)
        for _ in range(2):
            assert [(ints + s).dtype for s in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
            assert [torch.full((2,), 1.0).dtype, torch.arange(3).dtype] == [torch.float32, torch.int64]
            assert x.view(6).shape == (6,)
            assert x.view(3, 2).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x[:, 1:].storage_offset() == 1
            assert x[:, 1:].reshape(-1).shape == (4,)
            a, b = x.split([1, 2], 1)
            assert a.untyped_storage()._cdata == b.untyped_storage()._cdata
            assert torch.cat([a, b], 1).shape == (2, 3, 1)
            assert torch.cat([a, a], 1).shape == (2, 2, 1)
        y = x.clone()
        before = y.transpose(0, 1).shape
        y.squeeze_()
        assert (before, y.transpose(0, 1).shape) == ((3, 2, 1), (3, 2))
        torch.set_default_dtype(torch.float64)
        try:
            assert (ints + 1.0).dtype is torch.float64
            assert torch.full((2,), 1.0).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        z = torch.empty(2, dtype=torch.complex64)
        for t in (z, z.conj(), z, z.conj()):
            assert (t + 1).is_conj() is False
        with torch.inference_mode():
            assert torch.empty(2).is_inference()
            assert (x + 1).is_inference()
        assert not (x + 1).is_inference()
        assert all(t.fake_mode is mode for t in (a, b, x + 1))
