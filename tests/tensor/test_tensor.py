"""PyTorch habits on distributed tensors: writing in place, views, reading values, copies, making new tensors."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

import meshwright as mw
from meshwright import collective
from meshwright.errors import DispatchError, LayoutError
from meshwright.ranks import runtime
from tests.support.compare import FOUR, GRID, S0, S1, P, R, on_ranks, plain, ramp, same

LAYOUTS = [(R,), (S0,), (S1,)]
WITH_PARTIAL = [*LAYOUTS, (P,)]


def each(layouts=LAYOUTS):
    return pytest.mark.parametrize("p", layouts, ids=[repr(q[0]) for q in layouts])


def sharded(p=(S0,), shape=(10, 4), dtype=torch.float64):
    return mw.shard_tensor(ramp(*shape, dtype=dtype), FOUR, p)


# ------------------------------------------------------------------------------------------ in place

IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "add_ alpha": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "mul_ scalar": lambda x, y: x.mul_(3.0),
    "div_": lambda x, y: x.div_(y.abs() + 1),
    "copy_": lambda x, y: x.copy_(y),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(2.5),
    "+=": lambda x, y: x.__iadd__(y),
    "*=": lambda x, y: x.__imul__(y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 7.0),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "relu_": lambda x, y: torch.relu_(x),
    "functional relu": lambda x, y: nn.functional.relu(x, inplace=True),
    "addcmul_": lambda x, y: x.addcmul_(y, y),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "copy_ of a row": lambda x, y: x.copy_(y[0]),
}


@pytest.mark.parametrize("name", IN_PLACE)
@each()
def test_in_place(name, p):
    def run(x, y):
        made = IN_PLACE[name](x, y)
        assert made is x
        return x

    for q in WITH_PARTIAL:
        same(run, (ramp(10, 4), p), (ramp(10, 4).flip(0).contiguous(), q))


EVENS = torch.arange(40).view(10, 4) % 2 == 0


@pytest.mark.parametrize(
    "fn", [lambda x, y: x.mul_(2.0), lambda x, y: x.add_(y), lambda x, y: x.neg_(), lambda x, y: x.zero_(),
           lambda x, y: x.copy_(y), lambda x, y: x.sub_(y).div_(4.0), lambda x, y: x.masked_fill_(EVENS, y[0, 0])]
)  # fmt: skip
def test_in_place_on_a_partial(fn):
    for q in WITH_PARTIAL:

        def run(x, y, q=q):
            with collective.counting() as counts:
                fn(x, y)
            if isinstance(x, mw.DistTensor):
                assert x.placements == (P,)
                assert not counts.total or q != (P,)
            return x

        same(run, (ramp(10, 4), (P,)), (ramp(10, 4) + 1, q))


@pytest.mark.parametrize(
    ("fn", "p"),
    [
        (lambda x: x.relu_(), P),
        (lambda x: x.add_(1.0), P),
        (lambda x: x.pow_(2), P),
        (lambda x: x.cumsum_(0), S0),
    ],
)
def test_in_place_where_the_layout_of_the_target_cannot_be_kept_meanwhile(fn, p):
    def run(x):
        fn(x)
        assert not isinstance(x, mw.DistTensor) or x.placements == (p,)
        return x

    same(run, (ramp(10, 4), (p,)))


@each()
def test_setitem(p):
    def run(x, y):
        x[:, 1] = 5.0
        x[2] = y[0]
        x[3:5, :2] = 0.0
        x[x > 1.0] = -1.0
        x[torch.tensor([7, 8])] = 2.0
        x[..., -1:] = x[..., -1:] + 1.0
        return x

    same(run, (ramp(10, 4), p), (ramp(10, 4), (S0,)))


@each(WITH_PARTIAL)
def test_writing_to_a_view_writes_to_the_base(p):
    """Every view that needs no communication shares memory."""

    def run(x):
        x.view(10, 1, 4).mul_(2.0)
        x.t().mul_(0.5)
        x.detach().neg_()
        x.data.mul_(3.0)
        x.unsqueeze(0).squeeze(0).transpose(0, 1).mul_(2.0)
        if not isinstance(x, mw.DistTensor) or x.placements != (S1,):
            x[:, 1].mul_(4.0)
            x[:, 2:].narrow(1, 0, 1).zero_()
        if not isinstance(x, mw.DistTensor) or x.placements != (S0,):
            x[1:3].neg_()
            x.chunk(2)[1].zero_()
        return x

    def expected(x):
        return run(x)

    if p == (S1,):
        want = ramp(10, 4)
        want.mul_(2 * 0.5 * -1 * 3 * 2)
        want[1:3].neg_()
        want.chunk(2)[1].zero_()
        got = on_ranks(lambda: mw.unshard(run(mw.shard_tensor(ramp(10, 4), FOUR, p))))
        assert all(torch.allclose(g, want) for g in got)
    elif p == (S0,):
        want = ramp(10, 4)
        want.mul_(2 * 0.5 * -1 * 3 * 2)
        want[:, 1].mul_(4.0)
        want[:, 2] = 0.0
        got = on_ranks(lambda: mw.unshard(run(mw.shard_tensor(ramp(10, 4), FOUR, p))))
        assert all(torch.allclose(g, want) for g in got)
    else:
        same(run, (ramp(10, 4), p))


def test_what_may_be_a_view_or_a_copy_is_not_written():
    def run():
        x = sharded()
        flat = x.t().reshape(-1)
        with pytest.raises(
            DispatchError, match=r"whether reshape makes a view is not known here. Say .view\(...\)"
        ) as one:
            flat.zero_()
        x.mul_(2.0)
        with pytest.raises(DispatchError, match="reshape") as other:
            flat.sum()
        assert torch.equal(mw.unshard(x), ramp(10, 4) * 2.0)
        return str(one.value), str(other.value)

    assert len(set(on_ranks(run))) == 1


def test_reading_does_not_make_a_tensor_unwritable():
    """Conversions that leave some ranks' data alone do not mark the tensor itself."""

    def run(x, y):
        z = x * 1.0
        _ = z + y  # z is kept on one rank, as Partial
        _ = z @ y
        z.add_(1.0)
        z[0] = 3.0
        return z

    for q in WITH_PARTIAL:
        same(run, (ramp(4, 4), (R,)), (ramp(4, 4), q))


