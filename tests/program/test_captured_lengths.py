"""Sizes as inputs of captured steps: a program for many sizes is, at each of them, what a capture would have given."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.passes import PassManager
from meshwright.program import Plan, build
from meshwright.program.capture.build import conditions_of
from meshwright.program.ir.nodes import Value, info_of
from meshwright.program.ir.program import Program
from meshwright.program.ir.sizes import Fit, Size, value_at
from meshwright.program.run.lengths import Capture, Many, _subsets, one_for_all

Tensor = torch.Tensor
ALONE, PAIR, SQUARE = mw.Mesh({"dp": 1}), mw.Mesh({"dp": 2}), mw.Mesh({"dp": 2, "tp": 2})
S0, S1 = mw.Shard(0), mw.Shard(1)
HIDDEN = 8


class Attention(nn.Module):
    """Over ``(batch, length)`` of tokens; by hand, with scores of length times length, or by PyTorch's function."""

    def __init__(self, by_hand: bool, drop: float = 0.0) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.tokens, self.places = nn.Embedding(16, HIDDEN), nn.Embedding(512, HIDDEN)
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 16)
        self.drop = nn.Dropout(drop)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        b, n = ids.shape
        x = self.drop(self.norm(self.tokens(ids) + self.places(torch.arange(n))))
        q, k, v = self.qkv(x).view(b, n, 2, -1).transpose(1, 2).chunk(3, -1)
        if self.by_hand:
            scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -1e9)
            made = scores.softmax(-1) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.out(made.transpose(1, 2).reshape(b, n, HIDDEN))
        return F.cross_entropy(y.flatten(0, 1), targets.flatten(), ignore_index=0)


