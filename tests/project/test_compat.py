"""What is needed of PyTorch beyond its documentation, what differs between its versions, and ``meshwright doctor``."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

import meshwright as mw
from meshwright import compat
from meshwright.cli import app
from meshwright.errors import MeshwrightError
from tests.support import fresh


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
    assert found.output.rstrip().endswith("failed: fix undocumented names of torch")


def test_versions() -> None:
    assert compat.untested(torch.__version__) == compat.untested(compat.TESTED[0] + ".1+cpu") == ""
    for version in ("1.13.1", "2.99.0a0+git"):
        assert "is tested with torch" in compat.untested(version)


def test_doctor() -> None:
    text = CliRunner().invoke(app, ["doctor", "--names"], env={"COLUMNS": "200"})
    assert text.exit_code == 0, text.output
    assert all(path in text.output for path, _ in compat.PRIVATE.values())
    assert all(f"from torch {since} on: {what}" in text.output for since, what in compat.DIFFERENT.values())
    last = CliRunner().invoke(app, ["doctor"]).output.rstrip().splitlines()[-1]
    assert last.startswith("passed: Meshwright works here")
    assert "undone" not in CliRunner().invoke(app, ["doctor"]).output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert {"torch", "backends", "launcher", "processor"} <= {f["what"] for f in found}
    assert compat.stood_in("2.12.1+cpu") == ["around_checkpoints", "apply_function", "redispatch_function"]


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


class Seen(TorchFunctionMode):
    """Goes on into Python functions with ``redispatch``, and notes what they call."""

    def __init__(self, redispatch: Callable[..., Any]) -> None:
        super().__init__()
        self.redispatch, self.names = redispatch, list[str]()

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        if len(self.names) > 99:
            raise RecursionError(self.names[-1])
        if isinstance(func, types.FunctionType):
            with self:
                return self.redispatch(func, types_, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def x() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4).requires_grad_()


# Code that asks for overrides: by itself, as a name of a module, after a decorator, and in functions that it calls.
REDISPATCHED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "cross_entropy": (lambda: F.cross_entropy(x(), torch.tensor([0, 1, 2])), ["cross_entropy_loss"]),
    "dropout": (lambda: F.dropout(x(), 0.5), ["dropout"]),
    "norm": (lambda: x().norm(), ["norm", "vector_norm"]),
    "init": (lambda: nn.init.normal_(torch.empty(3)), ["normal_"]),
    "grad": (lambda: torch.autograd.grad(x().sum(), x(), allow_unused=True), ["sum"]),
    "rsub": (lambda: 1 - x(), ["rsub"]),
    "max_pool": (lambda: F.max_pool2d(x()[None], 2), ["max_pool2d"]),
    "unique": (lambda: x().unique(), ["_unique2"]),
    "meshgrid": (lambda: torch.meshgrid(x()[0], x()[1], indexing="ij"), ["meshgrid"]),
    "attention": (lambda: nn.MultiheadAttention(4, 2)(x()[None], x()[None], x()[None]), ["linear", "softmax"]),
}


@pytest.mark.parametrize("name", REDISPATCHED)
def test_a_function_without_its_own_overrides(name: str) -> None:
    call, inside = REDISPATCHED[name]
    torch.manual_seed(0)
    with Seen(compat._redispatch_function) as own:
        call()
    assert [n for n in own.names if n in inside], own.names
    torch.manual_seed(0)
    with Seen(compat.redispatch_function) as there:
        call()
    assert own.names == there.names  # those of PyTorch where it has such a function


def test_a_wrapped_function_without_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    import functools

    original = F.gelu if isinstance(F.gelu, types.FunctionType) else F.dropout
    runs = []

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        runs.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(F, original.__name__, wrapped)
    with Seen(compat._redispatch_function):
        wrapped(x())
    assert len(runs) == 1


def test_fakes_of_threads_that_have_ended() -> None:
    """What a torch for GPUs, on a machine without one, makes for the first fake mode is not of a simulated rank."""
    fresh.run("""
import torch
import meshwright as mw
from meshwright.compat import FakeTensorMode
def fakes():
    with FakeTensorMode():
        return torch.empty(2).shape
for _ in range(3):
    mw.simulate(fakes, mw.Mesh({"a": 2}))
""")


def test_groups_keep_their_order() -> None:
    fresh.run("""
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from datetime import timedelta
from meshwright import compat
dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
for make in (compat.in_order(dist.new_group), compat._unsorted()):
    made = make([3, 2, 0], timedelta(seconds=9), use_local_synchronization=False)
    assert made.rank() == 1 and dist.get_process_group_ranks(made) == [3, 2, 0], make
assert dist.get_process_group_ranks(dist.new_group([3, 2, 0])) == [0, 2, 3]
""")


def test_a_function_is_made_to_ask() -> None:
    def total(tensors: Any, factor: float = 1.0) -> Any:
        return factor * sum(t.sum() for t in tensors)

    module = types.SimpleNamespace(total=compat._asking(total, "total"))
    given = [x(), x()]
    with Seen(compat._redispatch_function) as seen:
        made = module.total(given, factor=2.0)
    assert made == 4 * 66
    assert seen.names[0] == "total"
    assert seen.names.count("sum") == 2
    assert module.total(tensors=(x(),)) == 66


def test_frames_that_an_autograd_function_saves_for() -> None:
    """As up to torch 2.11: what a frame is handed is led to its own methods."""

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> torch.Tensor:
            return torch.empty(0)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _, number, t = inputs
            ctx.save_for_backward(t)
            ctx.get_args = lambda saved: [number, *saved]

    class Frame:
        def __init__(self) -> None:
            self.input_saver: Any = None

    module = types.SimpleNamespace(_CheckpointFrame=Frame, _NoopSaveInputs=Saves)
    assert compat.saving_frame(module) is Frame
    frame, t = Frame(), x()
    assert frame.input_saver is None
    frame.input_saver = module._NoopSaveInputs.apply(torch.empty(0, requires_grad=True), 3, t)
    for _ in range(2):
        node = frame.input_saver.grad_fn
        number, again = node.get_args(node.saved_tensors)
        assert number == 3
        assert again is t
    frame = Frame()
    with torch.no_grad():
        frame.input_saver = module._NoopSaveInputs.apply(torch.empty(0, requires_grad=True), 3, t)
    assert frame.input_saver.grad_fn is None