def test_a_write_is_seen_by_later_conversions():
    """What was gathered before is not what is there now."""

    def run(x, w):
        first = torch.softmax(x, 0)
        x.add_(w)
        second = torch.softmax(x, 0)
        x.data.mul_(2.0)
        third = torch.softmax(x, 0)
        x.detach().zero_()
        base = x.data
        fourth = torch.cumsum(x, 0)
        base.add_(1.0)
        return first, second, third, fourth, torch.cumsum(x, 0), x.cumsum(1)

    for p in WITH_PARTIAL:
        for q in (R, S1):
            if p == (P,):
                continue
            same(run, (ramp(8, 4), p), (ramp(8, 4), (q,)))


def test_in_place_and_autograd():
    def run(x, y):
        z = x * 2.0
        z.mul_(y)
        z[:, 0] = 0.0
        z.view(5, 2, 4).select(2, 1).mul_(3.0) if not isinstance(z, mw.DistTensor) else z[:, 1].mul_(3.0)
        (z * z).sum().backward()
        return x.grad, y.grad

    for p in ((R,), (S0,)):
        for q in WITH_PARTIAL:
            same(run, (ramp(10, 4).requires_grad_(), p), (ramp(10, 4).requires_grad_(), q))


def test_out():
    def run(x, y, out):
        made = torch.add(x, y, out=out)
        assert made is out
        torch.matmul(x, y.t(), out=(other := torch.empty_like(x @ y.t())))
        values, index = torch.empty_like(x[:, 0]), torch.empty_like(x[:, 0], dtype=torch.int64)
        torch.max(x, 1, out=(values, index))
        return out, other, values, index

    for p in LAYOUTS:
        same(run, (ramp(8, 4), (S0,)), (ramp(8, 4) + 1, (S1,)), (torch.zeros(8, 4, dtype=torch.float64), p))


def test_out_that_cannot_be():
    def run():
        x = sharded()
        with pytest.raises(DispatchError, match=r"out= has shape \(3, 4\), the result \(10, 4\)"):
            torch.add(x, x, out=mw.shard_tensor(ramp(3, 4), FOUR, (S0,)))

    on_ranks(run)


