"""Ranks agree before anything is written or changed: a mistake found on one is an error on all."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from .. import collective, runtime
from ..errors import CheckpointError, DesyncError
from ..mesh import Mesh
from .contents import Roles

T = TypeVar("T")


def mesh_of(roles: Roles, given: Mesh | None) -> Mesh:
    """The mesh that is saved from or loaded to: that of the tensors; without distributed ones, all ranks."""
    if given is not None:
        return given
    if roles.program is not None:
        mesh: Mesh = roles.program.mesh
        return mesh
    first = next(roles.distributed(), None)
    return first.mesh if first is not None else Mesh({"ranks": runtime.RT.world})


def together(mesh: Mesh, what: str, do: Callable[[], T]) -> T:
    """What ``do`` returns, or on every rank the error that it raised on any.

    Raises:
        CheckpointError: as ``do`` raised it (OSError is one too), with the rank where others did not.
    """
    made: T | None = None
    own: Exception | None = None
    try:
        made = do()
    except Exception as error:  # of whatever kind: the others would wait
        own = error
    seen = everyone("" if own is None else str(own) or type(own).__name__, mesh)
    if own is not None and not isinstance(own, (CheckpointError, OSError)):
        raise own
    for rank, text in zip(mesh.ranks, seen, strict=True):
        if text:
            where = "" if all(seen) else f" on rank {rank}"
            raise CheckpointError(f"{what}{where}: {text}") from own
    return made  # type: ignore[return-value]


def from_first(mesh: Mesh, what: str, do: Callable[[], str]) -> str:
    """What ``do`` returns on the first rank, on every rank; or its error."""
    text, error, cause = b"", "", None
    group = collective.group(mesh)
    if runtime.RT.rank == mesh.ranks[0]:
        try:
            text = do().encode()
        except Exception as raised:  # of whatever kind: the others would wait
            error, cause = str(raised) or type(raised).__name__, raised
    size, error = everyone((len(text), error), mesh)[0]
    if error:
        raise CheckpointError(f"{what}: {error}") from cause
    if not size:
        return ""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(size, dtype=torch.uint8)
    sent = collective.broadcast(data.to(mesh.device), 0, group).cpu()
    return sent.numpy().tobytes().decode()


def everyone(value: T, mesh: Mesh) -> list[T]:
    """What each rank brings, in the order of the mesh."""
    return collective.all_gather_object(value, collective.group(mesh))


def alike(mesh: Mesh, what: str, fix: str, lines: Mapping[str, object]) -> None:
    """Raise on every rank where they bring different things.

    Raises:
        DesyncError: with the first line that differs.
    """
    if mesh.size == 1:
        return
    texts = {name: repr(value) for name, value in lines.items()}
    digest = hashlib.sha1(repr(texts).encode()).hexdigest()
    if len(set(everyone(digest, mesh))) == 1:
        return
    seen = everyone(texts, mesh)
    for rank, other in zip(mesh.ranks, seen, strict=True):
        for name in (*seen[0], *other):
            if seen[0].get(name) != other.get(name):
                a, b = (brief(one.get(name, "nothing")) for one in (seen[0], other))
                raise DesyncError(f"{what}: {name} is {a} on rank {mesh.ranks[0]} and {b} on rank {rank}; {fix}")
    raise DesyncError(f"{what}: the ranks bring the same in different orders; {fix}")


def brief(text: str) -> str:
    """A text that fits into a message."""
    return text if len(text) <= 120 else f"{text[:80]} ... {text[-30:]}"


def close_to(name: str, names: Iterable[str]) -> str:
    """Names that may have been meant, in words."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" (close: {', '.join(near)})" if near else ""


__all__ = ["alike", "close_to", "from_first", "mesh_of", "together"]
