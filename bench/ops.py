"""One op at a time on a process group that sends nothing: what the library costs the host beside the op itself.

Contenders wrap the same local tensors: DTensor, ours, and none at all.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw

from .core import DTENSOR, LOCAL, OURS, Benchmark, Effort, Row, Samples, fake_group, geometric_mean, interleave, ratio

MESHES = {"1d": {"dp": 8}, "2d": {"dp": 2, "tp": 4}}
FEW = ("add", "linear", "view", "sum")


class Wraps(Protocol):
    """A contender: gives local tensors a layout, one placement per axis such as ``S0,R``."""

    name: str

    def setup(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
        """Make the mesh."""

    def wrap(self, t: Tensor, placements: str, requires_grad: bool = False) -> Any:
        """A leaf with this local tensor's values."""


class PlainLocal:
    """The op alone."""

    name = LOCAL

    def setup(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
        """Nothing."""

    def wrap(self, t: Tensor, placements: str, requires_grad: bool = False) -> Tensor:
        """The tensor."""
        return t.detach().clone().requires_grad_(requires_grad)


class TorchDTensor:
    """PyTorch's distributed tensors."""

    name = DTENSOR

    def setup(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
        """Make its mesh."""
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)

    def wrap(self, t: Tensor, placements: str, requires_grad: bool = False) -> Any:
        """A DTensor."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        parts = [Replicate() if p == "R" else Shard(int(p[1:])) for p in placements.split(",")]
        made = DTensor.from_local(t.detach().clone(), self.mesh, parts, run_check=False).detach()
        return made.requires_grad_(requires_grad)


class DistTensors:
    """Ours."""

    name = OURS

    def setup(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
        """Make the mesh."""
        self.mesh = mw.init_mesh(dict(zip(names, sizes, strict=True)))

    def wrap(self, t: Tensor, placements: str, requires_grad: bool = False) -> Any:
        """A DistTensor."""
        parts = [mw.Replicate() if p == "R" else mw.Shard(int(p[1:])) for p in placements.split(",")]
        made = mw.from_local(t.detach().clone(), self.mesh, parts, check=False)
        return made.requires_grad_() if requires_grad else made


class Case(NamedTuple):
    """An op and what it is differentiated by."""

    run: Callable[[], Any]
    inputs: list[Any]


def cases(contender: Wraps, two_axes: bool, requires_grad: bool) -> dict[str, Case]:
    """The 15 ops on 4 x 8 x 16 elements of rank 0."""

    def place(first: str, second: str = "R") -> str:
        return f"{first},{second}" if two_axes else first

    def made(first: str, second: str, *shape: int) -> Any:
        return contender.wrap(torch.randn(*shape, generator=rng), place(first, second), requires_grad)

    rng = torch.Generator().manual_seed(0)
    x, y, rows = made("S0", "R", 4, 8, 16), made("S0", "R", 4, 8, 16), made("S0", "R", 32, 16)
    by_columns, by_rows, bias = made("R", "S1", 16, 16), made("R", "S0", 16, 16), made("R", "S0", 16)
    scale, shift, table = made("R", "R", 16), made("R", "R", 16), made("R", "R", 32, 16)
    q, k, v = (made("S0", "S1", 4, 4, 8, 4) for _ in range(3))
    ids = contender.wrap(torch.randint(0, 32, (4, 8), generator=rng), place("S0"))
    seen_as = (x.shape[0], 8, 4, 4)
    return {
        "add": Case(lambda: x + y, [x, y]),
        "mul_scalar": Case(lambda: x * 2.0, [x]),
        "relu": Case(lambda: torch.relu(x), [x]),
        "gelu": Case(lambda: F.gelu(x), [x]),
        "matmul": Case(lambda: rows @ by_columns, [rows, by_columns]),
        "linear": Case(lambda: F.linear(x, by_rows, bias), [x, by_rows, bias]),
        "layer_norm": Case(lambda: F.layer_norm(x, (16,), scale, shift), [x, scale, shift]),
        "sdpa": Case(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v]),
        "view": Case(lambda: x.view(seen_as), [x]),
        "transpose": Case(lambda: x.transpose(1, 2), [x]),
        "cat": Case(lambda: torch.cat([x, y], -1), [x, y]),
        "split": Case(lambda: x.split(4, -1)[0], [x]),
        "sum": Case(lambda: x.sum(), [x]),
        "softmax": Case(lambda: F.softmax(x, -1), [x]),
        "embedding": Case(lambda: F.embedding(ids, table), [table]),
    }


def differentiated(case: Case) -> Callable[[], Any]:
    """Forward and backward."""
    ones = torch.ones_like(case.run().detach())
    return lambda: torch.autograd.grad(case.run(), case.inputs, ones)


def built(mesh: str, backward: bool) -> dict[str, dict[str, Case]]:
    """Contender to its cases."""
    axes, made = MESHES[mesh], {}
    for contender in (PlainLocal(), TorchDTensor(), DistTensors()):
        contender.setup(tuple(axes.values()), tuple(axes))
        made[contender.name] = cases(contender, len(axes) > 1, backward)
    return made


def measure(effort: Effort, *, mesh: str, backward: bool) -> Samples:
    """Times of each op by contender; DTensor is left out where it has no rule for an op."""
    found: Samples = {}
    with fake_group(8):
        all_cases = built(mesh, backward)
        for op in all_cases[LOCAL] if effort.size == "whole" else FEW:
            calls: dict[str, Callable[[], Any]] = {}
            for name, of in all_cases.items():
                try:
                    call = differentiated(of[op]) if backward else of[op].run
                    call()
                except (NotImplementedError, RuntimeError):
                    if name != DTENSOR:
                        raise
                else:
                    calls[name] = call
            found[op] = interleave(calls, effort)
    return found


def rows(samples: Samples, *, mesh: str, backward: bool) -> Iterator[Row]:
    """Geometric means."""
    means = {}
    for name in (OURS, DTENSOR):
        of = [ratio(samples, op, name, LOCAL) for op, taken in samples.items() if name in taken]
        label = name if len(of) == len(samples) else f"{name}, {len(of)} of {len(samples)} ops"
        means[label] = geometric_mean(of)
    what = "forward + backward" if backward else "forward"
    ours = means.pop(OURS)
    yield Row(f"one op, {what}, {mesh} mesh: geometric mean / plain local", ours, None if backward else 2.3, means)


# ---------------------------------------------------------------------------------------------- plain numbers

# In a process that has never seen the package, and in one that trains with it.
READING = """
import json, time, torch
numbers = [torch.tensor(float(i)) for i in range(100)]
def taken():
    start = time.thread_time()
    for _ in range(20):
        for number in numbers:
            number.item()
    return (time.thread_time() - start) / 2e-3
"""
ALONE, IMPORTED, TRAINING = "torch alone", "imported", "training"
TRAINED = """
import meshwright as mw
model = mw.shard_module(torch.nn.Linear(4, 4), mw.init_mesh({"dp": 8}))
x = mw.shard_tensor(torch.ones(8, 4), model.weight.mesh, {"dp": mw.Shard(0)}, check=False)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = torch.nn.functional.cross_entropy(model(x), x)
    loss.backward()
    optimizer.step()
"""
OF_EIGHT = """
from bench.core import fake_group
of_eight = fake_group(8)
of_eight.__enter__()
"""
PROCESSES = {ALONE: "", IMPORTED: "import meshwright\n", TRAINING: OF_EIGHT + TRAINED}


def reading(effort: Effort) -> Samples:
    """What ``.item()`` of a plain tensor takes, in processes that are measured one after the other."""
    found: dict[str, list[float]] = {name: [] for name in PROCESSES}
    count = effort.pick(40, 10, 2)
    for _ in range(effort.pick(5, 2, 1)):
        for name, before in PROCESSES.items():
            code = f"{READING}{before}taken()\nprint(json.dumps(min(taken() for _ in range({count}))))"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=os.environ)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    return {".item()": found}


def of_plain_numbers(samples: Samples) -> Iterator[Row]:
    """Beside a process without the package."""
    yield Row(
        ".item() of a plain tensor beside training / without the package",
        ratio(samples, ".item()", TRAINING, ALONE), 1.05, {IMPORTED: ratio(samples, ".item()", IMPORTED, ALONE)},
    )  # fmt: skip


BENCHMARKS = [
    *(
        Benchmark(
            f"ops-{mesh}-{'fwdbwd' if backward else 'fwd'}",
            "us",
            functools.partial(measure, mesh=mesh, backward=backward),
            functools.partial(rows, mesh=mesh, backward=backward),
        )
        for mesh in MESHES
        for backward in (False, True)
    ),
    Benchmark("ops-item", "us", reading, of_plain_numbers),
]
