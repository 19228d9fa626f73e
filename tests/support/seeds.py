"""For each row of ``docs/seeds.md`` a way to break the code that it speaks of: its test must turn red.

``python -m tests.support.seeds [WORDS...]`` breaks a copy of the checkout, row by row (those whose first cell has one
of the words), runs the row's test in it and says which stay green.  ``test_seeds.py`` compares the table with the page
and the code.
"""

from __future__ import annotations

import contextlib
import os
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
ROOT = Path(__file__).parents[2]
CODE = "src/meshwright/"
COPIED = ("src", "tests", "conformance", "docs", "examples", "bench", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Row:
    """One row of the page: what is asked, the test that shows it, and the part that it stands in."""

    asked: str
    test: str
    part: str


def rows(page: str) -> list[Row]:
    """All rows of the page."""
    found, part = [], ""
    for line in page.splitlines():
        if line.startswith("## "):
            part = line[3:].partition(" (")[0]
        elif line.startswith("| ") and not line.startswith("| asked"):
            asked, _, test = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append(Row(asked, test.strip("` "), part))
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


@contextlib.contextmanager
def broken(folder: Path, one: Break) -> Iterator[None]:
    """While it is open, the copy is broken."""
    path = folder / one.path
    good = path.read_text()
    assert good.count(one.old) == 1, f"{one.path} has {good.count(one.old)} times: {one.old}"
    path.write_text(good.replace(one.old, one.new))
    try:
        yield
    finally:
        path.write_text(good)


def verdict(folder: Path, test: str) -> str:
    """What the test says of the copy: ``"red"``, ``"green"``, or that it did not run.

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
        os._exit(pytest.main([f"tests/{test}", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--whole"]))
    over = threading.Timer(PATIENCE, os.killpg, (child, signal.SIGTERM))  # a hang is red
    over.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    over.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it started
    if status in (0, 1, -signal.SIGTERM):
        return "red" if status else "green"
    return "did not run: " + (folder / "said.txt").read_text()[-300:]


def main(words: Sequence[str]) -> int:
    """Break what belongs to the rows with one of these words, or to all; how many stay green."""
    tests = {(r.part, r.asked): r.test for r in rows((ROOT / "docs" / "seeds.md").read_text())}
    green = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for one in breaks():
            for test in dict.fromkeys(t for (_, asked), t in tests.items() if asked == one.asked):
                if words and not any(w in one.asked for w in words):
                    continue
                began = time.monotonic()
                with broken(folder, one):
                    said = verdict(folder, test)
                green += said != "red"
                print(f"{said:6} {time.monotonic() - began:4.0f} s  {one.asked}  ({test})", flush=True)
    return green


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
