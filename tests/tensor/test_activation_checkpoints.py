"""``torch.utils.checkpoint`` on distributed tensors: nested, under other hooks, selective, with empty shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshwright as mw

LAYOUTS = {"0.*": {"tp": mw.Shard(0)}, "1.weight": {"tp": mw.Shard(1)}}  # the second one's output is Partial


def again(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def saved_elsewhere(m: nn.Sequential, x: Any, pinned: bool = False) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        return m[3](again(m[2], m[1](m[0](x))))


def saved_and_kept(m: nn.Sequential, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return m[3](m[2](m[1](m[0](x))) * x.sum())


def packed(m: nn.Sequential, x: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return m[3](again(m[2], m[1](m[0](x))))


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op is torch.ops.aten.gelu.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(m: nn.Sequential, x: Any) -> Any:
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return m[3](again(m[2], m[1](m[0](x)), context_fn=contexts))


WAYS: dict[str, Callable[[nn.Sequential, Any], Any]] = {
    "one": lambda m, x: again(m, x),
    "nested": lambda m, x: again(lambda h: m[3](again(m[2], h)), m[1](m[0](x))),
    "nested, a mean": lambda m, x: again(lambda h: m[3](again(lambda t: t - t.mean(0), h)), m[1](m[0](x))),
    "three": lambda m, x: again(lambda h: again(lambda t: m[3](again(m[2], t)), h.sin()), m[1](m[0](x))),
    "a block": lambda m, x: again(lambda x: m[3](again(m[2], m[1](m[0](x)))), x),
    "save_on_cpu": saved_elsewhere,
    "save_on_cpu, copied": functools.partial(saved_elsewhere, pinned=True),
    "save_on_cpu, no checkpoint": saved_and_kept,
    "hooks": packed,
    "selective": selective,
}


def gradients(way: Callable[..., Any], mesh: mw.Mesh | None, rows: int) -> list[Any]:
    torch.manual_seed(0)
    m: Any = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)).double()
    x: Any = torch.randn(rows, 5, dtype=torch.float64)
    if mesh is not None:
        m = mw.shard_module(m, mesh, LAYOUTS if "tp" in mesh.axes else {})
        x = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)} if "dp" in mesh.axes else {})
    way(m, x).square().mean().backward()
    return [p.grad if mesh is None else mw.unshard(p.grad) for p in m.parameters()]


@pytest.mark.parametrize("rows", [6, 2, 1])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}], ids=str)
def test_gradients(mesh: dict[str, int], rows: int) -> None:
    for name, way in WAYS.items():
        on = mw.Mesh(mesh)
        want = gradients(way, None, rows)
        for got in mw.simulate(lambda: gradients(way, on, rows), on):  # noqa: B023
            torch.testing.assert_close(got, want, msg=lambda m: f"{name}: {m}")  # noqa: B023


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("back", [lambda y: y.backward(), lambda y: torch.autograd.backward([y])])
def test_reproducible_random_reaches_the_second_run(back: Callable[[Any], None], reentrant: bool, inside: bool) -> None:
    def gradient(kept: bool) -> torch.Tensor:
        torch.manual_seed(1)
        x = torch.ones(4, 5, requires_grad=True)
        m = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Tanh())
        with mw.reproducible_random():
            y = (m(x) if kept else checkpoint(m, x, use_reentrant=reentrant)).sum()
            if inside:
                back(y)
        if not inside:
            back(y)
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(False), gradient(True))


def test_the_second_run_chooses_as_the_first_though_leaves_were_decided_by_that() -> None:
    """Of whole weights each rank uses its own part, or all of them for its own rows."""
    mesh, sizes = mw.Mesh({"ep": 2}), ((8, 10, 16), (8, 16, 5))

    def gradient(split: bool) -> Any:
        torch.manual_seed(0)
        weights: Any = [nn.Parameter(torch.randn(*size)) for size in sizes]
        x, scores = torch.randn(36, 16), torch.rand(36, 1)
        ids = torch.randint(8, (36, 1))
        if split:
            x, ids, scores = (mw.shard_tensor(t, mesh, {"ep": mw.Shard(0)}) for t in (x, ids, scores))
            places = ({}, {"ep": mw.Shard(0)})
            weights = [mw.shard_tensor(w, mesh, p).requires_grad_() for w, p in zip(weights, places, strict=True)]
        again(mw.experts, x, ids, scores, *weights).square().mean().backward()
        return [mw.unshard(w.grad) if split else w.grad for w in weights]

    for got in mw.simulate(lambda: gradient(True), mesh):
        torch.testing.assert_close(got, gradient(False))


class Inside(nn.Module):
    """A unit whose own forward checkpoints parts of itself, as transformers' layers do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(5, 8), nn.Linear(8, 5), how
        self.norm = nn.LayerNorm(5) if how in ("whole", "a part", "nested") else nn.Identity()

    def inner(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))

    def forward(self, x: Any) -> Any:
        if self.how == "whole":
            return again(lambda x: x + self.inner(self.norm(x)), x)
        if self.how == "a part":
            return x + self.b(again(lambda x: torch.tanh(self.a(self.norm(x))), x))
        if self.how == "nested":
            return again(lambda x: x + again(self.inner, self.norm(x)), x)
        if self.how == "twice":
            return again(self.inner, again(self.inner, x)) + self.inner(x)
        if self.how == "a weight":
            return self.b(again(lambda x, w: torch.tanh(x @ w.T), x, self.a.weight))
        if self.how == "a view":
            return self.b(again(lambda x, w: torch.tanh(x @ w).repeat(1, 2), x, self.a.weight[2:6].t()))
        return self.b(again(nn.functional.linear, x, self.a.weight, self.a.bias).relu())


