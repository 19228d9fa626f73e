"""Checkpointed calls (``torch.utils.checkpoint``) of a step that is captured: each is a region whose nodes are noted.

While a step is recorded their functions run once, as written; what is run again for the backward is cut out of the
program afterwards (``recompute``).  That is the same for both kinds of checkpoints (``use_reentrant``), and needs none
of what keeps two runs of Python alike: ``preserve_rng_state``, ``determinism_check``, ``early_stop``, ``debug``.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint as eager
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy

from ...compat import around_checkpoints, selective_context
from ...errors import CaptureError
from ...kept import ASKED
from ...layout import Shard
from .fakes import replaced

Tensor = torch.Tensor

_SAVED = {CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True}
_AGAIN = {CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE, False}


@dataclass(frozen=True, eq=False)
class Region:
    """One checkpointed call.

    Attributes:
        number: no other call of the step has it.
        policy: of a selective checkpoint: which ops are saved; None: none is.
        split: axis to how what it reads is kept for the backward (``mw.saved_split``); empty: as it lies.
    """

    number: int
    policy: Callable[..., Any] | None = None
    split: Mapping[str, Shard] = field(default_factory=dict)

    def saves(self, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
        """Whether what an op gives is kept for the backward.

        Raises:
            CaptureError: the policy wants what a program cannot do.
        """
        if self.policy is None or func in eager.SAC_IGNORED_OPS:
            return False
        said = self.policy(selective_context(out), func, *args, **kwargs)
        if said not in _SAVED | _AGAIN:
            raise CaptureError(
                f"the policy of a selective checkpoint says {said} of {func}: a captured step saves or recomputes"
            )
        return said in _SAVED


Path = tuple[Region, ...]  # of nested calls, from the outside


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


__all__ = ["Path", "Region", "Regions"]
