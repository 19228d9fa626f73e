"""Views that are copies, by hand: the index that a view is, writes that are counted or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.dispatch.views import View, _slices, count_write, view_of, with_base
from meshwright.ranks import runtime

Tensor = torch.Tensor
MESH = mw.Mesh({"a": 2})
INDEXED: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda x: x[1], "of the last": lambda x: x.select(-1, 2), "both": lambda x: x[2, :, 1],
    "one": lambda x: x[2, 1, 3], "narrow": lambda x: x.narrow(1, 1, 2), "steps": lambda x: x[::2, :, 1::2],
    "of one": lambda x: x[2:, 1:2], "more dims": lambda x: x[:, None, 1].unsqueeze(-1), "all": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(3, 1)[1], "squeezed": lambda x: x[1:2].squeeze(0), "steps of one": lambda x: x[1::3],
}  # fmt: skip
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 1), "flat": lambda x: x.view(-1), "flat rows": lambda x: x.flatten(0, 1),
    "expanded": lambda x: x[:1].expand(3, 3, 4), "diagonal": lambda x: x.diagonal(0, 1, 2), "empty": lambda x: x[:, :0],
    "every other": lambda x: x.view(-1)[::2], "every other of few": lambda x: x.view(-1)[:7:2],
    "windows": lambda x: x.unfold(1, 2, 1),
    "split": lambda x: x.view(3, 3, 2, 2),
    "across": lambda x: x.as_strided((3, 2), (12, 6)), "behind": lambda x: x.as_strided((2, 4), (4, 1), 8),
}  # fmt: skip


def index_of(func: Any, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
    """What is read off the strides of a view, and what it is a view of."""
    base = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    base.__dict__["_spec"] = SimpleNamespace(shape=shape, ndim=len(shape), mesh=SimpleNamespace(device="cpu"))
    return _slices(View(base, func, (base,), {}, 0, None, False, False), base), base


@pytest.mark.parametrize("name", INDEXED)
def test_views_that_an_index_gives(name: str) -> None:
    index, base = index_of(INDEXED[name], (3, 3, 4))
    want = INDEXED[name](base)
    assert index is not None
    got = base[index]
    assert torch.equal(got, want)
    assert [s for n, s in zip(got.shape, got.stride(), strict=True) if n > 1] == [
        s for n, s in zip(want.shape, want.stride(), strict=True) if n > 1
    ]
    assert got.storage_offset() == want.storage_offset()


@pytest.mark.parametrize("name", OTHER)
def test_views_that_no_index_gives(name: str) -> None:
    """It has its dims in another order, one of them twice, or runs from one row into the next."""
    index, _ = index_of(OTHER[name], (3, 3, 4))
    assert index is None


@pytest.mark.parametrize("shape", [(1, 4), (3, 1, 2), (2, 1), (1,), (5,)], ids=str)
def test_dims_of_one(shape: tuple[int, ...]) -> None:
    for func in (lambda x: x[-1:], lambda x: x[-1], lambda x: x[..., -1:], lambda x: x.unsqueeze(0)):
        index, base = index_of(func, shape)
        assert index is not None
        assert torch.equal(base[index], func(base))


def test_the_base_is_replaced_by_position_and_by_name() -> None:
    old, other, new = torch.zeros(1), torch.zeros(1), object()
    args, kwargs = with_base(old, new, (old, other, 1), {"x": old, "y": other, "z": 2})
    assert args == (new, other, 1)
    assert kwargs == {"x": new, "y": other, "z": 2}


def given(*, grad: bool = False) -> Any:
    x = mw.shard_tensor(torch.arange(8.0, dtype=torch.float64).reshape(2, 4), MESH, {"a": mw.Shard(1)})
    return x.requires_grad_(grad)


def test_writes_to_views_of_leaves_are_refused_before_they_are_made() -> None:
    """As one device refuses them: nothing was written; with no history both are written to."""

    def run() -> None:
        p = given(grad=True)
        view = p.view(-1)
        assert view_of(view) is not None
        for copy in (view, view[:3]):
            with pytest.raises(RuntimeError, match=r"^a view of a leaf Variable that requires grad is being used"):
                copy.mul_(2)
        assert mw.unshard(view).tolist() == list(range(8))
        view.detach().mul_(3)
        assert mw.unshard(p).flatten().tolist() == [3.0 * i for i in range(8)]
        with torch.no_grad():
            view.mul_(2)
        assert mw.unshard(p).flatten().tolist() == [6.0 * i for i in range(8)]

    mw.simulate(run, MESH)


def test_a_copy_without_history_is_brought_up_to_date_without() -> None:
    def run() -> None:
        x = given(grad=True) * 1.0
        with torch.no_grad():
            without = x.view(-1)
        within = x.view(-1)
        x.mul_(2)
        for copy, history in ((without, False), (within, True)):
            read = copy + 0.0
            assert (copy.requires_grad, read.requires_grad) == (history, history)
            assert mw.unshard(read.detach()).tolist() == [2.0 * i for i in range(8)]

    mw.simulate(run, MESH)


def test_writes_under_inference_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By address; of too many the counts go, which counts as a write to any memory."""
    writes: dict[Any, int] = {}
    monkeypatch.setattr(runtime.RT, "writes", writes)
    one, two = torch.zeros(2), torch.zeros(2)
    for t in (one, one[1:], two, None, None):
        count_write(t)
    at = one.untyped_storage()._cdata
    assert writes == {at: 2, two.untyped_storage()._cdata: 1, None: 2}
    writes |= {("other", i): 1 for i in range(4093)}
    count_write(one)
    assert (len(writes), writes[at]) == (4096, 3)
    writes["last"] = 1
    count_write(one)
    assert writes == {None: 3}
    writes.clear()
    writes |= dict.fromkeys(range(4097), 1)
    count_write(two)
    assert writes == {None: 1}
