"""The manifest of a checkpoint, which makes it one; and the folder that checkpoints are in."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..layout import Spec, spec_data, spec_from
from ..mesh import Mesh, mesh_data, mesh_from
from ..untrusted_files import making_sense, plain_name, read_regular
from . import files
from .files import Line

FORMAT, VERSION = "meshwright checkpoint", 2
CONFIGURATIONS = ("config.json", "generation_config.json")  # files of a model of transformers that manifests keep
NAME, UNFINISHED = "manifest.json", "manifest.json.tmp"
_FOLDER = re.compile(r"step-(\d{8,})-(\d{5,})-([0-9a-f]{4})", re.ASCII)
_WRITTEN = re.compile(r"rank-\d{5,}\.safetensors|manifest\.json\.tmp", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but the values of its tensors.

    Attributes:
        step: as ``save`` was given it.
        mesh: where it was saved.
        tensors: name to spec; their order counts (see :func:`~.pieces.own_piece`).
        aliases: further names of tensors.
        values: what else was saved, as JSON.
        files: name of a file to what it must be.
        run: which run it is of (see :mod:`~.runs`); empty where an earlier version wrote it.
    """

    step: int
    mesh: Mesh
    tensors: Mapping[str, Spec]
    aliases: Mapping[str, str]
    values: Mapping[str, Any]
    files: Mapping[str, Line] = field(default_factory=dict)
    run: str = ""

    @cached_property
    def turns(self) -> dict[str, int]:
        """Name of a tensor to its number."""
        return {name: i for i, name in enumerate(self.tensors)}

    def text(self) -> str:
        """As a file has it: a line per tensor and per file."""
        parts = {
            "format": json.dumps(FORMAT),
            "version": json.dumps(VERSION),
            "run": json.dumps(self.run),
            "step": json.dumps(self.step),
            "mesh": json.dumps(mesh_data(self.mesh)),
            "tensors": _lines({name: spec_data(spec) for name, spec in self.tensors.items()}),
            "aliases": _lines(self.aliases),
            "values": _lines(self.values),
            "files": _lines({name: [line.bytes, line.header] for name, line in self.files.items()}),
        }
        body = ",\n".join(f"{json.dumps(k)}: {v}" for k, v in parts.items())
        return f'{{"crc32": {zlib.crc32(body.encode())},\n{body}}}\n'


def _lines(table: Mapping[str, Any]) -> str:
    return "{" + ",".join(f"\n {json.dumps(k)}: {json.dumps(v)}" for k, v in table.items()) + "}"


def read_manifest(folder: Path) -> str:
    """The text of a manifest, found to be whole.  Raises CheckpointError."""
    path = folder / NAME
    try:
        text = read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    head, _, rest = text.partition(b",\n")
    if head != b'{"crc32": %d' % zlib.crc32(rest[:-2]) or rest[-2:] != b"}\n":
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    with making_sense(path, CheckpointError):
        return text.decode()


def parsed(text: str, path: Path) -> Manifest:
    """A manifest from its text.  Raises CheckpointError for one of another version, or that is none."""
    with making_sense(path, CheckpointError, "is no manifest of a checkpoint"):
        return _parsed(json.loads(text), path)


def _parsed(data: Any, path: Path) -> Manifest:
    if data["format"] != FORMAT or data["version"] != VERSION:
        raise CheckpointError(
            f"{path} is {data['format']!r} of version {data['version']}, {FORMAT!r} of version {VERSION} was "
            "expected: read it with the version of Meshwright that wrote it"
        )
    mesh = mesh_from(data["mesh"])
    tensors = {name: spec_from(spec, mesh) for name, spec in data["tensors"].items()}
    lines = {name: Line(*line) for name, line in data["files"].items()}
    made = Manifest(
        data["step"], mesh, tensors, dict(data["aliases"]), dict(data["values"]), lines, data.get("run", "")
    )
    if wrong := _wrong(made):
        raise CheckpointError(f"{path} is no manifest of a checkpoint: {wrong}")
    return made