# ------------------------------------------------------------------------------------------ reading values


@each(WITH_PARTIAL)
def test_values_as_python(p):
    def run(x):
        s = x.sum()
        return [
            s.item(), float(s), int(s), bool(s > 0), complex(s), f"{s:.3f}", x.tolist(), x.numpy().tolist(), len(x),
            [r.tolist() for r in x], 0.25 in x, 99.0 in x, x[3, 2].item(), (x == x).all().item(), x.shape, x.size(1),
            x.numel(), x.dim(), x.ndim, x.nelement(), x.size(), x.dtype, x.device, x.is_floating_point(),
            x.element_size(),
            list(range(10))[x[9, 3].abs().long()], bool(x.any()), x.is_leaf, x.requires_grad, tuple(x.shape),
        ]  # fmt: skip

    same(run, (ramp(10, 4), p))


@each(WITH_PARTIAL)
def test_comparisons(p):
    def run(x, y):
        return [
            torch.equal(x, y), torch.equal(x, x), torch.allclose(x, y + 1e-12), torch.allclose(x, y + 1), x > y, x != y,
            torch.isclose(x, y), x.eq(0.25), x > 1,
        ]  # fmt: skip

    for q in WITH_PARTIAL:
        same(run, (ramp(10, 4), p), (ramp(10, 4), q))


def test_item_needs_one_element():
    def run():
        with pytest.raises((RuntimeError, ValueError)):
            sharded().item()
        with pytest.raises((RuntimeError, ValueError)):
            bool(sharded())
        with pytest.raises(TypeError, match="0-d"):
            len(sharded().sum())
        with pytest.raises(TypeError, match="0-d"):
            iter(sharded().sum())

    on_ranks(run)


def test_print():
    def run():
        x = sharded((S0,), (4, 2))
        total = x.sum()
        assert total.placements == (P,)
        return repr(x), str(total), f"{total}", f"{total:.1f}", "%s" % total  # noqa: UP031

    answers = on_ranks(run)
    assert answers[1] == answers[1]
    assert "local part=tensor([[0.0000, 0.1250]]" in answers[1][0]
    assert "shape=(4, 2), layout=<x: Shard(0)>" in answers[0][0]
    for _, text, formatted, short, old in answers:
        assert (
            text
            == formatted
            == old
            == ("DistTensor(reduced value=tensor(1.5000, dtype=torch.float64), shape=(), layout=<x: Partial()>)")
        )
        assert short == "1.5"


def test_numpy_wants_no_history():
    def run():
        x = sharded().requires_grad_()
        with pytest.raises(RuntimeError, match="requires grad"):
            x.numpy()
        return x.numpy(force=True).sum()

    assert on_ranks(run) == [ramp(10, 4).sum().item()] * 4


# ------------------------------------------------------------------------------------------ dtype, device, copies


@each(WITH_PARTIAL)
def test_dtypes(p):
    def run(x):
        y = x.float()
        return [
            x.double() + 0, x.float(), x.half().float(), x.bfloat16().float(), x.to(torch.float32), x.to(y), x.long(),
            x.type(torch.float32), x.type_as(y), x.int(), x.bool(), x.cpu() + 0, x.to("cpu") + 0, x.contiguous() + 0,
            x.clone(), x + y, x * 2, (y * 2).dtype, (x.long() / 2), x.long() + 1.5, y + ramp(10, 4),
            torch.result_type(x, y),
            x.to(torch.device("cpu"), torch.float32), x.to(dtype=torch.float32, copy=True), x.float().double(),
        ]  # fmt: skip

    same(run, (ramp(10, 4), p))


def test_conversions_to_what_it_is_return_the_tensor_itself():
    def run():
        for p in (S0, P, R):
            x = sharded((p,))
            for y in (x.double(), x.to(torch.float64), x.cpu(), x.contiguous(), x.to("cpu"), x.requires_grad_()):
                assert y is x
            assert x.clone() is not x
            assert x.clone().placements == x.placements
            assert type(x.float()) is mw.DistTensor

    on_ranks(run)


