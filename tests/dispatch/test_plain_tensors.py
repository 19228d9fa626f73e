"""Plain tensors among distributed ones: that all ranks have the same is a claim, which they compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshwright as mw
from meshwright import collective
from meshwright.collective.digest import digests
from meshwright.errors import DesyncError
from meshwright.ranks import runtime
from tests.support.processes import run_processes

Tensor = torch.Tensor
TP = mw.Mesh({"tp": 2})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
LAYOUTS: Any = {"0.weight": {"tp": mw.Shard(0)}, "0.bias": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(own: bool) -> DataLoader[Any]:
    """Sixteen batches: of the ranks' own rows as a ``DistributedSampler`` gives them, or the same on all."""
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 6, generator=g), torch.randint(4, (128,), generator=g))
    rt = runtime.RT
    sampler = DistributedSampler(data, num_replicas=rt.world, rank=rt.rank if own else 0, shuffle=False)
    return DataLoader(data, batch_size=4 * 2 // rt.world, sampler=sampler)


def trains(own: bool, mesh: mw.Mesh = TP) -> Any:
    model = mw.shard_module(net(), mesh, LAYOUTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in rows(own):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def evaluates(own: bool, mesh: mw.Mesh = TP) -> Any:
    model = mw.shard_module(net(), mesh, LAYOUTS)
    with torch.no_grad():
        return sum(loss_of(model, batch).item() for batch in rows(own))


def evaluates_after_training(own: bool, mesh: mw.Mesh = TP) -> Any:
    model = mw.shard_module(net(), mesh, LAYOUTS)
    for batch in rows(False):
        loss_of(model, batch).backward()
    with torch.inference_mode():
        return sum(loss_of(model, batch).item() for batch in rows(own))


def captured(own: bool, mesh: mw.Mesh = TP, training: bool = True) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if training else None
    example = torch.zeros(4 * 2 // runtime.RT.world, 6), torch.zeros(4 * 2 // runtime.RT.world, dtype=torch.long)
    step = mw.compile_step(model, loss_of, optimizer, example, mesh=mesh, layouts=LAYOUTS)
    step.train(training)
    return [step(tuple(batch)) for batch in rows(own)][-1].item()


def captured_evaluation(own: bool, mesh: mw.Mesh = TP) -> Any:
    return captured(own, mesh, training=False)


WAYS: list[Callable[..., Any]] = [trains, evaluates, evaluates_after_training, captured, captured_evaluation]


def told(fn: Callable[[], Any], mesh: mw.Mesh = TP, **options: Any) -> set[str]:
    """What the ranks are told; one text where all are told the same."""

    def caught() -> str:
        try:
            fn()
        except DesyncError as error:
            return str(error)
        return ""

    return set(mw.simulate(caught, mesh, **options))


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_rank_s_own_where_no_axis_splits_data(way: Callable[..., Any], check: bool) -> None:
    assert told(lambda: way(False), check=check) == {""}
    texts = told(lambda: way(True), check=check)
    if check and way is not captured:
        assert len(texts) == 1
        assert "hold different values of a tensor that is the same on tp" in texts.pop()
    elif way is captured:
        assert "the ranks were given different batches" in texts.pop()
    else:
        (text,) = texts
        assert "the ranks gave different values of a plain tensor, float32[4, 6] of " in text
        assert ": rank 0: digest " in text
        assert "; rank 1: digest " in text
        assert "no DistributedSampler" in text
        assert "mw.shard_dataloader" in text


def test_on_a_mesh_of_two_axes() -> None:
    for way in (trains, evaluates):
        assert told(lambda way=way: way(False, BOTH), BOTH) == {""}
        texts = told(lambda way=way: way(True, BOTH), BOTH)
        assert "" not in texts
        assert any("the ranks gave different values of a plain tensor, float32[2, 6] of " in text for text in texts)


# An op of a distributed x and something plain, which differs between ranks where r does.
MIXED: dict[str, Callable[[Any, int], Any]] = {
    "scalar": lambda x, r: x * torch.tensor(1.0 + r),
    "mask": lambda x, r: x.masked_fill(torch.arange(4) > 2 - r, 0.0),
    "index": lambda x, r: x[:, torch.tensor([0, 1 + r])],
    "named": lambda x, r: torch.add(input=x, other=torch.full((4,), 1.0 + r)),
    "where": lambda x, r: torch.where(torch.tensor([True, r == 0, True, True]), x, 0.0),
    "list": lambda x, r: torch.cat([x, torch.full((1, 4), float(r))]),
    "in_place": lambda x, r: x.add_(torch.tensor(float(r))),
    "copy": lambda x, r: x.copy_(torch.full((4, 4), float(r))),
    "item": lambda x, r: x.__setitem__(0, torch.full((4,), float(r))),
    "data": lambda x, r: setattr(x, "data", torch.full((4, 4), float(r))),
    "foreach": lambda x, r: torch._foreach_mul_([x], torch.tensor(1.0 + r)),
    "foreach_lists": lambda x, r: torch._foreach_add_([mw.shard_tensor(torch.ones(4), TP, {})], [torch.ones(4) * r]),
    "einsum": lambda x, r: torch.einsum("ab,bc->ac", x, torch.full((4, 4), 1.0 + r)),
    "nan": lambda x, r: x * torch.tensor([float("nan")] * 3 + [float(r)]),
    "large": lambda x, r: x.sum() * torch.full((300, 1000), float(r)).T,
    "parameter": lambda x, r: F.linear(x, nn.Parameter(torch.full((3, 4), float(r)))),
    "parts": lambda x, r: x + torch.cat([x.to_local() * r, x.to_local()]),
}


@pytest.mark.parametrize("name", MIXED)
def test_every_way_to_mix(name: str) -> None:
    def fn(own: int) -> None:
        x = mw.shard_tensor(torch.ones(4, 4), TP, {"tp": mw.Shard(0)})
        with torch.no_grad():
            MIXED[name](x, own * runtime.RT.rank)
        (x.detach() * 2).sum().item()

    def autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fn(1)

    assert told(lambda: fn(0)) == {""}
    for wrong in (lambda: fn(1), autocast):
        (text,) = told(wrong)
        assert "the ranks gave different values of a plain tensor" in text, text
        assert "test_plain_tensors.py" in text


def test_what_one_rank_computes_alone_is_its_own_business() -> None:
    def fn() -> float:
        x = mw.shard_tensor(torch.ones(4), TP, {})
        y = mw.shard_tensor(torch.ones(4), TP, {"tp": mw.Shard(0)})
        for i in range(20):
            if runtime.RT.rank == 0:  # of what it has whole
                (x + torch.randn(4)).sum().item()
                x.mul(torch.tensor(float(i)))
            total = (y + torch.full((4,), float(i))).sum().item()
        return total

    assert mw.simulate(fn, TP) == [80.0, 80.0]


def test_what_is_not_read_may_be_anything() -> None:
    """``beta=0`` is how PyTorch is told not to read: models give it memory that nobody has written to."""

    def fn() -> None:
        x = mw.shard_tensor(torch.ones(4, 4), TP, {"tp": mw.Shard(0)})
        noise = torch.full((4, 4), float(runtime.RT.rank))
        torch.addmm(noise, x, x, beta=0).sum().item()

    assert told(fn) == {""}


def test_locals_and_plain_tensors_alone_may_differ() -> None:
    def fn() -> float:
        x = mw.shard_tensor(torch.arange(4.0), TP, {"tp": mw.Shard(0)})
        own = x.to_local() * (1 + runtime.RT.rank) + torch.rand(2)
        return mw.from_local(own, TP, {"tp": mw.Shard(0)}).sum().item()

    mw.simulate(fn, TP)


def test_nothing_more_is_counted_and_words_become_rare() -> None:
    def fn() -> tuple[int, int]:
        x = mw.shard_tensor(torch.ones(4, 2), TP, {"tp": mw.Shard(0)})
        with collective.counting() as counts:
            for _ in range(100):
                mw.unshard(x * torch.ones(2))
        return counts.total, runtime.RT.claims[TP.ranks].gap

    assert mw.simulate(fn, TP) == [(100, 32)] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_samples_hold_whole_elements(dtype: torch.dtype) -> None:
    """Of a large tensor, whatever half of an element tells two values apart."""
    x = torch.zeros(1 << 17, dtype=dtype)
    others = [x + 1, x + 2**-40, x.view(2, -1).T + 1] if dtype.is_floating_point else [x + 1, (x + 3).view(2, -1).T]
    assert len(set(digests([x, *others], whole=False))) >= len(others)
    assert digests([x.view(2, -1).T], whole=False) == digests([x.view(2, -1).T.contiguous()], whole=False)


def each_way() -> list[str]:
    """An error leaves the ranks where they were: they go on together."""
    texts = []
    mesh = mw.init_mesh({"tp": 2})
    for way in (trains, evaluates, captured_evaluation):
        for own in (False, True):
            try:
                way(own, mesh)
                texts.append("")
            except DesyncError as error:
                texts.append(str(error))
    return texts


@pytest.mark.processes
def test_on_real_processes() -> None:
    zero, one = run_processes(each_way, 2)
    assert zero == one
    for right, wrong in zip(zero[::2], zero[1::2], strict=True):
        assert right == ""
        assert "rank 0: digest" in wrong or "on rank 0, digest" in wrong, wrong
