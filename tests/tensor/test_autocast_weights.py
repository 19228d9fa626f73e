"""Under autocast weights are cast as often as on one device: once in a region, by PyTorch's own cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import meshwright as mw

Tensor = torch.Tensor
BF16 = torch.bfloat16
DATA = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))  # a row for each rank
DP, TP = mw.Mesh({"dp": 2}), mw.Mesh({"tp": 2})
ROWS = {"dp": mw.Shard(0)}
EQUAL, NEAR = {"rtol": 0.0, "atol": 0.0}, {"rtol": 0.05, "atol": 0.2}
MEGATRON = {
    "*.up.weight": {"tp": mw.Shard(0)},
    "*.up.bias": {"tp": mw.Shard(0)},
    "*.down.weight": {"tp": mw.Shard(1)},
}


class Casts(TorchDispatchMode):
    """Counts the casts of weights, down and of their gradients back: activations have three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self.back = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].ndim in (1, 2):
            self.down += kwargs["dtype"] is BF16
            self.back += kwargs["dtype"] is torch.float32
        return func(*args, **(kwargs or {}))


def region(**options: Any) -> Any:
    return torch.autocast("cpu", BF16, **options)


class Block(nn.Module):
    """Uses each of its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.relu(self.up(x)))
        return x


def net(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


Ran = tuple[int, int, Tensor, list[Tensor]]


def ran(model: nn.Module, x: Tensor) -> Ran:
    """Casts of the forward down and of the backward back, the output and gradients."""
    with Casts() as forward, region():
        y = model(x)
    with Casts() as backward:
        y.float().square().sum().backward()
    grads = [mw.unshard(p.grad) for p in model.parameters() if p.grad is not None]
    return forward.down, backward.back, mw.unshard(y.detach()), grads


def on(mesh: mw.Mesh, batch: Any, step: Callable[[nn.Module, Tensor], Any] = ran, **how: Any) -> Any:
    """What a step gives on rank 0."""

    def run() -> Any:
        made = mw.shard_module(net(), mesh, **how)
        return step(made, mw.shard_tensor(DATA, mesh, batch))

    return mw.simulate(run, mesh)[0]


HOW: dict[str, tuple[mw.Mesh, Any, dict[str, Any]]] = {
    "replicated": (DP, {}, {}),
    "dp": (DP, ROWS, {}),
    "zero-3": (DP, {}, {"fsdp": "dp"}),
    "zero-3, dp": (DP, ROWS, {"fsdp": "dp"}),
    "zero-3, kept": (DP, ROWS, {"fsdp": "dp", "reshard_after_forward": False}),
    "tp": (TP, {}, {"placements": MEGATRON}),
}


@pytest.mark.parametrize("name", HOW)
def test_as_often_as_on_one_device(name: str) -> None:
    """Bit for bit where no sum is split, else to what bfloat16 rounds."""
    mesh, batch, how = HOW[name]
    down, back, y, grads = on(mesh, batch, **how)
    want_down, want_back, want_y, want_grads = ran(net(), DATA)
    assert (want_down, want_back) == (8, 8)
    assert down == 8
    assert back == 8
    exact = batch == {} and mesh is DP
    torch.testing.assert_close(y, want_y, **(EQUAL if mesh is DP else NEAR))
    for g, w in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(g, w, **(EQUAL if exact else NEAR))


@pytest.mark.thin(2)
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("name", [n for n in HOW if n != "zero-3, kept"])
def test_captured(name: str, inner: bool) -> None:
    mesh, batch, how = HOW[name]

    layouts = how.get("placements")
    stored = how.get("fsdp")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with region(enabled=inner or torch.is_autocast_enabled("cpu")):
            return model(x).float().square().sum()

    def run() -> Any:
        model = net()
        with region(enabled=not inner):
            step = mw.compile_step(model, loss, None, DATA, mesh=mesh, batch=batch, layouts=layouts, fsdp=stored)
            with Casts() as casts:
                step(DATA)
        return casts.down, casts.back, [mw.unshard(p.grad) for p in model.parameters()]

    down, back, grads = mw.simulate(run, mesh)[0]
    assert (down, back) == (8, 8)
    for g, w in zip(grads, ran(net(), DATA)[3], strict=True):
        torch.testing.assert_close(g, w, **(EQUAL if batch == {} and mesh is DP else NEAR))


# ---------------------------------------------------------------------------------------------- the life of a cast


def _several(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        return [mul(weight), mul(weight), mul(weight)]


def _two_regions(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        first = mul(weight)
    with region():
        return [first, mul(weight)]


def _nested(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        first = mul(weight)
        with region():
            second = mul(weight)
        return [first, second, mul(weight)]


def _disabled_within(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        first = mul(weight)
        with region(enabled=False):
            second = mul(weight)
        return [first, second, mul(weight)]


def _no_cache(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region(cache_enabled=False):
        return [mul(weight), mul(weight)]


def _cleared(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        first = mul(weight)
        torch.clear_autocast_cache()
        return [first, mul(weight)]


def _written_between(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    """The stale cast is what is read, until the cache is cleared."""
    with region():
        first = mul(weight)
        with torch.no_grad():
            weight.mul_(2)
        second = mul(weight)
        torch.clear_autocast_cache()
        return [first, second, mul(weight)]


def _without_gradients_first(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    with region():
        with torch.no_grad():
            first = mul(weight)
        second = mul(weight)
        with torch.no_grad():
            third = mul(weight)
        return [first, second, third, mul(weight)]


def _frozen(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    weight.requires_grad_(False)
    try:
        with region():
            return [mul(weight), mul(weight)]
    finally:
        weight.requires_grad_()


def _raised(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    try:
        with region():
            first = mul(weight)
            raise KeyError
    except KeyError:
        with torch.no_grad():
            weight.mul_(2)
    with region():
        return [first.detach(), mul(weight)]


def _other_half_within(mul: Callable[[Tensor], Tensor], weight: Tensor) -> list[Any]:
    """The cast that is kept is in the other dtype: an error on one device too."""
    with region():
        first = mul(weight)
        with torch.autocast("cpu", torch.float16), pytest.raises(RuntimeError, match="dtype"):
            mul(weight)
        return [first, mul(weight)]


LIVES = [_several, _two_regions, _nested, _disabled_within, _no_cache, _cleared, _written_between,
         _without_gradients_first, _frozen, _raised, _other_half_within]  # fmt: skip


class Lives(nn.Module):
    """A forward that is one of these; its weight is stored, split or plain."""

    def __init__(self, life: Callable[..., list[Any]]) -> None:
        super().__init__()
        self.life = life
        self.weight = nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> list[Any]:
        x = x * 1  # a leaf would be kept too
        return self.life(lambda w: F.linear(x, w), self.weight)


def lived(model: Lives, x: Tensor) -> Any:
    """Casts of the forward, what it gave, and the gradient."""
    with Casts() as casts:
        made = model(x)
    down = casts.down
    wrt = [t.float().square().sum() for t in made if t.requires_grad]
    if wrt:
        torch.stack(wrt).sum().backward()
    grad = model.weight.grad
    return down, [mw.unshard(t.detach()) for t in made], None if grad is None else mw.unshard(grad)


WRITTEN = r"modified by an inplace operation: weight is at version"


@pytest.mark.thin(3)
@pytest.mark.parametrize("life", LIVES, ids=[life.__name__[1:] for life in LIVES])
@pytest.mark.parametrize("how", ["native", "columns", "zero-3"])
def test_a_cast_lives_as_on_one_device(life: Callable[..., list[Any]], how: str) -> None:
    want = lived(Lives(life), DATA.clone().requires_grad_())
    again = int(how == "zero-3" and life is _without_gradients_first)  # what gathers keep begins with gradients

    def run() -> Any:
        placements = {"weight": {"dp": mw.Shard(0)}} if how == "columns" else {}
        model = mw.shard_module(Lives(life), DP, placements, fsdp="dp" if how == "zero-3" else None)
        return lived(model, mw.shard_tensor(DATA, DP, {}).requires_grad_())

    if how == "zero-3" and life is _written_between:  # the backward gathers again, and casts what it gathers
        with pytest.raises(RuntimeError, match=WRITTEN):
            mw.simulate(run, DP)
        return
    for down, made, grad in mw.simulate(run, DP):
        assert down == want[0] + again
        for got, expected in zip(made, want[1], strict=True):
            torch.testing.assert_close(got, expected, **EQUAL)
        if grad is not None:
            torch.testing.assert_close(grad, want[2], **(EQUAL if how != "columns" else NEAR))


# ---------------------------------------------------------------------------------------------- models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class UnshardedParam(nn.Module):
    """One unit around a model."""

    def __init__(self, made: Callable[[], nn.Module], again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.again = nn.ModuleList([nn.Sequential(made())]), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return checkpoint(self.inner[0], x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.inner[0](x)  # type: ignore[no-any-return]


def attention() -> nn.Module:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.heads(x, x, x, need_weights=False)[0]
            return x

    return Attention()


MODELS = {
    "tied": lambda: UnshardedParam(Tied),
    "checkpoint": lambda: UnshardedParam(Block, again=True),
    "attention": lambda: UnshardedParam(attention),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("stored", [None, "dp"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, stored: str | None) -> None:
    down, back, y, grads = ran(MODELS[name](), DATA)

    def run() -> Any:
        return ran(mw.shard_module(MODELS[name](), DP, fsdp=stored), mw.shard_tensor(DATA, DP, {}))

    got = mw.simulate(run, DP)[0]
    assert got[:2] == (down, back)
    torch.testing.assert_close(got[2], y, **EQUAL)
    for g, w in zip(got[3], grads, strict=True):
        torch.testing.assert_close(g, w, **EQUAL)


def test_two_models_in_one_region() -> None:
    def both(a: nn.Module, b: nn.Module, x: Tensor) -> Any:
        with Casts() as casts:
            with region():
                y = a(b(a(x)))
            y.float().square().sum().backward()
        return casts.down, casts.back, [mw.unshard(p.grad) for m in (a, b) for p in m.parameters()]

    def run() -> Any:
        a, b = mw.shard_module(net(1), TP, MEGATRON), mw.shard_module(net(1), TP)
        return both(a, b, mw.shard_tensor(DATA, TP, {}))

    down, back, grads = mw.simulate(run, TP)[0]
    want = both(net(1), net(1), DATA)
    assert (down, back) == want[:2] == (8, 8)
    for g, w in zip(grads, want[2], strict=True):
        torch.testing.assert_close(g, w, **NEAR)


# ---------------------------------------------------------------------------------------------- memory, other threads


class Halves(TorchDispatchMode):
    """The memory of what weights are cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.ndim == 2:
            self.made.append(StorageWeakRef(made.untyped_storage()))
        return made


