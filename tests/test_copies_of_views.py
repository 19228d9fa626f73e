"""``view_copy`` and its kind: as the view, without sharing its memory, and without gathering anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw

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