INSIDE = ["whole", "a part", "nested", "twice", "a weight", "a view", "a function"]


@pytest.mark.thin(4)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"frozen": True}, {"double": True}], ids=str)
@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"dp": 3}, {"dp": 2}], ids=str)
def test_inside_units_of_stored_parameters(mesh: dict[str, int], options: dict[str, bool]) -> None:
    def train(how: str, mesh: mw.Mesh | None) -> list[Any]:
        torch.manual_seed(0)
        m: Any = nn.Sequential(nn.Linear(5, 5), Inside(how), Inside(how), nn.Linear(5, 1)).double()
        if "frozen" in options:
            m[1].requires_grad_(False)
        x: Any = torch.randn(7, 5, dtype=torch.float64)
        if mesh is not None:
            plan = {"*.a.*": {"tp": mw.Shard(0)}, "*.b.weight": {"tp": mw.Shard(1)}} if "tp" in mesh.axes else {}
            m = mw.shard_module(
                m, mesh, plan, fsdp="dp", reshard_after_forward=options.get("reshard_after_forward", True)
            )
            x = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})
        opt = torch.optim.AdamW(m.parameters(), 0.05)
        for _ in range(3):
            for _ in range(2):
                loss = m(x).square().mean()
                if "double" in options and how in ("whole", "a part"):
                    grads = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
                    loss = loss + sum(g.square().sum() for g in grads)
                loss.backward()
            opt.step()
            opt.zero_grad()
        return [mw.unshard(p.detach()) if mesh is not None else p.detach() for p in m.parameters()]

    made = mw.Mesh(mesh)
    found = mw.simulate(lambda: [train(how, made) for how in INSIDE], made)
    for i, how in enumerate(INSIDE):
        for ranks in found:
            torch.testing.assert_close(ranks[i], train(how, None), rtol=1e-9, atol=1e-12, msg=how)


class Counted(torch.autograd.graph.saved_tensors_hooks):
    """``save_on_cpu(pin_memory=True)``, and what it was given: kind and shape."""

    def __init__(self) -> None:
        own, self.given = torch.autograd.graph.save_on_cpu(pin_memory=True), []

        def pack(t: torch.Tensor) -> Any:
            self.given.append((type(t), tuple(t.shape)))
            return own.pack_hook(t)

        super().__init__(pack, own.unpack_hook)


