"""Copies between the memory of the host and that of the mesh's device: steps of a conversion like others."""

from __future__ import annotations

import torch

from ..operators import operator
from ..ranks import runtime

Tensor = torch.Tensor
HOST = "cpu"


def pins(device: str) -> bool:
    """Whether memory of the host that is copied to and from this type of device is pinned."""
    return device == "cuda" and torch.cuda.is_available()


def _to_device(t: Tensor, device: str) -> Tensor:
    runtime.RT.counts.add_copy("to_device", t.nbytes)
    return t.to(device, non_blocking=True, copy=True)


def _to_host(t: Tensor) -> Tensor:
    runtime.RT.counts.add_copy("to_host", t.nbytes)
    if not pins(t.device.type):
        return t.to(HOST, copy=True)
    return torch.empty(t.shape, dtype=t.dtype, device=HOST, pin_memory=True).copy_(t)


# What others on the device do later reads what was copied; the copy to the host is there when the call returns.
TO_DEVICE = operator(
    "to_device(Tensor x, str device) -> Tensor", _to_device, lambda t, device: t.new_empty(t.shape, device=device)
).default
TO_HOST = operator("to_host(Tensor x) -> Tensor", _to_host, lambda t: t.new_empty(t.shape, device=HOST)).default

__all__ = ["HOST", "TO_DEVICE", "TO_HOST", "pins"]
