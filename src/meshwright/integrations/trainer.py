"""The ``Trainer`` of Transformers on a mesh: the losses, parameters and files of one device.

The model is sharded by :func:`meshwright.shard_module` and given to it; all that a ``Trainer`` does besides (arguments,
callbacks, evaluation, schedules, logs) is its own.  Batch sizes in ``TrainingArguments`` are those of the whole mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer import OPTIMIZER_NAME

from .. import collective
from ..checkpoint import Checkpoints
from ..checkpoint.contents import host_generators, set_host_generators
from ..checkpoint.manifest import remove, saves_in
from ..errors import ShardError
from ..layout import Placement
from ..shard import shard_dataloader, shard_optimizer
from ..tensor import DistTensor
from ..tensor.api import unshard
from .accelerate import as_the_first, one_device

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
    them onto any mesh, and what a trainer on one device saved.

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
    _earlier: Set[Path] = frozenset()  # saves of runs before this one

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
        with as_the_first():  # seeds of workers
            loader: DataLoader[Any] = super()._get_dataloader(*args, **options)  # type: ignore[misc]
        batches = shard_dataloader(loader, self._mesh, self._batch)
        kept = getattr(self, "_eval_dataloaders", {})  # with workers that stay
        kept.update({name: batches for name, one in kept.items() if one is loader})
        return batches

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """All choose the best model, and stop, by the first rank's metrics: some are drawn, or a clock's."""
        made = super().evaluation_loop(*args, **options)  # type: ignore[misc]
        return made._replace(metrics=collective.all_gather_object(made.metrics, collective.group(self._mesh))[0])

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)  # type: ignore[misc]
        if not isinstance(optimizer, AcceleratedOptimizer):  # that of an earlier train()
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

    def train(self, *args: Any, **options: Any) -> Any:
        """Checkpoints that are there when it begins are of earlier runs, and give way to those of the same step."""
        one_device()  # other arguments, made since, set it anew
        found = Path(self.args.output_dir).glob(f"checkpoint-*/{_STATES}")
        self._earlier = {save.path for folder in found for save in saves_in(folder)}
        return super().train(*args, **options)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        states = Path(output_dir) / _STATES
        if self.is_world_process_zero():  # type: ignore[attr-defined]
            for save in saves_in(states):
                if save.path in self._earlier:
                    remove(save.path)
        collective.barrier(collective.group(self._mesh))
        Checkpoints(states).save(
            self.state.global_step, model=self.model, optimizer=self.optimizer.optimizer, scheduler=self.lr_scheduler,
            wait=True,
        )  # fmt: skip

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Random numbers stay where they are: the order of the data is drawn yet, and the trainer sets them behind it.

        Raises:
            CheckpointError: on all ranks: optimizer and schedule are not there, those of another step, or damaged.
        """
        if checkpoint is None:
            return
        states = Path(checkpoint) / _STATES
        there = states.exists(), (Path(checkpoint) / OPTIMIZER_NAME).exists()
        ours, of_one_device = collective.all_gather_object(there, collective.group(self._mesh))[0]
        if not ours:
            if not of_one_device:
                warnings.warn(
                    f"{checkpoint} has no states of an optimizer: it and the schedule begin anew", stacklevel=2
                )
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        hosts, devices = host_generators(), [torch.cuda.current_device()] if self._mesh.device == "cuda" else []
        with torch.random.fork_rng(devices):
            Checkpoints(states).load(
                model=self.model, optimizer=self.optimizer.optimizer, scheduler=self.lr_scheduler,
                step=self.state.global_step,
            )  # fmt: skip
        set_host_generators(hosts)


class MeshTrainer(OnMesh, transformers.Trainer):
    """``transformers.Trainer`` on a mesh; see :class:`OnMesh`."""
