"""What ranks compare: digests of what must be the same, always; everything, in check mode."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.collective import Fact, together
from meshwright.errors import DesyncError
from meshwright.ranks import runtime

TWO = mw.Mesh({"dp": 2})
SQUARE = mw.Mesh({"dp": 2, "tp": 2})
UNEVEN = mw.Mesh({"dp": 3})


def rank() -> int:
    return runtime.RT.rank


def told(fn: Any, mesh: mw.Mesh = TWO, **options: Any) -> str:
    """The error that every rank gets."""
    errors: dict[int, str] = {}

    def caught() -> None:
        try:
            fn()
        except DesyncError as error:
            errors[rank()] = str(error)

    mw.simulate(caught, mesh, **options)
    if not errors:
        return ""
    assert set(errors) == set(mesh.ranks), errors
    assert len(set(errors.values())) == 1, errors
    return errors[0]


# -- always ---------------------------------------------------------------------------------------------


def test_replicas_from_other_seeds_are_refused() -> None:
    def fn() -> None:
        torch.manual_seed(7 + rank())
        mw.shard_module(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), UNEVEN, {"0.weight": {"dp": mw.Shard(0)}})

    message = told(fn, UNEVEN)
    assert "different values of 0.weight (and 3 more differ): rank 0: digest" in message
    assert "; rank 1: digest" in message
    assert "; call torch.manual_seed with the same seed" in message


@pytest.mark.parametrize("what", ["element", "order", "buffer", "dtype"])
def test_any_difference_in_a_model_is_seen(what: str) -> None:
    def fn() -> None:
        torch.manual_seed(0)
        model = nn.BatchNorm1d(6)
        with torch.no_grad():
            nn.init.normal_(model.weight)
            if what == "dtype":
                model.to(torch.bfloat16)
            if rank() == 1:
                if what == "order":
                    model.weight.copy_(model.weight.flip(0))
                elif what == "buffer":
                    model.running_mean[3] = 1e-6
                else:
                    model.weight[5] += 0.1
        mw.shard_module(model, TWO)

    assert f"different values of {'running_mean' if what == 'buffer' else 'weight'}:" in told(fn)


def test_a_model_from_the_meta_device_needs_the_same_generator() -> None:
    def fn(step: int) -> None:
        torch.manual_seed(step * rank())
        with torch.device("meta"):
            model = nn.Linear(3, 2)
        mw.shard_module(model, TWO, {"weight": {"dp": mw.Shard(0)}})

    assert "different values of the default random generator" in told(lambda: fn(1))
    assert told(lambda: fn(0)) == ""


def test_a_mistake_on_one_rank_is_raised_on_all_whatever_it_says() -> None:
    def fn() -> None:
        with together(UNEVEN, "preparing"):
            if rank() == 1:
                raise ValueError

    def caught() -> str:
        with pytest.raises((ValueError, DesyncError)) as error:
            fn()
        return str(error.value)

    said = "preparing failed on rank 1: ValueError()"
    assert mw.simulate(caught, UNEVEN) == [said, "", said]


def test_facts_are_compared_where_ranks_share_them() -> None:
    def fn(*facts: Fact) -> str:
        with together(SQUARE, "preparing", fix="look") as own:
            own += facts
        return ""

    def row() -> int:
        return rank() // 2

    assert told(lambda: fn(Fact("part", row(), place=row())), SQUARE) == ""
    message = told(lambda: fn(Fact("a"), Fact("b", rank() == 3), Fact("part", rank(), row(), "alike")), SQUARE)
    assert message.endswith("different b (and 1 more differ): ranks 0, 1, 2: False; rank 3: True; look")
    assert told(lambda: fn(Fact("part", rank(), row(), "alike")), SQUARE).endswith("rank 0: 0; rank 1: 1; alike")
    more = [Fact("a"), Fact("b")]
    assert "ranks 0, 1: b; ranks 2, 3: nothing more" in told(lambda: fn(*more[: 2 - row()]), SQUARE)


def test_shard_tensor_of_other_values() -> None:
    message = told(lambda: mw.shard_tensor(torch.full((3,), float(rank())), TWO, {"dp": mw.Shard(0)}))
    assert "shard_tensor: the ranks disagree: rank 0: (" in message
    assert "values of digest" in message


def loader(seed: int, rows: int = 7) -> Any:
    data = TensorDataset(torch.arange(rows * 2.0).view(rows, 2), torch.arange(rows))
    return DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_loaders_of_another_shuffle() -> None:
    def fn(seed: int) -> None:
        for _ in mw.shard_dataloader(loader(seed * rank()), TWO):
            pass

    message = told(lambda: fn(1))
    assert "the ranks loaded different batches (batch 0): different values of [0]" in message
    assert "or local=True if each rank loads its own part" in message
    assert told(lambda: fn(0)) == ""


def test_loaders_of_other_lengths() -> None:
    class Rows:  # no __len__
        def __iter__(self) -> Any:
            yield from (torch.ones(2, 2) for _ in range(2 + rank()))

    def fn(made: Any) -> None:
        for x in mw.shard_dataloader(made(), TWO):
            x.sum().item()

    assert "rank 0: 3 batches in all; rank 1: 2 batches in all" in told(lambda: fn(lambda: loader(0, 7 - rank())))
    assert "rank 0: no more batch; rank 1: [((), (2, 2)" in told(lambda: fn(Rows), check=True)


def test_a_loader_that_does_not_know_its_length() -> None:
    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __getitem__(self, i: int) -> torch.Tensor:
            if i > 2:
                raise IndexError
            return torch.ones(2, 2)

    def fn() -> int:
        return len(list(mw.shard_dataloader(Unsure(Rows()), TWO)))

    assert mw.simulate(fn, TWO) == [3, 3]


class Unsure:
    """Has ``__len__``, as a DataLoader has, and does not know it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter([torch.ones(2, 2)] * 3)


