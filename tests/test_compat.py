"""What is needed of PyTorch beyond its documentation, what differs between its versions, and ``meshwright doctor``."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from meshwright import compat
from meshwright.cli import app
from meshwright.errors import MeshwrightError


def test_every_name_is_there() -> None:
    for name in compat.PRIVATE:
        assert compat.look_up(name) is getattr(compat, name)
    with pytest.raises(AttributeError, match="has no attribute 'gone'"):
        _ = compat.gone


def test_a_name_that_is_missing_says_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.PRIVATE, "gone", ("torch._C._gone", "something"))
    with pytest.raises(MeshwrightError, match=r"has no torch._C._gone, which is needed for something; Mesh"):
        compat.look_up("gone")
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert f"{len(compat.PRIVATE) - 1} of {len(compat.PRIVATE)} found" in found.output
    assert "torch._C._gone" in found.output


def test_versions() -> None:
    assert compat.untested(torch.__version__) == compat.untested(compat.TESTED[0] + ".1+cpu") == ""
    for version in ("1.13.1", "2.99.0a0+git"):
        assert "is tested with torch" in compat.untested(version)


def test_doctor() -> None:
    text = CliRunner().invoke(app, ["doctor", "--names"], env={"COLUMNS": "200"})
    assert text.exit_code == 0, text.output
    assert all(path in text.output for path, _ in compat.PRIVATE.values())
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert {"torch", "backends", "launcher", "processor"} <= {f["what"] for f in found}


def test_functions_apply() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g * 2

    x = torch.ones(2, requires_grad=True)
    compat.apply_function(Twice, x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]
    assert mw.Mesh({"a": 2}).size == 2
