"""The ```python blocks of README.md and docs/**/*.md run, file by file, in order."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from meshwright.program.step import CompiledStep

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = "# not run"  # as a block's first line: it needs what a test has not, such as several machines
MOST_NOT_RUN = 3


def blocks(page: Path) -> list[tuple[int, str]]:
    """(lines before the code, code) of each ```python block."""
    text = page.read_text()
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(2)), m[2]) for m in found if m[1].lower() in ("python", "py")]


def is_run(code: str) -> bool:
    return not code.startswith(NOT_RUN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(CompiledStep, "compares", True)
    # The page is the module's file and code keeps its lines: tracebacks and inspect.getsource find the text.
    module = types.ModuleType(f"page_{page.stem}")
    module.__file__ = str(page)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for lines, code in blocks(page):
        if is_run(code):
            exec(compile("\n" * lines + code, page, "exec", dont_inherit=True), vars(module))


def test_few_blocks_are_not_run() -> None:
    not_run = [f"{page.name}:{line}" for page in PAGES for line, code in blocks(page) if not is_run(code)]
    assert len(not_run) <= MOST_NOT_RUN, not_run


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n```python\nx = 1\n```\n```console\nls\n```\n```python\n# not run\ny\n```\n")
    assert blocks(page) == [(2, "x = 1\n"), (8, "# not run\ny\n")]
    assert [is_run(code) for _, code in blocks(page)] == [True, False]
