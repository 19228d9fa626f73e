"""What capturing a step costs by layers: with completion, partition, backward and AdamW, beside PyTorch's tracers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import meshwright as mw
from meshwright.program import Plan, build

from .core import Benchmark, Effort, Row, Samples, ratio, ratios
from .models import Batch, SmallGPT, batches, maker

EXPORT, JOINT = "torch.export", "aot joint graph"
TP = {"tp": mw.Shard(0)}


def export(model: SmallGPT, batch: Batch) -> Any:
    """The forward alone."""
    return torch.export.export(model, batch, strict=False)


def joint(model: SmallGPT, batch: Batch) -> Any:
    """Forward and backward in one graph."""
    from torch._functorch.aot_autograd import aot_export_module

    class Tuple(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return (self.model(*given),)

    return aot_export_module(Tuple(), batch, trace_joint=True, output_loss_index=0)


def ours(axes: dict[str, int]) -> Callable[[SmallGPT, Batch], Any]:
    """A captured step on a mesh without devices: two weights of each block named, the rest by completion."""
    layouts = {"*.qkv.weight": TP, "*.up.weight": TP} if "tp" in axes else {}
    mesh, plan = mw.Mesh(axes), Plan(layouts, batch={"dp": mw.Shard(0)})

    def capture(model: SmallGPT, batch: Batch) -> Any:
        return build(model, None, torch.optim.AdamW(model.parameters()), batch, mesh, plan)

    return capture


CONTENDERS: dict[str, Callable[[SmallGPT, Batch], Any]] = {
    EXPORT: export,
    JOINT: joint,
    "meshwright dp=4": ours({"dp": 4}),
    "meshwright dp=2,tp=2": ours({"dp": 2, "tp": 2}),
}


def seconds(capture: Callable[[SmallGPT, Batch], Any], layers: int, effort: Effort) -> float:
    """CPU seconds of one capture.  Nothing of the one before is held."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    hidden, seq, vocabulary = effort.pick((256, 128, 4096), (64, 32, 256), (16, 8, 32))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = maker(layers, hidden, 4, seq, vocabulary, effort.seed)()
        ((ids, targets),) = batches(1, 4, seq, vocabulary, effort.seed)
        # made by a generator, they are real tensors
        batch = torch.empty_like(ids), torch.empty_like(targets)
    gc.collect()
    start = time.process_time()
    made = capture(model, batch)
    took = time.process_time() - start
    del made
    return took


def measure(effort: Effort) -> Samples:
    """CPU seconds by number of layers."""
    for capture in effort.pick(tuple(CONTENDERS.values()), tuple(CONTENDERS.values()), ()):
        seconds(capture, 1, effort)  # imports and caches
    found: Samples = {}
    rng, order = effort.rng(), list(CONTENDERS)
    for layers, rounds in effort.pick(((4, 3), (24, 2), (96, 1)), ((2, 1), (8, 1)), ((1, 1),)):
        of = found[f"{layers} layers"] = {name: [] for name in CONTENDERS}
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                of[name].append(seconds(CONTENDERS[name], layers, effort))
    return found


def rows(samples: Samples) -> Iterator[Row]:
    """Beside ``torch.export``, which captures the forward alone."""
    for case in samples:
        for name in CONTENDERS:
            if name.startswith("meshwright"):
                what = f"capture of a step, {case}, {name.removeprefix('meshwright ')} / torch.export alone"
                yield Row(what, ratio(samples, case, name, EXPORT), None, ratios(samples, case, (JOINT,), EXPORT))


BENCHMARKS = [Benchmark("capture", "s", measure, rows)]
