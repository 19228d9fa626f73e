"""Values that are the same on several ranks: whether they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import collective, runtime
from ..layout import Layout, Replicate

Tensor = torch.Tensor


def astray(values: Mapping[str, tuple[Layout, Tensor]], group: collective.Group) -> str:
    """The first value that ranks of a group hold differently though they hold the same part, with both sides.

    Args:
        values: name to layout and local tensor; the same names on all ranks, which call it together.

    Returns:
        The same on every rank; empty if there is none.
    """
    places = {}
    for name, (layout, _) in values.items():
        here = layout.mesh.coordinate(runtime.RT.rank)
        split = [a for a, p in enumerate(layout.placements) if not isinstance(p, Replicate)]
        places[name] = tuple(here[a] for a in split)
    digests = collective.digests([t for _, t in values.values()])
    own = {name: (places[name], digest) for name, digest in zip(values, digests, strict=True)}
    everyone = collective.all_gather_object(own, group)
    for name in dict.fromkeys(name for held in everyone for name in held):
        first: dict[object, tuple[int, int | None]] = {}
        for rank, held in zip(group.ranks, everyone, strict=True):
            place, digest = held.get(name, (None, None))
            at, other = first.setdefault(place, (rank, digest)) if place is not None else (group.ranks[0], 0)
            if other != digest:
                said = "none" if digest is None else f"digest {digest:x}"
                return f"{name} (digest {other or 0:x} on rank {at}, {said} on rank {rank})"
    return ""


__all__ = ["astray"]
