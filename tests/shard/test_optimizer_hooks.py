"""What users see around an optimizer's own step: DistTensors with global values, all of them gathered."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import meshwright as mw
from meshwright.errors import ProgramError, ShardError

DP = mw.Mesh({"dp": 2})
THREE = mw.Mesh({"dp": 3})
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
O = torch.optim  # noqa: E741
# Replicated, states split, stored split, and split by layout (uneven, on three ranks empty too).
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "states": {"shard_states": "dp"},
    "stored": {"fsdp": "dp"},
    "split": {"layouts": {"0.weight": {"dp": mw.Shard(0)}, "2.*": {"dp": mw.Shard(0)}}},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def made(
    way: str | None, mesh: mw.Mesh, kind: Callable[..., Any] = O.AdamW, early: bool = False, **options: Any
) -> tuple[nn.Sequential, Any]:
    """A model and its optimizer, on one device for way None."""
    model = network()
    options.setdefault("lr", 0.1)
    if way is None:
        return model, kind(model.parameters(), **options)
    given = dict(WAYS[way])
    over = given.pop("shard_states", None)
    opt = kind(model.parameters(), **options) if early else None
    mw.shard_module(model, mesh, given.pop("layouts", None), **given)
    opt = opt or kind(model.parameters(), **options)
    by = None if kind.__module__.startswith("torch") else "element"
    return model, mw.shard_optimizer(opt, shard_states=over, by=by)


def backward(model: nn.Module, mesh: mw.Mesh, distributed: bool, scale: float = 1.0) -> Any:
    x: Any = mw.shard_tensor(X, mesh, {"dp": mw.Shard(0)}) if distributed else X
    loss = (model(x) * scale).square().mean()
    loss.backward()
    return loss


def whole(t: Any) -> torch.Tensor:
    return (mw.unshard(t) if isinstance(t, mw.DistTensor) else t).detach().clone()


def compare(run: Callable[[str | None, mw.Mesh], Any], way: str, mesh: mw.Mesh) -> None:
    """`run` gives tensors and numbers: on the mesh those of one device, on every rank."""
    want = run(None, mesh)
    for got in mw.simulate(lambda: run(way, mesh), mesh):
        torch.testing.assert_close(got, want)


ALL = pytest.mark.parametrize(
    ("way", "mesh"),
    [
        *(pytest.param(w, DP, id=w) for w in WAYS),
        pytest.param("split", THREE, id="split-uneven"),
        *(pytest.param(w, THREE, id=f"{w}-uneven", marks=pytest.mark.long) for w in WAYS if w != "split"),
    ],
)


@ALL
@pytest.mark.parametrize("where", ["own", pytest.param("all", marks=pytest.mark.long)])
def test_hooks_see_global_values(way: str, mesh: mw.Mesh, where: str) -> None:
    """A pre hook clips and changes the rate, a post hook renormalises; both read parameters, gradients and states."""

    of: dict[int, Any] = {}

    def run(way: str | None, mesh: mw.Mesh) -> Any:
        model, opt = made(way, mesh)
        seen: list[torch.Tensor] = []

        def note(opt: Any) -> None:
            for p in opt.param_groups[0]["params"]:
                assert isinstance(p, mw.DistTensor) == (way is not None)
                seen.extend(whole(t) for t in (p, p.grad, p.norm(), p.grad.norm()))
                for v in opt.state[p].values():
                    seen.extend((whole(v), whole(v.norm())))

        def before(o: Any, args: Any, kwargs: Any) -> Any:
            note(o)
            seen.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            o.param_groups[0]["lr"] *= 0.5
            o.param_groups[0]["weight_decay"] = 0.3
            return args, kwargs

        def after(o: Any, args: Any, kwargs: Any) -> None:
            note(o)
            assert args[0] is opt
            with torch.no_grad():
                model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True))
            seen.append(whole(model[0].weight))

        if where == "own":
            opt.register_step_pre_hook(before)
            opt.register_step_post_hook(after)
        else:
            of[id(opt)] = before, after
        for _ in range(3):
            backward(model, mesh, way is not None)
            opt.step()
            opt.zero_grad()
        assert [g["lr"] for g in opt.param_groups] == [0.1 / 8]
        return seen + [whole(p) for p in model.parameters()]

    nothing = (lambda *_: None,) * 2
    handles = [
        register_optimizer_step_pre_hook(lambda o, *a: of.get(id(o), nothing)[0](o, *a)),
        register_optimizer_step_post_hook(lambda o, *a: of.get(id(o), nothing)[1](o, *a)),
    ]
    try:
        compare(run, way, mesh)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("way", WAYS)
def test_a_class_whose_step_calls_that_of_its_base(way: str) -> None:
    """Its own work is about each rank's part; hooks of the inner call, as PyTorch calls them, see what users see."""

    class Decaying(O.AdamW):
        def step(self, closure: Any = None) -> Any:
            for g in self.param_groups:
                for p in g["params"]:
                    with torch.no_grad():
                        p.mul_(0.9)
            loss = super().step(closure)
            for g in self.param_groups:
                for p in g["params"]:
                    with torch.no_grad():
                        p.mul_(0.9)
            return loss

    def run(way: str | None, mesh: mw.Mesh) -> Any:
        model, opt = made(way, mesh, Decaying)
        model[2].requires_grad_(False)  # decays all the same
        norms: list[torch.Tensor] = []
        for hooked in (False, True):
            if hooked:
                opt.register_step_pre_hook(lambda o, *_: norms.append(whole(model[0].weight.norm())))
                opt.register_step_post_hook(lambda o, *_: norms.append(whole(model[0].weight.norm())))
            backward(model, mesh, way is not None)
            opt.step()

            def closure() -> Any:
                opt.zero_grad()
                return backward(model, mesh, way is not None)

            norms.append(whole(opt.step(closure)))
        return [*norms, *(whole(p) for p in model.parameters())]

    compare(run, way, DP)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["pre", "post", "within", "interrupt"])
