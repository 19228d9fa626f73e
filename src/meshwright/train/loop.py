"""One training step on a mesh, and the loop around it: the same for real and for simulated ranks."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import meshwright as mw
from meshwright import collective
from meshwright.collective import Fact
from meshwright.errors import CheckpointError, DataError, ShardError
from meshwright.explanation import memory_of
from meshwright.program import Plan
from meshwright.ranks import runtime
from meshwright.shard.data.dataloader import shard_dataloader

from .config import TrainConfig
from .evaluate import Evaluation
from .folder import lock, write_options
from .library import LibraryModel
from .not_finite import NotFiniteSearch, blame, check_finite, check_weights, observe_eagerly
from .options import OptionError
from .plan import planned
from .subject import BuiltInModel, TrainingSubject
from .usage import Usage
from .users import UsersModel
from .verify import Verdict, Verifier

# Told what happens, on the first rank only: ("start" | "step" | "end", values that pickle).
Emit = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Summary:
    """What a run came to, as ``--json`` prints it.

    Attributes:
        mesh: axis name to size.
        loss_first, loss_last: nats per byte in the first and in the last step.
        max_rel_loss_diff, max_rel_grad_diff: against one device, over all steps; None without verification.
        collectives_per_step: kind to number, of the last step on the first rank, without verification's own.
        bytes_per_step: what these moved, in the ring model.
        tokens_per_s: bytes of text learned from per second, without the first step and without verification.
    """

    mesh: dict[str, int]
    steps: int
    loss_first: float
    loss_last: float
    max_rel_loss_diff: float | None
    max_rel_grad_diff: float | None
    collectives_per_step: dict[str, int]
    bytes_per_step: int
    tokens_per_s: float


@dataclass
class Traffic:
    """Collectives of the training step itself, and the seconds that it took."""

    kinds: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add what happens inside."""
        start = time.perf_counter()
        with collective.counting() as counts:
            yield
        self.seconds += time.perf_counter() - start
        self.bytes += counts.total_bytes
        for kind, n in counts.kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + n


