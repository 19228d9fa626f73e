"""Checkpoints on real processes beside PyTorch's DCP: the same bytes to the same disk, synced, in turn.

Each rank holds half of the rows of some matrices.  They are saved, loaded as they lay, and loaded by columns; and a
save is begun whose files are written while training would go on: its stall, of the second save of a run, beside a
copy of what the rank holds.
PyTorch's reader of Hugging Face files, of what we wrote, is a second baseline.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import meshwright as mw

from .core import OURS, Benchmark, Effort, Row, Samples, ratio, ratios

DCP, HUGGING_FACE, COPY = "dcp", "dcp, hugging face reader", "copy"
ROWS, COLUMNS = 0, 1
# The disk of the checkout: what is temporary may lie in memory.
FOLDER = Path(__file__).resolve().parent / "out"


class Matrices(nn.Module):
    """So many square matrices of a seed."""

    def __init__(self, count: int, side: int, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        for i in range(count):
            self.register_parameter(f"w{i:03d}", nn.Parameter(torch.randn(side, side, generator=rng)))


class OurCheckpoints:
    """``mw.Checkpoints``."""

    name = OURS

    def __init__(self, make: Callable[[], Matrices]) -> None:
        mesh = mw.init_mesh({"dp": dist.get_world_size()})
        self.held = {d: mw.shard_module(make(), mesh, {"*": {"dp": mw.Shard(d)}}) for d in (ROWS, COLUMNS)}
        self.store = mw.Checkpoints(".")

    def tensors(self, dim: int) -> list[Tensor]:
        """What this rank holds."""
        held: Iterable[Any] = self.held[dim].parameters()
        return [p.to_local().detach() for p in held]

    def begin(self, folder: Path) -> Callable[[], Any]:
        """Begin to save; call the result to wait for the end."""
        if self.store.folder != folder:
            self.store = mw.Checkpoints(folder)
        return self.store.save(0, model=self.held[ROWS]).wait

    def save(self, folder: Path) -> None:
        """From begin to end."""
        self.begin(folder)()

    def load(self, folder: Path, dim: int) -> None:
        """Into the tensors that are there."""
        mw.Checkpoints(folder).load(model=self.held[dim])


def torch_checkpoints() -> Any:
    """PyTorch's module, imported where it is needed: that takes seconds."""
    import torch.distributed.checkpoint as dcp

    return dcp


class TorchCheckpoints:
    """DCP on DTensors."""

    name = DCP

    def __init__(self, make: Callable[[], Matrices]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), make()
        self.group = dist.new_group()  # its thread has collectives, which must not meet ours
        self.held: dict[int, dict[str, Any]] = {
            d: {n: distribute_tensor(p.detach(), mesh, [Shard(d)]) for n, p in whole.named_parameters()}
            for d in (ROWS, COLUMNS)
        }

    def tensors(self, dim: int) -> list[Tensor]:
        """What this rank holds."""
        return [t.to_local() for t in self.held[dim].values()]

    def begin(self, folder: Path) -> Callable[[], Any]:
        """Begin to save; call the result to wait for the end."""
        dcp = torch_checkpoints()
        writer = dcp.FileSystemWriter(folder)
        future: Any = dcp.async_save(self.held[ROWS], storage_writer=writer, process_group=self.group)
        return future.result

    def save(self, folder: Path) -> None:
        """From begin to end; its writer syncs files by default."""
        dcp = torch_checkpoints()
        dcp.save(self.held[ROWS], storage_writer=dcp.FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path, dim: int) -> None:
        """Into the tensors that are there."""
        dcp = torch_checkpoints()
        dcp.load(self.held[dim], checkpoint_id=folder)


class HuggingFaceReader(TorchCheckpoints):
    """The same with its reader of safetensors files."""

    name = HUGGING_FACE

    def load(self, folder: Path, dim: int) -> None:
        """From the one checkpoint in a folder of ours."""
        dcp = torch_checkpoints()
        (saved,) = (path for path in folder.iterdir() if path.is_dir())
        dcp.load(self.held[dim], storage_reader=dcp.HuggingFaceStorageReader(str(saved)))


