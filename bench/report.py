"""What a run leaves: one JSON object with all samples, the table of targets, and a page that compares two runs."""

from __future__ import annotations

import collections
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .core import Benchmark, Samples

FORMAT = 1
BUSY = 1.0  # load at the start above which figures are not to be trusted
DRAWS = 60
# Two runs of the same code differ by more than the rounds within one of them.
FLOOR = 0.03


def load() -> float:
    """Average number of processes that want a core, in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else math.nan


def machine(root: Path) -> dict[str, Any]:
    """What the figures are taken on, as it starts."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(root),
        "load at start": load(),
    }


def commit(root: Path) -> str:
    """Of the checkout, with a ``+`` where files differ from it; empty outside of one."""
    asked = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def medians(samples: Samples) -> Samples:
    """The same with one value in place of the rounds."""
    return {case: {name: [statistics.median(v)] for name, v in of.items()} for case, of in samples.items()}


def resampled(samples: Samples, rng: random.Random) -> Samples:
    """Rounds drawn with repetition, the same for all contenders of a case: one draw of a bootstrap."""
    made: Samples = {}
    for case, of in samples.items():
        counts = {len(v) for v in of.values()}
        picks = {n: rng.choices(range(n), k=n) for n in counts}
        made[case] = {name: [v[i] for i in picks[len(v)]] for name, v in of.items()}
    return made


def noise(benchmark: Benchmark, samples: Samples) -> dict[str, float | None]:
    """Relative standard error of each row's figure, from the rounds alone; None where there is one round."""
    rng, drawn = random.Random(0), collections.defaultdict(list)
    for _ in range(DRAWS):
        for row in benchmark.rows(resampled(samples, rng)):
            drawn[row.what].append(row.figure)
    single = all(len(v) == 1 for of in samples.values() for v in of.values())
    return {
        what: None if single or len(figures) < 2 else statistics.stdev(figures) / abs(statistics.median(figures) or 1.0)
        for what, figures in drawn.items()
    }


def record(benchmark: Benchmark, samples: Samples, seconds: float) -> dict[str, Any]:
    """What the JSON file has of a benchmark that ran."""
    errors = noise(benchmark, samples)
    rows = [asdict(row) | {"verdict": row.verdict, "noise": errors.get(row.what)} for row in benchmark.rows(samples)]
    found = {case: {name: v[0] for name, v in of.items()} for case, of in medians(samples).items()}
    return {"unit": benchmark.unit, "seconds": seconds, "rows": rows, "medians": found, "samples": samples}


def table(run: dict[str, Any]) -> str:
    """Target, figure and verdict of every row, with what must be known of the machine."""
    lines = ["| what | target | figure | | peers, same run | benchmark |", "|---|---|---|---|---|---|"]
    notes = []
    for name, of in run["benchmarks"].items():
        if "error" in of:
            notes.append(f"- `{name}` failed: {of['error'].strip().splitlines()[-1]}")
        for row in of.get("rows", ()):
            target = f"≤ {row['target']:g}" if row["target"] is not None else ""
            error = f" ± {row['noise'] * row['figure']:.2g}" if row["noise"] else ""
            peers = ", ".join(f"{peer} {value:.2f}" for peer, value in row["peers"].items())
            # so precise that it cannot look equal to its target
            cells = (row["what"], target, f"{row['figure']:.3f}{error}", row["verdict"], peers, name)
            lines.append(f"| {' | '.join(cells)} |")
    kind = "" if run["size"] == "whole" else "**Quick run: it shows that all runs, its figures mean little.** "
    if run["machine"]["load at start"] > BUSY:
        kind += f"**The machine was busy at the start (load {run['machine']['load at start']}).** "
    head = ["# Benchmarks", "", f"{kind}Ratios; smaller is better. {machine_line(run)}", "", *lines]
    return "\n".join([*head, *(["", *notes] if notes else [])]) + "\n"


def machine_line(run: dict[str, Any]) -> str:
    """One sentence."""
    m = run["machine"]
    return (
        f"{m['cpu']}, {m['cores']} cores, Python {m['python']}, torch {m['torch']}, commit {m['commit'] or '?'}, "
        f"seed {run['seed']}, load {m['load at start']} to {m.get('load at end', '?')}."
    )


def well(run: dict[str, Any]) -> bool:
    """All ran and, in a whole run, no target is missed."""
    for of in run["benchmarks"].values():
        missed = any(row["verdict"] == "missed" for row in of.get("rows", ()))
        if "error" in of or (missed and run["size"] == "whole"):
            return False
    return True


# ---------------------------------------------------------------------------------------------- two runs


def verdict(a: dict[str, Any], b: dict[str, Any]) -> str:
    """``better``, ``worse``, or empty: within three standard errors of both runs and what two runs differ by anyway."""
    if min(a["figure"], b["figure"]) <= 0:
        return ""
    change = math.log(b["figure"] / a["figure"])
    known = math.hypot(a["noise"] or 0.0, b["noise"] or 0.0)
    return "" if abs(change) <= 3 * known + FLOOR else "worse" if change > 0 else "better"


def compared(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Lines of the tables: rows of both runs, and peers, which should not have changed."""
    for name in (n for n in a["benchmarks"] if n in b["benchmarks"]):
        before = {row["what"]: row for row in a["benchmarks"][name].get("rows", ())}
        for row in b["benchmarks"][name].get("rows", ()):
            old = before.get(row["what"])
            if old is None:
                continue
            change = f"{row['figure'] / old['figure']:.3f}" if old["figure"] else ""
            both = [(p, old["peers"][p], value) for p, value in row["peers"].items() if p in old["peers"]]
            peers = ", ".join(f"{p} {x:.2f} → {y:.2f}" for p, x, y in both)
            yield (
                f"| {row['what']} | {old['figure']:.3f} | {row['figure']:.3f} | {change} | {verdict(old, row)} | "
                f"{peers} | {name} |"
            )


def comparison(a: dict[str, Any], b: dict[str, Any], names: Sequence[str] = ("A", "B")) -> str:
    """A page for two runs: figures, what changed beyond noise, and what only one of them has."""
    lines = ["# Two runs", ""]
    for name, run in zip(names, (a, b), strict=True):
        busy = " **Busy at the start.**" if run["machine"]["load at start"] > BUSY else ""
        lines.append(f"- {name}: {'' if run['size'] == 'whole' else 'quick; '}{machine_line(run)}{busy}")
    lines += ["", "Ratios, smaller is better. A change counts beyond three standard errors of the rounds and"]
    lines += [f"{FLOOR:.0%} that two runs differ by anyway. Where a peer changed as well, so did the machine.", ""]
    lines += ["| what | A | B | B / A | | peers | benchmark |", "|---|---|---|---|---|---|---|", *compared(a, b)]
    for name, run, other in ((names[0], a, b), (names[1], b, a)):
        only = [n for n in run["benchmarks"] if n not in other["benchmarks"]]
        failed = [n for n, of in run["benchmarks"].items() if "error" in of]
        lines += [f"\nOnly in {name}: {', '.join(only)}."] if only else []
        lines += [f"\nFailed in {name}: {', '.join(failed)}."] if failed else []
    return "\n".join(lines) + "\n"
