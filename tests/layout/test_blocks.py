"""Dims that are split by blocks: what ranks hold, conversions, and all that keeps, fills and saves tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import LayoutError
from meshwright.layout import placement_from
from meshwright.ranks import runtime
from meshwright.testing import check_conversion

Tensor = torch.Tensor
THREE, TWO_BY_TWO = mw.Mesh({"tp": 3}), mw.Mesh({"dp": 2, "tp": 2})
BLOCKS = mw.Shard(0, (5, 2, 4))  # uneven, and one of them shorter than the axis


def rows(n: int = 11, width: int = 3) -> Tensor:
    return torch.arange(n * width, dtype=torch.float64).reshape(n, width)


def own(mesh: mw.Mesh, p: mw.Shard, i: int) -> list[int]:
    """The indices that rank i of an axis has, by torch.chunk of each block."""
    n = mesh.sizes[mesh.axis_index("tp")]
    found = []
    for block in torch.arange(sum(p.blocks)).split(list(p.blocks)):
        parts = block.chunk(n)
        found += parts[i].tolist() if i < len(parts) else []
    return found


def test_ranks_hold_a_part_of_each_block() -> None:
    def run() -> tuple[list[list[float]], Tensor, list[int]]:
        x = mw.shard_tensor(rows(), THREE, {"tp": BLOCKS})
        held = x.to_local()
        back = mw.unshard(x)
        return held.tolist(), back, list(x.spec.local_shape(THREE.coordinate(runtime.RT.rank)))

    for i, (held, back, shape) in enumerate(mw.simulate(run, THREE)):
        assert held == rows()[own(THREE, BLOCKS, i)].tolist()
        assert shape == [len(own(THREE, BLOCKS, i)), 3]
        assert torch.equal(back, rows())


@pytest.mark.parametrize("mesh", [THREE, TWO_BY_TWO], ids=["tp3", "dp2tp2"])
def test_conversions_and_their_transposes(mesh: mw.Mesh) -> None:
    others = [mw.Replicate(), mw.Shard(0), mw.Shard(1), mw.Shard(0, (6, 5)), mw.Shard(1, (2, 4))]
    others += [mw.Partial(op) for op in ("sum", "avg", "max", "min", "product")]
    first = [{}] if mesh is THREE else [{}, {"dp": mw.Shard(1)}]
    for more, other in itertools.product(first, others):
        if more and isinstance(other, mw.Shard) and other.blocks and other.dim == 1:
            continue
        for src, dst in ((BLOCKS, other), (other, BLOCKS)):
            if not isinstance(dst, mw.Partial):
                ends = (mw.Layout(mesh, {"tp": p, **more}) for p in (src, dst))
                check_conversion(*(mw.Spec((11, 6), torch.float64, layout) for layout in ends))


def test_errors_name_what_is_wrong() -> None:
    for text, found in (("x", "the lengths of the blocks"), ((1, -1), "the lengths of the blocks")):
        with pytest.raises(LayoutError, match=found):
            mw.Shard(0, text)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="a dim that is split by blocks is split by no other axis"):
        mw.Layout(TWO_BY_TWO, {"dp": mw.Shard(0), "tp": BLOCKS})
    with pytest.raises(LayoutError, match=r"the blocks are 11 together, and dim 0 of \(12, 3\) is not"):
        mw.Spec((12, 3), torch.float64, mw.Layout(THREE, {"tp": BLOCKS}))
    with pytest.raises(LayoutError, match="torch's placements cannot express"):
        mw.Layout(THREE, {"tp": BLOCKS}).to_torch()
    with pytest.raises(LayoutError, match="lies in 3 places of dim 0"):
        mw.Layout(THREE, {"tp": BLOCKS}).local_bounds((11, 3), (0,))
    assert mw.Shard(0, (4,)) == mw.Shard(0, (4, 0)) == mw.Shard(0)
    assert placement_from(repr(BLOCKS)) == BLOCKS
    for wrong in ("Shard(0, blocks=(a, 2))", "Shard(0, blocks=)x"):
        with pytest.raises(LayoutError, match="is no placement"):
            placement_from(wrong)
    assert "[0:2 and 5:6 and 7:9, :]" in mw.Layout(THREE, {"tp": BLOCKS}).picture((11, 3))


FILLS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.normal_(),
    lambda t: t.uniform_(-1, 1),
    lambda t: nn.init.xavier_uniform_(t),
    lambda t: t.bernoulli_(0.4),
]


@pytest.mark.parametrize("fill", FILLS)
def test_random_values_are_those_of_one_device(fill: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(3)
    want = fill(rows())
    then = torch.rand(3)

    def run() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        x = mw.shard_tensor(rows(), THREE, {"tp": BLOCKS})
        with torch.no_grad():
            return mw.unshard(fill(x)), torch.rand(3)

    for got, after in mw.simulate(run, THREE):
        assert torch.equal(got, want)
        assert torch.equal(after, then)


def test_dropout_does_not_depend_on_blocks() -> None:
    def run() -> tuple[Tensor, ...]:
        found = []
        for p in (BLOCKS, mw.Shard(1), mw.Replicate()):
            torch.manual_seed(3)
            found.append(mw.unshard(nn.functional.dropout(mw.shard_tensor(rows(), THREE, {"tp": p}), 0.3)))
        return tuple(found)

    for blocks, split, whole in mw.simulate(run, THREE):
        assert torch.equal(blocks, whole)
        assert torch.equal(split, whole)


def test_writes_reach_the_rows_that_they_name() -> None:
    writes: list[Callable[[Tensor], object]] = [
        lambda t: t[:5].mul_(2),
        lambda t: t[5:7].zero_(),
        lambda t: t[3:9].add_(1),  # begins and ends within blocks
        lambda t: t.__setitem__((slice(7, 11), 1), -1.0),
        lambda t: t[4].fill_(7),
        lambda t: t.copy_(t.flip(0)),
        lambda t: [part.mul_(i) for i, part in enumerate(t.split([5, 2, 4]))],
    ]
    for write in writes:
        want = rows()
        write(want)

        def run(write: Callable[[Tensor], object] = write) -> Tensor:
            x = mw.shard_tensor(rows(), THREE, {"tp": BLOCKS})
            write(x)
            return mw.unshard(x)

        for got in mw.simulate(run, THREE):
            assert torch.equal(got, want)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 11), nn.Tanh(), nn.Linear(11, 2)).double()


PLAN = {"0.*": {"tp": BLOCKS}, "2.weight": {"tp": mw.Shard(1, BLOCKS.blocks)}}


def trained(mesh: mw.Mesh | None, steps: int, folder: Path | None = None, **stored: str) -> list[Tensor]:
    """The parameters after some steps; those that a checkpoint has done already are not done again."""
    own = model() if mesh is None else mw.shard_module(model(), mesh, PLAN if "tp" in mesh.axes else {}, **stored)
    opt = torch.optim.AdamW(own.parameters(), lr=0.1, eps=1e-3)
    store = None if folder is None else mw.Checkpoints(folder)
    done = (store and store.load(model=own, optimizer=opt)) or 0
    for _ in range(done, steps):
        opt.zero_grad()
        own(rows(4)).square().sum().backward()
        opt.step()
    if store is not None:
        store.save(steps, model=own, optimizer=opt).wait()
    return [mw.unshard(p.detach()) for p in own.parameters()]


@pytest.mark.parametrize("stored", [{}, {"fsdp": "dp"}], ids=["whole", "stored"])
def test_checkpoints_go_on_with_on_any_mesh(stored: dict[str, str], tmp_path: Path) -> None:
    meshes = [TWO_BY_TWO, mw.Mesh({"tp": 4}), mw.Mesh({"dp": 2})]
    for steps, mesh in enumerate(meshes, 1):
        given = stored if "dp" in mesh.axes else {}
        for got in mw.simulate(lambda: trained(mesh, 2 * steps, tmp_path, **given), mesh):  # noqa: B023
            torch.testing.assert_close(got, trained(None, 2 * steps))


def test_weights_of_hugging_face_and_state_dicts_have_the_models_order(tmp_path: Path) -> None:
    def run() -> dict[str, Tensor]:
        mine = mw.shard_module(model(), THREE, PLAN)
        mw.save_weights(mine, tmp_path / "weights")
        other = mw.shard_module(model(), THREE, PLAN)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        mw.load_weights(other, tmp_path / "weights")
        third = mw.shard_module(model(), THREE, PLAN)
        third.load_state_dict({k: 2 * mw.unshard(v) for k, v in other.state_dict().items()})
        return {k: mw.unshard(v) / 2 for k, v in third.state_dict().items()}

    for got in mw.simulate(run, THREE):
        assert all(torch.equal(got[k], v) for k, v in model().state_dict().items())
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "weights" / "model.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in model().state_dict().items())
