"""Judging mutants: a process for each, forked from one that has collected the tests and run none.

What is in the body of a function is put into the functions that live, so that a mutant costs a fork and its tests.
What has run before the tests did (constants, defaults, decorators) needs modules imported anew, in a process that has
imported no more than PyTorch.  A mutant's tests are those that reach its lines; what killed its neighbours runs
first, then the fastest, up to ``seconds`` of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import importlib.machinery
import json
import os
import random
import resource
import select
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest
from _pytest.outcomes import Skipped

from .judges import ROOT, SOURCE, cases
from .mutants import Mutant, mutants_of

OUT = ROOT / "conformance" / "out" / "mutation"
_HANG = 40.0  # seconds without an answer, beyond what the tests take
_MEMORY = 4 << 30
_SLOW = 3  # seconds of the processor: a test that takes more judges nothing


@dataclass
class Verdict:
    """What became of a mutant: ``killed``, ``time`` (killed: no end), ``survived``, ``unreached`` (by tests)."""

    module: str
    function: str
    line: int
    was: str
    now: str
    what: str = ""
    by: str = ""  # the test that killed it
    tests: int = 0  # how many tests there are that reach it


@dataclass
class _Test:
    """What one test reaches and takes, alone in a process."""

    seconds: float = 0.0
    failed: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)  # by module


def forked(
    work: Callable[[Callable[[Any], None]], None], patience: float, quiet: bool = True
) -> tuple[list[Any], bool]:
    """Run ``work`` in a child, which sends values; those that came, and whether it ended by itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        gc.disable()
        try:
            os.close(reading)
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2) if quiet else (0, 1):
                os.dup2(null, stream)
            work(lambda value: _sent(writing, value))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    got, until = b"", time.monotonic() + patience
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        more = os.read(reading, 1 << 20) if ready else b""
        if not more:
            break
        got += more
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL if not ready else 0)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what it may have started
    return [json.loads(line) for line in got.splitlines()], status == 0


def _sent(to: int, value: Any) -> None:
    line = json.dumps(value).encode() + b"\n"
    while line:
        line = line[os.write(to, line) :]


