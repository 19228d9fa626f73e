"""What users do to parameters, gradients, states and options between two steps: the next step sees it.

An optimizer is stepped on what was the same objects at its last step without looking at each of them again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.multiprocessing.reductions import StorageWeakRef

import meshwright as mw
from meshwright.errors import ShardError

O = torch.optim  # noqa: E741
MESH = mw.Mesh({"dp": 3})
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KINDS: dict[str, Callable[[Any], Any]] = {
    "foreach": lambda ps: O.AdamW(ps, lr=0.1, foreach=True),
    "fused": lambda ps: O.AdamW(ps, lr=0.1, fused=True),
    "one by one": lambda ps: O.Adam(ps, lr=0.1, amsgrad=True, foreach=False),
    "capturable": lambda ps: O.RAdam(ps, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "momentum": lambda ps: O.SGD(ps, lr=0.1, momentum=0.9),
    "sums": lambda ps: O.Adagrad(ps, lr=0.1),
}
# 1.weight is square: what turns it leaves its layout, and its memory, what they are.
OTHERS = [k for k in KINDS if k not in ("foreach", "fused")]
WAYS: dict[str, dict[str, Any]] = {"whole": {}, "split": {"0.weight": {"dp": mw.Shard(0)}, "2.*": {"dp": mw.Shard(0)}}}


class Run:
    """A model and its optimizer, on one device or on ranks."""

    def __init__(self, kind: str, way: str | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 2)).double()
        self.kind, self.way = kind, way
        if way is not None:
            mw.shard_module(self.model, MESH, WAYS[way])
        self.opt = KINDS[kind](list(self.model.parameters()))

    def backward(self) -> None:
        x: Any = X if self.way is None else mw.shard_tensor(X, MESH, {"dp": mw.Shard(0)})
        self.model(x).square().mean().backward()

    def step(self, set_to_none: bool = True) -> None:
        self.backward()
        self.opt.step()
        self.opt.zero_grad(set_to_none=set_to_none)

    def entry(self, i: int = 0) -> Any:
        """The states of a parameter."""
        return self.opt.state[self.params[i]]

    def state(self, i: int = 0) -> tuple[str, Any]:
        """One of one value per element."""
        return next((k, v) for k, v in self.entry(i).items() if v is not None and v.ndim)

    @property
    def params(self) -> list[Any]:
        return list(self.model.parameters())


def replace_state(run: Run) -> None:
    k, v = run.state()
    run.entry()[k] = v * 2


def write_to_state(run: Run) -> None:
    run.state()[1].mul_(3)


def set_data_of_state(run: Run) -> None:
    _, v = run.state()
    v.data = v.detach() * 2


def turn_state(run: Run) -> None:
    run.state(2)[1].t_()


def set_state(run: Run) -> None:
    with torch.no_grad():
        run.state()[1].set_(run.state()[1] + 1)


def swap_states(run: Run) -> None:
    (k, v), (_, w) = run.state(2), run.state(2)
    torch.utils.swap_tensors(v, w + 1)
    assert run.entry(2)[k] is v


def delete_states(run: Run) -> None:
    del run.opt.state[run.params[0]]


def clear_states(run: Run) -> None:
    run.opt.state.clear()


def replace_entry(run: Run) -> None:
    k, v = run.state()
    run.opt.state[run.params[0]] = {**run.entry(), k: v + 1}


def set_data(run: Run) -> None:
    run.params[0].data = run.params[0].detach() * 2


def turn_data(run: Run) -> None:
    p = run.params[2]
    p.data = p.data.t()


def turn(run: Run) -> None:
    with torch.no_grad():
        run.params[2].t_()


def swap_parameters(run: Run) -> None:
    p = run.params[2]
    other = nn.Parameter(p.detach() * 2)
    p.grad = None
    torch.utils.swap_tensors(p, other)


def write_to_parameter(run: Run) -> None:
    with torch.no_grad():
        run.params[0].mul_(0.5)


def freeze(run: Run) -> None:
    run.params[0].requires_grad_(False)


def change_options(run: Run) -> None:
    g = run.opt.param_groups[0]
    if isinstance(g["lr"], torch.Tensor):
        g["lr"].mul_(0.5)
    else:
        g["lr"] *= 0.5
    g["weight_decay"] = 0.1


def maximize(run: Run) -> None:
    run.opt.param_groups[0]["maximize"] = True


def change_momenta(run: Run) -> None:
    g = run.opt.param_groups[0]
    g.update({"betas": (0.5, 0.9)} if "betas" in g else {"momentum": 0.0} if "momentum" in g else {"eps": 0.1})


def change_kernels(run: Run) -> None:
    run.opt.param_groups[0].update(foreach=False, fused=False)


def reorder(run: Run) -> None:
    run.opt.param_groups[0]["params"].reverse()


def leave_one_out(run: Run) -> None:
    run.backward()
    run.params[1].grad = None
    run.opt.step()
    run.opt.zero_grad()


def assign_gradient(run: Run) -> None:
    run.backward()
    run.params[1].grad = run.params[1].grad * 2
    run.opt.step()
    run.opt.zero_grad()


def regroup(run: Run) -> None:
    g = run.opt.param_groups[0]
    run.opt.param_groups.append({**g, "lr": g["lr"] * 0.5, "params": [g["params"].pop()]})


def load(run: Run) -> None:
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))


def copied(run: Run) -> None:
    run.model, run.opt = copy.deepcopy((run.model, run.opt))


def differentiate(run: Run) -> None:
    """Its code then asks tensors what they are: the step runs on the parameters themselves."""
    change_options(run)
    run.opt.param_groups[0].update(foreach=False, fused=False, differentiable=True)


def step_in_inference_mode(run: Run) -> None:
    change_options(run)
    run.backward()
    with torch.inference_mode():
        run.opt.step()
    run.opt.zero_grad()


def replace_collection(run: Run) -> None:
    """Of this optimizer alone, by what asks it for the states of its own parameters."""
    own = run.opt._init_group
    run.opt._init_group = lambda group, *lists: own({**group, "params": group["params"][1:]}, *lists)


def nothing(run: Run) -> None:
    pass


BETWEEN = [
    nothing, replace_state, write_to_state, set_data_of_state, turn_state, set_state, swap_states, delete_states,
    clear_states, replace_entry, set_data, turn_data, turn, swap_parameters, write_to_parameter, freeze,
    change_options, maximize, change_momenta, change_kernels, reorder, leave_one_out, assign_gradient, regroup, load,
    copied, differentiate, step_in_inference_mode, replace_collection,
]  # fmt: skip


def outcome(kind: str, way: str | None, between: Callable[[Run], None], set_to_none: bool) -> list[torch.Tensor]:
    run = Run(kind, way)
    for _ in range(3):
        run.step(set_to_none)
    between(run)
    for _ in range(3):
        run.step(set_to_none)
    values = [*run.params, *(v for p in run.params for v in run.opt.state.get(p, {}).values() if v is not None)]
    return [(mw.unshard(v) if isinstance(v, mw.DistTensor) else v).detach().clone() for v in values]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["foreach", "fused", *(pytest.param(k, marks=pytest.mark.long) for k in OTHERS)])
def test_the_next_step_sees_it(kind: str, between: Callable[[Run], None]) -> None:
    if kind == "fused" and between in (turn, turn_data):
        pytest.skip("fused kernels of PyTorch walk through memory in its order, whatever the strides")
    keep = (True,) if between is swap_parameters else (True, False)  # set_to_none
    want = [outcome(kind, None, between, k) for k in keep]
    for got in mw.simulate(lambda: [outcome(kind, "split", between, k) for k in keep], MESH):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["foreach", "fused", "momentum"])
@pytest.mark.parametrize("way", list(WAYS))
def test_what_is_read_without_gradients_between_steps(kind: str, way: str) -> None:
    """What parameters and states are converted to is kept by their versions, which fused kernels do not count."""

    def run(way: str | None) -> list[torch.Tensor]:
        made, seen = Run(kind, way), []
        x: Any = X if way is None else mw.shard_tensor(X, MESH, {"dp": mw.Shard(0)})
        for _ in range(3):
            with torch.no_grad():
                seen.append(made.model(x))
                seen += [
                    x[0] @ v.t() for p in made.opt.state for k, v in made.opt.state[p].items() if v.shape == (5, 4)
                ]
            made.step()
        return [(mw.unshard(v) if isinstance(v, mw.DistTensor) else v).detach().clone() for v in seen]

    want = run(None)
    for got in mw.simulate(lambda: run(way), MESH):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_a_step_holds_no_gradient(kind: str) -> None:
    """Those that a parameter does not have any more are gone, with their memory."""

    def run() -> None:
        p: Any = mw.shard_tensor(torch.ones(6, 2), MESH, {"dp": mw.Shard(0)}).requires_grad_()
        opt = KINDS[kind]([p])
        for _ in range(3):
            p.square().sum().backward()
            opt.step()
            memory = StorageWeakRef(p.grad.to_local().untyped_storage())
            opt.zero_grad()
            assert memory.expired()

    mw.simulate(run, MESH)


def test_a_gradient_that_has_become_sparse_is_refused() -> None:
    """What the first steps listed, of gradients that were not, is not taken for it."""

    def run() -> None:
        w: Any = mw.shard_tensor(torch.ones(6, 2), MESH, {}).requires_grad_()
        ids: Any = mw.shard_tensor(torch.tensor([1, 2]), MESH, {})
        opt = O.AdamW([w], foreach=True)
        for step in range(5):
            nn.functional.embedding(ids, w, sparse=step == 4).sum().backward()
            if step == 4:
                assert w.grad.is_sparse
                with pytest.raises(RuntimeError, match="does not support sparse gradients"):
                    opt.step()
            else:
                opt.step()
            opt.zero_grad()

    mw.simulate(run, MESH)


def test_lists_of_steps_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch collects them in Python, of each parameter: in the first two steps, whatever a scheduler does."""
    own, called = O.Adam._init_group, []

    def counted(*args: Any) -> Any:
        called.append(None)
        return own(*args)

    monkeypatch.setattr(O.Adam, "_init_group", counted)

    def run() -> None:
        made = Run("foreach", "split")
        schedule = O.lr_scheduler.ExponentialLR(made.opt, 0.9)
        for _ in range(6):
            made.step()
            schedule.step()

    mw.simulate(run, MESH)
    assert len(called) == 2 * MESH.size


