"""What the system says of a process of this machine: it knows of deaths and stops, whatever the process does."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import uuid
from functools import lru_cache


@lru_cache(maxsize=1)
def machine() -> str:
    """What processes have alike that see each other: one running system, and one view of processes and of loopback."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return " ".join((boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")))
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode()}"


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def born(pid: int) -> str:
    """When a process was started: with its id, which process it is.  Empty where there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def state(pid: int, since: str = "") -> str:
    """``running``, ``stopped`` (by SIGSTOP or SIGTSTP, not by a debugger), ``ended``; empty where nobody says.

    Args:
        since: what :func:`born` said of it; another process that has its id now is not it.
    """
    fields = _stat(pid)
    if not fields or (since and fields[19] != since):
        return "ended" if os.path.isdir("/proc/self") else ""
    return {"Z": "ended", "X": "ended", "T": "stopped"}.get(fields[0], "running")


def status(pid: int, since: str = "") -> int | None:
    """How a process ended, as ``os.waitstatus_to_exitcode`` has it, while its parent has not asked; else None."""
    fields = _stat(pid)
    if not fields or fields[0] != "Z" or (since and fields[19] != since) or len(fields) < 50:
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def how(code: int | None) -> str:
    """A status in words."""
    if code is None:
        return "has ended without a word (killed, or os._exit)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"
    return f"ended with exit code {code}"


__all__ = ["born", "how", "machine", "state", "status"]
