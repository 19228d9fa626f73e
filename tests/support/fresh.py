"""Code in a process of its own that has no mesh yet: forked from one that has imported PyTorch, or Meshwright too."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TIMEOUT = 120  # seconds of one piece of code
# Of PyTorch what Meshwright's modules import, and what its first use does.
TORCH = ("torch", "torch.distributed.tensor", "torch.export", "torch._dynamo", "torch.distributions")


def run(code: str, imported: str = "meshwright") -> str:
    """Run code as ``python -c`` does; ``imported``: what its process has imported, ``torch`` or ``meshwright``.

    Returns:
        What it wrote.

    Raises:
        AssertionError: it failed; with what it wrote.
    """
    server = _servers()[imported]
    server.write(json.dumps(code) + "\n")
    server.flush()
    status, text = json.loads(server.readline())
    assert status == 0, text
    return str(text)


def run_ranks(code: str, environments: Sequence[dict[str, str]]) -> list[str]:
    """Run code in processes at once, each with an environment of its own, forked from one that has imported PyTorch.

    Returns:
        What each wrote to its standard output.

    Raises:
        AssertionError: one failed; with what all wrote to their standard errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        run(f"""
import os, signal, sys
for rank, environment in enumerate({list(environments)!r}):
    if os.fork() == 0:
        signal.alarm({TIMEOUT})
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(f"{folder}/{{rank}}", os.O_CREAT | os.O_WRONLY), 1)
        exec(compile({code!r}, "<string>", "exec"), vars(sys.modules["__main__"]))
        break
else:
    assert not any([os.wait()[1] for _ in range({len(environments)})])
""", "torch")  # fmt: skip
        return [(Path(folder) / str(rank)).read_text() for rank in range(len(environments))]


@functools.cache
def _servers() -> dict[str, TextIO]:
    """The processes that fork; they end with this one, whose sockets they read."""
    pairs = [socket.socketpair() for _ in range(2)]
    theirs = [pair[1].fileno() for pair in pairs]
    root = Path(__file__).parents[2]  # a test may be elsewhere
    subprocess.Popen([sys.executable, "-m", "tests.support.fresh", *map(str, theirs)], pass_fds=theirs, cwd=root)
    for _, their in pairs:
        their.close()
    return {name: ours.makefile("rw") for name, (ours, _) in zip(("torch", "meshwright"), pairs, strict=True)}


def _serve(fd: int) -> None:
    from tests.support import cheap

    cheap.freeze()
    with socket.socket(fileno=fd) as ours, ours.makefile("rw") as lines:
        while line := lines.readline():
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                os.close(reading)
                os.dup2(writing, 1)
                os.dup2(writing, 2)
                os._exit(_status_of(json.loads(line)))
            os.close(writing)
            with open(reading) as said:
                text = said.read()
            _, status = os.waitpid(child, 0)
            lines.write(json.dumps([status, text]) + "\n")
            lines.flush()


def _status_of(code: str) -> int:
    signal.alarm(TIMEOUT)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.orig_argv, sys.argv = [sys.executable, "-c", code], ["-c"]
    try:
        exec(compile(code, "<string>", "exec"), vars(main))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    plain, whole = map(int, sys.argv[1:])
    sys.argv[1:] = []
    for module in TORCH:
        importlib.import_module(module)
    if os.fork():
        os.close(whole)
        _serve(plain)
    else:
        os.close(plain)
        importlib.import_module("meshwright")
        _serve(whole)

__all__ = ["run", "run_ranks"]