class Convolution(nn.Module):
    """Halves the length, which decides by its remainder what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.conv = nn.Embedding(16, HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 3, stride=2, padding=1)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.conv(self.tokens(ids).transpose(1, 2)).square().mean() + 0 * targets.sum()


class Pooled(nn.Module):
    """Means over the length, a running sum, and padding to twice the length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, HIDDEN), nn.Linear(2 * HIDDEN, 16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        padded = F.pad(x, (0, 0, 0, x.shape[1])).cumsum(1)
        y = torch.cat([x.mean(1), padded[:, -1] / ids.shape[1]], -1)
        return F.cross_entropy(self.head(y), targets[:, 0])


def tokens(b: int, n: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(b * n).view(b, n)
    return ids * 7 % 16, ids * 5 % 16


BATCH = {"dp": S0}
PLANS: dict[str, tuple[mw.Mesh, Plan, Sequence[str]]] = {
    "dp": (PAIR, Plan(batch=BATCH), ()),
    "over the length": (PAIR, Plan(batch={"dp": S1}), ()),
    "dp and tp": (SQUARE, Plan({"tokens.weight": {"tp": S1}}, batch=BATCH), ()),
    "zero-3": (PAIR, Plan(batch=BATCH, fsdp="dp"), ("data-parallel-optimization",)),
    "zero-1": (PAIR, Plan(batch=BATCH, shard_states="dp", clip_grad_norm=1.0), ()),
    "merge": (PAIR, Plan(batch=BATCH), ("gradient-merge:k_steps=2",)),
    "three": (mw.Mesh({"tp": 3}), Plan(batch={"tp": S1}), ()),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(False),
    "by hand": lambda: Attention(True, drop=0.1),
    "convolution": Convolution,
    "pooled": Pooled,
}


def captured(model: nn.Module, batch: Any, mesh: mw.Mesh, plan: Plan, passes: Sequence[str], rank: int) -> Program:
    optimizer = torch.optim.AdamW(model.parameters())
    manager = PassManager(passes)
    made = build(model, None, optimizer, batch, mesh, plan, rank=rank, weighing=manager.weighing)
    return manager(made.program)


def capture_of(model: nn.Module, batch: Any, how: str, rank: int) -> Any:
    """What a program for many sizes is made of."""
    mesh, plan, passes = PLANS[how]
    optimizer, weighing = torch.optim.AdamW(model.parameters()), PassManager(passes).weighing
    built = build(model, None, optimizer, batch, mesh, plan, rank=rank, weighing=weighing)
    ready: Any = BoundProgram(PassManager(passes)(built.program))
    return Capture(ready, built.captured.module, ())


@dataclass
class BoundProgram:
    """In place of a program that is bound."""

    program: Program


def shapes_of(batch: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in batch)


def many_of(model: nn.Module, sizes: Sequence[tuple[int, int]], how: str, rank: int = 0) -> Many:
    """The program for many sizes that captures at these give."""
    mesh, plan, _ = PLANS[how]
    batches = [tokens(*s) for s in sizes]
    captures: Any = {shapes_of(b): capture_of(model, b, how, rank) for b in batches}
    ask = partial(conditions_of, model, None, batches[-1], mesh, plan)
    return one_for_all(captures, shapes_of(batches[-1]), mesh.size, ask)


def plain(a: Any, variables: tuple[int, ...]) -> Any:
    """An argument of a node at these sizes, with nodes by name."""
    if isinstance(a, fx.Node):
        return f"%{a.name}"
    if isinstance(a, (list, tuple)):
        return [plain(x, variables) for x in a]
    if isinstance(a, dict):
        return {k: plain(x, variables) for k, x in a.items()}
    return a.at(variables) if isinstance(a, Size) else repr(a) if not isinstance(a, (int, float)) else a


def assert_same(found: Program, want: Program, variables: tuple[int, ...]) -> None:
    """Node by node; what a capture gives is the oracle."""
    assert [(i.name, i.kind, i.spec) for i in found.inputs] == [(i.name, i.kind, i.spec) for i in want.inputs]
    assert [(o.name, o.kind, o.spec) for o in found.outputs] == [(o.name, o.kind, o.spec) for o in want.outputs]
    for a, b in zip(found.graph.nodes, want.graph.nodes, strict=True):
        assert (a.op, a.target) == (b.op, b.target), (a, b)
        assert plain((a.args, a.kwargs), variables) == plain((b.args, b.kwargs), ()), a.name
        value = info_of(a).value
        if isinstance(value, Value):
            made, wanted = value_at(value, variables), info_of(b).value
            assert (made.shape, made.strides) == (wanted.shape, wanted.strides), a.name
    assert found.schedules == want.schedules
    for name, part in want.parts.items():
        assert_same(found.parts[name], part, variables)


PAIRS = list(zip(itertools.cycle(MODELS), PLANS, strict=False))
REST = [pair for pair in itertools.product(MODELS, PLANS) if pair not in PAIRS]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("name", "how"), [*PAIRS, *(pytest.param(*p, marks=pytest.mark.long) for p in REST)])
def test_a_program_for_many_sizes_is_what_a_capture_gives(name: str, how: str) -> None:
    """At every size that it serves, node by node."""
    mesh, plan, passes = PLANS[how]
    model = MODELS[name]()
    for rank in (0, mesh.size - 1) if how == "three" else (mesh.size - 1,):
        many = many_of(model, [(4, 16), (4, 24), (4, 48), (4, 36)], how, rank)
        served = [n for n in range(12, 61) if many.variables(shapes_of(tokens(4, n))) is not None]
        assert len(served) >= 2
        for n in (served[0], served[-1]):
            batch = tokens(4, n)
            variables = many.variables(shapes_of(batch))
            assert variables is not None
            assert_same(many.sizes.at(variables), captured(model, batch, mesh, plan, passes, rank), variables)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.empty(4, 8, n)[..., :0],
        lambda n: torch.empty(n, 4, 8)[:, 1:1],
        lambda n: torch.empty(2, 0, n, n),
        lambda n: torch.empty(2, n, 0, 3).transpose(1, 2),
    ],
    ids=["cut off", "cut out", "scores of no heads", "no heads, transposed"],
)
def test_strides_of_what_is_empty(make: Callable[[int], Tensor]) -> None:
    """Three programs are enough for those of a square; at a fourth size they are PyTorch's."""
    fit, ends = Fit([(0,), (2,), (4,)]), [make(n) for n in (6, 8, 10)]
    shape = fit.numbers([t.shape for t in ends])
    strides = fit.strides(shape, [Value.alone(t.shape, t.dtype, 0, t.stride()) for t in ends])
    value = value_at(Value.alone(shape, torch.float32, 0, strides), (8,))
    assert (value.shape, value.strides) == (make(14).shape, make(14).stride())


