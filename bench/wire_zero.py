"""Overlap of ZeRO-3 on a virtual wire: how much of its communication a step waits for, against what no schedule avoids.

One process is rank 0 of two.  Its process group answers with the right shapes at once, and completes each collective
after ``alpha + bytes / beta`` on one serial wire: a thread that sleeps, so that communication takes no computing time.
Bytes are those that a ring sends per rank.  Each contender is timed beside itself on a wire that takes no time.

    python bench/wire_zero.py [--alpha-us 100] [--gb-per-s 0.4] [--layers 6] [--rounds 9] [--json]
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright import collective
from meshwright.train import TrainConfig
from meshwright.train.model import GPT

RANKS = 2


@dataclass
class Message:
    """What one collective took on the wire, seconds; when it was asked for, and when somebody waited for it."""

    took: float
    gathers: bool
    asked: float
    waited: float = 0.0


class Wire(threading.Thread):
    """One serial link: each message starts when the one before has arrived."""

    def __init__(self, alpha: float, beta: float) -> None:
        super().__init__(daemon=True)
        self.alpha, self.beta, self.instant = alpha, beta, True
        self.queue: queue.Queue[tuple[Message, Any, Any]] = queue.Queue()
        self.messages: list[Message] = []
        self.start()

    def put(self, sent: float, gathers: bool, future: Any, value: Any) -> Message:
        """Send that many bytes, then complete the future."""
        message = Message(self.alpha + sent / self.beta, gathers, time.perf_counter())
        self.messages.append(message)
        if self.instant:
            future.set_result(value)
        else:
            self.queue.put((message, future, value))
        return message

    def run(self) -> None:
        free = 0.0
        while True:
            message, future, value = self.queue.get()
            free = max(free, message.asked) + message.took
            left = free - time.perf_counter()
            if left > 0:
                time.sleep(left)
            future.set_result(value)


class Work(dist._Work):  # type: ignore[name-defined,misc]
    """What a collective on the wire gives."""

    def __init__(self, future: Any, message: Message) -> None:
        super().__init__()
        self.future, self.message = future, message

    def wait(self, timeout: Any = None) -> bool:
        self.message.waited = self.message.waited or time.perf_counter()
        self.future.wait()
        return True

    def get_future(self) -> Any:
        return self.future

    def is_completed(self) -> bool:
        return bool(self.future.done())


class OnWire(dist.ProcessGroup):
    """Rank 0 of two; the other one has the same data."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(0, RANKS)
        self.wire = wire

    def _sent(self, share: float, t: torch.Tensor, value: Any, gathers: bool = False) -> Work:
        future: Any = torch.futures.Future()
        return Work(future, self.wire.put(share * t.nbytes, gathers, future, value))

    def _allgather_base(self, out: Any, given: Any, options: Any = None) -> Work:
        out.view(RANKS, -1).copy_(given.reshape(1, -1).expand(RANKS, -1))
        return self._sent((RANKS - 1) / RANKS, out, out, True)

    def allgather(self, outs: Any, given: Any, options: Any = None) -> Work:
        for out, t in zip(outs[0], [given[0]] * RANKS, strict=True):
            out.copy_(t if t.shape == out.shape else t.new_zeros(out.shape))
        return self._sent(RANKS - 1, given[0], outs, True)

    def _reduce_scatter_base(self, out: Any, given: Any, options: Any = None) -> Work:
        out.copy_(given.view(RANKS, -1)[0].view(out.shape)).mul_(RANKS)
        return self._sent((RANKS - 1) / RANKS, given, out)

    def allreduce(self, tensors: Any, options: Any = None) -> Work:
        return self._sent(2 * (RANKS - 1) / RANKS, tensors[0], tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Work:
        return self._sent(0.0, tensors[0], tensors)

    def getBackendName(self) -> str:
        return "wire"

    def size(self) -> int:
        return RANKS

    def rank(self) -> int:
        return 0


def loss_of(model: Any, ids: Any) -> Any:
    """Cross-entropy of the next byte."""
    return torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Eager:
    """ZeRO-3 on distributed tensors."""

    name = "eager"

    def __init__(self, mesh: mw.Mesh, model: Any, batch: Any, gb_per_s: float) -> None:
        self.batch, self.model = batch, mw.shard_module(model, mesh, {}, stored_over="dp")
        self.optimizer = mw.shard_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True))

    def step(self) -> None:
        loss_of(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Captured:
    """ZeRO-3 as a captured step, with its passes."""

    name = "captured"

    def __init__(self, mesh: mw.Mesh, model: Any, batch: Any, gb_per_s: float) -> None:
        self.batch, passes = batch, [f"data-parallel-optimization:gb_per_s={gb_per_s},bucket_bytes=auto"]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        self.compiled = mw.compile_step(model, loss_of, optimizer, batch, mesh=mesh, stored_over="dp", passes=passes)

    def step(self) -> None:
        self.compiled(self.batch)


def timed(contender: Any, wire: Wire, *, instant: bool) -> tuple[float, float, list[Message]]:
    """When a step began, how long it took (seconds), and its messages."""
    wire.instant = instant
    wire.messages.clear()
    start = time.perf_counter()
    contender.step()
    return start, time.perf_counter() - start, list(wire.messages)


def least_exposed(start: float, took: float, messages: list[Message]) -> float:
    """What no order of the messages avoids, from a step whose wire took no time: seconds.

    All that is gathered for a computation, and for those before it, must have passed the wire: the head.  Behind the
    end of the computation passes what could not be sent earlier: the tail.  And the wire is never faster than itself.
    """
    passed, head = 0.0, 0.0
    for m in sorted((m for m in messages if m.gathers and m.waited), key=lambda m: m.waited):
        passed += m.took
        head = max(head, passed - (m.waited - start))
    rest, tail = 0.0, 0.0
    for m in sorted((m for m in messages if not m.gathers), key=lambda m: -m.asked):
        rest += m.took
        tail = max(tail, rest - (start + took - m.asked))
    return max(head + tail, sum(m.took for m in messages) - took)


def measured(contender: Any, wire: Wire, rounds: int) -> dict[str, float]:
    """Milliseconds of a step without the wire's time, sent, exposed, and the least that any schedule exposes."""
    lists: dict[str, list[float]] = {"compute": [], "sent": [], "exposed": [], "bound": []}
    count = 0
    for _ in range(rounds):
        start, quiet, messages = timed(contender, wire, instant=True)
        _, slow, _ = timed(contender, wire, instant=False)
        sent, bound, count = sum(m.took for m in messages), least_exposed(start, quiet, messages), len(messages)
        for name, value in zip(lists, (quiet, sent, slow - quiet, bound), strict=True):
            lists[name].append(1e3 * value)
    made = {name: statistics.median(values) for name, values in lists.items()}
    made["messages"] = float(count)
    made["part hidden"] = 1 - made["exposed"] / made["sent"]
    if made["bound"] > 0.1:  # else all can be hidden
        made["exposed / bound"] = made["exposed"] / made["bound"]
    return made


def main() -> None:
    """Time both and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--alpha-us", type=float, default=100, help="latency of a message, microseconds")
    parser.add_argument("--gb-per-s", type=float, default=0.4, help="bandwidth of the wire")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    torch.set_num_threads(1)
    wire, mesh = Wire(given.alpha_us * 1e-6, given.gb_per_s * 1e9), mw.Mesh({"dp": RANKS})
    collective.override_group(mesh, (0,), OnWire(wire)).scatters = True
    ids = torch.randint(0, 256, (2, 128))
    batch = mw.from_local(ids, mesh, {"dp": mw.Shard(0)}, check=False)
    found: dict[str, dict[str, float]] = {}
    for kind in (Eager, Captured):
        torch.manual_seed(0)
        model = GPT(TrainConfig(layers=given.layers, hidden=256, heads=4, seq=128))
        contender = kind(mesh, model, batch, given.gb_per_s)
        for _ in range(3):
            contender.step()
        found[kind.name] = measured(contender, wire, given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    for name, values in found.items():
        print(
            f"{name:10}"
            + "  ".join(
                f"{k} {v:.2f}" + ("" if "/" in k or k in ("messages", "part hidden") else " ms")
                for k, v in values.items()
            )
        )


if __name__ == "__main__":
    main()
