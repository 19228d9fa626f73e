"""Families of diffusers, built tiny: the sizes of each, and what it is called with.

Their classes share no names of sizes, and no auto class builds them, so each has its own here; for ``mw.layouts`` none
has.  The loss is the mean square of what a model gives against a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

Tensor = torch.Tensor
ROWS, TEXT, WIDTH = 4, 5, 24
_UNET = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "block_out_channels": (12, 24), "layers_per_block": 1,
         "norm_num_groups": 6, "attention_head_dim": 4}  # fmt: skip
_CROSS = _UNET | {
    "cross_attention_dim": WIDTH,
    "attention_head_dim": 6,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_VAE = {"in_channels": 3, "out_channels": 3, "block_out_channels": (12, 24), "layers_per_block": 1,
        "norm_num_groups": 6, "latent_channels": 6, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_DIT = {"num_attention_heads": 6, "attention_head_dim": 4, "in_channels": 4, "sample_size": 8, "patch_size": 2,
        "num_layers": 1, "norm_num_groups": 6, "dropout": 0.0}  # fmt: skip
_IMAGE, _LATENT, _WORDS, _TIME = (3, 8, 8), (4, 8, 8), (TEXT, WIDTH), ()


@dataclass(frozen=True)
class Family:
    """One class of diffusers.

    Attributes:
        sizes: what it is built with.
        inputs: name of an argument to the shape of it after the rows: floats, but for numbers, which count time steps
            or classes.
        more: arguments that are no tensors of rows.
    """

    cls: str
    sizes: dict[str, Any]
    inputs: dict[str, tuple[int, ...]]
    more: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "unet2d": Family("UNet2DModel", _UNET | {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")
    }, {"sample": _IMAGE, "timestep": _TIME}),
    "unet2d_condition": Family("UNet2DConditionModel", _CROSS, {
        "sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _WORDS,
    }),
    "controlnet": Family("ControlNetModel", {k: v for k, v in _CROSS.items() if k not in (
        "sample_size", "out_channels", "up_block_types")} | {"conditioning_embedding_out_channels": (6, 12)}, {
        "sample": _IMAGE, "timestep": _TIME, "encoder_hidden_states": _WORDS, "controlnet_cond": (3, 16, 16),
    }),
    "dit": Family("DiTTransformer2DModel", _DIT | {"out_channels": 8, "num_embeds_ada_norm": 10}, {
        "hidden_states": _LATENT, "timestep": _TIME, "class_labels": _TIME,
    }),
    "transformer2d": Family("Transformer2DModel", {
        "num_attention_heads": 6, "attention_head_dim": 4, "in_channels": 12, "num_layers": 1, "norm_num_groups": 6,
        "cross_attention_dim": WIDTH,
    }, {"hidden_states": (12, 4, 4), "encoder_hidden_states": _WORDS}),
    "pixart": Family("PixArtTransformer2DModel", _DIT | {
        "out_channels": 8, "cross_attention_dim": WIDTH, "caption_channels": WIDTH, "use_additional_conditions": False,
    }, {"hidden_states": _LATENT, "encoder_hidden_states": _WORDS, "timestep": _TIME},
        {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}),
    "sd3": Family("SD3Transformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 4,
        "num_attention_heads": 6, "joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH,
        "pooled_projection_dim": 12, "out_channels": 4, "pos_embed_max_size": 8,
    }, {"hidden_states": _LATENT, "encoder_hidden_states": _WORDS, "pooled_projections": (12,), "timestep": _TIME}),
    "flux": Family("FluxTransformer2DModel", {
        "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 4,
        "num_attention_heads": 6, "joint_attention_dim": WIDTH, "pooled_projection_dim": 12,
        "axes_dims_rope": (0, 2, 2),
    }, {"hidden_states": (16, 4), "encoder_hidden_states": _WORDS, "pooled_projections": (12,), "timestep": _TIME},
        {"txt_ids": torch.zeros(TEXT, 3), "img_ids": torch.stack([torch.arange(16) // 4 * i for i in range(3)], 1)}),
    "aura_flow": Family("AuraFlowTransformer2DModel", {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 4, "num_attention_heads": 6, "joint_attention_dim": WIDTH,
        "caption_projection_dim": WIDTH, "out_channels": 4, "pos_embed_max_size": 16,
    }, {"hidden_states": _LATENT, "encoder_hidden_states": _WORDS, "timestep": _TIME}),
    "sana": Family("SanaTransformer2DModel", {
        "sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1,
        "num_attention_heads": 6, "attention_head_dim": 4, "num_cross_attention_heads": 6,
        "cross_attention_head_dim": 4, "cross_attention_dim": WIDTH, "caption_channels": WIDTH,
    }, {"hidden_states": _LATENT, "encoder_hidden_states": _WORDS, "timestep": _TIME}),
    "prior": Family("PriorTransformer", {
        "num_attention_heads": 6, "attention_head_dim": 4, "num_layers": 1, "embedding_dim": WIDTH,
        "num_embeddings": TEXT, "additional_embeddings": 4,
    }, {"hidden_states": (WIDTH,), "timestep": _TIME, "proj_embedding": (WIDTH,), "encoder_hidden_states": _WORDS}),
    "autoencoder_kl": Family("AutoencoderKL", _VAE, {"sample": (3, 16, 16)}),
    "vq": Family("VQModel", _VAE | {"num_vq_embeddings": 12}, {"sample": (3, 16, 16)}),
    "autoencoder_tiny": Family("AutoencoderTiny", {
        "encoder_block_out_channels": (12, 12), "decoder_block_out_channels": (12, 12), "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1), "latent_channels": 6,
    }, {"sample": (3, 16, 16)}),
}  # fmt: skip


def built(name: str) -> nn.Module:
    """The family's model, in training mode, its weights large enough that every layer counts in the loss."""
    import diffusers

    family = FAMILIES[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, family.cls)(**family.sizes)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1 and p.std() < 0.05:
                p.normal_(std=0.15)
            elif p.ndim == 1 and not p.any():
                p.normal_(std=0.1)
    return model.train()


def batch_of(name: str) -> dict[str, Tensor]:
    """A batch for one device."""
    g = torch.Generator().manual_seed(1)
    return {
        k: torch.randn(ROWS, *shape, generator=g) if shape else torch.randint(1, 10, (ROWS,), generator=g)
        for k, shape in FAMILIES[name].inputs.items()
    }


def loss_of(name: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean square of each result against a constant."""
    made = model(**batch, **FAMILIES[name].more, return_dict=False)
    found: list[Tensor] = []
    for part in made:
        found += [t for t in ([part] if isinstance(part, Tensor) else part) if t.is_floating_point()]
    return torch.stack([(t - 0.5).square().mean() for t in found]).sum()