def _wrong(made: Manifest) -> str:
    """What of a manifest, whose checksum says nothing of who wrote it, no save writes; empty where it is sound."""
    if type(made.step) is not int or made.step < 0:
        return f"its step is {made.step!r}"
    if type(made.run) is not str:
        return f"its run is {made.run!r}"
    for name, spec in made.tensors.items():
        name.encode()  # half of a character could not even be shown
        if name == "__metadata__" or any(type(n) is not int or n < 0 for n in spec.shape) or spec.layout.partial:
            return f"it has a tensor {name!r} of {spec!r}"
    for other, name in made.aliases.items():
        if not isinstance(name, str) or name not in made.tensors:
            return f"{other!r} is another name of {name!r}, which it does not have"
    for name, line in made.files.items():
        if not plain_name(name) or type(line.bytes) is not int or type(line.header) is not int:
            return f"it names a file {name!r}, with {line}, which is none of its folder's"
    for name, text in dict(made.values.get("config", {})).items():
        if name not in CONFIGURATIONS or not isinstance(text, str):
            return f"it has a configuration {name!r}, which no model has"
    return ""


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a folder whose files are durable a checkpoint: all at once, and durably.  Raises OSError."""
    disk = files.DISK
    file = disk.create(folder / UNFINISHED)
    try:
        disk.write(file, manifest.text().encode())
        disk.sync(file)
    finally:
        disk.close(file)
    disk.rename(folder / UNFINISHED, folder / NAME)
    disk.sync_folder(folder)


# ---------------------------------------------------------------------------------------------- the folder


class SaveFolder(NamedTuple):
    """A folder of a save.

    Attributes:
        serial: how many were begun before; the last complete one is the newest, whatever its step.
    """

    serial: int
    step: int
    path: Path

    @property
    def complete(self) -> bool:
        """Whether it is a checkpoint."""
        return (self.path / NAME).is_file()

    def why_incomplete(self) -> str:
        """What is there of a save that did not come to its end."""
        there = sorted(p.name for p in self.path.glob("*.safetensors"))
        what = f"{len(there)} data file{'s' if len(there) != 1 else ''}" if there else "no data"
        return f"{self.path.name} ({what} and no {NAME}: the save was interrupted, or is still under way)"


def saves_in(folder: Path) -> list[SaveFolder]:
    """All saves, complete or not, the newest first.  Raises CheckpointError for a folder that cannot be read."""
    try:
        names = [p.name for p in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    found = [(m, name) for name in names if (m := _FOLDER.fullmatch(name))]
    return sorted((SaveFolder(int(m[2]), int(m[1]), folder / name) for m, name in found), reverse=True)


def new_folder(folder: Path, step: int) -> Path:
    """A name that no save has had."""
    serial = max((s.serial for s in saves_in(folder)), default=0) + 1
    return folder / f"step-{step:08d}-{serial:05d}-{secrets.token_hex(2)}"


def make_folder(path: Path) -> None:
    """Make the folder of a save, durably.  Raises OSError."""
    made = [path, *(p for p in path.parents if not p.exists())]
    files.DISK.make_folder(path)
    for p in made:
        files.DISK.sync_folder(p.parent)


def remove_old(folder: Path, keep: int | None, own: Path, owns: Callable[[SaveFolder], bool]) -> None:
    """Remove what is no longer needed: complete saves beyond ``keep``, and what interrupted ones left.

    What cannot be removed stays: it is not worth a run.

    Args:
        own: the save that is complete now.
        owns: whether a complete one is of the run.
    """
    saves = saves_in(folder)
    complete = [s for s in saves if s.complete and owns(s)]
    serial = next(s.serial for s in complete if s.path == own)
    old = [s for s in saves if s.serial < serial and not s.complete]
    old += [] if keep is None else [s for s in complete if s.serial <= serial][keep:]
    for s in old:
        with contextlib.suppress(OSError):
            remove(s.path)


def remove(path: Path) -> None:
    """Remove a save: what saves write, and the folder if nothing else is in it.  Raises OSError.

    A link is not followed: what it leads to is none of this folder's.
    """
    disk = files.DISK
    if path.is_symlink() or not path.is_dir():
        return
    if (path / NAME).exists():
        disk.remove(path / NAME)  # first: what is half removed must be no checkpoint
        disk.sync_folder(path)
    for file in path.iterdir():
        if _WRITTEN.fullmatch(file.name):
            disk.remove(file)
    disk.remove(path)


__all__ = [
    "CONFIGURATIONS", "NAME", "Manifest", "SaveFolder", "commit", "make_folder", "new_folder", "parsed",
    "read_manifest", "remove", "remove_old", "saves_in",
]  # fmt: skip