class Trainer:
    """The sharded model, its optimizer and its batches; steps eagerly.

    Args:
        config: the options.
        mesh: the connected mesh.
        subject: what is trained, on which data; the same on every rank.

    Attributes:
        model: gradients of the last step are in ``parameter.grad`` between :meth:`backward` and :meth:`update`.
        norm: of the gradients of the last step, before clipping; None where nobody has computed it, or in a program.
        taken: the batches of the last step.
    """

    norm: Tensor | None = None
    taken: Sequence[Any] = ()

    def __init__(self, config: TrainConfig, mesh: mw.Mesh, subject: TrainingSubject) -> None:
        self.config, self.mesh, self.subject = config, mesh, subject
        own = subject.plan(mesh) if config.plan is None else None  # before the seed: it may build the model too
        torch.manual_seed(config.seed)
        # Described on the meta device, then made shard by shard with the values that one device would get.
        self.model: nn.Module = subject.model("meta")
        self.table = None if own is not None else planned(config, mesh, self.model, subject.loss, subject.example())
        self.plan = own or Plan(self.table or {})
        self.lay()
        subject.fill(self.model)
        self.loader = shard_dataloader(
            subject.rows, mesh, self.plan.batch, batch_size=config.batch, shuffle=True, seed=config.seed,
            drop_last=True, num_workers=config.workers,
        )  # fmt: skip
        self.batches = self._batches()  # begins with the first batch, or behind those before a checkpoint

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def lay(self) -> None:
        """Lay the model and the optimizer's states on the mesh."""
        config, plan = self.config, self.plan
        self.model = mw.shard_module(
            self.model,
            self.mesh,
            plan.layouts,
            fsdp=config.fsdp,
            offload=config.offload,
            inputs=plan.inputs,
            outputs=plan.outputs,
            precision=config.policy,
            init="load" if self.subject.loads else None,
        )
        self.optimizer = mw.shard_optimizer(config.make_optimizer(self.model), shard_states=config.shard_states)

    def backward(self, step: int, again: bool = False) -> Tensor:
        """Gradients of one step, summed over its micro-steps and clipped; its loss, not reduced yet.

        Args:
            again: of the batches that it had before, without clipping.
        """
        config = self.config
        torch.manual_seed(step_seed(config, step))
        losses: list[Tensor] = []
        if not again:
            self.taken = [next(self.batches) for _ in range(config.accumulate)]
        for micro, batch in enumerate(self.taken):
            last = micro == config.accumulate - 1
            with contextlib.nullcontext() if last else mw.no_sync(self.model):
                loss = self.subject.loss(self.model, batch) / config.accumulate
                loss.backward()
            losses.append(loss.detach())
        if config.clip is not None and not again:
            self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        return sum(losses[1:], losses[0])

    def check_finite(self, step: int, loss: float) -> None:
        """Raises DataError where loss or gradients are not finite; before the update."""
        if self.config.clip is None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norm = nn.utils.get_total_norm(gradients)
        assert self.norm is not None

        def again() -> None:
            self.optimizer.zero_grad()
            self.backward(step, again=True)

        search = NotFiniteSearch(blame(self.model, self.optimizer))
        observed = functools.partial(observe_eagerly, model=self.model, batches=self.taken, again=again)
        check_finite(step, loss, float(self.norm), self.mesh, search, observed)

    def loss(self, batch: Any) -> Tensor:
        """Of a batch, by the model as it is."""
        with torch.no_grad():
            self.model.eval()
            loss = self.subject.loss(self.model, batch)
            self.model.train()
        return loss

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.finish()

    def parts(self) -> dict[str, Any]:
        """What is in checkpoints."""
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def told(self) -> dict[str, float]:
        """Numbers of the last step beside its loss; called by every rank."""
        told = {"lr": float(self.optimizer.param_groups[0]["lr"])}
        return told if self.norm is None else {**told, "grad_norm": float(self.norm)}

    def predicted(self) -> int | None:
        """Bytes that this rank will hold at most in a step, where that is known."""
        return None

    def finish(self) -> None:
        """Wait for the device; else the clock would tell how fast kernels are launched."""
        if self.mesh.device == "cuda":
            torch.cuda.synchronize()


# Loss scaling skips an update whose loss or gradients are not finite, on all ranks, and then lowers the scale.
WHOLE = mw.LossScale(init=1.0, growth_interval=(1 << 31) - 1, check_loss=True)


class StaticTrainer(Trainer):
    """The same, through a captured step: one program has forward, backward, clipping and update in it."""

    def lay(self) -> None:
        """Capture the step, which lays out model and optimizer as its layouts complete."""
        config, plan = self.config, self.plan
        self.optimizer = config.make_optimizer(self.model)
        laid: dict[str, Any] = {
            "layouts": plan.layouts, "batch": plan.batch, "inputs": plan.inputs, "outputs": plan.outputs,
            "fsdp": config.fsdp, "shard_states": config.shard_states, "stages": config.stages,
        }  # fmt: skip
        if self.table is not None:
            laid = {"layouts": self.table}
        self.step = mw.compile_step(
            self.model,
            self.subject.loss,
            self.optimizer,
            self.subject.example(),
            mesh=self.mesh,
            **laid,
            clip_grad_norm=config.clip,
            gradients=config.verify,
            passes=config.pass_manager(),
            precision=config.policy,
            loss_scale=WHOLE,
        )

    def check_finite(self, step: int, loss: float) -> None:
        """Raises DataError where loss or gradients are not finite; the program left the update out."""
        scale = self.step.loss_scale
        assert scale is not None
        overflow = float(scale) < WHOLE.init  # the same on all ranks: the program reduces a flag over them

        def again(search: NotFiniteSearch) -> None:
            torch.manual_seed(step_seed(self.config, step))
            for i, batch in enumerate(self.taken):
                search.where = f" in micro-step {i + 1}" if len(self.taken) > 1 else ""
                self.step.replay(batch, search.see)

        search = NotFiniteSearch(blame(self.model, self.optimizer))
        check_finite(step, loss, math.nan if overflow else 0.0, self.mesh, search, again, updated=not overflow)

    def backward(self, step: int, again: bool = False) -> Tensor:
        """One whole step, its update too; with verification the gradients that it updated with stay."""
        config = self.config
        torch.manual_seed(step_seed(config, step))
        self.taken = [next(self.batches) for _ in range(config.accumulate)]
        losses = [self.step(batch) for batch in self.taken]
        total: Tensor = sum(losses[1:], losses[0]) / config.accumulate
        return total

    def loss(self, batch: Any) -> Tensor:
        """Of a batch, by a program without backward and update."""
        made: Tensor = self.step.eval(batch)
        return made

    def predicted(self) -> int | None:
        """Of the program."""
        return memory_of(self.step.program).peak

    def parts(self) -> dict[str, Any]:
        """What is in checkpoints."""
        return {"program": self.step, **super().parts()}

    def update(self) -> None:
        """The program has done it."""
        self.finish()


