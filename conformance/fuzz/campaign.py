"""Many random programs: judged in worker processes, findings made smaller, refusals counted by op."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from .draw import draw_program
from .judge import BAD, Verdict, judge, shrink

CHUNK = 25
SECONDS = 60.0  # for one program; it takes a tenth of a second


@dataclass(frozen=True)
class Finding:
    """A program that a mesh does not run as one device does.

    Attributes:
        seed: draws the program as it was found.
        program: as text, after shrinking.
    """

    seed: int
    kind: str
    why: str
    program: str


@dataclass
class Tally:
    """What became of the programs: verdict to count, findings, and refusals by op and error."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take over what another one counted."""
        self.counts += other.counts
        self.refused += other.refused
        self.findings += other.findings

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "programs": sum(self.counts.values()),
            "verdicts": dict(self.counts),
            "refused": dict(self.refused.most_common()),
            "findings": [vars(f) for f in sorted(self.findings, key=lambda f: f.seed)],
        }


class _Slow(BaseException):
    """A program that takes too long; no Exception, so that nothing on the way takes it for one of the program's."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _Slow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_seed(seed: int, static: bool, small: bool = True) -> Tally:
    """Draw, judge and (``small``) shrink one program."""
    tally = Tally()
    program = draw_program(seed, static=static)
    try:
        with _limited(SECONDS):
            verdict = judge(program, static)
    except _Slow:
        verdict = Verdict("hang", f"no end after {SECONDS:.0f} s")
    tally.counts[verdict.kind] += 1
    if verdict.kind == "refused":
        tally.refused[_reason(verdict.why)] += 1
    if verdict.kind in BAD:
        why = verdict.why
        with contextlib.suppress(_Slow), _limited(SECONDS):
            program = shrink(program, verdict, static) if small else program
            why = judge(program, static).why
        tally.findings.append(Finding(seed, verdict.kind, why, str(program)))
    return tally


def _reason(why: str) -> str:
    """A refusal without sizes and layouts: the error and its op, and what follows the arguments."""
    text = re.sub(r"<[^<>]*>|\[[\d, ]*\]|\b(float|int|complex)\d+\b|\bbool\b", "", " ".join(why.split()))
    return re.sub(r"\([ ,]*\)|\d+", "", text)[:90]


def _chunk(seeds: range, static: bool, small: bool) -> Tally:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    importlib.import_module(
        "torch._dynamo"
    )  # which checkpoints would, within the time of a program: cut off, it stays broken
    tally = Tally()
    for seed in seeds:
        tally.add(run_seed(seed, static, small))
    return tally


def campaign(
    count: int, seed: int, *, static: bool = False, small: bool = True, jobs: int = 1,
    tell: Callable[[Tally], None] = lambda tally: None,
) -> Tally:  # fmt: skip
    """Judge the programs of seeds ``seed`` to ``seed + count - 1``.

    Args:
        static: as captured steps, two updates each.
        small: shrink what is found.
        jobs: worker processes.
        tell: called with the tally so far, now and then.
    """
    tally = Tally()
    chunks = [range(s, min(s + CHUNK, seed + count)) for s in range(seed, seed + count, CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            tally.add(_chunk(chunk, static, small))
            tell(tally)
        return tally
    todo = chunks
    while todo:
        broken: list[range] = []
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(_chunk, chunk, static, small): chunk for chunk in todo}
            for future in as_completed(futures):
                try:
                    tally.add(future.result())
                except BrokenProcessPool:
                    broken.append(futures[future])
                tell(tally)
        todo = _after_a_crash(broken, tally, static)
    return tally


def _after_a_crash(broken: list[range], tally: Tally, static: bool) -> list[range]:
    """What is to be run again when a worker died: halves, until the program that killed it is alone."""
    if len(broken) == 1 and len(broken[0]) == 1:
        seed = broken[0][0]
        tally.counts["internal"] += 1
        tally.findings.append(Finding(seed, "internal", "the process died", str(draw_program(seed, static=static))))
        return []
    if len(broken) == 1:
        middle = len(broken[0]) // 2
        return [broken[0][:middle], broken[0][middle:]]
    return broken