def test_autocast_gives_the_dtype_of_the_local_result():
    def run():
        x, w = sharded((S0,), (8, 4), torch.float32), sharded((R,), (6, 4), torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):  # the plan, the fast path
                y = nn.functional.linear(x, w)
                assert y.dtype == y.spec.dtype == y.to_local().dtype == torch.bfloat16
            z = nn.functional.layer_norm(y, (6,))
            loss = (z.float() ** 2).sum() + nn.functional.softmax(y, -1).sum() + (y @ w).sum()
        assert nn.functional.linear(x, w).dtype == torch.float32
        loss.backward()
        assert w.grad.dtype == torch.float32
        return mw.unshard(w.grad)

    w = ramp(6, 4, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = nn.functional.linear(ramp(8, 4, dtype=torch.float32), w)
        z = nn.functional.layer_norm(y, (6,))
        loss = (z.float() ** 2).sum() + nn.functional.softmax(y, -1).sum() + (y @ w).sum()
    loss.backward()
    for got in on_ranks(run):
        torch.testing.assert_close(got, w.grad, rtol=3e-2, atol=3e-1)


@each(WITH_PARTIAL)
def test_copies(p):
    def run():
        x = sharded(p).requires_grad_()
        x.sum().backward()
        for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), _saved(x)):
            assert type(y) is mw.DistTensor
            assert y.spec.layout == x.spec.layout
            assert y.requires_grad
            assert y.is_leaf
            assert y.to_local().data_ptr() != x.to_local().data_ptr() or not x.to_local().numel()
            assert torch.equal(mw.unshard(y), mw.unshard(x))
        assert torch.equal(mw.unshard(copy.deepcopy(x).grad), mw.unshard(x.grad))
        shallow = copy.copy(x)
        assert type(shallow) is mw.DistTensor
        assert torch.equal(mw.unshard(shallow), mw.unshard(x))
        with pytest.raises(RuntimeError, match="leaf"):
            copy.deepcopy(x * 2)
        kept = {}
        assert copy.deepcopy([x, x], kept)[0] is copy.deepcopy([x, x], kept)[1]

    on_ranks(run)


def _saved(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["x"]


def test_who_writes_parts_to_a_file_is_told():
    def run():
        net = mw.shard_module(nn.Linear(4, 4), FOUR, {"weight": (S0,)})
        whole = {name: mw.unshard(t) for name, t in net.state_dict().items()}
        with pytest.warns(UserWarning, match=r"the file has this rank's alone, .*mw\.save_weights\(") as told:
            torch.save(net.state_dict(), io.BytesIO())
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copy.deepcopy(net)
            torch.save({"bias": net.bias, **whole}, io.BytesIO())  # whole on each rank

    on_ranks(run)


def test_parameters_and_state_dicts():
    def run():
        net = nn.Linear(4, 6, dtype=torch.float64)
        with torch.no_grad():
            net.weight.copy_(ramp(6, 4))
            net.bias.copy_(ramp(6))
        net.weight = nn.Parameter(mw.shard_tensor(net.weight.detach(), FOUR, (S0,)))
        assert isinstance(net.weight, nn.Parameter)
        assert isinstance(net.weight, mw.DistTensor)
        assert type(net.weight) is mw.DistTensor
        assert net.weight.requires_grad
        assert not isinstance(net.weight * 2, nn.Parameter)
        assert [n for n, _ in net.named_parameters()] == ["weight", "bias"]
        net.register_buffer("scale", mw.shard_tensor(ramp(6), FOUR, (S0,)))
        state = net.state_dict()
        assert type(state["weight"]) is mw.DistTensor
        assert not state["weight"].requires_grad
        again = copy.deepcopy(net)
        assert isinstance(again.weight, nn.Parameter)
        assert isinstance(pickle.loads(pickle.dumps(net.weight)), nn.Parameter)
        with torch.no_grad():
            again.weight.zero_()
        again.load_state_dict(state)
        again.float()
        assert again.weight.dtype == torch.float32
        assert isinstance(again.weight, nn.Parameter)
        assert again.weight.placements == (S0,)
        again.double()
        net.zero_grad()
        y = again(mw.shard_tensor(ramp(5, 4), FOUR, (R,)))
        return plain(y)

    want = ramp(5, 4) @ ramp(6, 4).T + ramp(6)
    for got in on_ranks(run):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_data_get_and_set():
    def run(x, y):
        z = x.data
        assert not z.requires_grad
        z.mul_(2.0)
        first = x.clone().detach()
        x.data = y.data * 1.0
        assert x.requires_grad
        (x * x).sum().backward()
        return first, x, x.grad

    for p in LAYOUTS:
        same(run, (ramp(8, 4).requires_grad_(), p), (ramp(8, 4) + 3, p))


# ------------------------------------------------------------------------------------------ properties, new tensors


@each(WITH_PARTIAL)
def test_transposes(p):
    same(lambda x: [x.T, x.mT, x.H, x.mH, x.t(), x.real, x.adjoint()], (ramp(8, 4), p))


@each(WITH_PARTIAL)
def test_new_tensors(p):
    def run(x):
        torch.manual_seed(3)
        return [
            torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), torch.empty_like(x).zero_(),
            x.new_zeros(3, 2), x.new_ones((2,)), x.new_full((2, 2), 1.5), x.new_empty(2, 3).fill_(1.0),
            x.new_tensor([1, 2]),
            torch.zeros_like(x, dtype=torch.int64), torch.ones_like(x, requires_grad=True), x.new_zeros(()),
        ]  # fmt: skip

    same(run, (ramp(8, 4), p))


