"""ZeRO in captured steps under both passes: the same numbers, the collectives and bytes of eager code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from tests.support.processes import run_processes

Tensor = torch.Tensor
DPO = "data-parallel-optimization:bucket_bytes=4194304"
MERGE = "gradient-merge:k_steps=2"
DP, BOTH = mw.Mesh({"dp": 2}), mw.Mesh({"dp": 2, "tp": 2})


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Blocks between an embedding and a head, which may be one weight."""

    def __init__(self, width: int = 8, inner: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(3)])
        self.head = nn.Linear(width, 12, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


TP = {"*.up.weight": {"tp": mw.Shard(0)}, "*.up.bias": {"tp": mw.Shard(0)}, "*.down.weight": {"tp": mw.Shard(1)}}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).double(), ids.roll(1, 1).flatten())


def ids_of(i: int) -> Tensor:
    return torch.randint(0, 12, (8, 5), generator=torch.Generator().manual_seed(i))


def made_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def captured(make: Callable[[], nn.Module], mesh: mw.Mesh, passes: list[str], steps: int = 4, **options: Any) -> Any:
    """Parameters, counts of the last call and the step."""
    model = made_of(make)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layouts = TP if mesh is BOTH else None
    step = mw.compile_step(
        model, loss_of, opt, ids_of(0), mesh=mesh, layouts=layouts, batch={"dp": mw.Shard(0)}, passes=passes, **options
    )
    for i in range(steps):
        with collective.counting() as counts:
            step(ids_of(i))
    step.flush()
    return {n: mw.unshard(p.detach()).clone() for n, p in model.named_parameters()}, counts, step


def eager(make: Callable[[], nn.Module], mesh: mw.Mesh, steps: int = 4, **options: Any) -> Any:
    """Counts of the last step."""
    stored, states = options.get("fsdp"), options.get("shard_states")
    layouts = TP if mesh is BOTH else {}
    model = mw.shard_module(
        made_of(make), mesh, layouts, fsdp=stored, reshard_after_forward=options.get("reshard_after_forward", True)
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if states:
        opt = mw.shard_optimizer(opt, shard_states=states)
    for i in range(steps):
        ids = mw.shard_tensor(ids_of(i), mesh, {"dp": mw.Shard(0)})
        with collective.counting() as counts:
            loss_of(model, ids).backward()
            opt.step()
            opt.zero_grad()
    return counts


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[n] - b[n]).abs().max().item() for n in b)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "even": lambda: Net().double(),
    "uneven": lambda: Net(7, 10).double(),
    "tied": lambda: Net(tied=True).double(),
    "empty": lambda: Net(6, 2).double(),
}
ZERO = [{"shard_states": "dp"}, {"fsdp": "dp"}, {"fsdp": "dp", "reshard_after_forward": False}]


AUTO, STATES, STORED, KEPT = "data-parallel-optimization", *ZERO


@pytest.mark.parametrize(
    ("mesh", "model", "options", "passes"),
    [
        (DP, "even", STATES, [AUTO]),
        (DP, "uneven", STORED, [DPO]),
        (DP, "tied", KEPT, [MERGE, DPO]),
        (mw.Mesh({"dp": 3}), "empty", STORED, [AUTO]),
        (BOTH, "uneven", STATES, [MERGE, DPO]),
        (BOTH, "even", STORED, [MERGE, DPO]),
    ],
)
@pytest.mark.thin(5)
def test_the_same_numbers(mesh: mw.Mesh, model: str, options: dict[str, Any], passes: list[str]) -> None:
    def run() -> Any:
        made, _, step = captured(MODELS[model], mesh, passes, 3, **options)
        plain, _, _ = captured(MODELS[model], mesh, [p for p in passes if p == MERGE], 3, **options)
        return furthest(made, plain), step.program

    found = mw.simulate(run, mesh, timeout=120)
    assert max(f for f, _ in found) <= 1e-12
    mw.check_program([p for _, p in found])


