"""Mixtures of experts of Hugging Face's library, unchanged, with experts split: every gradient against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from conformance.decoders import EXPERTS, decoder, loss_of

pytest.importorskip("transformers", reason="the oracle is the transformers library")
pytest.importorskip("meshwright.integrations.transformers")

MESHES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "dp": ({"dp": 2}, {"dp": mw.Shard(0)}, {"dp": mw.Shard(0)}),
    "dp and ep": ({"dp": 2, "ep": 2}, {"dp": mw.Shard(0), "ep": mw.Shard(0)}, {"ep": mw.Shard(0)}),
}


def made(name: str, implementation: str) -> Any:
    return decoder(
        EXPERTS, name, num_hidden_layers=1, max_position_embeddings=32, experts_implementation=implementation
    )


@pytest.mark.parametrize(
    ("name", "mesh_name"),
    [("qwen3-moe", "dp and ep"), ("mixtral", "dp"), ("gpt-oss", "dp"), ("deepseek-v3", "dp and ep")],
)
@pytest.mark.thin(2)
def test_like_one_device(name: str, mesh_name: str) -> None:
    sizes, batch, laid = MESHES[mesh_name]
    mesh, ids = mw.Mesh(sizes), torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(1))
    alone = made(name, "eager")
    loss = loss_of(alone, ids)
    loss.backward()
    want = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in alone.named_parameters()}
    layouts = {"*.experts.*": laid}

    def eager() -> tuple[float, dict[str, Tensor]]:
        model = mw.shard_module(made(name, "meshwright"), mesh, layouts)
        found = loss_of(model, mw.shard_tensor(ids, mesh, batch))
        found.backward()
        return mw.unshard(found).item(), {n: mw.unshard(p.grad) for n, p in model.named_parameters()}

    def captured() -> tuple[float, dict[str, Tensor]]:
        model = made(name, "meshwright")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = mw.compile_step(model, loss_of, optimizer, ids, mesh=mesh, layouts=layouts, batch=batch)
        found = float(step(ids))
        return found, {n: before[n] - mw.unshard(p) for n, p in model.named_parameters()}

    for run in (eager, captured):
        for got, grads in mw.simulate(run, mesh):
            assert got == pytest.approx(loss.item(), rel=1e-6)
            for n, grad in grads.items():
                torch.testing.assert_close(grad, want[n], rtol=1e-5, atol=1e-6, msg=lambda m, n=n: f"{n}: {m}")
