"""States of the default random generators: that of the host, and that of the device which this rank computes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensor = torch.Tensor
HOST = "cpu"


def random_states(device: str) -> dict[str, Tensor]:
    """The states by type of device: the host's, and that of the current device of type ``device``."""
    states = {HOST: torch.get_rng_state()}
    module = _module(device)
    if module is not None:
        states[device] = module.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Tensor]) -> None:
    """Let the generators draw from these states on."""
    for device, state in states.items():
        module = _module(device)
        (torch if module is None else module).set_rng_state(state)


def _module(device: str) -> Any:
    """Of an accelerator, ``torch.cuda`` and the like."""
    return None if device in (HOST, "meta") else torch.get_device_module(device)


__all__ = ["random_states", "set_random_states"]
