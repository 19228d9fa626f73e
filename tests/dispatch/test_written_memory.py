"""Types of memory with several names: views made before, during and after a write that brings a gradient into it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw

VIEWS: dict[str, Callable[[Any], Any]] = {
    "alias": lambda b: b.view_as(b), "flat": lambda b: b.view(-1), "transposed": lambda b: b.t(),
    "rows": lambda b: b[1:], "row": lambda b: b[2], "view of a view": lambda b: b.t()[:, 1:],
}  # fmt: skip
# Into the memory of a buffer, by its name or that of a view made before; ``t`` is of the shape of the buffer.
WRITES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "its name": lambda b, early, view, t: b.copy_(t),
    "its name, twice": lambda b, early, view, t: b.add_(t).mul_(t),
    "the view": lambda b, early, view, t: early.copy_(view(t)),
    "the view, added": lambda b, early, view, t: early.add_(view(t)).mul_(2),
    "another view": lambda b, early, view, t: b[:2].add_(t[:2]),
}
# What is done with the names, in this order.  "parts" is work on a rank's own rows: each has a part of the gradient.
USES = [
    (("early", "parts"),), (("early", "whole"),), (("base", "parts"),), (("early", "parts"), ("base", "whole")),
    (("base", "whole"), ("early", "parts")), (("late", "parts"), ("early", "whole")),
    (("source", "parts"), ("early", "whole")), (("early", "whole"), ("source", "parts"), ("late", "parts")),
]  # fmt: skip
BEFORE = ("", "parts", "whole")  # what is done with what is written, before


def used(t: Any, use: str, data: Any) -> Any:
    return (data[:, None] * t.flatten()[:3] if use == "parts" else t * t).sin().sum()


def gradients(mesh: mw.Mesh | None, view: Any, write: Any, uses: Any, before: str, requires: bool) -> list[Any]:
    def made(rows: int, seed: int, layout: Any) -> Any:
        t = torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return t if mesh is None else mw.shard_tensor(t, mesh, layout)

    w, data, buffer = made(4, 0, {}), made(7, 1, {"a": mw.Shard(0)}), made(4, 2, {})
    w.requires_grad_()
    leaf = buffer
    if requires:
        leaf.requires_grad_()
        buffer = leaf * 1
    source, early = w * 2, view(buffer)
    loss = used(source, before, data) if before else (w * 0).sum()
    write(buffer, early, view, source)
    names = {"early": early, "base": buffer, "late": view(buffer), "source": w}
    for name, use in uses:
        loss = loss + used(names[name], use, data)
    loss.backward()
    grads = [w.grad, leaf.grad] if requires else [w.grad]
    return [g if mesh is None else mw.unshard(g) for g in grads]


@pytest.mark.thin(3)
@pytest.mark.parametrize("sizes", [{"a": 2}, {"a": 3}], ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("write", WRITES)
def test_one_memory_has_one_type(write: str, view: str, sizes: dict[str, int]) -> None:
    mesh = mw.Mesh(sizes)
    for number, (uses, before) in enumerate(itertools.product(USES, BEFORE)):
        args = VIEWS[view], WRITES[write], uses, before, number % 2 == 0
        want = gradients(None, *args)
        got = mw.simulate(lambda: gradients(mesh, *args), mesh)[-1]  # noqa: B023
        torch.testing.assert_close(got, want, msg=lambda m: f"{uses}, {before}: {m}")  # noqa: B023
