"""The folder of a run (``--save``): beside its checkpoints its options, with which it starts again, and its log."""

from __future__ import annotations

import json
import os
import platform
import socket
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from .config import TrainConfig
from .options import Option, OptionError, options_in

NAME, LOG, LOCK = "config.toml", "log.jsonl", "run.lock"
LEFT_OUT = ("resume", "verify")  # resume is always in the file, and nothing that is resumed is verified


def command(config: TrainConfig) -> str:
    """The command that starts the run again."""
    return f"meshwright train --config {Path(config.save or '') / NAME}"


def versions() -> dict[str, str]:
    """Versions of what a run is computed with."""
    return {name: version(name) for name in ("meshwright", "torch")} | {"python": platform.python_version()}


def options_as_toml(config: TrainConfig) -> str:
    """The options that are not at their defaults, as ``--config`` reads them; paths are absolute."""
    made = options_in(type(config))
    lines = [f"# {', '.join(f'{name} {number}' for name, number in versions().items())}"]
    lines += [f"# Continue, on any mesh: {command(config)} --mesh dp=2", "resume = true"]
    for one in fields(config):
        value = getattr(config, one.name)
        if value != one.default and one.name not in LEFT_OUT:
            lines.append(f"{made[one.name].flag.removeprefix('--')} = {_as_toml(value, made[one.name])}")
    return "\n".join(lines) + "\n"


def _as_toml(value: Any, option: Option) -> str:
    if option.read is not None:
        value = ",".join(f"{axis}={size}" for axis, size in value)
    elif isinstance(value, tuple):
        value = [_absolute(one, option) for one in value]
    elif isinstance(value, str):
        value = _absolute(value, option)
    return json.dumps(value, ensure_ascii=False)


def _absolute(text: str, option: Option) -> str:
    """A path from the root: the run may start again from another folder."""
    alternatives = (option.metavar or "").removesuffix("...").split("|")
    is_path = {"FILE", "DIR"} & {*alternatives} and (len(alternatives) == 1 or os.path.exists(text))
    return os.path.abspath(text) if is_path else text


def lock(folder: Path) -> IO[str] | None:
    """Hold the folder, so that no other run saves there until the file that this returns is closed.

    None where there are no locks, or no folder: that raises at the save.

    Raises:
        OptionError: If another run holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError:
        return None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: workers that it forks do not hold it
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise OptionError(
            f"--save {folder}: another run saves there ({holder}). End it, or pass another folder"
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def write_options(config: TrainConfig) -> None:
    """Write the options to the folder.  Raises OptionError."""
    path = Path(config.save or "") / NAME
    beside = path.with_suffix(".tmp")
    try:
        beside.write_text(options_as_toml(config), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OptionError(f"{path} cannot be written ({error.strerror or error}): pass another --save") from None


__all__ = ["LOG", "NAME", "command", "lock", "options_as_toml", "versions", "write_options"]
