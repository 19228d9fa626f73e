"""What a run trains: a model, the loss of a batch, the data, and the layout on a mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

import meshwright as mw
from meshwright.program import Plan
from meshwright.shard.data.order import RowOrder

from .config import TrainConfig
from .data import Corpus, Windows, load_corpus
from .model import GPT, loss_of
from .options import OptionError
from .plan import plan_for


class TrainingSubject(ABC):
    """What a run needs to know of what it trains.

    Attributes:
        rows: the data; collated rows are a batch.
        source: where the data come from, in words; ``digest``: of the data.
        title: of the model, in words.
    """

    rows: Dataset[Any]
    source: str
    digest: str
    title: str

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def model(self, device: str | torch.device) -> nn.Module:
        """The model with its first values, as one device has it; on the meta device without values."""

    @abstractmethod
    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Mean loss of a batch."""

    @abstractmethod
    def plan(self, mesh: mw.Mesh) -> Plan:
        """How model and batches are laid out."""

    def fill(self, model: nn.Module) -> None:
        """Load weights into the sharded model, where there are files of them."""
        return

    @property
    def loads(self) -> bool:
        """Whether :meth:`fill` writes all weights."""
        return False

    def export(self, model: nn.Module, folder: str, first: bool) -> None:
        """Write the trained model for others; called by every rank, ``first`` on one."""
        mw.save_weights(model, folder)

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out rows."""
        return bool(self.config.evaluate)

    @abstractmethod
    def held_out(self) -> Dataset[Any]:
        """The held-out rows."""

    @abstractmethod
    def count_labels(self, batch: Any) -> int:
        """How many labels the mean loss of a batch is over."""

    def example(self) -> Any:
        """A batch of the size of those that are trained on."""
        return default_collate([self.rows[0]] * self.config.batch)

    def batches(self) -> Iterator[Any]:
        """Endless global batches, as one device reads them: those of ``mw.shard_dataloader`` with this seed."""
        rows: Any = self.rows
        order, size, epoch = RowOrder(len(rows), self.config.seed), self.config.batch, 0
        while True:
            for first in range(0, len(rows) - size + 1, size):
                yield default_collate([rows[row] for row in order.at(epoch, first, first + size)])
            epoch += 1


class BuiltInModel(TrainingSubject):
    """The byte-level GPT, on windows of text."""

    def __init__(self, config: TrainConfig, corpus: Corpus | None = None) -> None:
        super().__init__(config)
        corpus = corpus or load_corpus(config.data, config.seq)
        self.rows = Windows(corpus, config.seq)
        self.source, self.digest = corpus.source, self.rows.digest
        self.title = f"byte-level GPT, {config.layers} layers, hidden {config.hidden}, {config.heads} heads"
        if len(self.rows) < config.batch:
            raise OptionError(
                f"--batch {config.batch}: {corpus.source} has {len(self.rows)} windows of --seq {config.seq}: give "
                "more text, or a smaller batch"
            )

    def model(self, device: str | torch.device) -> nn.Module:
        return GPT(self.config, device)

    def loss(self, model: Callable[..., Any], batch: Any) -> Tensor:
        return loss_of(model, *batch)

    def held_out(self) -> Dataset[Any]:
        windows = Windows(load_corpus(self.config.evaluate, self.config.seq), self.config.seq)
        return Subset(windows, range(0, len(windows), self.config.seq))

    def count_labels(self, batch: Any) -> int:
        return int(batch[1].numel())

    def plan(self, mesh: mw.Mesh) -> Plan:
        config = self.config
        return plan_for(
            mesh, sequence_parallel=config.sequence_parallel, tie=config.tie, experts=config.experts is not None,
            shared=bool(config.shared_experts),
        )  # fmt: skip


__all__ = ["BuiltInModel", "TrainingSubject"]
