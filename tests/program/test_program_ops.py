"""Ops and families of ``nn.functional`` in captured steps: the same rules, by the names of the captured graph.

The cases are those of the eager tests; each runs in one layout, on simulated ranks, against one device.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright.errors import CaptureError, DispatchError
from tests.rules import test_rules_basic, test_rules_nn

CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    **{c.name: (c.fn, c.tensors) for c in test_rules_basic.CASES},
    **{name: (case[0], tuple(case[1:])) for name, case in test_rules_nn.CASES.items()},
}
del CASES["fractional_max_pool2d"]  # draws from a generator of its own while it runs
del CASES["vector_norm dtype"]  # in float32 inside: its gradient has an error of its own
# Refused with an error: masks that say how much is taken.
NOT_CAPTURED = 3  # in one part of the cases


class Model(nn.Module):
    """Floating-point tensors are parameters, the others are buffers."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        for i, t in enumerate(tensors):
            if t.is_floating_point() and not getattr(t, "fixed", False):
                self.register_parameter(f"t{i}", nn.Parameter(t.detach().clone()))
            else:
                self.register_buffer(f"t{i}", t.clone())


def weighed(made: Any) -> Tensor | None:
    """A number that all of the results that have a gradient go into."""
    total = None
    for i, y in enumerate(t for t in (made if isinstance(made, (tuple, list)) else [made]) if isinstance(t, Tensor)):
        if y.is_floating_point() and y.requires_grad:
            weight = torch.sin(torch.arange(y.numel(), dtype=y.dtype) + i + 1).view(y.shape)
            part = (y * weight).sum()
            total = part if total is None else total + part
    return total


def layouts_of(number: int, tensors: Any) -> dict[str, Any]:
    """Each tensor split along some dim, by the number of its case."""
    return {f"t{i}": {"x": mw.Shard((number + i) % t.ndim)} for i, t in enumerate(tensors) if t.ndim}


@pytest.mark.thin(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(16))
def test_equals_one_device(part: int) -> None:
    mesh, wrong, apart = mw.Mesh({"x": 2}), [], []
    for number, (name, (fn, tensors)) in enumerate(CASES.items()):
        if number % 16 == part:
            found = compare(mesh, fn, tensors, layouts_of(number // 8, tensors))
            if found is None:
                apart.append(name)
            elif found:
                wrong.append(f"{name}: {found}")
    assert not wrong, "\n".join(wrong)
    assert len(apart) <= NOT_CAPTURED, apart


def compare(mesh: mw.Mesh, fn: Any, tensors: Any, layouts: dict[str, Any]) -> str | None:
    """What differs from one device; None if nothing can be compared."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        made = weighed(
            fn(*(getattr(model, f"t{i}") * (1 if t.dtype != torch.bool else True) for i, t in enumerate(tensors)))
        )
        if made is None:
            raise NotImplementedError
        return made

    plain = Model(tensors)
    torch.manual_seed(0)
    try:
        want = loss_fn(plain, None)
    except NotImplementedError:
        return ""
    want.backward()
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    def run() -> Any:
        model = Model(tensors)
        torch.manual_seed(0)
        step = mw.compile_step(model, loss_fn, None, torch.ones(2), mesh=mesh, layouts=layouts, gradients=True)
        got = step(torch.ones(2))
        return got.item(), {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = mw.simulate(run, mesh)
    except (CaptureError, DispatchError):
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    close = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2}[want.dtype]
    for got, found in results:
        if abs(got - want.item()) > close * max(1.0, abs(want.item())):
            return f"loss {got} instead of {want.item()}"
        for n, g in grads.items():
            if n not in found or (found[n] - g).abs().max() > close * max(1.0, float(g.abs().max())):
                return f"gradient of {n}"
    return ""
