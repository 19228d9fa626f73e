"""What takes time in each test and tells none of them anything: old garbage, and what PyTorch notes of its work."""

from __future__ import annotations

import gc
import logging

import pytest
import torch


def install(patch: pytest.MonkeyPatch) -> None:
    """Seed only devices that are there: for others ``torch.manual_seed`` formats the stack, for each, and keeps it.

    And look for no garbage until :func:`freeze`: what is imported and collected stays.
    """
    gc.disable()
    # pytest listens to loggers that do not propagate too: PyTorch describes each tensor and graph to one that anybody
    # listens to.
    patch.setattr(logging.getLogger("torch.__trace"), "addHandler", lambda handler: None)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            patch.setattr(device, "manual_seed_all", lambda seed: None)


def without_names_of_tests() -> None:
    """Have PyTorch's op database give samples without looking through the stack, each time, for a unittest."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    patch = pytest.MonkeyPatch()
    for module in (common_utils, core):
        patch.setattr(module, "extract_test_fn", lambda: None)


def freeze() -> None:
    """Keep the garbage collector off what lives as long as the process, through which it goes a fifth of the time."""
    gc.freeze()
    gc.set_threshold(10000, 10, 50)
    gc.enable()
