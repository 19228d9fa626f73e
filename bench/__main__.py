"""Runs the benchmarks, each in processes of its own, and tabulates figures against targets."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .core import Benchmark, Effort
from .registry import benchmarks, chosen
from .worker import BenchmarkError, samples_of

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join(b.name for b in benchmarks())
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: does it run, not how fast")
    parser.add_argument("--only", metavar="NAMES", help=f"names, or how they begin, separated by commas, of: {names}")
    parser.add_argument("--seed", type=int, default=0, help="draws the order of contenders and the data (default: 0)")
    told = "where the run is written, and its table beside (default: bench/out/run.json)"
    parser.add_argument("--json", type=Path, default=OUT / "run.json", metavar="FILE", help=told)
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="seconds per benchmark (default: 600)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--table", type=Path, metavar="FILE", help="run nothing; tabulate this run")
    which.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="run nothing; compare two runs")
    given = parser.parse_args(argv)
    try:
        given.selected = chosen(benchmarks(), given.only)
    except ValueError as error:
        parser.error(str(error))
    return given


def run(benchmark: Benchmark, effort: Effort, timeout: float) -> dict[str, Any]:
    """Start it and wait; the record of it, or of its ``error``."""
    begin = time.monotonic()
    try:
        samples = samples_of(benchmark, effort, timeout)
        return report.record(benchmark, samples, time.monotonic() - begin)
    except (BenchmarkError, ArithmeticError, LookupError) as error:  # the others go on
        return {"seconds": time.monotonic() - begin, "error": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print; the exit code is 1 where one failed or a whole run misses a target."""
    given = options(argv)
    if given.compare:
        a, b = (json.loads(path.read_text()) for path in given.compare)
        print(f"A is {given.compare[0]}, B is {given.compare[1]}.\n\n{report.comparison(a, b)}")
        return 0
    if given.table:
        found = json.loads(given.table.read_text())
    else:
        effort = Effort("quick" if given.quick else "whole", given.seed)
        found = {
            "format": report.FORMAT,
            "size": effort.size,
            "seed": given.seed,
            "machine": report.machine(HERE.parent),
        }
        found["benchmarks"] = {}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        for benchmark in given.selected:
            done = run(benchmark, effort, given.timeout)
            found["benchmarks"][benchmark.name] = done
            found["machine"]["load at end"] = report.load()
            given.json.write_text(json.dumps(found, indent=1))  # now: what was measured outlives an interruption
            outcome = "failed" if "error" in done else "ok"
            print(f"{benchmark.name}: {outcome} ({done['seconds']:.0f} s)", file=sys.stderr, flush=True)
        given.json.with_suffix(".md").write_text(report.table(found))
    print(report.table(found))
    for name, of in found["benchmarks"].items():
        if "error" in of:
            print(f"--- {name}\n{of['error']}", file=sys.stderr)
    return 0 if report.well(found) else 1


if __name__ == "__main__":
    # Before the server of processes starts, which has it from here.
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process is left behind
    sys.exit(main())
