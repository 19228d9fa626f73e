"""Whether a parameter has been written to since it was gathered."""

from __future__ import annotations

from typing import Any

import torch

from .. import compat

Tensor = torch.Tensor


def state_of(p: Tensor) -> tuple[int, int, Any]:
    """What changes when a tensor is written to, or could have been by a tensor that shares its memory."""
    return p._version, p.__dict__.get("_shared", 0), p._spec.layout  # type: ignore[attr-defined]


def aliased(p: Tensor) -> bool:
    """Whether writes to a tensor may go uncounted: somebody holds one that shares its memory (``p.data``)."""
    if "_shared" not in p.__dict__:
        return False
    storage = p.untyped_storage()
    return int(compat.storage_use_count(storage._cdata)) > 2  # the tensor and ``storage``


__all__ = ["aliased", "state_of"]
