"""Values that are the same on several ranks: whether they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ... import collective
from ...layout import Layout, Replicate
from ...ranks import runtime

Tensor = torch.Tensor


def first_divergent_replica(
    values: Mapping[str, tuple[Layout, Tensor]], group: collective.Group, *, whole: bool = True
) -> str:
    """The first value that ranks of a group hold differently though they hold the same part, with both sides.

    Args:
        values: name to layout and local tensor; the same names on all ranks, which call it together.
        whole: look at all elements, not at a sample of each.

    Returns:
        The same on every rank; empty if there is none.
    """
    return collective.difference(group, facts_of(values, whole=whole))[0]


def facts_of(values: Mapping[str, tuple[Layout, Tensor]], *, whole: bool = True) -> list[collective.Fact]:
    """What ranks tell each other for :func:`first_divergent_replica`."""
    digests = collective.digests([t for _, t in values.values()], whole=whole)
    facts = []
    for (name, (layout, _)), digest in zip(values.items(), digests, strict=True):
        here = layout.mesh.coordinate(runtime.RT.rank)
        place = tuple(at for at, p in zip(here, layout.placements, strict=True) if not isinstance(p, Replicate))
        facts.append(collective.Fact(f"values of {name}", f"digest {digest:x}", place))
    return facts


__all__ = ["facts_of", "first_divergent_replica"]