def test_the_layout_of_memory_is_torchs():
    def run():
        x = mw.shard_tensor(torch.ones(4, 3), mw.Mesh({"x": 2}), [mw.Shard(0)]).requires_grad_()
        assert x.layout is torch.strided
        assert (x * 2).sum().layout is torch.strided
        assert torch.zeros(2, layout=x.layout).layout is torch.strided
        like = torch.zeros_like(x, layout=x.layout)
        assert (like.spec.layout, like.to_local().tolist()) == (x.spec.layout, [[0.0] * 3] * 2)
        assert torch.empty_like(x, layout=torch.strided, dtype=torch.int64).placements == x.placements
        assert x.spec.layout != torch.strided

    mw.simulate(run, mw.Mesh({"x": 2}))


def test_like_keeps_the_layout():
    def run():
        for p in (S0, S1, R):
            x = sharded((p,))
            assert torch.zeros_like(x).placements == torch.empty_like(x).placements == (p,)
        assert torch.zeros_like(x, requires_grad=True).requires_grad

    on_ranks(run)


@each(WITH_PARTIAL)
def test_indexing_and_iteration(p):
    def run(x):
        a, *rest = x
        return [
            x[0], x[-1], x[2:7], x[::2], x[:, 1:3], x[..., 0], x[None, 3], x[:, None, :], x[[0, 3, 3]], x[x[:, 0] > 0],
            x[torch.tensor([[1, 2], [3, 4]])], x[1, 2], x[1][2], a, rest[-1], x[5:5], x[True],
            x[torch.arange(4), torch.arange(4)],
        ]  # fmt: skip

    same(run, (ramp(10, 4), p))


# ------------------------------------------------------------------------------------------ objects


def test_objects():
    def run():
        x = sharded()
        y = x * 2
        assert type(x) is type(y) is mw.DistTensor
        assert isinstance(x, torch.Tensor)
        table = {x: "x", y: "y"}
        assert table[x] == "x"
        assert hash(x) == hash(x)
        assert WeakTensorKeyDictionary({x: 1})[x] == 1
        gone = weakref.ref(y)
        x.remark = "kept"
        assert x.remark == "kept"
        del y, table
        return gone() is None

    assert on_ranks(run) == [True] * 4


def test_what_was_converted_is_freed_with_the_tensor():
    """The memo of conversions on a tensor is no cycle that only the collector breaks."""

    def run():
        gc.disable()
        try:
            w = sharded((S1,), (4, 4)).requires_grad_()
            x = sharded((S0,)) @ w
            y = x.softmax(0).sum() + x.cumsum(0).sum() + (x @ x.t()).sum()
            y.backward()
            alive = weakref.ref(x)
            del x, y
            return alive() is None
        finally:
            gc.enable()

    assert on_ranks(run) == [True] * 4


def test_plain_tensors_and_scalars_mix_in():
    def run(x, w):
        p = ramp(4, 4)
        return [
            x + p[0], p[0] + x, x @ p, p @ x.t(), x * torch.tensor(2.0), 3 - x, 2 / (x + 9), x**2, 2.0**x,
            torch.where(x > 0, x, 0.0),
            torch.stack([x[0], p[0]]), torch.cat([x, p]),
            torch.maximum(x, torch.zeros(4, dtype=torch.float64)), w + p.sum(),
        ]  # fmt: skip

    for p in WITH_PARTIAL:
        same(run, (ramp(10, 4), p), (ramp(4), (R,)))


