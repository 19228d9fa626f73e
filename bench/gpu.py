"""``make gpu``: measure what one CUDA device can show; without one, run the same checks shrunken on the CPU.

It starts on a bare machine, from a checkout and without an installation: ``PYTHONPATH=src python3 -m bench.gpu`` needs
torch, numpy, rich, typer and xxhash.  Checks compare a mesh with one device; four processes share it (gloo), or
have one each (NCCL).  Benchmarks are one process each.  Each has its own time limit, the most telling run first, the
report (text, and JSON beside it) is rewritten after each, so that an interrupted run leaves what it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import meshwright as mw
from meshwright.rules.attention_blocks import QueryRows, backward_of, forward_of, groups_of
from meshwright.rules.attention_kernels import PLAIN, TABLE
from meshwright.train import TrainConfig
from meshwright.train.loop import train
from meshwright.train.model import GPT, Llama, loss_of

from .report import machine
from .worker import CONTEXT

Sizes = dict[str, int]
Found = dict[str, Any]
ROOT = Path(__file__).parents[1]
SECONDS = 480.0  # for everything: what would start later is left out, and the report says so
EACH = 120.0  # for one of them
BATCH = 12


@dataclass(frozen=True)
class Where:
    """The device, and whether everything is shrunken."""

    device: str
    small: bool

    def finish(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------------- checks, by each rank


def trained(mesh: mw.Mesh, where: Where, **options: Any) -> Found:
    """``meshwright train --verify``: loss and gradients of every step against one device."""
    told: Found = {}
    sizes = tuple(zip(mesh.axes, mesh.sizes, strict=True))
    small: Found = {"layers": 1, "hidden": 24, "seq": 16} if where.small else {}
    config = TrainConfig(mesh=sizes, device=where.device, steps=3, verify=True, **small | options)
    summary = train(config, mesh, lambda kind, values: told.update({kind: values}))
    verdict = told["end"]["verdict"] if told else None
    found = {"loss": summary.max_rel_loss_diff, "gradients": summary.max_rel_grad_diff}
    return {"passed": verdict is None or verdict.passed, **found}


def drawn(mesh: mw.Mesh, where: Where) -> Found:
    """Initial values and dropout by the device's generators: the numbers of one device on every layout."""
    zeros = torch.zeros((53, 47) if where.small else (1003, 517), device=where.device)
    placements = (mw.Replicate(), mw.Shard(0), mw.Shard(1))
    wrong = []
    for name in ("uniform_", "normal_", "dropout"):

        def draw(x: Any, name: str = name) -> Any:
            torch.manual_seed(3)
            return nn.functional.dropout(x + 1, 0.3) if name == "dropout" else getattr(x, name)()

        with mw.reproducible_random():
            want = draw(zeros.clone())
        for placement in placements:
            x = mw.shard_tensor(zeros, mesh, dict.fromkeys(mesh.axes[:1], placement))
            if not torch.equal(mw.unshard(draw(x)), want):
                wrong.append(f"{name} {placement!r}")
    return {"passed": not wrong, "wrong": wrong}


def _network(where: Where, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    width = 32 if where.small else 1024
    layers = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8)]
    return nn.Sequential(*layers).to(where.device, dtype)


def _batch(model: nn.Sequential, where: Where) -> torch.Tensor:
    torch.manual_seed(1)
    first: Any = model[0]
    return torch.randn(BATCH, first.in_features).to(where.device, first.weight.dtype)


def _steps(model: nn.Module, optimizer: Any, batch: Any, count: int = 3) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _close(found: list[float], want: list[float]) -> Found:
    off = max(abs(a - b) / abs(b) for a, b in zip(found, want, strict=True))
    return {"passed": off < 1e-4, "loss": off}


