"""``import meshwright.integrations.transformers``: models of Hugging Face's library take :func:`meshwright.experts`.

    config._experts_implementation = "meshwright"      # or model.set_experts_implementation("meshwright")

From then on an expert layer of theirs with experts split, ``{"*.experts.*": {"ep": mw.Shard(0)}}``, computes on each
rank the tokens of its own experts, eagerly and in captured steps.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DispatchError, extra
from ..rules.experts import experts


def experts_forward(self: Any, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
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
    return experts(hidden_states, ids, weights, up, down, self._apply_gate if self.has_gate else self.act_fn, **named)


extra("transformers.integrations.moe", "hf", "meshwright.integrations.transformers").ALL_EXPERTS_FUNCTIONS.register(
    "meshwright", experts_forward
)
