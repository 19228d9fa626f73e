"""Micro-batches weigh as much as they have in the loss: merged steps are one step of one device on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.errors import PassError, ProgramError
from meshwright.passes import GradientMerge

Tensor = torch.Tensor
DPO = "data-parallel-optimization"
CLASSES = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(self.embed(x)))))  # type: ignore[no-any-return]


def rows(n: int, seed: int, ignored: float) -> tuple[Tensor, Tensor]:
    """Tokens and labels, of which many are ignored in some batches and few in others."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, 7, (n, 5), generator=g), torch.randint(0, 7, (n, 5), generator=g)
    return x, y.masked_fill(torch.rand(n, 5, generator=g) < ignored, -100)


def flat(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0]).flatten(0, 1), batch[1].flatten()


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(*flat(model, batch), reduction="none")


def masked(batch: Any) -> Tensor:
    return (batch[1] != -100).flatten()


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "ignored labels": lambda m, b: F.cross_entropy(*flat(m, b)),
    "weighted classes": lambda m, b: F.cross_entropy(*flat(m, b), weight=CLASSES),
    "smoothed": lambda m, b: F.cross_entropy(*flat(m, b), label_smoothing=0.1),
    "masked by hand": lambda m, b: (each(m, b) * masked(b)).sum() / masked(b).sum(),
    "masked, not below one": lambda m, b: (each(m, b) * masked(b)).sum() / masked(b).sum().clamp(min=1),
    "masked, a bit more": lambda m, b: (each(m, b) * masked(b)).sum() / (masked(b).sum() + 1e-3),
    "kept from zero twice": lambda m, b: (
        (each(m, b) * masked(b) * 0.01).sum() / ((masked(b) * 0.01).sum().clamp(min=1) + 0.5)
    ),
    "mean by mean": lambda m, b: (each(m, b) * masked(b)).mean() / masked(b).double().mean(),
    "by detached sums": lambda m, b: (each(m, b) * masked(b)).sum() / each(m, b).detach().sum(),
    "by a count": lambda m, b: (each(m, b) * masked(b)).sum() / torch.count_nonzero(masked(b)),
    "divided first": lambda m, b: (each(m, b) * masked(b) / masked(b).sum()).sum() * 0.5,
    "and a penalty": lambda m, b: F.cross_entropy(*flat(m, b)) + 0.01 * m.up.weight.square().mean(),  # type: ignore[operator,union-attr]
    "two of one kind": lambda m, b: F.cross_entropy(*flat(m, b)) + 0.1 * F.nll_loss(*flat(m, b)),
    "mean": lambda m, b: m(b[0]).square().mean(),
    "three means": lambda m, b: (
        m(b[0]).square().mean() + (0.3 * m.embed(b[0]).abs().sum(-1).mean() + 0.1 * m(b[0]).sum((1, 2)).square().mean())  # type: ignore[operator]
    ),
    "two means": lambda m, b: m(b[0]).square().mean() + 0.3 * m.embed(b[0]).abs().sum(-1).mean(),  # type: ignore[operator]
}


def one_device(loss_fn: Any, updates: Sequence[Sequence[Any]]) -> list[Tensor]:
    """One step on the rows of all micro-batches of an update."""
    torch.manual_seed(0)
    model = Net().double()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    for micro in updates:
        opt.zero_grad()
        loss_fn(model, tuple(torch.cat(parts) for parts in zip(*micro, strict=True))).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