def test_a_step_that_raises(way: str, where: str) -> None:
    """Ranks agree on what they hold afterwards, and training goes on as on one device."""

    class Stopping(O.AdamW):
        stop: Any = None

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.stop:
                raise self.stop

    def run(way: str | None, mesh: mw.Mesh) -> Any:
        model, opt = made(way, mesh, Stopping if where in ("within", "interrupt") else O.AdamW)
        error = KeyboardInterrupt if where == "interrupt" else ZeroDivisionError

        def boom(*_: Any) -> None:
            raise error("boom")

        backward(model, mesh, way is not None)
        opt.step()
        opt.stop = error("boom")
        handle = None if where not in ("pre", "post") else getattr(opt, f"register_step_{where}_hook")(boom)
        with pytest.raises(error, match="boom"):
            opt.step()
        seen = [whole(p) for p in model.parameters()]
        if way is not None:
            assert all(type(p) is type(p.grad) is mw.DistTensor for p in model.parameters())
        opt.stop = None
        if handle is not None:
            handle.remove()
        opt.step()
        return [*seen, *(whole(p) for p in model.parameters())]

    compare(run, way, DP)


@ALL
def test_states_are_read_and_replaced(way: str, mesh: mw.Mesh) -> None:
    """As DistTensors; a state may be replaced by one of any layout, and by a plain tensor of the global shape."""

    def run(way: str | None, mesh: mw.Mesh) -> Any:
        model, opt = made(way, mesh, O.SGD, momentum=0.9)
        seen: list[Any] = []

        def split(t: Any) -> Any:
            return mw.shard_tensor(t, mesh, {"dp": mw.Shard(0)}) if way else t

        zeros: list[Callable[[Any], Any]] = [
            torch.zeros_like,
            lambda p: torch.full(tuple(p.shape), 0.5),
            lambda p: torch.arange(float(p.numel())).view(tuple(p.shape)),
            lambda p: (
                mw.shard_tensor(torch.ones(tuple(p.shape)), mesh, {"dp": mw.Shard(0)}) if way else torch.ones_like(p)
            ),
            lambda p: p.detach() * 2,
        ]
        for new in zeros:
            backward(model, mesh, way is not None)
            opt.step()
            for p in model.parameters():
                held = opt.state[p]["momentum_buffer"]
                assert isinstance(held, mw.DistTensor) == (way is not None)
                seen += [whole(held), whole(held.norm())]
                opt.state[p]["momentum_buffer"] = new(p)
                opt.state[p]["momentum_buffer"].mul_(0.5)
            opt.step()
            seen += [whole(opt.state[p]["momentum_buffer"]) for p in model.parameters()]
        return seen + [whole(p) for p in model.parameters()]

    compare(run, way, mesh)


@ALL
def test_states_are_cleared_between_steps(way: str, mesh: mw.Mesh) -> None:
    """As many as before are made anew, by the next step."""

    def run(way: str | None, mesh: mw.Mesh) -> Any:
        model, opt = made(way, mesh, O.Adam)
        seen: list[Any] = []
        for clear in (False, True, False, True, False):
            backward(model, mesh, way is not None)
            opt.step()
            held = [opt.state[p]["exp_avg"] for p in model.parameters()]
            assert all(isinstance(t, mw.DistTensor) == (way is not None) for t in held)
            seen += [whole(t) for t in held]
            if clear:
                opt.state.clear()
        return seen + [whole(p) for p in model.parameters()]

    compare(run, way, mesh)