def _adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def fused(mesh: mw.Mesh, where: Where) -> Found:
    """The fused AdamW on parts of parameters, ZeRO-3."""
    plain = _network(where)
    batch = _batch(plain, where)
    want = _steps(plain, _adamw(plain, fused=True), batch)
    model = mw.shard_module(_network(where), mesh, fsdp=mesh.axes[0])
    laid = mw.shard_tensor(batch, mesh, {mesh.axes[0]: mw.Shard(0)})
    return _close(_steps(model, mw.shard_optimizer(_adamw(model, fused=True)), laid), want)


def hosted(mesh: mw.Mesh, where: Where, **options: Any) -> Found:
    """Parameters that are stored on the host: their places, and the numbers of one device."""
    plain = _network(where)
    batch = _batch(plain, where)
    want = _steps(plain, _adamw(plain), batch, 5)
    model = mw.shard_module(_network(where), mesh, offload="cpu", **options)
    laid = mw.shard_tensor(batch, mesh, {mesh.axes[0]: mw.Shard(0)})
    answer = _close(_steps(model, _adamw(model), laid, 5), want)
    model(laid).square().mean().backward()
    params: Any = list(model.parameters())
    lie = {t.to_local().device.type for p in params for t in (p, p.grad)}
    pinned = where.device != "cuda" or all(p.to_local().is_pinned() for p in params)
    return {**answer, "passed": answer["passed"] and lie == {"cpu"} and pinned, "lie": sorted(lie), "pinned": pinned}


def overlapped(mesh: mw.Mesh, where: Where) -> Found:
    """Reductions that go on beside the backward, in small buckets, on a stream that is not the default one."""
    plain = _network(where)
    batch = _batch(plain, where)
    want = _steps(plain, _adamw(plain), batch, 5)
    where.finish()
    with torch.cuda.stream(torch.cuda.Stream()) if where.device == "cuda" else contextlib.nullcontext():
        model = mw.shard_module(_network(where), mesh, bucket_bytes=1024)
        laid = mw.shard_tensor(batch, mesh, {mesh.axes[0]: mw.Shard(0)})
        found = _steps(model, mw.shard_optimizer(_adamw(model)), laid, 5)
        where.finish()
    return _close(found, want)


def captured(mesh: mw.Mesh, where: Where, **options: Any) -> Found:
    """A captured step, by default as one flat graph of ops."""
    plain = _network(where)
    batch = _batch(plain, where)
    want = _steps(plain, _adamw(plain), batch)
    model = _network(where)
    step = mw.compile_step(
        model, lambda m, b: m(b).square().mean(), _adamw(model), batch, mesh=mesh, batch={mesh.axes[0]: mw.Shard(0)},
        **options,
    )  # fmt: skip
    return _close([float(step(batch)) for _ in range(3)], want)


def graphed(mesh: mw.Mesh, where: Where, **options: Any) -> Found:
    """A captured step whose local ops are CUDA graphs; there are none on the CPU."""
    if where.device == "cuda":
        return captured(mesh, where, **options)
    return {**captured(mesh, where), "graphs": "none on the CPU"}