def test_local_loaders_agree_where_they_bring_the_same_part() -> None:
    def fn(broken: bool) -> float:
        dp, tp = SQUARE.coordinate(rank())
        batches = [torch.full((2, 3), float(dp + 5 * tp * broken))]
        (x,) = mw.shard_dataloader(batches, SQUARE, {"dp": mw.Shard(0)}, local=True)
        return x.sum().item()

    assert "different values of the tensor: rank 0: digest" in told(lambda: fn(True), SQUARE)
    assert mw.simulate(lambda: fn(False), SQUARE) == [6.0] * 4


def test_reading_different_values_is_an_error() -> None:
    def fn() -> None:
        x = mw.shard_tensor(torch.arange(4.0), TWO, {"dp": mw.Shard(0)})
        loss, accuracy = x.sum(), x.mean()
        float(loss) if rank() else float(accuracy)

    assert "for the value read at test_check_mode.py" in told(fn)


# -- check mode -----------------------------------------------------------------------------------------


def one_line() -> None:
    x = mw.shard_tensor(torch.arange(4.0), TWO, {"dp": mw.Shard(0)})
    if rank():
        mw.unshard(x)
    else:
        mw.unshard(x + 1)


def test_lines_and_layouts_are_compared() -> None:
    message = told(one_line, check=True)
    line = one_line.__code__.co_firstlineno + 3
    assert "are about to run different collectives" in message
    assert "rank 0: all_gather(dim=0, sizes=(2, 2)) of float32[2], for" in message
    assert f"over dp at test_check_mode.py:{line + 2}\n  rank 1:" in message
    assert f":{line}" in message
    assert "for the value read at" in told(one_line)  # what is read at two places is told without it, too


def test_replicated_values_are_compared() -> None:
    def fn() -> None:
        w = mw.shard_tensor(torch.ones(4), SQUARE, ())
        w.to_local()[0] += float(rank() == 2)  # one replica goes astray
        mw.reshard(w, {"tp": mw.Shard(0)})

    message = told(fn, SQUARE, check=True)
    assert "hold different values of a tensor that is the same on dp,tp" in message
    assert "other values of float32[4]" in message
    assert "test_check_mode.py" in message


def test_a_right_program_runs_in_check_mode() -> None:
    def fn() -> list[Any]:
        torch.manual_seed(3)
        placements = {"0.weight": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}}
        model = mw.shard_module(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)), SQUARE, placements)
        opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters()), shard_states="dp")
        data = TensorDataset(torch.randn(7, 5), torch.randn(7, 3))
        for x, y in mw.shard_dataloader(DataLoader(data, 3), SQUARE, {"dp": mw.Shard(0)}):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
        return [loss.item(), *(mw.unshard(p).tolist() for p in model.parameters())]

    assert mw.simulate(fn, SQUARE, check=True) == mw.simulate(fn, SQUARE)


def drifting(change: Any) -> None:
    torch.manual_seed(3)
    model = mw.shard_module(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), UNEVEN)
    opt = mw.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for i in range(4):
        loss = model(mw.shard_tensor(torch.ones(4, 5) + i, UNEVEN, {"dp": mw.Shard(0)})).square().mean()
        loss.backward()
        if rank() == 2 and i == 1:
            change(model, opt)
        opt.step()
        if rank() != 2 or i != 1 or change is not keep:
            opt.zero_grad()


def keep(model: Any, opt: Any) -> None:
    """Leave out zero_grad."""


DRIFTS: dict[str, Any] = {
    "lr": lambda model, opt: opt.param_groups[0].update(lr=0.5),
    "weight_decay": lambda model, opt: opt.param_groups[0].update(weight_decay=0.9),
    "gradient": lambda model, opt: model[1].weight.grad.mul_(2),
    "state": lambda model, opt: opt.state.clear(),
    "zero_grad": keep,
}


