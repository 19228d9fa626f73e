"""The options of a training run as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import meshwright as mw
from meshwright.errors import MeshError, MeshwrightError
from meshwright.passes import PassManager

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = ("adamw", "sgd")
LEARNING_RATES = {"adamw": 3e-3, "sgd": 0.1}
DEVICES = ("cpu", "cuda")
VOCABULARY = 256  # one entry per byte
MOMENTUM = 0.9
MERGE = "gradient-merge"  # the pass that accumulates


class OptionError(MeshwrightError, ValueError):
    """Options of a training run that do not fit together."""


@dataclass(frozen=True)
class TrainConfig:
    """What ``meshwright train`` was asked for.

    Attributes:
        mesh: axis name to size, outermost first; the plan knows ``dp`` and ``tp``.
        data: files to train on; empty: the sources of Python's standard library.
        stored_over: axis over which parameters are stored split (ZeRO-3), or None.
        states_over: axis over which optimizer states are split (ZeRO-1/2), or None.
        layers, hidden, heads: size of the model.
        seq: bytes per window.
        batch: windows per micro-step, over all ranks.
        accumulate: micro-steps per step; the loss is their mean.
        lr: learning rate; None: the default of the optimizer.
        clip: largest norm of all gradients together, or None.
        static: train through a captured step (``mw.compile_step``) instead of eagerly.
        passes: of the captured step, as ``meshwright.passes.parse`` reads them.
        verify: train the same model on one device too, and compare every step.
        threads: threads of each process inside one op.
    """

    mesh: tuple[tuple[str, int], ...] = (("dp", 1),)
    data: tuple[str, ...] = ()
    stored_over: str | None = None
    states_over: str | None = None
    sequence_parallel: bool = False
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    seq: int = 64
    batch: int = 8
    steps: int = 50
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float | None = None
    clip: float | None = None
    dropout: float = 0.0
    tie: bool = False
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    static: bool = False
    passes: tuple[str, ...] = ()
    verify: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        """Raises OptionError, or MeshError for the mesh, naming the option and what would be right."""
        for name in ("layers", "hidden", "heads", "seq", "batch", "steps", "accumulate", "threads"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name} {getattr(self, name)}: at least 1 was expected")
        if self.hidden % self.heads:
            raise OptionError(
                f"--hidden {self.hidden} cannot be split over --heads {self.heads}: take a multiple of the "
                f"heads, e.g. --hidden {-(-self.hidden // self.heads) * self.heads}"
            )
        for name, choices in (("optimizer", OPTIMIZERS), ("dtype", tuple(DTYPES)), ("device", DEVICES)):
            if getattr(self, name) not in choices:
                raise OptionError(f"--{name} {getattr(self, name)}: one of {', '.join(choices)} was expected")
        if not 0.0 <= self.dropout < 1.0:
            raise OptionError(f"--dropout {self.dropout}: a probability in [0, 1) was expected")
        if self.lr is not None and not self.lr > 0:
            raise OptionError(f"--lr {self.lr}: a positive number was expected")
        if self.clip is not None and not self.clip > 0:
            raise OptionError(f"--clip {self.clip}: a positive number was expected (leave it out: no clipping)")
        self.check_mesh()
        self.check_passes()

    def check_mesh(self) -> None:
        """Raises OptionError or MeshError where the mesh and the options that name its axes do not fit."""
        mesh = self.make_mesh()
        for name in ("stored_over", "states_over"):
            axis, option = getattr(self, name), "--" + name.replace("_", "-")
            if axis is None:
                continue
            if axis not in mesh.axes:
                raise MeshError(f"{option} {axis}: unknown axis; {mesh!r} has the axes {', '.join(mesh.axes)}")
            if axis == "tp":
                raise OptionError(f"{option} tp: the plan splits the parameters over tp already; take {option} dp")
        if self.stored_over and self.states_over:
            raise OptionError(
                f"--stored-over {self.stored_over} splits the optimizer states too: leave --states-over out"
            )
        if self.sequence_parallel and "tp" not in mesh.axes:
            raise OptionError(
                f"--sequence-parallel splits the residual stream over tp, and {mesh!r} has no such axis: "
                "add one, e.g. --mesh dp=2,tp=2"
            )

    def check_passes(self) -> None:
        """Raises OptionError or PassError for passes that do not exist or do not fit the other options."""
        if self.passes and not self.static:
            raise OptionError(f"--pass {self.passes[0]}: passes change the captured step: add --static")
        if self.static and self.accumulate > 1 and any(p.partition(":")[0] == MERGE for p in self.passes):
            raise OptionError(
                f"--accumulate {self.accumulate} is the pass {MERGE} of a captured step: leave one of the two out"
            )
        self.pass_manager()

    def pass_manager(self) -> PassManager:
        """The passes of the captured step; micro-steps are one of them."""
        merge = (f"{MERGE}:k_steps={self.accumulate}",) if self.accumulate > 1 and self.static else ()
        return PassManager((*merge, *self.passes))

    def make_mesh(self) -> mw.Mesh:
        """The mesh, as a description."""
        return mw.Mesh(dict(self.mesh), device=self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return DTYPES[self.dtype]

    @property
    def learning_rate(self) -> float:
        """``lr``, or the default of the optimizer."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step learns from, over all ranks."""
        return self.batch * self.seq * self.accumulate

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer, native, for a model of either kind."""
        parameters: Any = model.parameters()
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=MOMENTUM)
        return torch.optim.AdamW(parameters, lr=self.learning_rate)