def attended(mesh: mw.Mesh, where: Where) -> Found:
    """Each kernel of attention that takes this device: the last rows of a sequence, against float64 in own ops."""
    rows, keys = (24, 64) if where.small else (1024, 4096)
    lengths = [keys // 2 + 3, 1, keys - keys // 2 - 4]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    ways: dict[str, tuple[Any, int]] = {"causal": (None, 0), "window": (None, keys // 8), "documents": (ids, 0)}
    shapes = (2, 4, rows, 64), (2, 2, keys, 64), (2, 2, keys, 64), (2, 4, rows, 64)
    given = [torch.randn(shape, device=where.device, dtype=torch.float64) for shape in shapes]
    given[2] += 1  # else the result is nearly zero, and what a backward makes of it is not seen
    found: Found = {"passed": True}
    for kernel in (*(k for k in TABLE if k.device == where.device), PLAIN):
        dtype = torch.bfloat16 if where.device == "cuda" and kernel is not PLAIN else torch.float32
        for way, (documents, window) in ways.items():
            q, k, v, grad = (t.to(dtype) for t in given)
            which = QueryRows((0, keys - rows, rows), None, documents, True, window)
            answers = []
            for by, of in ((PLAIN, torch.float64), (kernel, dtype)):
                qs, ks, vs = q.to(of), k.to(of), v.to(of)
                plan = groups_of(by, which, qs, ks)
                made, sums = forward_of(by, plan, qs, ks, vs, None)
                answers.append([made, sums, *backward_of(by, plan, grad.to(of), qs, ks, vs, made, sums, None)])
            off = max(float((a - b).abs().max() / b.abs().max()) for b, a in zip(*answers, strict=True))
            found[f"{kernel.name}, {way}"] = off
            found["passed"] = found["passed"] and off < (3e-2 if dtype == torch.bfloat16 else 1e-4)
    return found


Check = Callable[[mw.Mesh, Where], Found]
BOTH, DATA = {"dp": 2, "tp": 2}, {"dp": 4}
CHECKS: dict[str, tuple[Sizes, Check]] = {
    "--verify dp=2,tp=2": (BOTH, partial(trained, dtype="float64")),
    "--verify dp=2,tp=2 --sequence-parallel --dropout 0.1": (
        BOTH, partial(trained, dtype="float64", sequence_parallel=True, dropout=0.1),
    ),
    "--verify tp=3": ({"tp": 3}, partial(trained, dtype="float64")),
    "--verify dp=4 --fsdp dp --accumulate 4": (
        DATA, partial(trained, dtype="float64", fsdp="dp", accumulate=4),
    ),
    "--verify dp=2,tp=2 --static": (BOTH, partial(trained, dtype="float64", static=True)),
    "--verify dp=2,tp=2 --dtype bfloat16": (BOTH, partial(trained, dtype="bfloat16")),
    "initial values and dropout": (BOTH, drawn),
    "kernels of attention": ({"cp": 1}, attended),
    "fused AdamW, ZeRO-3": (DATA, fused),
    "stored on the host": (DATA, hosted),
    "stored on the host, ZeRO-3": (DATA, partial(hosted, fsdp="dp")),
    "stored on the host, ZeRO-3, reduced in float64": (
        DATA, partial(hosted, fsdp="dp", precision=mw.Precision(reduce=torch.float64)),
    ),
    "--verify dp=2,tp=2 --fsdp dp --offload cpu --accumulate 2": (
        BOTH, partial(trained, dtype="float64", fsdp="dp", offload="cpu", accumulate=2),
    ),
    "overlapped reductions on a stream": (DATA, overlapped),
    "captured step": (DATA, captured),
    "captured step, inductor": (DATA, partial(captured, backend="inductor")),
    "captured step, CUDA graphs": (DATA, partial(graphed, backend="cudagraphs")),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- benchmarks, one process


def _llama(where: Where) -> tuple[nn.Module, torch.Tensor]:
    sizes: Found = {"layers": 20, "hidden": 2048, "heads": 16, "seq": 1024}
    if where.small:
        sizes = {"layers": 2, "hidden": 32, "heads": 2, "seq": 16}
    config = TrainConfig(dtype="bfloat16", **sizes)
    vocabulary = 256 if where.small else 32000
    torch.manual_seed(0)
    model = GPT(config, where.device, Llama(vocabulary))
    return model, torch.randint(vocabulary, (4, config.seq), device=where.device)


def _plain_step(where: Where, compiled: bool) -> tuple[Callable[[], Any], int, int]:
    model, ids = _llama(where)
    called: Any = torch.compile(model) if compiled else model
    step = partial(_trained, called, _adamw(model, fused=True), ids)
    return step, ids.numel(), sum(p.numel() for p in model.parameters())


def _trained(model: Any, optimizer: torch.optim.Optimizer, ids: Any) -> Any:
    """A step; its loss."""
    loss = loss_of(model, ids, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _eager_step(where: Where) -> tuple[Callable[[], Any], int, int]:
    plain, ids = _llama(where)
    count, mesh = sum(p.numel() for p in plain.parameters()), mw.init_mesh({"dp": 1}, device=where.device)
    model = mw.shard_module(plain, mesh)
    optimizer = mw.shard_optimizer(_adamw(model, fused=True))
    laid = mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})
    return partial(_trained, model, optimizer, laid), ids.numel(), count


def _captured_step(where: Where, **options: Any) -> tuple[Callable[[], Any], int, int]:
    model, ids = _llama(where)
    count, mesh = sum(p.numel() for p in model.parameters()), mw.init_mesh({"dp": 1}, device=where.device)
    made = mw.compile_step(
        model, lambda m, b: loss_of(m, *b), _adamw(model, fused=True), (ids, ids), mesh=mesh,
        batch={"dp": mw.Shard(0)}, **options,
    )  # fmt: skip
    return lambda: made((ids, ids)), ids.numel(), count


def _graphs_step(where: Where) -> tuple[Callable[[], Any], int, int]:
    return _captured_step(where, **{"backend": "cudagraphs"} if where.device == "cuda" else {})


CONTENDERS: dict[str, Callable[[Where], tuple[Callable[[], Any], int, int]]] = {
    "plain PyTorch": partial(_plain_step, compiled=False),
    "Meshwright": _eager_step,
    "Meshwright, captured": _captured_step,
    "torch.compile": partial(_plain_step, compiled=True),
    "Meshwright, captured, inductor": partial(_captured_step, backend="inductor"),
    "Meshwright, captured, CUDA graphs": _graphs_step,
}


def timed(where: Where, contender: str) -> Found:
    """Tokens per second and peak memory of a Llama of 1B parameters in bfloat16, with AdamW."""
    step, tokens, parameters = CONTENDERS[contender](where)
    losses = [float(step()) for _ in range(3)]  # the first ones compile
    where.finish()
    count, start = (2 if where.small else 10), time.perf_counter()
    for _ in range(count):
        loss = step()
    where.finish()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if where.device == "cuda" else None
    speed: Found = {"tokens/s": round(tokens * count / seconds), "peak MiB": peak and round(peak)}
    if "graphs" in contender and where.small:
        speed["graphs"] = "none on the CPU"
    return {"passed": bool(torch.isfinite(loss.float())), **speed, "parameters": parameters, "losses": losses}


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "mm": torch.mm,
    "gelu": lambda x, _: nn.functional.gelu(x),
}


