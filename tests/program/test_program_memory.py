"""How tensors lie in memory: captured steps equal one device whatever the strides of what they work on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.collective import as_rank
from meshwright.program.compile import capture_local
from meshwright.program.ir.nodes import value_of
from meshwright.program.ir.strides import dense, is_dense, laid, same
from meshwright.ranks import runtime
from tests.support.programs import compare

LAST = torch.channels_last
ONE, TWO, THREE = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2}), mw.Mesh({"tp": 3})
BY_ROWS: dict[str, Any] = {"batch": {"dp": mw.Shard(0)}}


def images(n: int = 3, last: bool = False, size: int = 5) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    made = [torch.randn(4, 4, 6, size, generator=g, dtype=torch.float64) for _ in range(n)]
    return [x.to(memory_format=LAST) for x in made] if last else made


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()


class Net(nn.Module):
    """A random chain of ops that look at strides, make views, or ask for memory in some order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.conv, self.back = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.turned = nn.Parameter(torch.randn(4, 5).t())  # a view
        self.scale = nn.Parameter(torch.randn(5))
        self.lead = nn.Parameter(torch.ones(4, 1, 1))
        self.tied = pick.random() < 0.5
        self.ops = [pick.choice(list(OPS)) for _ in range(pick.randint(3, 6))]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.lead
        for name in self.ops:
            x = OPS[name](self, x)
        return x


OPS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "conv": lambda m, x: m.back(m.conv(x)),
    "norm": lambda m, x: m.norm(x),
    "permuted": lambda m, x: F.gelu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "contiguous": lambda m, x: x.contiguous() * 2,
    "last": lambda m, x: x.to(memory_format=LAST).sin(),
    # The weight as it is, or transposed where it is tied.
    "turned": lambda m, x: x @ m.turned @ (m.turned.t() if m.tied else m.turned.t().contiguous()),
    "expanded": lambda m, x: x * m.scale.expand(4, 6, 5)[None],
    "cut": lambda m, x: torch.cat([x[:, 2:], x[:, :2]], 1) + x.flip(3)[:, :, ::2].repeat_interleave(2, 2),
    "flat": lambda m, x: (x.flatten(2).softmax(-1) * 30).unflatten(2, (6, 5)),
}
OPTIMIZERS = [  # with an eps above what rounding makes of gradients that are 0
    lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, eps=1e-3),
    lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, eps=1e-3),
    lambda ps: torch.optim.RMSprop(ps, lr=1e-2, eps=1e-3),
]


@pytest.mark.filterwarnings("ignore")  # of gathers
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.thin(3)
def test_random_models_over_memory_formats(seed: int) -> None:
    pick = random.Random(seed)
    mesh, options = pick.choice(
        [
            (ONE, {}),
            (TWO, BY_ROWS),
            (TWO, {**BY_ROWS, "shard_states": "dp"}),
            (TWO, {**BY_ROWS, "fsdp": "dp"}),
            (THREE, {"layouts": {"conv.weight": {"tp": mw.Shard(0)}}}),
            (THREE, {"layouts": {"turned": {"tp": mw.Shard(0)}}}),
            (TWO, {**BY_ROWS, "passes": ["data-parallel-optimization"]}),
        ]
    )
    last, alternating = pick.random() < 0.5, pick.random() < 0.3
    batches = images(3, last)
    if alternating:
        batches[1] = batches[1].contiguous() if last else batches[1].to(memory_format=LAST)

    def make() -> nn.Module:
        torch.manual_seed(seed)
        made = Net(seed)
        return made.to(memory_format=LAST) if pick.random() < 0.5 else made

    number = seed % (3 if "shard_states" in options else 4)  # others gather what they updated behind the program
    compare(make, squares, batches, mesh, optimizer=OPTIMIZERS[number], **options)


