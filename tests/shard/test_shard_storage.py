"""How parameters are stored does not change what code does with them: as on one device, stored split or not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import meshwright as mw
from meshwright.errors import LayoutError, ShardError
from tests.support.shard_networks import Block, same_values

Tensor = torch.Tensor
DP = mw.Mesh({"dp": 2})
X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "states": ({}, {"shard_states": "dp"}),
    "stored": ({"fsdp": "dp"}, {}),
    "kept": ({"fsdp": "dp", "reshard_after_forward": False}, {}),
    "buckets": ({"bucket_bytes": 200}, {}),
}


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    listed = list(params)
    made = torch.optim.SGD(listed, 0.1, momentum=0.9)
    return mw.shard_optimizer(made) if isinstance(listed[0], mw.DistTensor) else made


CASES: dict[str, Callable[..., Any]] = {}


def case(fn: Callable[..., Any]) -> Callable[..., Any]:
    CASES[fn.__name__] = fn
    return fn


@case
def functional_call(model: nn.Module, opt: Any, x: Tensor) -> None:
    other = {k: (p * 2).detach().requires_grad_() for k, p in model.named_parameters()}
    torch.func.functional_call(model, other, (x,)).square().mean().backward()
    for k, p in model.named_parameters():
        p.grad = other[k].grad
    opt.step()


@case
def assigned_state(model: nn.Module, opt: Any, x: Tensor) -> None:
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
    loss(model, x).backward()


@case
def assigned_attribute(model: Any, opt: Any, x: Tensor) -> None:
    model[0].up.weight = nn.Parameter((model[0].up.weight * 2).detach())
    loss(model, x).backward()


def _written(model: Any, write: Callable[[Any], None]) -> Any:
    return model[0].up.register_forward_pre_hook(lambda m, a: write(m) if m.training else None)


@case
def written_in_the_forward(model: Any, opt: Any, x: Tensor) -> None:
    def write(m: Any) -> None:
        with torch.no_grad():
            m.weight.mul_(0.9)

    handle = _written(model, write)
    loss(model, x).backward()
    opt.step()
    handle.remove()


@case
def data_written_in_the_forward(model: Any, opt: Any, x: Tensor) -> None:
    def write(m: Any) -> None:
        assert float(m.weight.sum()) is not None
        m.weight.data.mul_(0.9)
        m.bias.data = m.bias.data * 0.5 + m.weight.data.sum(1) * 0.1

    handle = _written(model, write)
    for _ in range(2):
        loss(model, x).backward()
        opt.step()
    handle.remove()


@case
def data_of_another_size(model: Any, opt: Any, x: Tensor) -> None:
    """Plain tensors are global values, of whatever size: as ``resize_token_embeddings`` of transformers."""
    up, down, g = model[0].up, model[0].down, torch.Generator().manual_seed(5)
    for size in (19, 1):  # not 10: that is a part of one rank
        up.weight.data, up.bias.data = (
            torch.randn(size, 8, generator=g).double(),
            torch.randn(size, generator=g).double(),
        )
        down.weight.data = torch.randn(8, size, generator=g).double()
        opt.zero_grad()
        loss(model, x).backward()
        opt.step()


@case
def momentum_encoder(model: Any, opt: Any, x: Tensor) -> None:
    """As MoCo: one part is a moving average of the other, written in the forward of the whole."""

    def average(m: Any, args: Any) -> None:
        for q, k in zip(m[0].parameters(), m[1].parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    handle = model.register_forward_pre_hook(average)
    for p in model[1].parameters():
        p.requires_grad_(False)
    for _ in range(3):
        opt.zero_grad()
        loss(model, x).backward()
        opt.step()
    handle.remove()


@case
def parameter_hooks(model: Any, opt: Any, x: Tensor) -> None:
    model[0].up.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3) * 3)
    model[1].norm.bias.register_hook(lambda g: None)
    (loss(model, x) + loss(model, 2 * x)).backward()
    loss(model, x).backward()
    opt.step()


@case
def optimizer_in_the_backward(model: Any, opt: Any, x: Tensor) -> None:
    opts = {p: sgd([p]) for p in model.parameters()}

    def step(p: Any) -> None:
        assert p.grad is not None
        opts[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loss(model, x).backward()
    assert all(p.grad is None for p in model.parameters())


@case
def gradients_written_after_accumulation(model: Any, opt: Any, x: Tensor) -> None:
    model[0].up.weight.register_post_accumulate_grad_hook(lambda p: p.grad.zero_().requires_grad or None)
    model[0].up.bias.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3).requires_grad or None)
    handle = model[1].up.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    loss(model, x).backward()
    assert model[1].up.bias.grad is None
    handle.remove()
    loss(model, x).backward()
    opt.step()


@case
def freezing(model: Any, opt: Any, x: Tensor) -> None:
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        opt.zero_grad()
        loss(model, x).backward()
        assert (model[0].up.weight.grad is None) == frozen
        opt.step()


@case
def group_added(model: Any, opt: Any, x: Tensor) -> None:
    two = sgd(model[0].parameters())
    loss(model, x).backward()
    two.step()
    two.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
    two.step()


@case
def zero_grad_to_zero(model: Any, opt: Any, x: Tensor) -> None:
    for _ in range(3):
        opt.zero_grad(set_to_none=False)
        loss(model, x).backward()
        opt.step()


@case
def vectors(model: Any, opt: Any, x: Tensor) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 1.1, model.parameters())
    loss(model, x).backward()
    opt.step()


@case
def retained(model: Any, opt: Any, x: Tensor) -> None:
    value = loss(model, x)
    value.backward(retain_graph=True)
    value.backward()
    opt.step()


@case
def unused(model: Any, opt: Any, x: Tensor) -> None:
    loss(model[0], x).backward()
    assert all(p.grad is None for p in model[1].parameters())
    opt.step()


@case
def read_in_a_thread(model: Any, opt: Any, x: Tensor) -> None:
    """Evaluated and saved by another thread in the middle of a forward and of a backward."""
    found: list[Any] = []

    def look(*_: Any) -> None:
        def run() -> None:
            with torch.no_grad():
                found.append(float(mw.unshard(loss(model, x))))
            found.append({k: mw.unshard(v) for k, v in model.state_dict().items()})

        thread = threading.Thread(target=run)
        handle.remove()
        thread.start()
        thread.join(20)

    start = {k: mw.unshard(v).clone() for k, v in model.state_dict().items()}
    for hooked in (False, True):
        if hooked:
            handle = model[0].register_forward_hook(lambda m, a, o: o.register_hook(look) and None)
        else:
            handle = model[1].down.register_forward_pre_hook(look)
        loss(model, x).backward()
    value = float(loss(model, x).detach())
    assert found[0] == pytest.approx(value, abs=1e-14)
    assert found[2] == pytest.approx(value, abs=1e-14)
    for seen in (found[1], found[3]):
        torch.testing.assert_close(seen, start)
    opt.step()


def run(name: str, model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
    loss(model, x).backward()
    opt.step()
    opt.zero_grad()
    CASES[name](model, opt, x)


@pytest.mark.parametrize("name", CASES)
def test_storage_changes_nothing(name: str) -> None:
    one = blocks()
    run(name, one, torch.optim.SGD(one.parameters(), 0.1), X)

    def fn() -> None:
        for mode, (options, bound) in MODES.items():
            model = mw.shard_module(blocks(), DP, **options)
            opt = mw.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1), **bound)
            try:
                run(name, model, opt, mw.shard_tensor(X, DP, {"dp": mw.Shard(0)}))
                same_values(model, one)
                same_values(model, one, grads=True)
            except BaseException as error:
                error.add_note(f"mode {mode}")
                raise

    mw.simulate(fn, DP)


def test_a_size_that_the_states_do_not_have_is_refused_on_every_rank() -> None:
    """PyTorch raises too; here the parts of some ranks would still fit."""

    def fn(placed: dict[str, Any], options: dict[str, Any]) -> None:
        m: Any = mw.shard_module(nn.Linear(8, 16), DP, placed)
        opt = mw.shard_optimizer(torch.optim.AdamW(m.parameters()), **options)
        for size in (16, 17):
            opt.zero_grad()
            m.weight.data, m.bias.data = torch.ones(size, 8), torch.ones(size)
            m(torch.ones(2, 8)).sum().backward()
            if size == 16:
                opt.step()
        with pytest.raises(
            ShardError, match=r"AdamW: state .* of .*weight has shape \(16, 8\), .*weight has \(17, 8\)"
        ):
            opt.step()
        opt.state.clear()
        opt.step()

    for placed, options in (({"*": {"dp": mw.Shard(0)}}, {}), ({}, {"shard_states": "dp"})):
        mw.simulate(lambda p=placed, o=options: fn(p, o), DP)  # type: ignore[misc]


def test_part_of_a_rank_is_no_other_size() -> None:
    def fn() -> None:
        m = mw.shard_module(nn.Linear(8, 15), DP, {"weight": {"dp": mw.Shard(0)}})
        for rows in (8, 7):
            with pytest.raises(LayoutError, match=r"use mw\.from_local for a local part"):
                m.weight.data = torch.ones(rows, 8)

    mw.simulate(fn, DP)


def test_saved_versions_are_checked() -> None:
    def fn() -> None:
        for reshard_after_forward in (True, False):
            model = mw.shard_module(blocks(), DP, fsdp="dp", reshard_after_forward=reshard_after_forward)
            x = mw.shard_tensor(X, DP, {"dp": mw.Shard(0)})
            value = loss(model, x)
            if reshard_after_forward:
                torch.optim.SGD(model.parameters(), 0.1).step()
                with torch.no_grad():
                    model[1].up.weight.add_(1)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    value.backward()

    mw.simulate(fn, DP)


@pytest.mark.parametrize("kept", [False, True])
def test_pieces_of_one_vector_as_parameters(kept: bool) -> None:
    """Of such pieces some are copies, on some ranks: what is gathered again must not follow from that."""
    mesh = mw.Mesh({"dp": 2, "tp": 2})
    x = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(distributed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        columns, rows = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
        if distributed:
            layouts = {"0.weight": columns, "0.bias": columns, "2.weight": rows}
            mw.shard_module(model, mesh, layouts, fsdp="dp")
        held = []
        for _ in range(3):
            model(mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}) if distributed else x).square().mean().backward()
            vector = parameters_to_vector(model.parameters()).detach()
            vector_to_parameters(vector * 0.9, model.parameters())
            held += [model[0].weight.data] if kept else []
            for p in model.parameters():
                p.grad = None
            for alias in held[-1:]:
                alias.mul_(0.5)  # seen by no counter
        return [mw.unshard(p) if distributed else p for p in model.parameters()]

    for got, want in zip(mw.simulate(lambda: run(True), mesh)[0], run(False), strict=True):
        torch.testing.assert_close(got, want)


def test_a_write_by_an_alias_that_has_gone() -> None:
    def run(distributed: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 3).double()
        if distributed:
            mw.shard_module(model, DP, fsdp="dp")
        given, out = mw.shard_tensor(X, DP, {"dp": mw.Shard(0)}) if distributed else X, []
        alias = model.weight.data
        for write in (False, True, False):
            out.append(model(given).sum().item())
            if write:
                alias.mul_(0.5)
                del alias
        return out

    assert mw.simulate(lambda: run(True), DP)[0] == pytest.approx(run(False))


ITSELF: dict[str, Callable[[Any], Any]] = {
    "float": lambda p: p.float(),
    "cpu": lambda p: p.cpu(),
    "to, device": lambda p: p.to("cpu"),
    "to, itself": lambda p: p.to(p),
    "to, dtype": lambda p: p.to(torch.float32),
    "type": lambda p: p.type(torch.float32),
    "type_as": lambda p: p.type_as(p),
    "contiguous": lambda p: p.contiguous(),
    "resolve_conj": lambda p: p.resolve_conj(),
    "resolve_neg": lambda p: p.resolve_neg(),
    "real": lambda p: p.real,
    "plus": lambda p: +p,
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float32),
    "at least": torch.atleast_2d,
    "several": lambda p: torch.atleast_2d(p, p),
    "broadcast": lambda p: torch.broadcast_tensors(p, p),
    "expand": lambda p: p.expand_as(p),
    "to_dense": lambda p: p.to_dense(),
    "dropout": lambda p: torch.dropout(p, 0.0, False),
    "reshard": lambda p: mw.reshard(p, p.placements),
    "sum_to_size": lambda p: p.sum_to_size(6, 6),
    "norm": lambda p: p.float().norm().item(),
    "requires_grad_": lambda p: p.requires_grad_(),
    "index": lambda p: p[...],
}


@pytest.mark.parametrize(
    "options", [{"fsdp": "dp"}, {"precision": mw.Precision(torch.bfloat16, torch.float32)}], ids=["zero", "cast"]
)
def test_an_op_that_returns_its_argument_leaves_it_what_it_was(options: dict[str, Any]) -> None:
    """``p.float()``, ``model.to(device)``: the parameter was neither stored split nor cast any more."""
    x = torch.ones(4, 6)

    def run(touch: Callable[[Any], Any], recorded: bool) -> Any:
        model = mw.shard_module(nn.Linear(6, 6), DP, **options)
        with torch.set_grad_enabled(recorded):
            touch(model.weight)
        with mw.explain() as why:
            out = model(mw.shard_tensor(x, DP, {"dp": mw.Shard(0)}))
            out.sum().backward()
        return out.dtype, dict(why.counts.bytes)

    def every() -> list[str]:
        want = run(lambda p: None, True)
        return [f"{n} {r}" for n, touch in ITSELF.items() for r in (True, False) if run(touch, r) != want]

    assert mw.simulate(every, DP)[0] == []


@pytest.mark.parametrize(
    ("placed", "options"),
    [
        ({"*": {"dp": mw.Shard(0)}}, {}),
        ({}, {"shard_states": "dp"}),
        ({}, {"shard_states": "dp", "offload_states": "cpu"}),
    ],
)
def test_a_size_of_before_the_first_step(placed: dict[str, Any], options: dict[str, Any]) -> None:
    """Of states that no step had made: those that the first one makes are of the size that there is then."""

    def run(distributed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        m: Any = nn.Linear(8, 16)
        if distributed:
            mw.shard_module(m, DP, placed)
        opt = torch.optim.AdamW(m.parameters(), lr=0.1)
        if distributed:
            mw.shard_optimizer(opt, **options)
        m.weight.data, m.bias.data = torch.ones(17, 8), torch.ones(17)
        for _ in range(2):
            opt.zero_grad()
            m(torch.ones(2, 8)).sum().backward()
            opt.step()
        return [mw.unshard(p.detach()) if distributed else p.detach() for p in m.parameters()]

    for made in mw.simulate(lambda: run(True), DP):
        torch.testing.assert_close(made, run(False))


class Branch(nn.Module):
    """Two parameters that are gathered together, one of which is used in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.often = nn.Parameter(torch.ones(8).double()), nn.Parameter(torch.full((8,), 2.0).double())

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return x * self.always * self.often if both else x * self.always


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "offload", "precision"])
def test_hooks_of_what_no_gradient_reaches(mode: str, silent: bool) -> None:
    """A parameter that this backward does not use keeps its gradient, and its hook is not called."""
    beside = {"offload": {"offload": "cpu"}, "precision": {"precision": mw.Precision(reduce=torch.float32)}}
    how = beside[mode] if mode in beside else MODES[mode][0]

    def run(shard: bool) -> list[Any]:
        model, x, calls = Branch(), X, list[str]()
        if shard:
            mw.shard_module(model, DP, **how)
            x = mw.shard_tensor(X, DP, {"dp": mw.Shard(0)})
        opts = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
        for name, p in model.named_parameters():

            def hook(p: Any, name: str = name) -> None:
                calls.append(name)
                p.grad.mul_(0.5)
                if not silent:  # what is still Partial updates nothing
                    opts[p].step()

            p.register_post_accumulate_grad_hook(hook)
        for both in (True, False, True):
            with mw.no_sync(model) if shard and silent and not both else contextlib.nullcontext():
                (model(x, both).square().sum() / 100).backward()
        return [sorted(calls), *(mw.unshard(p).detach() for p in model.parameters() if not silent)]

    wanted, found = run(False), mw.simulate(lambda: run(True), DP)[0]
    assert found[0] == wanted[0] == ["always"] * 3 + ["often"] * 2
    for a, b in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13 if mode != "precision" else 1e-6)
