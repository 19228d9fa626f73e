"""What optimizers are said to take together, and what is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import ShardError
from meshwright.shard.optimizers.kinds import ELEMENTWISE
from meshwright.shard.optimizers.probe import refuted
from tests.shard.test_optimizer_owners import MESHES, Net, data, layouts, loss_of, net, off, on, steps
from tests.support.optimizers import SOAP, Lamb, Mixer, Prodigy, Shampoo, Signs

Tensor = torch.Tensor
TWO, BOTH, THREE = MESHES["dp=2"], MESHES["dp=2,tp=2"], MESHES["dp=3"]
MATRICES = ("up.weight", "down.weight", "out.weight")


@pytest.mark.parametrize(
    ("make", "element", "parameter"),
    [
        *((lambda p, k=k: getattr(torch.optim, k)(p), True, True) for k in sorted(ELEMENTWISE)),
        (lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]), False, True),
        (lambda p: torch.optim.Adafactor(p), False, True),
        (Lamb, False, True), (Shampoo, False, True), (SOAP, False, True),
        (Prodigy, False, False), (Mixer, False, False), (Signs, True, True),
    ],
)  # fmt: skip
def test_classes_on_stand_ins(make: Any, element: bool, parameter: bool) -> None:
    opt = make(list(net().parameters()))
    state, before = torch.random.get_rng_state(), copy.deepcopy(opt.state_dict())
    assert (not refuted(opt, "element"), not refuted(opt, "parameter")) == (element, parameter)
    assert str(opt.state_dict()) == str(before)
    assert torch.equal(state, torch.random.get_rng_state())


class Reads(Signs):
    """Stops where a gradient is large: shards would decide for themselves."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return super().update(p, g, state, group) if g.abs().max().item() < 1e9 else torch.zeros_like(g)


