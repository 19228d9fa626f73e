"""Sharding of modules, optimizers and data loaders; gradient synchronisation; ZeRO."""

from __future__ import annotations

from .data.dataloader import shard_dataloader
from .gradients.sync import no_sync
from .modules.module import shard_module
from .optimizers import foreach as foreach
from .optimizers.optimizer import shard_optimizer
from .parameters.precision import Precision

__all__ = ["Precision", "no_sync", "shard_dataloader", "shard_module", "shard_optimizer"]
