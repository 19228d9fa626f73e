"""What a launcher says about this process: torchrun, accelerate, mpirun, srun.  The reader of the environment.

A launcher that makes the process group itself (Ray Train, a notebook's own code) says nothing here, and need not.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from ..errors import MeshError


@dataclass(frozen=True)
class Launch:
    """One of the processes that a launcher started.

    Attributes:
        by: the launcher's name.
        address, port: where rank 0 listens.
    """

    by: str
    rank: int
    world: int
    local_rank: int
    address: str
    port: int


# Name, then the variables that hold rank, number of processes, local rank, processes on this host, and what is the
# same in all processes of one job and differs between jobs.  torchrun's come first: inside a batch job it is the one.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ()),
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")),
    # Before Slurm's own, which are inherited: mpirun runs inside of jobs, srun --mpi=pmi2 sets both alike.
    ("mpirun (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
     ("PMI_ID", "HYDI_CONTROL_FD")),
    # SLURM_NTASKS is there in a batch script as well, which is one process: only a step has these.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)  # fmt: skip


def launched(env: Mapping[str, str] | None = None) -> Launch | None:
    """What the environment says, or None where no launcher started this process.

    Raises:
        MeshError: half of it is missing, or reads as no number.
    """
    env = os.environ if env is None else env
    found = next((known for known in _LAUNCHERS if known[1] in env and known[2] in env), None)
    if found is None:
        return None
    by, rank, world, local, here, job = found
    if not (env[rank].isdigit() and env[world].isdigit() and int(env[rank]) < int(env[world])):
        raise MeshError(
            f"{rank} and {world} are set, as {by} does, but they read {env[rank]!r} and {env[world]!r}: "
            f"start with {by}, or unset them"
        )
    size = int(env[world])
    if by == "torchrun" or ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        address, port = _said(env, rank, world, by)
    else:
        address, port = env.get("MASTER_ADDR") or _address(env, by, size, env.get(here, "")), _port(env, job)
    return Launch(by, int(env[rank]), size, int(env.get(local, env[rank])), address, port)


def is_command() -> bool:
    """Whether this process is the command line, and no program that imports the package."""
    given = sys.orig_argv[1:]
    if "-m" in given[:-1]:
        return given[given.index("-m") + 1] == "meshwright"
    return os.path.basename(sys.argv[0]) == "meshwright"


def interrupts_in_a_line() -> None:
    """From now on Ctrl-C, where nobody handles it, is a line and no traceback: of the command line while it imports."""
    before = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        else:
            before(kind, error, trace)

    sys.excepthook = shown


def keeps_store() -> bool:
    """Whether the launcher keeps the store by which the processes meet, also when it starts them anew."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def error_file() -> str:
    """The file in which torchrun looks for what went wrong in this process, or empty."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "")


def _said(env: Mapping[str, str], rank: str, world: str, by: str) -> tuple[str, int]:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing or not env["MASTER_PORT"].isdigit():
        what = f"{missing[0]} is not" if missing else f"MASTER_PORT reads {env['MASTER_PORT']!r}"
        raise MeshError(f"{rank} and {world} are set, as {by} does, but {what}: start with {by}, or unset them")
    return env["MASTER_ADDR"], int(env["MASTER_PORT"])


def _address(env: Mapping[str, str], by: str, world: int, here: str) -> str:
    """Where rank 0 is."""
    if here == str(world):
        return "127.0.0.1"  # all on this host
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") if by == "srun" else None
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts or "").partition(",")[0]  # rack[1-2]n[03-07,09]-ib -> rack1n03-ib
    if not first:
        raise MeshError(
            f"{by} started {world} processes and nothing says where the first of them is: set MASTER_ADDR to its host "
            "(and MASTER_PORT to a free port), for example mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500"
        )
    return first


def _port(env: Mapping[str, str], job: tuple[str, ...]) -> int:
    """The same in all processes of a job, and most likely another in the next job."""
    if "MASTER_PORT" in env and env["MASTER_PORT"].isdigit():
        return int(env["MASTER_PORT"])
    named = "/".join(env[name] for name in job if name in env)
    return 20000 + zlib.crc32(named.encode()) % 10000
