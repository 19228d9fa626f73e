"""What is changed in torch: nothing by the import, by the first mesh what the table says; what was taken before it."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import meshwright as mw
from meshwright import torch_changes
from meshwright.cli import app
from tests.support import fresh

FIRST = [t for c in torch_changes.TABLE if c.since == torch_changes.FIRST_MESH for t in c.targets]


@pytest.mark.processes
def test_the_import_changes_nothing_and_the_first_mesh_what_the_table_says() -> None:
    code = f"""
import importlib, inspect, sys, types
import torch, torch.distributed.nn, torch.nested, torch.optim, torch.utils.dlpack
import torch._functorch.autograd_function, torch._functorch.eager_transforms, torch._functorch.vmap
import torch.utils.checkpoint, torch.utils._device, torch.utils._foreach_utils, torch._subclasses.fake_tensor

KEPT = {{("torch._weights_only_unpickler", "_marked_safe_globals_set"), ("torch.ops", "_dir")}}  # registries
KEPT.add(("torch.ops", "meshwright"))
KERNEL = "aten::_local_scalar_dense"

def all_of_torch():
    found, seen = {{}}, set()
    def walk(name, owner):
        if id(owner) in seen:
            return
        seen.add(id(owner))
        for key, value in list(vars(owner).items()):
            if not key.startswith("__warning"):
                found[name, key] = (value, tuple(value)) if type(value) is list else value
            if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                walk(value.__module__ + "." + value.__qualname__, value)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            walk(name, module)
    return found

def changed(now):
    gone = object()
    def same(a, b):
        return a is b or (type(a) is tuple and type(b) is tuple and len(a) == 2 and a[0] is b[0] and a == b)
    return {{k for k, v in now.items() if not same(v, before.get(k, gone))}} - KEPT

import warnings
warnings.simplefilter("ignore")
before, paths, kernel = all_of_torch(), list(sys.meta_path), torch._C._dispatch_dump(KERNEL)
import meshwright as mw
from meshwright import torch_changes
assert changed(all_of_torch()) == set(), changed(all_of_torch())
assert sys.meta_path == paths and torch._C._dispatch_dump(KERNEL) == kernel

mw.Mesh({{"x": 1}})
def canonical(target):
    owner, name = torch_changes.find(target)
    return (owner.__module__ + "." + owner.__qualname__ if isinstance(owner, type) else owner.__name__), name
fsdp = [t for t in {FIRST!r} if "fsdp" in t]
want = {{canonical(t) for t in {FIRST!r} if t not in fsdp}}
want -= {{("torch.optim.optimizer.Optimizer", "step")}}
got = changed(all_of_torch())
assert got == want, (got - want, want - got)
assert len(sys.meta_path) == len(paths) + 1
for target in fsdp:
    owner, name = torch_changes.find(target)
    assert getattr(owner, name).__wrapped__

