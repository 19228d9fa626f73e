"""The device of the tests: ``MESHWRIGHT_TEST_DEVICE=cuda pytest -m gpu``, with simulated ranks that share one GPU.

Nothing else reads the variable. Tests are written for a mesh and tensors without a device; on another one a mesh is of
that device by default, and what makes a tensor makes it there. A CPU generator that a test passes draws on the CPU, so
its values are the same everywhere.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from meshwright.mesh import Mesh
from meshwright.ranks import simulation

DEVICE = os.environ.get("MESHWRIGHT_TEST_DEVICE", "cpu")
TELLING = (  # with `-m gpu`: about five minutes; the first ones first
    "tests/resharding/test_conversions.py",
    "tests/rules/test_opdb.py",
    "tests/tensor/test_autograd.py",
    "tests/generator/test_random.py",
    "tests/shard/test_shard_zero.py",
    "tests/shard/test_offload.py",
    "tests/shard/test_precision.py",
    "tests/passes/test_passes.py",
    "tests/program/test_captured_zero.py",
    "tests/shard/test_wires.py",
    "tests/conformance/test_fuzz.py",
    "tests/rules/test_attention.py",
)


APART = (  # PyTorch's GPU kernel of bernoulli with a tensor of probabilities draws in an order of its own (docs/gpu.md)
    "test_probabilities_and_means_from_tensors", "test_gradients_of_draws_are_zeros", "test_a_generator_of_ones_own",
)  # fmt: skip


class On(TorchFunctionMode):
    """Inside, what makes a tensor makes it on a device, if nothing else is passed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.makers = torch.device(device), _device_constructors()
        self.theirs: dict[int, tuple[torch.Generator, torch.Generator]] = {}

    def _there(self, generator: torch.Generator) -> torch.Generator:
        """A generator of the device in place of one of the host, with its seed."""
        if id(generator) not in self.theirs:
            own = torch.Generator(self.device).manual_seed(generator.initial_seed())
            self.theirs[id(generator)] = generator, own
        return self.theirs[id(generator)][1]

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if fn not in self.makers or kwargs.get("device") is not None:
            if generator is not None and generator.device.type != self.device.type and self.device.type != "meta":
                kwargs["generator"] = self._there(generator)
            return fn(*args, **kwargs)
        if generator is None or generator.device.type == self.device.type:
            return fn(*args, **{**kwargs, "device": self.device})
        made = fn(*args, **kwargs)
        return made.detach().to(self.device).requires_grad_(made.requires_grad)


def install(patch: pytest.MonkeyPatch, device: str = DEVICE) -> contextlib.AbstractContextManager[Any]:
    """Put meshes and simulated ranks on a device; enter what comes back for the thread of the tests."""
    if device == "cpu":
        return contextlib.nullcontext()
    patch.setattr(Mesh.__init__, "__kwdefaults__", {**(Mesh.__init__.__kwdefaults__ or {}), "device": device})
    of_caller: Callable[[], Callable[[], Any]] = simulation._caller_modes

    def caller_modes() -> Callable[[], Any]:
        inner = of_caller()

        @contextlib.contextmanager
        def modes() -> Iterator[None]:
            with inner(), On(device):
                yield

        return modes

    patch.setattr(simulation, "_caller_modes", caller_modes)
    return On(device)


def mark(items: list[pytest.Item]) -> None:
    """Mark the most telling simulated tests ``gpu``."""
    for item in items:
        apart = item.get_closest_marker("processes") or item.get_closest_marker("long")
        where, _, name = item.nodeid.partition("::")
        if where in TELLING and not apart and not name.startswith(APART):
            item.add_marker("gpu")


__all__ = ["DEVICE", "TELLING", "On", "install", "mark"]
