"""Weights from one mesh to another: the values of all layouts, no byte more than what ranks lack, rounds that are
bounded; what users do to it."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import CheckpointError, CollectiveError, DesyncError, ShardError
from meshwright.layout import Spec
from meshwright.layout.pieces import common, difference, nothing
from meshwright.ranks import runtime
from meshwright.resharding import moves
from tests.support.processes import run_processes

WORLD = mw.Mesh({"ranks": 6})
MESHES = [
    mw.Mesh({"dp": 2, "tp": 3}),
    mw.Mesh({"tp": 6}),
    mw.Mesh({"dp": 3, "tp": 2}, ranks=[5, 3, 1, 0, 2, 4]),
    mw.Mesh({"tp": 4}, ranks=[1, 2, 4, 5]),
    mw.Mesh({"a": 2, "b": 2}, ranks=[0, 3, 4, 2]),
    mw.Mesh({"one": 1}, ranks=[3]),
]
TRAIN, GENERATE = mw.Mesh({"dp": 2, "tp": 2}), mw.Mesh({"tp": 4})
SHAPES = [(7, 5), (12, 4), (1, 9), (3, 2, 4), (13,), (), (0, 4)]


def layout(draw: random.Random, mesh: mw.Mesh, ndim: int, blocks: bool = False) -> mw.Layout:
    choices: list[Any] = [mw.Replicate(), *(mw.Shard(d) for d in range(ndim))]
    placements: list[Any] = [draw.choice(choices) for _ in mesh.axes]
    if ndim and draw.random() < 0.2:
        axis = draw.randrange(mesh.ndim)
        placements[axis] = mw.At(draw.randrange(mesh.sizes[axis]))
    axes = [a for a, p in zip(mesh.axes, placements, strict=True) if p == mw.Shard(0)]
    order = {0: axes[::-1]} if len(axes) > 1 and draw.random() < 0.5 else None
    return mw.Layout(mesh, placements, order=order, ndim=ndim)


def lacking(source: mw.Layout, target: mw.Layout, shape: tuple[int, ...], rank: int) -> int:
    """Elements that a rank is to have and has not, counted one by one."""

    def held(one: mw.Layout) -> torch.Tensor:
        mask = torch.zeros(shape, dtype=torch.bool)
        if rank in one.mesh.ranks:
            mask[tuple(slice(a, b) for a, b in one.local_bounds(shape, one.mesh.coordinate(rank)))] = True
        return mask

    return int((held(target) & ~held(source)).sum())


def pairs(seed: int, count: int, meshes: list[mw.Mesh] = MESHES) -> list[tuple[tuple[int, ...], mw.Layout, mw.Layout]]:
    draw, made = random.Random(seed), []
    for _ in range(count):
        shape = draw.choice(SHAPES)
        made.append(
            (shape, layout(draw, draw.choice(meshes), len(shape)), layout(draw, draw.choice(meshes), len(shape)))
        )
    return made


def moved(cases: list[Any], max_bytes: int) -> list[Any]:
    """Of each case: the part that this rank got, what it should be, and the bytes that it sent."""
    found = []
    for shape, source, target in cases:
        whole = torch.arange(1.0, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)
        mine = {"w": mw.shard_tensor(whole, source.mesh, source, check=False)} if here(source.mesh) else None
        with collective.counting() as counts:
            out = mw.move(mine, target.mesh, {"w": target}, max_bytes=max_bytes)
        expected = target_part(whole, target)
        found.append((out["w"].to_local() if out else None, expected, counts.total_bytes))
    return found


def here(mesh: mw.Mesh) -> bool:
    return runtime.RT.rank in mesh.ranks


def target_part(whole: torch.Tensor, target: mw.Layout) -> torch.Tensor | None:
    if not here(target.mesh):
        return None
    spec = Spec(whole.shape, whole.dtype, target)
    return spec.part(whole, target.mesh.coordinate(runtime.RT.rank))


@pytest.mark.parametrize("max_bytes", [1, 24, 100, 1 << 24])
def test_all_values_and_no_byte_more_than_ranks_lack(max_bytes: int) -> None:
    cases = pairs(max_bytes, 100)
    of_ranks = mw.simulate(functools.partial(moved, cases, max_bytes), WORLD, timeout=300)
    for case, (shape, source, target) in enumerate(cases):
        for got, expected, _ in (ranks[case] for ranks in of_ranks):
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected), (shape, source, target)
        lack = sum(lacking(source, target, shape, rank) for rank in range(6)) if shape else None
        sent = sum(ranks[case][2] for ranks in of_ranks)
        assert lack is None or sent == 8 * lack, (shape, source, target)


@pytest.mark.processes
def test_on_real_processes() -> None:
    cases = pairs(7, 12, [TRAIN, GENERATE, mw.Mesh({"a": 3}, ranks=[2, 0, 3])])
    for ranks in run_processes(functools.partial(moved, cases, 64), 4):
        for got, expected, _ in ranks:
            assert (got is None) == (expected is None)
            assert got is None or torch.equal(got, expected)


@pytest.mark.parametrize("max_bytes", [8, 40, 96, 1 << 10])
def test_no_rank_sends_or_receives_more_in_a_round(max_bytes: int) -> None:
    transfers = tuple(
        moves.Transfer(Spec(shape, torch.float32, a), Spec(shape, torch.float32, b), torch.float32)
        for shape, a, b in pairs(3, 40)
    )
    plans = [moves.plan_moves(transfers, tuple(range(6)), rank, max_bytes) for rank in range(6)]
    assert len({len(plan.rounds) for plan in plans}) == 1
    for plan in plans:
        for parts in plan.rounds:
            for side in parts:
                nbytes = sum(4 * torch.Size([b - a for a, b in part.box]).numel() for one in side for part in one)
                copies = 6 if max_bytes < 24 else 1  # one element goes to all ranks
                assert nbytes <= max(max_bytes, 4 * copies)
    for rank, plan in enumerate(plans):
        for other, theirs in enumerate(plans):
            assert [r.sends[other] for r in plan.rounds] == [r.receives[rank] for r in theirs.rounds]


def test_what_is_left_of_a_box() -> None:
    draw = random.Random(0)
    for _ in range(300):
        box, other = ([tuple(sorted(draw.choices(range(6), k=2))) for _ in range(3)] for _ in range(2))
        mask = torch.zeros(6, 6, 6, dtype=torch.int64)
        mask[tuple(slice(a, b) for a, b in box)] += 1
        mask[tuple(slice(a, b) for a, b in other)] = 0
        for part in difference(tuple(box), tuple(other)):
            assert nothing(common(part, tuple(other)))
            mask[tuple(slice(a, b) for a, b in part)] -= 1
        assert not mask.any()


# ---------------------------------------------------------------------------------------------- models

SPLIT = {"up.weight": {"tp": mw.Shard(0)}, "down.weight": {"tp": mw.Shard(1)}}


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10, bias=False), nn.Linear(10, 6)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.head = nn.Linear(6, 5, bias=False)
        self.tokens = nn.Embedding(5, 6)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: mw.unshard(t).detach().clone() for n, t in model.state_dict().items()}


def net(mesh: mw.Mesh, seed: int, dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    tied = options.pop("tied", False)
    return mw.shard_module(Net(tied).to(dtype), mesh, options.pop("layouts", SPLIT), **options)


@pytest.mark.parametrize("tied", [False, True])
def test_train_and_generate_again_and_again(tied: bool) -> None:
    """The learner is stored over dp and goes on training; the actor is another layout of the same model."""

    def run() -> None:
        learner = net(TRAIN, 0, tied=tied, fsdp="dp")
        actor = net(GENERATE, 1, tied=tied)
        optimizer = mw.shard_optimizer(torch.optim.AdamW(learner.parameters(), lr=0.1))
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for _ in range(3):
            optimizer.zero_grad()
            learner(x).square().sum().backward()
            optimizer.step()
            learner.seen.add_(1)
            out = mw.move(learner, GENERATE, into=actor)
            assert out["up.weight"] is actor.up.weight
            assert all(torch.equal(a, b) for a, b in zip(values(learner).values(), values(actor).values(), strict=True))
            torch.testing.assert_close(mw.unshard(actor(x)), mw.unshard(learner(x)))
        assert moves.plan_moves.cache_info().hits

    moves.plan_moves.cache_clear()
    mw.simulate(run, TRAIN)


def test_a_target_that_is_stored_over_an_axis_sees_the_new_values() -> None:
    def run() -> None:
        learner, actor = net(TRAIN, 0), net(TRAIN, 1, fsdp="dp", layouts={})
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        actor(x)
        saved = actor(x).sum()
        mw.move(learner, TRAIN, into=actor)
        torch.testing.assert_close(mw.unshard(actor(x)), mw.unshard(learner(x)))
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was written"):
            saved.backward()

    mw.simulate(run, TRAIN)


def test_other_names_dtypes_blocks_and_new_tensors() -> None:
    fused = mw.Shard(0, blocks=[4, 4, 4])

    def run() -> None:
        qkv = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
        source = {
            "model.qkv": mw.shard_tensor(qkv, TRAIN, {"tp": fused}),
            "model.plain": torch.tensor(2.5),
            "model.flag": mw.shard_tensor(torch.tensor([True, False]), TRAIN, {"dp": mw.Shard(0)}),
            "model.pair": mw.shard_tensor(torch.view_as_complex(qkv[:, :2].contiguous()), TRAIN, {"tp": mw.Shard(0)}),
            "critic": mw.shard_tensor(qkv, TRAIN, {}),
        }
        names = {"model.*": "*", "critic": None, "model.plain": "lm.*.scale".replace("*.", "")}
        new = mw.move(source, GENERATE, {"q*": {"tp": mw.Shard(0, blocks=[4, 8])}}, names=names)
        assert list(new) == ["qkv", "lm.scale", "flag", "pair"]
        assert new["qkv"].placements == (mw.Shard(0, blocks=[4, 8]),)
        assert torch.equal(mw.unshard(new["qkv"]), qkv)
        assert mw.unshard(new["lm.scale"]).item() == 2.5
        assert mw.unshard(new["flag"]).tolist() == [True, False]
        assert torch.equal(mw.unshard(new["pair"]), torch.view_as_complex(qkv[:, :2].contiguous()))
        low = {"qkv": mw.shard_tensor(torch.zeros(12, 5, dtype=torch.bfloat16), GENERATE, {"tp": mw.Shard(1)})}
        with collective.counting() as counts:
            mw.move({"qkv": source["critic"]}, GENERATE, into=low)
        assert counts.total_bytes == 0  # each had all of it
        assert torch.equal(mw.unshard(low["qkv"]), qkv.bfloat16())

    mw.simulate(run, TRAIN)


def test_a_model_of_one_device_on_some_processes() -> None:
    """A plain module is the same on all processes; two of them go on with parts of it."""
    half = mw.Mesh({"tp": 2}, ranks=[1, 3])

    def run() -> int:
        torch.manual_seed(0)
        plain = Net()
        part = mw.move(plain, half, SPLIT)
        assert all(
            torch.equal(
                t.to_local(),
                Spec(t.shape, t.dtype, t.spec.layout).part(plain.state_dict()[n], half.coordinate(runtime.RT.rank)),
            )
            for n, t in part.items()
        )
        return len(part)

    assert mw.simulate(run, TRAIN) == [0, 6, 0, 6]


def wrong(**how: Any) -> Any:
    learner, actor = net(TRAIN, 0), net(GENERATE, 1)
    options: dict[str, Any] = {"source": learner, "mesh": GENERATE, "into": actor}
    options.update({k: v(learner, actor) if callable(v) else v for k, v in how.items()})
    return mw.move(options.pop("source"), options.pop("mesh"), **options)


def one(t: torch.Tensor) -> Any:
    """A single weight as the target, and its name alone as what moves."""
    return {
        "into": lambda *_: {"up.weight": mw.shard_tensor(t, GENERATE, {})},
        "names": {"*": None, "up.*": "up.*"},
    }


def partial(*_: Any) -> Any:
    return {"x": mw.shard_tensor(torch.ones(3), TRAIN, {"tp": mw.Partial()})}


ITSELF: dict[str, Any] = {
    "source": lambda m, _: {"y": m.up.weight}, "mesh": TRAIN, "into": lambda m, _: {"y": m.up.weight.view(10, 6)},
}  # fmt: skip


def first_alone(value: Any) -> Any:
    return lambda learner, actor: value(learner, actor) if runtime.RT.rank == 0 else learner


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"names": {"modle.*": "*"}}, "no tensor is called 'modle"),
        ({"names": {"up.*": "x.*"}}, r"the source lacks up.weight \(close: .*the target lacks x.weight"),
        ({"names": {"up.weight": "down.weight"}}, "would both be called down.weight: leave one out"),
        ({"names": {"a*b*": "*"}}, r"at most one \* on each side"),
        ({"layouts": {}}, "layouts= are for new tensors"),
        ({"into": None, "layouts": {"nope": {}}}, "'nope' matches no tensor that moves"),
        ({"into": None, "layouts": {"up.weight": {"tp": mw.Partial()}}}, "up.weight cannot be Partial"),
        ({"into": lambda _, a: dict(a.state_dict(), more=a.up.weight.new_zeros(2))}, "the source lacks more"),
        ({"into": lambda learner, _: learner}, r"up.weight lies on Mesh\(dp=2, tp=2\) instead of Mesh\(tp=4\)"),
        (one(torch.zeros(3, 3)), r"up.weight is float64\[10, 6\], and up.weight of the target float32\[3, 3\]"),
        (one(torch.zeros(10, 6).long()), r"of the target int64"),
        ({"source": partial}, "x is Partial .*mw.reshard"),
        ({"source": lambda m, a: {"x": m.up.weight, "y": a.up.weight}}, "y lies on Mesh"),
        ({"source": lambda m, _: {"x": torch.ones(2, device="meta")}}, "x is on the meta device"),
        ({"source": lambda m, _: {"x": 3}}, "x is no tensor"),
        ({"source": 3}, "source cannot be an int: give an nn.Module"),
        ({"source": first_alone(lambda m, a: None)}, "other ranks of its mesh have the source"),
        ({"source": first_alone(lambda m, a: {"x": m.up.weight})}, r"\[0\] and \[1, 2, 3\] differ in what moves"),
        ({"into": lambda m, a: a if runtime.RT.rank else None}, "other ranks of the mesh fill tensors here"),
        ({"max_bytes": 0}, "max_bytes=0: a number of bytes of at least 1"),
        ({"max_bytes": lambda m, a: 100 + runtime.RT.rank}, "options"),
        (ITSELF, ""),
    ],
)  # fmt: skip
def test_errors_are_errors_on_all_ranks(how: dict[str, Any], text: str) -> None:
    def run() -> str:
        try:
            wrong(**how)
        except (ShardError, DesyncError, CollectiveError) as error:
            return str(error)
        return ""

    said = mw.simulate(run, TRAIN)
    assert all(bool(one) == bool(text) for one in said), said
    assert any(re.search(text, one) for one in said), said


def test_copies_that_differ_do_not_move() -> None:
    def run() -> None:
        learner = net(TRAIN, 0)
        with torch.no_grad():
            learner.down.bias.to_local().add_(runtime.RT.rank)
        with pytest.raises(DesyncError, match=r"values of down\.bias"):
            mw.move(learner, GENERATE, SPLIT)

    mw.simulate(run, TRAIN)


def test_a_target_in_the_memory_of_what_moves_is_refused() -> None:
    def run() -> None:
        x = mw.shard_tensor(torch.arange(8.0), TRAIN, {"tp": mw.Shard(0)})
        y = mw.shard_tensor(torch.arange(8.0), TRAIN, {"tp": mw.Shard(0)})
        with pytest.raises(ShardError, match=r"a of the target lies in the memory of b, which moves: copy one of them"):
            mw.move({"a": x, "b": y}, TRAIN, into={"a": y, "b": x})
        mw.move({"a": x}, TRAIN, into={"a": x})

    mw.simulate(run, TRAIN)


@pytest.mark.parametrize("placements", [{}, {"dp": mw.Shard(0)}], ids=str)
def test_views_of_what_is_filled(placements: dict[str, mw.Shard]) -> None:
    """A part that its tensor's shards cannot show is refused, and so is what moves within its own memory."""

    def run() -> None:
        whole = mw.shard_tensor(torch.zeros(8, 4), TRAIN, placements)
        part, source = whole[2:6], mw.shard_tensor(torch.ones(4, 4), TRAIN, {})
        if placements:
            with pytest.raises(ShardError, match=r"a of the target .* is a part of another tensor"):
                mw.move({"a": source}, TRAIN, into={"a": part})
        else:
            mw.move({"a": source}, TRAIN, into={"a": part})
            assert mw.unshard(whole).sum() == 16
        square = mw.shard_tensor(torch.arange(16.0).view(4, 4), TRAIN, placements)
        with pytest.raises(ShardError, match="w of the target lies in the memory of w"):
            mw.move({"w": square.t()}, TRAIN, into={"w": square})
        with pytest.raises(ShardError, match="b and a of the target lie in the same memory"):
            mw.move({"a": source, "b": source + 1}, TRAIN, into={"a": square, "b": square.t()})

    mw.simulate(run, TRAIN)


