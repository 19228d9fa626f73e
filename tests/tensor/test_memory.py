"""A DistTensor is not its local memory: whatever reads memory gets the global bytes, or is told what to call."""

from __future__ import annotations

import copy
import io
import pickle
import re
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint

import meshwright as mw
from meshwright.errors import DispatchError, LayoutError, ShardError
from tests.support.processes import run_processes

MESH = mw.Mesh({"dp": 3})
SIZES = pytest.mark.parametrize("n", [6, 5, 2], ids=["even", "uneven", "empty"])


def values(n: int) -> torch.Tensor:
    return torch.arange(1.0, 2 * n + 1).reshape(n, 2)


def on_ranks(fn, mesh=MESH):
    return mw.simulate(fn, mesh)


# -------------------------------------------------------------------------------------------------- readers


@SIZES
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: np.array(x),
        lambda x: x.tolist(),
        lambda x: torch.tensor(x),
        lambda x: torch.tensor([list(row) for row in x]),
        lambda x: torch.as_tensor([list(row) for row in x]),
        lambda x: torch.as_tensor(x, dtype=torch.float64),
        lambda x: torch.asarray(x, dtype=torch.float64),
        lambda x: torch.zeros(1).new_tensor(x),
        lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
        lambda x: torch.stack([torch.tensor(list(row)) for row in x]),
        lambda x: x.type(torch.float64),
        lambda x: x.type("torch.DoubleTensor"),
    ],
)
def test_global_values(n, read):
    def fn():
        for given in (mw.Shard(0), mw.Shard(1), mw.Replicate()):
            x = mw.shard_tensor(values(n), MESH, {"dp": given})
            made = read(x)
            made = mw.unshard(made) if isinstance(made, torch.Tensor) else torch.tensor(made)
            assert torch.equal(made.double(), values(n).double())

    on_ranks(fn)


def test_numbers():
    def fn():
        x = mw.shard_tensor(values(5), MESH, {"dp": mw.Shard(0)})
        s, total = x.sum(), float(values(5).sum())
        assert isinstance(s.placements[0], mw.Partial)
        assert torch.tensor(s).item() == total
        assert torch.tensor([s, [s, 1.0][0]]).tolist() == [total, total]
        assert torch.full((2,), s).tolist() == [total, total]
        assert torch.zeros(1).new_full((1,), s).item() == total
        assert torch.scalar_tensor(s).item() == total
        assert len(torch.arange(s)) == int(total)
        only_first = mw.shard_tensor(torch.tensor([1.0, 0, 0]), MESH, {"dp": mw.Shard(0)}).sum()
        assert torch.is_nonzero(only_first)
        assert only_first.is_nonzero()
        assert x.is_same_size(torch.zeros(5, 2))
        assert not torch.is_same_size(x, torch.zeros(2, 2))
        assert (x.nbytes, x.itemsize) == (40, 4)
        assert x.type() == "torch.FloatTensor"

    on_ranks(fn)


@pytest.mark.parametrize(
    ("what", "read"),
    [
        ("data_ptr()", lambda x: x.data_ptr()),
        ("storage()", lambda x: x.storage()),
        ("DLPack", lambda x: torch.from_dlpack(x)),
        ("DLPack", lambda x: np.from_dlpack(x)),
        ("untyped_storage().tolist", lambda x: x.untyped_storage().tolist()),
        ("untyped_storage()[...]", lambda x: x.untyped_storage()[0]),
        ("as_subclass()", lambda x: x.as_subclass(torch.Tensor)),
    ],
)
def test_refused(what, read):
    def fn():
        for given in (mw.Shard(0), mw.Partial()):
            x = mw.shard_tensor(values(2), MESH, {"dp": given})
            with pytest.raises(
                DispatchError, match=re.escape(what) + r" would give this rank's memory.*mw.unshard\(x\)"
            ):
                read(x)
        read(mw.shard_tensor(values(2), MESH, ()))  # here the part is the whole

    on_ranks(fn)


def test_an_array_that_is_a_copy_cannot_be_written_to():
    def fn():
        x = mw.shard_tensor(values(5), MESH, {"dp": mw.Shard(0)})
        with pytest.raises(ValueError, match="read-only"):
            x.numpy()[0] = 1
        same = mw.shard_tensor(values(5), MESH, ())
        same.numpy()[0] = 7
        assert same[0, 0].item() == 7

    on_ranks(fn)


def test_safetensors(tmp_path):
    safe = pytest.importorskip("safetensors.torch")

    def fn():
        model = mw.shard_module(nn.Linear(2, 5), MESH, {"weight": {"dp": mw.Shard(0)}})
        for save in (lambda f: safe.save_model(model, f), lambda f: safe.save_file(model.state_dict(), f)):
            with pytest.raises(DispatchError, match=r"mw.unshard.* in model.state_dict"):
                save(str(tmp_path / "no"))
        whole = {name: mw.unshard(t) for name, t in model.state_dict().items()}
        file = str(tmp_path / f"{mw.ranks.runtime.RT.rank}")
        safe.save_file(whole, file)
        before = mw.unshard(model.weight).clone()
        with torch.no_grad():
            model.weight.zero_()
        model.load_state_dict(safe.load_file(file))
        assert torch.equal(mw.unshard(model.weight), before)

    on_ranks(fn)


