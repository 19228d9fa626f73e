"""shard_module: names and layouts, mistakes, meta-device models, hooks, and what one does with modules otherwise."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright import collective
from meshwright.errors import DesyncError, LayoutError, MeshError, ShardError
from meshwright.ranks import runtime
from tests.support.shard_networks import TP, Net, batches, loss_of, net, same_values

DP = mw.Mesh({"dp": 2})
BOTH = mw.Mesh({"dp": 2, "tp": 2})
IDS = batches(1)[0]


def split(mesh: mw.Mesh = BOTH) -> mw.DistTensor:
    return mw.shard_tensor(IDS, mesh, {"dp": mw.Shard(0)})


def check_gradients(model: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    model.zero_grad()
    reference.zero_grad()
    loss_of(model, split()).backward()
    loss_of(reference, IDS).backward()
    same_values(model, reference, grads=True, **tolerance)


# -- names and layouts -------------------------------------------------------------------------------------


def test_globs_match_names_and_the_last_match_counts() -> None:
    def fn() -> None:
        model = net()
        before = dict(model.named_parameters())
        made = mw.shard_module(
            model,
            BOTH,
            {"*.weight": {"tp": mw.Shard(1)}, "blocks.*.norm.*": {}, "blocks.0.up.weight": {"dp": mw.Shard(0)}},
        )
        assert made is model
        after = dict(model.named_parameters())
        assert all(after[n] is before[n] for n in before), "parameters stay the same objects"
        assert all(isinstance(p, mw.DistTensor) and isinstance(p, nn.Parameter) for p in after.values())
        assert after["blocks.1.up.weight"].placements == (mw.Replicate(), mw.Shard(1))
        assert after["blocks.0.up.weight"].placements == (mw.Shard(0), mw.Replicate())
        assert after["blocks.0.norm.weight"].spec.layout.is_replicated()
        assert after["scale"].spec.layout.is_replicated()
        assert model.head.weight is model.emb.weight
        assert after["emb.weight"].to_local().shape == (11, 4)
        assert type(model.offset) is torch.Tensor

    mw.simulate(fn, BOTH)


def test_a_tied_parameter_may_be_named_by_any_of_its_names() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), BOTH, {"head.weight": {"tp": mw.Shard(0)}})
        assert model.emb.weight.placements[1] == mw.Shard(0)

    mw.simulate(fn, BOTH)


def test_buffers_can_be_sharded_too() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), BOTH, {"offset": {"tp": mw.Shard(0)}})
        assert isinstance(model.offset, mw.DistTensor)
        assert "offset" in model.state_dict()
        check_gradients(model, net())

    mw.simulate(fn, BOTH)


def test_an_optimizer_made_before_goes_on_working() -> None:
    one = net()
    opt = torch.optim.SGD(one.parameters(), 0.1)
    loss_of(one, IDS).backward()
    opt.step()

    def fn() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        mw.shard_module(model, BOTH, TP)
        loss_of(model, split()).backward()
        opt.step()
        same_values(model, one)

    mw.simulate(fn, BOTH)


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"placements": {"block.*.up.weight": {}}}, ShardError, "matches no parameter or buffer.*blocks.0.up.weight"),
        ({"placements": {"scale": {"tp": mw.Shard(1)}}}, LayoutError, r"scale, of shape \(8,\): .*dims -1 to 0"),
        ({"placements": {"scale": {"pp": mw.Shard(0)}}}, MeshError, "scale.*'pp'.*dp, tp"),
        ({"placements": {"scale": {"tp": mw.Partial()}}}, LayoutError, "scale.*Partial"),
        ({"inputs": {"block.*": {}}}, ShardError, "matches no module"),
        ({"fsdp": "pp"}, MeshError, "'pp'"),
        ({"fsdp": {"nothing.*": "dp"}}, ShardError, "matches no parameter"),
        ({"placements": TP, "fsdp": "tp"}, ShardError, "cannot be stored over that axis"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mw.simulate(lambda: mw.shard_module(net(), BOTH, **options), BOTH)


def test_sharding_twice() -> None:
    def fn() -> None:
        model = mw.shard_module(net(), DP)
        with pytest.raises(ShardError, match="sharded already"):
            mw.shard_module(model, DP, {"scale": {"dp": mw.Shard(0)}})

    mw.simulate(fn, DP)


def test_ranks_that_disagree_are_told_so() -> None:
    def fn() -> None:
        dim = runtime.RT.rank
        mw.shard_module(nn.Linear(4, 4), DP, {"weight": {"dp": mw.Shard(dim)}})

    with pytest.raises(DesyncError, match=r"rank 0: weight .*rank 1: weight"):
        mw.simulate(fn, DP)


def test_a_mistake_on_one_rank_is_raised_on_all() -> None:
    def fn() -> str:
        try:
            mw.shard_module(nn.Linear(4, 4), DP, {"weight" if runtime.RT.rank else "wait": {}})
        except (DesyncError, ShardError) as error:
            return str(error)
        return ""

    first, second = mw.simulate(fn, DP)
    assert "'wait' matches no" in first
    assert "failed on rank 0" in second


# -- meta ---------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.rest = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Conv2d(4, 6, 3), nn.LayerNorm(5))
        self.lstm = nn.LSTM(8, 4)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("over", [None, "dp"])
def test_a_meta_model_gets_the_values_of_one_device(over: str | None) -> None:
    torch.manual_seed(5)
    one = Everything()

    def fn() -> None:
        with torch.device("meta"):
            model = Everything()
        torch.manual_seed(5)
        placements = {"rest.0.*": {"tp": mw.Shard(0)}, "attention.in_proj_weight": {"tp": mw.Shard(0)}}
        mw.shard_module(model, BOTH, placements, fsdp=over)
        assert model.head.weight is model.emb.weight
        assert isinstance(model.emb.weight, nn.Parameter)
        for name, value in model.state_dict().items():
            assert torch.equal(mw.unshard(value), one.state_dict()[name]), name

    mw.simulate(fn, BOTH)


class Helpless(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, device=device))


def test_a_meta_module_that_cannot_initialise_itself() -> None:
    def fn() -> None:
        model = nn.Sequential(Helpless("meta"))
        with pytest.raises(ShardError, match=r"0\.w of Helpless.*reset_parameters"):
            mw.shard_module(model, DP)
        model = nn.Sequential(Helpless("meta"))
        mw.shard_module(model, DP, init=lambda m: [nn.init.constant_(p, 3.0) for p in m.parameters()])
        assert mw.unshard(model[0].w.detach()).tolist() == [3.0] * 3

    mw.simulate(fn, DP)


# -- constraints of activations ---------------------------------------------------------------------------------


def test_inputs_and_outputs_are_brought_to_the_wished_placements() -> None:
    x = torch.randn(4, 6, 8)
    seen: list[Any] = []

    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.placements)  # type: ignore[attr-defined]
            return x * 2

    def fn() -> None:
        model = mw.shard_module(
            nn.Sequential(Look(), Look()),
            BOTH,
            inputs={"1": {"tp": mw.Shard(1)}},
            outputs={"1": {"tp": mw.Replicate()}},
        )
        y = model(mw.shard_tensor(x, BOTH, {"dp": mw.Shard(0)}))
        assert y.placements == (mw.Shard(0), mw.Replicate())
        torch.testing.assert_close(mw.unshard(y), 4 * x)

    mw.simulate(fn, BOTH)
    assert set(seen) == {(mw.Shard(0), mw.Replicate()), (mw.Shard(0), mw.Shard(1))}


# -- habits -------------------------------------------------------------------------------------------------

STORED = pytest.mark.parametrize("over", [None, "dp"])


def sharded(over: str | None) -> nn.Module:
    return mw.shard_module(net(), BOTH, TP, fsdp=over)


@STORED
def test_changing_the_dtype(over: str | None) -> None:
    def fn() -> None:
        model = sharded(over)
        model.float()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        check_gradients(model, net().float(), rtol=1e-3, atol=1e-5)
        model.double().to("cpu")
        check_gradients(model, net(), rtol=1e-3, atol=1e-5)
        model.half().bfloat16()

    mw.simulate(fn, BOTH)


@STORED
def test_state_dicts(over: str | None) -> None:
    def fn() -> None:
        model = sharded(over)
        state = model.state_dict()
        assert all(isinstance(v, mw.DistTensor) for k, v in state.items() if k != "offset")
        whole = {k: 2 * v for k, v in net().state_dict().items()}
        model.load_state_dict(whole)
        for k, v in model.state_dict().items():
            torch.testing.assert_close(mw.unshard(v), whole[k])
        rows = {k: mw.shard_tensor(v, BOTH, {"dp": mw.Shard(0)}) for k, v in net(5).state_dict().items()}
        model.load_state_dict(rows)
        check_gradients(model, net(5))
        other = mw.shard_module(net(), BOTH)
        other.load_state_dict(model.state_dict())
        check_gradients(other, net(5))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**whole, "scale": torch.ones(4)})

    mw.simulate(fn, BOTH)


@STORED
def test_copies_synchronise_their_own_gradients(over: str | None) -> None:
    def fn() -> None:
        model = sharded(over)
        check_gradients(model, net())
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
        with collective.counting() as counts:
            check_gradients(model, net())
        for other in copies:
            assert other.head.weight is other.emb.weight
            check_gradients(other, net())
            with collective.counting() as again:
                check_gradients(other, net())
            assert again.table == counts.table
            torch.optim.SGD(other.parameters(), 0.1).step()
        check_gradients(model, net())

    mw.simulate(fn, BOTH)


@STORED
def test_apply(over: str | None) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)

    one = net()
    torch.manual_seed(3)
    one.apply(init)

    def fn() -> None:
        model = sharded(over)
        torch.manual_seed(3)
        model.apply(init)
        same_values(model, one)

    mw.simulate(fn, BOTH)


@STORED
def test_evaluation(over: str | None) -> None:
    want = loss_of(net(), IDS)

    def fn() -> None:
        model = sharded(over).eval()
        for p in model.parameters():
            p.requires_grad = False
        torch.testing.assert_close(mw.unshard(loss_of(model, split())), want.detach())
        model.requires_grad_(True)
        with torch.no_grad():
            torch.testing.assert_close(mw.unshard(loss_of(model, split())), want.detach())
        check_gradients(model, net())

    mw.simulate(fn, BOTH)


def test_autocast() -> None:
    def fn() -> None:
        model = mw.shard_module(Net(), BOTH, TP)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, split())
        loss.backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        one = Net()
        one.load_state_dict({k: mw.unshard(v) for k, v in model.state_dict().items()})
        loss_of(one, IDS).backward()
        same_values(model, one, grads=True, rtol=0.2, atol=0.02)

    mw.simulate(fn, BOTH)


def test_what_has_no_shape_or_can_never_be_trained_is_refused() -> None:
    with pytest.raises(ShardError, match=r"weight has no shape yet: run one batch through"):
        mw.simulate(lambda: mw.shard_module(nn.LazyLinear(3), DP), DP)
    with torch.inference_mode():
        model = nn.Linear(3, 3)
    with pytest.raises(ShardError, match=r"weight was made under torch.inference_mode\(\)"):
        mw.simulate(lambda: mw.shard_module(model, DP), DP)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("stored", [None, "dp"])
def test_sparse_gradients_are_refused(kind: type[nn.Module], stored: str | None) -> None:
    def fn() -> None:
        table = nn.ModuleDict({"table": kind(6, 4, sparse=True)})
        with pytest.raises(ShardError, match=r"table is an Embedding.* with sparse=True, .* sparse=False"):
            mw.shard_module(table, BOTH, fsdp=stored)
        table.requires_grad_(False)
        mw.shard_module(table, BOTH, fsdp=stored)  # it will have no gradient

    mw.simulate(fn, BOTH)