def test_two_sizes_vary() -> None:
    """The number of sequences and their length."""
    model, (mesh, plan, passes) = Attention(True), PLANS["dp"]
    many = many_of(model, [(4, 16), (4, 24), (6, 24), (8, 16), (6, 32)], "dp")
    assert len(many.places) == 2
    for b, n in ((4, 40), (10, 17)):
        variables = many.variables(shapes_of(tokens(b, n)))
        assert variables is not None
        assert_same(many.sizes.at(variables), captured(model, tokens(b, n), mesh, plan, passes, 0), variables)
    assert many.variables(((5, 16), (5, 16))) is None  # no two ranks have a part of the same size
    assert many.variables(((4, 16), (4, 17))) is None  # lengths that never differed


def test_an_odd_batch_among_lengths() -> None:
    """The last batch of an epoch is smaller; lengths are served all the same."""
    sizes = [(4, 16), (2, 24), (4, 32), (4, 40)]
    mesh, plan, _ = PLANS["dp"]
    model, batches = Pooled(), [tokens(*s) for s in sizes]
    captures: Any = {shapes_of(b): capture_of(model, b, "dp", 0) for b in batches}
    last = shapes_of(batches[-1])
    _, *subsets = _subsets(captures, last)
    assert [len(s) for s in subsets] == [1, 3]
    many = one_for_all(subsets[1], last, mesh.size, partial(conditions_of, model, None, batches[-1], mesh, plan))
    assert many.variables(shapes_of(tokens(4, 17))) == (-23,)
    assert many.variables(shapes_of(tokens(2, 17))) is None


