"""Decoders of Hugging Face's library, unchanged, with a split sequence: every gradient against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshwright as mw
from meshwright import collective

transformers = pytest.importorskip("transformers", reason="the oracle is the transformers library")

SMALL = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma3 with windows": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 8}),
}
IDS = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(1))


def made(name: str) -> Any:
    config, model, more = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**SMALL | more)).double()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize(("name", "n"), [("llama", 4), ("gemma3 with windows", 3), ("qwen3", 2), ("llama", 2)])
@pytest.mark.thin(2)
def test_like_one_device(name: str, n: int) -> None:
    mesh = mw.Mesh({"cp": n})
    alone = made(name)
    loss = loss_of(alone, IDS)
    loss.backward()
    want = {k: p.grad for k, p in alone.named_parameters()}

    def eager() -> tuple[float, dict[str, Tensor]]:
        model = mw.shard_module(made(name), mesh)
        found = loss_of(model, mw.shard_tensor(IDS, mesh, {"cp": mw.Shard(1)}))
        found.backward()
        return mw.unshard(found).item(), {k: mw.unshard(p.grad) for k, p in model.named_parameters()}

    def captured() -> tuple[float, dict[str, Tensor]]:
        model = made(name)
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        step = mw.compile_step(model, loss_of, optimizer, IDS, mesh=mesh, batch={"cp": mw.Shard(1)})
        return float(step(IDS)), {k: before[k] - mw.unshard(p) for k, p in model.named_parameters()}

    for run in (eager, captured):
        for got, grads in mw.simulate(run, mesh):
            assert got == pytest.approx(loss.item(), rel=1e-6)
            for k, grad in grads.items():  # logits and positions are in float32
                torch.testing.assert_close(grad, want[k], rtol=1e-5, atol=1e-6, msg=lambda m, k=k: f"{k}: {m}")


def test_layers_send_heads_alone() -> None:
    """Per layer q, k, v to heads and the result back, and nothing for norms, positions or the cache of keys."""
    mesh = mw.Mesh({"cp": 2})

    def run() -> dict[str, int]:
        model = mw.shard_module(made("llama"), mesh).model
        with collective.counting() as counts:
            model(input_ids=mw.shard_tensor(IDS, mesh, {"cp": mw.Shard(1)}))
        return dict(counts.kinds)

    assert mw.simulate(run, mesh)[0] == {"all_to_all": 4 * SMALL["num_hidden_layers"]}