def step_seed(config: TrainConfig, step: int) -> int:
    """Seed of a step's random numbers (dropout), the same on the mesh and on one device."""
    return config.seed * 1_000_003 + step + 1


def train(config: TrainConfig, mesh: mw.Mesh, emit: Emit) -> Summary:
    """Train; called by every rank of the mesh together.

    Args:
        config: the options, the same on every rank.
        mesh: the connected mesh.
        emit: told what happens, on the first rank.

    Raises:
        DataError: on every rank, where any rank cannot read the text.
        CheckpointError, OptionError: a checkpoint that cannot be read or written, or that is beyond the last step.
        DesyncError: on every rank, where options or texts differ.
    """
    with _held(config, mesh):
        return _train(config, mesh, emit)


@contextlib.contextmanager
def _held(config: TrainConfig, mesh: mw.Mesh) -> Iterator[None]:
    """Inside no other run saves to the folder of this one."""
    file = None
    with collective.together(mesh, f"--save {config.save}", kind=CheckpointError):
        if config.save is not None and runtime.RT.rank == mesh.ranks[0]:
            file = lock(Path(config.save))
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _train(config: TrainConfig, mesh: mw.Mesh, emit: Emit) -> Summary:
    subject = agreed_subject(config, mesh)
    first = runtime.RT.rank == mesh.ranks[0]
    usage = Usage(config)
    trainer = (StaticTrainer if config.static else Trainer)(config, mesh, subject)
    verifier = Verifier(config, subject, first) if config.verify else None
    evaluation = Evaluation(config, mesh, subject, trainer.plan.batch, trainer.loss) if subject.evaluates else None
    store, begin = _opened(config, trainer)
    tell = emit if first else _nothing
    tell("start", {**_described(trainer), "begin": begin})

    size = sum(p.numel() for p in trainer.model.parameters())
    history: list[float] = []
    seconds: list[float] = []
    traffic, saved = Traffic(), None
    for step in range(begin, config.steps):
        traffic = Traffic()
        with traffic.measured():
            partial_loss = trainer.backward(step)
        loss = float(partial_loss)
        trainer.check_finite(step, loss)
        differences = verifier.check(step, loss, trainer.model, step_seed(config, step)) if verifier else {}
        with traffic.measured():
            trainer.update()
        history.append(loss)
        seconds.append(traffic.seconds)
        told = {"step": step, "loss": loss, **trainer.told(), "seconds": traffic.seconds, **differences}
        told |= usage.told(traffic.seconds, size)
        if evaluation is not None and evaluation.due(step + 1):
            told["eval_loss"] = evaluation()
        tell("step", {**told, "collectives": traffic.kinds, "bytes": traffic.bytes})
        if store is not None and _is_saved(config, step + 1):
            check_weights(step, mesh, trainer.model, trainer.optimizer)
            saved = store.save(step + 1, **trainer.parts())
    if saved is not None:
        saved.wait()
    if config.export is not None:
        subject.export(trainer.model, config.export, first)

    timed = seconds[1:] or seconds  # the first step makes plans and groups
    verdict = verifier.verdict() if verifier else None
    summary = Summary(
        mesh=dict(config.mesh),
        steps=config.steps,
        loss_first=history[0],
        loss_last=history[-1],
        max_rel_loss_diff=verdict.loss if verdict else None,
        max_rel_grad_diff=verdict.grad if verdict else None,
        collectives_per_step=dict(sorted(traffic.kinds.items())),
        bytes_per_step=traffic.bytes,
        tokens_per_s=round(config.tokens_per_step * len(timed) / sum(timed), 1),
    )
    tell("end", {"summary": asdict(summary), "verdict": verdict})
    return summary


