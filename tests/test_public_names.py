"""`meshwright.__all__` is the list of public names: sorted, complete, and each of them exists."""

from __future__ import annotations

import ast
from pathlib import Path

import meshwright


def test_all_is_sorted_and_without_doubles() -> None:
    assert list(meshwright.__all__) == sorted(set(meshwright.__all__))


def test_all_names_every_public_import() -> None:
    tree = ast.parse(Path(meshwright.__file__).read_text())
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", None) != "__future__"
        for alias in node.names
    }
    missing = {name for name in imported if not name.startswith("_")} - set(meshwright.__all__)
    assert not missing, f"imported by __init__ but not in __all__: {sorted(missing)}"


def test_every_name_in_all_exists() -> None:
    assert [name for name in meshwright.__all__ if not hasattr(meshwright, name)] == []
