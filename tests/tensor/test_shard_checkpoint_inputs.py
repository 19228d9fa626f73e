"""Inputs of checkpointed blocks that are kept split: the same gradients bit by bit, and what is held."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.utils.checkpoint
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import meshwright as mw
from meshwright.errors import LayoutError, MeshError, ShardError

TP, BOTH = mw.Mesh({"tp": 2}), mw.Mesh({"dp": 2, "tp": 2})
GELU = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])
again = functools.partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        made = x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x))))) * scale
        return mw.constrain(made, {"tp": mw.Replicate()})


def several(block: nn.Module, x: Any) -> Any:
    """Tensors in containers, one of integers, one that has fewer dims; others by keyword."""

    def run(given: dict[str, Any], pair: tuple[Any, Any], *, scale: Any) -> Any:
        kept = (pair[0] > 0).to(x.dtype).unsqueeze(-1)
        return block(given["x"], scale) * kept + pair[1]

    ids = (x.detach().sum(-1) > 0).to(torch.int64)
    return again(run, {"x": x}, (ids, x.mean()), scale=2.0)


def nested(block: nn.Module, x: Any) -> Any:
    return again(lambda h: again(block, h) + h.sin(), x)


WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "block": again,
    "nested": nested,
    "several": several,
    "selective": functools.partial(again, context_fn=GELU),
    "on the host": lambda block, x: _on_host(block, x),
}


def _on_host(block: nn.Module, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return again(block, x)


def network(mesh: mw.Mesh | None, blocks: int = 3, width: int = 8) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(Block(width) for _ in range(blocks)).double()
    rules = {"*.up.*": {"tp": mw.Shard(0)}, "*.down.weight": {"tp": mw.Shard(1)}}
    return model if mesh is None else mw.shard_module(model, mesh, rules)


def batch(mesh: mw.Mesh | None, length: int, width: int = 8) -> Any:
    x = torch.randn(4, length, width, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    return x if mesh is None else mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)} if "dp" in mesh.axes else {})


def gradients(way: Any, mesh: mw.Mesh | None, split: Any = None, length: int = 6) -> list[Any]:
    model, x = network(mesh), batch(mesh, length).requires_grad_()

    def forward() -> Any:
        h = x
        for block in model:
            h = way(block, h)
        return h.square().mean()

    torch.manual_seed(3)
    loss = mw.shard_checkpoint_inputs(split)(forward)() if split else forward()
    loss.backward()  # outside: what was kept is known
    return [
        g if mesh is None else mw.unshard(g) for g in (x.grad, *(p.grad for p in model.parameters())) if g is not None
    ]


@pytest.mark.thin(6)
@pytest.mark.parametrize("length", [6, 5, 1])
@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("mesh", [TP, BOTH], ids=repr)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_bit_by_bit(way: str, mesh: mw.Mesh, dim: int, length: int) -> None:
    def both() -> None:
        got = gradients(WAYS[way], mesh, {"tp": mw.Shard(dim)}, length)
        want = gradients(WAYS[way], mesh, None, length)
        assert len(got) == len(want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    mw.simulate(both, mesh)


def test_one_device() -> None:
    want = gradients(lambda block, x: block.eval()(x), None)
    for got in mw.simulate(lambda: gradients(lambda b, x: again(b.eval(), x), BOTH, {"tp": mw.Shard(1)}), BOTH):
        torch.testing.assert_close(got, want)


def held(mesh: mw.Mesh, split: Any, width: int = 64, blocks: int = 4) -> tuple[int, Any]:
    """Bytes that this rank keeps for the backward, of tensors that are no parameters; and what the backward sends."""
    model, x = network(mesh, blocks, width), batch(mesh, 32, width)
    storages: dict[int, int] = {}
    own = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: torch.Tensor) -> torch.Tensor:
        memory = t.untyped_storage()
        if memory.data_ptr() not in own:
            storages[memory.data_ptr()] = memory.nbytes()
        return t

    def forward() -> Any:
        h = x
        for block in model:
            h = again(block, h)
        return h

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = mw.shard_checkpoint_inputs(split)(forward)() if split else forward()
    found = sum(storages.values())
    with mw.explain() as why:
        y.sum().backward()
    return found, why


def test_what_is_held() -> None:
    """Four inputs of 2 x 32 x 64 doubles: a half of each, for an all-gather of each in the backward."""

    def run() -> None:
        (whole, before), (part, after) = held(BOTH, None), held(BOTH, {"tp": mw.Shard(1)})
        assert whole == 4 * 2 * 32 * 64 * 8
        assert part == whole // 2
        kinds = [w.counts.kinds.get("all_gather", 0) for w in (before, after)]
        assert kinds[1] - kinds[0] == 4
        assert "kept its input split (shard_checkpoint_inputs)" in str(after)

    mw.simulate(run, BOTH)


def test_the_whole_is_freed() -> None:
    """At once, on every rank, and not by the garbage collector."""

    def run() -> None:
        model, seen = network(TP), list[Any]()
        for block in model:
            block.register_forward_pre_hook(lambda m, args: seen.append(weakref.ref(args[0])))
        for _ in range(2):  # the first one finds the plans
            seen.clear()
            with mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}):
                h = batch(TP, 6)
                for block in model:
                    h = again(block, h)
        assert [one() is None for one in seen] == [True] * 3
        h.sum().backward()

    mw.simulate(run, TP)


def test_containers_of_other_classes_are_what_they_are() -> None:
    class Given(dict[str, Any]):
        pass

    def run() -> None:
        model, x, kinds = network(TP, 1), batch(TP, 6).requires_grad_(), list[Any]()

        def forward(given: Any, plain: Any) -> Any:
            kinds.append((type(given), type(plain)))
            return model[0](given["x"]) + plain[0]

        with mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}):
            again(forward, Given(x=x), [x]).sum().backward()
        assert kinds == [(Given, list)] * 2

    mw.simulate(run, TP)


def test_double_backward() -> None:
    def run(split: Any) -> Sequence[torch.Tensor]:
        model, x = network(TP, 1), batch(TP, 6).requires_grad_()
        forward = functools.partial(again, model[0].eval())
        y = mw.shard_checkpoint_inputs(split)(forward)(x) if split else forward(x)
        (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        g.square().sum().backward()
        return [mw.unshard(p.grad) for p in model.parameters() if p.grad is not None]

    def both() -> None:
        assert all(torch.equal(a, b) for a, b in zip(run({"tp": mw.Shard(1)}), run(None), strict=True))

    mw.simulate(both, TP)


def test_a_partial_input_is_kept_and_said() -> None:
    def run() -> None:
        model, x = network(TP, 1), batch(TP, 6).requires_grad_()
        with (
            mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}),
            pytest.warns(UserWarning, match="is Partial over tp.*mw.constrain"),
        ):
            y = again(model[0].norm, model[0].down(model[0].up(x)))
        y.sum().backward()
        got = mw.unshard(x.grad)
        x.grad = None
        model[0].norm(model[0].down(model[0].up(x))).sum().backward()
        assert torch.equal(got, mw.unshard(x.grad))

    mw.simulate(run, TP)


def test_without_gradients_nothing_is_kept() -> None:
    def run() -> None:
        model = network(TP, 1)
        with torch.no_grad(), mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}), mw.explain() as why:
            again(model[0], batch(TP, 6))
        assert "all_gather" not in why.counts.kinds

    mw.simulate(run, TP)


def test_what_is_refused() -> None:
    def run() -> None:
        model, x = network(TP, 1), batch(TP, 6).requires_grad_()
        for wrong, error in (([mw.Shard(1)], LayoutError), ({"tp": mw.Replicate()}, LayoutError)):
            with pytest.raises(error, match="shard_checkpoint_inputs"), mw.shard_checkpoint_inputs(wrong):  # type: ignore[arg-type]
                pass
        with mw.shard_checkpoint_inputs({"pp": mw.Shard(1)}), pytest.raises(MeshError, match="pp"):
            again(model[0], x)
        with (
            mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}),
            pytest.raises(ShardError, match="Say use_reentrant=False"),
        ):
            checkpoint(model[0], x, use_reentrant=True)

    mw.simulate(run, TP)


class Gated(nn.Module):
    """A block that is given the same value twice, whose last name is gone when the backward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def block(self, a: Any, b: Any) -> Any:
        return self.down(self.up(a).relu()) * b

    def forward(self, x: Any, view: Callable[[Any], Any]) -> Any:
        h = view(self.norm(x))
        made = torch.utils.checkpoint.checkpoint(self.block, h, h, use_reentrant=False)
        return mw.constrain(made, {"tp": mw.Replicate()}).sum()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda h: h,
    "transposed": lambda h: h.transpose(0, 1),
    "expanded": lambda h: h[:, :1].expand(*h.shape),
    "every other": lambda h: h[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("how", ["shard_checkpoint_inputs", "save_on_cpu"])
def test_an_input_that_is_given_twice_and_that_nobody_holds(how: str, view: str) -> None:
    """Both uses in the second run have the type that the value got after the first one was kept."""

    def grads(mesh: mw.Mesh | None) -> list[Any]:
        torch.manual_seed(0)
        net: Any = Gated().double()
        x: Any = torch.randn(4, 5, 6, dtype=torch.float64)
        around: Any = contextlib.nullcontext()
        if mesh is not None:
            plan = {"up.*": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}
            net, x = mw.shard_module(net, mesh, plan), mw.shard_tensor(x, mesh, {})
            around = (
                mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}) if how == "shard_checkpoint_inputs" else save_on_cpu()
            )
        with around:
            loss = net(x, VIEWS[view])
        loss.backward()
        return [p.grad if mesh is None else mw.unshard(p.grad) for p in net.parameters()]

    want, mesh = grads(None), mw.Mesh({"tp": 2})
    for found in mw.simulate(lambda: grads(mesh), mesh):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("value", [True, False], ids=["computed", "a leaf"])
