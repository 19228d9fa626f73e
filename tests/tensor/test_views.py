"""Views that are copies on the mesh: writes reach the base, reads see what was written to it, in value and gradient."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import meshwright as mw
from meshwright.errors import DispatchError
from tests.support.compare import FOUR, S0, S1, P, R, on_ranks, same

LAYOUTS = [S0, S1, R, P]


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def add_to_slice(x: Tensor) -> None:
    x[1:3] += 2


def overlapping(x: Tensor) -> None:
    a, b = x[1:4], x[2:5]
    a.mul_(2)
    b.mul_(3)
    a[0] = b[1]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "+= to a slice": add_to_slice,
    "row": lambda x: x[1].zero_(),
    "row by tensor": lambda x: x[torch.tensor(1)].zero_(),
    "negative": lambda x: x[-2].fill_(4),
    "stepped": lambda x: x[::2].mul_(3),
    "element": lambda x: x[1, 2].fill_(5.0),
    "None": lambda x: x[None, 1:3].mul_(2),
    "ellipsis": lambda x: x[..., 1:].mul_(2),
    "narrow": lambda x: x.narrow(0, 1, 2).mul_(2),
    "select": lambda x: x.select(0, 2).mul_(2),
    "T": lambda x: x.T[1].mul_(2),
    "permute": lambda x: x.permute(1, 0)[1:].mul_(2),
    "movedim of a slice": lambda x: x[1:3].movedim(0, 1).mul_(2),
    "unsqueeze of a slice": lambda x: x[1:3].unsqueeze(0).mul_(2),
    "diagonal": lambda x: x.diagonal().mul_(2),
    "view": lambda x: x.view(-1).mul_(2),
    "slice of a view": lambda x: x.view(-1)[3:7].add_(1),
    "unfold": lambda x: x.unfold(0, 2, 2)[1].mul_(2),
    "slice of a slice": lambda x: x[1:4][:, 1:].T[0, 1:].add_(3),
    "setitem in a slice": lambda x: x[1:4].__setitem__(0, 7.0),
    "mask in a slice": lambda x: x[1:4].__setitem__(torch.tensor([True, False, True]), 7.0),
    "cumsum_": lambda x: x[1:4].cumsum_(0),
    "relu_": lambda x: x[1:4].relu_(),
    "copy_ of another view": lambda x: x[1:3].copy_(x[3:5]),
    "overlapping views": overlapping,
    "write to the base between": lambda x: (x[2:], x.mul_(2))[0].add_(x[2:]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_view_reaches_its_base(name: str) -> None:
    def run(x: Tensor) -> list[Tensor]:
        y = x * 1.0
        WRITES[name](y)
        return [y, *torch.autograd.grad((y * y * r(5, 3, seed=9)).sum(), x)]

    for p in (S0, S1, R):
        same(run, (r(5, 3).requires_grad_(), (p,)))
    same(lambda x: run(part(x))[0], (r(5, 3).requires_grad_(), (S0,)))


def part(x: Tensor) -> Tensor:
    return mw.reshard(x, [P]) if isinstance(x, mw.DistTensor) else x


@pytest.mark.parametrize("split", [lambda x: x.chunk(2), lambda x: x.split([1, 3, 1]), lambda x: x.unbind(0), list])
@pytest.mark.parametrize("p", LAYOUTS)
def test_writes_to_several_views_of_one_base(split: Callable[[Tensor], Any], p: Any) -> None:
    def run(x: Tensor) -> list[Tensor]:
        pieces = split(x)
        for i, piece in enumerate(pieces):
            piece.mul_(i + 1)
        x.add_(1.0)
        return [x, *pieces]

    same(run, (r(5, 3), (p,)))


def two_reads(x: Tensor) -> Tensor:
    v = x[2:]
    w = v.T
    x.mul_(2)
    return w * v.T


def after_another_view(x: Tensor) -> Tensor:
    v, w = x[2:], x[1:3]
    w.mul_(3)
    return v * v


def read_before_and_after(x: Tensor) -> Tensor:
    v = x[2:]
    y = v * 3.0
    x[3] = y[0]
    return v + y


@pytest.mark.parametrize("fn", [two_reads, after_another_view, read_before_and_after])
@pytest.mark.parametrize("p", [S0, S1, R])
def test_a_view_sees_what_was_written_to_its_base(fn: Callable[[Tensor], Tensor], p: Any) -> None:
    def run(x: Tensor) -> list[Tensor]:
        y = fn(x * 1.0)
        return [y, *torch.autograd.grad((y * y).sum(), x)]

    same(run, (r(5, 3).requires_grad_(), (p,)))


@pytest.mark.parametrize("p", [S0, S1, R])
def test_second_derivative_through_a_write_to_a_view(p: Any) -> None:
    def run(x: Tensor) -> Tensor:
        h = x * x
        h[1:4] *= h[0].clone()
        (g,) = torch.autograd.grad(h.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), x)[0]

    same(run, (r(5, 3).requires_grad_(), (p,)))


@pytest.mark.parametrize("p", [S0, S1, R])
def test_leaves_and_no_grad_as_autograd_has_it(p: Any) -> None:
    def run(x: Tensor) -> list[Tensor]:
        for write in (lambda: x[1:3].add_(1), lambda: x[1:4][0].zero_(), lambda: x.T[:, 1:].zero_()):
            with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad is being used in"):
                write()
        before = x[1:3]
        with torch.no_grad():
            x[1:3].mul_(2)
            x[0].zero_()
        x.detach()[4].zero_()
        x.data[3:4].add_(9.0)
        (g,) = torch.autograd.grad((before * before).sum(), x)
        return [x, g]

    same(run, (r(5, 3).requires_grad_(), (p,)))


def test_values_leave_a_view_up_to_date() -> None:
    def run() -> None:
        base = r(5, 3)
        x = mw.shard_tensor(base, FOUR, [S0])
        v = x[1:3]
        for write, want in ((lambda: x.mul_(2), base[1:3] * 2), (lambda: x.data.mul_(2), base[1:3] * 4)):
            write()
            assert torch.equal(v.to_local(), want)
            assert torch.equal(mw.unshard(copy.deepcopy(v)), want)
            assert torch.equal(mw.unshard(mw.reshard(v, [S1])), want)
            assert v.tolist() == want.tolist()
        copy.deepcopy(v).zero_()
        v.clone().zero_()
        assert torch.equal(mw.unshard(x), base * 4)

    on_ranks(run)


def test_inference_mode_counts_no_writes() -> None:
    def run() -> None:
        with torch.inference_mode():
            x = mw.shard_tensor(r(5, 3), FOUR, [S0]) * 1.0
            v = x[1:3]
            x.mul_(2)
            assert torch.equal(mw.unshard(v), r(5, 3)[1:3] * 2)
            v.zero_()
            assert not mw.unshard(x)[1:3].any()

    on_ranks(run)


def test_lists_and_optimizers_write_to_views() -> None:
    def run(x: Tensor) -> Tensor:
        torch._foreach_mul_([x[1:3], x[3:]], 2.0)
        p = nn.Parameter(x[0:2])
        p.grad = torch.ones_like(p)
        optimizer = torch.optim.SGD([p], lr=0.5)
        optimizer.step()
        x.mul_(3.0)
        optimizer.step()
        return x

    for q in (S0, S1, R):
        same(run, (r(5, 3), (q,)))


# ------------------------------------------------------------------------------------------ out=


@pytest.mark.parametrize("p", LAYOUTS)
def test_out_of_any_layout(p: Any) -> None:
    def run(x: Tensor, out: Tensor) -> list[Tensor]:
        plain, empty = torch.empty(5, 3, dtype=x.dtype), torch.empty(0, dtype=x.dtype)
        assert torch.add(x, 1.0, out=plain) is plain
        torch.add(x, 1.0, out=empty)
        assert torch.mul(x, 3.0, out=out) is out
        torch.mul(x[1:3], 2.0, out=out[2:4])
        rows = (torch.empty(3, dtype=x.dtype), torch.empty(3, dtype=torch.int64))
        torch.max(x, 0, out=rows)
        assert not isinstance(plain, mw.DistTensor)
        return [plain, empty, out, *rows]

    for q in (S0, S1, R):
        same(run, (r(5, 3), (q,)), (torch.zeros(5, 3, dtype=torch.float64), (p,)))


def test_out_is_refused_as_on_one_device() -> None:
    def run() -> None:
        x = mw.shard_tensor(r(5, 3), FOUR, [S0])
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.add(x, 1.0, out=torch.empty(5, 3, dtype=torch.int64))
        with pytest.raises(RuntimeError, match=r"out=\.\.\. arguments don't support automatic differentiation"):
            torch.add(x.requires_grad_(), 1.0, out=torch.empty(5, 3, dtype=torch.float64))

    on_ranks(run)


REPARAMETRIZED: dict[str, Callable[[nn.Sequential], Any]] = {
    "l1": lambda m: prune.l1_unstructured(m[0], "weight", 0.3),
    "structured": lambda m: prune.ln_structured(m[0], "weight", 0.3, n=2, dim=0),
    "global": lambda m: prune.global_unstructured(
        [(m[0], "weight"), (m[2], "weight")], prune.L1Unstructured, amount=0.3
    ),
    "spectral_norm": lambda m: nn.utils.spectral_norm(m[0]),
    "parametrized": lambda m: nn.utils.parametrizations.spectral_norm(m[0]),
}


@pytest.mark.parametrize("name", REPARAMETRIZED)
@pytest.mark.parametrize("p", [S0, S1])
def test_pruning_and_spectral_norm_of_a_sharded_model(name: str, p: Any) -> None:
    def run(mesh: mw.Mesh | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5)).double()
        if mesh is not None:
            mw.shard_module(model, mesh, {"0.weight": {"x": p}})
        torch.manual_seed(3)
        REPARAMETRIZED[name](model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            loss = model(r(4, 6)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(mw.unshard(loss.detach()))
        return losses

    want = run(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for got in on_ranks(lambda: run(FOUR)):
            torch.testing.assert_close(got, want)


APART: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "the view": lambda base, view: view.add_(1),
    "a view of it": lambda base, view: view[0].mul_(2),
    "its base": lambda base, view: (base.add_(1), view.sum()),
    "another view": lambda base, view: (base[0].add_(1), view.sum()),
}


@pytest.mark.parametrize("write", APART)
@pytest.mark.parametrize("p", [{}, {"x": mw.Shard(1)}], ids=str)
def test_a_view_that_is_a_copy_on_this_rank_is_read_and_not_written(p: Any, write: str) -> None:
    """Parts of another layout in memory than views need: one device reads it as it is, or says that it cannot."""
    mesh, full = mw.Mesh({"x": 2}), r(3, 4, 2)

    def run() -> None:
        base = mw.shard_tensor(full, mesh, p).transpose(1, 2) * 1.5
        view = base.view(-1, 4)
        want = (full.transpose(1, 2) * 1.5).reshape(-1, 4)
        torch.testing.assert_close(mw.unshard(view), want)
        torch.testing.assert_close(mw.unshard(view[1:] * 2), want[1:] * 2)
        with pytest.raises(DispatchError, match=r"or its base was: .*say .contiguous\(\) in front of .view"):
            APART[write](base, view)

    mw.simulate(run, mesh)


def test_a_view_that_is_a_view_where_the_part_allows_it_is_written() -> None:
    """After ``.contiguous()``, as the error says; and of a part that lies as the whole does."""
    mesh, full = mw.Mesh({"x": 2}), r(4, 4, 2)

    def run() -> None:
        for p in ({}, {"x": mw.Shard(0)}, {"x": mw.Shard(1)}):
            base = (mw.shard_tensor(full, mesh, p).transpose(1, 2) * 1.5).contiguous()
            base.view(-1, 4).add_(1)
            torch.testing.assert_close(mw.unshard(base), full.transpose(1, 2) * 1.5 + 1)

    mw.simulate(run, mesh)


REPEATED: dict[str, Callable[[Tensor], Any]] = {
    "ends of windows": lambda x: x.unfold(0, 2, 1)[..., -1].add_(1),
    "a window": lambda x: x.unfold(0, 3, 2)[1].mul_(2),
    "a view of windows": lambda x: x.unfold(0, 3, 1).permute(2, 0, 1)[0].mul_(2),
    "a row of an expanded one": lambda x: x[:, 0].expand(2, 5)[1].mul_(2),
    "a list": lambda x: torch._foreach_mul_([x.unfold(0, 2, 1)[..., 0]], 2.0),
    "windows that lie apart": lambda x: x.unfold(0, 2, 2)[1].mul_(2),
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("p", [S0, S1, R])
def test_a_copy_with_elements_in_several_places_is_not_written_to(name: str, p: Any) -> None:
    """Of an element that is written in one place, the other places of the copy still hold the old value."""

    copied = {"a row of an expanded one": S1, "windows that lie apart": None}.get(name, S0)

    def run() -> None:
        plain, x = r(5, 3), mw.shard_tensor(r(5, 3), FOUR, [p])
        REPEATED[name](plain)
        if p is copied:
            with pytest.raises(DispatchError, match=r"in several places.*Write to the base, or say"):
                REPEATED[name](x)
        else:
            REPEATED[name](x)
            torch.testing.assert_close(mw.unshard(x), plain)

    on_ranks(run, FOUR)


@pytest.mark.parametrize("p", [S0, S1, R])
def test_flatten_of_one_dim_is_the_tensor_itself(p: Any) -> None:
    def run(x: Tensor) -> list[Tensor]:
        y = x * 1.0
        z = y.flatten(1, 1).unsqueeze_(-1)
        assert z is y
        return [y, *torch.autograd.grad((y * y).sum(), x)]

    same(run, (r(5, 3).requires_grad_(), (p,)))


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda x: x.cpu(),
    "word": lambda x: x.to("cpu"),
    "device": lambda x: x.to(torch.device("cpu")),
    "dtype": lambda x: x.to(torch.float64),
    "both": lambda x: x.to("cpu", torch.float64),
    "named": lambda x: x.to(device="cpu"),
    "like": lambda x: x.to(x),
    "double": lambda x: x.double(),
}


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (1, 1), (3, 4)])
@pytest.mark.parametrize("p", [S0, S1, R])
@pytest.mark.parametrize("move", STAYS)
def test_what_stays_on_its_device_is_written_to(move: str, p: Any, shape: tuple[int, ...]) -> None:
    """A sharded dim of one row is brought elsewhere by it; a write to the result reaches the tensor all the same."""

    def run(x: Tensor) -> list[Tensor]:
        STAYS[move](x).mul_(2)
        return [x * 1.0]

    same(run, (r(*shape), (p,)))


@pytest.mark.parametrize("turn", [lambda y: y.unsqueeze_(0), lambda y: y.t_(), lambda y: y.transpose_(0, 1)])
def test_a_view_that_is_a_copy_is_not_turned_in_place(turn: Any) -> None:
    """What is written to it afterwards would not reach its base."""
    mesh = mw.Mesh({"a": 2})

    def run() -> None:
        x = mw.shard_tensor(torch.arange(8.0).reshape(2, 4), mesh, {"a": mw.Shard(1)})
        with pytest.raises(DispatchError, match=r"of a view of .* that is a copy here.*Say y = y\."):
            turn(x.view(4, 2))
        x = mw.shard_tensor(torch.arange(8.0).reshape(2, 4), mesh, {"a": mw.Shard(1)})
        y = x.view(-1)
        turn(x)
        x.mul_(2)
        with pytest.raises(
            DispatchError, match=r"cannot write, because the base was transposed in place .* Use x = x.t\(\)"
        ):
            y.sum()

    mw.simulate(run, mesh)


@pytest.mark.parametrize("written", ["", "data", "counted"])
def test_a_base_whose_writes_nobody_counts_leaves_what_was_saved_of_its_copy(written: str) -> None:
    """``base.data`` may be written to without a word, so the copy is made anew at each use: of the same values, it was
    not written to."""

    def grads(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        base = x * 2
        v = base.view(-1)
        alias = base.data
        y = v * 3.0 if written else v.sin()
        if written == "data":
            alias.mul_(2.0)
        elif written:
            base.mul_(w)  # by ones: the history is another one, and the values are not
        z = v * v
        return list(torch.autograd.grad((y.sum() + z.sum()).sum(), [x, w], allow_unused=True))

    whole = torch.arange(24.0, dtype=torch.float64).view(4, 6), torch.ones(4, 6, dtype=torch.float64)
    want = grads(*(t.clone().requires_grad_() for t in whole))

    def run() -> list[Any]:
        mine = (mw.shard_tensor(t, mesh, {"tp": mw.Shard(1)}).requires_grad_() for t in whole)
        return [g if g is None else mw.unshard(g) for g in grads(*mine)]

    mesh = mw.Mesh({"tp": 2})
    for made in mw.simulate(run, mesh):
        for got, expected in zip(made, want, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                torch.testing.assert_close(got, expected)


HOOKED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda h: h[:2], "columns": lambda h: h[:, 1:3], "t": lambda h: h.t(), "view": lambda h: h.view(2, 12),
}  # fmt: skip


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_hook_on_a_view_whose_base_was_written_to(name: str, dim: int) -> None:
    """Where the view is a copy, that is made anew at its next use: the hook is of what is used."""
    mesh = mw.Mesh({"x": 2})

    def grad(lay: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        p = lay(torch.arange(24.0, dtype=torch.float64).view(4, 6)).requires_grad_()
        h = p * 2
        seen = HOOKED[name](h)
        h.mul_(0.5)
        _ = seen.grad_fn  # without it a plain view ends the process
        seen.register_hook(lambda g: g * 3)
        (seen.sin().sum() + h.sum()).backward()
        return p.grad

    found = mw.simulate(lambda: mw.unshard(grad(lambda t: mw.shard_tensor(t, mesh, {"x": mw.Shard(dim)}))), mesh)
    torch.testing.assert_close(found[0], grad(lambda t: t))


def test_a_hook_on_a_view_ends_no_process() -> None:
    def hooked() -> list[Any]:
        h = mw.shard_tensor(torch.ones(4, 6), mw.Mesh({"x": 2}), {"x": mw.Shard(0)}).requires_grad_() * 2
        seen, got = h.t(), list[Any]()
        h.mul_(0.5)
        seen.register_hook(lambda g: got.append(tuple(g.shape)))
        seen.sum().backward()
        return got

    assert mw.simulate(hooked, mw.Mesh({"x": 2})) == [[(6, 4)]] * 2
