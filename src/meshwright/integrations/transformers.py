"""``import meshwright.integrations.transformers``: models of Hugging Face's library take ops of this package.

    config._experts_implementation = "meshwright"      # or model.set_experts_implementation("meshwright")
    model.set_attn_implementation("meshwright")        # or attn_implementation="meshwright" where it is made
    set_recurrences(model)                             # of gated delta rules (Qwen3-Next and its kind)

From then on an expert layer of theirs with experts split, ``{"*.experts.*": {"ep": mw.Shard(0)}}``, computes on each
rank the tokens of its own experts (:func:`meshwright.experts`); and attention of a split sequence makes no mask, nor
does that of packed documents, which ``position_ids`` that start again tell, or of sliding windows
(:func:`meshwright.attention`); eagerly and in captured steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import DispatchError, extra
from ..rules.documents import attention
from ..rules.experts import experts
from ..rules.recurrence import gated_delta_rule

Tensor = torch.Tensor


def experts_forward(self: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The forward of an expert layer: ``self`` has its weights, and says how they lie in memory.

    Raises:
        DispatchError: the layer normalises what its experts give, which the op does not.
    """
    if getattr(self, "has_post_expert_norm", False):
        kind = type(self).__name__
        raise DispatchError(f"{kind} has a norm after its experts: set_experts_implementation('grouped_mm')")
    first = "gate_up_proj" if self.has_gate else "up_proj"
    up, down = getattr(self, first), self.down_proj
    if self.is_transposed:
        up, down = up.transpose(-1, -2), down.transpose(-1, -2)
    named = {}
    if self.has_bias:
        named = {"gate_up_bias": getattr(self, f"{first}_bias"), "down_bias": self.down_proj_bias}
    plain = not self.has_gate or type(self)._apply_gate is getattr(_moe, "_default_apply_gate", None)
    act = _NAMES.get(type(self.act_fn).__name__) if plain else None
    if act is None:
        act = self._apply_gate if self.has_gate else self.act_fn
    return experts(hidden_states, ids, weights, up, down, act, **named)


_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu"}  # of those that have kernels
_moe = extra("transformers.integrations.moe", "hf", "meshwright.integrations.transformers")
_moe.ALL_EXPERTS_FUNCTIONS.register("meshwright", experts_forward)


# ---------------------------------------------------------------------------------------------- attention

_sdpa = extra("transformers.integrations.sdpa_attention", "hf", "meshwright.integrations.transformers")
_masks = extra("transformers.masking_utils", "hf", "meshwright.integrations.transformers")
_models = extra("transformers.modeling_utils", "hf", "meshwright.integrations.transformers")


class Pattern(NamedTuple):
    """What a mask function of theirs lets a query see, where that is one of what :func:`meshwright.attention` has."""

    causal: bool = False
    documents: Tensor | None = None