def test_storages_tell_tied_weights():
    def fn():
        x = mw.shard_tensor(values(6), MESH, {"dp": mw.Shard(0)})
        y = mw.shard_tensor(values(6), MESH, {"dp": mw.Shard(0)})
        same = x.detach()
        a, b, c = (t.untyped_storage() for t in (x, same, y))
        assert a == b
        assert a != c
        assert len({a, b, c}) == 2
        assert a.data_ptr() == b.data_ptr() != c.data_ptr()
        assert a._cdata == b._cdata
        assert a.nbytes() == x.to_local().nbytes
        assert a == x.to_local().untyped_storage()

    on_ranks(fn)


def test_storages_are_there_in_code_that_dynamo_leaves_alone():
    """``torch.utils.checkpoint`` runs its function below a frame of ``torch._dynamo``, which traces nothing there."""
    import torch._dynamo

    def fn():
        x = mw.shard_tensor(values(6), MESH, {})
        assert torch._dynamo.disable(lambda: x.untyped_storage())().nbytes() == x.nbytes
        # A parameter whose ``.data`` is held is looked at by its storage when it is copied to the device.
        model = mw.shard_module(nn.Linear(2, 6), MESH, offload="cpu")
        held = [p.data for p in model.parameters()]
        made = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        made.sum().backward()
        assert torch.equal(mw.unshard(model.bias.grad), torch.full((6,), 6.0))
        return len(held)

    on_ranks(fn)


# -------------------------------------------------------------------------------------------------- plain targets


@SIZES
@pytest.mark.parametrize(
    "write",
    [
        lambda p, x: p.copy_(x),
        lambda p, x: p.add_(x),
        lambda p, x: p.__iadd__(x),
        lambda p, x: p.__setitem__(slice(None), x),
        lambda p, x: p.__setitem__((slice(None), 0), x[:, 1]),
        lambda p, x: p.mul_(0).addcmul_(x, x),
        lambda p, x: p.masked_scatter_(x > 3, x),
        lambda p, x: p.fill_(x.sum()),
        lambda p, x: p.set_(x.detach()),
        lambda p, x: setattr(p, "data", x),
        lambda p, x: torch._foreach_add_([p], [x]),
    ],
)
def test_written_into_a_plain_tensor(n, write):
    want = torch.ones(n, 2)
    write(want, values(n))

    def fn():
        p = torch.ones(n, 2)
        for _ in range(2):  # planned, and from the plan
            p.data = torch.ones(n, 2)
            write(p, mw.shard_tensor(values(n), MESH, {"dp": mw.Shard(0)}))
            assert type(p) is torch.Tensor
            assert torch.equal(p, want)

    on_ranks(fn)


@SIZES
def test_gradient_of_what_was_written_into_a_plain_tensor(n):
    def loss(x, p, w):
        h = torch.zeros(n, 3)
        h[:, 1:] = x * 2
        h[:, 0] = p
        h += w.sum()
        return (h**2).sum()

    leaves = [values(n), torch.ones(1) * 3, values(n)]
    want = [t.clone().requires_grad_() for t in leaves]
    loss(*want).backward()

    def fn():
        given = [
            mw.shard_tensor(t, MESH, {"dp": how}).requires_grad_()
            for t, how in zip(leaves, (mw.Shard(0), mw.Replicate(), mw.Shard(1)), strict=True)
        ]
        made = loss(*given)
        made.backward()
        for g, w in zip(given, want, strict=True):
            assert torch.allclose(mw.unshard(g.grad), w.grad)

    on_ranks(fn)


def test_a_plain_module_loads_a_distributed_state():
    def fn():
        model = nn.Linear(2, 5)
        state = {"weight": mw.shard_tensor(values(5), MESH, {"dp": mw.Shard(0)}), "bias": torch.zeros(5)}
        model.load_state_dict(state)
        assert type(model.weight) is nn.Parameter
        assert torch.equal(model.weight, values(5))

    on_ranks(fn)


def test_swapped():
    def fn():
        x, p = mw.shard_tensor(values(5), MESH, {"dp": mw.Shard(0)}), torch.zeros(5, 2)
        torch.utils.swap_tensors(x, p)
        assert type(x) is torch.Tensor
        assert torch.equal(mw.unshard(p), values(5))

    on_ranks(fn)


# -------------------------------------------------------------------------------------------------- files


def saved(x) -> bytes:
    file = io.BytesIO()
    torch.save(x, file)
    return file.getvalue()