def test_a_tied_source_fills_an_untied_target() -> None:
    def run() -> bool:
        x = mw.shard_tensor(torch.arange(8.0), TRAIN, {})
        a, b = (mw.shard_tensor(torch.zeros(8), TRAIN, {"tp": mw.Shard(0)}) for _ in "ab")
        mw.move({"a": x, "b": x}, TRAIN, into={"a": a, "b": b})
        return torch.equal(mw.unshard(a), mw.unshard(b)) and torch.equal(mw.unshard(a), torch.arange(8.0))

    assert mw.simulate(run, TRAIN) == [True] * 4


ROWS, COLUMNS = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}


@pytest.mark.parametrize(
    ("layouts", "wanted"),
    [
        ({"tokens.weight": ROWS, "head.weight": COLUMNS}, None),
        ({"head.weight": ROWS, "tok*": {}}, None),
        ({"head.weight": {"dp": mw.Shard(0)}, "*": {}, "tokens.weight": ROWS}, mw.Shard(0)),
        ({"*": COLUMNS, "head.weight": ROWS}, mw.Shard(0)),
        ({"head.weight": ROWS, "tokens.weight": [mw.Replicate(), mw.Shard(0)]}, mw.Shard(0)),
        ({"tokens.weight": ROWS}, mw.Shard(0)),
        ({"*.weight": ROWS, "tokens.*": COLUMNS, "head.weight": COLUMNS}, mw.Shard(1)),
    ],
)
def test_names_of_a_tied_tensor_agree(layouts: Any, wanted: Any) -> None:
    """A later glob overrides an earlier one of the same name; two names of one tensor do not have two layouts."""
    value = torch.arange(16.0).view(4, 4)

    def run() -> None:
        tied = mw.shard_tensor(value, TRAIN, {})
        given = {"tokens.weight": tied, "head.weight": tied, "up": mw.shard_tensor(value, TRAIN, {})}
        if wanted is None:
            with pytest.raises(ShardError, match=r"(head|tokens).weight are one tensor \(tied\).*Leave out one of"):
                mw.move(given, TRAIN, layouts)
            return
        moved = mw.move(given, TRAIN, layouts)
        assert moved["head.weight"] is moved["tokens.weight"]
        assert moved["head.weight"].spec.layout.placements[1] == wanted
        assert torch.equal(mw.unshard(moved["head.weight"]), value)

    mw.simulate(run, TRAIN)


def test_writes_are_counted_alike_on_all_ranks() -> None:
    """Also on one that has no rows, to which nothing comes."""

    def run() -> int:
        source, target = (
            mw.shard_tensor(torch.ones(5, 7), m, p) for m, p in ((TRAIN, {}), (GENERATE, {"tp": mw.Shard(0)}))
        )
        mw.move({"a": source}, GENERATE, into={"a": target})
        return target._version

    assert len({*mw.simulate(run, TRAIN)}) == 1


def test_a_checkpoint_does_not_fill_a_copy(tmp_path: Any) -> None:
    def run() -> None:
        whole, model = mw.shard_tensor(torch.zeros(8, 4), TRAIN, {"dp": mw.Shard(0)}), nn.Module()
        model.register_buffer("part", mw.shard_tensor(torch.ones(4, 4), TRAIN, {}))
        store = mw.Checkpoints(tmp_path)
        store.save(1, model=model).wait()
        model.part = whole[2:6]
        with pytest.raises(CheckpointError, match=r"part .* is a part of another tensor"):
            store.load(model=model)

    mw.simulate(run, TRAIN)