def pattern_of(fn: Callable[..., Any]) -> Pattern | None:
    """Read a mask function: causal, in windows, in packed documents, or all of these; None for any other."""
    if fn is _masks.causal_mask_function:
        return Pattern(causal=True)
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", "")
    if code is None or getattr(fn, "__module__", "") != _masks.__name__:
        return None
    held = {n: c.cell_contents for n, c in zip(code.co_freevars, fn.__closure__ or (), strict=True)}
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Pattern()  # how many keys, the layers say
    if name == "packed_sequence_mask_function.<locals>.inner_mask":
        return Pattern(documents=held["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return pattern_of(held["mask_function"])
    if name != "and_masks.<locals>.and_mask":
        return None
    found = [pattern_of(part) for part in held["mask_functions"]]
    if any(part is None for part in found):
        return None
    documents = [part.documents for part in found if part is not None and part.documents is not None]
    if len(documents) > 1:
        return None
    return Pattern(any(part.causal for part in found if part is not None), *documents)


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = _masks.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **more: Any,
) -> Tensor | None:
    """What stands for the mask in a model's layers: None, the documents of a packed batch, (b, t), or a mask."""
    found, whole = pattern_of(mask_function), q_length == kv_length and q_offset is not None
    whole = whole and not isinstance(q_offset, Tensor) and (q_offset, kv_offset) == (0, 0)
    if attention_mask is not None:  # of padding: where nothing is hidden, there is none
        whole = whole and not torch.compiler.is_exporting() and bool(attention_mask.all())
    told = found is not None and found.causal and (found.documents is not None or allow_is_causal_skip)
    if found is not None and told and whole:
        return found.documents
    made: Tensor | None = _masks.sdpa_mask(
        q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **more,
    )  # fmt: skip
    return made


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, of which ``attention_mask`` is what :func:`attention_mask` gave.

    Raises:
        DispatchError: the layer asks for more than the op has (capped scores, sinks), or does not say its window.
    """
    kind, config = type(module).__name__, getattr(module, "config", None)
    for name in ("softcap", "s_aux", "position_bias", "cache"):
        if more.get(name) is not None:
            raise DispatchError(f"{kind} asks its attention for {name}: set_attn_implementation('eager')")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    packed = attention_mask is not None and attention_mask.ndim == 2
    if not causal or query.shape[2] != key.shape[2] or (attention_mask is not None and not packed):
        made: tuple[Tensor, None] = _sdpa.sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
        )
        return made
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types and index is not None and "sliding" in types[index] and sliding_window is None:
        raise DispatchError(f"{kind} does not tell its window to its attention: set_attn_implementation('sdpa')")
    window = sliding_window if sliding_window is not None and sliding_window < query.shape[2] else None
    y = attention(
        query, key, value, document_ids=attention_mask, window=window, dropout_p=dropout, scale=scaling
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None


_models.ALL_ATTENTION_FUNCTIONS.register("meshwright", attention_forward)
_masks.ALL_MASK_ATTENTION_FUNCTIONS.register("meshwright", attention_mask)


# ---------------------------------------------------------------------------------------------- recurrences

_RULE = "torch_chunk_gated_delta_rule"


def set_recurrences(model: Any) -> None:
    """Let layers with a gated delta rule compute a split sequence part by part, at once.

    Their library's own loop goes from chunk to chunk, each of which comes whole to all ranks.  The function is one of
    the module that a layer's class is in, so this goes for all models of the family; what is neither distributed nor
    captured takes the library's own as before, and so does a call with a state to begin with or to be kept (train with
    ``use_cache=False``).

    Raises:
        DispatchError: the model has no such layer.
    """
    modules = [sys.modules[type(m).__module__] for m in model.modules()]
    having = [m for m in dict.fromkeys(modules) if hasattr(m, _RULE)]
    if not having:
        raise DispatchError(f"{type(model).__name__} has no gated delta rule that is known here: leave it as it is")
    for module in having:
        theirs = getattr(module, _RULE)
        if not hasattr(theirs, "_of_library"):
            setattr(module, _RULE, _delta_rule(theirs))


def _delta_rule(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def ours(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        plain = not torch.compiler.is_exporting() and not any(hasattr(x, "_spec") for x in (query, key, value, g, beta))
        if plain or initial_state is not None or output_final_state or more.get("cu_seqlens") is not None:
            made: tuple[Tensor, Tensor | None] = theirs(
                query, key, value, g, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                **more,
            )  # fmt: skip
            return made
        serves, wide = value.shape[2] // key.shape[2], torch.promote_types(query.dtype, torch.float32)
        query, key = (x.repeat_interleave(serves, dim=2) if serves > 1 else x for x in (query, key))
        q, k = query.to(wide), key.to(wide)
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        y = gated_delta_rule(q * q.shape[-1] ** -0.5, k, value.to(wide), g.to(wide), beta.to(wide), chunk_size)
        return y.to(query.dtype), None

    ours._of_library = theirs  # type: ignore[attr-defined]
    return ours