def merged(
    loss_fn: Any, updates: Sequence[Sequence[Any]], mesh: mw.Mesh, k: int, passes: Sequence[Any] = (), **options: Any
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = [GradientMerge(k), *passes]
    batch = {"dp": mw.Shard(0)}
    step = mw.compile_step(model, loss_fn, opt, updates[0][0], mesh=mesh, batch=batch, passes=made, **options)
    mw.check_program(step.program)
    for micro in updates:
        for part in micro:
            step(part)
        if len(micro) != k:
            step.flush()
    return [mw.unshard(p.detach()).clone() for p in model.parameters()]


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def updates_of(sizes: Sequence[int], flush_scale: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """Two updates of all sizes, and one of fewer micro-batches."""
    parts = [[rows(n, 10 * u + i, (0.0, 0.9, 0.4)[i % 3]) for i, n in enumerate(sizes)] for u in range(3)]
    return [*parts[:2], parts[2][:flush_scale]]


@pytest.mark.thin(2)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_step_of_one_device_on_the_whole_batch(loss: str) -> None:
    mesh, updates = mw.Mesh({"dp": 2}), updates_of((4, 4, 4))
    got = mw.simulate(lambda: merged(LOSSES[loss], updates, mesh, 3), mesh)[0]
    same(got, one_device(LOSSES[loss], updates))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("loss", "axes", "sizes", "options"),
    [
        ("ignored labels", {"dp": 3}, (3, 7, 4), {"passes": [DPO]}),  # uneven rows, other sizes
        ("mean", {"dp": 2}, (4, 2, 7), {}),
        ("two means", {"dp": 3}, (3, 6), {}),
        ("mean by mean", {"dp": 2}, (4, 2, 7), {}),
        ("by detached sums", {"dp": 3}, (3, 6), {}),
        ("three means", {"dp": 2}, (2, 6), {}),
        ("ignored labels", {"dp": 1}, (4, 2), {}),  # one op, with its division inside
        ("weighted classes", {"dp": 2, "tp": 2}, (4, 4), {"layouts": {"down.*": {"tp": mw.Shard(0)}}}),
        ("masked by hand", {"dp": 2}, (4, 4), {"fsdp": "dp", "passes": [DPO]}),
        ("ignored labels", {"dp": 2}, (4, 4), {"shard_states": "dp", "loss_scale": 8.0}),
    ],
    ids=str,
)
def test_meshes_and_unequal_micro_batches(loss: str, axes: Any, sizes: Any, options: Any) -> None:
    mesh, updates = mw.Mesh(axes), updates_of(sizes)
    got = mw.simulate(lambda: merged(LOSSES[loss], updates, mesh, len(sizes), **options), mesh)[0]
    same(got, one_device(LOSSES[loss], updates))


@pytest.mark.parametrize("axes", [{"dp": 1}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("loss", ["ignored labels", "masked by hand", "masked, not below one"])
def test_a_micro_batch_of_which_nothing_counts(loss: str, axes: Any) -> None:
    mesh, updates = mw.Mesh(axes), updates_of((4, 4))
    updates[0][0] = (updates[0][0][0], torch.full_like(updates[0][0][1], -100))
    updates[1][1] = (updates[1][1][0], torch.full_like(updates[1][1][1], -100))
    got = mw.simulate(lambda: merged(LOSSES[loss], updates, mesh, 2), mesh)[0]
    same(got, one_device(LOSSES[loss], updates))


def test_all_alike_where_it_is_asked_for() -> None:
    """The mean of means, which is another number."""
    mesh, loss = mw.Mesh({"dp": 2}), LOSSES["ignored labels"]
    (micro, *_) = updates_of((4, 4))
    gradients = []
    torch.manual_seed(0)
    model = Net().double()
    for part in micro:
        gradients.append(torch.autograd.grad(loss(model, part), list(model.parameters())))

    def run(weighted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        own = Net().double()
        start = [p.detach().clone() for p in own.parameters()]
        opt = torch.optim.SGD(own.parameters(), lr=1.0)
        how = GradientMerge(2, weighted=weighted)
        step = mw.compile_step(own, loss, opt, micro[0], mesh=mesh, batch={"dp": mw.Shard(0)}, passes=[how])
        for part in micro:
            step(part)
        return [a - mw.unshard(p.detach()) for a, p in zip(start, own.parameters(), strict=True)]

    alike, weighted = (mw.simulate(functools.partial(run, w), mesh)[0] for w in (False, True))
    same(alike, [(a + b) / 2 for a, b in zip(*gradients, strict=True)])
    assert max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(alike, weighted, strict=True)) > 0.05


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda m, b: m(b[0]).square().mean().sqrt(), "aten.sqrt.default of a sum over the batch"),
        (lambda m, b: F.cross_entropy(*flat(m, b)) + 0.1 * m(b[0]).square().mean(), "two means over different numbers"),
        (lambda m, b: (each(m, b) * masked(b)).sum() / masked(b).sum() / each(m, b).sum(), "again"),
        (
            lambda m, b: (
                (each(m, b) * masked(b)).sum() / masked(b).sum() + each(m, b).sum() / (b[0] > 2).sum().clamp(min=1)
            ),
            "two means over different numbers",
        ),
        (
            lambda m, b: each(m, b).sum() / m.embed(b[0]).detach().norm(),
            "linalg_vector_norm.default uses a sum over the rows",
        ),
        (lambda m, b: each(m, b).sum() / m.up(m.embed(b[0])).detach().max(), "aten.max.default reduces over all rows"),  # type: ignore[operator]
        (lambda m, b: each(m, b).sum() / b[0].max(), "aten.max.default reduces over all rows"),
        (lambda m, b: each(m, b).sum() / masked(b).sum().square(), r"divided by a power \(2\) of a sum over the batch"),
        (lambda m, b: each(m, b).sum() / masked(b).any(), "aten.any.default reduces over all rows"),
        (lambda m, b: each(m, b).square().sum() / each(m, b).sum(), "the gradient goes through"),
        (lambda m, b: each(m, b).mean() / masked(b).sum(), "divide a sum by a sum"),
        (lambda m, b: m.up.weight.square().sum() / masked(b).sum(), "divide a sum by a sum"),  # type: ignore[operator,union-attr]
        (lambda m, b: each(m, b).mean() / masked(b).double().mean().clamp(0.1), "kept from zero: divide sums"),
        (
            lambda m, b: (m(b[0]).sum((1, 2)) * (b[0][:, :1] == b[0][:, 0]).sum(1)).mean(),
            "reads rows of other micro-batches",
        ),
        (
            lambda m, b: (m(b[0]).sum((1, 2)) * torch.cdist(*[m.embed(b[0])[:, 0].detach()] * 2).sum(1)).mean(),
            "reads rows of other micro-batches",
        ),  # type: ignore[operator]
        (
            lambda m, b: (
                m(b[0]).sum((1, 2))
                / b[0].new_zeros(99).scatter_add(0, b[0][:, 0], torch.ones_like(b[0][:, 0]))[b[0][:, 0]]
            ).sum(),
            "reads rows of other micro-batches",
        ),
    ],
)
def test_a_loss_that_is_no_weighted_mean_is_refused_with_its_line(loss: Any, says: str) -> None:
    (micro, *_) = updates_of((4, 4))
    mesh = mw.Mesh({"dp": 2})
    with pytest.raises(PassError, match=says) as caught:
        mw.simulate(lambda: merged(loss, [micro], mesh, 2), mesh)
    assert "test_batch_weights.py" in str(caught.value)
    assert "weighted=False" in str(caught.value)