def test_gradients_of_plain_tensors_beside_distributed_ones():
    """On every rank the whole gradient; the tensor stays plain, also where an op gives it back."""
    uses = [
        lambda x, q: (x * q).square().sum(),
        lambda x, q: (x + q).square().sum(),
        lambda x, q: ((x - 1) @ q).relu().sum(),
        lambda x, q: (nn.functional.linear(x, torch.stack([q, q]), None) ** 2).sum(),
        lambda x, q: (q * q).sum() + x.sum(),
        lambda x, q: torch.where(x > 1, x, q).square().sum(),
        lambda x, q: (x.sum() * q).square().sum(),
    ]

    def run(p):
        x = mw.reshard(mw.shard_tensor(ramp(7, 4), FOUR, (R,)), p)
        made = []
        for use in uses:
            for needed in (False, True):  # plans for the one serve the other not
                q = (ramp(4) + 1).requires_grad_(needed)
                loss = use(x, q)
                made.append(float(loss))
                if needed:
                    made.append(torch.autograd.grad(loss, q)[0])
                    assert type(made[-1]) is torch.Tensor
        q = ramp(4)
        for op in (lambda: q.type_as(x), lambda: q.to(x), lambda: torch.broadcast_tensors(q, x[0])[0]):
            op()
            assert type(q) is torch.Tensor
        return made

    want = []
    for use in uses:
        for needed in (False, True):
            q = (ramp(4) + 1).requires_grad_(needed)
            loss = use(ramp(7, 4), q)
            want += [float(loss), *([torch.autograd.grad(loss, q)[0]] if needed else [])]
    for p in WITH_PARTIAL:
        for made in mw.simulate(lambda: run(p), FOUR):  # noqa: B023
            for have, ref in zip(made, want, strict=True):
                torch.testing.assert_close(have, ref)


def test_inference_mode_and_no_grad():
    def run(x, w):
        with torch.inference_mode():
            y = nn.functional.linear(x, w).relu().softmax(-1)
            y.mul_(2.0)
            first = y.sum() * 1
            plain_first = plain(first)
        with torch.no_grad():
            z = x @ w.t()
            assert not z.requires_grad
            z += x.sum()
        with torch.set_grad_enabled(True):
            assert (x @ w.t()).requires_grad
        return plain_first, z

    for p in WITH_PARTIAL:
        for q in ((S0,), (S1,), (R,)):
            same(run, (ramp(8, 4), p), (ramp(6, 4).requires_grad_(), q))


def test_the_fast_path_sees_what_changed():
    """One call site, many dtypes, flags and shapes."""

    def run(x):
        out = []
        for t in (x, x.float(), x[:, :2], x.long(), x.detach().requires_grad_()):
            for s in (2, 2.5, torch.tensor(3)):
                for _ in range(3):
                    y = t * s
                    out += [y, y.dtype, y.shape, y.requires_grad]
        return out

    for p in WITH_PARTIAL:
        same(run, (ramp(8, 4), p))


def test_two_axes():
    def run(x, w):
        y = torch.sin(x @ w)
        y[:, 0] = 1.0
        return [y.sum().item(), y, y.t() @ x, y.amax(), list(y)[2]]

    for p in ((S0, R), (S0, S1), (P, S0), (P, P), (R, S0), (S0, S0)):
        for q in ((R, S1), (S0, R), (P, R), (S1, S1)):
            same(run, (ramp(6, 4), p), (ramp(4, 5), q), mesh=GRID)


def test_counts_of_reading():
    """A Partial is reduced once per question, a replicated value never."""

    def run():
        x = sharded((R,))
        with collective.counting() as counts:
            x.sum().item()
            repr(x)
            x.tolist()
        assert counts.total == 0
        with collective.counting() as counts:
            sharded((S0,)).sum().item()
        return {k: n for k, n in counts.kinds.items() if k == "all_reduce"}

    assert on_ranks(run) == [{"all_reduce": 1}] * 4
    assert runtime.RT.sim is None


