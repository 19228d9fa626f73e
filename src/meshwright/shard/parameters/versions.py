"""Whether a parameter has been written to since it was gathered."""

from __future__ import annotations

from typing import Any

import torch

from ... import collective, compat
from ...local_tensor import PLAIN, SharedMemory, Sharing, shared_memory, version_of
from ...mesh import Mesh

Tensor = torch.Tensor


def state_of(p: Tensor) -> tuple[int, int, SharedMemory | None, int, Any]:
    """What changes when a tensor is written to, or could have been by a tensor that shares its memory.

    First what autograd counts; then that and what is written through ``.data``.
    """
    memory, version = shared_memory(p), p._version
    everything = version_of(p) if Sharing.counted else version
    return version, everything, memory, 0 if memory is None else memory.shared, p._spec.layout  # type: ignore[attr-defined]


def aliased(p: Tensor, mesh: Mesh) -> bool:
    """Whether writes to a tensor may go uncounted: on some rank one was given its memory (``other.data = p``).

    The ranks ask each other as long as one may: what is held on one may be a copy on the next, and what is gathered
    again must be on all.  When nobody holds one any more, that counts as a write: the last one may have gone unseen.
    """
    memory = shared_memory(p)
    if memory is None or not memory.aliased:
        return False
    held = is_held(p)
    if mesh.size > 1:
        word = torch.tensor([held], dtype=torch.int32, device=mesh.device)
        held = bool(collective.all_reduce(word, "max", collective.group(mesh)).item())
    if not held:
        memory.shared, memory.aliased = memory.shared + 1, False
    return held


def is_held(p: Tensor) -> bool:
    """Whether another tensor of this rank has the memory of a parameter, such as its ``.data``."""
    storage = p.untyped_storage()
    own = 2 + (PLAIN in p.__dict__)  # the tensor, ``storage``, and what steps of optimizers see it as, which count
    return int(compat.storage_use_count(storage._cdata)) > own


__all__ = ["aliased", "is_held", "state_of"]
