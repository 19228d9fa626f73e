"""Runs the reference benchmarks with our contenders, keeps their raw output, and tabulates target, figure and verdict.

Each benchmark is a harness of the shared folder that is run from there, with one of the contenders next to this file.
Every figure is a ratio of contenders that the harness timed alternately in one run: compare nothing else.
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
OURS, DP, TP = "meshwright", "meshwright_dp", "meshwright_tp"
STATIC, ZERO3, STATIC_ZERO3 = "meshwright_static_dp", "meshwright_zero3", "meshwright_static_zero3"
LEAST = 0.9  # of a physical bound: less is noise
PEERS = "nocomm,ddp,fsdp2,dt_tp,mega_tp"


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes:
        what: what it is the ratio of, or its unit.
        figure: ours.
        target: the largest figure that meets the target; None where there is none.
        peer: what a peer has in the same run.
        least: smaller figures are impossible, so they show a busy machine.
    """

    what: str
    figure: float
    target: float | None = None
    peer: str = ""
    least: float | None = None

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, ``noise``, or empty without a target."""
        if self.least is not None and self.figure < self.least:
            return "noise"
        return "" if self.target is None else "met" if self.figure <= self.target else "missed"


@dataclass(frozen=True)
class Job:
    """One run of a harness: its command, a shorter one, and how to read what it prints."""

    name: str
    command: tuple[str, ...]
    quick: tuple[str, ...]
    read: Callable[[str], Iterator[Row]]
    processes: int = 1

    def argv(self, quick: bool) -> list[str]:
        """The command line, to be run in the folder of the harnesses."""
        start = [sys.executable]
        if self.processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        return [*start, *(self.quick if quick else self.command)]


# ---------------------------------------------------------------------------------------------- reading


def microseconds(text: str) -> dict[str, dict[str, float]]:
    """Case to contender to time, from the table that the single-process harnesses print."""
    found: dict[str, dict[str, float]] = {}
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("case "):
            names = [n for n in line[28:].split() if "/" not in n]
        elif names and not line.startswith(("geomean", "#", "==")):
            values = line[28:].split()
            if len(values) >= len(names):
                found[line[:28].strip()] = {n: float(v) for n, v in zip(names, values, strict=False)}
    if not found:
        raise ValueError("there is no table in it")
    return found


def medians(text: str, after: str = "median") -> dict[str, float]:
    """Contender to the median of its steps in milliseconds; of CPU time per rank with ``after="cpu/rank"``."""
    found = re.findall(rf"^(\S+)(?=\s+median).*?\s{after}\s+([\d.]+) ms", text, re.MULTILINE)
    if not found:
        raise ValueError("there are no medians in it")
    return {name: float(ms) for name, ms in found}


def read_ops(label: str) -> Callable[[str], Iterator[Row]]:
    """Reads the geometric means of the per-op harness."""

    def read(text: str) -> Iterator[Row]:
        line = re.search(r"^geomean ratio vs local (\{.*\})", text, re.MULTILINE)
        if line is None:
            raise ValueError("there is no geometric mean in it")
        means = ast.literal_eval(line[1])
        peer = ", ".join(f"DTensor {v:.2f}" for k, v in means.items() if k != OURS)
        target = 2.3 if "forward," in label else None
        yield Row(f"one op, {label}: geometric mean / plain local", means[OURS], target, peer)

    return read


def read_block(text: str) -> Iterator[Row]:
    """Reads the transformer-block harness."""
    cases = microseconds(text)
    for case, what, target in (
        ("block fwd", "forward", None),
        ("(bwd = diff)", "backward", 1.1),
        ("block fwd+bwd", "forward + backward", 1.4),
    ):
        t = cases[case]
        peer = ", ".join(f"DTensor {t[k] / t['megatron']:.2f}" for k in ("dt_full",) if k in t)
        yield Row(f"transformer block, {what} / hand-written", t[OURS] / t["megatron"], target, peer)


def read_opt(text: str) -> Iterator[Row]:
    """Reads the optimizer part of the transformer-block harness."""
    cases = microseconds(text)
    for case, what, target in (
        ("AdamW foreach step", "AdamW, foreach", 1.1),
        ("AdamW fused step", "AdamW, fused", 1.1),
        ("clip_grad_norm_ foreach", "clip_grad_norm_", 1.5),
    ):
        t = cases[case]
        peer = f"DTensor {t['dt_full'] / t['local']:.2f}" if "dt_full" in t else ""
        yield Row(f"{what} / plain local", t[OURS] / t["local"], target, peer)


def read_step(label: str) -> Callable[[str], Iterator[Row]]:
    """Reads the harness of whole steps on real processes."""

    def read(text: str) -> Iterator[Row]:
        t, cpu = medians(text), medians(text, "cpu/rank")
        others = [f"FSDP2 {t['fsdp2'] / t['ddp']:.2f}"] if "fsdp2" in t else []
        yield Row(f"data-parallel step{label} / DDP", t[DP] / t["ddp"], 1.03, ", ".join(others))
        yield Row("the same in CPU time per rank", cpu[DP] / cpu["ddp"])
        others = [f"DTensor {t['dt_tp'] / t['mega_tp']:.2f}"] if "dt_tp" in t else []
        yield Row(f"tensor-parallel step{label} / hand-written", t[TP] / t["mega_tp"], 1.05, ", ".join(others))
        yield Row("the same in CPU time per rank", cpu[TP] / cpu["mega_tp"])
        for name, peer, what, target in (
            (STATIC, "ddp", f"captured step{label} / DDP", 1.0),
            (ZERO3, "fsdp2", f"ZeRO-3 step{label} / FSDP2", 1.0),
            (STATIC_ZERO3, "fsdp2", f"captured ZeRO-3 step{label} / FSDP2", 0.8),
        ):
            if name in t and peer in t:
                yield Row(what, t[name] / t[peer], target)
                yield Row("the same in CPU time per rank", cpu[name] / cpu[peer])

    return read


def read_memory(text: str) -> Iterator[Row]:
    """Reads the peak memory of one contender."""
    line = re.search(r"^mem (\S+)\s+peak rss delta\s+([\d.]+) MiB", text, re.MULTILINE)
    if line is None:
        raise ValueError("there is no peak in it")
    yield Row(f"peak memory over an idle process, {line[1]}, MiB", float(line[2]))


def read_wire(text: str) -> Iterator[Row]:
    """Reads the overlap harness."""
    bound = re.search(r"^physical lower bound.*: ([\d.]+) ms", text, re.MULTILINE)
    exposed = re.findall(r"^(\S+)\s+median.*exposed\s+(-?[\d.]+) ms", text, re.MULTILINE)
    ratios = {name: float(ms) / float(bound[1]) for name, ms in exposed} if bound else {}
    ours = {k: v for k, v in ratios.items() if k.startswith(OURS)}
    if not ours:
        raise ValueError("there are no exposed times of ours in it")
    peer = ", ".join(f"{k} {v:.2f}" for k, v in ratios.items() if k.startswith("ddp"))
    # Below the bound is noise; it is told only where there is nothing else.
    possible = {k: v for k, v in ours.items() if v >= LEAST} or ours
    best = min(possible, key=lambda k: ours[k])
    size = best.removeprefix(f"{OURS}_")
    yield Row(f"exposed communication / bound, best buckets ({size})", ours[best], 1.5, peer, least=LEAST)
    sizes = ", ".join(f"{k.removeprefix(f'{OURS}_')} {v:.2f}" for k, v in ours.items())
    yield Row("the same, worst buckets", max(ours.values()), None, f"ours: {sizes}")


# ---------------------------------------------------------------------------------------------- jobs


def jobs() -> list[Job]:
    """All runs, in the order of the table."""

    def contender(name: str) -> tuple[str, str]:
        return "--extra", str(HERE / f"{name}.py")

    made = []
    contenders = ",".join((PEERS, DP, TP, STATIC, ZERO3, STATIC_ZERO3))
    base: tuple[str, ...]
    few: tuple[str, ...]
    for mesh in ("1d", "2d"):
        for mode, what in (("fwd", "forward"), ("fwdbwd", "forward + backward")):
            base = ("bench_ops.py", "--mesh", mesh, "--mode", mode, *contender("ops"))
            few = (*base, "--only", "add,linear,view,sum")
            made.append(Job(f"ops-{mesh}-{mode}", base, few, read_ops(f"{what}, {mesh} mesh")))
    for part, read in (("block", read_block), ("opt", read_opt)):
        base = ("bench_block.py", "--part", part, *contender("block"))
        few = (*base, "--cont", f"local,megatron,{OURS}") if part == "block" else base
        made.append(Job(part, base, few, read))
    for acc in (1, 4):
        base = ("bench_step.py", "--acc", str(acc), *contender("step"), "--cont", contenders)
        label = f", {acc} micro-batches" if acc > 1 else ""
        whole, few = (*base, "--steps", "24"), (*base, "--steps", "4")
        made.append(Job(f"step-acc{acc}", whole, few, read_step(label), processes=2))
    for name in ("ddp", DP, STATIC, "fsdp2", ZERO3, STATIC_ZERO3):
        base = ("bench_step.py", *contender("step"), "--mem", "--cont", name)
        made.append(Job(f"mem-{name}", base, base, read_memory, processes=2))
    base = ("wire.py", "--beta-GBps", "0.4", *contender("wire"))
    made.append(Job("wire", (*base, "--rounds", "21"), (*base, "--rounds", "3"), read_wire))
    return made


def chosen(all_jobs: Iterable[Job], only: str | None) -> list[Job]:
    """The jobs named in ``only``, in full or by how they begin.  Raises ValueError for a word without a job."""
    listed = list(all_jobs)
    if only is None:
        return listed
    names: set[str] = set()
    for word in filter(None, only.split(",")):
        found = {job.name for job in listed if job.name == word} or {j.name for j in listed if j.name.startswith(word)}
        if not found:
            raise ValueError(f"--only {word}: no such benchmark; there are {', '.join(j.name for j in listed)}")
        names |= found
    return [job for job in listed if job.name in names]


def run(job: Job, folder: Path, quick: bool, timeout: float) -> str:
    """Run one job in the folder of the harnesses; a line for whoever watches."""
    argv = job.argv(quick)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    begin = time.monotonic()
    try:
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        text, error, status = "", "", f"did not end within {timeout:g} s"
    else:
        text, error, status = done.stdout, done.stderr, "ok" if not done.returncode else f"exit code {done.returncode}"
    command = " ".join(["python", *argv[1:]]).replace(str(HERE), HERE.name)
    head = f"# {command}\n# {'quick; ' if quick else ''}{status}\n"
    (OUT / f"{job.name}.txt").write_text(head + text + ("" if status == "ok" else f"\n# stderr:\n{error}"))
    return f"{job.name}: {status} ({time.monotonic() - begin:.0f} s)"


def machine() -> str:
    """What the figures were taken on."""
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return (
        f"Python {platform.python_version()}, torch {version('torch')}, {platform.machine()}, "
        f"{os.cpu_count()} cores{load}."
    )


def table(all_jobs: Iterable[Job]) -> tuple[str, bool]:
    """The table of every job whose output is there (of this run or an earlier one), and whether all is well."""
    lines = ["| what | target | figure | | peers, same run | raw output |", "|---|---|---|---|---|---|"]
    notes, well = [], True
    for job in all_jobs:
        path = OUT / f"{job.name}.txt"
        if not path.exists():
            continue
        text = path.read_text()
        try:
            rows = list(job.read(text))
        except (ValueError, KeyError, SyntaxError) as error:
            notes.append(f"- `{job.name}`: cannot be read ({type(error).__name__}: {error}); see out/{path.name}")
            well = False
            continue
        quick = " (quick)" if text.split("\n", 2)[1].startswith("# quick") else ""
        for row in rows:
            target = f"≤ {row.target:g}" if row.target is not None else ""
            figure = f"{row.figure:.3f}{quick}"  # so precise that it cannot look equal to its target
            lines.append(f"| {row.what} | {target} | {figure} | {row.verdict} | {row.peer} | {path.name} |")
            well = well and row.verdict != "missed"
    body = ["# Benchmarks", "", "Ratios; smaller is better. " + machine(), "", *lines]
    return "\n".join([*body, *(["", *notes] if notes else [])]) + "\n", well


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit code is 1 where a target is missed or an output cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(job.name for job in jobs())
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: does it run, not how fast")
    parser.add_argument("--only", metavar="NAMES", help=f"names, or how they begin, separated by commas, of: {names}")
    parser.add_argument("--shared", metavar="DIR", help="the folder that has bench/ (default: $SHARED or ../shared)")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds per benchmark (default: 900)")
    parser.add_argument("--table", action="store_true", help="run nothing; tabulate the outputs that are there")
    given = parser.parse_args(argv)
    root = HERE.parent
    folder = (root / (given.shared or os.environ.get("SHARED") or "../shared") / "bench").resolve()
    try:
        selected = chosen(jobs(), given.only)
    except ValueError as error:
        parser.error(str(error))
    if not given.table:
        if not (folder / "bench_ops.py").exists():
            parser.error(f"there are no harnesses in {folder}: give the folder that has bench/ with --shared DIR")
        OUT.mkdir(exist_ok=True)
        for job in selected:
            print(run(job, folder, given.quick, given.timeout), file=sys.stderr, flush=True)
    text, well = table(jobs())
    OUT.mkdir(exist_ok=True)
    (OUT / "table.md").write_text(text)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
