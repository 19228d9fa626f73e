"""What launchers say: their variables, alone and inside of one another, and two real processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.collective import rendezvous
from meshwright.errors import MeshError
from meshwright.ranks.launchers import Launch, launched
from meshwright.tensor.api import own_device
from tests.support import faulty, fresh
from tests.support.processes import CONTEXT

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "job-1",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]", "SLURM_NTASKS": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({}, None),
        (TORCHRUN, ("torchrun", 1, 4, 1, "node7", 29500)),
        ({**SRUN, **TORCHRUN}, ("torchrun", 1, 4, 1, "node7", 29500)),
        ({**SRUN, **TORCHRUN, **OPEN_MPI}, ("torchrun", 1, 4, 1, "node7", 29500)),
        ({**OPEN_MPI, "MASTER_ADDR": "a", "MASTER_PORT": "5"}, ("mpirun (Open MPI)", 2, 4, 0, "a", 5)),
        ({**MPICH, "MASTER_PORT": "7"}, ("mpirun (MPICH, Intel MPI)", 0, 2, 0, "127.0.0.1", 7)),
        ({**SRUN, "MASTER_PORT": "7"}, ("srun", 3, 8, 1, "gpu03", 7)),
        ({**SRUN, "SLURM_STEP_NODELIST": "login", "MASTER_PORT": "7"}, ("srun", 3, 8, 1, "login", 7)),
        ({**SRUN, "SLURM_STEP_NODELIST": "r[1-2]n[3,5]-ib,x", "MASTER_PORT": "7"}, ("srun", 3, 8, 1, "r1n3-ib", 7)),
        ({**SRUN, "SLURM_STEP_NODELIST": "a,b[1-2]", "MASTER_PORT": "7"}, ("srun", 3, 8, 1, "a", 7)),
        ({**SRUN, "MASTER_ADDR": "b", "MASTER_PORT": "7"}, ("srun", 3, 8, 1, "b", 7)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script: one process
    ],
)
def test_variables(env: dict[str, str], want: tuple[Any, ...] | None) -> None:
    assert launched(env) == (None if want is None else Launch(*want))


def test_a_port_is_the_jobs() -> None:
    ranks = {launched({**SRUN, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r % 4)}).port for r in range(8)}  # type: ignore[union-attr]
    other = launched({**SRUN, "SLURM_JOB_ID": "78"})
    assert other is not None
    assert len(ranks) == 1
    assert other.port not in ranks


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not: start with torchrun, or unset them"),
        ({**TORCHRUN, "MASTER_PORT": "x"}, "MASTER_PORT reads 'x'"),
        ({**TORCHRUN, "RANK": "one"}, "they read 'one' and '4'"),
        ({**TORCHRUN, "RANK": "4"}, "they read '4' and '4'"),
        (OPEN_MPI, "nothing says where the first of them is: set MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, r"mpirun \(MPICH, Intel MPI\) started 4 processes and nothing says where"),
        (
            {k: v for k, v in SRUN.items() if "LIST" not in k},
            "srun started 8 processes and nothing says where the first",
        ),
    ],
)
def test_half_of_it(env: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        launched(env)


SCRIPT = """
import torch, meshwright as mw
mesh = mw.init_mesh({"dp": 2})
print(mw.unshard(mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)}) * 2).tolist())
"""


# As docs/launchers.md has them, with fewer processes.
COMMANDS = [
    ["torchrun", "--nproc-per-node", "2"],
    ["accelerate", "launch", "--multi_gpu", "--num_processes", "2"],
    ["mpirun.openmpi", "-n", "2", "--oversubscribe", "python"],
    ["mpirun.openmpi", "-n", "2", "--host", "localhost:2", "-x", "MASTER_ADDR=localhost", "-x", "MASTER_PORT=29561",
     "python"],
    ["mpirun.mpich", "-n", "2", "python"],
    ["mpirun.mpich", "-n", "2", "-genv", "MASTER_ADDR", "localhost", "-genv", "MASTER_PORT", "29563", "python"],
]  # fmt: skip
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("command", [c for c in COMMANDS if shutil.which(c[0], path=PATH)], ids=" ".join)
def test_commands_as_written(command: list[str], tmp_path: Path) -> None:
    """Those of the launchers that are installed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = {k: v for k, v in os.environ.items() if k not in (*TORCHRUN, *SRUN)}
    own |= {"PATH": PATH, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    made = subprocess.run([*command, str(script)], env=own, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("[0.0, 2.0, 4.0, 6.0]") == 2


@pytest.mark.processes
def test_processes_of_mpirun() -> None:
    """Two processes with Open MPI's variables, and no others, meet."""
    own = {k: v for k, v in os.environ.items() if k not in (*TORCHRUN, *SRUN)}
    own |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"job-{os.getpid()}"}
    environments = [{**own, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)} for r in range(2)]
    said = fresh.run_ranks(SCRIPT, environments)
    assert [faulty.without_gloo(text).strip() for text in said] == ["[0.0, 2.0, 4.0, 6.0]"] * 2


def one_attempt(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    mesh = mw.init_mesh({"dp": 2})
    found = mw.shard_tensor(torch.arange(4.0), mesh, {"dp": mw.Shard(0)}).sum().item()
    os._exit(0 if found == 6 else 1)  # what it wrote to the store stays


@pytest.mark.processes
def test_an_attempt_does_not_meet_the_one_before() -> None:
    """torchrun's agent keeps its store: there are the addresses of processes that are dead."""
    store = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False)
    store.set("meshwright/ask/1", "a rank that died as it asked")
    store.add("meshwright/asks", 2)
    for _ in range(2):
        ranks = [CONTEXT.Process(target=one_attempt, args=(rank, store.port)) for rank in (0, 1)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(300)
            one.kill()
        assert [one.exitcode for one in ranks] == [0, 0]


def meets(rank: int, port: int, agent: bool, said: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(agent)}
    rendezvous.MUTE = 1
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch says a lot
    try:
        mw.init_mesh({"dp": 2})
    except MeshError as error:
        Path(f"{said}/{rank}").write_text(str(error))
    os._exit(0)


@pytest.mark.processes
@pytest.mark.parametrize("agent", [False, True])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_a_port_that_another_program_has(answer: bytes, agent: bool, tmp_path: Path) -> None:
    """All ranks end with the reason: torch's client would wait without end for a program that says nothing."""
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listening.accept()[0])
                held[-1].sendall(answer)

    with socket.create_server(("localhost", 0)) as listening:
        port = listening.getsockname()[1]
        threading.Thread(target=serve, daemon=True).start()
        ranks = [CONTEXT.Process(target=meets, args=(rank, port, agent, str(tmp_path))) for rank in (0, 1)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(300)
            one.kill()
    assert [one.exitcode for one in ranks] == [0, 0]
    mute = (
        rf"what listens at localhost:{port} does not answer as the store of rank 0 does: another program has the port"
    )
    assert re.search(
        mute if agent else f"another program has port {port} here: set MASTER_PORT", (tmp_path / "0").read_text()
    )
    assert re.search(mute, (tmp_path / "1").read_text())


def test_each_process_of_a_machine_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    devices = []
    for count, local_rank in ((4, 3), (2, 3), (1, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        devices.append(own_device(local_rank).index)
    assert taken == [3, 1]
    assert devices == [3, 1, 1]
