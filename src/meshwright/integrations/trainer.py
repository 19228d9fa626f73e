"""The ``Trainer`` of Transformers on a mesh: the losses, parameters and files of one device.

The model is sharded by :func:`meshwright.shard_module` and given to it; all that a ``Trainer`` does besides (arguments,
callbacks, evaluation, schedules, logs) is its own.  Batch sizes in ``TrainingArguments`` are those of the whole mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from torch.utils.data import DataLoader

from .. import collective
from ..checkpoint import Checkpoints
from ..errors import ShardError
from ..layout import Placement
from ..shard import shard_dataloader, shard_optimizer
from ..tensor import DistTensor
from ..tensor.api import unshard
from .accelerate import one_device

_STATES = "mesh"  # the folder of optimizer, schedule and random numbers inside of a checkpoint of the trainer


class OnMesh:
    """A mixin: ``class MySFTTrainer(OnMesh, trl.SFTTrainer)`` trains on a mesh.

    Args:
        model: from :func:`meshwright.shard_module`.
        batch: how batches lie on its mesh, as :func:`meshwright.shard_dataloader` takes it: ``{"dp": mw.Shard(0)}``.
        args, options: those of the trainer.  ``per_device_train_batch_size`` is the size of the batch on all
            ranks together, since to the trainer the mesh is one device.

    Checkpoints of the trainer have the weights as one device writes them, by the first rank, and in ``mesh/`` what
    :class:`meshwright.Checkpoints` saves of optimizer, schedule and random numbers; ``resume_from_checkpoint`` loads
    them onto any mesh.

    Raises:
        ShardError: the model is not sharded, or is made by ``model_init``.

    Example:
        >>> model = mw.shard_module(AutoModelForCausalLM.from_config(config), mesh, layouts)
        >>> MeshTrainer(model, args, train_dataset=rows, batch={"dp": mw.Shard(0)}).train()
    """

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, model: nn.Module | None = None, args: Any = None, *more: Any,
                 batch: Mapping[str, Placement] | None = None, **options: Any) -> None:  # fmt: skip
        found = next((p for p in model.parameters() if isinstance(p, DistTensor)), None) if model is not None else None
        if found is None:
            raise ShardError(f"{type(self).__name__} needs model=mw.shard_module(model, mesh, layouts)")
        self._mesh, self._batch = found.spec.mesh, dict(batch or {})
        args = args if args is not None else transformers.TrainingArguments("tmp_trainer")
        one_device()  # behind the arguments, which set the state anew
        super().__init__(model, args, *more, **options)  # type: ignore[call-arg]

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        """Every loader of the trainer comes from here: training, evaluation, prediction."""
        loader: DataLoader[Any] = super()._get_dataloader(*args, **options)  # type: ignore[misc]
        return shard_dataloader(loader, self._mesh, self._batch)

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)  # type: ignore[misc]
        self.optimizer = shard_optimizer(optimizer)
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        """All ranks gather, the first writes, and the others go on when it has.

        ``save_pretrained`` notes the architecture in the model's configuration, which stays that of all ranks.
        """
        whole = {name: unshard(value) for name, value in (state_dict or self.model.state_dict()).items()}
        super()._save(output_dir, whole)  # type: ignore[misc]
        config = getattr(self.model, "config", None)
        noted = vars(config) if config is not None else {}
        noted.update(collective.all_gather_object(noted, collective.group(self._mesh))[0])

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # one process writes the file that one process is to read
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        Checkpoints(Path(output_dir) / _STATES).save(
            self.state.global_step, model=self.model, optimizer=self.optimizer.optimizer, scheduler=self.lr_scheduler,
            wait=True,
        )  # fmt: skip

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            Checkpoints(Path(checkpoint) / _STATES).load(
                model=self.model, optimizer=self.optimizer.optimizer, scheduler=self.lr_scheduler
            )


class MeshTrainer(OnMesh, transformers.Trainer):
    """``transformers.Trainer`` on a mesh; see :class:`OnMesh`."""
