"""The page about the reference documents: each row names a test that exists."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.support import seeds

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "seeds.md").read_text()


def test_each_point_has_a_test() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if line[:2] == "| "]
    rows = [row for row in rows if row[0] != "asked"]
    assert f"{len(rows)} points" in PAGE
    known: dict[str, set[str]] = {}
    for row in rows:
        assert [bool(cell) for cell in row] == [True] * 3, row
    for one in seeds.rows(PAGE):
        assert one.tests, one
        for test in one.tests:
            file, _, name = test.partition("::")
            if file not in known:
                tree = ast.parse((TESTS / file).read_text())
                known[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
            assert name in known[file], one


def test_each_point_can_be_broken() -> None:
    """That its test then turns red is shown by ``python -m tests.support.seeds``."""
    found = seeds.rows(PAGE)
    asked = {row.asked for row in found}
    for one in seeds.breaks():
        assert one.asked in asked, one.asked
        assert (seeds.ROOT / one.path).read_text().count(one.old) == 1, f"{one.asked}: {one.path} has changed"
        assert one.new != one.old
    left = asked - {one.asked for one in seeds.breaks()}
    assert not left, f"no way to break them is known: {left}"
    assert not seeds.stale(seeds.others())
    others = Counter(one.asked for one in seeds.others())
    assert not others.keys() - asked, "rows have other names"
    assert not {name for name in asked if others[name] < 3}, "three ways to break each"


def test_options_of_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main(["--help"]) == 0
    assert "breaks a copy of the checkout" in capsys.readouterr().out
    assert seeds.main(["--other"]) == 1
    assert seeds.stale([seeds.Break("", "errors.py", "no such text", "")]) == [
        ": src/meshwright/errors.py: 'no such text'"
    ]
