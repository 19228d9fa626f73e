"""Parameters that one module reads and writes to before another uses them: all see what is stored, and store it.

Of each way in which ops see a parameter otherwise than it is stored, each way to write, and each moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from tests.support import sweep as sweeps

Tensor = torch.Tensor
DP, BOTH = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 2, "tp": 2})
WIDE, NARROW = mw.Precision(compute=torch.float64), mw.Precision(compute=torch.bfloat16)
X = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
TP = {"h.weight": {"tp": mw.Shard(0)}, "h.bias": {"tp": mw.Shard(0)}}


def looked(w: Tensor) -> Tensor:
    """A lookup that scales down the rows that it reads."""
    return F.embedding(torch.tensor([0, 2]), w, max_norm=0.3)


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "copy": lambda h: h.weight.copy_(F.normalize(h.weight, dim=1)),
    "scale": lambda h: h.weight.mul_(0.5),
    "operator": lambda h: h.weight.__imul__(0.5),
    "item": lambda h: h.weight.__setitem__(0, 0.5),
    "view": lambda h: h.weight.view(-1)[:9].zero_(),
    "rows": lambda h: h.weight[1:3].mul_(0.5),
    "transposed": lambda h: h.weight.t().clamp_(-0.1, 0.1),
    "chunk": lambda h: h.weight.chunk(2)[0].zero_(),
    "list": lambda h: torch._foreach_mul_([h.weight, h.bias], 0.5),
    "list of copies": lambda h: torch._foreach_copy_([h.weight], [h.weight * 0.5]),
    "init": lambda h: nn.init.constant_(h.weight, 0.5),
    "init by name": lambda h: nn.init.constant_(tensor=h.weight, val=0.5),
    "out": lambda h: torch.mul(h.weight, 0.5, out=h.weight),
    "renorm": lambda h: torch.embedding_renorm_(h.weight, torch.tensor([0, 2]), 0.3, 2.0),
    "lookup": lambda h: looked(h.weight),
    "index": lambda h: h.weight.index_fill_(0, torch.tensor([1]), 0.0),
    "relu": lambda h: F.relu(h.weight, inplace=True),
    "detached": lambda h: h.weight.detach().mul_(0.5),
    "data": lambda h: h.weight.data.mul_(0.5),
    "data of copies": lambda h: h.weight.data.copy_(F.normalize(h.weight.data, dim=1)),
    "both": lambda h: (h.weight.mul_(0.5), h.weight.detach().add_(0.1), h.weight.view(-1)[:3].zero_()),
}
KEPT: dict[str, tuple[mw.Mesh, dict[str, Any]]] = {
    "plain": (DP, {}),
    "split": (DP, {"fsdp": "dp"}),
    "kept": (DP, {"fsdp": "dp", "reshard_after_forward": False}),
    "wide": (DP, {"precision": WIDE}),
    "reduced": (DP, {"precision": mw.Precision(reduce=torch.float64)}),
    "partial": (DP, {"precision": mw.Precision(accumulate=torch.float64)}),
    "host": (DP, {"offload": "cpu"}),
    "host, wide": (DP, {"offload": "cpu", "precision": WIDE}),
    "split, wide": (DP, {"fsdp": "dp", "precision": WIDE}),
    "split, host": (DP, {"fsdp": "dp", "offload": "cpu"}),
    "all": (BOTH, {"fsdp": "dp", "offload": "cpu", "precision": WIDE}),
    "narrow": (BOTH, {"fsdp": "dp", "precision": NARROW}),
    "gather": (DP, {"fsdp": "dp", "precision": mw.Precision(gather=torch.float16)}),
    "wire": (DP, {"precision": mw.Precision(grad_comm=torch.bfloat16)}),
}


class Child(nn.Linear):
    """A layer that may write to itself, before or after it is used."""

    def __init__(self, trained: bool) -> None:
        super().__init__(7, 5)
        self.write: Callable[[nn.Linear], Any] | None = None
        self.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            with torch.no_grad():
                self.write(self)
        return super().forward(x)


class Parent(nn.Module):
    """A model that reads what its child has, writes to it at one moment, and calls the child.

    Args:
        tied: the parent has the child's weight as its own.
    """

    def __init__(self, when: str, write: Callable[[nn.Linear], Any], trained: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.h, self.scale, self.when, self.change = Child(trained), nn.Parameter(torch.ones(5)), when, write
        if tied:
            self.own = self.h.weight
        if when == "hook of the child":
            self.h.register_forward_pre_hook(lambda *_: self.write())
        if when == "hook behind the child":
            self.h.register_forward_hook(lambda *_: self.write())
        if when == "hook":
            self.register_forward_pre_hook(lambda *_: self.write())

    def write(self) -> None:
        with torch.no_grad():
            self.change(self.h)

    def forward(self, x: Tensor) -> Tensor:
        said = self.when.split(", ")
        if "before a read" in said:
            self.write()
        y = F.linear(x, self.h.weight).tanh().sum(1, keepdim=True) if "unread" not in said else x.sum(1, keepdim=True)
        if "detached" in said:
            y = y.detach()
        if "behind a read" in said:
            self.write()
        if "inside" in said:
            self.h.write = self.change
        z = self.h(x)
        self.h.write = None
        if "between calls" in said:
            z = z.detach()
            self.write()
            z = z + self.h(x)
        if "behind the child" in said:
            z = z.detach()
            self.write()
        return (z * self.scale + y).square().mean() + F.linear(x, self.h.weight).mean()


WHEN = (
    "before a read", "behind a read, detached", "between calls, detached", "inside, detached",
    "behind the child, detached", "behind a read, between calls, detached", "behind a read, inside, detached",
    "unread, inside", "hook", "hook of the child, detached",
    "hook of the child, unread", "hook behind the child, unread, detached",
)  # fmt: skip


def trained(make: Callable[[], nn.Module], shard: Callable[[nn.Module], Any], x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if shard is not one:
        mw.shard_optimizer(optimizer)
    losses = []
    for _ in range(2):
        losses.append(model(x))
        if losses[-1].requires_grad:
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [t.detach() for t in (*losses, *model.parameters())]


def one(model: nn.Module) -> None:
    """One device."""


def said(run: Callable[[], Any]) -> Any:
    """What came of it: an error is one."""
    try:
        return run()
    except RuntimeError as error:
        return str(error).split(":")[0][:60]


def compare(make: Callable[[], nn.Module], how: str) -> str:
    mesh, options = KEPT[how]
    layouts = TP if mesh is BOTH else {}
    want = said(lambda: trained(make, one, X))

    def run() -> Any:
        x = mw.shard_tensor(X, mesh, {"dp": mw.Shard(0)})
        return [mw.unshard(t) for t in trained(make, lambda m: mw.shard_module(m, mesh, layouts, **options), x)]

    try:
        ranks = mw.simulate(run, mesh)
    except Exception as error:
        return (
            ""
            if isinstance(want, str) and want[:30] in str(error)
            else f"raised {str(error)[:150]} (one device: {str(want)[:60]})"
        )
    if isinstance(want, str):
        return f"nothing raised, one device: {want}"
    tolerance = {"narrow": 0.02, "gather": 2e-3, "wire": 4e-3}.get(how, 1e-5)
    for have in ranks:
        for a, b in zip(have, want, strict=True):
            if not torch.allclose(a.double(), b.double(), atol=tolerance, rtol=tolerance):
                return f"WRONG by {(a.double() - b.double()).abs().max():.2g}"
    return ""


EVERY = [
    (when, name, *kind) for when in WHEN for name in WRITES for kind in ((True, False), (False, False), (True, True))
]


@pytest.mark.thin(2)
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.filterwarnings("ignore:.*has no rule for these arguments")
def test_what_is_written_between_modules_is_what_they_see(how: str) -> None:
    """As on one device, whether the child is trained, frozen, or its weight also the parent's own (tied)."""
    chosen = EVERY if sweeps.WHOLE else EVERY[list(KEPT).index(how) :: 73]
    found = {case[:2]: compare(lambda c=case: Parent(c[0], WRITES[c[1]], *c[2:]), how) for case in chosen}  # type: ignore[misc]
    assert not {case: words for case, words in found.items() if words}


