"""What is needed of PyTorch beyond its documentation, what differs between its versions, and ``meshwright doctor``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import meshwright as mw
from meshwright import compat
from meshwright.cli import app
from meshwright.errors import MeshError, MeshwrightError


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


@pytest.mark.parametrize("call", [
    lambda x: F.layer_norm(x, (4,)), lambda x: F.max_pool1d(x, 2), lambda x: F.multi_head_attention_forward,
    lambda x: F.gelu(x), lambda x: torch.einsum("ij,kj->ik", x, x), lambda x: F.cross_entropy(x, x.softmax(1)),
])  # fmt: skip
def test_redispatch_as_before_2_13(call: Any) -> None:
    """The Python code of a function runs, and what it calls is dispatched."""
    seen: list[str] = []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            if len(seen) > 1:  # what the first one calls
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs or {})
            return compat._redispatch(func, types, args, kwargs or {})

    x = torch.arange(12.0).view(3, 4)
    made = call(x.as_subclass(Seen))
    if seen:
        assert torch.equal(torch.Tensor(made), call(x))


def test_groups_whose_ranks_do_not_ascend_need_2_12(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def older(ranks: Any, timeout: Any, use_local_synchronization: bool = False) -> str:
        asked.append((ranks, timeout, use_local_synchronization))
        return "group"

    monkeypatch.setattr(torch.distributed, "new_group", older)
    limit = timedelta(seconds=1)
    assert compat.new_group((0, 2), limit, True) == "group"
    assert asked == [([0, 2], limit, True)]
    with pytest.raises(MeshError, match=r"needs torch 2\.12 or newer .* in ascending order"):
        compat.new_group((2, 0), limit, True)


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
