"""What this machine and this installation have, and what to do about the rest: for ``meshwright doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright import compat, torch_changes
from meshwright.errors import MeshwrightError
from meshwright.ranks.launchers import launched

# Package: what it is for.
OPTIONAL = {
    "transformers": "models of Hugging Face in examples and tests",
    "matplotlib": "meshwright train --plot",
    "ray": "starting processes with Ray Train",
}

# What changes torch is entered by the modules that do: those of `import meshwright`, and what captures steps.
REGISTERING = ("tensor.autograd_functions", "tensor.api", "ranks.simulation", "shard", "program.compile")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        what: is looked at.
        found: what there is.
        fix: what to do; empty where nothing has to be done.
        broken: whether Meshwright does not work as it is.
    """

    what: str
    found: str
    fix: str = ""
    broken: bool = False


def findings(torch_changes: bool = False) -> Iterator[Finding]:
    """All checks, from the versions to the devices; on request also each change of torch."""
    yield _installed("meshwright", "run from its sources")
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("torch", torch.__version__, compat.untested(torch.__version__))
    older = compat.stood_in(torch.__version__)
    yield Finding("in place of what newer versions of torch have", ", ".join(older) or "nothing")
    missing = list(_missing())
    found = f"{len(compat.PRIVATE) - len(missing)} of {len(compat.PRIVATE)} found"
    yield Finding("undocumented names of torch", found, "; ".join(missing), bool(missing))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    fight = threads > 1 and not torch.cuda.is_available()
    fix = "several processes on one machine: OMP_NUM_THREADS=1 keeps their threads from fighting" if fight else ""
    yield Finding("processor", f"{cores} cores, {threads} threads per process", fix)
    yield from _devices()
    yield from _backends()
    yield _launcher()
    free = shutil.disk_usage(Path.cwd()).free
    yield Finding("free disk here", f"{free / 2**30:.1f} GiB", "too little for checkpoints" if free < 2**30 else "")
    for name, needed in OPTIONAL.items():
        yield _installed(name, f"not installed (for {needed})")
    changes = list(_changes())
    if torch_changes:
        yield from changes
    else:
        yield Finding("changed in torch", f"{len(changes)} things (--torch-changes lists them)")


def _installed(name: str, otherwise: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, otherwise)


def _changes() -> Iterator[Finding]:
    for module in REGISTERING:
        importlib.import_module(f"meshwright.{module}")
    for c in torch_changes.TABLE:
        yield Finding(f"changed in torch from {c.since} on, undone {c.until}", f"{c.why} ({', '.join(c.targets)})")


def _missing() -> Iterator[str]:
    for name in compat.PRIVATE:
        try:
            compat.look_up(name)
        except MeshwrightError as error:
            yield str(error)


def _devices() -> Iterator[Finding]:
    count = torch.cuda.device_count()
    if not count:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        fix = "torch is built for GPUs, but there is no device or no driver: see nvidia-smi" if built else ""
        yield Finding("devices", "none but the processor (tensors on it, gloo)", fix)
    for i in range(count):
        made = torch.cuda.get_device_properties(i)
        near = [str(j) for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        links = f", direct access to {', '.join(near)}" if near else ""
        yield Finding(f"cuda:{i}", f"{made.name}, {made.total_memory / 2**30:.0f} GiB{links}")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("backends", "none", "this torch is built without torch.distributed: install another", True)
        return
    having = [n for n in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{n}_available", lambda: False)()]
    bare = torch.cuda.is_available() and "nccl" not in having
    yield Finding("backends", ", ".join(having), "without nccl tensors on GPUs are not sent" if bare else "")


def _launcher() -> Finding:
    found = launched()
    if found is None:
        return Finding("launcher", "none: one process (torchrun and the like start more)")
    return Finding("launcher", f"{found.by}: rank {found.rank} of {found.world}, at {found.address}:{found.port}")