@pytest.mark.parametrize("over", [None, "dp"])
def test_what_is_said_for_one_step_is_forgotten(over: str | None) -> None:
    """A scale that ``GradScaler`` gives a fused step, and takes away after it, is not that of the next one."""

    def run(way: str | None) -> list[torch.Tensor]:
        made = Run("fused", way)
        if way is not None:
            mw.shard_optimizer(made.opt, shard_states=over)
        made.step()
        made.backward()
        made.opt.grad_scale, made.opt.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
        made.opt.step()
        del made.opt.grad_scale, made.opt.found_inf
        made.opt.zero_grad()
        made.step()
        assert not hasattr(made.opt, "grad_scale")
        return [(mw.unshard(p) if way is not None else p).detach().clone() for p in made.params]

    want = run(None)
    for got in mw.simulate(lambda: run("whole"), MESH):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


class Own(O.Optimizer):
    """It has one of its methods under another name, which is bound to it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = self._with_momentum

    def _with_momentum(self, p: torch.Tensor, lr: float) -> None:
        state = self.state[p]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(p)
        state["sum"].mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
        p.add_(state["sum"], alpha=-lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for g in self.param_groups:
            for p in g["params"]:
                self.update(p, g["lr"])


@pytest.mark.parametrize("options", [{}, {"shard_states": "dp"}], ids=["whole", "over"])
def test_methods_bound_to_the_optimizer_have_its_states(options: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(KINDS, "own", Own)

    def run(way: str | None) -> list[torch.Tensor]:
        made = Run("own", way)
        if way is not None:
            mw.shard_optimizer(made.opt, by="element", **options)
        for _ in range(3):
            made.step()
            assert made.opt.update.__self__ is made.opt
        values = [*made.params, *(made.state(i)[1] for i in range(len(made.params)))]
        return [(mw.unshard(v) if way is not None else v).detach().clone() for v in values]

    want = run(None)
    for got in mw.simulate(lambda: run("whole"), MESH):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_collection_that_asks_the_optimizer_itself_is_refused_where_states_are_split() -> None:
    def run() -> None:
        made = Run("foreach", "whole")
        mw.shard_optimizer(made.opt, shard_states="dp")
        made.step()
        before = [mw.unshard(p) for p in made.params]
        replace_collection(made)
        with pytest.raises(ShardError, match=r"AdamW._init_group was patched on the instance.*by='element'"):
            made.step()
        torch.testing.assert_close([mw.unshard(p) for p in made.params], before, rtol=0, atol=0)
        made.opt.zero_grad()
        del made.opt._init_group
        made.step()

    mw.simulate(run, MESH)


class Listing(torch.optim.AdamW):
    """A class of one's own, whose step runs on the parameters themselves."""

    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Listing])
