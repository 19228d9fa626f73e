"""Whether a parameter has been written to since it was gathered."""

from __future__ import annotations

from typing import Any

import torch

from ... import collective, compat
from ...local_tensor import MEMORY, PLAIN
from ...mesh import Mesh
from ...tensor import ALIASED

Tensor = torch.Tensor


def state_of(p: Tensor) -> tuple[int, int, Any]:
    """What changes when a tensor is written to, or could have been by a tensor that shares its memory."""
    memory = p.__dict__.get(MEMORY)
    shared = p.__dict__.get("_shared", 0) + (0 if memory is None else memory.shared)
    return p._version, shared, p._spec.layout  # type: ignore[attr-defined]


def aliased(p: Tensor, mesh: Mesh) -> bool:
    """Whether writes to a tensor may go uncounted: on some rank there is one that shares its memory (``p.data``).

    The ranks ask each other as long as one may: what is held on one may be a copy on the next, and what is gathered
    again must be on all.  When nobody holds one any more, that counts as a write: the last one may have gone unseen.
    """
    memory = p.__dict__.get(MEMORY)
    if ALIASED not in p.__dict__ and (memory is None or not memory.aliased):
        return False
    storage = p.untyped_storage()
    own = 2 + (PLAIN in p.__dict__)  # the tensor, ``storage``, and what steps of optimizers see it as, which count
    held = int(compat.storage_use_count(storage._cdata)) > own
    if mesh.size > 1:
        word = torch.tensor([held], dtype=torch.int32, device=mesh.device)
        held = bool(collective.all_reduce(word, "max", collective.group(mesh)).item())
    if not held:
        p.__dict__.pop(ALIASED, None)
        p.__dict__["_shared"] = p.__dict__.get("_shared", 0) + 1
        if memory is not None:
            memory.aliased = False
    return held


__all__ = ["aliased", "state_of"]