class Residual(nn.Module):
    """Of one image the steps of a dim of one differ by kernel, and group norm reads the memory format from them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows, self.last = nn.GroupNorm(2, 4), nn.Linear(4, 4), nn.GroupNorm(2, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(self.first(x).flatten(2).transpose(1, 2))
        return self.last((rows.transpose(1, 2).reshape(x.shape) + x) / 1.0)


def test_a_rank_with_one_image() -> None:
    batches = [x[:2] for x in images(3)]
    compare(Residual, squares, batches, TWO, **BY_ROWS)


class Group(nn.Module):
    """Convolution, group norm, permute: kernels that walk through memory as autograd says."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).permute(0, 2, 3, 1)).relu()


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_merged_steps(merged: int, last: bool) -> None:
    """Sums of gradients lie as the gradients that are added to them."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return squares(model, batch)

    whole, k = images(2 * merged, last), merged
    one = Group()
    start = {n: t.clone() for n, t in one.state_dict().items()}
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for i in range(2):
        for x in whole[i * k : (i + 1) * k]:
            (loss(one, x) / k).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank() -> dict[str, Tensor]:
        model = Group()
        model.load_state_dict(start)
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = mw.compile_step(model, loss, own, whole[0], mesh=TWO, passes=[f"gradient-merge:k_steps={k}"], **BY_ROWS)
        for x in whole:
            step(x)
        return {n: mw.unshard(p).detach().clone() for n, p in model.named_parameters()}

    for found in mw.simulate(rank, TWO):
        for name, p in one.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-9, atol=1e-12)


def test_a_model_that_is_turned_after_capture_is_captured_again() -> None:
    batches = images(4)
    one = Group()
    start = {n: t.clone() for n, t in one.state_dict().items()}
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
    for x in batches:
        squares(one, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def rank() -> tuple[dict[str, Tensor], bool]:
        model = Group()
        model.load_state_dict(start)
        own = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = mw.compile_step(model, squares, own, batches[0], mesh=TWO, **BY_ROWS)
        step(batches[0])
        before = step.program
        for p in model.parameters():
            if p.ndim == 4:
                p.data = laid(p.detach(), torch.empty(p.shape).to(memory_format=LAST).stride())
        for x in batches[1:]:
            step(x)
        return {n: mw.unshard(p).detach().clone() for n, p in model.named_parameters()}, step.program is before

    for found, kept in mw.simulate(rank, TWO):
        for name, p in one.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), rtol=1e-9, atol=1e-12)
        assert not kept


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))
        self.v = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128).t())

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.w.dtype) @ self.w @ self.v).abs()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    "options", [BY_ROWS, {**BY_ROWS, "shard_states": "dp"}, {"layouts": {"w": {"dp": mw.Shard(1)}}}]
)
def test_complex_parameters(number: int, options: dict[str, Any]) -> None:
    compare(Complex, squares, [x[..., 0, :] for x in images(2)], TWO, optimizer=OPTIMIZERS[number], **options)


# ---------------------------------------------------------------------------------------------- steps by hand


@pytest.mark.parametrize("last", [False, True])
def test_a_step_by_hand(last: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Group()
        model.extra = nn.Parameter(torch.randn(4, 8, dtype=torch.float64)[:, ::2])  # with gaps
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step_of(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            loss = squares(model, x) + (x[0, 0, :4, :4] @ model.extra).sum() * 0.1 + model.extra.sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    batches = images(4, last)
    batches[2] = batches[2].contiguous() if last else batches[2].to(memory_format=LAST)
    one, own = make()
    wanted = [step_of(one, own)(x).item() for x in batches]

    def rank() -> list[float]:
        model, optimizer = make()
        step = capture_local(step_of(model, optimizer), ONE, model=model, optimizer=optimizer, batch=batches[0])
        return [step(x).item() for x in batches]

    assert mw.simulate(rank, ONE)[0] == pytest.approx(wanted, rel=1e-9)


# ---------------------------------------------------------------------------------------------- parts


def test_collectives_give_what_their_stand_ins_say() -> None:
    """Every collective, over every order of dims, even and uneven: the strides that a program was recorded with."""
    mesh = mw.Mesh({"x": 2})
    shapes = [(2, 4, 2, 6), (2, 1, 4, 2), (1, 2, 1, 1), (4, 2), (2,)]
    forms = {
        "rows": lambda t: t,
        "last": lambda t: t.to(memory_format=LAST) if t.ndim == 4 else t,
        "turned": lambda t: laid(t, dense(t.shape, tuple(range(t.ndim)))),
        "steps": lambda t: torch.stack([t, t], -1)[..., 0],
    }
    sizes = {2: [(1, 1), (2, 0)], 4: [(2, 2), (3, 1)], 6: [(3, 3)], 1: [(1, 0)]}

    def calls(t: Tensor, group: Any, me: int) -> Any:
        yield "all_reduce", lambda: collective.all_reduce(t, "sum", group)
        yield "all_reduce avg", lambda: collective.all_reduce(t, "avg", group)
        yield "broadcast", lambda: collective.broadcast(t, 0, group)
        for d in range(t.ndim):
            for cut in sizes[t.shape[d]]:
                own = t.narrow(d, 0, cut[me])
                yield f"all_gather {d} {cut}", lambda own=own, d=d, cut=cut: collective.all_gather(own, d, cut, group)
                yield (
                    f"reduce_scatter {d} {cut}",
                    lambda d=d, cut=cut: collective.reduce_scatter(t, d, cut, "sum", group),
                )
                e = (d + 1) % t.ndim
                if e != d:
                    take = sizes[t.shape[e]][0]
                    mine = t.narrow(e, 0, take[me])
                    yield (
                        f"all_to_all {d} {cut}",
                        lambda mine=mine, d=d, cut=cut, e=e, take=take: collective.all_to_all(
                            mine, d, cut, e, take, group
                        ),
                    )

    def rank() -> int:
        rank, seen = runtime.RT.rank, 0
        for shape in shapes:
            for form in forms.values():
                t = form(torch.ones(shape))
                with as_rank(mesh, rank):  # the stand-ins
                    said = {n: c().stride() for n, c in calls(t.to("meta"), collective.group(mesh, (0,)), rank)}
                for name, call in calls(t, collective.group(mesh, (0,)), rank):
                    got = call()
                    assert got.stride() == collective.row_major(got.shape) == said[name], (name, shape, got.stride())
                    seen += 1
        return seen

    assert min(mw.simulate(rank, mesh)) > 200


def test_strides() -> None:
    assert is_dense((2, 3), (3, 1))
    assert is_dense((2, 3), (1, 2))
    assert is_dense((2, 1, 3), (3, 77, 1))
    assert not is_dense((2, 3), (6, 2))
    assert is_dense((2, 3), (6, 2), gaps=True)
    assert not is_dense((2, 3), (0, 1), gaps=True)
    assert dense((2, 3), (6, 2)) == (3, 1)
    assert dense((2, 3, 4), (1, 0, 50)) == torch.empty(4, 2, 3).permute(1, 2, 0).stride()
    assert same((2, 1), (1, 5), (1, 1))
    assert not same((2, 2), (1, 2), (2, 1))


def test_values_lie_as_the_program_says() -> None:
    """Kernels that give other strides than their stand-ins are found when a program first runs."""
    seen: list[bool] = []

    def rank() -> None:
        model = Group()
        step = mw.compile_step(model, squares, torch.optim.SGD(model.parameters()), images(1, True)[0], mesh=ONE)
        values = [value_of(n) for n in step.program.graph.nodes]
        seen.append(any(v is not None and v.given is not None for v in values))
        mw.check_program(step.program)

    mw.simulate(rank, ONE)
    assert seen == [True]
