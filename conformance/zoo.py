"""Models that this project did not write, tiny and random, with batches, losses and plans; nothing is downloaded.

Sizes are such that two and three ranks do not divide all of them.  Nothing drops out: one device gives the numbers.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from doubled import float64

import meshwright as mw

Tensor = torch.Tensor
Batch = dict[str, Tensor]
VOCABULARY, ROWS, LENGTH = 50, 5, 10
LLAMA = (
    ("*embed_tokens.weight", "*q_proj.*", "*k_proj.*", "*v_proj.*", "*gate_proj.*", "*up_proj.*", "lm_head.*"),
    ("*o_proj.weight", "*down_proj.weight"),
)


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """What the model computes from its labels."""
    return model(**batch).loss


def square(name: str) -> Callable[[nn.Module, Batch], Tensor]:
    """The mean square of one of the model's results."""
    return lambda model, batch: getattr(model(**batch), name).square().mean()


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        make: the model; ``batch``: its inputs, drawn from a generator.
        columns, rows: globs of weights that Megatron's plan splits by outputs and by inputs.
        loss: of model and batch.
        uncaptured: why a step of it cannot be captured; empty where it can.
        exact: in float64; False where an op is float32 only.
        needs: the package that it comes from.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss
    uncaptured: str = ""
    exact: bool = True
    needs: str = "transformers"

    def build(self) -> nn.Module:
        """The model in training mode, its weights large enough that every layer counts in the loss."""
        model = self.make().train()
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim > 1 and 0 < p.std() < 0.05:
                    p.mul_(0.15 / p.std())
        return model


# ------------------------------------------------------------------------------------------------- batches


