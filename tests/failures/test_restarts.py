"""Runs that go on after processes died, on fewer of them, with the losses of the run that never stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.project.test_examples import EXAMPLES, numbered_losses, restarts
from tests.train.test_train_processes import LINUX, children

pytestmark = pytest.mark.processes


class Agents:
    """Four torchruns of one process each, as on four machines."""

    def __init__(self, folder: Path, *script: str) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2:4", "--nproc-per-node=1", "--max-restarts=9",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--local-addr=localhost", "--rdzv-id=1",
            "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=8", *script,
        ]  # fmt: skip
        self.running: list[subprocess.Popen[bytes]] = []
        self.start()  # the first has the store
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                socket.create_connection(("localhost", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        for _ in range(3):
            self.start()

    def start(self) -> None:
        out = open(self.folder / f"agent-{len(self.running)}", "wb")  # noqa: SIM115
        settings = os.environ | {"OMP_NUM_THREADS": "1"}
        self.running.append(subprocess.Popen(self.command, stdout=out, stderr=out, env=settings))

    def said(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("agent-*")))

    def until(self, true: Callable[[str], bool], seconds: float = 900) -> None:
        end = time.monotonic() + seconds
        while not true(self.said()):
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)

    def lose(self, agent: int) -> None:
        """A machine is switched off."""
        for pid in [*children(self.running[agent].pid), self.running[agent].pid]:
            os.kill(pid, signal.SIGKILL)
        self.running[agent].wait()

    def end(self) -> None:
        for agent in self.running:
            for pid in children(agent.pid) if agent.poll() is None else []:
                os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()


def after(said: str, ranks: int) -> int:
    """The number of steps that were made on so many ranks."""
    part = re.findall(rf"from step \d+ on {ranks} ranks\n((?:step .*\n)*)", said)
    return sum(text.count("step ") for text in part)


@pytest.mark.long
@pytest.mark.timeout(600)
@LINUX
def test_torchrun_goes_on_with_four_three_and_two_machines(tmp_path: Path) -> None:
    whole = dict(numbered_losses(restarts(1, tmp_path / "whole", 30)))
    script = [str(EXAMPLES / "restarts.py"), "--folder", str(tmp_path / "saves"), "--steps", "30", "--pause", "0.3"]
    agents = Agents(tmp_path, *script)
    try:
        agents.until(lambda said: after(said, 4) >= 4)
        agents.lose(3)
        agents.until(lambda said: after(said, 3) >= 4)
        agents.lose(2)
        agents.until(lambda said: "step 30 loss" in said)
        assert [agent.wait(60) for agent in agents.running[:2]] == [0, 0]
    finally:
        agents.end()
    said = agents.said()
    found = numbered_losses(said)
    assert {step for step, _ in found} == set(whole)
    for step, loss in found:
        assert loss == pytest.approx(whole[step], rel=1e-12), (step, said)
    assert after(said, 2) > 0
    assert "RankFailedError" in said
