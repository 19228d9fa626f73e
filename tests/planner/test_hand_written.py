"""No plan that people write by hand is faster by the model of costs than the one that is found."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.planner.emit import Keeping, Layouts
from meshwright.planner.measure import TrainedStep
from meshwright.planner.search import Candidate, PlanSearch
from meshwright.train.config import StepConfig
from meshwright.train.model import GPT, Llama, loss_of

Built = tuple[nn.Module, Callable[[nn.Module, Any], Any], Any]
DEVICES = (4, 8, 16, 64)
MACHINE = mw.hardware("h100-8x400g")
OUT, IN = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
GPT_TP = {"*.mlp.up.weight": OUT, "*.mlp.down.weight": IN, "*.attention.out.weight": IN}
LLAMA_TP = {
    **{f"*.attention.{name}.weight": OUT for name in ("query", "key", "value")}, "*.attention.out.weight": IN,
    "*.mlp.gate.weight": OUT, "*.mlp.up.weight": OUT, "*.mlp.down.weight": IN,
}  # fmt: skip
ENCODER_TP = {"*.linear1.weight": OUT, "*.linear2.weight": IN}


def decoder(llama: Llama | None, seq: int = 1024, **options: Any) -> Built:
    config = StepConfig(layers=6, heads=16, seq=seq, batch=64, dtype="bfloat16", **{"hidden": 1024, **options})
    ids = torch.empty(64, seq, dtype=torch.long, device="meta")
    return GPT(config, "meta", llama), lambda m, b: loss_of(m, *b), (ids, ids)


def encoder(hidden: int, rows: int) -> Built:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, 0.0, batch_first=True, norm_first=True)
        net = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        return net, lambda m, x: m(x).square().mean(), torch.empty(rows, 256, hidden)


def mlp(width: int, rows: int) -> Built:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        return net, lambda m, x: m(x).square().mean(), torch.empty(rows, width)


def images() -> Built:
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU()) for _ in range(6)]
        net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return net, lambda m, x: m(x).square().mean(), torch.empty(64, 3, 64, 64)


MODELS: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    "gpt": (lambda: decoder(None), GPT_TP),
    "gpt, long": (lambda: decoder(None, 4096), GPT_TP),
    "llama": (lambda: decoder(Llama()), LLAMA_TP),
    "llama, grouped": (lambda: decoder(Llama(kv_heads=8), hidden=4096), LLAMA_TP),
    "mixtral": (lambda: decoder(Llama(), experts=8), {"*.attention.out.weight": IN}),
    "deepseek": (lambda: decoder(Llama(), experts=16, shared_experts=1), {"*.attention.out.weight": IN}),
    "encoder": (lambda: encoder(512, 64), ENCODER_TP),
    "encoder, wide": (lambda: encoder(2048, 64), ENCODER_TP),
    "mlp": (lambda: mlp(8192, 64), {"0.weight": OUT, "2.weight": IN}),
    "images": (images, {}),
}


@functools.lru_cache(1)
def searches(name: str) -> Callable[..., PlanSearch]:
    """Searches of one model, which is captured once."""
    model, loss_fn, batch = MODELS[name][0]()
    step = TrainedStep(model, loss_fn, batch, torch.optim.AdamW(model.parameters()))
    first = PlanSearch(step, MACHINE, MACHINE.memory, 1)

    def search(devices: int, mesh: mw.Mesh | None = None, fix: Any = None) -> PlanSearch:
        made = PlanSearch(step, MACHINE, MACHINE.memory, devices, mesh, fix or {})
        made.captures, made.work, made._spaces = first.captures, first.work, first._spaces
        return made

    return search


KINDS = ("replicated", "states", "kept", "fsdp")
MICRO_BATCHES = (1, 2, 4, 8)  # for each stage


def inside(name: str, devices: int) -> Iterator[tuple[str, PlanSearch, Layouts]]:
    """Layouts without stages: rows split; over nodes and within them; weights split, with and without sequences."""
    search, weights = searches(name), MODELS[name][1]
    alone = search(devices, mw.Mesh({"dp": devices}), {"*": {"dp": mw.Replicate()}})
    layouts = alone.layouts((devices,))
    assert layouts is not None
    yield "dp", alone, layouts
    if devices > MACHINE.node:
        yield "hybrid", alone, layouts.hybrid(MACHINE.node)
    for tp in (2, 4, 8) if weights else ():
        if tp < devices:
            mesh = mw.Mesh({"dp": devices // tp, "tp": tp})
            for words, batch in (("tp", {}), ("tp, rows whole", {"*norm*": {"tp": mw.Replicate()}})):
                found = search(devices, mesh, {**weights, **(batch if name.startswith(("gpt", "llama")) else {})})
                split = found.layouts(mesh.sizes)
                assert split is not None
                yield f"{words}={tp}", found, split


def by_hand(name: str, devices: int) -> Iterator[tuple[str, Candidate]]:
    """Each of these with ZeRO-1/2, ZeRO-3 and recomputed blocks; and in stages of a pipeline."""
    for words, search, layouts in inside(name, devices):
        for storage in stored(layouts, search):
            yield f"{words}, {storage}", search.estimate(layouts, storage)
    blocks = sum(run.count for run in searches(name)(devices).repeats.runs)
    for stages in (n for n in range(2, blocks + 1) if devices % n == 0 and devices // n > 1):
        for words, search, layouts in inside(name, devices // stages):
            ways = math.prod(n for n, role in zip(layouts.sizes, layouts.roles, strict=True) if role in ("dp", "ep"))
            for m in (n * stages for n in MICRO_BATCHES if 64 % (n * stages * ways) == 0):
                for storage in stored(layouts, search, ("replicated", "states", "fsdp")):
                    piped = replace(storage, stages=stages, micro_batches=m)
                    yield f"{words}, {piped}", search.of_stages(layouts, piped, blocks)


def stored(layouts: Layouts, search: PlanSearch, kinds: Sequence[str] = KINDS) -> Iterator[Keeping]:
    """Ways to keep parameters over the axes of the batch; of two such axes (hybrid) the inner one alone too."""
    over = tuple(a for a, role in zip(layouts.axes, layouts.roles, strict=True) if role in ("dp", "cp"))
    for kind in kinds if over else kinds[:1]:
        for axes in {over, over[-1:]} if kind != "replicated" else {()}:
            for again in (False, True) if search.repeats.runs else (False,):
                yield Keeping(kind, axes, again)


@pytest.mark.thin(20)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", list(MODELS))
def test_nothing_by_hand_is_faster(name: str, devices: int) -> None:
    planned = searches(name)(devices).candidates()[0]
    assert planned.memory <= MACHINE.memory
    others = {words: c for words, c in by_hand(name, devices) if c.memory <= MACHINE.memory}
    best = min(others, key=lambda words: others[words].seconds)
    assert planned.seconds <= others[best].seconds * (1 + 1e-9), (str(planned), best, str(others[best]))


def test_of_a_llama_it_finds_the_layouts_of_megatron() -> None:
    """Weights split by outputs, then by inputs, heads by heads; what lies between blocks is split over the sequence."""
    config = StepConfig(layers=4, hidden=8192, heads=32, seq=512, batch=1, dtype="bfloat16")
    model = GPT(config, "meta", Llama())
    ids = torch.empty(1, 512, dtype=torch.long, device="meta")
    step = TrainedStep(model, lambda m, b: loss_of(m, *b), (ids, ids), torch.optim.AdamW(model.parameters()))
    search = PlanSearch(step, MACHINE, MACHINE.memory, 8, mw.Mesh({"tp": 8}))
    layouts = search.layouts((8,))
    assert layouts is not None
    counts = search.repeats.counts()
    lines = layouts.lines(lambda n: search.repeats.names(n, counts))
    for glob, placements in LLAMA_TP.items():
        for block in range(4):
            assert lines[f"blocks.{block}{glob[1:]}"].placements == placements, (glob, block)
    _, outputs = layouts.wishes(lambda n: search.repeats.names(n, counts))
    assert outputs["blocks.1.mlp.down"] == outputs["blocks.1.attention.out"] == {"tp": mw.Shard(1)}
    assert outputs["blocks.1.norm1"] == outputs["blocks.1.norm2"] == {"tp": mw.Replicate()}
