"""Models from the meta device: what constructors do is recorded and done again shard by shard; nothing is unwritten."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parametrizations

import meshwright as mw
from meshwright.errors import ShardError

DP = mw.Mesh({"dp": 2})
THREE = mw.Mesh({"dp": 3})


class Lora(nn.Linear):
    def __init__(self, n: int) -> None:
        super().__init__(n, n)
        self.A, self.B = nn.Parameter(torch.empty(3, n)), nn.Parameter(torch.zeros(n, 3))
        nn.init.normal_(self.A, std=0.02)


class Rotary(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, n, 2).float() / n))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("cos", torch.outer(torch.arange(5.0), inv_freq).cos())
        self.register_buffer("alias", self.inv_freq)
        self.register_buffer("mask", torch.tril(torch.ones(n, n, dtype=torch.bool)))
        self.register_buffer("numbers", torch.tensor([1.5, 2.5]))
        self.scale = nn.Parameter(torch.ones(n) * 0.5)


class Gpt(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, n, padding_idx=2)
        self.a, self.b = nn.Linear(n, n), nn.Linear(n, n)
        self.blocks = nn.ModuleList(copy.deepcopy(self.a) for _ in range(2))
        self.head = nn.Linear(n, 7, bias=False)
        self.head.weight = self.emb.weight
        self.apply(self.init)
        nn.init.zeros_(self.b.weight)
        with torch.no_grad():
            self.a.weight[1:3].mul_(3.0)
            self.a.weight[:, 0] = 7.0
            self.blocks[0].weight.data.copy_(self.a.weight * 2 + 1)

    def init(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)


class Odd(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.vain = nn.Linear(n, 5)
        self.vain = nn.Linear(n, 3)  # the first one draws all the same
        self.q = nn.Linear(n, n)
        nn.init.orthogonal_(self.q.weight)
        self.t = nn.Parameter(torch.randn(n, 5).t() * 0.1)
        self.stacked = nn.Parameter(torch.stack([torch.rand(n), torch.arange(float(n))]))
        self.half = nn.Linear(n, n).to(torch.bfloat16)
        self.normed = parametrizations.weight_norm(nn.Linear(n, n))
        self.spectral = parametrizations.spectral_norm(nn.Linear(n, n))
        self.many = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False)
        self.rnn, self.norm = nn.GRU(n, 3), nn.BatchNorm1d(n)
        nn.init.sparse_(self.vain.weight, 0.5)
        self.conv = nn.Conv1d(4, 4, 3)
        nn.init.dirac_(self.conv.weight)
        self.chosen = nn.Parameter(torch.bernoulli(torch.full((n,), 0.5)) + torch.randint(3, (n,)))


class Seeded(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a = nn.Linear(n, n)
        torch.manual_seed(11)
        self.b = nn.Linear(n, n)


def drawn_after(make: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    model = make()
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}, torch.rand(3)


MODELS = {"lora": Lora, "rotary": Rotary, "gpt": Gpt, "odd": Odd, "seeded": Seeded}


@pytest.mark.filterwarnings("ignore:.*no rule", "ignore:.*sharding rule")
@pytest.mark.parametrize("mesh", [DP, THREE], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_meta_model_is_that_of_one_device_bit_by_bit(kind: str, mesh: mw.Mesh) -> None:
    make: Callable[[], nn.Module] = lambda: MODELS[kind](8)  # noqa: E731
    want, after = drawn_after(make)
    layouts = {"*weight": {"dp": mw.Shard(0)}, "*A": {"dp": mw.Shard(1)}, "*scale": {"dp": mw.Shard(0)}}
    layouts = {g: p for g, p in layouts.items() if any(n.endswith(g[1:]) for n in want)}

    def run() -> None:
        with torch.device("meta"):
            model = make()
        params = dict(model.named_parameters())
        torch.manual_seed(3)
        mw.shard_module(model, mesh, layouts)
        assert torch.equal(torch.rand(3), after), "the generator ends where that of one device does"
        now = dict((*model.named_parameters(), *model.named_buffers()))
        assert now.keys() == want.keys()
        assert all(now[n] is p for n, p in params.items())
        for name, value in now.items():
            got = mw.unshard(value.detach())
            assert got.dtype is want[name].dtype, name
            assert torch.equal(got, want[name]), name

    mw.simulate(run, mesh)


def test_after_the_context() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def init(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.5)

    torch.manual_seed(0)
    want = make().apply(init).to(torch.bfloat16).state_dict()

    def run() -> None:
        with torch.device("meta"):
            model = make()
        model.apply(init).to(torch.bfloat16)
        torch.manual_seed(0)
        mw.shard_module(model, DP)
        assert all(torch.equal(mw.unshard(t), want[n]) for n, t in model.state_dict().items())
        with torch.device("meta"):
            model = make()
        nn.init.ones_(model[0].weight)
        with pytest.raises(ShardError, match=r"0\.weight was written to on the meta device outside of"):
            mw.shard_module(model, DP)

    mw.simulate(run, DP)


def test_two_models_of_one_context() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)

    def run() -> None:
        with torch.device("meta"):
            a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        torch.manual_seed(0)
        for model, want in ((b, two), (a, one)):
            mw.shard_module(model, DP)
            assert torch.equal(mw.unshard(model.weight.detach()), want.weight)

    mw.simulate(run, DP)


class Bare(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, **options)
        self.w = nn.Parameter(torch.empty(3, **options))
        self.register_buffer("mask", torch.ones(3, **options), persistent=False)


def test_what_nothing_wrote_is_an_error_by_name() -> None:
    def run() -> None:
        with pytest.raises(ShardError, match=r"w of Bare, mask of Bare: build .* init=\"load\""):
            mw.shard_module(Bare(device="meta"), DP)  # not recorded: mask is lost, too
        with torch.device("meta"):
            model = Bare()
        with pytest.raises(ShardError, match=r"writes w of Bare: "):
            mw.shard_module(model, DP)
        with torch.device("meta"):
            model = Bare()
        with pytest.raises(ShardError, match=r"writes inner.bias of Linear"):
            mw.shard_module(model, DP, init=lambda m: [nn.init.ones_(t) for t in (m.w, m.inner.weight)])
        with torch.device("meta"):
            model = Bare()
        mw.shard_module(model, DP, init=lambda m: [nn.init.ones_(p) for p in m.parameters()])
        assert mw.unshard(model.w.detach()).tolist() == model.mask.tolist() == [1.0] * 3

    mw.simulate(run, DP)


class Child(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)


class Parent(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.child = Child(2, 2, device=device)
        self.scale = nn.Parameter(torch.empty(2, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.child.weight, 3.0)
        nn.init.constant_(self.scale, 5.0)


def test_without_a_recording_children_come_before_their_parents() -> None:
    def run() -> None:
        model = mw.shard_module(Parent("meta"), DP)
        assert {n: t.mean().item() for n, t in model.state_dict().items()} == {
            n: t.mean().item() for n, t in Parent("cpu").state_dict().items()
        }

        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Linear(2, 2, device="meta")
                nn.init.zeros_(self.a.weight)

        with pytest.warns(UserWarning, match=r"a\.weight got values from reset_parameters"):
            mw.shard_module(Scaled(), DP)

    mw.simulate(run, DP)


def test_weights_that_are_loaded_next() -> None:
    want = nn.Sequential(Rotary(4), nn.Linear(4, 4))

    def run() -> None:
        with torch.device("meta"):
            model = nn.Sequential(Rotary(4), nn.Linear(4, 4))
        mw.shard_module(model, DP, init="load")
        assert torch.equal(model[0].inv_freq, want[0].inv_freq)
        assert model[1].weight.isnan().all().item()
        state = want.state_dict()
        model.load_state_dict({n: t for n, t in state.items() if n != "1.bias"}, strict=False)
        with pytest.raises(ShardError, match=r"nothing has written 1\.bias since"):
            model(torch.ones(2, 4))
        with pytest.raises(ShardError, match=r"nothing has written 1\.bias since"):
            mw.compile_step(model[1:], lambda m, x: m(x).sum(), None, torch.ones(2, 4), mesh=DP)(torch.ones(2, 4))
        model.load_state_dict(state)
        assert torch.equal(mw.unshard(model[1](torch.ones(2, 4)).detach()), want[1](torch.ones(2, 4)).detach())

    mw.simulate(run, DP)


def test_who_holds_a_parameter_goes_on_with_it() -> None:
    """Optimizers, schedulers, lists and averages that were made of a model on the meta device."""
    x = torch.randn(4, 4)

    def train(model: nn.Module, held: list[nn.Parameter], opt: Any, lay: Callable[[Any], Any]) -> list[float]:
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        average = torch.optim.swa_utils.AveragedModel(model) if not held[0].is_meta else None
        seen = []
        for _ in range(3):
            loss = model(lay(x)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(held, 0.5)
            opt.step()
            schedule.step()
            opt.zero_grad()
            seen.append(loss.item())
            if average is not None:
                average.update_parameters(model)
        return [*seen, average(lay(x)).sum().item() if average is not None else 0.0]

    torch.manual_seed(0)
    one = nn.Linear(4, 2)
    want = train(one, list(one.parameters()), torch.optim.AdamW(one.parameters(), 0.1), lambda t: t)
    calls: list[int] = []

    def run() -> None:
        with torch.device("meta"):
            model = nn.Linear(4, 2)
        held, opt = list(model.parameters()), torch.optim.AdamW(model.parameters(), 0.1)
        model.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        model.bias.register_hook(lambda g: calls.append(2))
        torch.manual_seed(0)
        mw.shard_module(model, DP, {"weight": {"dp": mw.Shard(1)}})
        got = train(model, held, opt, lambda t: mw.shard_tensor(t, DP, {"dp": mw.Shard(0)}))
        torch.testing.assert_close(got, want)

    mw.simulate(run, DP)
    assert calls.count(1) == calls.count(2) == 6


def test_a_copy_has_the_values_of_its_original() -> None:
    def run() -> None:
        with torch.device("meta"):
            model = Rotary(4)
        other = copy.deepcopy(model)
        assert all(type(t) is type(s) for t, s in zip(other.parameters(), model.parameters(), strict=True))
        with torch.device("meta"):
            linear = nn.Linear(4, 4)
        again = copy.deepcopy(linear)
        for m in (model, other, linear, again):
            mw.shard_module(m, DP)
        assert torch.equal(mw.unshard(linear.weight.detach()), mw.unshard(again.weight.detach()))
        assert torch.equal(other.inv_freq, model.inv_freq)

    mw.simulate(run, DP)
