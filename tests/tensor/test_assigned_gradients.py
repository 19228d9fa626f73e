"""Gradients that are views of memory that the user has: of one flat buffer, of another gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from tests.support.shard_networks import OwnScale

Tensor = torch.Tensor
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "replicated": ({"dp": 2}, {}),
    "stored": ({"dp": 2}, {"fsdp": "dp"}),
    "split": ({"tp": 3}, {}),
    "split and stored": ({"dp": 2, "tp": 2}, {"fsdp": "dp"}),
    "not synchronised": ({"tp": 4}, {}),
}
SPLIT = {"layers.0.*": {"tp": mw.Shard(0)}, "layers.2.weight": {"tp": mw.Shard(1)}}


class Run:
    """A model on one device, or laid on a mesh, and what is done with its gradients."""

    def __init__(self, case: str | None) -> None:
        torch.manual_seed(0)
        self.model, data = OwnScale().double(), [torch.randn(7, 4, dtype=torch.float64) for _ in range(3)]
        self.on_mesh = case is not None
        if case is not None:
            axes, options = CASES[case]
            mesh = mw.Mesh(axes)
            if case == "not synchronised":
                for name, p in list(self.model.named_parameters()):
                    owner, _, own = name.rpartition(".")
                    cut = {"tp": mw.Shard(0)} if name != "scale" else {}
                    held = nn.Parameter(mw.shard_tensor(p.detach(), mesh, cut))
                    setattr(self.model.get_submodule(owner), own, held)
            else:
                self.model = mw.shard_module(self.model, mesh, SPLIT if "tp" in axes else {}, **options)
            data = [mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)} if "dp" in axes else {}) for x in data]
        self.data, self.params = data, list(self.model.parameters())

    def loss(self, i: int) -> Any:
        return self.model(self.data[i]).square().mean()

    def full(self, t: Any) -> Tensor:
        return (mw.unshard(t) if isinstance(t, mw.DistTensor) else t).detach().clone()

    def assign(self, flat: Any) -> None:
        at = 0
        for p in self.params:
            p.grad = flat[at : at + p.numel()].view(p.shape)
            at += p.numel()


def ones(run: Run) -> Any:
    return torch.ones(sum(p.numel() for p in run.params), dtype=torch.float64)


def vector(run: Run) -> Any:
    run.loss(0).backward()
    return nn.utils.parameters_to_vector([p.grad for p in run.params])  # type: ignore[misc]


def flattened(run: Run) -> Any:
    run.loss(0).backward()
    return torch._utils._flatten_dense_tensors([run.full(p.grad) for p in run.params])


FLAT: list[Callable[[Run], Any]] = [ones, vector, flattened]


def backward(run: Run, flat: Any) -> None:
    run.loss(1).backward()
    run.loss(2).backward()


def scaled(run: Run, flat: Any) -> None:
    for p in run.params:
        p.grad.mul_(2)  # type: ignore[union-attr]


def clipped(run: Run, flat: Any) -> None:
    nn.utils.clip_grad_norm_(run.params, 0.1)


def zeroed(run: Run, flat: Any) -> None:
    run.model.zero_grad(set_to_none=False)
    run.loss(1).backward()


def written(run: Run, flat: Any) -> None:
    flat.mul_(3)
    run.loss(1).backward()
    flat.mul_(2)


def normed(run: Run, flat: Any) -> None:
    flat.mul_(3)
    nn.utils.clip_grad_norm_(run.params, 0.1, norm_type=float("inf"))


def stepped(run: Run, flat: Any) -> None:
    flat.mul_(3)
    torch.optim.AdamW(run.params, 0.1).step()


def not_sent(run: Run, flat: Any) -> None:
    synced = run.on_mesh and any("_sync" in p.__dict__ for p in run.params)
    with mw.no_sync(run.model) if synced else contextlib.nullcontext():
        run.loss(1).backward()
    run.loss(2).backward()


def hooked(run: Run, flat: Any) -> None:
    seen: dict[int, Tensor] = {}
    for i, p in enumerate(run.params):
        p.register_post_accumulate_grad_hook(lambda p, i=i: seen.update({i: run.full(p.grad)}))  # type: ignore[misc]
    run.loss(1).backward()
    flat.add_(sum(s.sum() for s in seen.values()))


def cleared(run: Run, flat: Any) -> None:
    run.model.zero_grad()
    run.loss(1).backward()


def asked(run: Run, flat: Any) -> None:
    torch.autograd.grad(run.loss(1), run.params)


DONE: list[Callable[[Run, Any], None]] = [
    backward, scaled, clipped, zeroed, written, normed, stepped, not_sent, hooked, cleared, asked
]  # fmt: skip


def ways(case: str | None) -> list[list[Tensor]]:
    found = []
    for flat_of in FLAT:
        for done in DONE:
            if done is hooked and case == "not synchronised":  # hooks of its leaves come in the engine's order
                continue
            run = Run(case)
            flat = flat_of(run)
            run.assign(flat)
            done(run, flat)
            found.append([run.full(t) for t in (flat, *(p.grad for p in run.params), *run.params)])
    return found


@pytest.mark.parametrize("case", list(CASES))
def test_what_is_added_reaches_what_it_is_a_view_of(case: str) -> None:
    want = ways(None)
    if case == "not synchronised":
        names = [done for _ in FLAT for done in DONE]
        want = [w for w, done in zip(want, names, strict=True) if done is not hooked]
    for made in mw.simulate(lambda: ways(case), mw.Mesh(CASES[case][0])):
        torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)


def of_another(case: str | None, way: str) -> list[Tensor]:
    run = Run(case)
    run.loss(0).backward()
    first, other = run.model.layers[2].weight, nn.Parameter(torch.ones(6, 6, dtype=torch.float64))
    if run.on_mesh:
        other = nn.Parameter(mw.shard_tensor(other.detach(), first.mesh, {first.mesh.axes[-1]: mw.Shard(0)}))
    given = first.grad
    assert given is not None
    other.grad = {"itself": lambda: given, "turned": lambda: given.T, "a view": lambda: given.view(36).view(6, 6)}[
        way
    ]()
    (other * torch.arange(36.0, dtype=torch.float64).view(6, 6)).sum().backward()
    return [run.full(given), run.full(first.grad), run.full(other.grad)]


@pytest.mark.parametrize("way", ["itself", "turned", "a view"])
@pytest.mark.parametrize("case", list(CASES))
def test_the_gradient_of_another_parameter(case: str, way: str) -> None:
    want = of_another(None, way)
    for made in mw.simulate(lambda: of_another(case, way), mw.Mesh(CASES[case][0])):
        torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)


def unscaled(case: str | None) -> list[Tensor]:
    run = Run(case)
    flat = ones(run)
    run.assign(flat)
    scaler, opt = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(run.params, 0.1)
    scaler.scale(run.loss(0)).backward()
    scaler.unscale_(opt)
    return [run.full(t) for t in (flat, *(p.grad for p in run.params))]


@pytest.mark.parametrize("case", ["replicated", "split"])
def test_what_is_unscaled(case: str) -> None:
    want = unscaled(None)
    for made in mw.simulate(lambda: unscaled(case), mw.Mesh(CASES[case][0])):
        torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)


def test_after_a_backward_that_raised() -> None:
    def fn() -> list[Tensor]:
        run = Run("split")
        flat = ones(run)
        run.assign(flat)
        found = run.loss(0)
        handle = run.params[1].register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found.backward()
        handle.remove()
        run.model.zero_grad()
        run.assign(flat.fill_(1))
        run.loss(0).backward()
        return [run.full(t) for t in (flat, *(p.grad for p in run.params))]

    run = Run(None)
    flat = ones(run)
    run.assign(flat)
    run.loss(0).backward()
    want = [run.full(t) for t in (flat, *(p.grad for p in run.params))]
    for made in mw.simulate(fn, mw.Mesh({"tp": 3})):
        torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)
