"""Models of transformers, unchanged, cut into two stages: a tied weight, an encoder and a decoder, one that sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshwright as mw

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(3, 50, (4, 6), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def text(model: Any, batch: Any) -> Any:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **SMALL, attn_implementation="eager"))


def gpt2() -> Any:
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, attn_implementation="eager"))


def t5() -> Any:
    sizes = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def vit() -> Any:
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


def qwen3_moe() -> Any:
    experts: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    experts |= {"num_key_value_heads": 2, "attn_implementation": "eager"}
    config = transformers.Qwen3MoeConfig(vocab_size=50, **SMALL, **experts, experts_implementation="batched_mm")
    return transformers.Qwen3MoeForCausalLM(config)


CASES: list[Any] = [
    (gpt2, text, {"pp": "transformer.h"}, IDS),
    pytest.param(llama, text, {"pp": "model.layers"}, IDS, marks=pytest.mark.long),
    pytest.param(t5, text, {"pp": {"encoder": 0, "decoder": 1}}, IDS, marks=pytest.mark.long),
    pytest.param(
        vit,
        lambda m, b: m(pixel_values=b[0], labels=b[1]).loss,
        {"pp": "vit.layers"},
        (IMAGES, torch.arange(4)),
        marks=pytest.mark.long,
    ),
    (qwen3_moe, text, {"pp": "model.layers"}, IDS),
]


@pytest.mark.parametrize(("make", "loss_of", "stages", "batch"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_cut(make: Callable[[], Any], loss_of: Any, stages: Any, batch: Any) -> None:
    """The bits of the uncut step; the losses of one device, which transformers takes in float32."""

    def run(schedule: str) -> list[float]:
        torch.manual_seed(0)
        model = make().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        passes = [f"pipeline:micro_batches=2,schedule={schedule}"]
        mesh = mw.Mesh({"pp": 2})
        step = mw.compile_step(model, loss_of, optimizer, batch, mesh=mesh, stages=stages, passes=passes)
        return [step(batch).item() for _ in range(2)]

    torch.manual_seed(0)
    model, losses = make().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    uncut, cut = (mw.simulate(lambda s=s: run(s), mw.Mesh({"pp": 2}))[0] for s in ("uncut", "zero-bubble"))
    assert cut == uncut
    assert cut == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.long), "llama"])
def test_micro_batches_of_one_row(kind: str) -> None:
    """Positions are repeated for several rows, and not for one: two rows and one row give one device's gradients."""
    names = {"gpt2": "transformer.h", "llama": "model.layers"}

    def made() -> Any:
        torch.manual_seed(0)
        model = globals()[kind]().double()
        model.set_attn_implementation("sdpa")  # which looks for packed documents in the positions
        return model

    def gradients(model: Any) -> dict[str, torch.Tensor]:
        return {n: mw.unshard(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}

    def run() -> Any:
        model, options = made(), {"stages": {"pp": names[kind]}, "passes": ["pipeline:micro_batches=2"]}
        step = mw.compile_step(model, text, None, IDS[:3], mesh=mw.Mesh({"pp": 2}), gradients=True, **options)
        return step(IDS[:3]).item(), gradients(model)

    model = made()
    loss = text(model, IDS[:3])
    loss.backward()
    found, got = mw.simulate(run, mw.Mesh({"pp": 2}))[0]
    assert found == pytest.approx(loss.item(), rel=1e-6)
    assert all(torch.allclose(got[n], g, atol=1e-6) for n, g in gradients(model).items())