# ------------------------------------------------------------------------------------------ .grad

GRADS = [(R,), (S0,), (S1,), (P,)]


def used(x, y):
    """Rank-dependent work where ``y`` is split: the gradient of a replicated ``x`` is then Partial."""
    (x * x * y).sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("given", GRADS, ids=[repr(q[0]) for q in GRADS])
@pytest.mark.parametrize("split", [(R,), (S0,)], ids=["I", "R"])
@each(WITH_PARTIAL)
def test_a_backward_adds_to_an_assigned_gradient_of_any_layout(p, split, given, before, frozen):
    """``before``: the leaf's types are decided when the gradient is assigned, else the backward decides them."""
    x, y, g = (ramp(8, 4) + i for i in range(3))
    one = x.clone().requires_grad_()
    one.grad = g.clone()
    for _ in range(2):
        used(one, y)

    def run():
        leaf = mw.shard_tensor(x, FOUR, p).requires_grad_()
        other = mw.shard_tensor(y, FOUR, split)
        if before:
            used(leaf, other)
        if frozen:
            leaf.requires_grad_(False)
        leaf.grad = None
        leaf.grad = mw.shard_tensor(g, FOUR, given)
        assert leaf.grad.placements == given
        torch.testing.assert_close(plain(leaf.grad), g)
        leaf.requires_grad_(True)
        for _ in range(2):
            used(leaf, other)
        return plain(leaf.grad)

    for got in on_ranks(run):
        torch.testing.assert_close(got, one.grad)


@pytest.mark.parametrize("split", [(R,), (S0,)], ids=["I", "R"])
@each(WITH_PARTIAL)
def test_a_plain_gradient_stands_for_the_global_one(p, split):
    x, y, g = (ramp(8, 4) + i for i in range(3))

    def run(x, y):
        x.grad = g.clone()
        torch.testing.assert_close(plain(x.grad), g)
        used(x, y)
        first = plain(x.grad) if isinstance(x, mw.DistTensor) else x.grad.clone()
        x.grad = None
        assert x.grad is None
        used(x, y)
        second = x.grad
        del x.grad
        assert x.grad is None
        return first, second

    same(run, (x.requires_grad_(), p), (y, split))


def test_two_axes_decide_how_an_assigned_gradient_is_added_to():
    x, y, g = (ramp(8, 4) + i for i in range(3))
    one = x.clone().requires_grad_()
    one.grad = g.clone()
    used(one, y)

    def run(given, split):
        leaf = mw.shard_tensor(x, GRID, (R, R)).requires_grad_()
        leaf.grad = mw.shard_tensor(g, GRID, given)
        used(leaf, mw.shard_tensor(y, GRID, split))
        return plain(leaf.grad)

    for split in [(S0, R), (R, S0), (S0, S1), (R, R)]:
        for given in [(R, R), (P, R), (R, S0), (S0, S1), (P, P)]:
            for got in on_ranks(functools.partial(run, given, split), GRID):
                torch.testing.assert_close(got, one.grad)


def test_a_gradient_that_cannot_be():
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, (S0,)).requires_grad_()
        used(x, 1.0)
        kept = x.grad
        with pytest.raises(RuntimeError, match=r"assigned grad has shape \(4, 8\), its tensor has \(8, 4\)"):
            x.grad = mw.shard_tensor(ramp(4, 8), FOUR, (S0,))
        with pytest.raises(LayoutError, match=r"a plain tensor of shape \(2, 4\) was given"):
            x.grad = ramp(2, 4)  # this rank's part: mw.from_local says so
        with pytest.raises(RuntimeError, match="type"):
            x.grad = mw.shard_tensor(ramp(8, 4).float(), FOUR, (S0,))
        with pytest.raises(RuntimeError, match=r"assigned grad has dtype torch.float32, its tensor torch.float64"):
            x.grad = mw.shard_tensor(ramp(8, 4).float(), FOUR, (R,))
        with pytest.raises(LayoutError, match="assigned grad lies on"):
            x.grad = mw.shard_tensor(ramp(8, 4), mw.Mesh({"other": 4}), (S0,))
        with pytest.raises(TypeError, match="assigned grad expected to be a Tensor or None but got grad of type str"):
            x.grad = "ones"
        with pytest.raises(RuntimeError):
            x.grad = x
        assert x.grad is kept  # a gradient that was refused has replaced nothing

    on_ranks(run)


