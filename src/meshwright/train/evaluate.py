"""Evaluation: the mean loss over held-out data, as a sum of losses by a sum of labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshwright as mw

from .config import TrainConfig
from .subject import TrainingSubject


class Evaluation:
    """The loss over the held-out rows of a subject, each counted once on every mesh.

    Args:
        loss: mean loss of a batch, by the model as it is.
    """

    def __init__(
        self, config: TrainConfig, mesh: mw.Mesh, subject: TrainingSubject, placements: Any, loss: Callable[[Any], Any]
    ) -> None:
        self.config, self.subject, self.loss = config, subject, loss
        self.loader = mw.shard_dataloader(subject.held_out(), mesh, placements, batch_size=config.batch)

    def due(self, done: int) -> bool:
        """Whether to evaluate after so many steps."""
        every = self.config.evaluate_every
        return done == self.config.steps or (every is not None and done % every == 0)

    def __call__(self) -> float:
        total, count = 0.0, 0
        for batch in self.loader:
            labels = self.subject.count_labels(batch)
            if labels:  # the mean over none is no number
                total, count = total + float(self.loss(batch)) * labels, count + labels
        return total / count if count else float("nan")


__all__ = ["Evaluation"]
