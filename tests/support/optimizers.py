"""Optimizers that take whole parameters, or the whole model, as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, self.state[p], group))
        return loss

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lamb(_Own):
    """Adam's step, scaled by norms of the whole parameter; its count is a number."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        m = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(g, 0.1)
        v = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(g * g, 0.01)
        found = (m / (1 - 0.9 ** state["step"])) / ((v / (1 - 0.99 ** state["step"])).sqrt() + 1e-6) + 0.01 * p
        scale = (p.norm() / found.norm().clamp_min(1e-9)).item() if p.norm() > 0 else 1.0  # a value that is read
        return found * scale


class Shampoo(_Own):
    """A list of statistics of other shapes than the parameter's, and their roots now and then."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["statistics"] = [0.1 * torch.eye(n, dtype=p.dtype) for n in p.shape]
            state["roots"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
        state["step"] += 1
        for i, (s, n) in enumerate(zip(state["statistics"], p.shape, strict=True)):
            flat = g.movedim(i, 0).reshape(n, -1)
            s.add_(flat @ flat.T)
            if int(state["step"]) % 2 == 1:
                values, vectors = torch.linalg.eigh(s)
                state["roots"][i] = vectors @ torch.diag(values.clamp_min(1e-6) ** (-0.5 / p.ndim)) @ vectors.T
            g = (state["roots"][i] @ g.movedim(i, 0).reshape(n, -1)).view(g.movedim(i, 0).shape).movedim(0, i)
        return g


class SOAP(_Own):
    """Adam in the eigenbasis of Shampoo: lists with holes, and a count in its groups."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["GG"] = [torch.zeros(n, n, dtype=p.dtype) if p.ndim == 2 else [] for n in p.shape]
            state["Q"] = None
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(g), torch.zeros_like(g)
        if p.ndim == 2:
            state["GG"][0].lerp_(g @ g.T, 0.1)
            state["GG"][1].lerp_(g.T @ g, 0.1)
            if group["count"] % 3 == 1 or state["Q"] is None:
                state["Q"] = [torch.linalg.eigh(s)[1] for s in state["GG"]]
        m, q = state["exp_avg"].lerp_(g, 0.1), state["Q"]
        turned, mean = (g, m) if q is None else (q[0].T @ g @ q[1], q[0].T @ m @ q[1])
        v = state["exp_avg_sq"].lerp_(turned * turned, 0.05)
        found = mean / (v.sqrt() + 1e-8)
        return found if q is None else q[0] @ found @ q[1].T


class Prodigy(torch.optim.Optimizer):
    """A step size of the whole model, estimated from all gradients together, which its groups keep."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        top, bottom = 0.0, 0.0
        for p, group in self._each():
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.clone(), torch.zeros_like(p)
            state["s"].add_(p.grad, alpha=group["d"])  # type: ignore[arg-type]
            top += group["d"] * torch.dot(p.grad.flatten(), (state["p0"] - p).flatten()).item()  # type: ignore[union-attr]
            bottom += state["s"].abs().sum().item()
        d = max(self.param_groups[0]["d"], top / bottom if bottom else 0.0)
        for p, group in self._each():
            p.sub_(p.grad, alpha=d * group["lr"])  # type: ignore[arg-type]
        for group in self.param_groups:
            group["d"], group["k"] = d, group["k"] + 1

    def _each(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        return ((p, g) for g in self.param_groups for p in g["params"] if p.grad is not None)


class Mixer(_Own):
    """A class that nobody knows: the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        squares = [p.grad.square().sum() for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.norm = torch.stack([*squares, torch.tensor(1e-3)]).sum().sqrt()
        return super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return g / self.norm


class Signs(_Own):
    """A class that nobody knows: element by element."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return 0.01 * state.setdefault("mean", torch.zeros_like(p)).lerp_(g, 0.5).sign()
