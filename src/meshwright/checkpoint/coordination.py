"""Ranks agree before anything is written or changed: a mistake found on one is an error on all."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch

from .. import collective
from ..errors import CheckpointError, DesyncError
from ..mesh import Mesh
from ..ranks import runtime
from .contents import Roles

T = TypeVar("T")
SHORT = 1 << 20  # bytes that all ranks may hold of what the first one says


def mesh_of(roles: Roles, given: Mesh | None) -> Mesh:
    """The mesh that is saved from or loaded to: that of the tensors; without distributed ones, all ranks."""
    if given is not None:
        return given
    if roles.program is not None:
        mesh: Mesh = roles.program.mesh
        return mesh
    first = next(roles.distributed(), None)
    return first.mesh if first is not None else Mesh({"ranks": runtime.RT.world})


def attempt(mesh: Mesh, what: str, do: Callable[[], T]) -> T:
    """What ``do`` returns, or on every rank the error that it raised on any.

    Raises:
        CheckpointError: as ``do`` raised it (OSError is one too), with the rank where it was another one.
    """
    return prepared(mesh, what, do)


def prepared(
    mesh: Mesh, what: str, do: Callable[[], T], lines: Callable[[T], Mapping[str, object]] = lambda made: {},
    differ: str = "", fix: str = "",
) -> T:  # fmt: skip
    """:func:`attempt`, and in the same exchange facts about the result are compared.

    Args:
        lines: what must be alike, of what ``do`` returned.
        differ, fix: the message where it is not.
    """
    said = differ.replace("{", "{{").replace("}", "}}") + ": the ranks disagree: {}"
    try:
        with collective.together(mesh, what, said=said, fix=fix, kind=CheckpointError) as facts:
            made = do()
            facts += [collective.Fact(name, value) for name, value in lines(made).items()]
        return made
    except (CheckpointError, OSError) as error:
        text = str(error) or type(error).__name__
        raise error if text.startswith(what) else CheckpointError(f"{what}: {text}") from error


def from_first(mesh: Mesh, what: str, do: Callable[[], str], lines: Mapping[str, object], differ: str, fix: str) -> str:
    """What ``do`` returns on the first rank, on every rank, or its error; in the same exchange facts are compared.

    Args:
        lines, differ, fix: what must be alike, and the message where it is not.
    """
    text, error, cause = b"", "", None
    if runtime.RT.rank == mesh.ranks[0]:
        try:
            text = do().encode()
        except Exception as raised:  # of whatever kind: the others would wait
            error, cause = str(raised) or type(raised).__name__, raised
    facts = [collective.Fact(name, value) for name, value in lines.items()]
    short = len(text) * mesh.size <= SHORT
    told = everyone((len(text), text if short else b"", error, facts), mesh)
    if went := collective.differing({rank: one[3] for rank, one in zip(mesh.ranks, told, strict=True)})[0]:
        raise DesyncError(f"{differ}: the ranks disagree: {went}; {fix}")
    size, sent, error, _ = told[0]
    if error:
        raise CheckpointError(f"{what}: {error}") from cause
    if size > len(sent):
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(size, dtype=torch.uint8)
        sent = collective.broadcast(data.to(mesh.device), 0, collective.group(mesh)).cpu().numpy().tobytes()
    return sent.decode()


def everyone(value: T, mesh: Mesh) -> list[T]:
    """What each rank brings, in the order of the mesh."""
    return collective.all_gather_object(value, collective.group(mesh))


def close_to(name: str, names: Iterable[str]) -> str:
    """Names that may have been meant, in words."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" (close: {', '.join(near)})" if near else ""


__all__ = ["attempt", "close_to", "everyone", "from_first", "mesh_of", "prepared"]
