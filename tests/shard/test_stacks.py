"""What compiles, traces, scripts, quantises or wraps a model meets a sharded one: right, or refused with what to do."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright.errors import DispatchError, ShardError
from meshwright.shard.parameters.stored import stored

MESH = mw.Mesh({"tp": 2})
X = torch.arange(32.0).view(4, 8) / 9 - 1
SPLIT = {"0.weight": {"tp": mw.Shard(0)}, "0.bias": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


def sharded() -> nn.Module:
    return mw.shard_module(net(), MESH, SPLIT)


def split() -> Tensor:
    return mw.shard_tensor(X, MESH, {"tp": mw.Shard(0)})


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled_in_place() -> nn.Module:
    model = net()
    model[0].compile(backend="eager")
    return model


def compiled_inside() -> nn.Module:
    model = net()
    model[2] = torch.compile(model[2], backend="eager")
    return model


def scripted_inside() -> nn.Module:
    model = net()
    model[0] = torch.jit.script(model[0])
    return model


class Quantised(Tensor):
    """As torchao's: a tensor that answers below dispatch."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)  # type: ignore[no-any-return,attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


def quantised() -> nn.Module:
    model = net()
    model[0].weight = nn.Parameter(Quantised(model[0].weight), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.compile(net(), backend="eager"), "the model is compiled by torch.compile.*mw.compile_step"),
        (compiled_in_place, "0 is compiled by torch.compile"),
        (compiled_inside, "2 is compiled by torch.compile.*: shard the module that was compiled"),
        (scripted_inside, "0.(weight|bias) would be split, and 0 is a module of TorchScript"),
        (quantised, "0.weight is a Quantised of tests.*plain tensors"),
    ],
    ids=["compiled", "compiled in place", "compiled inside", "scripted", "quantised"],
)
def test_models_that_are_not_plain(make: Callable[[], Any], text: str) -> None:
    def run() -> None:
        model = make()
        glob = {"*0.weight": {"tp": mw.Shard(0)}}
        with pytest.raises(ShardError, match=text):
            mw.shard_module(model, MESH, glob)

    mw.simulate(run, MESH)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("what", ["parameters", "inputs"])
def test_exports(what: str, strict: bool) -> None:
    def run() -> None:
        model, x = (sharded(), X) if what == "parameters" else (net(), split())
        with pytest.raises(DispatchError, match=r"torch.export cannot trace.*mw.compile_step"):
            torch.export.export(model, (x,), strict=strict)

    mw.simulate(run, MESH)


@pytest.mark.parametrize("what", ["split", "replicated", "parameters"])
def test_compiled_functions(what: str) -> None:
    def run() -> None:
        model = mw.shard_module(net(), MESH)
        given = {"split": split, "replicated": lambda: mw.shard_tensor(X, MESH, {}), "parameters": lambda: X}[what]()
        called = torch.compile(lambda x: model(x) if what == "parameters" else x * 2, backend="eager")
        with pytest.raises(Exception, match=r"torch.compile and torch.export cannot trace"):
            called(given)

    mw.simulate(run, MESH)


def test_compiled_functions_of_parts() -> None:
    """Copies of parts are plain; of the parts themselves Dynamo would meet the DistTensor under them."""

    def gate(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) * x

    compiled = torch.compile(gate, backend="aot_eager")

    def run() -> None:
        x = split().requires_grad_()
        with pytest.raises(Exception, match=r"is given x.to_local\(\).clone\(\), or is the kernel of a custom op"):
            compiled(x.to_local())
        torch._dynamo.reset()
        for part in (x.to_local().clone(), split().to_local().detach()):
            torch.testing.assert_close(compiled(part), gate(part))
        mw.from_local(compiled(x.to_local().clone()), MESH, x.spec.layout, shape=x.shape).sum().backward()
        y = X.clone().requires_grad_()
        gate(y).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(mw.unshard(x.grad), y.grad)

    mw.simulate(run, MESH)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.jit.script(sharded()),
        lambda: torch.jit.trace(sharded(), X),
        lambda: torch.jit.trace(mw.shard_module(net(), MESH), X, check_trace=False),
        lambda: torch.jit.trace(net(), (split(),)),
        lambda: torch.jit.trace(lambda x: x * 2, split()),
    ],
    ids=["script", "trace", "replicated", "input", "function"],
)
def test_torchscript(call: Callable[[], Any]) -> None:
    def run() -> None:
        mw.shard_module(nn.Linear(1, 1), MESH)
        with pytest.raises(ShardError, match=r"torch.jit.(script|trace) was given DistTensors.*on one device"):
            call()

    mw.simulate(run, MESH)
    assert torch.jit.trace(net(), X)(X).shape == (4, 2)


