"""``view_copy`` and its kind: as the view, without sharing its memory, and without gathering anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import DispatchError

MESH = mw.Mesh({"x": 3})
CALLS: dict[str, Callable[[Any], Any]] = {
    "diagonal": torch.diagonal_copy,
    "expand": lambda x: torch.expand_copy(x[:, None], (-1, 2, 4)),
    "narrow": lambda x: torch.narrow_copy(x, 1, 1, 2),
    "permute": lambda x: torch.permute_copy(x, (1, 0)),
    "select": lambda x: torch.select_copy(x, 1, 1),
    "split": lambda x: torch.split_copy(x, 2, 1),
    "split_with_sizes": lambda x: torch.split_with_sizes_copy(x, [1, 3], 1),
    "squeeze": lambda x: torch.squeeze_copy(x[:, None]),
    "t": torch.t_copy,
    "transpose": lambda x: torch.transpose_copy(x, 0, 1),
    "unbind": lambda x: torch.unbind_copy(x, 1),
    "unfold": lambda x: torch.unfold_copy(x, 1, 2, 1),
    "unsqueeze": lambda x: torch.unsqueeze_copy(x, 0),
    "view": lambda x: torch.view_copy(x, (x.shape[0], 2, 2)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rows", [5, 0])
def test_a_copy_of_a_view(name: str, rows: int) -> None:
    full = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def parts(made: Any) -> list[Any]:
        return list(made) if isinstance(made, tuple | list) else [made]

    def run() -> None:
        plain = full.clone().requires_grad_()
        want = parts(CALLS[name](plain))
        x = mw.shard_tensor(full.clone(), MESH, [mw.Shard(0)]).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = parts(CALLS[name](x))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(mw.unshard(a).detach(), b.detach())
        sum((t * t).sum() for t in want).backward()  # type: ignore[union-attr]
        sum((t * t).sum() for t in got).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(mw.unshard(x.grad), plain.grad)
        with torch.no_grad():
            for a in got:
                a.zero_()
        torch.testing.assert_close(mw.unshard(x).detach(), full)

    mw.simulate(run, MESH)


SEEN: dict[str, Any] = {
    "reshape": lambda x: x.reshape(20, 1), "flatten": torch.flatten, "view": lambda x: x.view(10, 2),
    "slice": lambda x: x[1:4], "row": lambda x: x[3], "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[2],
}  # fmt: skip
WRITTEN: dict[str, Any] = {
    "nothing": lambda x: None, "mul_": lambda x: x.mul_(2), "index": lambda x: x.__setitem__(1, 7.0),
    "alias": lambda x: x.view_as(x).mul_(2), "alias, index": lambda x: x[:].__setitem__(2, 3.0),
    "row": lambda x: x[3].add_(1), "list": lambda x: torch._foreach_mul_([x], 2.0),
    "out": lambda x: torch.add(x, 1, out=x),
    "mask": lambda x: x.__setitem__(x > 3, 0.0), "transposed": lambda x: x.transpose(0, 1).mul_(3),
    "twice": lambda x: (x.mul_(2), x.mul_(2)),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITTEN)
@pytest.mark.parametrize("seen", SEEN)
def test_a_copy_under_inference_mode(seen: str, write: str) -> None:
    """Tensors count no writes there: what is read must be what no_grad reads, and refused where that is."""
    full = torch.arange(20.0).view(5, 2, 1, 2)

    def read(mode: Any, make: Any) -> Any:
        with mode():
            x = make(full.clone()) * 1
            made = SEEN[seen](x)
            WRITTEN[write](x)
            if isinstance(made, mw.DistTensor) and write != "nothing" and seen in ("reshape", "flatten"):
                with pytest.raises(DispatchError, match="was then written to, or its base was"):
                    made + 1
                return None
            return [mw.unshard(t) if isinstance(t, mw.DistTensor) else t for t in (made, x, made + 1)]

    def run() -> Any:
        return read(torch.inference_mode, lambda t: mw.shard_tensor(t, MESH, [mw.Shard(0)]))

    got, want = mw.simulate(run, MESH)[0], read(torch.no_grad, lambda t: t)
    for a, b in zip(got or want, want, strict=True):
        torch.testing.assert_close(a, b)