def test_what_is_gathered_is_not_kept_by_its_casts() -> None:
    """Neither PyTorch's cache, which lasts to the end of the region, nor autograd has a cast when its unit is left."""

    def run() -> Any:
        model = mw.shard_module(net(), DP, fsdp="dp")
        x = mw.shard_tensor(DATA, DP, {})
        with region(), Halves() as halves:
            y = model(x)
            kept = [not h.expired() for h in halves.made]
        y.float().sum().backward()
        return kept

    assert mw.simulate(run, DP)[0] == [False] * 4


def test_a_cache_that_other_threads_clear_changes_no_communication() -> None:
    """Of a weight that is gathered for each use: one rank casts it again, and sends what the others send."""
    tall = mw.Mesh({"tp": 2})

    def run() -> Any:
        w = mw.shard_tensor(torch.ones(6, 8), tall, [mw.Shard(0)]).requires_grad_()
        x = mw.shard_tensor(DATA, tall, [mw.Replicate()])
        with region(), mw.explain() as why:
            for _ in range(3):
                y = F.layer_norm(F.linear(x, mw.constrain(w, [mw.Replicate()])), (6,))
                if mw.ranks.runtime.RT.rank == 1:
                    other = threading.Thread(target=torch.clear_autocast_cache)
                    other.start()
                    other.join()
        y.float().sum().backward()
        return dict(why.counts.kinds)

    first, second = mw.simulate(run, tall)
    assert first == second


@pytest.mark.parametrize("alias", ["before", "between", "none"])
def test_data_written_between_forward_and_backward(alias: str) -> None:
    """One device keeps the cast of before.  So does ZeRO-3 where it knows of the alias; else it is an error."""

    def grad(model: Any, x: Tensor) -> Any:
        held = model[1].weight.data if alias == "before" else None
        with region():
            made = model(x)
        if alias != "none":
            (model[1].weight.data if held is None else held).mul_(3)
        made.float().sum().backward()
        return model[0].weight.grad

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))

    def run() -> Any:
        return mw.unshard(grad(mw.shard_module(net(), DP, fsdp="dp"), mw.shard_tensor(DATA, DP, ROWS)))

    if alias == "between":
        with pytest.raises(RuntimeError, match=r"1\.weight was given to \.data"):
            mw.simulate(run, DP)
        return
    for made in mw.simulate(run, DP):
        torch.testing.assert_close(made, grad(net(), DATA), **NEAR)