@pytest.mark.parametrize("axes", [{"tp": 1}, {"tp": 2}], ids=str)
def test_autocast_keeps_casts_of_leaves_alone(axes: dict[str, int], value: bool) -> None:
    """The second run casts as the first: an input that was computed is no leaf there."""
    mesh, x = mw.Mesh(axes), torch.rand(2, 4, 6)

    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        block = mw.shard_module(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), mesh, {})
        inputs = mw.shard_tensor(x, mesh, {}).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), mw.shard_checkpoint_inputs({"tp": mw.Shard(1)}):
            out = again(block, inputs.sin() if value else inputs)
        out.float().sum().backward()
        return [mw.unshard(t.grad) for t in (inputs, *block.parameters())]

    torch.manual_seed(0)
    block, inputs = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = again(block, inputs.sin() if value else inputs)
    out.float().sum().backward()
    for got in mw.simulate(train, mesh):
        for a, b in zip(got, (inputs.grad, *(p.grad for p in block.parameters())), strict=True):
            torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_a_computed_input_may_be_written_to() -> None:
    mesh, x = mw.Mesh({"tp": 2}), torch.rand(3, 4, dtype=torch.float64)

    def train() -> torch.Tensor:
        inputs = mw.shard_tensor(x, mesh, {}).requires_grad_()
        with mw.shard_checkpoint_inputs({"tp": mw.Shard(0)}):
            out = again(lambda h: h.mul_(2).sin(), inputs * 3)
        out.sum().backward()
        assert inputs.grad is not None
        return mw.unshard(inputs.grad)

    inputs = x.clone().requires_grad_()
    (inputs * 6).sin().sum().backward()
    for got in mw.simulate(train, mesh):
        torch.testing.assert_close(got, inputs.grad)