@pytest.mark.parametrize("what", DRIFTS)
def test_replicas_that_drift_apart_are_seen(what: str) -> None:
    message = told(lambda: drifting(DRIFTS[what]), UNEVEN, check=True)
    if what == "zero_grad":
        assert (
            "for different parameters (0 on rank 0, 0 on rank 1, 4 on rank 2): did one rank leave out zero" in message
        )
        return
    if what != "gradient":
        assert re.search("the ranks updated with different (lr|weight_decay|states) of group 0: ranks 0, 1: ", message)
        return
    assert "the ranks hold different values of " in message
    assert re.search(
        r"ranks 0, 1: digest [-0-9a-f]+; rank 2: digest [-0-9a-f]+, after the backward at test_check", message
    )


HOW: dict[str, dict[str, Any]] = {
    "alone": {},
    "passes": {"passes": ["data-parallel-optimization"]},
    "stored": {"fsdp": "dp", "clip_grad_norm": 0.1},
    "states": {"shard_states": "dp", "loss_scale": 8.0},
    "merged": {"passes": ["gradient-merge:k_steps=2"]},
}


def captured(mesh: mw.Mesh, change: Any = None, optimizer: Any = None, **how: Any) -> list[Any]:
    """Four steps; ``change(i, model, optimizer)`` comes before each."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    made = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters())
    batch = torch.randn(5, 5)
    layouts = {"0.weight": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}} if "tp" in mesh.axes else {}
    step = mw.compile_step(
        model, lambda m, x: m(x).square().mean(), made, batch, mesh=mesh, layouts=layouts,
        batch={"dp": mw.Shard(0)}, **how,
    )  # fmt: skip
    losses = []
    for i in range(4):
        given = change(i, model, made) if change else None
        losses.append(step(batch if given is None else batch + given).item())
    return [losses, *(mw.unshard(p.detach()).tolist() for p in model.parameters())]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mesh", [pytest.param(SQUARE, marks=pytest.mark.long), UNEVEN], ids=["square", "uneven"])
def test_captured_steps_run_in_check_mode(mesh: mw.Mesh, how: str) -> None:
    assert mw.simulate(lambda: captured(mesh, **HOW[how]), mesh, check=True) == mw.simulate(
        lambda: captured(mesh, **HOW[how]), mesh
    )


def _zeroed(i: int, model: Any, opt: Any) -> None:
    if rank() == 2 and i == 2:
        with torch.no_grad():
            model[2].weight.mul_(0)


def _put_back(i: int, model: Any, opt: Any) -> None:
    if rank() == 2 and i == 2:
        with torch.no_grad():
            model[2].weight.mul_(2).div_(2)


def _state(i: int, model: Any, opt: Any) -> None:
    if rank() == 2 and i == 2:
        opt.state.clear()


def _rate(i: int, model: Any, opt: Any) -> None:
    opt.param_groups[0]["lr"] = 0.5 if rank() == 2 and i == 2 else 0.1


def _batch(i: int, model: Any, opt: Any) -> float:
    return float(rank() == 2 and i == 2)


ALONE = {
    _zeroed: r"different values of 2.weight.*: ranks 0, 1: digest .*; rank 2: digest .*\(0 on rank 0, .*, 1 on rank 2",
    _state: r"different values of 0.weight.*: ranks 0, 1: digest .*; rank 2: digest .*; ",
    _rate: r"different learning rates: ranks 0, 1: \[0.1\]; rank 2: \[0.5\]",
    _batch: r"different batches since the last update \(.* on rank 2\): did one rank leave out a batch",
}


@pytest.mark.parametrize("change", ALONE)
def test_captured_steps_see_what_one_rank_does_alone(change: Any) -> None:
    assert re.search(ALONE[change], told(lambda: captured(UNEVEN, change), UNEVEN))


def test_captured_steps_bear_what_changes_nothing() -> None:
    assert mw.simulate(lambda: captured(UNEVEN, _put_back), UNEVEN) == mw.simulate(lambda: captured(UNEVEN), UNEVEN)


def test_captured_steps_name_the_line_that_calls_them() -> None:
    def fn() -> None:
        model = nn.Linear(2, 2)
        step = mw.compile_step(
            model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), torch.ones(2, 2), mesh=TWO,
            batch={"dp": mw.Shard(0)},
        )  # fmt: skip
        x = mw.shard_tensor(torch.ones(2, 2), TWO, {"dp": mw.Shard(0)})
        step(x) if rank() else mw.unshard(x)

    line = fn.__code__.co_firstlineno + 7
    assert f"rank 1: a captured step for the global batch (2, 2) over dp at test_check_mode.py:{line}" in told(
        fn, check=True
    )


def test_where_a_value_is_read_does_not_depend_on_how_warm_the_code_is() -> None:
    def here() -> str:
        return runtime.user_line(exactly=True)

    # One call is several instructions, and which one a frame shows changes when the interpreter specialises the code.
    assert len({here() for _ in range(50)}) == 1
    first, second = runtime.user_line(exactly=True), runtime.user_line(exactly=True)
    assert first != second
