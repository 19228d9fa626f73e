"""What ranks that shard the same model have alike: how, and from which values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ... import collective
from ...collective import Fact
from ...dispatch import disabled
from ...layout import Spec
from ...tensor import DistTensor
from ..initialization.values import ValueOrigin, digest_of
from ..parameters.names import Names

_SEEDED = (
    "call torch.manual_seed with the same seed on all ranks, not seed + rank, before the model is built, or load the "
    "same weights everywhere"
)


def facts_of(names: Names, plan: Mapping[str, Spec], origins: Mapping[str, ValueOrigin]) -> list[Fact]:
    """How a model is laid, and digests of its values, or of the generator that those will be drawn from."""
    plain = {n: t for n, t in names.tensors.items() if not isinstance(t, DistTensor)}
    there = {n: t for n, t in plain.items() if not t.is_meta}
    with disabled():
        digests = dict(zip(there, collective.digests(list(there.values())), strict=True))
        if len(there) < len(plain):
            digests["the default random generator"] = collective.digests([torch.random.get_rng_state()])[0]
            digests["what constructors did on the meta device"] = digest_of(origins)
    how = [Fact(f"{n} {s!r}") for n, s in plan.items()]
    return [*how, *(Fact(f"values of {n}", f"digest {digest:x}", fix=_SEEDED) for n, digest in digests.items())]


__all__ = ["facts_of"]