@torch.jit.script
def doubled(x: Tensor, y: Tensor) -> Tensor:
    return (x.sum() + y.sum()) * 2


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_scripted_functions_are_given_whole_tensors() -> None:
    """They are C++, which would sum this rank's part."""

    def run() -> tuple[Tensor, Tensor]:
        model = sharded()
        x = split().requires_grad_()
        doubled(model(x), x).backward()
        assert doubled(X, X) == 4 * X.sum()
        return mw.unshard(x.grad), mw.unshard(model[0].weight.grad)

    one, x = net(), X.clone().requires_grad_()
    ((one(x).sum() + x.sum()) * 2).backward()
    for made in mw.simulate(run, MESH):
        torch.testing.assert_close(made, (x.grad, one[0].weight.grad))


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_scripted_classes_see_the_names_of_their_function() -> None:
    """TorchScript reads them in the frame that calls ``torch.jit.script``, before a sharded model and after it."""

    def scripted() -> Any:
        @torch.jit.script
        def twice(x: Tensor) -> Tensor:
            return x * 2

        class Held:
            def __init__(self, x: Tensor) -> None:
                self.x = twice(x)

        return torch.jit.script(Held)

    mw.simulate(sharded, MESH)
    torch.testing.assert_close(scripted()(X).x, X * 2)


def test_scripted_modules_that_stay_whole_are_right() -> None:
    def run() -> list[Tensor]:
        model = mw.shard_module(scripted_inside(), MESH)
        model(split()).square().mean().backward()
        return [mw.unshard(p.grad) for p in model.parameters()]

    one = net()
    one(X).square().mean().backward()
    for made in mw.simulate(run, MESH):
        torch.testing.assert_close(made, [p.grad for p in one.parameters()])


@pytest.mark.parametrize(
    ("caller", "says", "not_"),
    [
        ("transformers.trainer", "integrations.trainer.MeshTrainer", "Ray"),
        ("accelerate.accelerator", r"integrations.accelerate.one_device\(\)", "Ray"),
        ("lightning.fabric.fabric", r"integrations.fabric.MeshStrategy\(", "Ray|accelerat"),
        ("ray.train.torch", "Leave out prepare_model", "accelerat"),
        ("script", "Leave it out: mw.shard_module reduces", "Ray|accelerat"),
    ],
)
def test_wrappers_say_what_their_callers_users_can_do(caller: str, says: str, not_: str) -> None:
    package = types.ModuleType(caller)
    exec("def prepare(wrap, model):\n    return wrap(model)\n", package.__dict__)

    def run() -> str:
        with pytest.raises(ShardError, match=says) as error:
            package.prepare(nn.parallel.DistributedDataParallel, sharded())
        return str(error.value)

    import re

    assert not re.search(not_, mw.simulate(run, MESH)[0])


# ---------------------------------------------------------------------------------------------- names of modules


class Blocks(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
        if shared:
            self.again = self.b

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))  # type: ignore[no-any-return]


def told(key: str, option: str, value: Any, shared: bool = False) -> list[Any]:
    """What of an option reaches each parameter."""
    torch.manual_seed(0)
    model = mw.shard_module(Blocks(shared), MESH, **{option: {key: value}})  # type: ignore[arg-type]
    return [(n, p.spec.layout, stored(p)) for n, p in model.named_parameters()]


OPTIONS = {
    "fsdp": "tp",
    "offload": "cpu",
    "precision": mw.Precision(compute=torch.bfloat16, grad_comm=torch.bfloat16),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("module", "glob"), [("a", "a.*"), ("a.1", "a.1.*"), ("a.?", "a.*"), ("b", "b.*"), ("", "*")])
def test_options_take_names_of_modules(module: str, glob: str, option: str) -> None:
    """One resolution of names for all: where a parameter is stored, over what axis, on what device, in what dtypes."""

    def run() -> None:
        made = told(module, option, OPTIONS[option])
        assert made == told(glob, option, OPTIONS[option])
        assert made != told("a.0.bias", option, OPTIONS[option])

    mw.simulate(run, MESH)


def test_a_module_by_its_second_name() -> None:
    mw.simulate(lambda: told("again", "fsdp", "tp", True) == told("b", "fsdp", "tp", True) or 1 / 0, MESH)
    with pytest.raises(ShardError, match=r"b.weight and again.weight are one parameter \(tied\)"):
        mw.simulate(lambda: told("again", "precision", OPTIONS["precision"], True), MESH)


def test_names_of_modules_where_tensors_are_meant() -> None:
    with pytest.raises(ShardError, match=r"'b' is the name of a module.*say 'b\.\*'"):
        mw.simulate(lambda: mw.shard_module(Blocks(), MESH, {"b": {"tp": mw.Shard(0)}}), MESH)
    with pytest.raises(ShardError, match=r"'a.0' is the name of a module"):
        mw.simulate(
            lambda: mw.compile_step(
                Blocks(), lambda m, x: m(x).mean(), None, X[:, :4], mesh=MESH, layouts={"a.0": {"tp": mw.Shard(0)}}
            ),
            MESH,
        )
