"""Sharding of modules, optimizers and data loaders; gradient synchronisation; ZeRO."""

from __future__ import annotations

from . import foreach as foreach
from .loader import shard_dataloader
from .module import shard_module
from .optimizer import shard_optimizer
from .precision import Precision
from .sync import no_sync

__all__ = ["Precision", "no_sync", "shard_dataloader", "shard_module", "shard_optimizer"]
