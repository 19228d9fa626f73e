"""What does not go together: values that make no program, and what is documented as refused, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .factors import FACTORS, MODES, Case

Values = Mapping[str, "str | tuple[str, ...]"]


@dataclass(frozen=True)
class Apart:
    """Values that make no program, or none that one device can be compared with.

    Attributes:
        when: of each factor the values; all must be there.
    """

    when: Values
    why: str


@dataclass(frozen=True)
class Refusal:
    """What is refused, by an error that the documents promise.

    Attributes:
        says: a pattern of the error.
        page: of ``docs/``, and ``promise``: words there.
        always: whether these values are always refused; they are then left out of arrays, and tried alone.
        must: whether these values, which arrays have, are an error of the user, and no error is a finding.
    """

    when: Values
    says: str
    page: str
    promise: str
    always: bool = True
    must: bool = False


def but(factor: str, *values: str) -> tuple[str, ...]:
    """All other values of a factor."""
    return tuple(v for v in FACTORS[factor] if v not in values)


BY_HAND = tuple(m for m, how in MODES.items() if how["kind"] == "by hand")
CAPTURED = tuple(m for m, how in MODES.items() if how["kind"] == "captured")
GLOBAL = ("eager", *CAPTURED)

APART = [
    Apart({"mode": BY_HAND, "layouts": but("layouts", "none")}, "a step by hand works on a rank's own plain tensors"),
    Apart({"mode": BY_HAND, "storage": but("storage", "plain")}, "the same"),
    Apart({"mode": BY_HAND, "initial": ("meta", "meta, loaded")}, "the same: PyTorch gives no values to meta tensors"),
    Apart({"mode": BY_HAND, "precision": ("computed in float32", "reduced in float32")}, "options of the package"),
    Apart({"mode": BY_HAND, "resumed": but("resumed", "no")}, "torch.save does that"),
    Apart({"mode": BY_HAND, "update": "gradients only"}, "a step by hand clears its gradients itself"),
    Apart({"mode": BY_HAND, "rows": "none on some"}, "the loss of no rows is NaN"),
    Apart({"mode": BY_HAND, "second": "one"}, "the same"),
    Apart({"mode": BY_HAND, "random": but("random", "none")}, "each rank draws its own"),
    Apart({"mode": BY_HAND, "loader": but("loader", "tensors")}, "a rank's own loader"),
    Apart({"loader": "dataset", "second": but("second", "same")}, "batches of a dataset have one size"),
    Apart({"loader": "dataset", "lengths": but("lengths", "one")}, "the same"),
    Apart({"loader": "dataset", "inputs": "sequence first"}, "rows are joined in the first dim"),
    Apart({"loader": "dataset", "loss": "by a count"}, "a number of a batch is not that of a row"),
    *(
        Apart({"loader": "one rank skips a batch", name: tuple(values[1:])}, "an error hides what else is wrong there")
        for name, values in FACTORS.items()
        if name not in ("loader", "mode", "mesh", "storage", "micro", "schedule")
    ),
    Apart(
        {
            "mode": BY_HAND,
            "context": (
                "shard_checkpoint_inputs",
                "every layer checkpointed",
                "eval in between",
                "inference in between",
                "exception",
            ),
        },
        "options of the package, or written otherwise",
    ),
    Apart(
        {"random": "noise", "precision": ("computed in float32", "autocast")},
        "PyTorch draws other numbers in other dtypes",
    ),
    Apart(
        {"precision": "autocast", "block": "tied", "context": "no_grad"},
        "precision.md: simulated ranks share PyTorch's cache of casts, and round a weight's two uses otherwise",
    ),
    Apart({"context": "reentrant checkpoint", "loss": "gradient penalty"}, "PyTorch refuses it"),
    Apart({"context": "hook after gradients", "loss": "gradient penalty"}, "the same: a parameter is not used"),
    Apart(
        {"block": ("attention", "heads innermost", "rotary", "documents"), "loss": "gradient penalty"},
        "PyTorch's kernel has no second derivative",
    ),
    Apart(
        {
            "mode": (*CAPTURED, *BY_HAND),
            "block": "batch norm",
            "context": (
                "checkpoint",
                "reentrant checkpoint",
                "shard_checkpoint_inputs",
                "every layer checkpointed",
            ),
        },
        "program.md: buffers that a checkpoint writes to are written to once, by PyTorch twice",
    ),
    Apart({"mode": ("stages", "pipeline"), "layouts": "planned"}, "the axis of stages is none that a plan is made for"),
    Apart({"mode": "pipeline", "inputs": "sequence first"}, "pipeline.md: micro-batches are cut from the first dim"),
    Apart({"mode": "pipeline", "random": but("random", "none")}, "micro-batches draw for themselves"),
    Apart(
        {"mode": CAPTURED, "micro": ("2", "3"), "random": but("random", "none")}, "micro-batches draw for themselves"
    ),
]
Promise = tuple[str, str]  # a page, and words there
MERGED: Values = {"mode": CAPTURED, "micro": ("2", "3")}
PIPELINE: Values = {"mode": "pipeline"}


def of_micro_batches(
    when: Values, says: str, merge: Promise, pipeline: Promise, *, always_merged: bool = True
) -> list[Refusal]:
    """What is refused wherever a batch is cut into micro-batches."""
    return [
        Refusal({**MERGED, **when}, says, *merge, always=always_merged),
        Refusal({**PIPELINE, **when}, says, *pipeline),
    ]


_NO_MEAN = "no weighted mean"
_NO_RULE = "limits.md", "Ops without a rule, custom autograd Functions, that rows pass through | refused"
_NO_LOSS_OF_ROWS = "pipeline.md", "a loss that is no weighted mean of those of micro-batches"
REFUSED = [
    Refusal(
        {"update": "Prodigy", "storage": "shard_states"},
        "updates the whole model together",
        "gradients.md",
        'with `"model"` it raises',
    ),
    Refusal(
        {"mode": "eager", "context": "reentrant checkpoint"},
        "reentrant checkpoints do so",
        "limits.md",
        "`torch.utils.checkpoint(use_reentrant=True)` | works in captured steps only",
    ),
    Refusal(
        {"mode": CAPTURED, "context": "hook after gradients"},
        "has a hook",
        "program.md",
        "hooks of parameters, backward hooks of modules | an error",
    ),
    Refusal(
        {"mode": CAPTURED, "context": "tensor hook"},
        "calls Tensor.register_hook",
        "program.md",
        "hooks of tensors, of `grad_fn`",
    ),
    *of_micro_batches(
        {"block": "batch norm"},
        _NO_MEAN,
        ("gradient-merge.md", "what mixes rows earlier"),
        ("pipeline.md", "running statistics and other writes to"),
    ),
    *of_micro_batches(
        {"loss": ("contrastive", "over rows", "against the first row")},
        _NO_MEAN,
        ("gradient-merge.md", "pairs of rows as contrastive losses have them"),
        _NO_LOSS_OF_ROWS,
    ),
    *of_micro_batches(
        {"loss": "gradient penalty"},
        _NO_MEAN,
        ("gradient-merge.md", "A loss that is no weighted mean raises"),
        _NO_LOSS_OF_ROWS,
        always_merged=False,
    ),
    *of_micro_batches(
        {"loss": "z-loss"},
        "two means over different numbers",
        ("gradient-merge.md", "two means whose counts depend on the batch's values"),
        ("limits.md", "two means over different counts (masked z-loss and ignored labels)"),
    ),
    *of_micro_batches(
        {"positions": "of the first row"},
        "no weighted mean|picks a row",
        ("gradient-merge.md", "what mixes rows earlier"),
        _NO_LOSS_OF_ROWS,
        always_merged=False,
    ),
    *of_micro_batches({"context": "function"}, "as it has no rule", _NO_RULE, _NO_RULE),
    Refusal(
        {**MERGED, "mesh": "cp=2"},
        "pass rows_dim= to GradientMerge",
        "gradient-merge.md",
        "A loss that mixes one of both dims then raises",
        always=False,
    ),
    Refusal(
        {"mode": "pipeline", "storage": ("fsdp", "fsdp, kept", "fsdp and on")},
        "do not send the same values between stages",
        "limits.md",
        "Micro-batches of one row next to larger ones, with a weight of several stages and `fsdp=`",
        always=False,
    ),
    Refusal(
        MERGED,
        "micro-batches of 1 and of more elements in a sharded dim",
        "gradient-merge.md",
        "A micro-batch of one row is not split",
        always=False,
    ),
    Refusal(
        {"layouts": "found", "context": "tensor hook"},
        "calls Tensor.register_hook",
        "finding-layouts.md",
        "where no module can be captured either",
    ),
    Refusal(
        {"layouts": "planned", "context": "tensor hook"},
        "calls Tensor.register_hook",
        "program.md",
        "hooks of tensors, of `grad_fn`",
    ),
    Refusal(
        {**PIPELINE, "loader": ("shard_dataloader", "dataset"), "rows": but("rows", "even")},
        "cannot be cut into",
        "pipeline.md",
        "fewer rows than micro-batches",
        always=False,
    ),
    Refusal(
        {"loader": "one rank skips a batch"},
        "different batches",
        "errors.md",
        "one rank skipped a batch: skip it on all",
        always=False,
        must=True,
    ),
    Refusal(
        {**PIPELINE, "loss": "auxiliary"},
        "returns other values beside the loss",
        "pipeline.md",
        "values that are returned beside the loss",
    ),
]
# Classes that are being mended: values of a finding, and which.  Empty when they are.
KNOWN: list[Apart] = []


def meets(made: Case, when: Values) -> bool:
    """Whether a case has these values."""
    return all(made[k] in ((v,) if isinstance(v, str) else v) for k, v in when.items())


def refusal_of(made: Case, error: BaseException) -> Refusal | None:
    """The promise that an error of a case keeps."""
    return next((row for row in REFUSED if meets(made, row.when) and re.search(row.says, str(error))), None)


def must_raise(made: Case) -> Refusal | None:
    """The error that a case must raise."""
    return next((row for row in REFUSED if row.must and meets(made, row.when)), None)


def known(made: Case) -> Apart | None:
    """The class of findings that a case belongs to."""
    return next((k for k in KNOWN if meets(made, k.when)), None)