def one_op(where: Where) -> Found:
    """Microseconds that the host takes for one op of a mesh of one, and those of its kernel."""
    mesh = mw.init_mesh({"dp": 1}, device=where.device)
    size, count = (32, 50) if where.small else (2048, 2000)
    x, y = (torch.randn(size, size, device=where.device, dtype=torch.bfloat16) for _ in range(2))
    laid = mw.shard_tensor(x, mesh, {"dp": mw.Shard(0)}), mw.shard_tensor(y, mesh, {})
    found: Found = {"passed": True}
    for name, op in OPS.items():
        for who, (a, b) in (("plain", (x[:64, :64], y[:64, :64])), ("Meshwright", tuple(t[:64, :64] for t in laid))):
            for _ in range(50):
                op(a, b)
            where.finish()
            start = time.perf_counter()
            for _ in range(count):
                op(a, b)
            found[f"{name}, {who}, host us"] = round((time.perf_counter() - start) / count * 1e6, 2)
            where.finish()
        if not where.small:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000_000)  # else the kernels wait for the host
            begin.record()
            for _ in range(200):
                op(x, y)
            end.record()
            where.finish()
            found[f"{name}, kernel us"] = round(begin.elapsed_time(end) / 200 * 1e3, 2)
    return found


def overlap(where: Where) -> Found:
    """How much of the copies of parameters on the host is hidden behind a forward and a backward."""
    mesh = mw.init_mesh({"dp": 1}, device=where.device)
    seconds: dict[str, float] = {}
    for place in ("on the device", "on the host"):
        plain, ids = _llama(where)
        model = mw.shard_module(plain, mesh, offload="cpu" if place == "on the host" else None)
        laid = mw.shard_tensor(ids, mesh, {"dp": mw.Shard(0)})
        for timed_run in (False, True):
            where.finish()
            start = time.perf_counter()
            for _ in range(3 if timed_run else 1):
                loss_of(model, laid, laid).backward()
                model.zero_grad()
            where.finish()
        seconds[place] = (time.perf_counter() - start) / 3
    host = [torch.empty(p.shape, dtype=p.dtype, pin_memory=not where.small) for p in model.parameters()]
    there = [torch.empty_like(t, device=where.device) for t in host]
    where.finish()
    start = time.perf_counter()
    for _ in range(3):  # for the forward, for the backward; gradients go back
        for a, b in ((there, host), (there, host), (host, there)):
            for to, t in zip(a, b, strict=True):
                to.copy_(t, non_blocking=True)
    where.finish()
    seconds["copies alone"] = (time.perf_counter() - start) / 3
    hidden = seconds["on the device"] + seconds["copies alone"] - seconds["on the host"]
    part = hidden / min(seconds["on the device"], seconds["copies alone"])
    return {"passed": True, "hidden": round(part, 3), **{f"{k}, ms": round(s * 1e3, 2) for k, s in seconds.items()}}


