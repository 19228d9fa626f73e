"""``meshwright calibrate``: this machine's links and kernels, measured into a file that ``mw.hardware`` reads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import HardwareError, MeshwrightError

from .options import BAD_INPUT, complain, terminal, writing_to

app = typer.Typer(rich_markup_mode="rich", add_completion=False)
_SIZE, _LARGE, _REPEAT = (
    768,
    1 << 22,
    5,
)  # of matrices, elements of a large tensor, measurements of which the best counts
_SECONDS = 60.0  # that processes have to meet


@app.command()
def calibrate(
    save: Annotated[str, typer.Option("--save", metavar="FILE", help="Where to write: a name that ends in .json.")],
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=2, max=64, help="Between how many links are measured.")
    ] = 2,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="Of a device.  Default: what each process can have.")
    ] = None,
) -> None:
    """Measure this machine's links and kernels, for --hardware of plan.

    Links are those of gloo between processes, kernels those of one core.

    [dim]Exit codes: 0 done; 2 bad input.[/]
    """
    try:
        if not save.endswith(".json"):
            raise HardwareError(f"--save {save}: a name that ends in .json was expected, as in --save machine.json")
        if not Path(save).resolve().parent.is_dir():
            raise HardwareError(f"--save {save}: there is no folder {Path(save).resolve().parent}")
        found = measured(Path(save).stem, processes, memory)
        with writing_to("--save", save):
            found.save(save)
    except MeshwrightError as error:
        complain(error)
        raise typer.Exit(BAD_INPUT) from None
    link = found.links[0]
    terminal().print(
        f"{save}: products {found.speed('float32') / 1e9:.1f} GFLOP/s in float32, memory "
        f"{found.memory_bandwidth / 1e9:.1f} GB/s, an op {found.launch * 1e6:.1f} us; between {processes} processes "
        f"{link.latency * 1e6:.0f} us and {link.bandwidth / 1e9:.2f} GB/s",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def measured(name: str, processes: int, memory: str | None) -> Any:
    """This machine.

    Raises:
        HardwareError: If its processes cannot meet.
    """
    import torch

    from meshwright.machines import Hardware, LinkLevel, bytes_from

    torch.set_num_threads(1)
    flops = {}
    for dtype in ("float32", "float64", "bfloat16"):
        a = torch.ones(_SIZE, _SIZE, dtype=getattr(torch, dtype))
        flops[dtype] = 2.0 * _SIZE**3 / _best(lambda a=a: a @ a)  # type: ignore[misc]
    flops["*"] = flops["float32"]
    large, small = torch.ones(_LARGE), torch.ones(8)
    bandwidth = 3.0 * 4 * _LARGE / _best(lambda: torch.add(large, large))
    launch = _best(lambda: [torch.add(small, small) for _ in range(100)]) / 100
    latency, rate = _links(processes)
    held = (
        bytes_from(memory, "--memory")
        if memory
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    )
    note = f"measured by meshwright calibrate with {processes} processes, gloo, torch {torch.__version__}"
    return Hardware(name, (LinkLevel(0, latency, rate),), float(held), flops, bandwidth, launch, note)


def _best(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_REPEAT):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _links(processes: int) -> tuple[float, float]:
    """Seconds of a small collective for each doubling of ranks, and bytes per second of a large one."""
    import math
    import tempfile

    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        answers = context.Queue()
        started = [
            context.Process(target=_meet, args=(rank, processes, os.path.join(folder, "store"), answers), daemon=True)
            for rank in range(processes)
        ]
        try:
            for p in started:
                p.start()
            small, large, nbytes = answers.get(timeout=_SECONDS)
        except Exception as error:
            raise HardwareError(f"calibrate: {processes} processes could not measure their links: {error!r}") from error
        finally:
            for p in started:
                p.join(5.0)
                with contextlib.suppress(ValueError):
                    p.kill()
    sent = 2 * (processes - 1) / processes * nbytes
    return small / math.ceil(math.log2(processes)), sent / max(large - small, 1e-9)


def _meet(rank: int, processes: int, store: str, answers: Any) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes,
        timeout=datetime.timedelta(seconds=_SECONDS),
    )  # fmt: skip
    small, large = torch.ones(1), torch.ones(_LARGE)
    times = [_best(lambda t=t: dist.all_reduce(t, op=dist.ReduceOp.MAX)) for t in (small, large)]  # type: ignore[misc]
    dist.barrier()
    if rank == 0:
        answers.put((*times, large.numel() * 4))
    dist.barrier()
    dist.destroy_process_group()
