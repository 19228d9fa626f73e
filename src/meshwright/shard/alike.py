"""All ranks shard the same model in the same way, from the same values, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from .. import collective
from ..dispatch import disabled
from ..errors import DesyncError, MeshwrightError
from ..layout import Spec
from ..mesh import Mesh
from ..tensor import DistTensor
from .names import Names

Tensor = torch.Tensor


def agree(mesh: Mesh, names: Names, plan: Mapping[str, Spec], problem: MeshwrightError | None) -> None:
    """All ranks must shard the same model in the same way; a mistake found on one rank is raised on all."""
    if mesh.size == 1:
        if problem is not None:
            raise problem
        return
    lines = [f"{n} {s!r}" for n, s in plan.items()]
    values = {} if problem is not None else _values(names)
    digest = hashlib.sha1("\n".join(lines).encode()).hexdigest()
    group = collective.group(mesh, tuple(range(mesh.ndim)))
    of_values = hashlib.sha1(repr(values).encode()).hexdigest()
    seen = collective.all_gather_object((digest, str(problem or ""), of_values), group)
    if problem is not None:
        raise problem
    for rank, (_, error, _) in zip(mesh.ranks, seen, strict=True):
        if error:
            raise DesyncError(f"shard_module failed on rank {rank}: {error}")
    if len({d for d, _, _ in seen}) > 1:
        everyone = collective.all_gather_object(lines, group)
        raise DesyncError(f"shard_module: the ranks disagree; {_difference(mesh, everyone)}")
    if len({v for _, _, v in seen}) > 1:
        raise DesyncError(_other_values(mesh, collective.all_gather_object(values, group)))


_GENERATOR = "the default random generator"


def _values(names: Names) -> dict[str, int]:
    """Digests of what must be the same on all ranks: what the model holds, or what its values will be drawn from."""
    plain = {n: t for n, t in names.tensors.items() if not isinstance(t, DistTensor)}
    there = {n: t for n, t in plain.items() if not t.is_meta}
    with disabled():
        found = dict(zip(there, collective.digests(list(there.values())), strict=True))
        if len(there) < len(plain):
            found[_GENERATOR] = collective.digests([torch.random.get_rng_state()])[0]
    return found


def _other_values(mesh: Mesh, everyone: list[dict[str, int]]) -> str:
    """Names the first values that differ, the ranks, and the fix."""
    first = everyone[0]
    name = next(n for n in first if any(other.get(n) != first[n] for other in everyone))
    rank, other = next((r, o) for r, o in zip(mesh.ranks, everyone, strict=True) if o.get(name) != first[name])
    count = sum(any(o.get(n) != first[n] for o in everyone) for n in first)
    more = f" (and {count - 1} more differ)" if count > 1 else ""
    fix = (
        "call torch.manual_seed with the same seed on all ranks, not seed + rank, before the model is built, or load "
        "the same weights everywhere"
    )
    return (
        f"shard_module: the ranks bring different values of {name}{more}: digest {first[name]:x} on rank "
        f"{mesh.ranks[0]}, {other.get(name, 0):x} on rank {rank}; {fix}"
    )


def _difference(mesh: Mesh, everyone: list[list[str]]) -> str:
    for rank, lines in zip(mesh.ranks[1:], everyone[1:], strict=True):
        longest = max(len(lines), len(everyone[0]))
        for i in range(longest):
            a, b = (one[i] if i < len(one) else "nothing" for one in (everyone[0], lines))
            if a != b:
                return f"rank {mesh.ranks[0]} has {a}, rank {rank} has {b}"
    return "build the same model everywhere"


# ---------------------------------------------------------------------------------------------- parameters


__all__ = ["agree"]
