"""Lightning Fabric on a mesh: a strategy for which the mesh is one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_fabric.strategies.single_device import SingleDeviceStrategy
from torch import nn

from .. import collective
from ..compat import tree_map_only
from ..layout import Placement
from ..mesh import Mesh
from ..ranks import runtime
from ..shard import shard_dataloader, shard_module, shard_optimizer
from ..tensor import DistTensor
from ..tensor.api import init_mesh, unshard


class MeshStrategy(SingleDeviceStrategy):
    """``fabric.setup`` shards the module and its optimizers, ``setup_dataloaders`` the batches.

    Args:
        mesh: axis name to size, or a mesh that is there.
        layouts, batch: as :func:`meshwright.shard_module` and :func:`meshwright.shard_dataloader` take them.
        device: of this process.
        options: more for :func:`meshwright.shard_module`: ``fsdp=``, ``precision=``...

    The processes are torchrun's; ``fabric.all_reduce`` and ``all_gather`` return what they are given, since a value is
    that of all ranks already.  ``fabric.save`` writes whole tensors, by the first rank.

    Example:
        >>> strategy = MeshStrategy({"dp": 2, "tp": 2}, layouts, {"dp": mw.Shard(0)})
        >>> fabric = lightning_fabric.Fabric(accelerator="cpu", strategy=strategy)
        >>> model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        >>> loader = fabric.setup_dataloaders(loader)
    """

    def __init__(
        self, mesh: Mesh | Mapping[str, int], layouts: Any = None, batch: Mapping[str, Placement] | None = None, *,
        device: str = "cpu", **options: Any,
    ) -> None:  # fmt: skip
        self.mesh = mesh if isinstance(mesh, Mesh) else init_mesh(dict(mesh), device=device)
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        super().__init__(where)
        self.layouts, self.batch, self.options = layouts, dict(batch or {}), options
        self.global_rank = self.local_rank = runtime.RT.rank  # by the local one Fabric prints: once, on all hosts
        self._group = collective.group(self.mesh)

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_module(self, module: nn.Module) -> nn.Module:
        return shard_module(module, self.mesh, self.layouts, **self.options)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return shard_optimizer(optimizer)

    def process_dataloader(self, dataloader: Any) -> Any:
        return shard_dataloader(dataloader, self.mesh, self.batch)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        collective.barrier(self._group)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return collective.all_gather_object(obj, self._group)[src]

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        filters = options.pop("filter", None) or {}
        state = self._convert_stateful_objects_in_state(state, filters)
        whole = tree_map_only(DistTensor, unshard, state)
        super().save_checkpoint(path, whole, *args, **options)
        self.barrier()
