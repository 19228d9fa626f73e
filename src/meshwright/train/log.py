"""What a run leaves of its steps: lines of JSON (``--log``), and events for TensorBoard (``--tensorboard``)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from meshwright.errors import ExtraError

from .config import TrainConfig
from .folder import LOG, versions
from .options import writing

KEPT = ("loss", "lr", "seconds", "tokens_per_s", "peak_bytes", "flops_share", "grad_norm", "eval_loss")
Sink = Callable[[str, dict[str, Any]], None]


class Lines:
    """One JSON object per line: first the run, then each step.

    Args:
        config: of the run; one that is resumed goes on at the end of the file, others replace it when they start.

    Raises:
        OptionError: the file cannot be written, here or at any event.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.flag = f"--log {config.log}" if config.log else f"--save {config.save}: its log"
        with self._writing():
            path = Path(config.log or Path(config.save or "") / LOG)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[str] = path.open("a", encoding="utf-8")

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing(self.flag, "leave it out")

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """One event."""
        if kind == "start":
            if not self.config.resume:  # only now: a run that cannot start leaves the log of the one before
                self.file.truncate(0)
            mesh = dict(self.config.mesh)
            layouts = {row["name"]: row["placements"] for row in values.get("parameters", ())}
            told: dict[str, Any] = {"config": asdict(self.config) | {"mesh": mesh}, "mesh": mesh}
            told |= {"versions": versions(), "layouts": layouts, "data": values.get("digest")}
            self._write(told | {"predicted_bytes": values.get("predicted_bytes"), "resumed_after": values["begin"]})
        elif kind == "step":
            self._write({"step": values["step"] + 1, **{name: values[name] for name in KEPT if name in values}})

    def _write(self, told: dict[str, Any]) -> None:
        with self._writing():
            self.file.write(json.dumps({name: finite(value) for name, value in told.items()}, allow_nan=False) + "\n")
            self.file.flush()  # now: what was written outlives whatever ends the run

    def close(self) -> None:
        """No more events."""
        with contextlib.suppress(OSError):  # what could not be written has been said
            self.file.close()


class Board:
    """Scalars of each step as TensorBoard reads them.

    Raises:
        ExtraError: tensorboard is not installed.
        OptionError: the folder cannot be written, here or at any event.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.folder = config.tensorboard
        self.writer: Any = None
        if importlib.util.find_spec("tensorboard") is None:
            raise ExtraError("--tensorboard needs tensorboard: pip install tensorboard")
        with self._writing():
            Path(self.folder or "").mkdir(parents=True, exist_ok=True)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return writing(f"--tensorboard {self.folder}", "leave it out")

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """One event."""
        with self._writing():
            if kind == "start":
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.folder)
            elif kind == "step" and self.writer is not None:
                for name in KEPT:
                    if name in values:
                        self.writer.add_scalar(name, values[name], values["step"] + 1)
                self.writer.flush()

    def close(self) -> None:
        """No more events."""
        if self.writer is not None:
            with contextlib.suppress(OSError):
                self.writer.close()


def finite(value: Any) -> Any:
    """The value; ``"nan"`` and ``"inf"`` as words, for which JSON has no numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def sinks_of(config: TrainConfig) -> list[Lines | Board]:
    """Where the steps of a run are to go.  Raises as those do."""
    found: list[Lines | Board] = [Lines(config)] if config.log or config.save else []
    return found + ([Board(config)] if config.tensorboard else [])


__all__ = ["Board", "Lines", "sinks_of"]