class Noise(Signs):
    """Draws random numbers."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return super().update(p, g, state, group) * torch.rand_like(g)


@pytest.mark.parametrize(
    ("kind", "by", "text"),
    [
        (Lamb, "element", r"by='element', but Lamb does not update shards.*Pass by='parameter'"),
        (Mixer, "parameter", r"by='parameter', but Mixer does not update parameters one by one.*Pass by='model'"),
        (Reads, "element", r"by='element', but Reads reads values \(.item\(\)\).*Pass by='parameter'"),
        (Noise, "parameter", r"by='parameter', but Noise"),
        (torch.optim.Muon, "element", r"by='element', but Muon updates by 'parameter'. Leave by= out"),
        (torch.optim.LBFGS, "parameter", r"by='parameter', but LBFGS updates by 'model'"),
        (Signs, "elements", r"by='elements', expected 'element', 'parameter', 'model' or None"),
    ],
)
def test_a_wrong_word(kind: Any, by: str, text: str) -> None:
    def run() -> None:
        model = mw.shard_module(net(), BOTH, layouts(BOTH))
        mw.shard_optimizer(kind([model.get_parameter(n) for n in MATRICES]), by=by)

    with pytest.raises(ShardError, match=text):
        mw.simulate(run, BOTH)


def trained(make: Any, mesh: mw.Mesh | None, do: Any, n: int = 4) -> nn.Module:
    model = net() if mesh is None else mw.shard_module(net(), mesh, layouts(mesh), fsdp="dp")
    opt = make(model)
    for i, x in enumerate(data(n)):
        do(model, opt, x if mesh is None else on(mesh, x), i)
    return model


def same(make: Any, do: Any, mesh: mw.Mesh = BOTH, n: int = 4) -> None:
    """On a mesh as on one device."""
    one = trained(make, None, do, n)
    want = {k: v.detach() for k, v in one.state_dict().items()}
    assert max(mw.simulate(lambda: off(trained(make, mesh, do, n), want), mesh)) <= 1e-12


def step(model: Any, opt: Any, x: Any, i: int) -> None:
    steps(model, [opt], x)


@pytest.mark.parametrize("by", ["parameter", "model"])
@pytest.mark.parametrize("kind", [Signs, torch.optim.AdamW, torch.optim.SGD])
def test_a_larger_word_than_needed(kind: Any, by: str) -> None:
    def make(model: nn.Module) -> Any:
        opt = kind(model.parameters(), lr=0.05)
        return mw.shard_optimizer(opt, by=by) if isinstance(model.scale, mw.DistTensor) else opt

    same(make, step)


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"amsgrad": True}])
def test_flags(flags: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Any:
        opt = torch.optim.AdamW(model.parameters(), lr=0.05, **flags)
        return mw.shard_optimizer(opt, by="parameter") if isinstance(model.scale, mw.DistTensor) else opt

    same(make, step)
    same(make, step, TWO)


def test_unknown_classes_are_updated_whole_with_a_warning() -> None:
    class Unknown(Mixer):
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(lambda model: Unknown(model.parameters()), step)
    lack = 2 * 8 * sum(p.numel() - p.numel() // n for p, n in ((net().up.weight, 4),))
    (text,) = [str(w.message) for w in caught if "unknown optimizer class" in str(w.message)]
    assert "Unknown is an unknown optimizer class: each rank updates all parameters whole" in text
    assert int(text.split("receives ")[1].split()[0]) > lack


@pytest.mark.parametrize("line", [None, "strong_wolfe"])
@pytest.mark.parametrize("mesh", [BOTH, THREE], ids=["dp=2,tp=2", "dp=3"])
def test_lbfgs(mesh: mw.Mesh, line: str | None) -> None:
    def do(model: Any, opt: Any, x: Any, i: int) -> None:
        def closure() -> Any:
            opt.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        opt.step(closure)

    def make(model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, history_size=3, line_search_fn=line)

    same(make, do, mesh, 3)


def test_closures_of_owners() -> None:
    calls = []

    def do(model: Any, opt: Any, x: Any, i: int) -> None:
        def closure() -> Any:
            calls.append(i)
            opt.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        loss = opt.step(closure)
        assert type(loss) is (mw.DistTensor if isinstance(model.scale, mw.DistTensor) else Tensor)

    same(lambda model: Lamb(model.parameters()), do, TWO, 2)
    assert len(calls) == 2 * (1 + 2)

    class Twice(Lamb):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            closure()
            return super().step(closure)

    def again() -> None:
        model = mw.shard_module(net(), TWO)
        mw.shard_optimizer(Twice(model.parameters()), by="parameter").step(lambda: loss_of(model, on(TWO, data(1)[0])))

    with pytest.raises(ShardError, match=r"Twice calls its closure again within a step.*by='model'"):
        mw.simulate(again, TWO)


@pytest.mark.parametrize("kind", [Lamb, Shampoo, SOAP, Prodigy, torch.optim.Adafactor])
def test_frozen_late_and_missing_gradients(kind: Any) -> None:
    """A frozen parameter, one without gradient on some steps, a group that is added, one whose options change."""

    def make(model: Net) -> Any:
        model.out.bias.requires_grad_(False)
        return kind(
            [{"params": [model.up.weight, model.up.bias]}, {"params": [model.out.weight, model.out.bias]}], lr=0.05
        )

    def do(model: Any, opt: Any, x: Any, i: int) -> None:
        if i == 1:
            opt.add_param_group({"params": [model.down.weight, model.scale], "lr": 0.01})
        if i == 2:
            opt.param_groups[0]["lr"] = 0.02
        opt.zero_grad()
        loss_of(model, x).backward()
        if i in (0, 2):
            model.up.weight.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()

    if kind is SOAP:  # chaotic: the gradients must be equal to the bit
        return
    same(make, do, n=5)
    same(make, do, THREE, n=5)


@pytest.mark.parametrize("kind", [Lamb, Shampoo, torch.optim.Adafactor, Prodigy])
def test_states_by_hand(kind: Any) -> None:
    """``state_dict`` loaded into another optimizer: of the same mesh, of one device, and back; copies."""
    one = trained(lambda m: kind(m.parameters()), None, step, 5)
    want = {k: v.detach() for k, v in one.state_dict().items()}

    def run() -> float:
        model = mw.shard_module(net(), BOTH, layouts(BOTH))
        opt = kind(model.parameters())
        batches = [on(BOTH, x) for x in data(5)]
        for x in batches[:2]:
            steps(model, [opt], x)
        other = kind(model.parameters())
        with mw.explain() as why:
            other.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert kind is Prodigy or not why.counts.total  # states stay with owners
        steps(model, [other], batches[2])
        whole = net()
        whole.load_state_dict({k: mw.unshard(v) for k, v in model.state_dict().items()})
        alone = kind(whole.parameters())
        alone.load_state_dict(mapped_whole(other.state_dict()))
        steps(whole, [alone], data(5)[3])
        last = mw.shard_module(net(), BOTH, layouts(BOTH), fsdp="dp")
        last.load_state_dict(whole.state_dict())
        final = kind(last.parameters())
        final.load_state_dict(copy.deepcopy(alone.state_dict()))
        last, final = copy.deepcopy((last, final))
        steps(last, [final], batches[4])
        return off(last, want)

    assert max(mw.simulate(run, BOTH)) <= 1e-12


def mapped_whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: mapped_whole(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped_whole(v) for v in value)
    return mw.unshard(value).clone() if isinstance(value, Tensor) else value


def test_states_are_with_owners() -> None:
    def run() -> tuple[list[int], dict[str, int], int]:
        model = mw.shard_module(net(), BOTH, layouts(BOTH), fsdp="dp")
        opt = Shampoo(model.parameters())
        steps(model, [opt], on(BOTH, data(1)[0]))
        loss_of(model, on(BOTH, data(1)[0])).backward()
        with mw.explain() as why:
            opt.step()
        text = " ".join(why.text(120).split())
        assert "go to where the update takes them whole: each to its owner" in text
        assert "each rank gets its shards of updated parameters from their owners" in text
        held = [s.to_local().numel() for p in model.parameters() for s in opt.state[p].get("roots", ())]
        assert [float(opt.state[p]["step"]) for p in model.parameters()] == [2.0] * 6
        return held, why.counts.kinds, why.counts.bytes["exchange_rows"]

    found = mw.simulate(run, BOTH)
    for sizes in zip(*(held for held, *_ in found), strict=True):
        assert sum(map(bool, sizes)) == 1  # each at one rank
    sent = sum(nbytes for *_, nbytes in found)
    numbers = [p.numel() for p in net().parameters()]
    assert sent <= 3 * 8 * sum(numbers) * 4  # parameters and gradients in, parameters out to each rank
    assert all(kinds["exchange_rows"] == 2 and kinds["all_gather"] == 1 for _, kinds, _ in found)


def test_an_error_of_one_owner_is_raised_on_all() -> None:
    class Failing(Lamb):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
            if p.shape == (8, 5):
                raise FloatingPointError("singular")
            return super().update(p, g, state, group)

    def run() -> str:
        model = mw.shard_module(net(), TWO)
        opt = mw.shard_optimizer(Failing(model.parameters()), by="parameter")
        loss_of(model, on(TWO, data(1)[0])).backward()
        try:
            opt.step()
        except (ShardError, FloatingPointError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = mw.simulate(run, TWO)
    assert sorted(f.partition(":")[0] for f in found) == ["FloatingPointError", "ShardError"]
    assert any("Failing.step raised on rank" in f and "singular" in f for f in found)


def test_no_sync_and_hooks() -> None:
    seen: list[tuple[int, ...]] = []

    def make(model: nn.Module) -> Any:
        opt = Lamb(model.parameters())
        if isinstance(model.scale, mw.DistTensor):
            mw.shard_optimizer(opt)
        opt.register_step_post_hook(lambda o, *_: seen.append(tuple(o.param_groups[0]["params"][1].shape)))
        return opt

    def do(model: Any, opt: Any, x: Any, i: int) -> None:
        opt.zero_grad()
        if isinstance(model.scale, mw.DistTensor):
            with mw.no_sync(model):
                loss_of(model, x).backward()
        else:
            loss_of(model, x).backward()
        loss_of(model, x).backward()
        opt.step()

    same(make, do)
    assert set(seen) == {(8, 5)}


class Beside(torch.optim.Optimizer):
    """Momentum in attributes: by parameter, by its id, and by its place in a list."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.params = [p for g in self.param_groups for p in g["params"]]
        self.means: dict[Any, Tensor] = {}
        self.seen = {self.params[0]: 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.params:
            if p.grad is not None:
                for key in (p, str(id(p))):
                    self.means[key] = self.means.get(key, torch.zeros_like(p)).lerp(p.grad, 0.5)
                    p.sub_(self.means[key] / (1 + p.norm()), alpha=0.05)
                self.seen[p] = self.seen.get(p, 0) + 1


@pytest.mark.parametrize("by", ["parameter", "model"])
def test_what_a_class_keeps_beside_its_states(by: str) -> None:
    def make(model: nn.Module) -> Any:
        opt = Beside(model.parameters())
        return mw.shard_optimizer(opt, by=by) if isinstance(model.scale, mw.DistTensor) else opt

    def do(model: Any, opt: Any, x: Any, i: int) -> None:
        steps(model, [opt], x)
        assert all(any(p is q for q in model.parameters()) for p in [*opt.params, *opt.seen])

    same(make, do)
    same(make, do, TWO)


def test_a_class_that_sends_itself() -> None:
    class Muon(Lamb):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
            torch.ops._c10d_functional.all_reduce(p, "sum", "0")
            return super().update(p, g, state, group)

    assert refuted(Muon(net().parameters()), "parameter") == "calls torch.distributed itself"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("options", [{}, {"fsdp": "dp"}], ids=["whole", "stored in parts"])
def test_states_that_a_constructor_made_on_the_meta_device(captured: bool, options: Any) -> None:
    """Adagrad's sums exist before its first step, and had no values."""
    mesh = mw.Mesh({"dp": 2})

    def stepped(device: str, mesh: mw.Mesh | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.device(device):
            model = torch.nn.Linear(6, 5, dtype=torch.float64)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.3)
        x = torch.ones(4, 6, dtype=torch.float64)

        def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        if captured and mesh is not None:
            batch: Any = {"dp": mw.Shard(0)}
            step = mw.compile_step(model, loss, optimizer, x, mesh=mesh, batch=batch, **options)
            for _ in range(3):
                step(x)
        else:
            if mesh is not None:
                mw.shard_module(model, mesh, {"weight": {"dp": mw.Replicate()}}, **options)
                mw.shard_optimizer(optimizer)
            for _ in range(3):
                loss(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [mw.unshard(p).detach().clone() if mesh is not None else p.detach() for p in model.parameters()]

    for made in mw.simulate(lambda: stepped("meta", mesh), mesh):
        torch.testing.assert_close(made, stepped("cpu", None), rtol=1e-12, atol=0)