class Branching(nn.Module):
    """Does with a length what ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(HIDDEN, HIDDEN)
        self.longest = 20

    def forward(self, x: Tensor) -> Tensor:
        n, y = x.shape[1], self.linear(x)
        if self.how == "branch" and n > 40:
            y = y * 2
        if self.how == "remainder" and n % 3 == 0:
            y = y + 1
        if self.how == "state" and n > self.longest:
            y = y * 3
        if self.how == "int":
            y = y * int(n)
        if self.how == "range":
            for _ in range(0, n, 16):
                y = y + 1
        if self.how == "tensor":
            y = y * torch.tensor(n)
        if self.how == "root":
            y = y / n**0.5
        if self.how == "least":
            y = y[:, : min(n, 30)]
        if self.how == "half":
            y = y[:, : n // 2]
        return y.square().mean()


def test_what_comes_with_the_loss_varies_too() -> None:
    """Its size, and on one side of a branch its number."""
    lengths = [16, 24, 32, 48, 56, 44, 20, 50, 28, 60]

    def loss(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        return (y.square().mean(), y.sum(-1)) if x.shape[1] < 40 else (y.square().mean(), y.sum(-1), y.mean(-1))

    def run() -> list[tuple[bool, list[tuple[int, ...]]]]:
        model = nn.Linear(HIDDEN, HIDDEN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile_step(model, loss, optimizer, torch.ones(4, 16, HIDDEN), mesh=PAIR, batch=BATCH)
        made = []
        for n in lengths:
            x = torch.randn(4, n, HIDDEN)
            want = loss(model, mw.shard_tensor(x, PAIR, [S0], check=False))
            found = step(x)
            assert all(torch.equal(mw.unshard(a), mw.unshard(b)) for a, b in zip(found, want, strict=True))
            made.append((step._current.many, [tuple(t.shape) for t in found[1:]]))
        assert step.program.outputs[1].spec.shape == (4, lengths[-1])
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made in mw.simulate(run, PAIR):
            assert [shapes for _, shapes in made] == [[(4, n)] * (1 + (n >= 40)) for n in lengths]
            assert [many for many, _ in made[6:]] == [True] * 4


@pytest.mark.parametrize("how", ["branch", "remainder", "state", "int", "range", "tensor", "root", "least", "half"])
@pytest.mark.thin(3)
def test_code_that_looks_at_the_length(how: str) -> None:
    """Losses are those of one device at every length, whatever the code does with it."""
    lengths = [16, 24, 32, 36, 28, 44, 18, 45, 12, 60, 17]
    batches = [torch.randn(4, n, HIDDEN, dtype=torch.float64) for n in lengths]
    start = Branching(how).double().state_dict()

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Branching(how).double()
        model.load_state_dict(start)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, optimizer = fresh()
    want = []
    for x in batches:
        want.append(model(x))
        want[-1].backward()
        optimizer.step()
        optimizer.zero_grad()

    def run() -> tuple[list[float], int]:
        model, optimizer = fresh()
        step = mw.compile_step(model, None, optimizer, (batches[0],), mesh=PAIR, batch=BATCH)
        made = [step((x,)).item() for x in batches]
        return made, sum(r.many for r in step._ready.values())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mw.simulate(run, PAIR)
    for made, many in found:
        assert made == pytest.approx([w.item() for w in want], rel=1e-12)
        assert (many > 0) == (how in {"branch", "remainder", "state", "half"})


def test_the_model_changes_between_lengths() -> None:
    """Memory of parameters replaced, weights loaded, some frozen, evaluation: as a step that captures each length."""

    def run(anew: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.5), nn.Linear(HIDDEN, HIDDEN)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        made: list[float] = []

        def captured() -> Any:
            loss = lambda m, x: m(x).square().mean()  # noqa: E731
            return mw.compile_step(model, loss, optimizer, torch.ones(4, 16, HIDDEN).double(), mesh=PAIR, batch=BATCH)

        step = captured()
        for i, n in enumerate([16, 24, 32, 20, 28, 40, 44, 48, 52, 56, 60, 18, 22, 26]):
            if anew:
                step._lengths = type(step._lengths)(PAIR)  # forgets what it saw
            if i == 4:
                weight = model[0].weight
                weight.data = weight.data.clone()
            if i == 5:  # another order in memory
                turned = model[2].weight.data.t().clone(memory_format=torch.contiguous_format).t()
                model[2].weight.data = turned
            if i == 9:
                model.load_state_dict({k: 0.5 * v for k, v in model.state_dict().items()})
            if i == 10:
                model[0].bias.requires_grad_(False)
            step.train(i not in {8, 11})
            made.append(step(torch.full((4, n, HIDDEN), 0.1 * i).double()).item())
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, want = (mw.simulate(lambda anew=anew: run(anew), PAIR) for anew in (False, True))
    assert found == want


CONFIG = {"limit": 6}


class Settings:
    limit = 6


@pytest.mark.parametrize("where", ["module", "dict", "class", "closure"])
@pytest.mark.parametrize(
    "limit", [lambda n: min(n, 16), lambda n: n + n % 2, lambda n: 3 if n < 20 else 4], ids=["least", "even", "later"]
)
@pytest.mark.thin(3)
def test_numbers_that_follow_the_length(where: str, limit: Callable[[int], int]) -> None:
    """Set outside of the forward, by the user: in the captures they may look like sizes, or constants."""
    lengths = [6, 14, 10, 8, 12, 9, 20, 24, 11, 30]
    batches = [torch.randn(4, n, HIDDEN, dtype=torch.float64) for n in lengths]

    def run(mesh: mw.Mesh | None) -> list[float]:
        torch.manual_seed(0)
        model, held = nn.Linear(HIDDEN, HIDDEN).double(), 6

        def loss(m: Any, x: Tensor) -> Tensor:
            by = {"module": lambda: m.limit, "dict": lambda: CONFIG["limit"], "class": lambda: Settings.limit}
            return m(x).square().mean() * by.get(where, lambda: held)()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.limit = 6
        step: Any = None
        made = []
        for n, x in zip(lengths, batches, strict=True):
            held = model.limit = CONFIG["limit"] = Settings.limit = limit(n)
            if step is None and mesh is not None:
                step = mw.compile_step(model, loss, optimizer, x, mesh=mesh, batch=BATCH)
            if mesh is None:
                optimizer.zero_grad()
                value = loss(model, x)
                value.backward()
                optimizer.step()
            else:
                value = step(x)
            made.append(value.item())
        return made

    want = run(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = mw.simulate(lambda: run(ALONE), ALONE)
    assert found == pytest.approx(want, rel=1e-12)
