"""Parameters that are stored on the host: marked, and copied to the mesh's device and back.

A copy from the host is started before it is needed, on CUDA on a stream beside that of the ops; what is copied is as it
is stored, so that neither direction costs the processor more than the start: casts are made on the device.  Who waits
for a copy waits in Python too: from then on the memory that it read may be written to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from ...dispatch import disabled
from ...errors import ShardError
from ...ranks import runtime
from ...resharding.copies import HOST, pins

Tensor = torch.Tensor


def check_device(device: Any, option: str = "offload") -> None:
    """Raises ShardError for a device that nothing is stored on."""
    if device != HOST:
        raise ShardError(
            f"{option}={device!r}: {HOST!r} was expected, the memory of the host; leave it out to store on the mesh's "
            "device"
        )


def in_host_memory(local: Tensor, device: str) -> Tensor:
    """A plain tensor in memory of the host; pinned, where the mesh's device copies from that by itself."""
    made = Tensor.to(local, HOST)
    return made.pin_memory() if pins(device) else made


def check_place(p: Tensor) -> None:
    """Raises ShardError where a parameter that is stored on the host has been moved away since."""
    with disabled():
        lies = p.device
    if lies.type != HOST:
        raise ShardError(
            f"{p.__dict__.get('_param_name', 'a parameter')} is stored on the host (offload={HOST!r}), and lies on "
            f"{lies} since model.to() or p.data= moved it: move buffers before shard_module, and leave parameters "
            "where they are stored"
        )


def keep_for(t: Tensor, stream: Any) -> None:
    """Free the memory of ``t`` no sooner than a stream of CUDA is done with what it was given before."""
    if t.is_cuda:
        t.record_stream(stream)


class CopyStream:
    """Inside, what is queued for a device runs beside what it computes: on CUDA on a stream of its own.

    It begins when all is done that the device was given before; so what it reads is there, and what it writes to is no
    longer read.

    Args:
        device: type of the mesh's device.
        back: towards the host: copies both ways go on at a time.
    """

    def __init__(self, device: str, *, back: bool = False) -> None:
        self.cuda, self.back = pins(device), back
        self.side: Any = None
        self.inside: Any = None
        self.done: Any = None

    def __enter__(self) -> CopyStream:
        if self.cuda:
            self.side = _side(torch.cuda.current_device(), self.back)
            self.side.wait_stream(torch.cuda.current_stream())
            self.inside = torch.cuda.stream(self.side)
            self.inside.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.cuda:
            self.done = torch.cuda.Event()
            self.done.record(self.side)
            self.inside.__exit__(kind, error, at)

    def reads(self, t: Tensor) -> Tensor:
        """A tensor that is not of the lane and is read in it: its memory is kept until then."""
        if self.cuda:
            keep_for(t, self.side)
        return t

    def wait(self, made: Iterable[Tensor] = ()) -> None:
        """Until its copies are made; ``made``: tensors of the lane that others read from now on."""
        if self.done is not None:
            self.done.synchronize()
            for t in made:
                keep_for(t, torch.cuda.current_stream())


@functools.cache
def _side(device: int, back: bool) -> Any:
    """The stream for copies to, or from, a device."""
    return torch.cuda.Stream(device)


class AsyncOffload:
    """A tensor on its way from the mesh's device to the host."""

    def __init__(self, t: Tensor, device: str) -> None:
        runtime.RT.counts.add_copy("to_host", t.nbytes)
        self.lane, self.made = CopyStream(device, back=True), t
        if t.device.type != HOST:
            self.made = torch.empty(t.shape, dtype=t.dtype, device=HOST, pin_memory=pins(device))
            with self.lane:
                self.made.copy_(self.lane.reads(t), non_blocking=True)

    def wait(self) -> Tensor:
        """The tensor on the host."""
        self.lane.wait()
        return self.made


__all__ = [
    "HOST",
    "AsyncOffload",
    "CopyStream",
    "check_device",
    "check_place",
    "in_host_memory",
]
