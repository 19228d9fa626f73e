"""A captured step reduces a Partial value once for consumers that take linear images of it, where that sends less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.program.capture.early_sums import PartialValue, cheapest_sums
from tests.support.compare import GRID, S0, S1, P, ramp

PAIR, THREE = mw.Mesh({"x": 2}), mw.Mesh({"x": 3})
Images = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ROW = {"x": S0}, {"x": S1}  # of weights and of the batch: products are Partial


class Model(nn.Module):
    """``h`` is a product whose contracted dim is split, ``q`` another one, ``c`` a weight that is replicated."""

    def __init__(self, images: Images) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(ramp(5, 6).sin()), nn.Parameter(ramp(5, 6).cos())
        self.c, self.images = nn.Parameter(ramp(6) / 7), images

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, q = x @ self.w, x @ self.u
        return self.images(h, q, self.c)


def trained(
    images: Images, x: torch.Tensor, mesh: mw.Mesh | None = None, steps: int = 2, **options: Any
) -> tuple[Any, ...]:
    """Loss and weights after some steps on one device, or two captured ones and the collectives of these."""
    model = Model(images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if mesh is None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
        return loss.item(), *[p.detach().clone() for p in model.parameters()]
    step = mw.compile_step(model, lambda m, x: m(x), optimizer, x, mesh=mesh, **options)
    step(x)
    return step(x).item(), *[mw.unshard(p).detach() for p in model.parameters()], dict(step.program.kinds)


def check(images: Images, x: torch.Tensor, mesh: mw.Mesh, kinds: Mapping[str, int] | None, **options: Any) -> None:
    want = trained(images, x)
    for *got, sent in mw.simulate(lambda: trained(images, x, mesh, **options), mesh):
        torch.testing.assert_close(got, list(want), rtol=1e-9, atol=1e-9)
        assert kinds is None or sent == kinds


def over(weights: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"layouts": {n: dict(weights) for n in ("w", "u")}, "batch": dict(batch)}


# h is (4, 6).  Gradients of w and u are those of their own rows: nothing is sent for them.
CASES: dict[str, tuple[Images, int]] = {
    "three images": (lambda h, q, c: ((h * 2).relu() + h.t().contiguous().t().sin() + (h / 3).exp()).sum(), 1),
    "images of images": (lambda h, q, c: ((-(h * 2)).cos() + (h * 2).t().sin().t() + h.flip(0).exp()).sum(), 1),
    "the value itself last": (lambda h, q, c: ((h * 2).sin() + h.flip(1).cos() + h.relu()).sum(), 1),
    "two and two": (lambda h, q, c: ((h * 2).sin() + (h / 3).cos() + (q * 2).sin() + (q / 3).cos()).sum(), 2),
    # Three reductions of what is linear in both: each of the two is reduced.
    "three of two": (lambda h, q, c: ((h + q).sin() + (h - q).cos() + (h + 2 * q).exp()).sum(), 2),
    # Two of both: where they are needed.
    "two of two": (lambda h, q, c: ((h + q).sin() + (h - q).cos()).sum(), 2),
    "written between": (lambda h, q, c: ((h * 2).sin() + h.mul_(3).flip(0).cos() + (h / 3).exp()).sum(), 2),
    "views": (lambda h, q, c: (h.view(24).sin() + h.view(2, 12).cos().view(24) + h.t().reshape(24).exp()).sum(), 1),
    # Sums of dims are smaller: 6 + 4 + 1 numbers in place of 24.
    "smaller": (lambda h, q, c: h.sum(0).sin().sum() + h.sum(1).cos().sum() + h.sum().exp(), 3),
    # Rows of which three together are more than the value, two are not.
    "most of the rows": (lambda h, q, c: h[:3].sin().sum() + h[1:].cos().sum() + h[::2].exp().sum(), 1),
    "one image": (lambda h, q, c: (h * 2).sin().sum(), 1),
    "without a gradient": (lambda h, q, c: ((h * 2).detach().sin() * (h / 3).exp() + h.flip(0).relu()).sum(), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_reduced_once(name: str) -> None:
    images, reductions = CASES[name]
    check(images, ramp(4, 5).cos(), PAIR, {"all_reduce": reductions}, **over(*ROW))


def _used_by_parts(h: torch.Tensor, q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Each rank uses what it needs of ``h`` for its part of the rows of ``q``, so its gradient is Partial too."""
    m = h.mean(0)
    return ((m * 2 * q).sin() + (m.flip(0) * q).cos() + (m / 3 * q).exp()).sum()