class Views(nn.Module):
    """A model that holds on to a view of its child's weight while others write."""

    def __init__(self, act: Callable[[Child, Tensor], Any], tied: bool) -> None:
        super().__init__()
        self.h, self.g, self.act = Child(True), nn.Linear(5, 5), act
        if tied:
            self.own = self.h.weight

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            found = self.act(self.h, x)
        self.h.write = None
        return self.g(self.h(x)).square().mean() + found.sum() + self.h.weight.sum()  # type: ignore[no-any-return]


def written_by(h: Child, write: Callable[[nn.Linear], Any], x: Tensor) -> Tensor:
    h.write = write
    made: Tensor = h(x)
    return made


def read(h: Child, x: Tensor) -> Tensor:
    v = h.weight.view(-1)
    written_by(h, lambda m: m.weight.mul_(0.5), x)
    return v * 1


def written(h: Child, x: Tensor) -> Tensor:
    v = h.weight.view(-1)
    made = h(x)
    v.mul_(0.5)
    return made


def by_both(h: Child, x: Tensor) -> Tensor:
    v = h.weight.view(-1)
    made = written_by(h, lambda m: m.weight.mul_(0.5), x)
    v.add_(1.0)
    return made


def filled(h: Child, x: Tensor) -> Tensor:
    h.weight.mul_(0.5)
    return torch.mul(torch.ones(5, 7), 0.25, out=h.weight) * 1


def through(v: Tensor, h: nn.Linear) -> None:
    v.mul_(0.5)


ACTS: list[Callable[[Child, Tensor], Any]] = [
    read, written, by_both, filled,
    lambda h, x: written_by(h, partial(through, h.weight.view(-1)), x),
]  # fmt: skip


@pytest.mark.parametrize("how", ["split", "wide", "host", "all"])
def test_views_that_are_held_while_another_module_writes(how: str) -> None:
    for act in ACTS:
        for tied in (False, True):
            assert not compare(lambda a=act, t=tied: Views(a, t), how)  # type: ignore[misc]
