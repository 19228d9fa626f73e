"""For each row of ``docs/seeds.md`` ways to break the code that it speaks of: one of its tests must turn red.

``python -m tests.support.seeds [WORDS...]`` breaks a copy of the checkout, row by row (those whose first cell has one
of the words, or whose number is in a range such as ``1-20``), runs the row's tests in it and says which stay green.
With ``--whole`` grids are whole; with ``--others`` only the breaks of ``OTHERS``: three for each row, chosen from its
claim and the code without sight of its tests.  ``--stale`` runs nothing, and lists breaks whose text is no longer
there.  ``test_seeds.py`` compares the first table with the page and the code, and the others with the page.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch.distributed.tensor
import torch.export  # noqa: F401

PATIENCE = 150  # seconds
OTHERS = ("partial", "rules", "data_parallel", "merge")  # modules ``breaks_*``, one for each part of the page
OPTIONS = ("--others", "--stale", "--whole")
ROOT = Path(__file__).parents[2]
CODE = "src/meshwright/"
COPIED = ("src", "tests", "conformance", "docs", "examples", "bench", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Row:
    """One row of the page: what is asked, the tests that show it, and the part that it stands in."""

    asked: str
    tests: tuple[str, ...]
    part: str


def rows(page: str) -> list[Row]:
    """All rows of the page."""
    found, part = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            part = line[3:].partition(" (")[0]
        elif line.startswith("| ") and not line.startswith("| asked"):
            asked, _, test = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append(Row(asked, tuple(re.findall(r"`(.+?)`", test)), part))
    return found


@dataclass(frozen=True)
class Break:
    """One way to break the code: in ``file``, ``old`` (there once) becomes ``new``."""

    asked: str
    file: str
    old: str
    new: str

    @property
    def path(self) -> str:
        """The file in the checkout."""
        return self.file if self.file.startswith("conformance/") else CODE + self.file


def breaks() -> list[Break]:
    """The table: what is asked, the file, and what of it becomes what."""
    from tests.support.seeds_broken import BROKEN

    return [Break(*entry) for entry in BROKEN]


def others() -> list[Break]:
    """The breaks that were chosen without sight of the tests."""
    tables = [importlib.import_module(f"tests.support.breaks_{name}").OTHERS for name in OTHERS]
    return [Break(*entry) for table in tables for entry in table]


@contextlib.contextmanager
def broken(folder: Path, one: Break) -> Iterator[bool]:
    """While it is open, the copy is broken; False where the text to break is not there once."""
    path = folder / one.path
    good = path.read_text()
    there = good.count(one.old) == 1
    if there:
        path.write_text(good.replace(one.old, one.new))
    try:
        yield there
    finally:
        path.write_text(good)


def verdict(folder: Path, tests: Sequence[str], *options: str) -> tuple[str, str]:
    """What the tests say of the copy, and their words: ``"red"``, ``"green"``, ``"hung"``, or that it did not run.

    In a fork of this process, which has imported PyTorch and nothing of the package.
    """
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(folder)
        with open("said.txt", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ.update(PYTHONPATH=str(folder / "src"), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        sys.path[:0] = [str(folder / "src"), str(folder)]
        for name in [n for n in sys.modules if n.partition(".")[0] == "tests"]:  # this very module: of the checkout
            del sys.modules[name]
        sys.dont_write_bytecode = True
        os._exit(
            pytest.main(  # long ones too
                [*(f"tests/{t}" for t in tests), "-x", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=line", *options]
            )
        )
    over = threading.Timer(PATIENCE, os.killpg, (child, signal.SIGTERM))  # a hang is red
    over.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    said = (folder / "said.txt").read_text()
    if status in (0, 1, -signal.SIGTERM):
        return {0: "green", 1: "red"}.get(status, "hung"), said
    return "did not run", said


def _reason(said: str) -> str:
    """The line that says why a test failed."""
    lines = [line for line in said.splitlines() if re.match(r"(E |/.*\.py:\d+: |.*Error)", line)]
    return (lines[0] if lines else said[-200:]).replace("\n", " ")[:160]


def _picked(words: Sequence[str], number: int, row: Row) -> bool:
    """Whether a row is one of those asked for: all, those of a range of numbers, or with a word in the first cell."""
    for word in words:
        numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        if int(numbers[1]) <= number <= int(numbers[2] or numbers[1]) if numbers else word in row.asked:
            return True
    return not words


def stale(table: Sequence[Break]) -> list[str]:
    """Breaks whose text is not in the code once, in words."""
    return [f"{b.asked}: {b.path}: {b.old!r}" for b in table if (ROOT / b.path).read_text().count(b.old) != 1]


def main(words: Sequence[str]) -> int:
    """Break what belongs to the rows with one of these words, or to all; how many stay green."""
    if unknown := [w for w in words if w.startswith("-") and w not in OPTIONS]:
        print(__doc__)
        return len(set(unknown) - {"-h", "--help"})
    table = others() if "--others" in words else [*breaks(), *others()]
    if "--stale" in words:
        found = stale(table)
        print("\n".join(found))
        return len(found)
    options = [w for w in words if w == "--whole"]
    words = [w for w in words if not w.startswith("--")]
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for number, row in enumerate(rows((ROOT / "docs" / "seeds.md").read_text()), 1):
            for one in table if _picked(words, number, row) else ():
                if one.asked != row.asked:
                    continue
                began = time.monotonic()
                with broken(folder, one) as there:
                    result, said = verdict(folder, row.tests, *options) if there else ("stale", one.old)
                counts[result] = counts.get(result, 0) + 1
                why = "" if result == "green" else f"  {_reason(said)}"
                print(f"{result:6} {time.monotonic() - began:4.0f} s  {number} {row.asked}: {one.file}: "
                      f"{one.new.strip()[:80]!r}{why}", flush=True)  # fmt: skip
    print(counts)
    return sum(n for result, n in counts.items() if result not in ("red", "hung"))


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