@pytest.mark.parametrize("how", ["swapped", "resharded", "differentiable"])
def test_a_gradient_that_lies_otherwise_is_stepped_with_and_stays(kind: Any, how: str) -> None:
    """``p.grad`` assigned in another layout than the parameter's."""
    mesh = mw.Mesh({"a": 3})
    torch.manual_seed(0)
    values = [torch.randn(7, 5, dtype=torch.float64) for _ in range(4)]

    def run(on_mesh: bool) -> list[torch.Tensor]:
        b, c = (nn.Parameter(v.clone()) for v in values[:2])
        if on_mesh:
            b, c = (
                nn.Parameter(mw.shard_tensor(p.detach(), mesh, lies))
                for p, lies in zip((b, c), ({"a": mw.Shard(1)}, {}), strict=True)
            )
        opt: Any = kind([b, c], lr=0.1)
        if on_mesh:
            opt = mw.shard_optimizer(opt, by="element")
        for i in range(3):
            (b * values[2] + c * values[3] * (i + 1)).square().sum().backward()
            if how == "differentiable" and i:
                opt.param_groups[0]["weight_decay"] = 0.5
            b.grad, c.grad = c.grad, b.grad
            if how == "resharded" and on_mesh:
                b.grad = mw.reshard(b.grad, {"a": mw.Shard(0)})
            given = b.grad, c.grad
            opt.step()
            assert all(p.grad is g or p.grad.shape == g.shape for p, g in zip((b, c), given, strict=True))
            if on_mesh and how == "resharded":
                assert b.grad.layout == given[0].layout
            opt.zero_grad()
        return [mw.unshard(t.detach()) if on_mesh else t.detach() for t in (b, c, opt.state[b]["exp_avg"])]

    for found, wanted in zip(mw.simulate(lambda: run(True), mesh)[0], run(False), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
