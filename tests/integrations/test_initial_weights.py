"""Models of Transformers from the meta device: initial weights of one device, or those of their files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import meshwright as mw
from meshwright.errors import ShardError
from meshwright.shard.initialization.recording import unrecorded
from tests.support import fresh

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
DP = mw.Mesh({"dp": 2})
THREE = mw.Mesh({"dp": 3})

_SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
_T = transformers
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _T.LlamaForCausalLM(_T.LlamaConfig(**_SMALL, vocab_size=11, tie_word_embeddings=True)),
    "gpt2": lambda: _T.AutoModelForCausalLM.from_config(
        _T.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=9)
    ),
    "mixtral": lambda: _T.AutoModelForCausalLM.from_config(
        _T.MixtralConfig(**_SMALL, vocab_size=11, num_key_value_heads=1, num_local_experts=3)
    ),
    "bert": lambda: _T.BertForSequenceClassification(_T.BertConfig(**_SMALL, vocab_size=11, pad_token_id=0)),
    "t5": lambda: _T.T5ForConditionalGeneration(
        _T.T5Config(d_model=8, d_ff=12, d_kv=4, num_layers=1, num_heads=2, vocab_size=11)
    ),
    "vit": lambda: _T.ViTForImageClassification(_T.ViTConfig(**_SMALL, image_size=8, patch_size=4)),
    "clip": lambda: _T.CLIPModel(
        _T.CLIPConfig(
            text_config={**_SMALL, "vocab_size": 11}, vision_config={**_SMALL, "image_size": 8, "patch_size": 4}
        )
    ),
    "within": lambda: nn.Sequential(nn.Linear(3, 3), FAMILIES["gpt2"](), nn.Linear(3, 3)),
}


def seeded(make: Callable[[], nn.Module]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(3)
    model = make()
    return {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}, torch.rand(3)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: mw.unshard(t.detach()) for n, t in (*model.named_parameters(), *model.named_buffers())}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    differ = [n for n in want if not torch.equal(got[n], want[n])]
    assert not differ, differ


WEIGHTS = {"*weight": {"dp": mw.Shard(0)}}


@pytest.mark.parametrize("mesh", [DP, THREE], ids=["even", "uneven"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_model_has_the_initial_weights_of_one_device(family: str, mesh: mw.Mesh) -> None:
    want, after = seeded(FAMILIES[family])

    def run() -> None:
        with torch.device("meta"):
            model = FAMILIES[family]()
        torch.manual_seed(3)
        mw.shard_module(model, mesh, WEIGHTS)
        assert_same(values(model), want)
        assert torch.equal(torch.rand(3), after), "the generator ends where that of one device does"

    mw.simulate(run, mesh)


def seen_by(model: nn.Module, name: str) -> float:
    return values(model)[name].std().item()


def test_models_that_were_not_recorded_run_the_initialisation_of_the_library() -> None:
    config = _T.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=11, n_positions=9, initializer_range=0.5)
    with unrecorded(), torch.device("meta"):
        before = _T.GPT2LMHeadModel(config)

    def run() -> None:
        model = copy.deepcopy(before)
        mw.shard_module(model, DP, WEIGHTS)
        assert 0.45 < seen_by(model, "transformer.h.0.attn.c_attn.weight") < 0.55
        assert 0.22 < seen_by(model, "transformer.h.0.attn.c_proj.weight") < 0.28, "over sqrt(2 layers), by its parent"
        with accelerate.init_empty_weights():
            model = _T.GPT2LMHeadModel(config)
        with pytest.raises(
            ShardError, match=r"wte\.weight and lm_head\.weight are two tensors of one memory.*tie_weights\(\)"
        ):
            mw.shard_module(model, DP, WEIGHTS)
        with accelerate.init_empty_weights():
            model = FAMILIES["bert"]()
        mw.shard_module(model, DP, WEIGHTS)
        assert all(0.01 < seen_by(model, n) < 0.03 for n in values(model) if n.endswith("dense.weight"))

    mw.simulate(run, DP)


class Measured(_T.PreTrainedModel):
    config_class = _T.PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.w = nn.Parameter(torch.ones(4))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        self.w.data.fill_(self.w.sum().item())


def test_an_initialisation_that_reads_values_is_an_error_with_a_fix() -> None:
    def run() -> None:
        with torch.device("meta"):
            model, loaded = Measured(_T.PretrainedConfig()), Measured(_T.PretrainedConfig())
        with pytest.raises(ShardError, match=r"Measured.initialize_weights: .*\. Build the model on the CPU"):
            mw.shard_module(model, DP)
        mw.shard_module(loaded, DP, init="load")

    mw.simulate(run, DP)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_saved_models_come_back(family: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    one = FAMILIES[family]().eval()
    one.save_pretrained(tmp_path)
    want = {n: t.detach() for n, t in (*one.named_parameters(), *one.named_buffers())}
    ids = torch.arange(6).reshape(3, 2)
    logits = one(ids).logits.detach()

    def run() -> None:
        with torch.device("meta"):
            loaded = type(one)(one.config)
        mw.shard_module(loaded, DP, WEIGHTS, init="load")
        with pytest.raises(ShardError, match="nothing has written"):
            loaded(ids)
        mw.load_weights(loaded, tmp_path)
        read = type(one).from_pretrained(tmp_path)
        for model in (loaded, mw.shard_module(read, DP, WEIGHTS)):
            assert_same(values(model), want)
            assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
            got = model.eval()(mw.shard_tensor(ids, DP, {"dp": mw.Shard(0)})).logits
            torch.testing.assert_close(mw.unshard(got.detach()), logits)

    mw.simulate(run, DP)


def test_keys_that_files_lack_are_initialised_by_from_pretrained(tmp_path: Path) -> None:
    config = _T.BertConfig(**_SMALL, vocab_size=11, initializer_range=9.0)
    _T.BertModel(config).save_pretrained(tmp_path)

    def run() -> None:
        model = _T.BertForSequenceClassification.from_pretrained(tmp_path, num_labels=40)
        assert seen_by(model, "classifier.weight") > 5.0
        assert seen_by(model, "classifier.bias") == 0.0

    mw.simulate(run, DP)


FIRST = """
import sys, torch, transformers, meshwright as mw
mw.Mesh({"dp": 2})
config = transformers.LlamaConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1])
again = transformers.LlamaForCausalLM.from_pretrained(sys.argv[1])
assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq), again.model.rotary_emb.inv_freq
"""


def test_the_first_from_pretrained_of_a_process_fills_its_buffers(tmp_path: Path) -> None:
    """A mesh may be there before the library's models are imported."""
    fresh.run(f"import sys; sys.argv.append({str(tmp_path)!r})\n{FIRST}")