@SIZES
def test_saved_and_loaded(n):
    mesh = mw.Mesh({"dp": 3, "tp": 2})

    def fn():
        x = mw.shard_tensor(values(n), mesh, {"dp": mw.Shard(0), "tp": mw.Shard(0)}, order={0: ["tp", "dp"]})
        x = nn.Parameter(x)
        for y in (
            torch.load(io.BytesIO(saved({"x": x})), weights_only=True)["x"],
            pickle.loads(pickle.dumps(x)),
            copy.copy(x),
            copy.deepcopy(x),
        ):
            assert y.spec is x.spec
            assert isinstance(y, nn.Parameter)
            assert y.requires_grad
            assert torch.equal(mw.unshard(y), values(n))
        return saved({"part": x, "whole": mw.shard_tensor(values(n), mesh, ())})

    def elsewhere():
        with pytest.raises(LayoutError, match=r"the part that rank 4 of 6 holds.*each rank saves and loads a file"):
            torch.load(io.BytesIO(files[4]), weights_only=True)

    files = on_ranks(fn, mesh)
    on_ranks(elsewhere, mw.Mesh({"dp": 3}))
    elsewhere()
    with pytest.raises(LayoutError, match="rank 1 of 6"):
        on_ranks(lambda: torch.load(io.BytesIO(files[1]), weights_only=True), mesh)


def test_a_replicated_tensor_loads_anywhere():
    file = on_ranks(lambda: saved(mw.shard_tensor(values(5), MESH, ())))[2]
    for x in on_ranks(lambda: torch.load(io.BytesIO(file), weights_only=True)):
        assert torch.equal(x.to_local(), values(5))


# -------------------------------------------------------------------------------------------------- real processes


def _checkpoint(folder: str, axes: dict[str, int], save: bool) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = mw.init_mesh(axes)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    whole = {name: t.clone() for name, t in model.state_dict().items()}
    last = list(axes)[-1]
    mw.shard_module(model, mesh, {"0.*": {last: mw.Shard(0)}, "1.weight": dict.fromkeys(axes, mw.Shard(1))})
    state = model.state_dict()
    if save:
        dcp.save(state, checkpoint_id=folder)
        with pytest.raises(BaseException, match="not reduced"):  # CheckpointException
            dcp.save({"x": mw.shard_tensor(torch.ones(2), mesh, {last: mw.Partial()})}, checkpoint_id=folder + "x")
        return
    with torch.no_grad():
        for t in state.values():
            t.zero_()
    dcp.load(state, checkpoint_id=folder)
    for name, t in state.items():
        assert torch.equal(mw.unshard(t), whole[name]), name


@pytest.mark.processes
def test_torch_checkpoints_go_to_other_meshes():
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_processes(_checkpoint, 2, str(Path(folder) / "c"), {"dp": 2}, True)
        run_processes(_checkpoint, 3, str(Path(folder) / "c"), {"dp": 1, "tp": 3}, False)


def _wrapped() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = mw.init_mesh({"dp": 2})
    model = mw.shard_module(nn.Sequential(nn.Linear(4, 6)), mesh, {"0.*": {"dp": mw.Shard(0)}})
    cpu = {"device_id": torch.device("cpu")}
    for wrap, fix in (
        (nn.parallel.DistributedDataParallel, "reduces gradients itself"),
        (nn.DataParallel, "reduces gradients itself"),
        (lambda m: FullyShardedDataParallel(m, **cpu), "fsdp="),
        (lambda m: fully_shard(m, mesh=init_device_mesh("cpu", (2,))), "fsdp="),
    ):
        with pytest.raises(ShardError, match=f"a rank's shards for full tensors. Leave it out: .*{fix}"):
            wrap(copy.deepcopy(model))
    # Plain modules are wrapped as ever; shard_module does not take what is wrapped.
    for made in (
        nn.parallel.DistributedDataParallel(nn.Linear(2, 2)),
        FullyShardedDataParallel(nn.Linear(2, 2), **cpu),
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,))),
    ):
        with pytest.raises(ShardError, match="pass the module inside, unwrapped"):
            mw.shard_module(made, mesh)
    dist.barrier()


@pytest.mark.processes
def test_wrappers_of_sharded_models_are_refused():
    run_processes(_wrapped, 2)


def test_fully_shard_of_a_sharded_model_is_refused_without_a_process_group():
    from torch.distributed.fsdp import fully_shard

    def wrap() -> None:
        mesh = mw.Mesh({"dp": 2})
        model = mw.shard_module(nn.Sequential(nn.Linear(4, 6)), mesh, {"0.*": {"dp": mw.Shard(0)}})
        for modules in (model, model[0], [model[0]]):
            with pytest.raises(ShardError, match=r"fully_shard: mw.shard_module sharded .*Leave it out: .*fsdp="):
                fully_shard(modules)

    mw.simulate(wrap, mw.Mesh({"dp": 2}))
