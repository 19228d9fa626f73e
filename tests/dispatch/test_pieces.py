"""Pieces of one value that are needed whole: it is made whole once, and they are cut from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from tests.support.compare import GRID, S0, S1, P, R, ramp, same

THREE = mw.Mesh({"x": 3})


def tanh_of(pieces: Any) -> Any:
    return sum((p.tanh() * (i + 1)).sum() for i, p in enumerate(pieces))


CUT: dict[str, tuple[Callable[[Any], Any], int]] = {  # and the collectives of a forward
    "chunk": (lambda y: tanh_of(y.chunk(4, -1)), 1),
    "split": (lambda y: tanh_of(y.split([3, 2, 3], -1)), 1),
    "unbind": (lambda y: tanh_of(y.unbind(0)), 1),
    "iteration": (lambda y: tanh_of(y), 1),
    "select": (lambda y: tanh_of(y.select(1, i) for i in range(8)), 2),
    "rows": (lambda y: tanh_of(y[i] for i in range(6)), 2),
    "slices": (lambda y: tanh_of(y[:, 2 * i : 2 * i + 2] for i in range(4)), 2),
    "of pieces": (lambda y: tanh_of(z for half in y.chunk(2, 0) for z in half.chunk(4, 1)), 1),
    "one of them": (lambda y: y[0].tanh().sum() + y[0].exp().sum() * 0, 2),
}


@pytest.mark.parametrize("name", CUT)
def test_a_partial_is_added_up_once(name: str) -> None:
    cut, count = CUT[name]

    def run() -> tuple[int, int]:
        counts = []
        x, w = ramp(6, 5).requires_grad_(), ramp(5, 8).requires_grad_()
        for grad in (True, False):
            y = mw.shard_tensor(x, THREE, [S1]) @ mw.shard_tensor(w, THREE, [S0])
            with torch.set_grad_enabled(grad), collective.counting() as sent:
                cut(y)
            counts.append(sum(n for n, _ in sent.table.values()))
        return counts[0], counts[1]

    for counts in mw.simulate(run, THREE):
        assert counts == (count, count)


def graded(cut: Callable[[Any], Any]) -> Callable[..., Any]:
    def both(x: Any, w: Any) -> Any:
        y = x @ w
        loss = cut(y)
        with torch.no_grad():
            again = cut(y)
        grads = torch.autograd.grad(loss, (x, w, y), create_graph=True)
        return loss, again, grads, torch.autograd.grad(sum((g * g).sum() for g in grads), (x, w))

    return both


@pytest.mark.parametrize("name", CUT)
def test_value_and_gradients(name: str) -> None:
    leaves = ramp(6, 5).requires_grad_(), ramp(5, 8).requires_grad_()
    for a, b in ((S1, S0), (P, R), (R, P)):
        same(graded(CUT[name][0]), (leaves[0], [a]), (leaves[1], [b]), mesh=THREE)
    for a, b in (([S1, S0], [S0, R]), ([S0, S1], [R, S0]), ([S1, S1], [S0, S0])):
        same(graded(CUT[name][0]), (leaves[0], a), (leaves[1], b), mesh=GRID)


@pytest.mark.parametrize("op", ["avg", "max", "min", "product", "sum"])
def test_pieces_of_other_reductions(op: str) -> None:
    def fn(x: Any) -> Any:
        loss = tanh_of(x.chunk(3)) + tanh_of(x[i] for i in range(6))
        return loss, torch.autograd.grad(loss, x) if x.requires_grad else None

    same(fn, (ramp(6, 4).requires_grad_(op != "product"), [mw.Partial(op)]), mesh=THREE)


def test_a_gradient_of_a_piece_goes_through_it() -> None:
    """Hooks on a piece, and gradients asked of it, see all of its gradient."""

    def fn(x: Any, w: Any) -> Any:
        pieces, seen = (x @ w).chunk(2, 1), []
        pieces[0].register_hook(lambda g: seen.append(g) or g * 2)
        grads = torch.autograd.grad(tanh_of(pieces), (x, *pieces))
        return grads, seen

    same(fn, (ramp(6, 5).requires_grad_(), [S1]), (ramp(5, 8).requires_grad_(), [S0]), mesh=THREE)


def test_written_between_two_pieces() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        a, b, c = y[0], y[1], y[2]
        made = [a.tanh(), b.tanh()]
        b.mul_(3)
        made += [b.tanh(), c.tanh()]
        y[2] = 0.5
        made += [c.tanh(), a.tanh(), *(z.tanh() for z in y.chunk(2))]
        return made, torch.autograd.grad(sum(m.sum() for m in made), (x, w))

    for a, b in ((S1, S0), (S0, R)):
        same(fn, (ramp(6, 5).requires_grad_(), [a]), (ramp(5, 8).requires_grad_(), [b]), mesh=THREE)


def test_inside_a_checkpoint_and_without_a_history() -> None:
    def fn(x: Any, w: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        y = x @ w
        first = y[0].tanh()
        made = checkpoint(lambda y: tanh_of(y.chunk(2)) + tanh_of(y[i] for i in range(3)), y, use_reentrant=False)
        with torch.no_grad():
            rows = [y[i] for i in range(3)]
            flat = [r.tanh() for r in rows]
        loss = made + first.sum() + sum((r.detach() * x[0, 0]).exp().sum() for r in rows)
        return flat, loss, torch.autograd.grad(loss, (x, w))

    same(fn, (ramp(6, 5).requires_grad_(), [S1]), (ramp(5, 8).requires_grad_(), [S0]), mesh=THREE)


@pytest.mark.parametrize("steps", [6, 5, 2])
def test_a_loop_over_a_split_dim_gathers_once(steps: int) -> None:
    def fn(x: Any) -> Any:
        h = x * 2
        state = h[0].tanh()
        for t in range(1, steps):
            state = (state + h[t]).tanh()
        return state, torch.autograd.grad(state.sum(), x)

    leaf = ramp(steps, 4).requires_grad_()
    same(fn, (leaf, [S0]), mesh=THREE)

    def run() -> int:
        with collective.counting() as sent:
            fn(mw.shard_tensor(leaf.detach().clone().requires_grad_(), THREE, [S0]))
        return sum(n for (kind, _), (n, _) in sent.table.items() if kind == "all_gather")

    assert all(n <= 1 for n in mw.simulate(run, THREE))


class Edges(torch.nn.Module):
    """A network on a graph, whose edges are two rows of nodes; and pieces by other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.l = torch.nn.Linear(8, 8)

    def forward(self, x: Any, e: Any) -> Any:
        h = self.l(x)
        return (h[e[0]] + h[e[1]]).square().mean() + sum(cut(h).sin() for cut, _ in CUT.values())


def test_passes_take_a_captured_step_that_makes_a_split_value_whole_for_its_pieces() -> None:
    """Each collective serves the conversion that it is a part of."""
    batch = ramp(6, 8), torch.tensor([[0, 1, 5, 2], [3, 3, 1, 0]])

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Edges().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def rank() -> list[Any]:
        model, optimizer = made()
        options: Any = {"batch": {"dp": mw.Shard(0)}, "passes": ["data-parallel-optimization"]}
        step = mw.compile_step(model, None, optimizer, batch, mesh=mw.Mesh({"dp": 2}), **options)
        return [mw.unshard(step(batch).detach()), *(mw.unshard(p.detach()) for p in model.parameters())]

    model, optimizer = made()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    for have in mw.simulate(rank, mw.Mesh({"dp": 2})):
        torch.testing.assert_close(have, [loss.detach(), *(p.detach() for p in model.parameters())])
