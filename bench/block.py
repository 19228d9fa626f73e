"""A small transformer block on a process group that sends nothing: host time beside hand-written Megatron code."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw

from .core import DTENSOR, LOCAL, OURS, Benchmark, Effort, Row, Samples, fake_group, interleave, ratios
from .tensor_parallel import BlockBase, ByHand, keep_part

BY_HAND, MODULES = "by hand", "dtensor, parallelize_module"
DP, TP = 2, 4
HIDDEN, HEADS, BATCH, SEQ = 16, 4, 4, 8
COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
SPLIT_COLUMNS, SPLIT_ROWS = ("q", "k", "v", "up"), ("o", "down")
LAYOUTS = {**{f"{n}.*": COLUMN for n in SPLIT_COLUMNS}, **{f"{n}.weight": ROW for n in SPLIT_ROWS}}


class SmallBlock(BlockBase):
    """Pre-norm, with attention written out; ``heads`` and widths are those that this module sees."""

    def __init__(self, hidden: int, heads: int, inner: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v = (nn.Linear(hidden, inner) for _ in range(3))
        self.o = nn.Linear(inner, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def attend(self, h: Tensor) -> Tensor:
        """Attention without its output layer: ``[batch, seq, hidden]`` to ``[batch, seq, inner]``."""
        batch, seq = h.shape[:2]
        q, k, v = (f(h).view(batch, seq, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax((q @ k.transpose(-2, -1)) * 0.5, -1)
        return (weights @ v).transpose(1, 2).reshape(batch, seq, -1)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, hidden]`` to the same."""
        x = x + self.leave(self.o, self.attend(self.enter(self.ln1(x))))
        return x + self.leave(self.down, torch.relu(self.up(self.enter(self.ln2(x)))))


class SmallByHand(ByHand, SmallBlock):
    """With the hand-written conversions."""


class SmallOnDTensors(SmallBlock):
    """Everything is a DTensor; what is Partial is reduced where hand-written code does it."""

    def leave(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Reduced over tp."""
        from torch.distributed.tensor import Replicate, Shard

        made: Any = linear(x)
        return made.redistribute(placements=[Shard(0), Replicate()])


def whole_block(kind: type[SmallBlock] = SmallBlock) -> SmallBlock:
    """The block of the global shapes."""
    torch.manual_seed(0)
    return kind(HIDDEN, HEADS, HIDDEN, 4 * HIDDEN)


def part_of_batch() -> Tensor:
    """This rank's rows."""
    return torch.randn(BATCH // DP, SEQ, HIDDEN, generator=torch.Generator().manual_seed(1))


Made = tuple[nn.Module, Any]


def by_hand(kind: type[SmallBlock] = SmallByHand) -> Made:
    """This rank's parts of the weights as plain tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    block = whole_block(kind)
    block.heads //= TP
    for names, dim in ((SPLIT_COLUMNS, 0), (SPLIT_ROWS, 1)):
        for name in names:
            keep_part(block.get_submodule(name), dim, 0, TP)  # type: ignore[arg-type]
    if isinstance(block, ByHand):
        block.group = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))["tp"].get_group()
    return block, part_of_batch().requires_grad_()


def alone() -> Made:
    """The same work without communication."""
    return by_hand(SmallBlock)


def on_dtensors() -> Made:
    """All parameters and the batch are DTensors on the whole mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh, block = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp")), whole_block(SmallOnDTensors)
    dims = {f"{n}.{p}": 0 for n in SPLIT_COLUMNS for p in ("weight", "bias")} | {f"{n}.weight": 1 for n in SPLIT_ROWS}
    for path, p in list(block.named_parameters()):
        module, _, name = path.rpartition(".")
        over_tp = Shard(dims[path]) if path in dims else Replicate()
        made = distribute_tensor(p.detach(), mesh, [Replicate(), over_tp], src_data_rank=None)
        block.get_submodule(module).register_parameter(name, nn.Parameter(made))
    x = DTensor.from_local(part_of_batch(), mesh, [Shard(0), Replicate()], run_check=False).detach()
    return block, x.requires_grad_()


def by_modules() -> Made:
    """``parallelize_module``: plain tensors between the layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, block = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp")), whole_block()
    block.heads //= TP
    plan = {**{n: ColwiseParallel() for n in SPLIT_COLUMNS}, **{n: RowwiseParallel() for n in SPLIT_ROWS}}
    for style in plan.values():
        style.src_data_rank = None
    parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
    return block, part_of_batch().requires_grad_()


def ours() -> Made:
    """The plain block, with Megatron's layouts said on its weights."""
    mesh = mw.init_mesh({"dp": DP, "tp": TP})
    # The hand-written blocks do not reduce gradients over dp either.
    block = mw.shard_module(whole_block(), mesh, LAYOUTS, sync=False)
    x = mw.from_local(part_of_batch(), mesh, {"dp": mw.Shard(0)}, check=False)
    return block, x.requires_grad_()


CONTENDERS: dict[str, Callable[[], Made]] = {
    LOCAL: alone,
    BY_HAND: by_hand,
    MODULES: by_modules,
    DTENSOR: on_dtensors,
    OURS: ours,
}


def measure(effort: Effort) -> Samples:
    """Forward, and forward + backward."""
    with fake_group(DP * TP):
        built = {name: make() for name, make in CONTENDERS.items()}
        forward = {name: lambda block=block, x=x: block(x) for name, (block, x) in built.items()}
        both = {name: lambda f=f: f().sum().backward() for name, f in forward.items()}
        return {
            "forward": interleave(forward, effort, target_ms=15),
            "forward + backward": interleave(both, effort, target_ms=15),
        }


def rows(samples: Samples) -> Iterator[Row]:
    """Beside hand-written code; the backward is what the forward leaves of both."""
    both, forward = samples["forward + backward"], samples["forward"]
    backward = {n: [statistics.median(both[n]) - statistics.median(forward[n])] for n in both}
    all_cases = {"forward": forward, "backward": backward, "forward + backward": both}
    targets = {"forward": 1.35, "backward": 1.1, "forward + backward": 1.2}
    for case, target in targets.items():
        found = ratios(all_cases, case, (OURS, DTENSOR, MODULES), BY_HAND)
        yield Row(f"transformer block, {case} / hand-written", found.pop(OURS), target, found)


BENCHMARKS = [Benchmark("block", "us", measure, rows)]
