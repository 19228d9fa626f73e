"""`meshwright.__all__` is the list of public names: sorted, complete, and each of them exists."""

from __future__ import annotations

import ast
from pathlib import Path

import meshwright
from tests.support import fresh


def test_all_is_sorted_and_without_doubles() -> None:
    assert list(meshwright.__all__) == sorted(set(meshwright.__all__))


def test_all_names_every_public_import() -> None:
    tree = ast.parse(Path(meshwright.__file__).read_text())
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)  # those for types as well
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    missing = {name for name in imported if not name.startswith("_")} - set(meshwright.__all__)
    assert not missing, f"imported by __init__ but not in __all__: {sorted(missing)}"


def test_every_name_in_all_exists() -> None:
    assert [name for name in meshwright.__all__ if not hasattr(meshwright, name)] == []


def test_what_few_scripts_need_is_imported_at_its_first_use() -> None:
    """And the name of a function never turns into the module of that name."""
    code = """
import sys, meshwright as mw
before = [m for m in sys.modules if m.startswith(("meshwright.program", "meshwright.passes", "meshwright.checkpoint"))]
assert not before, before
import meshwright.explanation, meshwright.program.compile, meshwright.testing
missing = [n for n in mw.__all__ if not hasattr(mw, n)]
assert not missing, missing
assert callable(mw.explain) and set(mw.__all__) <= set(dir(mw))
try:
    mw.nothing
except AttributeError as error:
    assert str(error) == "module 'meshwright' has no attribute 'nothing'"
"""
    fresh.run(code, "torch")