@pytest.mark.parametrize("stored", [None, "dp"])
def test_saved_inputs_of_blocks_lie_elsewhere(stored: str | None) -> None:
    """Of each checkpointed block one input is copied away, this rank's part; training is that of one device."""
    rows, on = 5, mw.Mesh({"dp": 2, "tp": 2})
    plan = {"*.a.*": {"tp": mw.Shard(0)}, "*.b.weight": {"tp": mw.Shard(1)}}

    def train(mesh: mw.Mesh | None) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        m: Any = nn.Sequential(*(Inside("whole") for _ in range(3))).double()
        for block in m:
            block.how = ""
            block.forward = lambda x, block=block: x + block.inner(block.norm(x))
        x: Any = torch.randn(rows, 5, dtype=torch.float64)
        if mesh is not None:
            m = mw.shard_module(m, mesh, plan, fsdp=stored)
            x = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)})
        opt, hooks = torch.optim.AdamW(m.parameters(), 0.05), Counted()
        for _ in range(3):
            h = x
            with hooks:
                for block in m:
                    h = again(block, h)
            h.square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        given = [g for g in hooks.given if g[1] != (0,)]  # PyTorch 2.10 and 2.11 keep a mark beside each input
        return [p.detach() if mesh is None else mw.unshard(p.detach()) for p in m.parameters()], given

    want, _ = train(None)
    for rank, (made, given) in enumerate(mw.simulate(lambda: train(on), on)):
        torch.testing.assert_close(made, want, rtol=1e-9, atol=1e-12)
        assert given == [(torch.Tensor, (3 - rank // 2, 5))] * 9


INDICES: dict[str, Callable[[Any], Any]] = {
    "topk": lambda x: torch.topk(x, 2, -1),
    "sort": lambda x: torch.sort(x, -1),
    "max": lambda x: torch.max(x, -1),
    "cummin": lambda x: torch.cummin(x, -1),
    "max_pool": lambda x: torch.nn.functional.max_pool1d(x.unsqueeze(1), 2, return_indices=True),
}


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_indices_that_a_block_chooses_by(name: str, kept: bool) -> None:
    """A router's: they are plain as autograd saves them, and distributed tensors afterwards."""
    full = torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradient(x: Any) -> Any:
        names: list[Any] = []

        def block(p: Any) -> Any:
            values, index = INDICES[name](p)
            if kept:
                names.append(index)
            return values.sin() * (index + 1)

        x.requires_grad_()
        for _ in range(2):  # a call that is known runs on another path
            again(block, x * 1).sum().backward()
        return x.grad

    want, mesh = gradient(full.clone()), mw.Mesh({"dp": 2})
    for got in mw.simulate(lambda: mw.unshard(gradient(mw.shard_tensor(full, mesh, {"dp": mw.Shard(0)}))), mesh):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("said", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
@pytest.mark.parametrize("stored", [None, "dp"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_policy_sees_ops_of_the_block_alone(ranks: int, stored: str | None, said: CheckpointPolicy) -> None:
    """And not those of gathers, that one run of a block starts early, or of what one simulated rank does for all."""
    mesh, x = mw.Mesh({"dp": ranks}), torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.add(op)
        return said if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def run(on: mw.Mesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(3))
        h = x
        if on is not None:
            mw.shard_module(blocks, on, fsdp=stored)
            h = mw.shard_tensor(x, on, {"dp": mw.Shard(0)})
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        for block in blocks:
            h = h + again(block, h, context_fn=contexts)
        h.square().mean().backward()
        return [p.grad if on is None else mw.unshard(p.grad) for p in blocks.parameters()]

    seen: set[Any] = set()
    want, own = run(None), set(seen)
    for found in mw.simulate(lambda: run(mesh), mesh):
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)
    assert {op.namespace for op in seen} == {"aten"}
    assert not {torch.ops.aten.cat.default, torch.ops.aten._foreach_copy_.default} & (seen - own)
