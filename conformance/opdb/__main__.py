"""Command line: runs, tabulates, and exits with 1 where a value was silently wrong or ranks did not agree."""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .cases import KNOWN
from .worker import RANKS, Answer, Settings, rank

OUT = Path(os.environ.get("CONFORMANCE_OUT") or Path(__file__).resolve().parents[1] / "out")
GOOD, SILENT, STUCK = ("pass", "random"), ("wrong_value", "wrong_gradient"), ("desync", "timeout", "crash")


class Ranks:
    """Four processes, and lines to them."""

    def __init__(self, settings: Settings) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self.lines: list[Any] = []
        self.processes = []
        self.patience = settings.seconds + 15
        for me in range(RANKS):
            ours, theirs = context.Pipe()
            target = (me, f"{self.folder.name}/init", theirs, settings)
            process = context.Process(target=rank, args=target, daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def ask(self, *what: Any) -> list[Any]:
        """What each rank answers; None of those that died or say nothing."""
        for line in self.lines:
            with contextlib.suppress(OSError):  # that rank is dead, as will be seen
                line.send(what)
        answers: dict[Any, Any] = {}
        end = time.monotonic() + self.patience
        while len(answers) < len(self.lines) and time.monotonic() < end:
            ready: list[Any] = wait([x for x in self.lines if x not in answers], timeout=end - time.monotonic())
            for line in ready:
                try:
                    answers[line] = line.recv()
                except EOFError:
                    answers[line] = None
        return [answers.get(line) for line in self.lines]

    def died(self) -> bool:
        """Whether a rank was ended by a signal."""
        return any(p.exitcode is not None for p in self.processes)

    def end(self) -> None:
        """Kills what is left."""
        for p in self.processes:
            p.kill()
            p.join()
        self.folder.cleanup()


def together(answers: Sequence[Answer | None], died: bool) -> Answer:
    """One answer of four: ranks that do not agree are a desync, as the others would wait for them for ever."""
    there = [a for a in answers if a is not None]
    sent = sum(a.sent for a in there), sum(a.settled for a in there)
    if len(there) < RANKS:
        kind = "crash" if died else "timeout" if not there else "desync"
        return Answer(kind, next((a.message for a in there if a.message), ""), *sent)
    kinds = {a.kind for a in there}
    message = next((a.message for a in there if a.message), "")
    if len(kinds) == 1:
        return Answer(there[0].kind, message, *sent)
    silent = kinds & set(SILENT)
    if silent and kinds <= {*GOOD, *SILENT}:
        return Answer(silent.pop(), message, *sent)
    return Answer("desync" if kinds != {"timeout"} else "timeout", f"{sorted(kinds)}: {message}", *sent)


def records(
    numbers: Iterable[int], names: dict[int, str], settings: Settings, budget: float
) -> Iterator[dict[str, Any]]:
    """Every case of these ops by every contender."""
    ranks = Ranks(settings)
    try:
        for number in numbers:
            cases = ranks.ask("op", number)[0]
            if cases is None:
                yield {"op": names[number], "kind": "crash", "contender": "one device", "case": ""}
                ranks.end()
                ranks = Ranks(settings)
                continue
            begin, lost = time.monotonic(), 0
            for k, case in enumerate(cases):
                for contender in settings.contenders:
                    answers = ranks.ask("case", k, contender)
                    answer = together(answers, ranks.died())
                    about = {"op": names[number], "sample": case.sample, "mesh": case.mesh, "case": str(case)}
                    yield {**about, "contender": contender, **asdict(answer)}
                    if answer.kind in STUCK:
                        lost += 1
                        ranks.end()
                        ranks = Ranks(settings)
                        ranks.ask("op", number)
                if time.monotonic() - begin > budget or lost > 3 * len(settings.contenders):
                    yield {
                        "op": names[number],
                        "kind": "cut",
                        "contender": "",
                        "case": f"{len(cases) - k - 1} cases left",
                    }
                    break
    finally:
        ranks.end()


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line per contender, the failures of ours by op, and bytes side by side."""
    by: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for r in found:
        by[r["contender"]].append(r)
    lines = [" " * 12 + "   ops  whole   cases  right %  silent  stuck  missing  error"]
    for name in [n for n in by if n]:
        mine = by[name]
        ops: dict[str, set[str]] = collections.defaultdict(set)
        for r in mine:
            ops[r["op"]].add(r["kind"])
        count = collections.Counter(r["kind"] for r in mine)
        right = sum(count[k] for k in GOOD)
        lines.append(
            f"{name:12} {len(ops):5} {sum(k <= set(GOOD) for k in ops.values()):6} {len(mine):7} "
            f"{100 * right / len(mine):8.2f} {sum(count[k] for k in SILENT):7} {sum(count[k] for k in STUCK):6} "
            f"{count['missing']:8} {count['error']:6}"
        )
    lines += ["", "Not right, ours:"]
    bad: dict[tuple[str, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for r in by["meshwright"]:
        if r["kind"] not in GOOD:
            bad[r["op"], r["kind"]].append(r)
    for (op, kind), rs in sorted(bad.items()):
        why = KNOWN.get(op) or f"[{rs[0]['case']}] {rs[0]['message'][:150]}"
        lines.append(f"  {op}: {len(rs)} {kind}: {why}")
    lines += [f"  {r['op']}: cut, {r['case']}" for r in by[""]]
    return "\n".join([*lines, *_bytes(by)])


def _bytes(by: dict[str, list[dict[str, Any]]]) -> list[str]:
    def key(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["op"], r.get("sample"), str(r.get("mesh")), r["case"]

    theirs = {key(r): r for r in by.get("dtensor", ()) if r["kind"] in GOOD}
    both = [(r, theirs[key(r)]) for r in by["meshwright"] if r["kind"] in GOOD and key(r) in theirs]
    lines: list[str] = []
    for field, what in (("sent", "the op and its backward"), ("settled", "the same, sums and gradients settled")):
        ours, its = (sum(pair[i][field] for pair in both) for i in (0, 1))
        if not its:
            continue
        more = [(r, t) for r, t in both if r[field] > t[field] * 1.0001]
        share = 100 * (1 - len(more) / len(both))
        lines += ["", f"Bytes of {what}: no more than DTensor's in {share:.2f} % of {len(both)} cases that both pass"]
        lines.append(f"({ours / its:.2f} of DTensor's together).  More, by op:")
        per: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = collections.defaultdict(list)
        for r, t in more:
            per[r["op"]].append((r, t))
        for op, rs in sorted(per.items(), key=lambda x: -len(x[1])):
            r, t = max(rs, key=lambda x: x[0][field] - x[1][field])
            case = f"[{r['case']}] on {r['mesh']}, sample {r['sample']}"
            lines.append(f"  {op}: {len(rs)}, such as {case}: {r[field]:.0f} for {t[field]:.0f}")
    return lines


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m conformance.opdb", description=__doc__)
    parser.add_argument("--sizes", choices=["even", "uneven", "both"], default="both", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="such as float64 or complex128 (default: %(default)s)")
    parser.add_argument("--n", type=int, default=4, help="samples of each op (default: %(default)s)")
    parser.add_argument("--layouts", type=int, default=4, help="of each sample (default: %(default)s)")
    parser.add_argument("--ops", default="*", help='comma list of globs, such as "add,linalg.*"')
    parser.add_argument("--against", choices=["dtensor"], help="another library beside, with bytes side by side")
    parser.add_argument("--jobs", type=int, default=2, help="groups of four ranks at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="that one case may take (default: %(default)s)")
    parser.add_argument("--op-seconds", type=float, default=120, help="that one op may take (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="only tabulate what is there")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def part(given: argparse.Namespace, sizes: str, path: Path) -> None:
    """One share of the ops, in this process."""
    from torch.testing._internal.common_methods_invocations import op_db

    from .cases import op_name

    names = {i: op_name(op) for i, op in enumerate(op_db)}
    globs = given.ops.split(",")
    k, n = (int(x) for x in given.part.split("/"))
    mine = [i for i, name in names.items() if any(fnmatch.fnmatch(name, g) for g in globs)][k::n]
    contenders = ("meshwright", *([given.against] if given.against else []))
    settings = Settings(
        sizes, given.dtype, given.n, given.layouts, contenders, traffic=bool(given.against), seconds=given.seconds
    )
    with path.open("w") as file:
        for r in records(mine, names, settings, given.op_seconds):
            file.write(json.dumps(r) + "\n")
            file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = options(argv)
    OUT.mkdir(exist_ok=True)
    bad = 0
    for sizes in ("even", "uneven") if given.sizes == "both" else (given.sizes,):
        label = f"{sizes}_{given.dtype}_n{given.n}" + (f"_{given.against}" if given.against else "")
        paths = [OUT / f"opdb_{label}.{k}.jsonl" for k in range(given.jobs)]
        if given.part:
            part(given, sizes, paths[int(given.part.split("/")[0])])
            continue
        begin = time.monotonic()
        if not given.table:
            words = [*(sys.argv[1:] if argv is None else argv), "--sizes", sizes]
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "conformance.opdb", *words, "--part", f"{k}/{given.jobs}"],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    cwd=Path(__file__).resolve().parents[2],
                )
                for k in range(given.jobs)
            ]
            if max(p.wait() for p in started):
                return 2
        found = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
        text = f"# {label}, {time.monotonic() - begin:.0f} s\n{table(found)}\n"
        (OUT / f"opdb_{label}.txt").write_text(text)
        print(text, flush=True)
        ours = [r for r in found if r["contender"] == "meshwright" and r["op"] not in KNOWN]
        bad += sum(r["kind"] in (*SILENT, *STUCK) for r in ours)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
