"""The options of a training step, and of a training run, as frozen values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshError
from meshwright.mesh import Mesh

from .choices import (
    AUTO_PLAN,
    BATCH,
    CHECKPOINTS,
    CHUNKED,
    DEVICES,
    DTYPES,
    EXAMPLE,
    FITS,
    HOSTS,
    LEARNING_RATES,
    MERGE,
    MESH,
    MODEL,
    MOMENTUM,
    OF_BUILT_IN,
    OF_LIBRARY,
    OPTIMIZERS,
    OUTPUT,
    PRECISIONS,
    PROGRAM,
    SCHEDULES,
    SPLITTING,
    STAGES,
    TOLERANCES,
    TRAINING,
    WIRES,
    check_axes,
    passes_of,
    read_mesh,
    ways_of,
)
from .options import COUNT, NATURAL, POSITIVE, PROBABILITY, OptionError, check_bounds, one_of, option, options_in

if TYPE_CHECKING:
    import torch

    from meshwright.passes import PassManager
    from meshwright.shard import Precision


@dataclass(frozen=True)
class StepConfig:
    """A training step of a built-in model, as ``train`` runs and ``explain`` explains it.

    Attributes:
        mesh: axis name to size, outermost first.
        passes: of the captured step, as ``meshwright.passes.parse`` reads them.
    """

    mesh: tuple[tuple[str, int], ...] = option(
        (("dp", 1),), "--mesh", MESH,
        "Named axes and their sizes; of the built-in models [bold]dp[/] splits the batch, [bold]cp[/] the sequence, "
        "[bold]tp[/] the model, [bold]ep[/] the experts, and the batch as dp.",
        metavar="AXIS=SIZE,...", read=read_mesh, shown="dp=1",
    )  # fmt: skip
    device: str = option("cpu", "--device", MESH, f"One of {', '.join(DEVICES)}.", one_of(DEVICES))
    layers: int = option(2, "--layers", MODEL, "Transformer blocks.", COUNT)
    hidden: int = option(64, "--hidden", MODEL, "Width of the residual stream.", COUNT)
    heads: int = option(4, "--heads", MODEL, "Attention heads.", COUNT)
    experts: int | None = option(
        None, "--experts", MODEL, "A mixture of so many experts in each block, and a router, in place of its MLP.",
        COUNT, unset="one MLP for all tokens",
    )  # fmt: skip
    experts_per_token: int = option(2, "--experts-per-token", MODEL, "How many of them compute a token.", COUNT)
    expert_width: int | None = option(
        None, "--expert-width", MODEL, "Width of each expert.", COUNT, unset="twice --hidden"
    )
    shared_experts: int = option(
        0, "--shared-experts", MODEL, "Experts beside these that compute every token.", NATURAL
    )
    tie: bool = option(False, "--tie", MODEL, "The head shares the weight of the embedding.")
    dropout: float = option(
        0.0, "--dropout", MODEL, "Probability of dropout; the masks are the same on every mesh.", PROBABILITY
    )
    dtype: str = option("float32", "--dtype", MODEL, f"One of {', '.join(DTYPES)}.", one_of(DTYPES))
    precision: str | None = option(
        None, "--precision", MODEL,
        "Compute in this, and keep parameters, optimizer states and sums of gradients in --dtype: bf16.",
        one_of(PRECISIONS), unset="compute in --dtype",
    )  # fmt: skip
    grad_comm: str | None = option(
        None, "--grad-comm", SPLITTING,
        f"Send gradients in this, and sum them in float32 where they arrive: {' or '.join(WIRES)}.",
        one_of(WIRES), unset="in --dtype",
    )  # fmt: skip
    gather: str | None = option(
        None, "--gather", SPLITTING,
        f"With --fsdp: send parameters to where they are used in this: {' or '.join(WIRES)}.",
        one_of(WIRES), unset="as they are computed with",
    )  # fmt: skip
    seq: int = option(64, "--seq", TRAINING, "Tokens per sequence: bytes per window of text.", COUNT)
    packed: bool = option(
        False, "--packed", TRAINING, "Lines of text are documents packed into sequences: none attends to another."
    )
    batch: int = option(
        None, "--batch", TRAINING, "Sequences per micro-step, over all ranks.", COUNT,
        unset=f"{BATCH}, or one for each micro-batch of a pipeline and each rank over which the batch is split",
    )  # fmt: skip
    optimizer: str = option(
        "adamw", "--optimizer", TRAINING, f"One of {', '.join(OPTIMIZERS)} (sgd: momentum {MOMENTUM}).",
        one_of(OPTIMIZERS),
    )  # fmt: skip
    clip: float | None = option(
        None, "--clip", TRAINING, "Largest norm of all gradients together.", POSITIVE, unset="no clipping"
    )
    fsdp: str | None = option(
        None, "--fsdp", SPLITTING, "Store parameters split over this axis (ZeRO-3).", metavar="AXIS"
    )
    shard_states: str | None = option(
        None, "--shard-states", SPLITTING, "Split optimizer states over this axis (ZeRO-1/2).", metavar="AXIS"
    )
    sequence_parallel: bool = option(
        False, "--sequence-parallel", SPLITTING, "Split the residual stream over tp along the sequence."
    )
    schedule: str | None = option(
        None, "--schedule", PROGRAM,
        f"With an axis pp: the order in which stages compute micro-batches, one of {', '.join(SCHEDULES)}.  Of "
        f"{' and '.join(CHUNKED)} a rank has several stages, which needs more --layers.",
        one_of(SCHEDULES), unset="1f1b",
    )  # fmt: skip
    micro_batches: int | None = option(
        None, "--micro-batches", PROGRAM, "Number of micro-batches, with an axis pp.", COUNT,
        unset="every rank computes all stages", metavar="N",
    )  # fmt: skip
    chunks: int | None = option(
        None, "--chunks", PROGRAM,
        "How many stages a rank has: with --schedule looped 2 or more, with v 2.", COUNT,
        unset="2 of looped and v, else 1", metavar="N",
    )  # fmt: skip
    limit: int | None = option(
        None, "--limit", PROGRAM,
        "With --micro-batches: of how many of them a rank may hold what their backward needs (each of its stages by "
        "itself): fewer take less memory and wait longer.", COUNT, unset="as many as the schedule is made for",
        metavar="N",
    )  # fmt: skip
    passes: tuple[str, ...] = option(
        (), "--pass", PROGRAM, "A pass over the captured step, and its options; may be repeated.",
        metavar="NAME:OPTION=VALUE,...",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises OptionError, or MeshError for the mesh, naming the option and what would be right."""
        if self.precision in ("fp16", "float16"):
            raise OptionError(
                f"--precision {self.precision}: small gradients vanish in float16 unless the loss is scaled, which "
                "mw.compile_step(loss_scale=) does and this command does not: take --precision bf16"
            )
        check_bounds(self)
        batch: int | None = self.batch
        if batch is None:
            object.__setattr__(self, "batch", max(BATCH, self.ways * (self.micro_batches or 1)))
        if self.hidden % self.heads:
            raise OptionError(
                f"--hidden {self.hidden} cannot be split over --heads {self.heads}: take a multiple of the "
                f"heads, e.g. --hidden {-(-self.hidden // self.heads) * self.heads}"
            )
        mesh = self.make_mesh()
        self._check_experts()
        self._check_stages(mesh)
        for flag, axis in self._over():
            if axis not in mesh.axes:
                raise MeshError(f"{flag} {axis}: unknown axis; {mesh!r} has the axes {', '.join(mesh.axes)}")
        if self.fsdp and self.shard_states:
            raise OptionError(f"--fsdp {self.fsdp} splits the optimizer states too: leave --shard-states out")
        if self.gather and not self.fsdp:
            raise OptionError(
                f"--gather {self.gather}: only parameters that are stored split are gathered: add --fsdp dp"
            )
        if self.sequence_parallel and "tp" not in mesh.axes:
            raise OptionError(
                f"--sequence-parallel splits the residual stream over tp, and {mesh!r} has no such axis: "
                "add one, e.g. --mesh dp=2,tp=2"
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            if "ep" in self.make_mesh().axes:
                raise OptionError("an axis 'ep' splits experts, and there are none: add --experts, e.g. --experts 8")
            for flag, given in (("--expert-width", self.expert_width), ("--shared-experts", self.shared_experts)):
                if given:
                    raise OptionError(f"{flag} {given}: there are no experts: add --experts, e.g. --experts 8")
        elif self.experts_per_token > self.experts:
            raise OptionError(
                f"--experts-per-token {self.experts_per_token}: there are --experts {self.experts}: take at most these"
            )

    @property
    def inner(self) -> int:
        """Width of an expert."""
        return 2 * self.hidden if self.expert_width is None else self.expert_width

    @property
    def ways(self) -> int:
        """Into how many parts the sequences of a batch are split."""
        return ways_of(self.mesh)

    def _check_stages(self, mesh: Mesh) -> None:
        for flag, given in (
            ("--micro-batches", self.micro_batches), ("--schedule", self.schedule), ("--chunks", self.chunks),
            ("--limit", self.limit),
        ):  # fmt: skip
            if given and STAGES not in mesh.axes:
                raise OptionError(f"{flag} {given}: {mesh!r} has no axis of stages: add one, e.g. --mesh pp=2,dp=2")
            if given and not self.micro_batches:
                does = {"--schedule": "orders", "--limit": "bounds"}.get(flag, "spreads stages for")
                raise OptionError(f"{flag} {given} {does} micro-batches: add --micro-batches 8")
        if self.chunks and self.schedule not in CHUNKED:
            raise OptionError(
                f"--chunks {self.chunks}: of --schedule {self.schedule or SCHEDULES[0]} a rank has one stage: leave it "
                f"out, or take --schedule {' or '.join(CHUNKED)}"
            )
        if STAGES in mesh.axes:
            ranks, chunks = mesh.axis_size(STAGES), self.chunks or (2 if self.schedule in CHUNKED else 1)
            if self.layers < ranks * chunks:
                each = f" with {chunks} on each rank" if chunks > 1 else ""
                raise OptionError(
                    f"--layers {self.layers}: {STAGES}={ranks}{each} makes {ranks * chunks} stages, and each has a "
                    f"block: add --layers {ranks * chunks}, or take fewer stages"
                )
        if self.micro_batches and self.batch // self.ways < self.micro_batches:
            split = f", which {self.ways} ranks share," if self.ways > 1 else ""
            raise OptionError(
                f"--micro-batches {self.micro_batches}: --batch {self.batch}{split} has fewer sequences than each of "
                f"these needs: take --batch {self.ways * self.micro_batches}, or fewer micro-batches"
            )

    @property
    def stages(self) -> dict[str, str] | None:
        """Where the blocks of the built-in models are cut."""
        return {STAGES: "blocks"} if STAGES in self.make_mesh().axes else None

    @property
    def pipeline(self) -> tuple[str, ...]:
        """The pass of micro-batches, if they were asked for."""
        if not self.micro_batches:
            return ()
        more = "".join(f",{n}={v}" for n, v in (("chunks", self.chunks), ("limit", self.limit)) if v)
        return (f"pipeline:micro_batches={self.micro_batches},schedule={self.schedule or SCHEDULES[0]}{more}",)

    def _over(self) -> list[tuple[str, str]]:
        given = (("--fsdp", self.fsdp), ("--shard-states", self.shard_states))
        return [(flag, axis) for flag, axis in given if axis is not None]

    def pass_manager(self) -> PassManager:
        """The passes of the captured step.  Raises PassError for those that do not exist."""
        return passes_of((*self.pipeline, *self.passes))

    def make_mesh(self) -> Mesh:
        """The mesh, as a description."""
        return Mesh(dict(self.mesh), device=self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def policy(self) -> Precision | None:
        """The precision of the model."""
        import torch

        from meshwright.layout import Float8
        from meshwright.shard import Precision

        if not (self.precision or self.grad_comm or self.gather):
            return None
        compute, reduce = (None, None) if self.precision is None else (torch.bfloat16, self.torch_dtype)
        formats = {None: None, "float8": Float8(), "bf16": torch.bfloat16}
        return Precision(compute, reduce, grad_comm=formats[self.grad_comm], gather=formats[self.gather])

    @property
    def tolerances(self) -> tuple[float, float]:
        """The largest relative differences of loss and gradients that rounding explains."""
        return TOLERANCES["bfloat16" if self.precision or self.grad_comm or self.gather else self.dtype]

    @property
    def learning_rate(self) -> float:
        """The default of the optimizer."""
        return LEARNING_RATES[self.optimizer]

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer, native, for what is trained of a model."""
        import torch

        parameters: Any = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=MOMENTUM)
        return torch.optim.AdamW(parameters, lr=self.learning_rate)


@dataclass(frozen=True)
class TrainConfig(StepConfig):
    """What ``meshwright train`` was asked for.

    Attributes:
        data: files to train on; empty: the sources of Python's standard library.
        accumulate: micro-steps per step; the loss is their mean.
    """

    threads: int = option(1, "--threads", MESH, "Threads of each process inside one op.", COUNT)
    data: tuple[str, ...] = option(
        (), "--data", TRAINING, "Text to train on, read as bytes; several files may follow.",
        unset="Python's standard library", metavar="FILE...",
    )  # fmt: skip
    model: str | None = option(
        None, "--model", MODEL,
        "Train a causal language model of Transformers: a directory with config.json, and weights if it has any. Or "
        "what a function returns for the mesh: (model, loss_fn, dataset). Or example, which comes with the package.",
        unset="the byte-level GPT", metavar="DIR|MODULE:FUNCTION",
    )  # fmt: skip
    layouts: str | None = option(
        None, "--layouts", MODEL, "With --model: auto, or a file that mw.layouts(...).save(...) wrote.",
        unset="auto on a mesh with tp", metavar="auto|FILE",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, "--tokenizer", TRAINING, "With --model: directory of a tokenizer of Transformers.",
        unset="bytes are tokens", metavar="DIR",
    )  # fmt: skip
    fit: str = option(
        "best", "--fit", TRAINING,
        f"With --model: how documents are packed into rows of --seq tokens, one of {', '.join(FITS)}.", one_of(FITS),
    )  # fmt: skip
    column: str = option(
        "text", "--column", TRAINING, "With --model: key of JSONL, or column of Parquet, with the text."
    )
    tokens: str | None = option(
        None, "--tokens", TRAINING, "With --model: folder for the tokens of --data.",
        unset="~/.cache/meshwright/tokens", metavar="DIR",
    )  # fmt: skip
    lora: int | None = option(
        None, "--lora", MODEL, "With --model: freeze it and train adapters of this rank (PEFT); --export writes them.",
        COUNT, unset="train all weights", metavar="RANK",
    )  # fmt: skip
    evaluate: tuple[str, ...] = option(
        (), "--evaluate", TRAINING, "Held-out text: its mean loss is computed at the end; may be repeated.",
        unset="none", metavar="FILE",
    )  # fmt: skip
    evaluate_every: int | None = option(
        None, "--evaluate-every", TRAINING, "Steps from one evaluation to the next.", COUNT, unset="at the end only",
        metavar="N",
    )  # fmt: skip
    workers: int = option(0, "--workers", TRAINING, "Processes that read data, for each rank.", NATURAL)
    export: str | None = option(
        None, "--export", CHECKPOINTS, "Write the trained weights to this directory, for from_pretrained.",
        metavar="DIR",
    )  # fmt: skip
    steps: int = option(50, "--steps", TRAINING, "Steps of the optimizer.", COUNT)
    accumulate: int = option(
        1, "--accumulate", TRAINING, "Micro-steps per step; gradients are exchanged once per step.", COUNT
    )
    lr: float | None = option(
        None, "--lr", TRAINING, "Learning rate.", POSITIVE,
        unset=", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items()),
    )  # fmt: skip
    seed: int = option(0, "--seed", TRAINING, "The same seed gives the same run on every mesh.")
    offload: str | None = option(
        None, "--offload", SPLITTING,
        "Store parameters, gradients and optimizer states in the memory of the host: cpu.", one_of(HOSTS),
        unset="on --device",
    )  # fmt: skip
    plan: str | None = option(
        None, "--plan", SPLITTING,
        "Layouts, storage and recomputation of a captured step: a file of [bold]meshwright plan --save[/], or "
        "[bold]auto[/], which finds them for --mesh on --hardware.", unset="those of this model", metavar="auto|FILE",
    )  # fmt: skip
    hardware: str | None = option(
        None, "--hardware", SPLITTING, "With --plan auto: the machine, a preset or a file of meshwright calibrate.",
        metavar="NAME|FILE",
    )  # fmt: skip
    static: bool = option(False, "--static", PROGRAM, "Capture the step as one program and run that.")
    save: str | None = option(
        None, "--save", CHECKPOINTS, "Save to this folder: at the end, and see --save-every.", metavar="DIR",
    )  # fmt: skip
    save_every: int | None = option(
        None, "--save-every", CHECKPOINTS, "Steps from one checkpoint to the next.", COUNT, unset="at the end only",
        metavar="N",
    )  # fmt: skip
    keep: int = option(2, "--keep", CHECKPOINTS, "How many checkpoints stay.", COUNT)
    resume: bool = option(
        False, "--resume", CHECKPOINTS, "Go on from the newest checkpoint in --save, of any mesh, if there is one."
    )
    verify: bool = option(
        False, "--verify", OUTPUT,
        "Train the same model on one device too and compare loss and gradients in every step.  Largest relative "
        f"differences: {'; '.join(f'{n} {loss:.0e} and {grad:.0e}' for n, (loss, grad) in TOLERANCES.items())}.  "
        "Exit code 1 beyond.",
    )  # fmt: skip
    log: str | None = option(
        None, "--log", OUTPUT, "Write a line of JSON about the run, and one about each step, to this file.",
        unset="log.jsonl in --save", metavar="FILE",
    )  # fmt: skip
    tensorboard: str | None = option(
        None, "--tensorboard", OUTPUT, "Write loss, speed and memory of each step to this folder, for TensorBoard.",
        metavar="DIR",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises OptionError, MeshError or PassError, naming the option and what would be right."""
        super().__post_init__()
        if self.model == EXAMPLE and not os.path.exists(EXAMPLE):
            folder = Path(__file__).parent / EXAMPLE
            object.__setattr__(self, "model", str(folder))
            object.__setattr__(self, "data", self.data or (str(folder / "text.jsonl"),))
        self._check_plan()
        if self.plan is None:
            check_axes(self.make_mesh())
        self._check_model()
        if self.evaluate_every and not self.evaluate and not self.of_function:
            raise OptionError(f"--evaluate-every {self.evaluate_every} needs held-out text: add --evaluate FILE")
        if self.stages or self.plan:
            object.__setattr__(self, "static", True)  # only a captured step has stages
        if self.micro_batches and self.dropout and self.verify:
            raise OptionError(
                f"--verify --dropout {self.dropout}: micro-batches draw their own masks, other than one device for the "
                "whole batch: leave one of the two out"
            )
        for flag, axis in self._over():
            if axis == "tp":
                raise OptionError(f"{flag} tp: the plan splits the parameters over tp already; take {flag} dp")
        for flag, given in (("--save-every", self.save_every), ("--resume", self.resume)):
            if given and not self.save:
                raise OptionError(f"{flag} needs the folder of the checkpoints: add --save DIR")
        if self.verify and self.resume:
            raise OptionError("--verify trains on one device from the first step on: leave out --resume or --verify")
        if self.offload and self.static:
            raise OptionError("--offload: a captured step keeps parameters on --device: leave out --static")
        if self.passes and not self.static:
            raise OptionError(f"--pass {self.passes[0]}: passes change the captured step: add --static")
        if self.static and self.accumulate > 1 and any(p.partition(":")[0] == MERGE for p in self.passes):
            raise OptionError(
                f"--accumulate {self.accumulate} is the pass {MERGE} of a captured step: leave one of the two out"
            )
        if self.passes:
            self.pass_manager()

    def _check_plan(self) -> None:
        """Raises OptionError for what a plan decides, and was given too."""
        if self.plan is None:
            if self.hardware is not None:
                raise OptionError(f"--hardware {self.hardware}: only --plan auto asks for it: add --plan auto")
            return
        if (self.plan == AUTO_PLAN) != (self.hardware is not None):
            raise OptionError(
                "--plan auto needs --hardware NAME, and a file has its own: "
                f"--plan {self.plan}, --hardware {self.hardware}"
            )
        for flag, given in (
            ("--fsdp", self.fsdp), ("--shard-states", self.shard_states),
            ("--sequence-parallel", self.sequence_parallel), ("--offload", self.offload),
            ("--micro-batches", self.micro_batches), ("--layouts", self.layouts),
        ):  # fmt: skip
            if given:
                raise OptionError(f"{flag} {given}: --plan decides that: leave one of the two out")

    def _check_experts(self) -> None:
        if self.model is None:
            super()._check_experts()

    @property
    def of_function(self) -> bool:
        """Whether --model is a function, and no directory."""
        return self.model is not None and ":" in self.model and not os.path.exists(self.model)

    def _check_model(self) -> None:
        """Options that are only for the built-in model, or only for --model."""
        if self.model is None:
            for name in OF_LIBRARY[1:]:
                if getattr(self, name) is not None:
                    raise OptionError(f"--{name} {getattr(self, name)} is for --model DIR: add it, or leave it out")
            return
        for name, made in options_in(type(self)).items():
            if name in OF_BUILT_IN and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise OptionError(
                    f"{made.flag} {getattr(self, name)} is of the built-in model: leave it out with --model"
                )
        if STAGES in self.make_mesh().axes:
            raise OptionError(f"--mesh with {STAGES}: --model has no pipelines here: use mw.compile_step(stages=)")
        if self.of_function:
            for name in (*OF_LIBRARY, "evaluate"):
                if getattr(self, name):
                    raise OptionError(f"--{name} is for a model of Transformers, and {self.model} is a function")
        elif not self.data:
            raise OptionError(f"--model {self.model}: name the text to train on: --data FILE...")

    def pass_manager(self) -> PassManager:
        """The passes of the captured step; micro-steps are one of them."""
        merge = (f"{MERGE}:k_steps={self.accumulate},weighted=False",) if self.accumulate > 1 and self.static else ()
        return passes_of((*merge, *self.pipeline, *self.passes))

    @property
    def learning_rate(self) -> float:
        """``lr``, or the default of the optimizer."""
        return super().learning_rate if self.lr is None else self.lr

    @property
    def tokens_per_step(self) -> int:
        """Bytes of text that one step learns from, over all ranks."""
        return self.batch * self.seq * self.accumulate