@pytest.mark.parametrize("options", ZERO, ids=["states", "stored", "kept"])
@pytest.mark.parametrize(("mesh", "model"), [(DP, "even")])
def test_collectives_are_those_of_eager_code(mesh: mw.Mesh, model: str, options: dict[str, Any]) -> None:
    _, counts, step = mw.simulate(lambda: captured(MODELS[model], mesh, [DPO], **options), mesh)[0]
    _, plain, _ = mw.simulate(lambda: captured(MODELS[model], mesh, [], **options), mesh)[0]
    wanted = mw.simulate(lambda: eager(MODELS[model], mesh, **options), mesh)[0]
    for kind in ("all_gather", "reduce_scatter"):
        assert counts.kinds[kind] <= wanted.kinds[kind] < plain.kinds[kind], (kind, counts, wanted)
        assert counts.bytes[kind] <= wanted.bytes[kind], (kind, counts, wanted)
    assert step.program.kinds == counts.kinds
    if mesh is DP and "shard_states" in options:
        assert counts.kinds["reduce_scatter"] == counts.kinds["all_gather"] == 1


# -- dtypes ----------------------------------------------------------------------------------------------


class MixedBlock(Block):
    """A norm in float32, matrices in another dtype; uneven shapes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(7, 10)
        self.up.to(dtype)
        self.down.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x).to(self.up.weight.dtype))
        return x + self.down(torch.tanh(y)).float()  # type: ignore[no-any-return]


class Mixed(Net):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(7)
        self.blocks = nn.ModuleList([MixedBlock(dtype) for _ in range(2)])


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.bfloat16, STATES), (torch.float16, STORED), (torch.float64, STORED)]
)
@pytest.mark.thin(2)
def test_units_of_several_dtypes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """The passes change no bit of what is sent, and move what eager code moves."""

    def run() -> Any:
        made, counts, step = captured(lambda: Mixed(dtype), DP, [DPO], 2, **options)
        plain, before, _ = captured(lambda: Mixed(dtype), DP, [], 2, **options)
        return made, plain, counts, before, eager(lambda: Mixed(dtype), DP, 2, **options), step.program

    found = mw.simulate(run, DP, timeout=120)
    for made, plain, counts, before, wanted, _ in found:
        assert all(torch.equal(made[n], plain[n]) for n in plain)
        assert {t.dtype for t in made.values()} == {torch.float32, dtype}
        for kind in ("all_gather", "reduce_scatter"):
            assert counts.kinds[kind] <= wanted.kinds[kind] < before.kinds[kind], (kind, counts, wanted)
            assert counts.bytes[kind] <= wanted.bytes[kind], (kind, counts, wanted)
    mw.check_program([f[-1] for f in found])


def _on_processes() -> None:
    mesh = mw.init_mesh({"dp": 2})
    for make, options in ((lambda: Net(7, 10).double(), STORED), (lambda: Mixed(torch.bfloat16), STATES)):
        made, counts, step = captured(make, mesh, [MERGE, DPO], 4, **options)
        plain, _, _ = captured(make, mesh, [MERGE], 4, **options)
        assert all(torch.equal(made[n], plain[n]) for n in plain)
        assert step.program.kinds == counts.kinds


@pytest.mark.processes
def test_real_processes() -> None:
    run_processes(_on_processes, 2, timeout=250.0)


@pytest.mark.parametrize("passes", [[], ["gradient-merge:k_steps=2", "data-parallel-optimization"]])
def test_a_stored_model_is_captured_again(passes):
    """A batch of another size, eval, frozen parameters and a second step of the model, against one device."""
    mesh, k = mw.Mesh({"dp": 2}), 2 if passes else 1
    x = torch.arange(40.0, dtype=torch.float64).reshape(8, 5).sin()

    def made():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 5)).double()
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    def loss_of(net, x):
        return (net(x) - 1).square().mean()

    def run(net, opt, micro, evaluate):
        seen = []
        for rows, frozen in ((8, False), (5, False), (5, True), (8, True), (1, False)):
            net[0].weight.requires_grad_(not frozen)
            seen += [micro(x[:rows], last) for last in [False] * (k - 1) + [True]]
            seen.append(evaluate(x[:2]))
        return seen, [mw.unshard(p.detach()) if isinstance(p, mw.DistTensor) else p.detach() for p in net.parameters()]

    def alone():
        net, opt = made()

        def micro(x, last):
            loss = loss_of(net, x)
            (loss / k).backward()
            if last:
                opt.step()
                opt.zero_grad()
            return loss.item()

        return run(net, opt, micro, lambda x: loss_of(net, x).item())

    def captured():
        net, opt = made()
        options = {"mesh": mesh, "batch": {"dp": mw.Shard(0)}, "fsdp": "dp"}
        step = mw.compile_step(net, loss_of, opt, x, passes=passes, **options)
        other = mw.compile_step(net, loss_of, None, x, **options).eval()

        def micro(x, last):
            step.train()
            return step(x).item()

        def evaluate(x):
            first = step.eval()(x).item()
            assert first == other(x).item()
            return first

        return run(net, opt, micro, evaluate)

    wanted = alone()
    for got in mw.simulate(captured, mesh):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


AGAINST: dict[str, dict[str, Any]] = {
    "rows": {"*.up.weight": {"tp": mw.Shard(0)}, "*.up.bias": {}, "*.down.weight": {"tp": mw.Shard(0)}},
    "columns": {"*.up.weight": {"tp": mw.Shard(1)}, "*.up.bias": {"tp": mw.Shard(0)}},
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("layouts", AGAINST)
def test_weights_that_are_split_against_their_use(layouts: str) -> None:
    """Their gradients need two collectives, of which one travels with those of others."""

    def train(passes: list[str]) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        net = Net().double()
        step = mw.compile_step(
            net, loss_of, torch.optim.AdamW(net.parameters(), lr=0.1), ids_of(0), mesh=BOTH, layouts=AGAINST[layouts],
            batch={"dp": mw.Shard(0)}, fsdp="dp", passes=passes,
        )  # fmt: skip
        losses = [float(step(ids_of(i))) for i in range(3)]
        return losses, [mw.unshard(p.detach()) for p in net.parameters()]

    for fused, plain in zip(*(mw.simulate(lambda p=p: train(p), BOTH) for p in ([DPO], [])), strict=True):  # type: ignore[misc]
        torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("over", [("dp", "tp"), ("tp", "dp"), ("r", "dp", "tp")], ids="+".join)
def test_shard_states_an_axis_that_sums_gradients_and_one_that_does_not(over: tuple[str, ...]) -> None:
    """The batch is split over some of the axes alone: gradients are scattered over these, and cut over the other."""
    mesh = mw.Mesh({"r": 2, "dp": 3, "tp": 2})
    torch.manual_seed(0)
    start, data = torch.nn.Linear(4, 7).double(), torch.randn(6, 4, dtype=torch.float64)

    def trained(on_mesh: bool) -> torch.Tensor:
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if on_mesh:
            step = mw.compile_step(
                model, lambda m, x: m(x).square().mean(), optimizer, data, mesh=mesh, batch={"dp": mw.Shard(0)},
                shard_states=over,
            )  # fmt: skip
            step(data)
            return mw.unshard(model.weight.detach())
        model(data).square().mean().backward()
        optimizer.step()
        return model.weight.detach()

    want = trained(False)
    for made in mw.simulate(lambda: trained(True), mesh):
        torch.testing.assert_close(made, want, rtol=1e-12, atol=1e-12)


def test_weights_without_elements_on_a_rank_are_gathered_again_as_on_the_others() -> None:
    """A convolution refuses empty tensors and is padded there: its backward reads the padded weight."""

    def net() -> nn.Module:
        return made_of(lambda: nn.Sequential(nn.Conv1d(2, 4, 1), nn.Tanh(), nn.Conv1d(4, 4, 3)).double())

    def run() -> dict[str, Tensor]:
        model = net()
        layouts = {"*.weight": {"tp": mw.Shard(0)}, "*.bias": {"tp": mw.Shard(0)}}
        step = mw.compile_step(
            model, lambda m, b: m(b).square().mean(), None, x, mesh=mesh, layouts=layouts, fsdp="dp", gradients=True,
            batch={"dp": mw.Shard(0)},
        )  # fmt: skip
        step(x)
        return {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    mesh = mw.Mesh({"dp": 2, "tp": 3})
    x = torch.randn(3, 2, 4, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    one = net()
    one(x).square().mean().backward()
    for got in mw.simulate(run, mesh):
        for name, p in one.named_parameters():
            torch.testing.assert_close(got[name], p.grad)