ALONE: dict[str, Callable[[Where], Found]] = {
    **{name: partial(timed, contender=name) for name in CONTENDERS},
    "one op": one_op,
    "copies of offload, overlapped": overlap,
}

# ---------------------------------------------------------------------------------------------- processes


def _ranked(name: str, where: Where, rank: int, folder: Path) -> Found:
    """What one process of a check or benchmark finds."""
    if name in ALONE:
        return ALONE[name](where)
    sizes, check = CHECKS[name]
    world = torch.Size(sizes.values()).numel()
    backend = "gloo"
    if where.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "nccl" if torch.cuda.device_count() >= world else "gloo"  # which refuses two ranks on one device
    dist.init_process_group(backend, init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    found = check(mw.init_mesh(sizes, device=where.device), where)
    dist.barrier()
    dist.destroy_process_group()
    return {**found, "backend": backend}


def work(name: str, where: Where, rank: int, folder: Path) -> None:
    """One process; the first one and those that fail write what they found."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        found = _ranked(name, where, rank, folder)
    except BaseException as error:
        lines = traceback.format_exc().splitlines()[-12:]
        found = {"passed": False, "error": f"{type(error).__name__}: {error}".splitlines()[0], "traceback": lines}
    if rank == 0 or not found["passed"]:
        (folder / f"{rank}.new").write_text(json.dumps(found))
        (folder / f"{rank}.new").rename(folder / f"{rank}.json")  # a reader never sees half of it
    sys.stdout.flush()
    os._exit(0)  # at once, whatever its threads wait for


def found_of(name: str, where: Where, limit: float) -> Found:
    """Run a check or benchmark in processes of its own; the first failure is the answer."""
    world = 1 if name in ALONE else torch.Size(CHECKS[name][0].values()).numel()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        processes = [
            CONTEXT.Process(target=work, args=(name, where, rank, folder), daemon=True) for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.1, start + limit - time.monotonic()))
            late = any(process.is_alive() for process in processes)
            # Before the first is killed: the others would report its end as the failure.
            said = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    answer = next((s for s in said if not s["passed"]), said[0] if said and not late else None)
    answer = answer or {"passed": False, "error": f"did not end within {limit:.0f} s"}
    return {**answer, "seconds": round(time.monotonic() - start, 1)}


FIRST = (  # the most telling, in case the time is short; the others follow in their own order
    "--verify dp=2,tp=2",
    "plain PyTorch",
    "Meshwright",
    "Meshwright, captured",
    "one op",
    "copies of offload, overlapped",
    "captured step",
    "initial values and dropout",
    "kernels of attention",
    "overlapped reductions on a stream",
    "--verify dp=2,tp=2 --static",
    "--verify dp=4 --fsdp dp --accumulate 4",
    "fused AdamW, ZeRO-3",
    "stored on the host, ZeRO-3",
    "Meshwright, captured, inductor",
    "captured step, CUDA graphs",
    "Meshwright, captured, CUDA graphs",
)
LAST = ("torch.compile", "captured step, inductor")  # minutes, where a machine compiles for the first time


def names_by_worth(containing: str = "") -> list[str]:
    """Names of checks and benchmarks that contain a text, the most telling first."""
    every = [*FIRST, *(n for n in (*CHECKS, *ALONE) if n not in (*FIRST, *LAST)), *LAST]
    return [name for name in every if containing in name]


def run(where: Where, names: list[str], seconds: float, each: float = EACH) -> Iterator[tuple[str, Found]]:
    """All of them, one after the other, while there is time."""
    end = time.monotonic() + seconds
    for name in names:
        left = end - time.monotonic()
        late: Found = {"passed": True, "left out": "no time left"}
        yield name, found_of(name, where, min(each, left)) if left > 10 else late


def line_of(name: str, found: Found) -> str:
    """One line of the report."""
    rest = {k: v for k, v in found.items() if k not in ("passed", "traceback", "losses") and v not in (None, [])}
    shown = ", ".join(
        f"{k} {v:.2g}" if isinstance(v, float) and k != "seconds" else f"{k} {v}" for k, v in rest.items()
    )
    word = "passed" if found["passed"] else "FAILED"
    return f"{'left out' if 'left out' in found else word:8}  {name}: {shown}"


def about(where: Where) -> Found:
    """The machine and its device, as the run starts."""
    if where.device != "cuda":
        none = "none: on tensors of the CPU, shrunken, in place of a GPU; these figures say nothing about one"
        return {**machine(ROOT), "device": none}
    count = torch.cuda.device_count()
    return {**machine(ROOT), "device": f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"}


def write_report(out: Path, on: Found, found: dict[str, Found]) -> None:
    """Write what was measured so far: text for people at ``out``, the same as JSON beside it."""
    lines = [*(f"{k}: {v}" for k, v in on.items()), "", *(line_of(*item) for item in found.items())]
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in (
        (out, "\n".join(["# make gpu", "", "```", *lines, "```", ""])),
        (out.with_suffix(".json"), json.dumps({"machine": on, "found": found}, indent=1) + "\n"),
    ):
        beside = path.with_name(path.name + ".new")
        beside.write_text(text)
        beside.replace(path)  # a reader never sees half a report


def main(words: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure what one CUDA device can show.")
    parser.add_argument("--only", default="", help="checks and benchmarks whose names contain this")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all of them (default {SECONDS:.0f})")
    parser.add_argument("--each", type=float, default=EACH, help=f"time for one of them (default {EACH:.0f})")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "out" / "gpu.md", help="the report; .json beside it"
    )
    given = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = Where(device, small=device == "cpu")
    if where.small:
        print("there is no CUDA device: the checks run on the CPU, shrunken", flush=True)
    found: dict[str, Found] = {}
    on = about(where)
    for name, answer in run(where, names_by_worth(given.only), given.seconds, given.each):
        found[name] = answer
        print(line_of(name, answer), flush=True)
        write_report(given.out, on, found)
    print(f"report: {given.out}")
    return 0 if all(answer["passed"] for answer in found.values()) else 1


if __name__ == "__main__":
    from bench.gpu import main as entry  # what is pickled for the processes is of this module by its name

    sys.exit(entry())