def test_a_gradient_held_beside_the_slot():
    """Its local shape is not the tensor's, so autograd's slot cannot take it."""

    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, (S0,)).requires_grad_()
        g = mw.shard_tensor(ramp(8, 4) + 1, FOUR, (R,))
        x.grad = g
        assert x.grad is g
        x.grad = x.grad  # as `x.grad += ...` does
        assert x.grad is g
        again = copy.deepcopy(x)
        torch.testing.assert_close(plain(again.grad), ramp(8, 4) + 1)
        x.grad = None
        assert x.grad is None
        used(x, 1.0)
        torch.testing.assert_close(plain(x.grad), 2 * ramp(8, 4))
        x.grad = g
        x.grad = mw.shard_tensor(ramp(8, 4), FOUR, (S0,))  # fits: nothing is held any more
        torch.testing.assert_close(plain(x.grad), ramp(8, 4))
        used(again, 1.0)
        torch.testing.assert_close(plain(again.grad), 3 * ramp(8, 4) + 1)

    on_ranks(run)


def test_a_guarded_leaf_is_freed():
    def run():
        x = mw.shard_tensor(ramp(8, 4), FOUR, (R,)).requires_grad_()
        x.grad = mw.shard_tensor(ramp(8, 4), FOUR, (P,))
        used(x, 1.0)
        gone = weakref.ref(x)
        del x
        assert gone() is None

    on_ranks(run)


def test_an_assigned_gradient_and_a_second_derivative():
    x, y, g = (ramp(8, 4) + i for i in range(3))

    def run(x, y, g):
        x.grad = g * g
        (x * x * x * y).sum().backward(create_graph=True)
        return torch.autograd.grad(x.grad.sum(), [x, g])

    for given in GRADS:
        same(run, (x.clone().requires_grad_(), (R,)), (y, (S0,)), (g.clone().requires_grad_(), given))


BOUNDS = {
    "to": lambda x, t: x[:, :t],
    "from": lambda x, t: x[t:],
    "step": lambda x, t: x[:: t + 1],
    "both": lambda x, t: x[:t, t:],
    "written": lambda x, t: _with_columns_doubled(x.clone(), t),
}


def _with_columns_doubled(x, t):
    x[:, :t] = x[:, :t] * 2
    return x


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("kind", ["whole", "parts", "plain"])
def test_slices_bounded_by_tensors(name, kind):
    """A bound is a number: another one is another call, and each is read once, whatever was called before."""
    x = ramp(4, 3)

    def run():
        given, reads = mw.shard_tensor(x, FOUR, [S0]), []
        for n in (2, 1, 0, 1, 3, 2):
            t = torch.tensor(n)
            if kind != "plain":
                own = torch.tensor(n if kind == "whole" or runtime.RT.rank == 2 else 0)
                t = mw.from_local(own, FOUR, [P if kind == "parts" else R])
            with mw.explain() as why:
                made = BOUNDS[name](given, t)
            reads.append(why.counts.kinds.get("all_reduce", 0))
            want = BOUNDS[name](x, torch.tensor(n))
            assert made.shape == want.shape, (n, made.shape)
            assert torch.equal(mw.unshard(made), want), n
        return reads

    for reads in on_ranks(run):
        assert len(set(reads)) == 1, reads
        assert kind == "parts" or not any(reads)


def test_a_tensor_that_was_computed_keeps_its_gradients():
    mesh = mw.Mesh({"x": 2})

    def run():
        x = torch.arange(4.0, requires_grad=True)
        with pytest.raises(LayoutError, match=r"was computed \(MulBackward0\) .* say mw.from_local\(t, mesh, \{\}\)"):
            mw.shard_tensor(x * 2, mesh, {"x": mw.Shard(0)})
        y = mw.reshard(mw.from_local(x * 2, mesh, {}), {"x": mw.Shard(0)})
        (y * y).sum().backward()
        with torch.no_grad():
            assert not mw.shard_tensor(x * 2, mesh, {}).requires_grad
        return x.grad

    for grad in mw.simulate(run, mesh):
        assert torch.equal(grad, 8 * torch.arange(4.0))