def _opened(config: TrainConfig, trainer: Trainer) -> tuple[mw.Checkpoints | None, int]:
    """Where checkpoints go, and the number of steps that the newest one has behind it, loaded where that is asked for.

    Raises as :func:`train`.
    """
    if not config.save:
        return None, 0
    store = mw.Checkpoints(config.save, config.keep, mesh=trainer.mesh)
    store.check()
    if not config.resume and store.steps:
        raise OptionError(
            f"--save {config.save} has checkpoints of another run, up to step {max(store.steps)}: add --resume to go "
            "on from the newest, or take another folder"
        )
    try:
        begin = (store.load(**trainer.parts()) or 0) if config.resume else 0
    except ShardError as error:
        raise OptionError(
            f"--resume: the newest checkpoint in {config.save} is of other data than {trainer.subject.source} "
            f"({error}). Give the files, --seq and --seed of that run, or pass another --save"
        ) from error
    if begin >= config.steps:
        raise OptionError(f"--resume: the newest checkpoint is of step {begin}: take more --steps than {config.steps}")
    with collective.together(trainer.mesh, f"--save {config.save}", kind=CheckpointError):
        if runtime.RT.rank == trainer.mesh.ranks[0]:
            write_options(config)
    return store, begin


def _is_saved(config: TrainConfig, done: int) -> bool:
    """Whether there is to be a checkpoint after so many steps."""
    return done == config.steps or (config.save_every is not None and done % config.save_every == 0)


def _nothing(kind: str, values: dict[str, Any]) -> None:
    """What the other ranks tell."""


def subject_of(config: TrainConfig) -> TrainingSubject:
    """What the options name.

    Raises:
        DataError, OptionError: If a file cannot be read, or model, tokenizer and data do not fit.
    """
    if config.model is None:
        return BuiltInModel(config)
    return UsersModel(config) if config.of_function else LibraryModel(config)


def agreed_subject(config: TrainConfig, mesh: mw.Mesh) -> TrainingSubject:
    """Model and data, after all ranks found that they have the same ones and the same options.

    Raises:
        DataError, DesyncError, OptionError: on every rank, as for :func:`train`.
    """
    said, fix = "the ranks train with {}", "start all of them alike"
    with collective.together(mesh, "reading the text", said, fix, DataError) as facts:
        subject = subject_of(config)
        facts += [Fact("texts (--data)", subject.digest), Fact("options", repr(config))]
    return subject


def _described(trainer: Trainer) -> dict[str, Any]:
    """The mesh and the parameters' layouts, for the terminal."""
    here = trainer.mesh.coordinate(runtime.RT.rank)
    rows = []
    for name, p in trainer.model.named_parameters():
        assert isinstance(p, mw.DistTensor)
        placements = tuple(map(repr, p.placements))
        rows.append(
            {"name": name, "shape": tuple(p.shape), "placements": placements, "local": p.spec.local_shape(here)}
        )
    step = getattr(trainer, "step", None)
    passes = [str(record) for record in step.passes] if step is not None else []
    told = {"parameters": rows, "source": trainer.subject.source, "title": trainer.subject.title, "passes": passes}
    told["digest"] = trainer.subject.digest
    return told | {"predicted_bytes": trainer.predicted()}


__all__ = [
    "Emit",
    "StaticTrainer",
    "Summary",
    "Traffic",
    "Trainer",
    "Verdict",
    "agreed_subject",
    "step_seed",
    "subject_of",
    "train",
]
