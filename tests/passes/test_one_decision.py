"""What data-parallel-optimization decides about a sum is one decision of all ranks, whatever each of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import meshwright as mw
from meshwright.collective import together
from meshwright.errors import DesyncError, PassError
from meshwright.passes import Pass, PassRecord
from meshwright.passes.agreement import Answers
from meshwright.passes.order import Order
from meshwright.passes.scaling import _holds
from meshwright.program.ir.nodes import annotate, info_of
from meshwright.ranks import runtime
from tests.support.by_hand import Captured, Case, all_reduce, apart, as_written

Tensor = torch.Tensor
PASS = "data-parallel-optimization"
SMALL = f"{PASS}:bucket_bytes=300"


def rank() -> int:
    return runtime.RT.rank


# ---------------------------------------------------------------------------------------------- captured steps


class Ones(nn.Module):
    """Parameters whose leading size is that of a rank with one row, and others around them."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.cls = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(1, 1, 4))
        self.gain, self.number = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(()))
        self.inner, self.out, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.frozen, self.unused = nn.Parameter(torch.randn(1, 4), requires_grad=False), nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x + self.position)).tanh() * self.gain
        h = torch.cat([self.cls.expand(len(x), 1, 4), (h * self.frozen)[:, None]], 1).mul(self.cls).mean(1)
        h = h + self.unused(torch.arange(len(x)) * 0) + F.linear(h, self.inner.weight.t())  # tied
        return self.out(h * self.number).tanh()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()  # type: ignore[no-any-return]