def test_means_of_other_ratios_are_not_merged() -> None:
    """In longer rows a mean over tokens is one over more things, a mean over rows is not: no weight is that of both."""
    mesh, (a, *_) = mw.Mesh({"dp": 2}), [rows(4, 0, 0.0)]
    short = (a[0][:, :3], a[1][:, :3])
    with pytest.raises(ProgramError, match="a mean over other things in this micro-step"):
        mw.simulate(lambda: merged(LOSSES["three means"], [[a, short]], mesh, 2), mesh)


def test_saved_in_mid_merge() -> None:
    """The weights so far are part of a step's state."""
    mesh, loss, updates = mw.Mesh({"dp": 2}), LOSSES["ignored labels"], updates_of((4, 4))

    def run() -> list[Tensor]:
        def make() -> Any:
            torch.manual_seed(0)
            model = Net().double()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            batch = {"dp": mw.Shard(0)}
            args = (model, loss, opt, updates[0][0])
            return model, mw.compile_step(*args, mesh=mesh, batch=batch, passes=[GradientMerge(2)])

        model, step = make()
        step(updates[0][0])
        state = step.state_dict()
        other, later = make()
        later.load_state_dict(state)
        for s in (step, later):
            s(updates[0][1])
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())
        return [mw.unshard(p.detach()) for p in model.parameters()]

    mw.simulate(run, mesh)


