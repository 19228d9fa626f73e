"""Checkpointed regions: the calls of ``torch.utils.checkpoint`` that nodes of a program are part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.utils.checkpoint as eager
from torch.utils.checkpoint import CheckpointPolicy

from ...compat import selective_context
from ...errors import CaptureError
from ...layout import Shard

_SAVED = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True}
_AGAIN = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE, False}


@dataclass(frozen=True, eq=False)
class Region:
    """One checkpointed call.

    Attributes:
        number: no other call of the step has it.
        policy: of a selective checkpoint: which ops are saved; None: none is.
        split: axis to how what it reads is kept for the backward (``mw.shard_checkpoint_inputs``); empty: as it lies.
    """

    number: int
    policy: Callable[..., Any] | None = None
    split: Mapping[str, Shard] = field(default_factory=dict)

    def saves(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether what an op gives is kept for the backward.

        Raises:
            CaptureError: the policy wants what a program cannot do.
        """
        if self.policy is None or func in eager.SAC_IGNORED_OPS:
            return False
        said = self.policy(selective_context(out), func, *args, **kwargs)
        if said not in _SAVED | _AGAIN:
            raise CaptureError(
                f"the policy of a selective checkpoint says {said} of {func}: a captured step saves or recomputes"
            )
        return said in _SAVED


Path = tuple[Region, ...]  # of nested calls, from the outside


__all__ = ["Path", "Region"]