@pytest.mark.parametrize("way", ["states", "stored", "split"])
def test_a_state_of_the_size_of_a_rank_s_part_is_refused(way: str) -> None:
    """Before anything is loaded, on every rank."""

    def run() -> None:
        model, opt = made(way, DP)
        backward(model, DP, True)
        opt.step()
        before = copy.deepcopy(opt.state_dict())
        for shape in ((2, 5), (8, 5), (4, 4)):
            state = copy.deepcopy(before)
            state["param_groups"][0]["lr"] = 7.0
            state["state"][0]["exp_avg"] = torch.ones(shape)
            with pytest.raises(ShardError, match=r"'exp_avg' of 0.weight has shape .*global shape \(4, 5\)"):
                opt.load_state_dict(state)
            state["state"][0]["exp_avg"] = mw.shard_tensor(torch.ones(shape), DP, {"dp": mw.Shard(0)})
            with pytest.raises(ShardError, match=r"'exp_avg' of 0.weight has"):
                opt.load_state_dict(state)
        torch.testing.assert_close(whole(opt.state[model[0].weight]["exp_avg"]), whole(before["state"][0]["exp_avg"]))
        assert opt.param_groups[0]["lr"] == 0.1
        opt.state[model[0].weight]["exp_avg"] = torch.ones(2, 5)
        with pytest.raises(ShardError, match=r"'exp_avg' of 0.weight has"):
            opt.step()

    mw.simulate(run, DP)


def test_classes_that_say_what_is_copied_of_them() -> None:
    class Everything(O.SGD):
        def __getstate__(self) -> Any:
            return dict(self.__dict__)

    class Little(O.SGD):
        def __getstate__(self) -> Any:
            return {"defaults": self.defaults, "state": self.state, "param_groups": self.param_groups}

    def run(kind: Any) -> None:
        model, opt = made("states", DP, kind, momentum=0.9)
        backward(model, DP, True)
        opt.step()
        other, copied = copy.deepcopy((model, opt))
        for m, o in ((model, opt), (other, copied)):
            m.zero_grad()
            backward(m, DP, True)
            o.step()
            assert o.state[m[0].weight]["momentum_buffer"].placements == (mw.Shard(0),)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(a), whole(b))

    for kind in (Everything, Little):
        mw.simulate(lambda kind=kind: run(kind), DP)


# -- captured steps ------------------------------------------------------------------------------------------


def _hook(model: nn.Module, opt: Any) -> Any:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return opt.register_step_pre_hook(clip)


def _every_hook(model: nn.Module, opt: Any) -> Any:
    def decay(o: Any, *_: Any) -> None:
        if o is opt:
            with torch.no_grad():
                for p in model.parameters():
                    p.div_(1 + p.norm())

    return register_optimizer_step_post_hook(decay)


def _replaced(model: nn.Module, opt: Any) -> None:
    inner = opt.step

    def step(_: Any, *args: Any) -> Any:
        made = inner(*args)
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm())  # type: ignore[index,operator,union-attr]
        return made

    opt.step = types.MethodType(step, opt)


@pytest.mark.parametrize("add", [_hook, _every_hook, _replaced])
@pytest.mark.parametrize("kind", [O.AdamW, pytest.param(O.RMSprop, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "way",
    [{"shard_states": "dp"}, *(pytest.param(w, marks=pytest.mark.long) for w in ({}, {"fsdp": "dp"}))],
    ids=["states", "plain", "stored"],
)
def test_a_captured_step_runs_them(add: Any, kind: Any, way: dict[str, Any]) -> None:
    """Behind the program; those that come later are refused by name, and schedulers are not meant."""

    def run(way: dict[str, Any] | None) -> Any:
        model = network()
        opt = kind(model.parameters(), lr=0.1)
        handle = add(model, opt)
        schedule = O.lr_scheduler.StepLR(opt, 1, 0.5)
        captured: Any = None
        if way is not None:
            captured = mw.compile_step(
                model, lambda m, x: m(x).square().mean(), opt, X, mesh=DP, batch={"dp": mw.Shard(0)}, **way
            )
        for _ in range(3):
            if captured is None:
                backward(model, DP, False)
                opt.step()
                opt.zero_grad()
            else:
                captured(X)
            schedule.step()
        if handle is not None:
            handle.remove()
        return [whole(p) for p in model.parameters()]

    want = run(None)
    # Ranks one after the other would see each other's hook of all optimizers.
    for got in mw.simulate(lambda: run(way), DP):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("add", [_hook, _every_hook, _replaced])
def test_what_comes_after_the_capture_is_refused(add: Any) -> None:
    mesh = mw.Mesh({"dp": 1}) if add is _every_hook else DP

    def run() -> None:
        model = network()
        opt = O.AdamW(model.parameters(), lr=0.1)
        step = mw.compile_step(model, lambda m, x: m(x).square().mean(), opt, X, mesh=mesh, batch={"dp": mw.Shard(0)})
        schedule = O.lr_scheduler.StepLR(opt, 1, 0.5)
        step(X)
        schedule.step()
        assert isinstance(opt.state[model[0].weight]["exp_avg"], mw.DistTensor)
        before = whole(model[0].weight)
        handle = add(model, opt)
        with pytest.raises(
            ProgramError, match=r"AdamW has (the step hook (clip|.*decay)|a step\(\) of its own).*behind it"
        ):
            step(X)
        assert torch.equal(whole(model[0].weight), before)
        if handle is None:
            del opt.step
        else:
            handle.remove()
        step(X)

    mw.simulate(run, mesh)
