"""What people do with a sharded Llama: adapters of PEFT, and ``generate`` in its ways; as on one device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import transformers

import meshwright as mw

peft = pytest.importorskip("peft")

MESH = mw.Mesh({"dp": 2, "tp": 2})
CONFIG = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
COLUMNS, ROWS = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
LAYOUTS = {
    **{f"*.{name}_proj*.weight": COLUMNS for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": ROWS for name in ("o", "down")},
}
IDS = torch.randint(1, 64, (3, 9), generator=torch.Generator().manual_seed(1))


def placed(mesh: mw.Mesh | None, model: Any) -> tuple[Any, Any]:
    if mesh is None:
        return model, IDS
    return mw.shard_module(model, mesh, LAYOUTS), mw.shard_tensor(IDS, mesh, {"dp": mw.Shard(0)})


def adapted(mesh: mw.Mesh | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the adapter's weights, after three steps with dropout."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model, ids = placed(mesh, peft.get_peft_model(transformers.LlamaForCausalLM(CONFIG).double(), config).double())
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = optimizer if mesh is None else mw.shard_optimizer(optimizer)
    losses = []
    with contextlib.nullcontext() if mesh else mw.reproducible_random():
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {name: mw.unshard(t) for name, t in peft.get_peft_model_state_dict(model).items()}


def test_adapters() -> None:
    losses, weights = adapted(None)
    for found, mine in mw.simulate(lambda: adapted(MESH), MESH):
        assert found == pytest.approx(losses, rel=1e-6)  # Llama computes its norms in float32
        assert mine.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled": {"do_sample": True, "top_p": 0.9, "temperature": 0.7},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def generated(mesh: mw.Mesh | None) -> dict[str, list[list[int]]]:
    torch.manual_seed(0)
    model, ids = placed(mesh, transformers.LlamaForCausalLM(CONFIG).double().eval())
    made = {}
    for way, options in WAYS.items():
        torch.manual_seed(3)
        made[way] = mw.unshard(model.generate(ids, max_new_tokens=6, pad_token_id=0, **options)).tolist()
    return made


def test_generate() -> None:
    expected = generated(None)
    for made in mw.simulate(lambda: generated(MESH), MESH):
        assert made == expected


def test_a_cache_that_is_returned_beside_the_loss_is_none_of_a_captured_step() -> None:
    """With the configuration that a model has by itself, and without a loss function."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip

    def new() -> torch.nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).double()

    ids = torch.randint(40, (4, 6), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    model = new()
    expected = model(**batch)
    assert expected.past_key_values is not None
    expected.loss.backward()
    table = mw.layouts(new(), MESH, batch)
    assert not [note for note in table.notes if "block by block" in note]

    def run() -> tuple[Any, Any]:
        mine = new()
        made = mw.compile_step(mine, None, None, batch, mesh=MESH, layouts=table, gradients=True)(batch)
        assert made.past_key_values is None
        return mw.unshard(made.loss), {n: mw.unshard(p.grad) for n, p in mine.named_parameters()}

    for found in mw.simulate(run, MESH):
        torch.testing.assert_close(found, (expected.loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