@pytest.mark.parametrize("mesh", [PAIR, THREE], ids=repr)
def test_uneven_parts(mesh: mw.Mesh) -> None:
    images, _ = CASES["three images"]
    check(images, ramp(4, 5).cos(), mesh, {"all_reduce": 1}, **over(*ROW))
    check(images, ramp(1, 5).cos(), mesh, {"all_reduce": 1}, **over(*ROW))


def test_several_axes() -> None:
    images, _ = CASES["three images"]
    x = ramp(3, 5).cos()
    # Over tp a product is Partial, over dp rows are split, and gradients of both weights and the loss are summed.
    options = over({"tp": S0}, {"dp": S0, "tp": S1})
    want = trained(images, x)
    for *got, _ in mw.simulate(lambda: trained(images, x, GRID, **options), GRID):
        torch.testing.assert_close(got, list(want), rtol=1e-9, atol=1e-9)
    check(images, x, GRID, {"all_reduce": 1}, **over({"dp": S0, "tp": S0}, {"dp": S1, "tp": S1}))


def test_a_gradient_that_is_a_part_on_each_rank_is_reduced_once_too() -> None:
    """Rows of ``x`` are split, so ``h.mean(0)`` is Partial, and each rank uses images of it for its own rows."""
    x = ramp(4, 5).cos()
    seen = [kinds for *_, kinds in mw.simulate(lambda: trained(_used_by_parts, x, PAIR, batch={"x": S0}), PAIR)]
    # One of the value, one of its gradient, and those of the gradients of w and u.
    assert seen == [{"all_reduce": 4}] * 2
    check(_used_by_parts, x, PAIR, None, batch={"x": S0})


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin, torch.sum])
def test_other_reductions(reduce: Callable[..., torch.Tensor]) -> None:
    def images(h: torch.Tensor, q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        top = reduce(h, 0)
        return (top.flip(0).sin() + top.view(6, 1).cos().view(6) + top.view(2, 3).exp().view(6)).sum()

    # The value and the gradient of w.  A maximum along a split dim that needs a gradient is itself two before that: the
    # value and how often it occurs.
    sent = {"all_reduce": 2 if reduce is torch.sum else 4}
    check(images, ramp(4, 5).cos(), PAIR, sent, layouts={}, batch={"x": S0})


@pytest.mark.parametrize("passes", [["gradient-merge:k_steps=2"], ["data-parallel-optimization"]])
def test_with_passes(passes: Sequence[str]) -> None:
    images, _ = CASES["three images"]
    x = ramp(4, 5).cos()

    def mean(h: torch.Tensor, q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return images(h, q, c) / 24

    # Two merged steps on the same rows are one step.
    want = trained(mean, x, steps=1 if "merge" in passes[0] else 2)
    options = over({"tp": S0}, {"dp": S0, "tp": S1}) | {"passes": passes}
    for *got, _ in mw.simulate(lambda: trained(mean, x, GRID, **options), GRID):
        torch.testing.assert_close(got, list(want), rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------ the cheapest cut


def value(name: str, sources: Sequence[PartialValue] = (), size: int = 8, needed: bool = False) -> PartialValue:
    made = PartialValue((name, 0), mw.Spec((size,), torch.float32, mw.Layout(PAIR, [P])), list(sources))
    if needed:
        made.consumers.append("relu")
        made.bytes = made.price(0)
    return made


def test_the_cheapest_cut_is_the_latest_of_equals() -> None:
    a = value("a")
    b = value("b", [a])
    images = [value(f"image {i}", [b], needed=True) for i in range(3)]
    found = cheapest_sums([a, b, *images])
    assert [*found] == [("b", 0)]
    assert found["b", 0].instead == 3
    assert cheapest_sums([a, b, images[0]]) == {}


def test_a_wide_value_is_reduced_behind_it() -> None:
    wide = value("wide", size=80)
    narrow = value("narrow", [wide])
    images = [value(f"image {i}", [narrow], needed=True) for i in range(2)]
    other = value("other", [wide], size=4, needed=True)
    assert [*cheapest_sums([wide, narrow, *images, other])] == [("narrow", 0)]


def test_values_of_no_common_source_stay() -> None:
    assert cheapest_sums([value(f"{i}", needed=True) for i in range(4)]) == {}