class Normed(Net):
    """By the mean and variance of the batch, with running statistics or without."""

    def __init__(self, tracked: bool) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(5, track_running_stats=tracked)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.batch(self.embed(x)))))  # type: ignore[no-any-return]


def similar(model: nn.Module, batch: Any) -> Tensor:
    h = F.normalize(model(batch[0]).mean(1), dim=-1)
    return F.cross_entropy(h @ h.t() / 0.1, torch.arange(len(h)))


MIXED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (
        functools.partial(Normed, True),
        LOSSES["ignored labels"],
        "batch_norm.default uses a sum over the rows",
    ),
    (
        functools.partial(Normed, False),
        LOSSES["ignored labels"],
        "batch_norm.default uses a sum over the rows",
    ),
    (Net, similar, "reads rows of other micro-batches"),
    (Net, lambda m, b: (m(b[0]) - m(b[0]).mean(0)).square().mean(), "uses a sum over the rows of the batch"),
    (Net, lambda m, b: m(b[0]).softmax(0).square().mean(), "softmax.int reduces over all rows"),
]


@pytest.mark.parametrize(("make", "loss", "what"), MIXED)
def test_what_mixes_the_rows_of_a_batch_is_refused(make: Callable[[], nn.Module], loss: Any, what: str) -> None:
    """No weighted mean of micro-batches is the loss of the batch; with weighted=False it is as asked for."""
    model = make()
    with pytest.raises(PassError, match=rf"test_batch_weights.py:\d+: .*{what}"):
        mw.compile_step(
            model, loss, torch.optim.SGD(model.parameters()), rows(4, 0, 0.2), mesh=mw.Mesh({"dp": 1}),
            passes=[GradientMerge(2)],
        )  # fmt: skip
    again = make()
    optimizer = torch.optim.SGD(again.parameters())
    merge = GradientMerge(2, weighted=False)
    mw.compile_step(again, loss, optimizer, rows(4, 0, 0.2), mesh=mw.Mesh({"dp": 1}), passes=[merge])


MEANS: dict[str, Any] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "huber": F.huber_loss,
    "bce": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "poisson": F.poisson_nll_loss,
    "kl": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "soft labels": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "cosine": lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(len(x))),
}


@pytest.mark.thin(4)
@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.parametrize("axes", [{"dp": 3}, {"dp": 7}, {"dp": 2, "tp": 2}], ids=str)
def test_means_of_pytorchs_own_over_unequal_parts(axes: dict[str, int], loss: str) -> None:
    """Each rank's part of the mean was weighed as if it were the rows of all: ranks weighed micro-steps differently."""
    draw = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(n, k, generator=draw, dtype=torch.float64) for k in (6, 4)) for n in (8, 5)]

    def made() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()

    def value(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = MEANS[loss](model(batch[0]), batch[1])
        return found

    def rank() -> list[torch.Tensor]:
        model = made()
        layouts = {"0.*": {"tp": mw.Shard(0)}, "2.weight": {"tp": mw.Shard(1)}} if "tp" in axes else {}
        step = mw.compile_step(
            model, value, torch.optim.SGD(model.parameters(), 0.1), batches[0], mesh=mw.Mesh(axes),
            batch={"dp": mw.Shard(0)}, layouts=layouts, passes=["gradient-merge:k_steps=2"],
        )  # fmt: skip
        for batch in batches:
            step(batch)
        return [mw.unshard(p).detach() for p in model.parameters()]

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    value(model, [torch.cat(parts) for parts in zip(*batches, strict=True)]).backward()
    optimizer.step()
    for found in mw.simulate(rank, mw.Mesh(axes)):
        for got, wanted in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(got, wanted.detach(), rtol=0, atol=1e-12)