def trained():
    model = mw.shard_module(torch.nn.Linear(4, 4), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for loss_fn in (torch.nn.functional.cross_entropy, torch.nn.functional.mse_loss):
        for _ in range(2):
            x = mw.shard_tensor(torch.ones(4, 4), mesh, [mw.Shard(0)], check=False)
            loss = loss_fn(model(x), x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item(), float(loss), str(loss)
mesh = mw.Mesh({{"x": 2}})
mw.simulate(trained, mesh)
assert torch._C._dispatch_dump(KERNEL) == kernel, "plain numbers are read in Python"
mw.from_local(torch.tensor(1.0), mesh, [mw.Partial()], check=False)
assert torch._C._dispatch_dump(KERNEL) != kernel
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


BEFORE = """
import copy, io, pickle
import meshwright as mw, torch
from torch import as_tensor, full, tensor

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x

scaled = Scaled.apply
w0, x0 = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
p = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
alone = copy.deepcopy(p)
opt = torch.optim.SGD([p], lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
"""

TAKEN = {
    "autograd function": """
x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
scaled(x, w).sum().backward()
def run():
    a = mw.shard_tensor(x0.clone().requires_grad_(), mesh, {"dp": mw.Shard(0)}).detach().requires_grad_()
    b = mw.shard_tensor(w0.clone(), mesh, {}).requires_grad_()
    made = scaled(a, b)
    made.sum().backward()
    assert torch.equal(mw.unshard(made), x0 * w0)
    assert torch.equal(mw.unshard(a.grad), x.grad) and torch.equal(mw.unshard(b.grad), w.grad)
mw.simulate(run, mesh)
""",
    "function": """
assert tensor is torch.tensor and as_tensor is torch.as_tensor
def run():
    a = mw.shard_tensor(x0, mesh, {"dp": mw.Shard(0)})
    assert torch.equal(tensor(a), x0) and as_tensor(a).shape == (4,)
    assert torch.allclose(full((2,), a.sum()), x0.sum().float())
mw.simulate(run, mesh)
""",
    "scheduler": """
other = torch.optim.SGD([alone], lr=0.1)
(alone * x0).sum().backward()
other.step()
one = mw.Mesh({"dp": 1})
model = torch.nn.Module()
model.p = p
mw.shard_module(model, one, {"p": {"dp": mw.Shard(0)}})
seen = []
opt.register_step_post_hook(lambda o, *_: seen.append(type(o.param_groups[0]["params"][0])))
(p * x0).sum().backward()
opt.step()
schedule.step()
assert torch.equal(mw.unshard(p), alone) and seen == [mw.DistTensor] and opt.param_groups[0]["lr"] < 0.1
opt.step()
assert len(seen) == 2
""",
    "hooks": """
a = mw.shard_tensor(x0, mw.Mesh({"dp": 1}), {"dp": mw.Shard(0)}).requires_grad_()
(a * a).sum().backward()
assert torch.equal(mw.unshard(a.grad), 2 * x0)
assert packed and all(kind is torch.Tensor for kind in packed), packed
""",
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("taken", TAKEN)
def test_what_was_taken_before_the_first_mesh(taken: str) -> None:
    make = 'mesh = mw.Mesh({"dp": 2})\n'
    if taken == "hooks":
        body = "".join(f"    {line}\n" for line in (make + TAKEN[taken]).strip().splitlines())
        code = "packed = []\ndef pack(t):\n    packed.append(type(t))\n    return t\n"
        fresh.run(f"{BEFORE}{code}with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):\n{body}")
    else:
        fresh.run(BEFORE + make + TAKEN[taken])


def test_a_loaded_tensor_brings_its_mesh(tmp_path: Path) -> None:
    """Whatever way a DistTensor comes into a process passes the making of a mesh."""
    x = mw.shard_tensor(torch.ones(3), mw.Mesh({"x": 1}), {"x": mw.Shard(0)})
    torch.save(x, tmp_path / "x.pt")
    fresh.run(f"""
import meshwright as mw, torch
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from meshwright import torch_changes
assert not torch_changes._installed
assert isinstance(torch.load({str(tmp_path / "x.pt")!r}), mw.DistTensor) and torch_changes._installed
""")


def test_threads_that_make_the_first_mesh_together() -> None:
    fresh.run("""
import sys, threading
import meshwright as mw, torch
from meshwright import torch_changes
sys.setswitchinterval(1e-6)
calls, start, late = [], threading.Barrier(8), []
torch_changes.install("torch.nothing", why="counted")(lambda: calls.append(1))
held = [torch.compile]  # a name of a module would follow
def make():
    start.wait()
    mw.Mesh({"x": 2})
    late.append(torch.compile is held[0])
threads = [threading.Thread(target=make) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert calls == [1] and torch.compile.__wrapped__ is held[0] and not any(late)
""")


def test_what_is_registered_later_is_installed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module: types.ModuleType = types.ModuleType("engine")
    user = types.ModuleType("user_of_engine")
    module.run = user.go = lambda: 1  # type: ignore[attr-defined]
    for one in (module, user):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(torch_changes, "TABLE", [])
    mw.Mesh({"x": 1})
    make = torch_changes.replace("engine.run", "engine.missing", why="a test")(lambda run, name: lambda: run() + 1)
    assert (module.run(), user.go()) == (2, 2)
    assert not hasattr(module, "missing")
    assert make(lambda: 5, "run")() == 6
    assert [torch_changes.TorchChange(("engine.run", "engine.missing"), "a test")] == torch_changes.TABLE


def test_what_cannot_be_installed_is_said_by_each_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_changes, "TABLE", [])
    monkeypatch.setattr(torch_changes, "_installed", False)
    tries: list[int] = []

    @torch_changes.install("engine.run", why="a test")
    def change() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise AttributeError("no engine")

    for _ in range(2):
        with pytest.raises(AttributeError, match="no engine"):
            mw.Mesh({"x": 1})
    mw.Mesh({"x": 1})
    mw.Mesh({"x": 1})
    assert len(tries) == 3


def test_doctor_lists_them() -> None:
    text = CliRunner().invoke(app, ["doctor", "--torch-changes"]).output
    assert len(torch_changes.TABLE) > 20
    for change in torch_changes.TABLE:
        assert f"changed in torch from {change.since} on, undone {change.until}: {change.why}" in text
        assert all(target in text for target in change.targets)


TABLES = """
import torch, torch._dynamo.trace_rules, torch.fx.experimental.migrate_gradual_types.constraint_generator as rules
import torch.jit._builtins, torch.utils._device

def tables():
    ids = torch.jit._builtins._get_builtin_table()
    return {
        "device": lambda f: f in torch.utils._device._device_constructors(),
        "names": lambda f: torch.overrides.resolve_name(f),
        "overrides": lambda f: f in torch.overrides.get_testing_overrides(),
        "ignored": lambda f: f in torch.overrides.get_ignored_functions(),
        "unwrapped": lambda f: f in torch.overrides.get_default_nowrap_functions(),
        "dynamo": lambda f: torch._dynamo.trace_rules.get_torch_obj_rule_map().get(f),
        "fx": lambda f: rules._INFERENCE_RULES.get(f),
        "jit": lambda f: ids.get(id(f)),
        "a user's": lambda f: f in users,
    }
"""


@pytest.mark.thin(1)
@pytest.mark.parametrize("filled", ["before", "after"])
def test_tables_of_torch_know_what_was_replaced(filled: str) -> None:
    """Whatever the order of the first mesh and of the first use of a table: it has both, or neither."""
    functions = [t for t in FIRST if "fsdp" not in t and not t.endswith(("__", ".data", ".apply", ".step"))]
    fresh.run(f"""{TABLES}
from meshwright import torch_changes
import meshwright as mw
targets = {functions!r} + ["torch.jit.script", "torch.jit.trace"]
at = {{t: torch_changes.find(t) for t in targets}}
before = {{t: getattr(owner, name) for t, (owner, name) in at.items() if hasattr(owner, name)}}
users = {{f for f in before.values() if getattr(f, "__hash__", None)}}
asked = tables()
if {filled == "before"}:
    known = {{(t, n): ask(f) for t, f in before.items() if type(f) is not list for n, ask in asked.items()}}
mw.Mesh({{"x": 1}})
from meshwright.tensor.autograd_functions import guard_scripts
guard_scripts()
methods, wrong = ("Optimizer", "_prepare_trace", "_CheckpointFrame", "Module", "__torch_function__"), []
for t, f in before.items():
    owner, name = at[t]
    now = getattr(owner, name)
    if type(f) is list or any(m in t for m in methods):
        continue
    assert now is not f and now == f and f == now and hash(now) == hash(f) and now.__wrapped__ is f, t
    wrong += [(t, n) for n, ask in asked.items() if ask(now) != ask(f)]
    if {filled == "before"}:
        wrong += [(t, n) for n, ask in asked.items() if ask(now) != known[t, n]]
assert not wrong, wrong
assert asked["device"](torch.arange) and asked["jit"](torch.full) == "aten::full" and asked["fx"](torch.arange)
assert asked["names"](torch.Tensor.new_full) == "torch.Tensor.new_full" and asked["dynamo"](torch.tensor)
""")


@pytest.mark.thin(1)
@pytest.mark.parametrize("filled", ["before", "after"])
def test_factories_follow_devices_and_modes(filled: str) -> None:
    fresh.run(f"""
import copy, pickle, threading, torch
import meshwright as mw
from torch.overrides import TorchFunctionMode
if {filled == "before"}:
    with torch.device("meta"):
        torch.ones(1)
makers = [lambda: torch.ones(2), lambda: torch.arange(2.0), lambda: torch.full((2,), 0.5), lambda: torch.tensor([1.0])]
makers += [lambda: torch.as_tensor([1.0]), lambda: torch.asarray([1.0]), lambda: torch.scalar_tensor(1.0)]
kinds = lambda: {{make().device.type for make in makers}}
around = torch.device("meta")
around.__enter__()
mw.Mesh({{"dp": 2}})
assert kinds() == {{"meta"}}
with torch.device("cpu"):
    assert kinds() == {{"cpu"}}
assert kinds() == {{"meta"}} and torch.full((2,), 1.0, device="cpu").is_cpu
around.__exit__(None, None, None)
assert kinds() == {{"cpu"}}
torch.set_default_device("meta")
assert kinds() == {{"meta"}}
torch.set_default_device(None)
seen = []
def other():
    with torch.device("meta"):
        seen.append(kinds())
    seen.append(kinds())
with torch.device("meta"):
    threads = [threading.Thread(target=other) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
assert seen.count({{"meta"}}) == seen.count({{"cpu"}}) == 2, seen

class Counts(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return func(*args, **kwargs or {{}})
seen.clear()
with Counts(), Counts():
    x = torch.full((2,), 1.0)
    x.new_full((2,), 2.0), torch.tensor(x)
assert [f for f in seen if f is torch.full] == [torch.full] * 2
assert sum(f is torch.Tensor.new_full for f in seen) == sum(f is torch.tensor for f in seen) == 2
for f in (torch.full, torch.Tensor.new_full, torch.compile):
    assert copy.deepcopy(f) is f and pickle.loads(pickle.dumps(f)) == f
class Holds:
    make, compile = torch.tensor, torch.compile
assert Holds().make([1]).tolist() == [1] and Holds().compile.__self__
class Traced(torch.nn.Module):
    def forward(self, x):
        return torch.full((2,), x) + torch.arange(2)
assert "torch.full((2,), x)" in torch.fx.symbolic_trace(Traced()).code
""")


def test_what_is_replaced_runs_where_modes_are_on_and_disabled() -> None:
    mw.Mesh({"dp": 1})
    with torch.device("meta"), torch._C.DisableTorchFunction():
        assert torch.arange(3).device.type == "cpu"
        t = torch.zeros(2)
        assert t.set_(torch.ones(2)).sum() == 2
