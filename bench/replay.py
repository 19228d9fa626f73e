"""Host cost of replaying a captured forward and backward on one device, beside the eager model and a plain FX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import meshwright as mw
from meshwright.program import build
from meshwright.program.run.runner import compile_program

from .core import LOCAL, OURS, Benchmark, Effort, Row, Samples, interleave, ratio, ratios
from .models import Batch, SmallGPT, batches, maker

JOINT = "joint FX graph"
SEQ, VOCABULARY = 8, 32


def eager(model: SmallGPT, batch: Batch) -> Callable[[], Any]:
    """The model itself."""
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model(*batch), parameters)


def joint(model: SmallGPT, batch: Batch) -> Callable[[], Any]:
    """What ``make_fx`` traces, without its ``detach``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names, parameters = zip(*model.named_parameters(), strict=True)

    def both(of: Any, *given: Any) -> Any:
        loss = torch.func.functional_call(model, dict(zip(names, of, strict=True)), given)
        return torch.autograd.grad(loss, of)

    graph = make_fx(both)(parameters, *batch)
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    held = tuple(p.detach() for p in parameters)

    def run() -> Any:
        with torch.inference_mode():
            return graph(held, *batch)

    return run


def ours(model: SmallGPT, batch: Batch) -> Callable[[], Any]:
    """The program's runner on the model's own parameters."""
    program = build(model, None, None, batch, mw.Mesh({"dp": 1})).program
    run = compile_program(program)
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    given = iter(batch)
    inputs = [tensors[i.name].detach() if i.name in tensors else next(given) for i in program.inputs]
    return lambda: run(inputs)


CONTENDERS = {LOCAL: eager, JOINT: joint, OURS: ours}


def measure(effort: Effort) -> Samples:
    """Microseconds, by layers of a model so small that the host's work is all."""
    found: Samples = {}
    for layers in effort.pick((1, 4), (1,), (1,)):
        model = maker(layers, 16, 2, SEQ, VOCABULARY, effort.seed)()
        (batch,) = batches(1, 2, SEQ, VOCABULARY, effort.seed)
        calls = {name: make(model, batch) for name, make in CONTENDERS.items()}
        found[f"{layers} layers"] = interleave(calls, effort, target_ms=20)
    return found


def rows(samples: Samples) -> Iterator[Row]:
    """Beside the eager model."""
    for case in samples:
        peers = ratios(samples, case, (JOINT,), LOCAL)
        yield Row(f"replay of a captured step, {case} / eager local", ratio(samples, case, OURS, LOCAL), None, peers)


BENCHMARKS = [Benchmark("replay", "us", measure, rows)]
