"""What ``torch.profiler`` shows on real processes: each collective that was counted, its bytes and its purpose."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile, record_function

import meshwright as mw
from meshwright import collective
from meshwright.collective import profiler
from meshwright.ranks import runtime
from tests.support.processes import run_processes

MESH = {"dp": 2, "tp": 2}
COUNTED = re.compile(r"meshwright::(?!wait)(\w+) over ([\w,]+), (\d+) bytes(?:, (.*))?")
Sent = dict[tuple[str, tuple[str, ...]], list[int]]


class Block(nn.Module):
    """Attention's kind of pair, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.gate_up, self.out = nn.Parameter(torch.randn(4, 12, 8) / 4), nn.Parameter(torch.randn(4, 8, 6) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        scores, ids = self.router(x).softmax(-1).topk(1)
        return x + mw.experts(x, ids, scores, self.gate_up, self.out, act="silu")


LAYOUTS = {
    "*.up.*": {"tp": mw.Shard(0)}, "*.down.weight": {"tp": mw.Shard(1)}, "*.gate_up": {"dp": mw.Shard(0)},
    "*.out": {"dp": mw.Shard(0)},
}  # fmt: skip
BATCH = {"dp": mw.Shard(0)}
ROWS = {"experts": {"dp": "rows"}}


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def built() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()), torch.randn(8, 3, 8)


def eager(**how: Any) -> Callable[[], Any]:
    mesh = mw.init_mesh(MESH)
    model, x = built()
    mw.shard_module(model, mesh, LAYOUTS, **how)
    optimizer = torch.optim.AdamW(model.parameters())
    if not how:
        mw.shard_optimizer(optimizer, shard_states="dp")

    def step() -> Any:
        with mw.strategies(ROWS):
            loss = loss_fn(model, mw.shard_tensor(x, mesh, BATCH))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def captured(sizes: dict[str, int], layouts: Any, **how: Any) -> Callable[[], Any]:
    mesh = mw.init_mesh(sizes)
    model, x = built()
    step = mw.compile_step(
        model, loss_fn, torch.optim.AdamW(model.parameters()), x, mesh=mesh, layouts=layouts, batch=BATCH, **how
    )
    return lambda: step(x).item()


WAYS: dict[str, Callable[[], Callable[[], Any]]] = {
    "eager": eager,
    "eager, stored over dp": lambda: eager(fsdp={"*.up.*": "dp", "*.down.*": "dp"}),
    "captured": lambda: captured(MESH, LAYOUTS, strategies=ROWS),
    "captured, started early": lambda: captured(MESH, LAYOUTS, strategies=ROWS, passes=["data-parallel-optimization"]),
    "pipeline": lambda: captured(
        {"dp": 2, "pp": 2}, {}, stages={"pp": {"0": 0, "1": 1}}, passes=["pipeline:micro_batches=2,schedule=1f1b"]
    ),
}


def events_of(step: Callable[[], Any], **how: Any) -> list[str]:
    """Their names on the first rank, whose alone are looked at: reading them takes longer than a step."""
    with profile(activities=[ProfilerActivity.CPU], **how) as made:
        step()
    return [] if runtime.RT.rank else [e.name for e in made.events()]


def seen(names: list[str]) -> Sent:
    """As counts have it, from the names alone."""
    found: Sent = {}
    for name in names:
        if said := COUNTED.fullmatch(name):
            entry = found.setdefault((said[1], tuple(said[2].split(","))), [0, 0])
            entry[0] += 1
            entry[1] += int(said[3])
    return found


def profiled_everywhere() -> dict[str, tuple[Sent, Sent, list[str]]]:
    found = {}
    for way, make in WAYS.items():
        step = make()
        step()
        with collective.counting() as counts:
            names = events_of(step)
        found[way] = seen(names), counts.table, names
    return found


@pytest.mark.processes
def test_ranges_are_the_collectives_that_were_counted() -> None:
    first, *_ = run_processes(profiled_everywhere, 4)
    for way, (ranges, counts, names) in first.items():
        if way == "pipeline":  # of what other stages have a rank's part is empty: counted, and not sent
            assert {k: b for k, (_, b) in ranges.items()} == {k: b for k, (_, b) in counts.items()}
        else:
            assert ranges == counts, way
        unsaid = [n for n in names if (said := COUNTED.fullmatch(n)) and not said[4]]
        assert not unsaid, (way, unsaid)
        started = sum(n.startswith("meshwright::") and " over " in n and "wait for" not in n for n in names)
        assert sum(n.startswith("meshwright::wait for ") for n in names) == started, way
    of = {way: " ".join(names) for way, (_, _, names) in first.items()}
    for way in ("eager", "captured", "captured, started early"):
        assert re.search(r"meshwright::gather_rows over dp, \d+ bytes, expert_outputs", of[way]), way
        assert re.search(r"bytes, gradient of expert_outputs", of[way]), way
        assert re.search(r"all_reduce over tp, \d+ bytes, gradient of linear[^,]* at test_profiles.py:\d+", of[way])
    assert re.search(r"\d gradients: 1.\S+ \.\.\. 0.up.weight", of["eager"])
    assert re.search(r"gradient of 0.router.weight", of["captured"])
    assert re.search(r"all_gather over dp, \d+ bytes, 3 parameters: 0.up.weight", of["eager, stored over dp"])
    assert re.search(r"meshwright::send over pp, 192 bytes, F \S+ of \d", of["pipeline"])
    assert {"meshwright::linear", "meshwright::add", "meshwright::experts", "aten::linear"} <= set(first["eager"][2])


def as_people_do() -> list[Any]:
    """On the first rank alone: started and stopped in the middle, with ranges of one's own, beside threads and an
    explanation; the losses, and what was seen."""
    rank, losses, found = dist.get_rank(), [], list[Any]()
    for make in (eager, WAYS["captured"]):
        step = make()
        for i in range(6):
            if rank or not i % 2:
                losses.append(step())
                continue
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as made:
                other = threading.Thread(target=lambda: [torch.randn(3).relu() for _ in range(50)])
                other.start()
                with record_function("mine"), mw.explain() as why:
                    losses.append(step())
                other.join()
            names = [e.name for e in made.events()]
            found.append((seen(names), why.counts.table, Counter(names)["mine"]))
    assert runtime.RT.cause is None
    assert not profiler._is_profiler_enabled
    return [losses, found]


@pytest.mark.processes
def test_one_rank_may_profile_alone() -> None:
    first, *others = run_processes(as_people_do, 4)
    assert all(losses == first[0] for losses, _ in others)
    assert len(first[1]) == 6
    for ranges, counts, mine in first[1]:
        assert ranges == counts
        assert mine == 1


def test_an_op_that_raises_leaves_nothing_behind() -> None:
    x = mw.shard_tensor(torch.ones(2, 3), mw.Mesh({"dp": 1}), {})
    with profile(activities=[ProfilerActivity.CPU]) as made, pytest.raises(RuntimeError):
        x @ x
    assert runtime.RT.cause is None
    assert collective.OP.func is None
    assert "meshwright::matmul" in {e.name for e in made.events()}