def text(g: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 7:] = 0
    mask[4, 4:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def text_to_text(g: torch.Generator) -> Batch:
    return text(g) | {"labels": torch.randint(3, VOCABULARY, (ROWS, 7), generator=g)}


def image(side: int, classes: int = 5) -> Callable[[torch.Generator], Batch]:
    def made(g: torch.Generator) -> Batch:
        labels = {"labels": torch.randint(0, classes, (ROWS,), generator=g)} if classes else {}
        return {"pixel_values": torch.randn(ROWS, 3, side, side, generator=g), **labels}

    return made


def sound(g: torch.Generator) -> Batch:
    mask = torch.ones(ROWS, 400, dtype=torch.long)
    mask[2, 300:] = 0
    labels = torch.randint(1, 12, (ROWS, 5), generator=g)
    labels[3, 3:] = -100
    return {"input_values": torch.randn(ROWS, 400, generator=g), "attention_mask": mask, "labels": labels}


def unlabelled(g: torch.Generator) -> Batch:
    return {k: v for k, v in sound(g).items() if k != "labels"}


# ------------------------------------------------------------------------------------------------- models


def transformers() -> Any:
    import transformers

    return transformers


def decoder(name: str, **more: Any) -> Callable[[], nn.Module]:
    """A decoder of transformers, by the beginning of its name."""

    def made() -> nn.Module:
        given: dict[str, Any] = {
            "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
            "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 32,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        config = getattr(transformers(), f"{name.removesuffix('Text')}{'Text' * name.endswith('Text')}Config")
        config = config(**given | more)
        return getattr(transformers(), f"{name.removesuffix('Text')}ForCausalLM")(config)

    return made


def gpt2() -> nn.Module:
    return transformers().GPT2LMHeadModel(
        transformers().GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=24, n_layer=1, n_head=6, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def falcon() -> nn.Module:
    return transformers().FalconForCausalLM(
        transformers().FalconConfig(
            vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, attention_dropout=0.0,
            hidden_dropout=0.0, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def bloom() -> nn.Module:
    return transformers().BloomForCausalLM(
        transformers().BloomConfig(
            vocab_size=VOCABULARY, hidden_size=24, n_layer=1, n_head=6, hidden_dropout=0.0, attention_dropout=0.0
        )
    )


def mamba() -> nn.Module:
    return transformers().MambaForCausalLM(
        transformers().MambaConfig(
            vocab_size=VOCABULARY, hidden_size=15, state_size=4, num_hidden_layers=1, time_step_rank=3, pad_token_id=0,
            use_mambapy=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    return transformers().BertForMaskedLM(
        transformers().BertConfig(
            vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, intermediate_size=40,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    return transformers().T5ForConditionalGeneration(
        transformers().T5Config(
            vocab_size=VOCABULARY, d_model=24, d_kv=5, d_ff=40, num_layers=2, num_heads=6, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def whisper() -> nn.Module:
    return transformers().WhisperForConditionalGeneration(
        transformers().WhisperConfig(
            vocab_size=VOCABULARY, num_mel_bins=10, d_model=24, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=40, decoder_ffn_dim=40, dropout=0.0,
            max_source_positions=11, max_target_positions=16, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
        )
    )  # fmt: skip


def spectrogram(g: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(ROWS, 10, 22, generator=g),
        "labels": torch.randint(3, VOCABULARY, (ROWS, 7), generator=g),
    }


def clip() -> nn.Module:
    tower = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 6,
        "projection_dim": 15,
    }  # fmt: skip
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    return transformers().CLIPModel(
        transformers().CLIPConfig(
            text_config=tower | words, vision_config=tower | {"image_size": 12, "patch_size": 4}, projection_dim=15
        )
    )


def captions(g: torch.Generator) -> Batch:
    words = text(g)
    return {
        "input_ids": words["input_ids"],
        "attention_mask": words["attention_mask"],
        "pixel_values": torch.randn(ROWS, 3, 12, 12, generator=g),
    }


def vit() -> nn.Module:
    return transformers().ViTForImageClassification(
        transformers().ViTConfig(
            hidden_size=24, num_hidden_layers=1, num_attention_heads=6, intermediate_size=40, image_size=12,
            patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def resnet() -> nn.Module:
    return transformers().ResNetForImageClassification(
        transformers().ResNetConfig(
            embedding_size=8, hidden_sizes=[10, 15], depths=[1, 1], layer_type="basic", num_labels=5
        )
    )


def convnext() -> nn.Module:
    return transformers().ConvNextForImageClassification(
        transformers().ConvNextConfig(hidden_sizes=[8, 15], depths=[1, 2], num_stages=2, num_labels=5)
    )


def segformer() -> nn.Module:
    return transformers().SegformerForSemanticSegmentation(
        transformers().SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[12, 18], patch_sizes=[7, 3],
            strides=[4, 2], num_attention_heads=[1, 3], mlp_ratios=[2, 2], decoder_hidden_size=15, num_labels=5,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
        )
    )  # fmt: skip


def scene(g: torch.Generator) -> Batch:
    labels = torch.randint(0, 5, (ROWS, 24, 24), generator=g)
    labels[0, :4] = 255
    return {"pixel_values": torch.randn(ROWS, 3, 24, 24, generator=g), "labels": labels}


def sam() -> nn.Module:
    t = transformers()
    vision = t.SamVisionConfig(
        hidden_size=24, output_channels=12, num_hidden_layers=2, num_attention_heads=6, image_size=32, patch_size=4,
        window_size=3, global_attn_indexes=[1], mlp_dim=40, num_pos_feats=6,
    )  # fmt: skip
    prompt = t.SamPromptEncoderConfig(hidden_size=12, image_size=32, patch_size=4, mask_input_channels=4)
    mask = t.SamMaskDecoderConfig(
        hidden_size=12, mlp_dim=20, num_hidden_layers=1, num_attention_heads=3, attention_downsample_rate=2,
        iou_head_depth=2, iou_head_hidden_dim=14,
    )  # fmt: skip
    mask.attention_downsample_rate = 1
    return t.SamModel(t.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask))


def clicks(g: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=g),
        "input_points": torch.rand(ROWS, 1, 2, 2, generator=g) * 32,
        "input_labels": torch.randint(0, 2, (ROWS, 1, 2), generator=g),
    }


def unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(10, 20),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=5, attention_head_dim=5,
    )  # fmt: skip


def unet_conditioned() -> nn.Module:
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(10, 20),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=5, attention_head_dim=5, cross_attention_dim=12,
    )  # fmt: skip


def noisy(g: torch.Generator) -> Batch:
    return {
        "sample": torch.randn(ROWS, 3, 8, 8, generator=g),
        "timestep": torch.randint(0, 1000, (ROWS,), generator=g),
    }


def noisy_conditioned(g: torch.Generator) -> Batch:
    return noisy(g) | {"encoder_hidden_states": torch.randn(ROWS, 7, 12, generator=g)}


def deformable_detr() -> nn.Module:
    t = transformers()
    backbone = t.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 10, 15],
        depths=[1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3"],
    )
    return t.DeformableDetrForObjectDetection(
        t.DeformableDetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
            d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=7, num_feature_levels=2, encoder_n_points=2,
            decoder_n_points=2, num_labels=5, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, disable_custom_kernels=True,
        )
    )  # fmt: skip


def boxes_and_classes(model: nn.Module, batch: Batch) -> Tensor:
    """In place of Hungarian matching, which needs scipy."""
    found = model(**batch)
    return found.pred_boxes.square().mean() + found.logits.sigmoid().square().mean()


def wav2vec2() -> nn.Module:
    return transformers().Wav2Vec2ForCTC(
        transformers().Wav2Vec2Config(
            vocab_size=12, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, intermediate_size=40,
            conv_dim=(8, 10), conv_stride=(5, 4), conv_kernel=(10, 3), num_feat_extract_layers=2,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_prob=0.0, mask_feature_prob=0.0,
            layerdrop=0.0, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
            final_dropout=0.0, ctc_loss_reduction="mean", pad_token_id=0,
        )
    )  # fmt: skip


MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "decoder_sparse_step": 1}
EXPERTS = ("*experts.gate_up_proj", "*experts.down_proj")  # by expert
QKV = ("*q_proj.*", "*k_proj.*", "*v_proj.*")


def diffusion(build: Callable[[], nn.Module], batch: Callable[[torch.Generator], Batch]) -> Case:
    """A UNet of diffusers': convolutions in pairs, attention by heads."""
    columns, rows = ("*conv1.*", "*to_q.*", "*to_k.*", "*to_v.*"), ("*conv2.weight", "*to_out.0.weight")
    return Case(build, batch, columns, rows, square("sample"), needs="diffusers")


CASES: dict[str, Case] = {
    "llama": Case(decoder("Llama", head_dim=4), text, *LLAMA),
    "gpt2": Case(gpt2, text, ("*mlp.c_proj.weight", "*mlp.c_fc.bias"), ("*mlp.c_fc.weight",)),
    "bert": Case(
        bert,
        text,
        ("*query.*", "*key.*", "*value.*", "*intermediate.dense.*"),
        ("*attention.output.dense.weight", "bert.encoder.layer.?.output.dense.weight"),
    ),
    "t5": Case(
        t5, text_to_text, ("*.q.weight", "*.k.weight", "*.v.weight", "*.wi.weight"), ("*.o.weight", "*.wo.weight")
    ),
    "qwen3": Case(decoder("Qwen3", head_dim=8), text, *LLAMA),
    "qwen3-moe": Case(
        decoder("Qwen3Moe", head_dim=8, experts_implementation="batched_mm", **MOE),
        text,
        (*LLAMA[0], *EXPERTS),
        LLAMA[1],
    ),
    "qwen3-moe-grouped": Case(
        decoder("Qwen3Moe", head_dim=8, experts_implementation="grouped_mm", **MOE | {"moe_intermediate_size": 16}),
        text,
        (*LLAMA[0], *EXPERTS),
        LLAMA[1],
        exact=False,
    ),
    "qwen3-moe-loop": Case(
        decoder("Qwen3Moe", head_dim=8, experts_implementation="eager", **MOE),
        text,
        (*LLAMA[0], *EXPERTS),
        LLAMA[1],
        uncaptured="loops over the experts that tokens chose",
    ),
    "gemma2": Case(decoder("Gemma2", head_dim=8, sliding_window=4), text, *LLAMA),
    "gemma3": Case(
        decoder(
            "Gemma3Text",
            head_dim=8,
            sliding_window=4,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
        ),
        text,
        *LLAMA,
    ),
    "olmo2": Case(decoder("Olmo2"), text, *LLAMA),
    "cohere": Case(decoder("Cohere"), text, *LLAMA),
    "falcon": Case(
        falcon,
        text,
        ("*dense_h_to_4h.*", "*word_embeddings.weight", "*query_key_value.*"),
        ("*dense_4h_to_h.weight", "*attention.dense.weight"),
    ),
    "bloom": Case(
        bloom,
        text,
        ("*dense_h_to_4h.*", "*word_embeddings.weight", "*query_key_value.*"),
        ("*dense_4h_to_h.weight", "*attention.dense.weight"),
    ),
    "mamba": Case(
        mamba,
        text,
        ("*in_proj.weight", "*conv1d.*", "*A_log", "*mixer.D", "*dt_proj.*", "*embeddings.weight"),
        ("*out_proj.weight", "*x_proj.weight"),
    ),
    "whisper": Case(
        whisper, spectrogram, (*QKV, "*fc1.*", "*embed_tokens.weight"), ("*out_proj.weight", "*fc2.weight")
    ),
    "clip": Case(
        clip,
        captions,
        (*QKV, "*fc1.*", "*token_embedding.weight"),
        ("*out_proj.weight", "*fc2.weight"),
        lambda m, b: m(**b, return_loss=True).loss,
    ),
    "vit": Case(vit, image(12), (*QKV, "*fc1.*", "*intermediate.dense.*"), ("*o_proj.weight", "*fc2.weight")),
    "resnet": Case(resnet, image(16)),
    "convnext": Case(convnext, image(16), ("*pwconv1.*",), ("*pwconv2.weight",)),
    "segformer": Case(
        segformer,
        scene,
        ("*query.*", "*key.*", "*value.*", "*dense1.*"),
        ("*attention.output.dense.weight", "*dense2.weight"),
    ),
    "sam": Case(sam, clicks, ("*lin1.*", "*qkv.*", *QKV), ("*lin2.weight", "*out_proj.weight"), square("pred_masks")),
    "unet": diffusion(unet, noisy),
    "unet-conditioned": diffusion(unet_conditioned, noisy_conditioned),
    "deformable-detr": Case(
        deformable_detr,
        image(32, 0),
        ("*value_proj.*", "*fc1.*", "*sampling_offsets.*"),
        ("*output_proj.weight", "*fc2.weight"),
        boxes_and_classes,
        uncaptured="branches on whether values are finite",
    ),
    "wav2vec2": Case(
        wav2vec2,
        sound,
        (*QKV, "*intermediate_dense.*"),
        ("*out_proj.weight", "*output_dense.weight"),
        uncaptured="its loss looks at the values of the labels",
    ),
    "wav2vec2-frames": Case(
        wav2vec2,
        unlabelled,
        (*QKV, "*intermediate_dense.*"),
        ("*out_proj.weight", "*output_dense.weight"),
        square("logits"),
    ),
}


# ------------------------------------------------------------------------------------------------- plans


def columns(model: nn.Module) -> dict[str, Any]:
    """A newcomer's plan: every weight by its first dim."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    named = dict(model.named_parameters(remove_duplicate=False))
    weights = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, kinds)]
    return {n: {"tp": mw.Shard(0)} for n in weights if n in named}


def lone(model: nn.Module) -> dict[str, Any]:
    """One layer in the middle and nothing else, by its inputs."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {f"{names[len(names) // 2]}.weight": {"tp": mw.Shard(1)}}


def megatron(case: Case, model: nn.Module) -> dict[str, Any]:
    """Pairs of layers, the first by outputs and the second by inputs."""
    names = [n for n, _ in model.named_parameters()]
    sides = ((case.columns, mw.Shard(0)), (case.rows, mw.Shard(1)))
    return {g: {"tp": placement} for globs, placement in sides for g in globs if fnmatch.filter(names, g)}


def plan(kind: str, case: Case, model: nn.Module) -> Mapping[str, Any]:
    """Globs to placements."""
    if kind == "columns":
        return columns(model)
    return lone(model) if kind == "lone" else megatron(case, model)


PLANS = ("megatron", "columns", "lone", "zero")  # zero: Megatron's, stored over dp (ZeRO-3)


def arithmetic(case: Case) -> contextlib.AbstractContextManager[None]:
    """What a case is computed in."""
    case.make()  # imports its modules
    return float64() if case.exact else contextlib.nullcontext()