def together(fn: Callable[[], Any]) -> float:
    """Milliseconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    fn()
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder that all ranks see, removed at the end."""
    FOLDER.mkdir(exist_ok=True)
    path = [tempfile.mkdtemp(prefix="checkpoint-", dir=FOLDER) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    try:
        yield Path(path[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(path[0], ignore_errors=True)


@contextlib.contextmanager
def bytes_read() -> Iterator[list[int]]:
    """What this process reads of files while it lasts, as its only item.

    Ours are counted where they are read, since the system counts what comes from other ranks as well; in DCP's, which
    exchanges no more than its plan, are all that the system counts.
    """
    found, read = [0], os.preadv
    io = Path("/proc/self/io")

    def counted(*arguments: Any) -> int:
        n = read(*arguments)
        found[0] += n
        return n

    def system() -> int:
        return int(io.read_text().split("rchar:")[1].split()[0]) if io.exists() else 0

    before = system()
    os.preadv = counted
    try:
        yield found
    finally:
        os.preadv = read
        found[0] = found[0] or system() - before


def check(contender: Any, other: Any, dim: int) -> None:
    """What was loaded is what the other one holds.  Raises AssertionError."""
    for a, b in zip(contender.tensors(dim), other, strict=True):
        assert torch.equal(a, b), f"{contender.name} loaded something else"
        a.zero_()  # so that the next load has to fill it


def measure(effort: Effort) -> Samples:
    """Milliseconds by what is done, and bytes read by bytes needed."""
    count, side = effort.pick((48, 1024), (8, 512), (2, 32))

    def make() -> Matrices:
        return Matrices(count, side, effort.seed)

    writers: list[Any] = [OurCheckpoints(make), TorchCheckpoints(make)]
    reader = HuggingFaceReader(make)
    right = {d: [t.clone() for t in reader.tensors(d)] for d in (ROWS, COLUMNS)}
    needed = sum(t.nbytes for t in right[ROWS])
    found: Samples = {}
    rng = effort.rng()
    for turn in range(1 + effort.pick(7, 2, 1)):
        samples: Samples = found if turn else {}  # the first turn is for imports and caches
        rng.shuffle(writers)
        with shared_folder() as folder:
            one_turn(folder, writers, reader, right, needed, samples)
    return found


def one_turn(
    folder: Path, writers: list[Any], reader: Any, right: dict[int, list[Tensor]], needed: int, found: Samples
) -> None:
    """Everything once: saves, then loads of what was saved."""

    def note(case: str, name: str, value: float) -> None:
        found.setdefault(case, {}).setdefault(name, []).append(value)

    for w in writers:
        note("save", w.name, together(lambda w=w: w.save(folder / w.name)))  # type: ignore[misc]
    loads = [(w, folder / w.name) for w in writers] + [(reader, folder / OURS)]
    for dim, case in ((ROWS, "load"), (COLUMNS, "resharded load")):
        for w, path in loads:
            with bytes_read() as count:
                note(case, w.name, together(lambda w=w, path=path, dim=dim: w.load(path, dim)))  # type: ignore[misc]
            if w is not reader:  # which maps the files instead
                note(f"{case}: bytes read / needed", w.name, count[0] / needed)
            check(w, right[dim], dim)
    for w in writers:
        for t, value in zip(w.tensors(ROWS), right[ROWS], strict=True):
            t.copy_(value)
        held: list[Tensor] = w.tensors(ROWS)
        note("stall", COPY, together(lambda held=held: [t.clone() for t in held]))  # type: ignore[misc]
        ends: list[Callable[[], Any]] = []
        path = folder / f"{w.name}-later"
        w.begin(path)()  # a run saves many times: the first one is not what the others cost
        note("stall", w.name, together(lambda w=w, path=path, ends=ends: ends.append(w.begin(path))))  # type: ignore[misc]
        ends[0]()
        dist.barrier()


def rows(samples: Samples) -> Iterator[Row]:
    """Beside DCP; the stall beside a copy."""
    for case, target in (("save", 0.9), ("load", 0.6), ("resharded load", 0.9)):
        peers = ratios(samples, case, (HUGGING_FACE,), DCP)
        yield Row(f"checkpoint: {case} / DCP", ratio(samples, case, OURS, DCP), target, peers)
    # By columns all rows are read, from one page cache, in place of an exchange.
    for case, target in (("load: bytes read / needed", 1.05), ("resharded load: bytes read / needed", 2.05)):
        of = {name: sorted(v)[len(v) // 2] for name, v in samples[case].items()}
        yield Row(f"checkpoint, {case}", of.pop(OURS), target, of)
    stalls = ratios(samples, "stall", (OURS, DCP), COPY)
    yield Row("checkpoint: stall of a save that goes on / copy of what a rank holds", stalls.pop(OURS), 1.1, stalls)


BENCHMARKS = [Benchmark("checkpoint", "ms", measure, rows, processes=2)]