def _limited(seconds: float) -> None:
    """End this process when it has used the processor for so long; the clock tells nothing."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


class Session:
    """pytest's plugin: collects the judges of a module, and in place of running them judges mutants."""

    def __init__(
        self,
        module: str,
        files: list[str],
        wanted: Callable[[Verdict], bool],
        count: int,
        seconds: float,
        seed: int,
    ) -> None:
        self.module, self.files, self.wanted = module, files, wanted
        self.count, self.seconds, self.seed = count, seconds, seed
        self.path = SOURCE / module
        self.verdicts: list[Verdict] = []
        self.anew: list[tuple[Verdict, str, list[tuple[str, float]]]] = []  # those that need a fresh import
        self.kills: Counter[tuple[str, str]] = Counter()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"the judges of {self.module} cannot be collected")
        gc.unfreeze()  # tests/conftest.py keeps what there is from being gone through: also below
        for made in gc.get_objects():  # what collecting has filled
            if type(made) is functools._lru_cache_wrapper and str(made.__module__).startswith("meshwright"):
                made.cache_clear()
        self.items = {item.nodeid: item for item in _thinned(self.module, session.items)}
        self.live = _functions(str(self.path))
        gc.collect()
        gc.freeze()  # what is shared with children is not written to
        self.tests = {name: t for name, t in self._reached().items() if not t.failed}
        chosen = self._chosen()
        for number, (mutant, verdict) in enumerate(chosen, 1):
            self._judge(mutant, verdict)
            if sys.stderr.isatty() or number % 50 == 0:
                alive = sum(v.what in ("survived", "unreached") for v in self.verdicts)
                print(f"{self.module}: {number} of {len(chosen)}, {alive} alive", file=sys.stderr, flush=True)
        return True

    def collected(self) -> int:
        """Collect the judges, then do everything; what pytest returns."""
        imported = coverage.Coverage(data_file=None, include=[str(self.path)])
        imported.start()
        importlib.import_module(
            "meshwright." + self.module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        )
        imported.stop()
        self.early = set(imported.get_data().lines(str(self.path)) or ())
        return int(pytest.main(_options([str(ROOT / f) for f in self.files]), plugins=[self]))

    # ------------------------------------------------------------------------------------------ tests

    def _reached(self) -> dict[str, _Test]:
        """What each test reaches; kept for the same tests of the same package."""
        OUT.mkdir(parents=True, exist_ok=True)
        package = _digest(*sorted(SOURCE.rglob("*.py")))
        known: dict[str, _Test] = {}
        for file in self.files:
            names = [n for n in self.items if n.partition("::")[0] == file]
            kept = OUT / f"{Path(file).stem}-{cases(self.module, file)}-{_digest(ROOT / file)}-{package}.json"
            if not kept.exists():
                for old in OUT.glob(f"{Path(file).stem}-{cases(self.module, file)}-*.json"):
                    old.unlink()
                found = {name: asdict(self._alone(name)) for name in names}
                kept.write_text(json.dumps(found))
            known |= {name: _Test(**made) for name, made in json.loads(kept.read_text()).items() if name in self.items}
        for name, test in known.items():
            if test.failed and test.seconds < _SLOW:
                print(f"{name} fails alone, without a mutant: it judges nothing", file=sys.stderr)
        return known

    def _alone(self, name: str) -> _Test:
        def work(send: Callable[[Any], None]) -> None:
            seen = coverage.Coverage(data_file=None, include=[f"{SOURCE}/*"])
            _limited(_SLOW)
            seen.start()
            failed = _fails(self.items[name])
            seen.stop()
            used, data = resource.getrusage(resource.RUSAGE_SELF), seen.get_data()
            lines = {Path(f).relative_to(SOURCE).as_posix(): data.lines(f) for f in data.measured_files()}
            send({"seconds": used.ru_utime + used.ru_stime, "failed": failed, "lines": lines})

        made, _ = forked(work, 300)
        return _Test(**made[0]) if made else _Test(seconds=_SLOW, failed=True)

    # ---------------------------------------------------------------------------------------- mutants

    def _chosen(self) -> list[tuple[Mutant, Verdict]]:
        """So many of the mutants that are wanted, drawn by the seed, in the order of the text."""
        made = mutants_of(self.path.read_text())
        order = random.Random(f"{self.seed}.{self.module}").sample(range(len(made)), len(made))
        found: list[tuple[int, Verdict]] = []
        for i in order:
            if len(found) == self.count:
                break
            was, now = made[i].change
            verdict = Verdict(self.module, made[i].function, made[i].lines[0], was, now)
            if self.wanted(verdict):
                found.append((i, verdict))
        return [(made[i], verdict) for i, verdict in sorted(found, key=lambda f: f[0])]

    def _judge(self, mutant: Mutant, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        lines = range(mutant.lines[0], mutant.lines[1] + 1)
        early = not mutant.body or not self.early.isdisjoint(lines)
        tests = [n for n, t in self.tests.items() if early or not set(t.lines.get(self.module, ())).isdisjoint(lines)]
        verdict.tests = len(tests)
        if not tests:
            verdict.what = "unreached"
            return
        try:
            code = compile(mutant.source, str(self.path), "exec", dont_inherit=True)
        except SyntaxError:
            verdict.what, verdict.by = "killed", "the parser"
            return
        order = self._ordered(tests, mutant.function)
        changed = None if early else _inside(code, mutant.function, self.live)
        if changed is None:
            self.anew.append((verdict, mutant.source, [(n, self.tests[n].seconds) for n in order]))
            return

        def work(send: Callable[[Any], None]) -> None:
            for f, new in changed:
                f.__code__ = new
            _tried([(self.items[n], self.tests[n].seconds) for n in order], send)

        _settle(verdict, order, *forked(work, _HANG + 8 * sum(self.tests[n].seconds for n in order)))
        if verdict.by:
            self.kills[mutant.function, verdict.by] += 1
            self.kills["", verdict.by] += 1

    def _ordered(self, tests: list[str], function: str) -> list[str]:
        def key(name: str) -> tuple[int, int, float]:
            return -self.kills[function, name], -self.kills["", name], self.tests[name].seconds

        order: list[str] = []
        spent = 0.0
        for name in sorted(tests, key=key):
            if order and spent + self.tests[name].seconds > self.seconds:
                continue
            spent += self.tests[name].seconds
            order.append(name)
        return order


def judged_anew(verdict: Verdict, source: str, order: list[tuple[str, float]]) -> None:
    """Judge a mutant by importing everything anew: the caller has not imported the package."""
    path = str(SOURCE / verdict.module)

    def work(send: Callable[[Any], None]) -> None:
        class Tries:
            def pytest_runtestloop(self, session: pytest.Session) -> bool:
                if session.testsfailed:  # a module that a test imports does not import
                    raise session.Interrupted("not collected")
                items = {item.nodeid: item for item in session.items}
                send("collected")
                _tried([(items[n], s) for n, s in order if n in items], send)
                return True

        code, loader = compile(source, path, "exec", dont_inherit=True), importlib.machinery.SourceFileLoader
        plain = loader.get_code
        loader.get_code = lambda self, name: code if self.path == path else plain(self, name)  # type: ignore
        _limited(200)
        pytest.main(_options([str(ROOT / n) for n in dict.fromkeys(n.partition("::")[0] for n, _ in order)]), [Tries()])

    got, ended = forked(work, _HANG + 60 + 8 * sum(s for _, s in order))
    if got[:1] != ["collected"]:
        verdict.what, verdict.by = "killed", "import"
    else:
        _settle(verdict, [n for n, _ in order], got[1:], ended)


def _options(files: list[str]) -> list[str]:
    return [
        *files, f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "-p", "no:cacheprovider", "-p", "no:xdist",
        "-p", "no:timeout", "-o", "addopts=", "-o", "timeout=0", "-m", "not long and not processes",
        "-q", "-q", "--disable-warnings",
    ]  # fmt: skip


def _tried(tests: list[tuple[pytest.Item, float]], send: Callable[[Any], None]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    for item, seconds in tests:
        _limited(5 + 6 * seconds)
        send(["begun", item.nodeid])
        if _fails(item):
            send(["failed", item.nodeid])
            return
    send(["passed", ""])


def _thinned(module: str, items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Some cases of each test."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, listed in found.items():
        many = min(len(listed), cases(module, name.partition("::")[0]))
        yield from (listed[i * len(listed) // many] for i in range(many))


def _fails(item: pytest.Item) -> bool:
    """Run one test.  No report is made, which costs more than most of them."""
    hooks = item.ihook
    item._initrequest()  # type: ignore[attr-defined]  # as runtestprotocol does
    try:
        hooks.pytest_runtest_setup(item=item)
        hooks.pytest_runtest_call(item=item)
    except Skipped:
        pass
    except BaseException:
        return True
    hooks.pytest_runtest_teardown(item=item, nextitem=None)
    return False


def _settle(verdict: Verdict, order: list[str], got: list[Any], ended: bool) -> None:
    """What a mutant's tests said: all passed, one failed, or one never ended."""
    what, name = got[-1] if got else ("begun", order[0])
    if what == "passed":
        verdict.what = "survived"
    else:
        verdict.what, verdict.by = "killed" if what == "failed" else "time", name


# ------------------------------------------------------------------------------------------ functions

Live = dict[str, list[types.FunctionType]]


def _functions(path: str) -> Live:
    """The functions of a file that live, by name."""
    found: Live = {}
    for f in gc.get_objects():
        if type(f) is types.FunctionType and f.__code__.co_filename == path:
            found.setdefault(f.__code__.co_qualname, []).append(f)
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for made in code.co_consts:
        if isinstance(made, types.CodeType):
            yield made
            yield from _codes(made)


def _inside(code: types.CodeType, function: str, live: Live) -> list[tuple[types.FunctionType, types.CodeType]] | None:
    """The functions that live, with what they are in the mutant; None where that cannot be put into them."""
    found = []
    for f in live.get(function, ()):
        old = f.__code__
        made = [c for c in _codes(code) if (c.co_qualname, c.co_firstlineno) == (function, old.co_firstlineno)]
        if len(made) != 1 or made[0].co_freevars != old.co_freevars:
            return None
        found.append((f, made[0]))
    return found or None


def _digest(*files: Path) -> str:
    made = hashlib.sha256()
    for file in files:
        made.update(file.read_bytes())
    return made.hexdigest()[:16]
