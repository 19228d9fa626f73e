"""Models of Transformers are planned from their forward with labels, and train as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.planner import FoundPlan

transformers = pytest.importorskip("transformers")
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**SMALL, **LATENT}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 32, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        },
    ),
    "vit": ("ViTForImageClassification", {**SMALL, **DRY, "image_size": 16, "patch_size": 4, "num_labels": 8}),
    "bert": ("BertForMaskedLM", {**SMALL, **DRY}),
}  # fmt: skip


def built(name: str, device: str = "cpu") -> nn.Module:
    kind, options = CONFIGS[name]
    options = {k: v for k, v in options.items() if name != "vit" or k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.AutoConfig.for_model(name, **options)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, kind)(config)
    return model


def batch_of(name: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(8, 3, 16, 16, generator=draw)
        return {"pixel_values": images, "labels": torch.randint(8, (8,), generator=draw)}
    ids = torch.randint(64, (8, 16), generator=draw)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss


def planned(name: str, **options: Any) -> FoundPlan:
    model = built(name, "meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.plan(model, loss_fn, batch_of(name), optimizer, hardware="cpu-gloo", **options)


@pytest.mark.thin(7)  # seconds each: of their graphs, which no other model here has
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_planned_model_equals_one_device(name: str) -> None:
    found = planned(name, devices=4)
    assert found.check() == {}

    def step(build: Callable[[Any, Any, Any], Callable[[Any], Any]]) -> Any:
        model, batch = built(name), batch_of(name)
        run = build(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
        losses = [float(mw.unshard(run(batch))) for _ in range(2)]
        return losses, {n: mw.unshard(p.detach()) for n, p in model.named_parameters()}

    def alone(model: Any, optimizer: Any, batch: Any) -> Callable[[Any], Any]:
        def run(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return run

    def on_mesh(model: Any, optimizer: Any, batch: Any) -> Callable[[Any], Any]:
        return mw.compile_step(model, loss_fn, optimizer, batch, mesh=found.mesh, layouts=found.plan, check=False)

    losses, params = mw.simulate(lambda: step(on_mesh), found.mesh)[0]
    expected_losses, expected = step(alone)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    for n, p in expected.items():
        torch.testing.assert_close(params[n], p, rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