def trained(mesh: mw.Mesh | None, rows: tuple[int, ...], passes: list[str], **more: Any) -> dict[str, Tensor]:
    """The parameters after a step for each batch."""
    torch.manual_seed(0)
    model = Ones().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in rows]
    if mesh is None:
        for x in batches:
            squares(model, x).backward()  # type: ignore[no-untyped-call]
            if "clip_grad_norm" in more:
                nn.utils.clip_grad_norm_(model.parameters(), more["clip_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
    else:
        split = {"dp": mw.Shard(0)}
        step = mw.compile_step(model, squares, optimizer, batches[0], mesh=mesh, batch=split, passes=passes, **more)
        for x in batches:
            step(x)
        assert step.digest
    return {n: mw.unshard(p).detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("axes", "rows", "passes", "more"),
    [
        # One row on the last rank; then on none of the ranks that had one.
        ({"dp": 2}, (3, 4), SMALL, {}), ({"dp": 2}, (3,), f"{PASS}:overlap=no", {}),
        ({"dp": 2}, (1, 3), PASS, {}), ({"dp": 3}, (4, 5), PASS, {}), ({"dp": 3}, (2,), SMALL, {}),
        ({"dp": 2}, (3,), SMALL, {"fsdp": "dp"}), ({"dp": 3}, (5,), PASS, {"fsdp": "dp"}),
        ({"dp": 2}, (3, 2), PASS, {"shard_states": "dp"}), ({"dp": 3}, (4,), SMALL, {"shard_states": "dp"}),
        ({"dp": 2}, (3,), SMALL, {"clip_grad_norm": 0.1}),
        ({"dp": 2, "tp": 2}, (3,), SMALL, {"layouts": {"inner.weight": {"tp": mw.Shard(0)}}}),
        ({"dp": 2, "tp": 2}, (3,), PASS, {"layouts": {"out.weight": {"tp": mw.Shard(1)}}, "shard_states": "dp"}),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_with_one_row_or_none(axes: dict[str, int], rows: tuple[int, ...], passes: str, more: Any) -> None:
    mesh, want = mw.Mesh(axes), trained(None, rows, [], **more)
    for got in mw.simulate(lambda: trained(mesh, rows, [passes], **more), mesh):
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


# ---------------------------------------------------------------------------------------------- steps by hand


class Net(nn.Module):
    """Three layers, and a place for what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 1)
        self.logged: Tensor
        self.register_buffer("logged", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


SHARES = (0.2, 0.5, 0.1, 0.7)  # of the rows, by rank
Sync = Callable[[Any, list[Any]], None]


def mean(ps: list[Any], n: int = 2) -> None:
    for p in ps:
        all_reduce(p.grad)
        p.grad /= n


def clipped(ps: list[Any]) -> None:
    """What lets no factor through to where the backward starts."""
    nn.utils.clip_grad_norm_(ps, 0.05)


def logged_on_the_first(m: Any, ps: list[Any]) -> None:
    if rank() == 0:
        m.logged.copy_(ps[0].grad.norm())
    mean(ps)


def decayed_on_the_first(m: Any, ps: list[Any]) -> None:
    if rank() == 0:
        for p in ps[:3]:
            p.grad.add_(p.detach(), alpha=0.1)
    mean(ps)


def clipped_on_the_last(m: Any, ps: list[Any]) -> None:
    if rank() == 1:
        clipped(ps)
    mean(ps)


def shared_ahead(m: Any, ps: list[Any]) -> None:
    for p in ps:
        p.grad.mul_(SHARES[rank()])
        all_reduce(p.grad)


def shared_ahead_of_a_clip(m: Any, ps: list[Any]) -> None:
    clipped(ps)
    shared_ahead(m, ps)


def shared_behind(m: Any, ps: list[Any]) -> None:
    for p in ps:
        all_reduce(p.grad)
        p.grad.mul_(SHARES[rank()])


def shared_behind_a_clip(m: Any, ps: list[Any]) -> None:
    clipped(ps)
    shared_behind(m, ps)


def decayed_and_shared(m: Any, ps: list[Any]) -> None:
    for p in ps:
        p.grad.add_(p.detach(), alpha=0.1)
    shared_ahead(m, ps)


def on_either_side(m: Any, ps: list[Any]) -> None:
    for p in ps:
        if rank():
            p.grad.mul_(0.5)
        all_reduce(p.grad)
        if not rank():
            p.grad.mul_(0.5)


def tiny(m: Any, ps: list[Any]) -> None:
    clipped(ps)
    for i, p in enumerate(ps):
        p.grad.mul_(1e15)
        all_reduce(p.grad)
        p.grad.mul_((3e-16, 4e-16)[i % 2])


def in_halves(m: Any, ps: list[Any]) -> None:
    clipped(ps)
    for p in ps:
        g = p.grad.bfloat16()
        all_reduce(g)
        p.grad = g.double() / 3


def halves_divided(m: Any, ps: list[Any]) -> None:
    clipped(ps)
    for p in ps:
        g = p.grad.bfloat16()
        all_reduce(g)
        g.div_(3)
        p.grad = g.double()


def in_another_order(m: Any, ps: list[Any]) -> None:
    """The first rank has each gradient ready behind all others."""
    if rank() == 0:
        total = sum(p.grad.square().sum() for p in ps)
        for p in ps[::-1]:
            p.grad = p.grad * (1 + 0 * total)
    mean(ps)


ONE_AXIS = [
    logged_on_the_first, decayed_on_the_first, clipped_on_the_last, shared_ahead, shared_ahead_of_a_clip, shared_behind,
    shared_behind_a_clip, decayed_and_shared, on_either_side, tiny, in_halves, halves_divided, in_another_order,
]  # fmt: skip


def number_between_levels(m: Any, ps: list[Any]) -> None:
    for p in ps:
        all_reduce(p.grad, (0,))
        p.grad.mul_(SHARES[rank()])
        all_reduce(p.grad, (1,))


def number_of_a_level(m: Any, ps: list[Any]) -> None:
    """Alike on the ranks of the first sum: it may go ahead of it."""
    for p in ps:
        all_reduce(p.grad, (1,))
        p.grad.mul_(SHARES[rank() // 2])
        all_reduce(p.grad, (0,))


def cast_between_levels(m: Any, ps: list[Any]) -> None:
    for p in ps:
        all_reduce(p.grad, (1,))
        g = p.grad.float()
        all_reduce(g, (0,))
        p.grad = g.double()


def one_rank_between_levels(m: Any, ps: list[Any]) -> None:
    for p in ps:
        all_reduce(p.grad, (1,))
        if rank() == 3:
            p.grad = p.grad + 0.1
        all_reduce(p.grad, (0,))


def shared_ahead_of_the_second(m: Any, ps: list[Any]) -> None:
    for p in ps:
        p.grad.mul_(SHARES[rank()])
        all_reduce(p.grad, (0,))


def summed_on_the_way(m: nn.Module, x: Tensor) -> Tensor:
    """Ranks of the second axis meet in the backward."""

    def hook(g: Tensor) -> Tensor:
        made = g.clone()
        all_reduce(made, (1,))
        return made

    h = m.a(x)  # type: ignore[operator]
    h.register_hook(hook)
    return m.c(torch.tanh(m.b(torch.tanh(h)))).square().mean()  # type: ignore[operator, no-any-return]


TWO_AXES = [number_between_levels, number_of_a_level, cast_between_levels, one_rank_between_levels]


def plain_loss(m: nn.Module, x: Tensor) -> Tensor:
    return m(x).square().mean()  # type: ignore[no-any-return]


def by_hand(sync: Sync, axes: dict[str, int], loss_of: Callable[[nn.Module, Tensor], Tensor] = plain_loss) -> Case:
    def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()  # type: ignore[no-untyped-call]
        sync(model, list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Case(step, Net, axes)


@pytest.mark.parametrize("sync", [*ONE_AXIS, *TWO_AXES], ids=lambda f: f.__name__)
def test_steps_whose_ranks_differ(sync: Sync) -> None:
    given = by_hand(sync, {"dp": 2} if sync in ONE_AXIS else {"a": 2, "b": 2})
    want, captured = as_written(given), Captured(given)
    for passes in ([f"{PASS}:fuse=no,overlap=no"], [SMALL], [f"{PASS}:prune=no,bucket_bytes=100000"]):
        got, _, _ = captured.run(passes)
        # In halves a sum that is rounded otherwise is off by a thousandth.
        assert apart(got, want) < 1e-10, passes


@pytest.mark.parametrize(
    ("sync", "start"), [(shared_ahead_of_the_second, 1.0), (number_of_a_level, SHARES[0])], ids=["other", "alike"]
)
def test_ranks_that_meet_in_the_backward_with_factors(sync: Sync, start: float) -> None:
    given = by_hand(sync, {"a": 2, "b": 2}, summed_on_the_way)
    got, _, (record,) = Captured(given).run([PASS])
    assert apart(got, as_written(given)) < 1e-10
    assert record.details["folded"] == start


def test_what_all_ranks_can_do_is_done() -> None:
    """A number of each rank goes to where its own backward starts; of a level it goes ahead of the sum."""
    _, _, (record,) = Captured(by_hand(shared_ahead, {"dp": 2})).run([PASS])
    assert record.details["folded"] == SHARES[0]
    _, _, (record,) = Captured(by_hand(number_of_a_level, {"a": 2, "b": 2})).run([PASS])
    assert record.details["joined"] == 6
    _, _, (record,) = Captured(by_hand(logged_on_the_first, {"dp": 2})).run([PASS])
    assert record.details["rescaled"] == {0.5: 6}
    _, programs, _ = Captured(by_hand(clipped_on_the_last, {"dp": 2})).run([PASS])
    assert "on rank 1 " in "\n".join(programs[0].passes[0].lines), "which rank it is, and what stands there"


def test_a_factor_is_held_as_precisely_as_what_it_multiplies() -> None:
    f16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    assert [_holds(d, 1 / 3, d) for d in (f16, f32, f64)] == [False, True, True]
    assert [_holds(d, 0.375, f64) for d in (f16, f32)] == [True, True]
    assert not _holds(f32, 1 / 3, f64)
    assert _holds(torch.complex64, 0.1, torch.complex64)


# ---------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Strange(Pass):
    """Has another decision on the last rank, or another sum."""

    name = "strange"
    after = (PASS,)
    what: str = "decision"

    def apply(self, program: Any) -> tuple[Any, PassRecord]:
        last = program.rank == program.mesh.ranks[-1]
        if self.what == "sum" and last:
            node = next(n for n in program.graph.nodes if " and " not in info_of(n).sync and ", " in info_of(n).sync)
            annotate(node, sync=", ".join(info_of(node).sync.split(", ")[::-1]))
        decision = "the gradient of a.weight is doubled" if last else "the gradient of a.weight is halved"
        return program, PassRecord("done", decisions=(decision,) if self.what == "decision" else ())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("decision", r"rank 0: strange: the gradient of a.weight is halved; rank 1: strange: the gradient of a.weight"),
        ("sum", r"different all_reduce\['sum', 'dp'\] of torch.float64.*for c.*; rank 1: .* for "),
    ],
)
def test_decisions_are_compared_by_name(what: str, message: str) -> None:
    captured = Captured(by_hand(lambda m, ps: mean(ps), {"dp": 2}))
    with pytest.raises(DesyncError, match=message):
        captured.run([f"{PASS}:bucket_bytes=100000", Strange(what)])


def test_buckets_in_another_order_on_one_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = Order.sums
    monkeypatch.setattr(Order, "sums", lambda order: sums(order)[:: -1 if rank() else 1])
    captured = Captured(by_hand(lambda m, ps: mean(ps), {"dp": 2}))
    with pytest.raises(DesyncError, match=r"different .*c\.bias.*a\.weight"):
        captured.run([f"{PASS}:bucket_bytes=100000"])


def test_ranks_that_sum_other_gradients_are_named() -> None:
    def step(m: Any, ps: list[Any]) -> None:
        mean(ps[1:] if rank() else [*ps[1:], ps[0]])

    with pytest.raises(DesyncError, match=r"rank 0: all_reduce over dp of a\.weight; rank 1: nothing more"):
        Captured(by_hand(step, {"dp": 2})).run([PASS])


def test_an_error_on_one_rank_is_one_on_all() -> None:
    def step(m: Any, ps: list[Any]) -> None:
        mean(ps[1:])
        if rank():
            ps[0].grad.div_(2)
        else:
            all_reduce(ps[0].grad)

    with pytest.raises(PassError, match=r"the gradient of a\.weight is scaled by 1/2"):
        Captured(by_hand(step, {"dp": 2})).run([PASS])


# ---------------------------------------------------------------------------------------------- exchanging

TWO = mw.Mesh({"dp": 2})


def test_values_are_exchanged_on_the_way() -> None:
    def fn() -> list[Any]:
        with together(TWO, "preparing") as facts:
            return [facts.exchange("a", 1), facts.exchange("b", (rank(), "x")), facts.exchange("c", "alike")]

    assert mw.simulate(fn, TWO) == [[[1, 1], [(0, "x"), (1, "x")], ["alike", "alike"]]] * 2


@pytest.mark.parametrize("when", ["fails", "leaves", "asks otherwise"])
def test_ranks_that_do_not_come_to_an_exchange(when: str) -> None:
    def fn() -> None:
        with together(TWO, "preparing") as facts:
            if rank() == 0 or when == "asks otherwise":
                facts.exchange(f"what {rank()} sees", 1)
            elif when == "fails":
                raise ValueError("no")

    want = {
        "fails": "preparing failed on rank 1: no",
        "leaves": "preparing: the ranks are not at the same step: rank 0: what 0 sees; rank 1: the end",
        "asks otherwise": "preparing: the ranks are not at the same step: rank 0: what 0 sees; rank 1: what 1 sees",
    }

    def caught() -> str:
        with pytest.raises((ValueError, DesyncError)) as error:
            fn()
        return str(error.value)

    found = mw.simulate(caught, TWO)
    assert found[0].startswith(want[when]), found
    assert found[1].startswith("no" if when == "fails" else want[when]), found


def test_answers_are_given_again() -> None:
    answers = Answers()
    ask = answers.noting(lambda about, value: [value, f"another {about}"])
    assert [ask("a", 1), ask("b", 2)] == [[1, "another a"], [2, "another b"]]
    again = answers.again(2)
    assert [again("a", 5), again("c", 3), again("d", 4)] == [[1, "another a"], [3, 3], [4, 4]]
