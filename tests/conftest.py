"""How broad sweeps and grids are: ``make test`` takes a part of each, ``make test-long`` (``--whole``) all."""

from __future__ import annotations

import os
import signal
import time
import zlib

import pytest

from meshwright.program.step import CompiledStep
from tests.support import cheap, device, late
from tests.support import sweep as sweeps

SALT = "MESHWRIGHT_SALT"  # in the environment, so that all workers of a run have one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of grids and sweeps, long tests too")
    parser.addoption("--late", action="store_true", help="ranks deliver what is started at its wait, and check memory")
    parser.addoption("--salt", help="which covering array of three-way interactions; else another one in each run")


@pytest.hookimpl(optionalhook=True)  # with -p no:xdist there is none
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than cores: one of them waits for real processes while the others compute."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return len(cores) + 1


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"interactions: --salt {os.environ[SALT]}" if config.getoption("--whole") else None


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background: the tests of Ctrl-C need it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What programs prove of themselves the tests compare with one device; of check= there are tests of its own.
    CompiledStep.compares = bool(config.getoption("--whole"))
    if not hasattr(config, "workerinput"):
        os.environ[SALT] = config.getoption("--salt") or str(int(time.time()))
    device.install(pytest.MonkeyPatch()).__enter__()  # for good
    cheap.install(pytest.MonkeyPatch())
    if config.getoption("--late"):
        late.install(pytest.MonkeyPatch())
    if config.getoption("--whole"):
        sweeps.WHOLE = True
        config.option.markexpr = ""


def pytest_collection_finish(session: pytest.Session) -> None:
    cheap.freeze()


@pytest.hookimpl(tryfirst=True)  # before what -m leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``thin(n)``, keep one in n of its cases: by their names, so that a new case moves no other."""
    device.mark(items)
    # Work is dealt in stretches, so that one worker has all real processes: two tests of them would slow each other.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    if config.getoption("--whole") or any("::" in arg for arg in config.args):
        return
    seen: set[str] = set()
    kept, left = [], []
    for item in items:
        marker = item.get_closest_marker("thin")
        if marker is None:
            kept.append(item)
            continue
        name = item.nodeid.partition("[")[0]
        chosen = name not in seen or zlib.crc32(item.nodeid.encode()) % marker.args[0] == 0
        (kept if chosen else left).append(item)
        seen.add(name)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
