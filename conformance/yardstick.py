"""Runs PyTorch's op database against Meshwright on 4 gloo ranks, and tabulates it next to torch's DTensor.

The harness and DTensor's results are in the shared folder of yardsticks; what is written here goes to
``conformance/out``.  The exit code is 1 if an op was silently wrong, deadlocked or crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .opdb.cases import KNOWN

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
ADAPTER = "conformance.yardstick_adapter:Adapter"
SILENT, STUCK = ("wrong_value", "grad_wrong"), ("desync", "crash", "timeout")
COLUMNS = ("ops", "full pass", "combos", "pass %", "silently wrong", "desync", "crash", "timeout", "other")


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shared = os.environ.get("SHARED", str(HERE.parent.parent / "shared"))
    parser.add_argument("--shared", type=Path, default=Path(shared), help="folder of yardsticks (default: %(default)s)")
    parser.add_argument("--sizes", choices=["even", "default", "both"], default="both",
                        help="sizes that 4 ranks divide, op_db's own (uneven shards), or both")  # fmt: skip
    parser.add_argument("--n", type=int, default=4, help="samples per op (default: %(default)s)")
    parser.add_argument("--ops", default="*", help='comma list of globs on op names, such as "add,linalg.*"')
    parser.add_argument("--jobs", type=int, default=2, help="groups of 4 ranks at a time (default: %(default)s)")
    parser.add_argument("--op-timeout", type=float, default=60.0, help="seconds per op (default: %(default)s)")
    parser.add_argument("--only-table", action="store_true", help="tabulate the results of the last run")
    return parser.parse_args(argv)


def command(given: argparse.Namespace, *arguments: str) -> list[str]:
    """The harness with our adapter."""
    harness = given.shared / "conformance" / "opdb" / "cov.py"
    return [sys.executable, str(harness), "--adapter", ADAPTER, *arguments]


def run(given: argparse.Namespace, sizes: str) -> None:
    """One pass over the op database, in ``--jobs`` parallel parts that are merged into ``out/opdb_<sizes>.json``."""
    OUT.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    parts = [OUT / f"yardstick_{sizes}.{k}.json" for k in range(given.jobs)]
    running = []
    for k, part in enumerate(parts):
        wanted = ["--ops", given.ops, "--n", str(given.n), "--sizes", sizes, "--op-timeout", str(given.op_timeout)]
        wanted += ["--shard", f"{k}/{given.jobs}", "--out", str(part)]
        running.append(subprocess.Popen(command(given, *wanted), env=env, cwd=OUT, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"the harness failed with exit codes {codes}")
    raw = [f"{part}.raw.jsonl" for part in parts if Path(f"{part}.raw.jsonl").exists()]
    merge = command(given, "--merge", ",".join(raw), "--out", str(OUT / f"yardstick_{sizes}.json"))
    subprocess.run(merge, env=env, cwd=OUT, stdout=subprocess.DEVNULL, check=True)


def row(result: dict[str, Any]) -> list[str]:
    """The figures of one result, in the order of COLUMNS."""
    summary = result["summary"]
    status, classes = summary["status"], dict(summary["classes"])
    applicable = summary["ops"] - status.get("not_applicable", 0)
    good = sum(classes.pop(c, 0) for c in ("pass", "random_equal", "random_differs"))
    silent = sum(classes.pop(c, 0) for c in SILENT)
    stuck = [classes.pop(c, 0) for c in ("desync", "crash", "timeout")]
    full = status.get("full_pass", 0) + status.get("random_runs", 0)
    figures = [applicable, full, summary["combos"], f"{100 * good / max(1, summary['combos']):.2f}", silent, *stuck]
    return [str(f) for f in (*figures, sum(classes.values()))]


def table(rows: dict[str, list[str]]) -> str:
    """Rows by name, aligned."""
    lines = [["", *COLUMNS], *([name, *figures] for name, figures in rows.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def failures(result: dict[str, Any]) -> list[str]:
    """A line per op that does not pass fully."""
    lines = []
    for name, op in sorted(result["ops"].items()):
        bad = {c: n for c, n in op["counts"].items() if c not in ("pass", "random_equal", "random_differs")}
        bad |= {f"partial {c}": n for c, n in op["partial"].items() if not c.startswith(("pass", "random"))}
        flags = [f for f in op["flags"] if f in ("op_timeout", "_gaveup")]
        if bad or flags:
            listed = ", ".join([*(f"{n} {c}" for c, n in bad.items()), *flags])
            why = KNOWN.get(name) or (op["top"][0][1] if op["top"] else "")
            lines.append(f"  {name}: {listed}: {why[:150]}")
    return lines


def better_and_worse(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """How many ops only one of the two passes fully."""

    def full(result: dict[str, Any]) -> set[str]:
        return {name for name, op in result["ops"].items() if op["status"] in ("full_pass", "random_runs")}

    mine, its = full(ours), full(theirs) & set(ours["ops"])
    only = f": {', '.join(sorted(its - mine))}" if its - mine else ""
    return f"ops that only Meshwright passes fully: {len(mine - its)}; that only DTensor does: {len(its - mine)}{only}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, tabulate, compare.  Returns the exit code."""
    given = options(argv)
    reference = given.shared / "conformance" / "opdb" / "dtensor_2.13.json"
    if not reference.exists():
        sys.exit(f"{reference} is missing: give the folder of yardsticks with --shared, or as SHARED")
    sizes = ["even", "default"] if given.sizes == "both" else [given.sizes]
    for s in sizes:
        if not given.only_table:
            start = time.monotonic()
            run(given, s)
            print(f"{s} sizes: {time.monotonic() - start:.0f} s", flush=True)
    results = {s: json.loads((OUT / f"yardstick_{s}.json").read_text()) for s in sizes}
    theirs = json.loads(reference.read_text())
    rows = {f"Meshwright, {s} sizes": row(result) for s, result in results.items()}
    rows["DTensor 2.13, even sizes"] = row(theirs)
    report = [table(rows), ""]
    for s, result in results.items():
        report += [f"{s} sizes: {better_and_worse(result, theirs)}", *failures(result), ""]
    text = "\n".join(report)
    (OUT / "yardstick.txt").write_text(text)
    print(text)
    ops = [op for r in results.values() for name, op in r["ops"].items() if name not in KNOWN]
    bad = sum(op["counts"].get(c, 0) + op["partial"].get(c, 0) for op in ops for c in (*SILENT, *STUCK))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
