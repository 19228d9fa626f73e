"""The five lines of docs/verify.md, for a model of each kind of zoo.py: laid out by ``mw.layouts``, then verified.

``python conformance/verified.py`` prints a row for each: seconds of one core that layouts, an eager and a captured
verification took, and the verdicts.  The exit code is 1 if one is not right.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import zoo

import meshwright as mw
from meshwright.mesh import parse_mesh

KINDS = "qwen3,qwen3-moe,vit,whisper,unet"


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, and what was made."""
    begin = time.process_time()
    made = fn()
    return time.process_time() - begin, made


def row(name: str, mesh: mw.Mesh) -> tuple[str, bool]:
    """The row of a model, and whether it is right."""
    case = zoo.CASES[name]
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(torch.Generator().manual_seed(0))
    spent, table = timed(lambda: mw.layouts(model, mesh, batch, case.loss))
    cells, right = [name, f"{spent:.1f}"], True
    for mode in ("eager", "captured"):
        verify = partial(mw.verify, model, case.loss, batch, mesh, table, batch=table.batch, modes=[mode])
        spent, report = timed(verify)
        cells.append(f"{spent:.1f}, {'right' if report.passed else report.departures[0]}")
        right &= report.passed
    return f"| {' | '.join(cells)} |", right


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and print the rows of a table."""
    parser = argparse.ArgumentParser(prog="python conformance/verified.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=KINDS, help="comma list of names of zoo.py (default: %(default)s)")
    parser.add_argument("--mesh", default="dp=2,tp=2", help="default: %(default)s")
    given = parser.parse_args(argv)
    mesh = parse_mesh(given.mesh)
    print("| model | layouts | eager | captured |\n|---|---|---|---|")
    wrong = False
    for name in given.models.split(","):
        if importlib.util.find_spec(zoo.CASES[name].needs) is None:
            print(f"| {name} | {zoo.CASES[name].needs} is not installed | | |")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            line, right = row(name, mesh)
        print(line, flush=True)
        wrong |= not right
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
