"""Models that this project did not write, unchanged: loss, gradients and buffers equal the single device's.

The configurations are tiny and random; nothing is downloaded.  Several of these models compute norms in float32
whatever the dtype, so their tolerance is that of float32.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright import collective
from meshwright.errors import CaptureError
from meshwright.program.compile import compile_step

transformers = pytest.importorskip("transformers", reason="the oracle is the transformers library")

COLUMN, ROW = {"tp": mw.Shard(0)}, {"tp": mw.Shard(1)}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VOCABULARY = 64


def llama() -> Any:
    config = transformers.LlamaConfig(
        **SMALL, vocab_size=VOCABULARY, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64
    )
    columns = ("*embed_tokens.weight", "*q_proj.*", "*k_proj.*", "*v_proj.*", "*gate_proj.*", "*up_proj.*", "lm_head.*")
    return transformers.LlamaForCausalLM(config), dict.fromkeys(columns, COLUMN) | dict.fromkeys(
        ("*o_proj.*", "*down_proj.*"), ROW
    )


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    # GPT-2's Conv1D keeps weights transposed: columns are dim 1.
    return transformers.GPT2LMHeadModel(config), {
        "*mlp.c_fc.weight": ROW, "*mlp.c_fc.bias": COLUMN, "*mlp.c_proj.weight": COLUMN,
    }  # fmt: skip


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, **QUIET, vocab_size=VOCABULARY, intermediate_size=64)
    columns = ("*query.*", "*key.*", "*value.*", "*intermediate.dense.*")
    rows = ("*attention.output.dense.weight", "bert.encoder.layer.?.output.dense.weight")
    return transformers.BertForMaskedLM(config), dict.fromkeys(columns, COLUMN) | dict.fromkeys(rows, ROW)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL, vocab_size=VOCABULARY, intermediate_size=48, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, experts_implementation="eager",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {}


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    columns, rows = ("*.q.weight", "*.k.weight", "*.v.weight", "*.wi.weight"), ("*.o.weight", "*.wo.weight")
    return transformers.T5ForConditionalGeneration(config), dict.fromkeys(columns, COLUMN) | dict.fromkeys(rows, ROW)


def vit() -> Any:
    config = transformers.ViTConfig(**SMALL, **QUIET, intermediate_size=64, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config), dict.fromkeys(
        ("*q_proj.*", "*k_proj.*", "*v_proj.*"), COLUMN
    )


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config), {}


EXACT, FLOAT32 = 1e-12, 2e-6
MODELS = {llama: FLOAT32, gpt2: FLOAT32, bert: EXACT, mixtral: FLOAT32, t5: FLOAT32, vit: EXACT, resnet: EXACT}


def batch(make: Any) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    if make in (vit, resnet):
        side = 16 if make is vit else 32
        return {
            "pixel_values": torch.randn(6, 3, side, side, generator=g),
            "labels": torch.randint(0, 5, (6,), generator=g),
        }
    ids = torch.randint(0, VOCABULARY, (6, 12), generator=g)
    mask = torch.ones(6, 12, dtype=torch.long)
    mask[1, 8:] = 0
    mask[4, 5:] = 0
    labels = ids.clone() if make is t5 else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@functools.cache
def single(make: Any) -> Any:
    torch.manual_seed(0)
    model = make()[0].train()
    loss = model(**batch(make)).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, dict(model.named_buffers())


@pytest.fixture(autouse=True)
def float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def assert_equals(make: Any, got: torch.Tensor, found: dict[str, Any], held: dict[str, Any]) -> None:
    loss, grads, buffers = single(make)
    tolerance = MODELS[make]
    assert abs(got - loss) <= tolerance * abs(loss)
    assert found.keys() == grads.keys()
    largest = max(g.norm() for g in grads.values())
    for name, want in grads.items():
        assert (found[name] - want).norm() <= tolerance * max(want.norm(), 1e-3 * largest), name
    for name, want in buffers.items():
        torch.testing.assert_close(held[name], want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 3, "tp": 1}, {"dp": 1, "tp": 4}], ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda m: m.__name__)
@pytest.mark.thin(2)
def test_equals_one_device(make: Any, axes: dict[str, int]) -> None:
    mesh = mw.Mesh(axes)

    def run() -> Any:
        torch.manual_seed(0)
        model, layouts = make()
        mw.shard_module(model.train(), mesh, layouts)
        given = {k: mw.shard_tensor(v, mesh, {"dp": mw.Shard(0)}, check=False) for k, v in batch(make).items()}
        with collective.counting() as counts:
            made = model(**given).loss
            made.backward()
        found = {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return mw.unshard(made.detach()), found, {n: mw.unshard(b) for n, b in model.named_buffers()}, counts

    for got, found, held, counts in mw.simulate(run, mesh, timeout=300):
        assert_equals(make, got, found, held)
        if axes["tp"] == 1 and make in (vit, resnet):
            assert set(counts.kinds) == {"all_reduce"}  # data parallel: nothing but sums


@pytest.mark.thin(6)
@pytest.mark.filterwarnings("ignore:.*has no rule")
@pytest.mark.parametrize("make", [m for m in MODELS if m is not mixtral], ids=lambda m: m.__name__)
def test_captured_equals_one_device(make: Any) -> None:
    mesh = mw.Mesh({"dp": 2, "tp": 2})

    def run() -> Any:
        torch.manual_seed(0)
        model, layouts = make()
        model.train()
        step = compile_step(
            model, lambda m, b: m(**b).loss, None, batch(make), mesh=mesh, layouts=layouts,
            batch={"dp": mw.Shard(0)}, gradients=True,
        )  # fmt: skip
        loss = step(batch(make))
        found = {n: mw.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        return mw.unshard(loss), found, {n: mw.unshard(b) for n, b in model.named_buffers()}

    for got, found, held in mw.simulate(run, mesh, timeout=300):
        assert_equals(make, got, found, held)


def test_what_depends_on_values_is_not_captured() -> None:
    model = mixtral()[0]  # loops over the experts that some token chose
    with pytest.raises(CaptureError, match=r"MixtralForCausalLM cannot be captured: .*value.*modeling_mixtral.py:\d+"):
        compile_step(model, lambda m, b: m(**b).loss, None, batch(mixtral), mesh=mw.Mesh({"dp": 1}))
