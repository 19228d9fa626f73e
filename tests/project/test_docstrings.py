"""Docstrings of public names: an example that runs, an entry for each parameter, Markdown without Sphinx roles."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw

NAMES = [n for n in mw.__all__ if not inspect.ismodule(getattr(mw, n))]
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def documented(name: str) -> list[tuple[str, str]]:
    """(name, docstring) of a public name, and of the public methods of a class of ours."""
    value = getattr(mw, name)
    found = [(name, value.__doc__)]
    if name == "DistTensor":
        found += [(f"{name}.{m}", getattr(value, m).__doc__) for m in ("full_tensor", "redistribute")]
    return found


def examples(doc: str) -> list[str]:
    return [textwrap.dedent(code) for _, code in FENCE.findall(doc)]


def parameters(value: Any) -> set[str]:
    return {p.name for p in inspect.signature(value).parameters.values()}


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for where, doc in documented(name):
        codes = examples(doc)
        assert codes, f"{where} has no ```python example in its docstring"
        for code in codes:
            space: dict[str, Any] = {"mw": mw, "torch": torch, "nn": nn, "F": F, "__name__": f"example_{name}"}
            exec(compile(code, f"<example of {where}>", "exec", dont_inherit=True), space)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_markdown_with_every_parameter(name: str) -> None:
    for where, doc in documented(name):
        first = doc.strip().splitlines()[0]
        assert first.endswith("."), f"{where}: the first line is a sentence"
        assert not re.search(r":(class|func|meth|mod):`", doc), f"{where}: Markdown, not reStructuredText"
        assert "::\n" not in doc, f"{where}: a ```python block, not ::"
    value = getattr(mw, name)
    if inspect.isfunction(value):
        missing = [
            p for p in parameters(value) if not re.search(rf"^ +\*{{0,2}}{p}: ", value.__doc__ or "", re.MULTILINE)
        ]
        assert not missing, f"{name}: no entry under Args for {missing}"


def test_a_missing_example_is_seen() -> None:
    assert examples("Text.\n\n    Examples:\n        ```python\n        x = 1\n        ```\n") == ["x = 1\n"]
    assert examples("Text only.") == []
