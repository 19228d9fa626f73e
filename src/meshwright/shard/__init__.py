"""Sharding of modules, optimizers and data loaders; gradient synchronisation; ZeRO."""

from __future__ import annotations

from .module import shard_module
from .optimizer import shard_optimizer
from .sync import no_sync

__all__ = ["no_sync", "shard_module", "shard_optimizer"]
