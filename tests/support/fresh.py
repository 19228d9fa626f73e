"""Code in a process of its own that has no mesh yet: forked from one that has imported Meshwright and done nothing."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import traceback
import types
from typing import IO

TIMEOUT = 120  # seconds of one piece of code


def run(code: str) -> None:
    """Run code as ``python -c`` does.

    Raises:
        AssertionError: it failed; with what it wrote.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(code) + "\n")
    server.stdin.flush()
    status, text = json.loads(server.stdout.readline())
    assert status == 0, text


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, whose pipe it reads."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.fresh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve(answers: IO[str]) -> None:
    import meshwright  # noqa: F401 (for the forks)
    from tests.support import cheap

    cheap.freeze()
    for line in sys.stdin:
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
        print(json.dumps([status, text]), file=answers, flush=True)


def _status_of(code: str) -> int:
    signal.alarm(TIMEOUT)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
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
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    _serve(mine)

__all__ = ["run"]
