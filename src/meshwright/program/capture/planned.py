"""What plans say beside layouts: which calls run again for the backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from ...shard.parameters.names import matching


class Recomputed:
    """A module whose calls are checkpointed until :meth:`remove`."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.had = module, module.__dict__.get("forward")
        again = functools.partial(checkpoint, module.forward, use_reentrant=False)
        module.__dict__["forward"] = again

    def remove(self) -> None:
        """Have the module compute as before."""
        if self.had is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.had


def matching_modules(globs: Sequence[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of the modules that globs match.  Raises ShardError for a glob that matches none."""
    found = matching(dict.fromkeys(globs, ()), modules, "module (in recompute)")
    return list(dict.fromkeys(name for names in found.values() for name in names))


__all__ = ["Recomputed", "matching_modules"]
