"""Checkpointed calls (``torch.utils.checkpoint``) of a step that is captured: each is a region whose nodes are noted.

While a step is recorded their functions run once, as written; what is run again for the backward is cut out of the
program afterwards (``recompute``).  That is the same for both kinds of checkpoints (``use_reentrant``), and needs none
of what keeps two runs of Python alike: ``preserve_rng_state``, ``determinism_check``, ``early_stop``, ``debug``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as eager
from torch.utils.checkpoint import CheckpointFunction

from ...compat import around_checkpoints
from ...errors import CaptureError
from ...tensor.split_checkpoints import ASKED
from ...torch_changes import note
from ..ir.regions import Path, Region
from .fakes import replaced

Tensor = torch.Tensor
note(
    *(f"torch.utils.checkpoint.{name}" for name in around_checkpoints(eager, lambda context_fn: None)),
    "torch.utils.checkpoint.CheckpointFunction.apply",
    why="checkpointed calls of a step are regions of its program",
)


class Regions:
    """The checkpointed calls of a step, while it runs.

    Args:
        inside: of a path, what is entered while its function runs.
    """

    def __init__(self, inside: Callable[[Path], AbstractContextManager[Any]]) -> None:
        self.inside = inside
        self.path: Path = ()
        self._numbers = itertools.count()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, ``torch.utils.checkpoint`` and what is made of it run functions as regions."""
        composable: Any = sys.modules.get("torch.distributed._composable.checkpoint_activation")
        with contextlib.ExitStack() as stack:
            for module in filter(None, (eager, composable)):
                stack.enter_context(replaced(module, **around_checkpoints(module, self._around)))
            stack.enter_context(replaced(CheckpointFunction, apply=self._reentrant))
            yield

    @contextmanager
    def _region(self, policy: Callable[..., Any] | None) -> Iterator[None]:
        outer = self.path
        self.path = (*outer, Region(next(self._numbers), policy, ASKED.placements))
        try:
            with self.inside(self.path):
                yield
        finally:
            self.path = outer

    def _around(self, context_fn: Callable[[], Any]) -> Iterator[None]:
        """In place of what torch does around a call."""
        with self._region(_policy(context_fn)) if torch.is_grad_enabled() else contextlib.nullcontext():
            yield

    def _reentrant(self, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """In place of torch's autograd function, which gives gradients only where an input needs one."""
        if not any(isinstance(a, Tensor) and a.requires_grad for a in args):
            with torch.no_grad():
                return function(*args)
        with self._region(None) if torch.is_grad_enabled() else contextlib.nullcontext():
            return function(*args)


def _policy(context_fn: Callable[[], Any]) -> Callable[..., Any] | None:
    """Of the contexts of a selective checkpoint, what decides; None where there are none.

    Raises:
        CaptureError: contexts of another kind.
    """
    contexts = context_fn()
    if all(isinstance(c, contextlib.nullcontext) for c in contexts):
        return None
    if type(contexts[0]) is eager._CachingTorchDispatchMode:
        policy: Callable[..., Any] = contexts[0].policy_fn
        return policy
    names = ", ".join(type(c).__name__ for c in contexts)
    raise CaptureError(
        f"torch.utils.checkpoint(context_fn=...) gives {names}: a captured step knows those of "
        "create_selective_checkpoint_contexts; enter others inside the checkpointed function"
    )


__all__ = ["Regions"]
